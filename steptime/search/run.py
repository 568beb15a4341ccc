"""Runs a search: every requested job, number of devices and batch, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from operator import index
from pathlib import Path
from time import perf_counter
from typing import Any

from steptime.base.config import ConfigError, show
from steptime.base.words import counted
from steptime.job.job import Job
from steptime.search.estimated import narrowed
from steptime.search.objective import unit, weight
from steptime.search.pipeline_layouts import Block
from steptime.search.screen import Bound, Screen
from steptime.search.search import Asked, FoundLayouts, Search
from steptime.search.space import AXES, EXCESS, Axes, Counts


def search(
    job: Job | str | Path | Mapping[str, Any],
    devices: int | Sequence[int] | None = None,
    *,
    gbs: int | Sequence[int] | None = None,
    over: Mapping[str, Sequence[Any]] | None = None,
    objective: str = "step",
    axes: Axes | Mapping[str, Sequence[Any]] | None = None,
) -> Search:
    """Search every layout of a plan on a number of devices.

    Args:
        job: a `Job` or what `Job.load` takes; its layout is the one that others are compared with.
        devices: number of devices, or several; by default the plan's own. Of several the best per token is found.
        gbs: sequences per step, or several; by default the plan's own.
        over: values of other keys to try, such as `{"hardware.node_type": ["h100", "h200"]}`.
        objective: what to minimize: "step" (seconds per token), "cost", "energy" (both per token) or "memory".
        axes: the values to try of tp, pp, cp and so on, such as `{"tp": [8], "pp": [2, 4]}`; by default all that are possible.

    Returns:
        A `Search`: `.best`, `.top(n)`, `.pareto()`, `.best_of("tp")`, `.to_frame()`; each layout has `.job` and `.estimate`.

    >>> from steptime import Job
    >>> data = {"gbs": 64, "seqlen": 2048, "microbatch_sz": 1}
    >>> job = Job(model="llama3-8b", parallelism={"tp": 8, "pp": 1, "dp": 1}, data=data, hardware="dgx-h100")
    >>> search(job).best.job.parallelism.tp < 8
    True

    Raises:
        ConfigError: the plan is invalid, no layout can run, or an argument has no such value.
    """
    plan = job if isinstance(job, Job) else Job.load(job)
    counts = _counts("devices", plan.parallelism.devices if devices is None else devices)
    batches = _counts("gbs", plan.data.gbs if gbs is None else gbs)
    for key, values in (over or {}).items():
        if key in AXES:
            raise ConfigError(f"over: {key!r} is an axis of the search; fix it with axes={{{key!r}: [value, ...]}}")
        _check_values(f"over: {key}", values)
    return run(plan, Asked(counts, batches, _axes(axes), over or {}, objective))


def _axes(said: object) -> Axes:
    """The axes of a search, from a mapping of their names to values."""
    if said is None or isinstance(said, Axes):
        return said or Axes()
    if not isinstance(said, Mapping):
        raise ConfigError(f"axes: expected {{name: [value, ...]}} (got {show(said)})")
    for name, values in said.items():
        if name not in AXES:
            raise ConfigError(f"axes: no axis {name!r}; valid: {', '.join(sorted(AXES))}; for other keys use over")
        _check_values(f"axes: {name}", values)
    return Axes({name: tuple(values) for name, values in said.items()})


def _check_values(key: str, values: object) -> None:
    """Raise where values are no list."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(f"{key}: expected a list of values (got {show(values)})")


def _counts(name: str, said: object) -> tuple[int, ...]:
    """One whole number or several."""
    found = said if isinstance(said, Sequence) and not isinstance(said, str) else (said,)
    try:
        numbers = tuple(map(index, found))
    except TypeError:
        numbers = ()
    if min(numbers, default=0) < 1:
        raise ConfigError(f"{name}: expected a whole number of at least 1, or a list of them (got {show(said)})")
    return numbers


Tell = Callable[[float], None]


