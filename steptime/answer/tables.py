"""Rows that are computed when asked for: parameters, throughput, GEMMs, collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from steptime import fsdp
from steptime.base.rows import CollectiveRow, Flops, GemmRow, Params, Throughput
from steptime.cost import compute
from steptime.cost.comm import CommCost
from steptime.cost.compute import Pass
from steptime.cost.parts import CommCall
from steptime.cost.rates import peak_dtype
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.model.ops import Gemm
from steptime.model.segments import find_segments, replayed
from steptime.timing.data_parallel import Reduction

if TYPE_CHECKING:
    from steptime.timing.step_time import StepTime

PassName = Literal["forward", "dgrad", "wgrad"]


def params(assembly: Assembly) -> Params:
    """Parameter counts, vocabulary unpadded, before TP."""
    model = assembly.job.model
    padding = (assembly.shard.vocab - model.vocab_sz) * model.hidden_sz

    def count(name: str) -> int:
        part = {"embedding": assembly.embedding.params, "block": assembly.block.params, "head": assembly.head_params}[
            name
        ]
        padded = sum(p.name in {"embedding.weight", "head.weight"} for p in part)
        return int(sum(p.elements for p in part) - padded * padding)

    embedding, block, head = count("embedding"), count("block"), count("head")
    per_stage = [
        sum(c.layers * block + (embedding if c.embedding else 0) + (head if c.head else 0) for c in chunks)
        for chunks in assembly.stages
    ]
    copies = model.vocab_sz * model.hidden_sz if assembly.tied_copy else 0
    total = sum(per_stage) - copies
    return Params(total, total, per_stage, copies)


def throughput(job: Job, step_s: float, flops: Flops) -> Throughput:
    """Rates against the dense peak of the precision the GEMMs run in."""
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


def gemms(assembly: Assembly, timing: StepTime) -> list[GemmRow]:
    """Every projection: per call, on the first stage that runs it, in forward and both backward products.

    `count_per_step` is how often one device of that stage runs it in a step, recomputation included. Stages whose chunks hold the
    same number of layers repeat the same rows, so each different stage is listed once.
    """
    rows: list[GemmRow] = []
    seen: set[tuple[object, ...]] = set()
    for stage, chunks in enumerate(assembly.stages):
        kind = (sum(c.layers for c in chunks), any(c.embedding for c in chunks), any(c.head for c in chunks))
        if kind in seen:
            continue
        seen.add(kind)
        replayed = replayed_blocks(timing, stage)
        layers = float(kind[0])
        for op in assembly.block.ops:
            if isinstance(op, Gemm):
                rows += gemm_rows(op, stage, layers, replayed if is_replayed(timing, op) else 0.0, timing)
        if kind[2]:
            rows += [
                r for op in assembly.head.ops if isinstance(op, Gemm) for r in gemm_rows(op, stage, 1.0, 0.0, timing)
            ]
    return rows


def replayed_blocks(timing: StepTime, stage: int) -> float:
    """Blocks of a stage that backward runs again, for one micro-batch."""
    return sum(times for chunk in timing.assembly.stages[stage] for times, _ in timing.replays(chunk))


def is_replayed(timing: StepTime, op: Gemm) -> bool:
    """Whether recomputation repeats this projection."""
    job, ops = timing.job, timing.assembly.block.ops
    early = job.software.activations.recompute_stops_early
    if job.recompute.granularity == "full":
        again = replayed(ops, 0, len(ops) - 1, stops_early=early)
        return any(ops[i] is op for i in again)
    segments = find_segments(ops, job.recompute.modules)
    return any(ops[i] is op for s in segments for i in replayed(ops, s.first, s.last, stops_early=early))


def gemm_rows(op: Gemm, stage: int, times: float, replayed: float, timing: StepTime) -> list[GemmRow]:
    """Forward, dgrad and wgrad of one projection."""
    traffic = compute.gemm_traffic(op, timing.rates)
    done = compute.forward(op, timing.rates, timing.assembly.block.sizes)
    dgrad, wgrad = compute.gemm_backward(op, timing.rates)
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


def collectives(assembly: Assembly, timing: StepTime) -> list[CollectiveRow]:
    """Every kind of collective of a step, as the busiest stage sees it; sends by boundary."""
    rows = [*part_rows(assembly, timing), *pipeline_rows(timing)]
    if timing.dp:
        rows += data_parallel_rows(timing)
    elif fsdp.applies(timing.job):
        rows += fsdp_rows(assembly, timing)
    if timing.job.sp:
        cost, (calls, bytes_) = timing.norm_reduce, timing.norm_grads
        ranks, exposed = timing.job.parallelism.tp, timing.norm_reduce_s
        rows.append(row("norm gradients", "all_reduce", "tp", ranks, bytes_, calls, cost, exposed))
    if assembly.tied_copy:
        cost = timing.embedding_reduce
        name, bytes_ = "embedding gradients", timing.embedding_grad_bytes
        rows.append(row(name, "all_reduce", "embedding", 2, bytes_, 1.0, cost, cost.time_s))
    return [r for r in rows if r.ranks > 1]


def row(
    name: str, kind: str, axis: str, ranks: float, bytes_: float, count: float, cost: CommCost, exposed: float
) -> CollectiveRow:
    """One row of the table."""
    return CollectiveRow(
        name,
        kind,
        axis,
        int(ranks),
        cost.tier,
        float(bytes_),
        count,
        cost.latency_s,
        cost.bandwidth_s,
        cost.time_s,
        exposed,
    )


def part_rows(assembly: Assembly, timing: StepTime) -> list[CollectiveRow]:
    """Tensor- and context-parallel calls of the parts on every stage that has them, alike ones summed."""
    m, groups = timing.job.microbatches, timing.context.groups
    counts: dict[tuple[str, str], float] = {}
    calls: dict[tuple[str, str], CommCall] = {}
    stage = timing.busiest
    chunks = {c.depth: c for c in (*assembly.stages[stage], assembly.chunks[0], assembly.chunks[-1])}
    for chunk in chunks.values():
        here = chunk.stage == stage
        works = [(t, w) for t, part in timing.works(chunk) for w in (part.forward, part.backward)] + timing.replays(
            chunk
        )
        for times, work in works:
            for call in work.calls:
                key = (call.name, call.kind)
                if here or not call.name.startswith(("attn", "mlp")):
                    counts[key] = counts.get(key, 0.0) + times * m * float(call.count)
                    calls.setdefault(key, call)
    return [
        row(
            c.name,
            c.kind,
            c.axis,
            float(groups[c.axis].ranks),
            c.bytes,
            counts[key],
            c.cost,
            counts[key] * c.exposed_s / c.count,
        )
        for key, c in calls.items()
    ]


def pipeline_rows(timing: StepTime) -> list[CollectiveRow]:
    """One row per stage boundary: activations down and gradients up, each micro-batch of each chunk.

    The exposed seconds are the busiest stage's, shared out by what each boundary sends.
    """
    p, m = timing.job.parallelism, timing.job.microbatches
    costs = timing.boundary_costs
    counts = [2.0 * m * (p.vpp - 1 if boundary == p.pp - 1 else p.vpp) for boundary in range(len(costs))]
    total = sum(count * cost.time_s for count, cost in zip(counts, costs, strict=True))
    exposed = timing.time.parts_s.get("pp_comm", 0.0)
    rows = []
    for boundary, (count, cost) in enumerate(zip(counts, costs, strict=True)):
        if count:
            name, share = f"stage {boundary} to {(boundary + 1) % p.pp}", exposed * count * cost.time_s / total
            rows.append(row(name, "send_recv", "pp", 2, timing.assembly.boundary_bytes, count, cost, share))
    return rows


def data_parallel_rows(timing: StepTime) -> list[CollectiveRow]:
    """Buckets of the stage that sends the most, alike ones together; exposed seconds shared out by what each takes."""
    assert timing.dp is not None
    rows: list[CollectiveRow] = []
    both = ((timing.dp.reductions, timing.dp.reduce_exposed_s), (timing.dp.gathers, timing.dp.gather_exposed_s))
    for calls, exposed in both:
        stages = [[call for chunk in stage for call in chunk] for stage in calls]
        mine = max(stages, key=seconds_of, default=[])
        total = seconds_of(mine)
        for bytes_ in dict.fromkeys(call.bytes for call in mine):
            alike = [call for call in mine if call.bytes == bytes_]
            share = exposed * seconds_of(alike) / total if total else 0.0
            one = alike[0]
            rows.append(
                row(
                    one.name,
                    one.kind,
                    "dp",
                    timing.dp.group.ranks,
                    bytes_,
                    float(len(alike) * one.times),
                    one.cost,
                    share,
                )
            )
    return rows


def seconds_of(calls: list[Reduction]) -> float:
    """Seconds of calls one after the other."""
    return float(sum(call.cost.time_s * call.times for call in calls))


def fsdp_rows(assembly: Assembly, timing: StepTime) -> list[CollectiveRow]:
    """Gathers and reduce-scatters of the groups."""
    return fsdp.rows(assembly, timing.dp_tiers, timing.time.parts_s.get("dp_comm", 0.0), row)
