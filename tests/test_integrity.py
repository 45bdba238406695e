"""No byte is lost, doubled, moved or changed, with carriers switched at random moments.

programs/integrity.c makes every byte a function of seed, direction and stream offset, and reports where a wrong byte
came from. The engine's test hook XSMC_TEST_FLIP_US forces a switch of a random connection about every so many
microseconds. Sizes grow with XSMC_TEST_SCALE: about 60 thousand messages and 2 GB at 1, 2 million and 60 GB at 30.
"""

import itertools

import pytest

from harness import settings
from harness.settings import scaled
from harness.status import nodes

MESSAGES = scaled(6000)
BULK = scaled(170_000_000)
FLIPS = [None, 50, 1000]
HOLD = ["--hold", 300]  # milliseconds in which the status shows the whole of it
_seeds = itertools.count(settings.SEED)


def _seconds():
    return int(60 + 60 * settings.SCALE)


def _wait(world, *processes):
    world.finish(*processes, seconds=_seconds() + 10)
    for process in processes:
        assert "ok " in process.out, process.describe()


def _finish(world, watch, flip, share):
    print(watch)
    if flip is None:
        world.assert_rmb(watch, share)
    elif not world.not_asserted("carriers were switched"):
        assert watch.rmb > 0, f"nothing rode RMBs: {watch}"
        assert watch.switches > 2, f"the test hook switched nothing: {watch}"


def _pair(world, integrity, mode, flip, share, *options):
    seed = next(_seeds)
    env = {"XSMC_TEST_FLIP_US": flip}
    common = [*options, *HOLD, "--seed", seed, "--timeout", _seconds()]
    with world.watch(0.05) as watch:
        server = world.start([integrity, mode, "--role", "server", *common], env=env)
        port = server.wait_line("port ")
        client = world.start([integrity, mode, "--role", "client", "--port", port, *common], env=env)
        _wait(world, client, server)
    _finish(world, watch, flip, share)


def _self(world, integrity, mode, flip, share, *options):
    with world.watch(0.05) as watch:
        process = world.start([integrity, mode, "--role", "self", *options, *HOLD, "--seed", next(_seeds), "--timeout", _seconds()],
                              env={"XSMC_TEST_FLIP_US": flip})
        _wait(world, process)
    _finish(world, watch, flip, share)


@pytest.mark.parametrize("flip", FLIPS)
@pytest.mark.parametrize("io", ["block", "epoll", "vec"])
def test_pingpong(eager, program, io, flip):
    """Messages of 1 byte to 300 kB there and back between two processes."""
    _pair(eager, program("integrity"), "pingpong", flip, 0.8, "--io", io, "--count", MESSAGES)


@pytest.mark.parametrize("flip", FLIPS)
@pytest.mark.parametrize("io", ["block", "vec"])
def test_pingpong_one_thread(eager, program, io, flip):
    """One thread holds both ends: no call may wait for the other end."""
    _self(eager, program("integrity"), "pingpong", flip, 0.8, "--io", io, "--count", MESSAGES)


@pytest.mark.parametrize("flip", FLIPS)
def test_small_messages(eager, program, flip):
    """Many messages of up to 64 bytes, which meet every moment of a switch."""
    _pair(eager, program("integrity"), "pingpong", flip, 0.8, "--io", "block", "--max", 64,
          "--count", MESSAGES * (8 if flip else 15))


@pytest.mark.parametrize("flip", FLIPS)
def test_bulk(eager, program, flip):
    """Streams in both directions at once, by calls of all kinds, between two processes."""
    _pair(eager, program("integrity"), "bulk", flip, 0.8, "--bytes", BULK)


@pytest.mark.parametrize("flip", FLIPS)
def test_bulk_one_process(eager, program, flip):
    """Four threads of one process send and receive on both ends."""
    _self(eager, program("integrity"), "bulk", flip, 0.8, "--bytes", BULK)


def test_default_policy_upgrades_bulk(make_world, program):
    """Without eager mode a stream starts on TCP and is upgraded once it proves worth it."""
    world = make_world("default")
    _pair(world, program("integrity"), "bulk", None, 0.5, "--bytes", BULK)


def test_never_stays_on_tcp(make_world, program):
    """XSMC_UPGRADE=never keeps everything on TCP."""
    world = make_world("never")
    integrity = program("integrity")
    with world.watch(0.05) as watch:
        server = world.start([integrity, "pingpong", "--role", "server", "--count", 2000])
        client = world.start([integrity, "pingpong", "--role", "client", "--count", 2000, "--port", server.wait_line("port ")])
        _wait(world, client, server)
    assert watch.rmb == 0, watch
    assert not [node for node in nodes(world.status()) if node.get("connections")]


@pytest.mark.parametrize("loaded", ["server", "client"])
@pytest.mark.parametrize("io", ["block", "epoll", "vec"])
def test_one_end(eager, program, io, loaded):
    """With one plain end every byte goes over TCP."""
    integrity = program("integrity")
    common = ["--io", io, "--count", MESSAGES // 2, "--seed", next(_seeds), "--timeout", _seconds()]
    with eager.watch(0.05) as watch:
        server = eager.start([integrity, "pingpong", "--role", "server", *common], loaded == "server")
        port = server.wait_line("port ")
        client = eager.start([integrity, "pingpong", "--role", "client", "--port", port, *common], loaded == "client")
        _wait(eager, client, server)
    eager.assert_reason(watch)
