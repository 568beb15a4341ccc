"""Weak scaling: the same job with more or fewer data-parallel replicas."""

from __future__ import annotations

from collections.abc import Callable

from steptime.base.config import ConfigError
from steptime.base.rows import WeakScaling
from steptime.job.job import Job


def degrees(dp: int) -> list[int]:
    """Powers of two up to four times `dp`, and `dp` itself.

    >>> degrees(6)
    [1, 2, 4, 6, 8, 16]
    """
    powers = [2**i for i in range(20) if 2**i <= 4 * dp]
    return sorted({*powers, dp})


def weak(job: Job, answer: Callable[[Job], tuple[float, str]]) -> list[WeakScaling]:
    """Step time over dp = 1, 2, 4 ... with fixed work per device; efficiency is relative to the first row that fits.

    `answer` gives the step [s] and the verdict of a job. Degrees that the layout cannot have (over several data centers, or
    with replicas) are left out.
    """
    p, data = job.parallelism, job.data
    rows: list[WeakScaling] = []
    for dp in degrees(p.dp):
        gbs = data.gbs // p.dp * dp
        try:
            other = job.replace(**{"parallelism.dp": dp, "data.gbs": gbs}) if dp != p.dp else job
        except ConfigError:
            continue
        step_s, verdict = answer(other)
        first = next((row.step_s for row in rows if row.verdict != "does_not_fit"), step_s)
        rows.append(WeakScaling(dp, other.parallelism.devices, gbs, step_s, first / step_s, verdict))
    return rows
