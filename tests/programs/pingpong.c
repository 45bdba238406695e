/*
 * pingpong: echo server and ping-pong client over TCP, by the plain sockets API.
 *
 *   pingpong server [--epoll] [--port N] [--size BYTES] [--once]
 *   pingpong client [--epoll] --port N [--size BYTES] [--count N] [--warmup N] [--seconds S] [--verify]
 *
 * The server prints {"port": N} when it listens (--port 0, the default, takes a free one), and sends
 * every complete message of --size bytes back. Without --epoll its sockets block and it serves one
 * connection after the other; with it, all of them at once. --once ends it after the first
 * connection's end. The client sends a message, waits for its return, and repeats this --count
 * times, or for --seconds seconds if that ends before. It prints one JSON object: p50, p99, mean,
 * min and max of the round trips in nanoseconds, how many there were, and their rate a second. The
 * first --warmup round trips are not counted. The first bytes of each message hold its number and
 * are always compared; --verify compares all of it.
 *
 * Exit status: 0, 1 for a failed call or bad usage, 2 if a message came back changed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static bool use_epoll, once, verify;
static int port;
static size_t size = 64;
static uint64_t count = 200000, warmup = 20000;
static double seconds;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void usage(void)
{
	fputs("usage: pingpong server [--epoll] [--port N] [--size BYTES] [--once]\n"
	      "       pingpong client [--epoll] --port N [--size BYTES] [--count N] [--warmup N]\n"
	      "                       [--seconds S] [--verify]\n", stderr);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *allocate(size_t bytes)
{
	void *p = calloc(1, bytes ? bytes : 1);

	if (!p)
		fail("calloc");
	return p;
}

static void set_nodelay(int fd)
{
	int one = 1;

	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one))
		fail("setsockopt TCP_NODELAY");
}

static void set_nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK))
		fail("fcntl O_NONBLOCK");
}

static void watch(int ep, int op, int fd, uint32_t events, void *ptr)
{
	struct epoll_event ev = { .events = events, .data.ptr = ptr };

	if (epoll_ctl(ep, op, fd, &ev))
		fail("epoll_ctl");
}

/* Reads a whole message from a blocking socket; false at the stream's end between two messages. */
static bool read_message(int fd, char *buf)
{
	size_t have = 0;

	while (have < size) {
		ssize_t n = read(fd, buf + have, size - have);

		if (n > 0) {
			have += (size_t)n;
		} else if (n == 0) {
			if (have) {
				fputs("the stream ended inside a message\n", stderr);
				exit(1);
			}
			return false;
		} else if (errno != EINTR) {
			fail("read");
		}
	}
	return true;
}

static void write_message(int fd, const char *buf)
{
	size_t done = 0;

	while (done < size) {
		ssize_t n = write(fd, buf + done, size - done);

		if (n >= 0)
			done += (size_t)n;
		else if (errno != EINTR)
			fail("write");
	}
}

/* One connection of the epoll server: the message being received, or being sent back. */
struct conn {
	int fd;
	bool sending;
	size_t done;
	char *buf;
};

/* Goes on until the socket would block; false when the connection is over. */
static bool serve(int ep, struct conn *c)
{
	for (;;) {
		ssize_t n;

		if (c->sending)
			n = write(c->fd, c->buf + c->done, size - c->done);
		else
			n = read(c->fd, c->buf + c->done, size - c->done);
		if (n < 0 && errno == EAGAIN)
			return true;
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return false;
		c->done += (size_t)n;
		if (c->done < size) {
			if (!c->sending)
				continue;
			watch(ep, EPOLL_CTL_MOD, c->fd, EPOLLOUT, c);
			return true;
		}
		c->done = 0;
		c->sending = !c->sending;
		/* After a whole answer the peer has nothing more to say before it has read that. */
		if (!c->sending) {
			watch(ep, EPOLL_CTL_MOD, c->fd, EPOLLIN, c);
			return true;
		}
	}
}

static void serve_epoll(int listener)
{
	int ep = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event evs[64];

	if (ep < 0)
		fail("epoll_create1");
	set_nonblocking(listener);
	watch(ep, EPOLL_CTL_ADD, listener, EPOLLIN, NULL);
	for (;;) {
		int n = epoll_wait(ep, evs, 64, -1);

		if (n < 0 && errno != EINTR)
			fail("epoll_wait");
		for (int i = 0; i < n; i++) {
			struct conn *c = evs[i].data.ptr;

			if (!c) {
				int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

				if (fd < 0) {
					if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)
						continue;
					fail("accept4");
				}
				set_nodelay(fd);
				c = allocate(sizeof *c);
				c->fd = fd;
				c->buf = allocate(size);
				watch(ep, EPOLL_CTL_ADD, fd, EPOLLIN, c);
			} else if (!serve(ep, c)) {
				close(c->fd);
				free(c->buf);
				free(c);
				if (once)
					exit(0);
			}
		}
	}
}

static void serve_blocking(int listener)
{
	char *buf = allocate(size);

	for (;;) {
		int fd = accept(listener, NULL, NULL);

		if (fd < 0) {
			if (errno == EINTR || errno == ECONNABORTED)
				continue;
			fail("accept");
		}
		set_nodelay(fd);
		while (read_message(fd, buf))
			write_message(fd, buf);
		close(fd);
		if (once)
			exit(0);
	}
}

static void server(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	socklen_t len = sizeof a;
	int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (fd < 0)
		fail("socket");
	if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one))
		fail("setsockopt SO_REUSEADDR");
	if (bind(fd, (struct sockaddr *)&a, len))
		fail("bind");
	if (listen(fd, 128))
		fail("listen");
	if (getsockname(fd, (struct sockaddr *)&a, &len))
		fail("getsockname");
	printf("{\"port\": %d}\n", ntohs(a.sin_port));
	fflush(stdout);
	if (use_epoll)
		serve_epoll(fd);
	else
		serve_blocking(fd);
}

