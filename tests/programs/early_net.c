/* A shared library that uses sockets in its constructor, perhaps before any other library has started. */
#include "peer.h"
#include <sys/epoll.h>

__attribute__((constructor)) static void early(void)
{
    int port, listener = peer_listen(&port), one = peer_connect(port), two = peer_accept(listener);
    int epfd = epoll_create1(EPOLL_CLOEXEC), copy = dup(one);
    struct epoll_event event = {.events = EPOLLIN};
    struct pollfd p = {.fd = two, .events = POLLIN};
    char byte = 'e';
    CHECK(epfd >= 0 && copy >= 0 && epoll_ctl(epfd, EPOLL_CTL_ADD, two, &event) == 0);
    CHECK(poll(&p, 1, 0) == 0 && epoll_wait(epfd, &event, 1, 0) == 0);
    for (int i = 0; i < 50; i++) {
        CHECK(send(copy, &byte, 1, 0) == 1);
        CHECK(poll(&p, 1, 2000) == 1 && epoll_wait(epfd, &event, 1, 2000) == 1);
        CHECK(recv(two, &byte, 1, 0) == 1 && byte == 'e');
    }
    close(copy);
    close(one);
    CHECK(recv(two, &byte, 1, 0) == 0);
    close(two);
    close(epfd);
    close(listener);
}

/* For programs that link to this library. */
int early_net_is_here(void);
int early_net_is_here(void)
{
    return 1;
}
