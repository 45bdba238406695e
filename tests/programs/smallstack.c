/* Socket calls in threads with stacks of 32 KiB and in a handler on an alternate stack of 16 KiB. `smallstack PORT`. */
#include "peer.h"
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/time.h>

static int port, handler_fd;
static volatile unsigned handled;

static void *work(void *arg)
{
    int fd = peer_connect(port), epfd = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    CHECK(epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event) == 0);
    for (int i = 0; i < 1500; i++) {
        char out[200], in[200];
        struct pollfd p = {.fd = fd, .events = POLLIN};
        memset(out, i, sizeof out);
        send_fully(fd, out, sizeof out);
        CHECK(epoll_wait(epfd, &event, 1, 5000) == 1);
        CHECK(poll(&p, 1, 5000) == 1);
        recv_fully(fd, in, sizeof in);
        CHECK(memcmp(out, in, sizeof in) == 0);
    }
    close(epfd);
    close(fd);
    return arg;
}

static void handler(int number)
{
    char byte = (char)number;
    int saved = errno;
    if (send(handler_fd, &byte, 1, MSG_NOSIGNAL) != 1 || recv(handler_fd, &byte, 1, 0) != 1)
        _exit(41);
    handled++;
    errno = saved;
}

int main(int argc, char **argv)
{
    pthread_attr_t attributes;
    pthread_t threads[8];
    CHECK(argc == 2);
    port = atoi(argv[1]);
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, 32 * 1024) == 0);
    for (int i = 0; i < 8; i++)
        CHECK(pthread_create(&threads[i], &attributes, work, NULL) == 0);
    for (int i = 0; i < 8; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);

    /* The stack is surrounded by pages that can't be touched, so that an overflow is seen. */
    static char area[16 * 1024 + 2 * 4096] __attribute__((aligned(4096)));
    stack_t stack = {.ss_sp = area + 4096, .ss_size = 16 * 1024};
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK | SA_RESTART};
    int fd = peer_connect(port);
    handler_fd = peer_connect(port);
    peer_warm(handler_fd, 0);
    memset(area, 0x5a, 4096);
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval timer = {{0, 1000}, {0, 1000}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    for (int i = 0; i < 3000 || handled < 100; i++) {
        char byte = (char)i, got;
        send_fully(fd, &byte, 1);
        recv_fully(fd, &got, 1);
        CHECK(byte == got);
    }
    timer.it_value.tv_usec = timer.it_interval.tv_usec = 0;
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    for (int i = 0; i < 4096; i++)
        CHECK(area[i] == 0x5a);
    puts("ok");
    return 0;
}
