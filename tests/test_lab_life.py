"""Life and end of SMC-R connections between two hosts: what a program sees is what it would see with TCP."""

import array
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

from harness.hosts import check
from harness.net import *

# How long the end of a killed process may take to be noticed: its queue pair dies with it, so no message says so.
NOTICED = 4
GONE = (errno.ECONNRESET, errno.EPIPE)


def outcome(function, *args):
    """What a call gave: its value, or the number of its error."""
    try:
        return function(*args)
    except OSError as error:
        return error.errno


def endless(sock, block):
    """Sends until there is an error; gives its number."""
    while True:
        if (error := outcome(sock.sendall, block)) is not None:
            return error


def drained(sock):
    """All that comes, and how it ended: b"" or the number of an error."""
    parts = []
    while True:
        part = outcome(sock.recv, 1 << 18)
        if part == b"" or isinstance(part, int):
            return b"".join(parts), part
        parts.append(part)


@check()
def test_ipv4_and_ipv6(t):
    """SMC-R by the GID of either family, whichever side connects."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for listener in ("peer", "here"):
            c = t.pair(family=family, listener=listener)
            t.start("echo(c, 300_000)")
            data = chance.randbytes(300_000)
            sender = bg(c.sendall, data)
            assert recv_exact(c, len(data)) == data
            sender.join()
            t.join()
            c.close()
            assert t.peer("recv_end(c)") == b""


@check()
def test_exit_after_write_loses_nothing(t):
    """A process that ends right after its last write, in whatever way, has sent everything."""
    ways = {"return": "", "exit": "import sys; sys.exit(0)", "_exit": "import os; os._exit(0)"}
    for name, end in ways.items():
        with listen(host=OWN) as listener:
            code = (f"import socket\nc = socket.create_connection({listener.getsockname()!r})\n"
                    f"c.sendall(b'{name:8}' * 20_000)\n{end}\n")
            t.start("subprocess.run([sys.executable, '-S', '-c', program]).returncode", program=code)
            c = listener.accept()[0]
            t.smc(c)
            got = drained(c)
            assert got == (f"{name:8}".encode() * 20_000, b""), (name, len(got[0]), got[1])
            assert t.join() == 0


@check(seconds=60)
def test_killed_in_mid_transfer(t):
    """An intact prefix and then the end of the stream or a reset, whether the reader or the writer is killed."""
    block = bytes(range(256)) * 40
    reader = """
import socket, sys
c = socket.create_connection(ADDRESS)
while c.recv(65536): pass"""
    writer = """
import socket, sys
c = socket.create_connection(ADDRESS)
while True: c.sendall(bytes(range(256)) * 40)"""
    for code in (writer, reader):
        with listen(host=OWN) as listener:
            t.peer("victim = subprocess.Popen([sys.executable, '-S', '-c', program])",
                   program=code.replace("ADDRESS", repr(listener.getsockname())))
            c = listener.accept()[0]
            t.smc(c)
            done = []
            if code == writer:
                thread = bg(lambda: done.append(drained(c)))
            else:
                thread = bg(lambda: done.append((b"", endless(c, block))))
            time.sleep(0.7)
            t.peer("victim.kill()\nvictim.wait()")
            began = time.monotonic()
            thread.join(NOTICED + 3)
            took = time.monotonic() - began
            got, end = done[0]
            assert took < NOTICED, took
            assert end in (b"", *GONE), end
            if code == writer:
                assert len(got) > 10_000 and got == (block * (len(got) // len(block) + 1))[:len(got)], len(got)
            c.close()


@check()
def test_killed_while_idle(t):
    """Whoever sleeps in recv, poll or epoll is woken when the peer is killed; a new connection works afterwards."""
    names = ("c0", "c1", "c2")
    c0, c1, c2 = (t.pair(name) for name in names)
    epoll = select.epoll()
    epoll.register(c2, EPOLLIN | EPOLLRDHUP | EPOLLET)
    waits = [bg(outcome, c0.recv, 10), bg(polled, c1, select.POLLIN, 10), bg(epoll.poll, 10)]
    time.sleep(0.3)
    assert all(wait.is_alive() for wait in waits)
    t.kill_peer()
    began = time.monotonic()
    values = [wait.join(NOTICED + 3) for wait in waits]
    assert time.monotonic() - began < NOTICED, time.monotonic() - began
    assert values[0] in (b"", errno.ECONNRESET), values
    assert values[1] & select.POLLIN and values[2], values
    assert outcome(c1.recv, 1) in (b"", errno.ECONNRESET)
    # The rest of what TCP would tell: sending fails.
    until(lambda: outcome(c0.send, b"x") in GONE, 2)
    for sock in (c0, c1, c2):
        sock.close()


SERVER = """
import socket, os
l = socket.create_server(ADDRESS)
while True:
    c = l.accept()[0]
    while data := c.recv(65536):
        c.sendall(data)
    c.close()
