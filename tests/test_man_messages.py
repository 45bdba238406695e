"""What the manual pages of recv(2), send(2) and their relatives say, where bytes may be in a ring instead of the kernel."""

import ctypes
import signal
import socket
import struct
import time

from harness.behave import check
from harness.calls import *

MSG_FASTOPEN, MSG_CMSG_CLOEXEC, MSG_ERRQUEUE, MSG_EOR = 0x20000000, 0x40000000, 0x2000, 0x80


@check()
def test_zero_length_receive(t):
    """A recv of nothing looks at the connection as any other does, a read or readv of nothing does not: recv(2), read(2)."""
    c = t.pair()
    fd, b = c.fileno(), space(4)
    header = Msghdr(iov=vectors((None, 0)), iovlen=1)
    nowait = socket.MSG_DONTWAIT
    seen = [("recv, nothing there", said("recv", fd, b, SIZE(0), nowait), "EAGAIN"),
            ("recvmsg, nothing there", said("recvmsg", fd, ctypes.byref(header), nowait), "EAGAIN"),
            ("read, nothing there", said("read", fd, b, SIZE(0)), 0),
            ("readv, nothing there", said("readv", fd, vectors((None, 0)), 1), 0)]
    t.peer("c.sendall(b'x')")
    arrived(c, 1)
    seen += [("recv, a byte there", said("recv", fd, b, SIZE(0), nowait), 0),
             ("recvmsg, a byte there", said("recvmsg", fd, ctypes.byref(header), nowait), 0)]
    assert c.recv(1) == b"x"
    t.peer("c.close()")
    until(lambda: polled(c), 3, "the end")
    seen += [("recv at the end", said("recv", fd, b, SIZE(0), nowait), 0)]
    d = t.pair("d")
    t.peer("linger(d, 1, 0)\nd.close()")
    until(lambda: polled(d, 0), 3, "the reset")
    seen += [("recv after a reset", said("recv", d.fileno(), b, SIZE(0), nowait), "ECONNRESET")]
    differences(seen)


@check()
def test_zero_length_send(t):
    """After SHUT_WR sends of nothing say EPIPE, with SIGPIPE or without; a writev of nothing says 0: send(2), write(2)."""
    hits = []
    signal.signal(signal.SIGPIPE, lambda *_: hits.append(1))
    c = t.pair()
    fd, b = c.fileno(), space(4)
    header = Msghdr(iov=vectors((None, 0)), iovlen=1)
    many = (Mmsghdr * 1)(Mmsghdr(header))
    seen = [("send", said("send", fd, b, SIZE(0), 0), 0)]
    c.shutdown(socket.SHUT_WR)
    for what, want, signals, call in (
            ("send", "EPIPE", 1, lambda: said("send", fd, b, SIZE(0), 0)),
            ("send, no signal", "EPIPE", 0, lambda: said("send", fd, b, SIZE(0), socket.MSG_NOSIGNAL)),
            ("write", "EPIPE", 1, lambda: said("write", fd, b, SIZE(0))),
            ("sendmsg", "EPIPE", 1, lambda: said("sendmsg", fd, ctypes.byref(header), 0)),
            ("sendmmsg", "EPIPE", 0, lambda: said("sendmmsg", fd, many, 1, socket.MSG_NOSIGNAL)),
            ("writev", 0, 0, lambda: said("writev", fd, vectors((None, 0)), 1)),
            ("send of a byte", "EPIPE", 1, lambda: said("send", fd, b, SIZE(1), 0))):
        del hits[:]
        seen += [(what, (call(), len(hits)), (want, signals))]
    differences(seen)


