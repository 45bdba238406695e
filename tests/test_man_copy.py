"""What the manual pages of sendfile and splice say, on connected sockets whose bytes may be in a ring."""

import ctypes
import fcntl
import os
import select
import signal
import socket

from harness.behave import check
from harness.calls import *

SPLICE_F_NONBLOCK = 2


@check()
def test_sendfile_arguments(t):
    """Input that can't be seeked or read, wrong offsets, the end, an output that appends or is shut down: sendfile(2)."""
    c = t.pair()
    fd = c.fileno()
    file = os.memfd_create("data")
    os.write(file, b"0123456789")
    reader, writer = os.pipe()
    os.write(writer, b"pipe")
    path = f"/proc/self/fd/{file}"
    only_write = os.open(path, os.O_WRONLY)
    other, another = socket.socketpair()
    another.send(b"sock" * 100)

    def call(source, offset=None, count=4):
        at = None if offset is None else ctypes.c_int64(offset)
        value = said("sendfile", fd, source, None if at is None else ctypes.byref(at), SIZE(count))
        return value if at is None else (value, at.value)
    seen = [("pipe", call(reader), "EINVAL"), ("pipe with an offset", call(reader, 0), ("ESPIPE", 0)),
            ("socket", call(other.fileno()), "EINVAL"), ("itself", call(fd), "EINVAL"), ("closed", call(9999), "EBADF"),
            ("write-only", call(only_write), "EBADF"), ("negative offset", call(file, -1), ("EINVAL", -1)),
            ("none", call(file, 2, 0), (0, 2)), ("part", call(file, 2, 3), (3, 5)), ("rest", call(file, 5, 100), (5, 10)),
            ("end", call(file, 10), (0, 10)), ("beyond", call(file, 100), (0, 100)),
            ("position", (os.lseek(file, 0, os.SEEK_CUR), call(file)), (10, 0))]
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_APPEND)
    seen += [("O_APPEND", call(file, 0), ("EINVAL", 0))]
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    hits = []
    signal.signal(signal.SIGPIPE, lambda *_: hits.append(1))
    c.shutdown(socket.SHUT_WR)
    seen += [("after SHUT_WR", (call(file, 0), len(hits)), (("EPIPE", 0), 1)),
             ("left in the pipe", ioctl_int(reader, FIONREAD), 4),
             ("received", t.peer("recv_end(c)"), b"23456789")]
    differences(seen)


def spliced(source, target, count=5, flags=0, at=None, to=None):
    at, to = (None if one is None else ctypes.byref(one) for one in (at, to))
    return said("splice", source, at, target, to, SIZE(count), flags)


@check()
def test_splice_ends(t):
    """splice of nothing, of less than there is, at the end of either side, and EPIPE with SIGPIPE after SHUT_WR: splice(2)."""
    c, d = t.pair("c"), t.pair("d")
    reader, writer = os.pipe()
    t.peer("c.sendall(b'input')")
    arrived(c, 5)
    seen = [("none", spliced(c.fileno(), writer, 0), 0), ("all", spliced(c.fileno(), writer, 100), 5),
            ("part", spliced(reader, d.fileno(), 2), 2), ("rest", os.read(reader, 10), b"put")]
    t.peer("c.close()")
    until(lambda: polled(c), 3, "the end")
    seen += [("end of the stream", spliced(c.fileno(), writer), 0)]
    os.write(writer, b"unsent")
    d.shutdown(socket.SHUT_WR)
    hits = []
    signal.signal(signal.SIGPIPE, lambda *_: hits.append(1))
    seen += [("after SHUT_WR", (spliced(reader, d.fileno()), len(hits)), ("EPIPE", 1))]
    os.close(writer)
    e = t.pair("e")
    seen += [("all that is there", (spliced(reader, e.fileno(), 100), t.peer("e.recv(6)")), (6, b"unsent")),
             ("end of the pipe", spliced(reader, e.fileno()), 0), ("received", t.peer("recv_end(d)"), b"in")]
    differences(seen)


@check()
def test_splice_into_broken_pipe(t):
    """A splice into a pipe without readers says EPIPE, with SIGPIPE, and takes nothing from the stream: splice(2)."""
    hits = []
    signal.signal(signal.SIGPIPE, lambda *_: hits.append(1))
    first, whole = mixed(t)
    second = t.pair("d")
    t.peer("d.sendall(b'kept')")
    arrived(second, 4)
    reader, writer = os.pipe()
    os.close(reader)
    seen = []
    for what, sock, want in (("RMB", second, b"kept"), ("TCP", first, whole)):
        del hits[:]
        seen += [(f"from {what}", (spliced(sock.fileno(), writer, 100), len(hits)), ("EPIPE", 1)),
                 (f"left, {what}", ioctl_int(sock, FIONREAD), len(want))]
    differences(seen)
    assert recv_exact(first, len(whole)) == whole


