"""Figures over all ranks. A step takes as long as its slowest rank.

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
    max: float
    std: float
    """Standard deviation of the population."""


def over_ranks(values: Mapping[str, float | None]) -> dict[str, RankSpread]:
    """Each metric over the ranks; `values` are this rank's. A rank without the metric, or with None, has not tracked it.

    Raises:
        ValueError: some ranks have not tracked a metric; it names metrics and ranks, on all of them.
    """
    ranks = gathered(dict(values))
    problems, found = [], {}
    for name in dict.fromkeys(name for tracked in ranks for name in tracked):
        column = [tracked.get(name) for tracked in ranks]
        missing = [str(rank) for rank, value in enumerate(column) if value is None]
        if missing:
            where = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {len(ranks)}"
            problems.append(f"{name}: not tracked on {where}")
        else:
            found[name] = _spread([float(value) for value in column if value is not None])
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


def _spread(column: list[float]) -> RankSpread:
    if any(map(isnan, column)):  # min and max may not see a NaN
        return RankSpread(nan, nan, nan, nan)
    mean = fsum(column) / len(column)
    variance = fsum((value - mean) ** 2 for value in column) / len(column)
    return RankSpread(min(column), mean, max(column), sqrt(variance))
