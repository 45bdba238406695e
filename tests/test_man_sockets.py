"""What socket(7), tcp(7) and ip(7) promise of a connection holds whichever way its bytes go."""

import fcntl
import hashlib
import os
import select
import signal
import socket
import struct
import time

from harness.behave import check
from harness.net import *

SOL, TCP, IP = socket.SOL_SOCKET, socket.IPPROTO_TCP, socket.IPPROTO_IP
SO_TIMESTAMP, SO_TIMESTAMPNS, SO_PEEK_OFF, SO_SNDLOWAT = 29, 35, 42, 19
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW, SO_RCVTIMEO_NEW, SO_SNDTIMEO_NEW = 63, 64, 66, 67
TCP_INQ = TCP_CM_INQ = 36
FIOASYNC, FIOSETOWN, SIOCSPGRP, FIOGETOWN, SIOCGPGRP = 0x5452, 0x8901, 0x8902, 0x8903, 0x8904
SIOCOUTQNSD = 0x894B
CMSG_CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC
CLOSED = 7  # TCP_CLOSE, the first byte of TCP_INFO


def _stir(t, sock, name="c", seconds=1):
    """Exchanges bytes till both directions ride RMBs, or for a while if something holds them on TCP."""
    end = time.monotonic() + seconds
    while True:
        t.start(f"for _ in range(40):\n    echo({name}, 128)")
        for _ in range(40):
            sock.sendall(bytes(128))
            recv_exact(sock, 128)
        t.join()
        if not t.both or t.on_rmb(sock) or time.monotonic() > end:
            return
        time.sleep(0.01)


def _accepted(t, *options):
    """The accepted end of a used connection whose listener had these options."""
    with listen() as listener:
        for option in options:
            listener.setsockopt(*option)
        t.peer("c = connect(address)", address=listener.getsockname())
        sock = socket.socket(fileno=listener._accept()[0])
    _stir(t, sock)
    return sock


def _below_low_water(t, sock):
    """50 bytes don't make a socket with a low-water mark of 100 readable, 60 more do."""
    epoll = select.epoll()
    epoll.register(sock, EPOLLIN)
    t.peer("c.sendall(b'a' * 50)")
    arrived(sock, 50)
    no_event(epoll)
    assert not readable(sock) and not polled(sock)
    t.peer("c.sendall(b'b' * 60)")
    assert ready(epoll, 3) == {sock.fileno(): EPOLLIN} and readable(sock)
    assert recv_exact(sock, 110) == b"a" * 50 + b"b" * 60


# accept(2), socket(7), tcp(7): inheritance

@check()
def test_accepted_reads_options_of_listener(t):
    """Options of the listener read the same on the accepted socket, and another end's are its own (tcp(7), socket(7))."""
    options = [(SOL, socket.SO_KEEPALIVE, 1), (SOL, socket.SO_OOBINLINE, 1),
               (SOL, socket.SO_RCVBUF, 70_000), (SOL, socket.SO_SNDBUF, 80_000), (TCP, socket.TCP_NODELAY, 1),
               (TCP, socket.TCP_KEEPIDLE, 77), (TCP, socket.TCP_KEEPINTVL, 33), (TCP, socket.TCP_KEEPCNT, 4),
               (TCP, socket.TCP_USER_TIMEOUT, 12_345), (TCP, socket.TCP_LINGER2, 11), (TCP, socket.TCP_SYNCNT, 3),
               (TCP, socket.TCP_WINDOW_CLAMP, 50_000), (IP, socket.IP_TTL, 55), (IP, socket.IP_TOS, 16), (IP, 11, 1)]
    s = _accepted(t, *options)
    for level, option, value in options:
        if option in (socket.SO_RCVBUF, socket.SO_SNDBUF) and level == SOL:
            value *= 2
        if (level, option) != (TCP, socket.TCP_WINDOW_CLAMP):  # the kernel may lower it as bytes come
            assert s.getsockopt(level, option) == value, (level, option)
    assert t.peer("[c.getsockopt(*o) for o in o]", o=[(SOL, socket.SO_KEEPALIVE), (TCP, socket.TCP_KEEPCNT)]) == [0, 9]
    assert s.getsockopt(SOL, SO_SNDLOWAT) == 1 == s.getsockopt(SOL, socket.SO_RCVLOWAT)
    fails(errno.ENOPROTOOPT, s.setsockopt, SOL, SO_SNDLOWAT, 5)
    for option in (socket.SO_ACCEPTCONN, socket.SO_DOMAIN, socket.SO_PROTOCOL, socket.SO_TYPE, socket.SO_ERROR):
        fails(errno.ENOPROTOOPT, s.setsockopt, SOL, option, 1)
    fails(errno.EINVAL, s.setsockopt, TCP, socket.TCP_SYNCNT, 256)
    fails(errno.EINVAL, s.setsockopt, SOL, socket.SO_LINGER, b"1234")
    assert s.getsockopt(IP, 14) > 576  # IP_MTU, of a connected socket only
    fails(errno.ENOTCONN, socket.socket().getsockopt, IP, 14)


