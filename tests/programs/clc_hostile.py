"""Peers that break CLC, against a program under xsmc. All cases of a side run at once; each prints "ok NAME" or what went wrong.

    clc_hostile.py clients HOST PORT OWN   at HOST and PORT runs clc_victim.py as a server, which echoes
    clc_hostile.py servers OWN             at the ports that PORTS says, each for one connection of clc_victim.py

OWN is the own IPv4 address, in the GIDs that are shown.
"""

import select
import socket
import struct
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

from clc import (ACCEPT, CONFIRM, DECLINE, FIRST, PROPOSAL, V1, V2, accept, agreed, confirm, decline, finder, gid, marked,
                 message, proposal, proposal_v1, receive, receive_decline, receive_message)

PAYLOAD = bytes(range(256)) * 400
FIRST_PORT = 7000
RST = struct.pack("ii", 1, 0)  # SO_LINGER
AT_ONCE = 8  # cases
# Seconds. The guests are slow, but not so slow that this could be the end of a wait of 6 s.
SOON, LONG, LATE = 5.0, 4.0, 14.0


def expect_end(sock, within=SOON, after=0.0):
    """The connection is closed or reset, at a time that is right."""
    begin = time.monotonic()
    try:
        data = sock.recv(1)
    except ConnectionResetError:
        data = b""
    took = time.monotonic() - begin
    assert data == b"", f"{data.hex()} instead of the end"
    assert after <= took <= within, f"the end came after {took:.2f} s"


def exchange(sock):
    """The stream is the programs': what is sent comes back."""
    sock.sendall(PAYLOAD)
    assert receive(sock, len(PAYLOAD)) == PAYLOAD, "other bytes came back"
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b"", "a byte too many"


def echo(sock, first=b""):
    """The other end of exchange(); `first` has been received before."""
    sock.sendall(first + receive(sock, len(PAYLOAD) - len(first)))
    assert sock.recv(1) == b"", "a byte too many"


# Clients. A server waits 6 s for each message, and 3 s for the answer to CONFIRM LINK.


def client_garbage(sock, own):
    sock.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
    expect_end(sock)


def client_nearly_clc(sock, own):
    sock.sendall(proposal(own)[:4] + b"\x09\0\x10\x20" + bytes(8))
    expect_end(sock)


def client_silent(sock, own):
    """Meanwhile others are served, at once."""
    begin = time.monotonic()
    for _ in range(10):
        with socket.create_connection(sock.getpeername()) as plain:
            exchange(plain)
    took = time.monotonic() - begin
    assert took < SOON, f"others had to wait: {took:.2f} s"
    expect_end(sock, LATE, 0.1)


def client_silent_after_half_a_header(sock, own):
    sock.sendall(proposal(own)[:5])
    expect_end(sock, LATE, LONG)


def client_silent_after_most_of_a_proposal(sock, own):
    sock.sendall(proposal(own)[:-1])
    expect_end(sock, LATE, LONG)


def client_drips(sock, own):
    """Every byte comes soon enough, the Proposal doesn't."""
    for byte in proposal(own)[:50]:
        try:
            sock.sendall(bytes([byte]))
        except (ConnectionResetError, BrokenPipeError):
            return
        time.sleep(0.3)
    raise AssertionError("is waited for longer than 15 s")


def client_silent_after_accept(sock, own):
    sock.sendall(proposal(own, system_id=b"silent-a"))
    assert len(receive_message(sock, ACCEPT)) == 160
    expect_end(sock, LATE, LONG)


def client_goes(sock, own):
    sock.close()


def client_goes_in_a_proposal(sock, own):
    sock.sendall(proposal(own)[:100])
    sock.shutdown(socket.SHUT_WR)
    expect_end(sock)


def client_goes_after_accept(sock, own):
    sock.sendall(proposal(own, system_id=b"goes-away"[:8]))
    receive_message(sock, ACCEPT)
    sock.shutdown(socket.SHUT_WR)
    expect_end(sock)


def client_resets_after_accept(sock, own):
    sock.sendall(proposal(own, system_id=b"resetter"))
    receive_message(sock, ACCEPT)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)


def client_oversized(sock, own):
    """A length that no message has."""
    sock.sendall(message(PROPOSAL, 0x22, bytes(3000)))
    expect_end(sock)


def client_length_too_small(sock, own):
    sock.sendall(message(PROPOSAL, 0x22, bytes(100), length=7))
    expect_end(sock)


def client_wrong_length(sock, own):
    good = proposal(own)
    sock.sendall(message(PROPOSAL, 0x22, good[8:-4] + b"\0"))
    expect_end(sock)


def client_wrong_trailer(sock, own):
    sock.sendall(proposal(own)[:-4] + b"abcd")
    expect_end(sock)


