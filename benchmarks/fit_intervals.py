"""Writes steptime/data/intervals.json: the measured runs that intervals rest on, and the constants fitted over them.

    python benchmarks/fit_intervals.py DATE

Reads rows of the split `fit` only, as `3dtrn validate` judges and counts them, without peaks whose source does not say what it
read; the same rows, estimates and date give the same file. What is fitted, each on runs that the interval does not know:

Memory rests on the rows that count and on the jobs of Megatron-LM's own tests.

- `bandwidth` and `machine_step`: the pair of the grid with the least interval score (Gneiting and Raftery 2007, section 6.2),
  every cell left out in turn;
- `tails`: the share left out at each end so that 80 % of the left-out cells are inside, by accelerator, where an
  accelerator's own cells count beside `OTHERS` votes of all cells;
- `margins`: widening per step or doubling beyond what was measured, so that 80 % are inside when a whole accelerator, software
  family, or end of an axis is left out; one vote for each. Memory has none for machine and scale: what a job holds does not
  depend on the accelerator, and on more devices through shards only, which are counted.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import log, sqrt
from typing import Any

from steptime.answer.interval import beyond, interval, quantile, weigh
from steptime.answer.measured import AXES, INTERVALS_FILE, FitRun, Measured, RunKind, distances, place_of, scaled
from steptime.validation.error_summary import headline
from steptime.validation.judgement import Judgement, judge
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config, to_job

COLUMNS = ("id", "cell", "metric", *RunKind._fields, *AXES, "vote", "log_ratio")
BANDWIDTHS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4)
MACHINE_STEPS = (0.5, 1.0, 2.0)
"""Not 0, which scores alike: a run on another machine is never as near as one on the same."""
OTHERS = 20.0
COVERED = 0.8
FLOOR = 0.02
"""Least margin per step or doubling: assumed, so that farther is always wider."""
Constants = dict[str, Any]


def runs_of(judged: Iterable[Judgement], kind: str) -> list[FitRun]:
    """Runs with a measured step time or peak memory, cells numbered in the order of their keys."""
    pairs: list[tuple[Judgement, float]] = []
    for j in judged:
        measured, predicted = (j.measured_step_s, j.predicted_step_s)
        if kind == "memory":
            known = j.metric in {
                "allocated",
                "reserved",
            }  # nvidia-smi counts what the allocator caches, which is no need
            measured, predicted = (j.measured_bytes, j.predicted_bytes) if known else (None, None)
        if measured and predicted:
            pairs.append((j, round(log(measured / predicted), 4)))
    sizes = Counter(j.cell for j, _ in pairs)
    number = {cell: i for i, cell in enumerate(sorted(sizes))}
    runs = []
    for j, ratio in pairs:
        place, metric = place_of(to_job(to_config(j.row))), j.metric if kind == "memory" else "step"
        vote = round(1.0 / sizes[j.cell], 4)
        runs.append(FitRun(j.row.id, number[j.cell], metric, place, scaled(place.at), vote, ratio))
    return sorted(runs, key=lambda run: (run.log_ratio, run.id))


def left_out(runs: list[FitRun], constants: Constants) -> list[tuple[FitRun, Measured, list[float]]]:
    """Every run with the runs of other cells, and its distances to them."""
    others = {cell: Measured((run for run in runs if run.cell != cell), constants) for cell in {r.cell for r in runs}}
    return [(run, others[run.cell], distances(run.place, others[run.cell])) for run in runs]


def rank(values: list[float], weights: list[float], value: float) -> float:
    """The share at which `quantile` gives `value`; 0 or 1 outside of all."""
    i = bisect_left(values, value)
    if i == 0 or value >= values[-1]:
        return 0.0 if i == 0 else 1.0
    sums = list(accumulate(weights))
    low, high = sums[i - 1] - weights[i - 1] / 2.0, sums[i] - weights[i] / 2.0
    return (low + (high - low) * (value - values[i - 1]) / (values[i] - values[i - 1])) / sums[-1]


def upper(pairs: Iterable[tuple[float, float]], share: float) -> float:
    """The least value that `share` of the votes do not exceed, of (value, vote) pairs."""
    ordered = sorted(pairs)
    total, running = sum(vote for _, vote in ordered), 0.0
    for value, vote in ordered:
        running += vote
        if running >= share * total - 1e-9:
            return value
    return 0.0


def tails_of(ranks: list[tuple[FitRun, float]]) -> dict[str, float]:
    """Tails, for all accelerators ("") and for each that was measured."""
    depth = [(run, -min(share, 1.0 - share)) for run, share in ranks]
    found = {"": -upper(((d, run.vote) for run, d in depth), COVERED)}
    total = sum(run.vote for run, _ in depth)
    for name in sorted({run.place.kind.accelerator for run, _ in depth}):
        pairs = [(d, run.vote * ((run.place.kind.accelerator == name) + OTHERS / total)) for run, d in depth]
        found[name] = -upper(pairs, COVERED)
    return {name: round(max(value, 0.005), 4) for name, value in found.items()}


def fit(runs: list[FitRun]) -> Constants:
    """All constants of one list."""
    best: tuple[float, Constants] | None = None
    margins = dict.fromkeys(("machine", "software", "model", "sequence", "scale"), 0.0)
    for step in MACHINE_STEPS:
        kept = left_out(runs, {"machine_step": step})
        for bandwidth in BANDWIDTHS:
            constants: Constants = {"bandwidth": bandwidth, "machine_step": step, "tails": {}, "margins": margins}
            weights = []
            for run, others, away in kept:
                others.constants = constants
                weights.append(weigh(run.place, others, away))
            ranks = [(r, rank(o.ratios, w, r.log_ratio)) for (r, o, _), w in zip(kept, weights, strict=True)]
            constants["tails"] = tails = tails_of(ranks)
            score = 0.0
            for (run, others, _), w in zip(kept, weights, strict=True):
                share = tails[run.place.kind.accelerator]
                low, high = quantile(others.ratios, w, share), quantile(others.ratios, w, 1.0 - share)
                miss = max(low - run.log_ratio, run.log_ratio - high, 0.0)
                score += run.vote * (high - low + 2.0 / (1.0 - COVERED) * miss)
            if best is None or score < best[0]:
                best = score, constants
    assert best is not None
    constants = best[1]
    margins = margins_of(runs, constants)
    if all(run.metric != "step" for run in runs):
        margins |= {"machine": 0.0, "scale": 0.0}
    return constants | {
        "margins": margins,
        "score": round(best[0] / sum(run.vote for run in runs), 4),
    }


def margins_of(runs: list[FitRun], constants: Constants) -> dict[str, float]:
    """The margin of every axis."""
    machine = [
        needs(runs, "machine", constants, lambda r, n=name: r.place.kind.accelerator == n)
        for name in accelerators(runs)
    ]
    families = sorted({run.place.kind.family for run in runs})
    software = [needs(runs, "software", constants, lambda r, n=name: r.place.kind.family == n) for name in families]
    found = {"machine": margin(machine), "software": margin(software)}
    for axis, name in ((0, "model"), (2, "sequence"), (3, "scale")):
        groups = []
        for family in families:
            own = [(run.place.at[axis], run.vote) for run in runs if run.place.kind.family == family]
            low, high = upper(own, 0.25), upper(own, 0.75)
            for outside in (lambda v, e=low: v <= e, lambda v, e=high: v >= e):
                out = lambda r, f=family, o=outside, a=axis: r.place.kind.family == f and o(r.place.at[a])  # noqa: E731
                if any(run.place.kind.family == family and not out(run) for run in runs):
                    groups.append(needs(runs, name, constants, out))
        found[name] = margin(groups)
    return found


def accelerators(runs: list[FitRun]) -> list[str]:
    """Names of the accelerators, sorted."""
    return sorted({run.place.kind.accelerator for run in runs})


def needs(
    runs: list[FitRun], name: str, constants: Constants, out: Callable[[FitRun], bool]
) -> list[tuple[float, float]]:
    """What the interval lacks per step or doubling for each run of a left-out group, and its share of the group's one vote."""
    found = Measured((run for run in runs if not out(run)), constants)
    pairs = []
    for run in filter(out, runs if found.runs else []):
        away = distances(run.place, found)
        amount = next((b.amount for b in beyond(run.place, found, away) if b.margin == name), 0.0)
        if amount >= (0.5 if name in {"machine", "software"} else 1.0):
            span = interval(run.place, found)
            pairs.append((max(span.low - run.log_ratio, run.log_ratio - span.high, 0.0) / sqrt(amount), run.vote))
    total = sum(vote for _, vote in pairs)
    return [(need, vote / total) for need, vote in pairs]


