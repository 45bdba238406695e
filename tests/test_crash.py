"""Ends killed in mid-transfer, what they leave behind, and leaks over many connections."""

import os
import signal
import subprocess
import time

import pytest

from harness.settings import scaled
from harness.status import wait_until
from harness.world import python

WITHIN = 3  # seconds until the survivor must know; the aim is one


def _progress(path):
    return int.from_bytes(path.read_bytes()[:8], "little") if path.exists() else 0


def _stream(world, how_to_send, how_to_receive, name=""):
    """Starts both ends and waits till some megabytes have gone through; gives (sender, receiver, their progress files)."""
    sent, received = world.tmp / f"{name}sent", world.tmp / f"{name}received"
    receiver = world.start(python("stream.py", "receive", received, how_to_receive))
    port = receiver.wait_line("port ")
    sender = world.start(python("stream.py", "send", port, sent, how_to_send))
    wait_until(lambda: _progress(received) > 200_000, 20,
               lambda: f"200 kB received: {sender.describe()}\n{receiver.describe()}")
    world.wait_rmb()
    return sender, receiver, sent, received


def _end(process, killed_at):
    """(what, bytes) of the "end" line; checks how long it took from the kill, or from the last reading."""
    what, count, moment = process.wait_line("end ", 20).split()
    process.wait(10)
    return what, int(count), float(moment) - killed_at


def _leaves_nothing(world):
    """After the next programs came and went, no file of a killed process is left in the runtime directory."""
    sender, receiver, _, _ = _stream(world, "block", "block", "next-")
    sender.stop()
    receiver.wait(10)
    # The sender was ended by a signal, so the next to come has to clear up after it.
    follower = world.start(python("churn.py", "server"), stdin=subprocess.PIPE)
    client = world.start(python("churn.py", "client", follower.wait_line("port ")), stdin=subprocess.PIPE)
    client.child.communicate(b"10\n", timeout=20)
    follower.child.communicate(b"", timeout=20)
    if world.not_asserted("files of killed processes are gone"):
        return
    left = [name for name in os.listdir(world.runtime) if name.startswith("node-")]
    assert not left, f"left in the runtime directory: {sorted(os.listdir(world.runtime))}"


@pytest.mark.parametrize("receive", ["block", "epoll", "slow"])
@pytest.mark.parametrize("send", ["block", "epoll"])
def test_sender_killed(eager, send, receive):
    """The receiver gets everything that send calls had accepted, then the end, at once."""
    sender, receiver, sent, received = _stream(eager, send, receive)
    time.sleep(0.3)
    sender.kill()
    killed = time.monotonic()
    accepted = _progress(sent)
    what, count, seconds = _end(receiver, killed)
    print(f"accepted {accepted}, received {count}, {what} after {seconds:.3f} s")
    assert what in ("eof", "ECONNRESET")
    assert accepted <= count <= accepted + 60_000
    if receive != "slow":
        assert seconds < WITHIN
    _leaves_nothing(eager)


@pytest.mark.parametrize("send", ["block", "epoll"])
@pytest.mark.parametrize("receive", ["block", "epoll", "slow"])
def test_receiver_killed(eager, send, receive):
    """The sender learns it at once, also when it waits for room."""
    sender, receiver, sent, received = _stream(eager, send, receive)
    time.sleep(0.3)
    receiver.kill()
    what, count, seconds = _end(sender, time.monotonic())
    print(f"{what} after {seconds:.3f} s")
    assert what in ("EPIPE", "ECONNRESET") and seconds < WITHIN
    assert count >= _progress(received)
    _leaves_nothing(eager)


def test_sender_killed_while_receiver_is_stopped(eager):
    """Much is under way when the sender dies, and nobody reads it until later."""
    sender, receiver, sent, _ = _stream(eager, "block", "block")
    os.kill(receiver.pid, signal.SIGSTOP)
    before = -1
    while before != _progress(sent):
        before = _progress(sent)
        time.sleep(0.3)
    sender.kill()
    time.sleep(0.3)
    os.kill(receiver.pid, signal.SIGCONT)
    what, count, _ = _end(receiver, time.monotonic())
    assert what in ("eof", "ECONNRESET")
    assert before <= count <= before + 60_000, (before, count)


def test_both_killed_again_and_again(eager):
    """Nothing is left of killed pairs, and those that come after them are upgraded as ever."""
    for turn in range(scaled(4)):
        sender, receiver, _, _ = _stream(eager, "block", "epoll", f"{turn}-")
        first, second = (sender, receiver) if turn % 2 else (receiver, sender)
        first.kill()
        second.kill()
    _leaves_nothing(eager)


def _counts(process, order):
    seen = len([line for line in process.out.splitlines() if line.startswith("count ")])
    process.child.stdin.write(order)
    process.child.stdin.flush()

    def answered():
        assert process.running(), process.describe()
        lines = [line for line in process.out.splitlines(keepends=True) if line.startswith("count ") and line.endswith("\n")]
        return lines[seen:]
    line = wait_until(answered, 60 + scaled(60), lambda: f"a count: {process.describe()}")[0]
    return list(map(int, line.split()[1:]))


def test_one_link(eager):
    """Two processes have one link, whichever of them dials it, and whichever opens a connection on it."""
    server = eager.start(python("churn.py", "server"), stdin=subprocess.PIPE)
    client = eager.start(python("churn.py", "client", server.wait_line("port ")), stdin=subprocess.PIPE)
    for _ in range(8):
        _counts(client, b"300\n")
        nodes = eager.status()["nodes"]
        if eager.not_asserted("there is one link"):
            return
        assert [len(node["links"]) for node in nodes] == [1, 1], nodes


@pytest.mark.slow
def test_no_leaks(eager):
    """Thousands of connections leave no descriptor, no mapping and no memfd, in either process."""
    server = eager.start(python("churn.py", "server"), stdin=subprocess.PIPE)
    client = eager.start(python("churn.py", "client", server.wait_line("port ")), stdin=subprocess.PIPE)
    with eager.watch() as watch:
        before = [_counts(client, b"500\n"), _counts(server, b"\n")]
        rest = [_counts(client, b"%d\n" % scaled(2500)), _counts(server, b"\n")]
    print(f"(descriptors, mappings, memfd mappings) of client and server: {before}, after: {rest}; {watch}")
    eager.assert_rmb(watch, 0)
    for old, new in zip(before, rest):
        assert new[0] <= old[0], f"descriptors: {before} -> {rest}"
        assert new[1] <= old[1] + 6 and new[2] <= old[2] + 2, f"mappings: {before} -> {rest}"
    for process in (client, server):
        process.child.stdin.close()
        process.wait(20)


def test_no_leaks_when_peers_die(eager):
    """A server that outlives many killed clients keeps none of their memory or descriptors."""
    server = eager.start(python("churn.py", "server"), stdin=subprocess.PIPE)
    port = server.wait_line("port ")

    def clients(number):
        for _ in range(number):
            client = eager.start(python("churn.py", "client", port), stdin=subprocess.PIPE)
            client.child.stdin.write(b"100000\n")
            client.child.stdin.flush()
            eager.wait_rmb()
            time.sleep(0.05)
            client.kill()
        time.sleep(1)
    clients(2)
    before = _counts(server, b"\n")
    clients(scaled(12))
    after = _counts(server, b"\n")
    print(f"(descriptors, mappings, memfd mappings) of the server: {before}, after: {after}")
    assert after[0] <= before[0] and after[1] <= before[1] + 6 and after[2] <= before[2] + 2, (before, after)
