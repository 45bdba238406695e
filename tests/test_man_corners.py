"""Rarer promises of the manual pages: options, ioctls and ends that few programs use, whichever way the bytes go."""

import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import threading
import time

from harness.behave import check
from harness.calls import mixed
from harness.net import *

SOL, TCP, IP = socket.SOL_SOCKET, socket.IPPROTO_TCP, socket.IPPROTO_IP
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_LOCK_FILTER, SO_ATTACH_REUSEPORT_CBPF = 26, 27, 44, 51
SIOCGSTAMP, SIOCGSTAMPNS = 0x8906, 0x8907
IP_RECVERR, MSG_ERRQUEUE = 11, 0x2000
F_SETOWN_EX, F_GETOWN_EX, F_OWNER_TID, F_OWNER_PID, F_OWNER_PGRP, F_SETSIG = 15, 16, 0, 1, 2, 10


def _talks(t, sock, name="c"):
    t.start(f"echo({name}, 5000)")
    sock.sendall(b"x" * 5000)
    assert recv_exact(sock, 5000) == b"x" * 5000
    t.join()


@check()
def test_locked_filter_stays(t):
    """SO_LOCK_FILTER keeps a filter where it is; another can't take its place (socket(7))."""
    c = t.pair()
    whole, keep = bpf_return(0xffffffff)
    c.setsockopt(SOL, SO_ATTACH_FILTER, whole)
    _talks(t, c)
    assert c.getsockopt(SOL, SO_LOCK_FILTER) == 0
    c.setsockopt(SOL, SO_LOCK_FILTER, 1)
    assert c.getsockopt(SOL, SO_LOCK_FILTER) == 1
    fails(errno.EPERM, c.setsockopt, SOL, SO_DETACH_FILTER, 0)
    fails(errno.EPERM, c.setsockopt, SOL, SO_ATTACH_FILTER, whole)
    fails(errno.EPERM, c.setsockopt, SOL, SO_LOCK_FILTER, 0)
    _talks(t, c)
    del keep


@check()
def test_reuseport_filter_chooses_the_listener(t):
    """SO_ATTACH_REUSEPORT_CBPF picks the listener by its index; its connections are as any others (socket(7))."""
    one = socket.socket()
    one.setsockopt(SOL, socket.SO_REUSEPORT, 1)
    one.bind((HOST, 0))
    two = socket.socket()
    two.setsockopt(SOL, socket.SO_REUSEPORT, 1)
    second, keep = bpf_return(1)
    one.setsockopt(SOL, SO_ATTACH_REUSEPORT_CBPF, second)
    one.listen()
    two.bind(one.getsockname())
    two.listen()
    for _ in range(3):
        t.peer("c = connect(address)", address=one.getsockname())
        assert not readable(one) and readable(two, 2)
        with two.accept()[0] as sock:
            t.warm(sock, "c")
            _talks(t, sock)
    del keep


@check()
def test_time_of_last_packet(t):
    """SIOCGSTAMP gives no time on a stream, and leaves its bytes alone (socket(7))."""
    c = t.pair()
    t.peer("c.sendall(b'abc')")
    arrived(c, 3)
    for request in (SIOCGSTAMP, SIOCGSTAMPNS):
        fails(errno.ENOENT, fcntl.ioctl, c, request, bytes(16))
    assert c.recv(10) == b"abc"
    for request in (SIOCGSTAMP, SIOCGSTAMPNS):
        fails(errno.ENOENT, fcntl.ioctl, c, request, bytes(16))
    _talks(t, c)


@check()
def test_segment_size(t):
    """TCP_MAXSEG reads as the connection's, can be lowered in its limits, and changes no byte (tcp(7))."""
    c = t.pair()
    assert 500 < c.getsockopt(TCP, socket.TCP_MAXSEG) <= 65_535
    for size in (1, 87, 32_768, -1):
        fails(errno.EINVAL, c.setsockopt, TCP, socket.TCP_MAXSEG, size)
    c.setsockopt(TCP, socket.TCP_MAXSEG, 600)
    assert c.getsockopt(TCP, socket.TCP_MAXSEG) > 500
    _talks(t, c)


