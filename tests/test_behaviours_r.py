"""R: readiness. epoll, poll and select report what the kernel would."""

import ctypes
import os
import select
import socket
import threading
import time

from harness.behave import check
from harness.net import *


@check()
def test_R1_nested_epoll(t):
    """An epoll set that holds the socket is itself watched by epoll, poll and select, for input and output."""
    c = t.pair()
    inner, outer = select.epoll(), select.epoll()
    inner.register(c, EPOLLIN)
    outer.register(inner.fileno(), EPOLLIN)
    for _ in range(5):
        no_event(outer, 0.02)
        assert not polled(inner) and not readable(inner.fileno())
        t.peer("c.send(b'x')")
        assert ready(outer, 3) == {inner.fileno(): EPOLLIN}
        assert polled(inner) == select.POLLIN and readable(inner.fileno())
        assert ready(inner) == {c.fileno(): EPOLLIN}
        c.recv(1)
        no_event(outer, 0.02)
        assert not polled(inner) and not readable(inner.fileno())
    inner.modify(c, EPOLLOUT)
    assert ready(outer, 3) and polled(inner, seconds=1) and readable(inner.fileno(), 1)


@check()
def test_R1_nested_epoll_wakes_sleeper(t):
    """A thread that already sleeps in the outer set is woken."""
    c = t.pair()
    for wait in ("epoll", "poll", "select"):
        inner, outer = select.epoll(), select.epoll()
        inner.register(c, EPOLLIN)
        outer.register(inner.fileno(), EPOLLIN)
        sleeper = bg({"epoll": lambda: bool(outer.poll(5)), "poll": lambda: polled(inner, seconds=5),
                      "select": lambda: readable(inner.fileno(), 5)}[wait])
        time.sleep(0.2)
        t.peer("c.send(b'x')")
        assert sleeper.join(), wait
        c.recv(1)


@check()
def test_R2_registered_before_connect(t):
    """Registration, data and flags survive the set-up of the connection."""
    t.peer("l = listen()")
    for _ in range(5):
        s = socket.socket()
        s.setblocking(False)
        epoll = select.epoll()
        epoll.register(s, EPOLLIN | EPOLLET)
        assert s.connect_ex(tuple(t.peer("l.getsockname()"))) in (0, errno.EINPROGRESS)
        epoll.modify(s, EPOLLIN | EPOLLOUT | EPOLLET)
        assert ready(epoll, 3) == {s.fileno(): EPOLLOUT}
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        t.peer("c = l.accept()[0]")
        for _ in range(30):
            s.send(b"hello")
            t.peer("echo(c, 5)")
            events = ready(epoll, 3)
            assert list(events) == [s.fileno()] and events[s.fileno()] & EPOLLIN, events
            assert recv_exact(s, 5) == b"hello"
        epoll.modify(s, EPOLLIN | EPOLLET)
        epoll.unregister(s)
        fails(errno.ENOENT, epoll.unregister, s)
        fails(errno.ENOENT, epoll.modify, s, EPOLLIN)


@check()
def test_R3_edges(t):
    """One edge an arrival, none for a partial read, a new one for more bytes."""
    c = t.pair()
    c.setblocking(False)
    epoll = select.epoll()
    epoll.register(c, EPOLLIN | EPOLLET)
    epoll.poll(0)
    for _ in range(5):
        t.peer("c.send(b'abcdef')")
        assert ready(epoll, 3) == {c.fileno(): EPOLLIN}
        assert c.recv(2) == b"ab"
        no_event(epoll)
        t.peer("c.send(b'gh')")
        assert ready(epoll, 3) == {c.fileno(): EPOLLIN}
        assert recv_exact(c, 6) == b"cdefgh"
        fails(errno.EAGAIN, c.recv, 1)
        no_event(epoll, 0.1)


