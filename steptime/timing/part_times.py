"""Seconds of every part of a job for one micro-batch, and of the model chunks that hold them."""

from dataclasses import field
from math import inf
from typing import Any, NamedTuple

from steptime.base.num import Num, maximum
from steptime.base.records import record
from steptime.cost import compute
from steptime.cost.host import graphed_kernels, wait_for_host
from steptime.cost.network import network, one_link
from steptime.cost.nodes import forward_nodes
from steptime.cost.pace import slower_rates, slower_tiers
from steptime.cost.part_seconds import Context, PartTime, forward_work, part_time
from steptime.cost.rates import rates
from steptime.cost.work import Work
from steptime.fsdp.of_job import applies
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly, Chunk, content_of, take
from steptime.job.job import Job
from steptime.job.mesh import Group, GroupAxis, group
from steptime.job.parts import Part
from steptime.memory.part_memories import groups_of
from steptime.model.graphs import captured
from steptime.model.offload import copied_bytes, groups
from steptime.model.ops import Comm, Gemm, Move, Op
from steptime.model.segments import MOE, Segment, find_segments, kept_names, replayed
from steptime.software.calibration import slowdown
from steptime.software.efficiency import efficiency
from steptime.software.timing_settings import Graphs

GRAPHED_GAP = 0.5
"""Share of a layer's launch gaps that remains when its kernels are launched from CUDA graphs (assumed: the host no longer delays
the device, the pauses between dependent kernels remain)."""
COMPILED_GAP = 0.5
"""Share of them that remains when torch.compile fuses the element-wise kernels of a block (assumed: of about 60 kernels of an
eager Llama block, forward and backward, about 30 remain)."""

HALVES = frozenset({"mamba", "attention", "mlp", "experts"})
"""Kinds of layer with one norm and one residual, which launch half of the kernels of a layer with two (assumed)."""


class Pricing(NamedTuple):
    """Rates and tiers that price the kernels and collectives of a job."""

    context: Context
    """Rates, the groups of collectives among the layers, tiers."""
    dp_tiers: tuple[Tier, ...]
    """The tiers as data-parallel collectives see them."""
    n_dcs: int


def pricing(job: Job) -> Pricing:
    """Rates of the device and tiers of the network, slowed by a calibration where there is one."""
    p, software = job.parallelism, job.software
    n_dcs = job.cross_dc.n_dcs if job.cross_dc else 1
    slow = slowdown(job.performance.calibration)
    tiers = slower_tiers(network(job.machine, job.cross_dc, p.devices), slow)
    dp_tiers = one_link(group(p, "shards", n_dcs=n_dcs), tiers) if software.comm.node_links == "one" else tiers
    axes: tuple[GroupAxis, ...] = ("tp", "cp", "cp_a2a", "cp_p2p", "tp_cp", "ep", "etp", "ep_etp")
    ranks: dict[str, Group] = {axis: group(p, axis, n_dcs=n_dcs) for axis in axes}
    found = slower_rates(rates(job.machine.accelerator, software, job.microbatches), slow)
    if applies(job):  # which adds up shards, or whole gradients (fsdp.seconds.summed_bytes)
        found = found._replace(accumulate_bytes=0.0)
    link = job.machine.accelerator.host_bytes_per_s or inf
    woven = woven_share(job, job.data.gbs)
    sharded = applies(job)
    context = Context(found, software, ranks, tiers, p.tp, job.data.microbatch_sz, link, woven, sharded)
    return Pricing(context, dp_tiers, n_dcs)


def woven_share(job: Job, gbs: Num) -> Num:
    """`Context.woven` of a step of `gbs` sequences: of gbs / (dp * microbatch_sz) micro-batches all but the first pp.

    dp * pp is devices / (tp * cp), so the share is the same for every pipeline on them.
    """
    p = job.parallelism
    return maximum(0.0, 1.0 - p.devices * job.data.microbatch_sz / (p.tp * p.cp * gbs))


