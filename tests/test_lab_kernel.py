"""SMC-R between a program under xsmc and Linux's own AF_SMC, in both roles: all of it in one run of the lab, of which Wireshark
is asked, too."""

import json
import re
import shutil
import subprocess

import pytest

from harness import capture, lab as two_hosts, settings, status

MODES = ("echo 20 1", "echo 4 1000000", "bulk 2000000", "half-close 300000", "abort 1000", "many 100 100", "close server",
         "close client")
SIDES = ("server", "client")

# Ports of the steps begin at 5001; from these on, ours are not the servers but the clients, and then both.
STEPS_OF_A_SIDE = len(MODES) + 4
CLIENTS = 5001 + STEPS_OF_A_SIDE
BOTH = 5001 + 2 * STEPS_OF_A_SIDE

# OURS is the side whose program runs under xsmc.
SCRIPT = two_hosts.STEPS + r"""
# The kernel has nothing but TEST LINK by which it notices a killed process of ours.
testlink() { echo 1 >/proc/sys/net/smc/smcr_testlink_time; }
testlink
SMCTL enable >/dev/null || exit
port=5000

# One side is killed in the middle of a transfer that would last for ever; the other says how soon it knows.
transfer() { # VICTIM COMMAND...
    local victim=$1 at=$OUT/$OURS-$1; shift
    "$@" & local pid=$!
    if [ $ROLE = $victim ]; then
        lab-wait $at-runs
        kill -9 $pid; touch $at-killed; wait $pid
        lab-wait $at-known
    else
        for i in $(seq 200); do [ $(counter) -gt $((before + 100)) ] && break; sleep 0.05; done
        [ $OURS = $victim ] || SMCTL status --json >$at-status
        touch $at-runs
        lab-wait $at-killed; local since=${EPOCHREALTIME/./}
        wait $pid; echo "knows after $((${EPOCHREALTIME/./} - since)) us"
        touch $at-known
    fi
    true
}

# A link group ends when its connection is over, as the kernel's side does ACTION or ours has HOOK in the environment; the
# next connection has to make another one.
group() { # NAME HOOK ACTION...
    local name=$1 hook=$2 do; shift 2
    port=$((port + 1)) at=$OUT/$OURS-$name
    if [ $ROLE = client ]; then address="$PEER $port"; else address=$port; fi
    if [ $OURS = $ROLE ]; then
        do="env $hook ENV python3 TURNS $address echo touch:$at-used wait:$at-ready echo"
    else
        do="kernel $*"
    fi
    step "$OURS $name" $do -- $do
}
kernel() { # ACTION...
    python3 TURNS smc $address echo
    lab-wait $at-used; "$@"; touch $at-ready
    python3 TURNS smc $address echo
}
reload() { rmmod smc_diag; retry rmmod smc; modprobe smc; modprobe smc_diag; guestctl ueid add XSMC-TEST; testlink; }

commands() {
    if [ $OURS = $ROLE -o $OURS = both ]; then ends="ENV PROGRAM -f tcp"; else ends=PROGRAM; fi
}
kills() {
    commands
    for victim in server client; do
        port=$((port + 1))
        step "$OURS kill $victim" transfer $victim $ends -p $port serve bulk 100000000000 -- \
            transfer $victim $ends -p $port connect $PEER bulk 100000000000
    done
}

for OURS in server client; do
    commands
    while read -r mode; do
        port=$((port + 1))
        step "$OURS $mode" $ends -p $port serve $mode -- $ends -p $port connect $PEER $mode
    done <<'END'
MODES
END
    group unload "" reload
    group idle "XSMC_TEST_GROUP_IDLE_MS=300 XSMC_KEEPALIVE_MS=100" sleep 1
    kills
done
OURS=both
kills
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run of SCRIPT: its result, and what each role did in each step."""
    return run_all(tmp_path_factory)


