"""Fixtures of the end-to-end tests. harness/settings.py lists the environment variables that steer a run.

Everything runs on 127.0.0.1, or between two guests (fixture `lab`), in processes that the tests start and end
themselves; each test has a runtime directory of its own. A test fails when one of its programs crashed, whatever else happened.
"""

import os
import shutil
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from harness import build, hosts as host_checks, lab as two_hosts, settings, world  # noqa: E402  (needs the path)


# A test that fails gets a second chance (pytest-rerunfailures): programs and guests run against time limits, and what else
# the machine does counts. How it failed is printed all the same, to be looked into, and a run in which more than
# SECOND_CHANCES tests needed one fails.
SECOND_CHANCES = 10

HOSTS = pytest.StashKey()


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
    config.addinivalue_line("markers", "long: only part of scripts/test --long, so that the rest fits a build server's time")
    if config.pluginmanager.hasplugin("rerunfailures") and not config.option.reruns:
        config.option.reruns = 1


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if len(reporter.stats.get("rerun", [])) > SECOND_CHANCES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_report_header():
    mode = "plain (nothing is preloaded)" if settings.PLAIN else f"preloading {settings.LIBRARY}"
    return [f"xsmc: {mode}, scale {settings.SCALE:g}, seed {settings.SEED}"]


def pytest_terminal_summary(terminalreporter):
    again = terminalreporter.stats.get("rerun", [])
    for report in again:
        terminalreporter.section(f"needed a second chance: {report.nodeid}")
        terminalreporter.write_line(str(report.longrepr))
    if len(again) > SECOND_CHANCES:
        terminalreporter.write_line(f"{len(again)} tests needed a second chance: this run has failed", red=True)
    for report in terminalreporter.stats.get("skipped", []):
        where = report.nodeid
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"not run: {where}: {why}")
    if settings.PLAIN:
        terminalreporter.write_line("plain mode: what concerns RMBs and reasons was not asserted")


@pytest.fixture
def make_world(tmp_path, request):
    """Makes worlds with a chosen upgrade mode; see harness/world.py."""
    made = []

    def make(upgrade="default", **options):
        directory = tmp_path / f"world{len(made)}"
        directory.mkdir()
        made.append(world.World(directory, upgrade, **options))
        return made[-1]

    yield make
    wrong = [problem for one in made for problem in one.close()]
    failed = getattr(request.node, "failed", False)
    if not failed:
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert not wrong, "\n".join(wrong)


@pytest.fixture(params=["default", "eager"])
def xsmc(request, make_world):
    """A world, once with the default upgrade policy and once with eager upgrades."""
    return make_world(request.param)


@pytest.fixture
def eager(make_world):
    """A world with eager upgrades."""
    return make_world("eager")


@pytest.fixture
def port():
    return world.free_port()


@pytest.fixture
def program():
    """program("name") builds and gives tests/programs/name.c."""
    return build.program


@pytest.fixture
def need():
    """need("redis-server", ...) skips the test, with a reason, where a program is missing."""
    def check(*names):
        missing = [name for name in names if not shutil.which(name)]
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)}")
    return check


@pytest.fixture
def lab(tmp_path):
    """Two guests with soft-RoCE and the kernel's SMC; see harness/lab.py."""
    return two_hosts.Lab(tmp_path)


@pytest.fixture
def hosts(request, tmp_path_factory):
    """The checks of this file that run between two hosts; see harness/hosts.py."""
    if settings.PLAIN:
        pytest.skip("plain mode: checks between hosts need the library")
    # Not of scope "module": after a test's second chance, pytest-rerunfailures may hand that to the next file.
    module = request.node.getparent(pytest.Module)
    if HOSTS not in module.stash:
        chosen = {item.name: item.obj for item in request.session.items
                  if item.path == request.path and hasattr(item.obj, "boot")}
        folder = tmp_path_factory.mktemp("hosts")
        module.stash[HOSTS] = host_checks.Hosts(two_hosts.Lab(folder), request.path, chosen, folder)
    return module.stash[HOSTS]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed:
        item.failed = True
