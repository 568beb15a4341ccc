"""The whole training run: days, device-hours, money, energy, checkpoints, failures."""

from __future__ import annotations

from math import sqrt
from typing import Any

from steptime.job.job import Job
from steptime.job.sections import Run


def whole_run(job: Job, step_s: float, n_params: int, devices: int) -> dict[str, Any] | None:
    """The figures of the `run:` section as plain numbers; keys without inputs are absent. None without a `run` section.

    `days` is training only; `wall_days` adds start-up, checkpoint writes, and the work lost and redone after failures.
    """
    said = job.run
    if said is None:
        return None
    result: dict[str, Any] = {"step_s": step_s, **checkpoints(job, said, n_params)}
    mtbf_s = said.mtbf_device_hours * 3600.0 / devices if said.mtbf_device_hours else None
    interval = said.checkpoint_interval_s
    write_s = result.get("checkpoint_write_s")
    if mtbf_s is not None:
        result["mtbf_s"] = mtbf_s
        if write_s:
            result["best_checkpoint_interval_s"] = young_daly_s(write_s, mtbf_s)
            interval = interval or result["best_checkpoint_interval_s"]
    goodput = goodput_fraction(interval, write_s, mtbf_s, said.restart_s)
    result |= included(said, checkpoints=bool(interval and write_s), failures=mtbf_s is not None)
    if set(result["counted"]) - {"start-up"}:  # otherwise goodput would be 100 % of nothing
        result["goodput"] = goodput
    if said.tokens is not None:
        result |= totals(job, said, step_s, devices, goodput)
    return result


def included(said: Run, *, checkpoints: bool, failures: bool) -> dict[str, list[str]]:
    """What wall time and goodput include, and what they leave out because a figure is missing, with the keys that set it."""
    lost_work = failures and checkpoints
    writes = "run.checkpoint_write_s or checkpoint_bytes_per_s, and checkpoint_interval_s"
    parts = [
        ("start-up", said.startup_s > 0.0, "run.startup_s"),
        ("checkpoint writes", checkpoints, writes),
        ("restarts after failures", failures and said.restart_s > 0.0, "run.mtbf_device_hours and restart_s"),
        ("work redone after failures", lost_work, "run.mtbf_device_hours and the checkpoint keys"),
    ]
    return {
        "counted": [name for name, known, _ in parts if known],
        "not_counted": [f"{name} ({keys})" for name, known, keys in parts if not known],
    }


def price(job: Job, said: Run) -> tuple[float, str] | None:
    """Price of a device-hour and its origin: the plan, else the machine's file."""
    if said.price_per_device_hour is not None:
        return said.price_per_device_hour, "run.price_per_device_hour"
    if job.machine.price_per_device_hour is None:
        return None
    source = job.machine.source("price_per_device_hour")
    return job.machine.price_per_device_hour, f"US dollars; {job.machine.name}: {source or 'no source'}"


def checkpoints(job: Job, said: Run, n_params: int) -> dict[str, Any]:
    """Bytes of one checkpoint (parameters, master copy and moments, each once) and seconds to write it."""
    size = job.software.state_bytes
    total = n_params * (size.params + size.master + size.moments)
    result: dict[str, Any] = {"checkpoint_bytes": total}
    if said.checkpoint_write_s is not None:
        result["checkpoint_write_s"] = said.checkpoint_write_s
    elif said.checkpoint_bytes_per_s is not None:
        result["checkpoint_write_s"] = total / said.checkpoint_bytes_per_s
    return result


def young_daly_s(write_s: float, mtbf_s: float) -> float:
    """The checkpoint interval with the least lost time: sqrt(2 C M) (Young 1974; Daly 2006, equation 1, first order).

    >>> young_daly_s(50.0, 3600.0)
    600.0
    """
    return sqrt(2.0 * write_s * mtbf_s)


def goodput_fraction(interval_s: float | None, write_s: float | None, mtbf_s: float | None, restart_s: float) -> float:
    """Share of wall time spent training: without checkpoint writes, restarts, and half an interval of work lost per failure.

    Daly 2006, section 2: per interval T of work a write C; per failure the restart R and (T + C)/2 redone.
    """
    interval, write = interval_s or 0.0, write_s or 0.0
    working = interval / (interval + write) if interval else 1.0
    if mtbf_s is None:
        return working
    lost = restart_s + (interval + write) / 2.0
    return working * max(0.0, 1.0 - lost / mtbf_s)


def totals(job: Job, said: Run, step_s: float, devices: int, goodput: float) -> dict[str, Any]:
    """Steps, days, device-hours, cost and energy of all tokens."""
    assert said.tokens is not None
    steps = -(-said.tokens // (job.data.gbs * job.data.seqlen))
    train_s = steps * step_s
    wall_s = train_s / goodput + said.startup_s if goodput else float("inf")
    hours = wall_s / 3600.0 * devices
    result: dict[str, Any] = {"tokens": said.tokens, "steps": steps, "days": train_s / 86400.0}
    if goodput:
        result |= {"wall_days": wall_s / 86400.0, "device_hours": hours}
        if found := price(job, said):
            result |= {"cost": hours * found[0], "price_per_device_hour": found[0], "price_source": found[1]}
        power = job.machine.accelerator.power_w
        if power is not None:
            result["energy_kwh"] = hours * power / 1000.0
    return result
