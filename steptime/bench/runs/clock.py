"""Seconds of a piece of work: warmed up, repeated, with device synchronization; minimum, median and 90th percentile.

On CUDA and MPS a sample is a batch of calls, so that launching and waiting cost the batch, not the call. On CUDA two events
enclose it, and work queued ahead keeps the host in front, so that what is timed is the device. A CPU runs what it is given before
it returns, so a sample is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

Name = TypeVar("Name")
LEAST_ROUNDS = 3
BATCH_S = 2e-3
"""Least duration of a batch: a hundred times an event's resolution and the first launch's delay."""
BATCH_CALLS = 200
"""Most calls in a batch: a CUDA queue holds about a thousand launches before it blocks the host (CUDA_SCALE_LAUNCH_QUEUES)."""
LEAD = 2048
"""Rows of the square fp32 products that run ahead of a batch, 17 GFLOP each."""


class Timing(NamedTuple):
    """Seconds of one call over `reps` repetitions."""

    min_s: float
    median_s: float
    p90_s: float
    reps: int

    @property
    def spread(self) -> float:
        """90th percentile minus minimum, divided by the median: 0.1 is 10 %."""
        return (self.p90_s - self.min_s) / self.median_s if self.median_s else 0.0


def summary(samples: Sequence[float]) -> Timing:
    """Summary of seconds that were measured one by one; the 90th percentile is the nearest rank.

    >>> summary([0.3, 0.1, 0.2])
    Timing(min_s=0.1, median_s=0.2, p90_s=0.3, reps=3)

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    rank = -(-9 * len(ordered) // 10)
    return Timing(ordered[0], median(ordered), ordered[rank - 1], len(ordered))


def synchronize(device: torch.device) -> None:
    """Wait for all work launched on a device; a CPU's work is done when the call returns."""
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
    """Time `run` for so many seconds, within `least` and `most` repetitions.

    `before`: what to do ahead of each repetition, not timed (gradients set to None, say). With it a repetition is one call on
    every device, by the host's clock, the device waited for before and after: how to time a training step.
    """
    sample = single(run, device, before) if before is not None else sampler(run, device)
    samples: list[float] = []
    end = perf_counter() + seconds
    while len(samples) < least or (len(samples) < most and perf_counter() < end):
        samples.append(sample())
    return summary(samples)


def interleaved(
    runs: Mapping[Name, Callable[[], object]],
    device: torch.device,
    rounds: int = 10,
    *,
    turns: int = 1,
    seconds: float = inf,
    warm: int = 2,
) -> dict[Name, Timing]:
    """Time several pieces of work in turns, `rounds` of them, so that a change of load affects all equally.

    `turns`: samples of one piece in a round at most; of several those are taken that last no longer than one of the longest.
    `seconds`: when to stop before `rounds`, though not before three of them. `warm`: calls ahead of the first sample.
    """
    samplers = {name: sampler(run, device, warm) for name, run in runs.items()}
    end = perf_counter() + seconds
    samples = {name: [sample()] for name, sample in samplers.items()}
    longest = max((found[0] for found in samples.values()), default=0.0)
    times = {name: min(turns, ceil(longest / found[0])) for name, found in samples.items()}
    for done in range(1, rounds):
        if done >= LEAST_ROUNDS and perf_counter() > end:
            break
        for name, sample in samplers.items():
            late = perf_counter() > end
            samples[name] += [sample() for _ in range(1 if late else times[name])]
    return {name: summary(found) for name, found in samples.items()}


def sampler(run: Callable[[], object], device: torch.device, warm: int = 2) -> Callable[[], float]:
    """`run` warmed up by at least `warm` calls; every call of the result measures seconds of one call of it."""
    if device.type == "cpu":
        return single(run, device, warm=warm)
    return _by_events(run, device) if device.type == "cuda" else _by_batches(run, device)


def single(
    run: Callable[[], object], device: torch.device, before: Callable[[], object] | None = None, warm: int = 2
) -> Callable[[], float]:
    """`run` warmed up by `warm` calls; every call of the result measures one call of it by the host's clock."""

    def sample() -> float:
        if before is not None:
            before()
        synchronize(device)
        start = perf_counter()
        run()
        synchronize(device)
        return perf_counter() - start

    for _ in range(warm):  # allocator, autotuning, caches
        sample()
    return sample


def _batch(run: Callable[[], object], device: torch.device) -> tuple[int, float]:
    """Number of calls in a batch, and the host's time to launch one [s]; `run` is warm afterwards."""
    one = single(run, device)()
    start = perf_counter()
    for _ in range(3):
        run()
    launch = (perf_counter() - start) / 3
    synchronize(device)
    per_call = min(one, (perf_counter() - start) / 3)
    return min(max(ceil(BATCH_S / per_call), 1), BATCH_CALLS), launch


def _by_batches(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Samples by the host's clock around a batch of calls."""
    calls, _ = _batch(run, device)

    def batch() -> None:
        for _ in range(calls):
            run()

    sample = single(batch, device)
    return lambda: sample() / calls


def _by_events(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Samples by CUDA events around a batch of calls that was queued before its first call ran."""
    import torch

    calls, launch = _batch(run, device)
    lead = _lead(device, (calls + 2) * launch)
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def sample() -> float:
        lead()
        run()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / calls

    sample()
    return sample


def _lead(device: torch.device, seconds: float) -> Callable[[], None]:
    """Work that keeps the device busy for at least `seconds`, while the host queues the calls to be timed."""
    import torch

    factor = torch.randn(LEAD, LEAD, device=device)
    product = torch.empty_like(factor)
    once = single(lambda: torch.mm(factor, factor, out=product), device)
    times = ceil(1.5 * seconds / min(once(), once()))

    def lead() -> None:
        for _ in range(times):
            torch.mm(factor, factor, out=product)

    return lead