@check()
def test_bad_buffers_of_receives(t):
    """EFAULT is for bytes that would go there, not for a call that finds none; MSG_TRUNC needs no buffer: recv(2), readv(2)."""
    c = t.pair()
    fd, nowait, peek = c.fileno(), socket.MSG_DONTWAIT, socket.MSG_PEEK
    high = 1 << 63

    def receive(*buffers, flags=0, call="recvmsg"):
        v = vectors(*buffers)
        if call == "readv":
            return said("readv", fd, v, len(buffers))
        return said("recvmsg", fd, ctypes.byref(Msghdr(iov=v, iovlen=len(buffers))), flags)
    b, two = space(4), space(2)
    seen = [("nothing there, recv", said("recv", fd, ctypes.c_void_p(BAD), SIZE(4), nowait), "EAGAIN"),
            ("nothing there, recvmsg", receive((BAD, 4), flags=nowait), "EAGAIN"),
            ("read of nothing", said("read", fd, ctypes.c_void_p(BAD), SIZE(0)), 0)]
    t.peer("c.sendall(b'abcd')")
    arrived(c, 4)
    seen += [("recv", said("recv", fd, ctypes.c_void_p(BAD), SIZE(4), 0), "EFAULT"),
             ("read", said("read", fd, ctypes.c_void_p(BAD), SIZE(4)), "EFAULT"),
             ("recvfrom", said("recvfrom", fd, ctypes.c_void_p(BAD), SIZE(4), 0, None, None), "EFAULT"),
             ("readv", receive((BAD, 4), call="readv"), "EFAULT"),
             ("second bad", receive(two, (BAD, 4), call="readv"), "EFAULT"),
             ("second bad, MSG_PEEK", receive(two, (BAD, 4), flags=peek), "EFAULT"),
             ("still there", ioctl_int(c, FIONREAD), 4),
             ("recv, MSG_TRUNC", said("recv", fd, None, SIZE(9), socket.MSG_TRUNC | peek), 4),
             ("recvmsg, MSG_TRUNC", receive((None, 9), flags=socket.MSG_TRUNC | peek), 4),
             ("second bad, but not reached", receive(b, (BAD, 4), flags=peek), 4),
             ("empty one bad", receive((BAD, 0), b, call="readv"), 4), ("bytes", b.raw, b"abcd")]
    t.peer("c.sendall(b'abcd')")
    arrived(c, 4)
    seen += [("recvmsg, MSG_TRUNC", receive((None, 9), flags=socket.MSG_TRUNC), 4), ("left", ioctl_int(c, FIONREAD), 0),
             ("bad list", said("readv", fd, ctypes.c_void_p(BAD), 1), "EFAULT"),
             ("too many", said("readv", fd, vectors(*[b] * 1025), 1025), "EINVAL"),
             ("less than none", said("readv", fd, vectors(b), -1), "EINVAL"),
             ("too many, recvmsg", receive(*[b] * 1025, flags=nowait), "EMSGSIZE"),
             ("negative length", receive(b, (ctypes.addressof(b), high), call="readv"), "EINVAL"),
             ("the kernel's address", receive(b, (high, 1), call="readv"), "EFAULT")]
    t.peer("c.close()")
    until(lambda: polled(c), 3, "the end")
    seen += [("end, recv", said("recv", fd, ctypes.c_void_p(BAD), SIZE(4), 0), 0), ("end, readv", receive((BAD, 4), call="readv"), 0),
             ("end, second bad", receive(two, (BAD, 4)), 0)]
    differences(seen)


