"""Model states of a device under FSDP: shards of what is trained."""

from __future__ import annotations

from steptime.base.num import Num
from steptime.fsdp.groups import groups
from steptime.fsdp.plus_plus import secondary_bytes
from steptime.job.assembly import Assembly, Chunk
from steptime.memory.on_host import on_host
from steptime.memory.optimizer_moments import looped_temporaries, mean_moments
from steptime.memory.states import States, frozen_bytes, shard_ranks


def sharded_elements(assembly: Assembly, chunks: list[Chunk]) -> Num:
    """Trained parameters of some chunks on the rank that holds the most."""
    found = [groups(assembly, chunk) for chunk in chunks]
    return sum([sum([of.shard for of in (root, *layers)]) for root, layers in found])


def states(assembly: Assembly) -> list[States]:
    """Sharded states on the fullest rank of every stage; gathered parameters count as transients of the walk, not states."""
    return assembly.once(compute_states)


def compute_states(assembly: Assembly) -> list[States]:
    """The same, for one assembly."""
    size, found, offload = assembly.job.software.state_bytes, list[States](), assembly.job.performance.cpu_offload
    kept, there = 1.0 - offload.share, 0.0 if offload.params else 1.0
    for chunks in assembly.stages:
        shard = sharded_elements(assembly, chunks)
        counted = assembly.counted_params(chunks)
        ranks = {group: shard_ranks(assembly.job, group) for params, _ in counted for group in params.elements}
        moments = mean_moments(assembly.job, counted).get("dense", 0.0)
        optimizer_bytes = (size.master + moments) * shard
        frozen = frozen_bytes(assembly, chunks) / shard_ranks(assembly.job)
        found.append(
            States(
                there * (size.params * shard + frozen - stored_saving(assembly, chunks))
                + secondary_bytes(assembly.job, shard * shard_ranks(assembly.job)),
                0.0 if offload.share else size.gradients * shard,
                kept * optimizer_bytes,
                [],
                owned=kept * shard,
                update_bytes=kept * looped_temporaries(assembly.job, counted, ranks),
                host_bytes=offload.share * on_host(assembly.job).stored * shard + (1.0 - there) * frozen,
            )
        )
    return found


def stored_saving(assembly: Assembly, chunks: list[Chunk]) -> Num:
    """Bytes by which parameters that Megatron-FSDP stores in fp8 are smaller: a byte each, of MXFP8 two, by rows and by columns.

    MXFP8's scales, 1/32 byte each, are outside its buffers and are not counted.
    """
    software = assembly.job.software
    recipe = software.recipe
    if recipe is None or recipe.casts or not software.states.fp8_params:
        return 0.0
    saved = software.state_bytes.params - (2.0 if recipe.microscaling else 1.0)
    layers = [layer for chunk in chunks for layer in groups(assembly, chunk).layers]
    return saved * sum([of.quantized / of.ranks for of in layers])
