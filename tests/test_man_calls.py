"""What the manual pages of the calls on connected sockets say, where bytes may be in a ring instead of the kernel."""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import time

from harness.behave import check
from harness.calls import *

F_SETSIG, F_GETSIG = 10, 11
POLLRDNORM, POLLRDBAND, POLLWRNORM, POLLWRBAND, POLLRDHUP = 0x40, 0x80, 0x100, 0x200, 0x2000
POLLIN, POLLOUT, POLLHUP = select.POLLIN, select.POLLOUT, select.POLLHUP


@check()
def test_sendmmsg_ends_with_partial(t):
    """sendmmsg goes no further than a message that was sent in part: sendmmsg(2). Its reader makes room meanwhile."""
    c = t.pair()
    c.setblocking(False)
    t.start("""
got = hashlib.sha256()
while part := c.recv(30_000):
    got.update(part)
got.hexdigest()""")
    sent, whole = hashlib.sha256(), 0
    array = (Mmsghdr * 8)()
    buffers = [ctypes.create_string_buffer(chance.randbytes(70_001), 70_001) for _ in array]
    for entry, buffer in zip(array, buffers):
        entry.header.iov, entry.header.iovlen = vectors(buffer), 1
    while whole < 30_000_000:
        count = libc.sendmmsg(c.fileno(), array, 8, 0)
        if count < 0:
            assert ctypes.get_errno() == errno.EAGAIN
            select.select([], [c], [])
            continue
        lengths = [entry.length for entry in array[:count]]
        for length, buffer in zip(lengths, buffers):
            sent.update(buffer.raw[:length])
            whole += length
        assert all(length == 70_001 for length in lengths[:-1]), lengths
    c.close()
    assert t.join() == sent.hexdigest()


EVERY = POLLIN | POLLOUT | POLLRDNORM | POLLRDBAND | POLLWRNORM | POLLWRBAND | POLLRDHUP | select.POLLPRI


def masks(c):
    """(poll, epoll) over every event there is."""
    epoll = select.epoll()
    epoll.register(c, EVERY)
    return polled(c, EVERY), ready(epoll).get(c.fileno(), 0)


@check()
def test_all_events_after_own_shutdown(t):
    """Every event bit, idle, with input, after SHUT_RD, SHUT_WR and both at this end: poll(2), epoll_ctl(2).

    Who has shut down sending is told that it may write, though nobody reads.
    """
    out, into = POLLOUT | POLLWRNORM, POLLIN | POLLRDNORM
    c, d, e = t.pair("c"), t.pair("d"), t.pair("e")
    seen = [("idle", masks(c), (out, out))]
    t.peer("c.sendall(b'x')")
    arrived(c, 1)
    seen += [("input", masks(c), (out | into,) * 2), ("RDNORM", polled(c, POLLRDNORM), POLLRDNORM)]
    epoll = select.epoll()
    epoll.register(c, POLLRDNORM)
    seen += [("epoll RDNORM", ready(epoll), {c.fileno(): POLLRDNORM}), ("epoll RDBAND", polled(c, POLLRDBAND | POLLWRBAND), 0)]
    c.recv(1)
    c.shutdown(socket.SHUT_RD)
    seen += [("SHUT_RD", masks(c), (out | into | POLLRDHUP,) * 2)]
    d.shutdown(socket.SHUT_WR)
    seen += [("SHUT_WR", masks(d), (out,) * 2)]
    d.shutdown(socket.SHUT_RD)
    seen += [("both", masks(d), (out | into | POLLRDHUP | POLLHUP,) * 2)]
    e.setblocking(False)
    fill(e, 0.2)
    seen += [("full", masks(e), (0, 0))]
    e.shutdown(socket.SHUT_WR)
    seen += [("full, SHUT_WR", masks(e), (out,) * 2), ("writable", selected(e), (False, True, False))]
    differences(seen)


