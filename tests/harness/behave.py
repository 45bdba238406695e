"""Checks that run as two processes, written as one function.

A check is a function test_...(t) with the decorator @check(). Under pytest it becomes a test with one run per mode:

    plain   neither process has the library
    both    both have it, with eager upgrades; t.pair() and the like then wait till the connection rides RMBs
    local   only the process that runs the function has it
    peer    only the other process has it

In each run the function is executed in a fresh process ("here"), and `t` lets it execute code in a second one
("peer"): t.peer("c.sendall(b'x')") runs a snippet there, in the name space of the same test module, and gives the value
of the snippet if it is an expression. See harness/runner.py.
"""

import functools
import os
import sys

MODES = ("plain", "both", "local", "peer")
CHILD = "XSMC_CHECK_CHILD"  # set in the environment of the two processes


def loaded(mode):
    """(here, peer): which of the two has the library."""
    return mode in ("both", "local"), mode in ("both", "peer")


def modes(*wanted, differs=None):
    """Decorator of an ordinary pytest function with a parameter `mode`. `differs`: see `check`."""
    import pytest
    from . import settings
    chosen = list(wanted or MODES)
    if settings.PLAIN:
        skip = pytest.mark.skip(reason=f"plain mode: the check needs the library (modes {', '.join(chosen)})")
        chosen = ["plain"] if "plain" in chosen else [pytest.param(chosen[0], marks=skip)]
    elif differs:
        known = pytest.mark.xfail(strict=True, reason=differs)
        chosen = [pytest.param(mode, marks=known) if mode == "both" else mode for mode in chosen]
    return pytest.mark.parametrize("mode", chosen)


def check(*wanted, seconds=20, here=(), peer=(), differs=None):
    """Decorator of a check. `wanted`: modes (default all). `here`, `peer`: commands put before the processes' own. `differs`:
    why it fails, as is known, where both ends are loaded; it must, or the reason is to be taken out."""
    def decorate(function):
        if os.environ.get(CHILD):
            return function

        def test(make_world, mode):
            _run(make_world("eager"), sys.modules[function.__module__].__file__, function.__name__, mode, seconds, here, peer)

        functools.update_wrapper(test, function, assigned=("__name__", "__qualname__", "__module__", "__doc__"), updated=())
        del test.__wrapped__
        return modes(*wanted, differs=differs)(test)
    return decorate


def _run(world, module, name, mode, seconds, here, peer):
    from . import settings
    to_peer, from_peer = os.pipe(), os.pipe()
    code = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner.py")
    env = {CHILD: "1", "CHECK_MODE": mode, "CHECK_SECONDS": seconds, "CHECK_SEED": settings.SEED,
           "XSMC_TEST_SCALE": settings.SCALE}
    if mode == "plain":
        env["LD_PRELOAD"] = None
    local_loaded, peer_loaded = loaded(mode)
    python = [sys.executable, "-B", "-u", code]
    other = world.start([*peer, *python, "peer", module], peer_loaded, env, stdin=to_peer[0], stdout=from_peer[1])
    first = world.start([*here, *python, "here", module, name], local_loaded, env, stdin=from_peer[0], stdout=to_peer[1])
    for end in (*to_peer, *from_peer):
        os.close(end)
    try:
        first.wait(seconds + 5, None)
    except AssertionError:
        other.kill()
        raise AssertionError(f"{name}, mode {mode}: time-out\nhere: {first.describe()}\npeer: {other.describe()}") from None
    if first.child.returncode == 77:
        import pytest
        other.kill()
        pytest.skip(first.err.strip().splitlines()[-1])
    try:
        other.wait(5, None)
    except AssertionError as error:
        raise AssertionError(f"the peer did not end with the check: {error}\nhere: {first.describe()}") from None
    assert first.child.returncode == 0, f"{name}, mode {mode}:\nhere: {first.describe()}\npeer: {other.describe()}"
