"""SMC-R connections by hand, for peers that don't keep to the protocol: LLC and CDC over a queue pair of rnic.c, CLC from clc.py.

A Link has a queue pair, in a process of its own; Conns are connections on it, whose rings lie in the memory of that process.
What isn't said otherwise is said as Linux would.
"""

import itertools
import os
import socket
import struct
import subprocess
import time

from clc import (ACCEPT, CONFIRM, FIRST, MAC, PROPOSAL, V2, accept, agreed, confirm, gid, marked, proposal, receive_message)

RNIC = os.environ["RNIC"]  # rnic.c, built
RING = 16384  # bytes of a connection's ring
MTU = 5  # code of 4096

CONFIRM_LINK, ADD_LINK, DELETE_LINK, REQUEST_ADD_LINK, CONFIRM_RKEY, TEST_LINK, DELETE_RKEY = 0x21, 0x22, 0x24, 0x25, 0x26, 0x27, 0x29
CDC = 0xfe
RESPONSE = 0x80

# Producer flags and connection state flags of CDC.
BLOCKED, URGENT_PENDING, URGENT, UPDATE, FAILOVER = 0x80, 0x40, 0x20, 0x10, 0x08
DONE, CLOSED, ABORT = 0x80, 0x40, 0x20

WAIT = 8.0  # seconds that an answer may take: the guests are slow


class Broken(Exception):
    """The queue pair is of no use any more; why is the text."""


def llc(kind, flags=0, body=b"", length=None, size=44):
    """A message of `size` bytes that says that it has `length`."""
    return (struct.pack("<BHB", kind, size if length is None else length, flags) + body).ljust(size, b"\0")[:size]


def cdc(token, seq, prod=(0, 0), cons=(0, 0), flags=0, state=0, length=44):
    head = struct.pack("!BBHI2xHI2xHIBB", CDC, length, seq & 0xffff, token, prod[0] & 0xffff, prod[1], cons[0] & 0xffff, cons[1],
                       flags, state)
    return head.ljust(44, b"\0")


def cursor(offset, size=RING):
    return offset // size & 0xffff, offset % size