@check()
def test_data_after_own_shut_rd(t):
    """After SHUT_RD bytes that still come can be read, and the end is there whenever none are: shutdown(2) as Linux has it."""
    c = t.pair()
    c.shutdown(socket.SHUT_RD)
    for _ in range(3):
        assert c.recv(10) == b"" == c.recv(10, socket.MSG_PEEK)
        t.peer("c.sendall(b'still')")
        arrived(c, 5)
        assert c.recv(10, socket.MSG_WAITALL) == b"still"
    c.sendall(b"back")
    assert t.peer("recv_exact(c, 4)") == b"back"
    seen = [("how", said("shutdown", c.fileno(), 3), "EINVAL"), ("how", said("shutdown", c.fileno(), -1), "EINVAL"),
            ("again", said("shutdown", c.fileno(), 0), 0), ("SHUT_WR", said("shutdown", c.fileno(), 1), 0),
            ("SHUT_WR again", said("shutdown", c.fileno(), 1), 0)]
    t.peer("recv_end(c)\nc.shutdown(socket.SHUT_WR)")
    until(lambda: c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0] in (6, 7), 3, "both ends' FIN")
    seen += [("over", said("shutdown", c.fileno(), 1), "ENOTCONN")]
    differences(seen)


@check()
def test_edges_of_both_directions(t):
    """An edge for input tells of room, too; that the peer has read little of what was sent is no edge: epoll(7)."""
    c = t.pair()
    c.setblocking(False)
    epoll = select.epoll()
    epoll.register(c, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)
    number = c.fileno()
    assert ready(epoll, 1) == {number: EPOLLOUT}
    for _ in range(5):
        c.send(b"0123456789")
        t.peer("recv_exact(c, 10)")
        no_event(epoll, 0.1)
        t.peer("c.send(b'x')")
        assert ready(epoll, 3) == {number: EPOLLIN | EPOLLOUT}
        no_event(epoll, 0.1)
        assert c.recv(10) == b"x"
    t.peer("c.shutdown(socket.SHUT_WR)")
    assert ready(epoll, 3) == {number: EPOLLIN | EPOLLOUT | EPOLLRDHUP}
    no_event(epoll, 0.1)
    epoll.modify(c, EPOLLOUT | EPOLLET)
    assert ready(epoll, 1) == {number: EPOLLOUT}


@check()
def test_oneshot_hides_the_end(t):
    """A fired one-shot entry reports nothing, not even a hang-up or error; an entry with mask 0 reports these: epoll_ctl(2)."""
    for how, want in (("c.close()", EPOLLHUP), ("linger(c, 1, 0)\nc.close()", EPOLLHUP | EPOLLERR)):
        c = t.pair()
        once, empty = select.epoll(), select.epoll()
        once.register(c, EPOLLIN | EPOLLONESHOT)
        empty.register(c, 0)
        t.peer("c.send(b'x')")
        assert ready(once, 3) == {c.fileno(): EPOLLIN}
        no_event(empty, 0)
        assert c.recv(1) == b"x"
        if want == EPOLLHUP:
            c.shutdown(socket.SHUT_WR)
        t.peer(how)
        assert ready(empty, 3) == {c.fileno(): want}
        no_event(once, 0.1)
        once.modify(c, EPOLLONESHOT)
        assert ready(once, 3) == {c.fileno(): want}
        no_event(once, 0.1)
        once.modify(c, EPOLLIN)
        assert ready(once, 3) == {c.fileno(): want | EPOLLIN} == ready(once, 3)
        c.close()


def control(epoll, op, fd, mask=0, data=0):
    return said("epoll_ctl", epoll.fileno(), op, fd, struct.pack("=IQ", mask, data))


