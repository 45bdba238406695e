/*
 * Signals, cancellation and long jumps around socket calls. `signals PORT WHAT`, with an echo server at PORT.
 *
 * untouched  dispositions, mask, alternate stack and timers are as the program left them
 * handler    a timer's handler uses sockets while the interrupted code is inside socket calls
 * cancel     threads blocked in socket calls are cancelled
 * longjmp    a handler leaves blocked socket calls by siglongjmp
 */
#include "peer.h"
#include <pthread.h>
#include <setjmp.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/time.h>

static int port;

/* Exchanges a block of this size; with a peer that echoes. */
static void echo_once(int fd, size_t size, unsigned number)
{
    static __thread unsigned char out[40000], in[40000];
    peer_fill(out, size, number);
    send_fully(fd, out, size);
    recv_fully(fd, in, size);
    CHECK(memcmp(out, in, size) == 0);
}

/* ---- untouched ------------------------------------------------------------------------------------------------ */

static void all_default(void)
{
    sigset_t mask;
    stack_t stack;
    struct itimerval timer;
    for (int number = 1; number <= 64; number++) {
        struct sigaction action;
        if (number == 32 || number == 33 || number == SIGKILL || number == SIGSTOP)
            continue;
        CHECK(sigaction(number, NULL, &action) == 0);
        if (action.sa_handler != SIG_DFL)
            fprintf(stderr, "signal %d is not at its default\n", number);
        CHECK(action.sa_handler == SIG_DFL);
    }
    CHECK(sigprocmask(SIG_SETMASK, NULL, &mask) == 0);
    for (int number = 1; number <= 64; number++)
        CHECK(sigismember(&mask, number) != 1);
    CHECK(sigaltstack(NULL, &stack) == 0 && (stack.ss_flags & SS_DISABLE));
    for (int which = 0; which < 3; which++) {
        CHECK(getitimer((__itimer_which_t)which, &timer) == 0);
        CHECK(timer.it_value.tv_sec == 0 && timer.it_value.tv_usec == 0);
    }
}

static void untouched(void)
{
    all_default();
    int fd = peer_connect(port);
    peer_warm(fd, 0);
    for (unsigned i = 0; i < 200; i++)
        echo_once(fd, 1 + i * 50, i);
    all_default();
    puts("ok");
    fflush(stdout);
    raise(SIGHUP);
    CHECK(!"SIGHUP did not end the program");
}

/* ---- handler -------------------------------------------------------------------------------------------------- */

static int handler_fd;
static volatile unsigned handled;

static void use_sockets(int number)
{
    int saved = errno, ends[2];
    char byte = (char)handled, got = 0;
    (void)number;
    if (send(handler_fd, &byte, 1, MSG_NOSIGNAL) != 1)
        _exit(41);
    ssize_t n;
    do
        n = recv(handler_fd, &got, 1, 0);
    while (n < 0 && errno == EINTR);
    if (n != 1 || got != byte)
        _exit(42);
    if (pipe(ends) != 0)
        _exit(43);
    close(ends[0]);
    close(ends[1]);
    handled++;
    errno = saved;
}

static void handler(void)
{
    int fd = peer_connect(port), epfd = epoll_create1(0);
    struct sigaction action = {.sa_handler = use_sockets, .sa_flags = SA_RESTART};
    struct itimerval timer = {{0, 700}, {0, 700}};
    struct epoll_event event = {.events = EPOLLIN};
    handler_fd = peer_connect(port);
    peer_warm(fd, 0);
    peer_warm(handler_fd, 0);
    CHECK(epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event) == 0);
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    time_t end = time(NULL) + 3;
    for (unsigned i = 0; time(NULL) < end; i++) {
        echo_once(fd, 1 + peer_mix(i) % 40000, i);
        if (i % 8 == 0) {
            char byte = 'e';
            struct pollfd p = {.fd = fd, .events = POLLIN};
            send_fully(fd, &byte, 1);
            while (epoll_wait(epfd, &event, 1, 1000) < 0)
                CHECK(errno == EINTR);
            while (poll(&p, 1, 1000) < 0)
                CHECK(errno == EINTR);
            recv_fully(fd, &byte, 1);
            int more = peer_connect(port);
            echo_once(more, 10, i);
            close(more);
        }
    }
    timer.it_value.tv_usec = timer.it_interval.tv_usec = 0;
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    printf("ok %u signals\n", handled);
    CHECK(handled > 200);
}

/* ---- cancel --------------------------------------------------------------------------------------------------- */

static int cancel_fd, cancel_listener;
static int cleaned;
static const char *cancel_what;

static void cleanup(void *arg)
{
    (void)arg;
    __atomic_add_fetch(&cleaned, 1, __ATOMIC_SEQ_CST);
}

