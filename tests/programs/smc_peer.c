/*
 * One end of a connection that the tests of the lab (scripts/lab) exercise; both ends are told the same mode:
 *
 *     smc_peer [-f smc|tcp] [-6] [-s] [-p PORT] [-t SECONDS] serve MODE [NUMBERS]
 *     smc_peer [-f smc|tcp] [-s] [-p PORT] [-t SECONDS] connect HOST MODE [NUMBERS]
 *
 *     echo COUNT SIZE      the client sends messages of SIZE bytes and waits for each to come back
 *     bulk BYTES           both send BYTES at once, and check what they get
 *     bulks COUNT BYTES    the same on COUNT connections at once
 *     half-close BYTES     the client sends and shuts down; the server then sends, after it has seen the end
 *     abort BYTES          the server sends; the client closes without reading; the server is told of a reset (AF_SMC:
 *                          by sending only, receiving gives the end of the stream)
 *     urgent               the client sends bytes, one of them urgent
 *     many COUNT SIZE      COUNT connections are open at once; an echo of a few bytes on each, then all are closed
 *     close server|client  this side closes first, the other sees the end and closes then
 *
 * With -f smc (the default) the sockets are the kernel's AF_SMC, with -f tcp plain ones. With -s it stops itself (SIGSTOP)
 * once connected, so that something can happen to the connection before it gets SIGCONT. For each connection it prints
 * "path smcr", "path tcp REASON" (AF_SMC fell back; reason of the kernel in hexadecimal) or "path plain", and at the end
 * "done". Whatever goes wrong is said on standard error, with exit status 1; an alarm ends it after SECONDS (60).
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/smc_diag.h>
#include <linux/sock_diag.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define AF_SMC_FAMILY 43
#define SMC_OVER_IPV4 0
#define SMC_OVER_IPV6 1
#define BLOCK 65536
#define MOST_CONNECTIONS 1000
#define KEY_CLIENT 0x636c69656e74ull /* of the bytes that the client sends */
#define KEY_SERVER 0x736572766572ull

static void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
static void die(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fputs("smc_peer: ", stderr);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
    exit(1);
}

#include "pattern.h"

static int plain, ipv6, stopping, listener = -1;
static const char *host, *port = "5000";

static int is_server(void)
{
    return host == NULL;
}

static uint64_t own_key(void)
{
    return is_server() ? KEY_SERVER : KEY_CLIENT;
}

static uint64_t peer_key(void)
{
    return is_server() ? KEY_CLIENT : KEY_SERVER;
}

static int make_socket(int family)
{
    int fd = plain ? socket(family, SOCK_STREAM, 0)
                   : socket(AF_SMC_FAMILY, SOCK_STREAM, family == AF_INET6 ? SMC_OVER_IPV6 : SMC_OVER_IPV4);
    if (fd < 0)
        die("cannot make a socket: %m");
    return fd;
}

/* --- connections ------------------------------------------------------------------------------------------------- */

/* Prints "path smcr" or "path tcp REASON" from what an answer of smc_diag says about the socket, if it is in there. */
static int report_from(const char *answer, ssize_t length, ino_t inode, int *last)
{
    const struct nlmsghdr *head = (const struct nlmsghdr *)answer;
    for (; NLMSG_OK(head, length); head = NLMSG_NEXT(head, length)) {
        if (head->nlmsg_type == NLMSG_ERROR)
            die("the kernel refuses to list SMC sockets; is the module smc_diag loaded?");
        if (head->nlmsg_type == NLMSG_DONE) {
            *last = 1;
            return 0;
        }
        const struct smc_diag_msg *message = NLMSG_DATA(head);
        if (message->diag_inode != inode)
            continue;
        if (message->diag_mode != SMC_DIAG_MODE_FALLBACK_TCP) {
            printf("path %s\n", message->diag_mode == SMC_DIAG_MODE_SMCR ? "smcr" : "smcd");
            return 1;
        }
        uint32_t reason = 0;
        const char *at = (const char *)(message + 1), *end = (const char *)head + head->nlmsg_len;
        while (at + NLA_HDRLEN <= end) {
            const struct nlattr *attribute = (const struct nlattr *)at;
            if (attribute->nla_len < NLA_HDRLEN)
                break;
            if (attribute->nla_type == SMC_DIAG_FALLBACK)
                memcpy(&reason, at + NLA_HDRLEN, sizeof reason);
            at += NLA_ALIGN(attribute->nla_len);
        }
        printf("path tcp %08x\n", reason);
        return 1;
    }
    return 0;
}