@check()
def test_accepted_keeps_low_water_mark(t):
    """SO_RCVLOWAT of the listener holds for the accepted connection (socket(7), accept(2))."""
    s = _accepted(t, (SOL, socket.SO_RCVLOWAT, 100))
    assert s.getsockopt(SOL, socket.SO_RCVLOWAT) == 100
    _below_low_water(t, s)


@check()
def test_accepted_keeps_timeouts(t):
    """SO_RCVTIMEO and SO_SNDTIMEO of the listener hold for the accepted connection (socket(7))."""
    s = _accepted(t, (SOL, socket.SO_RCVTIMEO, timeval(0.2)), (SOL, socket.SO_SNDTIMEO, timeval(0.2)))
    for _ in range(2):
        fails(errno.EAGAIN, s.recv, 10)
    total = 0
    while True:
        try:
            total += s.send(bytes(100_000))
        except BlockingIOError:
            break
    t.peer("recv_exact(c, total) and None", total=total)
    s.sendall(b"on")
    assert t.peer("recv_exact(c, 2)") == b"on"


@check()
def test_accepted_keeps_linger(t):
    """SO_LINGER {1, 0} of the listener makes the close of an accepted connection a reset (socket(7))."""
    s = _accepted(t, (SOL, socket.SO_LINGER, struct.pack("ii", 1, 0)))
    s.close()
    t.peer("fails(errno.ECONNRESET, c.recv, 1)")


@check()
def test_accepted_keeps_timestamps(t):
    """SO_TIMESTAMP of the listener makes recvmsg on an accepted connection give the times (socket(7))."""
    s = _accepted(t, (SOL, SO_TIMESTAMP, 1))
    assert s.getsockopt(SOL, SO_TIMESTAMP) == 1
    _timestamped(t, s, SO_TIMESTAMP)


@check()
def test_accepted_keeps_peek_offset(t):
    """SO_PEEK_OFF of the listener, where TCP has it, holds for the accepted connection (socket(7))."""
    probe = socket.socket()
    try:
        probe.setsockopt(SOL, SO_PEEK_OFF, 2)
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP
        return
    s = _accepted(t, (SOL, SO_PEEK_OFF, 2))
    offset = s.getsockopt(SOL, SO_PEEK_OFF)
    if offset >= 0:
        s.setsockopt(SOL, SO_PEEK_OFF, offset)
        want = offset
        t.peer("c.sendall(b'aabbccddeeff')")
        arrived(s, 12)
        assert s.recv(2, socket.MSG_PEEK) == b"aabbccddeeff"[want:want + 2]


# socket(7): options by their effect

@check()
def test_low_water_mark_extremes(t):
    """SO_RCVLOWAT: 0 is 1, and a negative value the most there can be (socket(7))."""
    for early in (False, True):
        c = t.pair(warm=not early)
        c.setsockopt(SOL, socket.SO_RCVLOWAT, 0)
        assert c.getsockopt(SOL, socket.SO_RCVLOWAT) == 1
        t.peer("c.sendall(b'x')")
        assert readable(c, 3) and c.recv(1) == b"x"
        c.setsockopt(SOL, socket.SO_RCVLOWAT, -1)
        assert c.getsockopt(SOL, socket.SO_RCVLOWAT) > 10_000
        t.peer("c.sendall(b'a' * 50)")
        arrived(c, 50)
        assert not readable(c, 0.1) and not polled(c)
        c.setsockopt(SOL, socket.SO_RCVLOWAT, 1)
        assert readable(c, 3) and recv_exact(c, 50) == b"a" * 50


