"""Databases: replication and clusters between servers, a process or a thread for each client, bulk data both ways."""

import getpass
import hashlib
import os
import pathlib
import signal
import time

from harness import settings
from harness.services import postgres_programs
from harness.settings import scaled
from harness.status import wait_until
from harness.world import free_port

from .suite import Suite

PROGRAMS = settings.TESTS / "programs"
REDIS = ("redis-server", "redis-tools")


def suites():
    return [Suite("redis-replication", redis_replication, REDIS, takes=20, all_pass=True),
            Suite("redis-cluster", redis_cluster, REDIS, takes=25, all_pass=True),
            Suite("redis-io-threads", redis_threads, REDIS, takes=15, all_pass=True),
            Suite("memcached", memcached, ("memcached",), takes=15, all_pass=True),
            Suite("mariadb", mariadb, ("mariadb-server-core", "mariadb-client"), takes=40, all_pass=True),
            Suite("postgresql", postgresql, ("postgresql", "postgresql-client"), takes=50, all_pass=True)]


def start_redis(way, *options):
    port = free_port()
    directory = way.directory / f"redis{port}"
    directory.mkdir()
    server = way.start(["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", directory,
                        "--protected-mode", "no", *options], port)
    return server, port


def cli(way, port, *words):
    return way.run(["redis-cli", "-p", port, *words], 30).strip()


def info(way, port, section, key):
    return next((line.split(":", 1)[1].strip() for line in cli(way, port, "info", section).splitlines()
                 if line.startswith(f"{key}:")), "")


def digest_of(way, port):
    return cli(way, port, "debug", "digest")


def redis_replication(way):
    """The whole data set goes to the replica by RDB, from a file and from a forked child's pipe; then each write."""
    debug = ("--enable-debug-command", "yes", "--repl-diskless-load", "disabled")
    server, port = start_redis(way, *debug, "--repl-diskless-sync", "no")
    way.run(["redis-cli", "-p", port, "debug", "populate", scaled(40_000), "key", 1000])

    def replica(*options):
        other, there = start_redis(way, *debug, "--replicaof", "127.0.0.1", port, *options)
        wait_until(lambda: info(way, there, "replication", "master_link_status") == "up", 60, "a replica that is in sync", 0.2)
        same(there)
        return other, there

    def same(there):
        wait_until(lambda: digest_of(way, there) == digest_of(way, port), 30, "the same digest at the replica", 0.3)
    first = way.case("sync-by-file", replica)

    def diskless():
        cli(way, port, "config", "set", "repl-diskless-sync", "yes")
        cli(way, port, "config", "set", "repl-diskless-sync-delay", 0)
        return replica("--repl-diskless-load", "on-empty-db")
    second = way.case("sync-by-socket", diskless)

    def written():
        way.run(["redis-benchmark", "-p", port, "-n", scaled(20_000), "-c", 20, "-P", 4, "-r", 5000, "-d", 300, "-t",
                 "set,incr,lpush,sadd", "-q"], 120)
        for _, there in filter(None, (first, second)):
            same(there)
    way.case("writes", written)

    def again():
        """Cut off and back: it goes on where it was."""
        _, there = first
        before = info(way, port, "stats", "sync_full")
        cli(way, port, "client", "kill", "type", "replica")
        cli(way, port, "set", "after", "cut")
        wait_until(lambda: info(way, there, "replication", "master_link_status") == "up", 30, "the replica is back", 0.2)
        same(there)
        assert info(way, port, "stats", "sync_full") == before, "synced from the start"
    way.case("partial-resync", again)
    way.case("stops", way.stop, server)
    return way.outcomes