@check()
def test_bad_buffers_of_sends(t):
    """EFAULT for what can't be read, with nothing sent, unless it is EAGAIN or EPIPE: send(2), writev(2)."""
    c, d = t.pair("c"), t.pair("d")
    fd, b = c.fileno(), space(2)

    def calls(sock):
        return [said("send", sock.fileno(), ctypes.c_void_p(BAD), SIZE(4), socket.MSG_NOSIGNAL),
                said("sendto", sock.fileno(), ctypes.c_void_p(BAD), SIZE(4), socket.MSG_NOSIGNAL, None, 0),
                said("sendmsg", sock.fileno(), ctypes.byref(Msghdr(iov=vectors(b, (BAD, 2)), iovlen=2)), socket.MSG_NOSIGNAL)]
    seen = [("sends", calls(c), ["EFAULT"] * 3),
            ("write", said("write", fd, ctypes.c_void_p(BAD), SIZE(4)), "EFAULT"),
            ("writev", said("writev", fd, vectors((BAD, 4)), 1), "EFAULT"),
            ("second bad", said("writev", fd, vectors(b, (BAD, 4)), 2), "EFAULT"),
            ("bad list", said("writev", fd, ctypes.c_void_p(BAD), 1), "EFAULT"),
            ("too many", said("writev", fd, vectors(*[b] * 1025), 1025), "EINVAL"),
            ("too many, sendmsg", said("sendmsg", fd, ctypes.byref(Msghdr(iov=vectors(*[b] * 1025), iovlen=1025)), 0), "EMSGSIZE"),
            ("send of nothing", said("send", fd, ctypes.c_void_p(BAD), SIZE(0), 0), 0)]
    c.shutdown(socket.SHUT_WR)
    seen += [("after SHUT_WR", calls(c), ["EPIPE"] * 3), ("sent", t.peer("recv_end(c)"), b"")]
    d.setblocking(False)
    fill(d, 0.2)
    seen += [("full", calls(d), ["EAGAIN"] * 3)]
    differences(seen)


@check()
def test_recvmsg_fills_in(t):
    """msg_flags repeats MSG_CMSG_CLOEXEC, msg_controllen becomes 0, msg_namelen only if there is a msg_name; nothing on errors.

    recvfrom's length becomes 0 and can't be negative: recv(2).
    """
    c = t.pair()
    t.peer("c.sendall(b'0123456789' * 2)")
    arrived(c, 20)
    name, control, b = space(16), space(64), space(1)

    def receive(flags, named):
        header = Msghdr(name=ctypes.cast(name, ctypes.c_void_p) if named else None, namelen=16, iov=vectors(b), iovlen=1,
                        control=ctypes.cast(control, ctypes.c_void_p), controllen=64, flags=0x1234)
        value = said("recvmsg", c.fileno(), ctypes.byref(header), flags)
        return value, header.flags, header.controllen, header.namelen
    peek = socket.MSG_PEEK
    seen = [("plainly", receive(0, True), (1, 0, 0, 0)), ("peek", receive(peek, True), (1, 0, 0, 0)),
            ("without a name", receive(0, False), (1, 0, 0, 16)),
            ("MSG_CMSG_CLOEXEC", receive(MSG_CMSG_CLOEXEC, True), (1, MSG_CMSG_CLOEXEC, 0, 0)),
            ("MSG_TRUNC", receive(socket.MSG_TRUNC, True), (1, 0, 0, 0)),
            ("MSG_WAITALL", receive(socket.MSG_WAITALL, True), (1, 0, 0, 0)),
            ("MSG_ERRQUEUE", receive(MSG_ERRQUEUE, True), ("EAGAIN", 0x1234, 64, 16))]
    array = (Mmsghdr * 2)()
    for entry in array:
        entry.header = Msghdr(namelen=16, iov=vectors(b), iovlen=1, controllen=64, flags=0x1234)
    seen += [("recvmmsg", said("recvmmsg", c.fileno(), array, 2, MSG_CMSG_CLOEXEC, None), 2)]
    seen += [("message", (one.length, one.header.flags, one.header.controllen, one.header.namelen),
              (1, MSG_CMSG_CLOEXEC, 0, 16)) for one in array]
    length = ctypes.c_int(16)
    seen += [("recvfrom", (said("recvfrom", c.fileno(), b, SIZE(1), 0, name, ctypes.byref(length)), length.value), (1, 0))]
    length.value = -1
    seen += [("recvfrom, length -1", said("recvfrom", c.fileno(), b, SIZE(1), peek, name, ctypes.byref(length)), "EINVAL"),
             ("recvfrom, no length", said("recvfrom", c.fileno(), b, SIZE(1), peek, name, None), "EFAULT")]
    rest = c.recv(100)
    seen += [("rest", rest, b"890123456789"), ("nothing there", receive(socket.MSG_DONTWAIT, True), ("EAGAIN", 0x1234, 64, 16))]
    differences(seen)