@check()
def test_R4_modify_gives_event(t):
    """EPOLL_CTL_MOD on a ready descriptor gives a fresh event, edge-triggered too."""
    c = t.pair()
    c.setblocking(False)
    epoll = select.epoll()
    epoll.register(c, EPOLLIN | EPOLLET)
    c.send(b"a little")
    epoll.modify(c, EPOLLOUT | EPOLLET)
    assert ready(epoll, 2) == {c.fileno(): EPOLLOUT}
    no_event(epoll, 0.1)
    epoll.modify(c, EPOLLOUT | EPOLLET)
    assert ready(epoll, 2) == {c.fileno(): EPOLLOUT}
    no_event(epoll, 0.1)
    t.peer("c.send(b'x')")
    epoll.modify(c, EPOLLIN | EPOLLET)
    assert ready(epoll, 2) == {c.fileno(): EPOLLIN}
    no_event(epoll, 0.1)
    epoll.modify(c, EPOLLIN | EPOLLET)
    assert ready(epoll, 2) == {c.fileno(): EPOLLIN}


@check()
def test_R5_oneshot(t):
    """EPOLLONESHOT disarms after one event until MOD."""
    c = t.pair()
    epoll = select.epoll()
    epoll.register(c, EPOLLIN | EPOLLONESHOT)
    fails(errno.EEXIST, epoll.register, c, EPOLLIN)
    for _ in range(4):
        t.peer("c.send(b'1')")
        assert ready(epoll, 3) == {c.fileno(): EPOLLIN}
        no_event(epoll, 0.1)
        t.peer("c.send(b'2')")
        no_event(epoll)
        epoll.modify(c, EPOLLIN | EPOLLONESHOT)
        assert ready(epoll, 3) == {c.fileno(): EPOLLIN}
        assert recv_exact(c, 2) == b"12"
        epoll.modify(c, EPOLLIN | EPOLLONESHOT)
        no_event(epoll, 0.05)


@check()
def test_R6_exclusive_listener(t):
    """A listener watched with EPOLLEXCLUSIVE by three processes hands each connection to exactly one."""
    listener = listen()
    listener.setblocking(False)

    def worker(number):
        epoll = select.epoll()
        epoll.register(listener, EPOLLIN | EPOLLEXCLUSIVE)
        try:
            epoll.modify(listener, EPOLLIN | EPOLLEXCLUSIVE)
            raise AssertionError("MOD of an exclusive entry worked")
        except OSError as error:
            assert error.errno == errno.EINVAL
        while True:
            for _ in epoll.poll():
                try:
                    connection = listener.accept()[0]
                except BlockingIOError:
                    continue
                connection.setblocking(True)
                word = connection.recv(4)
                if word == b"quit":
                    return
                connection.sendall(b"%d" % number)
                connection.close()
    workers = [forked(worker, number) for number in range(3)]
    answers = t.peer("""
def ask(address):
    answers = []
    for _ in range(200):
        c = connect(address)
        c.sendall(b'work')
        answers.append(recv_end(c))
        c.close()
    return answers
ask(address)""", address=listener.getsockname())
    assert len(answers) == 200 and set(answers) <= {b"0", b"1", b"2"}, answers
    for _ in workers:
        t.peer("q = connect(address); q.sendall(b'quit'); time.sleep(0.1)")
    for pid in workers:
        reap(pid)


@check()
def test_R6_exclusive_connection(t):
    """EPOLLEXCLUSIVE on a connection: several sets, at least one gets the event, none is lost."""
    c = t.pair()
    sets = [select.epoll() for _ in range(3)]
    for epoll in sets:
        epoll.register(c, EPOLLIN | EPOLLEXCLUSIVE)
    for _ in range(20):
        t.peer("c.send(b'x')")
        until(lambda: any(epoll.poll(0) for epoll in sets), 3, "an event in one of the sets")
        assert c.recv(1) == b"x"
        for epoll in sets:
            no_event(epoll, 0)


@check()
def test_R7_full_is_not_writable(t):
    """Not writable while send gives EAGAIN, writable again when the peer has read."""
    c = t.pair()
    c.setblocking(False)
    epoll = select.epoll()
    epoll.register(c, EPOLLOUT)
    edge = select.epoll()
    edge.register(c, EPOLLOUT | EPOLLET)
    edge.poll(0)
    for _ in range(2):
        total = fill(c)
        assert not polled(c, select.POLLOUT) and not selected(c)[1]
        no_event(epoll, 0.05)
        edge.poll(0)
        t.start("got = recv_exact(c, total)", total=total)
        assert ready(epoll, 3) == {c.fileno(): EPOLLOUT}
        assert ready(edge, 3) == {c.fileno(): EPOLLOUT}
        t.join()
        assert polled(c, select.POLLOUT, 3) == select.POLLOUT and selected(c, 3)[1]