static void *blocked(void *arg)
{
    char byte;
    struct iovec vector = {&byte, 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    struct pollfd p = {.fd = cancel_fd, .events = POLLIN};
    struct epoll_event event = {.events = EPOLLIN};
    int epfd = epoll_create1(0);
    CHECK(epoll_ctl(epfd, EPOLL_CTL_ADD, cancel_fd, &event) == 0);
    pthread_cleanup_push(cleanup, NULL);
    if (!strcmp(cancel_what, "recv"))
        recv(cancel_fd, &byte, 1, 0);
    else if (!strcmp(cancel_what, "read"))
        (void)!read(cancel_fd, &byte, 1);
    else if (!strcmp(cancel_what, "recvmsg"))
        recvmsg(cancel_fd, &message, 0);
    else if (!strcmp(cancel_what, "accept"))
        accept(cancel_listener, NULL, NULL);
    else if (!strcmp(cancel_what, "poll"))
        poll(&p, 1, -1);
    else if (!strcmp(cancel_what, "epoll_wait"))
        epoll_wait(epfd, &event, 1, -1);
    else if (!strcmp(cancel_what, "select")) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(cancel_fd, &set);
        select(cancel_fd + 1, &set, NULL, NULL, NULL);
    }
    pthread_cleanup_pop(0);
    return arg;
}

static void *full_sender(void *arg)
{
    static char block[100000];
    pthread_cleanup_push(cleanup, NULL);
    for (;;)
        if (send(*(int *)arg, block, sizeof block, MSG_NOSIGNAL) < 0)
            break;
    pthread_cleanup_pop(0);
    return arg;
}

static void cancel_thread(void *(*run)(void *), void *arg)
{
    pthread_t thread;
    void *result = NULL;
    struct timespec limit;
    int before = cleaned;
    CHECK(pthread_create(&thread, NULL, run, arg) == 0);
    usleep(150000);
    CHECK(pthread_cancel(thread) == 0);
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 2;
    if (pthread_timedjoin_np(thread, &result, &limit) != 0)
        fprintf(stderr, "blocked in %s: not cancelled within 2 s\n", cancel_what);
    CHECK(result == PTHREAD_CANCELED);
    CHECK(cleaned == before + 1);
}

static void cancel(void)
{
    static const char *const calls[] = {"recv", "read", "recvmsg", "accept", "poll", "epoll_wait", "select"};
    int listen_port;
    cancel_listener = peer_listen(&listen_port);
    cancel_fd = peer_connect(port);
    peer_warm(cancel_fd, 0);
    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
        cancel_what = calls[i];
        cancel_thread(blocked, (void *)1);
        echo_once(cancel_fd, 1000, i);
    }
    int one = peer_connect(listen_port), two = peer_accept(cancel_listener);
    /* The far end of this one reads nothing. */
    cancel_what = "send";
    cancel_thread(full_sender, &one);
    char byte;
    CHECK(recv(two, &byte, 1, 0) == 1);
    echo_once(cancel_fd, 30000, 99);
    puts("ok");
}

/* ---- longjmp -------------------------------------------------------------------------------------------------- */

static sigjmp_buf out;

static void jump(int number)
{
    (void)number;
    siglongjmp(out, 1);
}

static void longjmps(void)
{
    int listen_port, listener = peer_listen(&listen_port), fd = peer_connect(port), epfd = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    struct sigaction action = {.sa_handler = jump};
    peer_warm(fd, 0);
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event) == 0);
    for (volatile unsigned turn = 0; turn < 24; turn++) {
        if (sigsetjmp(out, 1) == 0) {
            char byte;
            struct pollfd p = {.fd = fd, .events = POLLIN};
            struct itimerval timer = {{0, 0}, {0, 60000}};
            fd_set set;
            FD_ZERO(&set);
            FD_SET(fd, &set);
            CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
            switch (turn % 6) {
            case 0: recv(fd, &byte, 1, 0); break;
            case 1: accept(listener, NULL, NULL); break;
            case 2: poll(&p, 1, -1); break;
            case 3: epoll_wait(epfd, &event, 1, -1); break;
            case 4: (void)!read(fd, &byte, 1); break;
            default: select(fd + 1, &set, NULL, NULL, NULL); break;
            }
            CHECK(!"the call returned");
        }
        echo_once(fd, 2000 + turn, turn);
        int one = peer_connect(listen_port), two = peer_accept(listener);
        send_fully(one, "x", 1);
        char byte;
        recv_fully(two, &byte, 1);
        close(one);
        close(two);
        send_fully(fd, "y", 1);
        CHECK(epoll_wait(epfd, &event, 1, 3000) == 1);
        recv_fully(fd, &byte, 1);
    }
    puts("ok");
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    port = atoi(argv[1]);
    if (!strcmp(argv[2], "untouched"))
        untouched();
    else if (!strcmp(argv[2], "handler"))
        handler();
    else if (!strcmp(argv[2], "cancel"))
        cancel();
    else if (!strcmp(argv[2], "longjmp"))
        longjmps();
    return 0;
}
