"""Memory of every stage compared with the device's: fits, tight, does not fit."""

from __future__ import annotations

from functools import cached_property
from math import exp
from typing import NamedTuple

from steptime import fsdp
from steptime.answer.interval import memory_interval
from steptime.base.num import Num, maximum, new_row, where
from steptime.base.rows import Memory, StageBuffer, StageMemory, Verdict
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.allocator_blocks import further_ends
from steptime.memory.buffers import all_of_any_batch, at_peak, cublas_workspace_bytes, stage_buffers, step_change
from steptime.memory.overhead import StreamPools, overhead, reserved_bytes
from steptime.memory.stages import PeakMoment, peak_moments
from steptime.memory.states import States, stage_states
from steptime.timing.step_time import StepTime, step_time


def stage_memory(assembly: Assembly, states: list[States]) -> Memory:
    """Every stage at its peak, and the verdict: needs from `least_bytes` to `most_bytes`, compared with the device's capacity.

    does_not_fit: `least_bytes` exceeds the capacity, or the host cannot hold its states. fits: `most_bytes` does not exceed it.
    tight: in between.
    """
    job = assembly.job
    rows = stage_rows(assembly, states)
    worst = max(rows, key=lambda row: row.reserved_bytes)
    span = memory_interval(job)
    low, high = (worst.reserved_bytes * exp(end) for end in (span.low, span.high))
    found = Memory(
        stages=rows,
        peak_allocated_bytes=max(row.allocated_bytes for row in rows),
        peak_reserved_bytes=worst.reserved_bytes,
        peak_reserved_bytes_p10=low,
        peak_reserved_bytes_p90=high,
        overhead_bytes=overhead(job),
        capacity_bytes=job.machine.accelerator.usable_memory_bytes,
        verdict="tight",
        fits=False,
        worst_stage=worst.stage,
        host_bytes=host_bytes(job, states),
        host_capacity_bytes=job.machine.host.memory_bytes if job.machine.host else None,
    )
    verdict: Verdict = "fits" if found.most_bytes <= found.capacity_bytes else "tight"
    if found.least_bytes > found.capacity_bytes or found.host_overflows:
        verdict = "does_not_fit"
    return found._replace(verdict=verdict, fits=verdict == "fits")


class Candidate:
    """A job that is judged by its memory first: most of those that are tried do not fit, and their step is not timed."""

    def __init__(self, job: Job) -> None:
        self.job, self.assembly = job, Assembly(job)
        states = fsdp.states(self.assembly) if fsdp.applies(job) else stage_states(self.assembly)
        self.peaks = stage_memory(self.assembly, states)

    @cached_property
    def timing(self) -> StepTime:
        """Its step."""
        return step_time(self.assembly)

    @property
    def step_s(self) -> float:
        """Seconds of its step."""
        return self.timing.step_s


def host_bytes(job: Job, states: list[States]) -> float:
    """Bytes of states in host memory of the node that holds most, all of whose devices run the stage with the largest states."""
    devices = min(job.machine.devices_per_node, job.parallelism.devices)
    return float(devices * max(state.host_bytes for state in states))


def stage_rows(assembly: Assembly, states: list[States]) -> list[StageMemory]:
    """Every stage at its peak, in a micro-batch or in the optimizer step."""
    job = assembly.job
    walked = fsdp.peak_moments(assembly) if fsdp.applies(job) else peak_moments(assembly)
    first, known = assembly.first_alike, assembly.once(all_of_any_batch, states)
    around = {
        stage: around_peak(job, states[stage], stage_buffers(assembly, stage, states[stage], known[stage]))
        for stage in set(first)
    }
    kind = PoolKind(pooled=fsdp.applies(job) and fsdp.pooled(job), expandable=job.software.buffers.expandable_segments)
    return [
        stage_row(stage, state, around[first[stage]], moment, kind)
        for stage, (state, moment) in enumerate(zip(states, walked, strict=True))
    ]


def between_steps(memory: Memory, assembly: Assembly, states: list[States]) -> Memory:
    """The memory including the unused ends of allocator blocks shared by small tensors, computed tensor by tensor."""
    first = assembly.first_alike
    ends = {stage: further_ends(assembly, stage, states[stage]).bytes for stage in set(first)}
    rows = [
        row._replace(persisting_bytes=row.persisting_bytes + ends[first[stage]])
        for stage, row in enumerate(memory.stages)
    ]
    return memory._replace(stages=rows)