/* Says on what the connection runs. */
static void report_path(int fd)
{
    struct {
        struct nlmsghdr head;
        struct smc_diag_req request;
    } query = {
        .head = {.nlmsg_len = sizeof query, .nlmsg_type = SOCK_DIAG_BY_FAMILY, .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP},
        .request = {.diag_family = AF_SMC_FAMILY, .diag_ext = 1 << (SMC_DIAG_FALLBACK - 1)},
    };
    struct stat stat;
    char answer[32768];
    int netlink, last = 0;
    if (plain) {
        puts("path plain");
        return;
    }
    if (fstat(fd, &stat) < 0 || (netlink = socket(AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG)) < 0 ||
        send(netlink, &query, sizeof query, 0) < 0)
        die("cannot ask the kernel for its SMC sockets: %m");
    while (!last) {
        ssize_t length = recv(netlink, answer, sizeof answer, 0);
        if (length < 0)
            die("cannot get the kernel's SMC sockets: %m");
        if (report_from(answer, length, stat.st_ino, &last)) {
            close(netlink);
            return;
        }
    }
    die("the kernel does not list this SMC socket");
}

/* What the server makes once it listens, and the client waits for: a SYN that comes while listen(2) is at it is answered
 * without the SMC option. */
static const char *listening_file(void)
{
    return getenv("LISTENS");
}

static void start_listening(void)
{
    int one = 1, both = 0, family = ipv6 ? AF_INET6 : AF_INET;
    struct sockaddr_in6 any6 = {.sin6_family = AF_INET6, .sin6_port = htons(atoi(port))};
    struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    listener = make_socket(family);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (ipv6)
        setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof both);
    if (bind(listener, ipv6 ? (void *)&any6 : (void *)&any4, ipv6 ? sizeof any6 : sizeof any4) < 0 ||
        listen(listener, MOST_CONNECTIONS) < 0)
        die("cannot listen on port %s: %m", port);
    if (listening_file())
        close(open(listening_file(), O_CREAT | O_WRONLY, 0644));
}

/* The next connection: accepted, or made once the server listens. */
static int next_connection(void)
{
    int fd;
    if (is_server()) {
        fd = accept(listener, NULL, NULL);
        if (fd < 0)
            die("cannot accept: %m");
    } else {
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV}, *address;
        if (getaddrinfo(host, port, &hints, &address) != 0)
            die("%s is no IP address, or %s no port", host, port);
        for (int tries = 0; listening_file() && access(listening_file(), F_OK) < 0 && tries < 1000; tries++)
            usleep(5000);
        for (int tries = 0;; tries++) {
            fd = make_socket(address->ai_family);
            if (connect(fd, address->ai_addr, address->ai_addrlen) == 0)
                break;
            if (errno != ECONNREFUSED || tries == 200)
                die("cannot connect to %s port %s: %m", host, port);
            close(fd);
            usleep(50000);
        }
        freeaddrinfo(address);
    }
    report_path(fd);
    if (stopping)
        raise(SIGSTOP);
    return fd;
}

/* --- streams ----------------------------------------------------------------------------------------------------- */

static void send_all(int fd, const unsigned char *bytes, size_t length)
{
    while (length) {
        ssize_t sent = send(fd, bytes, length, MSG_NOSIGNAL);
        if (sent < 0)
            die("cannot send: %m");
        bytes += sent, length -= sent;
    }
}

/* Receives all of it; dies at the end of the stream. */
static void receive_all(int fd, unsigned char *bytes, size_t length)
{
    while (length) {
        ssize_t got = recv(fd, bytes, length, 0);
        if (got < 0)
            die("cannot receive: %m");
        if (got == 0)
            die("the stream ended with %zu bytes missing", length);
        bytes += got, length -= got;
    }
}

