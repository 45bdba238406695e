/*
 * Urgent data (tcp(7)) in both directions; what it prints must not depend on what carries the bytes.
 *
 *     urgent serve PORT | urgent connect HOST PORT
 *
 * First the client sends and the server looks at what comes; then, on a second connection, the other way round. Each
 * round begins with a byte from the one that looks; what it found is one line. An alarm ends the program after 40 s.
 */
#define _GNU_SOURCE /* strerrorname_np */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int fd;
static volatile sig_atomic_t signals, taking;
static char taken;

static void die(const char *what)
{
    fprintf(stderr, "urgent: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void on_urgent(int number)
{
    (void)number;
    if (taking && recv(fd, &taken, 1, MSG_OOB) != 1)
        taken = '?';
    signals++;
}

static void nap(int ms)
{
    struct timespec left = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&left, &left) != 0)
        continue;
}

/* --- the one that sends ------------------------------------------------------------------------------------------ */

static void put(const char *text, int flags)
{
    if (send(fd, text, strlen(text), flags) != (ssize_t)strlen(text))
        die("send");
}

static void sends(int round)
{
    char go;
    if (recv(fd, &go, 1, 0) != 1)
        die("no byte to begin with");
    switch (round) {
    case 0: put("ab", 0), put("X", MSG_OOB), put("cd", 0); break;
    case 1: put("X", MSG_OOB), put("e", 0); break;
    case 2: put("fg", 0), nap(50), put("X", MSG_OOB), put("hi", 0); break;
    case 3: put("j", 0), put("klX", MSG_OOB), put("m", 0); break;
    case 4: put("n", 0), put("X", MSG_OOB), put("o", 0); break;
    case 5: put("X", MSG_OOB), nap(100), put("p", 0); break;
    case 6: put("X", MSG_OOB), nap(50), put("Y", MSG_OOB), put("q", 0); break;
    case 7: put("r", 0), nap(100), put("X", MSG_OOB), nap(50), put("s", 0); break;
    case 8: put("t", 0), put("X", MSG_OOB), shutdown(fd, SHUT_WR); break;
    }
}

/* --- the one that looks ------------------------------------------------------------------------------------------ */

static void get(int flags, size_t size)
{
    char bytes[100];
    ssize_t got = recv(fd, bytes, size, flags);
    if (got < 0)
        printf(" %s", strerrorname_np(errno));
    else
        printf(" '%.*s'", (int)got, bytes);
}

/* Waits for one of the events, if any is given, and prints which of those that tell of input hold. */
static void await(short events)
{
    struct pollfd wait = {.fd = fd, .events = events};
    int got;
    while ((got = poll(&wait, 1, events ? 5000 : 0)) < 0 && errno == EINTR)
        continue;
    if (events && got == 0)
        printf(" nothing within 5 s");
    wait.events = POLLIN | POLLPRI;
    if (poll(&wait, 1, 0) < 0)
        die("poll");
    printf(" %s%s", wait.revents & POLLPRI ? "pri" : "-", events & POLLIN && wait.revents & POLLIN ? "+in" : "");
}

static void at_mark(void)
{
    int by_ioctl;
    if (ioctl(fd, SIOCATMARK, &by_ioctl) != 0)
        die("SIOCATMARK");
    printf(" mark%d%d", sockatmark(fd), by_ioctl);
}

static void readable(void)
{
    int bytes;
    if (ioctl(fd, FIONREAD, &bytes) != 0)
        die("FIONREAD");
    printf(" has%d", bytes);
}

static void by_select(void)
{
    fd_set set;
    struct timeval zero = {0, 0};
    FD_ZERO(&set);
    FD_SET(fd, &set);
    printf(" select%d", select(fd + 1, NULL, NULL, &set, &zero));
}

static void by_epoll(int epoll)
{
    struct epoll_event event;
    int got = epoll_wait(epoll, &event, 1, 0);
    printf(" epoll%x", got == 1 ? event.events : 0);
}

