"""What a suite is, and running it both ways."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import tempfile
import time

from harness import settings
from harness.status import Watch, wait_until
from harness.world import CRASHES, listening, processes, rest_of_line


@dataclasses.dataclass
class Suite:
    """One row of the table."""

    name: str
    # run(way) gives the outcome of each of its cases by name: "passed", "failed" or "skipped".
    run: callable
    # Debian packages that it needs.
    packages: tuple = ()
    # Whether it moves bytes between connections that could ride RMBs.
    moves_bytes: bool = True
    # In seconds, both ways together, on an idle machine; for people who choose.
    takes: int = 10
    # Whether all of its cases pass where nothing is wrong: those of ours, not of other people's suites.
    all_pass: bool = False
    # build(way), if any, makes what both ways run, once before them; they have what it gives as `built`.
    build: callable = None


class Way:
    """One of the two ways in which a suite is run: a directory for it, and how programs are started."""

    def __init__(self, name, directory):
        self.name, self.directory = name, directory
        self.runtime = directory / "runtime"
        self.runtime.mkdir(parents=True)
        self.loaded = name == "xsmc"
        self.processes = []
        self.options = {}
        self.outcomes, self.details = {}, {}
        self.built = None

    def env(self, **extra):
        """The environment of programs, with the library in it or not."""
        env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD" and not key.startswith("XSMC_")}
        if self.loaded:
            env |= {"LD_PRELOAD": str(settings.LIBRARY), "XSMC_RUNTIME_DIR": str(self.runtime), "XSMC_UPGRADE": "eager"}
        return env | extra

    def command(self, argv, seconds, **options):
        """Runs a program to its end; gives (status, output). Status None: it took longer than `seconds`.

        It has a process group of its own, which is ended with it."""
        child = self._start(argv, **options)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        end_group(child)
        return status, child.log.read_text(errors="replace")

    def case(self, name, check, *arguments):
        """Notes the outcome of one case; gives what the check gives, None if it has failed."""
        try:
            value = check(*arguments)
        except Exception as error:  # what is wrong with a case is told, and the others go on
            self.outcomes[name], self.details[name] = "failed", f"{type(error).__name__}: {error}"
            return None
        self.outcomes[name] = "passed"
        return value

    def lines(self, output, names):
        """Notes the outcomes of cases that a program of ours reports by lines "ok NAME" and "failed NAME: REASON"."""
        for name in names:
            self.outcomes[name], self.details[name] = "failed", f"no word of it: {output[-1500:]}"
        for line in output.splitlines():
            word, _, rest = line.partition(" ")
            name = rest.partition(":")[0]
            if word in ("ok", "failed") and name in names:
                self.outcomes[name], self.details[name] = "passed" if word == "ok" else "failed", rest

    def run(self, argv, seconds=60, **options):
        """Runs a program to its end; gives its output. RuntimeError unless it ends in time and with status 0."""
        status, output = self.command(argv, seconds, **options)
        if status != 0:
            raise RuntimeError(f"{argv[0]}: {'not done in time' if status is None else f'status {status}'}: {output[-1500:]}")
        return output

    def start(self, argv, port=None, seconds=30, **options):
        """Starts a program in the background, and waits till something listens on `port`. `close` ends it at the latest."""
        child = self._start(argv, **options)
        self.processes.append(child)
        if port:
            self.wait_port(child, port, seconds)
        return child

    def wait_port(self, child, port, seconds=30):
        """Looks at the kernel's table, so that no connection is made."""
        def ready():
            if child.poll() is not None:
                raise RuntimeError(f"{child.args[0]} ended before it listened on {port}: {tail(child)}")
            return port in listening()
        wait_until(ready, seconds, lambda: f"a listener on port {port}: {tail(child)}")

    def wait_line(self, child, start, seconds=30):
        """Waits for a line of output that starts so; gives its rest."""
        def ready():
            if rest := rest_of_line(child.log.read_text(errors="replace"), start):
                return rest
            if child.poll() is not None:
                raise RuntimeError(f"{child.args[0]} ended before it said {start!r}: {tail(child)}")
            return None
        return wait_until(ready, seconds, lambda: f"a line {start!r}: {tail(child)}")

    def stop(self, child, number=signal.SIGTERM, seconds=30):
        """Asks a background program to end; gives its status. RuntimeError if it crashed or doesn't end."""
        if child.poll() is None:
            child.send_signal(number)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{child.args[0]} did not end on signal {number}: {tail(child)}") from None
        finally:
            end_tree(child)
        if -status in CRASHES:
            raise RuntimeError(f"{child.args[0]} crashed by signal {-status}: {tail(child)}")
        return status

    def become(self, account):
        """Programs started from now on run as this user, if we are root."""
        if os.getuid():
            return
        entry = pwd.getpwnam(account)
        self.options = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        self.directory.parent.chmod(0o711)
        for path in (self.directory, self.runtime):
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def close(self):
        """Ends what still runs in the background, by its id."""
        for child in reversed(self.processes):
            end_tree(child)
        self.processes = []

    def _start(self, argv, env=None, stdin=subprocess.DEVNULL, **options):
        log = self.directory / f"{time.monotonic_ns()}-{os.path.basename(str(argv[0]))}.log"
        options = {"cwd": self.directory} | self.options | options
        with open(log, "wb") as output:
            child = subprocess.Popen([str(word) for word in argv], env=self.env(**(env or {})), stdin=stdin, stdout=output,
                                     stderr=subprocess.STDOUT, start_new_session=True, **options)
        child.log = log
        return child

    def status(self):
        """What `smctl status` says."""
        done = subprocess.run([str(settings.SMCTL), "status", "--json", "--runtime-dir", str(self.runtime)], check=False,
                              capture_output=True, text=True, timeout=30)
        return json.loads(done.stdout or "{}")

    def totals(self):
        """What all processes have counted."""
        return (self.status().get("totals") or [{}])[0]

    def rmb_bytes(self):
        """What has come by RMB so far: of the connections that have ended."""
        return self.totals().get("counters", {}).get("rmb_received", 0)

    def on_tcp(self, reason, check, *arguments):
        """Runs `check`; under xsmc fails if something goes by RMB, or if `smctl status` doesn't show the reason why not."""
        if not self.loaded:
            return check(*arguments)
        before = self.rmb_bytes()
        with Watch(self.status, 0.05) as watch:
            result = check(*arguments)
        shown = watch.reasons | {entry["name"] for entry in self.totals().get("fallbacks", []) if entry["count"]}
        assert self.rmb_bytes() == before and not watch.rmb, f"by RMB: {watch}"
        assert reason in shown, f"reason {reason} was not shown, but {sorted(shown)}"
        return result


