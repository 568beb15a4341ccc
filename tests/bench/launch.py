"""Runs a script on real ranks, gloo, this machine: under torchrun as a user would, or as forks that start at once."""

from __future__ import annotations

from pathlib import Path

import forked

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(__file__).with_name("run_torchrun.py")
WARM = ("steptime.commands.bench_command", "steptime.bench.conclude", "steptime.bench.rank_run")
"""What most scripts import, torch among it."""


def torchrun(script: Path, ranks: int = 2, *args: str):
    """The script under `ranks` processes; what they printed and the exit code."""
    return fork(TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", script, *args)


def fork(script: Path, *args: object, ranks=({},)):
    """The script as one fork for each environment of `ranks`."""
    return forked.run(forked.server(*WARM), script, *args, ranks=ranks)


def fork_ranks(script: Path, ranks: int = 2, *args: object):
    """The script on `ranks` forks, told what torchrun tells its processes; they meet in a store of this process, its agent."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return fork(script, *args, ranks=[shared | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)])