def margin(groups: list[list[tuple[float, float]]]) -> float:
    """The margin that covers 80 % of the votes of left-out groups."""
    return round(max(FLOOR, upper((pair for group in groups for pair in group), COVERED)), 4)


def section(judged: list[Judgement], kind: str) -> str:
    """One list of the file, a run on each line."""
    runs = runs_of(judged, kind)
    constants = json.dumps(fit(runs))
    lines = ",\n".join(
        json.dumps([r.id, r.cell, r.metric, *r.place.kind, *map(int, r.place.at), r.vote, r.log_ratio]) for r in runs
    )
    parts = f'"rows": {len(runs)},\n"constants": {constants},\n"columns": {json.dumps(COLUMNS)}'
    return f'"{kind}": {{\n{parts},\n"runs": [\n{lines}\n]}}'


def main(date: str) -> None:
    """Judge, fit, write."""
    every = [judge(row) for row in shipped() if row.text("split") == "fit"]
    judged = headline(every)
    held = [j for j in every if j.skipped is None and j.held is not None and not j.held.apart]
    head = {
        "command": f"python benchmarks/fit_intervals.py {date}",
        "date": date,
        "source": "steptime/data/measurements, rows of the split fit that 3dtrn validate counts",
    }
    lead = json.dumps(head, indent=0).removesuffix("\n}")
    INTERVALS_FILE.write_text(
        f"{lead},\n{section(judged, 'step')},\n{section([*judged, *held], 'memory')}\n}}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/fit_intervals.py DATE")
    main(sys.argv[1])
