"""Random socket calls of two processes, one at a time, give the same with and without xsmc: what they return, their errors, the
bytes, and what poll, select and epoll say. programs/lockstep.py makes the calls."""

import json
import os

import pytest

from harness import settings
from harness.world import python

CALLS = 1500
# Others with XSMC_TEST_SEED, more with XSMC_TEST_SCALE.
FIRST, SEEDS = int(os.environ.get("XSMC_TEST_SEED") or 1), settings.scaled(8, least=2)
# What takes its time in the kernel as well (acknowledgements) may differ, so calls must differ each time.
TRIES = 3


def play(world, seed, loaded, peer_loaded, **env):
    """The lines of one run."""
    argv = python("lockstep.py", seed, CALLS)
    env["LOCKSTEP_PEER_PRELOAD"] = settings.LIBRARY if peer_loaded and not world.plain else ""
    return world.run(argv, loaded=loaded, seconds=60, env=env).out.splitlines()


def events(line):
    """The call of an epoll_wait and the events it gave; (line, None) for other calls."""
    call, _, result = line.partition(" -> ")
    if " epoll_wait " not in call or not result.startswith("["):
        return line, None
    return call, json.loads(result)


def same(plain, loaded):
    """Whether a line is as it should be. An edge may be told again (README, Limits)."""
    (call, wanted), (other, got) = events(plain), events(loaded)
    if call != other or wanted is None or got is None:
        return plain == loaded
    return all(event in got for event in wanted) and all(event in wanted or "edge" in event for event in got)


def differences(world, seed, **how):
    """Calls that gave something else than without xsmc."""
    plain, loaded = play(world, seed, False, False), play(world, seed, **how)
    assert len(plain) == len(loaded) == CALLS
    return [f"plain: {one}\n xsmc: {other}" for one, other in zip(plain, loaded) if not same(one, other)]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["both", "one", "flipping"])
def test_lockstep(make_world, ends):
    """`flipping`: connections change between RMBs and TCP all the time."""
    world = make_world("eager")
    how = {"loaded": True, "peer_loaded": ends != "one"}
    if ends == "flipping":
        how["XSMC_TEST_FLIP_US"] = 1500
    for seed in range(FIRST, FIRST + SEEDS):
        for _ in range(TRIES):
            found = differences(world, seed, **how)
            if not found:
                break
        assert not found, f"seed {seed}, {len(found)} differ:\n" + "\n".join(found[:10])
    if ends != "one" and not world.not_asserted("the bytes ride RMBs"):
        [totals] = world.status()["totals"]
        assert totals["counters"]["rmb_sent"] > 100_000, totals
