"""Errors of ratios: two runs of one source and release that differ in one respect. Errors common to both cancel.

Ratios matter for choosing a layout or a number of devices. The error is (predicted b / predicted a) / (measured b /
measured a) - 1. All pairs of one series (same job but for that respect) share one vote, so that no long series dominates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

from steptime.answer.measured import COVERED
from steptime.base.grouping import grouped
from steptime.validation.judgement import Judgement
from steptime.validation.measurements import MeasuredRow
from steptime.validation.slices import headline, leads, others, split_of
from steptime.validation.stats import Errors, plain, stats, upper

MODEL = (
    "framework", "model_name", "n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab", "seq_len", "gpu",
    "machine", "precision", "recompute", "zero_or_fsdp", "overlap_notes", "task",
)  # fmt: skip
"""Columns that the two runs of any pair share, besides their source."""
LAYOUT_CELLS = ("tp", "pp", "cp", "vpp", "micro_batch_size")


class RatioKind(NamedTuple):
    """One respect in which two runs differ."""

    name: str
    shared: Callable[[Judgement], tuple[str, ...]]
    """Columns that they share besides `MODEL`."""
    differs: Callable[[Judgement], tuple[str, ...]]
    """Columns that differ."""
    target: tuple[float, float, float]
    """Target median, mean and p90."""


def _texts(*columns: str) -> Callable[[Judgement], tuple[str, ...]]:
    return lambda j: tuple(j.row.text(column) for column in columns)


def _work_per_device(j: Judgement) -> tuple[str, ...]:
    """Sequences per device, and the layout of a replica."""
    share = float(j.row.text("global_batch_size")) / float(j.row.text("n_gpus"))
    return (f"{share:.9g}", *_layout(j))


def _layout(j: Judgement) -> tuple[str, ...]:
    """Degrees and micro-batch; values that are not stated are 1."""
    return tuple(j.row.text(column) or "1" for column in LAYOUT_CELLS)


RATIO_KINDS = (
    RatioKind("weak_scaling", _work_per_device, _texts("n_gpus"), (0.005, 0.010, 0.025)),
    RatioKind(
        "strong_scaling",
        lambda j: (j.row.text("global_batch_size"), *_layout(j)),
        _texts("n_gpus"),
        (0.015, 0.020, 0.040),
    ),
    RatioKind("layout", _texts("global_batch_size", "n_gpus"), _layout, (0.03, 0.04, 0.08)),
)


def ratio_errors(judged: Iterable[Judgement], kind: RatioKind) -> Errors:
    """(series, signed error of the ratio) of every pair that differs in one respect."""
    known = [j for j in judged if j.step_error is not None]
    series = grouped(known, lambda j: (j.row.group, *_texts(*MODEL)(j), *kind.shared(j)))
    return [
        (name, (1.0 + (b.step_error or 0.0)) / (1.0 + (a.step_error or 0.0)) - 1.0)
        for name, rows in series.items()
        for a, b in combinations(sorted(rows, key=_order), 2)
        if kind.differs(a) != kind.differs(b)
    ]


CHOICE = ("tp", "pp", "cp", "vpp", "ep", "micro_batch_size", "recompute", "zero_or_fsdp")
"""Columns that a search chooses among."""
_JOB = tuple(column for column in (*MODEL, "global_batch_size", "n_gpus") if column not in CHOICE)


def layout_error(runs: Iterable[tuple[MeasuredRow, float]]) -> float:
    """What |ln of measured over predicted ratio| stays within in 80 % of pairs of layouts.

    `runs`: rows, each with its ln of measured over predicted step. The two runs of a pair are of one source and job (model,
    accelerators, batch, length, precision) and differ in layout. Runs of one layout count as one, with their median. All pairs
    of a job share one vote.
    """
    jobs = grouped(runs, lambda run: (run[0].group, *(run[0].text(column) for column in _JOB)))
    votes: list[tuple[float, float]] = []
    for own in jobs.values():
        layouts = grouped(own, lambda run: tuple(run[0].text(column) or "1" for column in CHOICE))
        pairs = list(combinations([median(error for _, error in same) for same in layouts.values()], 2))
        votes += [(abs(a - b), 1.0 / len(pairs)) for a, b in pairs]
    return upper(votes, COVERED)


def _order(j: Judgement) -> tuple[float, str]:
    """From few devices to many, whatever the order of the rows: the sign of an error is that of adding devices."""
    return float(j.row.text("n_gpus")), j.row.id


def ratios(judged: Sequence[Judgement]) -> dict[str, Any]:
    """By kind: stats of the headline group and of other trainers, of all pairs and of pairs of two test rows.

    In the stats `rows` are pairs and `cells` are series.
    """
    counted = headline(judged)
    groups = {"headline": [j for j in counted if leads(j)], "other": [j for j in counted if others(j)]}
    found: dict[str, Any] = {}
    for kind in RATIO_KINDS:
        found[kind.name] = {"target": dict(zip(("median", "mean", "p90"), kind.target, strict=True))}
        for name, rows in groups.items():
            both = {"all": rows, "test": [j for j in rows if split_of(j) == "test"]}
            found[kind.name][name] = {split: plain(stats(ratio_errors(some, kind))) for split, some in both.items()}
    return found
