"""The verbs layer on soft-RoCE: its own tests in a guest, `smctl device`, and that nothing is linked with RDMA libraries."""

import json
import re
import subprocess

from harness import settings


def loopback():
    """smc-core/tests/verbs_loopback.rs, built."""
    command = ["cargo", "test", "--locked", "-p", "smc-core", "--test", "verbs_loopback", "--no-run",
               "--message-format=json"]
    done = subprocess.run(command, cwd=settings.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "verbs_loopback":
            return message["executable"]
    raise AssertionError("cargo names no test program")


def test_loopback(lab):
    """All of it, as root and as a user who may use the device."""
    program = loopback()
    result = lab.passes(f"""
        export XSMC_NEED_RDMA=1
        {program} && lab-user {program} --skip a_change_of_address
    """, "true", timeout=120)
    assert len(re.findall(r"test result: ok\. [1-9]", result.server.output)) == 2, result.report()


def test_smctl_device(lab):
    """What it says, and its exit status, as the device's state changes."""
    result = lab.passes(f"""
        device() {{ echo "== $1"; shift; "$@" 2>&1; echo "status $?"; }}
        device works {settings.SMCTL} device
        chmod 600 /dev/infiniband/uverbs0
        device forbidden lab-user {settings.SMCTL} device
        chmod 666 /dev/infiniband/uverbs0
        device limited lab-user bash -c 'ulimit -l 64; exec {settings.SMCTL} device'
        ip link set eth0 down; until grep -q DOWN /sys/class/infiniband/rxe0/ports/1/state; do sleep 0.05; done
        device down {settings.SMCTL} device
        rdma link del rxe0
        device deleted {settings.SMCTL} device
        echo "== end"
    """, "true", timeout=60)
    said = dict(re.findall(r"^== (\w+)\n(.*?)(?=^== )", result.server.output, flags=re.M | re.S))
    works = r"rxe0 +1 +ACTIVE +4096 +1 +::ffff:10\.9\.0\.1 +RoCE v2 +eth0 +yes\n"
    assert re.search(works, said["works"]) and "status 0" in said["works"], result.report()
    for state, sentence in (("forbidden", "no permission to open /dev/infiniband/uverbs0; run: chmod 666"),
                            ("limited", "run: ulimit -l unlimited"),
                            ("down", "it is DOWN; run: ip link set eth0 up"),
                            ("deleted", "there is no RDMA device")):
        assert sentence in said[state] and "status 1" in said[state] and " yes\n" not in said[state], said[state]


def test_smctl_device_says_what_to_do_here():
    """On this machine, whatever it has."""
    done = subprocess.run([settings.SMCTL, "device", "--json"], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0 or "run: " in done.stderr or "rdma link add" in done.stderr, done.stderr
    assert report["devices"] or report["problems"]


def test_libraries_needed():
    """Programs run under libxsmc.so where there are no RDMA libraries."""
    done = subprocess.run(["readelf", "-dW", settings.LIBRARY], capture_output=True, text=True, check=True)
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", done.stdout)
    assert "libc.so.6" in needed
    # The dynamic linker is a part of libc that holds thread-local variables' addresses.
    assert set(needed) <= {"libc.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}, needed
