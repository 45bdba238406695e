/*
 * Ping-pong and bulk transfer between two hosts, for the comparison in scripts/lab-bench:
 *
 *     lab_bench [-f smc|tcp] [-w block|poll|epoll] -p PORT serve
 *     lab_bench [-f smc|tcp] [-w block|poll|epoll] -p PORT connect HOST ROUNDS SIZE MEGABYTES
 *
 * The client sends ROUNDS messages of SIZE bytes and waits for each to come back, then MEGABYTES to the server, which
 * answers one byte at the end. It prints one line of JSON: the median round trip in microseconds, the throughput in
 * megabytes a second, and what part of its CPU the guest was busy per round trip (us) and per megabyte (ms), from
 * /proc/stat. With -f smc the sockets are the kernel's AF_SMC. -w says in what a receiver sleeps: in recv (block,
 * the default), or in poll or epoll_wait after a recv that found nothing.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define AF_SMC_FAMILY 43
#define BLOCK (256 << 10)

static int family = AF_INET;
static char waits = 'b'; /* the first letter of -w */
static int set = -1;     /* epoll instance */
static char block[BLOCK];

static void die(const char *what)
{
    fprintf(stderr, "lab_bench: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* Microseconds that the host's CPUs were not idle. */
static double busy_us(void)
{
    double v[10] = {0}, sum = 0;
    FILE *f = fopen("/proc/stat", "r");
    if (!f || fscanf(f, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", v, v + 1, v + 2, v + 3, v + 4, v + 5, v + 6, v + 7) != 8)
        die("/proc/stat");
    fclose(f);
    for (int i = 0; i < 8; i++)
        if (i != 3 && i != 4)
            sum += v[i];
    return sum * 1e6 / sysconf(_SC_CLK_TCK);
}

/* recv that sleeps as -w says. */
static ssize_t take(int fd, char *buf, size_t n)
{
    while (waits != 'b') {
        ssize_t k = recv(fd, buf, n, MSG_DONTWAIT);
        if (k >= 0 || errno != EAGAIN)
            return k;
        struct epoll_event event = {.events = EPOLLIN};
        struct pollfd one = {.fd = fd, .events = POLLIN};
        if (waits == 'e' && set < 0) {
            set = epoll_create1(0);
            if (epoll_ctl(set, EPOLL_CTL_ADD, fd, &event))
                die("epoll_ctl");
        }
        if ((waits == 'e' ? epoll_wait(set, &event, 1, -1) : poll(&one, 1, -1)) < 0)
            die("waiting");
    }
    return recv(fd, buf, n, 0);
}

static void whole(int fd, char *buf, size_t n, int out)
{
    while (n > 0) {
        ssize_t k = out ? send(fd, buf, n, 0) : take(fd, buf, n);
        if (k < 0)
            die(out ? "send" : "recv");
        if (k == 0)
            exit(out ? 1 : 0);
        buf += k;
        n -= k;
    }
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    int option, port = 7000, one = 1;
    while ((option = getopt(argc, argv, "f:p:w:")) != -1) {
        if (option == 'f')
            family = strcmp(optarg, "smc") ? AF_INET : AF_SMC_FAMILY;
        else if (option == 'p')
            port = atoi(optarg);
        else if (option == 'w')
            waits = optarg[0];
        else
            return 2;
    }
    argv += optind;
    argc -= optind;
    int serve = argc == 1 && !strcmp(argv[0], "serve");
    if (!serve && argc != 5)
        return 2;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(family, SOCK_STREAM, 0);
    if (fd < 0)
        die("socket");
    uint32_t head[3];
    if (serve) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 1))
            die("listen");
        int c = accept(fd, NULL, NULL);
        if (c < 0)
            die("accept");
        setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        whole(c, (char *)head, sizeof head, 0);
        for (uint32_t i = 0; i < head[0]; i++) {
            whole(c, block, head[1], 0);
            whole(c, block, head[1], 1);
        }
        for (uint64_t left = (uint64_t)head[2] << 20; left > 0;) {
            ssize_t k = take(c, block, sizeof block);
            if (k <= 0)
                die("bulk");
            left -= k;
        }
        whole(c, block, 1, 1);
        close(c);
        return 0;
    }
    inet_pton(AF_INET, argv[1], &at.sin_addr);
    for (int i = 0; i < 5; i++)
        if (i > 1)
            head[i - 2] = atoi(argv[i]);
    int tries = 0;
    while (connect(fd, (struct sockaddr *)&at, sizeof at)) {
        if (errno != ECONNREFUSED || ++tries > 100)
            die("connect");
        close(fd);
        usleep(100000);
        fd = socket(family, SOCK_STREAM, 0);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (head[1] > BLOCK)
        return 2;
    double *times = calloc(head[0] + 1, sizeof *times);
    whole(fd, (char *)head, sizeof head, 1);
    double busy = busy_us();
    for (uint32_t i = 0; i < head[0]; i++) {
        double start = now_us();
        whole(fd, block, head[1], 1);
        whole(fd, block, head[1], 0);
        times[i] = now_us() - start;
    }
    double busy_trip = (busy_us() - busy) / (head[0] ? head[0] : 1);
    qsort(times, head[0], sizeof *times, compare);
    busy = busy_us();
    double start = now_us();
    for (uint64_t left = (uint64_t)head[2] << 20; left > 0;) {
        size_t k = left < sizeof block ? left : sizeof block;
        whole(fd, block, k, 1);
        left -= k;
    }
    whole(fd, block, 1, 0);
    double took = now_us() - start;
    printf("{\"p50_us\": %.1f, \"mb_s\": %.2f, \"busy_us_trip\": %.1f, \"busy_ms_mb\": %.2f}\n", times[head[0] / 2],
           head[2] / (took / 1e6), busy_trip, (busy_us() - busy) / 1e3 / (head[2] ? head[2] : 1));
    close(fd);
    return 0;
}
