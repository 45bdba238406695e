"""B: blocking, time, idle. Timeouts, full lengths, low-water marks, CPU use of those who wait."""

import fcntl
import os
import select
import socket
import struct
import time

from harness.behave import check
from harness.net import *


def _timed(low, high, number, function, *args):
    began = time.monotonic()
    fails(number, function, *args)
    seconds = time.monotonic() - began
    assert low <= seconds <= high, f"{function} took {seconds:.3f} s"


@check()
def test_B1_receive_timeout(t):
    """SO_RCVTIMEO ends blocked calls with EAGAIN at about the set time."""
    c = t.pair()
    for turn in range(2):
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0.25))
        for call in (lambda: c.recv(1), lambda: os.read(c.fileno(), 1), lambda: c.recvmsg(1),
                     lambda: c.recv(1, socket.MSG_PEEK), lambda: os.readv(c.fileno(), [bytearray(5)])):
            _timed(0.2, 1, errno.EAGAIN, call)
        seconds, micro = struct.unpack("ll", c.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        assert seconds == 0 and 240_000 <= micro <= 260_000
        t.peer("c.send(b'x')")
        assert c.recv(1) == b"x"
        # MSG_WAITALL with a part of it there gives the part.
        t.peer("c.send(b'part')")
        assert c.recv(10, socket.MSG_WAITALL) == b"part"
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0))
        t.warm(c, "c")


@check()
def test_B1_send_timeout(t):
    """SO_SNDTIMEO ends a send on a full stream; the stream goes on after it."""
    c = t.pair()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(0.25))
    total = 0
    while True:
        began = time.monotonic()
        try:
            total += c.send(bytes(100_000))
        except BlockingIOError:
            break
    assert 0.2 <= time.monotonic() - began <= 1
    _timed(0.2, 1, errno.EAGAIN, os.write, c.fileno(), b"x" * 1000)
    t.peer("recv_exact(c, total) and None", total=total)
    assert c.send(b"on") == 2
    assert t.peer("c.recv(10)") == b"on"


@check()
def test_B1_accept_timeout(t):
    listener = listen()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0.25))
    for _ in range(2):
        _timed(0.2, 1, errno.EAGAIN, listener._accept)
    t.peer("c = connect(address)", address=listener.getsockname())
    listener.accept()


@check()
def test_B2_full_length(t):
    """A blocking send, write or sendmsg returns the full length, however slow the reader is."""
    c = t.pair()
    for call, size in ((lambda data: c.send(data), 16 << 20), (lambda data: c.sendmsg([data]), 8 << 20),
                       (lambda data: os.write(c.fileno(), data), 8 << 20)):
        t.start("""
left, digest = size, hashlib.sha256()
while left:
    part = c.recv(min(left, 300000))
    digest.update(part)
    left -= len(part)
    if left % 7 == 0:
        time.sleep(0.002)
digest.digest()""", size=size)
        data = chance.randbytes(1 << 20) * (size >> 20)
        assert call(data) == size
        assert t.join() == hashlib.sha256(data).digest()


@check()
def test_B3_receive_low_water(t):
    """SO_RCVLOWAT holds back readability below the mark, except at the end, and not smaller reads."""
    for early in (False, True):
        c = t.pair(warm=not early)
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 100)
        assert c.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 100
        epoll = select.epoll()
        epoll.register(c, EPOLLIN)
        t.peer("c.sendall(b'a' * 50)")
        no_event(epoll)
        assert not readable(c, 0.1) and not polled(c)
        assert c.recv(5, socket.MSG_DONTWAIT) == b"aaaaa"
        t.peer("c.sendall(b'b' * 60)")
        assert ready(epoll, 3) == {c.fileno(): EPOLLIN} and readable(c)
        assert recv_exact(c, 100) == b"a" * 45 + b"b" * 55
        no_event(epoll, 0.1)
        t.peer("c.shutdown(socket.SHUT_WR)")
        assert ready(epoll, 3) and recv_end(c) == b"b" * 5
        c.close()


@check()
def test_B4_waitall(t):
    """MSG_WAITALL returns the full amount except at the end."""
    c = t.pair()
    t.start("for i in range(10):\n    c.sendall(bytes([i]) * 100)\n    time.sleep(0.015)")
    assert c.recv(1000, socket.MSG_WAITALL) == b"".join(bytes([i]) * 100 for i in range(10))
    t.join()
    fails(errno.EAGAIN, c.recv, 10, socket.MSG_WAITALL | socket.MSG_DONTWAIT)
    data = chance.randbytes(6 << 20)
    t.start("c.sendall(data)", data=data)
    buffers = [bytearray(1 << 20), bytearray(5 << 20)]
    count, _, flags, _ = c.recvmsg_into(buffers, 0, socket.MSG_WAITALL)
    assert count == 6 << 20 and b"".join(buffers) == data
    t.join()
    t.peer("c.sendall(b'short')\nc.shutdown(socket.SHUT_WR)")
    assert c.recv(100, socket.MSG_WAITALL) == b"short"
    assert c.recv(100, socket.MSG_WAITALL) == b""


