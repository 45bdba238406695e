"""Clients that break CDC, write where they must not, or disappear, for rdma_clients.py."""

import socket
import time

from clc import receive_decline
from clc_hostile import RST, exchange
from rdma_case import DATA, RESET, SILENT, goes_on, ignored
from smcr import ABORT, BLOCKED, CLOSED, DONE, FAILOVER, RING, URGENT, URGENT_PENDING, Conn, cdc, dial

# CDC.


@ignored
def client_tokens(t):
    """Of nobody: even an abort is not for this connection."""
    conn = t.open()
    conn.echo(DATA[:1000])
    right = conn.peer.token
    for token in 0, 1, right ^ 4095, right + 4096, right - 4096, right ^ 0x80000000, 0xffffffff:
        conn.link.send(cdc(token & 0xffffffff, 1000, (3, 3), (3, 3), URGENT, ABORT))
    goes_on(t, conn)


@ignored
def client_numbers(t):
    """Old messages have no effect; gaps and repetitions no bad one."""
    conn = t.open()
    conn.echo(DATA[:1000])
    for back in 1, 2, 1000, 0x7fff:
        conn.say(seq=conn.seq - back, state=ABORT, prod=(5, 5))
    for _ in range(3):
        conn.say(seq=conn.seq)
    for ahead in 1000, 0x7fff, 0x7ffe, 1:
        conn.seq = (conn.seq + ahead) & 0xffff
        conn.say(seq=conn.seq)
        conn.echo(DATA[:500])
    goes_on(t, conn)


@ignored
def client_goes_back(t):
    """Cursors that are older than those known."""
    conn = t.open()
    conn.echo(DATA[:2 * RING])
    for prod, cons in (conn.prod - 1, None), (0, None), (None, conn.cons - 1), (None, 0), (0, 0):
        conn.say(prod=prod, cons=cons)
    conn.say(prod=(0x8100, 0), cons=(0x8100, 0))
    goes_on(t, conn)


def violations(t, *fields):
    """Each resets its connection, and no other one of the link's."""
    link = t.link()
    stays = t.open(link)
    stays.echo(DATA[:1000])
    for at, wrong in enumerate(fields):
        conn = t.open(link)
        sent = DATA[:1 + 1000 * (at % 2)]
        conn.echo(sent)
        conn.say(**wrong(conn))
        t.violated(conn)
        t.saw(conn, *RESET, count=len(sent))
    goes_on(t, stays)


def client_producer_outside(t):
    violations(t, lambda c: {"prod": (0, c.peer.size)}, lambda c: {"prod": (0, c.peer.size)},
               lambda c: {"prod": (0, 0xffffffff)}, lambda c: {"prod": (1, c.prod + 1)}, lambda c: {"prod": (2, 0)},
               lambda c: {"prod": (0x7fff, 0)}, lambda c: {"prod": (0xffff, c.peer.size)})


def client_consumer_outside(t):
    violations(t, lambda c: {"cons": c.cons + 1}, lambda c: {"cons": c.cons + 1}, lambda c: {"cons": (0, RING)},
               lambda c: {"cons": (1, c.cons)}, lambda c: {"cons": (0x7fff, 0)}, lambda c: {"cons": (0, 0xffffffff)})


@ignored
def client_flags_of_cdc(t):
    """All there are, and those there aren't."""
    conn = t.open()
    conn.echo(DATA[:1000])
    conn.link.send(*(conn.message(flags=flags) for flags in range(256) if not flags & (FAILOVER | URGENT)))
    conn.link.send(*(conn.message(state=state) for state in range(0x20)))
    conn.link.test()
    for flags in 0xff & ~FAILOVER, 0x57, 0xc7:
        conn.send(b"xyz", flags=flags & ~URGENT)
        assert conn.recv(3) == b"xyz"
    goes_on(t, conn)


def client_failover(t):
    """There is no second link: cursors and flags say nothing. A number that we don't know means that data is lost."""
    conn = t.open()
    conn.echo(DATA[:1000])
    for back in 0, 1, conn.seq, 0x7fff:
        conn.say(flags=FAILOVER | URGENT, seq=conn.seq - back, prod=(9, 9), cons=(9, 9), state=ABORT | CLOSED)
    conn.echo(DATA[:1000])
    conn.say(flags=FAILOVER, seq=conn.seq + 1)
    t.violated(conn)


@ignored
def client_urgent(t):
    """An urgent byte isn't echoed by a program that doesn't ask for it; one that isn't there does nothing."""
    conn = t.open()
    for flags in URGENT, URGENT | URGENT_PENDING, URGENT | BLOCKED:
        conn.say(flags=flags)
    conn.echo(DATA[:1000])
    conn.say(flags=URGENT)
    for _ in range(3):
        conn.send(b"abc!", flags=URGENT | URGENT_PENDING)
        assert conn.recv(3) == b"abc"
        # It must be told that the byte is read, even if it says so again.
        conn.wait(lambda conn: conn.peer_cons == conn.prod)
        conn.say(flags=URGENT | URGENT_PENDING)
    # Before the first is read comes a second one.
    conn.send(b"de!", flags=URGENT)
    conn.send(b"fg!", flags=URGENT)
    assert conn.recv(4)[:2] == b"de"
    conn.link.test()
    conn.end(DONE)
    conn.wait(lambda conn: conn.peer_state)
    conn.end(CLOSED)
    t.saw(conn, "end")