/* Sends the bytes of this side's pattern from offset `at`. */
static void send_pattern(int fd, uint64_t at, uint64_t length)
{
    unsigned char block[BLOCK];
    while (length) {
        size_t part = length < sizeof block ? length : sizeof block;
        fill(block, at, part, own_key());
        send_all(fd, block, part);
        at += part, length -= part;
    }
}

static void receive_pattern(int fd, uint64_t at, uint64_t length)
{
    unsigned char block[BLOCK];
    while (length) {
        size_t part = length < sizeof block ? length : sizeof block;
        receive_all(fd, block, part);
        check(block, at, part, peer_key(), own_key(), is_server() ? "from the client" : "from the server");
        at += part, length -= part;
    }
}

static void expect_end(int fd)
{
    char byte;
    ssize_t got = recv(fd, &byte, 1, 0);
    if (got < 0)
        die("instead of the end of the stream: %m");
    if (got > 0)
        die("instead of the end of the stream there is the byte %02x", (unsigned char)byte);
}

static void close_own_first(int fd)
{
    close(fd);
}

static void close_after_peer(int fd)
{
    expect_end(fd);
    close(fd);
}

/* --- modes ------------------------------------------------------------------------------------------------------- */

static void echo(int fd, uint64_t count, uint64_t size)
{
    for (uint64_t i = 0; i < count; i++) {
        if (!is_server())
            send_pattern(fd, i * size, size);
        receive_pattern(fd, i * size, size);
        if (is_server())
            send_pattern(fd, i * size, size);
    }
}

struct half {
    int fd;
    uint64_t bytes;
};

static void *bulk_sender(void *argument)
{
    struct half *half = argument;
    send_pattern(half->fd, 0, half->bytes);
    return NULL;
}

static void bulk(int fd, uint64_t bytes)
{
    struct half half = {fd, bytes};
    pthread_t sender;
    if (pthread_create(&sender, NULL, bulk_sender, &half) != 0)
        die("cannot start a thread");
    receive_pattern(fd, 0, bytes);
    pthread_join(sender, NULL);
    if (shutdown(fd, SHUT_WR) < 0)
        die("cannot shut down: %m");
    expect_end(fd);
}

static void *bulk_of_one(void *argument)
{
    struct half *half = argument;
    bulk(half->fd, half->bytes);
    return NULL;
}

static void bulks(uint64_t count, uint64_t bytes)
{
    struct half halves[MOST_CONNECTIONS];
    pthread_t threads[MOST_CONNECTIONS];
    if (count > MOST_CONNECTIONS)
        die("more than %d connections", MOST_CONNECTIONS);
    for (uint64_t i = 0; i < count; i++)
        halves[i] = (struct half){next_connection(), bytes};
    for (uint64_t i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, bulk_of_one, &halves[i]) != 0)
            die("cannot start a thread");
    for (uint64_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    puts("all came");
    fflush(stdout);
    for (uint64_t i = 0; i < count; i++)
        close(halves[i].fd);
}

static void half_close(int fd, uint64_t bytes)
{
    if (is_server()) {
        receive_pattern(fd, 0, bytes);
        expect_end(fd);
        send_pattern(fd, 0, bytes);
    } else {
        send_pattern(fd, 0, bytes);
        if (shutdown(fd, SHUT_WR) < 0)
            die("cannot shut down: %m");
        receive_pattern(fd, 0, bytes);
        expect_end(fd);
    }
}

static void abort_unread(int fd, uint64_t bytes)
{
    char byte = 0;
    if (is_server()) {
        send_pattern(fd, 0, bytes);
        ssize_t got = recv(fd, &byte, 1, 0);
        if (got == 0 && !plain)
            got = send(fd, &byte, 1, MSG_NOSIGNAL);
        if (got >= 0 || (errno != ECONNRESET && (plain || errno != EPIPE)))
            die("instead of a reset: %s", got < 0 ? strerror(errno) : got ? "no error" : "the end of the stream");
    } else if (recv(fd, &byte, 1, MSG_PEEK) != 1) {
        die("nothing to leave unread: %m");
    }
}

