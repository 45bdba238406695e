"""Real programs, unmodified, both ends under xsmc: same results as plain, and the bytes ride RMBs."""

import hashlib
import json
import random
import shutil
import signal
import subprocess

import pytest

from harness import services, settings
from harness.settings import scaled
from harness.status import nodes, wait_until
from harness.world import python

REDIS = {
    "plain": (["-n", scaled(60_000)], 60_000),
    "pipelined": (["-n", scaled(600_000), "-P", 16], 600_000),
    "large": (["-n", scaled(6_000), "-d", 65536], 6_000),
}


def benchmark(world, port, options, loaded=True):
    """Runs redis-benchmark; gives the rates by test name. 50 clients, SET and GET."""
    done = world.run(["redis-benchmark", "-h", "127.0.0.1", "-p", port, "-c", 50, "-t", "set,get", "--csv", *options], loaded,
                     seconds=60 + 60 * settings.SCALE)
    assert "rror" not in done.out + done.err, done.describe()
    return {line.split(",")[0].strip('"'): float(line.split(",")[1].strip('"')) for line in done.out.splitlines()[1:]}


@pytest.mark.parametrize("kind", REDIS)
def test_redis_benchmark(xsmc, need, kind):
    need("redis-server", "redis-benchmark")
    server, port = services.redis(xsmc)
    with xsmc.watch(0.03) as watch:
        rates = benchmark(xsmc, port, REDIS[kind][0])
    print(rates)
    assert set(rates) == {"SET", "GET"} and all(rate > 0 for rate in rates.values())
    xsmc.assert_rmb(watch)
    cli = xsmc.run(["redis-cli", "-p", port, "info", "stats"], loaded=False) if shutil.which("redis-cli") else None
    if cli:
        calls = int(next(line.split(":")[1] for line in cli.out.splitlines() if line.startswith("total_commands")))
        assert calls >= 2 * scaled(REDIS[kind][1])
    server.stop()
    assert server.child.returncode == 0, server.describe()


def test_redis_threads(xsmc, need):
    """Redis with I/O threads: several threads read and write sockets of one epoll set."""
    need("redis-server", "redis-benchmark")
    _, port = services.redis(xsmc, True, "--io-threads", 3, "--io-threads-do-reads", "yes")
    with xsmc.watch() as watch:
        benchmark(xsmc, port, ["-n", scaled(50_000), "-P", 8, "-d", 2000])
    xsmc.assert_rmb(watch)


def test_redis_data(xsmc, need):
    """What was written is read back, while the server forks to save in the background; the saved file is right."""
    need("redis-server", "redis-cli")
    count, seed = scaled(1500), settings.SEED
    server, port = services.redis(xsmc)
    with xsmc.watch() as watch:
        xsmc.run(python("redis_check.py", port, count, seed), seconds=120)
    xsmc.assert_rmb(watch)
    done = xsmc.run(["redis-cli", "-p", port, "SHUTDOWN", "SAVE"], status=None)
    server.wait(30)
    assert (server.directory / "dump.rdb").stat().st_size > count, done.describe()
    _, again = services.redis(xsmc, False, "--dir", server.directory)
    wait_until(lambda: xsmc.run(["redis-cli", "-p", again, "DBSIZE"], loaded=False).out.strip() == str(count), 10,
               f"{count} keys in the saved file", every=0.2)