# The connection's end.


def client_done_and_more(t):
    """Bytes after the end aren't the stream's."""
    for state in DONE, CLOSED:
        conn = t.open()
        conn.echo(DATA[:1000])
        conn.end(state)
        conn.send(DATA[:1000])
        conn.end(DONE)
        conn.say(state=0)
        t.saw(conn, "end", *RESET, count=1000)
        conn.end(CLOSED)
        conn.sock.close()


def client_aborts(t):
    """With unread data, twice, and with data afterwards."""
    conn = t.open()
    conn.echo(DATA[:1000])
    conn.end(ABORT)
    conn.end(ABORT)
    conn.send(DATA[:1000])
    conn.say(state=0)
    t.reset(conn)
    conn.wait(lambda conn: conn.peer_state & (ABORT | CLOSED))


def client_says_all_at_once(t):
    conn = t.open()
    conn.write(DATA[:1000])
    conn.prod += 1000
    conn.end(DONE | CLOSED)
    t.saw(conn, "end", *RESET, count=1000)
    conn.wait(lambda conn: conn.peer_state & (ABORT | CLOSED))


def client_never_closes(t):
    """The place of a connection that only the victim closes is used again after a while. What is said of it then is of
    nobody's."""
    link = t.link()
    left = t.open(link)
    left.end(DONE)
    left.wait(lambda conn: conn.peer_state & CLOSED)
    slot = left.peer.token & 4095
    for _ in range(20):
        again = t.open(link)
        if again.peer.token & 4095 == slot:
            break
        again.finish()
        time.sleep(0.3)
    else:
        raise AssertionError(f"slot {slot} is never used again")
    left.end(ABORT)
    goes_on(t, again)


def client_never_reads(t):
    """And goes, while the program is in send()."""
    conn = t.open()
    for _ in range(8):
        conn.send(DATA[:4000])
        conn.wait(lambda conn: conn.peer_cons == conn.prod or conn.peer_prod == RING)
    conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
    conn.sock.close()
    t.reset(conn)


# RDMA outside of what is allowed.


def client_writes(t):
    """With another key, and outside of the region: the queue pair breaks, and with it the group."""
    for rkey, address in (1, 0), (0, 4 << 20), (0, -(4 << 20)):
        conn = t.open()
        conn.echo(DATA[:1000])
        conn.link.ask("write", conn.peer.rkey ^ rkey, (conn.peer.address + address) % (1 << 64), "00" * 64)
        conn.link.broken()
        t.reset(conn)
        t.down(conn.link, "the link failed")


def client_reads(t):
    conn = t.open()
    conn.link.ask("read", conn.peer.rkey, conn.peer.address, 64)
    conn.link.broken()
    t.reset(conn)
    t.down(conn.link, "the link failed")


def client_sends_too_much(t):
    """More than a receive takes."""
    conn = t.open()
    conn.link.send(bytes(8193))
    conn.link.broken()
    t.reset(conn)
    t.down(conn.link, "the link failed")


def client_with_a_wrong_rkey(t):
    """The victim's answer has no place."""
    for wrong in dict(rkey=77), dict(size=15, index=3):
        conn = t.open(**wrong)
        conn.send(DATA[:1000])
        conn.link.broken()
        t.reset(conn)
        t.down(conn.link, "the link failed")


def client_writes_with_immediate_data(t):
    """It means something between two xsmc only. What can't be is refused."""
    conn = t.open()
    slot = conn.peer.token & 4095
    conn.link.ask("write", conn.peer.rkey, conn.peer.address, "00" * 8, (slot ^ 1) << 20)
    conn.link.ask("write", conn.peer.rkey, conn.peer.address, "00" * 8, 4095 << 20 | 5)
    conn.echo(DATA[:1000])
    conn.link.ask("write", conn.peer.rkey, conn.peer.address, "00" * 8, slot << 20 | 0xfffff)
    t.violated(conn)


# Disappearing.


def client_has_no_queue_pair(t):
    """Any more, and its TCP connection stays."""
    conn = t.confirmed()
    conn.link.ask("destroy")
    receive_decline(conn.sock, 0x02010000)
    exchange(conn.sock)
    t.down(conn.link, "no CONFIRM LINK in time")


def client_loses_its_queue_pair(t):
    conn = t.open()
    conn.echo(DATA[:1000])
    conn.send(DATA[:1000])
    conn.link.ask("destroy")
    t.reset(conn)
    t.down(conn.link, SILENT)


def client_is_killed(t):
    """All at once, as a process dies: TCP says it."""
    conn = t.open()
    conn.echo(DATA[:1000])
    conn.send(DATA[:1000])
    conn.link.kill()
    conn.sock.close()
    t.reset(conn)
    t.down(conn.link, SILENT)


def client_is_killed_after_accept(t):
    conn = Conn(t.link())
    conn.begin(dial(t.address))
    conn.link.kill()
    conn.sock.close()


def client_is_killed_after_confirm(t):
    conn = t.confirmed()
    conn.link.kill()
    conn.sock.close()
    conn.link.ready = False


def client_resets_tcp(t):
    conn = t.open()
    conn.echo(DATA[:1000])
    conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
    conn.sock.close()
    t.reset(conn)
