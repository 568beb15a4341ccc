"""Weak and strong scaling: the same job with more or fewer data-parallel replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from steptime.base.config import ConfigError
from steptime.base.rows import WeakScaling
from steptime.job.job import Job

Answer = Callable[[Job], tuple[float, str]]
"""The step [s] and the verdict of a job."""


def degrees(dp: int) -> list[int]:
    """Powers of two up to four times `dp`, and `dp` itself.

    >>> degrees(6)
    [1, 2, 4, 6, 8, 16]
    """
    powers = [2**i for i in range(20) if 2**i <= 4 * dp]
    return sorted({*powers, dp})


def weak(job: Job, answer: Answer) -> list[WeakScaling]:
    """Step time over dp = 1, 2, 4 ... with fixed work per device: the batch grows with dp."""
    p, data = job.parallelism, job.data
    batches = {dp: data.gbs // p.dp * dp for dp in degrees(p.dp)}
    return _scaling(job, batches, answer, lambda step_s, _: step_s)


def strong(job: Job, answer: Answer) -> list[WeakScaling]:
    """Step time over dp = 1, 2, 4 ... with the job's own batch, as long as every replica gets a micro-batch."""
    sequences = job.data.gbs // job.data.microbatch_sz
    every = sorted({2**i for i in range(sequences.bit_length())} | {job.parallelism.dp})
    batches = {dp: job.data.gbs for dp in every if sequences % dp == 0}
    return _scaling(job, batches, answer, lambda step_s, devices: step_s * devices)


def _scaling(
    job: Job, batches: Mapping[int, int], answer: Answer, cost: Callable[[float, int], float]
) -> list[WeakScaling]:
    """A row for each dp with its batch; efficiency is the `cost` of the first row that fits, or of the first, over the row's own.

    Degrees that the layout cannot have (over several data centers, with replicas, with experts) are left out.
    """
    rows: list[tuple[float, WeakScaling]] = []
    for dp, gbs in batches.items():
        try:
            other = job.replace(**{"parallelism.dp": dp, "data.gbs": gbs}) if dp != job.parallelism.dp else job
        except ConfigError:
            continue
        step_s, verdict = answer(other)
        devices = other.parallelism.devices
        rows.append((cost(step_s, devices), WeakScaling(dp, devices, gbs, step_s, 1.0, verdict)))
    base = next((own for own, row in rows if row.verdict != "does_not_fit"), rows[0][0] if rows else 1.0)
    return [row._replace(efficiency=base / own) for own, row in rows]
