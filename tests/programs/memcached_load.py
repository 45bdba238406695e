"""Load on memcached: pipelined sets and gets of sizes from 1 byte to 200 kB by several processes, each byte of the answers checked.

memcached_load.py PORT PROCESSES CONNECTIONS ROUNDS
"""

import multiprocessing
import random
import socket
import sys


def value(key, version, size):
    return random.Random(f"{key} {version}").randbytes(size)


def line(stream):
    return stream.readline().rstrip(b"\r\n")


def use(process, port, connections, rounds):
    source = random.Random(process)
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    streams = [link.makefile("rb") for link in links]
    known = {}
    for round_number in range(rounds):
        for number, link in enumerate(links):
            # Some sets and some gets go out before any answer is read.
            batch, asked = b"", []
            for _ in range(source.randrange(1, 12)):
                key = f"k{connections}-{process}-{number}-{source.randrange(30)}"
                if source.random() < 0.4:
                    size = source.choice((1, 100, 3000, 200_000)) if source.random() < 0.2 else source.randrange(1, 2000)
                    known[key] = value(key, round_number, size)
                    batch += b"set %s 0 0 %d\r\n%s\r\n" % (key.encode(), size, known[key])
                    asked.append((key, None))
                else:
                    batch += b"get %s\r\n" % key.encode()
                    asked.append((key, known.get(key, b"")))
            link.sendall(batch)
            for key, expected in asked:
                answer = line(streams[number])
                if expected is None:
                    assert answer == b"STORED", answer
                elif answer != b"END":
                    _, name, _, size = answer.split()
                    data = streams[number].read(int(size))
                    assert name == key.encode() and data == expected, f"{key} differs"
                    assert line(streams[number]) == b"" and line(streams[number]) == b"END"
                else:
                    assert expected == b"", f"{key} is missing"
    for link in links:
        link.close()


def main():
    port, processes, connections, rounds = map(int, sys.argv[1:])
    workers = [multiprocessing.Process(target=use, args=(number, port, connections, rounds)) for number in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(worker.exitcode == 0 for worker in workers), [worker.exitcode for worker in workers]
    print("ok")


main()
