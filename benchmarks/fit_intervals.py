"""Writes steptime/data/intervals.json: the measured runs that intervals rest on, and the constants fitted over them.

    python benchmarks/fit_intervals.py DATE

Beside it steptime/data/run_features.json: what else the runs with a step time had (`steptime.answer.features`).

Reads rows of the split `fit` only, as `3dtrn validate` judges and counts them, without peaks whose source does not say what it
read; the same rows, estimates and date give the same file. What is fitted, each on runs that the interval does not know:

- `score` and `new_score` of every run: its error over the mean error of its neighbors, its cell left out, and all cells of its
  series (source, accelerator, hidden size, layers). With its series left out, the error is that of an estimate whose efficiency
  constants are fitted without it too (`fit_constants.errors_unseen`): errors that constants were fitted to are smaller than those
  of new runs, by a fifth in the median. `Measured.factors` are the scores beyond which a tenth lies on either side: split
  conformal prediction by groups.
- `bandwidth`, `machine_step`, then `other_side`, `per_distance`, `others`: those of the grid with the greatest mean log density
  (the logarithmic score, Gneiting and Raftery 2007, section 4.1) of the left-out runs under the density that `log_density` draws
  through the ends, half of it with every cell left out in turn, half with every series. The factors do not know a run's series
  either: with it, a factor for each profile looks better than it is;
- `margins`: widening per step or doubling beyond what was measured, so that 80 % are inside when a whole accelerator, software
  family, kind of layers, series (for the distance of the nearest run) or end of an axis is left out; one vote for each. An
  inferred accelerator's: so that 80 % of its own cells are inside, each left out. Memory has none for machine and scale: what a
  job holds does not depend on the accelerator, and on more devices through shards only, which are counted. Sizes are counted
  too, the few runs at their ends are of one source each, and the four series far from all others are torchtitan's: the least
  margin.
- `layouts`: what two layouts of one job do not share of their errors (`steptime.validation.ratios.layout_error`).

Memory rests on the rows that count and on the jobs of Megatron-LM's own tests, with constants of its own. What adds no
margin is no distance either: accelerator, devices, degrees and micro-batch. Its ends do not grow with the nearest run's distance:
that scores alike, and would call 20 more runs that ran TIGHT and as many of those out of memory FITS.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import log, sqrt
from typing import Any

from fit_constants import errors_unseen
from fit_constants import runs as fitted_runs

from steptime.answer.distance import distances
from steptime.answer.evidence import projected
from steptime.answer.features import FEATURES, FEATURES_FILE, features_of
from steptime.answer.interval import beyond, interval, least, mean_errors, scales, weigh
from steptime.answer.measured import (
    AXES,
    COVERED,
    HELD_ALIKE,
    HELD_PER_DOUBLING,
    INTERVALS_FILE,
    REACH,
    FitRun,
    Measured,
    RunKind,
    place_of,
)
from steptime.validation.judgement import Judgement, judge
from steptime.validation.measured_figures import ALLOCATOR
from steptime.validation.measurements import MeasuredRow, shipped
from steptime.validation.ratios import layout_error
from steptime.validation.row_plan import to_config, to_job
from steptime.validation.slices import headline
from steptime.validation.stats import upper

BANDWIDTHS = (0.35, 0.5, 0.7, 1.0)
"""Not 0.25, which scores alike for memory (0.002 more) and calls one more run out of memory FITS."""
OTHER_SIDES = (0.0, 0.25, 0.5)
PER_DISTANCES = (0.0, 0.25, 0.5)
OTHERS = (50.0, 100.0, 200.0, 400.0)
USUAL_OTHERS = 100.0
"""That with which bandwidth and machine step are chosen."""
MACHINE_STEPS = (1.0, 2.0)
"""Not 0 or 0.5, which score alike: a run on another architecture would count as measured nearby (1.5 steps, `NEAR`)."""
SMALLEST = 1e-3
"""Least mean error that a run's own is divided by."""
FLOOR = 0.02
"""Least margin per step or doubling: assumed, so that farther is always wider."""
MARGINS = ("machine", "inferred", "software", "layers", "model", "sequence", "scale", "layout", "batch", "gap")
ASSUMED = {"bubble": 0.1, "pace": 0.1}
"""Margins that no group of runs can be left out for: per doubling of a pipeline's makespan over its work, and of an accelerator's
pace. Assumed."""
STEPS = {"machine": 0.5, "software": 0.5, "layers": 0.5, "gap": 0.25}
"""Least amount that a left-out run says something about a margin from; others 1 doubling."""
Constants = dict[str, Any]
Group = list[tuple[float, float]]


