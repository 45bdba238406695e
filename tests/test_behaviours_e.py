"""E: end of stream. Close, half-close, reset, kill."""

import os
import select
import signal
import socket
import struct
import time

from harness.behave import check
from harness.net import *


@check()
def test_E1_linger_zero_resets(t):
    """Closing with linger on and zero time resets: ECONNRESET once, then 0; sending fails."""
    for pending in (False, True):
        c = t.pair()
        if pending:
            t.peer("c.sendall(b'kept or not')")
            time.sleep(0.05)
            assert recv_exact(c, 4) == b"kept"
        t.peer("linger(c, 1, 0)\nc.close()")
        time.sleep(0.1)
        if pending:
            assert recv_exact(c, 7) == b" or not"  # what had arrived before the reset is still read
        fails(errno.ECONNRESET, c.recv, 100)
        assert c.recv(100) == b""
        fails((errno.EPIPE, errno.ECONNRESET), c.send, b"x", socket.MSG_NOSIGNAL)
        c.close()


@check()
def test_E1_linger_reads_back(t):
    """Linger {1, 3} reads back, and close does not wait when all was read."""
    c = t.pair()
    linger(c, 1, 3)
    assert struct.unpack("ii", c.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)) == (1, 3)
    c.sendall(b"x" * 10_000)
    t.peer("recv_exact(c, 10000)")
    began = time.monotonic()
    c.close()
    assert time.monotonic() - began < 1
    assert t.peer("recv_end(c)") == b""


@check()
def test_E2_half_close(t):
    """After SHUT_WR the peer reads the end again and again, and can still send any amount back."""
    c = t.pair()
    t.start("""
got = recv_end(c)
again = [c.recv(10) for _ in range(3)]
c.setblocking(False)
again += [c.recv(10) for _ in range(3)]
c.setblocking(True)
c.sendall(b"answer--" * 393216)
c.close()
(got, again)""")
    c.sendall(b"q" * 3000)
    c.shutdown(socket.SHUT_WR)
    fails(errno.EPIPE, c.send, b"x", socket.MSG_NOSIGNAL)
    assert recv_end(c) == b"answer--" * 393216
    assert t.join() == (b"q" * 3000, [b""] * 6)


@check()
def test_E2_half_close_wakes(t):
    """A reader asleep in recv, poll, select or epoll is woken by a half-close."""
    def in_epoll(c):
        epoll = select.epoll()
        epoll.register(c, EPOLLIN)
        return epoll.poll(5)
    waits = {"recv": lambda c: c.recv(1) == b"", "poll": lambda c: polled(c, select.POLLIN, 5),
             "select": lambda c: readable(c, 5), "epoll": in_epoll}
    for name, wait in waits.items():
        c = t.pair()
        sleeper = bg(wait, c)
        time.sleep(0.15)
        assert sleeper.is_alive(), name
        began = time.monotonic()
        t.peer("c.shutdown(socket.SHUT_WR)")
        assert sleeper.join(), name
        assert time.monotonic() - began < 1, name
        c.sendall(b"still")
        assert t.peer("recv_exact(c, 5)") == b"still"


@check()
def test_E3_killed_after_sending(t):
    """The bytes of a killed peer can be read, then EOF or ECONNRESET."""
    c = t.pair()
    t.peer("c.sendall(b'k' * 30000)")
    t.kill_peer()
    time.sleep(0.2)
    assert recv_exact(c, 30_000) == b"k" * 30_000
    try:
        assert c.recv(10) == b""
    except ConnectionResetError:
        pass