def redis_cluster(way):
    """Three nodes; clients are sent from one to another, and slots move with their keys."""
    nodes = [start_redis(way, "--cluster-enabled", "yes", "--cluster-node-timeout", 15000, "--appendonly", "no")
             for _ in range(3)]
    ports = [port for _, port in nodes]
    hosts = [f"127.0.0.1:{port}" for port in ports]

    def create():
        way.run(["redis-cli", "--cluster", "create", *hosts, "--cluster-yes"], 90)
        wait_until(lambda: all("cluster_state:ok" in cli(way, port, "cluster", "info") for port in ports), 60, "a cluster", 0.3)
    way.case("create", create)

    def load():
        way.run(["redis-benchmark", "--cluster", "-p", ports[0], "-n", scaled(30_000), "-c", 30, "-r", 3000, "-d", 500, "-t",
                 "set,get", "-q"], 120)
    way.case("benchmark", load)

    def keys():
        for number in range(60):
            way.run(["redis-cli", "-c", "-p", ports[number % 3], "set", f"word{number}", f"value{number}"], 20)
    way.case("redirected-sets", keys)

    def move():
        source = cli(way, ports[0], "cluster", "myid")
        target = cli(way, ports[1], "cluster", "myid")
        way.run(["redis-cli", "--cluster", "reshard", hosts[0], "--cluster-from", source, "--cluster-to", target,
                 "--cluster-slots", 300, "--cluster-yes"], 120)
    way.case("reshard", move)

    def read():
        for number in range(60):
            answer = way.run(["redis-cli", "-c", "-p", ports[(number + 1) % 3], "get", f"word{number}"], 20).strip()
            assert answer.endswith(f"value{number}"), f"word{number}: {answer}"
    way.case("redirected-gets", read)
    for number, (server, _) in enumerate(nodes):
        way.case(f"stops-{number}", way.stop, server)
    return way.outcomes


def redis_threads(way):
    server, port = start_redis(way, "--io-threads", 2, "--io-threads-do-reads", "yes")
    way.case("data", lambda: way.run(["/usr/bin/python3", PROGRAMS / "redis_check.py", port, scaled(600), 1], 120))
    for name, options in (("pipelined", ("-P", 16, "-d", 2000)), ("large", ("-d", 100_000, "-n", scaled(1000))),
                          ("reconnects", ("-k", 0, "-n", scaled(2000)))):
        way.case(name, lambda options=options: way.run(["redis-benchmark", "-p", port, "-c", 30, "-n", scaled(15_000), "-t",
                                                        "set,get", "-q", *options], 120))
    way.case("stops", way.stop, server)
    return way.outcomes


def memcached(way):
    port = free_port()
    user = ["-u", getpass.getuser()] if os.getuid() == 0 else []
    server = way.start(["memcached", "-l", "127.0.0.1", "-p", port, "-U", 0, "-t", 4, "-m", 256, *user], port)
    for name, words in (("few", (2, 2, scaled(300))), ("many", (4, 25, scaled(12)))):
        way.case(name, lambda words=words: way.run(["/usr/bin/python3", PROGRAMS / "memcached_load.py", port, *words], 120))
    way.case("stops", way.stop, server, signal.SIGINT)
    return way.outcomes


def mariadb(way):
    """A thread for each connection."""
    data, port = way.directory / "data", free_port()
    user = [f"--user={getpass.getuser()}"]
    common = ["--no-defaults", f"--datadir={data}"]
    way.run(["mariadb-install-db", *common, *user, "--auth-root-authentication-method=normal", "--skip-test-db"], 120)
    server = way.start(["mariadbd", *common, *user, f"--port={port}", "--bind-address=127.0.0.1", "--skip-name-resolve",
                        f"--socket={way.directory}/sock", f"--pid-file={way.directory}/pid", "--skip-networking=0",
                        "--innodb-flush-log-at-trx-commit=0", "--max-allowed-packet=64M", "--local-infile=1"], port, 60)
    client = ["--no-defaults", "-h127.0.0.1", f"-P{port}", "-uroot", "--protocol=tcp"]

    def sql(text, *options):
        return way.run(["mariadb", *client, "-N", "--quick", *options, "-e", text], 120)

    def slap(*options):
        way.run(["mariadb-slap", *client, "--auto-generate-sql", "--concurrency=16", *options], 120)
    way.case("mysqlslap", slap, f"--number-of-queries={scaled(3000)}", "--auto-generate-sql-load-type=mixed")
    way.case("mysqlslap-reconnects", slap, f"--number-of-queries={scaled(600)}", "--detach=1")

    def infile():
        """20 MB go in from a file at the client's, and come out again."""
        rows = [f"{number}\t{hashlib.sha256(str(number).encode()).hexdigest() * 3}" for number in range(scaled(100_000))]
        text = "\n".join(rows) + "\n"
        (way.directory / "rows").write_text(text)
        sql("create database d; create table d.t (n int primary key, s varchar(300))")
        sql(f"load data local infile '{way.directory}/rows' into table d.t", "--local-infile=1")
        got = sql("select n, s from d.t order by n")
        assert got == text, f"{len(got)} bytes, not {len(text)}, or others"
    way.case("load-data", infile)

    def blob():
        """One packet of 24 MB each way."""
        assert sql("select sha2(repeat('x', 24000000), 256)").strip() == hashlib.sha256(b"x" * 24_000_000).hexdigest()
        got = sql("select repeat('x', 24000000)", "--max-allowed-packet=64M")
        assert got.strip() == "x" * 24_000_000, f"{len(got)} bytes"
    way.case("large-packet", blob)

    def dump():
        text = way.run(["mariadb-dump", *client, "--skip-comments", "d"], 120)
        (way.directory / "dump.sql").write_text(text)
        sql("create database e")
        with open(way.directory / "dump.sql", "rb") as file:
            way.run(["mariadb", *client, "e"], 120, stdin=file)
        sums = {sql(f"checksum table {name}.t").split()[-1] for name in ("d", "e")}
        assert len(sums) == 1, sums
    way.case("dump-and-load", dump)
    way.case("stops", way.stop, server, signal.SIGTERM, 60)
    return way.outcomes


