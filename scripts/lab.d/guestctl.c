/*
 * What a guest of scripts/lab has no packaged program for:
 *
 *     guestctl ueid add NAME | ueid flush   user-defined EIDs of the kernel's SMC (the host's, at most four)
 *     guestctl pnet NAME ETHDEV IBDEV       puts a network device and port 1 of an RDMA device into a PNET ID
 *     guestctl fallbacks                    how often the kernel's SMC sockets fell back to TCP, a line each: server or
 *                                           client, reason, count
 *     guestctl reseed HEX                   mixes 32 bytes into the random number generator and lets it start anew
 *
 * Linked statically, as it is used before the host's files are mounted. Numbers and names: <linux/smc.h>.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/genetlink.h>
#include <linux/netlink.h>
#include <linux/random.h>
#include <linux/smc.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define EID_LENGTH 32
#define SEED_LENGTH 32

/* A generic netlink message under construction; large enough for every message made here. */
struct message {
    struct nlmsghdr head;
    struct genlmsghdr generic;
    char attributes[256];
};

static void die(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fputs("guestctl: ", stderr);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
    exit(1);
}

static void begin(struct message *message, uint16_t family, uint8_t command)
{
    memset(message, 0, sizeof *message);
    message->head.nlmsg_len = NLMSG_LENGTH(GENL_HDRLEN);
    message->head.nlmsg_type = family;
    message->head.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK;
    message->generic.cmd = command;
    message->generic.version = 1;
}

static void attach(struct message *message, uint16_t type, const void *value, size_t length)
{
    size_t at = NLMSG_ALIGN(message->head.nlmsg_len);
    struct nlattr *attribute = (struct nlattr *)((char *)message + at);
    if (at + NLA_HDRLEN + NLA_ALIGN(length) > sizeof *message)
        die("argument of %zu bytes is too long", length);
    attribute->nla_type = type;
    attribute->nla_len = NLA_HDRLEN + length;
    memcpy((char *)attribute + NLA_HDRLEN, value, length);
    message->head.nlmsg_len = at + NLA_HDRLEN + NLA_ALIGN(length);
}

static void attach_string(struct message *message, uint16_t type, const char *text)
{
    attach(message, type, text, strlen(text) + 1);
}

/* Copies the attribute of this type to `value`, if it is among `left` bytes of attributes. */
static void find_attribute(const struct nlattr *attribute, int left, uint16_t type, void *value, size_t size)
{
    while (left >= NLA_HDRLEN && attribute->nla_len >= NLA_HDRLEN && attribute->nla_len <= left) {
        if (attribute->nla_type == type)
            memcpy(value, (const char *)attribute + NLA_HDRLEN, size);
        left -= NLA_ALIGN(attribute->nla_len);
        attribute = (const struct nlattr *)((const char *)attribute + NLA_ALIGN(attribute->nla_len));
    }
}

/* Sends the message, and hands answers with attributes to `take`, if that isn't NULL. Gives 0 or an errno value from the
   kernel. */
static int exchange(int fd, struct message *message, void (*take)(const struct nlattr *, int left, void *to), void *to)
{
    char answer[8192];
    if (send(fd, message, message->head.nlmsg_len, 0) < 0)
        die("cannot send to netlink: %m");
    for (;;) {
        ssize_t got = recv(fd, answer, sizeof answer, 0);
        if (got < 0)
            die("cannot receive from netlink: %m");
        struct nlmsghdr *head = (struct nlmsghdr *)answer;
        for (; NLMSG_OK(head, got); head = NLMSG_NEXT(head, got)) {
            if (head->nlmsg_type == NLMSG_DONE)
                return 0;
            if (head->nlmsg_type == NLMSG_ERROR)
                return -((struct nlmsgerr *)NLMSG_DATA(head))->error;
            if (take)
                take((struct nlattr *)((char *)NLMSG_DATA(head) + GENL_HDRLEN),
                     head->nlmsg_len - NLMSG_LENGTH(GENL_HDRLEN), to);
        }
    }
}

static void take_family(const struct nlattr *attributes, int left, void *family)
{
    find_attribute(attributes, left, CTRL_ATTR_FAMILY_ID, family, sizeof(uint16_t));
}

static uint16_t find_family(int fd, const char *name)
{
    struct message message;
    uint16_t family = 0;
    begin(&message, GENL_ID_CTRL, CTRL_CMD_GETFAMILY);
    attach_string(&message, CTRL_ATTR_FAMILY_NAME, name);
    int error = exchange(fd, &message, take_family, &family);
    if (error || !family)
        die("the kernel has no netlink family %s (%s); is the module smc loaded?", name, strerror(error));
    return family;
}

