"""Seconds of a step: parts to chunks, chunks through the pipeline, then gradients, optimizer and parameters."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from steptime import fsdp
from steptime.base.rows import Pipeline, Time
from steptime.cost import compute
from steptime.cost.comm import CommCost, collective, network, one_link, tree_depth
from steptime.cost.pace import slower_rates, slower_tiers
from steptime.cost.parts import Context, PartTime, Work, forward_work, part_time
from steptime.cost.rates import rates
from steptime.job.assembly import Assembly, Chunk, Part
from steptime.job.mesh import Group, group
from steptime.memory.states import PartialGradients, partial_gradients, shard_ranks, stage_states, state_bytes
from steptime.model.segments import find_segments, replayed
from steptime.schedule import Walk, in_flight, walk
from steptime.software.calibration import slowdown
from steptime.software.efficiency import efficiency
from steptime.timing.data_parallel import DataParallel, data_parallel
from steptime.timing.optimizer import optimizer_s, quantise_bytes_per_weight
from steptime.timing.step_parts import step_parts

STRAGGLER = 0.0036
"""Longer step per doubling of the replicas that wait for each other: Llama 3 70B bf16 takes 1.8 % longer on 2,048 H100 than on 64
at fixed work per GPU, and modelled communication grows by next to nothing there (NVIDIA/dgxc-benchmarking v25.02). Other series
of the same source grow by 0.7 % (Nemotron 15B fp8) and 2.5 % (Nemotron 340B fp8) per doubling."""

GRAPHED_GAP = 0.5
"""What is left of a layer's launch gaps when its kernels are launched from CUDA graphs (assumed: the host no longer holds the
device up, the pauses between dependent kernels stay)."""


class ChunkTime(NamedTuple):
    """Seconds of one micro-batch through one chunk, and how often each part's work is in it."""

    forward_s: float
    backward_s: float
    replay_s: float


