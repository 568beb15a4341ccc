"""The gain in step time from a slightly faster machine, the bandwidth that would hide its collectives, and what settings save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from steptime.answer.result import Estimate, estimate
from steptime.answer.switches import savings
from steptime.base.config import ConfigError
from steptime.base.rows import Saving
from steptime.hardware.machine import Accelerator, Machine, Tier
from steptime.job.job import Job
from steptime.job.mesh import comm_part
from steptime.search.fastest import fastest, within
from steptime.search.search import Asked

MORE = 1.1
"""Factor by which each figure is improved."""
HIDDEN = 0.01
"""Exposed share of the step below which a collective counts as hidden."""
FASTEST = 64.0
"""Largest network rate that is tried, as a multiple of the machine's."""
HALVINGS = 9
"""Bisections of a rate: to a hundredth of its range."""


class Gain(NamedTuple):
    """One figure of the machine, and the step time with more of it."""

    name: str
    now: str
    """The machine's figure, in words."""
    step_s: float
    change: float
    """Relative change of the step time: -0.05 is 5 % less."""
    note: str = ""


class Hiding(NamedTuple):
    """The bandwidth that hides a kind of communication."""

    name: str
    """A key of `time.parts_s`."""
    exposed_s: float
    tier: str
    now_bytes_per_s: float
    """Wire rate of the tier, per device and direction."""
    times: float | None
    """Multiple of that rate that hides it; None: not even `FASTEST` does."""
    every_times: float | None = None
    """Where that is none: multiple of the rates of all tiers together that hides it."""
    left_s: float = 0.0
    """Where that is none, too: seconds that are exposed with `FASTEST` of all tiers, of latency."""


class BestLayouts(NamedTuple):
    """Steps of the best layouts of the job's devices and batch [s], which need not be the job's own."""

    step_s: float
    with_more_memory_s: float


class Sensitivity(NamedTuple):
    """The result of `sensitivity`."""

    given: Estimate
    gains: list[Gain]
    hiding: list[Hiding]
    left_out: list[str]
    """What was not tried, each with its reason."""
    savings: list[Saving]
    """Settings besides the layout that shorten the step, and all of them together."""
    best: BestLayouts | None
    """None where they were not searched, or none fits."""


def sensitivity(job: Job, *, best: bool = True) -> Sensitivity:
    """What 10 % more of each figure buys in the job's own layout, most first. `best`: also search for layouts."""
    given = estimate(job)
    rate, dtype = given.throughput.peak_flops_used, given.throughput.peak_dtype
    words = f"{rate / 1e12:,.0f} TFLOP/s {dtype}"
    gains = [_gain(given, "peak FLOP/s", words, with_chip(job.machine, faster(job.machine.accelerator)))]
    gains += [_gain(given, name, now, machine) for name, now, machine in machines(job.machine)]
    layouts = _best_layouts(job) if best else None
    gains += [_memory(given, layouts)] if layouts else []
    left_out: list[str] = []
    try:
        gains.append(_devices(given))
    except ConfigError as error:
        left_out.append(f"{TWICE}: dp {job.parallelism.dp:,} cannot double: {error.problems[0]}")
    return Sensitivity(
        given,
        sorted(gains, key=lambda gain: gain.change),
        list(hiding(given)),
        left_out,
        savings(given, given.time.parts_s, estimate, exact=False),
        layouts,
    )


def _gain(given: Estimate, name: str, now: str, machine: Machine) -> Gain:
    step_s = estimate(given.job.replace(hardware=machine)).step_s
    return Gain(name, now, step_s, step_s / given.step_s - 1.0)


def machines(machine: Machine) -> Iterator[tuple[str, str, Machine]]:
    """(name, figure, machine) with 10 % more of each rate of memory and network, and 10 % less latency."""
    chip, inner, outer = machine.accelerator, machine.tiers[0], machine.tiers[1:]
    rate = chip.memory_bytes_per_s
    yield (
        "memory bandwidth",
        f"{rate / 1e9:,.0f} GB/s",
        with_chip(machine, chip.model_copy(update={"memory_bytes_per_s": MORE * rate})),
    )
    yield f"{inner.name} bandwidth", f"{inner.bytes_per_s / 1e9:,.0f} GB/s", with_tiers(machine, scaled(MORE, [0]))
    if outer:
        words = ", ".join(f"{tier.name} {tier.bytes_per_s / 1e9:,.1f} GB/s" for tier in outer)
        every = list(range(1, len(machine.tiers)))
        yield "network bandwidth", words, with_tiers(machine, scaled(MORE, every))
    words = ", ".join(f"{tier.name} {tier.latency_s * 1e6:,.1f} us" for tier in machine.tiers)
    yield (
        "latency (10 % less)",
        words,
        with_tiers(machine, lambda _, tier: tier.model_copy(update={"latency_s": tier.latency_s / MORE})),
    )


