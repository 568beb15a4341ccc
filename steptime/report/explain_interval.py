"""The 80 % interval explained: the measured runs that it rests on, their weights, the held-out fraction, and its width."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot, sqrt

from steptime.answer.distance import distances, effective
from steptime.answer.evidence import projected
from steptime.answer.interval import (
    FAR,
    Interval,
    ends,
    mean_errors,
    memory_interval,
    pooled_shares,
    scales,
    step_interval,
    weigh,
)
from steptime.answer.measured import COVERED, NEAR, Measured, RunKind, RunPlace
from steptime.answer.result import Estimate
from steptime.base.words import counted
from steptime.report.format import GIB, percent, seconds
from steptime.report.table import Fact, FactList

SHOWN = 6
"""Number of runs listed, those with most weight first."""
LONGEST = 60
"""Characters of an id: those of jobs of Megatron-LM's tests name model, layout, machine and commit."""


def step(estimate: Estimate) -> FactList:
    """The interval of the step time."""
    time = estimate.time
    shown = f"{seconds(time.step_s_p10)} to {seconds(time.step_s_p90)}"
    found = _facts(step_interval(estimate.job))
    if estimate.job.performance.calibration:
        found.append(Fact("calibrated", ["the factor holds the bias: both ends are half the width from the estimate"]))
    limits = Fact("interval", [f"{seconds(time.step_s)} x exp(low), exp(high) = {shown}"])
    return FactList("80 % interval of the step", [limits, *found])


def memory(estimate: Estimate) -> FactList:
    """The interval of the reserved memory of the worst stage."""
    peak = estimate.memory
    low, high = (f"{end / GIB:.1f}" for end in (peak.peak_reserved_bytes_p10, peak.peak_reserved_bytes_p90))
    limits = f"{peak.peak_reserved_bytes / GIB:.1f} GiB x exp(low), exp(high) = {low} to {high} GiB"
    return FactList(
        "80 % interval of reserved memory", [Fact("interval", [limits]), *_facts(memory_interval(estimate.job))]
    )


def _facts(span: Interval) -> list[Fact]:
    """What both ends are made of."""
    found, place = span.found, span.place
    base = projected(place, found, distances(place, found))
    nearest = f"{base.kind.accelerator} {base.kind.precision} {base.kind.software} {base.kind.layers}"
    kinds = {"": base.kind}
    if base.kind != place.kind:
        own = "the plan's own, which was not measured; of both the wider end counts on either side"
        kinds = {f"the nearest that was measured: {nearest}": base.kind, own: place.kind}
    facts: list[Fact] = []
    for lead, kind in kinds.items():
        facts += _of_kind(RunPlace(kind, effective(place._replace(kind=kind), found)), found, lead)
    facts += _widened(span)
    width = percent(exp(span.high) / exp(span.low) - 1.0)
    ends_said = f"low {span.low:+.4f}, high {span.high:+.4f}: {percent(exp(span.low) - 1.0, signed=True)} and "
    facts.append(
        Fact("width", [f"{ends_said}{percent(exp(span.high) - 1.0, signed=True)}; the ends are {width} apart"])
    )
    return facts


def _of_kind(place: RunPlace, found: Measured, lead: str) -> list[Fact]:
    """The ends at one kind, from runs to factor."""
    away = distances(place, found)
    weights = weigh(place, found, away)
    errors = mean_errors(weights, found.ratios)
    faster, slower = scales(errors, min(away), found.constants)
    below, above = found.factors(place.kind)
    low, high = ends(place, found, away)
    raw = f"-{below:.3f} x {faster:.4f} = {-below * faster:+.4f}, {above:.3f} x {slower:.4f} = {above * slower:+.4f}"
    widened = "" if (low, high) == (-below * faster, above * slower) else f"; moved apart to {low:+.4f}, {high:+.4f}"
    return [
        *([Fact("kind", [lead])] if lead else []),
        Fact("runs", _runs(weights, away, found)),
        Fact("weight", [_shares(place.kind, weights, found)]),
        Fact("mean error", [f"measured below the estimate {errors[0]:.4f}, above {errors[1]:.4f}, weighted, in ln"]),
        Fact("scale", [_scale(errors, (faster, slower), min(away), found)]),
        Fact("factor", [f"{below:.3f} below, {above:.3f} above: {_fraction(place.kind, found)}"]),
        Fact("ends", [f"factor x scale: {raw}{widened}"]),
    ]


