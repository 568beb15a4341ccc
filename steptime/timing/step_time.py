"""Seconds of a step: parts to chunks, chunks through the pipeline, then gradients, optimizer and parameters."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from steptime import fsdp
from steptime.base.num import Num, minimum, tree_depth
from steptime.base.recent import Recent
from steptime.base.records import record
from steptime.cost.comm import FREE, CommCost, collective
from steptime.cost.overlap import hidden_s
from steptime.cost.part_seconds import Context
from steptime.cost.rates import Rates
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.job.mesh import Group, group
from steptime.job.parts import Part
from steptime.memory.states import States, partial_gradients, stage_states
from steptime.schedule import Walk, walk
from steptime.schedule.orders import described
from steptime.schedule.sharded import AroundActions
from steptime.schedule.stage_exchange import exchange_of
from steptime.timing.data_parallel import DataParallel, data_parallel
from steptime.timing.node_waits import on_device, with_the_host
from steptime.timing.optimizer import OptimizerStep, optimizer_step
from steptime.timing.part_times import ChunkTime, PartTimes, Pricing, chunk_times, layer_gap_s, part_times, pricing

STRAGGLER = 0.0036
"""Longer step per doubling of the replicas that wait for each other: Llama 3 70B bf16 takes 1.8 % longer on 2,048 H100 than on 64
at fixed work per GPU, and modeled communication hardly grows there (NVIDIA/dgxc-benchmarking v25.02). Other series
of the same source grow by 0.7 % (Nemotron 15B fp8) and 2.5 % (Nemotron 340B fp8) per doubling."""


class Reduce(NamedTuple):
    """Equal all-reduces of a step: their number, the bytes of one [B], its cost."""

    calls: Num
    bytes: Num
    cost: CommCost

    @property
    def time_s(self) -> Num:
        """Seconds of all of them."""
        return self.calls * self.cost.time_s


@record
class StepTime:
    """All components of a step's time."""

    assembly: Assembly
    pricing: Pricing
    parts: PartTimes
    chunks: list[list[ChunkTime]]
    """Of every chunk, [stage][virtual chunk]."""
    states: list[States]
    boundary_costs: list[CommCost]
    """One send over each boundary between stage r and r + 1; the last is the wrap-around of virtual chunks."""
    walk: Walk
    """One pass of the pipeline."""
    dp: DataParallel | None
    """None under FSDP, whose collectives run inside the micro-batches."""
    fsdp: fsdp.StepSeconds | None
    embedding_reduce: Reduce
    """The tied embedding's gradient between first and last stage."""
    norm_reduce: Reduce
    """Gradients that sequence parallelism leaves partial, on the busiest stage."""
    optimizer: OptimizerStep
    straggler_s: float

    @property
    def job(self) -> Job:
        """The job."""
        return self.assembly.job

    @property
    def context(self) -> Context:
        """Rates and tiers that price its ops."""
        return self.pricing.context

    @property
    def rates(self) -> Rates:
        """Sustained rates of the device."""
        return self.pricing.context.rates

    @cached_property
    def busiest(self) -> int:
        """The stage with the most work."""
        return busiest(self.walk)

    @property
    def passes(self) -> int:
        """How often the pipeline runs in a step: it drains each time."""
        return self.job.parallelism.pipeline_passes

    @property
    def fsdp_exposed_s(self) -> float:
        """FSDP's exposed communication."""
        return self.fsdp.exposed_s if self.fsdp else 0.0

    @property
    def after_s(self) -> float:
        """The work after the pipeline, and the parameter gather before it."""
        dp = self.dp.reduce_exposed_s + self.dp.gather_exposed_s if self.dp else 0.0
        seconds: float = dp + self.embedding_reduce.time_s + self.norm_reduce.time_s + self.optimizer_s
        return seconds

    @property
    def optimizer_s(self) -> float:
        """The optimizer, on the device and on the host."""
        seconds: float = self.optimizer.time_s
        return seconds

    @cached_property
    def step_s(self) -> float:
        """The step."""
        return self.passes * self.walk.makespan_s + self.fsdp_exposed_s + self.after_s + self.straggler_s


PART_TIMES: Recent[PartTimes] = Recent(16)
"""Seconds of the last parts: pipelines, data parallelism and batches of a sweep share them."""


