"""One test's world: runtime directory, environment of loaded and plain programs, processes, status."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from . import settings
from .status import Watch, on_rmb, rmb_bytes, wait_until

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP, signal.SIGFPE, signal.SIGSYS)


def python(*args):
    """Command line of a Python program, one of tests/programs if the name has no slash."""
    script = str(args[0])
    if script.endswith(".py") and "/" not in script:
        script = str(settings.TESTS / "programs" / script)
    return [sys.executable, "-B", "-u", script, *map(str, args[1:])]


class Process:
    """A started program with its output in files. It is killed by its id at the end of the test if it still runs."""

    def __init__(self, world, argv, loaded, env, log, **options):
        self.world, self.argv, self.loaded, self.log = world, [str(word) for word in argv], loaded, log
        self.killed = False
        self.out_path, self.err_path = f"{log}.out", f"{log}.err"
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            options.setdefault("stdin", subprocess.DEVNULL)
            options.setdefault("cwd", world.tmp)
            options.setdefault("stdout", out)
            self.child = subprocess.Popen(self.argv, env=env, stderr=err, start_new_session=True, **options)
        self.pid = self.child.pid

    @property
    def out(self):
        return pathlib.Path(self.out_path).read_text(errors="replace")

    @property
    def err(self):
        return pathlib.Path(self.err_path).read_text(errors="replace")

    def describe(self):
        return (f"{' '.join(self.argv)[:300]} ({'loaded' if self.loaded else 'plain'}, pid {self.pid}, "
                f"status {self.child.poll()})\n--- its output:\n{self.out[-3000:]}\n--- its errors:\n{self.err[-3000:]}")

    def running(self):
        return self.child.poll() is None

    def wait(self, seconds=30, status=0):
        """Waits for the end; fails if it takes longer or the exit status differs (None: any that is no crash)."""
        try:
            code = self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            stacks = self.stacks()
            self.kill()
            raise AssertionError(f"still running after {seconds} s: {self.describe()}\n{stacks}") from None
        if status is None:
            assert code >= 0 or -code not in CRASHES, f"crashed: {self.describe()}"
        else:
            assert code == status, f"exit status {code}, not {status}: {self.describe()}"
        return self

    def stacks(self):
        """Where the process hangs, if a debugger is at hand."""
        if not shutil.which("gdb"):
            return ""
        try:
            done = subprocess.run(["gdb", "-p", str(self.pid), "-batch", "-nx", "-ex", "thread apply all bt 14"],
                                  capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
            return "--- its stacks:\n" + done.stdout[-5000:]
        except subprocess.TimeoutExpired:
            return ""

    def wait_port(self, port, seconds=15):
        """Waits till something listens on the port. Looks at the kernel's table, so that no connection is made."""
        def ready():
            assert self.running(), f"ended before it listened on {port}: {self.describe()}"
            return port in listening()
        wait_until(ready, seconds, lambda: f"a listener on port {port}: {self.describe()}")
        return self

    def wait_line(self, start, seconds=15):
        """Waits for a line of output that starts so; gives its rest."""
        def ready():
            if rest := rest_of_line(self.out, start):
                return rest
            assert self.running(), f"ended before it said {start!r}: {self.describe()}"
            return None
        return wait_until(ready, seconds, lambda: f"a line {start!r}: {self.describe()}")

    def kill(self, number=signal.SIGKILL):
        """Sends a signal to the process and what it started in its session group."""
        if self.running():
            self.killed = True
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass
            if number == signal.SIGKILL:
                self.child.wait(10)
        return self

    def stop(self, number=signal.SIGTERM, seconds=15):
        """Asks the process alone to end, and waits."""
        if self.running():
            self.killed = True
            os.kill(self.pid, number)
            try:
                self.child.wait(seconds)
            except subprocess.TimeoutExpired:
                stacks = self.stacks()
                self.kill()
                raise AssertionError(f"did not stop on signal {number}: {self.describe()}\n{stacks}") from None
        assert self.child.returncode >= 0 or -self.child.returncode not in CRASHES, f"crashed: {self.describe()}"
        return self