@check()
def test_epoll_ctl_rules(t):
    """What EPOLLEXCLUSIVE excludes, unknown operations, DEL without an event, maxevents, the data's 64 bits: epoll_ctl(2)."""
    c, d, e = t.pair("c"), t.pair("d"), t.pair("e")
    epoll, fd = select.epoll(), c.fileno()
    add, delete, modify = 1, 2, 3
    seen = [("with RDHUP", control(epoll, add, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLRDHUP), "EINVAL"),
            ("with ONESHOT", control(epoll, add, fd, EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT), "EINVAL"),
            ("unknown operation", control(epoll, 4, fd, EPOLLIN), "EINVAL"), ("operation 0", control(epoll, 0, fd), "EINVAL"),
            ("MOD of none", control(epoll, modify, fd, EPOLLIN), "ENOENT"), ("DEL of none", control(epoll, delete, fd), "ENOENT"),
            ("ADD", control(epoll, add, fd, EPOLLIN | (1 << 29), (1 << 64) - 2), 0),
            ("ADD again", control(epoll, add, fd, EPOLLIN), "EEXIST"),
            ("ADD again, exclusive", control(epoll, add, fd, EPOLLIN | EPOLLEXCLUSIVE), "EEXIST"),
            ("MOD to exclusive", control(epoll, modify, fd, EPOLLIN | EPOLLEXCLUSIVE), "EINVAL"),
            ("MOD, bad event", said("epoll_ctl", epoll.fileno(), modify, fd, ctypes.c_void_p(BAD)), "EFAULT"),
            ("no set", said("epoll_ctl", fd, add, fd, struct.pack("=IQ", 1, 0)), "EINVAL"),
            ("set closed", said("epoll_ctl", 9999, add, fd, struct.pack("=IQ", 1, 0)), "EBADF"),
            ("too many", said("epoll_wait", epoll.fileno(), space(12), (1 << 31) - 1, 0), "EINVAL")]
    for sock, data in ((d, 1 << 63), (e, 5)):
        seen += [("ADD", control(epoll, add, sock.fileno(), EPOLLIN, data), 0)]
    t.peer("[one.sendall(b'x') for one in (c, d, e)] and None")
    for sock in (c, d, e):
        arrived(sock, 1)
    event, got = space(12), []
    for _ in range(6):
        seen += [("wait for one", said("epoll_wait", epoll.fileno(), event, 1, 3000), 1)]
        got.append(struct.unpack("=IQ", event.raw))
    want = {(EPOLLIN, (1 << 64) - 2), (EPOLLIN, 1 << 63), (EPOLLIN, 5)}
    seen += [("round robin", set(got[:3]), want), ("round robin", set(got[3:]), want),
             ("DEL without an event", said("epoll_ctl", epoll.fileno(), delete, fd, None), 0),
             ("DEL, bad event", said("epoll_ctl", epoll.fileno(), delete, d.fileno(), ctypes.c_void_p(BAD)), 0),
             ("left", dict(epoll.poll(0)), {5: EPOLLIN})]
    differences(seen)


