"""T: threads."""

import os
import queue
import select
import socket
import threading
import time

from harness.behave import check
from harness.net import *


@check()
def test_T1_shutdown_of_listener(t):
    """shutdown on a listener returns 0 and wakes blocked accepts with EINVAL."""
    listener = listen()
    address = listener.getsockname()
    t.peer("c = connect(address)", address=address)  # the listener has been in use
    listener.accept()[0].close()
    epoll = select.epoll()
    epoll.register(listener, EPOLLIN)
    sleepers = [bg(fails, errno.EINVAL, listener._accept) for _ in range(2)]
    time.sleep(0.2)
    listener.shutdown(socket.SHUT_RDWR)
    for sleeper in sleepers:
        sleeper.join(3)
    assert ready(epoll, 1).get(listener.fileno(), 0) & EPOLLHUP
    fails(errno.EINVAL, listener._accept)
    t.peer("fails(errno.ECONNREFUSED, connect, address)")


@check()
def test_T2_shutdown_wakes(t):
    """shutdown from another thread wakes blocked recv, send and poll."""
    def full_send(c):
        try:
            while True:
                c.send(bytes(100_000), socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return True

    def epoll_wait(c):
        epoll = select.epoll()
        epoll.register(c, EPOLLIN)
        return epoll.poll(5)
    for name, act in (("recv", lambda c: c.recv(1) == b""), ("send", full_send),
                      ("poll", lambda c: polled(c, select.POLLIN, 5)), ("epoll", epoll_wait),
                      ("select", lambda c: readable(c, 5)), ("waitall", lambda c: c.recv(9, socket.MSG_WAITALL) == b"")):
        for how in (socket.SHUT_RDWR, socket.SHUT_WR if name == "send" else socket.SHUT_RD):
            c = t.pair()
            sleeper = bg(act, c)
            time.sleep(0.25)
            assert sleeper.is_alive(), name
            c.shutdown(how)
            assert sleeper.join(3), name
            c.close()
            t.peer("c.close()")


@check()
def test_T3_threads_share_epoll(t):
    """Six threads, one epoll set, one-shot entries: every message is answered once, in order, by one thread."""
    listener = listen()
    CONNECTIONS, MESSAGES = 40, 150
    t.start("""
def ask(address):
    sock = connect(address)
    for turn in range(150):
        text = b'%03d' % turn + random.randbytes(random.randrange(200))
        sock.sendall(len(text).to_bytes(2, 'big') + text)
        assert recv_exact(sock, len(text)) == text
    sock.shutdown(socket.SHUT_WR)
    assert recv_end(sock) == b''
threads = [bg(ask, address) for _ in range(40)]
[thread.join(18) for thread in threads] and None""", address=listener.getsockname())
    epoll = select.epoll()
    entries, busy = {}, {}
    for _ in range(CONNECTIONS):
        sock = listener.accept()[0]
        entries[sock.fileno()] = [sock, 0]
        busy[sock.fileno()] = threading.Lock()
        epoll.register(sock, EPOLLIN | EPOLLONESHOT)
    left = threading.Semaphore(0)

    def work():
        while True:
            for fd, _ in epoll.poll(-1, 1):
                if fd == stop:
                    return
                assert busy[fd].acquire(blocking=False), "an event was seen by two threads"
                sock, turn = entries[fd]
                head = sock.recv(2, socket.MSG_WAITALL)
                if not head:
                    sock.close()
                    left.release()
                    continue
                text = recv_exact(sock, int.from_bytes(head, "big"))
                assert text[:3] == b"%03d" % turn
                entries[fd][1] += 1
                sock.sendall(text)
                busy[fd].release()
                epoll.modify(fd, EPOLLIN | EPOLLONESHOT)
    stop, writer = os.pipe()
    threads = [bg(work) for _ in range(6)]
    for _ in range(CONNECTIONS):
        assert left.acquire(timeout=15), "a connection was forgotten"
    assert all(turn == MESSAGES for _, turn in entries.values())
    os.write(writer, b"x")
    epoll.register(stop, EPOLLIN)
    for thread in threads:
        thread.join()
    t.join()


@check()
def test_T3_two_sleepers_one_event(t):
    """Two threads sleep in one epoll set: two events wake both."""
    c, d = t.pair("c"), t.pair("d")
    for _ in range(10):
        epoll = select.epoll()
        epoll.register(c, EPOLLIN | EPOLLET)
        epoll.register(d, EPOLLIN | EPOLLET)
        threads = [bg(epoll.poll, 5, 1) for _ in range(2)]
        time.sleep(0.1)
        t.peer("c.send(b'x')")
        t.peer("d.send(b'x')")
        got = sorted(thread.join()[0][0] for thread in threads)
        assert got == sorted([c.fileno(), d.fileno()]), got
        assert c.recv(1) == d.recv(1) == b"x"


@check()
def test_T4_sockets_move_between_threads(t):
    """Accept in one thread, which ends, read in another, write in a third."""
    listener = listen()
    t.start("""
def ask(address, number):
    sock = connect(address)
    for turn in range(100):
        sock.sendall(b'%05d' % (number * 100 + turn) * 20)
        assert recv_exact(sock, 100) == b'%05d' % (number * 100 + turn) * 20
    sock.close()
[thread.join() for thread in [bg(ask, address, number) for number in range(12)]] and None""",
            address=listener.getsockname())

    def read(sock, texts):
        while True:
            text = sock.recv(100, socket.MSG_WAITALL)
            texts.put(text)
            if not text:
                return

    def write(sock, texts):
        while text := texts.get():
            sock.sendall(text)
    threads = []
    for _ in range(12):
        sock = bg(lambda: listener.accept()[0]).join()
        texts = queue.Queue()
        threads += [bg(read, sock, texts), bg(write, sock, texts)]
    for thread in threads:
        thread.join()
    t.join()


@check("plain", "local")
def test_T4_threads_of_one_process(t):
    """A connection between two threads is used by the main thread after both have ended."""
    listener = listen()
    for _ in range(5):
        one = bg(connect, listener.getsockname())
        two = bg(lambda: listener.accept()[0])
        a, b = one.join(), two.join()
        for turn in range(200):
            a.sendall(b"there %d" % turn)
            assert b.recv(100) == b"there %d" % turn
            b.sendall(b"back %d" % turn)
            assert a.recv(100) == b"back %d" % turn
        a.close()
        assert b.recv(1) == b""


@check("plain", "local")
def test_T4_both_ends_in_one_thread(t):
    """One thread connects, accepts and uses both ends; nothing waits for the other end's next call."""
    for _ in range(10):
        a, b = t.pair_here()
        a.sendall(b"x" * 30_000)
        assert recv_exact(b, 30_000) == b"x" * 30_000
        b.shutdown(socket.SHUT_WR)
        assert a.recv(1) == b""
        a.sendall(b"rest")
        a.close()
        assert recv_end(b) == b"rest"


@check()
def test_T5_many_threads_open_and_close(t):
    """Eight threads with 150 connections each, beside threads that open and close files and pipes."""
    listener = listen(256)
    t.start("""
def ask(address, number):
    for turn in range(150):
        sock = connect(address)
        text = b'%d:%d' % (number, turn) * random.randrange(1, 40)
        sock.sendall(text)
        sock.shutdown(socket.SHUT_WR)
        assert recv_end(sock) == text
        sock.close()
[thread.join(18) for thread in [bg(ask, address, number) for number in range(8)]] and None""",
            address=listener.getsockname())
    running = threading.Event()

    def serve():
        while not running.is_set():
            if not readable(listener, 0.05):
                continue
            with accepting:
                if not readable(listener):
                    continue
                sock = listener.accept()[0]
            if sock.fileno() % 3 == 0:
                copy = socket.socket(fileno=os.dup(sock.fileno()))
                sock.close()
                sock = copy
            text = recv_end(sock)
            sock.sendall(text)
            sock.close()

    def others():
        while not running.is_set():
            reader, writer = os.pipe()
            file = os.open("/dev/null", os.O_RDWR)
            os.write(writer, b"x")
            assert os.read(reader, 1) == b"x"
            for fd in (file, reader, writer):
                os.close(fd)
    accepting = threading.Lock()
    threads = [bg(serve) for _ in range(8)] + [bg(others) for _ in range(2)]
    t.join()
    running.set()
    for thread in threads:
        thread.join()


_DUPLEX = 24 << 20


def duplex(sock, seed_out, seed_in):
    """Sends and receives _DUPLEX bytes at once in random pieces, and checks every byte."""
    def data(seed):
        return random.Random(seed).randbytes(1 << 20) * (_DUPLEX >> 20)

    def send():
        pieces, at, out = random.Random(seed_out + 5), 0, memoryview(data(seed_out))
        while at < _DUPLEX:
            at += sock.send(out[at:at + pieces.randrange(1, 200_000)])
        sock.shutdown(socket.SHUT_WR)
    sender = bg(send)
    want, pieces, at = memoryview(data(seed_in)), random.Random(seed_in + 6), 0
    while part := sock.recv(pieces.randrange(1, 200_000)):
        assert part == want[at:at + len(part)], f"wrong bytes within {at}..{at + len(part)}"
        at += len(part)
    assert at == _DUPLEX, at
    sender.join()


@check()
def test_T6_send_and_receive_at_once(t):
    """Two threads at each end, 24 MiB each way at once in random pieces."""
    for _ in range(2):
        c = t.pair()
        t.start("duplex(c, 2, 1)")
        duplex(c, 1, 2)
        t.join()


@check()
def test_T7_small_sends_stay_whole(t):
    """Five threads and a forked process send 400 records of 100 bytes each on one socket."""
    c = t.pair()

    def send(number):
        for turn in range(400):
            assert c.send(b"%02d%06d" % (number, turn) + b"%02d" % number * 46) == 100
    t.start("recv_end(c)")
    pid = forked(send, 5)
    threads = [bg(send, number) for number in range(5)]
    for thread in threads:
        thread.join()
    reap(pid)
    c.close()
    data = t.join()
    assert len(data) == 6 * 400 * 100
    turns = [0] * 6
    for at in range(0, len(data), 100):
        record = data[at:at + 100]
        number, turn = int(record[:2]), int(record[2:8])
        assert record[8:] == b"%02d" % number * 46, record
        assert turn == turns[number]
        turns[number] += 1
