"""Memory of every stage against what the device has: fits, tight, does not fit."""

from __future__ import annotations

from math import exp

from steptime import fsdp
from steptime.answer.interval import memory_interval
from steptime.base.rows import Memory, StageMemory, Verdict
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.overhead import overhead, reserved_bytes
from steptime.memory.stages import PeakMoment, peak_moments
from steptime.memory.states import States, state_bytes


def stage_memory(assembly: Assembly, states: list[States]) -> Memory:
    """Every stage at its peak, and the verdict on the worst.

    does_not_fit: allocated memory and overhead exceed what the device has to give. tight: only reserved memory does, or its
    90th percentile.
    """
    job = assembly.job
    rows = stage_rows(assembly, states)
    worst = max(rows, key=lambda row: row.reserved_bytes)
    over = overhead(job)
    capacity = job.machine.accelerator.usable_memory_bytes
    allocated = max(row.allocated_bytes for row in rows)
    outside = over.context + over.communicators
    span = memory_interval(job)
    low, high = (worst.reserved_bytes * exp(end) for end in (span.low, span.high))
    verdict: Verdict = "fits" if max(worst.reserved_bytes, high) + outside <= capacity else "tight"
    if allocated + outside > capacity:
        verdict = "does_not_fit"
    fits = verdict == "fits"
    return Memory(rows, allocated, worst.reserved_bytes, low, high, over, capacity, verdict, fits, worst.stage)


def stage_rows(assembly: Assembly, states: list[States]) -> list[StageMemory]:
    """Every stage at its peak, in a micro-batch or in the optimizer step."""
    job = assembly.job
    walked = [fsdp.peak_moment(assembly)] if fsdp.applies(job) else peak_moments(assembly)
    walked = [moment.worse(in_step(job, state)) for moment, state in zip(walked, states, strict=True)]
    return [stage_row(i, state, moment) for i, (state, moment) in enumerate(zip(states, walked, strict=True))]


def in_step(job: Job, state: States) -> PeakMoment:
    """The optimizer step: no activations, but the temporaries of an update that does not work in place."""
    moments = state_bytes(job).moments
    owned = state.optimizer_bytes * moments / (moments + state_bytes(job).master)
    return PeakMoment(0.0, job.software.states.optimizer_temp_copies * owned / 2.0, "optimizer step")


def stage_row(stage: int, state: States, moment: PeakMoment) -> StageMemory:
    """One stage's states, activations and transients."""
    gradients = state.gradients_bytes - moment.grads_not_yet_allocated_bytes
    fixed = state.params_bytes + gradients + state.optimizer_bytes
    moving = moment.activations_bytes + moment.transient_bytes
    return StageMemory(
        stage=stage,
        params_bytes=state.params_bytes,
        gradients_bytes=gradients,
        optimizer_bytes=state.optimizer_bytes,
        activations_bytes=moment.activations_bytes,
        transient_bytes=moment.transient_bytes,
        allocated_bytes=fixed + moving,
        reserved_bytes=reserved_bytes(fixed, moving),
        peak_op=moment.op,
    )