static void by_message(void)
{
    char byte = '-';
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    ssize_t got = recvmsg(fd, &message, MSG_OOB);
    printf(" %zd%c%s", got, byte, message.msg_flags & MSG_OOB ? "!" : "");
}

static void looks(int round, int epoll)
{
    int before = signals, on = round == 4;
    printf("%d:", round);
    if (setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof on) != 0)
        die("SO_OOBINLINE");
    if (send(fd, "!", 1, 0) != 1)
        die("send");
    switch (round) {
    case 0:
        await(POLLPRI), by_select(), by_epoll(epoll), at_mark(), readable(), get(0, 100);
        at_mark(), readable(), get(MSG_OOB | MSG_PEEK, 1), get(MSG_OOB, 1), get(MSG_OOB, 1);
        at_mark(), await(POLLIN), by_select(), by_epoll(epoll), get(0, 100), at_mark();
        break;
    case 1: await(POLLIN), get(0, 100), get(MSG_OOB, 1), await(0); break;
    case 2: get(MSG_WAITALL, 5), at_mark(), get(MSG_WAITALL, 2); break;
    case 3: await(POLLPRI), by_message(), get(MSG_PEEK, 100), get(MSG_WAITALL, 100), get(0, 100); break;
    case 4: await(POLLPRI), get(0, 100), get(MSG_OOB, 1), at_mark(), get(MSG_WAITALL, 2), await(0), at_mark(); break;
    case 5: get(0, 100), get(MSG_OOB, 1); break;
    case 6: await(POLLPRI), get(MSG_OOB, 1), nap(200), await(POLLPRI), get(MSG_OOB, 1), get(0, 100); break;
    case 7: get(0, 100), taking = 1, get(0, 100), taking = 0, printf(" taken %c", taken); break;
    case 8: get(MSG_WAITALL, 100), at_mark(), get(MSG_OOB, 1), get(0, 100), get(MSG_OOB, 1); break;
    }
    /* The signal may be a moment later than the byte. */
    int wanted = before + (round == 6 ? 2 : 1);
    for (int i = 0; i < 200 && signals < wanted; i++)
        nap(5);
    printf(" signals%d\n", signals - before);
}

static void look(void)
{
    struct sigaction action = {.sa_handler = on_urgent, .sa_flags = SA_RESTART};
    struct epoll_event event = {.events = EPOLLPRI};
    int epoll = epoll_create1(0);
    sigaction(SIGURG, &action, NULL);
    if (fcntl(fd, F_SETOWN, getpid()) != 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
        die("cannot set the owner, or watch");
    for (int round = 0; round < 9; round++)
        looks(round, epoll);
    close(epoll);
}

static void send_all(void)
{
    for (int round = 0; round < 9; round++)
        sends(round);
}

int main(int count, char **words)
{
    int server = count == 3 && strcmp(words[1], "serve") == 0;
    struct addrinfo *at, hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    if (!server && (count != 4 || strcmp(words[1], "connect") != 0)) {
        fputs("usage: urgent serve PORT | urgent connect HOST PORT\n", stderr);
        return 2;
    }
    alarm(40);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (getaddrinfo(server ? NULL : words[2], words[count - 1], &hints, &at) != 0)
        die("getaddrinfo");
    for (int direction = 0; direction < 2; direction++) {
        int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
        if (server) {
            setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            if (bind(listener, at->ai_addr, at->ai_addrlen) != 0 || listen(listener, 1) != 0)
                die("listen");
            fd = accept(listener, NULL, NULL);
            if (fd < 0)
                die("accept");
        } else {
            for (int i = 0; i < 200; i++) {
                fd = socket(AF_INET, SOCK_STREAM, 0);
                if (connect(fd, at->ai_addr, at->ai_addrlen) == 0)
                    break;
                close(fd);
                nap(50);
            }
        }
        close(listener);
        if (server == (direction == 0))
            look();
        else
            send_all();
        shutdown(fd, SHUT_WR);
        char byte;
        if (recv(fd, &byte, 1, 0) != 0)
            die("no end of the stream");
        close(fd);
    }
    puts("done");
    return 0;
}
