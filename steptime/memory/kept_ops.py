"""Bytes kept for backward by a micro-batch, listed by the op that keeps them: the terms of `PartMemory.saved`."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from steptime.base.num import Num
from steptime.job.assembly import Chunk
from steptime.job.parts import Part
from steptime.memory.op_walk import kept_by_part
from steptime.memory.part_memories import PartMemories
from steptime.model.ops import Op
from steptime.model.segments import kept_by


class KeptTensor(NamedTuple):
    """A tensor, and the first op in depth order that keeps it; None for the input of recomputed layers."""

    op: Op | None
    name: str
    bytes: Num
    """Bytes in all equal layers of the chunk."""


def kept_of_chunk(memories: PartMemories, chunk: Chunk) -> Iterator[KeptTensor]:
    """Every tensor that one micro-batch of a chunk keeps on the device."""
    assembly = memories.assembly
    stays = 1.0 - float(assembly.job.performance.activation_offload or 0.0)
    if chunk.embedding:
        yield from of_part(memories, assembly.embedding, 1)
    for count, layers, memory in memories.layers(chunk):
        part = layers[0][0]
        if memory is memories.plain[part]:
            yield from of_part(memories, part, stays * count)
        elif memory is memories.selective[part]:
            yield from of_part(memories, part, stays * count, memories.recompute.modules)
        else:
            yield KeptTensor(None, part.x.name, stays * count * memory.saved)
    if chunk.head:
        yield from of_part(memories, assembly.head, 1, assembly.head_modules)


def of_part(
    memories: PartMemories, part: Part, count: float, modules: AbstractSet[str | float] = frozenset()
) -> Iterator[KeptTensor]:
    """The tensors of `count` equal parts."""
    saved = kept_by_part(part.ops, part.x, modules, memories.autograd_of(part))
    keepers = kept_by(part.ops, saved.segments)
    for name in saved.names:
        yield KeptTensor(part.ops[keepers[name][0]], name, count * saved.sizes[name])