@check()
def test_R7_sleeper_for_room(t):
    """Sleepers in poll, select and epoll are woken when there is room."""
    c = t.pair()
    c.setblocking(False)
    epoll = select.epoll()
    epoll.register(c, EPOLLOUT)
    for wait in (lambda: epoll.poll(5), lambda: polled(c, select.POLLOUT, 5), lambda: select.select([], [c], [], 5)[1]):
        total = fill(c, 0.3)
        sleeper = bg(wait)
        time.sleep(0.15)
        assert sleeper.is_alive(), "woke although full"
        t.start("got = recv_exact(c, total)", total=total)
        assert sleeper.join()
        t.join()


def count_false_input(listener, connections):
    """Echoes through a level-triggered epoll set; gives how often EPOLLIN was reported and nothing was there."""
    epoll, open_now, false = select.epoll(), {}, 0
    for _ in range(connections):
        sock = listener.accept()[0]
        sock.setblocking(False)
        open_now[sock.fileno()] = sock
        epoll.register(sock, EPOLLIN)
    while open_now:
        for fd, _ in epoll.poll(10):
            try:
                data = open_now[fd].recv(65536)
            except BlockingIOError:
                false += 1
                continue
            if data:
                send_all(open_now[fd], data)
            else:
                open_now.pop(fd).close()
    return false


@check()
def test_R7_no_false_input(t):
    """Nobody is told of input that is not there, also while connections are being set up and upgraded.

    A server with blocking sockets in a level-triggered epoll set hangs in recv otherwise.
    """
    t.peer("l = listen()")
    address = t.peer("l.getsockname()")
    false = 0
    for _ in range(500):
        t.start("count_false_input(l, 10)")
        socks = [connect(address) for _ in range(10)]
        for turn in range(12):
            for sock in socks:
                sock.sendall(b"%08d" % turn * 20)
            for sock in socks:
                assert recv_exact(sock, 160) == b"%08d" % turn * 20
        for sock in socks:
            sock.close()
        false += t.join()
    assert not false, f"EPOLLIN was reported {false} times, but there was nothing to read"


def _masks(c, want, want_poll):
    """Level, edge and poll all report this."""
    epoll = select.epoll()
    epoll.register(c, EPOLLIN | EPOLLRDHUP)
    got = until(lambda: ready(epoll, 1).get(c.fileno(), 0) == want and want, 3, f"{want:#x}, epoll says {ready(epoll)}")
    edge = select.epoll()
    edge.register(c, EPOLLIN | EPOLLRDHUP | EPOLLET)
    assert ready(edge, 1) == {c.fileno(): want}, ready(edge)
    # Once more if the connection leaves its link just now (README, Limits), and not again.
    again = ready(edge, 0.05)
    assert again in ({}, {c.fileno(): want}), again
    if again:
        no_event(edge, 0.05)
    assert polled(c, select.POLLIN | select.POLLRDHUP) == want_poll, hex(polled(c, select.POLLIN | select.POLLRDHUP))
    return got


@check()
def test_R8_close_and_half_close(t):
    """EPOLLIN|EPOLLRDHUP for close and half-close, EPOLLHUP when both directions are closed."""
    for how in ("c.shutdown(socket.SHUT_WR)", "c.close()"):
        c = t.pair()
        epoll = select.epoll()
        epoll.register(c, EPOLLIN | EPOLLRDHUP)
        no_event(epoll, 0.05)
        t.peer(how)
        assert ready(epoll, 3) == {c.fileno(): EPOLLIN | EPOLLRDHUP}
        _masks(c, EPOLLIN | EPOLLRDHUP, select.POLLIN | select.POLLRDHUP)
        assert c.recv(10) == b"" and c.recv(10) == b""
        _masks(c, EPOLLIN | EPOLLRDHUP, select.POLLIN | select.POLLRDHUP)
        c.shutdown(socket.SHUT_WR)
        _masks(c, EPOLLIN | EPOLLRDHUP | EPOLLHUP, select.POLLIN | select.POLLRDHUP | select.POLLHUP)
        c.close()


