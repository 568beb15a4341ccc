"""Step time over data-parallel degrees: `3dtrn scale`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.base.config import ConfigError
from steptime.base.rows import WeakScaling
from steptime.report.details import weak_scaling

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.answer.result import Estimate
    from steptime.job.job import Job
    from steptime.report.table import Table


def strong_scaling(job: Job, estimate: Callable[[Job], Estimate]) -> list[WeakScaling]:
    """The job's own batch over dp = 1, 2, 4 ... and its own dp, as long as every replica gets a micro-batch.

    Efficiency is tokens per second and device against the smallest degree that can run.
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
        except ConfigError:  # a degree that this layout does not allow (replicas, ep, data centers)
            continue
        base = base or found.devices * found.step_s
        rows.append(WeakScaling(dp, found.devices, job.data.gbs, found.step_s, base / (found.devices * found.step_s)))
    return rows


def unfit(job: Job, rows: list[WeakScaling], estimate: Callable[[Job], Estimate]) -> set[int]:
    """The degrees of the rows whose devices cannot hold the job."""

    def held(row: WeakScaling) -> bool:
        other = job.replace(**{"parallelism.dp": row.dp, "data.gbs": row.gbs}) if row.dp != job.parallelism.dp else job
        return estimate(other).memory.verdict != "does_not_fit"

    return {row.dp for row in rows if not held(row)}


def rebased(rows: list[WeakScaling], out: set[int]) -> list[WeakScaling]:
    """Efficiencies against the first row that fits, by tokens per second and device."""
    base = next((row for row in rows if row.dp not in out), None)
    if base is None:
        return rows
    each = base.gbs / base.devices / base.step_s
    return [row._replace(efficiency=row.gbs / row.devices / row.step_s / each) for row in rows]


def weak_table(estimate: Estimate, rows: list[WeakScaling], out: set[int]) -> Table:
    """Fixed work per device: the batch grows with dp."""
    return weak_scaling(rows, estimate.job.parallelism.dp, unfit=out)


def strong_table(estimate: Estimate, rows: list[WeakScaling], out: set[int]) -> Table:
    """Fixed batch: the work per device shrinks with dp."""
    title = f"strong scaling (the same batch of {estimate.job.data.gbs:,} sequences)"
    return weak_scaling(rows, estimate.job.parallelism.dp, title, out)
