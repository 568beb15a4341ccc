"""Parts of the step and stages' memory written out: formula with the job's numbers, constant, source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.cost.comm import tree_depth
from steptime.cost.compute import CHUNK_S_PER_TOKEN, RATED_LENGTH
from steptime.memory.states import local_groups, shard_ranks, state_bytes
from steptime.model.ops import Attention
from steptime.model.scans import Chunked
from steptime.report.format import BINARY, GIB, SI, number, percent, quantity, seconds, whole
from steptime.report.kernel_table import op_times
from steptime.report.table import Fact, FactList
from steptime.timing.optimizer import clip_bytes_per_param, update_bytes_per_param, updated
from steptime.timing.orthogonalize import STEPS, orthogonalize_s
from steptime.timing.step_time import STRAGGLER

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.answer.result import Estimate
    from steptime.base.rows import StageMemory

_SHOWN = 12


def attention(estimate: Estimate) -> FactList:
    """Each attention kernel: FLOPs over the rate at this length, forward and backward, times its calls."""
    rates, device = estimate.timing.rates, estimate.job.machine.accelerator
    rows = [row for row in op_times(estimate) if row.part == "attention"]
    facts = []
    ops = {op.name: op for part in estimate.assembly.kinds for op in part.ops if isinstance(op, Attention)}
    chunked = {op.name: op for part in estimate.assembly.kinds for op in part.ops if isinstance(op, Chunked)}
    for row in rows:
        lines = [_calls(row.times, row.forward_s, row.backward_s, estimate)]
        if row.name in ops:
            op = ops[row.name]
            lines.append(
                f"forward: {quantity(row.forward_flops, SI, 'FLOP')} (causal half) at "
                f"{quantity(rates.attention_forward_flops, SI, 'FLOP/s')}, backward 2.5 times that (5 products to 2, "
                f"FlashAttention-2, arXiv 2307.08691) at {quantity(rates.attention_backward_flops, SI, 'FLOP/s')}"
            )
            lines.append(
                f"both times {whole(op.kv_len)} / ({whole(op.kv_len)} + {rates.attention_ramp_tokens:g}) over "
                f"{RATED_LENGTH:g} / ({RATED_LENGTH:g} + {rates.attention_ramp_tokens:g}): short sequences waste diagonal blocks"
            )
        elif row.name in chunked:
            rule, flops = chunked[row.name], quantity(rates.chunk_flops, SI, "FLOP/s")
            lines.append(
                f"forward: {rule.slowness:g} times the longer of {quantity(row.forward_flops, SI, 'FLOP')} at {flops} and "
                f"{whole(rule.seq)} tokens of {CHUNK_S_PER_TOKEN * 1e9:.0f} ns; backward {rule.backward_times:g} times that "
                "(benchmarks of fla-org/flash-linear-attention)"
            )
        facts.append(Fact(row.name, lines))
    for key in ("attention_forward_efficiency", "attention_backward_efficiency"):
        value = getattr(device, key)
        facts.append(Fact(key, [f"{value:g} of the dense peak: {_source(estimate, f'accelerator.{key}')}"]))
    return _part(estimate, "attention", facts)


def memory_bound(estimate: Estimate) -> FactList:
    """Each memory-bound kernel: bytes over the rate, and a fixed time; widest first."""
    rates, device = estimate.timing.rates, estimate.job.machine.accelerator
    rows = sorted((row for row in op_times(estimate) if row.part == "memory_bound"), key=lambda row: -row.step_s)
    facts = [
        Fact(
            "each",
            [
                (
                    f"bytes / ({quantity(device.memory_bytes_per_s, SI, 'B/s')} x {device.memory_efficiency:g} x "
                    f"{rates.move_rate:g}) + {seconds(rates.move_kernel_s)} for each kernel"
                )
            ],
        ),
        Fact("source", [f"memory_efficiency: {_source(estimate, 'accelerator.memory_efficiency')}"]),
    ]
    for row in rows[:_SHOWN]:
        moved = f"forward moves {quantity(row.forward_bytes, BINARY)}; " if row.forward_bytes else ""
        facts.append(Fact(row.name, [moved + _calls(row.times, row.forward_s, row.backward_s, estimate)]))
    if len(rows) > _SHOWN:
        rest = sum(row.step_s for row in rows[_SHOWN:])
        facts.append(Fact("others", [f"{len(rows) - _SHOWN} kernels, {seconds(rest)}"]))
    return _part(estimate, "memory_bound", facts)


def launch(estimate: Estimate) -> FactList:
    """Gaps between kernels: the profile's gap per layer and micro-batch, and where the host is slower than the device."""
    software, m = estimate.job.software, estimate.job.microbatches
    layers = sum(count for chunk in estimate.assembly.stages[estimate.timing.busiest] for _, count in chunk.runs)
    gap = software.timing.layer_gap_s
    source = software.sources.get("layer_gap_s", "assumed")
    facts = [
        Fact(
            "gaps",
            [f"layer_gap_s {seconds(gap)} x {layers} layers x {m:,} micro-batches = {seconds(gap * layers * m)}"],
        ),
        Fact("source", [f"{software.name}: {source}"]),
        Fact(
            "factors",
            [f"kernels and gaps of {software.name} x {estimate.timing.rates.slowness:.4g} (data/efficiency.yaml)"],
        ),
        Fact(
            "host",
            [
                f"a block waits where its kernels are shorter than {seconds(software.timing.host_kernel_s)} for each launch"
            ],
        ),
    ]
    return _part(estimate, "launch", facts)


