"""Real programs, unmodified, between two hosts: same results as plain, and their bytes ride SMC-R."""

import getpass
import hashlib
import json
import os
import socket
import subprocess
import sys
import time

from harness import settings
from harness.hosts import CONTROL_PORT, check
from harness.net import *

TESTS = os.path.dirname(os.path.abspath(__file__))
SCRATCH = "/dev/shm/programs"


class Service:
    """A server program in this guest, ready once its port is open. stop() ends it and asserts how it ended."""

    def __init__(self, command, port, **options):
        os.makedirs(SCRATCH, exist_ok=True)
        self._log = open(f"{SCRATCH}/{port}.log", "w+")
        self._process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=self._log,
                                         stderr=subprocess.STDOUT, cwd=SCRATCH, **options)
        until(lambda: self._ended() or listens(port), 10, f"port {port} is open")
        assert not self._ended(), self.said()
        self.pid = self._process.pid

    def _ended(self):
        return self._process.poll() is not None

    def said(self):
        self._log.seek(0)
        return self._log.read()

    def stop(self, status=(0,)):
        self._process.terminate()
        try:
            ended = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            ended = "killed"
        assert ended in status, f"{ended}: {self.said()}"
        assert "panicked" not in self.said()


def listens(port):
    """Whether something listens on a port, without a connection that the server would count."""
    lines = open("/proc/net/tcp").readlines()[1:] + open("/proc/net/tcp6").readlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def run(*command, seconds=60, status=0):
    """Runs a client program to its end; gives what it printed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def between_hosts():
    """The connections of this host with the other one, as their nodes show them."""
    return [entry for document in node_documents() for entry in document["connections"]
            if entry["peer"].startswith(("10.9.", "[fd09:")) and not entry["peer"].endswith(f":{CONTROL_PORT}")]


def smc_bytes():
    """(bytes on RMBs, reasons of connections that have bytes on TCP) of the connections with the other host."""
    entries = between_hosts()
    tcp = [(entry["local"], entry["peer"], entry.get("reason")) for entry in entries
           if entry["tx"]["bytes_tcp"] or entry["rx"]["bytes_tcp"]]
    return sum(entry[way]["bytes_rmb"] for entry in entries for way in ("tx", "rx")), tcp


def sent_packets():
    with open("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts") as counter:
        return int(counter.read())


class Watched:
    """Asserts that what runs meanwhile puts its bytes on RMBs and RoCE, and none into TCP."""

    def __init__(self, packets=20):
        self._packets, self.most = packets, 0

    def __enter__(self):
        self._before, self._stop = sent_packets(), threading.Event()
        self._thread = bg(self._run)
        return self

    def _run(self):
        while not self._stop.wait(0.05):
            self.look()

    def look(self):
        rmb, tcp = smc_bytes()
        assert not tcp, f"bytes went over TCP: {tcp}"
        self.most = max(self.most, rmb)

    def __exit__(self, kind, *_):
        self._stop.set()
        self._thread.join()
        if kind is None:
            assert self.most > 0, "no connection on RMBs was seen"
            assert sent_packets() - self._before >= self._packets, "RoCE was not used"


@check(seconds=90, needs=("redis-server", "redis-benchmark", "redis-cli"))
def test_redis(t):
    """SET and GET by many clients, small and large values, pipelined too; what was written is read back."""
    t.peer("redis = Service(['redis-server', '--port', 7001, '--bind', OWN, '--save', '', '--protected-mode', 'no'], 7001)")
    for options in (["-n", 600, "-c", 20], ["-n", 2400, "-c", 5, "-P", 16], ["-n", 100, "-c", 5, "-d", 65536]):
        with Watched():
            said = run("redis-benchmark", "-h", PEER, "-p", 7001, "-t", "set,get", "--csv", *options)
        rates = [line.split(",")[0].strip('"') for line in said.splitlines()[1:]]
        assert rates == ["SET", "GET"] and "rror" not in said, said
    for number in range(5):
        assert run("redis-cli", "-h", PEER, "-p", 7001, "SET", f"key{number}", f"value {number}") == "OK\n"
    assert run("redis-cli", "-h", PEER, "-p", 7001, "GET", "key3") == "value 3\n"
    assert t.peer("smc_bytes()[1]") == []
    t.peer("redis.stop()")


NGINX = """
{user} worker_processes 2; daemon off; pid {folder}/nginx.pid; error_log stderr;
events {{ worker_connections 500; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen {own}:7011; listen [{own6}]:7011; sendfile on; root {folder}; }}
    server {{ listen {own}:7012; sendfile off; root {folder}; }}
}}"""


def start_nginx(own, own6):
    """nginx with two workers, and files of 4 MB and 25 MB (100 MB at a scale of 4); gives it with the files' checksums."""
    os.makedirs(SCRATCH, exist_ok=True)
    digests = {}
    for name, millions in (("file", settings.scaled(4)), ("big", settings.scaled(25))):
        content = b"".join(chance.randbytes(1000) * 1000 for _ in range(millions))
        digests[name] = hashlib.sha256(content).hexdigest()
        with open(f"{SCRATCH}/{name}", "wb") as file:
            file.write(content)
    with open(f"{SCRATCH}/nginx.conf", "w") as file:
        user = f"user {getpass.getuser()};" if os.getuid() == 0 else ""
        file.write(NGINX.format(folder=SCRATCH, own=own, own6=own6, user=user))
    command = ["nginx", "-p", SCRATCH, "-c", f"{SCRATCH}/nginx.conf", "-e", "stderr"]
    return Service(command, 7011), digests


