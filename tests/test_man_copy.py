"""What the manual pages of sendfile and splice say, on connected sockets whose bytes may be in a ring."""

import ctypes
import fcntl
import os
import signal
import socket

from harness.behave import check
from harness.net import *

SPLICE_F_NONBLOCK = 2


@check(differs="kinds of descriptors are not checked")
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


@check(differs="bytes taken from a pipe for a socket that has ended are lost")
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


@check(differs="bytes taken for a pipe that breaks are lost")
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


@check(differs="SPLICE_F_NONBLOCK is taken for the socket, too")
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
