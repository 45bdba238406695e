/* Blocking sockets that are waited for by poll as a raw system call, while the C library's functions move the bytes: 300 slow
   exchanges of 3 kB, then the end of the stream. No read ever waits, so what is received must not come where only the
   library sees it. */
#include "peer.h"
#include <sys/syscall.h>

static void readable(int fd)
{
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    CHECK(syscall(SYS_poll, &entry, 1, 5000) == 1);
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    int is_server = strcmp(argv[1], "server") == 0, port, fd;
    if (is_server) {
        int listener = peer_listen(&port);
        printf("port %d\n", port);
        fflush(stdout);
        fd = peer_accept(listener);
        close(listener);
    } else {
        fd = peer_connect(atoi(argv[2]));
    }
    static unsigned char data[3000], want[3000];
    uint64_t sent = 0, received = 0;
    for (int i = 0; i < 300; i++, usleep(1000))
        for (int turn = 0; turn < 2; turn++) {
            if (turn == is_server) {
                peer_fill(data, sizeof data, sent);
                sent += sizeof data;
                CHECK(write(fd, data, sizeof data) == sizeof data);
                continue;
            }
            peer_fill(want, sizeof want, received);
            received += sizeof want;
            for (unsigned done = 0; done < sizeof data;) {
                readable(fd);
                ssize_t n = read(fd, data + done, sizeof data - done);
                CHECK(n > 0);
                done += (unsigned)n;
            }
            CHECK(memcmp(data, want, sizeof data) == 0);
        }
    CHECK(shutdown(fd, SHUT_WR) == 0);
    readable(fd);
    CHECK(read(fd, data, sizeof data) == 0);
    puts("ok");
    return 0;
}
