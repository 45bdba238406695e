"""What can be set from outside, by environment variables.

XSMC_LIB         libxsmc.so to preload (default: target/release/libxsmc.so of this workspace)
SMCTL            the smctl program (default: target/release/smctl)
XSMC_TEST_PLAIN  1: no preload at all; what concerns RMBs is not asserted (and says so)
XSMC_TEST_SCALE  factor for the amount of work (default 1: continuous integration; about 30: the full programme)
XSMC_TEST_SEED   seed of the random checks (default: another one each time, printed on failure)
"""

import os
import pathlib
import random

TESTS = pathlib.Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
TARGET = ROOT / "target"
LIBRARY = pathlib.Path(os.environ.get("XSMC_LIB") or TARGET / "release" / "libxsmc.so")
SMCTL = pathlib.Path(os.environ.get("SMCTL") or TARGET / "release" / "smctl")
PLAIN = os.environ.get("XSMC_TEST_PLAIN", "") not in ("", "0")
SCALE = float(os.environ.get("XSMC_TEST_SCALE") or 1)
SEED = int(os.environ.get("XSMC_TEST_SEED") or random.SystemRandom().randrange(1, 1 << 31))


def scaled(amount, least=1):
    """`amount` for continuous integration, times XSMC_TEST_SCALE."""
    return max(least, int(amount * SCALE))
