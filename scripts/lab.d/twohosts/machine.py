"""One QEMU guest: start, control through QMP and the control port, memory snapshot, end."""

import json
import os
import pathlib
import re
import secrets
import socket
import subprocess
import time

from . import image as images
from .errors import LabError
from .image import QEMU

MEMORY_MIB = 512
# Without CMPXCHG16B: QEMU 7.2 emulates it with flags that, if an interrupt comes just then, end in a double fault.
EMULATED_CPU = "max,-cx16"
CMDLINE = "console=ttyS0 panic=-1 quiet mitigations=off nopti nokaslr audit=0 rodata=off nowatchdog"
# A cold boot takes 5 s on a quiet machine without KVM.
BOOT_SECONDS = 40
# With KVM it takes less than one; one that takes longer than this is taken for a KVM that doesn't work.
KVM_BOOT_SECONDS = 15
# Writing or reading a snapshot takes less than one.
SNAPSHOT_SECONDS = 30


class Machine:
    """A guest of the role "server" or "client". Its sockets lie in `folder`, its files in `out`/<role>.

    `links` are the paths of unix sockets, one for each network card: the server listens, the client connects. They are
    stream sockets of the unix kind on purpose; see scripts/lab for what happens over TCP.
    """

    def __init__(self, role, image, folder, out, links, accelerator, pcap=None):
        self.role, self.accelerator = role, accelerator
        self._image, self._folder, self._out, self._links, self._pcap = image, folder, out, links, pcap
        self._process = self._qmp = self._control = None
        self._answers = b""
        (out / role).mkdir(exist_ok=True)

    def _path(self, name):
        return str(self._folder / f"{self.role}.{name}")

    def _devices(self):
        """The arguments that decide what hardware the guest sees: a snapshot fits only machines with the same."""
        return [
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "q35", "-accel", self.accelerator,
            "-cpu", "host" if self.accelerator == "kvm" else EMULATED_CPU, "-smp", "1", "-m", str(MEMORY_MIB), "-append", CMDLINE,
            "-device", "virtio-9p-pci,fsdev=h,mount_tag=host", "-device", "virtio-9p-pci,fsdev=o,mount_tag=out",
            "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=ctl,name=ctl", "-device", "virtconsole,chardev=tty",
            *(word for nic in range(len(self._links)) for word in ("-device", f"virtio-net-pci,netdev=n{nic},romfile=")),
        ]

    def _backends(self):
        """The arguments that connect this hardware to the host."""
        words = [
            "-kernel", str(self._image.kernel), "-initrd", str(self._image.initramfs),
            "-serial", f"file:{self._out / self.role / 'console'}", "-qmp", f"unix:{self._path('qmp')},server=on,wait=off",
            "-fsdev", "local,id=h,path=/,security_model=none,readonly=on,multidevs=remap",
            "-fsdev", f"local,id=o,path={self._out},security_model=none",
            "-chardev", f"socket,id=ctl,path={self._path('ctl')},server=on,wait=off",
            "-chardev", f"socket,id=tty,path={self._path('tty')},server=on,wait=off",
        ]
        server = "on" if self.role == "server" else "off"
        for nic, link in enumerate(self._links):
            words += ["-netdev", f"stream,id=n{nic},server={server},addr.type=unix,addr.path={link}"]
            if self._pcap:
                name = f"{self._pcap}.{nic}" if nic else self._pcap
                words += ["-object", f"filter-dump,id=dump{nic},netdev=n{nic},file={name}"]
        return words

    def snapshot_path(self):
        """Where the snapshot of a machine like this one lies, or will lie."""
        version = subprocess.run([QEMU, "--version"], capture_output=True, check=True).stdout
        parts = [version, self._image.identity.encode(), "\0".join(self._devices()).encode()]
        if self.accelerator == "kvm":
            # The guest sees this machine's CPU.
            parts += sorted(set(re.findall(rb"^(?:model name|flags)\s*:.*$", pathlib.Path("/proc/cpuinfo").read_bytes(), re.M)))
        key = images.digest(*parts)
        return images.cache_folder() / f"memory-{key}"

    def start(self, snapshot=None):
        """Starts it cold, or from a snapshot: then it still has to be resumed by restore()."""
        words = [QEMU, *self._backends(), *self._devices()]
        if snapshot:
            words += ["-incoming", f"exec:exec cat '{snapshot}'"]
        with open(self._path("log"), "wb") as log:
            # setpriv lets the kernel end the guest if the driver is killed.
            self._process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words], stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=log, start_new_session=True)
        self._qmp = self._connect("qmp")
        self._read_answer()
        self.command("qmp_capabilities")
        self._control = self._connect("ctl")

    def alive(self):
        return self._process is not None and self._process.poll() is None

    def kill(self):
        """Ends it at once. Harmless when it has ended or was never started."""
        for sock in (self._qmp, self._control):
            if sock:
                sock.close()
        if self._process:
            self._process.kill()
            self._process.wait()

    def trouble(self):
        """The last things that QEMU and the guest's console said."""
        texts = [pathlib.Path(path).read_text(errors="replace") for path in (self._path("log"), self._out / self.role / "console")
                 if os.path.exists(path)]
        return "\n".join(line for text in texts for line in text.splitlines()[-12:])

    def _connect(self, name):
        end = time.monotonic() + 10
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self._path(name))
                return sock
            except OSError as error:
                sock.close()
                if not self.alive() or time.monotonic() > end:
                    raise LabError(f"{QEMU} for the {self.role} did not start ({error}):\n{self.trouble()}") from None
                time.sleep(0.01)

    def _read_answer(self):
        self._qmp.settimeout(20)
        while True:
            line, found, rest = self._answers.partition(b"\n")
            if found:
                self._answers = rest
                message = json.loads(line)
                if "event" not in message:
                    return message
                continue
            try:
                part = self._qmp.recv(65536)
            except OSError as error:
                raise LabError(f"{QEMU} for the {self.role} does not answer on its QMP socket: {error}") from None
            if not part:
                raise LabError(f"{QEMU} for the {self.role} ended:\n{self.trouble()}")
            self._answers += part

    def command(self, name, /, **arguments):
        """Executes a QMP command and gives its answer."""
        try:
            self._qmp.sendall(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
        except OSError as error:
            raise LabError(f"{QEMU} for the {self.role} ended ({error}):\n{self.trouble()}") from None
        answer = self._read_answer()
        if "error" in answer:
            raise LabError(f"{QEMU} for the {self.role} refuses {name}: {answer['error']['desc']}")
        return answer["return"]

    def await_ready(self, seconds=BOOT_SECONDS):
        """Waits until the guest's init waits for its assignments."""
        end = time.monotonic() + seconds
        self._control.settimeout(0.2)
        while True:
            try:
                # The guest writes to this port only once, and less than a buffer.
                if b"ready" in self._control.recv(100):
                    return
                raise LabError(f"the {self.role} ended while it booted:\n{self.trouble()}")
            except TimeoutError:
                pass
            except OSError as error:
                raise LabError(f"the {self.role} ended while it booted ({error}):\n{self.trouble()}") from None
            status = self.command("query-status")["status"]
            if status != "running":
                raise LabError(f"the {self.role} did not boot ({QEMU} is in state {status}):\n{self.trouble()}")
            if time.monotonic() > end:
                raise LabError(f"the {self.role} did not boot within {seconds} s:\n{self.trouble()}")

    def save(self, path):
        """Writes the snapshot of a guest that is ready, and ends it."""
        self._control.close()
        self.command("stop")
        self.command("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        fresh = path.with_name(f"fresh.{os.getpid()}")
        self.command("migrate", uri=f"exec:cat > '{fresh}'")
        end = time.monotonic() + SNAPSHOT_SECONDS
        while (status := self.command("query-migrate").get("status")) not in ("completed", "failed", "cancelled"):
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        self.kill()
        if status != "completed":
            fresh.unlink(missing_ok=True)
            raise LabError(f"{QEMU} could not write its memory to {path.parent} ({status}); is there room for 100 MB?")
        os.rename(fresh, path)

    def restore(self):
        """Resumes a machine that was started from a snapshot."""
        end = time.monotonic() + SNAPSHOT_SECONDS
        while (status := self.command("query-status")["status"]) == "inmigrate":
            if time.monotonic() > end:
                raise LabError(f"the {self.role} was not restored within {SNAPSHOT_SECONDS} s")
            time.sleep(0.01)
        if status not in ("paused", "postmigrate", "prelaunch"):
            raise LabError(f"the {self.role} was not restored ({QEMU} is in state {status})")
        self.command("cont")

    def begin(self, **values):
        """Hands the guest's init its assignments, whereupon it sets up the guest and runs its command."""
        own, peer = (1, 2) if self.role == "server" else (2, 1)
        values |= {"role": self.role, "own": own, "peer": peer, "nics": len(self._links), "now": int(time.time()),
                   "seed": secrets.token_hex(32)}
        for name, value in values.items():
            if not re.fullmatch(r"[\w.-]*", str(value), re.ASCII):
                raise LabError(f"{name} {value!r} may have only letters, digits, '.', '_' and '-'")
        line = " ".join(f"{name}={value}" for name, value in values.items()) + "\n"
        try:
            self._control.sendall(line.encode())
        except OSError as error:
            raise LabError(f"the {self.role} ended before its command could start ({error}):\n{self.trouble()}") from None

    def terminal(self):
        """A socket connected to the guest's console /dev/hvc0."""
        return self._connect("tty")


def accelerator(image, folder):
    """ "kvm" if a guest really boots with it, else "tcg". Tried once for each boot of this machine.

    There are machines on which /dev/kvm can be opened and a guest starts, but its first unusual instruction stops it.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known = images.cache_folder() / f"accelerator-{boot}"
    if known.exists():
        return known.read_text()
    machine = Machine("server", image, folder, folder, [], "kvm")
    try:
        machine.start()
        machine.await_ready(KVM_BOOT_SECONDS)
        works = "kvm"
    except LabError:
        works = "tcg"
    finally:
        machine.kill()
    known.write_text(works)
    return works
