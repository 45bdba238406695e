/*
 * Data integrity of TCP streams: every byte is a function of (seed, direction, stream offset), so a byte that is lost,
 * doubled, moved or belongs to another place is found, and the report says where it came from.
 *
 *   integrity pingpong  --role server|client|self  --io block|epoll|vec  --count N [--max BYTES]
 *   integrity bulk      --role server|client|self  --bytes N        (N bytes each way at once)
 *   common:             [--seed S] [--port P] [--timeout SECONDS] [--hold MILLISECONDS] [--host IP] [--quiet]
 *
 * A server listens at --host, a client connects to it; by default both use 127.0.0.1. A server prints "port P" when it listens (P = 0: any port) and takes one connection. "self" holds both ends in one
 * process, for pingpong in one single thread. --hold keeps the connection open for a while after the last byte, so that
 * somebody who looks at it from outside sees all of it. The last line on success is "ok ..."; any failure prints the seed, the
 * place and what was wrong, and exits with 1. A watchdog thread prints the progress and exits with 3 on a time-out.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum io { IO_BLOCK, IO_EPOLL, IO_VEC };

#define MAX_MESSAGE (1u << 20)

static uint64_t seed = 1;
static const char *role = "self", *mode = "";
static unsigned hold_ms;
static struct in_addr host = {.s_addr = 0x0100007f}; /* 127.0.0.1 */

static void die(const char *format, ...)
{
    va_list args;
    fflush(stdout);
    fprintf(stderr, "integrity FAILED (%s %s, seed %llu, pid %d): ", mode, role, (unsigned long long)seed, getpid());
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\n");
    fflush(stderr);
    _exit(1);
}

#include "pattern.h"

/* ---- one end of a connection ---------------------------------------------------------------------------------- */

struct end {
    int fd, epfd;
    enum io io;
    const char *name;
    uint64_t tx_key, rx_key;            /* pattern of what we send and of what we get */
    volatile uint64_t sent, received;   /* stream offsets, read by the watchdog */
    volatile uint64_t messages;
    const char *volatile doing;
    uint64_t tx_random, rx_random;      /* choices that the peer need not know; one a direction: two threads use them */
    unsigned char *buffer, *peeked;
};

static struct end *ends[2];

static uint64_t draw(uint64_t *state)
{
    return mix((*state)++);
}

static void *must_alloc(size_t size)
{
    void *p = malloc(size);
    if (!p)
        die("out of memory");
    return p;
}

static struct end *new_end(int fd, enum io io, int is_server, const char *name)
{
    struct end *e = must_alloc(sizeof *e);
    memset(e, 0, sizeof *e);
    e->fd = fd, e->io = io, e->epfd = -1, e->name = name, e->doing = "";
    uint64_t up = mix(seed * 2 + 101), down = mix(seed * 2 + 102);
    e->tx_key = is_server ? down : up;
    e->rx_key = is_server ? up : down;
    e->tx_random = mix(seed ^ (is_server ? 0x5eu : 0xc1u));
    e->rx_random = mix(seed ^ (is_server ? 0x15eu : 0x1c1u));
    /* Messages in several small parts would each wait for a delayed acknowledgement. */
    int one = 1;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0)
        die("TCP_NODELAY: %s", strerror(errno));
    e->buffer = must_alloc(MAX_MESSAGE);
    e->peeked = must_alloc(MAX_MESSAGE);
    ends[ends[0] != NULL] = e;
    return e;
}

static void set_nonblocking(int fd)
{
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0)
        die("O_NONBLOCK: %s", strerror(errno));
}

