"""What a calibration is worth: rows calibrated by their siblings, which share model, accelerator, precision and release.

Rows marked fit choose what the factor scales and how far it is shrunk (steptime/software/calibration.py); rows marked test
only report.
A sibling is another cell: another layout, batch or scale.

python benchmarks/calibrate.py         the shipped shrinkage
python benchmarks/calibrate.py grid    all that were tried, on fit rows
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import exp, log
from statistics import mean, median
from typing import NamedTuple

from steptime.job.assembly import Assembly
from steptime.software.calibration import DOUBT, HIGHEST, LOWEST
from steptime.timing.step_parts import step_parts
from steptime.timing.step_time import step_time
from steptime.validation.judgement import Judgement, judge_shipped
from steptime.validation.row_plan import to_config, to_job
from steptime.validation.slices import headline

COMPUTE = ("gemm", "attention", "memory_bound", "launch", "recompute")
NVIDIA = ("NeMo", "Megatron-LM", "Megatron-Bridge", "Megatron-Core")
DOUBTS = (0.0, 0.1, DOUBT, 0.5, 1.0, 2.0)


class Case(NamedTuple):
    """One row: who its siblings are, and its step."""

    split: str
    framework: str
    family: tuple[str, ...]
    cell: tuple[str, ...]
    measured_s: float
    step_s: float
    compute_s: float
    """Of rows marked fit, which alone choose what is scaled."""


Family = list[Case]
Scale = tuple[Callable[[Case], float], Callable[[Case, float], float]]
"""The factor that one measured run asks for, and the step under a factor."""

WHOLE: Scale = (lambda c: c.measured_s / c.step_s, lambda c, factor: c.step_s * factor)
COMPUTE_ONLY: Scale = (
    lambda c: max(0.1, 1.0 + (c.measured_s - c.step_s) / c.compute_s),
    lambda c, factor: c.step_s + (factor - 1.0) * c.compute_s,
)


def compute_s(j: Judgement) -> float:
    """Seconds of a row's step that compute."""
    parts_s = step_parts(step_time(Assembly(to_job(to_config(j.row))))).parts_s
    return sum(parts_s.get(part, 0.0) for part in COMPUTE)


def cases() -> list[Case]:
    """All rows of the headline whose step was measured."""
    found = []
    for j in headline(judge_shipped()):
        if j.measured_step_s is None:
            continue
        family = (j.row.text("model_name"), j.accelerator, j.precision, j.row.text("framework"), j.row.group)
        split, predicted_s = j.row.text("split"), j.predicted_step_s or 0.0
        seconds = compute_s(j) if split == "fit" else 0.0
        found.append(Case(split, j.framework, family, j.cell, j.measured_step_s, predicted_s, seconds))
    return found


def errors(rows: Iterable[Case], scale: Scale, doubt: float | None, *, single: bool) -> list[float]:
    """|error| of every row that has siblings: calibrated by one of them (mean over which), or by all; None: uncalibrated."""
    ratio, step = scale
    families: dict[tuple[str, ...], Family] = defaultdict(list)
    for case in rows:
        families[case.family].append(case)

    def error(case: Case, by: Family) -> float:
        factor = 1.0
        if doubt is not None:
            factor = exp(sum(log(ratio(other)) for other in by) / (len(by) + doubt))
        return abs(step(case, min(max(factor, LOWEST), HIGHEST)) / case.measured_s - 1.0)

    found = []
    for family in families.values():
        for case in family:
            siblings = [other for other in family if other.cell != case.cell]
            if siblings and single:
                found.append(mean(error(case, [other]) for other in siblings))
            elif siblings:
                found.append(error(case, siblings))
    return found


def figures(found: list[float]) -> str:
    """Rows, median, mean and p90 in per cent as cells of a table."""
    if not found:
        return "0 | - | - | -"
    ordered = sorted(found)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{len(ordered)} | {100 * median(ordered):.2f} | {100 * mean(ordered):.2f} | {100 * p90:.2f}"


HEADER = "| rows | scaled | n0 | by | n | median % | mean % | p90 % |\n|---|---|---:|---|---:|---:|---:|---:|"


def lines(name: str, rows: list[Case], scales: dict[str, Scale], doubts: tuple[float, ...]) -> None:
    """Print the errors of some rows: uncalibrated, then under each scale and shrinkage."""
    print(f"| {name} | nothing | | | {figures(errors(rows, WHOLE, None, single=False))} |")
    for scaled, scale in scales.items():
        for doubt in doubts:
            for by in ("one sibling", "all siblings"):
                found = errors(rows, scale, doubt, single=by == "one sibling")
                print(f"| {name} | {scaled} | {doubt:g} | {by} | {figures(found)} |")


def main(doubts: tuple[float, ...] = (DOUBT,)) -> None:
    """Print the choice between scales on fit rows, and what the shipped one reaches on test rows."""
    every = cases()
    nvidia = [case for case in every if case.framework.startswith(NVIDIA)]
    whole = {"whole step": WHOLE}
    print(HEADER)
    for split, scales, tried in (("fit", whole | {"compute only": COMPUTE_ONLY}, doubts), ("test", whole, (DOUBT,))):
        for name, rows in ((split, every), (f"{split}, NeMo and Megatron-LM", nvidia)):
            lines(name, [case for case in rows if case.split == split], scales, tried)


if __name__ == "__main__":
    main(DOUBTS if sys.argv[1:] == ["grid"] else (DOUBT,))
