"""Servers that speak SMC-R over a queue pair and then break it, for connections of rdma_victim.py under xsmc.

    rdma_servers.py OWN   listens at the ports that PORTS says, for one connection each

Prints as rdma_clients.py does.
"""

import struct
import sys
from concurrent.futures import ThreadPoolExecutor

from clc import CONFIRM, PROPOSAL, accept, finder, receive_decline, receive_message
from clc_hostile import PAYLOAD, echo, expect_end, listen, report
from rdma_case import Case
from smcr import (ABORT, ADD_LINK, CLOSED, CONFIRM_LINK, DELETE_LINK, DONE, REQUEST_ADD_LINK, RING, TEST_LINK, Conn, llc)

FIRST_PORT = 7200
# What the victim's program finds: its bytes come back, or the connection is reset.
EXPECTED = {}
finds = finder(EXPECTED)


class Server(Case):
    """What a case gets."""

    def __init__(self, name, own, sock):
        super().__init__(name, None, own)
        self.sock = sock

    def conn(self):
        return Conn(self.link())

    def answered(self):
        """A connection whose Accept has been sent, and whose Confirm has come."""
        conn = self.conn()
        conn.answer(self.sock)
        return conn

    def serve(self):
        return self.conn().serve(self.sock)

    def stays_tcp(self, conn, diagnosis, why):
        """The victim declines, says why its link group has ended, and goes on by TCP."""
        receive_decline(self.sock, diagnosis)
        self.down(conn.link, why)
        echo(self.sock)


def echoes(conn, rest=len(PAYLOAD)):
    """What the program sends, to its end, goes back; the program then ends its side, too."""
    data = PAYLOAD[:len(PAYLOAD) - rest] + conn.recv(rest)
    assert data == PAYLOAD, "other bytes than were sent"
    while data:
        conn.wait(lambda conn: conn.peer_cons + conn.peer.size > conn.prod)
        room = min(8192, conn.peer_cons + conn.peer.size - conn.prod)
        conn.send(data[:room])
        data = data[room:]
    conn.wait(lambda conn: conn.peer_state & (DONE | CLOSED))
    conn.end(DONE)
    conn.wait(lambda conn: conn.peer_state & CLOSED)
    conn.end(CLOSED)


@finds("echo")
def server_echoes(t):
    echoes(t.serve())


@finds("echo")
def server_confirms_another_link(t):
    conn = t.answered()
    conn.say_link(3, qpn=1, own_gid=bytes(16), link=77)
    answer = conn.link.await_llc(CONFIRM_LINK, True)
    assert (answer[3], answer[29]) == (0x83, 77), answer.hex()
    echoes(conn)


@finds("echo")
def server_speaks_before_the_link_is_confirmed(t):
    """Nothing of what can't be is taken for CONFIRM LINK."""
    conn = t.answered()
    for message in llc(CONFIRM_LINK, 0x83), llc(CONFIRM_LINK, 3)[:43], llc(CONFIRM_LINK, 3, length=43), llc(0x2a), bytes(8192):
        conn.link.send(message)
    for kind in TEST_LINK, ADD_LINK:
        conn.link.send(llc(kind, 0, b"\1" * 40))
    conn.say_link(3)
    conn.link.await_llc(CONFIRM_LINK, True)
    echoes(conn)


@finds("echo")
def server_wants_eyecatchers(t):
    conn = t.answered()
    conn.say_link(2)
    t.stays_tcp(conn, 0x03050000, "the peer wants RMBE eyecatchers")


@finds("echo")
def server_never_confirms_the_link(t):
    conn = t.answered()
    t.stays_tcp(conn, 0x02010000, "no CONFIRM LINK in time")


@finds("echo")
def server_ends_the_link_before_it_is_confirmed(t):
    conn = t.answered()
    conn.link.send(llc(DELETE_LINK, 0x40, struct.pack("!BI", 0, 0x00020000)))
    t.stays_tcp(conn, 0x09990002, "the peer ended the link group, reason 0x00020000")


@finds("echo")
def server_loses_its_queue_pair_before_the_link_is_confirmed(t):
    conn = t.answered()
    conn.link.ask("destroy")
    t.stays_tcp(conn, 0x02010000, "no CONFIRM LINK in time")