"""


@check(seconds=60)
def test_reconnects_to_a_new_server(t):
    """A server is killed and started again: the old connection ends, and new ones make a new link group."""
    t.peer("program = SERVER.replace('ADDRESS', repr((OWN, 7000)))")
    for turn in range(2):
        t.peer("server = subprocess.Popen([sys.executable, '-S', '-c', program])")
        c = until(lambda: connected((PEER, 7000)), 8, "connected")
        t.smc(c)
        for number in range(20):
            c.sendall(b"%08d" % number)
            assert recv_exact(c, 8) == b"%08d" % number
        t.peer("server.kill()\nserver.wait()")
        began = time.monotonic()
        assert drained(c)[1] in (b"", errno.ECONNRESET)
        assert time.monotonic() - began < NOTICED
        c.close()


def connected(address):
    try:
        return socket.create_connection(address)
    except ConnectionRefusedError:
        return None


@check()
def test_fork_resets_the_childs_copy(t):
    """The child of a fork can't go on with the connection and is told so; the parent can."""
    c = t.pair()
    t.peer("c.sendall(b'before')")
    time.sleep(0.1)

    def child():
        fails(errno.ECONNRESET, c.recv, 10)
        fails((errno.EPIPE, errno.ECONNRESET), c.send, b"x", socket.MSG_NOSIGNAL)
        c.close()
    pid = forked(child)
    assert recv_exact(c, 6) == b"before"
    reap(pid)
    t.start("echo(c, 100_000)")
    sender = bg(c.sendall, b"p" * 100_000)
    assert recv_exact(c, 100_000) == b"p" * 100_000
    sender.join()
    t.join()
    c.close()
    assert t.peer("recv_end(c)") == b""


@check()
def test_fork_before_use(t):
    """A child that accepts on an inherited listening socket has connections of its own."""
    with listen(host=OWN) as listener:
        def child():
            c = listener.accept()[0]
            echo_end(c)
        pid = forked(child)
        port = listener.getsockname()[1]
        got = t.peer("c = socket.create_connection((PEER, port))\nc.sendall(b'x' * 5000)\nknown = carriers(c)\n"
                     "c.shutdown(socket.SHUT_WR)\n(known, recv_end(c))", port=port)
        assert got[0][:2] == ("rmb", "rmb") and got[1] == b"x" * 5000
        reap(pid)


@check()
def test_exec_with_an_inherited_one_resets(t):
    """A forked child that becomes another program finds no connection; its parent's goes on."""
    c = t.pair()
    pid = os.fork()
    if pid == 0:
        os.dup2(c.fileno(), 0)
        os.execv("/bin/cat", ["cat"])
    code = reap(pid, status=None)
    assert code != 0  # cat: read error
    c.sendall(b"parent")
    assert t.peer("recv_exact(c, 6)") == b"parent"
    c.close()


@check()
def test_inherited_copy_of_a_closed_one_ends_no_other(t):
    """A child keeps a descriptor of a connection that its parent has closed. When that ends, nothing happens to the one
    that the parent has instead."""
    c = t.pair("c")
    pid = forked(lambda: time.sleep(3))
    c.close()
    assert t.peer("recv_end(c)") == b""
    d = t.pair("d")
    t.peer("c.close()")
    reap(pid)
    time.sleep(0.5)
    assert not polled(d) & (select.POLLERR | select.POLLHUP)
    d.sendall(b"still")
    assert t.peer("recv_exact(d, 5)") == b"still"
    d.close()