@check()
def test_splice_nonblock_is_for_the_pipe(t):
    """SPLICE_F_NONBLOCK leaves the socket's side blocking, unless that has O_NONBLOCK: splice(2)."""
    c = t.pair()
    reader, writer = os.pipe()
    t.start("time.sleep(0.2)\nc.sendall(b'late')")
    assert said("splice", c.fileno(), None, writer, None, SIZE(100), SPLICE_F_NONBLOCK) == 4
    t.join()
    assert os.read(reader, 10) == b"late"
    c.setblocking(False)
    assert said("splice", c.fileno(), None, writer, None, SIZE(100), 0) == "EAGAIN"


def files():
    """Descriptors of all kinds: (what, number)."""
    reader, writer = os.pipe()
    file = os.memfd_create("data")
    os.write(file, b"0123456789")
    one, other = socket.socketpair()
    fifo = f"fifo-{os.getpid()}"
    os.mkfifo(fifo)
    both = os.open(fifo, os.O_RDWR)
    os.unlink(fifo)
    other.detach()
    return {"reader": reader, "writer": writer, "file": file, "Unix socket": one.detach(), "FIFO": both, "closed": 9999,
            "no descriptor": -1, "path": os.open(f"/proc/self/fd/{reader}", os.O_PATH), "folder": os.open("/", os.O_RDONLY),
            "listener": listen().detach(), "UDP": socket.socket(type=socket.SOCK_DGRAM).detach(),
            "eventfd": os.eventfd(0)}


@check()
def test_splice_arguments(t):
    """Which descriptors, offsets and flags splice takes, and what it says of others, with bytes at both ends: splice(2)."""
    c, d = t.pair("c"), t.pair("d")
    t.peer("c.sendall(b'in')")
    arrived(c, 2)
    kinds = files()
    os.write(kinds["writer"], b"out")
    os.write(kinds["FIFO"], b"FIFO")
    reader, writer, fd = kinds["reader"], kinds["writer"], c.fileno()
    zero = ctypes.c_int64(0)
    seen = []
    for what in ("file", "Unix socket", "folder", "listener", "UDP", "eventfd"):
        seen += [(f"from {what}", spliced(kinds[what], fd), "EINVAL")]
        want = "EBADF" if what == "folder" else "EINVAL"
        seen += [(f"to {what}", spliced(fd, kinds[what]), want)]
    for what in ("closed", "no descriptor", "path"):
        seen += [(f"from {what}", spliced(kinds[what], fd), "EBADF"), (f"to {what}", spliced(fd, kinds[what]), "EBADF"),
                 (f"none, from {what}", spliced(kinds[what], fd, 0), 0)]
    seen += [("to a reader", spliced(fd, reader), "EBADF"), ("from a writer", spliced(writer, fd), "EBADF"),
             ("socket to socket", spliced(fd, d.fileno()), "EINVAL"), ("to itself", spliced(fd, fd), "EINVAL"),
             ("offset of the pipe, in", spliced(reader, fd, at=zero), "ESPIPE"),
             ("offset of the socket, out", spliced(reader, fd, to=zero), "EINVAL"),
             ("offset of the pipe, out", spliced(fd, writer, to=zero), "ESPIPE"),
             ("offset of the socket, in", spliced(fd, writer, at=zero), "EINVAL"),
             ("bad offset of the socket, in", said("splice", fd, ctypes.c_void_p(BAD), writer, None, SIZE(5), 0), "EFAULT"),
             ("bad offset of the socket, out", said("splice", reader, None, fd, ctypes.c_void_p(BAD), SIZE(5), 0), "EFAULT"),
             ("bad offset of the pipe", said("splice", fd, None, writer, ctypes.c_void_p(BAD), SIZE(5), 0), "ESPIPE"),
             ("unknown flag, in", spliced(fd, writer, flags=16), "EINVAL"),
             ("unknown flag, out", spliced(reader, fd, flags=16), "EINVAL"),
             ("unknown flag, none", spliced(reader, fd, 0, flags=16), 0),
             ("enormous, out", spliced(reader, fd, (1 << 64) - 1), "EINVAL"),
             ("enormous, in", spliced(fd, writer, (1 << 64) - 1), "EINVAL")]
    flags = fcntl.fcntl(d, fcntl.F_GETFL)
    fcntl.fcntl(d, fcntl.F_SETFL, flags | os.O_APPEND)
    seen += [("O_APPEND", spliced(reader, d.fileno()), "EINVAL")]
    fcntl.fcntl(d, fcntl.F_SETFL, flags)
    seen += [("all flags, out", spliced(reader, d.fileno(), flags=15), 3), ("from a FIFO", spliced(kinds["FIFO"], d.fileno()), 4),
             ("received", t.peer("recv_exact(d, 7)"), b"outFIFO"), ("left", ioctl_int(c, FIONREAD), 2),
             ("in", spliced(fd, writer), 2), ("taken", os.read(reader, 10), b"in")]
    differences(seen)


