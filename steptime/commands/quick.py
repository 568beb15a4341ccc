"""A plan from only a model, a machine and a number of devices: everything else takes named defaults."""

from __future__ import annotations

import json
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError
from steptime.base.words import counted
from steptime.job.edit import read_setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steptime.job.job import Job

MACHINE = "dgx-h100"
SEQLEN = 8192
STEP_TOKENS = 4 * 2**20
"""Default tokens per step: the initial batch of Llama 3 405B (arXiv 2407.21783, section 3.4.1: 4M)."""


def sets(model: str | None, machine: str | None, devices: int | None) -> list[str]:
    """The options as settings for a plan."""
    named = {"model": model, "hardware": machine, "devices": devices}
    return [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]


def job(model: str | None, machine: str | None, devices: int | None, changes: list[str]) -> Job:
    """The fastest layout among those with the smallest tp * pp that fits; its notes name every default.

    Raises:
        ConfigError: no model is named, a name is unknown, or no layout of the devices is possible.
    """
    from steptime.answer.result import estimate

    if model is None:
        raise ConfigError("--model: required without a PLAN file (3dtrn models lists the presets)")
    plan = base(model, machine, devices)
    note = partial(_named, _given(machine, devices, changes))
    first: ConfigError | None = None
    biggest: Job | None = None
    for checkpointing in ("none", "full"):
        for split in layouts(plan["devices"], plan["per_node"], plan["experts"]):
            fitting = []
            for degrees in split:
                try:
                    found = estimate(_built(plan, degrees, checkpointing, changes))
                except ConfigError as error:
                    first = first or error
                    continue
                biggest = found.job
                if found.peaks.fits:
                    fitting.append(found)
            if fitting:
                return note(
                    min(fitting, key=lambda one: one.step_s).job,
                    checkpointing,
                    "fastest with the smallest tp*pp that fits; 3dtrn search tries all",
                )
    if biggest is None:
        raise first or ConfigError("devices: no valid layout for this number of devices")
    return note(biggest, "full", "none of the layouts tried fits; 3dtrn search tries all")


def base(model: str, machine: str | None, devices: int | None) -> dict[str, Any]:
    """Names, devices, and the batch in tokens."""
    from steptime.hardware.machine import Machine
    from steptime.model.presets import load_model

    node = Machine.load(machine or MACHINE).devices_per_node
    shape = load_model(model)
    longest = shape.max_positions if shape.learned_positions and shape.max_positions else SEQLEN
    count = node if devices is None else devices
    if count < 1:
        raise ConfigError(f"--devices: must be at least 1 (got {count})")
    return {
        "model": model,
        "machine": machine or MACHINE,
        "devices": count,
        "per_node": node,
        "seqlen": min(longest, SEQLEN),
        "layers": shape.n_layers,
        "experts": shape.moe.n_experts if shape.moe else 1,
    }


def layouts(devices: int, per_node: int, experts: int = 1) -> Iterator[list[dict[str, int]]]:
    """Degrees ordered by how far tp and pp split the model, least first; tp stays inside a node.

    Whole experts lie over a node's devices, or over those of eight nodes (as DeepSeek-V3's, arXiv 2412.19437, section 3.2), or
    over as many of them as divide a stage's devices and the experts.
    """
    size = 1
    while size <= devices:
        splits = [
            {"tp": tp, "pp": size // tp}
            for tp in (1, 2, 4, 8, 16)
            if size % tp == 0 and tp <= per_node and devices % size == 0
        ]
        yield [split | spread for split in splits for spread in _spreads(devices // split["pp"], experts, per_node)]
        size *= 2


def _spreads(devices: int, experts: int, per_node: int) -> list[dict[str, int]]:
    """Expert degrees on a stage's devices; none without experts.

    >>> _spreads(128, 256, 8), _spreads(2, 60, 8), _spreads(8, 1, 8)
    ([{'ep': 8, 'etp': 1}, {'ep': 64, 'etp': 1}], [{'ep': 2, 'etp': 1}], [{}])
    """
    if experts == 1:
        return [{}]
    both = gcd(devices, experts)
    eps = {max(ep for ep in range(1, min(both, most) + 1) if both % ep == 0) for most in (per_node, 8 * per_node)}
    return [{"ep": ep, "etp": 1} for ep in sorted(eps)]


def sequences(seqlen: int, copies: int) -> int:
    """Sequences of a step: at least `STEP_TOKENS` tokens, a multiple of `copies`.

    >>> sequences(8192, 48)
    528
    """
    return -(-STEP_TOKENS // (seqlen * copies)) * copies


def unsplit(model: str, machine: str | None, devices: int) -> dict[str, Any]:
    """A plan without a layout: model, machine, and a batch that all but the largest even degrees of data parallelism divide."""
    plan = base(model, machine, devices)
    copies = devices
    while copies % 2 == 0 and copies * plan["seqlen"] > STEP_TOKENS:
        copies //= 2
    batch = {"gbs": sequences(plan["seqlen"], copies), "seqlen": plan["seqlen"]}
    return {"model": model, "data": batch, "hardware": plan["machine"]}


def _built(plan: dict[str, Any], degrees: dict[str, int], checkpointing: str, changes: list[str]) -> Job:
    from steptime.job.job import Job

    dp = plan["devices"] // (degrees["tp"] * degrees["pp"])
    uneven = {"layers_per_stage": "auto"} if plan["layers"] % degrees["pp"] else {}
    gbs = sequences(plan["seqlen"], dp)
    said: dict[str, Any] = {
        "model": plan["model"],
        "devices": plan["devices"],
        "parallelism": degrees | uneven,
        "data": {"gbs": gbs, "seqlen": plan["seqlen"], "microbatch_sz": 1},
        "hardware": plan["machine"],
    }
    if checkpointing != "none":
        said["performance"] = {"activation_checkpointing_type": checkpointing}
    return Job.load(json.dumps(said), changes)


def _given(machine: str | None, devices: int | None, changes: list[str]) -> set[str]:
    """What options and settings state, by the ends of their keys."""
    found = {read_setting(change)[0].rpartition(".")[2] for change in changes}
    found |= {"devices"} if devices is not None else set()
    return found | ({"machine"} if machine is not None or found & {"hardware", "node_type"} else set())


def _named(given: set[str], job: Job, checkpointing: str, found: str) -> Job:
    """The job with a note for every default that was not given, and for the reason of its layout."""
    p, data = job.parallelism, job.data
    degrees = {"tp": p.tp, "pp": p.pp} | ({"ep": p.ep, "etp": p.etp} if job.model.moe else {})
    split = [f"{name} {degree}" for name, degree in degrees.items() if name not in given]
    if not given & {"activation_checkpointing_type", "recompute"}:
        split.append(f"recomputation {checkpointing}")
    told = {
        "machine": job.machine.name,
        "devices": counted(p.devices, "device"),
        "layout": f"{', '.join(split)} ({found})" if split else "",
        "seqlen": f"{data.seqlen:,} tokens per sequence",
        "gbs": f"gbs {data.gbs:,} (at least {STEP_TOKENS / 2**20:g} Mi tokens per step)",
        "microbatch_sz": f"micro-batch {data.microbatch_sz}",
    }
    rest = ", ".join(text for key, text in told.items() if text and key not in given)
    return job.replace(
        notes=[*job.notes, f"defaults without a plan: {rest}; change them with --set"] if rest else job.notes
    )
