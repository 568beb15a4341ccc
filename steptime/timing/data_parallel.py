"""Gradient reduction and parameter gathering over the data-parallel group: bytes, and the seconds that they add to a step."""

from collections.abc import Callable, Mapping
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from steptime.base.num import Num, maximum, new_row
from steptime.cost.comm import Collective, CommCost
from steptime.cost.overlap import contention, hidden_s
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.job.mesh import Group, GroupAxis, group
from steptime.memory.states import Bucket, States
from steptime.model.ops import Kind
from steptime.schedule import Walk
from steptime.software.hidden_shares import Share
from steptime.software.performance import ITEMSIZE
from steptime.timing.part_times import ChunkTime

AXES: tuple[GroupAxis, ...] = ("shards", "replicas", "expert_shards")
"""Ranks that share one copy of the dense parameters, that hold the same shard, and that share one copy of an expert. Without
sharding there are no replicas (`job.rules`), so the shards are all ranks that reduce a gradient."""


class Reduction(NamedTuple):
    """One bucket's collective, made `times` times per step."""

    name: str
    kind: Kind
    bytes: float
    cost: CommCost
    times: int
    over: Group
    """The parameter group's ranks that take part."""


Calls: TypeAlias = list[list[list[Reduction]]]
"""[stage][virtual chunk][bucket]"""


class DataParallel(NamedTuple):
    """All data-parallel collectives of a step, and the seconds they add to it."""

    reductions: Calls
    gathers: Calls
    reduce_exposed_s: float
    gather_exposed_s: float
    group: Group


class PricedCalls(NamedTuple):
    """All data-parallel collectives of a step, nothing hidden."""

    reductions: Calls
    gathers: Calls
    reduce_s: float
    """Seconds of the stage with the most to reduce."""
    gather_s: float
    """Seconds of the one with the most to gather."""
    group: Group


class Network(NamedTuple):
    """The ranks that reduce together, and the tiers between them."""

    shards: Group
    replicas: Group
    tiers: tuple[Tier, ...]

    def costs(self, kind: Kind) -> Callable[[Num], CommCost]:
        """Seconds of a bucket by its bytes; with replicas, plus an all-reduce of the reduced shards between them.

        megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync (num_distributed_optimizer_instances > 1).
        """
        alone = Collective(kind, self.shards, self.tiers)
        if kind not in {"reduce_scatter", "all_reduce"} or self.replicas.ranks <= 1:
            return alone.cost
        left = self.shards.ranks if kind == "reduce_scatter" else 1.0
        copies = Collective("all_reduce", self.replicas, self.tiers)

        def both(bytes_: Num) -> CommCost:
            cost, between = alone.cost(bytes_), copies.cost(bytes_ / left)
            latency, bandwidth = cost.latency_s + between.latency_s, cost.bandwidth_s + between.bandwidth_s
            return CommCost(latency, bandwidth, between.tier, cost.time_s + between.time_s, cost.algorithm)

        return both


def data_parallel(
    assembly: Assembly,
    states: list[States],
    tiers: tuple[Tier, ...],
    walk: Walk,
    chunks: list[list[ChunkTime]],
) -> DataParallel:
    """Price a step's gradient reductions and parameter gathers and overlap them with the pipeline's walk.

    Level 2 of ZeRO keeps only a shard of the gradients, so it reduces every micro-batch.
    """
    job = assembly.job
    times = job.microbatches if job.zero_level == 2 else 1
    found = collectives(assembly, states, tiers, times) if times > 1 else assembly.once(collectives, states, tiers)
    reductions, gathers, reduce_s, gather_s, over = found
    share, slowed = job.software.overlap.dp, contention(over, tiers)
    late_s = late_gather_s = 0.0
    if share is True:
        late_s = exposed_reduction(reductions, walk) + repeated(reductions, chunks, times)
        late_gather_s = exposed_gather(gathers, walk, chunks)
    reduce_s = exposed(reduce_s, late_s, share, slowed)
    if job.software.comm.sharded_gather != "broadcast":
        gather_s = exposed(gather_s, late_gather_s, share, slowed)
    return DataParallel(reductions, gathers, reduce_s, gather_s, over)


