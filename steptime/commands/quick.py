"""The plan of only a model, a machine and a number of devices: the fastest layout of a search over the usual values."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from steptime.answer.result import estimate
from steptime.base.config import ConfigError, show
from steptime.base.words import counted
from steptime.commands import plan_defaults
from steptime.commands.search_plan import unplanned
from steptime.search.estimated import WORDS, covered
from steptime.search.fastest import fastest
from steptime.search.recompute import MAPPING, WORD, label
from steptime.search.search import NEAR, Asked
from steptime.search.space import AXES, Axes, chunk_counts, divisors

if TYPE_CHECKING:
    from steptime.answer.result import Estimate
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
    plan_defaults.check_devices(devices, plan.devices, changes)
    found = _Found(plan.job, "") if plan.said else _best(plan)
    given = set(plan_defaults.flat(changes))
    given |= {"devices"} if devices is not None or "hardware.nodes" in given else set()
    given |= {"machine"} if machine is not None or given & {"hardware", "hardware.node_type"} else set()
    return _named(given | {f"performance.{key}" for key in _recomputation(plan.job)}, found)


def quick(model: str, machine: str | None = None, devices: int | None = None, **changes: Any) -> Estimate:
    """The estimate of only a model, a machine and a number of devices, as `3dtrn --model M --machine H --devices N` shows it.

    The layout is the fastest of a search over the usual values that fits, or the one that needs least memory where none does.

    Args:
        model: the name of a preset (`3dtrn models`).
        machine: the name of a machine (`3dtrn machines`) or the path of a machine file; an H100 node by default.
        devices: number of devices; one node by default.
        changes: settings by dotted key, which are kept: `quick("llama3-8b", **{"data.seqlen": 4096, "parallelism.tp": 2})`.

    Returns:
        An `Estimate`; `.job` is the plan found, and `.job.notes` names every default. `.job.replace` keeps the number of
        devices: dp follows from the other degrees unless it is given.

    Raises:
        ConfigError: a name or a setting is unknown or wrong, or no layout of the devices is possible.

    >>> answer = quick("llama3-8b", "h100", 8, **{"data.gbs": 64})
    >>> answer.fits, answer.job.parallelism.devices, answer.job.data.gbs
    (True, 8, 64)
    """
    from steptime.report.notebook import estimate as shown  # which has a form for notebooks

    try:
        count = None if devices is None else index(devices)  # of any integer type, as numpy's
    except TypeError:
        count = 0
    if count is not None and (count < 1 or isinstance(devices, bool)):
        raise ConfigError(f"devices: expected a whole number of at least 1 (got {show(devices)})")
    for name, value in (("model", model), ("machine", machine or "")):
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]  callers may pass anything
            raise ConfigError(f"{name}: expected a name (got {show(value)})")
    settings = [f"{key}={_plain(key, value)}" for key, value in changes.items()]
    try:
        plan_defaults.check(model, machine, settings)
        found = job(model, machine, count, settings)
    except ConfigError as error:
        raise ConfigError(problem.keys_only or problem.line for problem in error.details) from None
    return shown(found)


def _plain(key: str, value: Any) -> str:
    """A setting's value as YAML.

    Raises:
        ConfigError: no YAML has such a value.
    """
    try:
        return json.dumps(value, default=index)  # integers of other types, as numpy's
    except (TypeError, ValueError):  # of a list that contains itself
        raise ConfigError(f"{key}: expected a number, text, a list or a mapping (got {show(value)})") from None


def _recomputation(plan: Job) -> dict[str, Any]:
    """The recomputation that the settings state, by its key in `performance`; empty where they state none."""
    stated = plan.performance.model_dump(include={"activation_checkpointing_type", "recompute"}, exclude_unset=True)
    return {key: value for key, value in stated.items() if value is not None}


def _best(plan: SearchPlan) -> _Found:
    """The fastest layout of the usual ones that fits, or the one that needs least memory; of all where no usual one can run."""
    fixed = plan.fixed | {f"performance.{key}": (value,) for key, value in _recomputation(plan.job).items()}
    fixed |= _stages(plan)
    asked = Asked((plan.devices or 1,), (plan.job.data.gbs,), Axes(usual(plan) | fixed), said=False)
    try:
        found = fastest(plan.job, asked)
    except ConfigError:
        found = _of_all(plan, replace(asked, axes=Axes(fixed)))
    tried = counted(found.counts.points, "layout")
    if (best := _fitting(found, plan.kept)) is not None:
        return _Found(best, f"fastest of {tried}; 3dtrn search tries more")
    return _Found(
        _smallest(found, plan.kept), f"none of {tried} fits, this needs least memory; 3dtrn search tries more"
    )


def _of_all(plan: SearchPlan, asked: Asked) -> Search:
    """The search of every layout; where none can run, what is wrong with the settings themselves is told first."""
    try:
        return fastest(plan.job, asked)
    except ConfigError:
        plan.job.replace(**{AXES[key]: value for key, (value,) in plan.fixed.items()})
        raise


def _stages(plan: SearchPlan) -> dict[str, tuple[Any, ...]]:
    """Values of the axes that suit what the settings say of the stages' layers and of groups of micro-batches."""
    said, layers, fixed = plan.job.parallelism, plan.job.model.n_layers, plan.fixed
    axes: dict[str, tuple[Any, ...]] = {}
    recomputed = plan.kept.get("performance.recompute", {}).get("n_layers")
    if counts := plan.kept.get("parallelism.layers_per_stage") or recomputed:
        vpp = fixed.get("vpp", (max(1, len(counts) // fixed["pp"][0]) if "pp" in fixed else 1,))
        axes = {"vpp": vpp, "pp": fixed.get("pp", (max(1, len(counts) // vpp[0]),))}
    elif "embedding_and_loss_count_as_layers" in said.model_fields_set and said.layers_per_stage is None:
        axes = {"split": ("ends",) if said.embedding_and_loss_count_as_layers else ("even", "auto")}
    if "parallelism.microbatch_group_sz" in plan.kept and not counts:  # of interleaving
        pps = [pp for pp in divisors(plan.devices or 1) if 1 < pp <= layers]
        axes |= {"pp": fixed.get("pp", tuple(pps)), "vpp": tuple(chunk_counts(layers, pps, ends=True)[1:])}
    return axes | fixed


def _fitting(found: Search, kept: dict[str, Any]) -> Job | None:
    """The fastest layout that fits, with the settings that only some layouts can have; None where none of them fits."""
    if not kept:
        return found.best.job if found.best is not None else None
    with_them = []
    for layout in [*found.top(NEAR), *found.pareto()]:
        with suppress(ConfigError):
            with_them.append(estimate(layout.job.replace(**kept)))
    fitting = [one for one in with_them if one.peaks.fits]
    return min(fitting, key=lambda one: one.step_s).job if fitting else None


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


def _smallest(found: Search, kept: dict[str, Any]) -> Job:
    """Of layouts that do not fit the one that needs least memory."""
    if found.best is not None:  # which fits without what is kept
        return found.best.job.replace(**kept)
    if found.nearest is None:
        raise ConfigError("devices: no valid layout for this number of devices")
    _, plan, changes = found.nearest
    return plan.replace(**found.fewest(changes) | kept)


def _named(given: set[str], found: _Found) -> Job:
    """The job on its number of devices, with a note for every default that was not given, and for the reason of its layout."""
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
    notes = [*job.notes, f"defaults without a plan: {rest}; change them with --set"] if rest else job.notes
    return job.replace(notes=notes, devices=p.devices)
