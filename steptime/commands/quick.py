"""A plan from only a model, a machine and a number of devices: everything else takes named defaults."""

from __future__ import annotations

import json
from math import gcd
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError
from steptime.base.words import counted
from steptime.job.edit import read_setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steptime.answer.result import Estimate
    from steptime.job.job import Job

MACHINE = "dgx-h100"
SEQLEN = 8192
STEP_TOKENS = 4 * 2**20
"""Default tokens per step: the initial batch of Llama 3 405B (arXiv 2407.21783, section 3.4.1: 4M)."""
DEVICE_TOKENS = 2**10
"""Default tokens per step and device on more than 4,096 devices: Llama 3 405B had 16M on 16,384 (the same, table 4)."""


def sets(model: str | None, machine: str | None, devices: int | None) -> list[str]:
    """The options as settings for a plan."""
    named = {"model": model, "hardware": machine, "devices": devices}
    return [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]


def job(model: str | None, machine: str | None, devices: int | None, changes: list[str]) -> Job:
    """The layout with the most tokens per second of those that fit and keep the batch; its notes name every default.

    Raises:
        ConfigError: no model is named, a name is unknown, or no layout of the devices is possible.
    """
    if model is None:
        raise ConfigError("--model: required without a PLAN file (3dtrn models lists the presets)")
    plan = base(model, machine, devices)
    given = _given(machine, devices, changes)
    tried = _Tried(plan, changes)
    for uneven in (False, True):
        for degrees in layouts(plan["devices"], plan["near"], plan["layers"], plan["experts"], uneven=uneven):
            if not tried.fits(degrees, "none"):
                tried.fits(degrees, "full")
        if tried.best is not None:
            break
    else:
        if tried.last is None:
            raise tried.error or ConfigError("devices: no valid layout for this number of devices")
        return _named(given, tried.last, "full", f"none of {tried.count} layouts tried fits; 3dtrn search tries all")
    found, degrees, checkpointing = tried.best
    pp, layers = found.job.parallelism.pp, plan["layers"]
    units = layers + 2 if layers % pp else layers  # see `_built`
    for vpp in range(2, units // pp + 1) if pp > 1 else ():
        if units % (pp * vpp) == 0:
            tried.fits(degrees | {"pp": pp, "vpp": vpp}, checkpointing)
    found, _, checkpointing = tried.best
    return _named(given, found.job, checkpointing, f"fastest of {tried.count} layouts; 3dtrn search tries all")


class _Tried:
    """Estimates of layouts of one plan: how many there were, the fastest that fits, the last, and the first error."""

    def __init__(self, plan: dict[str, Any], changes: list[str]) -> None:
        self.plan, self.changes = plan, changes
        self.count = 0
        self.best: tuple[Estimate, dict[str, int], str] | None = None
        self.last: Job | None = None
        self.error: ConfigError | None = None

    def fits(self, degrees: dict[str, int], checkpointing: str) -> bool:
        """Estimate one layout: does it fit? A layout that breaks a rule does not count."""
        from steptime.answer.result import estimate

        try:
            found = estimate(_built(self.plan, degrees, checkpointing, self.changes))
        except ConfigError as error:
            self.error = self.error or error
            return False
        self.count += 1
        self.last = found.job
        if not found.peaks.fits:
            return False
        if self.best is None or self._merit(found) > self._merit(self.best[0]):
            self.best = found, degrees, checkpointing
        return True

    def _merit(self, found: Estimate) -> tuple[bool, float]:
        """Whether the step has about the default tokens, which data parallelism over more ranks multiplies; tokens per second."""
        tokens = found.job.data.gbs * found.job.data.seqlen
        return tokens <= 2 * self.plan["tokens"], tokens / found.step_s


def base(model: str, machine: str | None, devices: int | None) -> dict[str, Any]:
    """Names, devices, and the batch in tokens."""
    from steptime.hardware.machine import Machine
    from steptime.model.presets import load_model

    node = Machine.load(machine or MACHINE)
    shape = load_model(model)
    longest = shape.max_positions if shape.learned_positions and shape.max_positions else SEQLEN
    count = node.devices_per_node if devices is None else devices
    if count < 1:
        raise ConfigError(f"--devices: must be at least 1 (got {count})")
    return {
        "model": model,
        "machine": machine or MACHINE,
        "devices": count,
        "tokens": max(STEP_TOKENS, DEVICE_TOKENS * count),
        "near": int(max(node.devices_per_node, min(node.tiers[0].size, count))),
        "seqlen": min(longest, SEQLEN) // 64 * 64 or longest,  # OPT's table has two more positions than its sequences
        "layers": shape.n_layers,
        "experts": shape.moe.n_experts if shape.moe else 1,
    }


def layouts(
    devices: int, near: int, layers: int, experts: int = 1, *, uneven: bool = False
) -> Iterator[dict[str, int]]:
    """Degrees ordered by how far tp and pp split the model, least first; tp stays among the `near` devices of a network domain.

    tp and pp are powers of two; with `uneven`, pp is every other divisor of what tp leaves.
    Whole experts lie over these devices, or over those of eight such domains (as DeepSeek-V3's, arXiv 2412.19437, section 3.2),
    or over as many of them as divide a stage's devices and the experts.
    """
    splits = [
        (tp * pp, tp, pp)
        for tp in (1, 2, 4, 8, 16)
        for pp in range(1, layers + 1)
        if tp <= near and devices % (tp * pp) == 0 and (pp & (pp - 1) > 0) == uneven
    ]
    for _, tp, pp in sorted(splits):
        yield from ({"tp": tp, "pp": pp} | spread for spread in _spreads(devices // pp, experts, near))


def _spreads(devices: int, experts: int, near: int) -> list[dict[str, int]]:
    """Expert degrees on a stage's devices; none without experts.

    >>> _spreads(128, 256, 8), _spreads(2, 60, 8), _spreads(8, 1, 8)
    ([{'ep': 8, 'etp': 1}, {'ep': 64, 'etp': 1}], [{'ep': 2, 'etp': 1}], [{}])
    """
    if experts == 1:
        return [{}]
    both = gcd(devices, experts)
    eps = {max(ep for ep in range(1, min(both, most) + 1) if both % ep == 0) for most in (near, 8 * near)}
    return [{"ep": ep, "etp": 1} for ep in sorted(eps)]


def sequences(tokens: int, seqlen: int, copies: int) -> int:
    """Sequences of a step: at least `tokens` tokens, a multiple of `copies`.

    >>> sequences(4 * 2**20, 8192, 48)
    528
    """
    return -(-tokens // (seqlen * copies)) * copies


def unsplit(model: str, machine: str | None, devices: int) -> dict[str, Any]:
    """A plan without a layout: model, machine, and a batch that all but the largest even degrees of data parallelism divide."""
    plan = base(model, machine, devices)
    copies = devices
    while copies % 2 == 0 and copies * plan["seqlen"] > plan["tokens"]:
        copies //= 2
    batch = {"gbs": sequences(plan["tokens"], plan["seqlen"], copies), "seqlen": plan["seqlen"]}
    return {"model": model, "data": batch, "hardware": plan["machine"]}


def _built(plan: dict[str, Any], degrees: dict[str, int], checkpointing: str, changes: list[str]) -> Job:
    from steptime.job.job import Job

    dp = plan["devices"] // (degrees["tp"] * degrees["pp"])
    layers, chunks = plan["layers"], degrees["pp"] * degrees.get("vpp", 1)
    ends = layers % chunks > 0 and (layers + 2) % chunks == 0
    split = (
        {"embedding_and_loss_count_as_layers": True}
        if ends
        else {"layers_per_stage": "auto"}
        if layers % chunks
        else {}
    )
    gbs = sequences(plan["tokens"], plan["seqlen"], dp)
    said: dict[str, Any] = {
        "model": plan["model"],
        "devices": plan["devices"],
        "parallelism": degrees | split,
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
    tokens = max(STEP_TOKENS, DEVICE_TOKENS * p.devices)
    degrees = {"tp": p.tp, "pp": p.pp} | ({"vpp": p.vpp} if p.vpp > 1 else {})
    degrees |= {"ep": p.ep, "etp": p.etp} if job.model.moe else {}
    split = [f"{name} {degree}" for name, degree in degrees.items() if name not in given]
    if not given & {"activation_checkpointing_type", "recompute"}:
        split.append(f"recomputation {checkpointing}")
    told = {
        "machine": job.machine.name,
        "devices": counted(p.devices, "device"),
        "layout": f"{', '.join(split)} ({found})" if split else "",
        "seqlen": f"{data.seqlen:,} tokens per sequence",
        "gbs": f"gbs {data.gbs:,} (at least {tokens / 2**20:.4g} Mi tokens per step)",
        "microbatch_sz": f"micro-batch {data.microbatch_sz}",
    }
    rest = ", ".join(text for key, text in told.items() if text and key not in given)
    return job.replace(
        notes=[*job.notes, f"defaults without a plan: {rest}; change them with --set"] if rest else job.notes
    )
