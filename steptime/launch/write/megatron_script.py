"""A plan as a shell script that launches Megatron-LM."""

from __future__ import annotations

import shlex
from math import gcd
from typing import Any

from steptime.job.job import Job
from steptime.launch.keys import KeyTable, load_table
from steptime.launch.write.megatron_arguments import arguments
from steptime.launch.write.plain_keys import unusual


def script(job: Job) -> str:
    """torchrun, the program and its flags, after the environment variables of some settings."""
    table = load_table("megatron")
    said = unusual(arguments(job, table, objects=False), table)
    nodes, processes = spread(job)
    program = "pretrain_mamba.py" if job.model.hybrid_pattern else "pretrain_gpt.py"
    lines = [f"torchrun --nnodes {nodes} --nproc-per-node {processes} {program}"]
    lines += [f"    {word}" for word in flags(said, table)]
    return "\n".join(variables(job)) + " \\\n".join(lines) + "\n"


def spread(job: Job) -> tuple[int, int]:
    """Nodes, and processes on each."""
    processes = gcd(job.parallelism.devices, job.machine.devices_per_node)
    return job.parallelism.devices // processes, processes


def variables(job: Job) -> list[str]:
    """Assignments to the environment; the last item is empty where there are any."""
    software, found = job.software, []
    if software.kernels.deterministic:
        found.append("export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0")
    if software.buffers.cublas_workspace != "default":
        found.append(f"export CUBLAS_WORKSPACE_CONFIG={software.buffers.cublas_workspace}")
    if software.buffers.expandable_segments:
        found.append("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if job.performance.cpu_offload.share and job.performance.cpu_offload.threads > 1:
        found.append(f"export OMP_NUM_THREADS={job.performance.cpu_offload.threads}")
    return [*found, ""] if found else []


_LISTS = {"recompute_modules", "offload_modules", "hierarchical_context_parallel_sizes"}
"""Arguments of several words."""


def flags(said: dict[str, Any], table: KeyTable) -> list[str]:
    """Arguments as the parser takes them, one flag with its value each."""
    names = {argument: flag for flag, argument in table.raw["flag_names"].items()}
    negations = {argument: flag for flag, argument in reversed(table.raw["negations"].items())}
    names["virtual_pipeline_model_parallel_size"] = "num-virtual-stages-per-pipeline-rank"
    found = []
    for argument, value in said.items():
        name = "--" + names.get(argument, argument.replace("_", "-"))
        if value is True:
            found.append(name)
        elif value is not False:
            words = str(value).split() if argument in _LISTS else [str(value)]
            found.append(" ".join([name, *map(shlex.quote, words)]))
        elif argument in negations:
            found.append("--" + negations[argument])
    return found
