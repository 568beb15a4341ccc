"""A plan from a model, a machine and a number of devices alone: what is left open takes named defaults."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steptime.job.job import Job

MACHINE = "dgx-h100"
SEQLEN = 8192
STEP_TOKENS = 4 * 2**20
"""Tokens of a step: what Llama 3 405B was trained on at first (arXiv 2407.21783, section 3.4.1: 4M)."""


def sets(model: str | None, machine: str | None, devices: int | None) -> list[str]:
    """The options as settings over a plan."""
    named = {"model": model, "hardware": machine, "devices": devices}
    return [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]


def job(model: str | None, machine: str | None, devices: int | None, changes: list[str]) -> Job:
    """The fastest of the least split layouts that fit; its notes name every default.

    Raises:
        ConfigError: no model is named, a name is unknown, or no layout of the devices is possible.
    """
    from steptime.answer.result import estimate

    if model is None:
        raise ConfigError("--model: required without a CONFIG file (3dtrn models lists the presets)")
    plan = base(model, machine, devices)
    last: ConfigError | None = None
    biggest: Job | None = None
    for checkpointing in ("none", "full"):
        for split in layouts(plan["devices"], plan["per_node"]):
            fitting = []
            for tp, pp in split:
                try:
                    found = estimate(_built(plan, tp, pp, checkpointing, changes))
                except ConfigError as error:
                    last = error
                    continue
                biggest = found.job
                if found.memory.fits:
                    fitting.append(found)
            if fitting:
                return min(fitting, key=lambda one: one.step_s).job
    if biggest is None:
        raise last or ConfigError("devices: no layout of this number of devices")
    return biggest


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
    }


def layouts(devices: int, per_node: int) -> Iterator[list[tuple[int, int]]]:
    """Layouts (tp, pp) by how far they split a model, least first; tp stays inside a node."""
    size = 1
    while size <= devices:
        yield [(tp, size // tp) for tp in (1, 2, 4, 8, 16) if size % tp == 0 and tp <= per_node and devices % size == 0]
        size *= 2


def _built(plan: dict[str, Any], tp: int, pp: int, checkpointing: str, changes: list[str]) -> Job:
    from steptime.job.job import Job

    dp = plan["devices"] // (tp * pp)
    gbs = max(1, -(-STEP_TOKENS // (plan["seqlen"] * dp))) * dp
    said: dict[str, Any] = {
        "model": plan["model"],
        "devices": plan["devices"],
        "parallelism": {"tp": tp, "pp": pp},
        "data": {"gbs": gbs, "seqlen": plan["seqlen"], "microbatch_sz": 1},
        "hardware": plan["machine"],
    }
    if checkpointing != "none":
        said["performance"] = {"activation_checkpointing_type": checkpointing}
    note = (
        f"defaults without a plan: {plan['devices']:,} devices of {plan['machine']}, tp {tp}, pp {pp}, recomputation "
        f"{checkpointing} (least split layout that fits), {plan['seqlen']:,} tokens per sequence, gbs {gbs:,} "
        f"({STEP_TOKENS / 2**20:g} Mi tokens per step or more), micro-batch 1; change them with --set"
    )
    return Job.load(json.dumps(said | {"notes": [note]}), changes)
