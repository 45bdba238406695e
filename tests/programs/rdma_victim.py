"""A program, to run under xsmc, for the peers of rdma_clients.py and rdma_servers.py.

    rdma_victim.py serve PORT     echoes on each connection what comes, until its end; at PORT + 1 one may ask in lines
                                  "PORT" for how the connection with that port ended and how many bytes it had brought,
                                  and "usage" for CPU seconds and resident KiB of this process
    rdma_victim.py connect HOST   tries the servers of rdma_servers.py, each as it expects
"""

import errno
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

ENDED = {}  # by port of the client
CHANGED = threading.Condition()


def echo(sock, port):
    count = 0
    try:
        with sock:
            while data := sock.recv(65536):
                count += len(data)
                sock.sendall(data)
            # The end is the end.
            time.sleep(0.2)
            how = "more" if sock.recv(1) else "end"
    except OSError as error:
        how = errno.errorcode[error.errno]
    with CHANGED:
        ENDED[port] = f"{how} {count}"
        CHANGED.notify_all()


def answer(words):
    if words == "usage":
        times = os.times()
        with open("/proc/self/statm", encoding="ascii") as statm:
            return f"{times.user + times.system} {int(statm.read().split()[1]) * 4}"
    with CHANGED:
        CHANGED.wait_for(lambda: int(words) in ENDED, 12)
        return ENDED.get(int(words), "still open")


def tell(sock):
    with sock, sock.makefile("rw") as lines:
        for line in lines:
            print(answer(line.strip()), file=lines, flush=True)


def accepting(port, function):
    listener = socket.create_server(("", port), backlog=200)
    while True:
        sock, (_, client) = listener.accept()
        threading.Thread(target=function, args=(sock, client), daemon=True).start()


def serve(port):
    threading.Thread(target=accepting, args=(port + 1, lambda sock, _: tell(sock)), daemon=True).start()
    accepting(port, echo)


def run(name, address):
    """What the server's case expects: the bytes come back, or the connection is reset."""
    from clc_hostile import exchange
    from rdma_servers import EXPECTED
    with socket.create_connection(address, timeout=30) as sock:
        sock.settimeout(None)
        try:
            exchange(sock)
            found = "echo"
        except (ConnectionResetError, BrokenPipeError):
            found = "reset"
        assert found == EXPECTED[name], f"{found} instead of {EXPECTED[name]}"


def connect(host):
    from clc_hostile import AT_ONCE, report
    from rdma_servers import PORTS
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, port in PORTS.items():
            pool.submit(report, name, run, name, (host, port))


if __name__ == "__main__":
    {"serve": lambda port: serve(int(port)), "connect": connect}[sys.argv[1]](sys.argv[2])
