"""Two processes that make random socket calls on their ends of a few connections, one call at a time.

lockstep.py SEED CALLS prints a line for each call: what was called, by which process (A or B), and what it gave. The calls depend
on the seed alone, never on what others gave, so that runs can be compared line by line. LOCKSTEP_PEER_PRELOAD is the LD_PRELOAD of
process B.
"""

import array
import errno
import fcntl
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import zlib

CONNECTIONS = 3
EPOLLS = 2
IN, OUT, PRI, RDHUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLPRI, select.EPOLLRDHUP
ET, ONESHOT = select.EPOLLET, select.EPOLLONESHOT
HOSTS = {4: "127.0.0.1", 6: "::1"}
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
# What a blocking call waits.
PATIENCE = struct.pack("ll", 0, 30_000)
# Bytes that are under way in a direction at most, so that no buffer of any kind is full.
MOST = 60_000
# A pipe or a file is sent from in pieces while a direction is on TCP; a reset may then come between them.
PIECE = 4000


def payload(seed, size):
    return random.Random(seed).randbytes(size)


class End:
    """The calls of one process. A connection k is a list of descriptors of its socket, of which the first is used."""

    def __init__(self):
        self.socks = {}
        self.listeners = {}
        self.epolls = [select.epoll() for _ in range(EPOLLS)]
        self.registered = {}  # (epoll, descriptor) -> (connection, mask)
        self.file = os.memfd_create("data")
        os.write(self.file, payload(1, 65536))

    def run(self, call, *args):
        """What the call gives, or the name of its error."""
        try:
            return getattr(self, call)(*args)
        except OSError as error:
            return errno.errorcode[error.errno]

    def _sock(self, k):
        return self.socks[k][0]

    def _fd(self, k):
        return self.socks[k][0].fileno()

    # Connections.

    def listen(self, k, family):
        self.listeners[k] = socket.create_server((HOSTS[family], 0), family=FAMILIES[family])
        return self.listeners[k].getsockname()[1]

    def connect(self, k, family, port):
        self.socks[k] = [socket.create_connection((HOSTS[family], port))]

    def accept(self, k):
        self.socks[k] = [self.listeners.pop(k).accept()[0]]

    def warm(self, k, first):
        """Some echoes, so that the connection is on RMBs if it will ever be."""
        sock = self._sock(k)
        for _ in range(40):
            if first:
                sock.sendall(b"x" * 50)
            got = 0
            while got < 50:
                select.select([sock], [], [], 5)
                got += len(sock.recv(50 - got))
            if not first:
                sock.sendall(b"x" * 50)
        # Nagle would make it a matter of time what has arrived.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)

    # Sending.

    def send(self, k, size, flags, seed):
        return self._sock(k).send(payload(seed, size), flags | socket.MSG_NOSIGNAL)

    def sendmsg(self, k, sizes, flags, seed):
        parts = [payload(seed + i, size) for i, size in enumerate(sizes)]
        return self._sock(k).sendmsg(parts, [], flags | socket.MSG_NOSIGNAL)

    def write(self, k, size, seed):
        return os.write(self._fd(k), payload(seed, size))

    def writev(self, k, sizes, seed):
        return os.writev(self._fd(k), [payload(seed + i, size) for i, size in enumerate(sizes)])

    def sendfile(self, k, at, size):
        return os.sendfile(self._fd(k), self.file, at, size)

    def splice_out(self, k, size, seed):
        reader, writer = os.pipe()
        try:
            os.write(writer, payload(seed, size))
            return os.splice(reader, self._fd(k), size, flags=os.SPLICE_F_NONBLOCK)
        finally:
            os.close(reader)
            os.close(writer)

    # Receiving: how many bytes, and a checksum of them.

    def recv(self, k, size, flags):
        data = self._sock(k).recv(size, flags)
        return [len(data), zlib.crc32(data)]

    def recvmsg(self, k, sizes, flags):
        parts = [bytearray(size) for size in sizes]
        got, _, flags, _ = self._sock(k).recvmsg_into(parts, 0, flags)
        return [got, zlib.crc32(b"".join(parts)), flags]

    def discard(self, k, size):
        return self._sock(k).recv_into(bytearray(size), size, socket.MSG_TRUNC)

    def read(self, k, size):
        data = os.read(self._fd(k), size)
        return [len(data), zlib.crc32(data)]

    def readv(self, k, sizes):
        parts = [bytearray(size) for size in sizes]
        return [os.readv(self._fd(k), parts), zlib.crc32(b"".join(parts))]

    def splice_in(self, k, size):
        reader, writer = os.pipe()
        try:
            got = os.splice(self._fd(k), writer, size, flags=os.SPLICE_F_NONBLOCK)
            return [got, zlib.crc32(os.read(reader, got) if got else b"")]
        finally:
            os.close(reader)
            os.close(writer)

    # Readiness: [connection, mask], and "edge" if only changes are told.

    def poll(self, masks):
        poll = select.poll()
        names = {}
        for k, mask in masks:
            poll.register(self._fd(k), mask)
            names[self._fd(k)] = k
        return sorted([names[fd], mask] for fd, mask in poll.poll(0))

    def select(self, *lists):
        found = select.select(*([self._sock(k) for k in ks] for ks in lists), 0)
        return [sorted(k for k in self.socks if self._sock(k) in part) for part in found]

    def epoll_add(self, e, k, mask):
        self.epolls[e].register(self._fd(k), mask)
        self.registered[e, self._fd(k)] = k, mask

    def epoll_mod(self, e, k, mask):
        self.epolls[e].modify(self._fd(k), mask)
        self.registered[e, self._fd(k)] = k, mask

    def epoll_del(self, e, k):
        self.epolls[e].unregister(self._fd(k))

    def epoll_wait(self, e, timeout):
        # Within 100 us of the last look at the kernel one may find only what is in rings.
        time.sleep(0.0002)
        found = []
        for fd, mask in self.epolls[e].poll(timeout):
            k, wanted = self.registered[e, fd]
            found.append([k, mask, "edge"] if wanted & ET else [k, mask])
        return sorted(found)

    # The rest.

    def shutdown(self, k, how):
        self._sock(k).shutdown(how)

    def close(self, k):
        self.socks[k].pop().close()
        if not self.socks[k]:
            del self.socks[k]

    def dup(self, k):
        self.socks[k].append(self._sock(k).dup())

    def linger(self, k):
        """Closing will reset."""
        self._sock(k).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def fionread(self, k):
        number = array.array("i", [0])
        fcntl.ioctl(self._fd(k), termios.FIONREAD, number)
        return number[0]

    def so_error(self, k):
        return self._sock(k).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def tcp_state(self, k):
        # FIN_WAIT1 and 2 are the same: acknowledgements take their time.
        state = self._sock(k).getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0]
        return 5 if state == 4 else state

    def getpeername(self, k):
        self._sock(k).getpeername()

    def option(self, k, level, name, value):
        self._sock(k).setsockopt(level, name, value)
        return self._sock(k).getsockopt(level, name)

    def blocking(self, k, on):
        sock = self._sock(k)
        sock.setblocking(False)
        if on:
            for name in socket.SO_RCVTIMEO, socket.SO_SNDTIMEO:
                sock.setsockopt(socket.SOL_SOCKET, name, PATIENCE)
            # Python's own waits for sockets with a time-out are not wanted.
            fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) & ~os.O_NONBLOCK)

    def forked(self, k):
        """A child uses the socket."""
        pid = os.fork()
        if pid == 0:
            os._exit(self.run("option", k, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1) != 1)
        return os.waitpid(pid, 0)[1]