class Link:
    """One end of a link. It answers CONFIRM RKEY, unless that is in `mute`, and TEST LINK."""

    def __init__(self, own, system_id):
        self.own, self.system_id = own, system_id
        self._process = subprocess.Popen([RNIC], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.qpn, self.psn, self.rkey, self.memory = map(int, self._process.stdout.readline().split())
        self.peer_qpn = None
        self.mute = set()
        self.llc, self.cdc = [], {}
        self.conns = 0
        self.ready = False

    def ask(self, *words):
        return self._ask([" ".join(map(str, words))])[-1]

    def _ask(self, commands):
        self._process.stdin.write("".join(command + "\n" for command in commands))
        self._process.stdin.flush()
        answers = [self._process.stdout.readline().strip() for _ in commands]
        for answer in answers:
            assert answer and not answer.startswith("error"), answer or "rnic is gone"
        return answers

    def kill(self):
        self._process.kill()
        self._process.wait()

    def close(self):
        """Ends it as one should, and the process."""
        if self._process.poll() is None:
            if self.ready:
                try:
                    self.send(llc(DELETE_LINK, 0x40, struct.pack("!BI", 0, 0x00030000)))
                    self.await_llc(DELETE_LINK)
                except (Broken, AssertionError):
                    pass
            self._process.stdin.close()
            self._process.wait(WAIT)

    def connect(self, end):
        """To the queue pair that an Accept or a Confirm names."""
        self.peer_qpn = end.qpn
        self.ask("connect", end.qpn, end.psn, end.gid.hex(), min(MTU, end.mtu))
        self.ready = True

    def send(self, *messages):
        for at in range(0, len(messages), 32):
            # (What rnic answers to so many fits a pipe.)
            self._ask([f"send {message.hex() or '-'}" for message in messages[at:at + 32]])

    def pump(self, seconds=0.0):
        """Takes what comes, for at most so long until there is something. False: nothing did."""
        word, _, rest = self.ask("next", int(seconds * 1000)).partition(" ")
        if word == "none":
            return False
        if word == "failed":
            raise Broken(rest)
        message = bytes.fromhex(rest)
        if message[0] == CDC:
            self.cdc.setdefault(struct.unpack("!I", message[4:8])[0], []).append(message)
        elif not self._serve(message):
            self.llc.append(message)
        return True

    def _serve(self, message):
        kind, flags = message[0], message[3]
        if flags & RESPONSE or kind in self.mute or kind != CONFIRM_RKEY:
            return False
        self.send(message[:3] + bytes([flags | RESPONSE]) + message[4:])
        return True

    def await_llc(self, kind, response=None, within=WAIT):
        """The next LLC message of this kind; others before it are dropped."""
        end = time.monotonic() + within
        while True:
            while self.llc:
                message = self.llc.pop(0)
                if message[0] == kind and response in (None, bool(message[3] & RESPONSE)):
                    return message
            left = end - time.monotonic()
            assert left > 0, f"no LLC message of kind {kind:#x} in {within} s"
            self.pump(left)

    def no_llc(self, kind, seconds=0.5):
        """None of this kind comes for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.pump(left)
        assert not [m for m in self.llc if m[0] == kind], self.llc

    def test(self, data=bytes(range(16))):
        """The link is alive, and the peer has taken all that was sent before."""
        self.send(llc(TEST_LINK, 0, data))
        answer = self.await_llc(TEST_LINK, True)
        assert answer == llc(TEST_LINK, RESPONSE, data), answer.hex()

    def drain(self, silence=0.5):
        """Forgets all LLC messages that come, until none does for so long."""
        while self.pump(silence):
            pass
        self.llc.clear()

    def broken(self, within=WAIT):
        """Waits for the end of the queue pair; gives the reason."""
        end = time.monotonic() + within
        try:
            while (left := end - time.monotonic()) > 0:
                self.pump(left)
        except Broken as why:
            return str(why)
        raise AssertionError("the queue pair still works")


class End:
    """What an Accept or a Confirm says of the peer's end."""

    def __init__(self, message):
        self.first = bool(message[7] & FIRST)
        self.gid, self.qpn = message[16:32], int.from_bytes(message[38:41], "big")
        self.rkey, index, self.token = struct.unpack("!IBI", message[41:50])
        self.size, self.mtu = 1 << (message[50] >> 4) + 14, message[50] & 15
        self.address = struct.unpack("!Q", message[52:60])[0] + (index - 1) * self.size
        self.psn = int.from_bytes(message[61:64], "big")


class Conn:
    """One end of a connection on a link; at first only its place there."""

    def __init__(self, link):
        self.link, self.sock, self.peer = link, None, None
        link.conns += 1
        # There are eight places.
        self.at = link.conns % 8 * RING
        self.token = 100 + link.conns
        self.prod = self.cons = self.seq = self.state = 0
        # What the peer has said last.
        self.peer_prod = self.peer_cons = self.peer_state = self.peer_flags = 0
        self.heard = []

    # Handshakes. `answer` are fields of Accept or Confirm that are to be others.

    def begin(self, sock):
        """As client: all until the Accept has come."""
        self.sock, self.port = sock, sock.getsockname()[1]
        assert agreed(sock), "the option is not agreed on"
        sock.sendall(proposal(self.link.own, system_id=self.link.system_id))
        if self.link.ready:
            # A server asks for its RMB to be confirmed before its Accept.
            sock.setblocking(False)
            end = time.monotonic() + WAIT
            while time.monotonic() < end:
                self.link.pump(0.02)
                try:
                    sock.recv(1, socket.MSG_PEEK)
                    break
                except BlockingIOError:
                    pass
            sock.settimeout(15)
        self.peer = End(receive_message(sock, ACCEPT))

    def confirm(self, **answer):
        """As client: the Confirm, and before it the queue pair or CONFIRM RKEY."""
        first = self.peer.first
        if first:
            self.link.connect(self.peer)
        else:
            self.link.send(llc(CONFIRM_RKEY, 0, struct.pack("!BIQ", 0, self.link.rkey, self.link.memory + self.at)))
            assert not self.link.await_llc(CONFIRM_RKEY, True)[3] & 0x20, "CONFIRM RKEY refused"
        self.sock.sendall(confirm(self.link.own, **self._end(first) | answer))

    def _end(self, first):
        return dict(flags=V2 | (FIRST if first else 0), qpn=self.link.qpn, rkey=self.link.rkey, token=self.token, size=0,
                    mtu=min(MTU, self.peer.mtu if self.peer else MTU), rmb=self.link.memory + self.at, psn=self.link.psn)

    def confirm_link(self, flags=0x83, **other):
        """As client: answers CONFIRM LINK."""
        asked = self.link.await_llc(CONFIRM_LINK, False)
        assert asked[3] == 3 and asked[26:29] == self.peer.qpn.to_bytes(3, "big"), asked.hex()
        self.say_link(flags, **{"link": asked[29], **other})

    def say_link(self, flags, **other):
        self.link.send(self._confirm_link(flags, **other))

    def _confirm_link(self, flags, qpn=None, own_gid=None, link=1):
        body = MAC + (own_gid or gid(self.link.own)) + (self.link.qpn if qpn is None else qpn).to_bytes(3, "big")
        return llc(CONFIRM_LINK, flags, body + struct.pack("!BIBB", link, 7, 1, 255))

    def open(self, sock, **answer):
        """The whole handshake as client."""
        self.begin(sock)
        self.confirm(**answer)
        if self.peer.first:
            self.confirm_link()
        return self

    def answer(self, sock, **answer):
        """As server, first contact: all until the Confirm has come, and the queue pair."""
        self.sock = sock
        receive_message(sock, PROPOSAL)
        sock.sendall(accept(self.link.own, **self._end(True) | answer))
        self.peer = End(receive_message(sock, CONFIRM))
        self.link.connect(self.peer)

    def serve(self, sock, **answer):
        """The whole handshake as server."""
        self.answer(sock, **answer)
        self.say_link(3)
        self.link.await_llc(CONFIRM_LINK, True)
        return self

    # Data.

    def message(self, flags=0, prod=None, cons=None, seq=None, state=None, token=None):
        """The CDC message of the connection as it stands, with the next number; cursors are offsets or (wrap, count)."""
        def place(given, known, size):
            return given if isinstance(given, tuple) else cursor(known if given is None else given, size)

        if seq is None:
            self.seq += 1
        return cdc(self.peer.token if token is None else token, self.seq if seq is None else seq,
                   place(prod, self.prod, self.peer.size), place(cons, self.cons, RING), flags,
                   self.state if state is None else state)

    def say(self, **fields):
        self.link.send(self.message(**fields))

    def end(self, state):
        self.state |= state
        self.say()

    def pump(self, seconds):
        """Takes what comes, as far as it is news; False: nothing did."""
        news = self.link.pump(seconds)
        for message in self.link.cdc.pop(self.token, []):
            self.heard.append(message)
            prod_wrap, prod = struct.unpack("!HI", message[10:16])
            cons_wrap, cons = struct.unpack("!HI", message[18:24])
            assert prod < RING and cons < self.peer.size, message.hex()
            self.peer_prod, self.peer_cons = prod_wrap * RING + prod, cons_wrap * self.peer.size + cons
            self.peer_flags, self.peer_state = message[24], message[25]
        return news

    def wait(self, what, within=WAIT):
        """Until `what` of this connection is true."""
        end = time.monotonic() + within
        while not what(self):
            left = end - time.monotonic()
            assert left > 0, f"prod {self.peer_prod} cons {self.peer_cons} state {self.peer_state:#x} is all that came"
            self.pump(left)

    def write(self, data, at=None):
        """RDMA WRITEs of what belongs at a stream offset; not announced."""
        at = self.prod if at is None else at
        while data:
            place = at % self.peer.size
            part = data[:min(8192, self.peer.size - place)]
            self.link.ask("write", self.peer.rkey, self.peer.address + place, part.hex())
            at, data = at + len(part), data[len(part):]

    def send(self, data, flags=0):
        """Data that there is room for, and its announcement."""
        assert self.prod + len(data) - self.peer_cons <= self.peer.size, "no room"
        self.write(data)
        self.prod += len(data)
        self.say(flags=flags)

    def recv(self, count):
        """So many bytes, consumed."""
        data = b""
        while len(data) < count:
            self.wait(lambda conn: conn.peer_prod > self.cons or conn.peer_state)
            have = min(self.peer_prod - self.cons, count - len(data), RING - self.cons % RING)
            assert have, f"the end after {len(data)} of {count} bytes"
            data += bytes.fromhex(self.link.ask("look", self.at + self.cons % RING, have).partition(" ")[2])
            self.cons += have
            self.say()
        return data

    def echo(self, data):
        """The peer's program sends back what it gets."""
        for at in range(0, len(data), 4096):
            part = data[at:at + 4096]
            self.send(part)
            got = self.recv(len(part))
            assert got == part, f"other bytes came back: {got[:20].hex()}... for {part[:20].hex()}..."

    def finish(self):
        """Closes it in order."""
        self.end(DONE)
        self.wait(lambda conn: conn.peer_state & (CLOSED | DONE))
        self.end(CLOSED)
        self.sock.close()


# The kernel gives a port to one connection after another; here it is to be the connection's name.
PORTS = itertools.count(20000)


def dial(address):
    sock = marked()
    sock.bind(("", next(PORTS)))
    sock.connect(address)
    return sock