def make_file(root, size):
    """A file of random content; its checksum."""
    content = random.Random(settings.SEED).randbytes(1 << 20) * (size >> 20)
    (root / "file").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def download(world, port, loaded=True):
    target = world.tmp / f"download{len(world.processes)}"
    world.run(["curl", "-sS", "-f", "-o", target, f"http://127.0.0.1:{port}/file"], loaded)
    with open(target, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target.unlink()
    return digest


@pytest.mark.parametrize("sendfile", [True, False])
def test_nginx_curl(xsmc, need, sendfile):
    """A file of 200 MB from nginx with two workers, by sendfile and by writev."""
    need("nginx", "curl")
    _, port, other, root = services.nginx(xsmc)
    digest = make_file(root, 200 << 20)
    with xsmc.watch(0.03) as watch:
        for _ in range(3):
            assert download(xsmc, port if sendfile else other) == digest
    xsmc.assert_rmb(watch)


def test_nginx_curl_limited(eager, need):
    """A slow reader: the ring is full most of the time, and nginx waits for room."""
    need("nginx", "curl")
    _, _, port, root = services.nginx(eager)
    digest = make_file(root, 24 << 20)
    target = eager.tmp / "slow"
    with eager.watch() as watch:
        eager.run(["curl", "-sS", "-f", "--limit-rate", "12M", "-o", target, f"http://127.0.0.1:{port}/file"])
    assert hashlib.sha256(target.read_bytes()).hexdigest() == digest
    eager.assert_rmb(watch, 0.1)


def test_nginx_wrk(xsmc, need):
    need("nginx", "wrk")
    _, _, port, root = services.nginx(xsmc)
    make_file(root, 1 << 20)
    (root / "small").write_bytes(b"x" * 4000)
    with xsmc.watch() as watch:
        done = xsmc.run(["wrk", "-t", 2, "-c", 100, "-d", f"{scaled(3, 2)}s", f"http://127.0.0.1:{port}/small"])
    print(done.out)
    assert "Socket errors" not in done.out and "Non-2xx" not in done.out, done.describe()
    assert int(done.out.split(" requests in")[0].split()[-1]) > 1000, done.describe()
    xsmc.assert_rmb(watch)


IPERF = {"normal": [], "reverse": ["-R"], "bidir": ["--bidir"], "parallel": ["-P", "4"]}


def iperf(world, port, options, loaded=True, seconds=2):
    done = world.run(["iperf3", "-c", "127.0.0.1", "-p", port, "-t", scaled(seconds, 1), "-J", *options], loaded,
                     60 + 10 * settings.SCALE)
    end = json.loads(done.out)
    assert "error" not in end, end["error"]
    end = end["end"]
    for direction in ("", "_bidir_reverse") if "--bidir" in options else ("",):
        sent, received = end[f"sum_sent{direction}"]["bytes"], end[f"sum_received{direction}"]["bytes"]
        print(f"iperf3{direction}: {sent} sent, {received} received")
        assert received > 10_000_000 and 0.9 * sent <= received <= sent, (sent, received)


@pytest.mark.parametrize("kind", IPERF)
def test_iperf3(xsmc, need, kind):
    need("iperf3")
    server, port = services.iperf3(xsmc)
    with xsmc.watch() as watch:
        iperf(xsmc, port, IPERF[kind])
        iperf(xsmc, port, ["-l", "7777", *IPERF[kind]], seconds=1)
    assert server.running(), server.describe()
    xsmc.assert_rmb(watch)


def test_memcached(xsmc, need):
    """Four server threads, eight client threads."""
    need("memcached")
    server, port = services.memcached(xsmc)
    with xsmc.watch() as watch:
        done = xsmc.run(python("memcached_check.py", port, scaled(1500), settings.SEED), seconds=120)
    assert "ok" in done.out
    xsmc.assert_rmb(watch)
    server.stop(signal.SIGINT)


@pytest.mark.slow
def test_postgres(xsmc, need):
    """A process for each connection, forked after accept."""
    if not services.postgres_programs():
        need("initdb")
    database = services.Postgres(xsmc)
    server = database.start()
    with xsmc.watch() as watch:
        database.run("pgbench", "-i", "-s", 5, "-q")
        done = database.run("pgbench", "-c", 8, "-j", 2, "-T", scaled(5, 3))
        assert "number of failed transactions: 0" in done.out, done.describe()
        rows = database.run("psql", "-At", "-c", "select count(*), sum(hashtext(repeat(aid::text, 40)) % 7) is not null "
                            "from pgbench_accounts")
        copied = database.run("psql", "-At", "-c", "copy (select aid, repeat(md5(aid::text), 20) from pgbench_accounts "
                              "where aid <= 150000 order by aid) to stdout")
    xsmc.assert_rmb(watch)
    plain = database.run("psql", "-At", "-c", "copy (select aid, repeat(md5(aid::text), 20) from pgbench_accounts "
                         "where aid <= 150000 order by aid) to stdout", loaded=False)
    assert rows.out.startswith("500000|"), rows.describe()
    assert copied.out == plain.out and len(copied.out) > 90_000_000
    server.stop(signal.SIGINT, 30)


def test_asyncio_500(xsmc):
    """500 connections at once through one epoll set on each side."""
    server, port = services.asyncio_echo(xsmc)
    with xsmc.watch() as watch:
        done = xsmc.run(python("asyncio_echo.py", "client", port, 500, scaled(12, 4), settings.SEED), seconds=120)
    assert "ok 500" in done.out
    if xsmc.upgrade == "eager":
        xsmc.assert_rmb(watch)
    assert server.running() and "Traceback" not in server.err, server.describe()


@pytest.mark.parametrize("what", ["EXEC:cat", "EXEC:cat,nofork"])
def test_socat_exec(xsmc, need, what):
    """Forks and execs: with a socket pair between socat and cat, and with the connection itself as cat's input and output."""
    need("socat")
    _, port = services.socat(xsmc, True, what)
    with xsmc.watch(0.05) as watch:
        done = xsmc.run(python("echo_client.py", port, 40_000_000, settings.SEED, 1))
    assert "ok" in done.out
    if what == "EXEC:cat":
        xsmc.assert_rmb(watch, 0.3)


def test_same_results_as_plain(eager, need):
    """The same requests to the same server by a loaded and by a plain client give the same bytes."""
    need("nginx", "curl")
    _, port, _, root = services.nginx(eager)
    (root / "page").write_bytes(random.Random(7).randbytes(300_000))
    outputs = set()
    for loaded in (True, False, True):
        done = eager.run(["curl", "-sS", "-i", f"http://127.0.0.1:{port}/page", "-o", eager.tmp / "answer", "-H",
                          "Range: bytes=1000-200000"], loaded)
        answer = (eager.tmp / "answer").read_bytes()
        outputs.add(b"\n".join(line for line in answer.split(b"\n") if not line.startswith(b"Date:")))
        assert done.out == "" and done.err == ""
    assert len(outputs) == 1


def test_smctl_run(eager, need):
    """`smctl run` starts a program with the library, found without the test's help."""
    if eager.not_asserted("smctl run"):
        pytest.skip("plain mode: smctl run would preload the library")
    need("redis-server", "redis-benchmark")
    _, port = services.redis(eager)
    with eager.watch() as watch:
        done = subprocess.run([str(settings.SMCTL), "run", "--", "redis-benchmark", "-h", "127.0.0.1", "-p", str(port), "-t",
                               "get", "-n", "400000", "-q"], env=eager.env(False), capture_output=True, text=True, timeout=60,
                              check=False)
    assert done.returncode == 0 and "requests per second" in done.stdout, done
    eager.assert_rmb(watch)


def test_shown_names(eager, program):
    """Status and the peer's greeting show the name by which a program was started, not that of the file behind a link."""
    link = eager.tmp / "named-by-link"
    link.symlink_to(program("integrity"))
    common = ["pingpong", "--count", 500, "--hold", 1500]
    server = eager.start([link, *common, "--role", "server"])
    client = eager.start([program("integrity"), *common, "--role", "client", "--port", server.wait_line("port ")])
    if not eager.not_asserted("the names that are shown"):
        seen = {(node["program"], peer["peer_program"]) for node in nodes(eager.wait_rmb()) for peer in node["links"]}
        assert seen == {("named-by-link", "integrity"), ("integrity", "named-by-link")}
    eager.finish(client, server)