class Peer:
    """The other process."""

    def __init__(self):
        env = os.environ | {"LD_PRELOAD": os.environ.get("LOCKSTEP_PEER_PRELOAD", "")}
        argv = [sys.executable, "-B", "-S", __file__, "serve"]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def begin(self, *call):
        print(json.dumps(call), file=self.process.stdin, flush=True)

    def end(self):
        return json.loads(self.process.stdout.readline())

    def run(self, *call):
        self.begin(*call)
        return self.end()


def serve():
    end = End()
    for line in sys.stdin:
        print(json.dumps(end.run(*json.loads(line))), flush=True)


class Chooser:
    """Draws the calls. What it knows of connections doesn't depend on results."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.descriptors = {}  # connection -> number of A, of B
        self.unread = {}       # (connection, side) -> bytes it has sent since the peer was told to read all

    def next(self):
        """(side, call, arguments...) or ("open", connection, family, listening side)."""
        draw = self.draw
        for k in range(CONNECTIONS):
            if not any(self.descriptors.get(k, ())):
                self.descriptors[k] = [1, 1]
                self.unread[k, 0] = self.unread[k, 1] = 0
                return "open", k, draw.choice((4, 4, 6)), draw.randrange(2)
        sides = [side for side in (0, 1) if any(numbers[side] for numbers in self.descriptors.values())]
        side = draw.choice(sides)
        live = [k for k, numbers in sorted(self.descriptors.items()) if numbers[side]]
        k = draw.choice(live)
        [kind] = draw.choices(("send", "receive", "poll", "epoll", "ask", "option", "end", "fork"),
                              (30, 30, 15, 25, 12, 4, 4, 0.7))
        if kind == "send" and self.unread[k, side] > MOST:
            self.unread[k, side] = 0
            if self.descriptors[k][1 - side]:
                return 1 - side, "recv", k, 1 << 20, 0
        return side, *getattr(self, f"_{kind}")(side, k, live)

    def _sizes(self):
        return [self.draw.choice((0, 1, 50, 3000)) for _ in range(self.draw.randrange(1, 5))]

    def _size(self):
        return self.draw.choice((0, 1, 1, 10, 100, 1000, 4000, 20000))

    def _send(self, side, k, _live):
        size, sizes, seed = self._size(), self._sizes(), self.draw.randrange(1 << 30)
        self.unread[k, side] += max(size, sum(sizes))
        return self.draw.choice((
            ("send", k, size, 0, seed), ("send", k, size, socket.MSG_DONTWAIT, seed), ("write", k, size, seed),
            ("sendmsg", k, sizes, 0, seed), ("writev", k, sizes, seed), ("sendfile", k, seed % 40000, min(size, PIECE)),
            ("splice_out", k, min(size or 1, PIECE), seed)))

    def _receive(self, _side, k, _live):
        size, sizes = self.draw.choice((self._size(), 1 << 17)), self._sizes()
        return self.draw.choice((
            ("recv", k, size, 0), ("recv", k, size, socket.MSG_PEEK), ("recv", k, size, socket.MSG_WAITALL),
            ("recv", k, size, socket.MSG_DONTWAIT), ("recv", k, 1 << 18, 0), ("read", k, size), ("discard", k, size or 1),
            ("recvmsg", k, sizes, 0), ("recvmsg", k, sizes, socket.MSG_PEEK), ("readv", k, sizes),
            ("splice_in", k, min(size or 1, 60_000))))

    def _poll(self, _side, _k, live):
        some = self.draw.sample(live, self.draw.randrange(1, len(live) + 1))
        if self.draw.randrange(3):
            masks = IN, OUT, IN | OUT, IN | RDHUP, 0, PRI | IN | OUT | RDHUP
            return "poll", [[k, self.draw.choice(masks)] for k in some]
        return "select", some, *(some if self.draw.randrange(2) else [] for _ in range(2))

    def _epoll(self, _side, k, _live):
        e = self.draw.randrange(EPOLLS)
        mask = self.draw.choice((IN, IN, OUT, IN | OUT, IN | RDHUP, IN | OUT | RDHUP | PRI, RDHUP, 0, PRI))
        mask |= self.draw.choice((0, 0, 0, ET, ONESHOT, ONESHOT | ET))
        [call] = self.draw.choices((("epoll_wait", e, 0), ("epoll_wait", e, 0.02), ("epoll_add", e, k, mask),
                                    ("epoll_mod", e, k, mask), ("epoll_del", e, k)), (5, 1, 2, 1, 1))
        return call

    def _ask(self, _side, k, _live):
        return self.draw.choice(("fionread", "fionread", "so_error", "tcp_state", "getpeername")), k

    def _option(self, _side, k, _live):
        return self.draw.choice((
            ("blocking", k, 1), ("blocking", k, 0), ("option", k, socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            ("option", k, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), ("option", k, socket.IPPROTO_TCP, socket.TCP_CORK, 0)))

    def _fork(self, _side, k, _live):
        return "forked", k

    def _end(self, side, k, _live):
        how = self.draw.choices(("shutdown", "dup", "linger", "close"), (3, 1, 1, 3))[0]
        if how == "shutdown":
            return how, k, self.draw.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_WR, socket.SHUT_RDWR))
        self.descriptors[k][side] += {"dup": 1, "close": -1}.get(how, 0)
        return how, k


def connect(ends, k, family, listening):
    """Makes a connection, and uses it."""
    port = ends[listening].run("listen", k, family)
    ends[1 - listening].run("connect", k, family, port)
    ends[listening].run("accept", k)
    ends[1].begin("warm", k, False)
    return [ends[0].run("warm", k, True), ends[1].end()]


def main():
    if sys.argv[1] == "serve":
        return serve()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    chooser = Chooser(int(sys.argv[1]))
    ends = End(), Peer()
    for number in range(int(sys.argv[2])):
        side, *call = chooser.next()
        if side == "open":
            print(number, side, *call, "->", json.dumps(connect(ends, *call)))
        else:
            print(number, "AB"[side], *call, "->", json.dumps(ends[side].run(*call)), flush=True)
    return None


main()