def tail(child):
    return child.log.read_text(errors="replace")[-1500:]


def tree(root):
    """Ids of the processes below and in the session of `root`, and its own."""
    parents = {pid: (parent, session) for pid, parent, session in processes()}
    found, before = {root}, 0
    while len(found) != before:
        before = len(found)
        found |= {pid for pid, (parent, session) in parents.items() if parent in found or session in found}
    return found & parents.keys()


def end_tree(child):
    """Ends a program and all that it started, in whatever group or session that is."""
    deadline = time.monotonic() + 10
    while (left := tree(child.pid)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        child.poll()
        time.sleep(0.01)
    child.wait()


def end_group(child):
    """Ends what is left of a program's process group."""
    try:
        os.killpg(child.pid, 9)
    except ProcessLookupError:
        pass
    child.wait()


@dataclasses.dataclass
class Result:
    """A suite's outcome, both ways."""

    name: str
    plain: dict
    xsmc: dict
    seconds: dict
    totals: dict
    moves_bytes: bool
    all_pass: bool = False
    # What is known about cases that failed, by way and name.
    details: dict = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def rmb_bytes(self):
        return self.totals.get("counters", {}).get("rmb_received", 0)

    def differences(self):
        """Cases whose outcome depends on xsmc: (name, plain, under xsmc)."""
        names = sorted(self.plain.keys() | self.xsmc.keys())
        pairs = [(name, self.plain.get(name, "not run"), self.xsmc.get(name, "not run")) for name in names]
        return [pair for pair in pairs if pair[1] != pair[2]]

    def detail(self, way, name):
        known = self.details.get(way, {}).get(name)
        return f" ({known})" if known else ""

    def problem(self):
        """Why the suite has not passed; empty if it has."""
        if self.error:
            return self.error
        if differing := self.differences():
            return "; ".join(f"{name}: {plain} plain, {xsmc} under xsmc{self.detail('xsmc', name) or self.detail('plain', name)}"
                             for name, plain, xsmc in differing[:5])
        if not self.plain or "passed" not in self.plain.values():
            return "nothing passed, plain or not"
        if self.all_pass and (failed := sorted(name for name, outcome in self.plain.items() if outcome == "failed")):
            return "; ".join(f"{name}: failed plain as well{self.detail('plain', name)}" for name in failed[:5])
        if self.moves_bytes and not self.rmb_bytes:
            return "no byte went by RMB"
        return ""

    def as_json(self):
        return {"name": self.name, "ok": not self.problem(), "problem": self.problem(), "plain": count(self.plain),
                "xsmc": count(self.xsmc), "seconds": self.seconds, "rmb_bytes": self.rmb_bytes, "totals": self.totals,
                "failed": sorted(name for name, outcome in self.plain.items() if outcome == "failed")}


def count(outcomes):
    return {kind: sum(outcome == kind for outcome in outcomes.values()) for kind in ("passed", "failed", "skipped")}


def run(suite, keep=None, together=False):
    """Runs a suite plain and under xsmc, `together`: at the same time. Its files go to the directory `keep`, or, if that is
    None, away."""
    if keep:
        os.makedirs(keep, exist_ok=True)
    top = pathlib.Path(tempfile.mkdtemp(prefix=f"xsmc-{suite.name}-", dir=keep))
    seconds, totals, error = {}, {}, ""
    ways = [Way(name, top / name) for name in ("plain", "xsmc")]

    def one(way):
        begin = time.monotonic()
        try:
            outcomes = suite.run(way)
        finally:
            way.close()
        seconds[way.name] = round(time.monotonic() - begin, 1)
        return outcomes
    try:
        if suite.build:
            built = suite.build(Way("build", top / "build"))
            for way in ways:
                way.built = built
        with concurrent.futures.ThreadPoolExecutor(2 if together else 1) as threads:
            plain, xsmc = threads.map(one, ways)
        totals = ways[1].totals()
    except Exception as failure:  # one suite that breaks doesn't stop the others
        plain, xsmc, error = {}, {}, f"{type(failure).__name__}: {failure}"
    finally:
        if not keep:
            shutil.rmtree(top, ignore_errors=True)
    details = {way.name: way.details for way in ways}
    return Result(suite.name, plain, xsmc, seconds, totals, suite.moves_bytes, suite.all_pass, details, error)