def listening():
    """Ports with a TCP listener in this network namespace."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                next(lines)
                for line in lines:
                    words = line.split()
                    if words[3] == "0A":
                        ports.add(int(words[1].rsplit(":", 1)[1], 16))
        except FileNotFoundError:
            pass
    return ports


def rest_of_line(text, start):
    """What follows `start` in the first complete line that begins so, " " if nothing does; None without such a line."""
    for line in text.splitlines(keepends=True):
        if line.startswith(start) and line.endswith("\n"):
            return line[len(start):].strip() or " "
    return None


def processes():
    """(id, parent's id, session) of all processes but zombies."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                yield int(name), int(fields[1]), int(fields[3])


def orphans(sessions):
    """Processes that belong to these sessions: children that outlived a program which a test had started."""
    return [pid for pid, _, session in processes() if session in sessions]


_used_ports = set()


def free_port():
    """A port below the range of client ports that nobody uses now and no other call of this run has given."""
    while True:
        port = random.SystemRandom().randrange(10000, 30000)
        if port in _used_ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _used_ports.add(port)
        return port


class World:
    """See the module. `plain`: nothing is ever loaded. `upgrade`: the XSMC_UPGRADE of loaded programs."""

    def __init__(self, tmp, upgrade="default"):
        self.tmp, self.upgrade, self.plain = pathlib.Path(tmp), upgrade, settings.PLAIN
        self.processes = []
        self.skipped = []
        if not self.plain:
            for path in (settings.LIBRARY, settings.SMCTL):
                assert path.exists(), f"{path} is missing: build it, or set XSMC_TEST_PLAIN=1 to try the tests themselves"
        # Short, because the paths of Unix sockets are limited, and in memory.
        self.runtime = pathlib.Path(tempfile.mkdtemp(prefix="xsmc-t-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))

    def env(self, loaded=True, **extra):
        """Environment of a program. A value None removes a variable."""
        env = {key: value for key, value in os.environ.items()
               if not key.startswith("XSMC_") and key not in ("LD_PRELOAD", "SMCTL")}
        env["LC_ALL"] = "C"
        env["XSMC_RUNTIME_DIR"] = str(self.runtime)
        env["XSMC_UPGRADE"] = self.upgrade
        if os.environ.get("XSMC_LOG"):
            env["XSMC_LOG"] = os.environ["XSMC_LOG"]
        if loaded and not self.plain:
            env["LD_PRELOAD"] = str(settings.LIBRARY)
        env.update({key: str(value) for key, value in extra.items() if value is not None})
        for key in [key for key, value in extra.items() if value is None]:
            env.pop(key, None)
        return env

    def start(self, argv, loaded=True, env=None, **options):
        """Starts a program in the background."""
        name = os.path.basename(str(argv[0]))
        log = self.tmp / f"{len(self.processes):02d}-{name}"
        process = Process(self, argv, loaded, self.env(loaded, **(env or {})), log, **options)
        self.processes.append(process)
        return process

    def run(self, argv, loaded=True, seconds=60, status=0, env=None, **options):
        """Runs a program to its end; gives the Process."""
        return self.start(argv, loaded, env, **options).wait(seconds, status)

    def finish(self, *processes, seconds=20):
        """Waits till all of these have ended with status 0; shows all of them if one has not."""
        wrong = []
        for process in processes:
            try:
                process.wait(5 if wrong else seconds)
            except AssertionError as error:
                wrong.append(str(error))
        assert not wrong, "\n".join([*wrong, "=== all:", *(process.describe() for process in processes)])

    def status(self):
        """The parsed answer of `smctl status --json`; an empty document in plain mode."""
        if self.plain:
            return []
        done = subprocess.run([str(settings.SMCTL), "status", "--json"], env=self.env(False), timeout=15,
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"smctl status --json: status {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)

    def watch(self, every=0.1):
        return Watch(self.status, every)

    def not_asserted(self, what):
        """Notes (and prints) that plain mode leaves out an assertion."""
        if self.plain:
            print(f"plain mode: not asserted: {what}")
            self.skipped.append(what)
        return self.plain

    def wait_rmb(self, seconds=10):
        """Waits till some connection has a carrier "rmb"; gives the status."""
        if self.not_asserted("a connection rides RMBs"):
            return []
        last = []

        def ready():
            last[:] = [self.status()]
            return on_rmb(last[0])
        wait_until(ready, seconds, lambda: f"a direction on an RMB; status: {json.dumps(last[0])[:3000]}", every=0.05)
        return last[0]

    def assert_rmb(self, watch, share=0.5, least=1):
        """Asserts that at least `least` of the bytes a Watch has seen rode RMBs, and a fair part of them all.

        `share` is what an idle machine reaches. How soon an upgrade comes depends on what else the machine does,
        so a twentieth of it is asserted: that connections ride RMBs, not how fast they got there.
        """
        if self.not_asserted("the bytes ride RMBs"):
            return
        print(f"carriage: {watch}")
        assert watch.rmb >= least, f"no bytes went through RMBs: {watch}"
        assert watch.rmb >= share / 20 * (watch.rmb + watch.tcp), f"too few bytes went through RMBs: {watch}"

    def assert_reason(self, watch, reason="no-peer"):
        """Asserts that a Watch saw nothing on RMBs, and this reason for it; processes may have ended before it looked."""
        if self.not_asserted(f"reason {reason}"):
            return
        assert watch.rmb == 0, f"one end is plain, but bytes went through RMBs: {watch}"
        ended = {entry["name"] for totals in self.status().get("totals", []) for entry in totals["fallbacks"]}
        assert reason in watch.reasons | ended, f"reason {reason} was not shown: {watch}; counted {sorted(ended)}"

    def rmb_bytes(self):
        return rmb_bytes(self.status())

    def close(self):
        """Kills what still runs; gives a list of what went wrong with the programs of this test."""
        wrong = []
        for process in self.processes:
            process.kill()
        for orphan in orphans({process.pid for process in self.processes}):
            try:
                os.kill(orphan, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for process in self.processes:
            code = process.child.returncode
            if code is not None and code < 0 and -code in CRASHES:
                wrong.append(f"crashed: {process.describe()}")
            if "panicked at" in process.err:
                wrong.append(f"panicked: {process.describe()}")
        deadline = time.monotonic() + 5
        while True:
            try:
                shutil.rmtree(self.runtime)
                break
            except FileNotFoundError:
                if not self.runtime.exists() or time.monotonic() > deadline:
                    break
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        return wrong
