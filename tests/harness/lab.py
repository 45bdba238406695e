"""Two guests with RDMA and the kernel's SMC for a test: the fixture `lab` of conftest.py is a Lab. See scripts/lab."""

import collections
import os
import pathlib
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


def roce_opcodes(pcap):
    """How often each RoCE v2 opcode occurs over IPv4: {opcode: count}."""
    counts = collections.Counter()
    for frame in frames(pcap):
        if frame[12:14] == b"\x08\x00" and frame[23] == 17:
            udp = 14 + 4 * (frame[14] & 15)
            if frame[udp + 2:udp + 4] == ROCE_PORT.to_bytes(2, "big"):
                counts[frame[udp + 8]] += 1
    return counts
