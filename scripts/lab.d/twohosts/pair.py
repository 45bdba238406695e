"""A run of the lab: both guests, a command in each, what they print, the faults they ask for, and the end of it all."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import sys
import tempfile
import time

from .errors import LabError
from .image import Image, cache_lock
from .machine import Machine, accelerator

ROLES = ("server", "client")
POLL_SECONDS = 0.02
# When one command has failed, how long the other may go on.
GRACE_SECONDS = 5


@dataclasses.dataclass
class End:
    """How the command of one guest ended."""

    status: int | None = None  # exit status; None if there is none
    output: str = ""           # standard output and standard error
    problem: str = ""          # why there is no status
    expected: bool = False     # the other guest asked for this end

    @property
    def ok(self):
        return self.status == 0 or self.expected


@dataclasses.dataclass
class Result:
    """What a run gave. `out` is the folder that both guests saw as $OUT."""

    server: End
    client: End
    out: pathlib.Path
    pcap: pathlib.Path | None = None

    @property
    def ok(self):
        return self.server.ok and self.client.ok

    def report(self):
        """For the message of a failed assertion."""
        return "\n".join(f"--- {role}: {end.problem or f'status {end.status}'}\n{end.output}"
                         for role, end in (("server", self.server), ("client", self.client)))


def run(server, client, *, out, nics=1, cold=False, timeout=60, pcap=None, ueid="XSMC-TEST", cwd=None, echo=None):
    """Boots the two guests, runs a shell text in each, and returns a Result when both have ended.

    out      folder for output, made if missing: the guests' $OUT, and the only place where what they write is kept
    nics     network cards in each guest, 1 or 2
    cold     True: boot without the memory snapshot
    timeout  seconds after which the guests are ended, not counting their boot
    pcap     file that gets the frames of the first link; those of the second go to the same name with ".1"
    ueid     the kernel's user-defined EID for SMC; "" for none
    cwd      folder of the host in which the commands run
    echo     called with (role, line) as soon as a line is printed

    Raises LabError when the lab itself fails. All its processes have ended when it returns or raises.
    """
    with Pair(out, nics, cold, pcap) as pair:
        for role, text in (("server", server), ("client", client)):
            folder = pathlib.Path(cwd or os.getcwd())
            (pair.out / role / "command").write_text(f"cd {_quoted(folder)} || exit\n{text}\n")
        pair.start(ueid=ueid, interactive=0)
        return pair.follow(time.monotonic() + timeout, timeout, echo)


def _quoted(path):
    return "'" + str(path).replace("'", "'\\''") + "'"


class Pair:
    """Two machines and the folders they use. A context manager: entering prepares them, leaving ends both."""

    def __init__(self, out, nics, cold, pcap):
        self.out = pathlib.Path(out).resolve()
        self.machines = {}
        self._nics, self._cold, self._pcap = nics, cold, pcap and pathlib.Path(pcap).resolve()
        self._dead = {}     # {role: why} of guests that ended for a known reason

    def __enter__(self):
        if self._nics not in (1, 2):
            raise LabError(f"a guest has 1 or 2 network cards, not {self._nics}")
        self._image = Image()
        # Names of unix sockets may have 107 bytes, so they can't lie in `out`.
        short = tempfile.gettempdir() if len(tempfile.gettempdir()) < 75 else "/tmp"
        self._sockets = pathlib.Path(tempfile.mkdtemp(prefix="xsmc-lab-", dir=short))
        try:
            self._accelerator = accelerator(self._image, self._sockets)
            self.out.mkdir(parents=True, exist_ok=True)
            self.out.chmod(0o777)
            for role in ROLES:
                shutil.rmtree(self.out / role, ignore_errors=True)
                self._make(role)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for machine in self.machines.values():
            machine.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _make(self, role):
        links = [self._sockets / f"link{nic}" for nic in range(self._nics)]
        pcap = self._pcap if role == "server" else None
        self.machines[role] = Machine(role, self._image, self._sockets, self.out, links, self._accelerator, pcap)
        return self.machines[role]

    def start(self, **values):
        """Starts both, from the snapshot if that is possible, and hands them their assignments."""
        if self._cold or not self._resume():
            self._start_both()
            for machine in self.machines.values():
                machine.await_ready()
        for machine in self.machines.values():
            machine.begin(**values)

    def _resume(self):
        """Starts both from the snapshot. If that fails, it says so, and gives False."""
        path = self.machines["server"].snapshot_path()
        try:
            self._make_snapshot(path)
            self._start_both(path)
            for machine in self.machines.values():
                machine.restore()
        except LabError as error:
            print(f"lab: booting, as the memory snapshot can't be used: {error}", file=sys.stderr, flush=True)
            path.unlink(missing_ok=True)
            for role in ROLES:
                self.machines[role].kill()
                self._make(role)
            return False
        return True

    def _start_both(self, snapshot=None):
        for link in self._sockets.glob("link*"):
            link.unlink()
        # The server's links exist once start() has spoken with QEMU.
        for role in ROLES:
            self.machines[role].start(snapshot)

    def _make_snapshot(self, path):
        with cache_lock():
            if not path.exists():
                machine = self._make("server")
                try:
                    machine.start()
                    machine.await_ready()
                    machine.save(path)
                finally:
                    machine.kill()
                self._make("server")
            os.utime(path)

    def follow(self, deadline, seconds, echo):
        """Serves both guests until their commands have ended, or the deadline has come."""
        ends = {role: End() for role in ROLES}
        readers = {role: _Lines(self.out / role / "log") for role in ROLES}
        running = list(ROLES)
        limit = f"no end within {seconds:g} s"
        while running:
            self.serve()
            late = time.monotonic() > deadline
            for role in list(running):
                end, status = ends[role], self.out / role / "status"
                ended = late or status.exists() or not self.machines[role].alive()
                for line in readers[role].new(last=ended):
                    end.output += line
                    if echo:
                        echo(role, line.rstrip("\n"))
                if not ended:
                    continue
                running.remove(role)
                self._note(role, end, limit if late else None)
                if not end.ok and not late:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    limit = f"ended {GRACE_SECONDS} s after the {role} had failed"
            time.sleep(POLL_SECONDS)
        return Result(ends["server"], ends["client"], self.out, self._pcap)

    def _note(self, role, end, limit):
        """Notes why a command ended; `limit` says which time limit it exceeded, if it did."""
        status = self.out / role / "status"
        if status.exists():
            end.status = int(status.read_text())
        elif limit:
            end.problem = limit
        elif role in self._dead:
            end.problem, end.expected = self._dead[role], True
        else:
            end.problem = f"the guest died; its last words:\n{self.machines[role].trouble()}"

    def serve(self):
        """Does what the lab-fault of a guest asks for, if it does."""
        for role in ROLES:
            request = self.out / role / "request"
            if not request.exists():
                continue
            words = request.read_text().split()
            request.unlink()
            try:
                self._fault(role, *(words if len(words) == 2 else ("", "")))
                answer = "ok"
            except LabError as error:
                answer = str(error)
            fresh = self.out / role / "answer.new"
            fresh.write_text(answer + "\n")
            fresh.rename(fresh.with_name("answer"))

    def _fault(self, role, kind, nic):
        peer = "client" if role == "server" else "server"
        if kind in ("link-up", "link-down"):
            self.machines[role].command("set_link", name=f"n{nic}", up=kind == "link-up")
        elif kind == "kill-peer":
            self._dead[peer] = f"killed as the {role} asked for it"
            self.machines[peer].kill()
        elif kind == "stop-peer":
            self.machines[peer].command("stop")
        elif kind == "continue-peer":
            self.machines[peer].command("cont")
        else:
            raise LabError(f"the lab's driver knows no fault '{kind}'")


class _Lines:
    """The complete lines that were added to a growing file."""

    def __init__(self, path):
        self._path, self._file, self._rest = path, None, ""

    def new(self, last=False):
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = open(self._path, encoding="utf-8", errors="replace", newline="\n")
        if self._file is None:
            return []
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        lines = [line + "\n" for line in lines]
        if last and self._rest:
            lines.append(self._rest)
            self._rest = ""
        if last:
            self._file.close()
        return lines
