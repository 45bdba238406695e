"""Programs that xsmc can't see into: their connections stay on TCP, with a reason that is shown, whatever the other end is."""

from harness import settings

from .suite import Suite

PROGRAMS = settings.TESTS / "programs"


def suites():
    return [Suite("static-glibc", lambda way: static(way, "cc"), ("gcc", "libc6-dev"), False, 8, True),
            Suite("static-musl", lambda way: static(way, "musl-gcc"), ("musl-tools",), False, 8, True),
            Suite("go", go, ("golang-go",), False, 25, True),
            Suite("liburing", uring, ("gcc", "liburing-dev"), False, 8, True)]


def clients(way, port, count):
    """Clients at once, each with small exchanges, bulk both ways, and a half-close at the end."""
    children = [way.start(["/usr/bin/python3", PROGRAMS / "echo_client.py", port, settings.scaled(4_000_000), number])
                for number in range(count)]
    for child in children:
        assert child.wait(90) == 0 and "ok" in child.log.read_text(), child.log.read_text()[-1500:]


def serve(way, argv, count, reason, first=1):
    server = way.start(argv)
    port = int(way.wait_line(server, "port "))
    for name, number in (("one-client", first), ("clients", count)):
        way.case(name, way.on_tcp, reason, clients, way, port, number)
    return server


def static(way, compiler):
    program = way.directory / "static_echo"
    way.run([compiler, "-std=gnu11", "-O2", "-static", "-I", PROGRAMS, "-o", program, PROGRAMS / "static_echo.c"], 60)
    server = serve(way, [program, 6], 5, "no-peer")
    way.case("ends", lambda: server.wait(20))
    return way.outcomes


def go(way):
    program = way.directory / "go_echo"
    way.run(["go", "build", "-o", program, PROGRAMS / "go_echo.go"], 300,
            env={"HOME": str(way.directory), "GOFLAGS": "-mod=mod", "GO111MODULE": "off", "GOCACHE": str(way.directory / "cache")})
    server = serve(way, [program], 5, "no-peer")
    way.case("stops", way.stop, server)
    return way.outcomes


def uring(way):
    program = way.directory / "uring_echo"
    way.run(["cc", "-std=gnu11", "-O2", "-I", PROGRAMS, "-o", program, PROGRAMS / "uring_echo.c", "-luring"], 60)
    server = serve(way, [program, 6], 5, "no-peer")
    way.case("ends", lambda: server.wait(20))
    return way.outcomes
