"""P: peeking, counts, options, addresses."""

import fcntl
import os
import select
import socket
import stat
import struct
import time

from harness.behave import check
from harness.net import *


@check()
def test_P1_peek(t):
    """1500 random blocks: two peeks and a peeking recvmsg agree with the read and with the stream."""
    c = t.pair()
    t.start("""
def send_blocks(seed):
    r = random.Random(seed)
    for _ in range(1500):
        c.sendall(r.randbytes(int(2 ** r.uniform(0, 14))))
    c.shutdown(socket.SHUT_WR)
send_blocks(11)""")
    same = random.Random(11)
    stream = b"".join(same.randbytes(int(2 ** same.uniform(0, 14))) for _ in range(1500))
    at = 0
    while at < len(stream):
        size = int(2 ** chance.uniform(0, 14))
        first = c.recv(size, socket.MSG_PEEK)
        second = c.recv(size, socket.MSG_PEEK)
        third = c.recvmsg(size, 0, socket.MSG_PEEK)[0]
        got = c.recv(size)
        for one, other in ((first, second), (second, third), (third, got)):
            assert other.startswith(one), (at, size, len(one), len(other))
        assert got == stream[at:at + len(got)], at
        at += len(got)
    assert c.recv(10, socket.MSG_PEEK) == b"" == c.recv(10)
    t.join()


@check()
def test_P1_peek_with_waitall(t):
    """MSG_PEEK with MSG_WAITALL waits for the amount."""
    c = t.pair()
    for _ in range(5):
        t.start("c.sendall(b'12345')\ntime.sleep(0.1)\nc.sendall(b'67890')")
        assert c.recv(10, socket.MSG_PEEK | socket.MSG_WAITALL) == b"1234567890"
        t.join()
        assert c.recv(20) == b"1234567890"


@check()
def test_P2_urgent(t):
    """Urgent data: POLLPRI, reads stop at the mark, SIOCATMARK, MSG_OOB once."""
    for warm in (False, True):
        c = t.pair(warm=warm)
        epoll = select.epoll()
        epoll.register(c, EPOLLPRI)
        t.peer("c.send(b'ab')\nc.send(b'X', socket.MSG_OOB)\nc.send(b'cd')")
        assert ready(epoll, 3) == {c.fileno(): EPOLLPRI}
        assert polled(c, select.POLLPRI) == select.POLLPRI and selected(c)[2]
        until(lambda: ioctl_int(c, FIONREAD) >= 2, 3, "two bytes")
        time.sleep(0.05)
        assert c.recv(100) == b"ab"
        assert ioctl_int(c, SIOCATMARK) == 1
        assert c.recv(1, socket.MSG_OOB) == b"X"
        fails(errno.EINVAL, c.recv, 1, socket.MSG_OOB)
        assert c.recv(100) == b"cd"
        c.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        t.peer("c.send(b'ef')\nc.send(b'Y', socket.MSG_OOB)\nc.send(b'gh')\nc.shutdown(socket.SHUT_WR)")
        assert recv_end(c) == b"efYgh"
        c.close()


@check()
def test_P3_fionread(t):
    """FIONREAD equals sent minus read, 0 at the end, EINVAL on a listener."""
    c = t.pair()
    t.peer("c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)")
    pending = 0
    for _ in range(200):
        size = chance.randrange(1, 3000)
        t.peer("c.sendall(bytes(size))", size=size)
        pending += size
        until(lambda: ioctl_int(c, FIONREAD) == pending, 3, lambda: f"{pending} bytes, not {ioctl_int(c, FIONREAD)}")
        part = chance.randrange(0, pending + 1)
        if pending > 60_000:
            part = pending
        if part:
            recv_exact(c, part)
        pending -= part
        assert ioctl_int(c, FIONREAD) == pending
    recv_exact(c, pending)
    t.peer("c.close()")
    assert c.recv(1) == b"" and ioctl_int(c, FIONREAD) == 0
    fails(errno.EINVAL, ioctl_int, listen(), FIONREAD)


@check()
def test_P4_outq_and_tcp_info(t):
    """SIOCOUTQ counts what the peer does not have and falls to 0; TCP_INFO tells the state."""
    c = t.pair()
    c.setblocking(False)
    sent = fill(c, 0.3)
    queued = ioctl_int(c, SIOCOUTQ)
    assert 0 < queued <= sent, (queued, sent)
    t.peer("recv_exact(c, sent) and None", sent=sent)
    until(lambda: ioctl_int(c, SIOCOUTQ) == 0, 3, lambda: f"SIOCOUTQ 0, not {ioctl_int(c, SIOCOUTQ)}")
    assert c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0] == 1
    t.peer("c.close()")
    until(lambda: c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0] == 8, 3, "close-wait")


@check()
def test_P5_trunc_discards(t):
    """MSG_TRUNC drops bytes without touching the buffer."""
    c = t.pair()
    t.peer("c.sendall(b'0123456789abcdef')")
    until(lambda: ioctl_int(c, FIONREAD) == 16, 3, "16 bytes")
    assert libc.recv(c.fileno(), None, 5, socket.MSG_TRUNC) == 5
    buffer = ctypes.create_string_buffer(b"zzzzzzzz", 8)
    assert libc.recv(c.fileno(), buffer, 3, socket.MSG_TRUNC) == 3
    assert buffer.raw == b"zzzzzzzz"
    assert c.recv(100) == b"89abcdef"
    fails(errno.EAGAIN, c.recv, 5, socket.MSG_TRUNC | socket.MSG_DONTWAIT)


OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
           (socket.SOL_SOCKET, socket.SO_SNDBUF, 50_000), (socket.SOL_SOCKET, socket.SO_RCVBUF, 60_000),
           (socket.SOL_SOCKET, socket.SO_OOBINLINE, 1), (socket.SOL_SOCKET, socket.SO_PRIORITY, 3),
           (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77),
           (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 33), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
           (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 12_345), (socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1),
           (socket.IPPROTO_IP, socket.IP_TOS, 16), (socket.IPPROTO_IP, socket.IP_TTL, 55)]


@check()
def test_P6_options(t):
    """Common options are accepted and read back, before and after connecting."""
    s = socket.socket()
    t.peer("l = listen()")
    for turn in range(2):
        for level, option, value in OPTIONS:
            s.setsockopt(level, option, value)
            want = value * 2 if option in (socket.SO_SNDBUF, socket.SO_RCVBUF) and level == socket.SOL_SOCKET else value
            got = s.getsockopt(level, option)
            assert got == want or (option == socket.TCP_QUICKACK and level == socket.IPPROTO_TCP), (turn, level, option, got)
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_INET
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        fails(errno.ENOPROTOOPT, s.setsockopt, socket.IPPROTO_TCP, 9999, 1)
        assert stat.S_ISSOCK(os.fstat(s.fileno()).st_mode)
        if not turn:
            s.connect(tuple(t.peer("l.getsockname()")))
            t.peer("c = l.accept()[0]")
            t.warm(s, "c")
    assert listen().getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    data = chance.randbytes(500_000)
    t.start("echo(c, 500000)")
    sender = bg(s.sendall, data)
    assert recv_exact(s, 500_000) == data
    sender.join()
    t.join()


@check()
def test_P7_addresses(t):
    """getsockname, getpeername and accept give the TCP addresses, with the kernel's truncation rule."""
    t.peer("l = listen()\naddress = l.getsockname()")
    s = socket.socket()
    fails(errno.ENOTCONN, s.getpeername)
    s.connect(tuple(t.peer("address")))
    accepted, its_name, its_peer = t.peer("c, where = l.accept()\n(where, c.getsockname(), c.getpeername())")
    t.warm(s, "c")
    assert s.getsockname() == accepted == its_peer and s.getpeername() == its_name == t.peer("address")
    buffer = ctypes.create_string_buffer(b"\xee" * 16, 16)
    size = ctypes.c_uint32(4)
    for call in (libc.getsockname, libc.getpeername):
        buffer.raw, size.value = b"\xee" * 16, 4
        assert call(s.fileno(), buffer, ctypes.byref(size)) == 0
        assert size.value == 16 and buffer.raw[4:] == b"\xee" * 12 and buffer.raw[:4] != b"\xee" * 4
    listener = listen()
    fails(errno.ENOTCONN, listener.getpeername)
    t.peer("d = connect(address)", address=listener.getsockname())
    buffer.raw, size.value = b"\xee" * 16, 4
    number = libc.accept(listener.fileno(), buffer, ctypes.byref(size))
    assert number >= 0 and size.value == 16 and buffer.raw[4:] == b"\xee" * 12
    os.close(number)
    peer_name = s.getpeername()
    t.peer("c.close()")
    assert s.recv(1) == b"" and s.getpeername() == peer_name
    buffer.raw, size.value = b"\xee" * 16, 16
    data = ctypes.create_string_buffer(4)
    t.peer("e = connect(address)\ne.send(b'x')", address=listener.getsockname())
    f = listener.accept()[0]
    assert libc.recvfrom(f.fileno(), data, 4, 0, buffer, ctypes.byref(size)) == 1
    assert size.value == 0 and buffer.raw == b"\xee" * 16


@check()
def test_P8_zero_length(t):
    """Zero-length sends are no end of stream, zero-length reads take nothing."""
    c = t.pair()
    for _ in range(5):
        t.peer("c.send(b'one')\nc.send(b'')\nc.sendmsg([])\nc.sendmsg([b'', b''])\nos.write(c.fileno(), b'')\nc.send(b'two')")
        assert c.recv(0) == b"" and os.read(c.fileno(), 0) == b""
        assert recv_exact(c, 6) == b"onetwo"
    # With nothing there, a read of nothing returns at once.
    assert os.read(c.fileno(), 0) == b""
    t.peer("c.send(b'msg')")
    data, ancillary, flags, address = c.recvmsg(10, 100)
    assert (data, ancillary, flags, address) == (b"msg", [], 0, None)


@check()
def test_P9_zerocopy(t):
    """MSG_ZEROCOPY is refused when switched on, or delivers data and completions."""
    SO_ZEROCOPY, MSG_ZEROCOPY, MSG_ERRQUEUE = 60, 0x4000000, 0x2000
    for warm in (False, True):
        c = t.pair(warm=warm)
        try:
            c.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
        except OSError:
            continue
        t.start("recv_exact(c, 200000)")
        sends = 0
        data = chance.randbytes(200_000)
        left = memoryview(data)
        while left:
            left = left[c.send(left[:50_000], MSG_ZEROCOPY):]
            sends += 1
        assert t.join() == data
        done, end = 0, time.monotonic() + 5
        while done < sends and time.monotonic() < end:
            try:
                _, ancillary, _, _ = c.recvmsg(1, 200, MSG_ERRQUEUE)
            except BlockingIOError:
                polled(c, 0, 0.05)
                continue
            for _, _, payload in ancillary:
                low, high = struct.unpack_from("II", payload, 8)
                done += high - low + 1
        assert done == sends, (done, sends)