def run_all(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    script = SCRIPT
    for name, text in {"PROGRAM": two_hosts.peer(), "ENV": two_hosts.ours(folder), "SMCTL": settings.SMCTL,
                       "TURNS": settings.TESTS / "programs" / "turns.py", "MODES": "\n".join(MODES)}.items():
        script = script.replace(name, str(text))
    result = two_hosts.Lab(folder).passes(script, script, pcap=True, timeout=300)
    return result, two_hosts.steps(result)


def ends(run, ours, step):
    """What our end and the kernel's did in a step."""
    _, steps = run
    theirs = SIDES[ours == "server"]
    return steps[ours][f"{ours} {step}"], steps[theirs][f"{ours} {step}"]


def contacts(output):
    """The kinds of contact that a program under xsmc had, in order."""
    return re.findall(r"SMC-R established, (\w+) contact", output)


@pytest.mark.parametrize("ours", SIDES)
@pytest.mark.parametrize("mode", MODES)
def test_stream(run, ours, mode):
    """Each connection works, and is SMC-R at both ends; connections of one process share a link group."""
    own, kernel = ends(run, ours, mode)
    count = int(mode.split()[1]) if mode.startswith("many") else 1
    assert own.status == 0 and "done" in own.output.splitlines(), own.output
    assert (kernel.status, kernel.output.splitlines()) == (0, ["path smcr"] * count + ["done"])
    assert contacts(own.output) == ["first"] + ["subsequent"] * (count - 1), own.output
    assert "declined" not in own.output and "failed" not in own.output, own.output
    assert own.packets > 0 and kernel.packets > 0


@pytest.mark.parametrize("ours", SIDES)
def test_status(run, ours):
    """What `smctl status` says in the middle of a transfer: all of it goes through RMBs."""
    result, _ = run
    document = json.loads((result.out / f"{ours}-{SIDES[ours == 'server']}-status").read_text(encoding="utf-8"))
    [connection] = status.connections(document)
    rmb, tcp = status.rmb_bytes(document)
    assert connection["state"] == "managed" and status.on_rmb(document) == 2 and rmb > 0 and tcp == 0, document
    assert status.reasons(document) == set(), document


@pytest.mark.parametrize("ours", [*SIDES, "both"])
@pytest.mark.parametrize("victim", SIDES)
def test_killed_process(run, ours, victim):
    """The survivor knows it soon: at once if a program of the kernel's SMC is killed, else after a TEST LINK."""
    survivor = run[1][SIDES[victim == "server"]][f"{ours} kill {victim}"]
    microseconds = int(re.search(r"knows after (\d+) us", survivor.output)[1])
    assert microseconds < (5_000_000 if ours in (victim, "both") else 1_000_000), survivor.output


@pytest.mark.parametrize("ours", SIDES)
def test_kernel_ends_the_link_group(run, ours, request, tmp_path_factory):
    """We let it go when we are told, and the next connection makes another one. Now and then the kernel takes long to let go
    of a connection before, and its module can't be unloaded: then all is done once more."""
    if getattr(request.node, "execution_count", 1) > 1:
        run = run_all(tmp_path_factory)
    own, kernel = ends(run, ours, "unload")
    assert own.status == kernel.status == 0 and contacts(own.output) == ["first", "first"], own.output
    assert "the peer ended the link group" in own.output


@pytest.mark.parametrize("ours", SIDES)
def test_we_end_the_link_group(run, ours):
    """An unused one goes after a time (here by a test hook: 300 ms), and the kernel goes along."""
    own, kernel = ends(run, ours, "idle")
    assert own.status == kernel.status == 0 and contacts(own.output) == ["first", "first"], own.output
    assert own.output.count("the link group was unused") == 1, own.output


@pytest.fixture(scope="module")
def tshark(run, tmp_path_factory):
    """tshark(FILTER, FIELD...): the frames that the filter takes, as lists of these fields."""
    if not shutil.which("tshark"):
        pytest.skip("not installed: tshark")
    copy = tmp_path_factory.mktemp("tshark") / "run.pcap"
    two_hosts.for_wireshark(run[0].pcap, copy)

    def ask(expression, *fields):
        # Guesses of what a payload might be only find protocols that aren't there.
        command = ["tshark", "-r", copy, "-o", "infiniband.identify_payload:FALSE", "--disable-protocol", "rpcordma",
                   "-Y", expression, "-T", "fields", *(word for field in fields for word in ("-e", field))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line.split("\t") for line in done.stdout.splitlines()]

    return ask


def test_wireshark_finds_nothing_malformed(tshark):
    assert tshark("_ws.malformed", "frame.number", "_ws.col.Info") == []
    kinds = {kind for [kind] in tshark("smc.llc_msg", "smc.llc_msg")}
    # CONFIRM LINK, DELETE LINK, CONFIRM RKEY, TEST LINK, and CDC.
    assert kinds >= {"0x21", "0x24", "0x26", "0x27", "0xfe"}


# Fields in which our messages and the kernel's don't differ.
PROPOSAL = ("smc.length", "smc.proposal.smc.version", "smc.proposal.smc.type", "smc.proposal.smcv2.type",
            "smc.proposal.smcv1_subnet_ext_offset", "smc.proposal.smcv2_ext_offset", "smc.proposal.smcdv2_ext_offset",
            "smc.proposal.smc.version.relnum", "smc.proposal.ism.gid", "smc.proposal.client.preferred.gid")
ACCEPT = ("smc.length", "smc.accept.smc.type", "smc.accept.flags", "smc.accept.server.tcp.conn.index",
          "smc.accept.qp.mtu.value")
CONFIRM = ("smc.length", "smc.confirm.smc.type", "smc.confirm.flags", "smc.confirm.client.tcp.conn.index",
           "smc.confirm.qp.mtu.value")


@pytest.mark.parametrize("kind, fields", [(1, PROPOSAL), (2, ACCEPT), (3, CONFIRM)])
def test_wireshark_sees_the_kernels_fields(tshark, kind, fields):
    """Our CLC messages have what the kernel's have."""
    own, kernel = set(), set()
    for port, peer_port, *values in tshark(f"smc.clc_msg == {kind}", "tcp.srcport", "tcp.dstport", *fields):
        listening = min(int(port), int(peer_port))
        if listening >= BOTH:
            continue
        server_is_ours = listening < CLIENTS
        (own if server_is_ours == (kind == 2) else kernel).add(tuple(values))
    assert own and own == kernel


@pytest.fixture(scope="module")
def messages(run):
    """All LLC and CDC messages of the run."""
    return capture.Capture(run[0].pcap)


def sender(message):
    """Whose it is: "ours", "kernel's", or None where both ends are ours."""
    if message.port >= BOTH:
        return None
    return "ours" if (message.port < CLIENTS) == (message.role == "server") else "kernel's"


# Bytes of LLC messages that don't name something of the sender's; in an answer they may be the request's.
LLC_FIELDS = {
    capture.CONFIRM_LINK: (slice(0, 4), slice(29, 30), slice(34, 44)),
    capture.CONFIRM_RKEY: (slice(0, 5), slice(17, 44)),
    capture.TEST_LINK: (slice(0, 44),),
}


@pytest.mark.parametrize("response", [False, True])
@pytest.mark.parametrize("kind", LLC_FIELDS)
def test_llc_is_the_kernels(messages, kind, response):
    """Type, length, flags, link number, limits, reserved bytes."""
    found = {"ours": set(), "kernel's": set(), None: set()}
    for message in messages.llc:
        if message.kind == kind and bool(message.flags & capture.RESPONSE) == response:
            found[sender(message)].add(tuple(message.bytes[part].hex() for part in LLC_FIELDS[kind]))
    if kind == capture.TEST_LINK and not (found["ours"] and found["kernel's"]):
        # Whether a link is tested depends on how long it was silent; then there is nothing to compare with.
        assert len(set().union(*found.values())) <= 1, found
        return
    assert found["ours"] and found["ours"] == found["kernel's"] >= found[None], found


def test_known_rkeys_are_deleted(messages):
    """Linux takes each of its RMBs back after a connection: we know all of them."""
    answers = {message.bytes.hex() for message in messages.llc
               if message.kind == capture.DELETE_RKEY and message.flags & capture.RESPONSE}
    assert answers == {(bytes.fromhex("292c00800100") + bytes(38)).hex()}


def test_ends_of_link_groups_are_the_kernels(messages):
    """Who is told that all links are deleted says so, too, with the same reason, and then ends the group."""
    unloaded = {"400000020000"}  # the kernel's reason where its module is unloaded before it has come to end the group itself
    links, whose, answered = {}, {}, set()
    for message in messages.llc:
        if message.kind == capture.DELETE_LINK:
            assert not any(message.bytes[9:]), message.bytes.hex()
            links.setdefault((message.link, message.role), []).append(message.bytes[3:9].hex())
            whose[message.link, message.role] = sender(message)
    for (link, role), said in links.items():
        told, own = links.get((link, SIDES[role == "server"]), []), whose[link, role]
        # Who begins says one thing (a killed process's link group is ended by one side alone).
        if len(said) == 2 and len(told) == 1:
            ends = {"400000030000"} | (unloaded if own == "kernel's" else set())
            assert said[0] == f"60{told[0][2:]}" and said[1] in ends, (link, role, said, told)
            if own:
                answered.add(own)
    assert answered == {"ours", "kernel's"}, links


def connections(messages):
    """{key: CDC messages} of one direction of each connection between us and the kernel."""
    found = {}
    for message in messages.cdc:
        if sender(message):
            found.setdefault(message.key, []).append(message)
    return found.values()


def test_cdc_is_well_formed(messages):
    """Ours and the kernel's: numbers, tokens, cursors, flags that stay, reserved bytes."""
    seen = set()
    for cdcs in connections(messages):
        first = cdcs[0]
        seen.add(sender(first))
        receiver = SIDES[first.role == "server"]
        sizes = [messages.ends[first.port, role, token].size for role, token in
                 [(receiver, first.token)] if (first.port, role, token) in messages.ends]
        assert sizes, f"the token of {first} was never announced"
        assert [message.seq for message in cdcs] == list(range(1, len(cdcs) + 1)), cdcs
        before = first
        for message in cdcs:
            data = message.bytes
            assert data[1] == 44 and not any(data[8:10] + data[16:18] + data[26:]), data.hex()
            assert message.flags & 0x1f == message.state & 0x1f == 0, data.hex()
            assert message.producer >= before.producer and message.consumer >= before.consumer, (before, message)
            assert message.producer[1] < sizes[0] and message.state & before.state == before.state, (before, message)
            before = message
    assert seen == {"ours", "kernel's"}


@pytest.mark.parametrize("role", SIDES)
@pytest.mark.parametrize("mode", MODES)
def test_connections_end_as_the_kernels(messages, mode, role):
    """The connection state flags of their messages, to the close."""
    at = MODES.index(mode)
    found = {"ours": set(), "kernel's": set()}
    for cdcs in connections(messages):
        if cdcs[0].port in (5001 + at, CLIENTS + at) and cdcs[0].role == role:
            states = [message.state for message in cdcs]
            # What comes after a close is from the end of the link group; others may be ended by that alone.
            end = next((at for at, state in enumerate(states) if state & (capture.CLOSED | capture.ABORT)), None)
            if end is not None:
                found[sender(cdcs[0])].add(tuple(sorted(set(states[:end + 1]) - {0})))
    if not mode.startswith("half-close"):
        # A busy sender says in one message what else goes in two.
        found = {end: {states[-1] for states in ended} for end, ended in found.items()}
    assert found["ours"] == found["kernel's"] != set(), found
