"""Web servers and proxies: several processes that share a listener, and connections between servers."""

import hashlib
import random
import signal
import time

from harness import settings
from harness.settings import scaled
from harness.world import free_port

from .suite import Suite

CHECK = settings.TESTS / "programs" / "http_check.py"


def suites():
    return [Suite("haproxy", haproxy, ("haproxy", "nginx-light", "curl"), takes=15, all_pass=True),
            Suite("nginx-http2", http2, ("nginx-light", "curl", "openssl"), takes=10, all_pass=True),
            Suite("apache-prefork", lambda way: apache(way, "prefork"), ("apache2-bin",), takes=15, all_pass=True),
            Suite("apache-event", lambda way: apache(way, "event"), ("apache2-bin",), takes=15, all_pass=True),
            Suite("gunicorn", gunicorn, ("gunicorn", "curl"), takes=15, all_pass=True)]


def make_files(root):
    """Two files; gives their digests by name."""
    root.mkdir(parents=True)
    digests = {}
    for name, size in (("small", 6000), ("big", 24 << 20)):
        data = random.Random(name).randbytes(size)
        (root / name).write_bytes(data)
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests


def http(way, port, digests):
    """Requests by our client over connections that stay open and that don't, and downloads by curl."""
    small = ("get", "/small", digests["small"])
    way.case(f"{port.name}-keep-alive", check, way, port, *small, 16, scaled(60), "keep")
    way.case(f"{port.name}-close", check, way, port, *small, 8, scaled(25), "close")
    way.case(f"{port.name}-big", check, way, port, "get", "/big", digests["big"], 3, 2, "keep")


def check(way, port, *words):
    return way.run(["/usr/bin/python3", CHECK, port.number, *words], 90)


def curl(way, port, digest, *options):
    """A download in parallel connections, whose content is checked."""
    way.run(["curl", "-sS", "-f", *options, "-o", "curl.out", f"http://127.0.0.1:{port.number}/big"])
    got = hashlib.sha256((way.directory / "curl.out").read_bytes()).hexdigest()
    assert got == digest, f"curl got {got}"


class Port:
    """A free port, and what it is for."""

    def __init__(self, name):
        self.name, self.number = name, free_port()