@check()
def test_R8_pending_bytes_and_close(t):
    """Unread bytes and the end of the stream are both seen, and the bytes can be read."""
    c = t.pair()
    epoll = select.epoll()
    epoll.register(c, EPOLLIN | EPOLLRDHUP)
    t.peer("c.sendall(b'z' * 10000); c.close()")
    until(lambda: ready(epoll).get(c.fileno()) == EPOLLIN | EPOLLRDHUP, 3, "EPOLLIN|EPOLLRDHUP")
    assert recv_end(c) == b"z" * 10000
    assert ready(epoll) == {c.fileno(): EPOLLIN | EPOLLRDHUP}


@check()
def test_R8_reset(t):
    """A reset gives EPOLLERR|EPOLLHUP, with the input and hang-up bits that go with it."""
    c = t.pair()
    epoll = select.epoll()
    epoll.register(c, EPOLLIN | EPOLLRDHUP)
    t.peer("linger(c, 1, 0); c.close()")
    want = EPOLLIN | EPOLLERR | EPOLLHUP | EPOLLRDHUP
    until(lambda: ready(epoll).get(c.fileno()) == want, 3, "EPOLLERR and EPOLLHUP")
    assert polled(c, 0) == select.POLLERR | select.POLLHUP
    fails(errno.ECONNRESET, c.recv, 1)


@check()
def test_R9_fair_to_ordinary_descriptors(t):
    """A flooded socket does not hide a pipe, an eventfd or a UDP socket, even with maxevents 1."""
    c = t.pair()
    c.setblocking(False)
    t.start("""
c.setblocking(False)
end = time.monotonic() + 4
while time.monotonic() < end:
    try:
        c.send(bytes(30000))
    except BlockingIOError:
        time.sleep(0.0005)
    except OSError:
        break""")
    reader, writer = os.pipe()
    event = os.eventfd(0, os.EFD_NONBLOCK)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((HOST, 0))
    epoll = select.epoll()
    for fd in (c.fileno(), reader, event, udp.fileno()):
        epoll.register(fd, EPOLLIN)
    actions = [(reader, lambda: os.write(writer, b"x"), lambda: os.read(reader, 1)),
               (event, lambda: os.eventfd_write(event, 1), lambda: os.eventfd_read(event)),
               (udp.fileno(), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", udp.getsockname()),
                lambda: udp.recv(1))]
    for _ in range(4):
        for fd, make_ready, consume in actions:
            make_ready()
            for turn in range(300):
                events = epoll.poll(1, 1)
                if events and events[0][0] == fd:
                    consume()
                    break
                if events:
                    try:
                        c.recv(2000)
                    except BlockingIOError:
                        pass
            else:
                raise AssertionError(f"descriptor {fd} did not show up within 300 waits")
    c.close()
    t.join()


@check()
def test_R9_ready_descriptors_hide_no_connection(t):
    """A pipe that is never read does not hide a connection, whatever the program does between waits, even with maxevents 1."""
    c = t.pair()
    reader, writer = os.pipe()
    os.write(writer, b"x")
    epoll = select.epoll()
    epoll.register(reader, EPOLLIN)
    epoll.register(c, EPOLLIN)
    for most in (10, 1):
        t.peer("c.sendall(b'bytes')")
        arrived(c, 5)
        seen = set()
        for _ in range(20):
            time.sleep(0.001)
            seen |= {fd for fd, _ in epoll.poll(0, most)}
        assert seen == {reader, c.fileno()}, (most, seen)
        assert c.recv(10) == b"bytes"


@check()
def test_R10_closing_between_waits(t):
    """40 readable connections, some closed after each wait: no stale, lost or repeated event."""
    t.peer("l = listen()\nothers = []")
    address = t.peer("l.getsockname()")
    connections = {}
    for _ in range(40):
        sock = connect(address)
        t.peer("others.append(l.accept()[0])")
        connections[sock.fileno()] = sock
    def exchange():
        for sock in connections.values():
            sock.send(b"w")
        # No read here waits: see read_up_to_rmb.
        t.peer("[polled(one) and echo(one, 1) for one in others] and None")
        for sock in connections.values():
            polled(sock)
        for sock in connections.values():
            assert sock.recv(1) == b"w"
        return all(t.on_rmb(sock) for sock in connections.values())
    if t.both:
        until(exchange, 8, "all connections on RMBs")
    else:
        exchange()
    epoll = select.epoll()
    for sock in connections.values():
        epoll.register(sock, EPOLLIN)
    t.peer("[one.send(b'x') for one in others] and None")
    waits = 0
    while connections:
        events = epoll.poll(2, 13)
        assert events, f"{len(connections)} readable connections were not reported"
        for fd, mask in events:
            assert fd in connections, f"event for closed descriptor {fd}"
        for number, (fd, _) in enumerate(events[:7]):
            if number % 2:
                epoll.unregister(fd)
            connections.pop(fd).close()
        waits += 1
        assert waits < 60
    no_event(epoll, 0.1)