def step_time(assembly: Assembly) -> StepTime:
    """The timing of one job."""
    job, priced = assembly.job, pricing(assembly.job)
    of = (assembly.parts, job.performance, priced.context, layer_gap_s(job, priced.context))
    times = PART_TIMES.of(of, lambda: part_times(assembly, priced))
    return time_parts(assembly, priced, times.under(assembly))


def time_parts(assembly: Assembly, priced: Pricing, parts: PartTimes, *, free_sends: bool = False) -> StepTime:
    """The timing of a job whose parts take this long: the pipeline's walk and the work around it.

    `free_sends`: sends take no time, for an ablation.
    """
    job = assembly.job
    sharded = fsdp.applies(job)
    states = fsdp.states(assembly) if sharded else stage_states(assembly)
    chunks = chunk_times(assembly, parts)
    costs = assembly.once(boundary_costs, priced)
    send_s = [0.0] * max(len(costs), 1) if free_sends else sends(job, costs)
    walked = run_pipeline(job, chunks, send_s)
    fsdp_time = fsdp_seconds(assembly, priced, parts, walked, (chunks, send_s)) if sharded else None
    inside_s = job.parallelism.pipeline_passes * walked.makespan_s + (fsdp_time.exposed_s if fsdp_time else 0.0)
    return StepTime(
        assembly,
        priced,
        parts,
        chunks,
        states,
        costs,
        walked,
        None if sharded else data_parallel(assembly, states, priced.dp_tiers, walked, chunks),
        fsdp_time,
        assembly.once(embedding_reduce, priced),
        norm_reduce(assembly, priced, busiest(walked)),
        optimizer_step(assembly, priced.context, chunks[0][0].backward_s),
        straggler_s(job, inside_s),
    )


def busiest(walked: Walk) -> int:
    """The stage with the most work."""
    return walked.busy_s.index(max(walked.busy_s))


# --- pipeline ----------------------------------------------------------------------------------------------------------


def boundary_costs(assembly: Assembly, priced: Pricing) -> list[CommCost]:
    """One send over each boundary between stage r and r + 1; the last is the wrap-around of virtual chunks."""
    p, n_dcs = assembly.job.parallelism, priced.n_dcs
    if p.pp == 1:
        return []
    inner, distance = priced.context.tiers[:-1], group(p, "pp", stage=1, n_dcs=n_dcs).first
    around = send(assembly, priced, group(p, "embedding", n_dcs=n_dcs))
    if not any(distance % tier.size for tier in inner):  # every stage fills whole domains
        return [*[send(assembly, priced, group(p, "pp", n_dcs=n_dcs))] * (p.pp - 1), around]
    known: dict[tuple[Num, ...], CommCost] = {}

    def cost(stage: int) -> CommCost:
        """Computed once for all pairs with the same position in the domains of every tier."""
        at = tuple([stage * distance % tier.size for tier in inner])
        if at not in known:
            known[at] = send(assembly, priced, group(p, "pp", stage=stage, n_dcs=n_dcs))
        return known[at]

    return [*map(cost, range(p.pp - 1)), around]


def send(assembly: Assembly, priced: Pricing, pair: Group) -> CommCost:
    """One stage's output to the next: its own tokens with sp; split over tp and gathered again where the profile does so."""
    job, whole, tiers = assembly.job, assembly.boundary_bytes, priced.context.tiers
    if not job.software.comm.scatter_gather_sends or job.sp:
        return collective("send_recv", whole, pair, tiers)
    sent = collective("send_recv", whole / job.parallelism.tp, pair, tiers)
    gathered = collective("all_gather", whole, priced.context.groups["tp"], tiers)
    latency, bandwidth = sent.latency_s + gathered.latency_s, sent.bandwidth_s + gathered.bandwidth_s
    return CommCost(latency, bandwidth, sent.tier, sent.time_s + gathered.time_s, sent.algorithm)


def sends(job: Job, costs: list[CommCost]) -> list[float]:
    """Seconds that one send over each boundary delays its receiver; a share of overlap takes that much off."""
    share = job.software.overlap.pp
    return [cost.time_s - hidden_s(cost.time_s, 0.0, share) for cost in costs] or [0.0]