@record
class PartTimes:
    """Seconds of one micro-batch through the embedding, the head, and a layer of each kind."""

    assembly: Assembly
    of: dict[Part, PartTime]
    whole_replays: dict[Part, Work]
    """By kind of layer, the forward that recomputation runs again: all of it, or up to the last tensor that backward needs."""
    known: dict[Any, "ChunkTime"] = field(default_factory=dict, repr=False)
    """`alone` and `together` so far, shared by all assemblies of the parts."""

    def under(self, assembly: Assembly) -> "PartTimes":
        """The same parts in chunks of another assembly."""
        return PartTimes(assembly, self.of, self.whole_replays, self.known)

    @property
    def embedding(self) -> PartTime:
        """The embedding."""
        return self.of[self.assembly.embedding]

    @property
    def head(self) -> PartTime:
        """Final norm, head and loss."""
        return self.of[self.assembly.head]

    @property
    def layer(self) -> PartTime:
        """A layer, of the first kind where there are several."""
        return self.of[self.assembly.kinds[0]]

    def alone(self, part: Part) -> "ChunkTime":
        """A part by itself, without recomputation."""
        if part not in self.known:
            forward, backward, _ = self.of[part]
            self.known[part] = ChunkTime(forward.seconds, backward.seconds, backward.weight_s)
        return self.known[part]

    def together(self, chunk: Chunk) -> "ChunkTime":
        """A chunk, with recomputation."""
        contents = content_of(chunk, self.assembly.job.recompute.n_layers)
        if contents not in self.known:
            self.known[contents] = chunk_time(self, chunk)
        return self.known[contents]

    def works(self, chunk: Chunk) -> list[tuple[float, Part]]:
        """The parts of a chunk and how often each occurs in it."""
        parts = [(float(count), part) for part, count in chunk.runs]
        parts += [(1.0, self.assembly.embedding)] if chunk.embedding else []
        return [*parts, (1.0, self.assembly.head)] if chunk.head else parts

    def replays(self, chunk: Chunk) -> list[tuple[float, Part, Work]]:
        """What recomputation repeats in one backward of a chunk: times, the kind of layer, the work.

        Of layers that are checkpointed together all but the last run the whole forward, since the next needs their outputs.
        """
        assembly = self.assembly
        in_head = [(1.0, assembly.head, self.of[assembly.head].replay)] if chunk.head and assembly.head_modules else []
        return self.layer_replays(chunk) + in_head

    def layer_replays(self, chunk: Chunk) -> list[tuple[float, Part, Work]]:
        """The chunk's parts that are layers."""
        job = self.assembly.job
        recompute = job.recompute
        if recompute.granularity == "none":
            return []
        if recompute.granularity == "selective":
            return [(float(count), part, self.of[part].replay) for part, count in chunk.runs]
        size = recompute.n_layers[chunk.depth]
        if recompute.method == "every":
            ones = [layers[0][0] for times, layers in groups_of(chunk.runs, 1) for _ in range(times)][size - 1 :: size]
            return [(float(ones.count(part)), part, self.whole_replays[part]) for part in dict.fromkeys(ones)]
        runs = take(chunk.runs, size)[0] if recompute.method == "block" else chunk.runs
        if not job.software.activations.recompute_stops_early or recompute.method == "block":
            size = 1
        last: dict[Part, float] = {}
        inner: dict[Part, float] = {}
        for times, layers in groups_of(runs, size):
            for at, (part, count) in enumerate(layers):
                ends = 1 if at == len(layers) - 1 else 0
                last[part] = last.get(part, 0.0) + times * ends
                inner[part] = inner.get(part, 0.0) + times * (count - ends)
        found = [(times, part, self.whole_replays[part]) for part, times in last.items()]
        found += [(times, part, self.of[part].forward) for part, times in inner.items()]
        return [entry for entry in found if entry[0]]


def part_times(assembly: Assembly, priced: Pricing) -> PartTimes:
    """Price every part once."""
    job, context = assembly.job, priced.context
    gap_s, compiled = layer_gap_s(job, context), job.software.kernels.compile != "none"
    of = {assembly.embedding: part_time(assembly.embedding.ops, assembly.embedding.sizes, context, [])}
    for part in (assembly.head, *assembly.kinds):
        modules = assembly.head_modules if part is assembly.head else job.recompute.modules
        segments = find_segments(part.ops, modules, compiled=compiled)
        away = away_bytes(assembly, part, segments, whole=job.recompute.granularity == "full")
        of[part] = part_time(part.ops, part.sizes, context, segments, part_gap_s(gap_s, assembly, part), away)
    whole = job.recompute.granularity == "full"
    replays = {part: whole_replay(part, of[part], context) for part in assembly.kinds if whole}
    return PartTimes(assembly, of, replays)


def away_bytes(assembly: Assembly, part: Part, segments: list[Segment], *, whole: bool) -> Num:
    """Bytes that a part sends to the host in forward and receives in backward. `whole`: a layer is run again from its input."""
    share = float(assembly.job.performance.activation_offload or 0.0)
    if not share or part not in assembly.kinds:
        return copied_bytes(groups(part.ops, part.x, segments, assembly.offload_modules(part)), part.sizes)
    return share * (part.x.bytes if whole else sum([part.sizes[name] for name in kept_names(part.ops, segments)]))


EXPERT_STREAMS = 4.0
"""Grouped products are one cuBLAS call per expert, over so many streams (NVIDIA/TransformerEngine
transformer_engine/common/util/multi_stream.cpp, get_num_compute_streams)."""
DENSE_LAUNCHES, MLP_LAUNCHES = 15.0, 3.0
"""Kernels of the dense layers on which the profile's gap was fitted, and those of their MLP (up, activation, down): a Llama layer
with tensor and sequence parallelism has 11, and 4 collectives."""