def postgresql(way):
    """A process for each connection, forked after accept. The server refuses to run as root."""
    way.become("postgres")
    programs, port, data = pathlib.Path(postgres_programs()), free_port(), way.directory / "data"
    env = {"PGHOST": "127.0.0.1", "PGPORT": str(port), "PGUSER": "postgres", "PGDATABASE": "postgres", "LC_ALL": "C",
           "HOME": str(way.directory)}

    def run(name, *words, seconds=180, **options):
        return way.run([programs / name, *words], seconds, env=env, **options)
    run("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-N", "--no-locale")
    server = way.start([programs / "postgres", "-D", data, "-p", port, "-c", "listen_addresses=127.0.0.1", "-c",
                        "unix_socket_directories=", "-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "wal_level=minimal",
                        "-c", "max_wal_senders=0", "-c", "max_wal_size=4GB"], port, 60, env=env)
    way.case("pgbench-init", run, "pgbench", "-i", "-s", 5, "-q")

    def bench(*options):
        output = run("pgbench", "-c", 16, "-j", 2, "-t", scaled(150), *options)
        assert "number of failed transactions: 0" in output, output
    way.case("pgbench", bench)
    way.case("pgbench-reconnects", bench, "-C", "-S", "-t", scaled(15))
    way.case("pgbench-prepared", bench, "-M", "prepared", "-S", "-t", scaled(500))
    count = scaled(300_000)
    out = way.directory / "rows"

    def copy_out():
        """About 200 MB."""
        made = run("psql", "-At", "-c", f"copy (select n, repeat(md5(n::text), 20) from generate_series(1, {count}) n) to stdout",
                   "-o", out)
        assert not made, made
        wanted = hashlib.sha256()
        for number in range(1, count + 1):
            wanted.update(f"{number}\t{hashlib.md5(str(number).encode()).hexdigest() * 20}\n".encode())
        with open(out, "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == wanted.hexdigest(), f"{out.stat().st_size} bytes differ"
    way.case("copy-out", copy_out)

    def copy_in():
        run("psql", "-At", "-c", "create unlogged table t (n int, s text)")
        with open(out, "rb") as file:
            run("psql", "-At", "-c", "copy t from stdin", stdin=file)
        got = run("psql", "-At", "-c", "select count(*), sum(n), bool_and(s = repeat(md5(n::text), 20)) from t").strip()
        assert got == f"{count}|{count * (count + 1) // 2}|t", got
    way.case("copy-in", copy_in)

    def cancel():
        """A second connection cancels what the first one waits for."""
        child = way.start([programs / "psql", "-At", "-c", "select 'begun'; select pg_sleep(60)"], env=env)
        asked = "select pg_cancel_backend(pid) from pg_stat_activity where query like '%pg_sleep(60)' and pid <> pg_backend_pid()"
        wait_until(lambda: run("psql", "-At", "-c", asked).strip() == "t", 20, "a query to cancel", 0.2)
        begin = time.monotonic()
        assert child.wait(30) == 1 and time.monotonic() - begin < 25
    way.case("cancel", cancel)
    way.case("stops", way.stop, server, signal.SIGINT, 60)
    return way.outcomes
