"""Regret: the cost of following the estimate where a source measured many layouts of one job.

A sweep is one source's runs of one job (model, accelerator, devices, batch, length, precision, release) with ten layouts or more,
those that ran out of memory included. The pick is the layout predicted fastest among those whose predicted reservation fits;
only where none does, among those called tight: as a user would choose who optimizes step time. Regret is the pick's
measured step time over the best measured one of the layouts judged, less 1. Runs of one layout (the same config) are one
layout, with the median of their times; it ran out of memory only if none of its runs succeeded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import exp, sqrt
from statistics import mean, median
from typing import Any, NamedTuple

from steptime.answer.ratio_interval import layouts_within
from steptime.base.grouping import grouped
from steptime.validation.judgement import Judgement
from steptime.validation.slices import headline, leads, others, split_of

JOB = (
    "framework", "model_name", "n_layers", "hidden", "ffn_hidden", "n_heads", "vocab", "gpu", "n_gpus", "seq_len",
    "global_batch_size", "precision",
)  # fmt: skip
FEWEST = 10
"""Least layouts of a sweep."""
NAMED = 5
"""Number of worst sweeps listed by name."""


class SweepLayout(NamedTuple):
    """One layout of a sweep."""

    id: str
    predicted_s: float
    measured_s: float | None
    """None: it ran out of memory."""
    verdict: str


class Sweep(NamedTuple):
    """One job in many layouts, and the result of the estimate's choice."""

    name: str
    source: str
    layouts: int
    ran: int
    pick: str
    """A row of the layout picked; "" where none is predicted to fit."""
    out_of_memory: bool
    """Whether the pick ran out of memory."""
    regret: float | None
    """Measured time of the pick over the best, less 1; None without a pick that ran."""
    first: bool
    """Whether the pick is the best measured."""
    in_three: bool
    """Whether the best measured is among the three predicted fastest with the pick's verdict."""
    tied: int
    """Layouts with the pick's verdict that are tied with it (`ratio_interval`): the estimate cannot distinguish them."""
    best_tied: bool
    """Whether the best measured is the pick or tied with it."""
    tau: float | None
    """Kendall's tau-b of predicted and measured time over the layouts that ran."""


def call(j: Judgement) -> str:
    """Fits where reserved memory and memory outside of the allocator are within the device's capacity; else the verdict."""
    return "fits" if j.occupancy is not None and j.occupancy <= 1.0 else j.verdict


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b of two rankings, pair by pair; None where all of one side are tied.

    Source: Kendall 1945, The treatment of ties in ranking problems: (concordant - discordant) over the geometric mean of the
    pairs not tied in a and those not tied in b.

    >>> kendall_tau([1, 2, 3, 4], [1, 3, 2, 4])
    0.6666666666666666
    """
    score, untied_a, untied_b = 0, 0, 0
    for (x, u), (y, v) in combinations(zip(a, b, strict=True), 2):
        left, right = (x > y) - (x < y), (u > v) - (u < v)
        score += left * right
        untied_a += left != 0
        untied_b += right != 0
    return score / sqrt(untied_a * untied_b) if untied_a and untied_b else None


def layouts_of(rows: Iterable[Judgement]) -> list[SweepLayout]:
    """The distinct layouts of a sweep, fastest prediction first."""
    found = []
    for same in grouped(rows, lambda j: json.dumps(j.config, sort_keys=True)).values():
        times = [j.measured_step_s for j in same if j.measured_step_s is not None and not j.ran_out]
        first = same[0]
        predicted = first.predicted_step_s or 0.0
        found.append(SweepLayout(first.row.id, predicted, median(times) if times else None, call(first)))
    return sorted(found, key=lambda layout: (layout.predicted_s, layout.id))


def sweeps(judged: Iterable[Judgement]) -> list[Sweep]:
    """Every sweep of `FEWEST` layouts of which two or more ran: picks that ran out of memory first, then by regret."""
    known = [j for j in judged if j.skipped is None and (j.measured_step_s is not None or j.ran_out)]
    found = []
    for rows in grouped(known, lambda j: (j.row.group, *(j.row.text(column) for column in JOB))).values():
        layouts = layouts_of(rows)
        if len(layouts) >= FEWEST and sum(layout.measured_s is not None for layout in layouts) > 1:
            found.append(_sweep(rows[0], layouts))
    return sorted(found, key=lambda sweep: (not sweep.out_of_memory, -(sweep.regret or 0.0), sweep.name))


def _sweep(j: Judgement, layouts: list[SweepLayout]) -> Sweep:
    """The pick of one sweep compared with its best."""
    row = j.row
    name = f"{row.text('model_name')}, {row.text('n_gpus')} x {row.text('gpu')}, {row.text('seq_len')} tokens"
    ran = [layout for layout in layouts if layout.measured_s is not None]
    best = min(layout.measured_s or 0.0 for layout in ran)
    called = [x for x in layouts if x.verdict == "fits"] or [x for x in layouts if x.verdict == "tight"]
    pick = called[0] if called else None
    seconds = pick.measured_s if pick else None
    end = pick.predicted_s * exp(layouts_within()) if pick else 0.0
    tied = [x for x in called if x.predicted_s <= end]
    return Sweep(
        name=f"{name}, batch {row.text('global_batch_size')}",
        source=row.group,
        layouts=len(layouts),
        ran=len(ran),
        pick=pick.id if pick else "",
        out_of_memory=pick is not None and seconds is None,
        regret=None if seconds is None else seconds / best - 1.0,
        first=seconds == best,
        in_three=any(layout.measured_s == best for layout in called[:3]),
        tied=len(tied) - 1 if pick else 0,
        best_tied=any(layout.measured_s == best for layout in tied),
        tau=kendall_tau([x.predicted_s for x in ran], [x.measured_s or 0.0 for x in ran]),
    )


def regret(judged: Sequence[Judgement]) -> dict[str, Any]:
    """Figures over the sweeps of the headline group, other trainers, their test rows only, and rows judged separately."""
    counted = headline(judged)
    excluded = [j for j in judged if j.skipped is None and j.excluded is not None]
    return {
        "headline": figures(sweeps(j for j in counted if leads(j))),
        "other": figures(sweeps(j for j in counted if others(j))),
        "test": figures(sweeps(j for j in counted if split_of(j) == "test")),
        "apart": figures(sweeps(excluded)),
    }


def figures(found: Sequence[Sweep]) -> dict[str, Any]:
    """Median, mean and worst regret, picks out of memory, how often the best was picked, Kendall's tau, and the worst by name."""
    costs = [sweep.regret for sweep in found if sweep.regret is not None]
    taus = [sweep.tau for sweep in found if sweep.tau is not None]
    picks = [sweep for sweep in found if sweep.pick]
    return {
        "sweeps": len(found),
        "picks": len(picks),
        "median": median(costs) if costs else None,
        "mean": mean(costs) if costs else None,
        "worst": max(costs, default=None),
        "picks_out_of_memory": sum(sweep.out_of_memory for sweep in found),
        "best_picked": sum(sweep.first for sweep in found),
        "best_in_three": sum(sweep.in_three for sweep in found),
        "best_tied": sum(sweep.best_tied for sweep in found),
        "tied_median": median(sweep.tied for sweep in picks) if picks else None,
        "tau_median": median(taus) if taus else None,
        "tau_lowest": min(taus, default=None),
        "worst_sweeps": [sweep._asdict() for sweep in found[:NAMED]],
    }