@check()
def test_exec_in_place_resets_the_peer(t):
    """A process that becomes another program with its own connection inherited: the peer gets a reset, not silence."""
    code = """
import os, socket
c = socket.create_connection(ADDRESS)
c.sendall(b"last words")
assert c.recv(2) == b"ok"
os.dup2(c.fileno(), 0)
os.execv("/bin/cat", ["cat"])"""
    with listen(host=OWN) as listener:
        t.start("subprocess.run([sys.executable, '-S', '-c', program], capture_output=True).returncode",
                program=code.replace("ADDRESS", repr(listener.getsockname())))
        c = listener.accept()[0]
        assert recv_exact(c, 10) == b"last words"
        c.sendall(b"ok")
        assert drained(c)[1] in (b"", errno.ECONNRESET)
        assert t.join() == 1


@check()
def test_passing_a_descriptor_resets_it(t):
    """SCM_RIGHTS: whoever gets the socket gets a reset one, and so does the peer; other connections go on."""
    c, d = t.pair("c"), t.pair("d")
    one, two = socket.socketpair()
    one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [c.fileno()]))])
    assert t.peer("outcome(c.recv, 1)") in (b"", errno.ECONNRESET)
    assert outcome(c.send, b"x") in GONE
    d.sendall(b"alive")
    assert t.peer("recv_exact(d, 5)") == b"alive"
    for sock in (one, two, c, d):
        sock.close()


@check()
def test_close_with_unread_data_resets(t):
    c = t.pair()
    t.peer("c.sendall(b'unread')")
    assert readable(c, 2)
    c.close()
    assert t.peer("until(lambda: polled(c, 0), 2)\noutcome(c.recv, 10)") == errno.ECONNRESET
    assert t.peer("outcome(c.recv, 10), outcome(c.send, b'x')") == (b"", errno.EPIPE)


@check()
def test_linger_zero_resets(t):
    c = t.pair()
    c.sendall(b"read")
    assert t.peer("recv_exact(c, 4)") == b"read"
    linger(c, 1, 0)
    c.close()
    assert t.peer("outcome(c.recv, 10)") == errno.ECONNRESET


@check()
def test_so_error_tells_of_a_reset(t):
    """SO_ERROR says ECONNRESET once, as programs ask that find POLLERR; reads find the end afterwards, sends EPIPE."""
    c = t.pair()
    assert c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    t.peer("linger(c, 1, 0)\nc.close()")
    until(lambda: polled(c, 0) & select.POLLERR, 3, "POLLERR")
    assert c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET
    assert c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and not polled(c, 0) & select.POLLERR
    assert c.recv(10) == b""
    fails(errno.EPIPE, c.send, b"x", socket.MSG_NOSIGNAL)


@check()
def test_shutdown_in_both_orders(t):
    """Half-close by either side first, and both at once; then close in either order."""
    for first in ("here", "peer"):
        c = t.pair()
        if first == "here":
            c.shutdown(socket.SHUT_WR)
            fails(errno.EPIPE, c.send, b"x", socket.MSG_NOSIGNAL)
            assert t.peer("recv_end(c)") == b""
            t.start("c.sendall(b'y' * 200_000)\nc.close()")
            assert recv_end(c) == b"y" * 200_000
            t.join()
        else:
            t.peer("c.shutdown(socket.SHUT_WR)")
            assert c.recv(10) == b"" and c.recv(10) == b""
            t.start("recv_end(c) == b'y' * 200_000")
            c.sendall(b"y" * 200_000)
            c.shutdown(socket.SHUT_WR)
            assert t.join()
        c.close()
    c = t.pair()
    c.shutdown(socket.SHUT_RD)
    assert c.recv(10) == b""
    c.sendall(b"out")
    assert t.peer("recv_exact(c, 3)") == b"out"
    c.close()
    c = t.pair()
    c.sendall(b"last")
    c.shutdown(socket.SHUT_RDWR)
    assert t.peer("recv_end(c)") == b"last"
    c.close()


