"""X: exec, spawn and descriptor passing. The successor goes on at the same byte, with or without the library."""

import array
import os
import select
import socket
import subprocess
import sys
import time

from harness.behave import check
from harness.net import *


def _cat(t, clear):
    """The child takes 6 bytes, then becomes cat on the socket, with 20 kB already queued."""
    c = t.pair()
    queued, rest = chance.randbytes(20_000), chance.randbytes(1 << 20)
    t.peer("c.sendall(b'header' + queued)", queued=queued)
    assert recv_exact(c, 6) == b"header"
    time.sleep(0.05)

    def child():
        os.dup2(c.fileno(), 0)
        os.dup2(c.fileno(), 1)
        if clear:
            os.execve("/bin/cat", ["cat"], {})
        os.execv("/bin/cat", ["cat"])
    pid = forked(child)
    c.close()
    got = t.peer("""
sender = bg(lambda: (c.sendall(rest), c.shutdown(socket.SHUT_WR)))
got = recv_end(c)
sender.join()
got""", rest=rest)
    assert got == queued + rest, (len(got), len(queued + rest))
    reap(pid)


@check()
def test_X1_exec_keeps_stream(t):
    """A connected socket inherited over exec goes on at the same byte."""
    _cat(t, False)


@check()
def test_X1_exec_without_fork(t):
    """The process itself becomes another program, with input queued and output under way."""
    c = t.pair()
    t.peer("c.sendall(b'to be read by the successor')")
    time.sleep(0.05)
    data = chance.randbytes(30_000)

    def child():
        d = connect(address)
        for _ in range(200):  # enough for an upgrade of the child's own connection
            d.sendall(b"w")
            assert d.recv(1) == b"w"
        d.sendall(data)
        os.dup2(d.fileno(), 0)
        os.dup2(d.fileno(), 1)
        os.execv("/bin/cat", ["cat"])
    t.peer("l = listen()")
    address = t.peer("l.getsockname()")
    pid = forked(child)
    t.peer("d = l.accept()[0]\n[echo(d, 1) for _ in range(200)]\ntime.sleep(0.1)")
    got = t.peer("""
d.sendall(b'round')
got = recv_exact(d, len(data)), recv_exact(d, 5)
d.shutdown(socket.SHUT_WR)
got + (recv_end(d),)""", data=data)
    assert got == (data, b"round", b"")
    reap(pid)
    assert recv_exact(c, 27) == b"to be read by the successor"


@check("both")
def test_X1_successor_earns_upgrade(t):
    """A loaded successor that goes on using an inherited connection rides RMBs again."""
    c = t.pair()
    code = """
import os
while data := os.read(0, 65536):
    os.write(1, data)
"""
    pid = os.fork()
    if pid == 0:
        os.dup2(c.fileno(), 0)
        os.dup2(c.fileno(), 1)
        os.execv(sys.executable, [sys.executable, "-S", "-c", code])
    c.close()
    seen = t.peer("""
def exchange_until_rmb(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for turn in range(50):
            c.sendall(b'%04d' % turn)
            assert recv_exact(c, 4) == b'%04d' % turn
        known = carriers(c)
        if known[:2] == ('rmb', 'rmb'):
            break
        time.sleep(0.01)
    return known
seen = exchange_until_rmb(5)
c.close()
seen""")
    reap(pid)
    assert seen[:2] == ("rmb", "rmb"), f"(tx, rx, reason) after 5 s of exchanges: {seen}"


@check()
def test_X1_spawn(t):
    """posix_spawn and subprocess with the socket as standard input and output."""
    for how in ("posix_spawn", "subprocess"):
        c = t.pair()
        t.peer("c.sendall(b'early ')")
        if how == "subprocess":
            child = subprocess.Popen(["/bin/cat"], stdin=c, stdout=c)
            pid = child.pid
        else:
            actions = [(os.POSIX_SPAWN_DUP2, c.fileno(), 0), (os.POSIX_SPAWN_DUP2, c.fileno(), 1)]
            pid = os.posix_spawn("/bin/cat", ["cat"], os.environ, file_actions=actions)
        c.close()
        got = t.peer("c.sendall(b'late' * 10000)\nc.shutdown(socket.SHUT_WR)\nrecv_end(c)")
        assert got == b"early " + b"late" * 10_000, len(got)
        if how == "subprocess":
            assert child.wait(5) == 0
        else:
            reap(pid)


