"""The memory of one pipeline stage explained: every figure with its formula, the job's numbers, and its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from steptime import fsdp
from steptime.answer.result import Estimate
from steptime.base.rows import StageMemory
from steptime.base.words import counted
from steptime.fsdp.collective_ranks import backward_group
from steptime.fsdp.plus_plus import secondary_bytes
from steptime.fsdp.sharded_states import stored_saving
from steptime.job.job import Job
from steptime.memory.allocator_blocks import further_ends
from steptime.memory.buffers import stage_buffers
from steptime.memory.kept_ops import kept_of_chunk
from steptime.memory.overhead import EXPANDABLE_FRAGMENTATION, FRAGMENTATION, communicating_groups
from steptime.memory.part_memories import PartMemories
from steptime.memory.stages import chunk_bytes
from steptime.memory.states import States, group_elements, shard_ranks, stage_states
from steptime.model.ops import Attention, Gemm, Move, Op
from steptime.model.scans import Chunked, Scan
from steptime.report.breakdown import RECEIVE_BUFFERS
from steptime.report.constants import abbreviations, constant, setting_source
from steptime.report.explain_parts import gradient_bytes
from steptime.report.format import gib, in_gib, percent, whole
from steptime.report.headline import RULE
from steptime.report.table import Fact, FactList
from steptime.timing.optimizer import updated

AUTOGRAD = "torch csrc/autograd/engine.cpp, call_function: tensors saved by an op are freed after its backward"
ALLOCATED = "torch.cuda.max_memory_allocated: torch c10/cuda/CUDACachingAllocator.cpp, DeviceStats.allocated_bytes"
FSDP_GROUPS = "torch distributed/fsdp/_fully_shard/_fsdp_param_group.py: gathered and freed group by group"


def stage_named(estimate: Estimate, name: str) -> FactList | None:
    """The memory of "stage N"; None where no stage of this job has that name."""
    word, _, digits = name.replace("-", " ").partition(" ")
    stages = estimate.memory.stages
    if word == "stage" and digits.isdecimal() and int(digits) < len(stages):
        return stage(estimate, stages[int(digits)])
    return None


def worst_stage(estimate: Estimate) -> FactList:
    """The memory of the stage that needs the most."""
    found = stage(estimate, estimate.memory.stages[estimate.memory.worst_stage])
    return found._replace(title=f"{found.title} (highest)")


def stage(estimate: Estimate, row: StageMemory) -> FactList:
    """States by their formula, tensors saved per micro-batch, buffers, transients at the peak, and the device's capacity."""
    states = _states_of(estimate, row.stage)
    buffers = stage_buffers(estimate.assembly, row.stage, states)
    ends = further_ends(estimate.assembly, row.stage, states)
    between = [item for item in [*buffers, ends] if item.stays and not item.at_peak and item.bytes]
    passing, op = row.transient_bytes - row.buffers_bytes, f"temporaries of the op at the peak, {row.peak_op}"
    facts = [
        *_states(estimate, row),
        *_activations(estimate, row),
        Fact("buffers", [f"hold {in_gib(row.buffers_bytes)} GiB at the peak"]),
        *[_fact("", item.bytes, f"of which {item.name}", item.source) for item in buffers if item.at_peak],
        _fact("transient", passing, op, AUTOGRAD),
        *_sums(estimate),
        _fact("allocated", row.allocated_bytes, "their sum", ALLOCATED),
        _fact("reserved", row.reserved_bytes, *_reserved(estimate, row)),
        _fact("between steps", row.persisting_bytes, "allocated: states and persistent buffers", ""),
        *[_fact("", item.bytes, f"of which {item.name}", item.source) for item in between],
        _fact("first step", row.first_peak_bytes, "peak of the first step, before optimizer moments are allocated", ""),
        *_outside(estimate),
        Fact("words", abbreviations(estimate.job.software.name)),
    ]
    return FactList(f"memory of a device of stage {row.stage}", facts)