def faster(chip: Accelerator) -> Accelerator:
    """A device whose arithmetic is 10 % faster in every dtype."""
    names = ("peak_flops", "sustained_flops", "best_flops")
    return chip.model_copy(
        update={name: {dtype: MORE * x for dtype, x in getattr(chip, name).items()} for name in names}
    )


def with_chip(machine: Machine, chip: Accelerator) -> Machine:
    """The machine with another device."""
    return machine.model_copy(update={"accelerator": chip})


def with_tiers(machine: Machine, change: Callable[[int, Tier], Tier]) -> Machine:
    """The machine with some tiers replaced."""
    return machine.model_copy(update={"tiers": [change(i, tier) for i, tier in enumerate(machine.tiers)]})


def scaled(factor: float, which: list[int]) -> Callable[[int, Tier], Tier]:
    """Some tiers with faster wires."""

    def change(i: int, tier: Tier) -> Tier:
        if i not in which:
            return tier
        link = None if tier.link_bytes_per_s is None else factor * tier.link_bytes_per_s
        return tier.model_copy(update={"bytes_per_s": factor * tier.bytes_per_s, "link_bytes_per_s": link})

    return change


TWICE = "devices (twice)"


def _devices(given: Estimate) -> Gain:
    """Twice the devices for the same batch: dp cannot grow by 10 %.

    Raises:
        ConfigError: dp cannot double.
    """
    job = given.job
    twice = estimate(job.replace(**{"parallelism.dp": 2 * job.parallelism.dp}))
    return Gain(
        TWICE,
        f"{given.devices:,}",
        twice.step_s,
        twice.step_s / given.step_s - 1.0,
        "with dp doubled, for the same batch",
    )


def _best_layouts(job: Job) -> BestLayouts | None:
    """One search with 10 % more memory gives the best layout with it and without."""
    asked = Asked((job.parallelism.devices,), (job.data.gbs,))
    chip = job.machine.accelerator
    more = {name: MORE * getattr(chip, name) for name in ("memory_bytes", "usable_memory_bytes")}
    try:
        then = fastest(job.replace(hardware=with_chip(job.machine, chip.model_copy(update=more))), asked, job)
    except ConfigError:
        return None
    now = within(then, job)
    return BestLayouts(now.best.step_s, then.best.step_s) if now.best and then.best else None


def _memory(given: Estimate, best: BestLayouts) -> Gain:
    """More memory, which changes no step of the job's own layout but may let a faster one fit."""
    usable = f"{given.job.machine.accelerator.usable_memory_bytes / 2**30:,.1f} GiB usable"
    steps = f"{best.with_more_memory_s:.4g} s with 10 % more, {best.step_s:.4g} s without"
    return Gain("memory size", usable, given.step_s, 0.0, f"this layout takes the same; the best layouts take {steps}")


_TIERS = {"tp_comm": 0, "cp_comm": -1, "pp_comm": -1, "dp_comm": -1, "ep_comm": -1, "embedding_comm": -1}
"""Kinds of communication by the tier that they use where a job does not decide it."""


def hiding(given: Estimate) -> Iterator[Hiding]:
    """For every kind of exposed communication, the network rate at which it is at most 1 % of the step."""
    job = given.job
    parts = given.time.parts_s
    for name in [part for part in parts if part.endswith("_comm")]:
        if parts[name] <= HIDDEN * given.step_s:
            continue
        tier = next((row.tier for row in given.collectives if comm_part(row.axis) == name and row.tier), "")
        names = [t.name for t in job.machine.tiers]
        at = names.index(tier) if tier in names else _TIERS.get(name, -1) % len(names)

        times, _ = _least(partial(_exposed, job, name, [at]))
        every, left = (None, 0.0) if times else _least(partial(_exposed, job, name, list(range(len(names)))))
        yield Hiding(name, parts[name], names[at], job.machine.tiers[at].bytes_per_s, times, every, left)


def _exposed(job: Job, name: str, which: list[int], times: float) -> tuple[float, bool]:
    """Exposed seconds of a kind of communication on faster tiers, and whether they are more than `HIDDEN` of the step."""
    found = estimate(job.replace(hardware=with_tiers(job.machine, scaled(times, which))))
    left = found.time.parts_s.get(name, 0.0)
    return left, left > HIDDEN * found.step_s


def _least(exposed: Callable[[float], tuple[float, bool]]) -> tuple[float | None, float]:
    """The least factor with which it is hidden, up to `FASTEST`; else None, and what is exposed with that."""
    left, shows = exposed(FASTEST)
    if shows:
        return None, left
    low, high = 1.0, FASTEST
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if exposed(middle)[1] else (low, middle)
    return high, 0.0


def document(found: Sensitivity) -> dict[str, Any]:
    """The `--json` document."""
    return {
        "step_s": found.given.step_s,
        "gains": [gain._asdict() for gain in found.gains],
        "hiding": [row._asdict() for row in found.hiding],
        "left_out": found.left_out,
        "settings": [saving._asdict() for saving in found.savings],
        "best_layouts": found.best._asdict() if found.best else None,
    }
