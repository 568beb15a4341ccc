"""The measured runs behind the intervals.

`data/intervals.json`, from `benchmarks/fit_intervals.py`: every run of the split `fit`, and the log of measured over predicted.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import compress, repeat
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from steptime.answer.features import Feature, features_of
from steptime.answer.sites import Sites, numbered, pick
from steptime.base.num import new_row
from steptime.job.job import Job

INTERVALS_FILE = Path(__file__).parents[1] / "data" / "intervals.json"

AXES = ("hidden", "n_layers", "seqlen", "devices", "tp", "pp", "cp", "microbatch")
PER_DOUBLING = (1.0, 0.3, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3)
"""Distance of a factor of two on each axis, assumed: half or twice any of them changes the score of the intervals (left-out
cells of the fit rows) by at most 2 %."""
HELD_PER_DOUBLING = (1.0, 0.3, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)
"""The same for memory. Bytes for a number of devices, degrees and sequences are counted, not estimated: runs that differ only in
these are evidence for each other, as are those on another accelerator."""
ALIKE = ("profile",)
"""What runs have in common whose scores count fully in `Measured.factors`."""
HELD_ALIKE = ("family", "layers")
"""The same for memory. One code base holds the same bytes; what experts hold depends on where the router sends tokens, a dense
model does not: with the scores of both in one, 3.41 instead of 3.48 as the score of left-out cells."""
REACH = ("tensor_parallel_span", "bubble", "slow", "fast")
"""Quantities of a job whose largest measured values bound the range: ranks of tp over the devices of the innermost network, where
more than one (its collectives leave it); 1 + (p - 1) / (v m), a pipeline's makespan over its work (Narayanan et al. 2021, section
2.2); and `USUAL_FLOPS` over the accelerator's dense 16-bit peak, and the reverse."""
USUAL_FLOPS = 1e15
NO_REACH = (1.0, 1.0, 1.0, 1.0)
NEAR = 1.0
"""A run within this distance counts as measured nearby: one doubling of the hidden size, or two of the devices and one of tp."""
FEW_RUNS = 10
"""A software family, or its models with one kind of layers, has no separate measured range with fewer runs."""
COVERED = 0.8
ARCHITECTURES = {
    **dict.fromkeys(("v100",), "Volta"),
    **dict.fromkeys(("a100", "a800", "a10g"), "Ampere"),
    **dict.fromkeys(("rtx4090", "l40s"), "Ada"),
    **dict.fromkeys(("h100", "h800", "h200", "gh200"), "Hopper"),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), "Blackwell"),
    **dict.fromkeys(("mi300x", "mi325x"), "CDNA 3"),
    **dict.fromkeys(("mi350x", "mi355x"), "CDNA 4"),
}
"""Chip, the first word of an accelerator's name, to the architecture that it shares with others."""


@cache
def first_word(name: str, before: str) -> str:
    """The part of a name before a sign."""
    return name.partition(before)[0]


class RunKind(NamedTuple):
    """What a job runs on and with: accelerator, precision, software, recomputation, kind of layers."""

    accelerator: str
    precision: str
    software: str
    """The profile's name, with its release where stated."""
    family: str
    """The profile at the end of its chain of `extends`."""
    recompute: str
    layers: str = "dense"
    """dense, moe, or hybrid where it has Mamba layers."""

    @property
    def chip(self) -> str:
        """The accelerator's name without form and capacity: h100."""
        return first_word(self.accelerator, "-")

    @property
    def architecture(self) -> str:
        """The architecture of the accelerator; its own chip where no other accelerator shares it."""
        return ARCHITECTURES.get(self.chip, self.chip)

    @property
    def width(self) -> str:
        """The bits of the precision, as a word: 4, 8, 16, 32."""
        if "fp4" in self.precision:
            return "4"
        return "8" if "fp8" in self.precision else "32" if self.precision == "fp32" else "16"

    @property
    def profile(self) -> str:
        """The profile without its release."""
        return first_word(self.software, "@")


class RunPlace(NamedTuple):
    """The position of a job among measured runs: its kind, and its values on `AXES` and `REACH`."""

    kind: RunKind
    at: tuple[float, ...]
    reach: tuple[float, ...] = NO_REACH
    inferred: bool = False
    """Whether its accelerator was inferred from step times (`Accelerator.inferred`)."""
    adapters: bool = False
    """Whether it trains adapters over frozen weights (`Model.lora`), which no measured run does."""
    features: tuple[Feature, ...] = ()
    """Of a job, its `features.FEATURES`: no distance, but named where a run differs."""


