"""I: interposition coverage. Other calls that move bytes or ask about descriptors."""

import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import termios
import time

import pytest

from harness.behave import check, loaded, modes
from harness.net import *


def strings(parts):
    return [ctypes.create_string_buffer(part, len(part)) if part else (ctypes.c_char * 0)() for part in parts]


def result(value):
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return value


for _name in ("readv", "writev", "sendmsg", "recvmsg", "recv", "send", "sendfile64", "splice", "preadv2", "pwritev2"):
    getattr(libc, _name).restype = ctypes.c_ssize_t


@check()
def test_I1_64_bit_variants(t):
    """fcntl64 and sendfile64 act like the plain ones."""
    c = t.pair()
    flags = libc.fcntl64(c.fileno(), fcntl.F_GETFL)
    assert libc.fcntl64(c.fileno(), fcntl.F_SETFL, flags | os.O_NONBLOCK) == 0
    fails(errno.EAGAIN, os.read, c.fileno(), 1)
    assert libc.fcntl64(c.fileno(), fcntl.F_SETFL, flags) == 0
    copy = libc.fcntl64(c.fileno(), fcntl.F_DUPFD, 30)
    assert copy >= 30
    os.write(copy, b"copy")
    assert t.peer("recv_exact(c, 4)") == b"copy"
    os.close(copy)
    data = chance.randbytes(200_000)
    file = os.memfd_create("data")
    os.write(file, data)
    t.start("recv_exact(c, 200000)")
    offset, sent = ctypes.c_int64(0), 0
    while sent < len(data):
        sent += result(libc.sendfile64(c.fileno(), file, ctypes.byref(offset), ctypes.c_size_t(len(data) - sent)))
    assert offset.value == len(data)
    assert t.join() == data


@check()
def test_I2_vectors(t):
    """Up to 1024 vectors, empty ones included; 1025 are refused."""
    c = t.pair()
    for call in ("writev", "sendmsg"):
        parts = [chance.randbytes(chance.randrange(0, 300)) if number % 3 else b"" for number in range(1024)]
        whole = b"".join(parts)
        buffers = strings(parts)
        array = vectors(*buffers)
        t.start("recv_exact(c, size)", size=len(whole))
        if call == "writev":
            assert result(libc.writev(c.fileno(), array, 1024)) == len(whole)
        else:
            header = Msghdr(iov=array, iovlen=1024)
            assert result(libc.sendmsg(c.fileno(), ctypes.byref(header), 0)) == len(whole)
        assert t.join() == whole
    for call in ("readv", "recvmsg"):
        sizes = [chance.randrange(0, 60) for _ in range(1000)]
        data = chance.randbytes(sum(sizes))
        t.peer("c.sendall(data)", data=data)
        until(lambda: ioctl_int(c, FIONREAD) == len(data), 3, "all bytes there")
        buffers = strings([bytes(size) for size in sizes])
        array = vectors(*buffers)
        header = Msghdr(iov=array, iovlen=1000)
        got = libc.readv(c.fileno(), array, 1000) if call == "readv" else libc.recvmsg(c.fileno(), ctypes.byref(header), 0)
        assert result(got) == len(data)
        assert b"".join(buffer.raw if len(buffer) else b"" for buffer in buffers) == data
    many = vectors(*strings([b"x"] * 1025))
    for function in (libc.readv, libc.writev):
        assert function(c.fileno(), many, 1025) == -1 and ctypes.get_errno() == errno.EINVAL
    header = Msghdr(iov=many, iovlen=1025)
    for function in (libc.sendmsg, libc.recvmsg):
        assert function(c.fileno(), ctypes.byref(header), 0) == -1 and ctypes.get_errno() == errno.EMSGSIZE


