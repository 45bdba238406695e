"""What checks use in both of their processes. Imports nothing heavy, opens nothing by itself."""

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time

EPOLLIN, EPOLLOUT, EPOLLET, EPOLLRDHUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLET, select.EPOLLRDHUP
EPOLLERR, EPOLLHUP, EPOLLONESHOT, EPOLLPRI = select.EPOLLERR, select.EPOLLHUP, select.EPOLLONESHOT, select.EPOLLPRI
EPOLLEXCLUSIVE = 1 << 28
SIOCOUTQ, FIONREAD, FIONBIO, SIOCATMARK = 0x5411, 0x541B, 0x5421, 0x8905
HOST = "127.0.0.1"


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Msghdr(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("namelen", ctypes.c_uint32), ("iov", ctypes.POINTER(Iovec)),
                ("iovlen", ctypes.c_size_t), ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t),
                ("flags", ctypes.c_int)]


class Mmsghdr(ctypes.Structure):
    _fields_ = [("header", Msghdr), ("length", ctypes.c_uint)]


libc = ctypes.CDLL(None, use_errno=True)  # finds preloaded functions first, as programs do
chance = random.Random(int(os.environ.get("CHECK_SEED", "1")))


class Skip(Exception):
    """Raised by a check that can't run here; the text says why."""


def listen(backlog=128, port=0, host=HOST, **options):
    return socket.create_server((host, port), backlog=backlog, **options)


def connect(address, timeout=None):
    sock = socket.socket()
    sock.connect(tuple(address))
    sock.settimeout(timeout)
    return sock


def bg(function, *args):
    """Runs a function in a thread; join() gives its value or raises its error."""
    return _Background(function, args)


class _Background(threading.Thread):
    def __init__(self, function, args):
        super().__init__(daemon=True)
        self._function, self._args, self._value, self._error = function, args, None, None
        self.start()

    def run(self):
        try:
            self._value = self._function(*self._args)
        except BaseException as error:
            self._error = error

    def join(self, seconds=15):
        super().join(seconds)
        assert not self.is_alive(), f"{self._function} still runs after {seconds} s"
        if self._error:
            raise self._error
        return self._value


def recv_exact(sock, size):
    """Exactly `size` bytes, whatever the mode of the socket."""
    parts, left = [], size
    while left:
        try:
            part = sock.recv(min(left, 1 << 20))
        except BlockingIOError:
            select.select([sock], [], [])
            continue
        assert part, f"end of stream, {left} of {size} bytes are missing"
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def recv_end(sock):
    """All bytes up to the end of the stream."""
    parts = []
    while True:
        try:
            part = sock.recv(1 << 18)
        except BlockingIOError:
            select.select([sock], [], [])
            continue
        if not part:
            return b"".join(parts)
        parts.append(part)


def vectors(*buffers):
    """A list of buffers, or of pairs (address, length), for readv(2) and its relatives."""
    array = (Iovec * len(buffers))()
    for entry, buffer in zip(array, buffers):
        if isinstance(buffer, tuple):
            entry.base, entry.length = buffer
        else:
            entry.base, entry.length = ctypes.cast(buffer, ctypes.c_void_p), len(buffer)
    return array


