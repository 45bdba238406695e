"""D: descriptor identity. Numbers, copies and open files behave as the kernel's do."""

import fcntl
import os
import resource
import select
import socket
import time

from harness.behave import check
from harness.net import *


@check()
def test_D1_number_reused(t):
    """close() ends all events; a new socket on the same number has no trace of the old one."""
    for _ in range(3):
        c = t.pair("c")
        epoll = select.epoll()
        epoll.register(c, EPOLLIN)
        number = c.fileno()
        t.peer("c.send(b'old')")
        ready(epoll, 2)
        c.close()
        t.peer("""
try:
    c.send(b'more')
except OSError:
    pass""")
        no_event(epoll, 0.2)
        d = t.pair("d")
        assert d.fileno() == number
        fails(errno.ENOENT, epoll.modify, d, EPOLLIN)
        epoll.register(d, EPOLLIN)
        no_event(epoll, 0.1)
        t.peer("d.send(b'new')")
        assert ready(epoll, 3) == {number: EPOLLIN}
        assert d.recv(10) == b"new"
        d.close()
        epoll.close()


@check()
def test_D2_epoll_follows_open_file(t):
    """A registered descriptor that was duplicated and closed goes on reporting until its last copy is closed."""
    c = t.pair()
    number = c.fileno()
    epoll = select.epoll()
    epoll.register(number, EPOLLIN)
    copy = os.dup(number)
    os.close(number)
    t.peer("c.send(b'x')")
    assert ready(epoll, 3) == {number: EPOLLIN}
    fails(errno.EBADF, epoll.unregister, number)
    epoll.register(copy, EPOLLIN)
    until(lambda: ready(epoll) == {number: EPOLLIN, copy: EPOLLIN}, 2, "events for both entries")
    os.close(copy)
    no_event(epoll)
    c.detach()


@check()
def test_D2_registered_anew(t):
    """The same open file under two numbers gives two entries, and DEL of one leaves the other."""
    c = t.pair()
    epoll = select.epoll()
    copy = os.dup(c.fileno())
    epoll.register(c, EPOLLIN)
    epoll.register(copy, EPOLLIN)
    t.peer("c.send(b'x')")
    until(lambda: len(ready(epoll)) == 2, 3, "both entries report")
    epoll.unregister(c)
    assert ready(epoll, 1) == {copy: EPOLLIN}
    assert os.read(copy, 1) == b"x"
    no_event(epoll, 0.1)


@check()
def test_D3_everything_unknown_closed(t):
    """After closing every unknown descriptor, kept connections work and new ones can be opened."""
    c = t.pair()
    listener = listen()
    keep = {c.fileno(), listener.fileno()}
    for number in range(3, 1024):
        if number not in keep:
            try:
                os.close(number)
            except OSError:
                pass
    for turn in range(60):
        c.sendall(b"still here")
        t.peer("echo(c, 10)")
        assert recv_exact(c, 10) == b"still here"
    t.peer("d = connect(address)", address=listener.getsockname())
    d = listener.accept()[0]
    t.warm(d, "d")
    t.peer("l = listen()")
    e = connect(t.peer("l.getsockname()"))
    t.peer("e = l.accept()[0]")
    e.sendall(b"new")
    t.peer("echo(e, 3)")
    assert recv_exact(e, 3) == b"new"
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)
    t.peer("c.send(b'x')")
    assert ready(epoll, 3) == {c.fileno(): EPOLLIN}


@check()
def test_D3_close_range(t):
    """The same with close_range() and closefrom()."""
    close_range, closefrom = libc.close_range, libc.closefrom
    for turn in range(2):
        c = t.pair("c")
        high = fcntl.fcntl(c, fcntl.F_DUPFD, 50)
        if turn:
            closefrom(51)
            assert close_range(3, 49, 0) == 0
        else:
            assert close_range(51, 0xFFFFFFFF, 0) == 0 and close_range(3, 49, 0) == 0
        c.detach()
        c = socket.socket(fileno=high)
        c.sendall(b"through")
        t.peer("echo(c, 7)")
        assert recv_exact(c, 7) == b"through"
        c.close()
        t.peer("assert c.recv(1) == b''")
        d = t.pair("d")
        d.sendall(b"y")
        t.peer("echo(d, 1)")
        assert d.recv(1) == b"y"
        d.close()


