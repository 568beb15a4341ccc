"""FSDP's memory where only a step's last micro-batch reduces gradients: the others accumulate theirs, unsharded, on every rank.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward, and _fsdp_param.py,
to_accumulated_grad_if_needed and accumulate_unsharded_grad_if_needed: sums are held in the dtype of the reduction, which a
group's first gradients are copied to. FSDP 1 (torch/distributed/fsdp/_runtime_utils.py, _post_backward_hook) adds flat gradients
in the dtype of compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from steptime.base.num import Num, maximum, same
from steptime.fsdp.ends import head_gradients, sum_of_tied_gradients
from steptime.fsdp.flat_walk import flat_forward, gathered_after, gathered_before, reduction
from steptime.fsdp.groups import Buffers, buffers, groups, options, stays_gathered
from steptime.fsdp.memory_walk import (
    Wrapped,
    copied_out,
    embedding_backward,
    forward,
    gathered_backward_ahead,
    wrapped,
)
from steptime.fsdp.moments import Moments
from steptime.fsdp.of_job import reduced_in
from steptime.fsdp.replays import gathered_ahead, kept_bytes, reentrant_checkpoints
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories
from steptime.software.performance import ITEMSIZE


class Phase(NamedTuple):
    """A micro-batch of the step."""

    summed: bool
    """Gradients of earlier ones are allocated."""
    last: bool
    """It reduces them."""


def phases(assembly: Assembly) -> Iterator[Phase]:
    """The micro-batches of a step that differ."""
    yield Phase(summed=False, last=False)
    if same(assembly.job.microbatches > 2):
        yield Phase(summed=True, last=False)
    yield Phase(summed=True, last=True)


class Sums:
    """Bytes of whole gradients as they add up."""

    def __init__(self, assembly: Assembly, root: Buffers, layers: list[Wrapped]) -> None:
        said, used = options(assembly), assembly.job.software.itemsize
        self.flat = said.version == 1
        self.grown = 1.0 if self.flat else ITEMSIZE[reduced_in(assembly.job)] / used
        """Size of a sum relative to the gradients."""
        self.copied = self.grown != 1.0
        self.whole = root.sums + sum([layer.buffers.sums for layer in layers])

    def reducing(self, group: Buffers) -> Num:
        """A group's sums when their reduction's input is allocated."""
        return group.sums + self.grown * group.chunked

    def reduced(self, group: Buffers) -> Num:
        """What replaces a group's sums once they are copied in; its last sum is one of them (foreach_reduce)."""
        return group.reduced + (self.grown - 1.0) * maximum(group.last, group.chunked)


def summed_bytes(assembly: Assembly) -> Num:
    """Bytes of the whole gradients that a step's earlier micro-batches leave."""
    chunk = assembly.chunks[0]
    root = buffers(assembly, groups(assembly, chunk).root)
    return Sums(assembly, root, wrapped(assembly, PartMemories(assembly), chunk)).whole


def walk(
    assembly: Assembly,
    memories: PartMemories,
    in_forward: Moments,
    in_backward: Moments,
    root: Buffers,
    layers: list[Wrapped],
) -> None:
    """Mark the moments of every micro-batch that differs from the others."""
    sums = Sums(assembly, root, layers)
    added = wrapped(assembly, PartMemories(assembly), assembly.chunks[0])
    kept = stays_gathered(assembly)
    for phase in phases(assembly):
        in_forward.standing_transient = sums.whole if phase.summed else 0.0
        if kept and phase.summed:
            gathered_forward(memories, in_forward, root, layers)
        else:
            (flat_forward if sums.flat else forward)(assembly, memories, in_forward, root, layers)
        if sums.flat:
            flat_backward(assembly, memories, in_backward, root, layers, phase)
        else:
            backward(WalkedChunk(assembly, memories, root, layers, added), in_backward, phase)


def gathered_forward(memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]) -> None:
    """The forward of a micro-batch whose parameters are gathered."""
    transient = root.unsharded + sum([layer.buffers.unsharded for layer in layers])
    parts = [memories.embedding, *(layer.memory for layer in layers), memories.head]
    below: Num = 0.0
    for part in parts:
        moments.mark(below + part.saved, transient + part.forward.bytes - part.saved, f"forward of {part.forward.op}")
        below = below + part.saved


class WalkedChunk(NamedTuple):
    """What a backward walks."""

    assembly: Assembly
    memories: PartMemories
    root: Buffers
    layers: list[Wrapped]
    added: list[Wrapped]
    """The layers where gradients are added to existing ones at once."""