@check()
def test_I3_many_messages(t):
    """sendmmsg and recvmmsg on a stream."""
    c = t.pair()
    for round_number in range(60):
        parts = [chance.randbytes(chance.randrange(1, 200)) for _ in range(64)]
        whole = b"".join(parts)
        array = (Mmsghdr * 64)()
        arrays = [vectors(*strings([part])) for part in parts]
        for entry, one in zip(array, arrays):
            entry.header.iov, entry.header.iovlen = one, 1
        t.start("recv_exact(c, size)", size=len(whole))
        assert result(libc.sendmmsg(c.fileno(), array, 64, 0)) == 64
        assert [entry.length for entry in array] == [len(part) for part in parts]
        assert t.join() == whole
        t.peer("c.sendall(data)", data=whole)
        until(lambda: ioctl_int(c, FIONREAD) == len(whole), 3, "all bytes there")
        got = b""
        while len(got) < len(whole):
            buffers = strings([bytes(150)] * 64)
            arrays = [vectors(buffer) for buffer in buffers]
            for entry, one in zip(array, arrays):
                entry.header.iov, entry.header.iovlen, entry.length = one, 1, 0
            count = result(libc.recvmmsg(c.fileno(), array, 64, 0x10000, None))
            assert count >= 1
            got += b"".join(buffer.raw[:entry.length] for buffer, entry in zip(buffers[:count], array))
        assert got == whole, round_number
    assert libc.recvmmsg(c.fileno(), array, 64, socket.MSG_DONTWAIT, None) == -1 and ctypes.get_errno() == errno.EAGAIN
    t.peer("c.close()")
    until(lambda: polled(c), 3, "the end")
    count = result(libc.recvmmsg(c.fileno(), array, 64, 0x10000, None))
    assert count >= 1 and array[0].length == 0


@check()
def test_I4_sendfile(t):
    """sendfile keeps its place in the stream and its return values."""
    c = t.pair()
    data = chance.randbytes(5_000_000)
    file = os.memfd_create("data")
    os.write(file, data)
    t.start("digest = hashlib.sha256(recv_end(c)).hexdigest()\ndigest")
    whole = hashlib.sha256()

    def both(part):
        c.sendall(part)
        whole.update(part)
    both(b"head")
    at = 0
    while at < 1_000_000:
        sent = os.sendfile(c.fileno(), file, at, 1_000_000 - at)
        whole.update(data[at:at + sent])
        at += sent
    both(b"between")
    os.lseek(file, 1_000_000, os.SEEK_SET)
    while at < 3_000_000:
        sent = os.sendfile(c.fileno(), file, None, 3_000_000 - at)
        whole.update(data[at:at + sent])
        at += sent
        assert os.lseek(file, 0, os.SEEK_CUR) == at
    both(b"again")
    c.setblocking(False)
    while at < len(data):
        try:
            sent = os.sendfile(c.fileno(), file, at, len(data))
        except BlockingIOError:
            select.select([], [c], [])
            continue
        whole.update(data[at:at + sent])
        at += sent
    assert os.sendfile(c.fileno(), file, len(data), 1000) == 0
    assert os.lseek(file, 0, os.SEEK_CUR) == 3_000_000
    c.setblocking(True)
    both(b"tail")
    c.close()
    assert t.join() == whole.hexdigest()


@check()
def test_I5_splice(t):
    """splice moves the stream between sockets and pipes."""
    c, d = t.pair("c"), t.pair("d")
    data = chance.randbytes(3 << 20)
    t.peer("thread = bg(lambda: (c.sendall(data), c.shutdown(socket.SHUT_WR)))\nreader = bg(recv_end, d)", data=data)
    pipe_out, pipe_in = os.pipe()
    moved = 0
    while True:
        count = os.splice(c.fileno(), pipe_in, 60_000)
        if not count:
            break
        moved += count
        while count:
            count -= os.splice(pipe_out, d.fileno(), count)
    assert moved == len(data)
    d.shutdown(socket.SHUT_WR)
    assert t.peer("thread.join()\nreader.join()") == data
    t.peer("d.sendall(b'end')")
    assert recv_exact(d, 3) == b"end"
    d.setblocking(False)
    fails(errno.EAGAIN, os.splice, d.fileno(), pipe_in, 100)