@check()
def test_peek_offset(t):
    """The example of socket(7), SO_PEEK_OFF, where TCP has it: set when bytes are queued, or before any come."""
    for early in (False, True):
        c = t.pair(warm=not early)
        assert c.getsockopt(SOL, SO_PEEK_OFF) == -1
        if not early:
            t.peer("c.sendall(b'aabbccddeeff')")
            arrived(c, 12)
        try:
            c.setsockopt(SOL, SO_PEEK_OFF, 4)
        except OSError as error:
            assert error.errno == errno.EOPNOTSUPP
            return
        if early:
            c.setsockopt(SOL, SO_PEEK_OFF, -1)
            _stir(t, c)
            c.setsockopt(SOL, SO_PEEK_OFF, 4)
            t.peer("c.sendall(b'aabbccddeeff')")
            arrived(c, 12)
        assert c.recv(2, socket.MSG_PEEK) == b"cc" and c.getsockopt(SOL, SO_PEEK_OFF) == 6
        assert c.recv(2, socket.MSG_PEEK) == b"dd" and c.getsockopt(SOL, SO_PEEK_OFF) == 8
        assert c.recv(2) == b"aa" and c.getsockopt(SOL, SO_PEEK_OFF) == 6
        assert c.recv(2, socket.MSG_PEEK) == b"ee" and c.getsockopt(SOL, SO_PEEK_OFF) == 8
        assert recv_exact(c, 10) == b"bbccddeeff"
        c.close()


def _timestamped(t, c, option):
    """recvmsg gives the time of reception, of this kind."""
    def stamped():
        t.peer("c.sendall(b'12345')")
        data, controls, flags, _ = c.recvmsg(100, 100)
        assert not flags and data, (data, flags)
        for level, kind, value in controls:
            assert (level, kind) == (SOL, option), controls
            assert abs(struct.unpack("qq", value)[0] - time.time()) < 30, controls
        return controls
    until(stamped, 3, lambda: f"a timestamp of kind {option}; carriers {carriers(c) if t.loaded else None}")


@check()
def test_timestamps(t):
    """SO_TIMESTAMP and SO_TIMESTAMPNS, set on a connection in use: each by its control message, one at a time (socket(7))."""
    for option, other in ((SO_TIMESTAMP, SO_TIMESTAMPNS), (SO_TIMESTAMPNS, SO_TIMESTAMP)):
        c = t.pair()
        c.setsockopt(SOL, other, 1)
        c.setsockopt(SOL, option, 1)
        assert (c.getsockopt(SOL, option), c.getsockopt(SOL, other)) == (1, 0)
        _timestamped(t, c, option)
        c.setsockopt(SOL, option, 0)
        _stir(t, c)
        t.peer("c.sendall(b'12345')")
        assert c.recvmsg(100, 100)[:3] == (b"12345", [], 0)
        c.close()


@check()
def test_timestamps_by_new_numbers(t):
    """SO_TIMESTAMP and SO_TIMESTAMPNS by the numbers of programs with 64-bit time everywhere (socket(7))."""
    for option in (SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW):
        c = t.pair()
        c.setsockopt(SOL, option, 1)
        _timestamped(t, c, option)
        c.close()


@check()
def test_timeouts_by_new_numbers(t):
    """SO_RCVTIMEO and SO_SNDTIMEO by the numbers of programs with 64-bit time everywhere (socket(7))."""
    c = t.pair()
    c.setsockopt(SOL, SO_RCVTIMEO_NEW, timeval(0.2))
    c.setsockopt(SOL, SO_SNDTIMEO_NEW, timeval(0.2))
    fails(errno.EAGAIN, c.recv, 1)
    while True:
        try:
            c.send(bytes(100_000))
        except BlockingIOError:
            break


@check()
def test_timeout_values(t):
    """Time-outs: EDOM for impossible microseconds, a part is given, readiness is not affected, 0 is for ever (socket(7))."""
    c = t.pair()
    fails(errno.EDOM, c.setsockopt, SOL, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1_000_000))
    fails(errno.EDOM, c.setsockopt, SOL, socket.SO_SNDTIMEO, struct.pack("ll", 0, -1))
    fails(errno.EINVAL, c.setsockopt, SOL, socket.SO_RCVTIMEO, 1)
    assert c.getsockopt(SOL, socket.SO_RCVTIMEO, 16) == timeval(0) == c.getsockopt(SOL, socket.SO_SNDTIMEO, 16)
    c.setsockopt(SOL, socket.SO_RCVTIMEO, timeval(0.1))
    t.start("time.sleep(0.4)\nc.sendall(b'late')")
    assert readable(c, 5)
    assert recv_exact(c, 4) == b"late"
    t.join()
    c.setsockopt(SOL, socket.SO_RCVTIMEO, timeval(0))
    t.start("time.sleep(0.4)\nc.sendall(b'later')")
    assert c.recv(100) == b"later"
    t.join()
    c.setsockopt(SOL, socket.SO_SNDTIMEO, timeval(0.2))
    total = 0
    while (sent := c.send(bytes(16 << 20))) == 16 << 20:  # nothing but a part ends the loop
        total += sent
    assert sent > 0
    total += sent
    fails(errno.EAGAIN, c.sendall, bytes(16 << 20))
    t.start("n = 0\nc.settimeout(1)\ntry:\n    while True:\n        n += len(c.recv(1 << 20))\nexcept TimeoutError:\n    pass\nn")
    assert t.join() >= total