@check()
def test_poll_and_select_lists(t):
    """The same socket twice, closed and negative numbers, sets and results: poll(2), select(2)."""
    c, d = t.pair("c"), t.pair("d")
    t.peer("c.sendall(b'x')")
    arrived(c, 1)
    closed = os.dup(0)
    os.close(closed)
    entries = [(c.fileno(), POLLIN), (d.fileno(), POLLIN), (-c.fileno(), POLLIN), (c.fileno(), POLLOUT), (closed, 0),
               (c.fileno(), POLLIN | POLLOUT), (d.fileno(), 0)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("=ihh", fd, mask, 0x7f) for fd, mask in entries), 8 * 7)
    seen = [("poll", said("poll", text, 7, 0), 4),
            ("revents", [struct.unpack_from("=ihh", text, 8 * i)[2] for i in range(7)],
             [POLLIN, 0, 0, POLLOUT, select.POLLNVAL, POLLIN | POLLOUT, 0])]

    def bits(*numbers):
        whole = sum(1 << number for number in numbers)
        return ctypes.create_string_buffer(whole.to_bytes(128, "little"), 128)

    def numbers(text):
        whole = int.from_bytes(text.raw, "little")
        return {number for number in range(1024) if whole >> number & 1}
    one, two = c.fileno(), d.fileno()
    top = max(one, two) + 1
    r, w, x = bits(one, two, 900), bits(one), bits(one)
    wait = ctypes.create_string_buffer(struct.pack("qq", 3, 0), 16)
    seen += [("select", said("select", top, r, w, x, wait), 2), ("sets", (numbers(r) - {900}, numbers(w), numbers(x)),
                                                                 ({one}, {one}, set()))]
    r, w = bits(one, closed), bits(one)
    seen += [("closed", said("select", max(top, closed + 1), r, w, None, wait), "EBADF"),
             ("sets on errors", (numbers(r), numbers(w)), ({one, closed}, {one})),
             ("negative", said("select", -1, r, w, None, wait), "EINVAL"),
             ("negative time", said("select", top, bits(one), None, None, struct.pack("qq", -1, 0)), "EINVAL"),
             ("pselect", said("pselect", top, bits(one), None, None, struct.pack("qq", 0, 1_000_000_000), None), "EINVAL"),
             ("ppoll", said("ppoll", text, 1, struct.pack("qq", 0, -1), None), "EINVAL")]
    r, wait = bits(two), ctypes.create_string_buffer(struct.pack("qq", 0, 50_000), 16)
    seen += [("time-out", (said("select", top, r, None, None, wait), numbers(r), wait.raw), (0, set(), bytes(16)))]
    r, wait = bits(two), ctypes.create_string_buffer(struct.pack("qq", 0, 50_000_000), 16)
    kept = wait.raw
    seen += [("pselect", (said("pselect", top, r, None, None, wait, None), numbers(r), wait.raw), (0, set(), kept))]
    differences(seen)


@check()
def test_masks_of_waiting(t):
    """A pending signal that the wait's mask lets in ends it with EINTR, unless something is ready; the old mask is back then.

    With a time-out of 0 poll and select say EINTR, too, epoll_pwait says 0: pselect(2), ppoll(2), epoll_pwait(2).
    """
    hits = []
    signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    c = t.pair()
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)
    nothing = bytes(128)
    entry = ctypes.create_string_buffer(struct.pack("=ihh", c.fileno(), POLLIN, 0), 8)
    mask_and_size = ctypes.create_string_buffer(128)

    def waits(seconds):
        time_spec = struct.pack("qq", seconds, 0)
        bits = ctypes.create_string_buffer((1 << c.fileno()).to_bytes(128, "little"), 128)
        return {"ppoll": lambda: said("ppoll", entry, 1, time_spec, nothing),
                "pselect": lambda: said("pselect", c.fileno() + 1, bits, None, None, time_spec, nothing),
                "epoll_pwait": lambda: said("epoll_pwait", epoll.fileno(), mask_and_size, 1, seconds * 1000, nothing)}
    seen = []
    for what in ("ppoll", "pselect", "epoll_pwait"):
        for state, seconds, data in (("ready", 5, True), ("ready, no wait", 0, True), ("idle", 5, False),
                                     ("idle, no wait", 0, False)):
            if data:
                t.peer("c.send(b'x')")
                arrived(c, 1)
            del hits[:]
            os.kill(os.getpid(), signal.SIGUSR1)
            value = waits(seconds)[what]()
            pending = signal.SIGUSR1 in signal.sigpending()
            blocked = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            want = (1, 0, True) if data else (0, 0, True) if (what, seconds) == ("epoll_pwait", 0) else ("EINTR", 1, False)
            seen += [(f"{what}, {state}", (value, len(hits), pending, blocked), (*want, True))]
            if data:
                assert c.recv(1) == b"x"
            if pending:
                signal.sigwait([signal.SIGUSR1])
    differences(seen)