def runs_of(judged: Iterable[Judgement], kind: str) -> list[FitRun]:
    """Runs with a measured step time or peak memory, cells and series numbered in the order of their keys."""
    pairs: list[tuple[Judgement, float]] = []
    for j in judged:
        measured, predicted = (j.measured_step_s, j.predicted_step_s)
        if kind == "memory":
            known = j.metric in ALLOCATOR
            measured, predicted = (j.measured_bytes, j.predicted_bytes) if known else (None, None)
        if measured and predicted:
            pairs.append((j, round(log(measured / predicted), 4)))
    sizes = Counter(j.cell for j, _ in pairs)
    cells = {cell: i for i, cell in enumerate(sorted(sizes))}
    series = {one: i for i, one in enumerate(sorted({j.series for j, _ in pairs}))}
    runs = []
    for j, ratio in pairs:
        place, metric = place_of(to_job(to_config(j.row))), j.metric if kind == "memory" else "step"
        own, vote = series[j.series], round(1.0 / sizes[j.cell], 4)
        runs.append(FitRun(j.row.id, cells[j.cell], own, metric, place, vote, ratio))
    return sorted(runs, key=lambda run: (run.log_ratio, run.id))


Kept = list[tuple[FitRun, Measured, Sequence[float]]]


def left_out(runs: list[FitRun], constants: Constants, unit: str) -> Kept:
    """Every run with the runs of other units (cell, series), and its distances to them."""
    units = {getattr(run, unit) for run in runs}
    others = {one: Measured((run for run in runs if getattr(run, unit) != one), constants) for one in units}
    found = [(run, others[getattr(run, unit)]) for run in runs]
    return [(run, rest, distances(run.place, rest)) for run, rest in found if rest.runs]


Errors = dict[str, tuple[tuple[float, float], float]]


def errors_of(kept: Kept, constants: Constants) -> Errors:
    """Mean errors of the runs near each run, and the distance of the nearest, by its id."""
    found = {}
    for run, rest, away in kept:
        rest.constants = constants
        found[run.id] = mean_errors(weigh(run.place, rest, away), rest.ratios), min(away)
    return found


def scores(runs: list[FitRun], errors: Errors, constants: Constants, unseen: dict[str, float]) -> dict[str, float]:
    """How often the scale of its side holds the ratio of each run, by its id; negative where it was faster than estimated."""
    found = {}
    for run in runs:
        if run.id in errors:
            ratio = unseen.get(run.id, run.log_ratio)
            faster, slower = scales(*errors[run.id], constants)
            found[run.id] = round(ratio / max(faster if ratio < 0.0 else slower, SMALLEST), 4)
    return found


def scored(runs: list[FitRun], cells: dict[str, float], series: dict[str, float]) -> list[FitRun]:
    """The runs with their scores."""
    return [r._replace(score=cells.get(r.id, r.score), new_score=series.get(r.id, r.new_score)) for r in runs]


def log_density(low: float, high: float, ratio: float) -> float:
    """Log density of a ratio, up to a constant, under Student's t of 3 degrees of freedom (tails for runs that are far off).

    It is scaled on each side of 0 so that its 10th and 90th percentile are `low` and `high`.
    """
    low, high = min(low, -SMALLEST), max(high, SMALLEST)
    quantile = 1.638  # 90th percentile of Student's t, 3 degrees of freedom
    x = quantile * ratio / (high if ratio > 0.0 else -low)
    return -2.0 * log(1.0 + x * x / 3.0) - log((high - low) / 2.0)


Units = Sequence[tuple[Errors, dict[str, float]]]
"""Mean errors with each cell, or series, left out, and the log ratios that are not those of the runs."""


