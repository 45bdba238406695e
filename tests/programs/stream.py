"""One end of a one-way stream whose other end will be killed.

    stream.py send PORT PROGRESS HOW       connects and sends a pattern for ever
    stream.py receive PROGRESS HOW         prints "port N", accepts one connection, reads to its end

HOW: block, epoll, or slow (the receiver reads little and late, so that much is under way when the end comes).
PROGRESS is a file of 8 bytes: the number of bytes that send calls have accepted, or that were received.
At the end it prints "end WHAT BYTES TIME" (monotonic seconds), WHAT being eof or the name of an error.
"""

import errno
import mmap
import os
import select
import signal
import socket
import sys
import time

signal.signal(signal.SIGPIPE, signal.SIG_IGN)
PATTERN = bytes((i * 7 + i // 251) % 256 for i in range(251 * 256)) * 8
PERIOD = 251 * 256


def pattern(offset, size):
    """Bytes [offset, offset + size) of the stream, size at most 7 periods."""
    at = offset % PERIOD
    return PATTERN[at:at + size]


def progress_file(path):
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 8)
    return mmap.mmap(file, 8)


def put(progress, number):
    progress[:8] = number.to_bytes(8, "little")


def finish(what, count):
    print("end", what, count, time.monotonic(), flush=True)
    sys.exit(0)


def send(port, progress, how):
    connection = socket.create_connection(("127.0.0.1", port))
    count, turn = 0, 0
    epoll = None
    if how == "epoll":
        connection.setblocking(False)
        epoll = select.epoll()
        epoll.register(connection, select.EPOLLOUT | select.EPOLLET)
    while True:
        turn += 1
        size = 1 + turn * 7919 % 60_000
        try:
            sent = connection.send(pattern(count, size))
        except BlockingIOError:
            epoll.poll()
            continue
        except OSError as error:
            finish(errno.errorcode[error.errno], count)
        count += sent
        put(progress, count)


def receive(progress, how):
    listener = socket.create_server(("127.0.0.1", 0))
    print("port", listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    count = 0
    epoll = None
    if how == "epoll":
        connection.setblocking(False)
        epoll = select.epoll()
        epoll.register(connection, select.EPOLLIN)
    while True:
        try:
            if epoll:
                epoll.poll()
            data = connection.recv(3000 if how == "slow" else 100_000)
        except BlockingIOError:
            continue
        except OSError as error:
            finish(errno.errorcode[error.errno], count)
        if not data:
            finish("eof", count)
        if data != pattern(count, len(data)):
            sys.exit(f"wrong bytes within {count}..{count + len(data)}")
        count += len(data)
        put(progress, count)
        # Slow at first; from 3 s on the rest is read at full speed.
        if how == "slow" and time.monotonic() - START < 3:
            time.sleep(0.01)


START = time.monotonic()
if sys.argv[1] == "send":
    send(int(sys.argv[2]), progress_file(sys.argv[3]), sys.argv[4])
else:
    receive(progress_file(sys.argv[2]), sys.argv[3])
