"""Gradient reduction and parameter gathering over the data-parallel group: what is sent, and what of it shows in the step."""

from __future__ import annotations

from typing import NamedTuple

from steptime.assembly import Assembly
from steptime.cost.comm import CommCost, collective
from steptime.cost.overlap import exposed_after
from steptime.machine import Tier
from steptime.mesh import Group, group
from steptime.ops import Kind
from steptime.schedule import Walk
from steptime.states import States, state_bytes


class Reduction(NamedTuple):
    """One bucket's collective on one stage, `count` times alike per step."""

    name: str
    kind: Kind
    stage: int
    virtual: int
    bytes: float
    cost: CommCost


class DataParallel(NamedTuple):
    """All data-parallel collectives of a step, and the seconds they add to it."""

    reductions: list[Reduction]
    gathers: list[Reduction]
    reduce_exposed_s: float
    gather_exposed_s: float
    group: Group


def data_parallel(
    assembly: Assembly, states: list[States], tiers: tuple[Tier, ...], walk: Walk, forward_s: list[list[float]]
) -> DataParallel:
    """Price a step's gradient reductions and parameter gathers and lay them beside the pipeline's walk.

    ZeRO 0: all-reduce of the gradients. ZeRO 1 and 2: reduce-scatter, and an all-gather of the parameters after the update
    (Rajbhandari et al. 2020, section 7.1). Bytes are the padded bucket's.
    """
    job = assembly.job
    over = group(job.parallelism, "dp_cp", n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)
    size = state_bytes(job)
    kind: Kind = "reduce_scatter" if job.zero_level else "all_reduce"
    reductions = priced("gradients", kind, states, size.gradients, over, tiers)
    gathers = priced("parameters", "all_gather", states, size.params, over, tiers) if job.zero_level else []
    share = job.software.overlap.dp
    reduce_s = exposed_reduction(assembly, reductions, walk) if share is True else worst_stage(reductions)
    gather_s = exposed_gather(assembly, gathers, walk, forward_s) if share is True else worst_stage(gathers)
    if share is not True and share is not None:
        reduce_s, gather_s = reduce_s * (1.0 - share), gather_s * (1.0 - share)
    return DataParallel(reductions, gathers, reduce_s, gather_s, over)


def priced(
    name: str, kind: Kind, states: list[States], itemsize: float, over: Group, tiers: tuple[Tier, ...]
) -> list[Reduction]:
    """One collective per bucket of every stage; equal buckets are priced once."""
    known: dict[float, CommCost] = {}
    calls = []
    for stage, state in enumerate(states):
        for virtual, buckets in enumerate(state.buckets):
            for elements in buckets:
                bytes_ = elements * itemsize
                if bytes_ not in known:
                    known[bytes_] = collective(kind, bytes_, over, tiers)
                calls.append(Reduction(name, kind, stage, virtual, bytes_, known[bytes_]))
    return calls


def of_stage(calls: list[Reduction], stage: int) -> list[Reduction]:
    """The calls of one stage."""
    return [call for call in calls if call.stage == stage]


def worst_stage(calls: list[Reduction]) -> float:
    """Seconds of the stage with the most to send, nothing hidden."""
    stages = {call.stage for call in calls}
    return max((sum(call.cost.time_s for call in of_stage(calls, stage)) for stage in stages), default=0.0)


def exposed_reduction(assembly: Assembly, calls: list[Reduction], walk: Walk) -> float:
    """Seconds by which reductions outlast the pipeline.

    A chunk's gradients are complete in its last micro-batch's backward. The first chunk of the first stage is cut into buckets,
    which become ready one after the other within that backward; every other chunk is one bucket, ready at its end, which later
    stages hide in the cool-down (megatron/core/distributed/distributed_data_parallel.py, bucket_size None where pp rank > 0).
    """
    exposed = 0.0
    for stage in range(assembly.job.parallelism.pp):
        timed = sorted(
            (ready, call.cost.time_s)
            for virtual in range(assembly.job.parallelism.vpp)
            for ready, call in ready_times([c for c in of_stage(calls, stage) if c.virtual == virtual], walk)
        )
        exposed = max(exposed, exposed_after([t[0] for t in timed], [t[1] for t in timed], walk.makespan_s))
    return exposed


def ready_times(calls: list[Reduction], walk: Walk) -> list[tuple[float, Reduction]]:
    """When each bucket of one chunk is complete: spread over the chunk's last backward by size."""
    if not calls:
        return []
    stage, virtual = calls[0].stage, calls[0].virtual
    start, end = walk.last_backward_start[stage][virtual], walk.last_backward_end[stage][virtual]
    total = sum(call.bytes for call in calls)
    timed, done = [], 0.0
    for call in calls:
        done += call.bytes
        timed.append((start + (end - start) * done / total, call))
    return timed


def exposed_gather(assembly: Assembly, calls: list[Reduction], walk: Walk, forward_s: list[list[float]]) -> float:
    """Seconds by which parameter gathers hold up the first micro-batch's forward.

    A stage gathers its chunks in order from the start of the step, a bucket ahead of the forward that needs it: the first bucket of
    the first stage has nothing to hide under; later stages gather while they wait for their first input.
    """
    delay = 0.0
    for stage in range(assembly.job.parallelism.pp):
        clock = 0.0
        for virtual in range(assembly.job.parallelism.vpp):
            mine = [call for call in of_stage(calls, stage) if call.virtual == virtual]
            if not mine:
                continue
            needed = walk.first_forward_start[stage][virtual]
            spread = forward_s[stage][virtual] / len(mine)
            for i, call in enumerate(mine):
                clock += call.cost.time_s
                delay = max(delay, clock - needed - i * spread)
    return delay
