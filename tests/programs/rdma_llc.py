"""Clients that break LLC, for rdma_clients.py."""

import struct

from clc import V2, decline, proposal, receive_decline
from clc_hostile import exchange, expect_end
from rdma_case import DATA, ENDED, SILENT, goes_on, ignored
from smcr import (ABORT, ADD_LINK, BLOCKED, CONFIRM_LINK, CONFIRM_RKEY, DELETE_LINK, DELETE_RKEY, REQUEST_ADD_LINK, RESPONSE,
                  TEST_LINK, UPDATE, Conn, cdc, dial, llc)

# What is well.


def client_echoes(t):
    goes_on(t, t.open(), DATA)


def client_with_connections(t):
    link = t.link()
    conns = [t.open(link) for _ in range(4)]
    for conn in conns:
        conn.echo(DATA[:2000])
    for conn in conns:
        goes_on(t, conn)


# LLC that must have no effect.


@ignored
def client_lengths(t):
    """Of messages."""
    conn = t.open()
    for kind in TEST_LINK, DELETE_LINK, CONFIRM_RKEY, 0xfe:
        conn.link.send(*(llc(kind, 0x40)[:size] for size in (0, 1, 4, 25, 43)))
    conn.link.test()
    for size in 45, 100, 244, 8191, 8192:
        for length in 44, size:
            conn.link.send(llc(TEST_LINK, 0, bytes(range(16)), length, size))
            answer = conn.link.await_llc(TEST_LINK, True)
            assert answer == llc(TEST_LINK, RESPONSE, bytes(range(16))), answer.hex()
        conn.link.send(cdc(conn.peer.token, 0xfff0, (7, 7), state=ABORT).ljust(size, b"\1"))
    goes_on(t, conn)


@ignored
def client_says_other_lengths(t):
    """Than the messages have."""
    conn = t.open()
    for length in 0, 1, 43, 45, 0x2b00, 0x2d00, 0xffff:
        conn.link.send(llc(TEST_LINK, length=length))
        conn.link.send(llc(DELETE_LINK, 0x40, length=length))
    for length in 0, 43, 45, 255:
        conn.link.send(struct.pack("BBBB", 4, length, 0, 0x40).ljust(44, b"\0"))
        conn.link.send(cdc(conn.peer.token, 100, (9, 9), length=length))
    conn.link.no_llc(TEST_LINK)
    goes_on(t, conn)


@ignored
def client_types(t):
    """That there aren't."""
    conn = t.open()
    known = {*range(1, 10), *range(0x21, 0x2a), 0xfe}
    conn.link.send(*(llc(kind, 0x40) for kind in range(256) if kind not in known))
    # Number 5 and 8 are only in one version, or nobody's.
    for kind in 0x05, 0x08, 0x23, 0x28:
        conn.link.send(llc(kind, 0xff, b"\xff" * 40))
    goes_on(t, conn)


@ignored
def client_flags(t):
    conn = t.open()
    for flags in 0x01, 0x40, 0x7f:
        conn.link.send(llc(TEST_LINK, flags))
        assert conn.link.await_llc(TEST_LINK, True) == llc(TEST_LINK, RESPONSE)
    conn.link.send(llc(CONFIRM_RKEY, 0x5f, struct.pack("!BIQ", 0, conn.link.rkey, conn.link.memory)))
    assert not conn.link.await_llc(CONFIRM_RKEY, True)[3] & 0x20
    goes_on(t, conn)


@ignored
def client_version_1(t):
    """Is answered in version 1."""
    conn = t.open()
    conn.link.send(bytes([7, 44, 0, 0]) + bytes(40))
    assert conn.link.await_llc(7, True) == bytes([7, 44, 0, RESPONSE]) + bytes(40)
    goes_on(t, conn)


@ignored
def client_responses(t):
    """That nobody waits for."""
    conn = t.open()
    for kind in CONFIRM_LINK, ADD_LINK, 0x23, DELETE_LINK, REQUEST_ADD_LINK, CONFIRM_RKEY, TEST_LINK, 0x28, DELETE_RKEY:
        for body in bytes(40), b"\xff" * 40:
            conn.link.send(*(llc(kind, flags, body) for flags in (0x80, 0x83, 0xa0, 0xc0, 0xe0, 0xff)))
    conn.link.send(llc(TEST_LINK, RESPONSE, b"not what was sent"))
    goes_on(t, conn)


