"""A command line in an interpreter of its own, and documents that are equal up to rounding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = "import sys; from steptime.commands.cli import main; sys.exit(main())"


def process(*args, stdin=None, env=None, command=SCRIPT, **options):
    """A run in its own interpreter, as the installed script is."""
    return subprocess.run(
        [sys.executable, "-c", command, *map(str, args)],
        input=stdin, capture_output=True, cwd=ROOT, env=os.environ | {"COLUMNS": "200"} | (env or {}), check=False, **options,
    )  # fmt: skip


def close(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, rel=1e-8) if isinstance(a, float) else a == b
