"""Errors put together: median, mean, p90 and bias with one vote per cell, by slice, and an interval by bootstrap over cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import median
from typing import Any, NamedTuple

from steptime.validation.compare import Judgement
from steptime.validation.coverage import summary_of

RESAMPLES = 200
"""Bootstrap draws; the interval is that of their 5th and 95th percentile."""
SEED = 20260101


class Stats(NamedTuple):
    """Errors of a set of rows, as shares; every cell has one vote, shared by its rows."""

    rows: int
    cells: int
    median: float
    """Of |error|."""
    mean: float
    """Of |error|."""
    p90: float
    """Of |error|."""
    bias: float
    """Mean signed error: positive is too slow, or too large."""


class Vote(NamedTuple):
    """One row's signed error and its share of the vote of its cell."""

    error: float
    cell: int
    weight: float


def _votes(errors: Iterable[tuple[tuple[str, ...], float]]) -> list[Vote]:
    """Votes in the order of |error|."""
    pairs = sorted(errors, key=lambda pair: abs(pair[1]))
    sizes = Counter(cell for cell, _ in pairs)
    index = {cell: i for i, cell in enumerate(sizes)}
    return [Vote(error, index[cell], 1.0 / sizes[cell]) for cell, error in pairs]


def stats(errors: Iterable[tuple[tuple[str, ...], float]]) -> Stats | None:
    """Stats of (cell, signed error) pairs; None without any.

    >>> stats([(("a",), 0.1), (("a",), 0.3), (("b",), -0.4)]).mean
    0.30000000000000004
    """
    votes = _votes(errors)
    if not votes:
        return None
    counts = [1] * len({vote.cell for vote in votes})
    return Stats(len(votes), len(counts), *_figures(votes, counts))


def _figures(votes: Sequence[Vote], counts: Sequence[int]) -> tuple[float, float, float, float]:
    """Median, mean, p90 and bias of votes in the order of |error|, cell c counted `counts[c]` times."""
    weights = [vote.weight * counts[vote.cell] for vote in votes]
    total = sum(weights)
    mean = sum(weight * abs(vote.error) for vote, weight in zip(votes, weights, strict=True)) / total
    bias = sum(weight * vote.error for vote, weight in zip(votes, weights, strict=True)) / total
    return _quantile(votes, weights, 0.5 * total), mean, _quantile(votes, weights, 0.9 * total), bias


def _quantile(votes: Sequence[Vote], weights: Sequence[float], at: float) -> float:
    """|error| where the running weight passes `at`; the mean of two neighbours where it meets it.

    Source: Hyndman and Fan 1996, definition 2 (the usual median of an even count).
    """
    running, met = 0.0, None
    for vote, weight in zip(votes, weights, strict=True):
        if weight == 0.0:
            continue
        if met is not None:
            return (met + abs(vote.error)) / 2.0
        running += weight
        if running > at + 1e-9:
            return abs(vote.error)
        if running > at - 1e-9:
            met = abs(vote.error)
    return abs(votes[-1].error) if met is None else met


def interval(errors: Iterable[tuple[tuple[str, ...], float]]) -> dict[str, list[float]]:
    """5th and 95th percentile of each figure over resampled cells, with a fixed seed."""
    votes = _votes(errors)
    if not votes:
        return {}
    n = len({vote.cell for vote in votes})
    random = Random(SEED)  # noqa: S311  statistics, not secrets
    draws: list[tuple[float, float, float, float]] = []
    for _ in range(RESAMPLES):
        counts = [0] * n
        for cell in random.choices(range(n), k=n):
            counts[cell] += 1
        draws.append(_figures(votes, counts))
    low, high = int(0.05 * RESAMPLES), int(0.95 * RESAMPLES) - 1
    columns = (sorted(column) for column in zip(*draws, strict=True))
    return {
        name: [column[low], column[high]]
        for name, column in zip(("median", "mean", "p90", "bias"), columns, strict=True)
    }


def step_errors(judged: Iterable[Judgement]) -> list[tuple[tuple[str, ...], float]]:
    """(cell, signed error of the step time) of the rows that have one."""
    return [(j.cell, error) for j in judged if (error := j.step_error) is not None]


def memory_errors(judged: Iterable[Judgement]) -> list[tuple[tuple[str, ...], float]]:
    """(cell, signed error of the peak memory) of the rows that have one."""
    return [(j.cell, error) for j in judged if (error := j.memory_error) is not None]


