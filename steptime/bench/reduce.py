"""Figures over all ranks. A step takes as long as its slowest rank; a mean over ranks is weighted by each rank's count.

Every function here is a collective: all ranks call it, all get the same answer, and what is wrong on one is an error on all.
Without a process group there is one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isnan, nan, sqrt
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class RankSpread(NamedTuple):
    """One metric over the ranks, in its original unit."""

    min: float
    mean: float
    """Weighted where weights were given."""
    max: float
    std: float
    """Standard deviation of the population, with the same weights."""


def over_ranks(values: Mapping[str, float | None], weights: Mapping[str, float] | None = None) -> dict[str, RankSpread]:
    """Each metric over the ranks. A rank without the metric, or with None, has not tracked it.

    Args:
        values: this rank's figures.
        weights: by metric, how many samples this rank's figure is the mean of; a metric without one counts each rank alike.

    Raises:
        ValueError: some ranks have not tracked a metric, or its weights are missing on some, negative or all zero; it names
            metrics and ranks, on all of them.
    """
    ranks = gathered((dict(values), dict(weights or {})))
    names = list(dict.fromkeys(name for tracked, _ in ranks for name in tracked))
    problems, found = [], {}
    for name in names:
        column: list[Any] = [tracked.get(name) for tracked, _ in ranks]
        shares: list[Any] = [given.get(name) for _, given in ranks]
        if all(share is None for share in shares):
            shares = [1.0] * len(ranks)
        problem = _problem(name, column, shares)
        if problem:
            problems.append(problem)
        else:
            found[name] = _spread([float(value) for value in column], [float(share) for share in shares])
    if problems:
        raise ValueError("; ".join(problems))
    return found


def slowest(samples: Sequence[float]) -> list[float]:
    """Seconds of each repetition on its slowest rank.

    Raises:
        ValueError: the ranks have different numbers of samples.
    """
    rows = gathered([float(sample) for sample in samples])
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks have different numbers of samples: {', '.join(map(str, counts))}, by rank")
    return [max(column) for column in zip(*rows, strict=True)]


def gathered(mine: T) -> list[T]:
    """Each rank's value, in rank order, on every rank."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def _problem(name: str, column: Sequence[float | None], shares: Sequence[float | None]) -> str:
    """The problem of a metric; "" where there is none."""
    for row, what in ((column, "not tracked"), (shares, "has no weight")):
        missing = [str(rank) for rank, item in enumerate(row) if item is None]
        if missing:
            ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {len(column)}"
            return f"{name}: {what} on {ranks}"
    weights = [share for share in shares if share is not None]
    if min(weights) < 0 or not fsum(weights) > 0:
        return f"{name}: weights must be 0 or more, and not all 0 (got {', '.join(f'{w:g}' for w in weights)})"
    return ""


def _spread(column: list[float], weights: list[float]) -> RankSpread:
    if any(map(isnan, column)):  # min and max may not see a NaN
        return RankSpread(nan, nan, nan, nan)
    total = fsum(weights)
    mean = fsum(value * weight for value, weight in zip(column, weights, strict=True)) / total
    variance = fsum(weight * (value - mean) ** 2 for value, weight in zip(column, weights, strict=True)) / total
    return RankSpread(min(column), mean, max(column), sqrt(variance))
