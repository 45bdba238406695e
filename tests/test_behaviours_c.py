"""C: connect and accept."""

import fcntl
import os
import select
import socket
import time

from harness.behave import check
from harness.net import *


@check()
def test_C1_nonblocking_connect(t):
    """EINPROGRESS, POLLOUT, SO_ERROR 0, EISCONN, as TCP does."""
    t.peer("l = listen()\nthread = bg(echo_server, l, 60)")
    address = tuple(t.peer("l.getsockname()"))
    for _ in range(60):
        s = socket.socket()
        s.setblocking(False)
        fails(errno.ENOTCONN, s.recv, 1)
        fails(errno.EPIPE, s.send, b"x", socket.MSG_NOSIGNAL)
        assert s.connect_ex(address) in (0, errno.EINPROGRESS)
        assert polled(s, select.POLLOUT | select.POLLIN, 3) == select.POLLOUT
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        assert s.connect_ex(address) in (0, errno.EISCONN)
        assert s.connect_ex(address) == errno.EISCONN
        fails(errno.EAGAIN, s.recv, 1)
        s.send(b"echo")
        assert recv_exact(s, 4) == b"echo"
        s.close()
    t.peer("thread.join()")


@check()
def test_C2_refused(t):
    """ECONNREFUSED at once, SO_ERROR once, the socket can be used again, nothing leaks."""
    with listen() as closed:
        address = closed.getsockname()
    began = time.monotonic()
    for _ in range(20):
        fails(errno.ECONNREFUSED, connect, address)
    assert time.monotonic() - began < 2
    s = socket.socket()
    s.setblocking(False)
    if s.connect_ex(address) == errno.EINPROGRESS:
        mask = polled(s, select.POLLOUT, 3)
        assert mask & (select.POLLERR | select.POLLHUP) == select.POLLERR | select.POLLHUP, hex(mask)
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        # Linux tells once more that the first attempt was given up.
        assert s.connect_ex(address) == errno.ECONNABORTED
    t.peer("l = listen()")
    s.setblocking(True)
    s.connect(tuple(t.peer("l.getsockname()")))
    t.peer("c = l.accept()[0]")
    t.warm(s, "c")
    time.sleep(0.3)
    before = len(open_fds())
    for _ in range(200):
        fails(errno.ECONNREFUSED, connect, address)
    until(lambda: len(open_fds()) == before, 3, lambda: f"{before} descriptors as before: {fd_targets()}")


@check()
def test_C3_accept_flags(t):
    """accept4 flags are obeyed, O_NONBLOCK is not inherited, socket options are."""
    def nonblocking(fd):
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK)

    def cloexec(fd):
        return bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
    listener = listen()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for listener_blocks in (True, False):
        for flags in (None, 0, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC):
            listener.setblocking(listener_blocks)
            t.peer("c = connect(address)", address=listener.getsockname())
            readable(listener, 3)
            if flags is None:
                number = libc.accept(listener.fileno(), None, None)
            else:
                number = libc.accept4(listener.fileno(), None, None, flags)
            assert number >= 0
            flags = flags or 0
            assert nonblocking(number) == bool(flags & socket.SOCK_NONBLOCK)
            assert cloexec(number) == bool(flags & socket.SOCK_CLOEXEC)
            sock = socket.socket(fileno=number)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            sock.close()
    assert libc.accept4(listener.fileno(), None, None, 0x40) == -1 and ctypes.get_errno() == errno.EINVAL


@check()
def test_C4_listeners_share_port(t):
    """Three processes with own listeners on one port share 300 connections."""
    first = listen(reuse_port=True)
    address = first.getsockname()

    def worker(listener):
        served = 0
        while True:
            sock = listener.accept()[0]
            word = sock.recv(4)
            if word == b"quit":
                return
            sock.sendall(b"%d" % os.getpid())
            sock.close()
            served += 1
    workers = [forked(worker, first)] + [
        forked(lambda: worker(listen(port=address[1], reuse_port=True))) for _ in range(2)]
    first.close()
    time.sleep(0.3)
    answers, slowest = t.peer("""
def ask():
    answers, slowest = [], 0
    for _ in range(300):
        began = time.monotonic()
        sock = connect(address)
        sock.sendall(b'work')
        answers.append(int(recv_end(sock)))
        sock.close()
        slowest = max(slowest, time.monotonic() - began)
    return answers, slowest
ask()""", address=address)
    assert set(answers) == set(workers), (set(answers), workers)
    assert slowest < 2
    for pid in workers:
        os.kill(pid, 15)
        reap(pid, status=-15)


