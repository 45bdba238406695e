"""What runs out, and what disappears under running programs: descriptors, memory, the runtime directory, processor time. Then
connections stay on TCP, and programs notice nothing."""

import errno
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
import time

import pytest

from harness.behave import check
from harness.net import *
from harness.status import on_rmb, reasons
from harness.world import python

MIB = 1 << 20


def tighten(more):
    """From now on this process may have `more` descriptors beyond those it has."""
    highest = max(map(int, open_fds()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def accept_all(listener, most):
    """Accepts until none is waiting, or descriptors have run out: the sockets, and whether the latter."""
    listener.setblocking(False)
    socks = []
    while len(socks) < most:
        try:
            socks.append(listener.accept()[0])
        except BlockingIOError:
            return socks, False
        except OSError as error:
            assert error.errno == errno.EMFILE, error
            return socks, True
    return socks, False


@check()
def test_descriptors_run_out(t):
    """accept says EMFILE when there are none, and goes on when there are some; what is open works all the time."""
    t.peer("l = listen()")
    address = t.peer("l.getsockname()")
    socks = [connect(address) for _ in range(8)]
    t.peer("first = [l.accept()[0] for _ in range(8)]")
    t.peer("tighten(20)")
    socks += [connect(address) for _ in range(40)]
    count = t.peer("(taken := accept_all(l, 40)) and (len(taken[0]), taken[1])")
    assert count[1] and 5 <= count[0] <= 20, count
    for _ in range(30):
        t.start("[echo(sock, 100) for sock in first + taken[0]] and None")
        for sock in socks[:8 + count[0]]:
            sock.sendall(b"m" * 100)
            assert recv_exact(sock, 100) == b"m" * 100
        t.join()
    t.peer("[sock.close() for sock in first]")
    for sock in socks[:8]:
        assert sock.recv(1) == b""
    again = t.peer("(more := accept_all(l, 40)) and (len(more[0]), more[1])")
    assert again[1] and again[0] >= 8, again
    t.start("[echo(sock, 5) for sock in more[0]] and None")
    for sock in socks[8 + count[0]:][:again[0]]:
        sock.sendall(b"small")
        assert recv_exact(sock, 5) == b"small"
    t.join()


@check()
def test_own_descriptors_run_out(t):
    """A program that has opened all the descriptors it may have can go on with its connections, and use freed ones."""
    c = t.pair("c")
    tighten(12)
    held = []
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(50):
        t.start("echo(c, 20000)")
        data = chance.randbytes(20000)
        send_all(c, data)
        assert recv_exact(c, len(data)) == data
        t.join()
    os.close(held.pop())
    d = socket.socket()
    t.peer("l = listen()")
    d.connect(t.peer("l.getsockname()"))
    t.peer("d = l.accept()[0]")
    for _ in range(50):
        t.start("echo(d, 100)")
        d.sendall(b"d" * 100)
        assert recv_exact(d, 100) == b"d" * 100
        t.join()


def traffic(t, sock, name):
    for _ in range(60):
        data = chance.randbytes(chance.randrange(1, 5000))
        t.start(f"echo({name}, {len(data)})")
        sock.sendall(data)
        assert recv_exact(sock, len(data)) == data
        t.join()


@check("both")
def test_runtime_directory_removed(t):
    """Connections that are there go on, and so do new ones, of old processes and of new ones."""
    old = t.pair("old")
    shutil.rmtree(os.environ["XSMC_RUNTIME_DIR"])
    traffic(t, old, "old")
    new = t.pair("new", warm=False)
    traffic(t, new, "new")
    code = "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); " \
        "[c.sendall(b'y' * 100) or c.recv(100, socket.MSG_WAITALL) for _ in range(100)]; c.close()"
    t.peer("l = listen()")
    port = t.peer("l.getsockname()")[1]
    t.start("echo_end(l.accept()[0])")
    done = subprocess.run([sys.executable, "-c", code, str(port)], timeout=10, check=False)
    assert done.returncode == 0
    t.join()
    traffic(t, old, "old")


@pytest.mark.parametrize("what", ["remount,ro", "full"])
def test_runtime_directory_unusable(make_world, tmp_path, what):
    """On a file system that gets full while programs run, or read-only after others ran: all work."""
    if os.getuid() != 0:
        pytest.skip("mounting a file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], check=True)
    try:
        _on_a_bad_file_system(make_world("eager"), place, what)
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def _on_a_bad_file_system(world, place, what):
    env = {"XSMC_RUNTIME_DIR": place / "run"}

    def pair():
        server = world.start(python("churn.py", "server"), stdin=subprocess.PIPE, env=env)
        client = world.start(python("churn.py", "client", server.wait_line("port ")), stdin=subprocess.PIPE, env=env)
        client.child.stdin.write(b"20\n")
        client.child.stdin.flush()
        client.wait_line("count ")
        return client, server

    def finish(client, server):
        for process, line in ((client, b"20\n"), (server, b"")):
            process.child.communicate(line, timeout=20)
            process.wait(10)
    early = pair()
    if not world.not_asserted("the runtime directory is there"):
        assert list((place / "run").glob("node-*"))
    if what == "full":
        with open(place / "fill", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        finish(*early)
    else:
        # Not possible while programs have the directory open.
        finish(*early)
        subprocess.run(["mount", "-o", what, place], check=True)
    finish(*pair())


def memory_group():
    """(folder of this process's control group with a memory controller, name of the file with its limit), or None."""
    for line in pathlib.Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        for mount, has, limit in (("/sys/fs/cgroup", not controllers, "memory.max"),
                                  ("/sys/fs/cgroup/memory", "memory" in controllers.split(","), "memory.limit_in_bytes")):
            group = pathlib.Path(mount + path)
            if has and (group / "memory.stat").exists():
                return group, limit
    return None


@pytest.fixture(name="small_group")
def fixture_small_group():
    """A control group with 64 MiB of memory."""
    if not (found := memory_group()):
        pytest.skip("this process is in no control group with a memory controller")
    group = found[0] / f"xsmc-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / found[1]).write_text(str(64 * MIB), encoding="ascii")
    except OSError as error:
        pytest.skip(f"can't make a control group with a memory limit: {error}")
    yield group
    for _ in range(50):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)


def test_memory_of_the_control_group(make_world, small_group):
    """A server with little memory and many connections: some ride RMBs, the others TCP, and it lives."""
    world = make_world("eager")
    server = world.start(["sh", "-c", f"echo $$ >{small_group}/cgroup.procs; exec \"$@\"", "sh", *python("churn.py", "server")],
                         stdin=subprocess.PIPE)
    port = int(server.wait_line("port "))
    client = world.start(python("many.py", port, 300, 300_000), stdin=subprocess.PIPE)
    client.wait_line("open")
    status = world.status()
    riding = on_rmb(status)
    client.child.communicate(b"\n", timeout=30)
    client.wait(10)
    server.child.communicate(b"", timeout=20)
    server.wait(10)
    if not world.not_asserted("as many ride RMBs as there is memory for"):
        assert 100 < riding < 600, f"{riding} of 1200 directions ride RMBs"
        assert "no-memory" in reasons(status)


def exchange(sock, size):
    data = chance.randbytes(size)
    sock.sendall(data)
    assert recv_exact(sock, size) == data


@check("plain", "both", seconds=60)
def test_thousands_of_idle_connections(t):
    """Of 5000 connections in two processes few are used: the others cost no processor time, and still work."""
    count = 5000
    for where in (resource.setrlimit, lambda *limit: t.peer("resource.setrlimit(*limit)", limit=limit)):
        where(resource.RLIMIT_NOFILE, (count + 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    t.peer("l = listen(1024)")
    address = t.peer("l.getsockname()")
    t.peer("server = bg(serve_epoll, l, count) and None", count=count)
    socks = [connect(address) for _ in range(count)]
    for sock in socks:
        exchange(sock, 100)
    used = cpu(), t.peer("cpu()")
    time.sleep(3)
    used = cpu() - used[0], t.peer("cpu()") - used[1]
    assert max(used) < 0.15, used
    for sock in chance.sample(socks, 300):
        for _ in range(20):
            exchange(sock, chance.randrange(1, 3000))
    if t.both:
        assert sum(entry["rx"]["carrier"] == "rmb" for one in node_documents() for entry in one["connections"]) > 300
    for sock in socks:
        exchange(sock, 1)
        sock.close()
