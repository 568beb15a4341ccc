"""How many measured values are inside their 80 % intervals, and the width of the intervals.

A row of the fit split is judged by the other cells only; rows of any other split are in no interval. The interval of memory is
fitted on counters of torch's allocator; rows that read another counter, or do not name it, are listed separately.

Rows of one cell share one vote, as in the fit of the intervals and in every error (`stats`): a table printed in ten releases does
not count ten times. `of_rows` is the share with one vote per row.

Rows of one series (source, accelerator, model) tend to be inside or outside together, so many rows of few series say little. The
standard error of a share counts a series as one draw: the robust variance of Liang and Zeger 1986 for a mean, times k / (k - 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from math import erf, exp, log, sqrt
from typing import Any, NamedTuple

from steptime.answer.interval import interval, interval_at
from steptime.answer.measured import FitRun, Measured, RunPlace, measured
from steptime.validation.judgement import Judgement
from steptime.validation.measured_figures import ALLOCATOR
from steptime.validation.measurements import shipped
from steptime.validation.slices import EXPERTS, with_experts
from steptime.validation.stats import upper

FEW_ROWS = 20
"""Rows that an accelerator or framework needs to be listed separately."""
GROUPS = {"mixtures of experts": with_experts, **EXPERTS}
"""Groups of rows whose step times are listed separately."""
OTHER_READINGS = "read by nvidia-smi or unstated, or with a leak"


class Coverage(NamedTuple):
    """Coverage of rows by their intervals, as shares."""

    rows: int
    cells: int
    series: int
    """Different sources, accelerators and models among the rows."""
    covered: float
    """Inside; rows of one cell share one vote, here and in all but `of_rows`."""
    error: float
    """Standard error of `covered`."""
    below: float
    """Faster, or smaller, than the 10th percentile."""
    above: float
    width: float
    """Median of (p90 - p10) / estimate."""
    of_rows: float
    """Inside, with a vote for every row."""


class CoveredRow(NamedTuple):
    """A measured row and its interval."""

    ratio: float
    """Log of measured over predicted."""
    low: float
    high: float
    series: tuple[str, ...]
    cell: tuple[str, ...]

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measured value."""
        return self.low <= self.ratio <= self.high


def coverage(found: Iterable[CoveredRow]) -> Coverage | None:
    """Coverage of rows; None without any."""
    rows = list(found)
    if not rows:
        return None
    sizes = Counter(row.cell for row in rows)
    votes = [1.0 / sizes[row.cell] for row in rows]

    def share(of: Iterable[bool]) -> float:
        return sum(compress(votes, of)) / len(sizes)

    inside = [row.inside for row in rows]
    covered, of_rows = share(inside), sum(inside) / len(rows)
    below, above = share(row.ratio < row.low for row in rows), share(row.ratio > row.high for row in rows)
    width = upper(zip((exp(row.high) - exp(row.low) for row in rows), votes, strict=True), 0.5)
    error = standard_error([(row.series, float(row.inside), vote) for row, vote in zip(rows, votes, strict=True)])
    series = len({row.series for row in rows})
    return Coverage(len(rows), len(sizes), series, covered, error, below, above, width, of_rows)


def standard_error(values: Sequence[tuple[object, float, float]]) -> float:
    """Standard error of the mean of (cluster, value, vote) triples, with clusters as draws; 0.5 where there is only one.

    Of equal clusters of one vote each it is that of a binomial share, with n - 1 for n:

    >>> standard_error([(i, float(i < 16), 1.0) for i in range(20)]) == sqrt(0.8 * 0.2 / 19)
    True
    """
    total = sum(vote for _, _, vote in values)
    mean = sum(value * vote for _, value, vote in values) / total
    sums: dict[object, float] = {}
    for cluster, value, vote in values:
        sums[cluster] = sums.get(cluster, 0.0) + vote * (value - mean)
    k = len(sums)
    return sqrt(sum(s * s for s in sums.values()) * k / (k - 1)) / total if k > 1 else 0.5


class Near80(NamedTuple):
    """Slices whose coverage is near 80 %, and how many chance leaves near it where each is at 80 %."""

    near: int
    """Slices with 75 to 85 % of their rows inside."""
    slices: int
    expected: float
    """Sum over the slices of P(|error| < 5 %), with normal errors of each slice's standard error."""