class StepTime:
    """The timing of one job. Seconds of the step are there at once; parts and rows when asked for."""

    def __init__(self, assembly: Assembly) -> None:
        """Price the parts, walk the pipeline, add what follows it."""
        self.assembly = assembly
        self.job = job = assembly.job
        p = job.parallelism
        self.n_dcs = job.cross_dc.n_dcs if job.cross_dc else 1
        slow = slowdown(job.performance.calibration)
        self.tiers = slower_tiers(network(job.machine, job.cross_dc, p.devices), slow)
        shards = group(p, "shards", n_dcs=self.n_dcs)
        self.dp_tiers = one_link(shards, self.tiers) if job.software.comm.node_links == "one" else self.tiers
        self.rates = slower_rates(rates(job.machine.accelerator, job.software, job.microbatches), slow)
        self.tp_group = group(p, "tp", n_dcs=self.n_dcs)
        groups = {"tp": self.tp_group, "cp": group(p, "cp", n_dcs=self.n_dcs)}
        self.context = Context(self.rates, job.software, groups, self.tiers, p.tp)
        self.embedding, self.head = self.timed(assembly.embedding), self.timed(assembly.head)
        gap_s = job.software.timing.layer_gap_s * self.gap_factor
        self.block = self.timed(assembly.block, job.recompute.modules, gap_s)
        self.states = fsdp.states(assembly) if fsdp.applies(job) else stage_states(assembly)
        self.known_chunks: dict[tuple[int, bool, bool, int], ChunkTime] = {}
        self.chunk_times = [[self.chunk_time(c) for c in chunks] for chunks in assembly.stages]
        self.forward_s = [[c.forward_s for c in stage] for stage in self.chunk_times]
        self.backward_s = [[c.backward_s for c in stage] for stage in self.chunk_times]
        self.walk = self.run_pipeline(self.sends)
        self.fsdp_exposed_s = self.fsdp_exposed()
        self.step_s = self.walk.makespan_s + self.fsdp_exposed_s + self.after_s + self.straggler_s

    def timed(self, part: Part, modules: frozenset[str] = frozenset(), gap_s: float = 0.0) -> PartTime:
        """One part of one micro-batch."""
        return part_time(part.ops, part.sizes, self.context, find_segments(part.ops, modules), gap_s)

    @property
    def gap_factor(self) -> float:
        """A layer's launch gaps over the profile's."""
        software = self.job.software
        recipe = efficiency().recipe_gap if software.recipe else 1.0
        return self.rates.slowness * recipe * (GRAPHED_GAP if software.timing.cuda_graphs else 1.0)

    @cached_property
    def whole_replay(self) -> Work:
        """The forward of a block run again: all of it, or up to the last tensor that backward needs."""
        ops = self.assembly.block.ops
        again = replayed(ops, 0, len(ops) - 1, stops_early=self.job.software.activations.recompute_stops_early)
        passes = [compute.forward(op, self.rates, self.assembly.block.sizes) for op in ops]
        work = forward_work(ops, passes, self.context, again)
        work.launch_s = self.block.forward.launch_s * len(again) / len(ops)
        return work

    def replays(self, chunk: Chunk) -> list[tuple[float, Work]]:
        """What recomputation repeats in one backward of a chunk: (times, work)."""
        plan = self.job.recompute
        if plan.granularity == "none":
            return []
        if plan.granularity == "selective":
            return [(float(chunk.layers), self.block.replay)]
        count = plan.n_layers[chunk.depth]
        layers = min(count, chunk.layers) if plan.method == "block" else chunk.layers
        if not self.job.software.activations.recompute_stops_early or plan.method == "block" or count <= 1:
            return [(float(layers), self.whole_replay)]
        groups = -(-layers // count)
        return [(float(groups), self.whole_replay), (float(layers - groups), self.block.forward)]

    def works(self, chunk: Chunk) -> list[tuple[float, PartTime]]:
        """The parts of a chunk and how often each stands in it."""
        parts = [(float(chunk.layers), self.block)]
        parts += [(1.0, self.embedding)] if chunk.embedding else []
        return [*parts, (1.0, self.head)] if chunk.head else parts

    def chunk_time(self, chunk: Chunk) -> ChunkTime:
        """Seconds of one chunk; alike chunks are summed once."""
        plan = self.job.recompute.n_layers
        key = (chunk.layers, chunk.embedding, chunk.head, plan[chunk.depth] if plan else 0)
        if key not in self.known_chunks:
            self.known_chunks[key] = self.sum_chunk(chunk)
        return self.known_chunks[key]

    def sum_chunk(self, chunk: Chunk) -> ChunkTime:
        """Seconds of one chunk."""
        works = self.works(chunk)
        forward = sum(times * part.forward.seconds for times, part in works)
        backward = sum(times * part.backward.seconds for times, part in works)
        replay = sum(times * work.seconds for times, work in self.replays(chunk))
        return ChunkTime(forward, backward + replay, replay)

    # --- pipeline ------------------------------------------------------------------------------------------------------

    @cached_property
    def boundary_costs(self) -> list[CommCost]:
        """One send over each boundary between stage r and r + 1; the last is the wrap-around of virtual chunks."""
        p = self.job.parallelism
        if p.pp == 1:
            return []
        pairs = [group(p, "pp", stage=r, n_dcs=self.n_dcs) for r in range(p.pp - 1)]
        pairs.append(group(p, "embedding", n_dcs=self.n_dcs))
        return [self.send(pair) for pair in pairs]

    def send(self, pair: Group) -> CommCost:
        """One stage's output to the next: its own tokens with sp; split over tp and gathered again where the profile does so."""
        whole = self.assembly.boundary_bytes
        if not self.job.software.comm.scatter_gather_sends or self.job.sp:
            return collective("send_recv", whole, pair, self.tiers)
        sent = collective("send_recv", whole / self.context.tp, pair, self.tiers)
        gathered = collective("all_gather", whole, self.tp_group, self.tiers)
        latency, bandwidth = sent.latency_s + gathered.latency_s, sent.bandwidth_s + gathered.bandwidth_s
        return CommCost(latency, bandwidth, sent.tier, sent.time_s + gathered.time_s, sent.algorithm)

    @cached_property
    def sends(self) -> list[float]:
        """Seconds that one send over each boundary delays its receiver; a share of overlap takes that much off."""
        share = self.job.software.overlap.pp
        shown = 1.0 if isinstance(share, bool) or share is None else 1.0 - share
        return [cost.time_s * shown for cost in self.boundary_costs] or [0.0]

    def run_pipeline(self, sends: list[float]) -> Walk:
        """Walk the schedule. Without overlap a send holds its sender too (batched isend and irecv, waited for)."""
        job, p = self.job, self.job.parallelism
        blocking = job.software.overlap.pp is not True
        return walk(
            job.schedule, p.pp, p.vpp, job.microbatches, self.forward_s, self.backward_s, sends, blocking=blocking
        )

    @cached_property
    def busiest(self) -> int:
        """The stage with the most work."""
        busy = self.walk.busy_s
        return busy.index(max(busy))

    @cached_property
    def pipeline(self) -> Pipeline:
        """Bubble and in-flight counts."""
        p, w = self.job.parallelism, self.walk
        free = self.run_pipeline([0.0] * len(self.sends)) if p.pp > 1 else w
        bubble = free.makespan_s - free.busy_s[self.busiest] if p.pp > 1 else 0.0
        counts = in_flight(self.job.schedule, p.pp, p.vpp, self.job.microbatches)
        return Pipeline(self.job.schedule, p.pp, self.job.microbatches, bubble, w.idle_fraction, counts)

    # --- after the pipeline --------------------------------------------------------------------------------------------

    @cached_property
    def dp(self) -> DataParallel | None:
        """Data-parallel collectives of the step; FSDP has its own, inside the micro-batches."""
        if fsdp.applies(self.job):
            return None
        return data_parallel(self.assembly, self.states, self.dp_tiers, self.walk, self.forward_s, self.backward_s)

    @cached_property
    def embedding_reduce(self) -> CommCost:
        """All-reduce of the tied embedding's gradient between first and last stage."""
        p = self.job.parallelism
        if not self.assembly.tied_copy:
            return collective("all_reduce", 0.0, group(p, "pp")._replace(ranks=1), self.tiers)
        return collective("all_reduce", self.embedding_grad_bytes, group(p, "embedding", n_dcs=self.n_dcs), self.tiers)

    @cached_property
    def embedding_grad_bytes(self) -> float:
        """Bytes of the embedding's main gradient on one device."""
        elements = self.assembly.shard.vocab * self.job.model.hidden_sz / self.job.parallelism.tp
        return float(elements) * state_bytes(self.job).gradients

    @cached_property
    def norm_grads(self) -> PartialGradients:
        """All-reduces of the gradients that sequence parallelism leaves partial, on the busiest stage."""
        return partial_gradients(self.assembly, self.busiest, one_by_one=fsdp.applies(self.job))

    @cached_property
    def norm_reduce(self) -> CommCost:
        """One of them, over tp."""
        over = self.tp_group if self.job.sp else self.tp_group._replace(ranks=1)
        return collective("all_reduce", self.norm_grads.bytes, over, self.tiers)

    @property
    def norm_reduce_s(self) -> float:
        """All of them."""
        return float(self.norm_grads.calls * self.norm_reduce.time_s)

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer on the stage with the most parameters, and of quantising the updated weights."""
        ranks = shard_ranks(self.job) if self.job.zero_level >= 1 else 1
        held = max(sum(self.assembly.local_params(c) for c in chunks) for chunks in self.assembly.stages)
        kept = held / ranks if self.job.zero_level >= 2 else held
        layers = max(sum(c.layers for c in chunks) for chunks in self.assembly.stages)
        quantised = layers * self.assembly.block.n_quantised * quantise_bytes_per_weight(self.job)
        return optimizer_s(self.job, held / ranks, kept, self.rates.bytes_per_s) + quantised / self.rates.bytes_per_s

    @cached_property
    def after_s(self) -> float:
        """What follows the pipeline, and the parameter gather that precedes it."""
        dp = (self.dp.reduce_exposed_s + self.dp.gather_exposed_s) if self.dp else 0.0
        return dp + float(self.embedding_reduce.time_s) + self.norm_reduce_s + self.optimizer_s

    @cached_property
    def straggler_s(self) -> float:
        """Seconds that synchronised replicas wait for the slowest of them."""
        p = self.job.parallelism
        replicas = min(p.dp * p.cp, -(-p.devices // self.job.machine.devices_per_node))
        return STRAGGLER * float(tree_depth(replicas)) * (self.walk.makespan_s + self.fsdp_exposed_s)

    @cached_property
    def fsdp_times(self) -> tuple[list[fsdp.CommSeconds], list[fsdp.CommSeconds]]:
        """Groups of one micro-batch's forward and backward."""
        chunk = self.assembly.chunks[0]
        replay = sum(times * work.seconds for times, work in self.replays(chunk)) / max(chunk.layers, 1)
        return fsdp.group_seconds(
            self.assembly, self.dp_tiers, (self.embedding, self.block, self.head), replay, self.rates
        )

    def fsdp_exposed(self) -> float:
        """Seconds of FSDP's communication that compute does not hide, over all micro-batches."""
        if not fsdp.applies(self.job):
            return 0.0
        return self.job.microbatches * fsdp.micro_batch_exposed(self.assembly, self.dp_tiers, self.fsdp_times)

    # --- parts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def time(self) -> Time:
        """The step's parts, on the busiest stage: they sum to the step."""
        return step_parts(self)

    @cached_property
    def hardware_flops(self) -> float:
        """FLOPs that all devices run in a step, recomputation included."""
        p = self.job.parallelism
        total = 0.0
        for chunk in self.assembly.chunks:
            total += sum(times * (part.forward.flops + part.backward.flops) for times, part in self.works(chunk))
            total += sum(times * work.flops for times, work in self.replays(chunk))
        return total * self.job.microbatches * p.tp * p.cp * p.dp