@check()
def test_sendmsg_checks_address_and_control(t):
    """A destination is ignored on a connected socket, unless it can't be one; control messages must be well-formed: send(2)."""
    c = t.pair()
    fd, b = c.fileno(), space(1)
    b.raw = b"x"
    address = struct.pack("=HH4s8x", socket.AF_INET, 0x1234, bytes([10, 1, 2, 3]))

    def message(**fields):
        return said("sendmsg", fd, ctypes.byref(Msghdr(iov=vectors(b), iovlen=1, **fields)), 0)

    def control(*fields):
        text = ctypes.create_string_buffer(struct.pack("=QiiI4x", *fields), 24)
        return message(control=ctypes.cast(text, ctypes.c_void_p), controllen=24)
    differences([
        ("sendto", said("sendto", fd, b, SIZE(1), 0, address, 16), 1),
        ("sendto, short address", said("sendto", fd, b, SIZE(1), 0, address, 1), 1),
        ("sendto, long address", said("sendto", fd, b, SIZE(1), 0, address, 1000), "EINVAL"),
        ("sendto, length -1", said("sendto", fd, b, SIZE(1), 0, address, -1), "EINVAL"),
        ("sendto, bad address", said("sendto", fd, b, SIZE(1), 0, ctypes.c_void_p(BAD), 16), "EFAULT"),
        ("sendmsg, bad address", message(name=BAD, namelen=16), "EFAULT"),
        ("sendmsg, length -1", message(name=ctypes.addressof(b), namelen=0xffffffff), "EINVAL"),
        ("sendmsg, no address but a length", message(namelen=16), 1),
        ("MSG_FASTOPEN", said("sendto", fd, b, SIZE(1), MSG_FASTOPEN, address, 16), "EISCONN"),
        ("MSG_FASTOPEN without an address", said("send", fd, b, SIZE(1), MSG_FASTOPEN), "EISCONN"),
        ("control message too long", control(100, socket.SOL_SOCKET, 1, 0), "EINVAL"),
        ("control message too short", control(3, socket.SOL_SOCKET, 1, 0), "EINVAL"),
        ("unknown control message", control(20, socket.SOL_SOCKET, 9999, 0), "EINVAL"),
        ("control of another level", control(20, socket.IPPROTO_TCP, 9999, 0), 1),
        ("bad control address", message(control=BAD, controllen=24), "EFAULT"),
        ("control length", message(control=ctypes.addressof(b), controllen=1 << 40), "ENOBUFS"),
        ("MSG_EOR", said("send", fd, b, SIZE(1), MSG_EOR), 1)])
    c.shutdown(socket.SHUT_WR)
    assert t.peer("recv_end(c)") == b"xxxxx"


@check()
def test_peek_over_switch(t):
    """A peek sees all bytes that are there, wherever they came: as many as it asks for, with MSG_WAITALL or without: recv(2)."""
    c, whole = mixed(t)
    assert c.recv(len(whole), socket.MSG_PEEK) == whole
    assert c.recv(len(whole) + 100, socket.MSG_PEEK) == whole
    assert recv_exact(c, len(whole)) == whole


@check()
def test_peek_for_all_over_switch(t):
    """The same where the peek waits for the amount: MSG_PEEK | MSG_WAITALL, recv(2)."""
    c, whole = mixed(t)
    c.settimeout(None)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(3))
    got = c.recv(len(whole), socket.MSG_PEEK | socket.MSG_WAITALL)
    assert got == whole, f"{len(got)} of {len(whole)}"
    assert recv_exact(c, len(whole)) == whole


