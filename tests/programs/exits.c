/*
 * Ways of ending with bytes under way: `exits server` and `exits client PORT return|exit|_exit|abort`.
 * The server prints how many bytes came before the end of the stream and the last three of them.
 */
#include "peer.h"
#include <dlfcn.h>

static int at_exit_fd = -1;

static void at_exit(void)
{
    send(at_exit_fd, "A", 1, MSG_NOSIGNAL);
}

int main(int argc, char **argv)
{
    int is_server, fd = peer_open(argc, argv, &is_server);
    static char block[50000];
    peer_warm(fd, is_server);
    if (is_server) {
        char tail[4] = "...";
        size_t total = 0;
        ssize_t n;
        usleep(300000); /* all is over at the other end before anything is read */
        while ((n = recv(fd, block, sizeof block, 0)) > 0) {
            for (ssize_t i = n > 3 ? n - 3 : 0; i < n; i++) {
                memmove(tail, tail + 1, 2);
                tail[2] = block[i];
            }
            total += (size_t)n;
        }
        printf("got %zu %s %s\n", total, tail, n == 0 ? "eof" : strerror(errno));
        return 0;
    }
    const char *how = argc > 3 ? argv[3] : "return";
    int *goodbye_fd = dlsym(RTLD_DEFAULT, "goodbye_fd");
    if (goodbye_fd)
        *goodbye_fd = fd;
    at_exit_fd = fd;
    CHECK(atexit(at_exit) == 0);
    memset(block, '-', sizeof block);
    send_fully(fd, block, sizeof block);
    if (!strcmp(how, "exit"))
        exit(7);
    if (!strcmp(how, "_exit"))
        _exit(8);
    if (!strcmp(how, "abort"))
        abort();
    return 9;
}