/* Waits in the end's epoll set (edge-triggered half of the time, by seed) or in poll. */
static void wait_for(struct end *e, int out)
{
    if (e->epfd < 0) {
        struct pollfd p = {.fd = e->fd, .events = out ? POLLOUT : POLLIN};
        if (poll(&p, 1, -1) < 0 && errno != EINTR)
            die("%s: poll: %s", e->name, strerror(errno));
        return;
    }
    for (;;) {
        struct epoll_event event;
        int n = epoll_wait(e->epfd, &event, 1, -1);
        if (n < 0 && errno != EINTR)
            die("%s: epoll_wait: %s", e->name, strerror(errno));
        if (n == 1 && (event.events & (out ? EPOLLOUT : EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)))
            return;
        if (n == 1 && (event.events & (EPOLLERR | EPOLLHUP)))
            return;
    }
}

static void watch(struct end *e, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = e};
    if (e->epfd < 0) {
        e->epfd = epoll_create1(EPOLL_CLOEXEC);
        if (e->epfd < 0 || epoll_ctl(e->epfd, EPOLL_CTL_ADD, e->fd, &event) != 0)
            die("%s: epoll: %s", e->name, strerror(errno));
    } else if (epoll_ctl(e->epfd, EPOLL_CTL_MOD, e->fd, &event) != 0) {
        die("%s: EPOLL_CTL_MOD: %s", e->name, strerror(errno));
    }
}

/* Cuts [buffer, buffer + len) into up to eight random vectors, some of them empty; gives their number. */
static int cut(struct iovec *vectors, unsigned char *buffer, size_t len, uint64_t *random)
{
    int count = 0;
    while (count < 7 && len) {
        size_t part = draw(random) % 5 == 0 ? 0 : draw(random) % (len + 1);
        vectors[count].iov_base = buffer;
        vectors[count++].iov_len = part;
        buffer += part, len -= part;
    }
    vectors[count].iov_base = buffer;
    vectors[count++].iov_len = len;
    return count;
}

/* One sending call of a random kind; the result of the call. */
static ssize_t send_call(struct end *e, unsigned char *data, size_t len, int flags)
{
    struct iovec vectors[8];
    struct msghdr message = {.msg_iov = vectors};
    switch (e->io == IO_VEC ? draw(&e->tx_random) % 5 : draw(&e->tx_random) % 2) {
    case 0:
        return send(e->fd, data, len, flags | MSG_NOSIGNAL);
    case 1:
        if (flags)
            return send(e->fd, data, len, flags | MSG_NOSIGNAL);
        return write(e->fd, data, len);
    case 2:
        if (flags)
            return sendto(e->fd, data, len, flags | MSG_NOSIGNAL, NULL, 0);
        return writev(e->fd, vectors, cut(vectors, data, len, &e->tx_random));
    case 3:
        message.msg_iovlen = (size_t)cut(vectors, data, len, &e->tx_random);
        return sendmsg(e->fd, &message, flags | MSG_NOSIGNAL);
    default:
        return sendto(e->fd, data, len, flags | MSG_NOSIGNAL, NULL, 0);
    }
}

