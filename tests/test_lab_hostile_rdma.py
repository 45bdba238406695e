"""Peers on the other host that keep to CLC and then break LLC or CDC, over a real queue pair, against programs under xsmc. One
run of the lab."""

import json
import re

import pytest

from harness import build, lab as two_hosts, settings, status

PROGRAMS = settings.TESTS / "programs"

SCRIPT = two_hosts.STEPS + r"""
SMCTL enable >/dev/null || exit
export RNIC=PROGRAM
victim() {
    ENV python3 PROGRAMS/rdma_victim.py serve 6000 & local victim=$!
    lab-wait $OUT/clients-tried
    SMCTL status --json >$OUT/status
    kill -0 $victim && kill $victim && touch $OUT/alive
}
clients() {
    for i in $(seq 100); do python3 -c "import socket; socket.create_connection(('$PEER', 6001))" 2>/dev/null && break; done
    python3 PROGRAMS/rdma_clients.py $PEER 6000 $OWN
    touch $OUT/clients-tried
}
step clients victim -- clients
servers() { (sleep 2; touch $OUT/servers) & python3 PROGRAMS/rdma_servers.py $OWN; }
connects() { lab-wait $OUT/servers; ENV python3 PROGRAMS/rdma_victim.py connect $PEER; }
step servers servers -- connects
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run of SCRIPT, and what each role did in each step."""
    folder = tmp_path_factory.mktemp("lab")
    script = SCRIPT
    ours = two_hosts.ours(folder, XSMC_KEEPALIVE_MS=2000, XSMC_TEST_CLOSE_MS=1000)
    for name, text in {"PROGRAMS": PROGRAMS, "PROGRAM": build.program("rnic", "-libverbs"), "ENV": ours,
                       "SMCTL": settings.SMCTL}.items():
        script = script.replace(name, str(text))
    result = two_hosts.Lab(folder).passes(script, script, timeout=240)
    return result, two_hosts.steps(result)


def outcomes(text):
    """The cases that went well, and what the others said."""
    good = re.findall(r"^ok (\w+) ", text, re.M)
    bad = re.findall(r"^FAILED \w+: (?:(?!ok |FAILED |xsmc|\w+: group).*\n)*", text, re.M)
    return set(good), bad


def cases(prefix, *files):
    text = "".join((PROGRAMS / file).read_text(encoding="utf-8") for file in files)
    return set(re.findall(rf"^def {prefix}_(\w+)\(", text, re.M))


def unexplained(said, log):
    """Link groups that have ended, with the reason that the log must have, but hasn't."""
    logged = re.findall(r"link group (\d+): (.*)$", log, re.M)
    return [(group, why) for group, why in re.findall(r"^\w+: group (\d+) (.*)$", said, re.M)
            if not any(group == number and re.fullmatch(why, reason) for number, reason in logged)]


def test_clients(run):
    """The program under xsmc sees what it would see on TCP, and goes on serving others."""
    result, steps = run
    good, bad = outcomes(steps["client"]["clients"].output)
    assert not bad, "\n".join(bad)
    assert good == cases("client", "rdma_llc.py", "rdma_cdc.py") | {"quiet"}
    assert (result.out / "alive").exists(), steps["server"]["clients"].output


def test_servers(run):
    """The same for programs that connect."""
    _, steps = run
    for role in "server", "client":
        good, bad = outcomes(steps[role]["servers"].output)
        assert not bad, "\n".join(bad)
        assert good == cases("server", "rdma_servers.py")


@pytest.mark.parametrize("step, victim, peer", [("clients", "server", "client"), ("servers", "client", "server")])
def test_reasons(run, step, victim, peer):
    """Our log says why each link group has ended."""
    _, steps = run
    log = steps[victim][step].output
    missing = unexplained(steps[peer][step].output, log)
    assert not missing, f"{missing}\n{log}"


def test_status(run):
    """The status counts the connections that were reset for what their peers said."""
    result, steps = run
    document = json.loads((result.out / "status").read_text(encoding="utf-8"))
    [node] = status.nodes(document)
    [count] = [entry["count"] for entry in node["fallbacks"] if entry["name"] == "peer-violation"]
    said = steps["client"]["clients"].output
    assert count == len(re.findall(r"^\w+: violation$", said, re.M)) > 0, document
    assert any(group["down"] for group in node["link_groups"]), document