@check()
def test_C5_listener_bound_again(t):
    """A closed listener's port is bound again at once, with old connections alive."""
    listener = listen()
    address = listener.getsockname()
    t.peer("old = connect(address)", address=address)
    old = listener.accept()[0]
    t.warm(old, "old")
    for turn in range(20):
        listener.close()
        listener = listen(port=address[1])
        t.peer("new = connect(address)")
        new = listener.accept()[0]
        for sock, name in ((old, "old"), (new, "new")):
            sock.sendall(b"echo")
            t.peer(f"echo({name}, 4)")
            assert recv_exact(sock, 4) == b"echo"
        new.close()


@check()
def test_C6_connect_never_blocks(t):
    """With a full queue non-blocking connects return at once and can be given up."""
    t.peer("l = socket.socket(); l.bind((HOST, 0)); l.listen(0)")
    address = tuple(t.peer("l.getsockname()"))
    socks, pending = [], 0
    for _ in range(12):
        s = socket.socket()
        s.setblocking(False)
        began = time.monotonic()
        code = s.connect_ex(address)
        assert time.monotonic() - began < 0.6
        assert code in (0, errno.EINPROGRESS), errno.errorcode.get(code)
        socks.append(s)
    time.sleep(0.2)
    for s in socks:
        if not polled(s, select.POLLOUT):
            assert s.connect_ex(address) == errno.EALREADY
            fails(errno.EAGAIN, s.recv, 1)
            fails(errno.EAGAIN, s.send, b"x")
            pending += 1
    assert pending, "no connect is pending"
    began = time.monotonic()
    for s in socks:
        s.close()
    assert time.monotonic() - began < 1


@check()
def test_C7_ipv6_and_mapped(t):
    """IPv6, IPv4 to a dual-stack listener, and other loopback addresses."""
    if not os.path.exists("/proc/net/if_inet6") or not open("/proc/net/if_inet6").read().strip():
        t.skip("this network namespace has no IPv6")
    t.peer("l = socket.create_server(('::', 0), family=socket.AF_INET6, dualstack_ipv6=True)")
    port = t.peer("l.getsockname()[1]")
    for family, to, peer_sees in ((socket.AF_INET6, "::1", "::1"), (socket.AF_INET, HOST, "::ffff:127.0.0.1"),
                                  (socket.AF_INET, "127.0.0.2", "::ffff:127.0.0.1"),
                                  (socket.AF_INET6, "::ffff:127.0.0.1", "::ffff:127.0.0.1")):
        s = socket.socket(family)
        s.connect((to, port))
        where, name = t.peer("c, where = l.accept()\n(where[:2], c.getsockname()[0])")
        assert where == (peer_sees, s.getsockname()[1]), (where, s.getsockname())
        assert s.getpeername()[:2] == (to, port)
        t.warm(s, "c")
        data = chance.randbytes(50_000)
        t.start("echo(c, 50000)")
        s.sendall(data)
        assert recv_exact(s, 50_000) == data
        t.join()
        s.close()
        t.peer("c.close()")


@check()
def test_C8_accept_after_close(t):
    """Connections whose client has already sent and closed can be accepted: bytes, then the end."""
    t.peer("l = listen()")
    address = t.peer("l.getsockname()")
    names = []
    for number in range(60):
        s = connect(address)
        names.append(s.getsockname())
        if number % 3:
            s.sendall(b"%04d" % number * number)
        s.close()
    for number in range(60):
        where, data = t.peer("c, where = l.accept()\ndata = recv_end(c)\nc.close()\n(where, data)")
        assert where == names[number]
        assert data == (b"%04d" % number * number if number % 3 else b"")
