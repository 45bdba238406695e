"""Writes random values to a Redis server, lets it save in the background (it forks for that), reads all back.

Arguments: port, number of keys, seed. Speaks the protocol itself, over one blocking connection, in pipelined batches.
"""

import random
import socket
import sys

port, count, seed = map(int, sys.argv[1:4])
connection = socket.create_connection(("127.0.0.1", port))
connection.settimeout(30)
reader = connection.makefile("rb")


def request(*words):
    words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def reply():
    line = reader.readline()
    assert line.endswith(b"\r\n"), f"cut off: {line!r}"
    kind, rest = line[:1], line[1:-2]
    if kind == b"$":
        size = int(rest)
        if size < 0:
            return None
        body = reader.read(size + 2)
        assert body[-2:] == b"\r\n" and len(body) == size + 2, "cut off"
        return body[:-2]
    if kind == b"*":
        return [reply() for _ in range(int(rest))]
    assert kind != b"-", rest
    return int(rest) if kind == b":" else rest


def call(*words):
    connection.sendall(request(*words))
    return reply()


def value(key):
    chance = random.Random(seed * 1_000_003 + key)
    return chance.randbytes(int(2 ** chance.uniform(0, 17)))


def check(keys):
    connection.sendall(b"".join(request("GET", key) for key in keys))
    for key in keys:
        got = reply()
        assert got == value(key), f"seed {seed}: key {key}: {len(got or b'')} bytes differ from what was written"


BATCH = 20
for first in range(0, count, BATCH):
    batch = range(first, min(first + BATCH, count))
    connection.sendall(b"".join(request("SET", key, value(key)) for key in batch))
    assert all(reply() == b"OK" for _ in batch)
    if first == count // 2 // BATCH * BATCH:
        assert b"started" in call("BGSAVE")
        print("saving", flush=True)
    check([random.Random(first).randrange(first + len(batch)) for _ in range(3)])
for first in range(0, count, BATCH):
    check(range(first, min(first + BATCH, count)))
assert call("DBSIZE") == count
print("ok", count, flush=True)