@check()
def test_R10_closed_while_waiting(t):
    """Another thread removes and closes a socket while this one waits: the wait goes on and reports the others."""
    c, d = t.pair("c"), t.pair("d")
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)
    epoll.register(d, EPOLLIN)
    number = d.fileno()
    waiter = bg(epoll.poll, 5)
    time.sleep(0.1)
    c.close()
    t.peer("c.close()")
    time.sleep(0.1)
    t.peer("d.send(b'x')")
    assert waiter.join() == [(number, EPOLLIN)]


def _not_readable(c, epoll):
    """Which calls say at a look that there is nothing to read, though there is."""
    said = {"epoll": epoll.poll(0), "poll": polled(c), "select": select.select([c], [], [], 0)[0]}
    return [call for call, readable in said.items() if not readable]


@check()
def test_R11_stays_readable(t):
    """What can be read can be read at every look until it is, also while the connection goes back to TCP for good."""
    for _ in range(12):
        c = t.pair()
        t.peer("c.sendall(b'unread')")
        arrived(c, 6)
        missed, looks, over = [], 0, time.monotonic() + 0.06
        with select.epoll() as epoll:
            epoll.register(c, select.EPOLLIN)
            assert ready(epoll, 3)
            # SO_ATTACH_FILTER, an option that only the kernel's TCP honours.
            t.start("time.sleep(0.01)\nwhole, keep = bpf_return(0xffffffff)\nc.setsockopt(socket.SOL_SOCKET, 26, whole)")
            while time.monotonic() < over:
                looks += 1
                missed += _not_readable(c, epoll)
                try:
                    assert c.recv(10, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"unread"
                except BlockingIOError:
                    missed.append("recv")
        t.join()
        assert not missed, (len(missed), missed[:5], looks)
        t.peer("c.sendall(b'. And more')")
        assert recv_exact(c, 16) == b"unread. And more"
        c.close()


@check()
def test_R12_readable_while_another_thread_looks(t):
    """What can be read can be read at every look of one thread while others look at it, too, or read some of it."""
    for warm in (False, True):
        c = t.pair(warm=warm)
        t.peer("c.sendall(b'unread' * 20000)")
        arrived(c, 120_000)
        done = threading.Event()

        def look():
            for _ in range(19_000):  # some are left
                assert c.recv(6, socket.MSG_PEEK) == b"unread"
                assert c.recv(6) == b"unread"
                if done.is_set():
                    break

        missed, looks, over = [], 0, time.monotonic() + 0.3
        thread = bg(look)
        with select.epoll() as epoll:
            epoll.register(c, select.EPOLLIN)
            while time.monotonic() < over:
                looks += 1
                missed += _not_readable(c, epoll)
        done.set()
        thread.join()
        assert not missed, (len(missed), missed[:5], looks)
        c.close()


def _send_whole(c, whole):
    """Sends it by non-blocking calls, waiting by epoll."""
    c.setblocking(False)
    left = memoryview(whole)
    with select.epoll() as epoll:
        epoll.register(c, EPOLLOUT)
        while left:
            assert epoll.poll(3), f"{len(left)} bytes can't be sent"
            try:
                left = left[c.send(left):]
            except BlockingIOError:
                pass
    c.setblocking(True)


@check()
def test_R13_as_much_under_way_as_with_tcp(t):
    """Two ends that both send a megabyte by non-blocking calls before they read get done: TCP has room for it."""
    whole = chance.randbytes(1 << 20)
    for warm in (True, False):
        c = t.pair(warm=warm)
        t.start("_send_whole(c, whole)", whole=whole)
        _send_whole(c, whole)
        t.join()
        assert recv_exact(c, len(whole)) == whole
        assert t.peer("recv_exact(c, len(whole)) == whole")
        c.close()