def nginx_command(way, name, servers, extra=""):
    """The command line of an nginx with two workers."""
    base = way.directory / name
    (base / "temp").mkdir(parents=True)
    temp = "".join(f"{kind}_temp_path {base}/temp/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (base / "nginx.conf").write_text(f"""
        user root;
        worker_processes 2; daemon off; pid {base}/nginx.pid; error_log {base}/error.log;
        events {{ worker_connections 500; }}
        http {{ access_log off; keepalive_requests 100000; {temp} {extra} {servers} }}
    """)
    return ["nginx", "-p", base, "-c", base / "nginx.conf", "-e", base / "error.log"]


def haproxy(way):
    """In front of two nginx, with connections to them that are kept, and with a new one for each request."""
    digests = make_files(way.directory / "www")
    behind = [Port("nginx"), Port("nginx")]
    for number, port in enumerate(behind):
        server = f"server {{ listen 127.0.0.1:{port.number}; sendfile {'on' if number else 'off'}; root {way.directory}/www; }}"
        way.start(nginx_command(way, f"nginx{number}", server), port.number)
    keep, close = Port("reuse"), Port("httpclose")
    backends = "".join(f"  server s{n} 127.0.0.1:{port.number} check inter 200ms\n" for n, port in enumerate(behind))
    config = way.directory / "haproxy.cfg"
    config.write_text(f"""
global
  nbthread 2
  stats socket {way.directory}/stats mode 600 level admin expose-fd listeners
defaults
  mode http
  timeout client 30s
  timeout server 30s
  timeout connect 10s
listen keep
  bind 127.0.0.1:{keep.number}
  http-reuse always
{backends}
listen close
  bind 127.0.0.1:{close.number}
  option http-server-close
  option splice-auto
{backends}
""")
    proxy = way.start(["haproxy", "-db", "-f", config], keep.number)
    for port in (keep, close):
        http(way, port, digests)
        way.case(f"{port.name}-curl", curl, way, port, digests["big"])
    way.case("slow-reader", curl, way, keep, digests["big"], "--limit-rate", "12M")

    def reload(parts):
        """A new process takes the listeners over, by descriptor passing, while a download by the old one goes on."""
        slow = way.start(["curl", "-sS", "-f", "--limit-rate", "8M", "-o", "slow.out", f"http://127.0.0.1:{keep.number}/big"])
        time.sleep(0.5)
        after = way.start(["haproxy", "-db", "-f", config, "-sf", proxy.pid, "-x", way.directory / "stats"])
        check(way, keep, "get", "/small", digests["small"], 8, scaled(20), "close")
        assert slow.wait(60) == 0, slow.log.read_text()
        assert hashlib.sha256((way.directory / "slow.out").read_bytes()).hexdigest() == digests["big"], "the download differs"
        assert proxy.wait(60) == 0, proxy.log.read_text()[-1000:]
        check(way, close, "get", "/small", digests["small"], 8, scaled(20), "close")
        parts.append(after)
    parts = []
    way.case("reload", reload, parts)
    way.case("stops", way.stop, parts[-1] if parts else proxy, signal.SIGUSR1)
    return way.outcomes


def http2(way):
    """Many streams of one TLS connection."""
    digests = make_files(way.directory / "www")
    way.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "9",
             "-subj", "/CN=localhost"])
    port = Port("tls")
    tls = f"ssl_certificate {way.directory}/cert.pem; ssl_certificate_key {way.directory}/key.pem;"
    server = f"server {{ listen 127.0.0.1:{port.number} ssl http2; sendfile on; root {way.directory}/www; }}"
    way.start(nginx_command(way, "nginx", server, tls), port.number)

    def get(version, parallel):
        names = ["small"] * 40 + ["big"] * 2
        words = [word for number, name in enumerate(names)
                 for word in ("-o", f"out{number}", f"https://localhost:{port.number}/{name}")]
        output = way.run(["curl", "-sS", "-f", "--cacert", "cert.pem", "--resolve", f"localhost:{port.number}:127.0.0.1", version,
                          *(["--parallel"] if parallel else []), "-w", "version %{http_version}\n", *words], 90)
        versions = {line for line in output.splitlines() if line.startswith("version ")}
        assert versions == {f"version {version.removeprefix('--http')}"}, output
        for number, name in enumerate(names):
            path = way.directory / f"out{number}"
            assert hashlib.sha256(path.read_bytes()).hexdigest() == digests[name], f"number {number}, {name}, differs"
            path.unlink()
    way.case("http2-sequential", get, "--http2", False)
    way.case("http2-parallel", get, "--http2", True)
    way.case("http1.1-parallel", get, "--http1.1", True)
    return way.outcomes


def apache(way, model):
    """A graceful restart takes place while it is used. It refuses to serve as root."""
    way.become("www-data")
    digests = make_files(way.directory / "www")
    port = Port(model)
    modules = "/usr/lib/apache2/modules"
    config = way.directory / "apache.conf"
    config.write_text(f"""
ServerRoot {way.directory}
ServerName localhost
Listen 127.0.0.1:{port.number}
PidFile {way.directory}/apache.pid
DefaultRuntimeDir {way.directory}
Mutex file:{way.directory}
ErrorLog {way.directory}/error.log
LoadModule mpm_{model}_module {modules}/mod_mpm_{model}.so
LoadModule authz_core_module {modules}/mod_authz_core.so
DocumentRoot {way.directory}/www
KeepAlive On
MaxKeepAliveRequests 0
KeepAliveTimeout 20
StartServers 3
MaxRequestWorkers 50
""")
    server = way.start(["apache2", "-DFOREGROUND", "-f", config], port.number)
    http(way, port, digests)
    way.case("curl", curl, way, port, digests["big"])
    server.send_signal(signal.SIGUSR1)
    way.case("after-graceful-restart", check, way, port, "get", "/small", digests["small"], 8, scaled(20), "close")
    way.case("stops", way.stop, server)
    return way.outcomes


APPLICATION = """
import hashlib

def application(environ, start_response):
    if environ["REQUEST_METHOD"] == "POST":
        body = hashlib.sha256(environ["wsgi.input"].read()).hexdigest().encode()
    else:
        with open(f"www/{environ['PATH_INFO'][1:]}", "rb") as file:
            body = file.read()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""


def gunicorn(way):
    """Pre-forked Python workers: sync ones with a connection for each request, and threaded ones that keep connections."""
    digests = make_files(way.directory / "www")
    (way.directory / "application.py").write_text(APPLICATION)
    for kind in ("sync", "gthread"):
        port = Port(kind)
        server = way.start(["gunicorn", "-b", f"127.0.0.1:{port.number}", "-w", 3, "-k", kind, "--threads",
                            1 if kind == "sync" else 16, "--keep-alive", 20, "--worker-tmp-dir", "/dev/shm", "--chdir",
                            way.directory, "application"], port.number)
        keep = "keep" if kind == "gthread" else "close"
        way.case(f"{kind}-get", check, way, port, "get", "/small", digests["small"], 8, scaled(30), keep)
        way.case(f"{kind}-big", check, way, port, "get", "/big", digests["big"], 2, 2, keep)
        way.case(f"{kind}-post", check, way, port, "post", "/", 300_000, 8, scaled(10), keep)
        way.case(f"{kind}-stops", way.stop, server)
    return way.outcomes