def collectives(assembly: Assembly, states: list[States], tiers: tuple[Tier, ...], times: int = 1) -> PricedCalls:
    """Price a step's collectives, each reduction made `times` times.

    ZeRO 0: all-reduce of the gradients. ZeRO 1 and 2: reduce-scatter, and an all-gather of the parameters after the update
    (Rajbhandari et al. 2020, section 7.1). Bytes are the padded bucket's.
    """
    job = assembly.job
    nets = networks(job, tiers)
    reduced, gathered = [reduced_itemsize(job)] * len(states), [state.gathered_itemsize for state in states]
    reductions, gathers = priced("gradients", reduction(job), states, reduced, nets, times), Calls()
    if job.zero_level >= 1:
        gathers = priced("parameters", job.software.comm.sharded_gather, states, gathered, nets, 1)
    return PricedCalls(reductions, gathers, worst_stage(reductions), worst_stage(gathers), nets["dense"].shards)


def networks(job: Job, tiers: tuple[Tier, ...]) -> dict[str, Network]:
    """The ranks that reduce a parameter group, by the group's name."""
    n_dcs = job.cross_dc.n_dcs if job.cross_dc else 1
    over, copies, holders = (group(job.parallelism, axis, n_dcs=n_dcs) for axis in AXES)
    return {"dense": Network(over, copies, tiers), "expert": Network(holders, copies, tiers)}


def reduction(job: Job) -> Kind:
    """The collective that reduces gradients."""
    return job.software.comm.sharded_reduction if job.zero_level >= 1 else "all_reduce"


def reduced_itemsize(job: Job) -> float:
    """Bytes per element that a reduction sends."""
    return ITEMSIZE["fp32"] if job.software.comm.reduce_dtype == "fp32" else job.software.state_bytes.gradients


def exposed(comm_s: Num, late_s: Num, share: Share | None, slowed: Num) -> Num:
    """Seconds that the collectives of the stage with the most to send add to the step; `late_s`: those after compute is done."""
    return maximum(comm_s, late_s) - hidden_s(comm_s, maximum(0.0, comm_s - late_s), share, slowed)


def priced(
    name: str, kind: Kind, states: list[States], itemsizes: list[float], nets: Mapping[str, Network], times: int
) -> Calls:
    """One collective per bucket: [stage][virtual chunk][bucket]; equal buckets of a chunk are priced once.

    `itemsizes`: bytes per element, by stage; `nets`: who reduces a parameter group.
    """
    costs: dict[str, Callable[[Num], CommCost]] = {}
    rows: dict[tuple[int, float], list[Reduction]] = {}  # equal chunks share their buckets
    found: dict[int, list[list[Reduction]]] = {}  # equal stages share their states

    def call(bucket: Bucket, itemsize: float) -> Reduction:
        elements, of = bucket
        if of not in costs:
            costs[of] = nets[of].costs(kind)
        called, bytes_ = name if of == "dense" else f"{of} {name}", elements * itemsize
        return new_row(Reduction, (called, kind, bytes_, costs[of](bytes_), times, nets[of].shards))

    for state, itemsize in zip(states, itemsizes, strict=True):
        if id(state) in found:
            continue
        keys = [(id(buckets), itemsize) for buckets in state.buckets]
        for key, buckets in zip(keys, state.buckets, strict=True):
            if key not in rows:
                of = {bucket: call(bucket, itemsize) for bucket in set(buckets)}
                rows[key] = [of[bucket] for bucket in buckets]
        found[id(state)] = [rows[key] for key in keys]
    return [found[id(state)] for state in states]


def repeated(calls: Calls, chunks: list[list[ChunkTime]], times: int) -> float:
    """Seconds by which the reductions of every micro-batch but the last outlast the backward that they overlap."""
    late = 0.0
    if times == 1:
        return late
    for stage, seconds in zip(calls, chunks, strict=True):
        once = sum([call.cost.time_s for chunk in stage for call in chunk])
        late = max(late, once - sum([chunk.backward_s for chunk in seconds]))
    return late * (times - 1)


