"""The launch command of a benchmark, as text: torchrun for any cluster, or a complete sbatch script. Nothing is launched.

Sources: torchrun's options, torch.distributed.run; sbatch(1), srun(1). One torchrun per node starts that node's ranks; they meet
at the first node (c10d).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from steptime.base.config import ConfigError, near
from steptime.base.words import counted
from steptime.bench.phases import JOB_STARTED
from steptime.job.job import Job

KINDS = ("slurm", "torchrun")


class _Place(NamedTuple):
    """The placement of the ranks."""

    devices: int
    nodes: int
    per_node: int
    machine: str

    @property
    def words(self) -> str:
        return f"{counted(self.devices, 'device')} on {counted(self.nodes, 'node')} of {self.machine}"


def emit(kind: str, job: Job, config_path: str, *, arguments: Sequence[str] = (), gpus: bool = True) -> str:
    """The shell text that runs `steptime.bench PLAN` on all devices of a job, with its line end.

    slurm: a script for sbatch, which asks for `gpus` or none; torchrun: a command, on several nodes for each of them. The ranks
    open `config_path`, and get the further `arguments`, such as --out DIR.

    Raises:
        ConfigError: the kind is unknown, the config has no path, or the devices do not fill their nodes.
    """
    if kind not in KINDS:
        raise ConfigError(f"--emit: unknown kind (got {kind!r}){near(kind, KINDS)}")
    if config_path == "-":
        raise ConfigError("--emit: a plan from standard input cannot be opened by the ranks; save it to a file")
    place = _place(job)
    path = f"./{config_path}" if config_path.startswith("-") else config_path
    program = ["-m", "steptime.bench", *map(shlex.quote, (path, *arguments))]
    return _sbatch(place, program, gpus=gpus) if kind == "slurm" else _torchrun(place, program)


def _place(job: Job) -> _Place:
    devices, per_node = job.parallelism.devices, job.machine.devices_per_node
    machine = " ".join(job.machine.name.split())  # a line break would end the comment in which it stands
    if devices <= per_node:
        return _Place(devices, 1, devices, machine)
    if devices % per_node:
        nodes = f"{devices} devices is not a multiple of {per_node} per node ({machine})"
        raise ConfigError(f"--emit: {nodes}; change parallelism, or hardware.overrides.devices_per_node")
    return _Place(devices, devices // per_node, per_node, machine)


def _torchrun(place: _Place, program: list[str]) -> str:
    if place.nodes == 1:
        where, options = "run there", ["--standalone", f"--nproc-per-node={place.per_node}"]
    else:
        where = "run on each of them, with HEAD_NODE the name of the first"
        options = _rendezvous(place, '"${HEAD_NODE:?the name of the first node}:29500"', "steptime-bench")
    command = _folded("torchrun", *options, " ".join(program))
    return f"# {place.words}; {where}\n{JOB_STARTED}=$(date +%s) {command}\n"


def _rendezvous(place: _Place, endpoint: str, name: str) -> list[str]:
    """How the torchruns of several nodes find each other."""
    return [
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={place.per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={name}",
        f"--rdzv-endpoint={endpoint}",
    ]


def _folded(*parts: str) -> str:
    """One command split over several lines."""
    return " \\\n    ".join(parts)


def _sbatch(place: _Place, program: list[str], *, gpus: bool) -> str:
    torchrun = _rendezvous(place, '"${nodes[0]}:$port"', '"$SLURM_JOB_ID"')
    launch = _folded("srun --kill-on-bad-exit=1 --cpu-bind=none torchrun", *torchrun, " ".join(program))
    request = ["--job-name=steptime-bench", f"--nodes={place.nodes}", "--ntasks-per-node=1"]
    request += [f"--gpus-per-node={place.per_node}"] if gpus else []
    request += ["--exclusive", "--output=%x-%j.log"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in request),
        "# remove one # if the cluster requires these:",
        "##SBATCH --partition=NAME",
        "##SBATCH --account=NAME",
        "##SBATCH --time=01:00:00",
        "",
        f"# {place.words}; one torchrun per node starts its {counted(place.per_node, 'rank')}",
        "set -euo pipefail",
        'echo "Job started at: $(date -u +%Y-%m-%d-%H%M%S) on $(hostname)"',
        f"{JOB_STARTED}=$(date +%s.%N)",
        f"export {JOB_STARTED}",
        "",
        "# the environment with steptime[bench], if it is not the one of sbatch:",
        "# source /path/to/venv/bin/activate",
        "",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "port=$((10000 + SLURM_JOB_ID % 20000)) # the same on every node, different for each job",
        "",
        launch,
    ]
    return "\n".join(lines) + "\n"