@check()
def test_error_told_once(t):
    """SO_ERROR gives and clears the error of a reset; queued bytes, the end and EPIPE come after it (socket(7))."""
    hits = []
    signal.signal(signal.SIGPIPE, lambda *_: hits.append(1))
    for first in ("getsockopt", "send", "recv"):
        c = t.pair()
        t.peer("c.sendall(b'queued')")
        arrived(c, 6)
        t.peer("linger(c, 1, 0)\nc.close()")
        both = select.POLLIN | select.POLLOUT
        until(lambda: polled(c, both) & select.POLLERR, 3, "the reset")
        assert polled(c, both) == both | select.POLLERR | select.POLLHUP, (first, polled(c, both))
        if first == "getsockopt":
            assert c.getsockopt(SOL, socket.SO_ERROR) == errno.ECONNRESET
        elif first == "send":
            fails(errno.ECONNRESET, c.send, b"x")
        else:
            assert c.recv(100) == b"queued"
            fails(errno.ECONNRESET, c.recv, 100)
        assert c.getsockopt(SOL, socket.SO_ERROR) == 0 and not hits, first
        assert polled(c, both) == both | select.POLLHUP, (first, polled(c, both))
        if first != "recv":
            assert c.recv(100) == b"queued"
        assert c.recv(100) == b"" == c.recv(100)
        fails(errno.EPIPE, c.send, b"x")
        assert hits == [1]
        hits.clear()
        fails(errno.ENOTCONN, c.getpeername)
        fails(errno.ENOTCONN, c.shutdown, socket.SHUT_WR)
        assert ioctl_int(c, FIONREAD) == 0
        assert c.getsockopt(TCP, socket.TCP_INFO, 8)[0] == CLOSED
        c.close()


@check()
def test_outq_of_reset_connection(t):
    """SIOCOUTQ is 0 on a connection whose peer, which had read everything, has reset it (tcp(7))."""
    c = t.pair()
    until(lambda: ioctl_int(c, SIOCOUTQ) == 0, 3, lambda: f"SIOCOUTQ 0, not {ioctl_int(c, SIOCOUTQ)}")
    t.peer("linger(c, 1, 0)\nc.close()")
    until(lambda: polled(c) & select.POLLERR, 3, "the reset")
    assert c.getsockopt(SOL, socket.SO_ERROR) == errno.ECONNRESET
    fails(errno.EPIPE, c.send, b"x", socket.MSG_NOSIGNAL)
    until(lambda: ioctl_int(c, SIOCOUTQ) == 0, 3, lambda: f"SIOCOUTQ 0, not {ioctl_int(c, SIOCOUTQ)}")


@check()
def test_empty_send_breaks_pipe(t):
    """Sending nothing after the own shutdown is EPIPE and SIGPIPE too (socket(7), tcp(7))."""
    hits = []
    signal.signal(signal.SIGPIPE, lambda *_: hits.append(1))
    c = t.pair()
    assert c.send(b"") == 0 == c.sendmsg([b""])
    c.shutdown(socket.SHUT_WR)
    fails(errno.EPIPE, c.send, b"")
    fails(errno.EPIPE, c.sendmsg, [b""])
    assert len(hits) == 2
    fails(errno.EPIPE, c.send, b"", socket.MSG_NOSIGNAL)
    assert len(hits) == 2


