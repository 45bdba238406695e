"""Faults between two hosts: what RDMA can repair loses and changes no byte, and what it can't is told as TCP would."""

import hashlib
import os
import select
import socket
import threading
import time

import pytest

from harness.hosts import check
from harness.net import *

GONE = (errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EPIPE)
# So that a silent peer is noticed within seconds; the answer may take 2 s more.
KEEPALIVE = 2
SOON = (f"XSMC_KEEPALIVE_MS={KEEPALIVE * 1000}",)
# Until the connection must have ended: the test of the link, or the repetitions of what was under way.
BOUND = KEEPALIVE + 8


def transfer(t, size, messages, meanwhile=lambda: None):
    """A bulk transfer in each direction and an echo of small messages at the same time, all checked."""
    bulk, small = t.pair("bulk"), t.pair("small")
    seed = chance.randrange(1 << 30)
    t.start("""
import random
def answer():
    for _ in range(messages):
        echo(small, 100)
echoing = bg(answer)
sending = bg(bulk.sendall, random.Random(seed + 1).randbytes(size))
got = hashlib.sha256(recv_exact(bulk, size)).hexdigest()
sending.join(60)
echoing.join(60)
got""", size=size, messages=messages, seed=seed)
    data = random.Random(seed).randbytes(size)
    sending = bg(bulk.sendall, data)

    def ask():
        for number in range(messages):
            message = b"%08d" % number * 12 + b"...."
            small.sendall(message)
            assert recv_exact(small, 100) == message, number
    asking = bg(ask)
    disturbing = bg(meanwhile)
    got = recv_exact(bulk, size)
    assert got == random.Random(seed + 1).randbytes(size), "what came is not what was sent"
    sending.join(60)
    asking.join(60)
    disturbing.join(60)
    assert t.join() == hashlib.sha256(data).hexdigest(), "what arrived is not what was sent"
    for sock in (bulk, small):
        sock.close()
    assert t.peer("recv_end(bulk), recv_end(small)") == (b"", b"")


@pytest.mark.long
@check(seconds=60, boot="loss")
def test_roce_loss(t):
    """RoCE packets are lost at the receiver."""
    t.fault("roce-loss", "3%")
    transfer(t, 2 << 20, 200)
    t.fault("roce-loss", "0%")


@check(seconds=60, boot="loss")
def test_loss(t):
    """Frames of all kinds are lost: those of TCP and of the handshake, too."""
    t.fault("loss", "2%")
    transfer(t, 2 << 20, 150)
    for number in range(5):
        c = t.pair("c")
        c.sendall(b"%d" % number)
        assert t.peer("c.recv(9)") == b"%d" % number
        c.close()
    t.fault("loss", "0%")


@check(seconds=60, boot="outage")
def test_short_outage(t):
    """Nothing reaches this host by RDMA for 3 s in the middle of it. (It is dropped where it arrives: soft-RoCE breaks a queue
    pair that sends just when its card loses the carrier.)"""
    def outage():
        time.sleep(0.3)
        t.fault("roce-loss", "100%")
        time.sleep(3)
        t.fault("roce-loss", "0%")
    transfer(t, 8 << 20, 300, outage)


@pytest.mark.long
@check(seconds=60, boot="unplugged")
def test_cable_out(t):
    """The cable is out for 3 s while nothing is sent: events of the port, and then all goes on."""
    connections = [(name, t.pair(name)) for name in ("c", "d")]
    t.fault("link-down")
    time.sleep(3)
    t.fault("link-up")
    for name, sock in connections:
        sock.sendall(b"x" * 100_000)
        assert t.peer(f"echo({name}, 100_000)\ncarriers({name})[:2]") == ("rmb", "rmb")
        assert recv_exact(sock, 100_000) == b"x" * 100_000


def ends(t, disturb):
    """Connections on which somebody waits in recv, in send, and for nothing: all end in time, with an errno of TCP's.
    The process goes on."""
    reading, writing, idle, polling = (t.pair(name) for name in ("c0", "c1", "c2", "c3"))
    epoll = select.epoll()
    epoll.register(polling, EPOLLIN | EPOLLRDHUP)

    def send():
        while True:
            writing.sendall(bytes(60_000))

    def outcome(function, *args):
        try:
            return function(*args), time.monotonic()
        except OSError as error:
            return error.errno, time.monotonic()
    waits = [bg(outcome, reading.recv, 10), bg(outcome, send), bg(outcome, epoll.poll, 60)]
    time.sleep(0.5)
    began = time.monotonic()
    disturb()
    values = [wait.join(BOUND + 15) for wait in waits]
    took = [round(at - began, 1) for _, at in values]
    print("ended after", took, [value for value, _ in values], file=sys.stderr)
    assert values[0][0] in GONE and values[1][0] in GONE, values
    assert values[2][0] and values[2][0][0][1] & select.EPOLLERR, values
    assert max(took) < BOUND, took
    fails(GONE, polling.recv, 1)
    until(lambda: polled(idle) & select.POLLERR, 1, "the idle one has ended")
    for sock in (reading, writing, idle, polling):
        sock.close()


@check(seconds=60, boot="down", env=SOON)
def test_link_down_for_good(t):
    ends(t, lambda: t.fault("link-down"))


@check(seconds=60, boot="killed", env=SOON)
def test_peer_host_dies(t):
    ends(t, lambda: t.fault("kill-peer"))


@pytest.mark.long
@check(seconds=60, boot="stopped", env=SOON)
def test_peer_host_stands_still(t):
    ends(t, lambda: t.fault("stop-peer"))
    t.fault("continue-peer")


@check(seconds=60, boot="device", env=SOON)
def test_device_removed(t):
    """Connections on it are reset at once, at both ends; with the device back, new ones are SMC-R again."""
    c, d = t.pair("c"), t.pair("d", listener="here")
    waiting = bg(c.recv, 10)
    time.sleep(0.2)
    began = time.monotonic()
    removal = bg(t.fault, "device-del")
    fails(GONE, waiting.join)
    assert time.monotonic() - began < 2
    fails(GONE, d.recv, 10)
    c.close()
    d.close()
    removal.join()
    assert t.peer("until(lambda: polled(c) & select.POLLERR and polled(d) & select.POLLERR, seconds)", seconds=BOUND)
    t.peer("c.close()\nd.close()")
    e = t.pair("e", smc=False)
    e.sendall(b"over TCP")
    assert t.peer("e.recv(10)") == b"over TCP" and not t.on_rmb(e)
    t.fault("device-add")
    time.sleep(2.5)  # for so long a look at the devices counts
    f = t.pair("f")
    f.sendall(b"again")
    assert t.peer("f.recv(10)") == b"again"


@pytest.mark.long
@check(seconds=60, boot="replaced")
def test_device_replaced(t):
    """The peer learns from a reset alone that a link group is gone, and doesn't offer it to the next connection."""
    c = t.pair("c")
    waiting = bg(c.recv, 10)
    time.sleep(0.2)
    removal = bg(t.fault, "device-del")
    fails(GONE, waiting.join)
    c.close()
    removal.join()
    t.fault("device-add")
    time.sleep(2.5)  # for so long a look at the devices counts
    d = t.pair("d")
    d.sendall(b"again")
    assert t.peer("c.close()\nrecv_exact(d, 5)") == b"again"
    d.close()