def run(
    plan: Job, asked: Asked, tell: Tell | None = None, bound: Bound | None = None, *, every: bool = False
) -> Search:
    """The search; a keyboard interrupt ends it with the results so far.

    `tell`: called with the share that is done. `bound`: skips useless layouts, which are not counted. `every`: also computes
    layouts that need many times a device's memory, as happens by default where nothing needs less.

    Raises:
        ConfigError: no devices, or an axis that has no value left.
    """
    start, result = perf_counter(), Search(plan, asked)
    if bound:
        bound.search = result
    if min(asked.devices, default=0) < 1:
        raise ConfigError("devices: must be at least 1")
    jobs = [(extra, plan.replace(**extra) if extra else plan) for extra in _others(asked.over)]
    result.unit = unit([job for _, job in jobs], asked.objective)
    lots = [(extra, job, n, gbs) for extra, job in jobs for n in asked.devices for gbs in asked.gbs]
    try:
        for at, (extra, changed, devices, gbs) in enumerate(lots):
            screen = Screen(changed, narrowed(changed, asked.axes), result.counts, bound, every)
            for share, block in screen.blocks(devices, gbs):
                _keep(result, changed, extra, block)
                if tell:
                    tell((at + share) / len(lots))
    except KeyboardInterrupt:
        result.interrupted = True
    result.seconds = perf_counter() - start
    if not result.interrupted and not result.counts.evaluated:
        raise ConfigError(nothing_runs(result))
    if not every and not bound and not result.interrupted and _nothing_near(result):
        return run(plan, asked, tell, every=True)
    return result


MOST = 6
"""Rules that are named where no layout can run."""


def nothing_runs(result: Search) -> str:
    """Why no layout can run."""
    counts, asked = result.counts, result.asked
    devices = " or ".join([*(f"{n:,}" for n in asked.devices[:-1]), counted(asked.devices[-1], "device")])
    said = ", ".join(f"{name} {' or '.join(map(str, values))}" for name, values in asked.axes.said.items())
    if not counts.points:
        return f"search: no layout of {devices} has {said or 'these values'}: tp*cp*pp must divide the devices"
    rules = ", ".join(
        f"{rule} ({n:,})" for rule, n in sorted(counts.rejected.items(), key=lambda pair: -pair[1])[:MOST]
    )
    return f"search: no layout of {devices} can run{' with ' + said if said else ''}; rejected by: {rules}"


def _others(over: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of the keys that are not axes."""
    for values in product(*over.values()):
        yield dict(zip(over, values, strict=True))


def _keep(result: Search, plan: Job, extra: Mapping[str, Any], block: Block) -> None:
    """Count a block, keep what may fit, and note the nearest of what does not."""
    import numpy as np

    counts, legal, choices = result.counts, block.legal, len(block.choices)
    fits = block.fits
    total, fitting = int(legal.sum()) * choices, int(fits.sum())
    counts.evaluated += total
    counts.fitting += fitting
    if total > fitting:
        _count_excess(counts, block.needed_bytes[(legal & ~fits)] / block.capacity_bytes)
        if not result.found and not fitting:
            _note_nearest(result, plan, extra, block)
    if fitting:
        choice, row = np.nonzero(fits)
        step, memory = block.step_s[choice, row], block.needed_bytes[choice, row]
        tokens = block.gbs * plan.data.seqlen
        objective = result.asked.objective
        value = memory if objective == "memory" else step * weight(plan, block.devices, objective) / tokens
        kept = block._replace(step_s=None, allocated_bytes=None, reserved_bytes=None, legal=None)
        result.found.append(FoundLayouts(kept, plan, extra, choice, row, value, step, memory))


def _nothing_near(result: Search) -> bool:
    """Whether nothing fits and the nearest layout may be among those counted as oversized."""
    capacity = result.plan.machine.accelerator.usable_memory_bytes
    return not result.found and (result.nearest is None or result.nearest[0] > EXCESS[-2] * capacity)


def _count_excess(counts: Counts, shares: Any) -> None:
    import numpy as np

    for i, n in enumerate(np.bincount(np.searchsorted(EXCESS, shares), minlength=len(EXCESS))):
        counts.too_large[i] += int(n)


def _note_nearest(result: Search, plan: Job, extra: Mapping[str, Any], block: Block) -> None:
    import numpy as np

    needs = np.where(block.legal, block.needed_bytes, np.inf)
    choice, row = np.unravel_index(int(needs.argmin()), needs.shape)
    least = float(needs[choice, row])
    if result.nearest is None or least < result.nearest[0]:
        result.nearest = least, plan, {**extra, **block.changes(int(choice), int(row))}