/* One round trip on a nonblocking socket that is in the epoll set ep. */
static void round_trip_epoll(int ep, int fd, char *out, char *in, bool *out_watched)
{
	size_t sent = 0, have = 0;
	struct epoll_event ev;

	for (;;) {
		while (sent < size) {
			ssize_t n = write(fd, out + sent, size - sent);

			if (n >= 0)
				sent += (size_t)n;
			else if (errno == EAGAIN)
				break;
			else if (errno != EINTR)
				fail("write");
		}
		if (*out_watched != (sent < size)) {
			*out_watched = sent < size;
			watch(ep, EPOLL_CTL_MOD, fd, *out_watched ? EPOLLIN | EPOLLOUT : EPOLLIN, NULL);
		}
		if (epoll_wait(ep, &ev, 1, -1) < 0) {
			if (errno == EINTR)
				continue;
			fail("epoll_wait");
		}
		while (have < size) {
			ssize_t n = read(fd, in + have, size - have);

			if (n > 0) {
				have += (size_t)n;
			} else if (n == 0) {
				fputs("the server closed the connection\n", stderr);
				exit(1);
			} else if (errno == EAGAIN) {
				break;
			} else if (errno != EINTR) {
				fail("read");
			}
		}
		if (have == size)
			return;
	}
}

static void check(const char *out, const char *in, size_t head)
{
	if (memcmp(out, in, verify ? size : head)) {
		fputs("a message came back changed\n", stderr);
		exit(2);
	}
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static void client(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	int ep = -1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char *out = allocate(size), *in = allocate(size);
	uint32_t *samples = allocate(count * sizeof *samples);
	size_t head = size < 8 ? size : 8;
	bool out_watched = false;
	uint64_t done = 0, sum = 0, start = 0, last = 0, stop = UINT64_MAX;

	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (fd < 0)
		fail("socket");
	if (connect(fd, (struct sockaddr *)&a, sizeof a))
		fail("connect");
	set_nodelay(fd);
	if (use_epoll) {
		ep = epoll_create1(EPOLL_CLOEXEC);
		if (ep < 0)
			fail("epoll_create1");
		set_nonblocking(fd);
		watch(ep, EPOLL_CTL_ADD, fd, EPOLLIN, NULL);
	}
	for (size_t i = 0; i < size; i++)
		out[i] = (char)(i * 31 + 7);
	/* Touch the sample array now, so that no page fault falls into a round trip. */
	memset(samples, 1, count * sizeof *samples);

	for (uint64_t i = 0; i < warmup + count; i++) {
		memcpy(out, &i, head);
		if (i == warmup) {
			start = last = now_ns();
			if (seconds > 0)
				stop = start + (uint64_t)(seconds * 1e9);
		}
		if (use_epoll) {
			round_trip_epoll(ep, fd, out, in, &out_watched);
		} else {
			write_message(fd, out);
			if (!read_message(fd, in)) {
				fputs("the server closed the connection\n", stderr);
				exit(1);
			}
		}
		check(out, in, head);
		if (i >= warmup) {
			uint64_t t = now_ns(), d = t - last;

			samples[done++] = d > UINT32_MAX ? UINT32_MAX : (uint32_t)d;
			sum += d;
			last = t;
			if (t >= stop)
				break;
		}
	}
	close(fd);
	qsort(samples, done, sizeof *samples, by_value);
	printf("{\"mode\": \"%s\", \"size\": %zu, \"count\": %llu, \"p50_ns\": %u, \"p99_ns\": %u, "
	       "\"mean_ns\": %.1f, \"min_ns\": %u, \"max_ns\": %u, \"per_second\": %.0f}\n",
	       use_epoll ? "epoll" : "blocking", size, (unsigned long long)done,
	       samples[done / 2], samples[done * 99 / 100], (double)sum / (double)done, samples[0],
	       samples[done - 1], (double)done * 1e9 / (double)(last - start));
}

static unsigned long long number(const char *s, unsigned long long max)
{
	char *end;
	unsigned long long v;

	errno = 0;
	v = strtoull(s, &end, 10);
	if (errno || end == s || *end || *s == '-' || v > max)
		usage();
	return v;
}

int main(int argc, char **argv)
{
	bool is_server;

	if (argc < 2)
		usage();
	is_server = !strcmp(argv[1], "server");
	if (!is_server && strcmp(argv[1], "client"))
		usage();
	for (int i = 2; i < argc; i++) {
		const char *o = argv[i], *v = i + 1 < argc ? argv[i + 1] : NULL;

		if (!strcmp(o, "--epoll")) {
			use_epoll = true;
			continue;
		} else if (!strcmp(o, "--once")) {
			once = true;
			continue;
		} else if (!strcmp(o, "--verify")) {
			verify = true;
			continue;
		}
		if (!v)
			usage();
		i++;
		if (!strcmp(o, "--port"))
			port = (int)number(v, 65535);
		else if (!strcmp(o, "--size"))
			size = number(v, 1u << 30);
		else if (!strcmp(o, "--count"))
			count = number(v, 100000000);
		else if (!strcmp(o, "--warmup"))
			warmup = number(v, 100000000);
		else if (!strcmp(o, "--seconds"))
			seconds = strtod(v, NULL);
		else
			usage();
	}
	if (!size || !count || (!is_server && !port))
		usage();
	if (is_server)
		server();
	else
		client();
	return 0;
}