def worst_stage(calls: Calls) -> float:
    """Seconds of the stage with the most to send, nothing hidden."""
    distinct = {id(stage): stage for stage in calls}  # equal stages share their collectives
    sums = [sum([call.cost.time_s * call.times for chunk in stage for call in chunk]) for stage in distinct.values()]
    return max(sums, default=0.0)


def exposed_reduction(calls: Calls, walk: Walk) -> float:
    """Seconds by which reductions outlast the pipeline.

    A chunk's gradients are complete in its last micro-batch's backward. The first chunk of the first stage is cut into buckets,
    which become ready one after the other within that backward; every other chunk is one bucket, ready at its end, which later
    stages hide in the cool-down (megatron/core/distributed/distributed_data_parallel.py, bucket_size None where pp rank > 0).
    """
    late = 0.0
    for stage, chunks in enumerate(calls):
        ends = reduction_ends(chunks, stage, walk)  # in order: the last one ends last
        late = max(late, (ends[-1][0] if ends else 0.0) - walk.makespan_s)
    return late


def reduction_ends(chunks: list[list[Reduction]], stage: int, walk: Walk) -> list[tuple[float, Reduction]]:
    """When each reduction of a stage ends, counted from the pipeline's start, as its network runs them in order."""
    timed: list[tuple[float, float, Reduction]] = []
    for mine, start_s, end_s in zip(
        chunks, walk.last_backward_start[stage], walk.last_backward_end[stage], strict=True
    ):
        if len(mine) == 1:  # of most chunks
            timed.append((end_s, mine[0].cost.time_s, mine[0]))
        else:
            timed += ready_times(mine, start_s, end_s)
    timed.sort(key=itemgetter(0, 1))
    free_s, ends = 0.0, []
    for ready_s, seconds, call in timed:
        free_s = (ready_s if ready_s > free_s else free_s) + seconds  # noqa: FURB136  (max() takes twice as long)
        ends.append((free_s, call))
    return ends


def ready_times(calls: list[Reduction], start_s: float, end_s: float) -> list[tuple[float, float, Reduction]]:
    """When each bucket of one chunk is complete, and how long its reduction takes: spread over the last backward by size."""
    sizes, span_s = [call.bytes for call in calls], end_s - start_s
    total, done = sum(sizes), accumulate(sizes)
    return [(start_s + span_s * n / total, call.cost.time_s, call) for n, call in zip(done, calls, strict=True)]


def exposed_gather(calls: Calls, walk: Walk, times: list[list[ChunkTime]]) -> float:
    """Seconds by which parameter gathers hold up the first micro-batch's forward.

    A stage gathers its chunks in order from the start of the step, a bucket ahead of the forward that needs it: the embedding's
    bucket of the first stage overlaps nothing; later stages gather while they wait for their first input. Buckets are in backward
    order, so their gathers run from the last to the first (megatron/core/distributed/distributed_data_parallel.py:237), each
    issued once the previous one has arrived and forward has reached it (param_and_grad_buffer.py, finish_param_sync).
    """
    stages = [gather_ends(chunks, stage, walk, times) for stage, chunks in enumerate(calls)]
    return max([ends[-1][1] for ends in stages if ends], default=0.0)  # the last forward is the latest


def gather_ends(
    chunks: list[list[Reduction]], stage: int, walk: Walk, times: list[list[ChunkTime]]
) -> list[tuple[float, float, Reduction]]:
    """When each gather of a stage ends, from the step's start, how late its forward runs by then, and the gather."""
    end_s = late_s = 0.0
    ends: list[tuple[float, float, Reduction]] = []
    for mine, needed, chunk in zip(chunks, walk.first_forward_start[stage], times[stage], strict=True):
        spread = chunk.forward_s / len(mine) if mine else 0.0
        for i, call in enumerate(reversed(mine)):
            reached_s = late_s + needed + (i - 1) * spread if i else 0.0
            end_s = (reached_s if reached_s > end_s else end_s) + call.cost.time_s  # noqa: FURB136  (as above)
            late = end_s - needed - i * spread
            late_s = late if late > late_s else late_s  # noqa: FURB136
            ends.append((end_s, late_s, call))
    return ends
