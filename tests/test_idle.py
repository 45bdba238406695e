"""Idle connections give their RMBs and their slot of the link back, and earn new ones by traffic."""

import select
import time

from harness.behave import check
from harness.net import *

MS = 300  # idle time of the checks that look at what happens
SOON = 5  # and of those in which traffic meets it
SHORT = ("env", f"XSMC_IDLE_MS={MS}")
SHORTER = ("env", f"XSMC_IDLE_MS={SOON}")


def view(sock):
    """This end as its node shows it: the connection's entry."""
    local, peer = sock.getsockname()[1], sock.getpeername()[1]
    for document in node_documents():
        for entry in document["connections"]:
            if [int(entry[side].rsplit(":", 1)[1]) for side in ("local", "peer")] == [local, peer]:
                return document, entry
    return None, None


def at_rest(sock):
    document, entry = view(sock)
    return (entry and entry["state"] == "plain" and entry["tx"]["carrier"] == entry["rx"]["carrier"] == "tcp"
            and entry.get("reason") == "idle" and all(link["slots_used"] == 0 for link in document["links"]))


def counted():
    """How often connections of this process were given back for being idle."""
    mine = [document for document in node_documents() if document["pid"] == os.getpid()]
    return sum(entry["count"] for document in mine for entry in document["fallbacks"] if entry["name"] == "idle")


def moved_rmb(sock):
    return view(sock)[1]["tx"]["bytes_rmb"]


@check("both", here=SHORT, peer=SHORT)
def test_given_back_and_earned_again(t):
    """Both ends leave the link; traffic in both directions then rides RMBs again, and again is given back."""
    c = t.pair()
    for turn in range(1, 4):
        until(lambda: at_rest(c), 5, lambda: f"given back at this end: {view(c)}")
        until(lambda: t.peer("at_rest(c)"), 1, lambda: f"given back at the other end: {t.peer('view(c)')}")
        assert counted() == turn and t.peer("counted()") == turn
        t.warm(c, "c")
    c.close()


@check("both", here=SHORT)
def test_one_end_begins(t):
    """The end whose policy says so begins, the other follows."""
    c = t.pair()
    until(lambda: at_rest(c), 5, lambda: f"given back at this end: {view(c)}")
    until(lambda: t.peer("at_rest(c)"), 1, lambda: f"given back at the other end: {t.peer('view(c)')}")
    t.warm(c, "c")


@check("local", here=SHORT)
def test_both_ends_in_one_process(t):
    """The same where both ends are in one process."""
    one, two = t.pair_here()
    until(lambda: at_rest(one) and at_rest(two), 5, lambda: f"{view(one)} {view(two)}")
    one.sendall(b"1")
    assert two.recv(9) == b"1"


@check("both", here=SHORT, peer=SHORT)
def test_unread_bytes_are_not_idle(t):
    """What the program has not read keeps the connection as it is, and is there when it reads."""
    c = t.pair()
    t.peer("c.sendall(b'u' * 5000)")
    time.sleep(MS * 4 / 1000)
    assert t.on_rmb(c)
    assert recv_exact(c, 5000) == b"u" * 5000
    until(lambda: at_rest(c), 5, lambda: f"given back after all: {view(c)}")


@check("both", here=SHORT, peer=SHORT)
def test_unread_edge_is_not_reported_again(t):
    """Bytes that came over TCP and wait there were reported once; that is enough for EPOLLET."""
    c = t.pair()
    until(lambda: at_rest(c) and t.peer("at_rest(c)"), 5, lambda: f"given back: {view(c)}")
    epoll = select.epoll()
    epoll.register(c, EPOLLIN | EPOLLET)
    t.peer("c.sendall(b'data')")
    assert ready(epoll, 2) == {c.fileno(): EPOLLIN}
    c.sendall(b"x")
    until(lambda: view(c)[1]["state"] == "managed", 5, lambda: f"upgraded: {view(c)}")
    ready(epoll, 0.05)
    no_event(epoll, MS * 5 / 1000)
    assert c.recv(9) == b"data"


@check("both", here=SHORT, peer=SHORT)
def test_busy_in_one_direction(t):
    """A trickle in one direction is traffic."""
    c = t.pair()
    for _ in range(40):
        c.sendall(b"x")
        t.peer("c.recv(1)")
        time.sleep(MS / 10000)
    assert t.on_rmb(c) and counted() == 0


@check("both", here=("env", "XSMC_IDLE_MS=0"), peer=("env", "XSMC_IDLE_MS=0"))
def test_zero_is_never(t):
    c = t.pair()
    time.sleep(1)
    assert t.on_rmb(c)