@ignored
def client_asks_for_links(t):
    """Only a server adds one, and this one doesn't."""
    conn = t.open()
    for size, count in (44, 0), (72, 0), (73, 0), (87, 1), (88, 1), (88, 0xffff), (8192, 507), (8192, 0xffff):
        body = bytes(24) + b"\0\0\7" + bytes([2, 5]) + bytes(3 + 8) + b"\x80" + bytes(25) + struct.pack("<H", count)
        conn.link.send(llc(ADD_LINK, 0, body, size=size))
    conn.link.send(llc(ADD_LINK, 0, b"\xff" * 8188, size=8192))
    conn.link.send(llc(0x23, 0, b"\xff" * 40))
    conn.link.no_llc(ADD_LINK)
    for count in 0, 1, 200, 255:
        conn.link.send(llc(REQUEST_ADD_LINK, 0, bytes(20) + bytes([count]), size=44 + 16 * 200))
    assert conn.link.await_llc(REQUEST_ADD_LINK, True) == llc(REQUEST_ADD_LINK, RESPONSE)
    goes_on(t, conn)


@ignored
def client_confirms_again(t):
    conn = t.open()
    for flags in 0x83, 0x03, 0x80, 0x00:
        conn.say_link(flags, link=9, qpn=1)
    conn.link.no_llc(CONFIRM_LINK, 0.2)
    goes_on(t, conn)


@ignored
def client_test_link_flood(t):
    conn = t.open()
    conn.link.ask("flood", 2000, llc(TEST_LINK, 0, b"\7" * 16).hex())
    # Not all are answered.
    conn.link.drain()
    goes_on(t, conn)


def client_flood_without_receives(t):
    """The answers can't be sent. They must not fill memory, nor keep the CPU busy for long."""
    conn = t.open()
    conn.link.ask("starve")
    before = int(t.ask("usage")[1])
    for _ in range(10):
        conn.link.ask("flood", 1000, llc(TEST_LINK).hex())
    grown = int(t.ask("usage")[1]) - before
    assert grown < 16 << 10, f"{grown} KiB more"
    t.reset(conn)
    # As soon as no message has been sent for 10 s, or its own TEST LINK isn't answered.
    t.down(conn.link, f"the link failed|{SILENT}")


@ignored
def client_cdc_flood(t):
    conn = t.open()
    conn.echo(DATA[:100])
    conn.link.ask("flood", 2000, conn.message(flags=UPDATE | BLOCKED).hex())
    goes_on(t, conn)


# RKeys.


def client_confirms_many_rkeys(t):
    """More than the table takes."""
    conn = t.open()
    messages = [llc(CONFIRM_RKEY, 0, struct.pack("!BIQ", 0, 0x70000000 + rkey, rkey)) for rkey in range(300)]
    refused = 0
    for at in range(0, 300, 30):
        conn.link.send(*messages[at:at + 30])
        for message in messages[at:at + 30]:
            answer = conn.link.await_llc(CONFIRM_RKEY, True)
            assert (answer[:3], answer[4:]) == (message[:3], message[4:]), answer.hex()
            refused += answer[3] == 0xa0
    assert refused == 300 - 254, refused
    other = t.open(conn.link)
    goes_on(t, other)
    goes_on(t, conn)


@ignored
def client_confirms_odd_rkeys(t):
    conn = t.open()
    for count in 3, 255:
        conn.link.send(llc(CONFIRM_RKEY, 0, bytes([count]) + b"\xff" * 39))
    conn.link.no_llc(CONFIRM_RKEY, 0.2)
    message = llc(CONFIRM_RKEY, 0, b"\2" + b"\xff" * 38)
    conn.link.send(message)
    assert conn.link.await_llc(CONFIRM_RKEY, True) == message[:3] + b"\x80" + message[4:]
    goes_on(t, conn)


@ignored
def client_deletes_rkeys(t):
    """Unknown ones are counted."""
    conn = t.open()
    for count in 0, 9, 255:
        conn.link.send(llc(DELETE_RKEY, 0, bytes([count])))
    conn.link.no_llc(DELETE_RKEY, 0.2)
    for count in 1, 8:
        conn.link.send(llc(DELETE_RKEY, 0, bytes([count, 0, 0, 0]) + b"\x77" * 32))
        assert conn.link.await_llc(DELETE_RKEY, True) == llc(DELETE_RKEY, 0xa0, bytes([count, count]))
    goes_on(t, conn)


@ignored
def client_deletes_its_rkey(t):
    """That is in use: the peer's own matter."""
    conn = t.open()
    conn.link.send(llc(DELETE_RKEY, 0, struct.pack("!BxxxI", 1, conn.link.rkey)))
    assert conn.link.await_llc(DELETE_RKEY, True) == llc(DELETE_RKEY, RESPONSE, b"\1")
    goes_on(t, conn)


# The link's end.


def deletes_all(t, flags, reason):
    conn = t.open()
    conn.echo(DATA[:1000])
    conn.send(DATA[:5000])
    conn.link.send(llc(DELETE_LINK, flags, struct.pack("!BI", 0, reason)))
    # Its own request, of the same reason; aborts; and the end.
    asked = conn.link.await_llc(DELETE_LINK, False)
    assert asked == llc(DELETE_LINK, 0x60, struct.pack("!BI", 0, reason)), asked.hex()
    conn.wait(lambda conn: conn.peer_state & ABORT)
    asked = conn.link.await_llc(DELETE_LINK, False)
    assert asked == llc(DELETE_LINK, 0x40, struct.pack("!BI", 0, 0x00030000)), asked.hex()
    expect_end(conn.sock)
    t.reset(conn)
    t.down(conn.link, ENDED.format(reason))


