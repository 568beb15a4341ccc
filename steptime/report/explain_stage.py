"""The memory of one pipeline stage written out: formula with the job's numbers, constant, source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime import fsdp
from steptime.base.words import counted
from steptime.job.assembly import Assembly
from steptime.memory.buffers import stage_buffers
from steptime.memory.overhead import COMMUNICATOR_BYTES, FRAGMENTATION
from steptime.memory.stages import chunk_bytes
from steptime.memory.states import group_elements, shard_ranks, stage_states, state_bytes
from steptime.report.explain_rates import source
from steptime.report.format import GIB, column, whole
from steptime.report.table import Fact, FactList
from steptime.timing.optimizer import updated

if TYPE_CHECKING:
    from steptime.answer.result import Estimate
    from steptime.base.rows import HeldBuffer, StageMemory


def stage_named(estimate: Estimate, name: str) -> FactList | None:
    """The memory of "stage N"; None where the name is none of a stage of this job."""
    word, _, digits = name.replace("-", " ").partition(" ")
    stages = estimate.memory.stages
    if word == "stage" and digits.isdecimal() and int(digits) < len(stages):
        return stage(estimate, stages[int(digits)])
    return None


def stage(estimate: Estimate, row: StageMemory) -> FactList:
    """States by their formula, what is saved by micro-batch, what lives only at the peak, and what the allocator adds."""
    job = estimate.job
    facts = [
        *_states(estimate, row),
        Fact("activations", [_size(row.activations_bytes, _in_flight(estimate, row)), *_saved(estimate, row)]),
        Fact("buffers", [_size(row.buffers_bytes, "workspaces and buffers; 3dtrn explain PLAN memory lists them")]),
        Fact(
            "transient",
            [_size(row.transient_bytes - row.buffers_bytes, f"temporaries of the op at the peak, {row.peak_op}")],
        ),
        Fact("allocated", [_size(row.allocated_bytes, "their sum")]),
        Fact("reserved", [_size(row.reserved_bytes, _reserved(row))]),
        Fact(
            "source",
            [f"zero_level {job.zero_level}; docs/notation.md has the formulas; bytes of buffers include padding"],
        ),
    ]
    return FactList(f"memory of a device of stage {row.stage}", facts)


def _states(estimate: Estimate, row: StageMemory) -> list[Fact]:
    """Parameters, gradients and optimizer: bytes of each, over the ranks that share them."""
    held = estimate.assembly.counted_params(estimate.assembly.stages[row.stage])
    job, size, moments = estimate.job, state_bytes(estimate.job), updated(estimate.job, held).moments
    groups = group_elements(held)
    shared = ", ".join(f"{whole(round(n))} {of} over {shard_ranks(job, of):g} ranks" for of, n in groups.items())
    optimizer = f"master {size.master:g} + moments {moments:g} B each, shared from zero_level 1"
    return [
        Fact("held", [f"{whole(round(sum(groups.values())))} parameters on a device: {shared}"]),
        Fact("parameters", [_size(row.params_bytes, f"{size.params:g} B each, shared from zero_level 3")]),
        Fact("gradients", [_size(row.gradients_bytes, f"{size.gradients:g} B each, shared from zero_level 2")]),
        Fact("optimizer", [_size(row.optimizer_bytes, optimizer)]),
    ]


def _in_flight(estimate: Estimate, row: StageMemory) -> str:
    held = estimate.pipeline.in_flight
    count = held[row.stage] if row.stage < len(held) else 1.0
    return f"saved for backward, {whole(round(count, 2))} micro-batches in flight at most"


def _saved(estimate: Estimate, row: StageMemory) -> list[str]:
    """What a micro-batch keeps for backward on the stage; FSDP's groups are walked instead."""
    if fsdp.applies(estimate.job):
        return []
    assembly = estimate.assembly
    kept = chunk_bytes(assembly).weights[row.stage]
    layers = sum(count for chunk in assembly.stages[row.stage] for _, count in chunk.runs)
    chunks = f" in {len(kept)} chunks" if len(kept) > 1 else ""
    return [f"a micro-batch keeps {sum(kept) / GIB:.3f} GiB, {counted(layers, 'layer')}{chunks}"]


def _reserved(row: StageMemory) -> str:
    """The allocator's formula (memory/overhead.py) with its numbers."""
    moving = row.activations_bytes + row.transient_bytes - row.buffers_bytes
    fixed = row.allocated_bytes - moving
    return (
        f"{fixed / GIB:.3f} states and buffers + {moving / GIB:.3f} activations and transients x (1 + FRAGMENTATION "
        f"{FRAGMENTATION:g}); 1.03 to 1.09 x allocated on 8 x B200 (SimuMax)"
    )


def _size(size: float, how: str) -> str:
    return f"{size / GIB:.3f} GiB   {how}"


def memory(estimate: Estimate) -> FactList:
    """Every part of the memory of the stage that needs most, buffer by buffer with the file that makes it."""
    found = estimate.memory
    row = found.stages[found.worst_stage]
    keys = ("params_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
    sizes = [(key.removesuffix("_bytes"), getattr(row, key), "") for key in keys]
    held = _buffers(estimate, row.stage)
    sizes.append(("buffers", row.buffers_bytes, "workspaces and buffers at the peak:"))
    sizes += [("", item.bytes, f"{item.name} ({item.source})") for item in held if item.at_peak]
    groups = found.overhead_bytes.communicators / COMMUNICATOR_BYTES
    sizes += [
        ("transient", row.transient_bytes - row.buffers_bytes, "temporaries of the op at the peak"),
        ("allocated", row.allocated_bytes, f"their sum at the peak, {row.peak_op}"),
        (
            "reserved",
            row.reserved_bytes,
            f"held by the caching allocator: allocated + {FRAGMENTATION:g} x activations and transients",
        ),
        ("context", found.overhead_bytes.context, "CUDA context and kernels, outside the allocator"),
        (
            "communicators",
            found.overhead_bytes.communicators,
            f"outside the allocator: {groups:g} x COMMUNICATOR_BYTES",
        ),
        ("between steps", row.persisting_bytes, "allocated: states, and the buffers that stay, among them"),
        *(("", item.bytes, f"{item.name} ({item.source})") for item in held if item.stays and not item.at_peak),
        ("first step", row.first_peak_bytes, "peak of the first step, before the optimizer's moments exist"),
        (
            "usable",
            found.capacity_bytes,
            f"usable_memory_bytes: {source(estimate, 'accelerator.usable_memory_bytes')}",
        ),
    ]
    shown = column([size for _, size, _ in sizes], GIB, 4)
    width = max(map(len, shown))
    pairs = zip(sizes, shown, strict=True)
    facts = [
        Fact(label, [f"{text.rjust(width)} GiB{'   ' + what if what else ''}"]) for (label, _, what), text in pairs
    ]
    return FactList(f"memory of a device of stage {row.stage} (highest)", facts)


def _buffers(estimate: Estimate, stage: int) -> list[HeldBuffer]:
    """Workspaces and buffers of a stage."""
    assembly = Assembly(estimate.job)
    states = fsdp.states(assembly) if fsdp.applies(estimate.job) else stage_states(assembly)
    return stage_buffers(assembly, stage, states[stage])
