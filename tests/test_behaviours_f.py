"""F: fork. Copies of a socket in several processes are one socket."""

import os
import select
import signal
import socket
import time

from harness.behave import check
from harness.net import *


def _exchange(t, c, text, name="c"):
    t.start(f"echo({name}, {len(text)})")
    c.sendall(text)
    assert recv_exact(c, len(text)) == text
    t.join()


@check()
def test_F1_child_closes_or_exits(t):
    """A child that closes an inherited socket, or only exits, does not affect the parent's stream."""
    c = t.pair()
    for turn in range(40):
        _exchange(t, c, b"turn %d" % turn * (1 + turn * 50))
        reap(forked(c.close if turn % 2 else lambda: None))
        _exchange(t, c, b"after")
    if t.both:
        t.warm(c, "c")


@check()
def test_F1_pending_bytes(t):
    """Bytes that were under way when the parent forks arrive, in both directions."""
    c = t.pair()
    for turn in range(10):
        t.peer("c.sendall(data)", data=b"d" * 30_000)
        c.sendall(b"u" * 30_000)
        reap(forked(c.close if turn % 2 else lambda: None))
        assert recv_exact(c, 30_000) == b"d" * 30_000
        assert t.peer("recv_exact(c, 30000)") == b"u" * 30_000
        t.warm(c, "c")


@check()
def test_F2_children_leave_epoll_alone(t):
    """Children that close inherited sockets and epoll sets do not change what the parent's epoll reports."""
    c = t.pair()
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)

    def child(number):
        c.close()
        if number % 2:
            epoll.close()
    for number in range(10):
        reap(forked(child, number))
        if number in (2, 6):
            t.warm(c, "c")
    t.peer("c.send(b'x')")
    assert ready(epoll, 3) == {c.fileno(): EPOLLIN}
    epoll.modify(c, EPOLLIN | EPOLLET)
    assert ready(epoll, 3) == {c.fileno(): EPOLLIN}
    epoll.unregister(c)
    no_event(epoll, 0.05)


@check()
def test_F2_epoll_used_in_child(t):
    """A forked child that goes on with the inherited epoll set and socket gets the events."""
    c = t.pair()
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)

    def child():
        for _ in range(50):
            assert ready(epoll, 5) == {c.fileno(): EPOLLIN}
            data = c.recv(100)
            c.sendall(data)
    pid = forked(child)
    number = c.fileno()
    c.close()
    answers = t.peer("""
answers = []
for turn in range(50):
    c.sendall(b'%04d' % turn)
    answers.append(recv_exact(c, 4))
answers""")
    assert answers == [b"%04d" % turn for turn in range(50)]
    reap(pid)
    assert number >= 0


@check()
def test_F3_all_generations_talk(t):
    """Parent, four children and a grandchild each use old and new connections at the same time."""
    c = t.pair()
    t.peer("l = listen()\nserver = [bg(lambda: echo_end(l.accept()[0])) for _ in range(8)]")
    address = t.peer("l.getsockname()")

    def talk(count):
        sock = connect(address)
        for turn in range(count):
            sock.sendall(b"%06d" % turn)
            assert recv_exact(sock, 6) == b"%06d" % turn
        sock.close()

    def child():
        grandchild = forked(talk, 100)
        talk(100)
        reap(grandchild)
    t.start("for _ in range(300):\n    echo(c, 100)")
    pids = [forked(child) for _ in range(4)]
    for turn in range(300):
        text = b"%04d" % turn * 25
        c.sendall(text)
        assert recv_exact(c, 100) == text
    for pid in pids:
        reap(pid)
    t.join()
    t.peer("[thread.join() for thread in server] and None")


@check()
def test_F4_workers_share_listener(t):
    """Four forked workers in accept serve 300 requests of random size, each once."""
    listener = listen()

    def worker():
        while True:
            sock = listener.accept()[0]
            size = int.from_bytes(recv_exact(sock, 4), "little")
            if size == 0:
                return
            sock.sendall(hashlib.sha256(recv_exact(sock, size)).digest())
            assert sock.recv(1) == b""
            sock.close()
    workers = [forked(worker) for _ in range(4)]
    served = t.peer("""
def request(data):
    sock = connect(address)
    sock.sendall(len(data).to_bytes(4, "little") + data)
    if data:
        assert recv_exact(sock, 32) == hashlib.sha256(data).digest()
    sock.close()
def many(seed, count):
    r = random.Random(seed)
    for _ in range(count):
        request(r.randbytes(int(2 ** r.uniform(0, 17))))
    return count
sum(thread.join() for thread in [bg(many, seed, 100) for seed in range(3)])""", address=listener.getsockname())
    assert served == 300
    t.peer("[request(b'') for _ in range(4)] and None")
    for pid in workers:
        reap(pid)