/* One receiving call of a random kind, at most `len` bytes; peeks before it sometimes. */
static ssize_t recv_call(struct end *e, unsigned char *data, size_t len, int flags)
{
    struct iovec vectors[8];
    struct msghdr message = {.msg_iov = vectors};
    ssize_t seen = -1, got;
    if (e->io == IO_VEC && draw(&e->rx_random) % 4 == 0) {
        size_t part = 1 + draw(&e->rx_random) % len;
        e->doing = "peek";
        seen = recv(e->fd, e->peeked, part, MSG_PEEK | flags);
        if (seen < 0)
            return seen;
        if ((size_t)seen > part)
            die("%s: MSG_PEEK of %zu bytes returned %zd", e->name, part, seen);
        check(e->peeked, e->received, (size_t)seen, e->rx_key, e->tx_key, e->name);
        if (draw(&e->rx_random) % 2) {
            int queued = -1;
            if (ioctl(e->fd, FIONREAD, &queued) != 0 || queued < seen)
                die("%s: FIONREAD says %d after a peek of %zd bytes", e->name, queued, seen);
        }
        e->doing = "receive after peek";
    }
    switch (e->io == IO_VEC ? draw(&e->rx_random) % 6 : draw(&e->rx_random) % 2) {
    case 0:
        got = recv(e->fd, data, len, flags);
        break;
    case 1:
        got = flags ? recv(e->fd, data, len, flags) : read(e->fd, data, len);
        break;
    case 2:
        got = flags ? recvfrom(e->fd, data, len, flags, NULL, NULL)
                    : readv(e->fd, vectors, cut(vectors, data, len, &e->rx_random));
        break;
    case 3:
        message.msg_iovlen = (size_t)cut(vectors, data, len, &e->rx_random);
        got = recvmsg(e->fd, &message, flags);
        break;
    case 4:
        got = recvfrom(e->fd, data, len, flags, NULL, NULL);
        break;
    default:
        got = recv(e->fd, data, len, flags | (flags & MSG_DONTWAIT ? 0 : MSG_WAITALL));
        if (got >= 0 && (size_t)got != len && !(flags & MSG_DONTWAIT))
            die("%s: MSG_WAITALL of %zu bytes at offset %llu returned %zd", e->name, len,
                (unsigned long long)e->received, got);
        break;
    }
    if (seen > 0 && got >= 0 && got < (seen < (ssize_t)len ? seen : (ssize_t)len) && e->io != IO_VEC)
        die("%s: %zd bytes peeked, but only %zd read", e->name, seen, got);
    if (seen == 0 && got > 0)
        die("%s: MSG_PEEK said end of stream, then %zd bytes came", e->name, got);
    return got;
}

/* Counts and checks the outcome of a receive of at most `len` bytes; gives the number of bytes. */
static size_t take(struct end *e, unsigned char *data, ssize_t got, size_t len)
{
    if (got == 0)
        die("%s: early end of stream at offset %llu", e->name, (unsigned long long)e->received);
    if ((size_t)got > len)
        die("%s: a receive of %zu bytes returned %zd", e->name, len, got);
    check(data, e->received, (size_t)got, e->rx_key, e->tx_key, e->name);
    e->received += (size_t)got;
    return (size_t)got;
}

static size_t give(struct end *e, ssize_t put, size_t len)
{
    if (put == 0 || (size_t)put > len)
        die("%s: a send of %zu bytes returned %zd", e->name, len, put);
    e->sent += (size_t)put;
    return (size_t)put;
}

static void send_message(struct end *e, size_t len)
{
    size_t done = 0;
    fill(e->buffer, e->sent, len, e->tx_key);
    e->doing = "send";
    while (done < len) {
        size_t part = len - done;
        if (e->io != IO_BLOCK && part > 1 && draw(&e->tx_random) % 4 == 0)
            part = 1 + draw(&e->tx_random) % part;
        ssize_t n = send_call(e, e->buffer + done, part, 0);
        if (n < 0 && errno == EAGAIN && e->io == IO_EPOLL) {
            e->doing = "wait for room";
            wait_for(e, 1);
            e->doing = "send";
            continue;
        }
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            die("%s: send at offset %llu: %s", e->name, (unsigned long long)e->sent, strerror(errno));
        if (e->io != IO_EPOLL && (size_t)n != part)
            die("%s: a blocking send of %zu bytes returned %zd", e->name, part, n);
        done += give(e, n, part);
    }
}

static void recv_message(struct end *e, size_t len)
{
    size_t done = 0;
    e->doing = "receive";
    while (done < len) {
        size_t part = len - done;
        if (draw(&e->rx_random) % 4 == 0)
            part = 1 + draw(&e->rx_random) % part;
        ssize_t n = recv_call(e, e->buffer, part, 0);
        if (n < 0 && errno == EAGAIN && e->io == IO_EPOLL) {
            e->doing = "wait for input";
            wait_for(e, 0);
            e->doing = "receive";
            continue;
        }
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            die("%s: receive at offset %llu: %s", e->name, (unsigned long long)e->received, strerror(errno));
        done += take(e, e->buffer, n, part);
    }
}