@check()
def test_sendfile_checks_more(t):
    """An offset that can't be read is EFAULT and sends nothing; kinds of files, and counts of nothing: sendfile(2)."""
    c = t.pair()
    fd = c.fileno()
    kinds = files()
    bad = ctypes.c_void_p(BAD)
    file = kinds["file"]
    seen = [("bad offset", said("sendfile", fd, file, bad, SIZE(4)), "EFAULT"),
            ("bad offset, none", said("sendfile", fd, file, bad, SIZE(0)), "EFAULT"),
            ("bad offset, closed", said("sendfile", fd, 9999, bad, SIZE(4)), "EFAULT")]
    for what, want in (("folder", "EINVAL"), ("FIFO", "EINVAL"), ("eventfd", "EINVAL"), ("listener", "EINVAL"), ("writer", "EBADF"),
                       ("path", "EBADF"), ("no descriptor", "EBADF")):
        seen += [(what, said("sendfile", fd, kinds[what], None, SIZE(4)), want)]
    for what, want in (("closed", "EBADF"), ("writer", "EBADF"), ("FIFO", "EINVAL")):
        seen += [(f"{what}, none", said("sendfile", fd, kinds[what], None, SIZE(0)), want)]
    c.shutdown(socket.SHUT_WR)
    seen += [("none after SHUT_WR", said("sendfile", fd, file, ctypes.byref(ctypes.c_int64(0)), SIZE(0)), 0),
             ("received", t.peer("recv_end(c)"), b"")]
    differences(seen)


@check()
def test_splice_moves_what_there_is(t):
    """A splice takes all that is there and fits, not only a page: epoll(7) has a short count mean that there is no more."""
    c = t.pair()
    data = chance.randbytes(20_000)
    reader, writer = os.pipe()
    t.peer("c.sendall(data)", data=data)
    arrived(c, len(data))
    assert spliced(c.fileno(), writer, 1 << 20) == len(data)
    assert spliced(reader, c.fileno(), 1 << 20) == len(data)
    assert t.peer("recv_exact(c, 20000)") == data


@check()
def test_splice_takes_bytes_of_both_carriers(t):
    """The bytes of a stream come in order, whichever way they came, and none twice: splice(2)."""
    c, whole = mixed(t)
    reader, writer = os.pipe()
    got = b""
    while len(got) < len(whole):
        count = spliced(c.fileno(), writer, chance.randrange(1, 200))
        assert count > 0, count
        got += os.read(reader, count)
    assert got == whole
    t.peer("c.close()")
    assert spliced(c.fileno(), writer) == 0


@check()
def test_copies_go_on_without_reader(t):
    """What TCP's buffers would take, sendfile and splice send though nobody reads it yet: more than an RMB holds."""
    size = 600_000
    data = chance.randbytes(size)
    file = os.memfd_create("data")
    os.write(file, data)
    c, d = t.pair("c"), t.pair("d")
    done = 0
    while done < size:
        done += os.sendfile(c.fileno(), file, done, size - done)
    assert t.peer("recv_exact(c, size)", size=size) == data
    reader, writer = os.pipe()
    for at in range(0, size, 50_000):
        os.write(writer, data[at:at + 50_000])
        left = 50_000
        while left:
            left -= os.splice(reader, d.fileno(), left)
    assert t.peer("recv_exact(d, size)", size=size) == data


@check()
def test_splice_loses_nothing_to_a_full_stream(t):
    """A splice to a non-blocking socket that is full leaves the pipe's bytes where they are: splice(2)."""
    c = t.pair()
    c.setblocking(False)
    sent = fill(c, 0.2)
    reader, writer = os.pipe()
    data = chance.randbytes(30_000)
    os.write(writer, data)
    left = len(data)
    for _ in range(5):
        value = spliced(reader, c.fileno(), 1 << 20)
        assert value == "EAGAIN" or value > 0
        left -= 0 if value == "EAGAIN" else value
        assert ioctl_int(reader, FIONREAD) == left
    t.start("whole = recv_exact(c, size)\nwhole[-30000:]", size=sent + len(data))
    while left:
        select.select([], [c], [])
        value = spliced(reader, c.fileno(), 1 << 20)
        left -= 0 if value == "EAGAIN" else value
    assert t.join() == data
