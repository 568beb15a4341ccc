"""Simpler baselines for comparison: predictions of the step time fitted on the `fit` rows.

Both take one factor per accelerator and precision, the median of measured over predicted on `fit` rows: a flat MFU uses the FLOP
count only; the scaled estimate shows how much of the error is a constant bias that a fit would remove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from steptime.validation.judgement import Judgement
from steptime.validation.slices import split_of, step_errors, unfitted
from steptime.validation.stats import Errors, plain, stats

Guess = Callable[[Judgement], float | None]


def scaled(judged: Iterable[Judgement], guess: Guess) -> Errors:
    """(cell, signed error) on test rows of a baseline times its factor; a pair without fit rows takes the median of all factors.

    Empty where there is no fit row at all.
    """
    timed = [(j, seconds) for j in judged if j.measured_step_s and (seconds := guess(j))]
    factors: dict[tuple[str, str], list[float]] = {}
    for j, seconds in timed:
        if split_of(j) == "fit" and j.measured_step_s:
            factors.setdefault((j.accelerator, j.precision), []).append(j.measured_step_s / seconds)
    if not factors:
        return []
    everything = [factor for group in factors.values() for factor in group]
    return [
        (j.cell, seconds * median(factors.get((j.accelerator, j.precision), everything)) / j.measured_step_s - 1.0)
        for j, seconds in timed
        if split_of(j) == "test" and j.measured_step_s
    ]


def baselines(counted: Iterable[Judgement]) -> dict[str, Any]:
    """Stats on test rows: the estimate, the estimate with one factor per accelerator and precision, and a flat MFU per pair."""
    rows = list(counted)
    if not any(split_of(j) == "fit" for j in rows) or not any(split_of(j) == "test" for j in rows):
        return {}  # no rows to fit factors on, or none to judge
    return {
        "estimate": plain(stats(step_errors(unfitted(rows)))),
        "scaled_estimate": plain(stats(scaled(rows, lambda j: j.predicted_step_s))),
        "flat_mfu": plain(stats(scaled(rows, lambda j: j.model_flops))),
    }
