"""Debuggers, tracers, checkers and preloaded libraries around a small server and its client."""

import re
import signal
import time

from harness import settings
from harness.settings import scaled

from .suite import Suite

PROGRAMS = settings.TESTS / "programs"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
PRELOADED = {"jemalloc": ("libjemalloc2", f"{LIBRARIES}/libjemalloc.so.2"),
             "tcmalloc": ("libtcmalloc-minimal4", f"{LIBRARIES}/libtcmalloc_minimal.so.4"),
             "faketime": ("libfaketime", f"{LIBRARIES}/faketime/libfaketime.so.1")}


def suites():
    return [Suite("gdb", gdb, ("gcc", "gdb"), takes=25, all_pass=True),
            Suite("strace", strace, ("gcc", "strace"), takes=20, all_pass=True),
            Suite("valgrind", valgrind, ("gcc", "valgrind"), takes=40, all_pass=True),
            *(Suite(f"preload-{name}", lambda way, path=path: preload(way, path), ("gcc", package), takes=8, all_pass=True)
              for name, (package, path) in PRELOADED.items()),
            Suite("asan", lambda way: sanitized(way, "address"), ("gcc",), takes=12, all_pass=True),
            Suite("ubsan", lambda way: sanitized(way, "undefined"), ("gcc",), takes=10, all_pass=True)]


def build(way, *flags):
    program = way.directory / "pingpong"
    way.run(["cc", "-std=gnu11", "-O1", "-g", *flags, "-o", program, PROGRAMS / "pingpong.c"], 60)
    return program


def serve(way, argv, *options, **more):
    """Starts a server; gives it and its port."""
    server = way.start([*argv, "server", "--size", 3000, *options], **more)
    return server, int(way.wait_line(server, '{"port": ', 60).rstrip("}"))


def use(way, argv, port, count, *options, seconds=90, **more):
    """A client that checks each byte."""
    output = way.run([*argv, "client", "--epoll", "--port", port, "--size", 3000, "--count", count, "--warmup", 100, "--verify",
                      *options], seconds, **more)
    assert f'"count": {count},' in output, output


def gdb(way):
    """Stops server and client for a moment, calls functions in them, and lets them go on."""
    program = build(way)
    server, port = serve(way, [program], "--epoll")
    client = way.start([program, "client", "--epoll", "--port", port, "--size", 3000, "--count", 20_000_000, "--verify"])
    time.sleep(0.5)

    def attach(child):
        for _ in range(3):
            output = way.run(["gdb", "-p", child.pid, "-batch", "-nx", "-ex", "thread apply all bt 3", "-ex", "shell sleep 0.3",
                              "-ex", "set language c", "-ex", "print (int) getpid()", "-ex", "detach"], 60, env={"LD_PRELOAD": ""})
            assert f"$1 = {child.pid}" in output, output
            assert child.poll() is None, "it has ended"
    way.case("attach-server", attach, server)
    way.case("attach-client", attach, client)

    def breakpoint():
        output = way.run(["gdb", "-p", server.pid, "-batch", "-nx", "-ex", "break write", "-ex", "continue",
                          "-ex", "bt", "-ex", "delete", "-ex", "detach"], 60, env={"LD_PRELOAD": ""})
        assert "Breakpoint 1" in output and "serve" in output, output
    way.case("breakpoint", breakpoint)

    def goes_on():
        """It ends at the first byte that is wrong."""
        assert client.poll() is None, client.log.read_text()
        way.stop(client)
    way.case("client-goes-on", goes_on)
    way.case("run-under-gdb", lambda: use(way, ["gdb", "-batch", "-nx", "-return-child-result", "-ex", "run", "--args", program],
                                          port, scaled(3000)))
    way.case("server-stops", way.stop, server)
    return way.outcomes


def strace(way):
    program = build(way)
    _, port = serve(way, ["strace", "-f", "-o", way.directory / "server.trace", program], "--epoll")
    way.case("traced-server", use, way, [program], port, scaled(3000))
    way.case("traced-both", use, way, ["strace", "-f", "-o", way.directory / "client.trace", program], port, scaled(2000))

    def attach():
        other, there = serve(way, [program], "--epoll")
        client = way.start([program, "client", "--epoll", "--port", there, "--size", 3000, "--count", 4_000_000, "--seconds",
                            4, "--verify"])
        time.sleep(0.5)
        tracer = way.start(["strace", "-f", "-p", other.pid, "-o", way.directory / "attached.trace"], env={"LD_PRELOAD": ""})
        time.sleep(1)
        tracer.send_signal(signal.SIGINT)
        tracer.wait(20)
        assert client.wait(60) == 0, client.log.read_text()
        way.stop(other)
    way.case("attach-and-detach", attach)

    def calls():
        """Every call of the table that strace makes at its end is a number."""
        output = way.run(["strace", "-f", "-c", program, "client", "--port", port, "--size", 3000, "--count", 500, "--warmup", 1,
                          "--verify"], 60)
        assert re.search(r"100\.00 .* total", output), output
    way.case("count", calls)
    return way.outcomes


def valgrind(way):
    """Memcheck: one thread runs at a time, and what it finds counts."""
    program = build(way)
    memcheck = ["valgrind", "-q", "--error-exitcode=9", program]
    server, port = serve(way, [program], "--epoll")
    way.case("client", lambda: use(way, memcheck, port, scaled(1500), seconds=120))
    way.stop(server)
    server, port = serve(way, memcheck, "--epoll", "--once")
    way.case("both", lambda: use(way, memcheck, port, scaled(1500), seconds=120))

    def clean():
        assert server.wait(60) == 0, server.log.read_text()[-1500:]
    way.case("server-without-errors", clean)
    return way.outcomes


def preload(way, path):
    """Before and after xsmc in LD_PRELOAD, at both ends. (libfaketime's clock stands still.)"""
    program = build(way)
    ours = [str(settings.LIBRARY)] if way.loaded else []
    for name, order in (("before", [path, *ours]), ("after", [*ours, path])):
        env = {"LD_PRELOAD": ":".join(order), "FAKETIME": "2020-01-01 00:00:00"}
        server, port = serve(way, [program], "--epoll", env=env)
        way.case(name, lambda port=port, env=env: use(way, [program], port, scaled(20_000), env=env))

        def loaded(server=server):
            maps = open(f"/proc/{server.pid}/maps", encoding="utf-8").read()
            assert all(library.rsplit("/", 1)[1].split(".so")[0] in maps for library in order), "not loaded"
        way.case(f"{name}-loaded", loaded)
        way.case(f"{name}-stops", way.stop, server)
    return way.outcomes


def sanitized(way, kind):
    """Its own library must come first, or it says so and ends."""
    program = build(way, f"-fsanitize={kind}", "-fno-sanitize-recover=all")
    library = {"address": "libasan.so", "undefined": "libubsan.so"}[kind]
    path = way.run(["cc", f"-print-file-name={library}"], env={"LD_PRELOAD": ""}).strip()
    order = [path, str(settings.LIBRARY)] if way.loaded else [path]
    env = {"LD_PRELOAD": ":".join(order), "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0"}
    server, port = serve(way, [program], "--once", env=env)
    way.case("pingpong", lambda: use(way, [program], port, scaled(5000), env=env))

    def clean():
        assert server.wait(30) == 0, server.log.read_text()[-1500:]
    way.case("server-without-errors", clean)
    # Without its library in LD_PRELOAD, as a user may try it first.
    env = {"ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}
    _, port = serve(way, [program], "--epoll", "--once", env=env)
    way.case("not-first", lambda: use(way, [program], port, scaled(5000), env=env))
    return way.outcomes
