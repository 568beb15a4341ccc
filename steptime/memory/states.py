"""Model states of one device: parameters, gradients, optimizer, by ZeRO level, dtypes and parameter group.

A parameter group (`Param.group`) has its own data-parallel ranks, and so its own shards, buffers and reductions: dense
parameters those of dp*cp, experts those of edp = dp*cp*tp / (ep*etp).
"""

from collections.abc import Sequence
from typing import NamedTuple

from steptime.base.num import Num, lcm, maximum, where
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.job.local_params import CountedParams, Pieces
from steptime.memory.buckets import BUCKET_ALIGNMENT, PARAM_ALIGNMENT, Run, round_up, run_buckets
from steptime.memory.on_host import follows_buckets, offload_buffers, on_host, staging_bytes
from steptime.memory.optimizer_moments import mean_moments, unevenness, update_temporaries
from steptime.model.lora import NF4, PROJECTIONS
from steptime.software.performance import ITEMSIZE
from steptime.software.precision import weight_bytes


class Bucket(NamedTuple):
    """Bytes of one gradient reduction."""

    elements: Num
    """Elements, padding included."""
    group: str = "dense"


class States(NamedTuple):
    """Bytes on one device of one pipeline stage."""

    params_bytes: Num
    gradients_bytes: Num
    optimizer_bytes: Num
    buckets: list[list[Bucket]]
    """Gradient buckets by virtual chunk, in the order of backward."""
    gathered_itemsize: Num = 0.0
    """Bytes per parameter that the all-gather after the update sends, averaged over the stage."""
    owned: Num = 0.0
    """Parameters that the device updates."""
    update_bytes: Num = 0.0
    """Temporaries that the update holds for the tensor it works on."""
    kept_masters: Num = 0.0
    """Of `optimizer_bytes` the masters of parameters that the host updates."""
    host_bytes: Num = 0.0
    """In host memory."""