def run_pipeline(
    job: Job, chunks: list[list[ChunkTime]], send_s: list[float], around: AroundActions | None = None
) -> Walk:
    """Walk the schedule, with what FSDP adds (`around`). Without overlap a send blocks its sender (isend, irecv, then wait)."""
    p = job.parallelism
    split = described(job.schedule).split
    weight_s = [[chunk.weight_s for chunk in stage] for stage in chunks] if split else None
    return walk(
        job.schedule,
        p.pp,
        p.vpp,
        job.schedule_microbatches,
        [[chunk.forward_s for chunk in stage] for stage in chunks],
        [[chunk.backward_s - chunk.weight_s * split for chunk in stage] for stage in chunks],
        send_s,
        weight_s=weight_s,
        blocking=job.software.overlap.pp is not True,
        group=p.microbatch_group_sz,
        around=around,
        exchange=exchange_of(job.software.layout.stage_exchange, job.schedule, p.vpp),
    )


# --- around the pipeline -----------------------------------------------------------------------------------------------


def fsdp_seconds(
    assembly: Assembly,
    priced: Pricing,
    parts: PartTimes,
    walked: Walk,
    pipeline: tuple[list[list[ChunkTime]], list[float]],
) -> fsdp.StepSeconds:
    """FSDP's groups of one micro-batch, and their exposed communication.

    Under a pipeline that is by how much longer the schedule takes with them; `pipeline`: its chunks and sends.
    """
    if assembly.job.parallelism.pp == 1:
        tiers, alone = priced.dp_tiers, on_device(parts)
        replay_s = layer_replays_s(alone, assembly.chunks[0])
        directions = fsdp.group_seconds(assembly, tiers, alone.of, replay_s, priced.context.rates)
        return with_the_host(assembly, parts, fsdp.step_seconds(assembly, tiers, directions))
    inside = pipeline_fsdp(assembly, priced, parts)
    longer = run_pipeline(assembly.job, *pipeline, inside)
    stage = busiest(walked)
    exposed = max(0.0, longer.makespan_s - walked.makespan_s)  # two sums of equal times differ in the last digit
    return fsdp.StepSeconds(*inside.passes(stage), inside.times * exposed, inside.calls(stage))


def pipeline_fsdp(assembly: Assembly, priced: Pricing, parts: PartTimes) -> fsdp.PipelineSeconds:
    """What FSDP adds to the actions of a pipeline."""
    replays = [layer_replays_s(parts, chunk) for chunk in assembly.chunks]
    return fsdp.PipelineSeconds(assembly, priced.dp_tiers, parts.of, replays, priced.context.rates)


def layer_replays_s(parts: PartTimes, chunk: Chunk) -> dict[Part, float]:
    """What recomputation adds to the backward of a layer of each kind in a chunk, spread over all of them."""
    counts: dict[Part, int] = {}
    for part, count in chunk.runs:
        counts[part] = counts.get(part, 0) + count
    replay_s = dict.fromkeys(counts, 0.0)
    for times, part, work in parts.replays(chunk):
        replay_s[part] += times * work.seconds
    return {part: seconds / counts[part] for part, seconds in replay_s.items()}


def embedding_reduce(assembly: Assembly, priced: Pricing) -> Reduce:
    """All-reduce of the tied embedding's gradient between first and last stage."""
    job = assembly.job
    if not assembly.embedding_copied or assembly.job.model.lora is not None:
        return Reduce(0.0, 0.0, FREE)
    elements = assembly.shard.vocab * job.model.hidden_sz / job.parallelism.tp
    bytes_ = 1.0 * elements * job.software.state_bytes.gradients
    over = group(job.parallelism, "embedding", n_dcs=priced.n_dcs)
    return Reduce(1.0, bytes_, collective("all_reduce", bytes_, over, priced.context.tiers))


def norm_reduce(assembly: Assembly, priced: Pricing, stage: int) -> Reduce:
    """All-reduces over tp of the gradients that sequence parallelism leaves partial on a stage."""
    if not assembly.job.sp:
        return Reduce(0.0, 0.0, FREE)
    calls, bytes_ = partial_gradients(assembly, stage, one_by_one=fsdp.applies(assembly.job))
    return Reduce(calls, bytes_, collective("all_reduce", bytes_, priced.context.groups["tp"], priced.context.tiers))


def straggler_s(job: Job, inside_s: Num) -> Num:
    """Seconds that synchronized replicas wait for the slowest of them, of `inside_s` spent in the pipeline."""
    p = job.parallelism
    replicas = minimum(p.dp * p.cp, -(-p.devices // job.machine.devices_per_node))
    return STRAGGLER * (1.0 * tree_depth(replicas)) * inside_s
