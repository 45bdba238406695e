// One queue pair of rxe0 for a peer that need not keep to SMC-R: smcr.py says over pipes what it does.
//
// It says "QPN PSN RKEY ADDRESS" of its queue pair and of MEMORY bytes that the peer may write. Then each line of
// standard input is a command, and each is answered by one line: "ok", or as below, or "error ...".
//
//     connect QPN PSN GID MTU     to RTR and RTS; the MTU is its code
//     send HEX                    SEND, solicited ("-": of no bytes)
//     flood COUNT HEX             so many
//     write RKEY ADDRESS HEX [IMMEDIATE]
//     read RKEY ADDRESS LENGTH    RDMA READ, of at most a slot
//     next MS                     the next event: "received HEX", "failed STATUS" of a request, or "none" in that time
//     look OFFSET LENGTH          bytes of the memory that the peer may write
//     mute                        TEST LINK is no longer answered: it is by itself, else, and isn't told
//     starve                      what has been received is no longer replaced by new receives
//     destroy                     destroys the queue pair
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MEMORY = 128 << 10, RECEIVES = 48, RECEIVE = 8192, SLOTS = 48, SLOT = 9216, GID_INDEX = 1 };
#define SENDING 0x10000u // in the ids of requests; the others are receives

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *memory, *receives, *slots;
static char *memory_at, *receives_at, *slots_at;
static unsigned posted, completed; // requests; slot n % SLOTS is that of request n
static int starving, mute;

static struct event { struct event *next; int status; unsigned length; char bytes[]; } *first, **last = &first;

static void fail(const char *what) {
    fprintf(stderr, "rnic: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

static void say_hex(const char *word, const char *bytes, unsigned length) {
    printf("%s ", word);
    for (unsigned i = 0; i < length; i++) printf("%02x", (unsigned char)bytes[i]);
    say("");
}

static struct ibv_mr *region(char **at, size_t size, int access) {
    if (posix_memalign((void **)at, 4096, size)) fail("memory");
    memset(*at, 0, size);
    struct ibv_mr *made = ibv_reg_mr(pd, *at, size, IBV_ACCESS_LOCAL_WRITE | access);
    if (!made) fail("ibv_reg_mr");
    return made;
}

static void receive(unsigned index) {
    struct ibv_sge piece = {(uintptr_t)receives_at + index * RECEIVE, RECEIVE, receives->lkey};
    struct ibv_recv_wr request = {.wr_id = index, .sg_list = &piece, .num_sge = 1}, *bad;
    if (qp && !starving) ibv_post_recv(qp, &request, &bad);
}

static void note(int status, const char *bytes, unsigned length) {
    struct event *event = malloc(sizeof *event + length);
    if (!event) fail("malloc");
    *event = (struct event){.status = status, .length = length};
    if (length) memcpy(event->bytes, bytes, length);
    *last = event;
    last = &event->next;
}

static const char *post(struct ibv_send_wr request, const char *bytes, unsigned length);

// Answers TEST LINK.
static int test_link(char *message, unsigned length) {
    if (length < 44 || message[0] != 0x27 || message[3] & 0x80) return 0;
    message[3] |= 0x80;
    if (!mute && posted - completed < SLOTS) post((struct ibv_send_wr){.opcode = IBV_WR_SEND}, message, length);
    return 1;
}

// Takes completions. True: there were some.
static int look(void) {
    struct ibv_wc done;
    int any = 0;
    while (ibv_poll_cq(cq, 1, &done) > 0) {
        any = 1;
        if (done.wr_id & SENDING) completed++;
        if (done.status) {
            // Those after the first say nothing new.
            if (done.status != IBV_WC_WR_FLUSH_ERR || !first) note(done.status, 0, 0);
        } else if (!(done.wr_id & SENDING)) {
            char *message = receives_at + done.wr_id * RECEIVE;
            if (!test_link(message, done.byte_len)) note(0, message, done.byte_len);
            receive(done.wr_id);
        }
    }
    return any;
}

static long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Waits for a completion, or a command if these are wanted, at most until `end`. False: neither came.
static int wait_until(long end, int commands) {
    for (;;) {
        if (look()) return 1;
        ibv_req_notify_cq(cq, 0);
        if (look()) return 1;
        long left = end - now_ms();
        struct pollfd fds[] = {{channel->fd, POLLIN, 0}, {commands ? 0 : -1, POLLIN, 0}};
        if (left <= 0 || poll(fds, 2, left) == 0) return 0;
        if (fds[1].revents) return 1;
        struct ibv_cq *queue;
        void *cookie;
        if (ibv_get_cq_event(channel, &queue, &cookie) == 0) ibv_ack_cq_events(queue, 1);
    }
}

// The next command; NULL at the end.
static char *command(void) {
    static char buffer[64 << 10];
    static size_t used, had;
    memmove(buffer, buffer + used, had -= used);
    for (;;) {
        char *end = memchr(buffer, '\n', had);
        if (end) {
            *end = 0;
            used = end + 1 - buffer;
            return buffer;
        }
        struct pollfd fd = {0, POLLIN, 0};
        while (poll(&fd, 1, 0) == 0) wait_until(now_ms() + 1000, 1);
        ssize_t n = read(0, buffer + had, sizeof buffer - had);
        if (n <= 0) return NULL;
        had += n;
    }
}

static unsigned from_hex(const char *hex, char *to) {
    unsigned length = 0, byte;
    for (; sscanf(hex, "%2x", &byte) == 1; hex += 2) to[length++] = byte;
    return length;
}

// Posts a request with these bytes, or which reads `length` bytes.
static const char *post(struct ibv_send_wr request, const char *bytes, unsigned length) {
    for (long end = now_ms() + 20000; posted - completed == SLOTS;)
        if (!wait_until(end, 0)) return "error: the send queue is full";
    char *at = slots_at + posted % SLOTS * SLOT;
    if (bytes) memcpy(at, bytes, length);
    struct ibv_sge piece = {(uintptr_t)at, length, slots->lkey};
    request.wr_id = SENDING;
    request.sg_list = &piece;
    request.num_sge = length > 0;
    request.send_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
    struct ibv_send_wr *bad;
    if (!qp || ibv_post_send(qp, &request, &bad)) return "error: ibv_post_send";
    posted++;
    return "ok";
}

static int to_init(void) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1,
                               .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int to_rts(unsigned own_psn, unsigned number, unsigned psn, const char *gid, int mtu) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = number, .rq_psn = psn,
                               .max_dest_rd_atomic = 1, .min_rnr_timer = 5,
                               .ah_attr = {.is_global = 1, .port_num = 1,
                                           .grh = {.sgid_index = GID_INDEX, .hop_limit = 1}}};
    from_hex(gid, (char *)attr.ah_attr.grh.dgid.raw);
    if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        return -1;
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = own_psn, .timeout = 15, .retry_cnt = 7, .rnr_retry = 7,
                                .max_rd_atomic = 1};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                        IBV_QP_MAX_QP_RD_ATOMIC);
}