@check()
def test_peek_from_rmb_into_tcp(t):
    """The same where bytes on an RMB, which nobody reads, are followed by others on TCP: recv(2)."""
    c = t.pair()
    whole = chance.randbytes(2_000_000)
    t.start("c.sendall(whole)", whole=whole)
    seen = []
    until(lambda: seen.append(ioctl_int(c, FIONREAD)) or len(seen) > 40 and seen[-1] == seen[-20], 8, "the sender's stop")
    size = seen[-1]
    for call, flags in ((c.recv, socket.MSG_PEEK), (c.recv, socket.MSG_PEEK | socket.MSG_WAITALL)):
        got = call(size, flags)
        assert (len(got), got == whole[:size]) == (size, True)
    cut = [0, 1, 1000, size // 3, size // 2, size - 1, size]
    b = [space(end - start) for start, end in zip(cut, cut[1:])] + [space(5)] * 60
    header = Msghdr(iov=vectors(*b), iovlen=6)
    assert said("recvmsg", c.fileno(), ctypes.byref(header), socket.MSG_PEEK) == size
    assert b"".join(one.raw for one in b[:6]) == whole[:size]
    assert recv_exact(c, len(whole)) == whole
    t.join()


@check(peer=("env", "XSMC_TEST_FLIP_US=300"), seconds=40)
def test_peek_while_carriers_change(t):
    """A peek gives what is read next, and no less than was there, with MSG_WAITALL or without: recv(2)."""
    c = t.pair()
    whole = chance.randbytes(1 << 20)
    t.start("""
seed, at = random.Random(1), 0
while at < len(whole):
    size = seed.randrange(1, 3000)
    c.sendall(whole[at:at + size])
    at += size
    if seed.random() < 0.3:
        time.sleep(0.0005)""", whole=whole)
    at = 0
    while at < len(whole):
        there, want = ioctl_int(c, FIONREAD), chance.randrange(1, 20_000)
        flags = socket.MSG_PEEK
        if there and chance.random() < 0.3:
            want, flags = min(there, want), socket.MSG_PEEK | socket.MSG_WAITALL
        peeked = c.recv(want, flags)
        assert peeked == whole[at:at + len(peeked)], at
        assert len(peeked) >= min(there, want), (len(peeked), there, want)
        size = chance.randrange(1, len(peeked) + 1)
        assert recv_exact(c, size) == whole[at:at + size]
        at += size
    t.join()


@check()
def test_many_vectors_over_switch(t):
    """A readv, recvmsg or recvmmsg takes all that is there and fits: readv(2); epoll(7) takes a short count for the last."""
    c, whole = mixed(t)
    for call in ("readv", "recvmsg"):
        b = [space(1) for _ in range(40)]
        header = Msghdr(iov=vectors(*b), iovlen=40)
        got = said("readv", c.fileno(), header.iov, 40) if call == "readv" \
            else said("recvmsg", c.fileno(), ctypes.byref(header), 0)
        assert got == 40, (call, got)
        assert b"".join(one.raw for one in b) == whole[:40]
        whole = whole[40:]
    b = [space(1) for _ in range(1024)]
    assert said("readv", c.fileno(), vectors(*b), 1024) == len(whole)
    assert b"".join(one.raw for one in b[:len(whole)]) == whole


@check()
def test_many_vectors_sent_by_tcp(t):
    """A writev, sendmsg or sendmmsg gives away all that there is room for, while the carrier is TCP, too: writev(2)."""
    t.peer("l = listen()")
    c = connect(t.peer("l.getsockname()"))
    t.peer("c = l.accept()[0]\nl.close()")
    c.sendall(b"unread")
    polled(c)  # no read here waits: see read_up_to_rmb
    for turn in range(400):
        t.peer("c.sendall(b'R')")
        assert c.recv(1) == b"R"
        if not t.both and turn > 5 or t.both and (carriers(c) or " ")[:2] == ("tcp", "rmb"):
            break
    else:
        raise AssertionError(f"carriers {carriers(c)}")
    c.setblocking(False)
    b = [ctypes.create_string_buffer(chance.randbytes(3), 3) for _ in range(1024)]
    header = Msghdr(iov=vectors(*b), iovlen=1024)
    many = (Mmsghdr * 1)(Mmsghdr(header))
    seen = [("writev", said("writev", c.fileno(), header.iov, 40), 120),
            ("sendmsg", said("sendmsg", c.fileno(), ctypes.byref(header), 0), 3072),
            ("sendmmsg", (said("sendmmsg", c.fileno(), many, 1, 0), many[0].length), (1, 3072))]
    differences(seen)
    whole = b"".join(one.raw for one in b)
    assert t.peer("recv_exact(c, size)", size=6 + 120 + 2 * 3072) == b"unread" + whole[:120] + whole * 2


@check()
def test_waitall_ends_early(t):
    """MSG_WAITALL over a switch; it gives what there is on a time-out, a signal, MSG_DONTWAIT, and at the end: recv(2)."""
    c, whole = mixed(t)
    t.start("time.sleep(0.1)\nc.sendall(b'more')")
    assert c.recv(len(whole) + 4, socket.MSG_WAITALL) == whole + b"more"
    t.join()
    t.peer("c.sendall(b'abc')")
    arrived(c, 3)
    assert c.recv(10, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == b"abc"
    t.peer("c.sendall(b'abc')")
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0.2))
    assert c.recv(10, socket.MSG_WAITALL) == b"abc"
    fails(errno.EAGAIN, c.recv, 10, socket.MSG_WAITALL)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0))
    signal.signal(signal.SIGALRM, lambda *_: None)
    t.peer("c.sendall(b'abc')")
    arrived(c, 3)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    b = space(10)
    assert said("recv", c.fileno(), b, SIZE(10), socket.MSG_WAITALL) == 3
    t.start("c.sendall(b'abc')\ntime.sleep(0.1)\nc.close()")
    assert c.recv(10, socket.MSG_WAITALL) == b"abc"
    t.join()
    assert c.recv(10, socket.MSG_WAITALL) == b""