def _fact(label: str, size: float, how: str, source: str) -> Fact:
    """A figure, its derivation, and the code or measurement it comes from."""
    text = f"{in_gib(size)} GiB"
    return Fact(label, [f"{text}   {how}" if how else text, *([f"({source})"] if source else [])])


def _states(estimate: Estimate, row: StageMemory) -> list[Fact]:
    """Parameters, gradients and optimizer states: bytes of each, over the ranks that they are sharded over."""
    buffers = estimate.assembly.counted_params(estimate.assembly.stages[row.stage])
    job, size, moments = estimate.job, estimate.job.software.state_bytes, updated(estimate.job, buffers).moments
    groups = group_elements(buffers)
    shared = ", ".join(f"{whole(round(n))} {of} over {shard_ranks(job, of):g} ranks" for of, n in groups.items())
    states = job.software.states
    optimizer = (
        f"{states.optimizer}: master {size.master:g} + moments {moments:g} B each, sharded at zero_level 1 and above"
    )
    if share := job.performance.cpu_offload.share:
        node = f"{gib(estimate.memory.host_bytes)} GiB on each node's host"
        optimizer += f"; those of {percent(share)} of the parameters are on the host: {node}"
    counted = f"{whole(round(sum(groups.values())))} parameters on a device: {shared}; zero_level {job.zero_level}"
    if states.padded_buckets and job.zero_level:
        counted += f"; buckets are padded ({setting_source(job, 'padded_buckets')})"
    params = f"{size.params:g} B each, sharded at zero_level 3{_other_parameters(estimate, row, sum(groups.values()))}"
    gradients = gradient_bytes(job)
    if (to_come := _states_of(estimate, row.stage).gradients_bytes - row.gradients_bytes) > 0.0:
        gradients += f"; {in_gib(to_come)} GiB of them are not allocated at the peak"
    found = [Fact("held", [counted])]
    for label, bytes_, how, keys in (
        ("parameters", row.params_bytes, params, ("param_dtype",)),
        ("gradients", row.gradients_bytes, gradients, ("main_grad_dtype",)),
        ("optimizer", row.optimizer_bytes, optimizer, ("master_dtype", "moment_dtype")),
    ):
        source = "; ".join(_said(estimate, key, getattr(states, key)) for key in keys)
        found.append(_fact(label, bytes_, how, source))
    return found


def _other_parameters(estimate: Estimate, row: StageMemory, elements: float) -> str:
    """What makes parameters more or less than their elements: how a recipe stores weights, or a second partition."""
    job, chunks = estimate.job, estimate.assembly.stages[row.stage]
    recipe, itemsize, more = job.software.recipe, job.software.state_bytes.params, 0.0
    if fsdp.applies(job):
        stored = -float(stored_saving(estimate.assembly, chunks))
        more = float(secondary_bytes(job, fsdp.sharded_elements(estimate.assembly, chunks) * shard_ranks(job)))
    else:
        stored = row.params_bytes - itemsize * elements if recipe is not None and not recipe.casts else 0.0
    found = f"; {in_gib(stored, signed=True)} GiB as {job.software.precision} stores projections" if stored else ""
    if more:
        ranks = f"{backward_group(job).ranks:g} ranks (hpz_partition_size)"
        found += (
            f"; {in_gib(more, signed=True)} GiB of a second partition, {job.software.itemsize:g} B each over {ranks}"
        )
    return found


def _said(estimate: Estimate, key: str, value: object) -> str:
    """A setting of the profile and its source."""
    return f"{key} {value}: {setting_source(estimate.job, key)}"


