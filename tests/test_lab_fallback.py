"""When a connection between hosts stays on TCP: that it then is as good as any, no byte lost, and that our log and the
kernel's counters have the reason. All of it in one run of the lab."""

import collections
import re

import pytest

from harness import build, lab as two_hosts, settings

# What our log says, as client and as server.
CASES = {
    "plain-peer": ("the other host does not offer SMC-R", ""),
    "no-common-ueid": ("declined by the peer: NOSMCDEV", "declined by us: NOSMCDEV"),
    "no-ueid-here": ("", ""),
    "no-rule-here": ("", ""),
    "not-enabled": ("not offered SMC-R: the SMC option of TCP isn't enabled here",) * 2,
    # Linux as a server finds out that it has no device when the Proposal has come.
    "no-device-there": ("declined by the peer: NOSMCRDEV", "declined by the peer: NOSMCDEV"),
    "no-device-here": ("not offered SMC-R: there is no RDMA device",) * 2,
}

# What the kernel counts at the other end, as the server of our client and as the client of our server.
KERNELS = {
    "plain-peer": (None, None),
    "no-common-ueid": ("NOSMCDEV", "PEERDECL"),
    "no-ueid-here": ("PEERNOSMC",) * 2,
    "no-rule-here": ("PEERNOSMC",) * 2,
    "not-enabled": ("PEERNOSMC",) * 2,
    "no-device-there": ("NOSMCRDEV", "NOSMCDEV"),
    "no-device-here": ("PEERNOSMC",) * 2,
}
REASONS = {"PEERNOSMC": "0x03010000", "NOSMCDEV": "0x03030000", "NOSMCRDEV": "0x03030002", "PEERDECL": "0x05000000"}

