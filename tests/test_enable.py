"""smctl enable: the SMC option of TCP by eBPF, on the kernel that runs here.

Needs root, cgroup v2 and a kernel that lets us load programs; skips, saying why, without. Everything happens in a control group
made for it, with a bpf file system of its own in a mount namespace, and (see programs/syn_option.py) in network
namespaces: other programs of this machine notice nothing, and nothing is left however the tests end.
"""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import pytest

from harness import settings
from harness.status import wait_until
from harness.world import python

CHECKS = ["combinations", "mapped", "many", "inherited", "reuseport", "late", "self", "syncookies", "fast_open",
          "raw_clients", "raw_servers", "crossing", "nosy", "greedy", "saved_syn", "again", "opening", "others"]


def hierarchy():
    """Where cgroup v2 is mounted."""
    for line in pathlib.Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields[2] == "cgroup2":
            return pathlib.Path(fields[1])
    return None


class Lab:
    """A control group, and a mount namespace with a bpf file system that nobody else sees."""

    def __init__(self, cgroup):
        self.cgroup = cgroup
        cgroup.mkdir()
        self.holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", "mount -t bpf bpf /sys/fs/bpf && echo ready && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.problem = None
        if self.holder.stdout.readline() != "ready\n":
            self.problem = f"no bpf file system: {self.holder.stderr.read().strip()}"

    def command(self, *words, inside=()):
        """Runs smctl in the mount namespace, by way of the command `inside`."""
        return subprocess.run(["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", *inside, str(settings.SMCTL), *map(str, words)],
                              capture_output=True, text=True, timeout=60, check=False)

    def enable(self):
        done = self.command("enable", "--cgroup", self.cgroup)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout == f"enabled on {self.cgroup} (links in /sys/fs/bpf/xsmc)\n"

    def status(self):
        done = self.command("enable", "--status", "--json")
        document = json.loads(done.stdout)
        assert done.returncode == (0 if document["enabled"] else 1)
        return document

    def start(self, check, cgroup=None):
        return subprocess.Popen(python("syn_option.py", check, cgroup or self.cgroup), stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check(self, name, cgroup=None):
        finish(self.start(name, cgroup))

    def remove_cgroup(self):
        # A process that has just ended may still be counted.
        wait_until(lambda: remove(self.cgroup), 10, lambda: f"{self.cgroup} to be removed")

    def close(self):
        self.holder.communicate(timeout=10)  # with the namespace go its links
        if self.cgroup.exists():
            self.remove_cgroup()


def remove(cgroup):
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True


def finish(child):
    """Waits for a check to say ok."""
    try:
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, out.splitlines()[-1:]) == (0, ["ok"]), f"{out}{err}"


