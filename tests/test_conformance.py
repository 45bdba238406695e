"""Those of the suites that scripts/conformance runs which say most about sockets; the others take too long for every change."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance import cpython, suite
from harness import settings

NAMES = ("test_asyncio", "test_socket", "test_selectors", "test_socketserver", "test_ftplib")


@pytest.fixture(scope="module")
def results():
    """Of all of them, run together: they mostly wait."""
    chosen = [s for s in cpython.suites() if s.name in NAMES]
    with ThreadPoolExecutor(3) as threads:
        done = threads.map(lambda s: suite.run(s, together=True), chosen)
        return {result.name: result for result in done}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_same_as_plain(results, name):
    """The same tests pass, fail and are skipped under xsmc as plain, and bytes go by RMB."""
    if settings.PLAIN:
        pytest.skip("plain mode: there would be nothing to compare")
    result = results[name]
    if result.differences():
        result = suite.run(next(s for s in cpython.suites() if s.name == name))
    assert not result.problem(), result.problem()
