"""Blocks that torch's caching allocator gives to the states of a stage: what it counts beyond the bytes that were requested.

The allocator is run tensor by tensor, as Megatron makes them. Line numbers: torch v2.11.0 c10/cuda/CUDACachingAllocator.cpp;
megatron-core 0.16.1.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from steptime.base.rows import StageBuffer
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.job.local_params import Pieces
from steptime.memory.block_rests import BLOCKS, MIB, block_rest_bytes, whole_blocks
from steptime.memory.buckets import PARAM_ALIGNMENT, round_up
from steptime.memory.buffers import FP32, gradient_copy_bytes
from steptime.memory.states import States, backward_runs, chunk_buckets, shard_ranks
from steptime.software.state_bytes import PER_ELEMENT

SMALL, SHARED, LARGE, ROUND = 1.0 * MIB, 20.0 * MIB, 10.0 * MIB, 2.0 * MIB
"""kSmallSize, kLargeBuffer, kMinLargeAlloc and kRoundLarge."""
UNIT = 512.0
"""kMinBlockSize."""


class TensorBlock(NamedTuple):
    """The block of a tensor: address, length, and the bytes that were requested."""

    address: float
    length: float
    size: float


class LargeBlocks:
    """The allocator's pool of tensors over 1 MiB. Smaller ones have a separate pool, whose blocks are cut to the unit.

    A tensor takes the smallest free block that is long enough; without one, memory of 20 MiB for a tensor below 10 MiB, else of
    a multiple of 2 MiB (get_free_block, get_allocation_size). What is left of a block stays with it up to 1 MiB (should_split).
    """

    def __init__(self) -> None:
        """Start with no memory."""
        self.rest = 0.0
        """Bytes counted beyond those requested."""
        self._lengths: dict[float, float] = {}
        """Length of every free block by its address."""
        self._starts: dict[float, float] = {}
        """Their addresses by end."""
        self._known: list[float] = []
        """Lengths of blocks that are or were free, the shortest first: few, where blocks may be a hundred thousand."""
        self._heaps: dict[float, list[float]] = {}
        """Addresses of each such length as a heap; those of blocks that are free no more are passed over."""
        self._end = 0.0

    def allocate(self, size: float) -> TensorBlock | None:
        """A tensor's block; None for one of the other pool."""
        if size <= SMALL:
            return None
        length = wanted = -(-size // UNIT) * UNIT
        if (address := self._shortest(wanted)) is None:
            length, address = self._new(wanted)
        else:
            length = self._take(address)
        if length - wanted > SMALL:
            self._add(address + wanted, length - wanted)
            length = wanted
        self.rest += length - size
        return TensorBlock(address, length, size)

    def release(self, block: TensorBlock) -> None:
        """Free a block; it joins its free neighbors (try_merge_blocks)."""
        address, length, size = block
        self.rest -= length - size
        if address + length in self._lengths:
            length += self._take(address + length)
        if address in self._starts:
            address = self._starts[address]
            length += self._take(address)
        self._add(address, length)

    def _new(self, wanted: float) -> tuple[float, float]:
        """Memory from the driver, apart from all other."""
        length = SHARED if wanted < LARGE else -(-wanted // ROUND) * ROUND
        address, self._end = self._end, self._end + length + ROUND
        return length, address

    def _shortest(self, wanted: float) -> float | None:
        """Address of the first of the shortest free blocks that are long enough."""
        at = bisect_left(self._known, wanted)
        while at < len(self._known):
            length = self._known[at]
            heap = self._heaps[length]
            while heap and self._lengths.get(heap[0]) != length:
                heappop(heap)
            if heap:
                return heap[0]
            del self._known[at], self._heaps[length]
        return None

    def _add(self, address: float, length: float) -> None:
        """Add a free block."""
        self._lengths[address] = length
        self._starts[address + length] = address
        if length not in self._heaps:
            insort(self._known, length)
            self._heaps[length] = []
        heappush(self._heaps[length], address)

    def _take(self, address: float) -> float:
        """Length of a free block that is used, or becomes part of another."""
        length = self._lengths.pop(address)
        del self._starts[address + length]
        return length


def further_ends(assembly: Assembly, stage: int, states: States) -> StageBuffer:
    """Ends of blocks between steps beyond those that `block_rest_bytes` counts, tensor by tensor; of Megatron's states.

    Moments use the space left free by parameters and main weights; space left by activations is not tracked, so a job's own
    figure may differ by a few MiB. None (0 bytes) for expandable segments and where states are not Megatron's flat buffers.
    """
    job, chunks = assembly.job, assembly.stages[stage]
    found = 0.0
    if replayed(job):
        found = states_rest(assembly, chunks, states) - block_rest_bytes(assembly, chunks, states.buckets)
    return StageBuffer("unused ends of blocks shared by small tensors", found, stays=True, at_peak=False, source=BLOCKS)


def replayed(job: Job) -> bool:
    """Whether the tensors of a job's states are known one by one."""
    software = job.software
    return whole_blocks(software) and job.zero_level <= 1 and software.states.optimizer in PER_ELEMENT


def states_rest(assembly: Assembly, chunks: Sequence[Chunk], states: States) -> float:
    """Bytes counted beyond those of the states, of the last data-parallel rank.

    Parameters come first, in registered order; then each chunk's buffers (distributed/param_and_grad_buffer.py:797, :803), which
    with the distributed optimizer take the parameters over; then main weights, each made from a copy of the parameter
    (optimizer/optimizer.py:674, optimizer/distrib_optimizer.py:399); fp32 copies of half-precision gradients; in the first step
    the moments, tensor by tensor (TransformerEngine v2.9 optimizers/fused_adam.py, initialize_state). Experts have their own
    optimizer, after the dense parameters'.
    """
    job, size, blocks = assembly.job, assembly.job.software.state_bytes, LargeBlocks()
    params = [[blocks.allocate(size.params * n) for n in tensors(assembly, chunk)] for chunk in chunks]
    owned: dict[str, list[float]] = {}
    for virtual, (chunk, mine) in enumerate(zip(chunks, params, strict=True)):
        cut = states.buckets[virtual] if states.buckets else chunk_buckets(assembly, chunk)
        lengths: dict[str, list[float]] = {}
        for bucket in cut:
            lengths.setdefault(bucket.group, []).append(float(bucket.elements))
        backward = backward_runs(assembly, chunk)
        for group, ends in lengths.items():
            if job.zero_level:
                blocks.allocate(size.params * sum(ends))
            blocks.allocate(size.gradients * sum(ends))
            pieces = [piece for run, times in backward[group] for piece in [*run] * times]
            updated = shards(pieces, ends, float(shard_ranks(job, group))) if job.zero_level else registered(pieces)
            owned.setdefault(group, []).extend(updated)
        for block in filter(None, mine if job.zero_level else ()):
            blocks.release(block)
    updated = [n for group in sorted(owned) for n in owned[group]]  # "dense" before "expert"
    whole = size.master == FP32
    for n in updated if whole else ():
        copy = blocks.allocate(size.params * n)
        blocks.allocate(FP32 * n)
        if copy:
            blocks.release(copy)
    for n in updated if gradient_copy_bytes(job, states) else ():
        blocks.allocate(FP32 * n)
    count = int(PER_ELEMENT[job.software.states.optimizer])
    for n in updated:
        for _ in range(count):
            blocks.allocate(size.moments / count * n)
        if not whole:
            blocks.allocate(size.master * n)
    return blocks.rest


def tensors(assembly: Assembly, chunk: Chunk) -> Iterator[float]:
    """Elements of every parameter of a chunk on a device, in registered order."""
    for params, count in assembly.chunk_params(chunk):
        yield from [float(p.each) for p in params for _ in range(p.tensors)] * count


def registered(pieces: Sequence[Pieces]) -> list[float]:
    """Elements of the tensors of a group in registered order, given in that of backward."""
    return [float(piece.elements) for piece in reversed(pieces) for _ in range(piece.times)]


def shards(pieces: Sequence[Pieces], buckets: Sequence[float], ranks: float) -> list[float]:
    """Elements of each tensor that the last of `ranks` ranks updates, of every bucket its part (distrib_optimizer.py).

    >>> shards([Pieces(100, 1), Pieces(1000, 1)], [1152.0], 2.0)
    [552.0]
    """
    found: list[float] = []
    at, ends = 0.0, accumulate(buckets)
    left = [(end - length / ranks, end) for length, end in zip(buckets, ends, strict=True)]
    first, end = left.pop(0)
    for elements, times, _ in pieces:
        for _ in range(times):
            at = round_up(at, PARAM_ALIGNMENT)
            if left and at + elements > end:
                at = end
                first, end = left.pop(0)
            mine = min(at + elements, end) - max(at, first)
            if mine > 0.0:
                found.append(float(mine))
            at += elements
    return found