static int add_ueid(int fd, const char *name)
{
    struct message message;
    char padded[EID_LENGTH + 1];
    if (strlen(name) > EID_LENGTH)
        die("UEID %s has more than %d characters", name, EID_LENGTH);
    snprintf(padded, sizeof padded, "%-*s", EID_LENGTH, name);
    begin(&message, find_family(fd, SMC_GENL_FAMILY_NAME), SMC_NETLINK_ADD_UEID);
    attach_string(&message, SMC_NLA_EID_TABLE_ENTRY, padded);
    return exchange(fd, &message, NULL, NULL);
}

static int flush_ueids(int fd)
{
    struct message message;
    begin(&message, find_family(fd, SMC_GENL_FAMILY_NAME), SMC_NETLINK_FLUSH_UEID);
    return exchange(fd, &message, NULL, NULL);
}

static int add_pnet(int fd, const char *name, const char *ethernet, const char *rdma)
{
    struct message message;
    uint8_t port = 1;
    begin(&message, find_family(fd, SMCR_GENL_FAMILY_NAME), SMC_PNETID_ADD);
    attach_string(&message, SMC_PNETID_NAME, name);
    attach_string(&message, SMC_PNETID_ETHNAME, ethernet);
    attach_string(&message, SMC_PNETID_IBNAME, rdma);
    attach(&message, SMC_PNETID_IBPORT, &port, sizeof port);
    return exchange(fd, &message, NULL, NULL);
}

/* Prints one entry of the kernel's table of fallbacks. */
static void print_fallback(const struct nlattr *nest, int left, void *unused)
{
    uint8_t is_server = 0;
    uint16_t count = 0;
    uint32_t reason = 0;
    (void)unused;
    if (left < NLA_HDRLEN || nest->nla_len < NLA_HDRLEN || nest->nla_len > left)
        return;
    left = nest->nla_len - NLA_HDRLEN;
    find_attribute(nest + 1, left, SMC_NLA_FBACK_STATS_TYPE, &is_server, sizeof is_server);
    find_attribute(nest + 1, left, SMC_NLA_FBACK_STATS_RSN_CODE, &reason, sizeof reason);
    find_attribute(nest + 1, left, SMC_NLA_FBACK_STATS_RSN_CNT, &count, sizeof count);
    if (count)
        printf("%s 0x%08x %u\n", is_server ? "server" : "client", reason, count);
}

static int print_fallbacks(int fd)
{
    struct message message;
    begin(&message, find_family(fd, SMC_GENL_FAMILY_NAME), SMC_NETLINK_GET_FBACK_STATS);
    message.head.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
    return exchange(fd, &message, print_fallback, NULL);
}

static void reseed(const char *hex)
{
    struct {
        struct rand_pool_info info;
        unsigned char bytes[SEED_LENGTH];
    } seed = {.info = {.entropy_count = 8 * SEED_LENGTH, .buf_size = SEED_LENGTH}};
    for (int i = 0; i < SEED_LENGTH; i++)
        if (sscanf(hex + 2 * i, "%2hhx", &seed.bytes[i]) != 1)
            die("the seed must have %d hexadecimal digits", 2 * SEED_LENGTH);
    int fd = open("/dev/urandom", O_RDWR);
    if (fd < 0 || ioctl(fd, RNDADDENTROPY, &seed) < 0 || ioctl(fd, RNDRESEEDCRNG) < 0)
        die("cannot reseed the random number generator: %m");
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "", *verb = count > 2 ? arguments[2] : "";
    if (count == 3 && strcmp(what, "reseed") == 0) {
        if (strlen(verb) != 2 * SEED_LENGTH)
            die("the seed must have %d hexadecimal digits", 2 * SEED_LENGTH);
        reseed(verb);
        return 0;
    }
    int fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC), error;
    if (fd < 0)
        die("cannot open a netlink socket: %m");
    if (count == 4 && strcmp(what, "ueid") == 0 && strcmp(verb, "add") == 0)
        error = add_ueid(fd, arguments[3]);
    else if (count == 3 && strcmp(what, "ueid") == 0 && strcmp(verb, "flush") == 0)
        error = flush_ueids(fd);
    else if (count == 2 && strcmp(what, "fallbacks") == 0)
        error = print_fallbacks(fd);
    else if (count == 5 && strcmp(what, "pnet") == 0)
        error = add_pnet(fd, arguments[2], arguments[3], arguments[4]);
    else
        die("usage: guestctl ueid add NAME | ueid flush | pnet NAME ETHDEV IBDEV | fallbacks | reseed HEX");
    if (error)
        die("the kernel refuses: %s %s %s: %s", what, verb, count > 3 ? arguments[3] : "", strerror(error));
    return 0;
}