@check()
def test_shutdown_right_after_accept(t):
    """While the handshake may go on, too, no byte goes out behind the end of the stream."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for _ in range(5):
        with listen(host=OWN) as listener:
            t.start("with socket.create_connection(address) as c:\n    got = recv_end(c)\ngot",
                    address=(OWN, listener.getsockname()[1]))
            sock = listener.accept()[0]
        sock.shutdown(socket.SHUT_WR)
        for _ in range(3):
            fails(errno.EPIPE, sock.send, b"behind the end")
        assert t.join() == b""
        sock.close()


@check()
def test_dup(t):
    """The connection ends with its last descriptor."""
    c = t.pair()
    copy = c.dup()
    c.close()
    copy.sendall(b"by the copy")
    assert t.peer("recv_exact(c, 11)") == b"by the copy"
    other = os.dup2(copy.fileno(), 200)
    copy.close()
    os.write(other, b"by the last")
    assert t.peer("recv_exact(c, 11)") == b"by the last"
    assert not t.peer("readable(c, 0.2)")
    os.close(other)
    assert t.peer("recv_end(c)") == b""


@check()
def test_timeouts(t):
    """SO_RCVTIMEO and SO_SNDTIMEO end blocking calls with EAGAIN."""
    c = t.pair()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0.3))
    c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(0.3))
    began = time.monotonic()
    fails(errno.EAGAIN, c.recv, 10)
    assert 0.25 < time.monotonic() - began < 2
    block, sent = bytes(1 << 16), 0
    began = time.monotonic()
    while (count := outcome(libc.send, c.fileno(), block, len(block), socket.MSG_NOSIGNAL)) > 0:
        sent += count
        assert time.monotonic() - began < 10
    assert count == -1 and ctypes.get_errno() == errno.EAGAIN
    assert t.peer("len(recv_exact(c, sent))", sent=sent) == sent


@check()
def test_signals(t):
    """A signal ends a blocking recv with EINTR, unless SA_RESTART says otherwise."""
    c = t.pair()
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    buffer = ctypes.create_string_buffer(16)
    for restart in (False, True):
        signal.siginterrupt(signal.SIGUSR1, not restart)
        threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)).start()
        if restart:
            t.start("time.sleep(0.8)\nc.sendall(b'late')")
        count = libc.recv(c.fileno(), buffer, 16, 0)
        if restart:
            assert count == 4 and buffer.raw[:4] == b"late", count
            t.join()
        else:
            assert count == -1 and ctypes.get_errno() == errno.EINTR
    assert len(seen) == 2


@check()
def test_waitall_peek_and_counts(t):
    c = t.pair()
    t.start("for part in (b'abc', b'defg', b'hij'):\n    c.sendall(part)\n    time.sleep(0.15)")
    assert c.recv(10, socket.MSG_WAITALL) == b"abcdefghij"
    t.join()
    t.peer("c.sendall(b'peeked at')")
    assert readable(c, 2)
    assert c.recv(100, socket.MSG_PEEK) == b"peeked at"
    assert ioctl_int(c, FIONREAD) == 9
    assert c.recv(4) == b"peek"
    assert ioctl_int(c, FIONREAD) == 5 and c.recv(9) == b"ed at"
    assert ioctl_int(c, FIONREAD) == 0
    c.sendall(b"u" * 5000)
    assert t.peer("recv_exact(c, 5000)") == b"u" * 5000
    until(lambda: ioctl_int(c, SIOCOUTQ) == 0, 3, lambda: f"SIOCOUTQ {ioctl_int(c, SIOCOUTQ)}")
    # At most what was not read; the peer's TCP would have acknowledged it.
    c.sendall(b"u" * 5000)
    assert 0 <= ioctl_int(c, SIOCOUTQ) <= 5000
    assert t.peer("c.recv(9000, socket.MSG_DONTWAIT | socket.MSG_WAITALL)")


@check()
def test_cancelled_in_recv(t):
    """A thread that sleeps in recv is cancelled; others go on with the connection."""
    c = t.pair()
    victim = threading.Thread(target=c.recv, args=(10,), daemon=True)
    victim.start()
    time.sleep(0.3)
    before = len(os.listdir("/proc/self/task"))
    assert libc.pthread_cancel(ctypes.c_ulong(victim.ident)) == 0
    until(lambda: len(os.listdir("/proc/self/task")) == before - 1, 3, "the thread has ended")
    t.peer("c.sendall(b'after')")
    assert c.recv(10) == b"after"


@check(seconds=60)
def test_readiness(t):
    """poll, select, level- and edge-triggered epoll over what comes, room to send, and the end."""
    c = t.pair()
    level, edge = select.epoll(), select.epoll()
    level.register(c, EPOLLIN | EPOLLOUT | EPOLLRDHUP)
    edge.register(c, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)
    number = c.fileno()
    assert ready(level, 1) == ready(edge, 1) == {number: EPOLLOUT}
    assert polled(c, select.POLLIN | select.POLLOUT) == select.POLLOUT and selected(c) == (False, True, False)
    no_event(edge, 0.1)
    t.peer("c.sendall(b'some')")
    assert ready(edge, 2)[number] & EPOLLIN
    no_event(edge, 0.1)
    assert ready(level)[number] == EPOLLIN | EPOLLOUT and selected(c) == (True, True, False)
    assert c.recv(2) == b"so"
    no_event(edge, 0.1)
    assert polled(c) == select.POLLIN
    t.peer("c.sendall(b' more')")
    assert ready(edge, 2)[number] & EPOLLIN
    assert recv_exact(c, 7) == b"me more"
    assert ready(level)[number] == EPOLLOUT
    # No room, then room again.
    c.setblocking(False)
    filled = fill(c, 0.3)
    assert selected(c) == (False, False, False) and not ready(level)
    ready(edge)
    no_event(edge, 0.1)
    waiting = bg(ready, edge, 10)
    assert t.peer("len(recv_exact(c, filled))", filled=filled) == filled
    assert waiting.join()[number] & EPOLLOUT and polled(c, select.POLLOUT, 1) == select.POLLOUT
    t.peer("c.shutdown(socket.SHUT_WR)")
    until(lambda: ready(edge).get(number, 0) & (EPOLLIN | EPOLLRDHUP) == EPOLLIN | EPOLLRDHUP, 2)
    assert ready(level)[number] == EPOLLIN | EPOLLOUT | EPOLLRDHUP
    assert c.recv(1) == b""
    c.shutdown(socket.SHUT_WR)
    until(lambda: ready(level)[number] & EPOLLHUP, 2)
    c.close()


@check(seconds=60)
def test_many_connections_share_a_link_group(t):
    """200 connections at once between two processes use one queue pair; buffers are used again afterwards."""
    count = 200
    before = queue_pairs()
    socks = []
    with listen(host=OWN, backlog=512) as listener:
        t.start("socks = [socket.create_connection(address) for _ in range(count)]",
                address=listener.getsockname(), count=count)
        socks = [listener.accept()[0] for _ in range(count)]
        t.join()
    t.start("for sock in socks:\n    echo(sock, 1000)")
    for number, sock in enumerate(socks):
        sock.sendall(b"%04d" % number * 250)
    for number, sock in enumerate(socks):
        assert recv_exact(sock, 1000) == b"%04d" % number * 250
    t.join()
    assert queue_pairs() - before == 1, (before, queue_pairs())
    riding = [carriers(sock)[:2] for sock in socks[::20]]
    assert set(riding) == {("rmb", "rmb")}, riding
    for sock in socks:
        sock.close()
    assert t.peer("[recv_end(sock) for sock in socks] == [b''] * count", count=count)


def queue_pairs():
    """How many reliable queue pairs this host has."""
    shown = subprocess.run(["rdma", "resource", "show", "qp", "type", "RC"], capture_output=True, text=True, check=True)
    return len(shown.stdout.splitlines())


@check()
def test_two_threads_wait(t):
    """One is woken and waits no more. The other still is, by what comes for it later."""
    c, d = t.pair("c"), t.pair("d")
    for _ in range(8):
        waits = []
        for sock in (c, d):
            waits.append(bg(recv_exact, sock, 1))
            time.sleep(0.05)
        for name, wait in zip("dc", reversed(waits)):
            t.peer(f"{name}.sendall(b'x')\npolled({name})")
            assert wait.join(2) == b"x"
            time.sleep(0.05)


@check()
def test_many_sends_by_a_program_that_does_not_look(t):
    """More messages than the send queue has places for go out without another call on a socket."""
    c = t.pair("c")
    time.sleep(0.5)
    for _ in range(40):
        c.sendall(b"x")
    assert t.peer("bg(recv_exact, c, 40).join(2)") == b"x" * 40


@check()
def test_idle_connections_cost_no_cpu(t):
    socks = [t.pair(f"c{number}") for number in range(3)]
    for number, sock in enumerate(socks):
        sock.sendall(b"x")
        t.peer(f"c{number}.recv(1)")
    sleepers = [bg(outcome, sock.recv, 1) for sock in socks]
    time.sleep(1)
    used = cpu(), t.peer("cpu()")
    time.sleep(4)
    used = cpu() - used[0], t.peer("cpu()") - used[1]
    assert max(used) < 0.1, used
    t.peer("c0.close(); c1.close(); c2.close()")
    assert [sleeper.join() for sleeper in sleepers] == [b""] * 3
