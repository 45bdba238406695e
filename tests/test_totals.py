"""What `smctl status` tells of programs that have ended."""

import subprocess

from harness.status import wait_until
from harness.world import python


def _totals(world):
    [totals] = world.status()["totals"]
    return totals["counters"]


def test_bytes_of_ended_programs(eager):
    """Whatever has gone by RMB is counted once at each end, in forked children, too, and stays when both have ended."""
    if eager.not_asserted("there are totals"):
        return
    server = eager.start(python("churn.py", "server"), stdin=subprocess.PIPE)
    client = eager.start(python("churn.py", "client", server.wait_line("port ")), stdin=subprocess.PIPE)
    client.child.communicate(b"200\n", timeout=30)
    server.child.communicate(b"", timeout=30)
    counters = _totals(eager)
    # Each of the 200 connections carries 20 messages of 6 bytes each way; the first of them go by TCP.
    assert 0 < counters["rmb_sent"] <= 2 * 20 * 6 * 200, counters
    assert counters["rmb_received"] == counters["rmb_sent"], counters
    assert counters["upgrades"] >= 2, counters


def test_connections_that_end_with_the_program(eager):
    """Open connections are counted when their program exits; a fork's child doesn't count its parent's."""
    if eager.not_asserted("there are totals"):
        return
    code = """
import os, select, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
a = socket.create_connection(listener.getsockname())
b = listener.accept()[0]
select.select([b], [], [], 0)  # no read here waits, and what a blocking socket receives goes by RMB once something has
for _ in range(50000):
    a.sendall(b"12345678")
    b.recv(8, socket.MSG_WAITALL)
pid = os.fork()
if pid == 0:
    a.sendall(b"one more")
    sys.exit(0)
os.waitpid(pid, 0)
"""
    eager.run(["/usr/bin/python3", "-c", code])
    wait_until(lambda: _totals(eager)["rmb_received"] == _totals(eager)["rmb_sent"], 5, lambda: str(_totals(eager)))
    assert 200_000 < _totals(eager)["rmb_sent"] <= 400_008, _totals(eager)