def backward(walked: WalkedChunk, moments: Moments, phase: Phase) -> None:
    """As `memory_walk.backward`, with sums in place of gradients."""
    assembly, memories, root, layers, added = walked
    said, sums = options(assembly), Sums(assembly, root, layers)
    kept = stays_gathered(assembly) and not phase.last
    at_once = phase.summed and not sums.copied
    head, embedding, x = memories.head, memories.embedding, 1.0 * assembly.head.x.bytes
    below = embedding.saved + sum([layer.memory.saved for layer in layers])
    there: Num = sums.whole if phase.summed else 0.0
    arriving = gathered_backward_ahead(assembly, layers, len(layers))
    unsharded: Num = sum([kept_bytes(assembly, layer.buffers) for layer in layers])
    transient = there + root.unsharded + arriving + unsharded + head.backward.bytes - head.saved
    moments.mark(below + head.saved, transient, f"backward of {head.backward.op}")
    fresh, reducing = root.unsharded + head_gradients(assembly, added_at_once=at_once), 0.0
    for i in range(len(layers) - 1, -1, -1):
        block, before = layers[i].buffers, layers[i].memory.saved
        memory = (added if at_once else layers)[i].memory
        mine = there + fresh + reducing + unsharded
        following = gathered_backward_ahead(assembly, layers, i)
        moments.mark(below, mine + copied_out(assembly, layers, i) + x, "backward of an all-gather")
        mine = mine - kept_bytes(assembly, block) + block.unsharded
        moments.mark(below, mine + following + memory.backward.bytes - before, f"backward of {memory.backward.op}")
        below = below - before
        unsharded = unsharded - (0.0 if kept else kept_bytes(assembly, block))
        rest = fresh + x + following + unsharded
        if phase.last:
            there = there - block.sums
            reducing = 0.0
            for at, waits in reductions(layers[i], sums):
                moments.mark(below, there + rest + at, "backward of a reduce-scatter")
                reducing = waits
            moments.to_come = maximum(0.0, moments.to_come - sum(layers[i].gradients))
        elif not phase.summed:
            there = there + block.sums
            copied = layers[i].last if sums.copied else 0.0
            moments.mark(below, there + rest + copied, "backward of a sum of gradients")
        if (said.wrap == "model" and not at_once) or (said.wrap != "model" and phase.last):
            fresh = fresh + layers[i].waits
    transient = there + fresh + reducing + (unsharded if kept else 0.0)
    embedding_backward(moments, embedding, transient, sum_of_tied_gradients(assembly))
    replicas = 0.0 if said.wrap == "model" else sum([layer.waits for layer in layers])
    resident = replicas if phase.last else there + (unsharded + root.unsharded if kept else 0.0)
    root_sums(moments, root, sums, phase, resident)


def root_sums(moments: Moments, root: Buffers, sums: Sums, phase: Phase, resident: Num) -> None:
    """The root's gradients at the end of a backward: reduced by the last micro-batch, copied by the first."""
    if phase.last:
        left = maximum(sums.reducing(root), sums.reduced(root)) + root.reduce_input
        moments.mark(0.0, resident + left, "backward of the root's reduce-scatter")
    elif not phase.summed and sums.copied:
        moments.mark(0.0, resident + root.sums + root.last, "backward of a sum of gradients")


def reductions(layer: Wrapped, sums: Sums) -> Iterator[tuple[Num, Num]]:
    """At each reduction of a layer, its experts' first: the bytes that its groups hold, and the inputs, which outlive it."""
    inputs: Num = 0.0
    left = layer.buffers.sums
    for j in range(len(layer.each) - 1, -1, -1):
        one = layer.each[j]
        left, inputs = left - one.sums, inputs + one.reduce_input
        gathered = sum([of.unsharded for of in layer.each[:j]])
        yield maximum(sums.reducing(one), sums.reduced(one)) + left + gathered + inputs, inputs


def flat_backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped], phase: Phase
) -> None:
    """As `memory_walk.flat_backward`, with flat sums in place of gradients."""
    reshard, sums = options(assembly).reshard_after_forward, Sums(assembly, root, layers)
    head, embedding, x = memories.head, memories.embedding, 1.0 * assembly.head.x.bytes
    below = embedding.saved + sum([layer.memory.saved for layer in layers])
    total: Num = sums.whole if phase.summed else 0.0
    first, kept_x = layers[-1:] if gathered_ahead(assembly) else [], 3.0 * x if reentrant_checkpoints(assembly) else 0.0
    there = sum([layer.buffers.gathered for layer in (first if reshard else layers)])
    coming = first[0].buffers.sent if reshard and first else 0.0
    moments.mark(below + head.saved, total + root.gathered + there + coming, "backward of an all-gather")
    transient = total + root.gathered + there + head.backward.bytes - head.saved
    moments.mark(below + head.saved, transient, f"backward of {head.backward.op}")
    fresh: Num = head_gradients(assembly)
    for i in range(len(layers) - 1, -1, -1):
        memory, flat = layers[i].memory, layers[i].buffers
        base = root.gathered + fresh
        if (following := gathered_before(assembly, layers, i)) is not None:
            there = there + following.gathered
            moments.mark(below, total + base + there + following.sent + x, "backward of an all-gather")
        transient = total + base + there + memory.backward.bytes - memory.saved
        moments.mark(below, transient, f"backward of {memory.backward.op}")
        below = below - memory.saved
        transient = total + base + there + flat.gradients + x + kept_x
        moments.mark(below, transient + flat.gathered, "backward of a flat gradient")
        total = total + (0.0 if phase.summed else flat.sums)
        freed = flat.gathered if reshard or phase.last else 0.0
        if (following := gathered_after(assembly, layers, i)) is not None:
            there, transient = there + following.gathered, transient + following.gathered
            then = transient - (flat.gathered if phase.summed else 0.0)
            moments.mark(below, then + following.sent, "backward of an all-gather")
        if phase.last:
            total, transient = total - flat.sums, transient - flat.sums + reduction(assembly, flat) - flat.gathered
            moments.mark(below, transient, "backward of a reduce-scatter")
            moments.to_come = maximum(0.0, moments.to_come - sum(layers[i].gradients))
        there = there - freed
    embedding_backward(moments, embedding, total + root.gathered + fresh + there, sum_of_tied_gradients(assembly))
    transient = total + there + root.gathered + root.gradients + root.gathered
    moments.mark(0.0, transient, "backward of the root's flat gradient")
    if phase.last:
        moments.mark(0.0, reduction(assembly, root) + root.gradients, "backward of the root's reduce-scatter")
