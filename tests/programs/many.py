"""Many connections at once, each of which carries many bytes: many.py PORT COUNT SIZE

Has SIZE bytes echoed on each of COUNT connections with 127.0.0.1, twice, then prints "open" and ends after a line on its
standard input.
"""

import random
import socket
import sys
import threading

port, count, size = map(int, sys.argv[1:4])
chance = random.Random(1)
socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
for _ in range(2):
    for sock in socks:
        data = chance.randbytes(size)
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        assert sock.recv(size, socket.MSG_WAITALL) == data
        sender.join()
print("open", flush=True)
sys.stdin.readline()
