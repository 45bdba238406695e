/* A connection that is made non-blocking, and waited for by epoll, in raw system calls, while its bytes are moved by the C
   library's functions: 200 exchanges of 9 kB, then the end of the stream. Rust programs with the crates rustix and std are such.
   With SEEN in the environment the C library's functions do all. */
#include "peer.h"
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

static int epoll_fd;

static void wait_for(uint32_t event)
{
    struct epoll_event found;
    do
        CHECK((getenv("SEEN") ? epoll_wait(epoll_fd, &found, 1, 10000)
                              : (int)syscall(SYS_epoll_wait, epoll_fd, &found, 1, 10000)) == 1);
    while (!(found.events & event));
}

static void watch(int fd)
{
    struct epoll_event both = {.events = EPOLLIN | EPOLLOUT | EPOLLET};
    int on = 1;
    if (getenv("SEEN")) {
        CHECK(ioctl(fd, FIONBIO, &on) == 0);
        CHECK(epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &both) == 0);
    } else {
        CHECK(syscall(SYS_ioctl, fd, FIONBIO, &on) == 0);
        CHECK(syscall(SYS_epoll_ctl, epoll_fd, EPOLL_CTL_ADD, fd, &both) == 0);
    }
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    int is_server = strcmp(argv[1], "server") == 0, port, fd;
    epoll_fd = getenv("SEEN") ? epoll_create1(EPOLL_CLOEXEC) : (int)syscall(SYS_epoll_create1, EPOLL_CLOEXEC);
    CHECK(epoll_fd >= 0);
    if (is_server) {
        int listener = peer_listen(&port);
        printf("port %d\n", port);
        fflush(stdout);
        watch(listener);
        while ((fd = accept(listener, NULL, NULL)) < 0) {
            CHECK(errno == EAGAIN);
            wait_for(EPOLLIN);
        }
        close(listener);
        watch(fd);
    } else {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2]))};
        CHECK(inet_pton(AF_INET, getenv("PEER") ? getenv("PEER") : "127.0.0.1", &address.sin_addr) == 1);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        watch(fd);
        CHECK(connect(fd, (struct sockaddr *)&address, sizeof address) == 0 || errno == EINPROGRESS);
        do
            wait_for(EPOLLOUT);
        while (getpeername(fd, (struct sockaddr *)&address, &(socklen_t){sizeof address}) != 0);
    }
    static unsigned char data[9000], want[9000];
    uint64_t sent = 0, received = 0;
    for (int i = 0; i < 200; i++) {
        for (int turn = 0; turn < 2; turn++) {
            unsigned done = 0;
            if (turn == is_server) {
                peer_fill(data, sizeof data, sent);
                sent += sizeof data;
            } else {
                peer_fill(want, sizeof want, received);
                received += sizeof want;
            }
            while (done < sizeof data) {
                ssize_t n = turn == is_server ? send(fd, data + done, sizeof data - done, MSG_NOSIGNAL)
                                              : recv(fd, data + done, sizeof data - done, 0);
                if (n < 0) {
                    CHECK(errno == EAGAIN);
                    wait_for(turn == is_server ? EPOLLOUT : EPOLLIN);
                    continue;
                }
                CHECK(n > 0);
                done += (unsigned)n;
            }
            if (turn != is_server)
                CHECK(memcmp(data, want, sizeof data) == 0);
        }
    }
    CHECK(shutdown(fd, SHUT_WR) == 0);
    ssize_t n;
    while ((n = recv(fd, data, sizeof data, 0)) < 0) {
        CHECK(errno == EAGAIN);
        wait_for(EPOLLIN);
    }
    CHECK(n == 0);
    puts("ok");
    return 0;
}