def client_offsets_out_of_range(sock, own):
    good = bytearray(proposal(own))
    good[50:52] = b"\xff\xff"
    sock.sendall(good)
    expect_end(sock)


def client_nine_ueids(sock, own):
    sock.sendall(proposal(own, eids=[b"XSMC-TEST"] * 9))
    expect_end(sock)


def client_confirm_first(sock, own):
    sock.sendall(confirm(own))
    expect_end(sock)


def client_declines(sock, own):
    sock.sendall(decline(0x03030000, V1) + PAYLOAD)
    assert receive(sock, len(PAYLOAD)) == PAYLOAD


def client_declines_v2(sock, own):
    sock.sendall(decline(0x03030000) + PAYLOAD)
    assert receive(sock, len(PAYLOAD)) == PAYLOAD


def client_declines_in_pieces(sock, own):
    for byte in decline(0x03030000, V1):
        sock.sendall(bytes([byte]))
        time.sleep(0.01)
    exchange(sock)


def client_declines_after_accept(sock, own):
    sock.sendall(proposal(own, system_id=b"declines"))
    receive_message(sock, ACCEPT)
    sock.sendall(decline(0x03030000) + PAYLOAD)
    assert receive(sock, len(PAYLOAD)) == PAYLOAD


def client_declines_out_of_sync_at_first(sock, own):
    sock.sendall(decline(0x04000000, flags=8))
    exchange(sock)


def client_declines_after_confirm(sock, own):
    sock.sendall(proposal(own, system_id=b"declines2"[:8]))
    receive_message(sock, ACCEPT)
    sock.sendall(confirm(own) + decline(0x02010000) + PAYLOAD)
    assert receive(sock, len(PAYLOAD)) == PAYLOAD


def client_queue_pair_is_none(sock, own):
    """Nothing answers the CONFIRM LINK."""
    sock.sendall(proposal(own, system_id=b"no-queue"))
    receive_message(sock, ACCEPT)
    sock.sendall(confirm(own))
    receive_decline(sock, 0x02010000)
    exchange(sock)


def client_joins_a_first_contact_that_fails(sock, own):
    """Two Proposals of one client: the second isn't drawn into the first one's failure."""
    with marked() as other:
        other.connect(sock.getpeername())
        other.sendall(proposal(own, system_id=b"together"))
        receive_message(other, ACCEPT)
        sock.sendall(proposal(own, system_id=b"together"))
        time.sleep(0.3)
        other.sendall(decline(0x03030000))
        assert receive_message(sock, ACCEPT)[7] & FIRST
        sock.sendall(decline(0x03030000))
        exchange(other)
        exchange(sock)


def client_foreign_ueid(sock, own):
    sock.sendall(proposal(own, eids=[b"FOREIGN", b"OTHER"]))
    receive_decline(sock, 0x03030000)
    exchange(sock)


def client_no_ueid(sock, own):
    sock.sendall(proposal(own, eids=[]))
    receive_decline(sock, 0x03030008)
    exchange(sock)


def client_eight_ueids(sock, own):
    sock.sendall(proposal(own, system_id=b"eight-id", eids=[b"A%d" % i for i in range(7)] + [b"XSMC-TEST"]))
    assert receive_message(sock, ACCEPT)[64:96] == b"XSMC-TEST".ljust(32)
    sock.sendall(decline(0x03030000))
    exchange(sock)


def client_version_1(sock, own):
    sock.sendall(proposal_v1(own))
    assert len(receive_decline(sock, 0x03030002)) == 28
    exchange(sock)


def client_version_3(sock, own):
    sock.sendall(proposal(own, flags=0x32, release=3, system_id=b"future!!"))
    answer = receive_message(sock, ACCEPT)
    assert answer[7] == V2 | FIRST and answer[105] & 15 == 1, answer.hex()
    sock.sendall(decline(0x03030000))
    exchange(sock)


def client_few_connections(sock, own):
    sock.sendall(proposal(own, conns=15))
    receive_decline(sock, 0x0303000a)
    exchange(sock)


def client_no_links(sock, own):
    sock.sendall(proposal(own, links=0))
    receive_decline(sock, 0x0303000b)
    exchange(sock)


def client_limits_not_repeated(sock, own):
    sock.sendall(proposal(own, system_id=b"limits!!", conns=100))
    answer = receive_message(sock, ACCEPT)
    assert (answer[140], answer[141]) == (100, 1), answer.hex()
    sock.sendall(confirm(own, conns=99))
    receive_decline(sock, 0x0303000a)
    exchange(sock)


def client_release_not_repeated(sock, own):
    sock.sendall(proposal(own, system_id=b"release!"))
    receive_message(sock, ACCEPT)
    sock.sendall(confirm(own, release=2))
    receive_decline(sock, 0x03030009)
    exchange(sock)


