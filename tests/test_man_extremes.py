"""Options of socket(7) and tcp(7): unusual values, and moments at which the library sets them itself."""

import socket
import struct
import threading
import time

from harness.behave import check
from harness.net import *

SOL, TCP = socket.SOL_SOCKET, socket.IPPROTO_TCP
SO_RCVTIMEO_NEW, SO_SNDTIMEO_NEW = 66, 67


def _send_until_full(sock):
    while True:
        try:
            sock.send(bytes(100_000))
        except BlockingIOError:
            return


@check()
def test_timeout_extremes(t):
    """A negative time-out reads as 0 but means that no call waits, a very long one that they do (socket(7) as Linux has it)."""
    for receive, send, layout in ((socket.SO_RCVTIMEO, socket.SO_SNDTIMEO, "ll"), (SO_RCVTIMEO_NEW, SO_SNDTIMEO_NEW, "qq")):
        c = t.pair()
        for seconds in (18_446_744_074, 1 << 55):  # that many ns are little more than a power of 2
            c.setsockopt(SOL, receive, struct.pack(layout, seconds, 0))
            c.setsockopt(SOL, send, struct.pack(layout, seconds, 0))
            t.start("time.sleep(0.6)\nc.sendall(b'late')")
            assert recv_exact(c, 4) == b"late"
            t.join()
        for option in (receive, send):
            c.setsockopt(SOL, option, struct.pack(layout, -1, 0))
            assert c.getsockopt(SOL, option, 16) == bytes(16)
        start = time.monotonic()
        fails(errno.EAGAIN, c.recv, 1)
        fails(errno.EAGAIN, c.recv, 1, socket.MSG_PEEK | socket.MSG_WAITALL)
        t.peer("c.sendall(b'abc')")
        arrived(c, 3)
        assert c.recv(10, socket.MSG_WAITALL) == b"abc"
        _send_until_full(c)
        assert time.monotonic() - start < 2
        c.setsockopt(SOL, receive, struct.pack(layout, 0, 0))
        t.start("time.sleep(0.2)\nc.sendall(b'late')")
        assert recv_exact(c, 4) == b"late"
        t.join()
        c.close()


@check()
def test_accepted_keeps_negative_timeout(t):
    """A negative SO_RCVTIMEO or SO_SNDTIMEO of the listener holds for the accepted connection (socket(7))."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        with listen() as listener:
            listener.setsockopt(SOL, option, struct.pack("ll", -5, 0))
            t.peer("c = connect(address)", address=listener.getsockname())
            assert readable(listener, 3)
            c = socket.socket(fileno=listener._accept()[0])
        for turn in range(200):
            t.peer("c.sendall(b'x')")
            assert readable(c, 3) and c.recv(1) == b"x"
            c.sendall(b"y")
            # No read here waits: see read_up_to_rmb.
            assert t.peer("polled(c, seconds=3) and recv_exact(c, 1)") == b"y"
            if t.on_rmb(c) if t.both else turn > 5:
                break
        else:
            raise AssertionError(f"carriers {carriers(c)}")
        if option == socket.SO_SNDTIMEO:
            _send_until_full(c)
        else:
            fails(errno.EAGAIN, c.recv, 1)
        c.close()


@check(seconds=40)
def test_nodelay_reads_as_set(t):
    """TCP_NODELAY reads as it was set, and stays so, whatever happens to bytes that the peer has not read (tcp(7))."""
    c = t.pair()
    wrong, over = [], threading.Event()

    def look():
        while not over.is_set():
            for value in (0, 1):
                c.setsockopt(TCP, socket.TCP_NODELAY, value)
                for turn in range(50):
                    if bool(c.getsockopt(TCP, socket.TCP_NODELAY)) != bool(value):
                        wrong.append((value, turn))
    looking = bg(look)
    for _ in range(12):
        c.sendall(b"unread" * 100)
        # A fork puts the connection on TCP, unread bytes included.
        t.peer("arrived(c, 600)\nreap(forked(lambda: None))\nrecv_exact(c, 600) and None")
        t.warm(c, "c")
    over.set()
    looking.join()
    assert not wrong, wrong[:10]
