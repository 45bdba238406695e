"""N: integrity and scale. Many connections, and what past ones leave behind. (Integrity itself: test_integrity.py.)"""

import glob
import os
import signal
import socket
import subprocess
import sys
import time

from harness.behave import check
from harness.net import *


@check(seconds=40)
def test_N3_thousand_connections(t):
    """1000 connections at once through one epoll server, rounds of echoes in random order."""
    t.peer("l = listen(1024)")
    address = t.peer("l.getsockname()")
    t.start("serve_epoll(l, 1000)")
    socks = [connect(address) for _ in range(1000)]
    for turn in range(12):
        chance.shuffle(socks)
        texts = {}
        for sock in socks:
            texts[sock] = chance.randbytes(chance.randrange(1, 500))
            sock.sendall(texts[sock])
        for sock in reversed(socks):
            assert recv_exact(sock, len(texts[sock])) == texts[sock]
    if t.both:
        documents = node_documents()
        riding = sum(entry["rx"]["carrier"] == "rmb" for one in documents for entry in one["connections"])
        print(f"{riding} receiving directions on RMBs", file=sys.stderr)
        states = {}
        for one in documents:
            for entry in one["connections"]:
                key = entry["state"], entry["tx"]["carrier"], entry["rx"]["carrier"], entry.get("reason")
                states[key] = states.get(key, 0) + 1
        assert riding > 200, f"{states}: only {riding} of 2000 receiving directions ride RMBs"
    for sock in socks:
        sock.close()
    assert t.join() == 1000


def footprint():
    """(resident kB, mappings, descriptors) of this process."""
    with open("/proc/self/status") as lines:
        lines = lines.readlines()
        print([line.strip() for line in lines if line.startswith(("VmRSS", "Rss"))], file=sys.stderr)
        resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    with open("/proc/self/maps") as lines:
        return resident, len(lines.readlines()), len(open_fds())


@check(seconds=40)
def test_N4_nothing_grows(t):
    """2500 connections after 400 warm-up ones: memory, mappings, descriptors and shared names stay as they were."""
    t.peer("l = listen(256)")
    address = t.peer("l.getsockname()")

    def many(count):
        t.start("serve_epoll(l, count)", count=count)
        for number in range(0, count, 10):
            socks = [connect(address) for _ in range(10)]
            for turn in range(12):
                for sock in socks:
                    sock.sendall(b"%08d" % turn * 20)
                for sock in socks:
                    assert recv_exact(sock, 160) == b"%08d" % turn * 20
            for sock in socks:
                sock.close()
        t.join()
        time.sleep(1)
    many(400)
    before = footprint(), t.peer("footprint()"), len(glob.glob(os.environ["XSMC_RUNTIME_DIR"] + "/*"))
    many(2500)
    after = footprint(), t.peer("footprint()"), len(glob.glob(os.environ["XSMC_RUNTIME_DIR"] + "/*"))
    print(before, after, file=sys.stderr)
    for old, new in zip(before[:2], after[:2]):
        assert new[0] < old[0] + 2500, ("resident", before, after)
        assert new[1] <= old[1] + 6, ("mappings", before, after)
        assert new[2] <= old[2], ("descriptors", before, after)
    assert after[2] <= before[2] + 1


def victim_server(report):
    listener = listen()
    os.write(report, b"%05d" % listener.getsockname()[1])
    socks = [listener.accept()[0] for _ in range(10)]
    while True:
        for sock in socks:
            sock.sendall(sock.recv(1))


def victim_client(port, report):
    socks = [connect((HOST, port)) for _ in range(10)]
    for turn in range(10 ** 9):
        for sock in socks:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        if turn == 150:
            os.write(report, b"ready")


VISITOR = """
import socket, time
l = socket.create_server(("127.0.0.1", 0))
a = socket.create_connection(l.getsockname())
b = l.accept()[0]
for turn in range(300):
    a.sendall(b"x")
    assert b.recv(1) == b"x"
    b.sendall(b"y")
    assert a.recv(1) == b"y"
time.sleep(0.3)
"""


@check(seconds=40)
def test_N5_killed_processes_leave_nothing(t):
    """Both ends killed in any order with ten connections open: nothing is left of them, and the port works again."""
    def names():
        # Other programs of this machine make files too, and other tests directories of their own.
        found = {path for place in ("/dev/shm", "/tmp", "/run") for path in glob.glob(f"{place}/*xsmc*")
                 if not os.path.basename(path).startswith(("xsmc-t-", "xsmc-lab-"))}
        return found | set(glob.glob(os.environ["XSMC_RUNTIME_DIR"] + "/node-*"))
    c = t.pair()  # this process and the peer are nodes themselves, before and after
    time.sleep(0.2)
    before = names()
    for turn in range(4):
        report, to = os.pipe()
        server = forked(victim_server, to)
        port = int(os.read(report, 5))
        client = forked(victim_client, port, to)
        assert os.read(report, 5) == b"ready"
        for pid in (server, client) if turn % 2 else (client, server):
            os.kill(pid, signal.SIGKILL)
            reap(pid, status=None)
            time.sleep(0.05 * (turn // 2))
        again = listen(port=port)
        again.close()
        os.close(report)
        os.close(to)
    # Those who come next clear up; these end in the ordinary way.
    for command in ("subprocess.run([sys.executable, '-S', '-c', VISITOR], check=True, timeout=10)",) * 2:
        t.peer(command)
        exec(command, globals())
    until(lambda: not names() - before, 6, lambda: f"new names: {sorted(names() - before)}")
    t.warm(c, "c")