def score_of(known: list[FitRun], units: Units, constants: Constants) -> float:
    """Mean log density of runs that neither the scales nor the factors know, one vote per run's vote."""
    found = Measured(known, constants)
    total = votes = 0.0
    for errors, unseen in units:
        for run in known:
            if run.id in errors:
                faster, slower = scales(*errors[run.id], constants)
                below, above = found.factors(run.place.kind, run.series)
                low, high = least(-below * faster, above * slower)
                total += run.vote * log_density(low, high, unseen.get(run.id, run.log_ratio))
                votes += run.vote
    return total / votes if votes else 0.0


Tried = tuple[float, list[FitRun], Constants, Units]
"""A score, the runs with their scores, the constants, and what was left out."""


def best(runs: list[FitRun], units: Units, near: Constants, choices: Iterable[tuple[float, float, float]]) -> Tried:
    """The choice of `other_side`, `per_distance` and `others` with the greatest score."""
    tried: list[Tried] = []
    for side, per, others in choices:
        constants = {**near, "other_side": side, "per_distance": per, "others": others}
        own, new = (scores(runs, errors, constants, ratios) for errors, ratios in units)
        known = scored(runs, own, new)
        tried.append((score_of(known, units, constants), known, constants, units))
    return max(tried, key=lambda one: one[0])


def fit(
    runs: list[FitRun],
    bandwidths: Iterable[float] = BANDWIDTHS,
    machine_steps: Iterable[float] = MACHINE_STEPS,
    unseen: dict[str, float] | None = None,
) -> tuple[list[FitRun], Constants]:
    """The runs with their scores, and all constants of one list: of step times, or of memory."""
    held, unseen = all(run.metric != "step" for run in runs), unseen or {}
    of_memory: Constants = {"per_doubling": HELD_PER_DOUBLING, "alike": HELD_ALIKE}
    pers = [0.0] if held else PER_DISTANCES
    tried: list[Tried] = []
    for step in machine_steps:
        start: Constants = {"machine_step": step} | (of_memory if held else {})
        cells, series = left_out(runs, start, "cell"), left_out(runs, start, "series")
        for bandwidth in bandwidths:
            near: Constants = {"bandwidth": bandwidth, **start, "margins": {}}
            units = ((errors_of(cells, near), {}), (errors_of(series, near), unseen))
            tried.append(best(runs, units, near, product(OTHER_SIDES, pers, [USUAL_OTHERS])))
    _, _, near, units = max(tried, key=lambda one: one[0])
    score, runs, constants, _ = best(runs, units, near, product(OTHER_SIDES, pers, OTHERS))
    margins = margins_of(runs, constants) | ASSUMED
    if held:
        margins |= dict.fromkeys(("machine", "inferred", "scale", "layout", "batch", *ASSUMED), 0.0)
        margins |= dict.fromkeys(("model", "sequence", "gap"), FLOOR)
    reach = [round(max(run.place.reach[i] for run in runs), 6) for i in range(len(REACH))]
    return runs, constants | {"margins": margins, "reach": reach, "score": round(score, 4)}


def margins_of(runs: list[FitRun], constants: Constants) -> dict[str, float]:
    """The margin of every axis."""
    kinds = {run.place.kind for run in runs}
    families = sorted({kind.family for kind in kinds})
    found: dict[str, list[Group]] = {name: [] for name in MARGINS}

    def leave(name: str, out: Callable[[FitRun], bool]) -> None:
        found[name].append(needs(runs, name, constants, out))

    for name, field in (("machine", "accelerator"), ("software", "family"), ("layers", "layers")):
        for word in sorted({getattr(kind, field) for kind in kinds}):
            leave(name, lambda r, f=field, w=word: getattr(r.place.kind, f) == w)
    for number in sorted({run.cell for run in runs if run.place.inferred}):
        leave("inferred", lambda r, n=number: r.cell == n)
    for number in sorted({run.series for run in runs}):
        leave("gap", lambda r, n=number: r.series == n)
    for axis, name in ((0, "model"), (2, "sequence"), (3, "scale"), (4, "layout"), (7, "batch")):
        for family in families:
            own = [(run.place.at[axis], run.vote) for run in runs if run.place.kind.family == family]
            low, high = upper(own, 0.25), upper(own, 0.75)
            for outside in (lambda v, e=low: v <= e, lambda v, e=high: v >= e):
                out = lambda r, f=family, o=outside, a=axis: r.place.kind.family == f and o(r.place.at[a])  # noqa: E731
                if any(run.place.kind.family == family and not out(run) for run in runs):
                    leave(name, out)
    return {name: margin(groups) for name, groups in found.items()}