@check()
def test_I9_wrong_arguments(t):
    """Wrong arguments give the kernel's errors; a receive touches only the bytes it delivers."""
    c = t.pair()
    bad = ctypes.c_void_p(8)
    t.peer("c.sendall(b'0123456789')")
    until(lambda: ioctl_int(c, FIONREAD) == 10, 3, "ten bytes")
    for call in (lambda: libc.recv(c.fileno(), bad, 5, 0), lambda: libc.read(c.fileno(), bad, 5),
                 lambda: libc.send(c.fileno(), bad, 5, 0), lambda: libc.write(c.fileno(), bad, 5),
                 lambda: libc.readv(c.fileno(), bad, 1), lambda: libc.writev(c.fileno(), bad, 1),
                 lambda: libc.recvmsg(c.fileno(), bad, 0), lambda: libc.sendmsg(c.fileno(), bad, 0),
                 lambda: libc.readv(c.fileno(), (Iovec * 1)(Iovec(8, 5)), 1)):
        assert call() == -1 and ctypes.get_errno() == errno.EFAULT, ctypes.get_errno()
    assert c.recv(100) == b"0123456789"
    # A buffer whose tail is not mapped: fine as long as the data fit.
    area = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    t.peer("c.sendall(b'fits')")
    until(lambda: ioctl_int(c, FIONREAD) == 4, 3, "four bytes")
    assert libc.recv(c.fileno(), ctypes.c_void_p(start + mmap.PAGESIZE - 10), 10_000, 0) == 4
    assert area[mmap.PAGESIZE - 10:mmap.PAGESIZE - 6] == b"fits"
    # A receive touches nothing beyond what it delivers.
    buffer = ctypes.create_string_buffer(b"\xaa" * 64, 64)
    t.peer("c.sendall(b'few')")
    until(lambda: ioctl_int(c, FIONREAD) == 3, 3, "three bytes")
    assert libc.recv(c.fileno(), buffer, 64, 0) == 3 and buffer.raw[3:] == b"\xaa" * 61
    reader, _ = os.pipe()
    closed = 9999
    for number, want in ((closed, errno.EBADF), (reader, errno.ENOTSOCK), (-1, errno.EBADF)):
        for call in (lambda: libc.recv(number, buffer, 1, 0), lambda: libc.send(number, buffer, 1, 0),
                     lambda: libc.shutdown(number, 1), lambda: libc.accept(number, None, None),
                     lambda: libc.listen(number, 1), lambda: libc.connect(number, buffer, 16)):
            assert call() == -1 and ctypes.get_errno() == want
    assert libc.epoll_create(0) == -1 and ctypes.get_errno() == errno.EINVAL
    epoll = select.epoll()
    epoll.register(c, EPOLLIN)
    assert libc.epoll_wait(epoll.fileno(), buffer, 0, 0) == -1 and ctypes.get_errno() == errno.EINVAL
    assert libc.epoll_wait(epoll.fileno(), buffer, -1, 0) == -1 and ctypes.get_errno() == errno.EINVAL
    assert libc.epoll_wait(c.fileno(), buffer, 1, 0) == -1 and ctypes.get_errno() == errno.EINVAL
    assert libc.epoll_ctl(c.fileno(), 1, reader, buffer) == -1 and ctypes.get_errno() == errno.EINVAL
    fails(errno.EINVAL, epoll.register, epoll.fileno(), EPOLLIN)
    fresh = socket.socket()
    number_of_sets = c.fileno() + 1
    file = os.memfd_create("file")
    fails(errno.EPERM, epoll.register, file, EPOLLIN)
    fails(errno.EBADF, epoll.register, closed, EPOLLIN)
    assert polled(closed) == select.POLLNVAL
    t.peer("c.sendall(b'z')")
    assert ready(epoll, 3)
    for call in (lambda: libc.poll(bad, 1, 0), lambda: libc.ppoll(bad, 1, None, None),
                 lambda: libc.select(number_of_sets, bad, None, None, None),
                 lambda: libc.select(number_of_sets, None, bad, None, None),
                 lambda: libc.pselect(number_of_sets, bad, None, None, None, None),
                 lambda: libc.epoll_wait(epoll.fileno(), bad, 1, 0), lambda: libc.epoll_ctl(epoll.fileno(), 3, c.fileno(), bad),
                 lambda: libc.connect(fresh.fileno(), bad, 16), lambda: libc.sendmmsg(c.fileno(), bad, 1, 0),
                 lambda: libc.recvmmsg(c.fileno(), bad, 1, 0, None), lambda: libc.getpeername(c.fileno(), bad, bad),
                 lambda: libc.setsockopt(c.fileno(), 1, 9, bad, 4), lambda: libc.ioctl(c.fileno(), FIONREAD, bad)):
        value = call()
        assert value == -1 and ctypes.get_errno() == errno.EFAULT, (value, ctypes.get_errno())
    assert c.recv(1) == b"z"
    # Still everything in order.
    c.sendall(b"fine")
    t.peer("echo(c, 4)")
    assert recv_exact(c, 4) == b"fine"


