"""Two guests with RDMA and the kernel's SMC for a test: the fixture `lab` of conftest.py is a Lab. See scripts/lab."""

import collections
import os
import pathlib
import re
import shutil
import struct
import sys

import pytest

from . import build, settings

sys.path.insert(0, str(settings.ROOT / "scripts" / "lab.d"))

import twohosts  # noqa: E402  (needs the path)

ROCE_PORT = 4791
# Opcodes of RoCE's reliable connections that carry data into the peer's memory.
WRITES = (6, 7, 8, 9, 10, 11)
SEND_ONLY = 4
ADD_LINK = 0x22 # type of the LLC message

# Bash functions for scripts in which both guests do the same steps, each step with a server and a client that waits for
# it by connecting: step NAME SERVER-COMMAND -- CLIENT-COMMAND. See steps().
STEPS = r"""
counter() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts 2>/dev/null || echo 0; }
step() {
    local name="$1" status=0; shift
    local server=(); while [ "$1" != -- ]; do server+=("$1"); shift; done; shift
    local before="$(counter)"
    export LISTENS="$OUT/listens-${name//[ \/]/-}"
    if [ "$ROLE" = server ]; then "${server[@]}" || status=$?; else "$@" || status=$?; fi
    echo "step $name: status $status, packets $(($(counter) - before))"
}
retry() { for i in $(seq 100); do "$@" && return; sleep 0.1; done; false; }
"""

Step = collections.namedtuple("Step", "output status packets")
Step.__doc__ = "What a guest did in a step: output, exit status, packets that its rxe0 sent."


class Lab:
    """Runs commands in two guests. `folder` gets one folder, and one pcap file if wanted, a run."""

    def __init__(self, folder):
        if not shutil.which("qemu-system-x86_64"):
            pytest.skip("not installed: qemu-system-x86_64 (scripts/lab run installs all that the lab needs)")
        self._folder, self._runs = folder, 0

    def run(self, server, client, *, pcap=False, **options):
        """Runs a shell text in each guest, and gives a twohosts.Result; options as those of twohosts.run()."""
        self._runs += 1
        if pcap:
            options["pcap"] = self._folder / f"run{self._runs}.pcap"
        return twohosts.run(server, client, out=self._folder / f"run{self._runs}", **options)

    def passes(self, server, client, **options):
        """run(), and both commands must end with status 0."""
        result = self.run(server, client, **options)
        assert result.ok, result.report()
        return result


def steps(result):
    """What the functions of STEPS said in a run: {role: {name: Step}}."""
    return {role: {name: Step(output, int(status), int(packets))
                   for output, name, status, packets in re.findall(
                       r"(.*?)^step (.*?): status (\d+), packets (-?\d+)\n", end.output, flags=re.M | re.S)}
            for role, end in (("server", result.server), ("client", result.client))}


def ours(folder, **environment):
    """A command prefix that runs a program of a guest under xsmc, which offers SMC-R to the other guest. Before it
    `smctl enable` is needed there. The policy is written to `folder`, where guests see it if it is made before the run."""
    policy = pathlib.Path(folder) / "xsmc.toml"
    policy.write_text('[smc-r]\nueid = "XSMC-TEST"\n[[rule]]\naction = "smc"\n', encoding="utf-8")
    variables = {"XSMC_CONFIG": policy, "XSMC_LOG": "debug", "LD_PRELOAD": settings.LIBRARY, **environment}
    return " ".join(["env", *(f"{name}={value}" for name, value in variables.items())])


def peer():
    """tests/programs/smc_peer.c, built: it runs on the host and in the guests."""
    return build.program("smc_peer")


def qemus(word):
    """Process ids of the QEMUs that have this word in their arguments."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if words.startswith(b"qemu-system") and os.fsencode(word) in words:
            found.append(int(path.parent.name))
    return found


def frames(pcap):
    """The Ethernet frames of a pcap file in the byte order of this machine."""
    data = pathlib.Path(pcap).read_bytes()
    assert data[:4] == struct.pack("=I", 0xa1b2c3d4), f"{pcap} is no pcap file"
    at = 24
    while at + 16 <= len(data):
        length = struct.unpack_from("=I", data, at + 8)[0]
        yield data[at + 16:at + 16 + length]
        at += 16 + length


def roce(frame):
    """Where RoCE v2's header begins in a frame over IPv4, or None."""
    if frame[12:14] == b"\x08\x00" and frame[23] == 17:
        udp = 14 + 4 * (frame[14] & 15)
        if frame[udp + 2:udp + 4] == ROCE_PORT.to_bytes(2, "big"):
            return udp + 8
    return None


def roce_opcodes(pcap):
    """How often each RoCE v2 opcode occurs over IPv4: {opcode: count}."""
    starts = ((frame, roce(frame)) for frame in frames(pcap))
    return collections.Counter(frame[at] for frame, at in starts if at is not None)


def for_wireshark(pcap, copy):
    """Copies a pcap file with two fields of LLC version 2 turned: Linux has them in its own byte order, Wireshark doesn't
    know that, and takes such messages for something else. Checksums no longer fit."""
    head = pathlib.Path(pcap).read_bytes()[:24]
    with open(copy, "wb") as out:
        out.write(head)
        for frame in map(bytearray, frames(pcap)):
            at = roce(frame)
            if at is not None and frame[at] == SEND_ONLY and 0x21 <= frame[at + 12] <= 0x29:
                fields = [13] + [82] * (frame[at + 12] == ADD_LINK and len(frame) > at + 12 + 72)
                for field in fields:
                    frame[at + field:at + field + 2] = frame[at + field:at + field + 2][::-1]
            out.write(struct.pack("=IIII", 0, 0, len(frame), len(frame)) + frame)
