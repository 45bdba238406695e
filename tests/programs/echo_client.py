"""Sends random bytes to an echo server from one thread while another reads them back; compares checksums.

Arguments: port, bytes, seed, [number of connections, one after another]. Between two connections it prints "next" and
waits for a line on its standard input. Half-closes at the end and expects the end of the stream.
"""

import hashlib
import random
import socket
import sys
import threading
import time

port, size, seed = map(int, sys.argv[1:4])
connections = int(sys.argv[4]) if len(sys.argv) > 4 else 1


def connect():
    for attempt in range(200):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)
    sys.exit("no server")


for number in range(connections):
    chance = random.Random(seed + number)
    connection = connect()
    connection.settimeout(30)
    sent, got, count = hashlib.sha256(), hashlib.sha256(), 0

    # A few small exchanges, as interactive programs have them, before the bulk.
    for _ in range(50):
        data = chance.randbytes(chance.randrange(1, 2000))
        connection.sendall(data)
        while data:
            part = connection.recv(len(data))
            assert part and data.startswith(part), f"seed {seed}: wrong echo"
            data = data[len(part):]

    def send():
        left = size
        while left:
            data = chance.randbytes(min(left, chance.randrange(1, 100_000)))
            connection.sendall(data)
            sent.update(data)
            left -= len(data)
        connection.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    while data := connection.recv(65536):
        got.update(data)
        count += len(data)
    sender.join()
    connection.close()
    assert count == size, f"seed {seed}: {count} of {size} bytes came back"
    assert sent.digest() == got.digest(), f"seed {seed}: other bytes came back"
    if number + 1 < connections:
        print("next", number, flush=True)
        assert sys.stdin.readline()
print("ok", sent.hexdigest(), flush=True)
