"""Model states of one device: parameters, gradients, optimizer, by ZeRO level and dtype recipe."""

from __future__ import annotations

from typing import NamedTuple

from steptime.job.assembly import Assembly, Chunk, local_elements
from steptime.job.job import Job
from steptime.memory.buckets import bucket_elements
from steptime.model.ops import Param
from steptime.software.precision import weight_bytes


class States(NamedTuple):
    """Bytes of one device of one pipeline stage."""

    params_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    buckets: list[list[int]]
    """Padded elements of each gradient bucket, by virtual chunk: what one reduction carries."""
    gathered_itemsize: float = 0.0
    """Bytes per parameter that the all-gather after the update sends, mean of the stage."""


class StateBytes(NamedTuple):
    """Bytes per parameter of each state, unsharded."""

    params: float
    gradients: float
    master: float
    moments: float
    """Both of Adam's moments together."""


def state_bytes(job: Job) -> StateBytes:
    """The dtype recipe of a job.

    Megatron bf16: 2 + 4 + 4 + 8, the 6 + 12/d of docs/user-guide/features/dist_optimizer.md (NVIDIA/Megatron-LM).
    """
    s = job.software
    return StateBytes(
        s.bytes_of(s.states.param_dtype),
        s.bytes_of(s.states.main_grad_dtype),
        s.bytes_of(s.states.master_dtype),
        2.0 * s.bytes_of(s.states.moment_dtype),
    )


def shard_ranks(job: Job) -> int:
    """Ranks over which ZeRO shards: dp*cp, or one replica's share of them."""
    p = job.parallelism
    return p.dp * p.cp // p.replicas