@check()
def test_X1_spawn_leaves_stream_alone(t):
    """Spawning programs that get no socket does not disturb the stream."""
    c = t.pair()
    for turn in range(10):
        t.peer("c.sendall(b'under way' * 500)")
        assert subprocess.run(["/bin/true"], check=False).returncode == 0
        os.system("true")
        with os.popen("echo popen") as output:
            assert output.read() == "popen\n"
        assert recv_exact(c, 4500) == b"under way" * 500
        c.sendall(b"back")
        assert t.peer("recv_exact(c, 4)") == b"back"


@check()
def test_X2_exec_without_library(t):
    """The new program has no library (environment cleared): the same bytes."""
    _cat(t, True)


@check()
def test_X3_passed_socket(t):
    """A socket sent with SCM_RIGHTS goes on in the receiving process at the same byte; the end follows its last copy."""
    here, there = socket.socketpair(socket.AF_UNIX)

    def child():
        here.close()
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
        sock = socket.socket(fileno=fds[0])
        sock.sendall(recv_exact(sock, 90_000))
        time.sleep(0.2)
    pid = forked(child)  # before there is any connection: the receiver is no relative of it
    there.close()
    c = t.pair()
    t.start("c.sendall(bytes(range(250)) * 360 + b'0123456789')\ngot = recv_exact(c, 90000)\n(got, c.recv(1))")
    assert recv_exact(c, 10) == bytes(range(10))
    socket.send_fds(here, [b"x"], [c.fileno()])
    c.close()
    got, end = t.join()
    whole = bytes(range(250)) * 360 + b"0123456789"
    assert got == whole[10:], "other bytes came back"
    assert end == b""
    reap(pid)


@check()
def test_X3_passed_with_unread_bytes(t):
    """Unread bytes that came by TCP, then by an RMB, are all there for who gets the descriptor."""
    c, read = tcp_then_rmb(t, "d")
    t.peer("d.sendall(b'RRR')")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [c.fileno()])
        c.close()
        c = socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0])
    assert recv_exact(c, 500 - read) == b"T" * (500 - read)
    assert recv_exact(c, read + 3) == b"R" * (read + 3)
    c.sendall(b"on")
    assert t.peer("recv_exact(d, 2)") == b"on"


@check()
def test_X3_passed_and_kept(t):
    """A socket sent with SCM_RIGHTS and kept is used by both processes in turn."""
    here, there = socket.socketpair(socket.AF_UNIX)

    def child():
        here.close()
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
        sock = socket.socket(fileno=fds[0])
        for turn in range(20):
            assert there.recv(1) == b"t"
            assert recv_exact(sock, 7) == b"odd %03d" % turn
            sock.sendall(b"child %03d" % turn)
            there.send(b"d")
    pid = forked(child)
    there.close()
    c = t.pair()
    socket.send_fds(here, [b"x"], [c.fileno()])
    for turn in range(20):
        t.peer("c.sendall(b'even %03d' % turn)", turn=turn)
        assert recv_exact(c, 8) == b"even %03d" % turn
        c.sendall(b"parent %03d" % turn)
        assert t.peer("recv_exact(c, 10)") == b"parent %03d" % turn
        t.peer("c.sendall(b'odd %03d' % turn)")
        here.send(b"t")
        assert here.recv(1) == b"d"
        assert t.peer("recv_exact(c, 9)") == b"child %03d" % turn
    reap(pid)