@check()
def test_signal_of_one_s_own_choice(t):
    """F_SETSIG and F_SETOWN with O_ASYNC give a queued signal that tells the descriptor and its events: fcntl(2)."""
    number = signal.SIGRTMIN + 3
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    c = t.pair()
    fcntl.fcntl(c, F_SETSIG, number)
    fcntl.fcntl(c, fcntl.F_SETOWN, os.getpid())
    assert fcntl.fcntl(c, F_GETSIG) == number and fcntl.fcntl(c, fcntl.F_GETOWN) == os.getpid()
    fcntl.ioctl(c, 0x5452, struct.pack("i", 1))  # FIOASYNC
    assert fcntl.fcntl(c, fcntl.F_GETFL) & os.O_ASYNC

    def info():
        text = space(128)
        until(lambda: libc.sigtimedwait(struct.pack("Q", 1 << number - 1) + bytes(120), text, struct.pack("qq", 3, 0)) == number)
        return struct.unpack_from("i", text.raw) + struct.unpack_from("qi", text.raw, 16)
    while libc.sigtimedwait(struct.pack("Q", 1 << number - 1) + bytes(120), None, struct.pack("qq", 0, 100_000_000)) == number:
        pass
    for _ in range(3):
        t.peer("c.send(b'x')")
        assert info() == (number, POLLIN | POLLRDNORM, c.fileno())
        assert c.recv(1) == b"x"
    fcntl.ioctl(c, 0x5452, struct.pack("i", 0))
    t.peer("c.send(b'y')")
    assert recv_exact(c, 1) == b"y"
    assert libc.sigtimedwait(struct.pack("Q", 1 << number - 1) + bytes(120), None, struct.pack("qq", 0, 200_000_000)) == -1


@check()
def test_flags_of_preadv2(t):
    """RWF_NOWAIT doesn't wait, a flag that doesn't exist is refused, and so are offsets: readv(2)."""
    c = t.pair()
    b = space(4)
    b.raw = b"data"
    at, fd = ctypes.c_int64(-1), c.fileno()
    seen = [("RWF_NOWAIT", said("preadv2", fd, vectors(b), 1, at, 8), "EAGAIN")]
    t.peer("c.sendall(b'text')")
    arrived(c, 4)
    seen += [("unknown flag", said("preadv2", fd, vectors(b), 1, at, 0x4000), "ENOTSUP"),
             ("unknown flag, writing", said("pwritev2", fd, vectors(b), 1, at, 0x4000), "ENOTSUP"),
             ("offset", said("preadv2", fd, vectors(b), 1, ctypes.c_int64(0), 0), "ESPIPE"),
             ("RWF_NOWAIT", said("preadv2", fd, vectors(b), 1, at, 8), 4), ("bytes", b.raw, b"text"),
             ("writing", said("pwritev2", fd, vectors(b), 1, at, 8), 4), ("received", t.peer("recv_exact(c, 4)"), b"text")]
    differences(seen)


@check()
def test_count_of_queued_bytes_by_message(t):
    """With TCP_INQ each recvmsg tells in msg_control how many bytes are left: recv(2), linux/tcp.h."""
    c = t.pair()
    c.setsockopt(socket.IPPROTO_TCP, 36, 1)
    t.peer("c.sendall(b'0123456789')")
    arrived(c, 10)
    assert c.recvmsg(4, 100)[:2] == (b"0123", [(socket.IPPROTO_TCP, 36, struct.pack("i", 6))])
    assert c.recvmsg(9, 100)[:2] == (b"456789", [(socket.IPPROTO_TCP, 36, bytes(4))])


@check()
def test_times_by_message(t):
    """With SO_TIMESTAMP in its old and new form each recvmsg gives a time in msg_control: recv(2), socket(7)."""
    for option in (29, 35, 63, 64):  # SO_TIMESTAMP, SO_TIMESTAMPNS, SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW
        c = t.pair()
        c.setsockopt(socket.SOL_SOCKET, option, 1)
        for _ in range(100):  # of which the first may be under way already
            t.peer("c.sendall(b'abcdef')")
            arrived(c, 6)
            data, messages, _, _ = c.recvmsg(10, 100)
            assert data == b"abcdef"
            if messages:
                break
            time.sleep(0.01)
        assert [one[:2] for one in messages] == [(socket.SOL_SOCKET, option)], (option, messages, carriers(c))
