"""Distributes a config over the available ranks: its data-parallel degree is filled in, or a named layout applied."""

from __future__ import annotations

from typing import Any

from steptime.base.config import ConfigError
from steptime.job.job import Job

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"performance.software": "torch", "parallelism.dp": "ranks"},
    "fsdp2": {"performance.software": "fsdp2", "parallelism.dp": "ranks"},
    "tp": {"performance.software": "torch", "parallelism.tp": "ranks", "parallelism.sp": True},
    "pp": {"performance.software": "torch", "parallelism.pp": "ranks"},
}
"""Layouts of --layouts: one kind of parallelism over all ranks."""


def spread(job: Job, ranks: int) -> tuple[Job, list[str]]:
    """The config on `ranks` processes, and the changes made.

    Its dp is replaced by the ranks left over by tp, pp and cp; the batch per data-parallel rank stays (weak scaling).

    Raises:
        ConfigError: tp * pp * cp does not divide the ranks.
    """
    p = job.parallelism
    inner = p.tp * p.pp * p.cp
    dp, rest = divmod(ranks, inner)
    if rest or dp == 0:
        many = f"{ranks} process{'es' * (ranks > 1)}"
        raise ConfigError(
            f"parallelism: tp {p.tp} x pp {p.pp} x cp {p.cp} does not divide {many}; start a multiple of {inner} (torchrun), "
            "or --set another layout"
        )
    if dp == p.dp:
        return job, []
    gbs = job.data.gbs * dp // p.dp
    changed = job.replace(**{"parallelism.dp": dp, "data.gbs": gbs})
    return changed, [f"parallelism.dp: {dp} on {ranks} processes ({p.dp} in the plan), data.gbs: {gbs}"]


def named(job: Job, name: str, ranks: int) -> Job:
    """The config's model and batch with one kind of parallelism over all ranks.

    The batch per data-parallel rank stays; a pipeline gets as many micro-batches as it has stages.

    Raises:
        ConfigError: the name is unknown, there is one rank, or the model cannot be laid out so.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"--layouts: unknown layout (got {name!r}); known: {', '.join(LAYOUTS)}")
    if ranks == 1:
        start = "torchrun --nproc-per-node 2 -m steptime.bench"
        raise ConfigError(f"--layouts {name}: needs more than one process; start several ({start} PLAN ...)")
    size, per_rank = job.data.microbatch_sz, job.data.gbs // job.parallelism.dp
    plain: dict[str, Any] = {f"parallelism.{axis}": 1 for axis in ("tp", "pp", "dp", "cp", "vpp", "replicas")}
    plain |= {f"parallelism.{key}": None for key in ("sp", "zero_level", "fsdp", "schedule", "layers_per_stage")}
    changes = plain | {key: ranks if value == "ranks" else value for key, value in LAYOUTS[name].items()}
    copies = changes["parallelism.dp"]
    changes["data.gbs"] = max(per_rank * copies, size * ranks if name == "pp" else 0)
    try:
        return job.replace(**changes)
    except ConfigError as error:
        raise ConfigError(f"--layouts {name}: {problem}" for problem in error.problems) from None