@check()
def test_broken_pipe_by_own_shutdown(t):
    """After the own shutdown each way to write fails with EPIPE, and with SIGPIPE unless MSG_NOSIGNAL (socket(7), tcp(7))."""
    hits = []
    signal.signal(signal.SIGPIPE, lambda *_: hits.append(1))
    for how in (socket.SHUT_WR, socket.SHUT_RDWR):
        c = t.pair()
        c.shutdown(how)
        assert polled(c, select.POLLOUT) & select.POLLOUT
        for call in (lambda: c.send(b"x"), lambda: c.sendmsg([b"x"]), lambda: os.write(c.fileno(), b"x"),
                     lambda: c.sendto(b"x", ("127.0.0.1", 9)), lambda: os.writev(c.fileno(), [b"x", b"y"])):
            before = len(hits)
            fails(errno.EPIPE, call)
            assert len(hits) == before + 1
        hits.clear()
        fails(errno.EPIPE, c.send, b"x", socket.MSG_NOSIGNAL | socket.MSG_MORE)
        fails(errno.EPIPE, c.sendmsg, [b"x"], [], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        assert not hits and c.getsockopt(SOL, socket.SO_ERROR) == 0
        if how == socket.SHUT_WR:
            t.peer("c.sendall(b'still')")
            assert recv_exact(c, 5) == b"still"
        c.close()


@check()
def test_filter_drops(t):
    """SO_ATTACH_FILTER: what the filter does not let pass does not come, until it is detached (socket(7))."""
    c = t.pair()
    drop, keep = bpf_return(0)
    c.setsockopt(SOL, SO_ATTACH_FILTER, drop)
    del keep
    t.peer("c.sendall(b'filtered')")
    assert not readable(c, 0.3) and ioctl_int(c, FIONREAD) == 0
    c.setsockopt(SOL, SO_DETACH_FILTER, 0)
    assert recv_exact(c, 8) == b"filtered"


@check()
def test_lingering_close_keeps_bytes(t):
    """A close that lingers, on a full stream, loses nothing, however late the peer reads (socket(7))."""
    c = t.pair()
    c.setblocking(False)
    linger(c, 1, 1)
    sent = fill(c, 0.3)
    c.close()
    assert t.peer("len(recv_end(c))") == sent


@check()
def test_writable_means_room(t):
    """That it may be written is told when a good part of the buffer is free, by each way of waiting alike (poll(2), tcp(7))."""
    c = t.pair()
    sent = 600_000
    c.sendall(bytes(sent))  # what an RMB doesn't hold goes by TCP
    c.setsockopt(SOL, socket.SO_SNDBUF, 400_000)  # and doesn't grow
    c.setblocking(False)
    since = time.monotonic()
    while time.monotonic() - since < 0.2:
        if polled(c, select.POLLOUT):
            sent += c.send(bytes(10_000))
            since = time.monotonic()
    epoll = select.epoll()
    epoll.register(c, EPOLLOUT)
    assert not polled(c, select.POLLOUT, 0.05) and not ready(epoll, 0.05) and not selected(c, 0.05)[1]
    t.start("len(recv_end(c))")
    assert polled(c, select.POLLOUT, 3) and ready(epoll, 3) and selected(c, 3)[1]
    c.close()
    assert t.join() == sent


# tcp(7): ioctls

@check()
def test_outq_falls_without_reader(t):
    """SIOCOUTQ counts bytes that the other host does not have yet, not those its program has not read (tcp(7)).

    SIOCOUTQNSD counts those of them that were not sent. On a full stream there are some.
    """
    c = t.pair()
    for size in (1, 10_000):
        c.sendall(bytes(size))
        until(lambda: ioctl_int(c, SIOCOUTQ) == 0, 3, lambda: f"SIOCOUTQ 0, not {ioctl_int(c, SIOCOUTQ)}")
        assert ioctl_int(c, SIOCOUTQNSD) == 0
    c.setblocking(False)
    sent = 10_001 + fill(c, 0.2)
    assert 0 < ioctl_int(c, SIOCOUTQNSD) <= ioctl_int(c, SIOCOUTQ) < sent
    t.peer("recv_exact(c, sent) and None", sent=sent)
    until(lambda: ioctl_int(c, SIOCOUTQ) == 0, 3, lambda: f"SIOCOUTQ 0, not {ioctl_int(c, SIOCOUTQ)}")
    c.setblocking(True)
    c.shutdown(socket.SHUT_WR)
    until(lambda: ioctl_int(c, SIOCOUTQ) == 0, 3, lambda: f"SIOCOUTQ 0, not {ioctl_int(c, SIOCOUTQ)}")
    for request in (FIONREAD, SIOCOUTQ, SIOCOUTQNSD):
        fails(errno.EINVAL, ioctl_int, listen(), request)
        assert ioctl_int(socket.socket(), request) == 0


@check()
def test_reading_up_to_the_mark(t):
    """SIOCATMARK and reads lead up to the mark through bytes queued before; it is kept by peeking; SIGURG (tcp(7))."""
    hits = []
    signal.signal(signal.SIGURG, lambda *_: hits.append(1))
    c = t.pair()
    fcntl.ioctl(c, SIOCSPGRP, struct.pack("i", os.getpid()))
    before = chance.randbytes(20_000)
    t.peer("c.sendall(before)", before=before)
    arrived(c, 20_000)
    fails(errno.EINVAL, c.recv, 1, socket.MSG_OOB)
    assert ioctl_int(c, SIOCATMARK) == 0
    t.peer("c.send(b'first!', socket.MSG_OOB)\nc.sendall(b'between')")
    until(lambda: hits, 3, "SIGURG")
    until(lambda: selected(c)[2], 3, "an exceptional condition")
    assert c.recv(5, socket.MSG_OOB | socket.MSG_PEEK) == b"!" == c.recv(5, socket.MSG_OOB | socket.MSG_PEEK)
    got = b""
    while not ioctl_int(c, SIOCATMARK):
        got += c.recv(777)
    assert got == before + b"first"
    assert recv_exact(c, 7) == b"between"
    # Newer urgent data makes the older an ordinary part of the stream.
    t.peer("c.sendall(b'ab')\nc.send(b'O', socket.MSG_OOB)\nc.sendall(b'cd')\nc.send(b'N', socket.MSG_OOB)\nc.sendall(b'after')")
    until(lambda: c.recv(100, socket.MSG_OOB | socket.MSG_PEEK) == b"N", 3, "the newer urgent byte")
    got = b""
    while not ioctl_int(c, SIOCATMARK):
        got += c.recv(3)
    assert got == b"abOcd"
    assert libc.recv(c.fileno(), None, 1, socket.MSG_OOB | socket.MSG_TRUNC) == 1
    fails(errno.EINVAL, c.recv, 1, socket.MSG_OOB)
    assert recv_exact(c, 5) == b"after" and ioctl_int(c, SIOCATMARK) == 0
    c.setsockopt(SOL, socket.SO_OOBINLINE, 1)
    t.peer("c.sendall(b'ab')\nc.send(b'U', socket.MSG_OOB)\nc.sendall(b'cd')")
    arrived(c, 5)
    fails(errno.EINVAL, c.recv, 1, socket.MSG_OOB)
    assert c.recv(100) == b"ab" and ioctl_int(c, SIOCATMARK) == 1
    assert c.recv(100) == b"Ucd" and ioctl_int(c, SIOCATMARK) == 0


@check()
def test_owner_and_async_by_ioctl(t):
    """FIOASYNC with an owner and F_SETSIG gives signals that tell the descriptor and the event (socket(7), fcntl(2))."""
    c = t.pair()
    number = signal.SIGRTMIN + 3
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    for set_owner, get_owner in ((FIOSETOWN, FIOGETOWN), (SIOCSPGRP, SIOCGPGRP)):
        assert ioctl_int(c, get_owner) == 0
        fcntl.ioctl(c, set_owner, struct.pack("i", os.getpid()))
        assert ioctl_int(c, get_owner) == os.getpid() == fcntl.fcntl(c, fcntl.F_GETOWN)
        fcntl.ioctl(c, set_owner, struct.pack("i", 0))
    fcntl.ioctl(c, FIOSETOWN, struct.pack("i", os.getpid()))
    fcntl.fcntl(c, fcntl.F_SETSIG, number)
    fcntl.ioctl(c, FIOASYNC, struct.pack("i", 1))
    assert fcntl.fcntl(c, fcntl.F_GETFL) & os.O_ASYNC
    for _ in range(3):
        t.peer("c.sendall(b'x')")
        until(lambda: (info := signal.sigtimedwait([number], 3)) and info.si_band & select.POLLIN, 3, "POLLIN by a signal")
        assert c.recv(1) == b"x"
        while signal.sigtimedwait([number], 0):
            pass
    fcntl.ioctl(c, FIOASYNC, struct.pack("i", 0))
    assert not fcntl.fcntl(c, fcntl.F_GETFL) & os.O_ASYNC
    _stir(t, c)
    t.peer("c.sendall(b'x')")
    assert c.recv(1) == b"x"


# tcp(7): options by their effect

@check()
def test_corked_bytes_keep_their_place(t):
    """TCP_CORK, MSG_MORE and TCP_NODELAY change when bytes go, never their order; the options read as set (tcp(7))."""
    t.peer("l = listen()")
    c = connect(t.peer("l.getsockname()"))
    t.peer("c = l.accept()[0]")
    nodelay = False
    for turn in range(200):
        data = chance.randbytes(chance.randrange(2, 3000))
        cut = chance.randrange(1, len(data))
        t.start("c.sendall(recv_exact(c, size))", size=len(data))
        if turn % 3 == 0:
            c.setsockopt(TCP, socket.TCP_CORK, 1)
            c.sendall(data[:cut])
            c.sendall(data[cut:])
            assert c.getsockopt(TCP, socket.TCP_CORK) == 1
            if turn % 2:
                c.setsockopt(TCP, socket.TCP_NODELAY, 1)  # flushes what is corked
                nodelay = True
            c.setsockopt(TCP, socket.TCP_CORK, 0)
        elif turn % 3 == 1:
            c.send(data[:cut], socket.MSG_MORE)
            c.sendall(data[cut:])
        else:
            c.sendall(data)
            c.setsockopt(TCP, socket.TCP_NODELAY, 0)
            nodelay = False
        assert recv_exact(c, len(data)) == data, turn
        t.join()
        assert (c.getsockopt(TCP, socket.TCP_CORK), bool(c.getsockopt(TCP, socket.TCP_NODELAY))) == (0, nodelay)

    def on_rmb():
        t.start("echo(c, 10)")
        c.sendall(b"0123456789")
        assert recv_exact(c, 10) == b"0123456789"
        t.join()
        return t.on_rmb(c)
    if t.both:
        until(on_rmb, 5, "back on RMBs")


@check()
def test_user_timeout_ends_stuck_connection(t):
    """TCP_USER_TIMEOUT: bytes that stay untransmitted for a closed window for so long end it with ETIMEDOUT (tcp(7))."""
    c = t.pair()
    c.setblocking(False)
    c.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 500)
    fill(c, 0.3)
    until(lambda: polled(c, select.POLLERR) & select.POLLERR, 10, "the end of the connection")
    assert c.getsockopt(SOL, socket.SO_ERROR) == errno.ETIMEDOUT
    fails(errno.EPIPE, c.send, b"x", socket.MSG_NOSIGNAL)