SLICES: dict[str, Callable[[Judgement], str]] = {
    "split": lambda j: j.row.text("split") or "none",
    "accelerator": lambda j: j.accelerator,
    "source": lambda j: j.row.group,
    "precision": lambda j: j.precision,
    "framework": lambda j: j.framework,
}


def sliced(judged: Sequence[Judgement], key: Callable[[Judgement], str], errors: Any = step_errors) -> dict[str, Stats]:
    """Stats by a key, most rows first."""
    groups: dict[str, list[Judgement]] = {}
    for j in judged:
        groups.setdefault(key(j), []).append(j)
    found = {name: stats(errors(group)) for name, group in groups.items()}
    kept = {name: figures for name, figures in found.items() if figures is not None}
    return dict(sorted(kept.items(), key=lambda item: (-item[1].rows, item[0])))


def skip_kind(reason: str) -> str:
    """A reason without the row's own numbers, to count by."""
    first = re.sub(r" \(got .*?\)(?=;|$| with)", "", reason).partition("; ")[0]
    return re.sub(r"(?<=[ =])\d[\d,]*\b", "N", first).strip()


def headline(judged: Iterable[Judgement]) -> list[Judgement]:
    """The rows that count: judged, and not apart."""
    return [j for j in judged if j.skipped is None and j.apart is None]


def fitting(judged: Sequence[Judgement]) -> dict[str, dict[str, int]]:
    """Runs that ended out of memory and runs that did not, and how many of each the estimate calls so.

    A run that fitted counts as right when its verdict is fits or tight; one that did not when it is tight or does_not_fit.
    """
    out = [j for j in judged if j.skipped is None and j.ran_out]
    sources = {j.row.group for j in out}
    ran = [j for j in judged if j.skipped is None and not j.ran_out and j.row.group in sources]
    return {
        "ran_out": {"rows": len(out), "right": sum(j.verdict != "fits" for j in out)},
        "ran": {"rows": len(ran), "right": sum(j.verdict != "does_not_fit" for j in ran)},
    }


def summarise(judged: Sequence[Judgement], worst: int) -> dict[str, Any]:
    """The `summary` of `3dtrn validate --json`; figures of step time unless they say memory."""
    counted = headline(judged)
    beside = [j for j in judged if j.skipped is None and j.apart is not None]
    skipped = Counter(skip_kind(j.skipped) for j in judged if j.skipped is not None)
    total = stats(step_errors(counted))
    by = {name: sliced(counted, key) for name, key in SLICES.items()}
    medians = [figures.median for figures in by["source"].values()]
    return {
        "rows": len(judged),
        "judged": len(judged) - sum(skipped.values()),
        "skipped": sum(skipped.values()),
        "step_time": _plain(total) | {"interval_5_95": interval(step_errors(counted))},
        "median_over_sources": median(medians) if medians else None,
        "by": {name: {key: _plain(figures) for key, figures in group.items()} for name, group in by.items()},
        "split_interval_5_95": {
            name: interval(step_errors(j for j in counted if SLICES["split"](j) == name)) for name in by["split"]
        },
        "apart": {key: _plain(figures) for key, figures in sliced(beside, lambda j: j.apart or "").items()},
        "memory": {
            key: _plain(figures)
            for key, figures in sliced(judged, lambda j: f"{j.metric}, {j.row.group}", memory_errors).items()
        },
        "intervals": summary_of(counted),
        "fits": fitting(judged),
        "worst": [_row(j) for j in worst_rows(counted, worst)],
        "skipped_by_reason": dict(skipped.most_common()),
    }


def worst_rows(counted: Iterable[Judgement], n: int) -> list[Judgement]:
    """The n rows with the largest errors of step time."""
    judged = [(abs(error), j) for j in counted if (error := j.step_error) is not None]
    return [j for _, j in sorted(judged, key=lambda pair: (-pair[0], pair[1].row.id))[:n]]


def _row(j: Judgement) -> dict[str, Any]:
    return {"id": j.row.id, "split": j.row.text("split"), "step_time_error": j.step_error}


def _plain(figures: Stats | None) -> dict[str, Any]:
    return figures._asdict() if figures else dict.fromkeys(Stats._fields) | {"rows": 0, "cells": 0}
