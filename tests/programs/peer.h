/* What the small C programs share: `program server` prints "port N" and accepts, `program client N` connects. They use
   127.0.0.1 or, with PEER in the environment, all addresses of this host and the one in PEER. */
#ifndef PEER_H
#define PEER_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not true: %s (%s)\n", __FILE__, __LINE__, #condition, strerror(errno));             \
            fflush(stderr);                                                                                            \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static inline int peer_listen(int *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_addr.s_addr = htonl(getenv("PEER") ? INADDR_ANY : INADDR_LOOPBACK);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 64) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&address, &size) == 0);
    *port = ntohs(address.sin_port);
    return fd;
}

static inline int peer_connect(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK(inet_pton(AF_INET, getenv("PEER") ? getenv("PEER") : "127.0.0.1", &address.sin_addr) == 1);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    return fd;
}

static inline int peer_accept(int listener)
{
    int fd = accept(listener, NULL, NULL), one = 1;
    CHECK(fd >= 0);
    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    return fd;
}

/* The connection of a program with the two forms of command line above. */
static inline int peer_open(int argc, char **argv, int *is_server)
{
    CHECK(argc >= 2);
    *is_server = strcmp(argv[1], "server") == 0;
    if (*is_server) {
        int port, listener = peer_listen(&port);
        printf("port %d\n", port);
        fflush(stdout);
        int fd = peer_accept(listener);
        close(listener);
        return fd;
    }
    CHECK(argc >= 3);
    return peer_connect(atoi(argv[2]));
}

static inline void send_fully(int fd, const void *data, size_t size)
{
    const char *at = data;
    while (size) {
        ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        CHECK(n > 0);
        at += n, size -= (size_t)n;
    }
}

static inline void recv_fully(int fd, void *data, size_t size)
{
    char *at = data;
    while (size) {
        ssize_t n = recv(fd, at, size, 0);
        if (n < 0 && errno == EINTR)
            continue;
        CHECK(n > 0);
        at += n, size -= (size_t)n;
    }
}

/* Exchanges bytes for about a quarter of a second, so that the connection is upgraded where that is possible. */
static inline void peer_warm(int fd, int is_server)
{
    char byte = 'w';
    for (int i = 0; i < 200; i++) {
        if (!is_server) {
            usleep(1000);
            send_fully(fd, &byte, 1);
        }
        recv_fully(fd, &byte, 1);
        CHECK(byte == 'w');
        if (is_server)
            send_fully(fd, &byte, 1);
    }
}

static inline uint64_t peer_mix(uint64_t x)
{
    x = (x + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
    return x ^ (x >> 29);
}

static inline void peer_fill(unsigned char *to, size_t size, uint64_t at)
{
    for (size_t i = 0; i < size; i++)
        to[i] = (unsigned char)(peer_mix((at + i) >> 3) >> (8 * ((at + i) & 7)));
}
#endif
