"""An interval around the estimate that holds the measured value of a job in 80 of 100 cases, and the evidence for it.

The ends are the mean error of measured runs of the split `fit` on either side (slower than estimated, faster than estimated),
times a factor: split conformal prediction with a local scale (Lei, G'Sell, Rinaldo, Tibshirani and Wasserman 2018, section
5.2). Near runs weigh most (exp of minus the distance); beneath them lie, with small weights, all runs of the same architecture,
precision, kind of layers and software family, of the same family, and of any. So few near runs shrink towards wider groups. Each
side takes a share of the other, and both grow with the distance of the nearest run. The factor is the one that holds 80 % of the
runs, those of the job's software most, when their own cells, and their own series (source, accelerator, model), are unknown: to
the interval and to the constants that were fitted on runs (Barber, Candes, Ramdas and Tibshirani 2021, section 3,
CV+). Where the job lies outside of what was measured, margins are added that grow with how far outside it is; as errors of
independent steps and doublings, they add in squares.

The estimate itself is not moved, and always inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import accumulate
from math import exp, hypot, log2, sqrt
from operator import add, mul
from typing import Any, NamedTuple

from steptime.answer.distance import clipped, distances, effective, outside
from steptime.answer.evidence import Evidence, evidence, projected
from steptime.answer.measured import FEW_RUNS, NEAR, USUAL_FLOPS, Measured, RunKind, RunPlace, measured, place_of
from steptime.job.job import Job

GROUPS = (0.3, 0.1, 0.05)
"""Votes of all cells of a group together, in addition to the near runs: same architecture, precision width, kind of layers and
software family; same family; any. Where these are n, they have n / (n + `FEW_RUNS`) of it: a group of two says little. Assumed:
half or twice changes the score of left-out cells by at most 4 %."""
LEAST = 0.02
"""Half the width of the narrowest interval: the same cell measured twice in one release differs by 1.9 % in the mean
(`3dtrn validate`, noise floor)."""
FAR = 3.0
"""Distance of the nearest run above which a job is called extrapolated even inside the measured ranges."""
SAME_STATES = {"megatron-2021": "megatron-core"}
"""Profile family -> the family whose measured memory applies to it: one code base, whose layers, buffers and optimizer are
counted alike. Allocated memory in five logs of 2021 is within 0.5 % (docs/validation.md, fp16 of 2021)."""


class Beyond(NamedTuple):
    """One thing that was not measured: how far beyond the measured range, in the unit of its margin, and in words."""

    margin: str
    """machine, inferred, software, layers (steps), model, sequence, scale, layout, batch, bubble, pace (doublings), gap
    (distance)."""
    amount: float
    text: str


class Interval(NamedTuple):
    """Log of measured over predicted: 10th and 90th percentile, and the evidence for them."""

    low: float
    high: float
    beyond: list[Beyond]
    found: Measured
    place: RunPlace
    away: Sequence[float]
    """Distance of every run of `found`, without `reach`."""
    reach: float
    """Added distance to all of them because the job is outside the measured ranges."""

    @property
    def evidence(self) -> Evidence:
        """The runs nearest to the job, and how near they are in one word."""
        away = [d + self.reach for d in self.away]
        return evidence(self.place, self.found, away, [axis.text for axis in self.beyond if axis.text])


def step_interval(job: Job) -> Interval:
    """The interval of the step time."""
    return interval_at("step", place_of(job))


def memory_interval(job: Job) -> Interval:
    """The interval of the peak memory that the allocator reserves."""
    return interval_at("memory", place_of(job))


def interval_at(of: str, place: RunPlace, without: str = "") -> Interval:
    """The interval of `step` or `memory` at a place; `without` leaves out the cell of one measured run."""
    return _interval_at(of, place, measured(of).cells.get(without) if without else None)


@lru_cache(maxsize=256)
def _interval_at(of: str, place: RunPlace, cell: int | None) -> Interval:
    """One for all runs at a place whose cell it leaves out, or that are no fit rows."""
    found = measured(of)
    if of == "memory":
        family = SAME_STATES.get(place.kind.family, place.kind.family)
        place = place._replace(kind=place.kind._replace(family=family))
    return interval(place, found if cell is None else found.without_cell(cell))


def interval(place: RunPlace, found: Measured) -> Interval:
    """Quantiles over `found`, widened for everything outside its range.

    Of a place that was not measured the interval holds that of the nearest measured kind at the nearest measured values, and
    adds margins that grow with the distance: farther is never narrower.
    """
    away = distances(place, found)
    base = projected(place, found, away)
    far = beyond(place, base, found, away)
    margins: dict[str, float] = found.constants["margins"]
    margin = hypot(*(margins.get(axis.margin, 0.0) * sqrt(axis.amount) for axis in far))
    low, high = ends_at(base.kind, effective(base, found), found)
    if base.kind != place.kind:
        own = ends_at(place.kind, effective(place, found), found)
        low, high = min(low, own[0]), max(high, own[1])
    reach = outside(base._replace(at=place.at, reach=place.reach), found)
    return Interval(low - margin, high + margin, far, found, place, away, reach)


@lru_cache(maxsize=256)
def ends_at(kind: RunKind, values: tuple[float, ...], found: Measured) -> tuple[float, float]:
    """`ends` at an `effective` place: one for all layouts that differ only in what does not count."""
    place = RunPlace(kind, values)
    return ends(place, found, distances(place, found))


def ends(place: RunPlace, found: Measured, away: Sequence[float]) -> tuple[float, float]:
    """The 10th and 90th percentile of log measured over predicted at a place; the estimate itself is inside."""
    faster, slower = scales(mean_errors(weigh(place, found, away), found.ratios), min(away), found.constants)
    below, above = found.factors(place.kind)
    return least(-below * faster, above * slower)


def least(low: float, high: float) -> tuple[float, float]:
    """The ends, moved apart alike where they are nearer than twice `LEAST`."""
    short = max(0.0, LEAST - (high - low) / 2.0)
    return low - short, high + short


def scales(errors: tuple[float, float], nearest: float, constants: Mapping[str, Any]) -> tuple[float, float]:
    """The scale of each side: `other_side` of the mean error over both, the rest its own; grows by `per_distance` up to `FAR`."""
    share, (faster, slower) = constants["other_side"] / 2.0, errors
    grown = 1.0 + constants["per_distance"] * min(nearest, FAR)
    return grown * (faster + share * (slower - faster)), grown * (slower + share * (faster - slower))


def mean_errors(weights: Sequence[float], ratios: Sequence[float]) -> tuple[float, float]:
    """Weighted mean of how far measured is below, and above, predicted; a run on the other side counts as 0.

    >>> mean_errors([1.0, 3.0], [-0.5, 0.25])
    (0.125, 0.1875)
    """
    total = sum(weights)
    products = list(map(mul, weights, ratios))
    return -sum([p for p in products if p < 0.0]) / total, sum([p for p in products if p > 0.0]) / total


def weigh(place: RunPlace, found: Measured, away: Sequence[float]) -> list[float]:
    """The weight of every run: near ones by distance, and small shares of the groups that the place belongs to."""
    pooled = pooled_shares(place.kind, found)
    bandwidth: float = found.constants["bandwidth"]
    near = [exp(-d / bandwidth) for d in away]
    return list(map(mul, found.weights, map(add, near, map(pooled.__getitem__, found.kinds))))


@lru_cache(maxsize=256)
def pooled_shares(kind: RunKind, found: Measured) -> list[float]:
    """The share of its vote that a run of each measured kind has wherever it lies, from the groups that `kind` belongs to."""
    levels = [level(kind, other) for other in found.votes]
    totals = [0.0, 0.0, 0.0]
    for narrowest, votes in zip(levels, found.votes.values(), strict=True):
        totals[narrowest] += votes
    shares = [votes / (total + FEW_RUNS) for votes, total in zip(GROUPS, accumulate(totals), strict=True)]
    by_level = [sum(shares), shares[1] + shares[2], shares[2]]
    return [by_level[narrowest] for narrowest in levels]


def level(a: RunKind, b: RunKind) -> int:
    """The narrowest of `GROUPS` that contains both."""
    if a.family != b.family or a.layers != b.layers:
        return 2
    return 0 if a.architecture == b.architecture and a.width == b.width else 1


def beyond(place: RunPlace, base: RunPlace, found: Measured, away: Sequence[float]) -> list[Beyond]:
    """Every way in which the job lies outside of what was measured; `base` is the nearest measured kind."""
    least = min(away)
    near = found.runs[away.index(least)].place.kind
    sizes = [*_sizes(place, base, found), *_reach(place, found)]
    gap = least - NEAR
    text = f"no measured run nearby; nearest {near.accelerator}, {near.precision}, {near.software}"
    machine, software = of_kind(place.kind, near, found)
    named = [*machine, *_inferred(place), *software, *_layers(place, found.votes.keys()), *sizes]
    return [*named, Beyond("gap", gap, text if gap + NEAR > FAR and not named else "")] if gap > 0.0 else named


@lru_cache(maxsize=256)
def of_kind(kind: RunKind, near: RunKind, found: Measured) -> tuple[list[Beyond], list[Beyond]]:
    """What machine and software were not measured, of a job whose nearest run is of the kind `near`."""
    kinds = found.votes.keys()
    return _machine(kind, kinds, near), _software(kind, kinds, near)


def _layers(place: RunPlace, kinds: AbstractSet[RunKind]) -> list[Beyond]:
    """A kind of layers (Mamba, experts, adapters over frozen weights) that no run had."""
    words = {"hybrid": "with Mamba layers", "moe": "of a mixture of experts", "dense": "of a dense model"}
    unmeasured = [] if any(other.layers == place.kind.layers for other in kinds) else [words[place.kind.layers]]
    if place.adapters:
        unmeasured.append("with adapters over frozen weights")
    return [Beyond("layers", 1.0, f"no measured run {each}") for each in unmeasured]


def _machine(kind: RunKind, kinds: AbstractSet[RunKind], near: RunKind) -> list[Beyond]:
    """The accelerator or its precision: half a step where one of the same architecture was measured, else a whole step."""
    same = [other for other in kinds if other.accelerator == kind.accelerator]
    if same:
        if any(other.width == kind.width for other in same):
            return []
        return [Beyond("machine", 0.5, f"no measured run in {kind.precision} on {kind.accelerator}")]
    siblings = any(other.architecture == kind.architecture for other in kinds)
    text = f"no run on {kind.accelerator} among those behind the interval; nearest {near.accelerator}"
    return [Beyond("machine", 0.5 if siblings else 1.0, text)]


def _inferred(place: RunPlace) -> list[Beyond]:
    """An accelerator that no run is known to have had."""
    text = f"no measured run states accelerator {place.kind.accelerator}: inferred from step times"
    return [Beyond("inferred", 1.0, text)] if place.inferred else []


def _software(kind: RunKind, kinds: AbstractSet[RunKind], near: RunKind) -> list[Beyond]:
    """The profile: half a step where its family was measured, or where the profile was measured on other architectures only."""
    same = [other for other in kinds if other.profile == kind.profile]
    if not same:
        family = any(other.family == kind.family for other in kinds)
        text = f"no measured run of {kind.profile}; nearest {near.software}"
        return [Beyond("software", 0.5 if family else 1.0, text)]
    here = kind.architecture
    known = any(other.architecture == here for other in kinds)
    if known and not any(other.architecture == here for other in same):
        return [Beyond("software", 0.5, f"no measured run of {kind.profile} on {here}")]
    return []


_WORDS = (
    ("model", "hidden size", ""),
    ("model", "", " layers"),
    ("sequence", "sequences of", " tokens"),
    ("scale", "", " devices"),
    ("layout", "tp", ""),
    ("layout", "pp", ""),
    ("layout", "cp", ""),
    ("batch", "micro-batch", ""),
)
"""Margin, and the words around a value, of each of `AXES`."""


def _sizes(place: RunPlace, base: RunPlace, found: Measured) -> list[Beyond]:
    """Sizes, degrees and micro-batch outside of the range that the software family was measured in."""
    out: list[Beyond] = []
    inside = clipped(base._replace(at=place.at), found)
    for value, end, (margin, lead, unit) in zip(place.at, inside, _WORDS, strict=True):
        if value != end:
            word = "up to" if value > end else "from"
            text = f"{lead} {value:,.0f}{unit}, measured {word} {end:,.0f}".strip()
            out.append(Beyond(margin, abs(log2(value / end)), text))
    return out


def _tera(pace: float) -> str:
    """TFLOP/s of a pace, without powers of ten: 12.5 of 0.0125, 2,500 of 2.5."""
    tera = pace * USUAL_FLOPS / 1e12
    return f"{tera:,.0f}" if tera >= 100.0 else f"{tera:.3g}"


def _reach(place: RunPlace, found: Measured) -> list[Beyond]:
    """Larger than any measured: tensor parallelism beyond its network domain, pipeline bubbles, the accelerator's pace."""
    ends: Sequence[float] = found.constants.get("reach", place.reach)
    span, bubble, _, pace = place.reach
    words = (
        ("layout", f"tp over {span:g} domains of the innermost network, measured up to {ends[0]:g}"),
        ("bubble", f"pipeline bubble {100.0 - 100.0 / bubble:.0f} %, measured up to {100.0 - 100.0 / ends[1]:.0f} %"),
        ("pace", f"accelerator of {_tera(pace)} TFLOP/s, measured from {_tera(1.0 / ends[2])}"),
        ("pace", f"accelerator of {_tera(pace)} TFLOP/s, measured up to {_tera(ends[3])}"),
    )
    return [
        Beyond(margin, log2(value / end), text)
        for (margin, text), value, end in zip(words, place.reach, ends, strict=True)
        if value > end * (1.0 + 1e-9)
    ]
