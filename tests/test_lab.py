"""The lab itself: two guests, soft-RoCE between them, the kernel's SMC on it, the faults, and no process left behind."""

import os
import signal
import subprocess
import time

import pytest

from harness import lab as two_hosts, settings

COMMAND = settings.ROOT / "scripts" / "lab"
MODES = ("echo 10 100", "bulk 300000", "half-close 100000", "abort 1000", "urgent", "many 5 100", "close server",
         "close client")

STEPS = two_hosts.STEPS + r"""
step verbs ibv_rc_pingpong -g 1 -n 20 -- retry ibv_rc_pingpong -g 1 -n 20 $PEER
port=5000
while read -r mode; do
    port=$((port + 1))
    step "smc $mode" PROGRAM -p $port serve $mode -- PROGRAM -p $port connect $PEER $mode
done <<'END'
MODES
END
step fallback PROGRAM -f tcp -p 6000 serve echo 5 100 -- PROGRAM -p 6000 connect $PEER echo 5 100
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """One run of all STEPS, which the tests below look at: the result, and {role: {step: its output}}."""
    script = STEPS.replace("PROGRAM", str(two_hosts.peer())).replace("MODES", "\n".join(MODES))
    result = two_hosts.Lab(tmp_path_factory.mktemp("lab")).passes(script, script, pcap=True, timeout=300)
    return result, two_hosts.steps(result)


def test_verbs_work_between_the_guests(steps):
    _, outputs = steps
    for role in ("server", "client"):
        output, status, packets = outputs[role]["verbs"]
        assert status == 0 and packets >= 20 and "20 iters" in output, output


@pytest.mark.parametrize("mode", MODES)
def test_kernel_smc_rides_rdma(steps, mode):
    result, outputs = steps
    for role in ("server", "client"):
        output, status, packets = outputs[role][f"smc {mode}"]
        connections = int(mode.split()[1]) if mode.startswith("many") else 1
        assert (status, output.splitlines()) == (0, ["path smcr"] * connections + ["done"]), result.report()
        assert packets > 0, f"the {role}'s rxe0 sent nothing"


def test_capture_has_rdma_writes(steps):
    result, _ = steps
    counts = two_hosts.roce_opcodes(result.pcap)
    assert sum(counts[opcode] for opcode in two_hosts.WRITES) > 100, counts


def test_kernel_smc_falls_back_to_a_plain_server(steps):
    _, outputs = steps
    assert outputs["server"]["fallback"][:2] == ("path plain\ndone\n", 0)
    # The server's SYN-ACK had no SMC option.
    assert outputs["client"]["fallback"][:2] == ("path tcp 03010000\ndone\n", 0)


def test_nothing_is_left_running(steps):
    result, _ = steps
    assert not two_hosts.qemus(result.out)


def test_faults(lab):
    """Loss, a cut cable, a lost device and a dead peer, asked for by the client."""
    result = lab.passes("echo I live; exec sleep 1000", r"""
        set -e
        fails() { ! "$@"; }
        state() { cat /sys/class/infiniband/rxe0/ports/1/state; }
        until_state() {
            for i in $(seq 100); do case "$(state)" in *$1) return;; esac; sleep 0.05; done
            echo "the port is not $1"; exit 1
        }
        until_state ACTIVE
        lab-fault link-down; until_state DOWN
        lab-fault link-up; until_state ACTIVE
        lab-fault loss 100%; fails busybox ping -c 1 -W 1 $PEER
        lab-fault loss 0%; busybox ping -c 3 -W 2 $PEER
        lab-fault roce-loss 5%; nft list table inet lab | grep 4791
        lab-fault device-del; fails state
        lab-fault device-add; until_state ACTIVE
        fails lab-fault nonsense
        lab-fault kill-peer; fails busybox ping -c 1 -W 1 $PEER
        echo all made
    """)
    assert "all made" in result.client.output
    assert result.server.problem == "killed as the client asked for it"


def test_command_line_and_statuses(tmp_path):
    """A failing command ends the run early, and the exit status tells."""
    command = [COMMAND, "run", "--out", tmp_path / "out", "--", "echo $ROLE at $OWN; exit 3", "--", "sleep", "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "server| server at 10.9.0.1\n" in done.stdout
    assert "lab: server: exit status 3\nlab: client: ended 5 s after the server had failed\n" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_guests_end_with_the_driver(tmp_path, number):
    command = [COMMAND, "run", "--out", tmp_path / "out", "--", "sleep 100", "--", "sleep 100"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as driver:
        try:
            assert _wait(lambda: len(two_hosts.qemus(tmp_path)) == 2), "no guests were started"
        finally:
            driver.send_signal(number)
        assert driver.wait(10) != 0
        assert _wait(lambda: not two_hosts.qemus(tmp_path)), "guests are still running"


@pytest.mark.long
def test_two_links(lab):
    """With two cards the kernel's link group has two links, and both its connections survive the loss of one link."""
    result = lab.passes(_two_links("serve"), _two_links("-s connect $PEER", """
        for pid in ${pids[*]}; do until grep -q 'State:.T' /proc/$pid/status; do sleep 0.05; done; done
        cat /sys/class/infiniband/rxe?/ports/1/hw_counters/sent_pkts
        lab-fault link-down 1
        kill -CONT ${pids[*]}
    """), nics=2)
    counts = [int(line) for line in result.client.output.splitlines()]
    assert len(counts) == 2 and min(counts) > 0, f"packets sent by rxe0 and rxe1 before: {counts}"


def _two_links(part, meanwhile=""):
    """Two connections at once; too large to be over before the client goes on."""
    return f"""
        for port in 5001 5002; do
            {two_hosts.peer()} -p $port {part} bulk 300000 >$OUT/$port-$ROLE & pids+=($!)
        done
        {meanwhile}
        for pid in ${{pids[*]}}; do wait $pid || exit; done
        grep -q 'path smcr' $OUT/5001-$ROLE && grep -q 'path smcr' $OUT/5002-$ROLE
    """


def _wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