def send_all(sock, data):
    """Sends everything, whatever the mode of the socket."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view):]
        except BlockingIOError:
            select.select([], [sock], [])


def echo(sock, size):
    """Sends the next `size` bytes back."""
    send_all(sock, recv_exact(sock, size))


def echo_end(sock):
    """Sends everything back until the end of the stream, then closes."""
    while True:
        data = sock.recv(65536)
        if not data:
            break
        sock.sendall(data)
    sock.close()


def echo_server(listener, connections):
    """Accepts so many connections, one after another, and echoes each to its end."""
    for _ in range(connections):
        echo_end(listener.accept()[0])


def serve_epoll(listener, total):
    """Echoes on all connections through one epoll set until `total` of them have ended."""
    epoll = select.epoll()
    listener.setblocking(False)
    epoll.register(listener, EPOLLIN)
    open_now, ended = {}, 0
    while ended < total:
        for fd, _ in epoll.poll(10):
            if fd == listener.fileno():
                try:
                    while True:
                        sock = listener.accept()[0]
                        open_now[sock.fileno()] = sock
                        epoll.register(sock, EPOLLIN)
                except BlockingIOError:
                    continue
            data = open_now[fd].recv(65536) if fd in open_now else None
            if data:
                open_now[fd].sendall(data)
            elif data is not None:
                open_now.pop(fd).close()
                ended += 1
    assert not open_now
    return ended


def arrived(sock, size):
    """Waits until so many bytes can be read."""
    until(lambda: ioctl_int(sock, FIONREAD) == size, 3, lambda: f"{size} bytes there, not {ioctl_int(sock, FIONREAD)}")


def read_up_to_rmb(t, sock, name):
    """Reads bytes "T" that wait on TCP, until the peer, whose end has this name, writes to an RMB where it can.

    It sends an "R" for each byte read. Gives their number.
    """
    polled(sock)  # no read here waits, and what a blocking socket receives goes by RMB once something has
    for read in range(1, 400):
        assert recv_exact(sock, 1) == b"T"
        t.peer(f"{name}.sendall(b'R')")
        if read >= 5 and not t.both or t.both and t.peer(f"(carriers({name}) or ' ')[0] == 'rmb'"):
            return read
        time.sleep(0.01)
    raise AssertionError("the peer's direction has stayed on TCP")


def tcp_then_rmb(t, name="c"):
    """A connection, whose other end gets the name in the peer, with "T" to read that came by TCP and then "R" by an RMB.

    Gives it, and how many of 500 T were read; so many R have come.
    """
    t.peer("both_l = listen()")
    sock = connect(t.peer("both_l.getsockname()"))
    t.peer(f"{name} = both_l.accept()[0]\nboth_l.close()\n{name}.sendall(b'T' * 500)")
    sock.sendall(b"read some")
    t.peer(f"recv_exact({name}, 9)")
    return sock, read_up_to_rmb(t, sock, name)


def fails(number, function, *args, **keywords):
    """Asserts that a call fails with this error number (or one of these)."""
    numbers = number if isinstance(number, tuple) else (number,)
    try:
        value = function(*args, **keywords)
    except OSError as error:
        got = errno.errorcode.get(error.errno, error)
        assert error.errno in numbers, f"{got} instead of {[errno.errorcode[n] for n in numbers]}"
        return error.errno
    raise AssertionError(f"gave {value!r} instead of {[errno.errorcode[n] for n in numbers]}")


def ready(epoll, seconds=0.0):
    """Events of an epoll set, as a dict from number to mask, waiting at most so long for the first."""
    return dict(epoll.poll(seconds))


def no_event(epoll, seconds=0.25):
    events = epoll.poll(seconds)
    assert not events, f"unexpected events {[(fd, hex(mask)) for fd, mask in events]}"


def polled(fd, mask=select.POLLIN, seconds=0.0):
    """What poll() reports for one descriptor."""
    poll = select.poll()
    poll.register(fd, mask)
    events = poll.poll(seconds * 1000)
    return events[0][1] if events else 0


def selected(fd, seconds=0.0):
    """(readable, writable, exceptional) by select()."""
    return tuple(bool(part) for part in select.select([fd], [fd], [fd], seconds))


def readable(fd, seconds=0.0):
    return bool(select.select([fd], [], [], seconds)[0])


def fill(sock, still=0.5):
    """Sends until there was no room for `still` seconds; gives the bytes sent. The socket must be non-blocking."""
    total, since, block = 0, time.monotonic(), bytes(65536)
    while time.monotonic() - since < still:
        try:
            total += sock.send(block)
            since = time.monotonic()
        except BlockingIOError:
            time.sleep(0.01)
    return total


def until(condition, seconds=5, what="the condition"):
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds} s: {what() if callable(what) else what}"
        time.sleep(0.01)


def ioctl_int(sock, request):
    return struct.unpack("i", fcntl.ioctl(sock, request, bytes(4)))[0]


def linger(sock, on, seconds):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, seconds))


def bpf_return(value):
    """A classic BPF program for SO_ATTACH_FILTER and the like that only returns a value, and the memory to be kept for it."""
    memory = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, value))  # BPF_RET | BPF_K
    return struct.pack("HxxxxxxP", 1, ctypes.addressof(memory)), memory


def timeval(seconds):
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))


def cpu():
    """CPU seconds of this process, all its threads included."""
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)


def open_fds():
    """Sorted numbers of the open descriptors (without the one used for looking)."""
    return sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}"))


def fd_targets():
    """What the open descriptors are: number -> target."""
    return {number: os.readlink(f"/proc/self/fd/{number}") for number in open_fds()
            if os.path.lexists(f"/proc/self/fd/{number}")}


def forked(function, *args):
    """Runs a function in a forked child; gives the child's id. The child ends with 0, or with 1 and a traceback."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*args)
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def reap(pid, seconds=15, status=0):
    """Waits for a child and checks its exit status."""
    end = time.monotonic() + seconds
    while True:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(code)
            assert status is None or code == status, f"child {pid} ended with {code}, not {status}"
            return code
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"child {pid} still ran after {seconds} s")
        time.sleep(0.005)


def node_documents():
    """The status documents of all nodes of this runtime directory, asked for on their own sockets."""
    documents = []
    for path in glob.glob(os.path.join(os.environ["XSMC_RUNTIME_DIR"], "node-*.sock")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as query:
            query.settimeout(5)
            try:
                query.connect(path)
                query.send(b"XSMCSTAT")
                parts = []
                while part := query.recv(1 << 20):
                    parts.append(part)
            except OSError:
                continue
            if parts:
                documents.append(json.loads(b"".join(parts)))
    return documents


def carriers(sock):
    """(tx, rx, reason) of this end as its node says, or None if no node knows it."""
    local, peer = sock.getsockname()[1], sock.getpeername()[1]
    for document in node_documents():
        if document["pid"] != os.getpid():
            continue
        for entry in document["connections"]:
            ports = [int(entry[side].rsplit(":", 1)[1]) for side in ("local", "peer")]
            if ports == [local, peer]:
                return entry["tx"]["carrier"], entry["rx"]["carrier"], entry.get("reason")
    return None


def warm_echo(sock):
    """The far side of a warm-up: echoes single bytes until an "e" comes."""
    while True:
        byte = sock.recv(1)
        assert byte in (b"w", b"e"), f"warm-up: got {byte!r}"
        sock.sendall(byte)
        if byte == b"e":
            return


def warm_exchange(sock, count):
    """The near side of a warm-up."""
    for turn in range(count):
        byte = b"e" if turn == count - 1 else b"w"
        sock.sendall(byte)
        got = sock.recv(1)
        assert got == byte, f"warm-up: got {got!r}"