@check()
def test_I10_file_calls(t):
    """File calls on sockets answer as the kernel does; preadv2, pwritev2, epoll_pwait2 work."""
    c = t.pair()
    number = c.fileno()
    fails(errno.ESPIPE, os.lseek, number, 0, os.SEEK_SET)
    fails(errno.ESPIPE, os.pread, number, 1, 0)
    fails(errno.ESPIPE, os.pwrite, number, b"x", 0)
    fails(errno.EINVAL, os.fsync, number)
    fails(errno.EINVAL, os.ftruncate, number, 0)
    fails(errno.ENXIO, os.open, f"/dev/fd/{number}", os.O_RDWR)
    assert libc.isatty(number) == 0 and ctypes.get_errno() == errno.ENOTTY
    out = vectors(*strings([b"pwrite", b"v2"]))
    assert result(libc.pwritev2(number, out, 2, ctypes.c_int64(-1), 0)) == 8
    assert t.peer("recv_exact(c, 8)") == b"pwritev2"
    t.peer("c.sendall(b'preadv2')")
    until(lambda: ioctl_int(c, FIONREAD) == 7, 3, "seven bytes")
    buffers = strings([bytes(3), bytes(10)])
    assert result(libc.preadv2(number, vectors(*buffers), 2, ctypes.c_int64(-1), 0)) == 7
    assert buffers[0].raw + buffers[1].raw[:4] == b"preadv2"
    fcntl.ioctl(c, FIONBIO, struct.pack("i", 1))
    assert libc.preadv2(number, vectors(*buffers), 2, ctypes.c_int64(-1), 0) == -1 and ctypes.get_errno() == errno.EAGAIN
    fcntl.ioctl(c, FIONBIO, struct.pack("i", 0))
    fcntl.ioctl(c, termios.FIONCLEX)
    assert not fcntl.fcntl(c, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    fcntl.ioctl(c, termios.FIOCLEX)
    assert fcntl.fcntl(c, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    if not hasattr(libc, "epoll_pwait2"):
        return
    epoll = select.epoll()
    event = struct.pack("=IQ", EPOLLIN, 0x1122334455667788)
    assert libc.epoll_ctl(epoll.fileno(), 1, number, event) == 0
    events = ctypes.create_string_buffer(12 * 4)
    wait = struct.pack("qq", 0, 200_000_000)
    began = time.monotonic()
    assert libc.epoll_pwait2(epoll.fileno(), events, 4, wait, None) == 0
    assert 0.19 <= time.monotonic() - began < 1
    t.peer("c.sendall(b'x')")
    assert libc.epoll_pwait2(epoll.fileno(), events, 4, struct.pack("qq", 3, 0), None) == 1
    assert struct.unpack("=IQ", events.raw[:12]) == (EPOLLIN, 0x1122334455667788)


def _ends(world, argv, mode, warm=True):
    """Runs a program as server and as client, the first end loaded in mode "local", the second in mode "peer"."""
    with world.watch(0.02) as watch:
        if "uring" in argv.name and world.start([argv, "try"]).child.wait(10) == 77:
            pytest.skip(world.processes[-1].out.strip())
        server = world.start([argv, "server"], loaded(mode)[0])
        client = world.start([argv, "client", server.wait_line("port ")], loaded(mode)[1])
        world.finish(client, server)
    assert "ok" in server.out and "ok" in client.out, f"{server.describe()}\n{client.describe()}"
    if mode == "both" and warm:
        assert watch.most_on_rmb, f"the warm-up brought no RMBs: {watch}"


@modes()
def test_I6_stdio(make_world, program, mode):
    """FILE streams made with fdopen carry the stream, also after it has been upgraded."""
    _ends(make_world("eager"), program("stdio"), mode)


@modes()
def test_I7_raw_calls(make_world, program, mode):
    """syscall(2), functions taken from libc.so.6 itself, and ordinary calls, mixed on one connection: one stream."""
    _ends(make_world("eager"), program("rawcalls"), mode)


@modes()
def test_I8_io_uring(make_world, program, mode):
    """A connection used through io_uring from its first byte on."""
    _ends(make_world("eager"), program("uring"), mode, False)


@pytest.mark.parametrize("name", ["uring_waits", "rawwaits", "rawpoll"])
@modes()
def test_I8_unseen_waits(make_world, program, mode, name):
    """A connection that is waited for by io_uring or by raw system calls, which see nothing of an RMB, while the bytes are
    moved by the C library's functions."""
    _ends(make_world("eager"), program(name), mode, False)
