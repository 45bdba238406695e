"""The two-host lab: two QEMU guests with soft-RoCE and the kernel's SMC. scripts/lab describes it and is its command line.

`run()` boots both, runs a command in each, and gives statuses and outputs.
"""

from .console import shell
from .errors import LabError
from .pair import End, Result, run

__all__ = ["End", "LabError", "Result", "run", "shell"]
