"""K: fallback and environment. Unaware peers, other descriptors, limits, users, namespaces, filters, static programs."""

import fcntl
import os
import pathlib
import pty
import resource
import select
import signal
import socket
import struct
import sys
import time

from harness.behave import check, loaded, modes
from harness.net import *

FILTERED = [sys.executable, "-B", str(pathlib.Path(__file__).parent / "programs" / "filtered.py")]
OTHER_NAMESPACES = ["unshare", "--mount", "--ipc", "--pid", "--uts", "--fork", "--kill-child", "sh", "-c",
                    'mount -t tmpfs none /dev/shm && mount --bind "$0" /mnt && mount -t tmpfs none /tmp && mkdir -p "$0" '
                    '&& mount --move /mnt "$0" && exec "$@"', os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
OTHER_PIDS = ["unshare", "--ipc", "--pid", "--uts", "--fork", "--kill-child"]


@check()
def test_K1_exact_bytes(t):
    """Server first, client first, silence: exactly the program's bytes and no wait."""
    t.peer("l = listen()")
    address = t.peer("l.getsockname()")
    c = connect(address)
    t.peer("s = l.accept()[0]\ns.sendall(b'220 hello')")
    assert recv_exact(c, 9) == b"220 hello"
    c.sendall(b"QUIT")
    assert t.peer("recv_exact(s, 4)") == b"QUIT"
    t.peer("s.close()")
    assert c.recv(1) == b""
    for _ in range(10):
        c = connect(address)
        c.sendall(b"GET /")
        t.peer("s = l.accept()[0]")
        assert t.peer("recv_exact(s, 5)") == b"GET /"
        t.peer("s.sendall(b'200')\ns.shutdown(socket.SHUT_WR)")
        assert recv_end(c) == b"200"
        c.shutdown(socket.SHUT_WR)
        assert t.peer("recv_end(s)") == b""
    # A silent client is accepted at once, and nothing comes from it.
    t.start("began = time.monotonic()\ns = l.accept()[0]\ntook = time.monotonic() - began\n(took, readable(s, 1.2))")
    c = connect(address)
    took, spoke = t.join()
    assert took < 0.8 and not spoke
    assert not readable(c)
    # A server that says nothing does not hold up the client.
    began = time.monotonic()
    d = connect(address)
    d.sendall(b"x")
    assert time.monotonic() - began < 0.5


@check()
def test_K2_registrations_survive(t):
    """Registrations and waiters from before the connection see its data and its end, level and edge."""
    t.peer("l = listen()")
    address = tuple(t.peer("l.getsockname()"))
    s = socket.socket()
    level, edge, other = select.epoll(), select.epoll(), select.epoll()
    level.register(s, EPOLLIN | EPOLLRDHUP)
    edge.register(s, EPOLLIN | EPOLLRDHUP | EPOLLET)
    s.connect(address)
    level.poll(0)
    edge.poll(0)
    other.register(s, EPOLLIN)
    waiter = bg(other.poll, 5)
    t.start("""
c = l.accept()[0]
time.sleep(0.15)
c.sendall(b'one')
time.sleep(0.35)
c.sendall(b'two')
time.sleep(0.2)
c.close()""")
    for word in (b"one", b"two"):
        assert ready(edge, 3) == {s.fileno(): EPOLLIN}
        assert ready(level, 1) == {s.fileno(): EPOLLIN}
        assert waiter.join() == [(s.fileno(), EPOLLIN)]
        assert recv_exact(s, 3) == word
        no_event(edge, 0.05)
        no_event(level, 0.01)
        waiter = bg(other.poll, 5)
    assert ready(edge, 3) == {s.fileno(): EPOLLIN | EPOLLRDHUP}
    assert ready(level, 1) == {s.fileno(): EPOLLIN | EPOLLRDHUP}
    assert waiter.join() == [(s.fileno(), EPOLLIN)]
    t.join()


@check()
def test_K3_fast_open(t):
    """Fast-open sends deliver their bytes once and in order."""
    for prepared in (False, True):
        t.peer("l = listen()")
        if prepared:
            t.peer("l.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 5)")
        address = tuple(t.peer("l.getsockname()"))
        for turn in range(6):
            s = socket.socket()
            if turn % 2:
                s.setsockopt(socket.IPPROTO_TCP, 30, 1)  # TCP_FASTOPEN_CONNECT
                s.connect(address)
                s.sendall(b"first ")
            else:
                assert s.sendto(b"first ", socket.MSG_FASTOPEN, address) == 6
            s.sendall(b"second ")
            t.peer("c = l.accept()[0]")
            assert t.peer("recv_exact(c, 13)") == b"first second "
            t.warm(s, "c") if not t.both else None
            data = chance.randbytes(20_000)
            t.start("echo(c, 20000)")
            s.sendall(data)
            assert recv_exact(s, 20_000) == data
            t.join()
            s.close()
            assert t.peer("recv_end(c)") == b""


@check("plain", "both")
def test_K4_other_descriptors(t):
    """UDP, Unix sockets, pipes, files, a terminal, netlink: as without the library, beside an accelerated connection."""
    c = t.pair()
    udp1, udp2 = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    udp1.bind((HOST, 0))
    udp2.sendto(b"", udp1.getsockname())
    udp2.sendto(b"0123456789", udp1.getsockname())
    udp2.sendto(b"rest", udp1.getsockname())
    assert udp1.recv(10) == b""
    data, _, flags, _ = udp1.recvmsg(4)
    assert data == b"0123" and flags & socket.MSG_TRUNC
    assert udp1.recv(10) == b"rest"
    udp2.connect(udp1.getsockname())
    udp2.send(b"connected")
    assert udp1.recvfrom(100) == (b"connected", udp2.getsockname())
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        a, b = socket.socketpair(socket.AF_UNIX, kind)
        b.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        a.send(b"unix")
        data, ancillary, _, _ = b.recvmsg(100, 100)
        assert data == b"unix"
        assert struct.unpack("iII", ancillary[0][2]) == (os.getpid(), os.getuid(), os.getgid())
        assert struct.unpack("iII", a.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] == os.getpid()
        epoll = select.epoll()
        epoll.register(b, EPOLLIN | EPOLLET)
        a.send(b"x")
        assert ready(epoll, 2) == {b.fileno(): EPOLLIN}
        a.close()
        if kind != socket.SOCK_DGRAM:
            assert b.recv(1) == b"x" and b.recv(1) == b""
    reader, writer = os.pipe()
    os.writev(writer, [b"pi", b"pe"])
    assert os.read(reader, 10) == b"pipe" and fcntl.fcntl(writer, 1032) >= 4096
    os.close(writer)
    assert os.read(reader, 1) == b"" and polled(reader) == select.POLLHUP
    file = os.memfd_create("checks")
    os.write(file, b"file contents")
    assert os.pread(file, 4, 5) == b"cont" and os.lseek(file, 0, os.SEEK_SET) == 0 and os.read(file, 4) == b"file"
    fails(errno.EPERM, select.epoll().register, file, EPOLLIN)
    main, sub = pty.openpty()
    os.write(sub, b"tty\n")
    assert os.read(main, 100) == b"tty\r\n" and os.isatty(sub)
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    netlink.send(struct.pack("IHHII", 17, 18, 0x301, 1, 0) + b"\0")
    assert len(netlink.recv(65536)) > 16
    for call in (libc.send, libc.recv):
        assert call(file, b"x", 1, 0) == -1 and ctypes.get_errno() == errno.ENOTSOCK
        assert call(9999, b"x", 1, 0) == -1 and ctypes.get_errno() == errno.EBADF
    c.sendall(b"fine")
    t.peer("echo(c, 4)")
    assert recv_exact(c, 4) == b"fine"


def limit(kind):
    assert signal.getsignal(signal.SIGXFSZ) in (signal.SIG_DFL, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if kind == 'space':
        with open('/proc/self/statm') as file:
            now = int(file.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (now + (12 << 20),) * 2)
    else:
        number, value = {'fsize0': (resource.RLIMIT_FSIZE, 0), 'fsize4096': (resource.RLIMIT_FSIZE, 4096),
                         'memlock': (resource.RLIMIT_MEMLOCK, 0), 'nofile': (resource.RLIMIT_NOFILE, 20),
                         'nproc': (resource.RLIMIT_NPROC, 0)}[kind]
        resource.setrlimit(number, (value, value))


def _limited(t, kind, where):
    if where == "here":
        limit(kind)
    else:
        t.peer("limit(kind)", kind=kind)
    t.peer("l = listen()")
    c = connect(t.peer("l.getsockname()"))
    t.peer("c = l.accept()[0]")
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)
    for _ in range(6):
        data = chance.randbytes(200_000)
        t.start("echo(c, 200000)")
        send_all(c, data)
        assert ready(epoll, 5)
        assert recv_exact(c, 200_000) == data
        t.join()
    for _ in range(200):
        t.start("echo(c, 5)")
        c.sendall(b"small")
        assert recv_exact(c, 5) == b"small"
        t.join()


for _kind in ("fsize0", "fsize4096", "memlock", "nofile", "space", "nproc"):
    for _where in ("here", "peer"):
        _name = f"test_K5_limit_{_kind}_{_where}"

        def _body(t, kind=_kind, where=_where):
            _limited(t, kind, where)
        _body.__name__ = _body.__qualname__ = _name
        _body.__doc__ = f"Works with a tight limit ({_kind}) at one end."
        globals()[_name] = check("plain", "both")(_body)


def drop(uid):
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def server(before, between, after, ready):
    if before:
        drop(before)
    l = listen()
    os.write(ready, b'%d' % l.getsockname()[1])
    if between:
        drop(between)
    sock = l.accept()[0]
    if after:
        drop(after)
    echo_end(sock)


@check("plain", "both")
def test_K6_users(t):
    """Processes of different users, or that change user after listening or connecting, talk."""
    if os.getuid() != 0:
        t.skip("changing users needs root")
    def client(address, before, after):
        if before:
            drop(before)
        sock = connect(address)
        if after:
            drop(after)
        for _ in range(100):
            sock.sendall(b"w")
            assert sock.recv(1) == b"w"
        data = chance.randbytes(150_000)
        sender = bg(sock.sendall, data)
        assert recv_exact(sock, 150_000) == data
        sender.join()
        sock.close()
    for before, between, after, mine, later in ((0, 0, 0, 65534, 0), (65534, 0, 0, 0, 0), (0, 65534, 0, 0, 0),
                                                (0, 0, 65534, 0, 65534), (1000, 0, 0, 65534, 0), (65534, 0, 0, 65534, 0)):
        port = int(t.peer("r, w = os.pipe()\npid = forked(server, *how, w)\nos.close(w)\nport = os.read(r, 10)\nos.close(r)\nport",
                          how=(before, between, after)))
        reap(forked(client, (HOST, port), mine, later))
        t.peer("reap(pid)")


def _exchange_much(t):
    t.peer("l = listen()")
    address = t.peer("l.getsockname()")
    for _ in range(5):
        c = connect(address)
        t.peer("c = l.accept()[0]")
        for _ in range(20):
            data = chance.randbytes(chance.randrange(1, 30_000))
            t.start("echo(c, size)", size=len(data))
            c.sendall(data)
            assert recv_exact(c, len(data)) == data
            t.join()
        t.start("for _ in range(2000):\n    echo(c, 4)")
        for _ in range(2000):
            c.sendall(b"ping")
            assert recv_exact(c, 4) == b"ping"
        t.join()
        c.shutdown(socket.SHUT_WR)
        assert t.peer("recv_end(c)") == b""
        t.peer("c.close()")
        assert c.recv(1) == b""


if os.getuid() == 0:
    @check("plain", "both", peer=OTHER_NAMESPACES)
    def test_K7_other_namespaces(t):
        """New mount, IPC, PID and UTS namespaces with own /dev/shm and /tmp, one network."""
        _exchange_much(t)

    @check("plain", "both", peer=OTHER_PIDS)
    def test_K7_other_pid_namespace(t):
        """A PID namespace of its own, but the same runtime directory."""
        _exchange_much(t)
else:
    def test_K7_other_namespaces():
        """Needs the right to make namespaces."""
        import pytest
        pytest.skip("making namespaces needs root")


@check("plain", "both", here=FILTERED)
def test_K8_filtered_here(t):
    """Under a filter that refuses special system calls, at this end."""
    _exchange_much(t)


@check("plain", "both", peer=FILTERED)
def test_K8_filtered_peer(t):
    """The same at the other end."""
    _exchange_much(t)


@check("plain", "both", here=FILTERED, peer=FILTERED)
def test_K8_filtered_both(t):
    """The same at both ends."""
    _exchange_much(t)


@modes("plain", "local")
def test_K9_static(make_world, program, mode):
    """A statically linked program at the other end, as client and as server, on many connections."""
    world = make_world("eager")
    static, dynamic = program("integrity", "-static"), program("integrity")
    here = loaded(mode)[0]
    for turn in range(5):
        for server, client in ((static, dynamic), (dynamic, static)):
            common = ["--count", 200, "--io", ("block", "epoll", "vec")[turn % 3], "--seed", turn, "--timeout", 15]
            one = world.start([server, "pingpong", "--role", "server", *common], here)
            two = world.start([client, "pingpong", "--role", "client", "--port", one.wait_line("port "), *common], here)
            world.finish(two, one)
