"""Builds the C programs of tests/programs when a test first needs them."""

import os
import pathlib
import shutil
import subprocess

from . import settings

_OUTPUT = settings.TARGET / "programs"


def program(name, *flags):
    """Path of the built tests/programs/<name>.c; rebuilt when the source is newer."""
    return _build(f"{name}.c", name + ("-" + "".join(c for c in "".join(flags) if c.isalnum()) if flags else ""), flags)


def library(name):
    """Path of tests/programs/<name>.c built as a shared library."""
    return _build(f"{name}.c", f"lib{name}.so", ("-shared", "-fPIC"))


def _build(source, output, flags):
    source, output = settings.TESTS / "programs" / source, pathlib.Path(_OUTPUT) / output
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler, "no C compiler: install gcc, or set CC"
    newest = max(path.stat().st_mtime for path in (source, *source.parent.glob("*.h")))
    if not output.exists() or output.stat().st_mtime <= newest:
        output.parent.mkdir(parents=True, exist_ok=True)
        fresh = output.with_name(f"{output.name}.{os.getpid()}")
        done = subprocess.run([compiler, "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-pthread", "-o", str(fresh), str(source),
                               *flags, "-ldl"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{source.name} does not compile:\n{done.stderr}"
        os.rename(fresh, output)
    return output