def stragglers(estimate: Estimate) -> FactList:
    """Synchronized replicas wait for the slowest of them."""
    job, timing = estimate.job, estimate.timing
    p = job.parallelism
    nodes = -(-p.devices // job.machine.devices_per_node)
    replicas = min(p.dp * p.cp, nodes)
    inside = timing.walk.makespan_s + timing.fsdp_exposed_s
    facts = [
        Fact("replicas", [f"min(dp x cp, nodes) = min({p.dp * p.cp:,}, {nodes:,}) = {replicas:,}"]),
        Fact("formula", ["STRAGGLER x ceil(log2(replicas)) x seconds in the pipeline"]),
        Fact(
            "numbers", [f"{STRAGGLER:g} x {tree_depth(replicas):g} x {seconds(inside)} = {seconds(timing.straggler_s)}"]
        ),
        Fact("source", ["STRAGGLER is a shared constant; 3dtrn explain ROW_ID lists it with its source"]),
    ]
    return _part(estimate, "stragglers", facts)


def optimizer(estimate: Estimate) -> FactList:
    """Bytes that the update moves over the rate of memory, on the stage that owns most parameters."""
    job, timing = estimate.job, estimate.timing
    shares = [updated(estimate.assembly, stage) for stage in range(len(estimate.assembly.stages))]
    most, moments = max(shares, key=lambda share: share.owned)
    named = job.software.states.optimizer
    per, clip = update_bytes_per_param(job, moments), clip_bytes_per_param(job)
    facts = [
        Fact("owned", [f"{number(most)} parameters on the stage with most, zero_level {job.zero_level}"]),
        Fact("bytes", [f"{named} {per:g} + clipping {clip:g} bytes for each; zeroing persistent gradients beside them"]),
        Fact(
            "update",
            [(f"{number(most)} x {per + clip:g} B / {quantity(timing.rates.bytes_per_s, SI, 'B/s')} = "
             f"{seconds(most * (per + clip) / timing.rates.bytes_per_s)}")],
        ),
        *_orthogonalized(estimate),
        Fact("source", ["passes of megatron/core/optimizer/optimizer.py and torch/optim/adam.py"]),
    ]  # fmt: skip
    return _part(estimate, "optimizer", facts)


def _orthogonalized(estimate: Estimate) -> list[Fact]:
    """Muon's iterations, if it is Muon."""
    assembly, states = estimate.assembly, estimate.job.software.states
    if "muon" not in states.optimizer:
        return []
    took = max(orthogonalize_s(assembly, chunks, estimate.timing.pricing.context) for chunks in assembly.stages)
    how = f"{STEPS:g} iterations of 4 m^2 n + 2 m^3 FLOPs on each m x n matrix: {seconds(took)}"
    return [Fact("orthogonalize", [how, f"muon_tp_mode {states.muon_tp_mode}; Jordan et al. 2024"])]


def stage(estimate: Estimate, row: StageMemory) -> FactList:
    """The memory of one stage: states by their formula, then what is saved and what lives only at the peak."""
    job, size, chunks = estimate.job, state_bytes(estimate.job), estimate.assembly.stages[row.stage]
    groups, moments = local_groups(estimate.assembly, chunks), updated(estimate.assembly, row.stage).moments
    held = sum(groups.values())
    ranks = {of: shard_ranks(job, of) for of in groups}
    shared = ", ".join(f"{number(n)} {of} over {ranks[of]:g} ranks" for of, n in groups.items())
    facts = [
        Fact("held", [f"{number(held)} parameters on a device: {shared}"]),
        Fact("parameters", [_state(row.params_bytes, f"{size.params:g} B each, shared from zero_level 3")]),
        Fact("gradients", [_state(row.gradients_bytes, f"{size.gradients:g} B each, shared from zero_level 2")]),
        Fact(
            "optimizer",
            [
                _state(
                    row.optimizer_bytes,
                    f"master {size.master:g} + moments {moments:g} B each, shared from zero_level 1",
                )
            ],
        ),
        Fact("activations", [_state(row.activations_bytes, _in_flight(estimate, row))]),
        Fact("transient", [_state(row.transient_bytes, f"lives only at the peak, {row.peak_op}")]),
        Fact("allocated", [_state(row.allocated_bytes, "their sum")]),
        Fact("reserved", [_state(row.reserved_bytes, "with fragmentation of the caching allocator")]),
        Fact(
            "source",
            [f"zero_level {job.zero_level}; docs/notation.md has the formulas; bytes of buffers include padding"],
        ),
    ]
    return FactList(f"memory of a device of stage {row.stage}", facts)


def _in_flight(estimate: Estimate, row: StageMemory) -> str:
    held = estimate.pipeline.in_flight
    count = held[row.stage] if row.stage < len(held) else 1.0
    return f"saved for backward, {whole(round(count, 2))} micro-batches in flight at most"


def _state(size: float, how: str) -> str:
    return f"{size / GIB:.3f} GiB   {how}"


def _calls(times: float, forward_s: float, backward_s: float, estimate: Estimate) -> str:
    total = times * (forward_s + backward_s)
    share = percent(total / estimate.step_s)
    return (
        f"{whole(times)} x ({seconds(forward_s)} forward + {seconds(backward_s)} backward) = {seconds(total)}, {share}"
    )


def _source(estimate: Estimate, path: str) -> str:
    return estimate.job.machine.source(path) or "not in the machine's file: the usual figure (assumed)"


def _part(estimate: Estimate, name: str, facts: list[Fact]) -> FactList:
    total = estimate.time.parts_s.get(name, 0.0)
    title = f"{name.replace('_', '-')}: {seconds(total)}, {percent(total / estimate.step_s)} of the step"
    return FactList(title, facts)


PARTS: dict[str, Callable[[Estimate], FactList]] = {
    "attention": attention,
    "memory_bound": memory_bound,
    "launch": launch,
    "stragglers": stragglers,
    "optimizer": optimizer,
}


def stage_named(estimate: Estimate, name: str) -> FactList | None:
    """The memory of "stage N"; None where the name is none of a stage of this job."""
    word, _, digits = name.replace("-", " ").partition(" ")
    stages = estimate.memory.stages
    return (
        stage(estimate, stages[int(digits)])
        if word == "stage" and digits.isdecimal() and int(digits) < len(stages)
        else None
    )