def client_index_0(sock, own):
    sock.sendall(proposal(own, system_id=b"index--0"))
    receive_message(sock, ACCEPT)
    sock.sendall(confirm(own, index=0))
    receive_decline(sock, 0x03000000)
    exchange(sock)


def client_token_0(sock, own):
    sock.sendall(proposal(own, system_id=b"token--0"))
    receive_message(sock, ACCEPT)
    sock.sendall(confirm(own, token=0))
    receive_decline(sock, 0x03000000)
    exchange(sock)


def client_address_overflows(sock, own):
    sock.sendall(proposal(own, system_id=b"overflow"))
    receive_message(sock, ACCEPT)
    sock.sendall(confirm(own, rmb=2**64 - 1, index=255))
    receive_decline(sock, 0x03000000)
    exchange(sock)


def client_gid_of_nobody(sock, own):
    """No route leads there: there will be no queue pair."""
    sock.sendall(proposal(own, system_id=b"gidnone!", own_gid=gid("203.0.113.9")))
    receive_message(sock, ACCEPT)
    sock.sendall(confirm(own))
    receive_message(sock, DECLINE)
    exchange(sock)


def client_gid_out_of_reach(sock, own):
    """No host has that address, but it takes the kernel a second to find out. Others don't wait for that."""
    for number in range(3):
        with marked() as first, marked() as other:
            first.connect(sock.getpeername())
            first.sendall(proposal(own, system_id=b"faraway%d" % number, own_gid=gid(f"10.9.0.{77 + number}")))
            receive_message(first, ACCEPT)
            first.sendall(confirm(own))
            other.connect(sock.getpeername())
            other.sendall(proposal(own, eids=[]))
            receive_decline(other, 0x03030008)
            waited = bool(select.select([first], [], [], 0)[0])
            receive_message(first, DECLINE)
            for each in (first, other):
                exchange(each)
        # (A slow machine may take a second for the other one, too, but not each time.)
        if not waited:
            break
    assert not waited, "the other connection was answered only after the first"
    sock.sendall(proposal(own, eids=[]))
    receive_decline(sock, 0x03030008)
    exchange(sock)


def client_gid_of_zeros(sock, own):
    sock.sendall(proposal(own, system_id=b"gidzero!", own_gid=bytes(16)))
    receive_message(sock, ACCEPT)
    sock.sendall(confirm(own))
    receive_message(sock, DECLINE)
    exchange(sock)


def client_accept_for_confirm(sock, own):
    sock.sendall(proposal(own, system_id=b"swapped!"))
    receive_message(sock, ACCEPT)
    sock.sendall(accept(own))
    expect_end(sock)


def client_payload_after_proposal(sock, own):
    sock.sendall(proposal(own, system_id=b"too-soon") + PAYLOAD)
    receive_message(sock, ACCEPT)
    expect_end(sock)


# Servers. Each has what the victim must find: "echo", or the errno of its connect. A client waits 6 s for the Accept, and
# 5 s for CONFIRM LINK.

EXPECTED = {}
finds = finder(EXPECTED)


@finds("EPROTO")
def server_garbage(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(b"220 mail.example.org ESMTP\r\n")
    expect_end(sock)


@finds("ETIMEDOUT")
def server_silent(sock, own):
    receive_message(sock, PROPOSAL)
    expect_end(sock, LATE, LONG)


@finds("ETIMEDOUT")
def server_silent_in_accept(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own)[:80])
    expect_end(sock, LATE, LONG)


@finds("ECONNRESET")
def server_closes(sock, own):
    receive_message(sock, PROPOSAL)


@finds("ECONNRESET")
def server_closes_in_accept(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own)[:80])


@finds("ECONNRESET")
def server_resets(sock, own):
    receive_message(sock, PROPOSAL)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)


@finds("echo")
def server_declines(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(decline(0x03030000))
    echo(sock)


@finds("echo")
def server_declines_v1_in_pieces(sock, own):
    receive_message(sock, PROPOSAL)
    for byte in decline(0x03030000, V1):
        sock.sendall(bytes([byte]))
        time.sleep(0.01)
    echo(sock)


@finds("greeting")
def server_declines_and_speaks(sock, own):
    """Its program's first bytes come in the Decline's segment."""
    receive_message(sock, PROPOSAL)
    sock.sendall(decline(0x03030000) + PAYLOAD)
    echo(sock)


@finds("echo")
def server_declines_after_accept(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own) + decline(0x09990001))
    receive_message(sock, CONFIRM)
    echo(sock)


@finds("greeting")
def server_declines_late_and_speaks(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own))
    receive_message(sock, CONFIRM)
    sock.sendall(decline(0x02010000) + PAYLOAD)
    echo(sock)


@finds("echo")
def server_never_confirms_the_link(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own))
    receive_message(sock, CONFIRM)
    receive_decline(sock, 0x02010000)
    echo(sock)


