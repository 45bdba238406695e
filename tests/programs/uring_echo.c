/* An echo server by liburing: accept, receive and send are requests in rings, which only the kernel sees. `uring_echo N` serves N
   connections and prints "port N". Exit status 77: no io_uring here. */
#include "peer.h"
#include <liburing.h>

enum { ACCEPT, RECV, SEND };

struct conn {
    int fd, doing;
    unsigned have, done;
    char data[32768];
};

static struct io_uring ring;

static struct io_uring_sqe *entry(void *data)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
    if (!sqe) {
        CHECK(io_uring_submit(&ring) >= 0);
        CHECK((sqe = io_uring_get_sqe(&ring)));
    }
    io_uring_sqe_set_data(sqe, data);
    return sqe;
}

static void receive(struct conn *c)
{
    struct io_uring_sqe *sqe = entry(c);
    io_uring_prep_recv(sqe, c->fd, c->data, sizeof c->data, 0);
    io_uring_sqe_set_data(sqe, c);
    c->doing = RECV;
}

static void answer(struct conn *c)
{
    struct io_uring_sqe *sqe = entry(c);
    io_uring_prep_send(sqe, c->fd, c->data + c->done, c->have - c->done, MSG_NOSIGNAL);
    io_uring_sqe_set_data(sqe, c);
    c->doing = SEND;
}

static void take(int listener, struct conn *c)
{
    struct io_uring_sqe *sqe = entry(c);
    io_uring_prep_accept(sqe, listener, NULL, NULL, 0);
    io_uring_sqe_set_data(sqe, c);
}

int main(int argc, char **argv)
{
    int port, left = argc > 1 ? atoi(argv[1]) : 1, open = 0;
    int status = io_uring_queue_init(64, &ring, 0);
    if (status < 0) {
        printf("no io_uring here: %s\n", strerror(-status));
        return 77;
    }
    int listener = peer_listen(&port);
    static struct conn acceptor = {.doing = ACCEPT};
    printf("port %d\n", port);
    fflush(stdout);
    take(listener, &acceptor);
    while (left > 0 || open > 0) {
        struct io_uring_cqe *cqe;
        CHECK(io_uring_submit_and_wait(&ring, 1) >= 0);
        if (io_uring_wait_cqe(&ring, &cqe) < 0)
            continue;
        struct conn *c = io_uring_cqe_get_data(cqe);
        int result = cqe->res;
        io_uring_cqe_seen(&ring, cqe);
        switch (c->doing) {
        case ACCEPT:
            CHECK(result >= 0);
            struct conn *fresh = calloc(1, sizeof *fresh);
            CHECK(fresh);
            fresh->fd = result;
            open++;
            receive(fresh);
            if (--left > 0)
                take(listener, c);
            break;
        case RECV:
            if (result <= 0) {
                close(c->fd);
                free(c);
                open--;
                break;
            }
            c->have = (unsigned)result, c->done = 0;
            answer(c);
            break;
        case SEND:
            CHECK(result > 0);
            c->done += (unsigned)result;
            if (c->done < c->have)
                answer(c);
            else
                receive(c);
        }
    }
    return 0;
}
