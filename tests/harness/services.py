"""Starts the real servers that the tests use, each with files of its own in the test's directory."""

import getpass
import os
import pathlib
import pwd
import shutil
import stat

from .world import free_port, python


def redis(world, loaded=True, *options):
    port = free_port()
    directory = world.tmp / f"redis{port}"
    directory.mkdir()
    process = world.start(["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", directory,
                           "--protected-mode", "no", *options], loaded)
    process.wait_port(port)
    process.directory = directory
    return process, port


def nginx(world, loaded=True):
    """Two workers; gives (process, port with sendfile, port without, document root)."""
    base = world.tmp / f"nginx{len(world.processes)}"
    root = base / "www"
    root.mkdir(parents=True)
    (base / "temp").mkdir()
    with_sendfile, without = free_port(), free_port()
    user = f"user {getpass.getuser()};" if os.getuid() == 0 else ""
    temp = "".join(f"{kind}_temp_path {base}/temp/{kind};" for kind in
                   ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    servers = "".join(f"server {{ listen 127.0.0.1:{port}; sendfile {word}; root {root}; }}"
                      for port, word in ((with_sendfile, "on"), (without, "off")))
    (base / "nginx.conf").write_text(f"""
        {user}
        worker_processes 2; daemon off; pid {base}/nginx.pid; error_log {base}/error.log;
        events {{ worker_connections 1000; }}
        http {{ access_log off; {temp} {servers} }}
    """)
    process = world.start(["nginx", "-p", base, "-c", base / "nginx.conf", "-e", base / "error.log"], loaded)
    process.wait_port(with_sendfile).wait_port(without)
    return process, with_sendfile, without, root


def memcached(world, loaded=True):
    port = free_port()
    user = ["-u", getpass.getuser()] if os.getuid() == 0 else []
    process = world.start(["memcached", "-l", "127.0.0.1", "-p", port, "-U", 0, "-t", 4, "-m", 128, *user], loaded)
    process.wait_port(port)
    return process, port


def iperf3(world, loaded=True):
    port = free_port()
    process = world.start(["iperf3", "-s", "-B", "127.0.0.1", "-p", port], loaded)
    process.wait_port(port)
    return process, port


def asyncio_echo(world, loaded=True, port=None):
    port = port or free_port()
    process = world.start(python("asyncio_echo.py", "server", port), loaded)
    process.wait_port(port)
    return process, port


def socat(world, loaded=True, what="EXEC:cat"):
    port = free_port()
    process = world.start(["socat", "-t", "30", f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork", what], loaded)
    process.wait_port(port)
    return process, port


def postgres_programs():
    """The directory of initdb, postgres and pgbench; None without them."""
    found = [str(path.parent) for path in sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    if not found and shutil.which("initdb"):
        found = [os.path.dirname(os.path.realpath(shutil.which("initdb")))]
    return found[-1] if found else None


class Postgres:
    """A database cluster of its own; as root, everything runs as the user postgres (the server refuses root)."""

    def __init__(self, world):
        self.world, self.port, self.bin = world, free_port(), postgres_programs()
        self.base = world.tmp / "pg"
        self.base.mkdir()
        self.options = {"cwd": self.base}
        if os.getuid() == 0:
            account = pwd.getpwnam("postgres")
            self.options.update(user=account.pw_uid, group=account.pw_gid, extra_groups=[])
            for path in (self.base, world.runtime):
                os.chown(path, account.pw_uid, account.pw_gid)
            for path in [self.base, *self.base.parents]:
                if os.stat(path).st_uid == 0:
                    os.chmod(path, os.stat(path).st_mode | stat.S_IXOTH | stat.S_IXGRP)
        self.env = {"PGHOST": "127.0.0.1", "PGPORT": self.port, "PGUSER": "postgres", "PGDATABASE": "postgres",
                    "HOME": self.base}

    def run(self, name, *arguments, loaded=True, seconds=120):
        return self.world.run([f"{self.bin}/{name}", *arguments], loaded, seconds, env=self.env, **self.options)

    def start(self, loaded=True):
        data = self.base / "data"
        self.run("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-N", "--no-locale", loaded=False)
        process = self.world.start(
            [f"{self.bin}/postgres", "-D", data, "-p", self.port, "-c", "listen_addresses=127.0.0.1", "-c",
             "unix_socket_directories=", "-c", "fsync=off", "-c", "synchronous_commit=off"],
            loaded, env=self.env, **self.options)
        process.wait_port(self.port, 30)
        return process
