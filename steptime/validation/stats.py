"""Figures of a set of errors: median, mean, p90 and bias with one vote per cell, and an interval by bootstrap over cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple, TypeAlias

Errors: TypeAlias = list[tuple[tuple[str, ...], float]]
"""(cell, signed error): rows of one cell share one vote."""

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

    >>> stats([(("a",), 0.25), (("a",), 0.5), (("b",), -0.125)]).mean
    0.25
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
    """|error| where the cumulative weight passes `at`; the mean of two neighbors where it equals it.

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


def plain(figures: Stats | None) -> dict[str, Any]:
    """Figures as a mapping; without any rows all are None and the counts 0."""
    return figures._asdict() if figures else dict.fromkeys(Stats._fields) | {"rows": 0, "cells": 0}


def upper(pairs: Iterable[tuple[float, float]], share: float) -> float:
    """The least value that `share` of the votes do not exceed, of (value, vote) pairs; 0 without any.

    >>> upper([(3.0, 1.0), (1.0, 1.0), (2.0, 2.0)], 0.75)
    2.0
    """
    ordered = sorted(pairs)
    total, running = sum(vote for _, vote in ordered), 0.0
    for value, vote in ordered:
        running += vote
        if running >= share * total - 1e-9:
            return value
    return 0.0