@check()
def test_user_timeout_of_listener(t):
    """TCP_USER_TIMEOUT of the listener holds for an accepted connection, whose sender waits before each send (tcp(7))."""
    s = _accepted(t, (TCP, socket.TCP_USER_TIMEOUT, 500))
    s.setblocking(False)
    while polled(s, select.POLLOUT, 0.3) == select.POLLOUT:
        s.send(bytes(1 << 16))
    until(lambda: polled(s, select.POLLERR) & select.POLLERR, 10, "the end of the connection")
    assert s.getsockopt(SOL, socket.SO_ERROR) == errno.ETIMEDOUT


@check()
def test_user_timeout_of_waiting_sender(t):
    """TCP_USER_TIMEOUT holds for a sender, too, that waits for room when it is set (tcp(7))."""
    c = t.pair()
    c.setblocking(False)
    epoll = select.epoll()
    epoll.register(c, EPOLLOUT | EPOLLET)
    fill(c, 0.3)
    ready(epoll)
    c.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 500)
    while ready(epoll, 10) == {c.fileno(): EPOLLOUT}:
        fill(c, 0.05)
    assert c.getsockopt(SOL, socket.SO_ERROR) == errno.ETIMEDOUT


@check()
def test_user_timeout_spares_slow_reader(t):
    """TCP_USER_TIMEOUT ends no connection whose peer reads, however slowly, or has read everything (tcp(7))."""
    c = t.pair()
    c.setblocking(False)
    c.setsockopt(TCP, socket.TCP_USER_TIMEOUT, 500)
    size = 3_000_000
    t.start("""
whole = b""
while len(whole) < size:
    whole += c.recv(20_000)
    time.sleep(0.2 if len(whole) % 11 == 0 else 0.01)
hashlib.sha256(whole).hexdigest()""", size=size)
    data = chance.randbytes(size)
    send_all(c, data)
    assert t.join() == hashlib.sha256(data).hexdigest()
    time.sleep(0.7)
    assert not polled(c, 0)
    c.setblocking(True)
    _stir(t, c, seconds=5)
    if t.both:
        assert t.on_rmb(c)