@check()
def test_F5_workers_replaced(t):
    """Workers exit and are replaced while connections arrive; no request fails."""
    listener = listen()

    def worker():
        ended = []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
        listener.settimeout(None)
        while not ended:
            if not select.select([listener], [], [], 0.05)[0]:
                continue
            listener.setblocking(False)
            try:
                sock = listener.accept()[0]
            except BlockingIOError:
                continue
            sock.setblocking(True)
            sock.sendall(recv_exact(sock, 200)[::-1])
            sock.close()
    t.start("""
def clients(address):
    for turn in range(250):
        sock = connect(address)
        data = random.randbytes(200)
        sock.sendall(data)
        assert recv_exact(sock, 200) == data[::-1]
        assert sock.recv(1) == b""
        sock.close()
threads = [bg(clients, address) for _ in range(3)]
[thread.join(17) for thread in threads] and None""", address=listener.getsockname())
    workers = [forked(worker) for _ in range(3)]
    for _ in range(15):
        time.sleep(0.05)
        os.kill(workers[0], signal.SIGTERM)
        reap(workers.pop(0))
        workers.append(forked(worker))
    t.join()
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
        reap(pid)


@check()
def test_F6_end_with_last_copy(t):
    """The peer sees the end when the last copy in any process is closed, not before, and at once then."""
    c = t.pair()

    def child():
        assert recv_end(c) == b"question"
        time.sleep(0.3)
        c.sendall(b"answer")
    pid = forked(child)
    c.close()
    got, seconds = t.peer("""
c.sendall(b"question")
c.shutdown(socket.SHUT_WR)
began = time.monotonic()
got = recv_end(c)
(got, time.monotonic() - began)""")
    assert got == b"answer" and 0.25 < seconds < 3, (got, seconds)
    reap(pid)

    for turn in range(3):
        c = t.pair()
        pid = forked(time.sleep, 0.5)
        c.close()
        seconds = t.peer("began = time.monotonic()\nassert c.recv(1) == b''\ntime.monotonic() - began")
        assert 0.2 < seconds < 3, seconds
        reap(pid)


@check()
def test_F6_child_sends_rest(t):
    """The parent closes after fork; the child sends a lot and exits: everything arrives, then the end."""
    for _ in range(3):
        c = t.pair()
        c.sendall(b"head")
        pid = forked(lambda: c.sendall(b"tail" * 50_000))
        c.close()
        got = t.peer("recv_end(c)")
        assert got == b"head" + b"tail" * 50_000, len(got)
        reap(pid)


@check()
def test_F7_daemon(t):
    """Listens and connects, then forks twice: the daemon keeps listener, epoll set and connections."""
    t.peer("l = listen()")
    out = connect(t.peer("l.getsockname()"))
    t.peer("out = l.accept()[0]")
    t.warm(out, "out")
    listener = listen()
    listener.setblocking(False)
    epoll = select.epoll()
    epoll.register(listener, EPOLLIN)
    t.peer("early = connect(address)\nearly.sendall(b'early')", address=listener.getsockname())

    def daemon():
        served = 0
        while served < 6:
            events = epoll.poll(8)
            assert events, "no connection came"
            try:
                sock = listener.accept()[0]
            except BlockingIOError:
                continue
            sock.setblocking(True)
            sock.sendall(recv_exact(sock, 5))
            served += 1
            sock.close()
        out.sendall(b"from the daemon")
        assert recv_exact(out, 4) == b"done"

    reap(forked(lambda: forked(lambda: forked(daemon))))
    listener.close()
    out.close()
    t.peer("""
assert recv_end(early) == b'early'
for _ in range(5):
    late = connect(address)
    late.sendall(b'later')
    assert recv_end(late) == b'later'
assert recv_exact(out, 15) == b'from the daemon'
out.sendall(b'done')
assert recv_end(out) == b''""")


@check()
def test_F8_peer_stopped(t):
    """A stopped peer holds up neither fork nor close nor connect; once it goes on, every byte is there."""
    c, d = t.pair("c"), t.pair("d")
    t.peer("l = listen()")
    pid, address = t.peer("(os.getpid(), l.getsockname())")
    os.kill(pid, signal.SIGSTOP)
    try:
        c.sendall(b"before")
        began = time.monotonic()
        reap(forked(lambda: None))
        assert time.monotonic() - began < 5, f"fork took {time.monotonic() - began:.1f} s"
        c.sendall(b" after")
        e = connect(address)
        e.sendall(b"new")
        began = time.monotonic()
        d.close()
        assert time.monotonic() - began < 2, f"close took {time.monotonic() - began:.1f} s"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert t.peer("recv_exact(c, 12)") == b"before after"
    assert t.peer("recv_end(d)") == b""
    assert t.peer("e = l.accept()[0]\nrecv_exact(e, 3)") == b"new"
    t.warm(c, "c")
