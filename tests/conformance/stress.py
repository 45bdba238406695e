"""stress-ng's stressors of sockets, descriptors and readiness, which check what they do."""

from .suite import Suite

STRESSORS = ("sock", "sockmany", "sockfd", "sockpair", "epoll", "poll", "sendfile", "splice")
# Only this one has TCP connections that live for longer than one message.
MOVES_BYTES = {"sock"}


def suites():
    return [Suite(f"stress-{name}", lambda way, name=name: run(way, name), ("stress-ng",), name in MOVES_BYTES, 16)
            for name in STRESSORS]


def run(way, name):
    argv = ["stress-ng", f"--{name}", "2", "--verify", "--timeout", "6", "--metrics-brief", "--temp-path", way.directory]
    if name == "sock":
        argv += ["--sock-domain", "ipv4", "--sock-type", "stream"]
    status, output = way.command(argv, 60)
    return {name: "passed" if status == 0 and "fail:" not in output else "failed"}