def place_of(job: Job) -> RunPlace:
    """The place of a job."""
    p, software = job.parallelism, job.software
    name = job.machine.accelerator.name
    layers = "hybrid" if job.model.mamba else "moe" if job.model.moe else "dense"
    kind = RunKind(name, software.precision, software.name, software.family, job.recompute.granularity, layers)
    at = (job.model.hidden_sz, job.model.n_layers, job.data.seqlen, p.devices, p.tp, p.pp, p.cp, job.data.microbatch_sz)
    bubble = 1.0 + (p.pp - 1) / (p.vpp * job.schedule_microbatches)
    peaks = job.machine.accelerator.peak_flops
    pace = (peaks.get("bf16") or peaks.get("fp16") or max(peaks.values())) / USUAL_FLOPS
    reach = (max(1.0, p.tp / job.machine.tiers[0].size), bubble, 1.0 / pace, pace)
    inferred, adapters = job.machine.accelerator.inferred, job.model.lora is not None
    return RunPlace(kind, tuple(map(float, at)), reach, inferred, adapters, features_of(job))


class FitRun(NamedTuple):
    """One measured run."""

    id: str
    cell: int
    """Runs of one cell (model, accelerator, layout, batch, precision family) share one vote."""
    series: int
    """Cells of one source, accelerator and model, which tend to share one error."""
    metric: str
    """step, or what a peak memory was read from: allocated, reserved, nvidia-smi, unstated."""
    place: RunPlace
    vote: float
    log_ratio: float
    """ln(measured / predicted)."""
    score: float = 1.0
    """`log_ratio` divided by the mean error, on its side, of the runs near it; its own cell left out."""
    new_score: float = 1.0
    """The same with its own series left out, also from the runs that constants are fitted on: the case of a job whose source,
    accelerator or model was never measured."""


RankedScore: TypeAlias = tuple[float, int, int, int]
"""A score, and its run's series, kind and index."""


class Measured:
    """Runs sorted by their log ratio, and the interval constants fitted on them."""

    def __init__(self, runs: Iterable[FitRun], constants: Mapping[str, Any]) -> None:
        self.runs = sorted(runs, key=lambda run: run.log_ratio)
        self._start(constants)

    def _start(self, constants: Mapping[str, Any]) -> None:
        self.constants = constants
        self.per_doubling: Sequence[float] = constants.get("per_doubling", PER_DOUBLING)
        self.alike: Sequence[str] = constants.get("alike", ALIKE)
        self.ratios: list[float] = self.column("log_ratio")
        self.weights: list[float] = self.column("vote")
        self.series: list[int] = self.column("series")
        self.kinds, kinds = numbered(self.column("place.kind"))
        """Index of each run's kind in `votes`."""
        votes = [0.0] * len(kinds)
        for kind, vote in zip(self.kinds, self.weights, strict=True):
            votes[kind] += vote
        self.votes: dict[RunKind, float] = dict(zip(kinds, votes, strict=True))
        """Votes of all runs of a kind."""
        self._spans: dict[RunKind, list[tuple[float, float]]] = {}
        self._factors: dict[tuple[float, tuple[str, ...], int | None], tuple[float, float]] = {}

    @cached_property
    def sites(self) -> Sites:
        """Kind and values of every run, for distances."""
        of_run, places = numbered(self.column("place.at"))
        return Sites(self.kinds, of_run, [self.counted(values) for values in places], self.per_doubling)

    def column(self, name: str) -> list[Any]:
        """One value of every run."""
        return list(map(attrgetter(name), self.runs))

    def counted(self, at: Sequence[float]) -> tuple[float, ...]:
        """Values on `AXES`, 1 on those that do not count."""
        axes = zip(at, self.per_doubling, strict=True)
        return tuple(at) if all(self.per_doubling) else tuple([value if per else 1.0 for value, per in axes])

    def factors(self, kind: RunKind, without: int | None = None) -> tuple[float, float]:
        """Mean errors that hold 80 % of the runs, with a tenth beyond on either side (faster, slower than estimated).

        The runs that are alike (`ALIKE`) count fully, beside all, which count as `others` runs together: where few are alike, the
        factor shrinks to that of all. Half of a run's vote is its score without its cell, half that without its series, since a
        job may or may not be one more of a series that was measured. The series `without` counts nothing.
        """
        own, others = self.key(kind), self.constants["others"]
        if (others, own, without) not in self._factors:
            alike = [self.key(other) == own for other in self.votes]
            every = zip(self.series, map(alike.__getitem__, self.kinds), strict=True)
            kept = [counts for series, counts in every if series != without]
            rest = others / (len(kept) or 1)
            beyond = (rest * len(kept) + sum(kept)) * (1.0 - COVERED) + 1e-9  # a tenth of both scores
            faster, slower = [exceeded(one, [rest + n for n in alike], beyond, without) for one in self.ranked]
            self._factors[others, own, without] = (faster, slower)
        return self._factors[others, own, without]

    @cached_property
    def ranked(self) -> tuple[list[RankedScore], ...]:
        """Scores of runs faster, and slower, than estimated, greatest first."""
        scores = [*self.column("score"), *self.column("new_score")]
        both = list(zip(scores, self.series * 2, self.kinds * 2, [*range(len(self.runs))] * 2, strict=True))
        faster = [(-score, series, kind, at) for score, series, kind, at in both if score < 0.0]
        slower = [one for one in both if one[0] > 0.0]
        return sorted(faster, key=itemgetter(0), reverse=True), sorted(slower, key=itemgetter(0), reverse=True)

    def key(self, kind: RunKind) -> tuple[str, ...]:
        """What runs alike have in common with a kind."""
        return tuple(getattr(kind, name) for name in self.alike)

    def without(self, run_id: str) -> "Measured":
        """The runs without the cell of `run_id`; all of them where that was no fit row."""
        cell = self.cells.get(run_id)
        return self if cell is None else self.without_cell(cell)

    def without_cell(self, cell: int) -> "Measured":
        """The runs of other cells."""
        return SomeMeasured(self, [at for at, run in enumerate(self.runs) if run.cell != cell])

    @cached_property
    def cells(self) -> dict[str, int]:
        """The cell of every run, by its id."""
        return {run.id: run.cell for run in self.runs}

    def spans(self, kind: RunKind) -> list[tuple[float, float]]:
        """Least and largest value on each of `AXES`, of the family with these layers; where few, of the family, or of all."""
        if kind not in self._spans:
            family = [other.family == kind.family for other in self.votes]
            alike = [other.family == kind.family and other.layers == kind.layers for other in self.votes]
            places: list[tuple[float, ...]] = self.column("place.at")
            every = ([*compress(places, map(own.__getitem__, self.kinds))] for own in (alike, family))
            columns = zip(*next((own for own in every if len(own) >= FEW_RUNS), places), strict=True)
            self._spans[kind] = [(min(column), max(column)) for column in columns]
        return self._spans[kind]