def data_parallel_ranks(job: Job, group: str) -> Num:
    """Ranks that hold the same parameters of a group and reduce their gradients: dp*cp for dense parameters, edp for experts.

    Raises:
        KeyError: for an unknown group.
    """
    p = job.parallelism
    return {"dense": p.dp * p.cp, "expert": p.dp * p.cp * p.tp // (p.ep * p.etp)}[group]


def shard_ranks(job: Job, group: str = "dense") -> Num:
    """Ranks over which ZeRO shards a group's states: its data-parallel ranks, or one replica's share of them."""
    return data_parallel_ranks(job, group) // job.parallelism.replicas


def stage_states(assembly: Assembly) -> list[States]:
    """States of every stage's device."""
    return assembly.once(compute_states)


def compute_states(assembly: Assembly) -> list[States]:
    """The same, for one assembly."""
    buckets = assembly.by_chunk(lambda chunk: chunk_buckets(assembly, chunk))
    return assembly.by_stage(lambda stage, _: states_of(assembly, stage, buckets[stage]))


def states_of(assembly: Assembly, stage: int, buckets: list[list[Bucket]]) -> States:
    """States of a stage's device.

    ZeRO (Rajbhandari et al. 2020, figure 1): level 1 shards the optimizer, 2 the gradients too, 3 the parameters too, over
    dp*cp. Megatron's buffers are padded per parameter and bucket (`buckets.py`); others divide evenly and round up.
    """
    job = assembly.job
    size, level = job.software.state_bytes, job.zero_level
    chunks, counted = assembly.stages[stage], assembly.stage_params[stage]
    quantized = quantized_elements(assembly, chunks)
    buffer: dict[str, Num] = {}
    for bucket in (bucket for chunk in buckets for bucket in chunk):
        buffer[bucket.group] = buffer.get(bucket.group, 0.0) + bucket.elements
    parts = buffer if job.software.states.padded_buckets and level >= 1 else group_elements(counted)
    ranks = {group: shard_ranks(job, group) for group in parts}
    uneven, moments = unevenness(job, counted, ranks), mean_moments(job, counted)
    shards = {group: -(-elements // ranks[group]) + uneven[group] for group, elements in parts.items()}
    padded, shard = sum([parts[group] + n * uneven[group] for group, n in ranks.items()]), sum(shards.values())
    updated = shards if level >= 1 else parts
    offload, owned = job.performance.cpu_offload, sum(updated.values())
    kept = 1.0 - offload.share
    masters = offload.share * size.master * owned if offload.keep_masters else 0.0
    trained = size.params * (shard if level == 3 else padded) + quantized * extra_bytes(job)
    return States(
        params_bytes=trained + frozen_bytes(assembly, chunks) / (shard_ranks(job) if level == 3 else 1),
        gradients_bytes=size.gradients * (kept * shard if level >= 2 else padded * gradient_sets(job))
        + (offload_buffers(job, counted, first_bucket_size(assembly, chunks[0])) if follows_buckets(job) else 0.0),
        optimizer_bytes=masters
        + kept * sum([(size.master + moments[group]) * elements for group, elements in updated.items()]),
        buckets=buckets,
        owned=kept * owned,
        update_bytes=update_temporaries(job, counted, ranks) + staging_bytes(job, counted, owned),
        gathered_itemsize=gathered_itemsize(job, quantized, counted),
        kept_masters=masters,
        host_bytes=offload.share * on_host(job).stored * owned if offload.share else 0.0,
    )


def frozen_bytes(assembly: Assembly, chunks: Sequence[Chunk]) -> Num:
    """Bytes of the parameters of some chunks that are not trained, unsharded."""
    lora, itemsize = assembly.job.model.lora, assembly.job.software.itemsize
    if lora is None:
        return 0.0
    others = ITEMSIZE.get(lora.base_dtype or "", itemsize)
    projections = NF4 if lora.base_dtype == "nf4" else others
    total: Num = 0.0
    parts = [run for chunk in chunks for run in chunk.runs]
    parts += [(assembly.embedding, 1) for chunk in chunks if chunk.embedding]
    for part, count in [*parts, *((assembly.head, 1) for chunk in chunks if chunk.head)]:
        for op in part.ops:
            each = projections if op.name in PROJECTIONS else others
            mine = [
                p for p in op.params if not p.trained and not (p.vocab and part is assembly.head and assembly.tied_here)
            ]
            rows = assembly.shard.vocab  # in columns of layouts a part's ops are those of one of them
            whole = [p._replace(shape=(rows, *p.shape[1:])) if p.vocab else p for p in mine]
            total = total + count * each * sum([p.local(part.tp) for p in whole])
    return total


def group_elements(counted: CountedParams) -> dict[str, Num]:
    """Parameters of some chunks on one device, by group."""
    found: dict[str, Num] = {}
    for params, count in counted:
        for group, elements in params.elements.items():
            found[group] = found.get(group, 0.0) + count * elements
    return found


def gradient_sets(job: Job) -> Num:
    """2 where the reduced gradients are copies, which stay in buckets in addition to the originals from step to step; else 1."""
    p, copied = job.parallelism, job.software.states.reducer_buckets and job.zero_level == 0
    return where(p.dp * p.cp > 1, 2.0, 1.0) if copied else 1.0


def quantized_elements(assembly: Assembly, chunks: Sequence[Chunk]) -> Num:
    """Weights on one device that a recipe quantizes: those of the layers of some chunks, and of the head."""
    if assembly.job.software.recipe is None:
        return 0.0
    runs = [run for chunk in chunks for run in (*chunk.runs, *([(assembly.head, 1)] if chunk.head else []))]
    return 1.0 * sum([count * part.n_quantized for part, count in runs])


def extra_bytes(job: Job) -> float:
    """Bytes per quantized weight in addition to those of any parameter: its copies, minus the unquantized weight's."""
    s = job.software
    stored = s.bytes_of(s.states.param_dtype)
    return weight_bytes(s.recipe, stored, stored=s.states.fp8_params) - stored


def gathered_itemsize(job: Job, quantized: Num, counted: CountedParams) -> Num:
    """Bytes per parameter in the all-gather; with `fp8_params` quantized weights are sent in the recipe's format.

    Megatron puts fp8 parameters and others into separate buffers (core distributed/param_and_grad_buffer.py); the mean is used
    for both.
    """
    s = job.software
    usual = s.bytes_of(s.states.param_dtype)
    if s.recipe is None or not s.states.fp8_params:
        return usual
    whole = 1.0 * sum([count * params.total for params, count in counted])
    return usual + (s.recipe.param_gather_itemsize - usual) * quantized / maximum(whole, 1.0)


def chunk_buckets(assembly: Assembly, chunk: Chunk) -> list[Bucket]:
    """The gradient buckets of one model chunk, group by group, in backward order.

    Only the first chunk is cut into buckets: later stages and virtual chunks reduce in one piece (megatron/core/distributed/
    distributed_data_parallel.py, where pp rank > 0 or disable_bucketing leaves bucket_size None). Parameters of different groups
    are in separate buffers (same file, expert_parallel_buffers).
    """
    job, sharded = assembly.job, pads(assembly.job)
    if in_one_piece(assembly, chunk):
        return whole_buckets(assembly, chunk, sharded=sharded)
    found: list[Bucket] = []
    for group, backward in backward_runs(assembly, chunk).items():
        size = bucket_size(job, backward) if chunk.depth == 0 else None
        counts = run_buckets(backward, shard_ranks(job, group), size, sharded=sharded)
        found += [Bucket(elements, group) for elements in counts]
    return found


def pads(job: Job) -> bool:
    """Whether buckets are padded: Megatron's under the distributed optimizer."""
    return job.software.states.padded_buckets and job.zero_level >= 1


def in_one_piece(assembly: Assembly, chunk: Chunk) -> bool:
    """Whether the gradients of a chunk are reduced in one piece per group."""
    return bool(chunk.depth) and not (pads(assembly.job) and assembly.copied_weight(chunk))


def backward_runs(assembly: Assembly, chunk: Chunk) -> dict[str, list[Run]]:
    """The tensors of a chunk in the order of backward, by parameter group."""
    copied, parts = assembly.copied_weight(chunk), assembly.chunk_params(chunk)
    found: dict[str, list[Run]] = {group: [] for params, _ in parts for group in params.elements}
    for params, count in reversed(parts):
        for group, backward in found.items():
            mine = params.pieces.get(group, [])
            if copied is not None:
                mine = [Pieces(p.each, p.tensors, p.param is copied) for p in params.backward.get(group, [])]
            backward.append((mine, count))
    return found


def whole_buckets(assembly: Assembly, chunk: Chunk, *, sharded: bool) -> list[Bucket]:
    """The buckets of a chunk that is reduced in one piece: one per group, its tensors aligned (`run_buckets`)."""
    found: dict[str, Num] = {}
    for params, count in assembly.counted_params([chunk]):
        for group, mine in params.pieces.items():
            total = sum([times * (round_up(each, PARAM_ALIGNMENT) if sharded else each) for each, times, _ in mine])
            found[group] = found.get(group, 0.0) + count * total
    ranks = {group: lcm(BUCKET_ALIGNMENT, shard_ranks(assembly.job, group)) if sharded else 1 for group in found}
    return [Bucket(round_up(elements, ranks[group]), group) for group, elements in found.items()]


def bucket_size(job: Job, runs: Sequence[Run]) -> Num:
    """Elements per gradient bucket: from the plan (bytes, or a count of buckets for all of `runs`), else the profile's."""
    p, software = job.parallelism, job.software
    if p.n_param_buckets is not None:
        elements = sum([times * piece.times * piece.elements for pieces, times in runs for piece in pieces])
        return elements / p.n_param_buckets
    if p.bucket_size_mb is not None:
        return p.bucket_size_mb * 1e6 / software.bytes_of(software.states.main_grad_dtype)
    return maximum(software.layout.bucket_elements, software.layout.bucket_elements_per_dp * p.dp * p.cp)


def first_bucket_size(assembly: Assembly, chunk: Chunk) -> Num:
    """Elements per gradient bucket of a chunk that is cut into buckets."""
    return bucket_size(assembly.job, [run for runs in backward_runs(assembly, chunk).values() for run in runs])


class PartialGradients(NamedTuple):
    """All-reduces over tp in a step: their number, and the bytes of one (the mean where each parameter is reduced by itself)."""

    calls: Num
    bytes: Num


def partial_gradients(assembly: Assembly, stage: int, *, one_by_one: bool) -> PartialGradients:
    """Gradients that sequence parallelism leaves partial: those of a stage's parameters that tp does not split.

    Megatron flattens them into one all-reduce a step (megatron/core/distributed/finalize_model_grads.py). `one_by_one`: FSDP2
    redistributes each parameter's before every reduce-scatter (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
    _get_grad_inner_tensor).
    """
    job, chunks = assembly.job, assembly.stages[stage]
    runs = [run for chunk in chunks for run in chunk.runs]
    runs += [(assembly.head, 1) for chunk in chunks if chunk.head]
    if job.model.lora is not None:  # norms are frozen, and every rank makes all of an adapter's gradient
        return PartialGradients(0.0, 0.0)
    elements = 1.0 * sum([count * sum(part.unsplit) for part, count in runs])
    if not one_by_one:
        return PartialGradients(1.0, elements * job.software.state_bytes.gradients)
    tensors = sum([count * len(part.unsplit) for part, count in runs])
    return PartialGradients(1.0 * tensors * job.microbatches, elements * job.software.itemsize / tensors)