def near_80(lines: Iterable[Mapping[str, Any]]) -> Near80:
    """Accelerators and frameworks near 80 % on test rows. A slice of one series is left out: it is one draw.

    >>> near_80([{"what": "a", "split": "test", "series": 9, "covered": 0.78, "error": 0.05}])
    Near80(near=1, slices=1, expected=0.6826894921370859)
    """
    groups = {"all", OTHER_READINGS, *GROUPS}
    slices = [x for x in lines if x["split"] == "test" and x["what"] not in groups and x["series"] > 1]
    near = sum(0.75 <= x["covered"] <= 0.85 for x in slices)
    return Near80(near, len(slices), sum(erf(0.05 / (x["error"] * sqrt(2.0))) if x["error"] else 1.0 for x in slices))


def ratio_of(j: Judgement, of: str) -> float | None:
    """Log of measured over predicted step time, or peak memory."""
    measured, predicted = (j.measured_step_s, j.predicted_step_s)
    if of == "memory":
        measured, predicted = (j.measured_bytes, j.predicted_bytes)
    return log(measured / predicted) if measured and predicted and j.place else None


def lines(judged: Sequence[Judgement], of: str) -> list[dict[str, Any]]:
    """Coverage by slice and split: all rows, then `GROUPS` (of step times), accelerators and frameworks, most rows first.

    A slice other than all rows has `FEW_ROWS` rows of the split or more.
    """
    groups: dict[tuple[str, str], list[CoveredRow]] = {}
    for j in judged:
        ratio = ratio_of(j, of)
        if ratio is None or j.place is None:
            continue
        place = j.place._replace(features=())  # which move no end: more rows share one
        span = interval_at(of, place, j.row.id if j.row.published else "")
        for name in names_of(j, of):
            groups.setdefault((name, j.row.text("split")), []).append(
                CoveredRow(ratio, span.low, span.high, j.series, j.cell)
            )
    sizes = Counter({name: 0 for name, _ in groups})
    for (name, _), rows in groups.items():
        sizes[name] += len(rows)
    found = []
    for name, split in sorted(groups, key=lambda key: (key[0] != "all", -sizes[key[0]], key[0], key[1] != "test")):
        figures = coverage(groups[name, split])
        if figures and (figures.rows >= FEW_ROWS or name == "all"):
            found.append({"what": name, "split": split} | figures._asdict())
    return found


def names_of(j: Judgement, of: str) -> tuple[str, ...]:
    """The slices that a row belongs to."""
    if of == "step":
        return ("all", *(name for name, wanted in GROUPS.items() if wanted(j)), j.accelerator, j.framework)
    return ("all", j.accelerator, j.framework) if j.metric in ALLOCATOR else (OTHER_READINGS,)


def left_out(judged: Sequence[Judgement], of: str, what: str) -> Coverage | None:
    """Coverage where no run of the row's source, accelerator, architecture or framework is known: what a new one can expect."""
    known = measured(of)
    sources = {row.id: row.group for row in shipped()}

    field = {"framework": "family"}.get(what, what)

    def group_of(run: FitRun) -> str:
        return sources.get(run.id, "") if what == "source" else str(getattr(run.place.kind, field))

    def group(j: Judgement) -> str:
        if j.place is None:
            return ""
        return j.row.group if what == "source" else str(getattr(j.place.kind, field))

    others = {
        name: Measured((run for run in known.runs if group_of(run) != name), known.constants)
        for name in set(map(group, judged))
    }
    ends: dict[tuple[RunPlace, str], tuple[float, float]] = {}
    rows = []
    for j in judged:
        ratio = ratio_of(j, of)
        if ratio is None or j.place is None:
            continue
        key = (j.place._replace(features=()), group(j))  # which move no end
        if key not in ends:
            span = interval(key[0], others[key[1]])
            ends[key] = (span.low, span.high)
        rows.append(CoveredRow(ratio, *ends[key], j.series, j.cell))
    return coverage(rows)


def summary_of(judged: Sequence[Judgement]) -> dict[str, list[dict[str, Any]]]:
    """The `intervals` of the summary of `3dtrn validate --json`."""
    found = {of: lines(judged, of) for of in ("step", "memory")}
    if any(j.row.published for j in judged):
        for what in ("source", "accelerator", "architecture", "framework"):
            if new := left_out(judged, "step", what):
                found["step"].append({"what": f"other {what}s", "split": "all"} | new._asdict())
    return found
