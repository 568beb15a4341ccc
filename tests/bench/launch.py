"""Runs a script on real ranks, as a user would: torchrun, gloo, this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "MV2_", "TORCHELASTIC_")


def clean(env: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what a launcher may have left in it, with `env` over it."""
    base = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    return base | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {})


def torchrun(script: Path, ranks: int = 2, *args: str, env: dict[str, str] | None = None):
    """The script under `ranks` processes; what they printed and the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, str(script), *args], capture_output=True, text=True, env=clean(env), timeout=120, check=False
    )