@check()
def test_X4_nothing_leaks_into_programs(t):
    """Programs started by exec get no socket, memfd, shm or anon_inode beyond what they should inherit."""
    c = t.pair()
    listener = listen()
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)

    def listed(**options):
        # Without closing anything on the way: what is inherited must be right by itself.
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        pid = os.fork()
        if pid == 0:
            os.dup2(writer, 1)
            os.execv("/bin/ls", ["ls", "-l", "/proc/self/fd"])
        os.close(writer)
        text = b""
        while part := os.read(reader, 65536):
            text += part
        os.close(reader)
        reap(pid)
        return [line.split(" -> ")[1] for line in text.decode().splitlines() if " -> " in line]
    suspicious = ("socket:", "memfd", "/dev/shm", "anon_inode", "eventfd", "xsmc")
    found = [name for name in listed() if any(word in name for word in suspicious)]
    assert not found, found
    os.set_inheritable(c.fileno(), True)
    found = [name for name in listed() if any(word in name for word in suspicious)]
    assert len(found) == 1 and found[0].startswith("socket:"), found
    c.sendall(b"fine")
    t.peer("echo(c, 4)")
    assert recv_exact(c, 4) == b"fine"
    listener.close()


@check()
def test_X5_listener_over_exec(t):
    """A listener inherited over exec, with a connection waiting, is accepted from."""
    listener = listen()
    t.peer("early = connect(address)\nearly.sendall(b'early')", address=listener.getsockname())
    time.sleep(0.1)
    listener.set_inheritable(True)
    code = """
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
for _ in range(5):
    sock = listener.accept()[0]
    while data := sock.recv(65536):
        sock.sendall(data)
    sock.close()
"""
    number = listener.fileno()
    pid = os.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", code, str(number)])
    listener.close()
    t.peer("""
early.shutdown(socket.SHUT_WR)
assert recv_end(early) == b'early'
for turn in range(4):
    late = connect(address)
    late.sendall(b'late' * 5000)
    late.shutdown(socket.SHUT_WR)
    assert recv_end(late) == b'late' * 5000""")
    reap(pid)


@check()
def test_X6_no_hole_for_the_successor(t):
    """What a successor reads begins with the next unread byte, or there is an error: however the bytes have come, and whatever
    the peer has done since."""
    stream = b"".join(b"%08d" % number for number in range(50_000))

    def successor(sock):
        got = b""
        try:
            while len(got) < len(stream) and (part := sock.recv(1 << 16)):
                got += part
        except OSError as error:
            assert error.errno in (errno.ECONNRESET, errno.ENOTCONN), error
        assert stream.startswith(got), (got[:8], stream.find(got[:8]))

    for last in ("", "linger(c, 1, 0)\nc.close()", "c.close()", "c.shutdown(socket.SHUT_WR)"):
        for way in ("pass", "fork", "fork, pass", "exec", "fork, exec"):
            c = t.pair(warm=True)
            # More than a ring holds: what it doesn't take goes by TCP once it has been full for a while.
            t.peer("c.sendall(stream)", stream=stream)
            if last:
                t.peer(last)
                time.sleep(0.05)

            def passed():
                ours, theirs = socket.socketpair()
                socket.send_fds(ours, [b"x"], [c.fileno()])
                c.close()
                successor(socket.socket(fileno=socket.recv_fds(theirs, 1, 1)[1][0]))

            def replaced():
                os.dup2(c.fileno(), 0)
                program = ("import os, sys\ngot = b''\ntry:\n    while len(got) < 400000 and (part := os.read(0, 65536)):\n"
                           "        got += part\nexcept OSError as error:\n    assert error.errno in (104, 107), error\n"
                           "assert b''.join(b'%08d' % n for n in range(50000)).startswith(got), got[:8]\n")
                os.execv(sys.executable, [sys.executable, "-S", "-c", program])
            if way == "pass":
                passed()
            elif way == "exec":
                # (As the child of a fork whose parent never used it: it has the connection for itself.)
                reap(forked(replaced))
            elif way == "fork":
                reap(forked(lambda: successor(c)))
            elif way == "fork, pass":
                reap(forked(passed))
            else:
                reap(forked(lambda: reap(forked(replaced))))
            c.close()
            t.peer("c.close()")
