"""Peers on the other host that break the protocol, against programs under xsmc. One run of the lab."""

import re

import pytest

from harness import lab as two_hosts, settings

PROGRAMS = settings.TESTS / "programs"

# A bystander's connection, with the kernel's SMC at its other end, must outlive what the others do.
SCRIPT = two_hosts.STEPS + r"""
SMCTL enable >/dev/null || exit
victim() {
    ENV python3 PROGRAMS/clc_victim.py serve 6000 & local victim=$!
    lab-wait $OUT/clients-done
    kill $victim
}
clients() {
    python3 PROGRAMS/clc_bystander.py $PEER 6000 $OUT/bystander $OUT/clients-tried & local bystander=$!
    lab-wait $OUT/bystander
    python3 PROGRAMS/clc_hostile.py clients $PEER 6000 $OWN
    touch $OUT/clients-tried
    wait $bystander && touch $OUT/clients-done
}
step clients victim -- clients
servers() { (sleep 2; touch $OUT/servers) & python3 PROGRAMS/clc_hostile.py servers $OWN; }
connects() {
    lab-wait $OUT/servers
    local case
    for case in "" slow_for_interrupted slow_for_forked; do
        ENV python3 PROGRAMS/clc_victim.py connect $PEER $case &
    done
    wait
}
step servers servers -- connects
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What each role did in each step of SCRIPT."""
    folder = tmp_path_factory.mktemp("lab")
    script = SCRIPT
    for name, text in {"PROGRAMS": PROGRAMS, "ENV": two_hosts.ours(folder), "SMCTL": settings.SMCTL}.items():
        script = script.replace(name, str(text))
    return two_hosts.steps(two_hosts.Lab(folder).passes(script, script, timeout=240))


def outcomes(text):
    """The cases that went well, and what the others said."""
    good = re.findall(r"^ok (\w+) ", text, re.M)
    bad = re.findall(r"^FAILED \w+: (?:(?!ok |FAILED |xsmc).*\n)*", text, re.M)
    return set(good), bad


def cases(prefix):
    return set(re.findall(rf"^def {prefix}_(\w+)\(", (PROGRAMS / "clc_hostile.py").read_text(encoding="utf-8"), re.M))


def test_clients(run):
    """Clients that break CLC: each is told so, or is served on TCP, and no other connection suffers."""
    good, bad = outcomes(run["client"]["clients"].output)
    assert not bad, "\n".join(bad)
    assert good == cases("client")
    assert "bystander served" in run["client"]["clients"].output
    # Its connection was on SMC-R, and the only one.
    assert run["server"]["clients"].output.count("SMC-R established") == 1


@pytest.mark.parametrize("role", ["server", "client"])
def test_servers(run, role):
    """Servers that break CLC; the program's connect, or what it does meanwhile, ends as it would on TCP."""
    good, bad = outcomes(run[role]["servers"].output)
    assert not bad, "\n".join(bad)
    assert good == cases("server")
    assert "SMC-R established" not in run[role]["servers"].output


def test_rdma_calls_do_not_fail(run):
    """But where the client's GID can't be reached."""
    output = run["server"]["clients"].output + run["client"]["servers"].output
    failed = re.findall(r"warn: (.*failed.*)", output)
    assert len(failed) >= 3 and all("to RTR" in line for line in failed), failed
