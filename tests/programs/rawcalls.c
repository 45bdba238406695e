/* One connection used by syscall(2), by functions taken from libc.so.6 itself, and by ordinary calls, in turn. */
#include "peer.h"
#include <dlfcn.h>
#include <sys/syscall.h>
#include <sys/uio.h>

static ssize_t (*libc_send)(int, const void *, size_t, int), (*libc_recv)(int, void *, size_t, int);
static ssize_t (*libc_write)(int, const void *, size_t), (*libc_read)(int, void *, size_t);

static ssize_t send_somehow(int how, int fd, const void *data, size_t size)
{
    switch (how) {
    case 0: return syscall(SYS_write, fd, data, size);
    case 1: return syscall(SYS_sendto, fd, data, size, MSG_NOSIGNAL, NULL, 0);
    case 2: return libc_send(fd, data, size, MSG_NOSIGNAL);
    case 3: return libc_write(fd, data, size);
    case 4: return write(fd, data, size);
    default: return send(fd, data, size, MSG_NOSIGNAL);
    }
}

static ssize_t recv_somehow(int how, int fd, void *data, size_t size)
{
    switch (how) {
    case 0: return syscall(SYS_read, fd, data, size);
    case 1: return syscall(SYS_recvfrom, fd, data, size, 0, NULL, NULL);
    case 2: return libc_recv(fd, data, size, 0);
    case 3: return libc_read(fd, data, size);
    case 4: return read(fd, data, size);
    default: return recv(fd, data, size, 0);
    }
}

static int choose(int first, uint64_t at)
{
    return first + (int)(peer_mix(at) % (uint64_t)(6 - first));
}

/* Sends by the calls number first_out..5, receives by the calls number first_in..5. */
static void exchange(int fd, int is_server, int first_out, int first_in, int rounds, uint64_t *sent, uint64_t *received)
{
    static unsigned char out[20000], in[20000], want[20000];
    for (int i = 0; i < rounds; i++) {
        size_t size = 1 + peer_mix((uint64_t)i) % 9000;
        for (int turn = 0; turn < 2; turn++) {
            if (turn == is_server) {
                peer_fill(out, size, *sent);
                for (size_t done = 0; done < size;) {
                    ssize_t n = send_somehow(choose(first_out, *sent + done), fd, out + done, size - done);
                    CHECK(n > 0);
                    done += (size_t)n;
                }
                *sent += size;
            } else {
                peer_fill(want, size, *received);
                for (size_t done = 0; done < size;) {
                    ssize_t n = recv_somehow(choose(first_in, *received + done + 1), fd, in + done, size - done);
                    CHECK(n > 0);
                    done += (size_t)n;
                }
                CHECK(memcmp(in, want, size) == 0);
                *received += size;
            }
        }
    }
}

int main(int argc, char **argv)
{
    int is_server, fd = peer_open(argc, argv, &is_server);
    void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
    CHECK(libc != NULL);
    *(void **)&libc_send = dlsym(libc, "send");
    *(void **)&libc_recv = dlsym(libc, "recv");
    *(void **)&libc_write = dlsym(libc, "write");
    *(void **)&libc_read = dlsym(libc, "read");
    CHECK(libc_send && libc_recv && libc_write && libc_read);
    uint64_t sent = 0, received = 0;
    /* Mixed from the start: this connection must be left alone. */
    exchange(fd, is_server, 0, 0, 500, &sent, &received);
    CHECK(shutdown(fd, SHUT_WR) == 0);
    char byte;
    CHECK(recv(fd, &byte, 1, 0) == 0);
    close(fd);
    /* Ordinary at first, so that it may be upgraded; then sent to by raw calls behind the library's back. */
    if (argc > 2 || is_server) {
        int port = 0;
        if (is_server) {
            int listener = peer_listen(&port);
            FILE *file = fopen(".rawcalls-port", "w");
            CHECK(file && fprintf(file, "%d\n", port) > 0 && fclose(file) == 0);
            CHECK(rename(".rawcalls-port", "rawcalls-port") == 0);
            fd = peer_accept(listener);
            close(listener);
        } else {
            FILE *file = NULL;
            for (int i = 0; i < 500 && !(file = fopen("rawcalls-port", "r")); i++)
                usleep(10000);
            CHECK(file && fscanf(file, "%d", &port) == 1);
            fclose(file);
            fd = peer_connect(port);
        }
    }
    peer_warm(fd, is_server);
    sent = received = 0;
    exchange(fd, is_server, 4, 4, 100, &sent, &received);
    /* What is sent behind the library's back arrives after what was sent before it. */
    exchange(fd, is_server, 0, 4, 300, &sent, &received);
    CHECK(shutdown(fd, SHUT_WR) == 0);
    CHECK(recv(fd, &byte, 1, 0) == 0);
    puts("ok");
    return 0;
}
