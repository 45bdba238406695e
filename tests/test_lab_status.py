"""What the operator sees of connections between hosts: fabric, link groups, and why one stayed on TCP."""

import json
import shlex

import pytest

from harness import lab as two_hosts, settings

POLICY = '[smc-r]\nueid = "{ueid}"\n[[rule]]\naction = "smc"\n'

# A step keeps a connection open in both guests; each looks at its own end when that has come as far as it should.
PRELUDE = r"""
set -e
OTHER=client; if [ "$ROLE" = client ]; then OTHER=server; fi
SMCTL enable
step() { # NAME WHAT-THE-STATUS-MUST-HAVE COMMAND...
    local name="$1" want="$2"; shift 2
    "$@" >$OUT/$name-$ROLE.out & local pid=$!
    if [ -n "$want" ]; then
        for i in $(seq 100); do
            if grep -q open $OUT/$name-$ROLE.out; then break; fi
            sleep 0.1
        done
        for i in $(seq 50); do
            SMCTL status --json >$OUT/$name-$ROLE.json
            if grep -q "$want" $OUT/$name-$ROLE.json; then break; fi
            sleep 0.1
        done
        SMCTL status >$OUT/$name-$ROLE.status
        SMCTL linkgroup >$OUT/$name-$ROLE.linkgroup
    fi
    touch $OUT/$name-$ROLE.seen
    lab-wait $OUT/$name-$OTHER.seen
    kill -KILL $pid
    wait $pid || true
}
"""


class Steps:
    """The steps of one run of the lab, and what was seen in them."""

    def __init__(self, folder):
        self._folder = folder
        self._scripts = {"server": PRELUDE, "client": PRELUDE}
        self.out = None
        for ueid in ("XSMC-TEST", "OTHER"):
            (folder / ueid).write_text(POLICY.format(ueid=ueid))

    def add(self, name, server, client):
        """A step; each side is what its status must have, and its command."""
        for role, (want, command) in (("server", server), ("client", client)):
            self._scripts[role] += f"step {name} {shlex.quote(want)} {command}\n"

    def run(self, **options):
        scripts = [text.replace("SMCTL", str(settings.SMCTL)) for text in self._scripts.values()]
        result = two_hosts.Lab(self._folder).passes(*scripts, timeout=60, **options)
        self.out = result.out

    def xsmc(self, *args, ueid="XSMC-TEST", upgrade="default"):
        """hold.py under xsmc."""
        variables = f"LD_PRELOAD={settings.LIBRARY} XSMC_CONFIG={self._folder / ueid} XSMC_UPGRADE={upgrade}"
        return f"env {variables} {plain(*args)}"

    def node(self, name, role):
        """The one node that a step has seen."""
        nodes = json.loads((self.out / f"{name}-{role}.json").read_text())["nodes"]
        assert len(nodes) == 1, nodes
        return nodes[0]

    def text(self, name, role, what):
        return (self.out / f"{name}-{role}.{what}").read_text()


def plain(*args):
    """hold.py as it is."""
    return " ".join(map(str, ["python3", settings.TESTS / "programs" / "hold.py", *args]))


def kernel(*args):
    """The kernel's AF_SMC; stops when connected."""
    return " ".join(map(str, [two_hosts.peer(), "-s", *args, "echo", 1, 100]))


