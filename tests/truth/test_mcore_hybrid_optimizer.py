"""`mcore_hybrid_optimizer.py` in a process of its own: importing Megatron changes what torch compiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from forked import ROOT, clean

CHECKS = Path(__file__).with_name("mcore_hybrid_optimizer.py")


def test_states_lie_where_megatrons_hybrid_optimizer_puts_them():
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, cwd=ROOT, env=clean(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
