"""Tables that are computed on request: parameters, throughput, GEMMs, collectives."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from steptime import fsdp
from steptime.base.rows import CollectiveRow, Flops, GemmRow, Params, Throughput, Time
from steptime.cost import compute
from steptime.cost.comm import CommCost
from steptime.cost.compute import Pass
from steptime.cost.rates import peak_dtype
from steptime.cost.work import CommCall, Work
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.job.mesh import shown_axis
from steptime.job.parts import Part
from steptime.model.ops import Gemm, Param
from steptime.model.segments import find_segments, replayed, rerun
from steptime.schedule import placement
from steptime.timing.data_parallel import Calls, DataParallel, Reduction
from steptime.timing.orthogonalize import calls_of_step
from steptime.timing.step_time import StepTime

PassName = Literal["forward", "dgrad", "wgrad"]


def params(assembly: Assembly) -> Params:
    """Parameter counts, vocabulary unpadded, before TP."""
    model = assembly.job.model
    padding = (assembly.shard.vocab - model.vocab_sz) * model.hidden_sz

    def count(tensors: list[Param]) -> int:
        return int(sum(p.elements for p in tensors) - sum(p.vocab for p in tensors) * padding)

    layers = {part: count(part.params) for part in assembly.kinds}
    every = [*assembly.runs, (assembly.head, 1)]
    idle = sum(n * (p.elements - p.active) for part, n in every for p in part.params)
    embedding, head = count(assembly.embedding.params), count(assembly.head_params)

    def parameters(chunk: Chunk) -> int:
        inside = sum(n * layers[part] for part, n in chunk.runs)
        first = embedding if chunk.embedding or assembly.holds_copy(chunk) else 0
        return inside + first + (head if chunk.head else 0)

    per_stage = [sum(map(parameters, chunks)) for chunks in assembly.stages]
    copies = 0
    if assembly.embedding_copied:
        tied = model.vocab_sz * model.hidden_sz if model.tie_embeddings else 0
        copies = tied + (embedding if model.mtp else 0)
    total = sum(per_stage) - copies
    return Params(total, total - int(idle), per_stage, copies)


def throughput(job: Job, step_s: float, flops: Flops) -> Throughput:
    """Rates relative to the dense peak of the GEMMs' precision."""
    devices = job.parallelism.devices
    dtype = peak_dtype(job.machine.accelerator, job.software.precision)
    peak = job.machine.accelerator.peak_flops[dtype]
    tokens = job.data.gbs * job.data.seqlen / step_s
    per_device = step_s * devices
    return Throughput(
        tokens_per_s=tokens,
        tokens_per_s_per_device=tokens / devices,
        model_tflops_per_device=flops.model_per_step / per_device / 1e12,
        mfu=flops.model_per_step / per_device / peak,
        mfu_full_attention=flops.model_per_step_full_attention / per_device / peak,
        hfu=flops.hardware_per_step / per_device / peak,
        peak_flops_used=peak,
        peak_dtype=dtype,
    )


def gemms(timing: StepTime) -> list[GemmRow]:
    """Every projection: per call, on the first stage that runs it, in forward and both backward products.

    `count_per_step` is how often one device of that stage runs it in a step, recomputation included. Stages whose chunks hold the
    same layers repeat the same rows, so each different stage is listed once. Where layers differ, a name says the kind's number.
    """
    rows: list[GemmRow] = []
    for stage in stages_alike(timing.assembly):
        chunks = timing.assembly.stages[stage]
        for part, layers in layer_counts(chunks).items():
            rows += layer_gemms(timing, part, stage, layers)
        rows += layer_gemms(timing, timing.assembly.head, stage, 1) if any(c.head for c in chunks) else []
    return rows


def stages_alike(assembly: Assembly) -> dict[int, list[int]]:
    """The first of each set of stages that hold the same layers and ends, and all of that set."""
    found: dict[tuple[object, ...], list[int]] = {}
    for stage, chunks in enumerate(assembly.stages):
        ends = any(c.embedding for c in chunks), any(c.head for c in chunks)
        found.setdefault((*layer_counts(chunks).items(), *ends), []).append(stage)
    return {stages[0]: stages for stages in found.values()}