def stage_states(assembly: Assembly) -> list[States]:
    """States of every stage's device.

    ZeRO (Rajbhandari et al. 2020, figure 1): level 1 shards the optimizer, 2 the gradients too, 3 the parameters too, over
    dp*cp. Megatron's buffers are padded per parameter and bucket (`buckets.py`); others divide evenly and round up.
    """
    job = assembly.job
    size, ranks = state_bytes(job), shard_ranks(job)
    level = job.zero_level
    by_stage = []
    known: dict[tuple[int, bool, bool, bool], list[int]] = {}
    for chunks in assembly.stages:
        buckets = [alike_buckets(assembly, c, known) for c in chunks]
        whole = float(sum(assembly.local_params(c) for c in chunks))
        padded = float(sum(map(sum, buckets))) if job.software.states.padded_buckets and level >= 1 else whole
        shard = -(-padded // ranks)
        quantised = float(sum(quantised_elements(assembly, c) for c in chunks))
        by_stage.append(
            States(
                params_bytes=size.params * (shard if level == 3 else padded) + quantised * extra_bytes(job),
                gradients_bytes=size.gradients
                * (shard if level >= 2 else padded * (2.0 if reduces_copies(job) else 1.0)),
                optimizer_bytes=(size.master + size.moments) * (shard if level >= 1 else whole),
                buckets=buckets,
                gathered_itemsize=gathered_itemsize(job, quantised, whole),
            )
        )
    return by_stage


def reduces_copies(job: Job) -> bool:
    """Whether the gradients that are reduced are copies, which lie in buckets beside them from step to step."""
    p = job.parallelism
    return job.software.states.reducer_buckets and p.dp * p.cp > 1 and job.zero_level == 0


def quantised_elements(assembly: Assembly, chunk: Chunk) -> int:
    """Weights of a chunk on one device that a recipe quantises: those of its blocks."""
    return chunk.layers * assembly.block.n_quantised


def extra_bytes(job: Job) -> float:
    """Bytes per quantised weight over what any parameter takes: its copies, less the compute dtype's where there is none."""
    s = job.software
    stored = s.bytes_of(s.states.param_dtype)
    return weight_bytes(s.recipe, stored, stored=s.states.fp8_params) - stored


def gathered_itemsize(job: Job, quantised: float, whole: float) -> float:
    """Bytes per parameter in the all-gather: quantised ones go as the recipe sends them under `fp8_params`.

    Megatron puts fp8 parameters and others into buffers of their own (core distributed/param_and_grad_buffer.py); the mean
    stands for both.
    """
    s = job.software
    usual = s.bytes_of(s.states.param_dtype)
    if s.recipe is None or not s.states.fp8_params or not whole:
        return usual
    return usual + (s.recipe.param_gather_itemsize - usual) * quantised / whole


def alike_buckets(assembly: Assembly, chunk: Chunk, known: dict[tuple[int, bool, bool, bool], list[int]]) -> list[int]:
    """`chunk_buckets`, once for all chunks that hold the same parts."""
    key = (chunk.layers, chunk.embedding, chunk.head, chunk.depth == 0)
    if key not in known:
        known[key] = chunk_buckets(assembly, chunk)
    return known[key]


def chunk_buckets(assembly: Assembly, chunk: Chunk) -> list[int]:
    """Elements of the gradient buckets of one model chunk, in backward order.

    Only the first chunk is cut into buckets: later stages and virtual chunks reduce in one piece (megatron/core/distributed/
    distributed_data_parallel.py, where pp rank > 0 or disable_bucketing leaves bucket_size None).
    """
    job = assembly.job
    software = job.software
    ordered = registered(assembly.chunk_params(chunk))
    local = [local_elements(q, assembly.block.tp) for q in ordered]
    sharded = software.states.padded_buckets and job.zero_level >= 1
    last = len(ordered) - 1
    alone = {last - i for i, q in enumerate(ordered) if q.name in TIED} if assembly.tied_copy else set()
    size = bucket_size(job, float(sum(local))) if chunk.depth == 0 else None
    return bucket_elements(reversed(local), shard_ranks(job), size, sharded=sharded, alone=alone)


TIED = ("embedding.weight", "head.weight")


def registered(parts: list[list[Param]]) -> list[Param]:
    """Parameters in the order Megatron's modules register them: in a block the output projection stands before qkv.

    megatron/core/transformer/attention.py: Attention.__init__ builds linear_proj, SelfAttention.__init__ then linear_qkv.
    """
    rank = {"attn.norm": 0, "attn.proj": 1}
    known: dict[int, list[Param]] = {}  # blocks repeat: each is sorted once
    ordered: list[Param] = []
    for part in parts:
        if id(part) not in known:
            known[id(part)] = sorted(part, key=lambda q: rank.get(q.name.rpartition(".")[0], 2))
        ordered += known[id(part)]
    return ordered


def bucket_size(job: Job, elements: float) -> float:
    """Elements per gradient bucket: as said (bytes or a count of buckets), else the profile's."""
    p, software = job.parallelism, job.software
    if p.n_param_buckets is not None:
        return -(-elements // p.n_param_buckets)
    if p.bucket_size_mb is not None:
        return p.bucket_size_mb * 1e6 / software.bytes_of(software.states.main_grad_dtype)
    return max(software.layout.bucket_elements, software.layout.bucket_elements_per_dp * p.dp * p.cp)


class PartialGradients(NamedTuple):
    """All-reduces over tp in a step: how many, and the bytes of one (the mean where each parameter goes by itself)."""

    calls: float
    bytes: float


def partial_gradients(assembly: Assembly, stage: int, *, one_by_one: bool) -> PartialGradients:
    """Gradients that sequence parallelism leaves partial: those of one stage's parameters that tp does not split.

    Megatron flattens them into one all-reduce a step (megatron/core/distributed/finalize_model_grads.py). `one_by_one`: FSDP2
    redistributes each parameter's before every reduce-scatter (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
    _get_grad_inner_tensor).
    """
    job, chunks = assembly.job, assembly.stages[stage]
    block = [p.elements for p in assembly.block.params if not p.shard]
    ends = [p.elements for p in assembly.head.params if not p.shard] if any(c.head for c in chunks) else []
    layers = sum(c.layers for c in chunks)
    elements = float(sum(block) * layers + sum(ends))
    if not one_by_one:
        return PartialGradients(1.0, elements * state_bytes(job).gradients)
    tensors = len(block) * layers + len(ends)
    return PartialGradients(float(tensors * job.microbatches), elements * job.software.itemsize / tensors)
