"""One end under xsmc, the other plain, in both orders: everything works over TCP, and the reason is shown."""

import signal
import subprocess

import pytest

from harness import services, settings
from harness.settings import scaled
from harness.world import python
from test_programs import benchmark, download, iperf, make_file

pytestmark = pytest.mark.parametrize("loaded", ["server", "client"])


def test_redis(eager, need, loaded):
    need("redis-server", "redis-benchmark")
    _, port = services.redis(eager, loaded == "server")
    with eager.watch() as watch:
        rates = benchmark(eager, port, ["-n", scaled(30_000)], loaded == "client")
    assert set(rates) == {"SET", "GET"}
    eager.assert_reason(watch)


def test_nginx(eager, need, loaded):
    need("nginx", "curl")
    _, port, other, root = services.nginx(eager, loaded == "server")
    digest = make_file(root, 100 << 20)
    with eager.watch(0.03) as watch:
        for one in (port, other, port, other):
            assert download(eager, one, loaded == "client") == digest
    eager.assert_reason(watch)


def test_iperf3(eager, need, loaded):
    need("iperf3")
    _, port = services.iperf3(eager, loaded == "server")
    with eager.watch() as watch:
        iperf(eager, port, ["--bidir"], loaded == "client", seconds=1)
    eager.assert_reason(watch)


def test_memcached(eager, need, loaded):
    need("memcached")
    _, port = services.memcached(eager, loaded == "server")
    with eager.watch() as watch:
        done = eager.run(python("memcached_check.py", port, scaled(500), settings.SEED), loaded == "client")
    assert "ok" in done.out
    eager.assert_reason(watch)


def test_postgres(eager, need, loaded):
    if not services.postgres_programs():
        need("initdb")
    database = services.Postgres(eager)
    server = database.start(loaded == "server")
    with eager.watch() as watch:
        database.run("pgbench", "-i", "-s", 1, "-q", loaded=loaded == "client")
        done = database.run("pgbench", "-c", 8, "-j", 2, "-T", 2, loaded=loaded == "client")
    assert "number of failed transactions: 0" in done.out, done.describe()
    eager.assert_reason(watch)
    server.stop(signal.SIGINT, 30)


def test_asyncio(eager, loaded):
    _, port = services.asyncio_echo(eager, loaded == "server")
    with eager.watch() as watch:
        done = eager.run(python("asyncio_echo.py", "client", port, 500, 6, settings.SEED), loaded == "client", 120)
    assert "ok 500" in done.out
    eager.assert_reason(watch)


@pytest.mark.parametrize("what", ["EXEC:cat", "EXEC:cat,nofork"])
def test_socat(eager, need, loaded, what):
    need("socat")
    _, port = services.socat(eager, loaded == "server", what)
    with eager.watch(0.03) as watch:
        done = eager.run(python("echo_client.py", port, 20_000_000, settings.SEED), loaded == "client")
    assert "ok" in done.out
    if what == "EXEC:cat" or loaded == "client":
        eager.assert_reason(watch)
    else:
        # cat has never connected or accepted anything: whether it is counted at all is checked elsewhere.
        assert watch.rmb == 0, watch


def test_server_restarted_otherwise(eager, loaded):
    """A long-lived client meets first a server of one kind, then on the same port one of the other kind."""
    first = loaded == "server"
    server, port = services.asyncio_echo(eager, first)
    with eager.watch(0.05) as watch:
        client = eager.start(python("echo_client.py", port, 40_000_000, settings.SEED, 3), stdin=subprocess.PIPE)
        for turn in range(2):
            client.wait_line(f"next {turn}")
            server.kill()
            first = not first
            server, _ = services.asyncio_echo(eager, first, port)
            client.child.stdin.write(b"go\n")
            client.child.stdin.flush()
        client.wait(60)
        client.child.stdin.close()
    if not eager.not_asserted("RMBs with the loaded servers"):
        assert watch.rmb > 0, watch
        assert "no-peer" in watch.reasons, watch