@finds("echo")
def server_has_another_queue_pair(t):
    """Than it says: CONFIRM LINK can't come."""
    conn = t.conn()
    receive_message(t.sock, PROPOSAL)
    t.sock.sendall(accept(t.own, qpn=conn.link.qpn + 5, psn=conn.link.psn, mtu=5, size=0))
    receive_message(t.sock, CONFIRM)
    receive_decline(t.sock, 0x02010000)
    echo(t.sock)


@finds("echo")
def server_adds_links(t):
    """All that are proposed are refused, and garbage isn't answered."""
    conn = t.serve()
    for size, count, answered in (44, 0, 1), (72, 0, 1), (73, 0, 1), (88, 1, 1), (88, 0xffff, 0), (8192, 507, 1), (8192, 0xffff, 0):
        body = bytes(24) + b"\0\0\7" + bytes([2, 5]) + bytes(3 + 8) + b"\x80" + bytes(25) + struct.pack("<H", count)
        message = llc(ADD_LINK, 0, body, size=size)
        conn.link.send(message)
        if answered:
            answer = conn.link.await_llc(ADD_LINK)
            assert answer == llc(ADD_LINK, 0xc0, message[4:44]), answer.hex()
    conn.link.send(llc(REQUEST_ADD_LINK, 0))
    conn.link.send(llc(0x23, 0, b"\xff" * 40))
    conn.link.test()
    assert not conn.link.llc, conn.link.llc
    echoes(conn)


@finds("reset")
def server_ends_the_group(t):
    conn = t.serve()
    conn.recv(10000)
    conn.link.send(llc(DELETE_LINK, 0x60, struct.pack("!BI", 0, 0x00020000)))
    conn.wait(lambda conn: conn.peer_state & ABORT)
    expect_end(t.sock)
    t.down(conn.link, "the peer ended the link group, reason 0x00020000")


@finds("reset")
def server_deletes_the_link(t):
    conn = t.serve()
    conn.recv(10000)
    for link, reason in (9, 0x00100000), (1, 0x00010000):
        conn.link.send(llc(DELETE_LINK, 0x20, struct.pack("!BI", link, 0x00010000)))
        answer = conn.link.await_llc(DELETE_LINK)
        assert answer == llc(DELETE_LINK, 0xa0, struct.pack("!BI", link, reason)), answer.hex()
    expect_end(t.sock)
    t.down(conn.link, "the peer ended the link group, reason 0x00010000")


@finds("reset")
def server_producer_outside(t):
    conn = t.serve()
    conn.recv(10000)
    conn.say(prod=(0, conn.peer.size))
    conn.wait(lambda conn: conn.peer_state & ABORT)
    conn.end(ABORT)


@finds("reset")
def server_consumer_outside(t):
    conn = t.serve()
    conn.recv(10000)
    conn.say(cons=(3, RING))
    conn.wait(lambda conn: conn.peer_state & ABORT)
    conn.end(ABORT)


@finds("reset")
def server_writes_with_a_wrong_key(t):
    conn = t.serve()
    conn.recv(10000)
    conn.link.ask("write", conn.peer.rkey ^ 1, conn.peer.address, "00" * 64)
    conn.link.broken()
    expect_end(t.sock)
    t.down(conn.link, "the link failed")


@finds("reset")
def server_loses_its_queue_pair(t):
    conn = t.serve()
    conn.recv(10000)
    conn.link.ask("destroy")
    expect_end(t.sock, 12)
    t.down(conn.link, "the peer is silent")


@finds("reset")
def server_is_killed(t):
    conn = t.serve()
    conn.recv(10000)
    conn.link.kill()
    t.down(conn.link, "the peer is silent")


PORTS = {name: FIRST_PORT + at for at, name in enumerate(EXPECTED)}


def run(name, function, listener, own):
    with listener, listener.accept()[0] as sock:
        sock.settimeout(15)
        case = Server(name, own, sock)
        try:
            function(case)
        finally:
            case.close()


def main(own):
    with ThreadPoolExecutor(len(PORTS)) as pool:
        for name, port in PORTS.items():
            pool.submit(report, name, run, name, globals()[f"server_{name}"], listen(port), own)


if __name__ == "__main__":
    main(*sys.argv[1:])