# OURS is the side whose program runs under xsmc. What a step needs is made by a command on one side and undone after it.
SCRIPT = two_hosts.STEPS + r"""
SMCTL enable >/dev/null || exit
port=5000
peers() { [ $OURS != $ROLE ] && "$@"; true; }
here() { [ $OURS = $ROLE ] && "$@"; true; }
counted() { # COMMAND; and what the kernel has counted until then
    local status=0; "$@" || status=$?
    guestctl fallbacks | sed "s/^/kernel: /"
    return $status
}
connection() { # NAME KIND OUR-TURN PEER-TURN; KIND is that of the peer's sockets
    port=$((port + 1))
    local address=$port do
    if [ $ROLE = client ]; then address="$PEER $port"; fi
    if [ $OURS = $ROLE ]; then
        do="ENV${policy:+ XSMC_CONFIG=$policy} python3 TURNS $address $3"
    else
        do="counted python3 TURNS ${2#plain} $address ${4:-$3}"
    fi
    step "$OURS $1" $do -- $do
    # Both are done before either goes on.
    touch $OUT/$port-$ROLE; lab-wait $OUT/$port-server; lab-wait $OUT/$port-client
}
waiting() { # NAME; and SEEN=1 for an end that can be seen to wait
    if [ $ROLE = client ]; then
        lab-wait $OUT/$1-up
        ENV $2 WAITS client $(sed 's/port //' $OUT/$1-port)
    else
        ENV $2 WAITS server >$OUT/$1-port & local pid=$!
        until grep -q port $OUT/$1-port; do sleep 0.05; done
        touch $OUT/$1-up; wait $pid
    fi
}
for OURS in server client; do
    connection plain-peer plain exchange
    peers guestctl ueid flush; peers guestctl ueid add ANOTHER
    connection no-common-ueid smc exchange
    peers guestctl ueid flush; peers guestctl ueid add XSMC-TEST
    policy=FOLDER/no-ueid.toml connection no-ueid-here smc exchange
    policy=FOLDER/no-rule.toml connection no-rule-here smc exchange
    here SMCTL disable >/dev/null
    connection not-enabled smc exchange
    here SMCTL enable >/dev/null
    peers lab-fault device-del
    connection no-device-there smc exchange
    peers lab-fault device-add
    here lab-fault device-del
    connection no-device-here smc exchange
    here lab-fault device-add
done
OURS=server
connection fork smc fork exchange
connection slam smc slam
OURS=client
connection slam smc slam
for server in "" SEEN=1; do for client in "" SEEN=1; do
    name=waits-$server-$client
    step $name waiting $name $server -- waiting $name $client
done; done
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What each role did in each step of SCRIPT."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "no-ueid.toml").write_text('[[rule]]\naction = "smc"\n', encoding="utf-8")
    (folder / "no-rule.toml").write_text('[smc-r]\nueid = "XSMC-TEST"\n', encoding="utf-8")
    script = SCRIPT
    for name, text in {"WAITS": build.program("rawwaits"), "TURNS": settings.TESTS / "programs" / "turns.py", "ENV": two_hosts.ours(folder),
                       "SMCTL": settings.SMCTL, "FOLDER": folder}.items():
        script = script.replace(name, str(text))
    return two_hosts.steps(two_hosts.Lab(folder).passes(script, script, timeout=240))


def both(steps, ours, name):
    """What our end and the other one did in a step."""
    theirs = "client" if ours == "server" else "server"
    return steps[ours][f"{ours} {name}"], steps[theirs][f"{ours} {name}"]


def works_on_tcp(own, peer):
    assert own.status == peer.status == 0, own.output + peer.output
    # TEST LINK of an older link group may be among them.
    assert own.packets < 20 and peer.packets < 20, "the bytes went over RDMA"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ours", ["client", "server"])
def test_fallback(steps, ours, name):
    own, peer = both(steps, ours, name)
    works_on_tcp(own, peer)
    reason = CASES[name][ours == "server"]
    said = [line.partition("]")[2] for line in own.output.splitlines() if "debug" not in line or reason and reason in line]
    assert [reason in line for line in said] == [True] * bool(reason), own.output


def fallbacks(steps, role):
    """What the kernel of this guest counted in each step in which it was the peer: {step: {(role, reason): count}}."""
    before, gained = collections.Counter(), {}
    for name, step in steps[role].items():
        if not name.startswith(role):
            now = collections.Counter({(end, reason): int(count) for end, reason, count in re.findall(
                r"kernel: (\w+) (\w+) (\d+)", step.output)})
            gained[name], before = dict(now - before), now
    return gained


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ours", ["client", "server"])
def test_kernel_knows_the_reason(steps, ours, name):
    theirs = "client" if ours == "server" else "server"
    reason = KERNELS[name][ours == "server"]
    assert fallbacks(steps, theirs)[f"{ours} {name}"] == ({(theirs, REASONS[reason]): 1} if reason else {})


def test_fork_right_after_accept(steps):
    """The child serves the connection, on TCP."""
    own, peer = both(steps, "server", "fork")
    works_on_tcp(own, peer)
    assert "declined by us: OPTUNSUPP" in own.output, own.output


@pytest.mark.parametrize("ours", ["client", "server"])
def test_close_right_after_accept(steps, ours):
    """The other end is told, whatever the handshake has come to."""
    own, peer = both(steps, ours, "slam")
    assert own.status == peer.status == 0, own.output + peer.output


@pytest.mark.parametrize("server", ["", "SEEN=1"])
@pytest.mark.parametrize("client", ["", "SEEN=1"])
def test_unseen_waits(steps, server, client):
    """An end that waits by raw system calls, which see nothing of an RMB, declines."""
    name = f"waits-{server}-{client}"
    ends = steps["server"][name], steps["client"][name]
    assert [end.status for end in ends] == [0, 0], ends
    declined = [("declined by us: OPTUNSUPP" in end.output, "declined by the peer: OPTUNSUPP" in end.output) for end in ends]
    by_server, by_client = [(True, False), (False, True)], [(False, True), (True, False)]
    if not (server and client):
        # Where both would, the one that comes first does.
        assert declined in [by_server] * (not server) + [by_client] * (not client), ends
    else:
        assert declined == [(False, False)] * 2 and min(end.packets for end in ends) > 400, ends
