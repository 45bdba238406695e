/* A server that confines itself by a seccomp filter in the middle of a conversation: whatever it does then but read, write, wait
   and end kills it. `confined server MODE` and `confined client PORT`; MODE is one of
     prctl    by prctl(2), blocking calls
     all      by seccomp(2), for all threads, as libseccomp does it
     epoll    by prctl(2), waiting in an epoll set made before
     fork     in a forked child, which has inherited the connection, as sshd does */
#include "peer.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define ALLOW(name)                                                                                                    \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void confine(int all_threads)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(read), ALLOW(write), ALLOW(recvfrom), ALLOW(sendto), ALLOW(epoll_wait), ALLOW(close), ALLOW(exit),
        ALLOW(exit_group), ALLOW(newfstatat), ALLOW(fstat),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (all_threads)
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
    else
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0);
}

/* Sends back what comes, up to `limit` bytes or the end. */
static size_t echo(int fd, int set, size_t limit)
{
    static char data[50000];
    size_t total = 0;
    while (total < limit) {
        struct epoll_event event;
        if (set >= 0)
            CHECK(epoll_wait(set, &event, 1, -1) == 1 && event.data.u64 == 77);
        size_t most = limit - total < sizeof data ? limit - total : sizeof data;
        ssize_t n = read(fd, data, most);
        CHECK(n >= 0);
        if (n == 0)
            break;
        send_fully(fd, data, (size_t)n);
        total += (size_t)n;
    }
    return total;
}

int main(int argc, char **argv)
{
    static unsigned char data[40000], back[40000];
    int is_server;
    const char *mode = argc > 2 ? argv[2] : "";
    int fd = peer_open(argc, argv, &is_server);
    if (is_server) {
        int set = -1;
        if (!strcmp(mode, "epoll")) {
            struct epoll_event event = {.events = EPOLLIN, .data.u64 = 77};
            set = epoll_create1(0);
            CHECK(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
        }
        echo(fd, set, 200);
        pid_t child = strcmp(mode, "fork") ? 0 : fork();
        if (child == 0) {
            confine(!strcmp(mode, "all"));
            CHECK(echo(fd, set, SIZE_MAX) == 100 * sizeof data);
            CHECK(write(1, "ok\n", 3) == 3);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        return 0;
    }
    for (int i = 0; i < 200; i++) {
        char byte = (char)i;
        usleep(1000);
        send_fully(fd, &byte, 1);
        recv_fully(fd, &byte, 1);
        CHECK(byte == (char)i);
    }
    for (uint64_t i = 0; i < 100; i++) {
        peer_fill(data, sizeof data, i * sizeof data);
        send_fully(fd, data, sizeof data);
        recv_fully(fd, back, sizeof back);
        CHECK(!memcmp(data, back, sizeof data));
    }
    CHECK(shutdown(fd, SHUT_WR) == 0 && recv(fd, back, 1, 0) == 0);
    puts("ok");
    return 0;
}