@check()
def test_E3_killed_while_streaming(t):
    """An intact prefix of the stream of a peer that is killed in the middle."""
    c = t.pair()
    pid = t.peer("os.getpid()")
    t.start("""
block = bytes(range(256)) * 40
while True:
    c.sendall(block)""")
    got = recv_exact(c, 3_000_000)
    os.kill(pid, signal.SIGKILL)
    try:
        while part := c.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    block = bytes(range(256)) * 40
    assert got == (block * (len(got) // len(block) + 1))[:len(got)], "not a prefix of what was sent"


def _killed(t, act):
    """Kills the peer 0.3 s from now, while act(c) runs; act must end within 3 s of it."""
    c = t.pair()
    pid = t.peer("os.getpid()")
    sleeper = bg(act, c)
    time.sleep(0.3)
    assert sleeper.is_alive()
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    value = sleeper.join(6)
    assert time.monotonic() - began < 3, time.monotonic() - began
    return value


@check()
def test_E3_killed_wakes_recv(t):
    def act(c):
        try:
            return c.recv(10)
        except ConnectionResetError:
            return b""
    assert _killed(t, act) == b""


@check()
def test_E3_killed_wakes_epoll(t):
    def act(c):
        epoll = select.epoll()
        epoll.register(c, EPOLLIN)
        return epoll.poll(8)
    assert _killed(t, act)


@check()
def test_E3_killed_wakes_full_send(t):
    def act(c):
        try:
            while True:
                c.send(bytes(100_000), socket.MSG_NOSIGNAL)
        except (ConnectionResetError, BrokenPipeError):
            return True
    assert _killed(t, act)


@check()
def test_E4_shut_rd(t):
    """SHUT_RD keeps queued bytes, makes later reads return 0 at once, wakes readers, leaves sending alone."""
    c = t.pair()
    t.peer("c.sendall(b'abcde')")
    until(lambda: ioctl_int(c, FIONREAD) == 5, 3, "5 bytes queued")
    c.shutdown(socket.SHUT_RD)
    assert c.recv(2) == b"ab" and c.recv(10) == b"cde"
    began = time.monotonic()
    assert c.recv(10) == b"" and c.recv(10) == b"" and time.monotonic() - began < 0.5
    c.sendall(b"still sending")
    assert t.peer("recv_exact(c, 13)") == b"still sending"
    c.close()
    c = t.pair()
    sleeper = bg(c.recv, 10)
    time.sleep(0.2)
    c.shutdown(socket.SHUT_RD)
    assert sleeper.join(3) == b""
    c.sendall(b"still")
    assert t.peer("recv_exact(c, 5)") == b"still"


@check()
def test_E5_broken_pipe(t):
    """EPIPE and SIGPIPE when the peer is gone; no signal with MSG_NOSIGNAL; the default action kills."""
    hits = []
    c = t.pair()
    t.peer("c.close()")
    until(lambda: polled(c, select.POLLIN), 3, "the end of the stream")
    signal.signal(signal.SIGPIPE, lambda *_: hits.append(1))

    def gone():
        try:
            c.send(b"x", socket.MSG_NOSIGNAL)
        except OSError as error:
            return error.errno == errno.EPIPE
    until(gone, 3, "EPIPE")
    assert not hits
    for call in (lambda: c.send(b"x"), lambda: os.write(c.fileno(), b"x"), lambda: os.writev(c.fileno(), [b"x", b"y"]),
                 lambda: c.sendmsg([b"x"])):
        before = len(hits)
        fails(errno.EPIPE, call)
        assert len(hits) == before + 1
    before = len(hits)
    fails(errno.EPIPE, c.sendmsg, [b"x"], [], socket.MSG_NOSIGNAL)
    assert len(hits) == before

    def child():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        c.send(b"x")
    reap(forked(child), status=-signal.SIGPIPE)


@check()
def test_E6_unread_input_resets(t):
    """Closing or exiting with unread input resets; with everything read it is a clean end."""
    for how in ("close", "exit"):
        for read in (False, True):
            c = t.pair()
            c.sendall(b"unread")
            t.peer("until(lambda: ioctl_int(c, FIONREAD) == 6, 3, 'six bytes')")
            if read:
                t.peer("recv_exact(c, 6)")
            if how == "close":
                t.peer("c.close()")
            else:
                t.peer("pid = forked(lambda: None)\nc.close()\nreap(pid)")
            if read:
                assert c.recv(10) == b"", how
            else:
                fails(errno.ECONNRESET, c.recv, 10)
            c.close()


@check()
def test_E6_process_exits_with_unread_input(t):
    """The same when the process itself ends."""
    c = t.pair()
    c.sendall(b"unread")
    t.peer("until(lambda: ioctl_int(c, FIONREAD) == 6, 3, 'six bytes')")
    t.start("os._exit(0)")
    fails(errno.ECONNRESET, c.recv, 10)


@check()
def test_E7_closed_listener_resets_waiting(t):
    """Closing a listener resets the connections in its queue."""
    t.peer("l = listen()")
    address = t.peer("l.getsockname()")
    clients = [connect(address) for _ in range(3)]
    t.peer("l.close()")
    for c in clients:
        fails(errno.ECONNRESET, c.recv, 1)
    fails(errno.ECONNREFUSED, connect, address)


@check()
def test_E8_both_close_at_once(t):
    """800 connections: both ends send 6 bytes, SHUT_WR, read to the end, close."""
    t.peer("""
def closing(sock, word):
    sock.sendall(word)
    sock.shutdown(socket.SHUT_WR)
    got = recv_end(sock)
    sock.close()
    return got
def serve():
    for turn in range(800):
        sock = l.accept()[0]
        assert closing(sock, b'S%05d' % turn) == b'C%05d' % turn
l = listen()""")
    address = t.peer("l.getsockname()")
    t.start("serve()")
    for turn in range(800):
        c = connect(address)
        c.sendall(b"C%05d" % turn)
        c.shutdown(socket.SHUT_WR)
        assert recv_end(c) == b"S%05d" % turn
        c.close()
    t.join()


@check()
def test_E8_both_close_at_once_warm(t):
    """The same on connections that have been used for a while."""
    for turn in range(25):
        c = t.pair()
        t.start("c.sendall(b'S' * 50000)\nc.shutdown(socket.SHUT_WR)\ngot = recv_end(c)\nc.close()\ngot")
        c.sendall(b"C" * 50_000)
        c.shutdown(socket.SHUT_WR)
        assert recv_end(c) == b"S" * 50_000
        c.close()
        assert t.join() == b"C" * 50_000
