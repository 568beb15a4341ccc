"""`mcore_cuda_graphs.py` in a process of its own: importing Megatron changes what torch compiles and which pickles it trusts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from forked import ROOT, clean

CHECKS = Path(__file__).with_name("mcore_cuda_graphs.py")


def test_graphs_of_experts_are_those_that_megatron_accepts():
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, cwd=ROOT, env=clean(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
