"""SMC-R in a capture of the lab: the LLC and CDC messages, with who said them on which connection.

CLC messages, which are in the capture as well, say what the queue pairs and alert tokens belong to. Offsets are those of
SMC-R version 2.1 as Linux speaks it.
"""

import collections
import struct

from . import lab

EYECATCHER = bytes.fromhex("e2d4c3d9")
ACCEPT, CONFIRM = 2, 3
SERVER = bytes([10, 9, 0, 1])
CDC = 0xfe
CONFIRM_LINK, DELETE_LINK, CONFIRM_RKEY, TEST_LINK, DELETE_RKEY = 0x21, 0x24, 0x26, 0x27, 0x29
RESPONSE = 0x80
# Producer flags and connection state flags of CDC.
BLOCKED, URGENT_PENDING, URGENT = 0x80, 0x40, 0x20
DONE, CLOSED, ABORT = 0x80, 0x40, 0x20

# What an Accept or a Confirm says of its sender's end.
End = collections.namedtuple("End", "qpn token size")

# An LLC message: `link` names the link by the ports of its first connection, `port` is the server's, `role` the sender's.
Llc = collections.namedtuple("Llc", "port role link kind flags bytes")

# A CDC message; cursors are (wrap, count). `key` names the connection and the direction.
Cdc = collections.namedtuple("Cdc", "port role key seq token producer consumer flags state bytes")


class Capture:
    """`llc` and `cdc` are lists of the messages in order, `ends` {(port, role, token): End} of what CLC said."""

    def __init__(self, pcap):
        self.llc, self.cdc, self.ends = [], [], {}
        self._ports, self._conns, self._psns = {}, {}, {}
        for frame in lab.frames(pcap):
            if frame[12:14] != b"\x08\x00":
                continue
            if frame[23] == 6:
                self._tcp(frame)
            elif (at := lab.roce(frame)) is not None and frame[at] == lab.SEND_ONLY:
                self._send(frame, at)

    def _tcp(self, frame):
        ip = 14 + 4 * (frame[14] & 15)
        data = ip + 4 * (frame[ip + 12] >> 4)
        clc = frame[data:14 + int.from_bytes(frame[16:18], "big")]
        if clc[:4] != EYECATCHER or clc[4] not in (ACCEPT, CONFIRM) or len(clc) < 68:
            return
        source, client = struct.unpack("!HH", frame[ip:ip + 4])
        port, role = (source, "server") if clc[4] == ACCEPT else (client, "client")
        qpn, token = int.from_bytes(clc[38:41], "big"), int.from_bytes(clc[46:50], "big")
        address = frame[26:30]
        # A link stays that of its first connection.
        if clc[7] & 8:
            self._ports[address, qpn] = (port, client if source == port else source)
            self._psns = {key: psn for key, psn in self._psns.items() if key != (address, qpn)}
        self.ends[port, role, token] = End(qpn, token, 1 << (clc[50] >> 4) + 14)
        # Tokens may be used again.
        self._conns[address, qpn, token] = (port, client if source == port else source)

    def _send(self, frame, at):
        receiver, qpn = frame[30:34], int.from_bytes(frame[at + 5:at + 8], "big")
        psn = int.from_bytes(frame[at + 9:at + 12], "big")
        message = frame[at + 12:at + 56]
        role = "server" if frame[26:30] == SERVER else "client"
        link = self._ports.get((receiver, qpn))
        # Repeated packets come again with their number.
        last = self._psns.get((receiver, qpn))
        if link is None or len(message) < 44 or last is not None and (psn - last) & 0xffffff >= 1 << 23 or psn == last:
            return
        self._psns[receiver, qpn] = psn
        if message[0] != CDC:
            self.llc.append(Llc(link[0], role, link, message[0], message[3], message))
            return
        seq, token, producer, wrap, consumer, other, flags, state = struct.unpack("!HI2xHI2xHIBB", message[2:26])
        conn = self._conns.get((receiver, qpn, token))
        self.cdc.append(Cdc((conn or link)[0], role, (receiver, qpn, token, conn), seq, token, (producer, wrap),
                            (consumer, other), flags, state, message))
