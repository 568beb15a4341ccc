"""Seconds of a piece of work: warmed up, repeated, the device waited for; minimum, median and 90th percentile."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Timing(NamedTuple):
    """Seconds of one call over `reps` repetitions."""

    min_s: float
    median_s: float
    p90_s: float
    reps: int

    @property
    def spread(self) -> float:
        """How far the 90th percentile lies above the minimum, over the median: 0.1 is 10 %."""
        return (self.p90_s - self.min_s) / self.median_s if self.median_s else 0.0


def summary(samples: Sequence[float]) -> Timing:
    """Of seconds that were measured one by one; the 90th percentile is the nearest rank.

    >>> summary([0.3, 0.1, 0.2])
    Timing(min_s=0.1, median_s=0.2, p90_s=0.3, reps=3)

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no samples to summarise")
    ordered = sorted(samples)
    rank = -(-9 * len(ordered) // 10)
    return Timing(ordered[0], median(ordered), ordered[rank - 1], len(ordered))


def synchronize(device: torch.device) -> None:
    """Wait for all that was launched on a device; a CPU's work is done when the call returns."""
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def measure(
    run: Callable[[], object],
    device: torch.device,
    *,
    seconds: float = 0.2,
    least: int = 5,
    most: int = 200,
    before: Callable[[], object] | None = None,
) -> Timing:
    """Time `run` by itself, again and again.

    Args:
        run: the work of one repetition.
        device: what it runs on; waited for before and after each repetition.
        seconds: how long to go on [s], within `least` and `most` repetitions.
        least: repetitions at least.
        most: repetitions at most.
        before: what to do ahead of each repetition, not timed (gradients set to None, say).
    """
    samples: list[float] = []
    for _ in range(2):  # allocator, autotuning, caches
        if before is not None:
            before()
        run()
    end = perf_counter() + seconds
    while len(samples) < least or (len(samples) < most and perf_counter() < end):
        if before is not None:
            before()
        synchronize(device)
        start = perf_counter()
        run()
        synchronize(device)
        samples.append(perf_counter() - start)
    return summary(samples)