@check()
def test_error_queue_is_empty(t):
    """IP_RECVERR gives a connection no error queue but its own, which is empty: EAGAIN, also with bytes to read (ip(7))."""
    c = t.pair()
    c.setsockopt(IP, IP_RECVERR, 1)
    assert c.getsockopt(IP, IP_RECVERR) == 1
    t.peer("c.sendall(b'bytes')")
    arrived(c, 5)
    for _ in range(2):
        fails(errno.EAGAIN, c.recv, 100, MSG_ERRQUEUE)
        fails(errno.EAGAIN, c.recvmsg, 100, 100, MSG_ERRQUEUE)
    assert not polled(c) & select.POLLERR and c.recv(100) == b"bytes"
    _talks(t, c)


@check()
def test_signals_for_one_thread(t):
    """F_SETOWN_EX has SIGIO sent to one thread, and reads as set (fcntl(2))."""
    c = t.pair()
    number = signal.SIGRTMIN + 4
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    owner = lambda: struct.unpack("ii", fcntl.fcntl(c, F_GETOWN_EX, bytes(8)))
    for kind, value in ((F_OWNER_PID, os.getpid()), (F_OWNER_PGRP, os.getpgrp()), (F_OWNER_TID, threading.get_native_id())):
        fcntl.fcntl(c, F_SETOWN_EX, struct.pack("ii", kind, value))
        assert owner() == (kind, value)
    fails(errno.EINVAL, fcntl.fcntl, c, F_SETOWN_EX, struct.pack("ii", 7, 1))
    fails(errno.ESRCH, fcntl.fcntl, c, F_SETOWN_EX, struct.pack("ii", F_OWNER_TID, 0x3fffffff))
    assert owner() == (F_OWNER_TID, threading.get_native_id())
    heard, go = [], threading.Event()

    def other():
        fcntl.fcntl(c, F_SETOWN_EX, struct.pack("ii", F_OWNER_TID, threading.get_native_id()))
        fcntl.fcntl(c, F_SETSIG, number)
        fcntl.fcntl(c, fcntl.F_SETFL, fcntl.fcntl(c, fcntl.F_GETFL) | os.O_ASYNC)
        go.set()
        while (info := signal.sigtimedwait([number], 3)) and not info.si_band & select.POLLIN:
            pass
        heard.append(bool(info))

    thread = bg(other)
    assert go.wait(3)
    t.peer("c.sendall(b'x')")
    thread.join()
    assert heard == [True] and not signal.sigtimedwait([number], 0)
    assert c.recv(1) == b"x"
    _talks(t, c)


@check()
def test_more_entries_than_descriptors(t):
    """poll refuses more entries than RLIMIT_NOFILE, ppoll too; as many as that are fine (poll(2))."""
    c = t.pair()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit))
    entry = struct.pack("ihh", c.fileno(), select.POLLOUT, 0)
    entries = ctypes.create_string_buffer(entry * 101)
    for name, rest in (("poll", (0,)), ("ppoll", (None, None))):
        call = getattr(libc, name)
        ctypes.set_errno(0)
        assert call(entries, ctypes.c_ulong(101), *rest) == -1 and ctypes.get_errno() == errno.EINVAL, name
        assert call(entries, ctypes.c_ulong(100), *rest) == 100, name


@check(seconds=30)
def test_lingering_close_of_full_stream(t):
    """close with SO_LINGER waits for its time while the peer's host does not have all that was sent; the peer gets it, and the
    end (socket(7))."""
    c = t.pair()
    c.setblocking(False)
    sent = fill(c)
    c.setblocking(True)
    linger(c, 1, 1)
    began = time.monotonic()
    c.close()
    took = time.monotonic() - began
    assert took < 3 and (took > 0.8 or t.both), took  # the peer's host has what is in a ring
    assert t.peer("len(recv_end(c))") == sent


@check()
def test_urgent_byte_among_carriers(t):
    """The mark keeps its place where bytes before it have come by TCP and by a ring, and is not read over (tcp(7))."""
    c, read = tcp_then_rmb(t)
    t.peer("c.sendall(b'R' * 100)\nc.send(b'end!', socket.MSG_OOB)\nc.sendall(b'behind')")
    before = b"T" * (500 - read) + b"R" * (read + 100) + b"end"
    arrived(c, len(before))
    until(lambda: selected(c)[2], 3, "an exceptional condition")
    assert c.recv(1, socket.MSG_OOB | socket.MSG_PEEK) == b"!"
    got = b""
    while not ioctl_int(c, SIOCATMARK):
        got += c.recv(1000)
    assert got == before, (len(got), len(before))
    assert c.recv(1, socket.MSG_OOB) == b"!"
    assert recv_exact(c, 6) == b"behind"
    _talks(t, c)


