"""Up to which ratio of their estimated steps two layouts of one job are tied: which is faster is then not known.

Two layouts of the same model on the same accelerators under the same profile share most of their error: it cancels in the ratio
of their steps. What is left was measured on pairs of runs of the split `fit` that differ in layout only
(`validation.ratios.layout_error`): the value that the error of the ratio stays within in 80 % of the pairs, on either side.
Layouts on different accelerators, in different precisions or under different profiles share less; their errors count as
independent: the half-widths of both 80 % intervals that face each other, added in squares.
"""

from __future__ import annotations

from math import hypot

from steptime.answer.interval import step_interval
from steptime.answer.measured import RunKind, measured, place_of
from steptime.job.job import Job


def tied_within(faster: Job, slower: Job) -> float:
    """The ratio of their estimated steps up to which two layouts are tied, as its natural logarithm."""
    if _shared(place_of(faster).kind) == _shared(place_of(slower).kind):
        return layouts_within()
    return hypot(step_interval(faster).high, step_interval(slower).low)


def layouts_within() -> float:
    """The same of two layouts that differ in nothing else."""
    return float(measured("step").constants["layouts"])


def _shared(kind: RunKind) -> tuple[str, ...]:
    """What two layouts have in common where their errors are mostly one."""
    return kind.accelerator, kind.width, kind.profile
