"""Seconds of a schedule's chunks and boundaries as a walk takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from steptime.schedule.orders import described

SecondsPerChunk: TypeAlias = Sequence[Sequence[float]]
"""Seconds of each chunk, [pp][vpp]."""


def by_kind(
    schedule: str,
    pp: int,
    vpp: int,
    forward_s: SecondsPerChunk,
    backward_s: SecondsPerChunk,
    weight_s: SecondsPerChunk | None,
) -> tuple[SecondsPerChunk, ...]:
    """Seconds by kind of action, each [pp][vpp]."""
    tables = _by_kind(schedule, forward_s, backward_s, weight_s)
    if any(len(kind) != pp or any(len(stage) != vpp for stage in kind) for kind in tables):
        raise ValueError(f"forward_s and backward_s must be [{pp}][{vpp}]")
    return tables


def _by_kind(
    schedule: str, forward_s: SecondsPerChunk, backward_s: SecondsPerChunk, weight_s: SecondsPerChunk | None
) -> tuple[SecondsPerChunk, ...]:
    """Seconds by kind of action, unchecked."""
    split = described(schedule).split
    if weight_s is None:
        if split:
            raise ValueError(f"{schedule} runs the weight gradients separately: weight_s is required")
        return forward_s, backward_s
    both = [[b + w for b, w in zip(*rows, strict=True)] for rows in zip(backward_s, weight_s, strict=True)]
    return (forward_s, both, backward_s, weight_s) if split else (forward_s, both)


def boundaries(send_s: Sequence[float], pp: int, vpp: int) -> list[float]:
    """One send time for each of the pp boundaries."""
    if len(send_s) == pp:
        return list(send_s)
    if len(send_s) == pp - 1 and vpp == 1:
        return [*send_s, 0.0]
    raise ValueError(f"send times must be one for each of {pp} boundaries, not {len(send_s)}")