@check()
def test_error_after_partial_receive(t):
    """A MSG_WAITALL that a reset has ended gives what came; the next call tells of the reset, which is no end: recv(2)."""
    for way in ("recv", "readv"):
        c = t.pair()
        t.start("c.sendall(b'abc')\ntime.sleep(0.2)\nlinger(c, 1, 0)\nc.close()")
        assert c.recv(10, socket.MSG_WAITALL) == b"abc"
        t.join()
        until(lambda: polled(c, 0), 3, "the reset")
        got = said("recv", c.fileno(), space(10), SIZE(10), 0) if way == "recv" \
            else said("readv", c.fileno(), vectors(space(10)), 1)
        assert got == "ECONNRESET", (way, got)
        assert c.recv(10) == b""


@check()
def test_error_after_partial_send(t):
    """A blocked send that a reset has ended gives what went out; the next one says ECONNRESET, those after it EPIPE: send(2)."""
    c = t.pair()
    size = 64 << 20
    b = space(size)
    t.start("time.sleep(0.5)\nlinger(c, 1, 0)\nc.close()")
    assert 0 < said("send", c.fileno(), b, SIZE(size), socket.MSG_NOSIGNAL) < size
    t.join()
    seen = [said("send", c.fileno(), b, SIZE(1), socket.MSG_NOSIGNAL) for _ in range(3)]
    assert seen == ["ECONNRESET", "EPIPE", "EPIPE"], seen