def layer_gemms(timing: StepTime, part: Part, stage: int, layers: int) -> list[GemmRow]:
    """The projections of one kind of layer on a stage."""
    replays = [entry for chunk in timing.assembly.stages[stage] for entry in timing.parts.replays(chunk)]
    times = sum(times for times, of, _ in replays if of is part)
    rows = [
        row
        for op in products(part)
        for row in gemm_rows(op, stage, float(layers), times if is_replayed(timing, part, op) else 0.0, timing)
    ]
    return [row._replace(name=kind_label(timing.assembly, part) + row.name) for row in rows]


def kind_label(assembly: Assembly, part: Part) -> str:
    """Prefix of the names of a kind of layer where there are several."""
    kinds = assembly.kinds
    return f"{part.kind}{kinds.index(part) + 1}." if len(kinds) > 1 and part in kinds else ""


def layer_counts(chunks: Iterable[Chunk]) -> dict[Part, int]:
    """Number of layers of each kind in some chunks."""
    counts: dict[Part, int] = {}
    for part, count in (run for chunk in chunks for run in chunk.runs):
        counts[part] = counts.get(part, 0) + count
    return counts


def products(part: Part) -> list[Gemm]:
    """The matrix products of a part."""
    return [op for op in part.ops if isinstance(op, Gemm)]


def is_replayed(timing: StepTime, part: Part, op: Gemm) -> bool:
    """Whether recomputation repeats this projection."""
    job, ops = timing.job, part.ops
    early, in_head = job.software.activations.recompute_stops_early, part is timing.assembly.head
    if job.recompute.granularity == "full" and not in_head:
        rerun_ops = replayed(ops, 0, len(ops) - 1, stops_early=early)
        return any(ops[i] is op for i in rerun_ops)
    modules = timing.assembly.head_modules if in_head else job.recompute.modules
    segments = find_segments(ops, modules, compiled=job.software.kernels.compile != "none")
    return any(ops[i] is op for s in segments for i in rerun(ops, s, stops_early=early))


def gemm_rows(op: Gemm, stage: int, times: float, replayed: float, timing: StepTime) -> list[GemmRow]:
    """Forward, dgrad and wgrad of one projection."""
    rates = timing.pricing.context.rates
    traffic = compute.gemm_traffic(op, rates)
    done = compute.forward(op, rates, {})
    dgrad, wgrad = compute.gemm_backward(op, rates)
    m = timing.job.microbatches
    return [
        gemm_row(op, stage, "forward", (times + replayed) * m, (op.m, op.n, op.k), traffic[0], done),
        gemm_row(op, stage, "dgrad", times * m, (op.m, op.k, op.n), traffic[1], dgrad),
        gemm_row(op, stage, "wgrad", times * m, (op.k, op.n, op.m), traffic[2], wgrad),
    ]


def gemm_row(
    op: Gemm,
    stage: int,
    pass_: PassName,
    count: float,
    shape: tuple[float, float, float],
    moved: tuple[float, float, float],
    done: Pass,
) -> GemmRow:
    """One row; `moved` is bytes of input, weight (or the other operand) and output."""
    m, n, k = (float(x) for x in shape)
    count *= float(op.count)
    per_call = 1.0 / float(op.count)
    return GemmRow(
        op.name, stage, pass_, count, m, n, k,
        done.flops * per_call, done.compute_s * per_call,
        moved[0] * per_call, moved[1] * per_call, moved[2] * per_call,
        done.bandwidth_s * per_call, done.time_s * per_call,
    )  # fmt: skip


def collectives(timing: StepTime, time: Time) -> list[CollectiveRow]:
    """Every kind of collective of a step, as the busiest stage sees it; sends by boundary."""
    rows = [*part_rows(timing), *pipeline_rows(timing, time.parts_s.get("pp_comm", 0.0))]
    if timing.dp:
        rows += data_parallel_rows(timing.dp)
    if timing.fsdp:
        shown = time.parts_s.get("dp_comm", 0.0)
        rows += fsdp.rows(timing.assembly, timing.pricing.dp_tiers, timing.fsdp.calls, shown, row)
    reduces = (
        ("norm gradients", "tp", timing.job.parallelism.tp, timing.norm_reduce),
        ("embedding gradients", "embedding", 2, timing.embedding_reduce),
    )
    for name, axis, ranks, of in reduces:
        if of.calls:
            rows.append(row(name, "all_reduce", axis, ranks, of.bytes, of.calls, of.cost, of.time_s))
    rows += [
        row(c.name, c.kind, shown_axis(c.group), c.group.ranks, c.bytes, c.count, c.cost, c.count * c.cost.time_s)
        for c in calls_of_step(timing.job, timing.assembly.stage_params[timing.busiest], timing.context)
    ]
    return [r for r in rows if r.ranks > 1]


