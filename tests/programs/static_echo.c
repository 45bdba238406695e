/* An echo server for many connections, one after the other or by fork; `static_echo N` serves N of them. It is built statically
   linked: with no dynamic linker, nothing can be preloaded. It prints "port N". */
#include "peer.h"
#include <sys/wait.h>

int main(int argc, char **argv)
{
    int port, left = argc > 1 ? atoi(argv[1]) : 1, listener = peer_listen(&port);
    printf("port %d\n", port);
    fflush(stdout);
    static char data[70000];
    for (; left > 0; left--) {
        int fd = peer_accept(listener);
        if (left % 2 == 0) {
            if (fork() > 0) {
                close(fd);
                continue;
            }
            left = 1;
        }
        ssize_t n;
        while ((n = read(fd, data, sizeof data)) > 0)
            send_fully(fd, data, (size_t)n);
        close(fd);
    }
    while (wait(NULL) > 0)
        ;
    return 0;
}
