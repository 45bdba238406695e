"""Opens connections and keeps them: for looking at them from outside.

    hold.py serve HOST PORT COUNT
    hold.py connect HOST PORT COUNT

One byte goes each way on each connection, sent without waiting for the other's. Then it says "open" and sleeps until a
signal ends it.
"""

import signal
import socket
import sys
import time


def connect(host, port):
    """A connection, once somebody listens."""
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def serve(host, port, count):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        for _ in range(count):
            yield listener.accept()[0]


def main(role, host, port, count):
    port, count = int(port), int(count)
    if role == "serve":
        connections = serve(host, port, count)
    else:
        connections = (connect(host, port) for _ in range(count))
    held = []
    for connection in connections:
        connection.sendall(b"x")
        held.append(connection)
    print("open", flush=True)
    signal.pause()


main(*sys.argv[1:])