def _runs(weights: Sequence[float], away: Sequence[float], found: Measured) -> list[str]:
    """How many runs and cells, and those with the most weight: one of each cell."""
    total, cells = sum(weights), {run.cell for run in found.runs}
    near = {run.cell for run, d in zip(found.runs, away, strict=True) if d <= NEAR}
    lines = [
        f"{counted(len(found.runs), 'fit run')} in {counted(len(cells), 'cell')}; {len(near)} within distance {NEAR:g}"
    ]
    shares: dict[int, float] = {}
    for run, weight in zip(found.runs, weights, strict=True):
        shares[run.cell] = shares.get(run.cell, 0.0) + weight / total
    first: dict[int, int] = {}
    for at in sorted(range(len(away)), key=away.__getitem__):
        first.setdefault(found.runs[at].cell, at)
    for cell in sorted(shares, key=lambda cell: -shares[cell])[:SHOWN]:
        at = first[cell]
        ratio, d = exp(found.runs[at].log_ratio), away[at]
        share = f"{percent(shares[cell])} of the weight"
        lines.append(f"{_name(found.runs[at].id)}: measured / predicted {ratio:.3f}, distance {d:.2f}, {share}")
    return lines


def _name(of: str) -> str:
    """The id of a run, its middle left out where it is longer than a line."""
    return of if len(of) <= LONGEST else f"{of[: LONGEST // 2]}…{of[-LONGEST // 2 + 1 :]}"


def _shares(kind: RunKind, weights: Sequence[float], found: Measured) -> str:
    """How much of the weight is by distance, and how much that of groups."""
    pooled = pooled_shares(kind, found)
    groups = sum(vote * pooled[of] for vote, of in zip(found.weights, found.kinds, strict=True)) / sum(weights)
    bandwidth = found.constants["bandwidth"]
    return (
        f"vote x (exp(-distance / {bandwidth:g}) + the share of groups): {percent(1.0 - groups)} by distance, "
        f"{percent(groups)} as runs of the same {kind.architecture}, precision and {kind.family}, of {kind.family}, of any"
    )


def _scale(errors: tuple[float, float], scale: tuple[float, float], nearest: float, found: Measured) -> str:
    """The scale of both sides."""
    share, per = found.constants["other_side"] / 2.0, found.constants["per_distance"]
    limit = f", at most {FAR:g}" if nearest > FAR else ""
    grown = f" x (1 + {per:g} x {min(nearest, FAR):.2f}, the distance of the nearest run{limit})" if per else ""
    sides = [f"({1.0 - share:g} x {own:.4f} + {share:g} x {other:.4f})" for own, other in (errors, errors[::-1])]
    return f"{sides[0]} and {sides[1]}{grown} = {scale[0]:.4f} below, {scale[1]:.4f} above"


def _fraction(kind: RunKind, found: Measured) -> str:
    """Of which held-out runs the factor holds what fraction."""
    below, above = found.factors(kind)
    own = [run for run in found.runs if found.key(run.place.kind) == found.key(kind)]
    groups = [(f"the {counted(len(own), 'run')} of {' '.join(found.key(kind))}", own), ("all", found.runs)]
    said = [f"a tenth of the held-out runs is beyond each, {100.0 * COVERED:.0f} % inside"]
    for name, runs in groups:
        scores = [score for run in runs for score in (run.score, run.new_score)]
        inside = sum(-below <= score <= above for score in scores)
        said += [f"{100.0 * inside / len(scores):.0f} % of {name}"] if scores else []
    return "; ".join(said) + f" (all count as {found.constants['others']:g} runs)"


def _widened(span: Interval) -> list[Fact]:
    """The margin of everything that was not measured, in squares."""
    margins = span.found.constants["margins"]
    parts = [(margins.get(axis.margin, 0.0) * sqrt(axis.amount), axis) for axis in span.beyond]
    if not parts:
        return [Fact("margin", ["0: inside of what was measured"])]
    lines = [
        f"{axis.margin} {margins.get(axis.margin, 0.0):g} x sqrt({axis.amount:.2f}) = {size:.4f}"
        + (f": {axis.text}" if axis.text else "")
        for size, axis in parts
    ]
    return [Fact("margin", [*lines, f"added in squares, to both ends: {hypot(*(size for size, _ in parts)):.4f}"])]