@check()
def test_deferred_accept(t):
    """TCP_DEFER_ACCEPT: the listener is woken by the first bytes, and they are there for the accepted one (tcp(7))."""
    with listen() as listener:
        listener.setsockopt(TCP, socket.TCP_DEFER_ACCEPT, 5)
        for turn in range(5):
            t.peer("c = connect(address)", address=listener.getsockname())
            assert not readable(listener, 0.05)
            t.peer("c.sendall(b'first')")
            assert readable(listener, 5)
            s = listener.accept()[0]
            assert s.recv(100, socket.MSG_DONTWAIT) == b"first", turn
            _stir(t, s)
            t.peer("c.sendall(b'more')\nc.close()")
            assert recv_end(s) == b"more"


@check()
def test_connected_socket_used_again(t):
    """EISCONN and EINVAL on a connected socket; connect to AF_UNSPEC resets it, and it connects anew (ip(7), connect(2))."""
    t.peer("l = listen()")
    address = tuple(t.peer("l.getsockname()"))
    s = socket.socket()
    for turn in range(3):
        s.connect(address)
        t.peer("c = l.accept()[0]")
        _stir(t, s)
        fails(errno.EISCONN, s.connect, address)
        fails(errno.EINVAL, s.bind, ("127.0.0.1", 0))
        fails(errno.EINVAL, s.listen)
        fails(errno.EINVAL, s.accept)
        t.peer("c.sendall(b'alive')")
        assert recv_exact(s, 5) == b"alive"
        if turn == 1:
            t.peer("c.sendall(b'never read')")
            arrived(s, 10)
        if turn == 2:
            s.sendall(b"may be lost")
        assert libc.connect(s.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16) == 0
        t.peer("until(lambda: polled(c, select.POLLERR) & select.POLLERR, 3, 'the reset')")
        assert t.peer("c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)") == errno.ECONNRESET
        assert s.getsockopt(SOL, socket.SO_ERROR) == errno.ECONNRESET
        fails(errno.ENOTCONN, s.getpeername)
        fails(errno.ENOTCONN, s.recv, 1)
        fails(errno.EPIPE, s.send, b"x", socket.MSG_NOSIGNAL)
        assert ioctl_int(s, FIONREAD) == 0