class AroundPeak(NamedTuple):
    """What a stage holds besides the worst moment of its micro-batches [B]; equal stages share it."""

    buffers: Num
    """Buffers allocated at that moment."""
    staying: Num
    """Buffers that stay between steps."""
    updating: PeakMoment
    """The optimizer step."""
    not_yet: tuple[Num, ...]
    """Of the first step's micro-batches: what is not allocated yet, to be taken off one by one."""


def around_peak(job: Job, state: States, buffers: list[StageBuffer]) -> AroundPeak:
    """That of one stage with its buffers."""
    staying = sum([one.bytes for one in buffers if one.stays])
    return AroundPeak(at_peak(buffers), staying, in_step(job, state, buffers), not_yet(job, state, buffers))


def moment_bytes(job: Job, state: States) -> Num:
    """Bytes of the moments of a stage, which are allocated in the first optimizer step."""
    return state.optimizer_bytes - state.kept_masters - job.software.state_bytes.master * state.owned


def in_step(job: Job, state: States, buffers: list[StageBuffer]) -> PeakMoment:
    """The optimizer step: no activations; the update's temporaries, without the buffers that exist only during micro-batches."""
    return PeakMoment(0.0, update_temporaries(job, state) + step_change(buffers), "optimizer step")


def update_temporaries(job: Job, state: States) -> Num:
    """Temporaries of an update: copies of everything it updates (foreach), or of the tensor it works on."""
    states = job.software.states
    foreach = 1.0 * (states.optimizer == "adamw" and states.optimizer_impl == "foreach")
    return foreach * moment_bytes(job, state) / 2.0 + state.update_bytes


def not_yet(job: Job, state: States, buffers: list[StageBuffer]) -> tuple[Num, ...]:
    """What the first step's micro-batches lack of later ones': moments, what is left from a previous step.

    In a single one's forward the workspace of autograd's thread too.
    """
    software, p = job.software, job.parallelism
    lacking = moment_bytes(job, state), at_peak([one for one in buffers if one.carried])
    if (
        p.pp > 1
        or not job.single_microbatch
        or software.compute_capability == 0.0
        or software.buffers.cublas_handles < 2
    ):
        return lacking
    return *lacking, cublas_workspace_bytes(software.buffers.cublas_workspace, software.compute_capability)


class PoolKind(NamedTuple):
    """How the caching allocator works for a job."""

    pooled: bool
    """FSDP's streams have memory of their own."""
    expandable: bool
    """Segments are expandable."""


def stream_pools(walked: PeakMoment, updating: PeakMoment, to_come: Num) -> StreamPools:
    """What FSDP's streams hold. A pipeline's walk does not tell gathered parameters from other transients."""
    most = where(walked.most_bytes == 0.0, walked.activations_bytes + walked.transient_bytes, walked.most_bytes)
    return StreamPools(to_come, maximum(most, updating.transient_bytes), walked.gathers_bytes)


def stage_row(stage: int, state: States, around: AroundPeak, walked: PeakMoment, kind: PoolKind) -> StageMemory:
    """One stage's states, buffers, activations and transients, at its peak in a micro-batch or in the optimizer step."""
    at_peak_bytes, staying, updating, lacking = around
    moment = walked.worse(updating)
    gradients = state.gradients_bytes - moment.grads_not_yet_allocated_bytes
    fixed = state.params_bytes + gradients + state.optimizer_bytes + at_peak_bytes
    moving = moment.activations_bytes + moment.transient_bytes
    states = state.params_bytes + state.gradients_bytes + state.optimizer_bytes
    first = states + at_peak_bytes + walked.added_bytes
    for bytes_ in lacking:
        first = first - bytes_
    pools = stream_pools(walked, updating, moment.grads_not_yet_allocated_bytes) if kind.pooled else None
    row = (
        stage,
        state.params_bytes,
        gradients,
        state.optimizer_bytes,
        moment.activations_bytes,
        moment.transient_bytes + at_peak_bytes,
        fixed + moving,
        reserved_bytes(fixed, moving, pools, expandable=kind.expandable),
        moment.op,
        at_peak_bytes,
        states + staying,
        maximum(first, states + at_peak_bytes + updating.transient_bytes),
    )
    return new_row(StageMemory, row)
