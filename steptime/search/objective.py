"""What a search ranks by: seconds, dollars or joules a token, or memory."""

from __future__ import annotations

from steptime.answer.result import Estimate
from steptime.job.job import Job


def ranked(found: Estimate, objective: str) -> float:
    """What an objective ranks an estimate by."""
    job = found.job
    tokens = job.data.gbs * job.data.seqlen
    if objective == "memory":
        return found.memory.peak_reserved_bytes + sum(found.memory.overhead_bytes)
    return found.step_s * weight(job, found.devices, objective) / tokens


def weight(job: Job, devices: int, objective: str) -> float:
    """What a second of a step weighs: 1, dollars (device-seconds without a price), or joules."""
    if objective == "step":
        return 1.0
    if objective == "cost":
        said = job.run.price_per_device_hour if job.run else None
        price = said if said is not None else job.machine.price_per_device_hour
        return devices * (price / 3600.0 if price is not None else 1.0)
    return devices * (job.machine.accelerator.power_w or 1.0)