@check()
def test_passed_socket_keeps_options(t):
    """Options belong to the open socket: a low-water mark and timestamps hold in a process that gets it (socket(7))."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)

    def child():
        ours.close()
        sock = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
        for _ in range(300):
            sock.sendall(recv_exact(sock, 128))
            time.sleep(0.001)
        theirs.send(b"used")
        theirs.recv(4)
        for size, seen in ((50, False), (110, True)):
            arrived(sock, size)
            assert readable(sock, 0.2) is seen and bool(polled(sock)) is seen, (size, seen)
            theirs.send(b"seen")
            theirs.recv(4)
        data, controls, _, _ = sock.recvmsg(110, 100)
        assert data == bytes(110) and [c[:2] for c in controls] == [(SOL, SO_TIMESTAMP)], controls
    pid = forked(child)
    theirs.close()
    c = t.pair()
    c.setsockopt(SOL, socket.SO_RCVLOWAT, 100)
    c.setsockopt(SOL, SO_TIMESTAMP, 1)
    socket.send_fds(ours, [b"x"], [c.fileno()])
    c.close()
    t.peer("for _ in range(300):\n    c.sendall(bytes(128))\n    recv_exact(c, 128)\n")
    assert ours.recv(4) == b"used"
    for size in (50, 60):
        ours.send(b"next")
        t.peer("c.sendall(bytes(size))", size=size)
        assert ours.recv(4) == b"seen"
    ours.send(b"next")
    reap(pid)


@check()
def test_message_fields(t):
    """recvmsg gives back MSG_CMSG_CLOEXEC, and leaves the length of a name alone that is not asked for (recvmsg(2))."""
    c = t.pair()
    t.peer("c.sendall(b'0123456789')")
    arrived(c, 10)
    data, control, flags, _ = c.recvmsg(2, 100, CMSG_CLOEXEC)
    assert (data, control) == (b"01", [])
    buffer = ctypes.create_string_buffer(2)
    message = Msghdr(namelen=77, iov=vectors(buffer), iovlen=1, flags=0x55)
    assert libc.recvmsg(c.fileno(), ctypes.byref(message), 0) == 2 and buffer.raw == b"23"
    fields = hex(flags), message.namelen, message.controllen, message.flags
    assert fields == (hex(CMSG_CLOEXEC), 77, 0, 0), fields


@check()
def test_inq_control_message(t):
    """TCP_INQ makes recvmsg tell what stays queued, as FIONREAD does (linux/tcp.h)."""
    c = t.pair()
    t.peer("c.sendall(b'456789')")
    arrived(c, 6)
    c.setsockopt(TCP, TCP_INQ, 1)
    assert c.recvmsg(2, 100)[:3] == (b"45", [(TCP, TCP_CM_INQ, struct.pack("i", 4))], 0)
