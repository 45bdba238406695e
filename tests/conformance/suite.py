"""What a suite is, and running it both ways."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

from harness import settings


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


class Way:
    """One of the two ways in which a suite is run: a directory for it, and how programs are started."""

    def __init__(self, name, directory):
        self.name, self.directory = name, directory
        self.runtime = directory / "runtime"
        self.runtime.mkdir(parents=True)
        self.loaded = name == "xsmc"

    def env(self, **extra):
        """The environment of programs, with the library in it or not."""
        env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD" and not key.startswith("XSMC_")}
        if self.loaded:
            env |= {"LD_PRELOAD": str(settings.LIBRARY), "XSMC_RUNTIME_DIR": str(self.runtime), "XSMC_UPGRADE": "eager"}
        return env | extra

    def command(self, argv, seconds, **options):
        """Runs a program to its end; gives (status, output). Status None: it took longer than `seconds`.

        It has a process group of its own, which is ended with it."""
        log = self.directory / f"{time.monotonic_ns()}.log"
        options.setdefault("cwd", self.directory)
        with open(log, "wb") as output:
            child = subprocess.Popen([str(word) for word in argv], env=self.env(**options.pop("env", {})), stdin=subprocess.DEVNULL,
                                     stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **options)
            try:
                status = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            end_group(child)
        return status, log.read_text(errors="replace")

    def totals(self):
        """What all processes have counted, of `smctl status`."""
        done = subprocess.run([str(settings.SMCTL), "status", "--json", "--runtime-dir", str(self.runtime)], check=False,
                              capture_output=True, text=True, timeout=30)
        totals = json.loads(done.stdout or "{}").get("totals") or [{}]
        return totals[0]


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
    error: str = ""

    @property
    def rmb_bytes(self):
        return self.totals.get("counters", {}).get("rmb_received", 0)

    def differences(self):
        """Cases whose outcome depends on xsmc: (name, plain, under xsmc)."""
        names = sorted(self.plain.keys() | self.xsmc.keys())
        pairs = [(name, self.plain.get(name, "not run"), self.xsmc.get(name, "not run")) for name in names]
        return [pair for pair in pairs if pair[1] != pair[2]]

    def problem(self):
        """Why the suite has not passed; empty if it has."""
        if self.error:
            return self.error
        if differing := self.differences():
            return "; ".join(f"{name}: {plain} plain, {xsmc} under xsmc" for name, plain, xsmc in differing[:5])
        if not self.plain or "passed" not in self.plain.values():
            return "nothing passed, plain or not"
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
    top = pathlib.Path(tempfile.mkdtemp(prefix=f"xsmc-{suite.name}-", dir=keep))
    seconds, totals, error = {}, {}, ""
    ways = [Way(name, top / name) for name in ("plain", "xsmc")]

    def one(way):
        begin = time.monotonic()
        outcomes = suite.run(way)
        seconds[way.name] = round(time.monotonic() - begin, 1)
        return outcomes
    try:
        with concurrent.futures.ThreadPoolExecutor(2 if together else 1) as threads:
            plain, xsmc = threads.map(one, ways)
        totals = ways[1].totals()
    except Exception as failure:  # one suite that breaks doesn't stop the others
        plain, xsmc, error = {}, {}, f"{type(failure).__name__}: {failure}"
    finally:
        if not keep:
            shutil.rmtree(top, ignore_errors=True)
    return Result(suite.name, plain, xsmc, seconds, totals, suite.moves_bytes, error)
