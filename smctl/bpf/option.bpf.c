// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The SMC option of TCP, for sockets that ask for it.
//
// SMC-R begins with a TCP option (RFC 7609, appendix A.1), by which both ends say in SYN and SYN-ACK
// that they can go on with SMC. Only the kernel writes TCP options, so these programs do it, attached
// to a control group by `smctl enable`:
//
//   xsmc_setsockopt   handles setsockopt(fd, SOL_XSMC, XSMC_OPT_WANT, &u32): marks a socket before
//                     it connects or listens.
//   xsmc_handshake    writes the option into the SYN of a marked socket, and into the SYN-ACKs of a
//                     marked listener to clients that sent it; notes whether the peer sent it.
//   xsmc_getsockopt   answers getsockopt(fd, SOL_XSMC, XSMC_OPT_STATE, &u32).
//
// The mark lives in socket-local storage. The kernel is told to call for header options only on
// marked sockets, and only until their handshake is over. Sockets without a mark are left alone.
//
// The rule that everything here serves: once both ends saw the option, the first bytes in each
// direction must be SMC's. So either both ends of a connection report "the peer sent it" or neither
// does, whatever gets lost, is sent again or takes an unusual path.
//
// Linux 5.15 or later. Numbers that programs use are those of smc-core/src/negotiate/option.rs.

#include <linux/bpf.h>

// ---- What helpers and maps look like (kernel ABI) ----------------------------------------------

#define INLINE inline __attribute__((always_inline))
#define SEC(name) __attribute__((section(name), used))
#define INTEGER(name, value) int(*name)[value]
#define TYPE(name, type) type *name

static void *(*const map_lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*const map_update)(void *map, const void *key, const void *value, __u64 flags) =
	(void *)BPF_FUNC_map_update_elem;
static long (*const map_delete)(void *map, const void *key) = (void *)BPF_FUNC_map_delete_elem;
static void *(*const storage_get)(void *map, struct bpf_sock *sk, void *initial, __u64 flags) =
	(void *)BPF_FUNC_sk_storage_get;
static __u64 (*const socket_cookie)(void *ctx) = (void *)BPF_FUNC_get_socket_cookie;
static __u64 (*const nanoseconds)(void) = (void *)BPF_FUNC_ktime_get_ns;
static __u64 (*const netns_cookie)(void *ctx) = (void *)BPF_FUNC_get_netns_cookie;
static long (*const set_callbacks)(struct bpf_sock_ops *ops, int flags) =
	(void *)BPF_FUNC_sock_ops_cb_flags_set;
static long (*const kernel_getsockopt)(void *ctx, int level, int name, void *value, int len) =
	(void *)BPF_FUNC_getsockopt;
static long (*const kernel_setsockopt)(void *ctx, int level, int name, void *value, int len) =
	(void *)BPF_FUNC_setsockopt;