@check()
def test_error_after_partial_call_is_told_once(t):
    """Whichever call is next tells of it, SO_ERROR as well, and nothing does after that: recv(2), send(2), socket(7)."""
    for next_call in ("SO_ERROR", "send", "recv"):
        for first in ("recv", "send"):
            c = t.pair()
            if first == "recv":
                t.start("c.sendall(b'abc')\ntime.sleep(0.2)\nlinger(c, 1, 0)\nc.close()")
                assert c.recv(10, socket.MSG_WAITALL) == b"abc"
            else:
                t.start("time.sleep(0.2)\nlinger(c, 1, 0)\nc.close()")
                assert 0 < c.send(bytes(64 << 20)) < 64 << 20
            t.join()
            until(lambda: polled(c, 0), 3, "the reset")
            seen = {"recv": lambda: said("recv", c.fileno(), space(10), SIZE(10), 0),
                    "send": lambda: said("send", c.fileno(), space(1), SIZE(1), socket.MSG_NOSIGNAL),
                    "SO_ERROR": lambda: c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)}
            told = seen[next_call]()
            after = [seen[name]() for name in ("SO_ERROR", "send", "recv")]
            want = errno.ECONNRESET if next_call == "SO_ERROR" else "ECONNRESET"
            assert (told, after) == (want, [0, "EPIPE", 0]), (first, next_call, told, after)


@check()
def test_mmsg_limits(t):
    """sendmmsg takes at most 1024 messages a call, recvmmsg any number, until its time-out; what is no time is refused.

    sendmmsg(2), recvmmsg(2).
    """
    c = t.pair()
    fd, b = c.fileno(), space(1)
    array = (Mmsghdr * 1030)()
    for entry in array:
        entry.header.iov, entry.header.iovlen = vectors(b), 1
    seen = [("sendmmsg", said("sendmmsg", fd, array, 1030, 0), 1024), ("none", said("sendmmsg", fd, array, 0, 0), 0)]
    t.peer("recv_exact(c, 1024)\nc.sendall(bytes(1040))")
    arrived(c, 1040)
    seen += [("recvmmsg", said("recvmmsg", fd, array, 1030, 0, None), 1030),
             ("time-out over", said("recvmmsg", fd, array, 3, 0, struct.pack("qq", 0, 0)), 1),
             ("bad time-out", said("recvmmsg", fd, array, 3, 0, struct.pack("qq", 0, -1)), "EINVAL"),
             ("negative time-out", said("recvmmsg", fd, array, 3, 0, struct.pack("qq", -1, 0)), "EINVAL"),
             ("none", said("recvmmsg", fd, array, 0, 0, None), 0)]
    array[1].header.iov = vectors((BAD, 1))
    seen += [("bad second", said("sendmmsg", fd, array, 2, 0), 1), ("bad second", said("recvmmsg", fd, array, 2, 0, None), 1),
             ("kept", c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), errno.EFAULT)]
    differences(seen)


@check()
def test_recvmmsg_time_and_errors(t):
    """What is left of the time-out is stored; a reset comes before bytes; MSG_WAITFORONE waits for one: recvmmsg(2)."""
    c = t.pair()
    fd, b = c.fileno(), space(1)
    array = (Mmsghdr * 3)()
    for entry in array:
        entry.header.iov, entry.header.iovlen = vectors(b), 1
    t.start("time.sleep(0.1)\nc.sendall(b'ab')")
    seen = [("wait for one", said("recvmmsg", fd, array, 1, 0x10000, None), 1)]
    t.join()
    arrived(c, 1)
    seen += [("no wait", said("recvmmsg", fd, array, 3, 0x10000, None), 1)]
    t.peer("c.sendall(b'abc')")
    arrived(c, 3)
    left = ctypes.create_string_buffer(struct.pack("qq", 100, 0), 16)
    seen += [("all", said("recvmmsg", fd, array, 3, 0, left), 3)]
    seconds, ns = struct.unpack("qq", left.raw)
    assert seconds == 99 and 0 < ns < 1_000_000_000, (seconds, ns)
    t.peer("c.sendall(b'abc')")
    arrived(c, 3)
    t.peer("linger(c, 1, 0)\nc.close()")
    until(lambda: polled(c, 0), 3, "the reset")
    seen += [("reset", said("recvmmsg", fd, array, 3, 0, None), "ECONNRESET"),
             ("bytes", said("recvmmsg", fd, array, 3, 0, None), 3),
             ("end", (said("recvmmsg", fd, array, 3, 0, None), [one.length for one in array]), (3, [0, 0, 0]))]
    differences(seen)
