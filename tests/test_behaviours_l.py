"""L: loading, start, exit. Orders of preloaded libraries, ways of ending, small stacks, silence."""

import glob
import signal
import sys
import time

import pytest

from harness import build, services, settings
from harness.behave import loaded, modes

ORDERS = pytest.mark.parametrize("order", ["before", "after"])


def _preload(world, is_loaded, other, order):
    """LD_PRELOAD of a program that also preloads another library, before or after ours."""
    words = [str(other)]
    if is_loaded and not world.plain:
        words.insert(1 if order == "before" else 0, str(settings.LIBRARY))
    return {"LD_PRELOAD": ":".join(words)}


def _pingpong(world, mode, integrity, preload):
    """200 exchanges between two processes; preload(loaded) gives their environment."""
    common = ["--count", 200, "--timeout", 15, "--io", "epoll"]
    server = world.start([integrity, "pingpong", "--role", "server", *common], env=preload(loaded(mode)[0]))
    port = server.wait_line("port ")
    client = world.start([integrity, "pingpong", "--role", "client", "--port", port, *common], env=preload(loaded(mode)[1]))
    world.finish(client, server)
    for process in (client, server):
        assert process.err == "", process.describe()


@ORDERS
@modes()
def test_L1_allocator(make_world, program, mode, order):
    """An allocator that reads a file under its start-up lock, before and after the library."""
    world, other = make_world("eager"), build.library("early_alloc")
    _pingpong(world, mode, program("integrity"), lambda is_loaded: _preload(world, is_loaded, other, order))


@ORDERS
@modes("plain", "both")
def test_L1_packaged_allocator(make_world, program, mode, order):
    """A packaged allocator."""
    found = glob.glob("/usr/lib/*/libjemalloc.so.2") + glob.glob("/usr/lib/*/libtcmalloc*.so.4")
    if not found:
        pytest.skip("neither jemalloc nor tcmalloc is installed")
    for other in found:
        world = make_world("eager")
        _pingpong(world, mode, program("integrity"), lambda is_loaded: _preload(world, is_loaded, other, order))


@ORDERS
@modes()
def test_L2_sockets_in_constructors(make_world, program, mode, order):
    """Another library uses sockets in its constructor, before and after the library in LD_PRELOAD."""
    world, other = make_world("eager"), build.library("early_net")
    _pingpong(world, mode, program("integrity"), lambda is_loaded: _preload(world, is_loaded, other, order))


@modes()
def test_L2_linked_dependency(make_world, program, mode):
    """The same as a dependency that the program is linked to."""
    world, other = make_world("eager"), build.library("early_net")
    linked = program("integrity", "-Wl,--no-as-needed", str(other), f"-Wl,-rpath,{other.parent}")
    _pingpong(world, mode, linked,
              lambda is_loaded: {"LD_PRELOAD": str(settings.LIBRARY) if is_loaded and not world.plain else None})


@ORDERS
@pytest.mark.parametrize("how, status, tail", [("return", 9, {"AD", "DA"}), ("exit", 7, {"AD", "DA"}), ("_exit", 8, {"--"}),
                                               ("abort", -signal.SIGABRT, {"--"})])
@modes()
def test_L3_ways_of_ending(make_world, program, mode, how, status, tail, order):
    """All that was sent arrives, then the end, also what exit handlers and destructors of other libraries send."""
    world, other = make_world("eager"), build.library("goodbye")
    exits = program("exits")
    server = world.start([exits, "server"], env=_preload(world, loaded(mode)[0], other, order))
    port = server.wait_line("port ")
    client = world.start([exits, "client", port, how], env=_preload(world, loaded(mode)[1], other, order))
    assert client.child.wait(20) == status, client.describe()
    client.child.returncode = 0  # an abort is what was asked for
    server.wait(20)
    total, end, what = server.wait_line("got ").split()
    assert int(total) == 50_000 + (0 if "--" in tail else 2) and what == "eof" and end[1:] in tail, server.describe()


@modes()
def test_L4_small_stacks(make_world, program, mode):
    """Threads with stacks of 32 KiB and a handler on one of 16 KiB."""
    world = make_world("eager")
    _, port = services.asyncio_echo(world, loaded(mode)[1])
    assert "ok" in world.run([program("smallstack"), port], loaded(mode)[0], 20).out


CONNECT = """
import socket, sys
l = socket.create_server(("127.0.0.1", 0))
a = socket.create_connection(l.getsockname()); b = l.accept()[0]
for turn in range(500):
    a.sendall(b"x"); assert b.recv(1) == b"x"
    b.sendall(b"y"); assert a.recv(1) == b"y"
print("done"); sys.exit(int(sys.argv[1]))
"""


@modes("plain", "local")
def test_L5_silence(make_world, mode):
    """Nothing is printed, exit statuses are unchanged, programs start quickly."""
    world = make_world("eager")
    is_loaded = loaded(mode)[0]
    for argv, status, out in ((["true"], 0, ""), (["false"], 1, ""), (["sh", "-c", "echo a | cat | tr a b; exit 3"], 3, "b\n"),
                              (["cat", "/dev/null"], 0, ""), ([sys.executable, "-S", "-c", "print(1)"], 0, "1\n"),
                              ([sys.executable, "-S", "-c", CONNECT, "5"], 5, "done\n"),
                              (["sh", "-c", "kill -TERM $$"], -signal.SIGTERM, "")):
        began = time.monotonic()
        done = world.start(argv, is_loaded)
        assert done.child.wait(20) == status, done.describe()
        assert time.monotonic() - began < 2
        assert done.out == out and done.err == "", done.describe()
