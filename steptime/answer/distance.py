"""The distance of a job from each measured run.

A sum of steps (machine, precision, software, recomputation, kind of layers) and of doublings (sizes and degrees); its shape is
assumed, its scale is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import log2

from steptime.answer.measured import Measured, RunKind, RunPlace, SomeMeasured

RECOMPUTE = {"none": 0.0, "selective": 0.5, "full": 1.0}
OTHER_LAYERS = 2.0
"""Distance of a dense model and one with experts, or Mamba layers. Assumed: 0 to 4 change the score of left-out cells by less
than 1 %, since they are no group of each other either."""


def scaled(values: Iterable[float], per_doubling: Iterable[float]) -> list[float]:
    """Values on `AXES` in units of distance."""
    return [per * log2(value) for per, value in zip(per_doubling, values, strict=True)]


def distances(place: RunPlace, found: Measured) -> Sequence[float]:
    """Distance of every run from a place.

    A place beyond the measured range of an axis counts as at its end: how far beyond is for the interval's margins, and the
    weights of runs are the same however far it is.
    """
    return _distances(place.kind, effective(place, found), found)


def effective(place: RunPlace, found: Measured) -> tuple[float, ...]:
    """What distances depend on of a place besides its kind: its values within the measured range, 1 on axes that do not count."""
    return found.counted(clipped(place, found))


@lru_cache(maxsize=256)
def _distances(kind: RunKind, values: tuple[float, ...], found: Measured) -> list[float]:
    if isinstance(found, SomeMeasured):
        return list(found.of_whole(_distances(kind, values, found.whole)))
    return found.sites.distances(_steps(kind, found), scaled(values, found.per_doubling))


@lru_cache(maxsize=256)
def _steps(kind: RunKind, found: Measured) -> list[float]:
    """Distance of every measured kind."""
    machine: float = found.constants["machine_step"]
    return [steps_between(kind, other, machine) for other in found.votes]


def steps_between(a: RunKind, b: RunKind, machine: float) -> float:
    """Distance between two kinds; `machine` scales that of accelerators."""
    d = abs(RECOMPUTE[a.recompute] - RECOMPUTE[b.recompute])
    if a.layers != b.layers:
        d += OTHER_LAYERS
    if a.accelerator != b.accelerator:
        d += machine * (0.25 if a.chip == b.chip else 0.5 if a.architecture == b.architecture else 1.5)
    if a.precision != b.precision:
        d += 0.5 if a.width == b.width else 1.0
    if a.software != b.software:
        d += 0.5 if a.profile == b.profile else 1.0 if a.family == b.family else 2.0
    return d


def clipped(place: RunPlace, found: Measured) -> list[float]:
    """The values of a place, each limited to the measured range.

    A pipeline of experts measures none of a dense model: of the 249 runs of FSDP2's trainers one has a pipeline, with experts.
    """
    spans = found.spans(place.kind)
    return [min(max(value, low), high) for value, (low, high) in zip(place.at, spans, strict=True)]


def outside(place: RunPlace, found: Measured) -> float:
    """How far a place lies outside the measured range, in units of distance."""
    per = found.per_doubling
    beyond = zip(scaled(place.at, per), scaled(clipped(place, found), per), strict=True)
    ends: list[float] = found.constants.get("reach", place.reach)
    return sum(abs(a - b) for a, b in beyond) + sum(
        log2(max(value / end, 1.0)) for value, end in zip(place.reach, ends, strict=True)
    )
