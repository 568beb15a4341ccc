"""The plan of only a model, a machine and a number of devices: the fastest layout of a search over the usual values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.words import counted
from steptime.commands.search_plan import unplanned
from steptime.job.edit import read_setting
from steptime.search.estimated import WORDS, covered
from steptime.search.fastest import fastest
from steptime.search.recompute import MAPPING, WORD, label
from steptime.search.search import Asked
from steptime.search.space import Axes, divisors

if TYPE_CHECKING:
    from steptime.commands.search_plan import SearchPlan
    from steptime.job.job import Job
    from steptime.search.search import Search

MICROBATCHES = (1, 2, 4, 8, 16)
LARGEST_TP = 16
MOST_EP = 64
"""Experts lie over at most so many devices, as DeepSeek-V3's (arXiv 2412.19437, section 3.2)."""


class _Found(NamedTuple):
    job: Job
    how: str
    """The reason of its layout; empty where the layout was stated."""


def job(model: str | None, machine: str | None, devices: int | None, changes: list[str]) -> Job:
    """The fastest layout that fits, or the one that needs least memory where none does; its notes name every default.

    Raises:
        ConfigError: no model is named, a name is unknown, or no layout of the devices is possible.
    """
    if model is None:
        raise ConfigError("--model: required without a PLAN file (3dtrn models lists the presets)")
    plan = unplanned(model, machine, devices, changes)
    stated = dict(map(read_setting, changes))
    found = _Found(plan.job, "") if plan.said else _best(plan, stated)
    given = {path for key, value in stated.items() for path in _paths(key, value)}
    given |= {"devices"} if devices is not None or "hardware.nodes" in given else set()
    given |= {"machine"} if machine is not None or given & {"hardware", "hardware.node_type"} else set()
    return _named(given | {f"performance.{key}" for key in _recomputation(plan.job)}, found)


def _paths(key: str, value: Any) -> list[str]:
    """The dotted keys that a setting states: its own, and those of the mappings in its value.

    >>> _paths("parallelism", {"tp": 8, "fsdp": {"version": 1}})
    ['parallelism', 'parallelism.tp', 'parallelism.fsdp', 'parallelism.fsdp.version']
    """
    inner = value.items() if isinstance(value, dict) else ()
    return [key, *(path for name, item in inner for path in _paths(f"{key}.{name}", item))]


def _recomputation(plan: Job) -> dict[str, Any]:
    """The recomputation that the settings state, by its key in `performance`; empty where they state none."""
    stated = plan.performance.model_dump(
        mode="json", include={"activation_checkpointing_type", "recompute"}, exclude_unset=True
    )
    return {key: value for key, value in stated.items() if value is not None}


def _best(plan: SearchPlan, stated: dict[str, Any]) -> _Found:
    """The fastest layout of the usual ones that fits, or the one that needs least memory; of all where no usual one can run."""
    kept = plan.fixed | {f"performance.{key}": (value,) for key, value in _recomputation(plan.job).items()}
    asked = Asked((plan.devices or 1,), (plan.job.data.gbs,), Axes(usual(plan) | kept), said=False)
    try:
        found = fastest(plan.job, asked)
    except ConfigError:
        found = _of_all(plan, replace(asked, axes=Axes(kept)), stated)
    tried = counted(found.counts.points, "layout")
    if found.best is not None:
        return _Found(found.best.job, f"fastest of {tried}; 3dtrn search tries more")
    return _Found(_smallest(found), f"none of {tried} fits, this needs least memory; 3dtrn search tries more")


def _of_all(plan: SearchPlan, asked: Asked, stated: dict[str, Any]) -> Search:
    """The search of every layout; where none can run, what is wrong with the settings themselves is told first."""
    try:
        return fastest(plan.job, asked)
    except ConfigError:
        plan.job.replace(**stated)
        raise


def usual(plan: SearchPlan) -> dict[str, tuple[Any, ...]]:
    """Values of the axes that are tried: tp in a network domain, whole experts, small micro-batches."""
    machine, devices = plan.job.machine, plan.devices or 1
    near = int(max(machine.devices_per_node, min(machine.tiers[0].size, devices)))
    whole = divisors(devices)
    axes: dict[str, tuple[Any, ...]] = {
        "tp": tuple(tp for tp in whole if tp <= min(near, LARGEST_TP)),
        "sp": (True,),
        "microbatch_sz": tuple(size for size in MICROBATCHES if plan.job.data.gbs % size == 0),
    }
    if not covered(plan.job):  # FSDP, a layout of which takes an estimate
        axes |= {"microbatch_sz": axes["microbatch_sz"][:3], WORD: WORDS}
    if moe := plan.job.model.moe:
        axes |= {"ep": tuple(ep for ep in divisors(moe.n_experts) if ep <= MOST_EP), "etp": (1,)}
        axes["microbatch_sz"] = axes["microbatch_sz"][:3]
    return axes


def _smallest(found: Search) -> Job:
    """Of layouts that do not fit the one that needs least memory."""
    if found.nearest is None:
        raise ConfigError("devices: no valid layout for this number of devices")
    _, plan, changes = found.nearest
    return plan.replace(**found.fewest(changes))


def _named(given: set[str], found: _Found) -> Job:
    """The job with a note for every default that was not given, and for the reason of its layout."""
    job, p, data = found.job, found.job.parallelism, found.job.data
    degrees = {"tp": p.tp, "pp": p.pp} | {axis: n for axis in ("cp", "vpp") if (n := getattr(p, axis)) > 1}
    degrees |= {"ep": p.ep, "etp": p.etp} if job.model.moe else {}
    degrees |= {"zero": job.zero_level} if p.zero_level is not None else {}
    split = [
        f"{name} {degree}"
        for name, degree in degrees.items()
        if not given & {f"parallelism.{name}", f"parallelism.{name}_level"}
    ]
    if not given & {WORD, MAPPING}:
        split.append(f"recomputation {label(job.recompute)}")
    told = {
        "machine": job.machine.name,
        "devices": counted(p.devices, "device"),
        "layout": f"{', '.join(split)} ({found.how})" if split and found.how else "",
        "data.seqlen": f"{data.seqlen:,} tokens per sequence",
        "data.gbs": f"gbs {data.gbs:,} ({data.gbs * data.seqlen / 2**20:.3g} Mi tokens per step)",
        "data.microbatch_sz": f"micro-batch {data.microbatch_sz}",
    }
    rest = ", ".join(text for key, text in told.items() if text and key not in given)
    return job.replace(
        notes=[*job.notes, f"defaults without a plan: {rest}; change them with --set"] if rest else job.notes
    )
