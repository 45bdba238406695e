"""CLC messages by hand, and sockets with the SMC option of TCP, for peers that don't keep to the protocol.

Offsets and values are those of SMC-R version 2.1 as Linux speaks it. Nothing here runs under xsmc; the guest needs `smctl enable`.
"""

import re
import socket
import struct
from pathlib import Path

_OPTION = (Path(__file__).parents[2] / "smc-core/src/negotiate/option.rs").read_text(encoding="utf-8")


def _number(name):
    return int(re.search(rf"pub const {name}: \w+ = (\w+);", _OPTION)[1].replace("_", ""), 0)


EYECATCHER = bytes.fromhex("e2d4c3d9")
PROPOSAL, ACCEPT, CONFIRM, DECLINE = 1, 2, 3, 4
FIRST = 8  # flag of Accept and Confirm
V1, V2 = 0x10, 0x20
ID = bytes.fromhex("00ff5254000000aa")
MAC = bytes.fromhex("5254000000aa")
UEID = b"XSMC-TEST"


def finder(expected):
    """A decorator for functions server_NAME: @finds(OUTCOME) notes in `expected` what the program at the other end finds."""
    def finds(outcome):
        def note(function):
            expected[function.__name__.removeprefix("server_")] = outcome
            return function
        return note
    return finds


def marked():
    """A TCP socket that will send the option."""
    sock = socket.socket()
    sock.settimeout(15)
    sock.setsockopt(_number("SOL_XSMC"), _number("XSMC_OPT_WANT"), struct.pack("I", 1))
    return sock


def agreed(sock):
    """Whether both ends of a connection have sent it."""
    answer = sock.getsockopt(_number("SOL_XSMC"), _number("XSMC_OPT_STATE"), 4)
    return bool(struct.unpack("I", answer)[0] & _number("STATE_PEER"))


def gid(address):
    return bytes(10) + b"\xff\xff" + socket.inet_aton(address)


def message(kind, flags, body, eyecatcher=EYECATCHER, trailer=EYECATCHER, length=None):
    """With its header and trailer; `length` to say another one than it has."""
    if length is None:
        length = 8 + len(body) + len(trailer)
    return eyecatcher + struct.pack("!BHB", kind, length, flags) + body + trailer


def decline(reason, version=V2, flags=0):
    body = ID + struct.pack("!I", reason) + b"\x20\0\0\0"
    return message(DECLINE, version | flags, body + (bytes(16) if version != V1 else b""))


def proposal(address, flags=0x22, eids=(UEID,), count=None, release=1, conns=255, links=1, system_id=ID, own_gid=None):
    """A version 2 Proposal of SMC-R only."""
    extension = struct.pack("!BBBBHH", len(eids) if count is None else count, 0, 0, release << 4, 0, 0)
    extension += (own_gid or gid(address)) + struct.pack("!BBH", conns, links, 0) + bytes(12)
    extension += b"".join(eid.ljust(32) for eid in eids)
    head = system_id + bytes(34) + struct.pack("!H", 28) + bytes(28)
    return message(PROPOSAL, flags, head + extension)


def proposal_v1(address):
    """A Proposal of SMC-R version 1, with a prefix area."""
    head = ID + gid(address) + MAC + struct.pack("!H", 0x28) + bytes(40)
    return message(PROPOSAL, 0x18, head + socket.inet_aton("10.9.0.0") + bytes([24, 0, 0, 0]))


def accept(address, kind=ACCEPT, flags=V2 | FIRST, qpn=0xabcdef, rkey=0x1234, token=7, index=1, size=2, mtu=3,
           rmb=0x10000, psn=0x55, eid=UEID, release=1, conns=255, links=1, extension=None):
    """An Accept, or a Confirm; the extension of first contact is there with the flag, unless `extension` is given."""
    body = ID + gid(address) + MAC + qpn.to_bytes(3, "big") + struct.pack("!IBI", rkey, index, token)
    body += bytes([size << 4 | mtu, 0]) + struct.pack("!QB", rmb, 0) + psn.to_bytes(3, "big")
    if flags & 0xf0 == V1:
        return message(kind, flags, body)
    body += eid.ljust(32) + bytes(8)
    if extension is None and flags & FIRST:
        extension = bytes([0x80, 0x20 | release, 0, 0]) + b"nowhere".ljust(32) + bytes([conns, links, 0, 0]) + bytes(12)
        if kind == CONFIRM:
            extension += bytes([1, 0, 0, 0]) + gid(address)
    return message(kind, flags, body + (extension or b""))


def confirm(address, **fields):
    return accept(address, kind=CONFIRM, **fields)


def receive(sock, count):
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, f"the stream ended after {len(data)} of {count} bytes: {data.hex()}"
        data += part
    return data


def receive_message(sock, kind):
    """The next message, which must be of this kind."""
    head = receive(sock, 8)
    assert head[:4] == EYECATCHER, head.hex()
    whole = head + receive(sock, struct.unpack("!H", head[5:7])[0] - 8)
    assert whole[4] == kind, f"message {whole.hex()} instead of one of kind {kind}"
    assert whole[-4:] == EYECATCHER, whole.hex()
    return whole


def receive_decline(sock, reason):
    whole = receive_message(sock, DECLINE)
    got = struct.unpack("!I", whole[16:20])[0]
    assert got == reason, f"declined for {got:#010x} instead of {reason:#010x}"
    return whole