/* Sizes that both ends know: mostly small, up to `max`, as many of each order of magnitude. */
static size_t message_size(uint64_t index, int reply, size_t max)
{
    uint64_t r = mix(seed * 0x1000193 + index * 2 + (uint64_t)reply);
    int bits = 0;
    while ((max >> bits) > 1)
        bits++;
    size_t top = (size_t)1 << (r % (uint64_t)(bits + 1));
    size_t size = top + (size_t)((r >> 16) % top);
    return size > max ? max : size;
}

/* ---- modes ---------------------------------------------------------------------------------------------------- */

/* The end of the sending: holds the connection open first, where that is asked for. */
static void end_sending(struct end *e)
{
    e->doing = "hold";
    usleep(hold_ms * 1000);
    if (shutdown(e->fd, SHUT_WR) != 0)
        die("%s: shutdown: %s", e->name, strerror(errno));
}

static void expect_end(struct end *e)
{
    unsigned char byte;
    ssize_t n;
    e->doing = "wait for the end of the stream";
    for (;;) {
        n = recv(e->fd, &byte, 1, 0);
        if (n < 0 && errno == EAGAIN) {
            struct pollfd p = {.fd = e->fd, .events = POLLIN};
            poll(&p, 1, -1);
            continue;
        }
        break;
    }
    if (n != 0)
        die("%s: after the last message recv gave %zd (%s), not the end of the stream", e->name, n,
            n < 0 ? strerror(errno) : "a byte too many");
}