@check(seconds=settings.scaled(90, least=60), needs=("nginx", "curl"))
def test_nginx_and_curl(t):
    """A file from a worker that its master has forked: by sendfile and by writev, over IPv4 and IPv6; several at once."""
    digests = t.peer("nginx, digests = start_nginx(OWN, OWN6)\ndigests")
    urls = (f"http://{PEER}:7011/file", f"http://{PEER}:7011/big", f"http://{PEER}:7012/file", f"http://[{PEER6}]:7011/file")
    with Watched(packets=1000):
        for url in urls:
            run("curl", "-sS", "-f", "-g", "-o", f"{SCRATCH}-got", url)
            with open(f"{SCRATCH}-got", "rb") as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == digests[url.rpartition("/")[2]], url
        run("curl", "-sS", "-f", "-Z", *(word for number in range(3) for word in ("-o", f"{SCRATCH}-{number}", urls[0])))
        for number in range(3):
            with open(f"{SCRATCH}-{number}", "rb") as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == digests["file"], number
    assert t.peer("smc_bytes()[1]") == []
    t.peer("nginx.stop()")


@check(seconds=90, needs=("iperf3",))
def test_iperf3(t):
    """Both directions, and both at once; the numbers of both ends agree."""
    t.peer("iperf3 = Service(['iperf3', '-s', '-B', OWN, '-p', 7021], 7021)")
    for options in ([], ["-R"], ["--bidir"], ["-P", 3]):
        with Watched(packets=200):
            end = json.loads(run("iperf3", "-c", PEER, "-p", 7021, "-t", 1, "-J", *map(str, options)))
        assert "error" not in end, end["error"]
        end = end["end"]
        for direction in ("", "_bidir_reverse") if "--bidir" in options else ("",):
            sent, received = end[f"sum_sent{direction}"]["bytes"], end[f"sum_received{direction}"]["bytes"]
            assert 250_000 < received <= sent, (options, sent, received)
    t.peer("iperf3.stop((0, 1))")


@check(seconds=60, needs=("memcached",))
def test_memcached(t):
    """Values of up to 800 kB; four threads share one listening socket."""
    t.peer("user = ['-u', getpass.getuser()] if os.getuid() == 0 else []\n"
           "memcached = Service(['memcached', '-l', OWN, '-p', 7031, '-U', 0, '-t', 2, '-m', 64, *user], 7031)")
    with Watched():
        socks = [socket.create_connection((PEER, 7031)) for _ in range(6)]
        values = {}
        for turn in range(60):
            key = f"key{turn}"
            value = chance.randbytes(chance.choice((1, 100, 5000, 70_000, 800_000 if turn % 10 == 0 else 9)))
            values[key] = value
            sock = socks[turn % len(socks)]
            sender = bg(sock.sendall, b"set %s 0 0 %d\r\n%s\r\n" % (key.encode(), len(value), value))
            assert recv_exact(sock, 8) == b"STORED\r\n"
            sender.join()
        for turn, (key, value) in enumerate(values.items()):
            sock = socks[-turn % len(socks)]
            sock.sendall(b"get %s\r\n" % key.encode())
            wanted = b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key.encode(), len(value), value)
            assert recv_exact(sock, len(wanted)) == wanted, key
        for sock in socks:
            sock.close()
    t.peer("memcached.stop()")


ECHO = """
import asyncio, sys
async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2]), backlog=512)
    async with server:
        await server.serve_forever()
asyncio.run(main())
"""

CLIENTS = """
import asyncio, random, sys
async def client(number, few, all_open):
    draw = random.Random(number)
    async with few:
        reader, writer = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    await all_open.wait()
    for turn in range(5):
        data = draw.randbytes(draw.choice((1, 500, 9000)))
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
async def main():
    # A handshake takes some milliseconds in an emulated machine, and whoever waits too long gets TCP.
    few, all_open = asyncio.Semaphore(10), asyncio.Barrier(int(sys.argv[3]))
    await asyncio.gather(*(client(number, few, all_open) for number in range(all_open.parties)))
    print("all done")
asyncio.run(main())
"""


@check(seconds=90)
def test_asyncio(t):
    """Sixty connections at once between two event loops, over IPv4, and then some over IPv6."""
    for host, port, count in (("PEER", 7041, 60), ("PEER6", 7042, 20)):
        peer = PEER if host == "PEER" else PEER6
        t.peer(f"echo_server = Service([sys.executable, '-c', ECHO, {host.replace('PEER', 'OWN')}, port], port)", port=port)
        with Watched():
            assert run(sys.executable, "-c", CLIENTS, peer, port, count) == "all done\n"
        t.peer("echo_server.stop((-15,))")