def client_deletes_all_links(t):
    for reason in 0x00010000, 0xdeadbeef:
        deletes_all(t, 0x40, reason)


def client_deletes_all_links_in_order(t):
    for reason in 0x00020000, 0:
        deletes_all(t, 0x60, reason)


@ignored
def client_deletes_another_link(t):
    conn = t.open()
    for link in 0, 2, 255:
        conn.link.send(llc(DELETE_LINK, 0x20, struct.pack("!BI", link, 0x00010000)))
        answer = conn.link.await_llc(DELETE_LINK)
        assert answer == llc(DELETE_LINK, 0xa0, struct.pack("!BI", link, 0x00100000)), answer.hex()
    goes_on(t, conn)


def client_deletes_the_link(t):
    """The server asks back, and needs no answer to end it."""
    for flags, answered in (0, True), (0x20, False):
        conn = t.open()
        conn.send(DATA[:5000])
        message = llc(DELETE_LINK, flags, struct.pack("!BI", 1, 0x00050000))
        conn.link.send(message)
        assert conn.link.await_llc(DELETE_LINK, False) == message
        if answered:
            conn.link.send(message[:3] + bytes([flags | RESPONSE]) + message[4:])
        t.reset(conn)
        t.down(conn.link, ENDED.format(0x00050000))


def client_is_mute(t):
    conn = t.open()
    conn.echo(DATA[:100])
    conn.link.ask("mute")
    t.reset(conn)
    t.down(conn.link, SILENT)


# CONFIRM LINK, and subsequent contact.


def client_confirms_another_link(t):
    """Nothing in the answer matters but the flags."""
    conn = t.confirmed()
    conn.confirm_link(qpn=1, own_gid=bytes(16), link=77)
    goes_on(t, conn)


def client_wants_eyecatchers(t):
    conn = t.confirmed()
    conn.confirm_link(0x80)
    receive_decline(conn.sock, 0x03050000)
    exchange(conn.sock)
    t.down(conn.link, "the peer wants RMBE eyecatchers")


def client_does_not_confirm_the_link(t):
    """Nor does anything else stand for it."""
    conn = t.confirmed()
    conn.link.await_llc(CONFIRM_LINK, False)
    for message in llc(CONFIRM_LINK, 3), llc(CONFIRM_LINK, 0x83)[:43], llc(TEST_LINK), llc(CONFIRM_LINK, 0x83, length=43):
        conn.link.send(message)
    receive_decline(conn.sock, 0x02010000)
    assert conn.link.await_llc(DELETE_LINK, False)[3] == 0x40
    exchange(conn.sock)
    t.down(conn.link, "no CONFIRM LINK in time")


def client_speaks_before_the_link_is_confirmed(t):
    """The data must not be lost."""
    conn = t.confirmed()
    conn.link.await_llc(CONFIRM_LINK, False)
    conn.send(DATA[:3000])
    conn.say_link(0x83)
    assert conn.recv(3000) == DATA[:3000]
    goes_on(t, conn)


def client_breaks_cdc_before_the_link_is_confirmed(t):
    conn = t.confirmed()
    conn.link.await_llc(CONFIRM_LINK, False)
    conn.say(prod=(0, 0xffffffff))
    conn.say_link(0x83)
    t.violated(conn)


def second(t, conn, *asks):
    """A second connection, whose CONFIRM RKEY request gets these answers: the peer's RMB is new to it."""
    other = Conn(conn.link)
    conn.link.mute.add(CONFIRM_RKEY)
    other.sock = sock = dial(t.address)
    sock.sendall(proposal(t.own, system_id=conn.link.system_id))
    asked = conn.link.await_llc(CONFIRM_RKEY, False)
    for change in asks:
        conn.link.send(change(asked))
    receive_decline(sock, 0x09990003)
    exchange(sock)
    conn.link.mute.clear()
    goes_on(t, conn)


def client_does_not_confirm_the_rkey(t):
    second(t, t.open())


def client_refuses_the_rkey(t):
    second(t, t.open(), lambda asked: asked[:3] + b"\xa0" + asked[4:])


def client_confirms_another_rkey(t):
    second(t, t.open(), lambda asked: asked[:3] + b"\x80" + b"\0" * 40, lambda asked: asked[:3] + b"\x80" + asked[4:8] + b"\1" * 36)


def client_is_out_of_sync(t):
    """Of all connections of the group, none may go on."""
    first = t.open()
    first.echo(DATA[:1000])
    other = Conn(first.link)
    other.begin(dial(t.address))
    other.sock.sendall(decline(0x04000000, V2, 8))
    t.reset(first)
    exchange(other.sock)
    t.down(first.link, "link group ended, reason 0x00030000")
