"""Checks that run as two processes on two hosts: the guests of scripts/lab, with soft-RoCE between them.

A check is a function test_...(t) with the decorator @check(). The client's guest executes it; `t` is as in behave.py, but
the peer is in the server's guest: t.peer("c.sendall(b'x')") runs a snippet there. Both processes have the library and
a policy that offers SMC-R, so that t.pair() gives an SMC-R connection.

Booting costs seconds, so all checks of a file share one pair of guests, each in fresh processes; @check(boot="name") puts
a check into another pair. Each becomes one test of pytest's, and the first one of a boot runs the others as well.
See guest.py for what happens in the guests.
"""

import functools
import json
import os
import shlex
import shutil
import sys

CHILD = "XSMC_CHECK_CHILD"  # set in the environment of the checks' processes
CONTROL_PORT = 9000

POLICY = f"""
[smc-r]
ueid = "XSMC-TEST"

[[rule]]
listen = [":{CONTROL_PORT}"]
action = "tcp"

[[rule]]
connect = [":{CONTROL_PORT}"]
action = "tcp"

[[rule]]
action = "smc"
"""

# What both guests do; the other variables come before it.
SCRIPT = """
$SMCTL enable || exit
mkdir $XSMC_RUNTIME_DIR
exec env LD_PRELOAD="$LIBRARY" "${COMMAND[@]}"
"""


def check(seconds=40, boot="", env=(), needs=(), nics=1):
    """Decorator of a check that must end within `seconds`. `env`: settings (NAME=VALUE) of the whole boot. `needs`:
    programs without which it is skipped. `nics`: network cards in each guest."""
    def decorate(function):
        if os.environ.get(CHILD):
            function.seconds = seconds
            return function

        def test(hosts, need):
            need(*needs)
            hosts.passed(function.__name__)

        functools.update_wrapper(test, function, assigned=("__name__", "__qualname__", "__module__", "__doc__"), updated=())
        del test.__wrapped__
        test.boot, test.env, test.seconds, test.needs, test.nics = boot, env, seconds, needs, nics
        return test
    return decorate


class Hosts:
    """The boots of one file, made when first asked for; the fixture `hosts` of conftest.py."""

    def __init__(self, lab, module, functions, folder):
        self._lab, self._module, self._functions, self._folder = lab, module, functions, folder
        self._results = {}

    def passed(self, name):
        """Asserts that a check has passed, after running all of its boot; once more if that is asked again of one that has not."""
        if name not in self._results:
            self._run(self._functions[name].boot)
        error = self._results[name]
        if error:
            del self._results[name]
        assert not error, error

    def _run(self, boot):
        from . import settings
        chosen = {name: function for name, function in self._functions.items() if function.boot == boot
                  and all(map(shutil.which, function.needs))}
        env = {word for function in chosen.values() for word in function.env}
        policy = self._folder / "policy.toml"
        policy.write_text(POLICY)
        values = {"SMCTL": settings.SMCTL, "LIBRARY": settings.LIBRARY, CHILD: 1, "CHECK_MODE": "both", "CHECK_SECONDS": 0,
                  "CHECK_SEED": settings.SEED, "XSMC_TEST_SCALE": settings.SCALE, "XSMC_CONFIG": policy,
                  "XSMC_RUNTIME_DIR": "/dev/shm/xsmc", "XSMC_LOG": os.environ.get("XSMC_LOG", "info")}
        command = [sys.executable, "-B", "-u", settings.TESTS / "harness" / "guest.py", self._module, *chosen]
        lines = [f"export {name}={shlex.quote(str(value))}" for name, value in values.items()]
        lines += [f"export {word}" for word in sorted(env)]
        lines.append(f"COMMAND=({shlex.join(map(str, command))})")
        script = "\n".join(lines) + SCRIPT
        seconds = 15 + sum(function.seconds for function in chosen.values())
        nics = max((function.nics for function in chosen.values()), default=1)
        result = self._lab.run(script, script, timeout=seconds, nics=nics)
        lines = [json.loads(line) for line in _read(result.out / "results").splitlines()]
        known = {line["name"]: line for line in lines}
        for name in chosen:
            found = known.get(name, {"error": "did not run"})
            said = "\n".join(f"--- {role}:\n{_part(end.output, name)}" for role, end in
                             (("client", result.client), ("server", result.server)))
            self._results[name] = found["error"] and f"{found['error']}\n{said}"
        if not known:
            self._results.update({name: result.report() for name in chosen})


def _read(path):
    return path.read_text() if path.exists() else ""


def _part(output, name):
    """What a guest said while a check ran."""
    if f"== {name}\n" not in output:
        return output
    return output.partition(f"== {name}\n")[2].partition("== test_")[0]
