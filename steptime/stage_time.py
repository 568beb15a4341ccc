"""Seconds of a step: parts to chunks, chunks through the pipeline, then gradients, optimizer and parameters."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from steptime import fsdp
from steptime.assembly import Assembly, Chunk, Part
from steptime.cost import compute
from steptime.cost.comm import CommCost, collective, network
from steptime.cost.compute import rates
from steptime.cost.optimizer import optimizer_s
from steptime.cost.parts import Context, PartTime, Work, forward_work, part_time
from steptime.data_parallel import DataParallel, data_parallel
from steptime.estimate import Pipeline, Time
from steptime.mesh import Group, group
from steptime.recompute import find_segments, replayed
from steptime.schedule import Walk, in_flight, walk
from steptime.states import shard_ranks, stage_states, state_bytes


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
        self.tiers = network(job.machine, job.cross_dc, p.devices)
        self.rates = rates(job.machine.accelerator, job.software)
        self.context = Context(self.rates, job.software, group(p, "tp", n_dcs=self.n_dcs), self.tiers, p.tp)
        self.embedding, self.head = self.timed(assembly.embedding), self.timed(assembly.head)
        self.block = self.timed(assembly.block, job.recompute.modules)
        self.states = fsdp.states(assembly) if fsdp.applies(job) else stage_states(assembly)
        self.known_chunks: dict[tuple[int, bool, bool, int], ChunkTime] = {}
        self.chunk_times = [[self.chunk_time(c) for c in chunks] for chunks in assembly.stages]
        self.forward_s = [[c.forward_s for c in stage] for stage in self.chunk_times]
        self.backward_s = [[c.backward_s for c in stage] for stage in self.chunk_times]
        self.walk = self.run_pipeline(self.sends)
        self.fsdp_exposed_s = self.fsdp_exposed()
        self.step_s = self.walk.makespan_s + self.fsdp_exposed_s + self.after_s

    def timed(self, part: Part, modules: frozenset[str] = frozenset()) -> PartTime:
        """One part of one micro-batch."""
        return part_time(part.ops, part.sizes, self.context, find_segments(part.ops, modules))

    @cached_property
    def whole_replay(self) -> Work:
        """The forward of a block run again: all of it, or up to the last tensor that backward needs."""
        ops = self.assembly.block.ops
        again = replayed(ops, 0, len(ops) - 1, stops_early=self.job.software.recompute_stops_early)
        passes = [compute.forward(op, self.rates, self.assembly.block.sizes) for op in ops]
        return forward_work(ops, passes, self.context, again)

    def replays(self, chunk: Chunk) -> list[tuple[float, Work]]:
        """What recomputation repeats in one backward of a chunk: (times, work)."""
        plan = self.job.recompute
        if plan.granularity == "none":
            return []
        if plan.granularity == "selective":
            return [(float(chunk.layers), self.block.replay)]
        count = plan.n_layers[chunk.depth]
        layers = min(count, chunk.layers) if plan.method == "block" else chunk.layers
        if not self.job.software.recompute_stops_early or plan.method == "block" or count <= 1:
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
        if not self.job.software.scatter_gather_sends or self.job.sp:
            return collective("send_recv", whole, pair, self.tiers)
        sent = collective("send_recv", whole / self.context.tp, pair, self.tiers)
        gathered = collective("all_gather", whole, self.context.tp_group, self.tiers)
        latency, bandwidth = sent.latency_s + gathered.latency_s, sent.bandwidth_s + gathered.bandwidth_s
        return CommCost(latency, bandwidth, sent.tier, sent.time_s + gathered.time_s, sent.algorithm)

    @cached_property
    def sends(self) -> list[float]:
        """Exposed seconds of one send over each boundary."""
        share = self.job.software.overlap.pp
        shown = 0.0 if share is True else 1.0 - float(share or 0.0)
        return [cost.time_s * shown for cost in self.boundary_costs] or [0.0]

    def run_pipeline(self, sends: list[float]) -> Walk:
        """Walk the schedule; sends hold up sender and receiver unless they overlap."""
        p = self.job.parallelism
        blocking = self.job.software.overlap.pp is not True
        return walk(
            self.job.schedule,
            p.pp,
            p.vpp,
            self.job.microbatches,
            self.forward_s,
            self.backward_s,
            sends,
            blocking=blocking,
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
        return data_parallel(self.assembly, self.states, self.tiers, self.walk, self.forward_s)

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
    def norm_grad_bytes(self) -> float:
        """Bytes of the gradients that sequence parallelism leaves partial: unsplit parameters of the busiest stage's blocks."""
        chunks = self.assembly.stages[self.busiest]
        block = sum(p.elements for p in self.assembly.block.params if not p.shard)
        ends = sum(p.elements for p in self.assembly.head.params if not p.shard) if any(c.head for c in chunks) else 0
        return float(block * sum(c.layers for c in chunks) + ends) * state_bytes(self.job).gradients

    @cached_property
    def norm_reduce(self) -> CommCost:
        """Their all-reduce over tp, once a step (megatron/core/distributed/finalize_model_grads.py)."""
        over = self.context.tp_group if self.job.sp else self.context.tp_group._replace(ranks=1)
        return collective("all_reduce", self.norm_grad_bytes, over, self.tiers)

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer on the stage with the most parameters."""
        ranks = shard_ranks(self.job) if self.job.zero_level >= 1 else 1
        held = max(sum(self.assembly.local_params(c) for c in chunks) for chunks in self.assembly.stages)
        kept = held / ranks if self.job.zero_level >= 2 else held
        return optimizer_s(self.job, held / ranks, kept, self.rates.bytes_per_s)

    @cached_property
    def after_s(self) -> float:
        """What follows the pipeline, and the parameter gather that precedes it."""
        dp = (self.dp.reduce_exposed_s + self.dp.gather_exposed_s) if self.dp else 0.0
        return dp + float(self.embedding_reduce.time_s) + float(self.norm_reduce.time_s) + self.optimizer_s

    @cached_property
    def fsdp_times(self) -> tuple[list[fsdp.CommSeconds], list[fsdp.CommSeconds]]:
        """Groups of one micro-batch's forward and backward."""
        chunk = self.assembly.chunks[0]
        replay = sum(times * work.seconds for times, work in self.replays(chunk)) / max(chunk.layers, 1)
        return fsdp.group_seconds(self.assembly, self.tiers, (self.embedding, self.block, self.head), replay)

    def fsdp_exposed(self) -> float:
        """Seconds of FSDP's communication that compute does not hide, over all micro-batches."""
        if not fsdp.applies(self.job):
            return 0.0
        prefetch = fsdp.options(self.assembly).prefetch
        return self.job.microbatches * sum(fsdp.exposed_s(groups, prefetch) for groups in self.fsdp_times)

    # --- parts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def time(self) -> Time:
        """The step's parts, on the busiest stage: they sum to the step."""
        m, stage = self.job.microbatches, self.busiest
        parts = dict.fromkeys(("gemm", "attention", "memory_bound", "recompute", "tp_comm"), 0.0)
        hidden = {"tp_comm": 0.0}
        for chunk in self.assembly.stages[stage]:
            for times, part in self.works(chunk):
                for work in (part.forward, part.backward):
                    add_work(parts, hidden, work, times * m)
            for times, work in self.replays(chunk):
                parts["recompute"] += times * m * (work.seconds - work.comm_s)
                add_comm(parts, hidden, work, times * m)
        parts["bubble"] = self.pipeline.bubble_s
        parts["pp_comm"] = (
            self.walk.makespan_s - self.walk.busy_s[stage] - parts["bubble"] if self.job.parallelism.pp > 1 else 0.0
        )
        self.add_after(parts, hidden)
        hidden = {name: seconds for name, seconds in hidden.items() if seconds}
        return Time(
            self.step_s,
            {name: seconds for name, seconds in parts.items() if seconds or name in {"gemm", "attention"}},
            hidden,
        )

    def add_after(self, parts: dict[str, float], hidden: dict[str, float]) -> None:
        """Data parallelism, embedding and optimizer."""
        parts["dp_comm"] = self.fsdp_exposed_s
        if self.dp:
            parts["dp_comm"] += self.dp.reduce_exposed_s + self.dp.gather_exposed_s
            stages = [calls[self.busiest] for calls in (self.dp.reductions, self.dp.gathers) if calls]
            total = sum(call.cost.time_s for stage in stages for chunk in stage for call in chunk)
            hidden["dp_comm"] = max(0.0, total - parts["dp_comm"])
        elif fsdp.applies(self.job):
            total = self.job.microbatches * sum(g.gather_s + g.reduce_s for groups in self.fsdp_times for g in groups)
            hidden["dp_comm"] = max(0.0, total - self.fsdp_exposed_s)
        parts["tp_comm"] += self.norm_reduce.time_s
        parts["embedding_comm"] = self.embedding_reduce.time_s
        parts["optimizer"] = self.optimizer_s

    @cached_property
    def hardware_flops(self) -> float:
        """FLOPs that all devices run in a step, recomputation included."""
        p = self.job.parallelism
        total = 0.0
        for chunk in self.assembly.chunks:
            total += sum(times * (part.forward.flops + part.backward.flops) for times, part in self.works(chunk))
            total += sum(times * work.flops for times, work in self.replays(chunk))
        return total * self.job.microbatches * p.tp * p.cp * p.dp


def add_work(parts: dict[str, float], hidden: dict[str, float], work: Work, times: float) -> None:
    """Add one direction of one part."""
    parts["gemm"] += times * work.gemm_s
    parts["attention"] += times * work.attention_s
    parts["memory_bound"] += times * work.memory_s
    add_comm(parts, hidden, work, times)


def add_comm(parts: dict[str, float], hidden: dict[str, float], work: Work, times: float) -> None:
    """Add its tensor-parallel communication."""
    parts["tp_comm"] += times * work.comm_s
    hidden["tp_comm"] += times * sum(call.hidden_s for call in work.calls)
