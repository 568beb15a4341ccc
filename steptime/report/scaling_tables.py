"""Step time over data-parallel degrees: `3dtrn scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.base.config import ConfigError
from steptime.base.rows import WeakScaling
from steptime.base.words import counted
from steptime.report.details import weak_scaling

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.answer.result import Estimate
    from steptime.job.job import Job
    from steptime.report.table import Table


def strong_scaling(job: Job, estimate: Callable[[Job], Estimate]) -> list[WeakScaling]:
    """The job's own batch over dp = 1, 2, 4 ... and its own dp, as long as every replica gets a micro-batch.

    Efficiency is tokens per second and device against the smallest degree that fits.
    """
    sequences = job.data.gbs // job.data.microbatch_sz
    degrees = {2**i for i in range(sequences.bit_length())} | {job.parallelism.dp}
    rows: list[WeakScaling] = []
    base = 0.0
    for dp in sorted(degrees):
        if sequences % dp:
            continue
        try:
            found = estimate(job.replace(**{"parallelism.dp": dp}))
        except ConfigError:  # a degree that this layout cannot have (replicas, ep, data centers)
            continue
        cost = found.devices * found.step_s
        base = base or (0.0 if found.memory.verdict == "does_not_fit" else cost)
        efficiency = (base or cost) / cost
        rows.append(WeakScaling(dp, found.devices, job.data.gbs, found.step_s, efficiency, found.memory.verdict))
    return rows


def weak_table(estimate: Estimate) -> Table:
    """Fixed work per device: the batch grows with dp."""
    return weak_scaling(estimate.weak_scaling, estimate.job.parallelism.dp)


def strong_table(estimate: Estimate, rows: list[WeakScaling]) -> Table:
    """Fixed batch: the work per device shrinks with dp."""
    title = f"strong scaling (the same batch of {counted(estimate.job.data.gbs, 'sequence')})"
    return weak_scaling(rows, estimate.job.parallelism.dp, title)