static void pingpong(struct end *e, int is_server, uint64_t count, size_t max)
{
    if (e->io == IO_EPOLL) {
        set_nonblocking(e->fd);
        watch(e, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    }
    for (uint64_t i = 0; i < count; i++) {
        /* Changes between edge- and level-triggered waiting, at other moments at the other end. */
        if (e->io == IO_EPOLL && (i + (uint64_t)is_server * 7) % 64 == 0)
            watch(e, (i / 64) % 2 ? EPOLLIN | EPOLLOUT : EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
        if (is_server) {
            recv_message(e, message_size(i, 0, max));
            send_message(e, message_size(i, 1, max));
        } else {
            send_message(e, message_size(i, 0, max));
            recv_message(e, message_size(i, 1, max));
        }
        e->messages++;
    }
    end_sending(e);
    expect_end(e);
}

/* Moves one message from a to b, both in this thread: neither call may wait for the other end. */
static void carry(struct end *a, struct end *b, size_t len)
{
    size_t put = 0, got = 0;
    fill(a->buffer, a->sent, len, a->tx_key);
    unsigned idle = 0;
    while (got < len) {
        int moved = 0;
        if (put < len) {
            size_t part = len - put;
            int flags = MSG_DONTWAIT;
            if (part <= 2048 && put == got && draw(&a->tx_random) % 2)
                flags = 0; /* a blocking call that fits into any buffer must return at once */
            a->doing = "send";
            ssize_t n = send_call(a, a->buffer + put, part, flags);
            if (n < 0 && errno != EAGAIN)
                die("%s: send at offset %llu: %s", a->name, (unsigned long long)a->sent, strerror(errno));
            if (n >= 0)
                put += give(a, n, part), moved = 1;
        }
        size_t part = len - got;
        b->doing = "receive";
        ssize_t n = recv_call(b, b->buffer, part, MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN)
            die("%s: receive at offset %llu: %s", b->name, (unsigned long long)b->received, strerror(errno));
        if (n >= 0)
            got += take(b, b->buffer, n, part), moved = 1;
        if (!moved && ++idle > 8) {
            struct pollfd p[2] = {{.fd = b->fd, .events = POLLIN}, {.fd = a->fd, .events = put < len ? POLLOUT : 0}};
            a->doing = b->doing = "poll both ends";
            poll(p, 2, 1000);
        } else if (moved) {
            idle = 0;
        }
    }
}

struct bulk {
    struct end *end;
    uint64_t bytes;
};

static void *bulk_sender(void *arg)
{
    struct bulk *b = arg;
    struct end *e = b->end;
    unsigned char *data = must_alloc(MAX_MESSAGE);
    while (e->sent < b->bytes) {
        size_t len = (size_t)1 << draw(&e->tx_random) % 19;
        len += draw(&e->tx_random) % len;
        if (len > b->bytes - e->sent)
            len = b->bytes - e->sent;
        fill(data, e->sent, len, e->tx_key);
        for (size_t done = 0; done < len;) {
            ssize_t n = send_call(e, data + done, len - done, 0);
            if (n < 0 && errno == EINTR)
                continue;
            if (n < 0)
                die("%s: send at offset %llu: %s", e->name, (unsigned long long)e->sent, strerror(errno));
            done += give(e, n, len - done);
        }
    }
    end_sending(e);
    free(data);
    return NULL;
}

static void *bulk_receiver(void *arg)
{
    struct bulk *b = arg;
    struct end *e = b->end;
    while (e->received < b->bytes) {
        size_t len = (size_t)1 << draw(&e->rx_random) % 20;
        if (len > b->bytes - e->received)
            len = b->bytes - e->received;
        ssize_t n = recv_call(e, e->buffer, len, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            die("%s: receive at offset %llu: %s", e->name, (unsigned long long)e->received, strerror(errno));
        take(e, e->buffer, n, len);
    }
    expect_end(e);
    return NULL;
}

static void start(pthread_t *thread, void *(*run)(void *), void *arg)
{
    int err = pthread_create(thread, NULL, run, arg);
    if (err)
        die("pthread_create: %s", strerror(err));
}

static void *watchdog(void *arg)
{
    long seconds = (long)(intptr_t)arg;
    while (seconds > 0)
        seconds -= sleep(1) == 0;
    fflush(stdout);
    fprintf(stderr, "integrity TIMED OUT (%s %s, seed %llu, pid %d)\n", mode, role, (unsigned long long)seed, getpid());
    for (int i = 0; i < 2 && ends[i]; i++) {
        struct end *e = ends[i];
        int queued = -1, unsent = -1;
        ioctl(e->fd, FIONREAD, &queued);
        ioctl(e->fd, TIOCOUTQ, &unsent);
        fprintf(stderr, "  %s: %llu messages, sent %llu, received %llu, FIONREAD %d, SIOCOUTQ %d, doing: %s\n", e->name,
                (unsigned long long)e->messages, (unsigned long long)e->sent, (unsigned long long)e->received, queued,
                unsent, e->doing);
    }
    fflush(stderr);
    _exit(3);
}

/* ---- connections ---------------------------------------------------------------------------------------------- */

static int listen_on(int *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)*port)};
    socklen_t size = sizeof address;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address.sin_addr = host;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 16) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &size) != 0)
        die("listen on port %d: %s", *port, strerror(errno));
    *port = ntohs(address.sin_port);
    return fd;
}

static int connect_to(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address.sin_addr = host;
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        die("connect to port %d: %s", port, strerror(errno));
    return fd;
}

static int accept_one(int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        die("accept: %s", strerror(errno));
    return fd;
}