static void urgent(int fd)
{
    unsigned char bytes[4];
    if (!is_server()) {
        send_all(fd, (const unsigned char *)"ab", 2);
        if (send(fd, "U", 1, MSG_OOB) != 1)
            die("cannot send an urgent byte: %m");
        send_all(fd, (const unsigned char *)"cd", 2);
        expect_end(fd);
        return;
    }
    struct pollfd wait = {.fd = fd, .events = POLLPRI};
    if (poll(&wait, 1, 10000) != 1 || !(wait.revents & POLLPRI))
        die("no urgent byte within 10 s");
    if (recv(fd, bytes, 1, MSG_OOB) != 1 || bytes[0] != 'U')
        die("the urgent byte did not come: %m");
    receive_all(fd, bytes, 4);
    if (memcmp(bytes, "abcd", 4) != 0)
        die("around the urgent byte came %.4s", bytes);
}

static void many(uint64_t count, uint64_t size)
{
    int fds[MOST_CONNECTIONS];
    if (count > MOST_CONNECTIONS)
        die("more than %d connections", MOST_CONNECTIONS);
    for (uint64_t i = 0; i < count; i++)
        fds[i] = next_connection();
    /* The kernel may accept two that are connected one after the other in the other order: nobody waits for one of them
     * before all have something to answer. */
    for (uint64_t i = 0; i < count && !is_server(); i++)
        send_pattern(fds[i], 0, size);
    for (uint64_t i = 0; i < count; i++) {
        receive_pattern(fds[i], 0, size);
        if (is_server())
            send_pattern(fds[i], 0, size);
    }
    for (uint64_t i = 0; i < count; i++) {
        if (is_server())
            close_after_peer(fds[i]);
        else
            close_own_first(fds[i]);
    }
}

static uint64_t number(const char *text)
{
    char *end;
    errno = 0;
    uint64_t value = text ? strtoull(text, &end, 0) : 0;
    if (!text || errno || *end || end == text)
        die("a number is wanted instead of '%s'", text ? text : "");
    return value;
}

static void exercise(char **words)
{
    const char *mode = words[0], *first = words[1], *second = first ? words[2] : NULL;
    if (strcmp(mode, "many") == 0) {
        many(number(first), number(second));
        return;
    }
    if (strcmp(mode, "bulks") == 0) {
        bulks(number(first), number(second));
        return;
    }
    int fd = next_connection();
    if (strcmp(mode, "echo") == 0) {
        echo(fd, number(first), number(second));
        (is_server() ? close_after_peer : close_own_first)(fd);
    } else if (strcmp(mode, "bulk") == 0) {
        bulk(fd, number(first));
        close(fd);
    } else if (strcmp(mode, "half-close") == 0) {
        half_close(fd, number(first));
        close(fd);
    } else if (strcmp(mode, "abort") == 0) {
        abort_unread(fd, number(first));
        close(fd);
    } else if (strcmp(mode, "urgent") == 0) {
        urgent(fd);
        close(fd);
    } else if (strcmp(mode, "close") == 0 && first) {
        echo(fd, 1, 1);
        (is_server() == (strcmp(first, "server") == 0) ? close_own_first : close_after_peer)(fd);
    } else {
        die("unknown mode %s", mode);
    }
}

int main(int count, char **words)
{
    unsigned seconds = 60;
    int option;
    setvbuf(stdout, NULL, _IOLBF, 0);
    while ((option = getopt(count, words, "+f:6sp:t:")) != -1) {
        switch (option) {
        case 'f': plain = strcmp(optarg, "tcp") == 0; break;
        case '6': ipv6 = 1; break;
        case 's': stopping = 1; break;
        case 'p': port = optarg; break;
        case 't': seconds = number(optarg); break;
        default: return 2;
        }
    }
    words += optind;
    alarm(seconds);
    if (words[0] && strcmp(words[0], "serve") == 0 && words[1]) {
        start_listening();
        exercise(words + 1);
    } else if (words[0] && strcmp(words[0], "connect") == 0 && words[1] && words[2]) {
        host = words[1];
        exercise(words + 2);
    } else {
        die("usage: smc_peer [-f smc|tcp] [-6] [-s] [-p PORT] [-t SECONDS] serve MODE... | connect HOST MODE...");
    }
    puts("done");
    return 0;
}
