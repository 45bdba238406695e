/* A connection used through io_uring: SEND, POLL_ADD and RECV, 200 exchanges of 9 kB, then the end of the stream. With
   ONLY_WAITS only POLL_ADD is, and bytes are moved by the C library's functions. */
#include "peer.h"
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static int ring_fd;
static unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
static struct io_uring_sqe *sqes;
static struct io_uring_cqe *cqes;

static int one(unsigned char opcode, int fd, void *data, unsigned size, unsigned events)
{
    unsigned tail = *sq_tail, index = tail & *sq_mask;
    struct io_uring_sqe *entry = &sqes[index];
    memset(entry, 0, sizeof *entry);
    entry->opcode = opcode;
    entry->fd = fd;
    entry->addr = (uint64_t)(uintptr_t)data;
    entry->len = size;
    entry->poll32_events = events;
    if (opcode == IORING_OP_SEND)
        entry->msg_flags = MSG_NOSIGNAL;
    sq_array[index] = index;
    __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
    long done;
    do
        done = syscall(SYS_io_uring_enter, ring_fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    while (done < 0 && errno == EINTR);
    CHECK(done == 1);
    while (__atomic_load_n(cq_tail, __ATOMIC_ACQUIRE) == *cq_head)
        CHECK(syscall(SYS_io_uring_enter, ring_fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) >= 0);
    int result = cqes[*cq_head & *cq_mask].res;
    __atomic_store_n(cq_head, *cq_head + 1, __ATOMIC_RELEASE);
    return result;
}

#ifdef ONLY_WAITS
static int give(int fd, void *data, unsigned size)
{
    return (int)send(fd, data, size, MSG_NOSIGNAL);
}

static int take(int fd, void *data, unsigned size)
{
    return (int)recv(fd, data, size, 0);
}
#else
static int give(int fd, void *data, unsigned size)
{
    return one(IORING_OP_SEND, fd, data, size, 0);
}

static int take(int fd, void *data, unsigned size)
{
    return one(IORING_OP_RECV, fd, data, size, 0);
}
#endif

int main(int argc, char **argv)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    ring_fd = (int)syscall(SYS_io_uring_setup, 8, &params);
    if (ring_fd < 0) {
        printf("no io_uring here: %s\n", strerror(errno));
        return 77;
    }
    if (argc == 2 && !strcmp(argv[1], "try"))
        return 0;
    char *sq = mmap(NULL, params.sq_off.array + params.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                    ring_fd, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof *cqes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE, ring_fd, IORING_OFF_CQ_RING);
    sqes = mmap(NULL, params.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_fd,
                IORING_OFF_SQES);
    CHECK(sq != MAP_FAILED && cq != MAP_FAILED && sqes != MAP_FAILED);
    sq_tail = (unsigned *)(sq + params.sq_off.tail);
    sq_mask = (unsigned *)(sq + params.sq_off.ring_mask);
    sq_array = (unsigned *)(sq + params.sq_off.array);
    cq_head = (unsigned *)(cq + params.cq_off.head);
    cq_tail = (unsigned *)(cq + params.cq_off.tail);
    cq_mask = (unsigned *)(cq + params.cq_off.ring_mask);
    cqes = (struct io_uring_cqe *)(cq + params.cq_off.cqes);

    int is_server, fd = peer_open(argc, argv, &is_server);
#ifdef ONLY_WAITS
    CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
#endif
    static unsigned char data[9000], want[9000];
    uint64_t sent = 0, received = 0;
    for (int i = 0; i < 200; i++) {
        for (int turn = 0; turn < 2; turn++) {
            if (turn == is_server) {
                peer_fill(data, sizeof data, sent);
                for (unsigned done = 0; done < sizeof data;) {
                    int n = give(fd, data + done, (unsigned)sizeof data - done);
                    CHECK(n > 0);
                    done += (unsigned)n;
                }
                sent += sizeof data;
            } else {
                peer_fill(want, sizeof want, received);
                for (unsigned done = 0; done < sizeof data;) {
                    CHECK(one(IORING_OP_POLL_ADD, fd, NULL, 0, POLLIN) & POLLIN);
                    int n = take(fd, data + done, (unsigned)sizeof data - done);
                    CHECK(n > 0);
                    done += (unsigned)n;
                }
                CHECK(memcmp(data, want, sizeof data) == 0);
                received += sizeof data;
            }
        }
    }
    CHECK(shutdown(fd, SHUT_WR) == 0);
    CHECK(one(IORING_OP_POLL_ADD, fd, NULL, 0, POLLIN) & POLLIN);
    CHECK(take(fd, data, sizeof data) == 0);
    puts("ok");
    return 0;
}