class SomeMeasured(Measured):
    """Some of the runs, with the same constants."""

    def __init__(self, whole: Measured, kept: Sequence[int]) -> None:
        """`kept`: the places of these in `whole`, in order."""
        self.whole = whole
        self.of_whole = pick(kept)
        self.runs = [whole.runs[at] for at in kept]
        self._start(whole.constants)
        self.own = {at: (kind, number) for number, (at, kind) in enumerate(zip(kept, self.kinds, strict=True))}
        """Kind and index here of each run, by its index in `whole`."""

    @cached_property
    def ranked(self) -> tuple[list[RankedScore], ...]:
        """Those of all runs, less the others."""
        own, every = self.own, self.whole.ranked
        return tuple([(score, series, *own[at]) for score, series, _, at in ranked if at in own] for ranked in every)


def exceeded(ranked: Iterable[RankedScore], votes: Sequence[float], share: float, without: int | None) -> float:
    """The score at which the votes of the greatest ones first exceed `share`, 0 if never; `votes`: of each kind.

    >>> exceeded([(3.0, 7, 0, 0), (2.0, 8, 1, 1), (1.0, 7, 0, 2)], [1.0, 5.0], 1.5, without=8)
    1.0
    """
    running = 0.0
    for score, series, kind, _ in ranked:
        if series != without:
            running += votes[kind]
            if running > share:
                return score
    return 0.0


def read_runs(document: Mapping[str, Any]) -> list[FitRun]:
    """The runs of one list of the data file, which names each kind and each place once: rows refer to them by index."""
    kinds = [RunKind(*words) for words in document["kinds"]]
    places = [RunPlace(kinds[kind], tuple(at)) for kind, *at in document["places"]]
    columns = dict(zip(document["columns"]["runs"], zip(*document["runs"], strict=True), strict=True))
    columns["place"] = tuple(map(places.__getitem__, columns["place"]))
    return list(map(new_row, repeat(FitRun), zip(*columns.values(), strict=True)))


@cache
def measured(of: str) -> Measured:
    """The shipped runs: of `step` times, or of peak `memory`."""
    document = _document()[of]
    return Measured(read_runs(document), document["constants"])


@cache
def _document() -> Any:
    return json.loads(INTERVALS_FILE.read_bytes())
