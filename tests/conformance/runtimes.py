"""Language runtimes with event loops of their own: Node and Java, with programs of ours."""

from harness import settings

from .suite import Suite

PROGRAMS = settings.TESTS / "programs"
NODE = ("http-keep-alive", "http-bodies", "http-close", "net-echo", "cluster", "socket-to-child", "used-socket-to-child")
JAVA = ("nio-messages", "nio-bulk", "nio-select-client", "http-keep-alive", "http-bodies", "blocking-bulk", "blocking-timeout",
        "async-channel", "processes-between")


def suites():
    return [Suite("node", lambda way: node(way, "rr"), ("nodejs",), takes=20, all_pass=True),
            Suite("node-shared-listener", lambda way: node(way, "none"), ("nodejs",), takes=20, all_pass=True),
            Suite("java", java, ("openjdk-17-jdk-headless",), takes=30, all_pass=True)]


def node(way, policy):
    """How a cluster's workers come by connections: the first process hands them on, or shares its listener."""
    env = {"NODE_CLUSTER_SCHED_POLICY": policy}
    program = PROGRAMS / "node_net.js"
    server = way.start(["node", program, "server"], env=env)
    ports = way.wait_line(server, "ports ")
    _, output = way.command(["node", program, "client", ports], 240, env=env)
    way.lines(output, NODE)
    way.case("server-lives", way.stop, server)
    return way.outcomes


def java(way):
    """The compiler runs once: it takes longer than the cases."""
    way.run(["javac", "-d", way.directory, PROGRAMS / "JavaNet.java"], 120)
    run = ["java", "-Xmx400m", "-XX:+UseSerialGC", "-cp", way.directory, "JavaNet"]
    server = way.start([*run, "server"])
    ports = way.wait_line(server, "ports ").split()
    _, output = way.command([*run, "client", *ports], 240)
    way.lines(output, JAVA)
    way.case("server-lives", way.stop, server)
    return way.outcomes