@check()
def test_owner_of_descriptor_in_child(t):
    """close in one process doesn't end the connection that another holds; SHUT_WR by either is for both (close(2), fork(2))."""
    c = t.pair()
    start, go = os.pipe()

    def child():
        os.read(start, 1)
        c.sendall(b"by the child")
        c.shutdown(socket.SHUT_WR)
        assert recv_exact(c, 3) == b"yes"

    pid = forked(child)
    c.close()
    os.write(go, b"1")
    assert t.peer("recv_end(c)") == b"by the child"
    t.peer("c.sendall(b'yes')")
    reap(pid)


@check()
def test_bytes_for_an_end_that_is_shut_down(t):
    """RFC 1122, 4.2.2.13: an end shut down both ways answers more bytes with a reset; what it had got before can be read."""
    for steps in ((socket.SHUT_RDWR,), (socket.SHUT_RD, socket.SHUT_WR), (socket.SHUT_WR, socket.SHUT_RD)):
        c = t.pair()
        t.peer("c.sendall(b'before')")
        arrived(c, 6)
        for how in steps:
            c.shutdown(how)
        assert t.peer("c.send(b'more')") == 4
        assert until(lambda: polled(c, 0) == select.POLLERR | select.POLLHUP, 1), steps
        assert c.recv(100) == b"before"
        fails(errno.ECONNRESET, c.recv, 100)
        assert t.peer("fails(errno.EPIPE, c.send, b'more')") == errno.EPIPE
        c.close()
        t.peer("c.close()")


@check()
def test_receiving_nothing_waits_once(t):
    """recv of no bytes on a blocking socket waits, and then gives 0 even if the time is over; recv of some says EAGAIN."""
    c = t.pair()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    began = time.monotonic()
    assert c.recvmsg_into([bytearray(0)])[0] == 0
    assert time.monotonic() - began > 0.04
    fails(errno.EAGAIN, c.recv, 1)
    c.setblocking(False)
    fails(errno.EAGAIN, c.recvmsg_into, [bytearray(0)])


@check()
def test_reset_behind_bytes_of_both_carriers(t):
    """Bytes that came before a reset are read at once, whichever way they came, and the error is told after them, once."""
    for look in (lambda c: None, lambda c: c.recv(1000, socket.MSG_PEEK), lambda c: c.recv(0, socket.MSG_PEEK)):
        c, whole = mixed(t)
        t.peer("linger(c, 1, 0); c.close()")
        assert look(c) in (None, whole, b"")
        assert until(lambda: polled(c, 0) == select.POLLERR | select.POLLHUP, 1)
        assert c.recv(1000) == whole
        assert polled(c, 0) == select.POLLERR | select.POLLHUP
        fails(errno.ECONNRESET, c.recv, 1)
        assert c.recv(1) == b""
        c.close()


@check()
def test_splice_tells_of_a_reset(t):
    """splice to a connection that was reset says so, once, after what had come before was read."""
    c, whole = mixed(t)
    t.peer("linger(c, 1, 0); c.close()")
    assert until(lambda: polled(c, 0) == select.POLLERR | select.POLLHUP, 1)
    assert c.recv(1000, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == whole
    reader, writer = os.pipe()
    os.write(writer, b"bytes")
    fails(errno.ECONNRESET, os.splice, reader, c.fileno(), 5)
    fails(errno.EPIPE, os.splice, reader, c.fileno(), 5)


@check()
def test_waitall_leaves_the_reset_to_the_next_call(t):
    """A receiver that waits for more than comes gets what came before a reset; poll and the next call tell of that."""
    c = t.pair()
    waiting = bg(c.recv, 1000, socket.MSG_WAITALL)
    t.peer("c.sendall(b'bytes')")
    time.sleep(0.1)
    t.peer("linger(c, 1, 0); c.close()")
    assert waiting.join(5) == b"bytes"
    assert polled(c, 0) == select.POLLERR | select.POLLHUP
    epoll = select.epoll()
    epoll.register(c, 0)
    assert until(lambda: ready(epoll).get(c.fileno()), 1) == select.EPOLLERR | select.EPOLLHUP
    fails(errno.ECONNRESET, c.recv, 1)
