/*
 * untouched: what a read or write costs on file descriptors that xsmc has no interest in.
 *
 *   untouched [--sockets] [--batches N] [--calls N]
 *
 * Writes a byte to a pipe and reads it back, in batches (default 100) of --calls calls (default
 * 20000), alternately through the symbols `read` and `write` as the program is linked (with
 * libxsmc.so preloaded: through its hooks) and straight through libc's functions, found in libc by
 * dlsym, which are never interposed. --sockets first opens a TCP connection to itself and sends
 * some bytes there, so that tracked descriptors exist. Prints one JSON object: for each way the
 * smallest and the median batch, in nanoseconds a call; and "extra_ns", the median over pairs of
 * batches of their difference.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef ssize_t (*read_fn)(int, void *, size_t);
typedef ssize_t (*write_fn)(int, const void *, size_t);

#define MAX_BATCHES 10000

static double linked[MAX_BATCHES], direct[MAX_BATCHES], extra[MAX_BATCHES];

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Nanoseconds a call. Not inlined: both ways run the very same instructions. */
static __attribute__((noinline)) double batch(read_fn rd, write_fn wr, const int fds[2], long calls)
{
	char byte = 'x';
	uint64_t start = now_ns();

	for (long i = 0; i < calls; i += 2) {
		if (wr(fds[1], &byte, 1) != 1)
			fail("write");
		if (rd(fds[0], &byte, 1) != 1)
			fail("read");
	}
	return (double)(now_ns() - start) / (double)calls;
}

static void open_sockets(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	socklen_t len = sizeof a;
	int l, c, s;
	char buf[64] = "hello";

	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	l = socket(AF_INET, SOCK_STREAM, 0);
	if (l < 0 || bind(l, (struct sockaddr *)&a, len) || listen(l, 1) ||
	    getsockname(l, (struct sockaddr *)&a, &len))
		fail("listening socket");
	c = socket(AF_INET, SOCK_STREAM, 0);
	if (c < 0 || connect(c, (struct sockaddr *)&a, len))
		fail("connect");
	s = accept(l, NULL, NULL);
	if (s < 0)
		fail("accept");
	for (int i = 0; i < 100; i++) {
		if (send(c, buf, sizeof buf, 0) != sizeof buf ||
		    recv(s, buf, sizeof buf, MSG_WAITALL) != sizeof buf ||
		    send(s, buf, sizeof buf, 0) != sizeof buf ||
		    recv(c, buf, sizeof buf, MSG_WAITALL) != sizeof buf)
			fail("send and recv");
	}
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	long batches = 100, calls = 20000;
	int sockets = 0, fds[2];
	void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
	read_fn libc_read;
	write_fn libc_write;

	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--sockets"))
			sockets = 1;
		else if (!strcmp(argv[i], "--batches") && i + 1 < argc)
			batches = atol(argv[++i]);
		else if (!strcmp(argv[i], "--calls") && i + 1 < argc)
			calls = atol(argv[++i]);
		else
			batches = 0;
	}
	if (batches < 1 || batches > MAX_BATCHES || calls < 2 || calls % 2) {
		fputs("usage: untouched [--sockets] [--batches N] [--calls EVEN]\n", stderr);
		return 1;
	}
	if (!libc) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	libc_read = (read_fn)dlsym(libc, "read");
	libc_write = (write_fn)dlsym(libc, "write");
	if (!libc_read || !libc_write) {
		fprintf(stderr, "libc has no read or write\n");
		return 1;
	}
	if (sockets)
		open_sockets();
	if (pipe(fds))
		fail("pipe");
	batch(read, write, fds, calls);
	batch(libc_read, libc_write, fds, calls);
	for (long i = 0; i < batches; i++) {
		/* Which way goes first alternates, so that neither gains by its place. */
		if (i % 2) {
			linked[i] = batch(read, write, fds, calls);
			direct[i] = batch(libc_read, libc_write, fds, calls);
		} else {
			direct[i] = batch(libc_read, libc_write, fds, calls);
			linked[i] = batch(read, write, fds, calls);
		}
		extra[i] = linked[i] - direct[i];
	}
	qsort(linked, (size_t)batches, sizeof *linked, by_value);
	qsort(direct, (size_t)batches, sizeof *direct, by_value);
	qsort(extra, (size_t)batches, sizeof *extra, by_value);
	printf("{\"interposed\": %s, \"calls\": %ld, \"min_ns\": %.2f, \"median_ns\": %.2f, "
	       "\"libc_min_ns\": %.2f, \"libc_median_ns\": %.2f, \"extra_ns\": %.2f}\n",
	       (read_fn)dlsym(RTLD_DEFAULT, "read") == libc_read ? "false" : "true", batches * calls,
	       linked[0], linked[batches / 2], direct[0], direct[batches / 2], extra[batches / 2]);
	return 0;
}
