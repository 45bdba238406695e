"""Eight threads with a connection each write and read random values in memcached and check every one.

Arguments: port, rounds a thread, seed.
"""

import random
import socket
import sys
import threading

port, rounds, seed = map(int, sys.argv[1:4])
failures = []


def work(number):
    chance = random.Random(seed * 100 + number)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(30)
    reader = connection.makefile("rb")
    stored = {}
    for step in range(rounds):
        key = b"k%d-%d" % (number, chance.randrange(50))
        if chance.random() < 0.5 or key not in stored:
            stored[key] = chance.randbytes(int(2 ** chance.uniform(0, 16)))
            connection.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (key, len(stored[key]), stored[key]))
            answer = reader.readline()
            assert answer == b"STORED\r\n", answer
        else:
            connection.sendall(b"get %s\r\n" % key)
            header = reader.readline()
            assert header == b"VALUE %s 0 %d\r\n" % (key, len(stored[key])), (step, header)
            body = reader.read(len(stored[key]) + 7)
            assert body == stored[key] + b"\r\nEND\r\n", f"seed {seed}: wrong value of {key}"
    connection.sendall(b"quit\r\n")
    assert reader.read() == b""


def guarded(number):
    try:
        work(number)
    except BaseException as error:
        failures.append(f"thread {number}: {error!r}")


threads = [threading.Thread(target=guarded, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if failures:
    sys.exit("\n".join(failures))
print("ok", rounds * 8)
