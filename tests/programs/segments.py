"""TCP segments as they are on the wire: for capturing them, and for a TCP peer of one's own.

For programs that run as root, in a network namespace of their own, under the effective user id of somebody else.
"""

import contextlib
import os
import socket
import struct
import subprocess
import time

OPTION = bytes.fromhex("fe06e2d4c3d9")  # the SMC option: kind, length, "SMCR" in EBCDIC
FIN, SYN, RST, ACK = 1, 2, 4, 16


@contextlib.contextmanager
def root():
    """Acts as root again."""
    before = os.geteuid()
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(before)


class Segment:
    """A captured TCP segment."""

    def __init__(self, packet):
        if packet[0] >> 4 == 4:
            head, self.protocol, addresses = (packet[0] & 15) * 4, packet[9], packet[12:20]
        else:
            head, self.protocol, addresses = 40, packet[6], packet[8:40]
        middle = len(addresses) // 2
        self.source, self.target = addresses[:middle], addresses[middle:]
        header = packet[head:]
        self.tcp = self.protocol == socket.IPPROTO_TCP
        if self.tcp:
            self.sport, self.dport, self.seq, self.ack, offset, self.flags = struct.unpack("!HHIIBB", header[:14])
            self.options, self.data = header[20:(offset >> 4) * 4], header[(offset >> 4) * 4:]

    def has(self):
        """Whether the SMC option is there, once and in the form of Linux's SMC."""
        found, rest = 0, self.options
        while rest and rest[0] != 0:
            if rest[0] == 1:
                rest = rest[1:]
                continue
            if rest[0] == 254:
                assert rest[:rest[1]] == OPTION, rest.hex()
                found += 1
            rest = rest[rest[1]:]
        assert found <= 1, self.options.hex()
        return found == 1


class Capture:
    """All segments on an interface from now on. Loopback shows each twice: the second is dropped."""

    def __init__(self, interface="lo"):
        with root():
            self.raw = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
            self.raw.bind((interface, 3))
        self.raw.setblocking(False)

    def segments(self):
        found = []
        while True:
            try:
                packet, address = self.raw.recvfrom(65536)
            except BlockingIOError:
                return found
            if address[2] != socket.PACKET_OUTGOING and address[1] in (0x0800, 0x86DD):
                segment = Segment(packet)
                if segment.tcp:
                    found.append(segment)

    def handshake(self):
        """Whether SYN and SYN-ACK had the option; no other segment may have it."""
        found = {}
        for segment in self.segments():
            kind = segment.flags & (SYN | ACK)
            if kind & SYN:
                assert found.setdefault(kind, segment.has()) == segment.has(), "retransmitted otherwise"
            else:
                assert not segment.has()
        return found[SYN], found[SYN | ACK]


class Raw:
    """The host 10.9.0.2, of which the kernel knows nothing but an Ethernet address."""

    HERE, THERE = "10.9.0.1", "10.9.0.2"

    def __init__(self):
        lines = ("link add a0 address 02:00:00:00:00:01 type veth peer name b0 address 02:00:00:00:00:02",
                 "link set a0 up", "link set b0 up", f"addr add {self.HERE}/24 dev a0",
                 f"neigh add {self.THERE} lladdr 02:00:00:00:00:02 dev a0")
        with root():
            for line in lines:
                subprocess.run(["ip", *line.split()], check=True)
            self.raw = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
            self.raw.bind(("b0", 0x0800))
        self.to = ("b0", 0x0800, 0, 0, b"\2\0\0\0\0\1")

    def send(self, sport, dport, flags, seq, ack=0, options=b"", data=b""):
        options += b"\1" * (-len(options) % 4)
        source, target = socket.inet_aton(self.THERE), socket.inet_aton(self.HERE)
        head = struct.pack("!HHIIBBHHH", sport, dport, seq, ack, (5 + len(options) // 4) << 4, flags, 65535, 0, 0)
        body = head + options + data
        check = checksum(source + target + struct.pack("!HH", 6, len(body)) + body)
        body = body[:16] + struct.pack("!H", check) + body[18:]
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0x4000, 64, 6, 0, source, target)
        ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
        self.raw.sendto(ip + body, self.to)

    def receive(self, flags, seconds=5):
        """The next segment with exactly these flags (of SYN, ACK, RST, FIN)."""
        end = time.monotonic() + seconds
        while True:
            self.raw.settimeout(max(0.001, end - time.monotonic()))
            packet, address = self.raw.recvfrom(65536)
            if address[2] == socket.PACKET_OUTGOING:
                continue
            segment = Segment(packet)
            if segment.tcp and segment.flags & (SYN | ACK | RST | FIN) == flags:
                return segment

    def connect(self, listening, options, sport, answers=1, data=b""):
        """Connects by hand, with so many SYN-ACKs awaited; gives whether they had the option, and the accepted socket."""
        dport = listening.getsockname()[1]
        self.send(sport, dport, SYN, 1000, options=options, data=data)
        seen = [self.receive(SYN | ACK) for _ in range(answers)]
        assert len({one.seq for one in seen}) == 1
        assert len({one.has() for one in seen}) == 1, "the SYN-ACK was sent again otherwise"
        self.send(sport, dport, ACK, 1001 + len(data), seen[0].seq + 1)
        return seen[0].has(), listening.accept()[0]


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