static long (*const load_option)(struct bpf_sock_ops *ops, void *option, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_load_hdr_opt;
static long (*const store_option)(struct bpf_sock_ops *ops, const void *option, __u32 len,
				  __u64 flags) = (void *)BPF_FUNC_store_hdr_opt;
static long (*const reserve_option)(struct bpf_sock_ops *ops, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_reserve_hdr_opt;

// ---- Numbers -----------------------------------------------------------------------------------

#define SOL_XSMC 0x58534d43 // "XSMC": far from every level of the kernel
#define XSMC_OPT_WANT 1
#define XSMC_OPT_STATE 2

#define STATE_WANTED 1u // bits of XSMC_OPT_STATE
#define STATE_PEER 2u

// From linux/in.h, linux/tcp.h and the TCP header; their headers bring in more than this target has.
#define SOL_TCP 6
#define TCP_SAVE_SYN 27
#define FLAG_SYN 0x02
#define FLAG_ACK 0x10

// The smallest page size. Of longer option values the programs see only a part.
#define PAGE 4096

// ---- Maps --------------------------------------------------------------------------------------

enum {
	WANTED = STATE_WANTED,
	PEER = STATE_PEER,
	// A SYN of this socket carried the option; a listener: its SYN-ACKs may.
	OFFERS = 4,
	// There is room for the option in the SYN that is being made.
	ROOM = 8,
	// The call-back for header options was switched on by us, not by another program.
	CALLED = 16,
	// Of a listener: it saves SYNs because we had it do so.
	SAVES = 32,
};

struct mark {
	__u32 flags;
};

// Marks, by socket. A listener's is copied to the sockets of its connections.
struct {
	INTEGER(type, BPF_MAP_TYPE_SK_STORAGE);
	INTEGER(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	TYPE(key, int);
	TYPE(value, struct mark);
} xsmc_marks SEC(".maps");

struct place {
	__u64 netns;
	__u32 port;
	__u32 zero;
};

// Where marked sockets listen, or once did, and until when (ns of the boot clock) one of them is new.
// While a SYN-ACK is made, the listener can't be seen; should another program have switched on the
// call-back for all sockets, this keeps the option out of the SYN-ACKs of other listeners.
struct {
	INTEGER(type, BPF_MAP_TYPE_LRU_HASH);
	INTEGER(max_entries, 16384);
	TYPE(key, struct place);
	TYPE(value, __u64);
} xsmc_listening SEC(".maps");

// Connection requests (by cookie, which the accepted socket inherits) whose SYN had the option, but
// whose SYN-ACK has not.
struct {
	INTEGER(type, BPF_MAP_TYPE_LRU_HASH);
	INTEGER(max_entries, 1024);
	TYPE(key, __u64);
	TYPE(value, __u32);
} xsmc_refused SEC(".maps");

// Those that a new listener answered with the option. See `listening`.
struct {
	INTEGER(type, BPF_MAP_TYPE_LRU_HASH);
	INTEGER(max_entries, 4096);
	TYPE(key, __u64);
	TYPE(value, __u32);
} xsmc_answered SEC(".maps");

// How long a listener counts as new: far longer than the kernel takes for one SYN.
#define NEW_NS 10000000000ull

static INLINE struct mark *mark_of(struct bpf_sock *sk)
{
	return sk ? storage_get(&xsmc_marks, sk, 0, 0) : 0;
}

// ---- The option --------------------------------------------------------------------------------

// Kind 254 (shared experiment, RFC 6994), length, and "SMCR" in EBCDIC.
static const __u8 OPTION[6] = {254, 6, 0xe2, 0xd4, 0xc3, 0xd9};

// Whether a TCP header has the option: that of the packet at hand (flags 0), or of the SYN. Like
// Linux's own SMC, takes every even length from 6 on.
static INLINE int has_option(struct bpf_sock_ops *ops, __u64 flags)
{
	__u8 found[40] = {254, 6, 0xe2, 0xd4, 0xc3, 0xd9};
	long len = load_option(ops, found, sizeof(found), flags);

	return len >= (long)sizeof(OPTION) && len % 2 == 0;
}

static INLINE void call_us(struct bpf_sock_ops *ops, struct mark *mark)
{
	__u32 on = ops->bpf_sock_ops_cb_flags;

	if (on & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG)
		return;
	if (set_callbacks(ops, on | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG) == 0)
		mark->flags |= CALLED;
}

static INLINE void leave_us(struct bpf_sock_ops *ops, struct mark *mark)
{
	if (mark->flags & CALLED)
		set_callbacks(ops, ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	mark->flags &= ~CALLED;
}

// ---- The handshake -----------------------------------------------------------------------------

static INLINE struct place place_of(struct bpf_sock_ops *ops)
{
	struct place place = {.netns = netns_cookie(ops), .port = ops->local_port};

	return place;
}

static INLINE void connecting(struct bpf_sock_ops *ops)
{
	struct mark *mark = mark_of(ops->sk);

	if (!mark)
		return;
	mark->flags &= ~(OFFERS | PEER | SAVES);
	call_us(ops, mark);
}

// A socket begins to listen, and SYNs may come already: the kernel tells us after the fact, and SYNs
// take no lock of the listener. Those that came before the call-back was on are answered without the
// option. What tells them from the others when their connections are accepted is that they weren't
// saved, so SYNs are saved only once the call-back is on. That leaves those whose turn to be saved
// had passed, but not that to be answered. For as long as that may be, answers are noted.
static INLINE void listening(struct bpf_sock_ops *ops)
{
	struct mark *mark = mark_of(ops->sk);
	__u64 until = nanoseconds() + NEW_NS;
	struct place place;
	int saves = 0, one = 1;

	if (!mark)
		return;
	place = place_of(ops);
	// It has listened before. Nothing was switched off in between.
	if ((mark->flags & (SAVES | OFFERS)) == (SAVES | OFFERS)) {
		map_update(&xsmc_listening, &place, &until, BPF_ANY);
		return;
	}
	mark->flags &= ~(OFFERS | PEER);
	leave_us(ops, mark);
	// SYNs that the program has saved itself prove nothing.
	kernel_getsockopt(ops, SOL_TCP, TCP_SAVE_SYN, &saves, sizeof(saves));
	if (saves || map_update(&xsmc_listening, &place, &until, BPF_ANY))
		return;
	mark->flags |= OFFERS | SAVES;
	call_us(ops, mark);
	// This only sets a number, which can't fail.
	kernel_setsockopt(ops, SOL_TCP, TCP_SAVE_SYN, &one, sizeof(one));
}

static INLINE int note(void *map, __u64 request)
{
	__u32 one = 1;

	return map_update(map, &request, &one, BPF_ANY) == 0;
}

static INLINE void refuse(__u64 request)
{
	map_delete(&xsmc_answered, &request);
	note(&xsmc_refused, request);
}

// Whether the SYN-ACK that is being made for a listener answers an offer that hasn't been refused.
static INLINE int answers(struct bpf_sock_ops *ops, __u64 request)
{
	// A SYN cookie has no place to keep that the option was there.
	return ops->args[0] != BPF_WRITE_HDR_TCP_SYNACK_COOKIE &&
	       (map_lookup(&xsmc_answered, &request) ||
		has_option(ops, BPF_LOAD_HDR_OPT_TCP_SYN)) &&
	       !map_lookup(&xsmc_refused, &request);
}

static INLINE void measure_answer(struct bpf_sock_ops *ops)
{
	struct place place = place_of(ops);
	__u64 request = socket_cookie(ops), *until;

	if (!answers(ops, request))
		return;
	until = map_lookup(&xsmc_listening, &place);
	if (!until || (*until > nanoseconds() && !note(&xsmc_answered, request)) ||
	    reserve_option(ops, sizeof(OPTION), 0))
		refuse(request);
}

static INLINE void write_answer(struct bpf_sock_ops *ops)
{
	__u64 request = socket_cookie(ops);

	if (answers(ops, request) && store_option(ops, OPTION, sizeof(OPTION), 0))
		refuse(request);
}

// Before a header is written: how much room we need.
static INLINE void measure(struct bpf_sock_ops *ops)
{
	__u32 kind = ops->skb_tcp_flags & (FLAG_SYN | FLAG_ACK);
	struct mark *mark;

	if (!ops->is_fullsock) {
		if (kind == (FLAG_SYN | FLAG_ACK))
			measure_answer(ops);
		return;
	}
	// A full socket sends a SYN-ACK when both ends connect to each other at once. There is no
	// listener and no saved SYN then, and this end couldn't tell what the other one sent.
	if (kind != FLAG_SYN)
		return;
	mark = mark_of(ops->sk);
	if (!mark)
		return;
	mark->flags &= ~ROOM;
	// Fast Open: bytes of the program travel in the SYN (or in an earlier SYN, now lost), so SMC's
	// can't be the first.
	if (ops->skb_len || ops->data_segs_out)
		return;
	if (reserve_option(ops, sizeof(OPTION), 0) == 0)
		mark->flags |= ROOM;
}

static INLINE void write(struct bpf_sock_ops *ops)
{
	__u32 kind = ops->skb_tcp_flags & (FLAG_SYN | FLAG_ACK);
	struct mark *mark;

	if (!ops->is_fullsock) {
		if (kind == (FLAG_SYN | FLAG_ACK))
			write_answer(ops);
		return;
	}
	mark = mark_of(ops->sk);
	if (kind == FLAG_SYN && mark && mark->flags & ROOM &&
	    store_option(ops, OPTION, sizeof(OPTION), 0) == 0)
		mark->flags |= OFFERS;
}

static INLINE void connected(struct bpf_sock_ops *ops)
{
	struct mark *mark = mark_of(ops->sk);

	if (!mark)
		return;
	leave_us(ops, mark);
	if (mark->flags & OFFERS && !ops->data_segs_out && has_option(ops, 0))
		mark->flags |= PEER;
}

static INLINE void accepted(struct bpf_sock_ops *ops)
{
	struct mark *mark = mark_of(ops->sk);
	__u64 request;

	if (!mark)
		return;
	leave_us(ops, mark);
	mark->flags &= ~SAVES; // the listener's
	// With Fast Open the connection is there as soon as the SYN is. Its SYN-ACK comes after this, and
	// is without the option.
	if (!(mark->flags & OFFERS) || ops->skb_tcp_flags & FLAG_SYN)
		return;
	request = socket_cookie(ops);
	if (map_delete(&xsmc_refused, &request) == 0)
		return;
	if (map_delete(&xsmc_answered, &request) == 0 ||
	    has_option(ops, BPF_LOAD_HDR_OPT_TCP_SYN))
		mark->flags |= PEER;
}

SEC("sockops")
int xsmc_handshake(struct bpf_sock_ops *ops)
{
	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		connecting(ops);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		listening(ops);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		measure(ops);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		write(ops);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		connected(ops);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		accepted(ops);
		break;
	}
	return 1;
}

// ---- The socket options ------------------------------------------------------------------------

static INLINE int is_tcp(struct bpf_sock *sk)
{
	return sk->protocol == 6 && (sk->family == 2 || sk->family == 10); // IPPROTO_TCP, AF_INET, AF_INET6
}

SEC("cgroup/setsockopt")
int xsmc_setsockopt(struct bpf_sockopt *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct mark none = {}, *mark;
	__u32 *want = ctx->optval;

	if (ctx->level != SOL_XSMC || ctx->optname != XSMC_OPT_WANT || !is_tcp(sk)) {
		// Not ours. Of a value longer than a page we got only the beginning; unless told so, the
		// kernel would use just that.
		if (ctx->optlen > PAGE)
			ctx->optlen = 0;
		return 1;
	}
	// The same programs, attached to a control group further down, were here before.
	if (ctx->optlen == -1)
		return 1;
	// 0 makes it EPERM.
	if (ctx->optlen != sizeof(*want) || (void *)(want + 1) > ctx->optval_end ||
	    *want != 1 || sk->state != BPF_TCP_CLOSE)
		return 0;
	mark = storage_get(&xsmc_marks, sk, &none, BPF_SK_STORAGE_GET_F_CREATE);
	if (!mark)
		return 0;
	mark->flags |= WANTED;
	ctx->optlen = -1; // done: not for the kernel
	return 1;
}

SEC("cgroup/getsockopt")
int xsmc_getsockopt(struct bpf_sockopt *ctx)
{
	__u32 *state = ctx->optval;
	struct mark *mark;

	if (ctx->level != SOL_XSMC || ctx->optname != XSMC_OPT_STATE || !is_tcp(ctx->sk) ||
	    (void *)(state + 1) > ctx->optval_end) {
		// Not ours: the program keeps what the kernel gave it. Of a value longer than a page we
		// got only the beginning, and of a failed call nothing.
		if (ctx->optlen > PAGE || ctx->retval)
			ctx->optlen = 0;
		return 1;
	}
	// As in xsmc_setsockopt.
	if (!ctx->retval)
		return 1;
	mark = mark_of(ctx->sk);
	*state = mark ? mark->flags & (STATE_WANTED | STATE_PEER) : 0;
	// One by one: the verifier refuses the single store that the compiler would make of the two.
	*(volatile __s32 *)&ctx->optlen = sizeof(*state);
	*(volatile __s32 *)&ctx->retval = 0;
	return 1;
}

// Which terms the helpers are used under; none of them needs the GPL.
SEC("license") const char LICENSE[] = "Dual MIT/GPL";