@finds("ECONNRESET")
def server_resets_after_confirm(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own))
    receive_message(sock, CONFIRM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)


@finds("EPROTO")
def server_garbage_after_confirm(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own))
    receive_message(sock, CONFIRM)
    sock.sendall(b"220 mail.example.org ESMTP\r\n")
    expect_end(sock)


@finds("echo")
def server_names_an_unknown_link(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own, flags=V2))
    assert receive_decline(sock, 0x04000000)[7] == V2 | 8
    echo(sock)


@finds("EPROTO")
def server_answers_in_version_1(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own, flags=V1 | FIRST))
    expect_end(sock)


@finds("echo")
def server_answers_for_smc_d(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(message(ACCEPT, V2 | 1, bytes(66)))
    receive_decline(sock, 0x03040000)
    echo(sock)


@finds("echo")
def server_without_extension(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own, extension=b""))
    receive_decline(sock, 0x0303000a)
    echo(sock)


@finds("echo")
def server_few_connections(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own, conns=3))
    receive_decline(sock, 0x0303000a)
    echo(sock)


@finds("echo")
def server_many_links(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own, links=5))
    receive_decline(sock, 0x0303000b)
    echo(sock)


@finds("echo")
def server_rmb_of_no_size(sock, own):
    """The queue pair would do, but not the buffer."""
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own, mtu=0))
    receive_decline(sock, 0x03000000)
    echo(sock)


@finds("echo")
def server_address_overflows(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(accept(own, rmb=2**64 - 1, index=255))
    receive_decline(sock, 0x03000000)
    echo(sock)


@finds("echo")
def server_oversized(sock, own):
    """It is read to its end, but not to be worked with."""
    receive_message(sock, PROPOSAL)
    sock.sendall(message(ACCEPT, V2 | FIRST, bytes(60000)))
    receive_decline(sock, 0x03000000)
    echo(sock)


@finds("EPROTO")
def server_proposes(sock, own):
    receive_message(sock, PROPOSAL)
    sock.sendall(proposal(own))
    expect_end(sock)


# How the victim's program behaves meanwhile is its own matter; these servers only take their time.


def slow(sock, own):
    receive_message(sock, PROPOSAL)
    time.sleep(2)
    sock.sendall(decline(0x03030000))
    echo(sock)


@finds("poll")
def server_slow_for_poll(sock, own):
    slow(sock, own)


@finds("epoll")
def server_slow_for_epoll(sock, own):
    slow(sock, own)


@finds("interrupted")
def server_slow_for_interrupted(sock, own):
    slow(sock, own)


@finds("shut")
def server_slow_for_shut(sock, own):
    receive_message(sock, PROPOSAL)
    time.sleep(2)
    sock.sendall(decline(0x03030000) + PAYLOAD)
    assert sock.recv(1) == b"", "no end of the stream"


@finds("closed")
def server_slow_for_closed(sock, own):
    receive_message(sock, PROPOSAL)
    expect_end(sock)


@finds("forked")
def server_slow_for_forked(sock, own):
    receive_message(sock, PROPOSAL)
    time.sleep(2)
    sock.sendall(accept(own))
    receive_decline(sock, 0x03060000)
    echo(sock)


PORTS = {name: FIRST_PORT + at for at, name in enumerate(EXPECTED)}


def run_client(function, host, port, own):
    with marked() as sock:
        sock.connect((host, port))
        assert agreed(sock), "the option is not agreed on"
        function(sock, own)


def run_server(function, listener, own):
    with listener, listener.accept()[0] as sock:
        sock.settimeout(15)
        assert agreed(sock), "the option is not agreed on"
        function(sock, own)


def report(name, function, *args):
    begin = time.monotonic()
    try:
        function(*args)
        print(f"ok {name} {time.monotonic() - begin:.2f}\n", end="", flush=True)
    except Exception:  # each case says what happened to it
        print(f"FAILED {name}: {traceback.format_exc()}\n", end="", flush=True)


def listen(port):
    sock = marked()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", port))
    sock.listen()
    sock.settimeout(40)
    return sock


def main(side, *words):
    cases = {name.partition("_")[2]: function for name, function in globals().items()
             if name.startswith(side[:-1] + "_")}
    if side == "servers":
        jobs = [(name, run_server, function, listen(PORTS[name]), *words) for name, function in cases.items()]
        workers = len(jobs)
    else:
        jobs = [(name, run_client, function, words[0], int(words[1]), words[2]) for name, function in cases.items()]
        workers = AT_ONCE
    # Those that take 6 s come first.
    jobs.sort(key=lambda job: "silent" not in job[0])
    with ThreadPoolExecutor(workers) as pool:
        for job in jobs:
            pool.submit(report, *job)


if __name__ == "__main__":
    main(*sys.argv[1:])
