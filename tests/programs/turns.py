"""One process that has one connection after another, and waits in between: turns.py [smc] [HOST] PORT TURN...

    echo         a connection: the client sends a byte, the server sends it back, the client closes
    exchange     a connection that stays open: some 100 kB each way
    close        closes that
    fork         as exchange, by a child that is forked right after the accept
    slam         accepts a connection and closes it at once; or connects, and must see the end of that soon
    touch:FILE   makes a file
    wait:FILE    waits for a file
    sleep:S      waits so many seconds

With HOST it is the client, which tries for 10 s to connect. With smc the sockets are the kernel's AF_SMC.
"""

import os
import pathlib
import random
import socket
import sys
import time

IPPROTO_SMC = 256
DATA = random.Random(1).randbytes(200000)
# What the server makes once it listens, and the client waits for (as smc_peer.c does): a connection that is refused is
# another one to xsmc.
LISTENS = os.environ.get("LISTENS")


def connect(address, protocol):
    end = time.monotonic() + 10
    while LISTENS and not os.path.exists(LISTENS) and time.monotonic() < end - 5:
        time.sleep(0.005)
    while True:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
        try:
            sock.connect(address)
            return sock
        except ConnectionRefusedError:
            sock.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def listen(address, protocol):
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    sock.listen()
    if LISTENS:
        pathlib.Path(LISTENS).touch()
    return sock


def receive(sock, count):
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, f"the stream ended after {len(data)} of {count} bytes"
        data += part
    return data


def exchange(sock, is_client):
    if is_client:
        sock.sendall(DATA)
        assert receive(sock, len(DATA)) == DATA[::-1]
    else:
        assert receive(sock, len(DATA)) == DATA
        sock.sendall(DATA[::-1])
    return sock


def slammed(address, protocol):
    try:
        with connect(address, protocol) as sock:
            sock.settimeout(5)
            assert sock.recv(1) == b""
    except ConnectionError:
        pass


def main(*words):
    words = list(words)
    protocol = IPPROTO_SMC if words[0] == "smc" else 0
    if protocol:
        del words[0]
    host = "" if words[0].isdigit() else words.pop(0)
    address, turns = (host, int(words[0])), words[1:]
    listener = None if host else listen(address, protocol)
    for turn in turns:
        what, _, argument = turn.partition(":")
        if what == "echo" and host:
            with connect(address, protocol) as sock:
                sock.sendall(b"x")
                assert sock.recv(1) == b"x"
        elif what == "echo":
            with listener.accept()[0] as sock:
                sock.sendall(sock.recv(1))
                assert sock.recv(1) == b""
        elif what == "exchange":
            kept = exchange(connect(address, protocol) if host else listener.accept()[0], bool(host))
        elif what == "fork":
            sock = listener.accept()[0]
            pid = os.fork()
            if pid == 0:
                exchange(sock, False)
                os._exit(0)
            sock.close()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        elif what == "slam" and not host:
            listener.accept()[0].close()
        elif what == "slam":
            slammed(address, protocol)
        elif what == "close":
            kept.close()
        elif what == "touch":
            pathlib.Path(argument).touch()
        elif what == "wait":
            while not pathlib.Path(argument).exists():
                time.sleep(0.05)
        else:
            time.sleep(float(argument))


if __name__ == "__main__":
    main(*sys.argv[1:])