@pytest.fixture
def make_lab():
    """Makes labs, whose control groups may lie in one another."""
    if not settings.SMCTL.exists() and settings.PLAIN:
        pytest.skip(f"{settings.SMCTL} is missing")
    if os.geteuid() != 0:
        pytest.skip("loading eBPF programs needs root")
    if hierarchy() is None:
        pytest.skip("no cgroup v2 hierarchy is mounted")
    missing = [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    labs = []

    def make(below=None):
        try:
            labs.append(Lab((below or hierarchy()) / f"xsmc-test-{os.getpid()}-{time.monotonic_ns()}"))
        except OSError as error:
            pytest.skip(f"can't make a control group: {error}")
        if labs[-1].problem:
            pytest.skip(labs[-1].problem)
        return labs[-1]

    yield make
    for lab in reversed(labs):
        lab.close()


@pytest.fixture
def lab(make_lab):
    """A lab where the option is not enabled yet, on a system where it could be."""
    made = make_lab()
    done = made.command("enable", "--cgroup", made.cgroup)
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if "not permitted" in done.stderr or (done.returncode and kernel < (5, 15)):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert made.command("disable").stdout == "disabled\n"
    return made


@pytest.mark.parametrize("name", CHECKS)
def test_option(lab, name):
    lab.enable()
    lab.check(name)


def test_life(lab):
    """The links outlive smctl; disable takes everything away, also from sockets that are marked."""
    assert lab.status() == {"enabled": False, "cgroup": None, "links": "/sys/fs/bpf/xsmc", "problem": None}
    lab.check("disabled")
    lab.enable()
    assert lab.status() == {"enabled": True, "cgroup": str(lab.cgroup), "links": "/sys/fs/bpf/xsmc", "problem": None}
    survivor = lab.start("survivor")
    assert survivor.stdout.readline() == "marked\n"
    assert lab.command("disable").stdout == "disabled\n"
    finish(survivor)
    lab.check("disabled")
    done = lab.command("disable")
    assert (done.returncode, done.stdout) == (0, "not enabled: nothing to do\n")
    lab.enable()
    lab.check("combinations")


def test_outside(lab):
    """Processes of other control groups have no option."""
    lab.enable()
    other = lab.cgroup.with_name(lab.cgroup.name + "-other")
    other.mkdir()
    try:
        lab.check("disabled", other)
    finally:
        wait_until(lambda: remove(other), 10, lambda: f"{other} to be removed")


def test_below(lab):
    """Processes of control groups further down have it."""
    lab.enable()
    inner = lab.cgroup / "inner"
    inner.mkdir()
    try:
        lab.check("combinations", inner)
    finally:
        wait_until(lambda: remove(inner), 10, lambda: f"{inner} to be removed")


@pytest.mark.parametrize("name", ["combinations", "fast_open", "late", "others", "raw_clients"])
def test_twice(lab, make_lab, name):
    """Enabled for a control group and, by somebody who can't know, for one below: as if enabled once."""
    inner = make_lab(lab.cgroup)
    lab.enable()
    inner.enable()
    lab.check(name, inner.cgroup)


def test_cgroup_removed(lab):
    """The control group goes away: that is said, and can be cleared up."""
    lab.enable()
    lab.remove_cgroup()
    assert lab.status()["problem"] == "the control group is gone"
    done = lab.command("enable", "--status")
    assert done.stdout.startswith("not working: the control group is gone") and "smctl disable" in done.stdout
    assert lab.command("disable").stdout == "disabled\n"
    lab.cgroup.mkdir()
    lab.enable()
    lab.check("combinations")


def says(done, *parts):
    """Asserts that smctl failed with a message that has these parts."""
    assert (done.returncode, done.stdout) == (1, ""), done
    for part in parts:
        assert part in done.stderr, f"{part!r} is not in {done.stderr!r}"
    assert done.stderr.count("\n") == 1, done.stderr


def test_messages(lab):
    """What is wrong, with what, and what to do."""
    enable = ("enable", "--cgroup", lab.cgroup)
    in_namespace = ["unshare", "--mount", "sh", "-c"]
    says(lab.command("enable", "--cgroup", "/tmp"), "/tmp: not a control group of cgroup v2")
    says(lab.command("enable", "--cgroup", lab.cgroup / "absent"), f"can't open control group {lab.cgroup}/absent")
    says(lab.command(*enable, inside=[*in_namespace, 'mount -t tmpfs none /sys/fs/bpf && exec "$0" "$@"']),
         "no bpf file system is mounted at /sys/fs/bpf", "mount -t bpf bpf /sys/fs/bpf")
    says(lab.command("enable", inside=[*in_namespace, 'umount -a -l -t cgroup2 && exec "$0" "$@"']),
         "no cgroup v2 hierarchy is mounted", "/proc/mounts", "mount -t cgroup2")
    assert lab.status()["enabled"] is False
    lab.enable()
    says(lab.command(*enable), f"already enabled on {lab.cgroup} (links in /sys/fs/bpf/xsmc)", "smctl disable")
    assert lab.status()["enabled"] is True


def test_not_root(lab):
    """A user, and root without capabilities, are told what they lack."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="xsmc-t-"))
    try:
        folder.chmod(0o755)
        shutil.copy(settings.SMCTL, folder / "smctl")
        drop = {"user": ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
                "powerless root": ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]}
        for who, words in drop.items():
            as_user = [*words, "sh", "-c", f'shift; exec {folder}/smctl "$@"', "sh"]
            says(lab.command("enable", "--cgroup", lab.cgroup, inside=as_user), "not permitted to", "as root", "CAP_BPF")
            assert lab.status() == {"enabled": False, "cgroup": None, "links": "/sys/fs/bpf/xsmc", "problem": None}, who
        lab.enable()
        as_user = [*drop["user"], "sh", "-c", f'shift; exec {folder}/smctl "$@"', "sh"]
        for words in (["enable", "--status"], ["disable"], ["enable", "--cgroup", lab.cgroup]):
            says(lab.command(*words, inside=as_user), "not permitted to", "/sys/fs/bpf/xsmc", "as root")
        assert lab.status()["enabled"] is True
        lab.check("combinations")
    finally:
        shutil.rmtree(folder)
