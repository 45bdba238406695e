"""A short run of scripts/torture; a longer one: XSMC_TEST_SCALE, or that script."""

import os
import subprocess

import pytest

from harness import settings
from harness.settings import scaled


@pytest.mark.slow
@pytest.mark.parametrize("flip_us", [0, 2000])
def test_torture(flip_us):
    """Connect, send, fork, exec, pass, close, reset, kill at random: every byte, end and descriptor is as on TCP."""
    if settings.PLAIN:
        pytest.skip("plain mode: its processes are always loaded")
    env = os.environ | {"PYTHONPATH": str(settings.TESTS)}
    done = subprocess.run(["/usr/bin/python3", "-B", "-m", "torture", "--minutes", str(scaled(15) / 60), "--seed",
                           str(settings.SEED), "--flip-us", str(flip_us)], env=env, capture_output=True, text=True,
                          timeout=scaled(15) + 120, check=False)
    print(done.stdout[-20000:], done.stderr[-2000:])
    assert done.returncode == 0, done.stdout.splitlines()[-2:]
    assert " bytes by RMB" in done.stdout and " 0 bytes by RMB" not in done.stdout, done.stdout