def needs(runs: list[FitRun], name: str, constants: Constants, out: Callable[[FitRun], bool]) -> Group:
    """What the interval lacks per step or doubling for each run of a left-out group, and its share of the group's one vote."""
    found = Measured((run for run in runs if not out(run)), constants)
    pairs = []
    for run in filter(out, runs if found.runs else []):
        away = distances(run.place, found)
        lacking = beyond(run.place, projected(run.place, found, away), found, away)
        amount = next((axis.amount for axis in lacking if axis.margin == name), 0.0)
        if amount >= STEPS.get(name, 1.0):
            span = interval(run.place, found)
            pairs.append((max(span.low - run.log_ratio, run.log_ratio - span.high, 0.0) / sqrt(amount), run.vote))
    total = sum(vote for _, vote in pairs)
    return [(need, vote / total) for need, vote in pairs]


def margin(groups: list[Group]) -> float:
    """The margin that covers 80 % of the votes of left-out groups."""
    return round(max(FLOOR, upper((pair for group in groups for pair in group), COVERED)), 4)


def section(kind: str, runs: list[FitRun], constants: Constants) -> str:
    """One list of the file: each kind, each place and each run on a line; runs refer to places, and places to kinds, by index."""
    kinds = {each: i for i, each in enumerate(dict.fromkeys(run.place.kind for run in runs))}
    known = dict.fromkeys((run.place.kind, run.place.at) for run in runs)
    places = {place: i for i, place in enumerate(known)}
    columns = {"kinds": RunKind._fields, "places": ("kind", *AXES), "runs": FitRun._fields}
    lists = {
        "kinds": kinds,
        "places": [(kinds[kind], *map(int, at)) for kind, at in places],
        "runs": [run._replace(place=places[run.place.kind, run.place.at]) for run in runs],
    }
    said = {"rows": len(runs), "constants": constants, "columns": columns}
    parts = [f'"{key}": {json.dumps(value)}' for key, value in said.items()]
    for name, rows in lists.items():
        lines = ",\n".join(json.dumps(row) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    inside = ",\n".join(parts)
    return f'"{kind}": {{\n{inside}\n}}'


def write_features(rows: Iterable[MeasuredRow]) -> None:
    """The features of the runs of some rows, one a line."""
    found = sorted((row.id, features_of(to_job(to_config(row)))) for row in rows)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(own)}" for name, own in found)
    FEATURES_FILE.write_text(
        f'{{\n"features": {json.dumps(list(FEATURES))},\n"runs": {{\n{lines}\n}}\n}}\n', encoding="utf-8"
    )


def main(date: str) -> None:
    """Judge, fit, write."""
    every = [judge(row) for row in shipped() if row.text("split") == "fit"]
    judged = headline(every)
    held = [j for j in every if j.skipped is None and j.allocator is not None and not j.allocator.excluded]
    head = {
        "command": f"python benchmarks/fit_intervals.py {date}",
        "date": date,
        "source": "steptime/data/measurements, rows of the split fit that 3dtrn validate counts",
    }
    lead = json.dumps(head, indent=0).removesuffix("\n}")
    runs = runs_of(judged, "step")
    errors = errors_unseen(fitted_runs(), {run.id: run.series for run in runs})
    steps, constants = fit(runs, unseen={name: round(-error, 4) for name, error in errors.items()})
    rows = {j.row.id: j.row for j in judged}
    constants["layouts"] = round(layout_error((rows[run.id], run.log_ratio) for run in steps), 4)
    memory = fit(runs_of([*judged, *held], "memory"), machine_steps=[0.0])
    sections = f"{section('step', steps, constants)},\n{section('memory', *memory)}"
    ids = {run.id for run in steps}
    write_features(j.row for j in every if j.row.id in ids)
    INTERVALS_FILE.write_text(f"{lead},\n{sections}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/fit_intervals.py DATE")
    main(sys.argv[1])
