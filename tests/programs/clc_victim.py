"""A program, to run under xsmc, for the peers of clc_hostile.py.

    clc_victim.py serve PORT     echoes on each connection what comes, until its end
    clc_victim.py connect HOST [NAME...]   tries servers of clc_hostile.py, each as it expects; without names all of them,
                                 but those for which this process must be single-threaded
"""

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from clc_hostile import AT_ONCE, EXPECTED, PAYLOAD, PORTS, exchange, receive, report

# A program that acts this long, in seconds, after its connect finds the handshake begun: machines may be slow.
MEANWHILE = 1.0

# A signal wakes the main thread; fork takes all connections of a process out of their handshakes.
ALONE = {"slow_for_interrupted", "slow_for_forked"}


def serve(port):
    listener = socket.create_server(("", port), backlog=200)
    while True:
        threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()


def echo(sock):
    with sock:
        try:
            while data := sock.recv(65536):
                sock.sendall(data)
        except (ConnectionError, TimeoutError):
            pass


def begin(address):
    """A connect that goes on in the background."""
    sock = socket.socket()
    sock.setblocking(False)
    number = sock.connect_ex(address)
    assert number == errno.EINPROGRESS, errno.errorcode.get(number)
    return sock


def error(sock):
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def goes_on(sock, took, number):
    """The handshake was over when the socket became writable, and the program could begin."""
    assert took > 1.9, f"writable after {took:.2f} s, before the handshake was over"
    assert number == 0, errno.errorcode[number]
    sock.setblocking(True)
    exchange(sock)


def run_poll(address):
    since = time.monotonic()
    with begin(address) as sock:
        poll = select.poll()
        poll.register(sock, select.POLLOUT | select.POLLIN)
        [(_, events)] = poll.poll(5000)
        assert events == select.POLLOUT, events
        goes_on(sock, time.monotonic() - since, error(sock))


def run_epoll(address):
    since = time.monotonic()
    with begin(address) as sock, select.epoll() as epoll:
        epoll.register(sock, select.EPOLLOUT | select.EPOLLIN | select.EPOLLET)
        assert sock.connect_ex(address) in (errno.EALREADY, errno.EISCONN)
        [(_, events)] = epoll.poll(5)
        assert events == select.EPOLLOUT, events
        goes_on(sock, time.monotonic() - since, error(sock))


def run_interrupted(address):
    """An interrupted connect goes on in the background."""
    def handler(*_):
        raise InterruptedError
    signal.signal(signal.SIGALRM, handler)
    # Again and again, as the first may come before connect waits for the handshake.
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
    sock, since = socket.socket(), time.monotonic()
    try:
        sock.connect(address)
        raise AssertionError("connect was not interrupted")
    except InterruptedError:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert sock.connect_ex(address) == errno.EALREADY
    select.select([], [sock], [])
    goes_on(sock, time.monotonic() - since, error(sock))


def run_shut(address):
    """What was shut down during the handshake is shut down after it; the other direction still works."""
    with begin(address) as sock:
        time.sleep(MEANWHILE)
        sock.shutdown(socket.SHUT_WR)
        sock.setblocking(True)
        assert receive(sock, len(PAYLOAD)) == PAYLOAD


def run_closed(address):
    sock = begin(address)
    time.sleep(MEANWHILE)
    sock.close()


def run_forked(address):
    """The child may use the connection; it is on TCP."""
    sock = begin(address)
    time.sleep(MEANWHILE)
    pid = os.fork()
    if pid == 0:
        try:
            select.select([], [sock], [])
            assert error(sock) == 0
            sock.setblocking(True)
            exchange(sock)
            os._exit(0)
        finally:
            os._exit(1)
    sock.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def run(name, address):
    expected = EXPECTED[name]
    if function := globals().get(f"run_{expected}"):
        return function(address)
    with socket.socket() as sock:
        number = sock.connect_ex(address)
        found = errno.errorcode[number] if number else "echo"
        if found == "echo" == expected:
            return exchange(sock)
        if found == "echo" and expected == "greeting":
            assert receive(sock, len(PAYLOAD)) == PAYLOAD
            return exchange(sock)
        assert found == expected, f"{found} instead of {expected}"


def main(what, *words):
    if what == "serve":
        serve(int(words[0]))
        return
    host, *names = words
    if names:
        for name in names:
            report(name, run, name, (host, PORTS[name]))
        return
    names = sorted(PORTS.keys() - ALONE, key=lambda name: "silent" not in name)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name in names:
            pool.submit(report, name, run, name, (host, PORTS[name]))


if __name__ == "__main__":
    main(*sys.argv[1:])
