"""The objectives of a search: seconds, dollars or joules per token, or memory."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.answer.result import Estimate
from steptime.base.config import ConfigError, near
from steptime.job.job import Job

OBJECTIVES = ("step", "cost", "energy", "memory")
_RATES = {"cost": ("price", "price_per_device_hour"), "energy": ("power", "accelerator.power_w")}


def ranked(found: Estimate, objective: str) -> float:
    """The value of an objective for an estimate."""
    job = found.job
    tokens = job.data.gbs * job.data.seqlen
    if objective == "memory":
        return found.peaks.most_bytes
    return found.step_s * weight(job, found.devices, objective) / tokens


def weight(job: Job, devices: int, objective: str) -> float:
    """Weight of a second of a step: 1, or dollars or joules; device-seconds where price or power is unknown."""
    return devices * (rate(job, objective) or 1.0) if objective in _RATES else 1.0


def rate(job: Job, objective: str) -> float | None:
    """US dollars (`cost`) or joules (`energy`) of a device per second; None where none is stated, or a price of 0."""
    if objective == "energy":
        return job.machine.accelerator.power_w
    said = job.run.price_per_device_hour if job.run else None
    price = said if said is not None else job.machine.price_per_device_hour
    return price / 3600.0 if price else None


def unit(jobs: Sequence[Job], objective: str) -> str:
    """Description of the objective.

    Raises:
        ConfigError: there is no such objective, or some of the machines have a price (or a power) and others have none.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective: unknown (got {objective!r}){near(objective, OBJECTIVES)}")
    words = {"step": "seconds per token", "cost": "cost per token", "energy": "energy per token"}.get(
        objective, objective
    )
    if objective not in _RATES:
        return words
    without = sorted({job.machine.name for job in jobs if rate(job, objective) is None})
    if not without:
        return words
    what, key = _RATES[objective]
    if any(rate(job, objective) is not None for job in jobs):
        raise ConfigError(f"--objective {objective}: no {what} for {', '.join(without)}; set {key} in its machine file")
    return f"device-seconds per token (no {what} known; set hardware.overrides.{key})"