def _activations(estimate: Estimate, row: StageMemory) -> list[Fact]:
    """Bytes saved for backward, and for one micro-batch by the op that keeps them."""
    job, assembly = estimate.job, estimate.assembly
    in_flight = estimate.pipeline.in_flight
    count = in_flight[row.stage] if row.stage < len(in_flight) else 1.0
    noun = "micro-batch" if round(count, 2) == 1.0 else "micro-batches"
    how = f"saved for backward, {whole(round(count, 2))} {noun} in flight at most"
    source = FSDP_GROUPS if fsdp.applies(job) else _said(estimate, "schedule", job.schedule)
    total = _fact("activations", row.activations_bytes, how, source)
    chunks = assembly.stages[row.stage]
    parts: dict[str, float] = {}
    sources: dict[str, str] = {}
    for chunk in chunks:
        for tensor in kept_of_chunk(PartMemories(assembly), chunk):
            keeper = keeper_of(tensor.op)
            parts[keeper.label] = parts.get(keeper.label, 0.0) + tensor.bytes
            sources[keeper.label] = source_of(job, keeper)
    if not fsdp.applies(job):
        outputs = sum(chunk_bytes(assembly).weights[row.stage]) - sum(parts.values())
        if outputs > 0.0:
            parts["outputs"], sources["outputs"] = outputs, _said(estimate, "deallocate_pipeline_outputs", "false")
    layers = sum(n for chunk in chunks for _, n in chunk.runs)
    cut = f" in {len(chunks)} chunks" if len(chunks) > 1 else ""
    kept = Fact("micro-batch", [f"keeps {in_gib(sum(parts.values()))} GiB, {layers} layers{cut}"])
    return [
        total,
        kept,
        *[_fact("", size, f"of which {label}", sources[label]) for label, size in parts.items() if size],
    ]


def _sums(estimate: Estimate) -> list[Fact]:
    """Unsharded gradients that FSDP accumulates until the last micro-batch of a step reduces them; counted as temporaries."""
    if not fsdp.unsynced(estimate.job):
        return []
    how = "of which at most: unsharded gradients of earlier micro-batches (no_sync)"
    source = "torch distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward: reduce_grads False"
    return [_fact("", float(fsdp.summed_bytes(estimate.assembly)), how, source)]


def _states_of(estimate: Estimate, stage: int) -> States:
    """States of a stage."""
    assembly = estimate.assembly
    return (fsdp.states(assembly) if fsdp.applies(estimate.job) else stage_states(assembly))[stage]


def _reserved(estimate: Estimate, row: StageMemory) -> tuple[str, str]:
    """The allocator's formula (memory/overhead.py) with its numbers, and its source."""
    job = estimate.job
    expandable = job.software.buffers.expandable_segments
    name = "EXPANDABLE_FRAGMENTATION" if expandable else "FRAGMENTATION"
    share = EXPANDABLE_FRAGMENTATION if expandable else FRAGMENTATION
    pieces, source = f"(1 + {name} {share:g})", constant(f"memory.overhead.{name}").source
    moving = row.activations_bytes + row.transient_bytes - row.buffers_bytes
    fixed = row.allocated_bytes - moving
    if fsdp.applies(job) and fsdp.pooled(job):
        gathers = fsdp.peak_moments(estimate.assembly)[row.stage].gathers_bytes
        to_come = _states_of(estimate, row.stage).gradients_bytes - row.gradients_bytes
        most = (row.reserved_bytes - fixed - to_come - gathers) / (1.0 + share)
        text = (
            f"{in_gib(fixed)} states and buffers + {in_gib(to_come)}, gradients not allocated at the peak, "
            f"+ {in_gib(most)}, most activations and transients of the stream that computes, x {pieces} "
            f"+ {in_gib(gathers)}, all-gathers"
        )
        return text, source
    text = (
        f"{in_gib(fixed)} states and buffers + {in_gib(moving)} activations and transients x {pieces} = "
        f"{row.reserved_bytes / row.allocated_bytes:.3f} x allocated"
    )
    return (text if expandable else f"{text} (1.03 to 1.09 x in ten dense runs on 8 x B200)"), source


