"""What the cases of rdma_llc.py and rdma_cdc.py have in common: see rdma_clients.py."""

import os
import socket
import threading

from smcr import ABORT, CLOSED, DONE, Conn, Link, dial

IGNORED = set()
DATA = bytes(range(251)) * 200
RESET = {"ECONNRESET", "EPIPE"}
SILENT = "the peer is silent"
ENDED = "the peer ended the link group, reason {:#010x}"
REFUSED = "the peer refused key or address"


def ignored(function):
    """Of a case in which nothing has an effect: it may share its link with others."""
    IGNORED.add(function)
    return function


class Case:
    """What a case gets."""

    def __init__(self, name, address, own, shared=None):
        self.name, self.address, self.own, self.shared = name, address, own, shared
        self._links = []

    def link(self):
        if self.shared:
            return self.shared
        link = Link(self.own, os.urandom(7) + b"\1")
        self._links.append(link)
        return link

    def open(self, link=None, **fields):
        """A connection, on a new link unless one is given."""
        return Conn(link or self.link()).open(dial(self.address), **fields)

    def confirmed(self):
        """A connection on a new link, whose Confirm has been sent."""
        conn = Conn(self.link())
        conn.begin(dial(self.address))
        conn.confirm()
        return conn

    def ask(self, what):
        with socket.create_connection((self.address[0], self.address[1] + 1)) as sock, sock.makefile("rw") as lines:
            print(what, file=lines, flush=True)
            return lines.readline().split()

    def saw(self, conn, *how, count=None):
        """How the victim's program saw the connection end, and how many bytes it had got."""
        found, had = self.ask(conn.port)
        assert found in how, f"{found} after {had} bytes instead of {how}"
        assert count in (None, int(had)), f"{found} after {had} bytes instead of {count}"

    def reset(self, conn):
        self.saw(conn, *RESET)

    def violated(self, conn):
        """The victim must have aborted the connection."""
        conn.wait(lambda conn: conn.peer_state & ABORT)
        self.reset(conn)
        print(f"{self.name}: violation\n", end="", flush=True)
        conn.end(ABORT)
        conn.sock.close()

    def down(self, link, why):
        """The victim's group has ended by itself, or will; `why` is a regular expression."""
        print(f"{self.name}: group {link.peer_qpn} {why}\n", end="", flush=True)
        link.ready = False

    def close(self):
        for link in self._links:
            if link.ready:
                link.close()
                self.down(link, ENDED.format(0x00030000))
            else:
                link.close()


class Good:
    """A peer that keeps to everything."""

    def __init__(self, address, own):
        self._case, self._lock = Case("good", address, own), threading.Lock()
        self._link = self._case.link()

    def works(self):
        with self._lock:
            conn = self._case.open(self._link)
            conn.echo(DATA[:3000])
            conn.end(DONE | CLOSED)
            conn.sock.close()
        self._case.saw(conn, "end", count=3000)

    def close(self):
        self._case.close()


def goes_on(t, conn, data=DATA[:6000]):
    """The connection is as good as before."""
    conn.link.test()
    conn.echo(data)
    before = conn.prod
    conn.finish()
    t.saw(conn, "end", count=before)