int main(int argc, char **argv)
{
    uint64_t count = 1000, bytes = 1u << 26;
    size_t max = 300000;
    enum io io = IO_BLOCK;
    int port = 0, timeout = 600, quiet = 0;
    if (argc < 2) {
        fprintf(stderr, "usage: integrity pingpong|bulk --role server|client|self ...\n");
        return 2;
    }
    mode = argv[1];
    for (int i = 2; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--quiet")) {
            quiet = 1;
            continue;
        }
        i++;
        if (!strcmp(argv[i - 1], "--role"))
            role = value;
        else if (!strcmp(argv[i - 1], "--io"))
            io = !strcmp(value, "epoll") ? IO_EPOLL : !strcmp(value, "vec") ? IO_VEC : IO_BLOCK;
        else if (!strcmp(argv[i - 1], "--count"))
            count = strtoull(value, NULL, 0);
        else if (!strcmp(argv[i - 1], "--bytes"))
            bytes = strtoull(value, NULL, 0);
        else if (!strcmp(argv[i - 1], "--max"))
            max = strtoull(value, NULL, 0);
        else if (!strcmp(argv[i - 1], "--seed"))
            seed = strtoull(value, NULL, 0);
        else if (!strcmp(argv[i - 1], "--port"))
            port = atoi(value);
        else if (!strcmp(argv[i - 1], "--hold"))
            hold_ms = (unsigned)atoi(value);
        else if (!strcmp(argv[i - 1], "--host")) {
            if (inet_pton(AF_INET, value, &host) != 1)
                die("--host %s is not an IPv4 address", value);
        } else if (!strcmp(argv[i - 1], "--timeout"))
            timeout = atoi(value);
        else
            die("unknown option %s", argv[i - 1]);
    }
    if (max < 1 || max > MAX_MESSAGE)
        die("--max must be 1..%u", MAX_MESSAGE);

    struct timespec begin, now;
    pthread_t threads[5];
    int self = !strcmp(role, "self"), is_server = !strcmp(role, "server"), peer = -1, fd = -1;
    struct end *near, *far = NULL;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    start(&threads[4], watchdog, (void *)(intptr_t)timeout);

    if (self) {
        int listener = listen_on(&port);
        fd = connect_to(port);
        peer = accept_one(listener);
        close(listener);
    } else if (is_server) {
        int listener = listen_on(&port);
        printf("port %d\n", port);
        fflush(stdout);
        fd = accept_one(listener);
        close(listener);
    } else {
        fd = connect_to(port);
    }
    near = new_end(fd, io, is_server, self ? "client end" : role);
    if (self)
        far = new_end(peer, io, 1, "server end");

    if (!strcmp(mode, "pingpong")) {
        if (self) {
            /* No read below waits, and what is received by a blocking socket goes by RMB once something has. */
            struct pollfd both[] = {{.fd = near->fd, .events = POLLIN}, {.fd = far->fd, .events = POLLIN}};
            if (poll(both, 2, 0) < 0)
                die("poll: %s", strerror(errno));
            for (uint64_t i = 0; i < count; i++) {
                carry(near, far, message_size(i, 0, max));
                carry(far, near, message_size(i, 1, max));
                near->messages++, far->messages++;
            }
            end_sending(near);
            expect_end(far);
            end_sending(far);
            expect_end(near);
        } else {
            pingpong(near, is_server, count, max);
        }
    } else if (!strcmp(mode, "bulk")) {
        struct bulk a = {near, bytes}, b = {far, bytes};
        near->io = IO_VEC;
        start(&threads[0], bulk_sender, &a);
        start(&threads[1], bulk_receiver, &a);
        if (self) {
            far->io = IO_VEC;
            start(&threads[2], bulk_sender, &b);
            start(&threads[3], bulk_receiver, &b);
        }
        for (int i = 0; i < (self ? 4 : 2); i++)
            pthread_join(threads[i], NULL);
    } else {
        die("unknown mode");
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = (double)(now.tv_sec - begin.tv_sec) + (double)(now.tv_nsec - begin.tv_nsec) / 1e9;
    if (!quiet)
        printf("ok %s %s: %llu messages, %llu bytes sent, %llu received, %.2f s\n", mode, role,
               (unsigned long long)near->messages, (unsigned long long)near->sent, (unsigned long long)near->received,
               seconds);
    close(fd);
    if (self)
        close(peer);
    return 0;
}