def more_launches(ops: list[Op], graphs: Graphs, layers: float) -> Num:
    """Launch gaps of a part of `layers` layers with two norms over those of as many dense ones, which the profile states.

    Whatever the attention, a kernel of the experts adds the gaps of one of a dense layer, and those of its MLP are left out. Of
    kernels launched by graphs `GRAPHED_GAP` remains.
    """
    inside = captured(ops, graphs)
    each = [launches(op) for op in ops]
    left = [n * GRAPHED_GAP if i in inside else n for i, n in enumerate(each)]
    experts = [i for i, op in enumerate(ops) if op.role in MOE]
    if not experts:
        return sum(left) / sum(each)
    others = [i for i, op in enumerate(ops) if op.role not in MOE]
    share = sum([left[i] for i in others]) / sum([each[i] for i in others])
    dense = DENSE_LAUNCHES * layers
    return (share * (dense - MLP_LAUNCHES * max(1.0, layers)) + sum([left[i] for i in experts])) / dense


def launches(op: Op) -> Num:
    """Kernels of an op, forward, that have a gap of their own; those of one expert after another run without a pause."""
    if isinstance(op, Gemm):
        called = 1.0 + (op.count - 1.0) / EXPERT_STREAMS if op.grouped else op.kernels
        return called + op.forward_cast.kernels if op.recipe and op.recipe.of_experts else called
    if isinstance(op, Comm):
        return 1.0 if op.kind is not None else 0.0
    if not isinstance(op, Move) or op.looped:
        return 1.0
    return op.kernels if op.gaps is None else op.gaps


def layer_gap_s(job: Job, context: Context) -> float:
    """Launch gaps of a layer, forward and backward [s]: the profile's, longer with a recipe's kernels, shorter when compiled."""
    of = job.software.recipe
    recipe = 1.0 + (efficiency().recipe_gap - 1.0) * of.gaps if of else 1.0
    compiled = COMPILED_GAP if job.software.kernels.compile != "none" else 1.0
    return job.software.timing.layer_gap_s * (context.rates.slowness * recipe * compiled)


def part_gap_s(gap_s: Num, assembly: Assembly, part: Part) -> Num:
    """The launch gaps of a part, from those of a layer with two norms."""
    layers = gap_layers(assembly, part)
    return gap_s * layers * more_launches(part.ops, assembly.job.software.timing.cuda_graphs, layers) if layers else 0.0


def gap_layers(assembly: Assembly, part: Part) -> float:
    """Layers with two norms in a part; of the ends only multi-token prediction has any."""
    if part is assembly.embedding:
        return 0.0
    return float(assembly.job.model.mtp) if part is assembly.head else 0.5 if part.kind in HALVES else 1.0


def whole_replay(part: Part, times: PartTime, context: Context) -> Work:
    """The forward of a layer run again: all of it, or up to the last tensor that backward needs."""
    ops = part.ops
    rerun = replayed(ops, 0, len(ops) - 1, stops_early=context.software.activations.recompute_stops_early)
    passes = [compute.forward(op, context.rates, part.sizes) for op in ops]
    work = forward_work(ops, passes, context, rerun)
    work.launch_s = (times.forward.launch_s - times.forward.host_s) * len(rerun) / len(ops)
    work.kernels -= graphed_kernels(ops, [(done,) for done in passes], context.software, rerun)
    nodes = forward_nodes(ops, context.software.timing, rerun, context.tp, sharded=context.sharded)
    wait_for_host(work, context.software, context.tp, nodes)
    return work


class ChunkTime(NamedTuple):
    """Seconds of one micro-batch through one chunk."""

    forward_s: Num
    backward_s: Num
    """Includes recomputation."""
    weight_s: Num
    """Part of it that computes gradients of weights."""


def chunk_times(assembly: Assembly, times: PartTimes) -> list[list[ChunkTime]]:
    """Seconds of every chunk, [stage][virtual chunk]; equal chunks are summed once."""
    return assembly.by_chunk(times.together)


def chunk_time(times: PartTimes, chunk: Chunk) -> ChunkTime:
    """Seconds of one chunk."""
    forward_s, backward_s, weight_s = plain_time(times, chunk)
    return ChunkTime(forward_s, backward_s + replay_s(times, chunk), weight_s)


def plain_time(times: PartTimes, chunk: Chunk) -> ChunkTime:
    """Seconds of one chunk without recomputation."""
    forward: Num = 0
    backward: Num = 0
    weight: Num = 0
    for count, part in times.works(chunk):
        forward_s, backward_s, weight_s = times.alone(part)
        forward, backward, weight = (
            forward + count * forward_s,
            backward + count * backward_s,
            weight + count * weight_s,
        )
    return ChunkTime(forward, backward, weight)


def replay_s(times: PartTimes, chunk: Chunk) -> Num:
    """Seconds that recomputation adds to a backward of one chunk."""
    return sum([n * work.seconds for n, _, work in times.replays(chunk)])
