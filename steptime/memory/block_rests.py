"""What remains of the blocks of torch's caching allocator beside a stage's states."""

from __future__ import annotations

from steptime.base.num import Num, where
from steptime.job.assembly import Assembly, Chunk
from steptime.memory.states import Bucket, chunk_buckets, group_elements
from steptime.software.performance import Software
from steptime.software.state_bytes import StateBytes

KIB = 1024.0
"""Bytes of a KiB."""
MIB = KIB * KIB
"""Bytes of a MiB."""
ROUND_LARGE, LARGEST_SHARED, KEPT_REST = 2.0 * MIB, 10.0 * MIB, 1.0 * MIB
"""kRoundLarge, kMinLargeAlloc and kSmallSize of torch's caching allocator."""
BLOCKS = "torch v2.11.0 c10/cuda/CUDACachingAllocator.cpp, get_allocation_size and should_split"


def block_rest_bytes(assembly: Assembly, chunks: list[Chunk], buckets: list[list[Bucket]]) -> Num:
    """Bytes counted for states beyond their size: of Megatron's, whose buffers and tensors are known one by one.

    Flat buffers of each chunk's gradients by parameter group, and of its parameters under the distributed optimizer; else each
    parameter, its master copy and its moments for themselves. `buckets`: by chunk, where they are cut already.
    """
    job, software = assembly.job, assembly.job.software
    if not whole_blocks(software):
        return 0.0
    size = job.software.state_bytes
    rest: Num = 0.0
    if job.zero_level:
        rests: dict[int, list[Num]] = {}  # equal chunks share their buckets
        cuts = buckets or [chunk_buckets(assembly, chunk) for chunk in chunks]
        for cut in cuts:
            if id(cut) not in rests:
                rests[id(cut)] = buffer_rests(size, cut)
            for buffer in rests[id(cut)]:
                rest = rest + buffer
        return rest
    for chunk in chunks:
        counted = assembly.chunk_params(chunk)
        for elements in group_elements(counted).values():
            rest = rest + block_rest(size.gradients * elements)
        for p, count in ((p, count) for own, count in counted for p in own):
            tensors = block_rest(size.params * p.each) + block_rest(size.master * p.each)
            rest = rest + count * p.tensors * (tensors + 2.0 * block_rest(size.moments / 2.0 * p.each))
    return rest


def whole_blocks(software: Software) -> bool:
    """Whether states are Megatron's flat buffers, in blocks of an NVIDIA device that expandable segments do not cut."""
    nvidia = software.compute_capability != 0.0
    return software.states.padded_buckets and nvidia and not software.buffers.expandable_segments


def buffer_rests(size: StateBytes, cut: list[Bucket]) -> list[Num]:
    """`block_rest` of the flat buffers of a chunk's gradients and parameters, by parameter group."""
    flat: dict[str, Num] = {}
    for bucket in cut:
        flat[bucket.group] = flat.get(bucket.group, 0) + bucket.elements
    return [block_rest(each * elements) for elements in flat.values() for each in (size.gradients, size.params)]


def block_rest(size: Num) -> Num:
    """Bytes by which a new allocator block exceeds the `size` that was requested.

    From 10 MiB on a block is a multiple of 2 MiB long (kRoundLarge); what is left of it stays with it up to 1 MiB (kSmallSize).

    >>> block_rest(49.25 * 2**20) / 2**20, block_rest(98.25 * 2**20) / 2**20
    (0.75, 0.0)
    """
    rest = -size % ROUND_LARGE
    return where((size >= LARGEST_SHARED) & (rest <= KEPT_REST), rest, 0.0)
