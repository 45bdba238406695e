"""Many connections, one after another or some at once, and what they leave behind in this process.

    churn.py server          prints "port N"; echoes; prints "count ..." for every line on its standard input
    churn.py client PORT     for each line "N" on standard input makes N connections, then prints "count ..."

"count FDS MAPS MEMFDS": entries of /proc/self/fd, lines of /proc/self/maps, lines that are memfds, after a second of rest.
"""

import os
import select
import socket
import sys
import time


def count():
    time.sleep(1)
    fds = len(os.listdir("/proc/self/fd"))
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        maps = lines.read().splitlines()
    print("count", fds, len(maps), sum("memfd:" in line for line in maps), flush=True)


def server():
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print("port", listener.getsockname()[1], flush=True)
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    epoll.register(0, select.EPOLLIN)
    open_now = {}
    while True:
        for fd, _ in epoll.poll():
            if fd == 0:
                if not sys.stdin.readline():
                    return
                count()
            elif fd == listener.fileno():
                connection, _ = listener.accept()
                open_now[connection.fileno()] = connection
                epoll.register(connection, select.EPOLLIN)
            else:
                try:
                    data = open_now[fd].recv(65536)
                    open_now[fd].sendall(data)
                except ConnectionError:
                    data = b""
                if not data:
                    open_now.pop(fd).close()


def client(port):
    for line in sys.stdin:
        for number in range(0, int(line), 10):
            group = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
            for turn in range(20):
                for connection in group:
                    connection.sendall(b"%06d" % (number + turn))
                for connection in group:
                    assert connection.recv(6, socket.MSG_WAITALL) == b"%06d" % (number + turn)
            for connection in group:
                connection.close()
        count()


if sys.argv[1] == "server":
    server()
else:
    client(int(sys.argv[2]))