@check()
def test_B5_would_block(t):
    """EAGAIN for "nothing there" and "no room" in every call, asked for by flag, O_NONBLOCK or FIONBIO."""
    c = t.pair()
    flag = socket.MSG_DONTWAIT
    for call in (lambda: c.recv(1, flag), lambda: c.recvfrom(1, flag), lambda: c.recvmsg(1, 0, flag),
                 lambda: c.recv(1, flag | socket.MSG_PEEK)):
        fails(errno.EAGAIN, call)
    fcntl.ioctl(c, FIONBIO, struct.pack("i", 1))
    assert fcntl.fcntl(c, fcntl.F_GETFL) & os.O_NONBLOCK
    for call in (lambda: os.read(c.fileno(), 1), lambda: os.readv(c.fileno(), [bytearray(2)]), lambda: c.recv(1)):
        fails(errno.EAGAIN, call)
    fcntl.ioctl(c, FIONBIO, struct.pack("i", 0))
    assert not fcntl.fcntl(c, fcntl.F_GETFL) & os.O_NONBLOCK
    flags = fcntl.fcntl(c, fcntl.F_GETFL)
    fcntl.fcntl(c, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    fails(errno.EAGAIN, os.read, c.fileno(), 1)
    total = fill(c)
    for call in (lambda: c.send(b"x"), lambda: os.write(c.fileno(), b"x"), lambda: os.writev(c.fileno(), [b"x"]),
                 lambda: c.sendmsg([b"x"])):
        fails(errno.EAGAIN, call)
    fcntl.fcntl(c, fcntl.F_SETFL, flags)
    fails(errno.EAGAIN, c.send, b"x" * 100_000, flag)
    t.peer("recv_exact(c, total) and None", total=total)
    listener = listen()
    listener.setblocking(False)
    fails(errno.EAGAIN, listener._accept)


def idle(idle_socks):
    epoll = select.epoll()
    for sock in idle_socks:
        epoll.register(sock, EPOLLIN)
    thread = bg(listen().accept)
    poll_thread = bg(polled, idle_socks[0].fileno(), select.POLLIN, 2)
    recv_thread = bg(idle_socks[1].recv, 1)
    before = cpu()
    epoll.poll(2)
    time.sleep(0.1)
    return cpu() - before


@check()
def test_B6_idle_costs_nothing(t):
    """30 idle connections, a lost peer and a blocked accept: both processes use under 0.3 s CPU in 2 s."""
    socks = [t.pair(f"c{number}", warm=number < 4) for number in range(30)]
    pid = forked(lambda: time.sleep(60))  # a process whose connection is lost
    os.kill(pid, 9)
    reap(pid, status=-9)
    socks.pop().close()
    t.peer("idle_socks = [c0, c1, c2, c3] + [globals()[f'c{n}'] for n in range(4, 29)]")
    time.sleep(0.3)
    t.start("idle(idle_socks)")
    mine = idle(socks)
    other = t.join()
    print("CPU", mine, other, file=sys.stderr)
    assert mine < 0.3 and other < 0.3, (mine, other)


@check()
def test_B6_lost_peer_costs_nothing(t):
    """Waiting after the peer was killed uses no CPU."""
    c, d = t.pair("c"), t.pair("d")
    t.kill_peer()
    time.sleep(0.5)
    listener = listen()
    epoll = select.epoll()
    epoll.register(listener, EPOLLIN)
    before = cpu()
    epoll.poll(1.5)
    assert cpu() - before < 0.2, cpu() - before
    assert c and d


@check()
def test_B7_waits_with_nothing(t):
    """Waits with nothing to watch, or only idle sockets, return at their time without CPU; zero does not wait."""
    c, d = t.pair("c"), t.pair("d")
    epoll, empty = select.epoll(), select.epoll()
    for sock in (c, d):
        epoll.register(sock, EPOLLIN)
    waits = {
        "select nothing": lambda s: select.select([], [], [], s),
        "poll nothing": lambda s: select.poll().poll(s * 1000),
        "epoll nothing": empty.poll,
        "select idle": lambda s: select.select([c, d], [], [], s),
        "poll idle": lambda s: polled(c, select.POLLIN, s),
        "epoll idle": epoll.poll,
    }
    for name, wait in waits.items():
        began, used = time.monotonic(), cpu()
        value = wait(0.3)
        seconds, used = time.monotonic() - began, cpu() - used
        assert not value or not any(value), (name, value)
        assert 0.29 <= seconds <= 1.5, (name, seconds)
        assert used < 0.15, (name, used)
        began = time.monotonic()
        for _ in range(20):
            wait(0)
        assert time.monotonic() - began < 0.2, name


@check()
def test_B8_empty_mask(t):
    """With an empty mask only errors and full hang-up are reported."""
    c = t.pair()
    level, edge, once = select.epoll(), select.epoll(), select.epoll()
    level.register(c, 0)
    edge.register(c, EPOLLIN | EPOLLRDHUP | EPOLLET)
    once.register(c, EPOLLONESHOT)
    t.peer("c.shutdown(socket.SHUT_WR)")
    before = cpu()
    no_event(level, 0.7)
    assert cpu() - before < 0.2
    assert ready(edge, 1) == {c.fileno(): EPOLLIN | EPOLLRDHUP}
    no_event(edge, 0.1)
    t.peer("linger(c, 1, 0)\nc.close()")
    want = {c.fileno(): EPOLLERR | EPOLLHUP}
    until(lambda: ready(level, 0.1) == want, 3, "EPOLLERR|EPOLLHUP with an empty mask")
    assert ready(level) == want
    assert ready(once, 1) == want
    no_event(once, 0.1)