RDMA = '"fabric": "rdma"'


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A run between hosts that are set up for SMC-R."""
    steps = Steps(tmp_path_factory.mktemp("status"))
    steps.add("both", ('"slot": 1', steps.xsmc("serve", "$OWN", 5001, 2)),
              ('"slot": 1', steps.xsmc("connect", "$PEER", 5001, 2)))
    steps.add("ipv6", (RDMA, steps.xsmc("serve", "$OWN6", 5002, 1)), (RDMA, steps.xsmc("connect", "$PEER6", 5002, 1)))
    steps.add("kernel-serves", ("", kernel("-p", 5003, "serve")), (RDMA, steps.xsmc("connect", "$PEER", 5003, 1)))
    steps.add("kernel-connects", (RDMA, steps.xsmc("serve", "$OWN", 5004, 1)),
              ("", kernel("-p", 5004, "connect", "$PEER")))
    steps.add("plain-serves", ("", plain("serve", "$OWN", 5005, 1)),
              ('"reason"', steps.xsmc("connect", "$PEER", 5005, 1, upgrade="eager")))
    steps.add("other-eid", ("no-common-eid", steps.xsmc("serve", "$OWN", 5006, 1)),
              ("smc-declined", steps.xsmc("connect", "$PEER", 5006, 1, ueid="OTHER")))
    steps.run()
    return steps


def test_both_ends_show_the_same_link(steps):
    nodes = {role: steps.node("both", role) for role in ("server", "client")}
    groups = {role: node["link_groups"] for role, node in nodes.items()}
    for role, node in nodes.items():
        assert len(groups[role]) == 1, groups
        group = groups[role][0]
        number = 1 if role == "server" else 2
        link, = group["links"]
        assert link["own"] == {"gid": f"::ffff:10.9.0.{number}", "qpn": group["id"]}
        assert (link["number"], link["up"], link["device"], link["port"], link["mtu"]) == (1, True, "rxe0", 1, 4096)
        assert (group["role"], group["state"], group["connections"], group["max_conns"]) == (role, "up", 2, 255)
        assert (group["rmb_chunks"], group["send_chunks"]) == (1, 1)
        assert group["cdc_sent"] >= 2 and group["bytes_written"] == 2, group
        first, second = (connection["rdma"] for connection in node["connections"])
        assert (first["first_contact"], first["slot"]) == (True, 0)
        assert (second["first_contact"], second["slot"]) == (False, 1)
        for connection in node["connections"]:
            assert (connection["fabric"], connection["state"]) == ("rdma", "managed")
            assert connection["rdma"]["link_group"] == group["id"]
            assert connection["tx"]["carrier"] == connection["rx"]["carrier"] == "rmb"
            assert connection["tx"]["bytes_rmb"] == 1 and "reason" not in connection
    for one, other in (("server", "client"), ("client", "server")):
        assert groups[one][0]["links"][0]["peer"] == groups[other][0]["links"][0]["own"]
        assert groups[one][0]["peer_system_id"] == nodes[other]["node"]
        owns = {(end["peer"], end["local"]): end["rdma"]["own"] for end in nodes[other]["connections"]}
        for end in nodes[one]["connections"]:
            assert end["rdma"]["peer"] == owns[end["local"], end["peer"]]


def test_ipv6(steps):
    for role, own, peer in (("server", "fd09::1", "fd09::2"), ("client", "fd09::2", "fd09::1")):
        group, = steps.node("ipv6", role)["link_groups"]
        link, = group["links"]
        assert (group["state"], link["own"]["gid"], link["peer"]["gid"]) == ("up", own, peer), group


@pytest.mark.parametrize("name, role", [("kernel-serves", "client"), ("kernel-connects", "server")])
def test_connection_with_the_kernel(steps, name, role):
    node = steps.node(name, role)
    group, = node["link_groups"]
    connection, = node["connections"]
    assert (connection["fabric"], connection["rdma"]["first_contact"]) == ("rdma", True)
    assert connection["rdma"]["peer"]["alert_token"] and connection["rdma"]["peer"]["rkey"]
    assert (group["role"], group["state"], group["connections"]) == (role, "up", 1)
    link, = group["links"]
    assert link["peer"]["gid"] == ("::ffff:10.9.0.1" if role == "client" else "::ffff:10.9.0.2")
    assert group["peer_system_id"].endswith("525400090001" if role == "client" else "525400090002"), group
    assert not node["declines"] and not node["fallbacks"], node


def test_tables(steps):
    group, = steps.node("both", "client")["link_groups"]
    lines = steps.text("both", "client", "linkgroup").splitlines()
    assert len(lines) == 2, lines
    gids = ("::ffff:10.9.0.1", "::ffff:10.9.0.2")
    for word in (group["id"], "client", "up", "rxe0", *gids, group["links"][0]["peer"]["qpn"], "2/255"):
        assert str(word) in lines[1].split(), lines
    status = steps.text("both", "client", "status")
    assert status.count(" rdma ") == 2 and " first " in status and " subsequent " in status, status
    assert "no link groups" in steps.text("plain-serves", "client", "linkgroup")


def test_peer_without_smc(steps):
    node = steps.node("plain-serves", "client")
    connection, = node["connections"]
    assert connection["reason"] == "no-smc-option" and "fabric" not in connection, connection
    assert [entry["name"] for entry in node["fallbacks"]] == ["no-smc-option"]
    assert not node["declines"] and not node["link_groups"]


def test_no_enterprise_id_in_common(steps):
    for role, reason, sent, received in (("server", "no-common-eid", 1, 0), ("client", "smc-declined", 0, 1)):
        node = steps.node("other-eid", role)
        connection, = node["connections"]
        assert (connection["reason"], connection["state"]) == (reason, "plain"), connection
        assert connection["diagnosis"] == {"code": 0x03030000, "name": "NOSMCDEV"}
        assert node["declines"] == [{"code": 0x03030000, "name": "NOSMCDEV", "sent": sent, "received": received}]
        text = steps.text("other-eid", role, "status")
        assert f"{reason} (NOSMCDEV 0x03030000)" in text and "UEID" in text, text


def test_kernel_without_enterprise_id(tmp_path):
    """Without a UEID the kernel has SMC version 1 only."""
    steps = Steps(tmp_path)
    steps.add("kernel-serves", ("", kernel("-p", 5001, "serve")), ('"reason"', steps.xsmc("connect", "$PEER", 5001, 1)))
    steps.add("kernel-connects", ('"reason"', steps.xsmc("serve", "$OWN", 5002, 1)),
              ("", kernel("-p", 5002, "connect", "$PEER")))
    steps.run(ueid="")
    for name, role in (("kernel-serves", "client"), ("kernel-connects", "server")):
        node = steps.node(name, role)
        connection, = node["connections"]
        assert (connection["reason"], connection["diagnosis"]["name"]) == ("smc-declined", "NOSMCDEV"), connection
        assert [(entry["sent"], entry["received"]) for entry in node["declines"]] == [(0, 1)]