@check("both", here=SHORT, peer=SHORT)
def test_sleepers_are_served(t):
    """Who sleeps in recv, poll or epoll_wait while the connection is given back gets what comes later, and the end."""
    socks = {name: t.pair(name) for name in ("c0", "c1", "c2", "c3")}
    c0, c1, c2, c3 = socks.values()
    epoll, edge = select.epoll(), select.epoll()
    epoll.register(c2, EPOLLIN)
    edge.register(c3, EPOLLIN | EPOLLET | EPOLLRDHUP)

    def polled():
        poll = select.poll()
        poll.register(c1, select.POLLIN)
        return poll.poll(15000)
    waiting = [bg(c0.recv, 10), bg(polled), bg(epoll.poll, 15), bg(edge.poll, 15)]
    for sock in socks.values():
        until(lambda: at_rest(sock), 8, lambda: f"given back: {view(sock)}")
    assert all(thread.is_alive() for thread in waiting), [thread.join(1) for thread in waiting if not thread.is_alive()]
    for name in socks:
        t.peer(f"{name}.sendall(b'late')")
    assert waiting[0].join() == b"late"
    assert waiting[1].join() == [(c1.fileno(), select.POLLIN)]
    assert waiting[2].join() == [(c2.fileno(), EPOLLIN)]
    assert waiting[3].join() == [(c3.fileno(), EPOLLIN)]
    for sock in (c1, c2, c3):
        assert sock.recv(10) == b"late"
    for name, sock in socks.items():
        t.peer(f"{name}.close()")
        assert sock.recv(1) == b""


@check("both", here=SHORT, peer=SHORT)
def test_many_at_once(t):
    """200 connections that fall idle together are all given back; the link's slots are free, and are used again."""
    count = 200
    socks = [t.pair(f"c{number}", warm=False) for number in range(count)]
    t.peer(f"socks = [globals()[f'c{{number}}'] for number in range({count})]")
    for _ in range(4):
        t.start("[echo(sock, 100) for sock in socks for _ in range(3)] and None")
        for sock in socks:
            for _ in range(3):
                sock.sendall(b"m" * 100)
                recv_exact(sock, 100)
        t.join()
    assert sum(moved_rmb(sock) > 0 for sock in socks[:10]) > 2
    until(lambda: at_rest(socks[0]) and t.peer("at_rest(c0)"), 10, lambda: f"given back: {view(socks[0])}")
    t.warm(socks[7], "c7")


@check("both", here=SHORT, peer=SHORT)
def test_idle_costs_nothing(t):
    """Idle connections use no CPU, neither those given back nor those that can't be."""
    kept, given = t.pair("kept"), t.pair("given")
    t.peer("kept.sendall(b'unread')")
    until(lambda: view(given)[1]["state"] == "plain", 5, lambda: f"given back: {view(given)}")
    used = cpu(), t.peer("cpu()")
    time.sleep(3)
    used = cpu() - used[0], t.peer("cpu()") - used[1]
    assert max(used) < 0.1, used
    assert kept.recv(10) == b"unread"


def chatter(sock, seed, seconds, wait):
    """Echoes with pauses around the idle time; says how many."""
    draw, end, count = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        data = draw.randbytes(draw.choice((1, 100, 5000, 100_000)))
        sender = bg(send_all, sock, data) if len(data) > 50_000 else send_all(sock, data)
        got = b""
        while len(got) < len(data):
            got += wait(sock, len(data) - len(got))
        if sender:
            sender.join()
        assert got == data, (count, len(data), [n for n in range(len(data)) if got[n] != data[n]][:5])
        count += 1
        if draw.random() < 0.7:
            time.sleep(draw.uniform(SOON * 0.8, SOON * 2.2) / 1000)
    return count


def by_recv(sock, size):
    part = sock.recv(size)
    assert part, "end of stream"
    return part


def by_epoll(sock, size):
    with select.epoll() as epoll:
        epoll.register(sock, EPOLLIN)
        assert epoll.poll(10), f"no event; {view(sock)}"
    return by_recv(sock, size)


def by_poll(sock, size):
    assert select.select([sock], [], [], 10)[0], f"not readable; {view(sock)}"
    return by_recv(sock, size)


@check("both", here=SHORTER, peer=SHORTER, seconds=40)
def test_traffic_resumes_at_that_moment(t):
    """Echoes with pauses about as long as the idle time lose nothing and never hang, however the ends wait."""
    socks = [t.pair(f"c{number}", warm=False) for number in range(6)]
    t.peer("threads = [bg(echo_end, sock) for sock in (c0, c1, c2, c3, c4, c5)]")
    waits = [by_recv, by_epoll, by_poll] * 2
    threads = [bg(chatter, sock, chance.random(), 10 * max(1, t.scale), wait) for sock, wait in zip(socks, waits)]
    done = [thread.join(30 * max(1, t.scale)) for thread in threads]
    print(f"{done} echoes, given back {counted()} times here, {t.peer('counted()')} there", file=sys.stderr)
    assert min(counted(), t.peer("counted()")) > 20
    for sock in socks:
        sock.close()
    t.peer("[thread.join() for thread in threads] and None")
