"""The whole run and weak scaling explained: each figure's formula with the job's numbers."""

from __future__ import annotations

from steptime.answer.result import Estimate
from steptime.report.details import RUN
from steptime.report.format import BINARY, quantity, seconds, whole
from steptime.report.table import Fact, FactList


def whole_run(estimate: Estimate) -> FactList:
    """Every figure of the section on the whole run of a plan that has one, by its formula (`answer.whole_run`)."""
    job, found = estimate.job, estimate.run or {}
    said, size, step = job.run, job.software.state_bytes, seconds(estimate.step_s)
    if said is None:
        raise ValueError("run: not set, so there is no whole run")
    write, mtbf, days = found.get("checkpoint_write_s"), found.get("mtbf_s"), found.get("days", 0.0)
    each = size.params + size.master + size.moments
    params = estimate.params.total
    lost = "; x (1 - (restart + (T + C) / 2) / time between failures)" if mtbf is not None else ""
    how = {
        "tokens": "run.tokens",
        "steps": f"tokens / (gbs {job.data.gbs:,} x seqlen {job.data.seqlen:,}), rounded up",
        "days": f"steps x {step}",
        "goodput": f"T / (T + C): T between checkpoints, C to write one{lost} (Daly 2006, section 2)",
        "wall_days": f"{days:.4g} days / goodput {found.get('goodput', 1.0):.4g} + start-up {seconds(said.startup_s)}",
        "device_hours": f"wall time in hours x {estimate.devices:,} devices",
        "cost": "device-hours x price of one",
        "energy_kwh": f"device-hours x {job.machine.accelerator.power_w or 0.0:g} W, the rated power of a device",
        "checkpoint_bytes": f"{whole(params)} parameters x {each:g} B (parameter, master and moments, each once) = "
        f"{quantity(float(params * each), BINARY)}",
        "checkpoint_write_s": "run.checkpoint_write_s"
        if said.checkpoint_write_s is not None
        else "one checkpoint / run.checkpoint_bytes_per_s",
        "best_checkpoint_interval_s": f"sqrt(2 x {seconds(write or 0.0)} to write x {seconds(mtbf or 0.0)} between failures) "
        "(Young 1974; Daly 2006, equation 1)",
        "mtbf_s": f"run.mtbf_device_hours {said.mtbf_device_hours or 0.0:g} / {estimate.devices:,} devices",
        "counted": "what wall time and goodput contain",
        "not_counted": "what they leave out, and the keys that set it",
        "price_per_device_hour": "run.price_per_device_hour, or that of the machine's file",
        "price_source": "where the price is from",
    }
    return FactList("the whole run", [Fact(RUN[key][0].strip(), [text]) for key, text in how.items() if found.get(key)])


def scaling(estimate: Estimate) -> FactList:
    """Step time of each degree over that of the least one that may fit."""
    rows = [row for row in estimate.weak_scaling if row.verdict != "does_not_fit"]
    least = f"step of dp {rows[0].dp:,}, the least that does not exceed the memory, / step of dp N" if rows else ""
    facts = [
        Fact("dp N", ["this plan with data parallelism N and N / dp of its batch: each device has the same work"]),
        Fact("efficiency", [least or "not stated, since no degree fits"]),
        *[Fact(f"dp {row.dp:,}", [f"{seconds(rows[0].step_s)} / {seconds(row.step_s)}"]) for row in rows],
    ]
    return FactList("weak scaling", facts)