static void next_event(long ms) {
    for (long end = now_ms() + ms; look(), !first;)
        if (!wait_until(end, 0)) return say("none");
    struct event *event = first;
    if (!(first = event->next)) last = &first;
    if (event->status) say("failed %s", ibv_wc_status_str(event->status));
    else say_hex("received", event->bytes, event->length);
    free(event);
}

int main(void) {
    struct ibv_device **devices = ibv_get_device_list(NULL), **found = devices;
    while (found && *found && strcmp(ibv_get_device_name(*found), "rxe0")) found++;
    if (!found || !*found || !(context = ibv_open_device(*found))) fail("rxe0");
    if (!(pd = ibv_alloc_pd(context)) || !(channel = ibv_create_comp_channel(context))) fail("ibv_alloc_pd");
    if (!(cq = ibv_create_cq(context, 2 * (SLOTS + RECEIVES), NULL, channel, 0))) fail("ibv_create_cq");
    memory = region(&memory_at, MEMORY, IBV_ACCESS_REMOTE_WRITE);
    receives = region(&receives_at, RECEIVES * RECEIVE, 0);
    slots = region(&slots_at, SLOTS * SLOT, 0);
    struct ibv_qp_init_attr wanted = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                      .cap = {.max_send_wr = SLOTS, .max_recv_wr = RECEIVES, .max_send_sge = 1,
                                              .max_recv_sge = 1}};
    if (!(qp = ibv_create_qp(pd, &wanted)) || to_init()) fail("ibv_create_qp");
    for (unsigned i = 0; i < RECEIVES; i++) receive(i);
    unsigned own_psn = now_ms() & 0xffffff;
    say("%u %u %u %" PRIu64, qp->qp_num, own_psn, memory->rkey, (uint64_t)(uintptr_t)memory_at);

    static char word[32], hex[32 << 10], bytes[SLOT];
    for (char *line; (line = command());) {
        unsigned a, b, c;
        uint64_t address;
        const char *answer = "ok";
        int fields;
        if (sscanf(line, "connect %u %u %31s", &a, &b, word) == 3) {
            sscanf(line, "connect %*u %*u %63s %u", hex, &c);
            if (to_rts(own_psn, a, b, hex, c)) answer = "error: ibv_modify_qp";
        } else if (sscanf(line, "send %32767s", hex) == 1) {
            answer = post((struct ibv_send_wr){.opcode = IBV_WR_SEND}, bytes, from_hex(hex, bytes));
        } else if (sscanf(line, "flood %u %32767s", &a, hex) == 2) {
            b = from_hex(hex, bytes);
            for (; a && !strcmp(answer, "ok"); a--) answer = post((struct ibv_send_wr){.opcode = IBV_WR_SEND}, bytes, b);
        } else if ((fields = sscanf(line, "write %u %" SCNu64 " %32767s %u", &a, &address, hex, &b)) >= 3) {
            struct ibv_send_wr request = {.opcode = fields == 4 ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE};
            request.wr.rdma.rkey = a;
            request.wr.rdma.remote_addr = address;
            if (fields == 4) request.imm_data = htonl(b);
            answer = post(request, bytes, from_hex(hex, bytes));
        } else if (sscanf(line, "read %u %" SCNu64 " %u", &a, &address, &b) == 3) {
            struct ibv_send_wr request = {.opcode = IBV_WR_RDMA_READ};
            request.wr.rdma.rkey = a;
            request.wr.rdma.remote_addr = address;
            answer = post(request, NULL, b < SLOT ? b : SLOT);
        } else if (sscanf(line, "next %u", &a) == 1) {
            next_event(a);
            continue;
        } else if (sscanf(line, "look %u %u", &a, &b) == 2 && a <= MEMORY && b <= MEMORY - a) {
            say_hex("bytes", memory_at + a, b);
            continue;
        } else if (!strncmp(line, "mute", 4)) {
            mute = 1;
        } else if (!strncmp(line, "starve", 6)) {
            starving = 1;
        } else if (!strncmp(line, "destroy", 7)) {
            if (ibv_destroy_qp(qp)) fail("ibv_destroy_qp");
            qp = NULL;
        } else {
            answer = "error: no such command";
        }
        say("%s", answer);
    }
    return 0;
}