@check()
def test_D4_dup2(t):
    """dup2, dup3 and F_DUPFD onto or from a socket."""
    c1, c2 = t.pair("p1"), t.pair("p2")
    n1, n2 = c1.fileno(), c2.fileno()
    os.dup2(n2, n1)
    assert t.peer("p1.recv(1)") == b""
    os.write(n1, b"via one")
    assert t.peer("p2.recv(100)") == b"via one"
    t.peer("p2.send(b'back')")
    assert os.read(n1, 100) == b"back"
    reader, writer = os.pipe()
    os.dup2(writer, n2)
    os.write(n2, b"to the pipe")
    assert os.read(reader, 100) == b"to the pipe"
    os.write(n1, b"copy lives")
    assert t.peer("p2.recv(100)") == b"copy lives"
    assert os.dup2(n1, n1) == n1
    assert libc.dup3(n1, n1, 0) == -1 and ctypes.get_errno() == errno.EINVAL
    high = fcntl.fcntl(n1, fcntl.F_DUPFD_CLOEXEC, 100)
    assert high >= 100 and fcntl.fcntl(high, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.write(high, b"high")
    assert t.peer("p2.recv(100)") == b"high"
    other = os.dup(writer)
    assert libc.dup3(n1, other, os.O_CLOEXEC) == other
    os.write(other, b"dup3")
    assert t.peer("p2.recv(100)") == b"dup3"
    for number in (n1, high):
        os.close(number)
    t.peer("p2.send(b'last')")
    assert os.read(other, 10) == b"last"
    os.close(other)
    assert t.peer("p2.recv(1)") == b""
    c1.detach()
    c2.detach()


@check()
def test_D4_dup2_closes_pending(t):
    """Bytes sent just before the last copy is replaced by dup2 arrive before the end."""
    for _ in range(5):
        c = t.pair()
        c.sendall(b"k" * 100_000)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, c.fileno())
        assert t.peer("len(recv_end(c))") == 100_000
        os.close(null)
        c.close()


@check()
def test_D5_copies_share(t):
    """File status flags, shutdown and position are those of the open file."""
    c = t.pair()
    copy = socket.socket(fileno=os.dup(c.fileno()))
    t.peer("c.sendall(b'0123456789')")
    assert recv_exact(c, 5) == b"01234" and recv_exact(copy, 5) == b"56789"
    flags = fcntl.fcntl(copy, fcntl.F_GETFL)
    fcntl.fcntl(copy, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    assert fcntl.fcntl(c, fcntl.F_GETFL) & os.O_NONBLOCK
    fails(errno.EAGAIN, os.read, c.fileno(), 1)
    fcntl.fcntl(c, fcntl.F_SETFL, flags)
    assert not fcntl.fcntl(copy, fcntl.F_GETFL) & os.O_NONBLOCK
    copy.shutdown(socket.SHUT_WR)
    fails(errno.EPIPE, c.send, b"x")
    assert t.peer("c.recv(1)") == b""
    t.peer("c.sendall(b'answer')")
    assert recv_exact(c, 6) == b"answer"


@check()
def test_D5_close_one_copy(t):
    """Closing one copy, by number, changes nothing for the other."""
    c = t.pair()
    for _ in range(20):
        copy = os.dup(c.fileno())
        os.close(copy)
        c.sendall(b"on")
        t.peer("echo(c, 2)")
        assert recv_exact(c, 2) == b"on"
    if t.both:
        assert t.on_rmb(c), "dup and close made the connection leave the RMBs for good"


@check()
def test_D6_table_as_before(t):
    """1500 cycles leave the descriptor table as it was; new sockets get the lowest free number."""
    kept = t.pair()  # Upgraded, so that what the library holds for this peer is there from the start.
    t.peer("l = listen()\nepoll_l = bg(echo_server, l, 1650)")
    address = t.peer("l.getsockname()")

    def cycle():
        c = connect(address)
        c.sendall(b"hello")
        assert recv_exact(c, 5) == b"hello"
        epoll = select.epoll()
        epoll.register(c, EPOLLIN)
        numbers = c.fileno(), epoll.fileno()
        if t_odd[0] % 2:
            epoll.close()
            c.close()
        else:
            c.close()
            epoll.close()
        t_odd[0] += 1
        return numbers
    t_odd = [0]
    for _ in range(100):
        cycle()
    time.sleep(0.3)
    before = [number for number in open_fds()]
    highest = max(max(cycle()) for _ in range(1500))
    assert highest <= 63, highest
    until(lambda: open_fds() == before, 3, lambda: f"{before} as before: {fd_targets()}")
    lowest = next(number for number in range(64) if number not in before)
    s = socket.socket()
    assert s.fileno() == lowest, (s.fileno(), lowest, before)
    kept.close()


@check()
def test_D7_numbers_up_to_1023(t):
    """select works up to 1023; poll and epoll at 5000."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        t.skip(f"the hard limit of descriptors is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (6000, hard))
    c = t.pair()
    for number in (1015, 1020, 1023, 5000):
        os.dup2(c.fileno(), number)
        if number < 1024:
            assert selected(number) == (False, True, False)
            t.peer("c.send(b'x')")
            assert select.select([number], [], [], 3)[0] == [number]
            assert selected(number) == (True, True, False)
        else:
            t.peer("c.send(b'x')")
        epoll = select.epoll()
        epoll.register(number, EPOLLIN)
        assert polled(number, seconds=3) == select.POLLIN
        assert ready(epoll, 3) == {number: EPOLLIN}
        assert os.read(number, 1) == b"x"
        os.write(number, b"abc")
        assert t.peer("recv_exact(c, 3)") == b"abc"
        os.close(number)
        epoll.close()