def _outside(estimate: Estimate) -> list[Fact]:
    """Memory outside of the allocator, and the capacity that the total is compared with."""
    memory, machine = estimate.memory, estimate.job.machine
    over = memory.overhead_bytes
    own = machine.source("accelerator.context_bytes") or constant("memory.overhead.CONTEXT_BYTES").source
    groups = counted(communicating_groups(estimate.job), "process group")
    received = _fact(RECEIVE_BUFFERS, over.receive_buffers, "outside the allocator", "memory/receive_buffers.py")
    usable = machine.source("accelerator.usable_memory_bytes") or "the machine's file"
    return [
        _fact("context", over.context, "outside the allocator", own),
        _fact("communicators", over.communicators, groups, constant("memory.overhead.COMMUNICATOR_BYTES").source),
        *([received] if over.receive_buffers else []),
        _fact("usable", memory.capacity_bytes, "", usable),
        Fact("verdict", [RULE]),
    ]


TORCH = "torch tools/autograd/derivatives.yaml: tensors read by the backward formula of the op"


class Keeper(NamedTuple):
    """What keeps tensors, in words; the profile's setting that decides it, or the code of Megatron and of torch."""

    label: str
    shows: Callable[[Op], bool]
    setting: str = ""
    megatron: str = ""
    torch: str = TORCH


def _is(*kinds: type) -> Callable[[Op], bool]:
    return lambda op: isinstance(op, kinds)


def _starts(word: str) -> Callable[[Op], bool]:
    return lambda op: op.name.startswith(word)


KEEPERS = (
    Keeper("loss", _starts("loss"), setting="loss_impl"),
    Keeper(
        "embedding", _starts("embedding"), megatron="core tensor_parallel/layers.py, VocabParallelEmbedding.forward"
    ),
    Keeper("core attention", _is(Attention), setting="attention_impl"),
    Keeper("dropout", lambda op: isinstance(op, Move) and op.draws_mask, setting="dropout_mask_bytes"),
    Keeper("norms", lambda op: op.name.endswith("norm"), setting="norm_impl"),
    Keeper("activation functions", lambda op: ".act" in op.name, setting="activation_impl"),
    Keeper("rotary embedding", lambda op: ".rope" in op.name, setting="rope_impl"),
    Keeper(
        "router, dispatch and combine",
        lambda op: op.name.startswith("moe.") or op.role == "router",
        megatron="core transformer/moe/router.py, moe_utils.py:1185; TransformerEngine v2.9 pytorch/permutation.py:295, 678",
    ),
    Keeper(
        "projections",
        _is(Gemm),
        megatron="TransformerEngine v2.9 pytorch/module/linear.py:429, layernorm_linear.py:458, grouped_linear.py:231",
        torch="torch tools/autograd/derivatives.yaml, mm: both operands",
    ),
    Keeper(
        "Mamba scan",
        _is(Scan),
        megatron="core ssm/mamba_mixer.py; state-spaces/mamba@e9594ce mamba_ssm/ops/triton/ssd_combined.py",
    ),
    Keeper(
        "linear attention in chunks",
        _is(Chunked),
        megatron="flash-linear-attention v0.5.2 fla/ops, chunk.py of each rule: save_for_backward",
    ),
)
"""In the order in which they are tested."""
OTHERS = Keeper("other operations", lambda _: True, megatron=TORCH)
REPLAYED = Keeper(
    "inputs of recomputed layers",
    lambda _: True,
    megatron="core tensor_parallel/random.py, CheckpointFunction.forward: save_for_backward(*args)",
    torch="torch utils/checkpoint.py: the checkpoint keeps its arguments",
)


def keeper_of(op: Op | None) -> Keeper:
    """The role of an op for its saved tensors; None: layers that are recomputed."""
    return REPLAYED if op is None else next((one for one in KEEPERS if one.shows(op)), OTHERS)


def source_of(job: Job, keeper: Keeper) -> str:
    """The code or setting behind a keeper in a job's framework."""
    if keeper.setting:
        value = job.software.settings()[keeper.setting]
        return f"{keeper.setting} {value}: {setting_source(job, keeper.setting)}"
    return keeper.megatron if job.software.family == "megatron-core" and keeper.megatron else keeper.torch
