"""A layout of a search in words, and as a row of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steptime.answer.result import Estimate, estimate
from steptime.job.job import Job
from steptime.report.format import GIB, number, percent, seconds
from steptime.report.headline import VERDICTS
from steptime.search.changes import settings
from steptime.search.front import REACH
from steptime.search.objective import ranked, rate
from steptime.search.recompute import label
from steptime.search.search import Layout, Search


def figures(layout: Layout, objective: str = "step") -> str:
    """Step, MFU, memory and verdict of a layout, and its cost or energy where that is the objective."""
    e = layout.estimate
    memory = f"{layout.held_bytes / GIB:.1f} of {e.memory.capacity_bytes / GIB:.1f} GiB"
    text = f"{seconds(e.step_s)}, MFU {percent(e.throughput.mfu)}, {memory}"
    text += "".join(f", {name} {value}" for name, value in spent(e, objective).items())
    return text if e.memory.fits else f"{text}, {VERDICTS[e.memory.verdict][0].lower()}"


def spent(found: Estimate, objective: str) -> dict[str, str]:
    """Cost or energy of a billion tokens under its unit, where that is the objective; device-seconds without a price or power."""
    if objective not in {"cost", "energy"}:
        return {}
    value, known = ranked(found, objective), rate(found.job, objective) is not None
    name, size = {"cost": ("cost/B tokens", 1e9), "energy": ("MJ/B tokens", 1e3)}[objective] if known else _UNPRICED
    return {name: number(size * value)}


_UNPRICED = ("device-s/B tokens", 1e9)


def shape(layout: Layout) -> str:
    """A layout in words."""
    p, job = layout.job.parallelism, layout.job
    experts = f"  ep {p.ep}  etp {p.etp}" if job.model.moe else ""
    text = f"tp {p.tp}  cp {p.cp}  pp {p.pp}  vpp {p.vpp}  dp {p.dp}{experts}  micro-batch {job.data.microbatch_sz}"
    text += f"  {job.schedule}" if p.schedule is not None and p.pp > 1 else ""
    return f"{text}  zero {job.zero_level}{'  sp' if job.sp else ''}  recompute {recomputed(layout)}"


def recomputed(layout: Layout) -> str:
    """Its recomputation in a word."""
    return label(layout.job.recompute)


def lines(changes: Mapping[str, Any], width: int) -> list[str]:
    """The settings of a layout in lines of limited width, in shell syntax with continued lines."""
    found: list[str] = []
    for setting in settings(changes):
        if found and len(found[-1]) + len(setting) + 3 <= width:
            found[-1] += f" {setting}"
        else:
            found.append(setting)
    return [f"{line} \\" for line in found[:-1]] + found[-1:]


def head(found: Search) -> list[str]:
    """The columns of a layout."""
    experts = ["ep", "etp"] if found.plan.model.moe else []
    axes = ["tp", "cp", "pp", "vpp", "dp", *experts, "mbs", "zero", "sp"]
    axes += ["schedule", "recompute"] if found.several_schedules else ["recompute"]
    return ["", *varied(found, found.plan), "step", "MFU", "GiB", *_spent_names(found), *axes]


def _spent_names(found: Search) -> list[str]:
    """The column of cost or energy, where that is the objective; machines that lack a price or a power lack it together."""
    return list(spent(best.estimate if (best := found.best) else estimate(found.plan), found.asked.objective))


def varied(found: Search, job: Job) -> dict[str, str]:
    """Machine, devices and batch of `job`, as far as the search varies them."""
    asked = found.asked
    each = {
        "machine": (asked.over.get("hardware.node_type", ()), job.machine.name),
        "devices": (asked.devices, f"{job.parallelism.devices:,}"),
        "gbs": (asked.gbs, f"{job.data.gbs:,}"),
    }
    return {name: value for name, (values, value) in each.items() if len(values) > 1}


def row_of(found: Search, name: str, layout: Layout) -> list[str]:
    """A layout as a row under `head`."""
    p, job, e = layout.job.parallelism, layout.job, layout.estimate
    experts = [p.ep, p.etp] if job.model.moe else []
    axes = [p.tp, p.cp, p.pp, p.vpp, p.dp, *experts, job.data.microbatch_sz, job.zero_level]
    memory = f"{layout.held_bytes / GIB:.1f}"
    schedule = [job.schedule if p.pp > 1 else "-"] if found.several_schedules else []
    return [
        name, *varied(found, job).values(), seconds(e.step_s), percent(e.throughput.mfu).removesuffix(" %"), memory,
        *spent(e, found.asked.objective).values(), *map(str, axes), "yes" if job.sp else "no", *schedule, recomputed(layout),
    ]  # fmt: skip


def selection(found: Search, layouts: Sequence[Layout]) -> str:
    """How many layouts of a front are shown, where it is not all of them."""
    if found.front_size <= len(layouts):
        return ""
    return f"{len(layouts)} of the {found.front_size:,} layouts of the front, up to {REACH:g} x the best"