def row(
    name: str, kind: str, axis: str, ranks: float, bytes_: float, count: float, cost: CommCost, exposed: float
) -> CollectiveRow:
    """One row of the table."""
    call_s = (cost.latency_s, cost.bandwidth_s, cost.time_s)
    return CollectiveRow(name, kind, axis, int(ranks), cost.tier, float(bytes_), count, *call_s, exposed)


def part_rows(timing: StepTime) -> list[CollectiveRow]:
    """Tensor- and context-parallel calls of the parts on every stage that has them, equal ones summed."""
    m, groups, assembly = timing.job.microbatches, timing.pricing.context.groups, timing.assembly
    counts: dict[tuple[str, str], float] = {}
    calls: dict[tuple[str, str], CommCall] = {}
    stage = timing.busiest
    chunks = {c.depth: c for c in (*assembly.stages[stage], assembly.chunks[0], assembly.chunks[-1])}
    for chunk in chunks.values():
        for times, part, work in works_of(timing, chunk):
            if chunk.stage != stage and part in assembly.kinds:
                continue
            for call in (call for call in work.calls if call.axis != "host"):
                key = (call.name, call.kind)
                counts[key] = counts.get(key, 0.0) + times * m * float(call.count)
                calls.setdefault(key, call)
    return [
        row(c.name, c.kind, c.axis, float(groups[c.axis].ranks), c.bytes, n, c.cost, n * c.exposed_s / c.count)
        for n, c in ((counts[key], call) for key, call in calls.items())
    ]


def works_of(timing: StepTime, chunk: Chunk) -> list[tuple[float, Part, Work]]:
    """The work of one micro-batch in a chunk: repetitions, part, work of one direction or of a recomputation."""
    parts = timing.parts
    both = [
        (n, part, work) for n, part in parts.works(chunk) for work in (parts.of[part].forward, parts.of[part].backward)
    ]
    return both + parts.replays(chunk)


def pipeline_rows(timing: StepTime, exposed: float) -> list[CollectiveRow]:
    """One row per stage boundary: activations forward and gradients backward, for each micro-batch of each chunk.

    The exposed seconds are the busiest stage's, shared out by what each boundary sends.
    """
    p, m = timing.job.parallelism, timing.job.microbatches
    costs = timing.boundary_costs
    counts = [0.0] * len(costs)
    for here, there in pairwise(placement(timing.job.schedule, p.pp, p.vpp)):
        if here.stage != there.stage:
            boundary = here.stage if there.stage == (here.stage + 1) % p.pp else there.stage
            counts[boundary] += 2.0 * m
    total = sum(count * cost.time_s for count, cost in zip(counts, costs, strict=True))
    rows = []
    for boundary, (count, cost) in enumerate(zip(counts, costs, strict=True)):
        if count:
            name, share = f"stage {boundary} to {(boundary + 1) % p.pp}", exposed * count * cost.time_s / total
            rows.append(row(name, "send_recv", "pp", 2, timing.assembly.boundary_bytes, count, cost, share))
    return rows


def data_parallel_rows(dp: DataParallel) -> list[CollectiveRow]:
    """Buckets of the stage that sends the most, equal ones joined; exposed seconds divided in proportion to their time."""
    rows: list[CollectiveRow] = []
    for calls, exposed in ((dp.reductions, dp.reduce_exposed_s), (dp.gathers, dp.gather_exposed_s)):
        stages = [[call for chunk in stage for call in chunk] for stage in calls]
        mine = stages[sends_most(calls)] if stages else []
        total = seconds_of(mine)
        for name, bytes_ in dict.fromkeys((call.name, call.bytes) for call in mine):
            alike = [call for call in mine if call.name == name and call.bytes == bytes_]
            share = exposed * seconds_of(alike) / total if total else 0.0
            one, count = alike[0], float(len(alike) * alike[0].times)
            rows.append(row(one.name, one.kind, shown_axis(one.over), one.over.ranks, bytes_, count, one.cost, share))
    return rows


def sends_most(calls: Calls) -> int:
    """The stage whose calls, by chunk, take longest one after another."""
    seconds = [seconds_of([call for chunk in stage for call in chunk]) for stage in calls]
    return seconds.index(max(seconds))


def seconds_of(calls: list[Reduction]) -> float:
    """Total seconds of serial calls."""
    return float(sum(call.cost.time_s * call.times for call in calls))
