"""One chunk of a pipeline under FSDP2: its parts, its groups' buffers, and the worst moment of each kind of action.

Every moment counts what the chunk's own micro-batch saves and the transients, including gathered parameters and unsharded
gradients of the chunk; the groups of a layer whose experts are on other ranks count together
(torch 2.13: distributed/fsdp/_fully_shard/_fsdp_param_group.py, distributed/pipelining/stage.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

from steptime.base.num import Num, maximum, minimum
from steptime.fsdp.groups import Buffers, buffers, groups, options
from steptime.fsdp.loss_in_pipeline import by_micro_batch
from steptime.fsdp.memory_walk import Wrapped, gathered_backward_ahead, gathered_forward_ahead, wrapped
from steptime.fsdp.moments import Moments
from steptime.fsdp.of_job import reduced_in
from steptime.job.assembly import Assembly, Chunk
from steptime.memory.ledger import NO_BYTES, PartMemory, Peak
from steptime.memory.part_memories import PartMemories, input_kept
from steptime.memory.stages import PeakMoment, logits_kept
from steptime.software.performance import ITEMSIZE

ABSENT = PartMemory(0.0, NO_BYTES, NO_BYTES)
"""The missing embedding or head of a chunk in the middle of the model."""


class Gradients(NamedTuple):
    """Unsharded gradients that a chunk holds between actions."""

    summed: bool = False
    """Of all micro-batches so far, in the dtype of the reduction [B]."""
    fresh: bool = False
    """Made by the second half of a backward and not added to the others yet [B]."""

    def after(self, kind: str) -> Gradients:
        """Once an action of a kind has run (_fsdp_param_group.py, post_backward, which only a whole backward or an I runs)."""
        if kind == "F":
            return self
        return (
            Gradients(self.summed, fresh=True) if kind == "W" else Gradients(self.summed or kind == "B" or self.fresh)
        )


class Passing(NamedTuple):
    """The state of a chunk when one of its actions starts."""

    kind: str
    fetched: bool
    """Its parameters were requested before the action."""
    gathered: bool
    """Its layers are already gathered."""
    roots: bool
    """Parameters outside of layers have to be gathered first."""
    gradients: Gradients


@dataclass(frozen=True, eq=False)
class ShardedChunk:
    """A chunk's parts and the buffers of its groups, for one micro-batch."""

    assembly: Assembly
    chunk: Chunk
    keeps_sent: bool
    """Whether the schedule keeps the gradient that it sent last."""
    root: Buffers
    last_of_root: Num
    """Bytes of the last gradient of the root's parameters."""
    layers: list[Wrapped]
    added: list[PartMemory]
    """The layers as they are where gradients of weights are added to existing ones at once."""
    embedding: PartMemory
    head: PartMemory
    head_grad: Num
    """Bytes of the gradients of the head's parameters."""
    output: Num
    """Bytes of its output that the pipeline holds until its backward."""
    half: tuple[Num, Num]
    """Where backward is split: what its first half leaves in memory, and its peak."""
    waits: list[Num]
    """What the first half leaves of each layer; nothing unless backward is split."""
    x: Num
    """Bytes of a layer's input."""
    by_loss: bool = False
    """Whether its forward ends with the loss in chunks, which reduces the head's gradient (`loss_in_pipeline`)."""

    @property
    def saved(self) -> Num:
        """Bytes that a forward leaves for its backward."""
        inside = sum([layer.memory.saved for layer in self.layers])
        return self.embedding.saved + inside + self.head.saved + self.output

    @property
    def parameters(self) -> Num:
        """Its layers, gathered."""
        return sum([layer.buffers.unsharded for layer in self.layers])

    @property
    def converts(self) -> bool:
        """Whether gradients accumulate in copies of another dtype."""
        return reduced_in(self.assembly.job) != self.assembly.job.software.compute_dtype

    def summed(self, of: Buffers) -> Num:
        """Bytes of a group's gradients in the dtype in which they accumulate."""
        if not self.converts:
            return of.gradients
        return of.gradients * ITEMSIZE[reduced_in(self.assembly.job)] / self.assembly.job.software.itemsize

    @property
    def roots(self) -> list[Buffers]:
        """The root's group, where its gradients add up over the micro-batches of a step."""
        return [] if self.by_loss else [self.root]

    @property
    def pending(self) -> Num:
        """Bytes of the head's last reduction, whose input the next one frees, and of its sharded gradient.

        The norm's gradient is a part of what the second micro-batch's reduction gave, in the stored dtype, and holds all of it.
        """
        times = 1.0 if self.assembly.job.schedule == "gpipe" else 2.0
        return self.root.reduce_input + times * self.root.stored if self.by_loss else 0.0

    def gradient_bytes(self, of: Gradients) -> Num:
        """Bytes of the gradients that are allocated."""
        every = [*self.roots, *(layer.buffers for layer in self.layers)]
        summed = sum([self.summed(group) for group in every]) if of.summed else 0.0
        return (
            self.pending
            + summed
            + (sum([group.gradients for group in every]) if of.fresh and (self.converts or not of.summed) else 0.0)
        )

    def worst(self, passing: Passing) -> PeakMoment:
        """The worst moment of an action."""
        moments = Moments(0.0)
        if passing.fetched:
            one = reduce(maximum, [layer.buffers.gathered for layer in self.layers], self.root.gathered)
            saved = 0.0 if passing.kind == "F" else self.saved
            bytes_ = self.root.unsharded + self.parameters + self.gradient_bytes(passing.gradients) + one
            moments.mark(saved, bytes_, "copies of gathered parameters")
        if passing.kind == "F":
            self.forward(passing, moments)
        elif passing.kind == "B":
            self.backward(passing, moments)
        else:
            self.one_half(passing, moments)
        return moments.worst

    def forward(self, passing: Passing, moments: Moments) -> None:
        """As without a pipeline, except that layers already gathered are not gathered again."""
        reshard = options(self.assembly).reshard_after_forward
        base = self.gradient_bytes(passing.gradients)
        below, root = self.embedding.saved, self.root
        previous = root.gathered if passing.roots else 0.0
        early = self.embedding.forward
        ahead = (
            [0.0] * (len(self.layers) + 1) if passing.gathered else gathered_forward_ahead(self.assembly, self.layers)
        )
        arriving = root.unsharded + previous + ahead[0]
        moments.mark(0.0, base + arriving + early.bytes, f"forward of {early.op or 'the input'}")
        params = self.parameters if passing.gathered else 0.0
        for i, layer in enumerate(self.layers):
            memory, block = layer.memory, layer.buffers
            newest = 0.0 if passing.gathered else block.gathered
            if not passing.gathered:
                arriving = root.unsharded + previous + maximum(newest, ahead[i]) + params + block.unsharded
                moments.mark(below, base + arriving + self.x, "forward of an all-gather")
                params = params + block.unsharded
            extra = memory.forward.bytes - memory.saved + newest + ahead[i + 1]
            moments.mark(
                below + memory.saved, base + root.unsharded + params + extra, f"forward of {memory.forward.op}"
            )
            below, previous = below + memory.saved, newest
            params = params - (block.unsharded if reshard else 0.0)
        head = self.head
        inside = base + root.unsharded + params
        if self.by_loss:
            extra = self.summed(root) + head.backward.bytes - head.saved + self.sent_before(passing)
            moments.mark(below + head.saved, inside + extra, f"backward of {head.backward.op}")
            return
        extra = head.forward.bytes - head.saved + self.output + previous
        moments.mark(below + head.saved, inside + extra, f"forward of {head.forward.op or 'the output'}")

    def backward(self, passing: Passing, moments: Moments) -> None:
        """Last layer first. Gathered parameters stay; each layer's gradients are added to those of earlier micro-batches."""
        summed, fresh = passing.gradients
        root, head = self.root, self.head
        below = self.embedding.saved + sum([layer.memory.saved for layer in self.layers])
        base = self.output + root.unsharded + self.gradient_bytes(passing.gradients) + self.sent_before(passing)
        received = (
            0.0 if self.chunk.head else self.x
        )  # in the pipeline's own buffer; the last layer counts it once more
        params = self.parameters if passing.gathered else 0.0
        ends = (self.x, "head.norm") if self.by_loss else (head.backward.bytes - head.saved, head.backward.op)
        moments.mark(below + head.saved, base + params + ends[0], f"backward of {ends[1]}")
        grads, sums = 0.0 if self.by_loss else self.head_grad, 0.0
        at_once = summed and not self.converts
        for i in range(len(self.layers) - 1, -1, -1):
            memory, block = self.added[i] if at_once else self.layers[i].memory, self.layers[i].buffers
            if not passing.gathered:
                params = params + block.unsharded
                arrived = gathered_backward_ahead(self.assembly, self.layers, i, arrived=True)
                arriving = params + block.gathered + arrived + self.x - received
                moments.mark(below, base + arriving + grads + sums, "backward of an all-gather")
            ahead = 0.0 if passing.gathered else gathered_backward_ahead(self.assembly, self.layers, i)
            extra = memory.backward.bytes - self.layers[i].memory.saved - received
            received = 0.0
            moments.mark(below, base + params + ahead + grads + sums + extra, f"backward of {memory.backward.op}")
            below = below - self.layers[i].memory.saved
            if not summed:
                sums = sums + self.summed(block)
                copied = self.layers[i].last if self.converts else 0.0
                moments.mark(
                    below, base + params + ahead + grads + sums + copied + self.x, "backward of a sum of gradients"
                )
        extra = self.embedding.backward.bytes - self.embedding.saved
        moments.mark(
            self.embedding.saved, base + params + grads + sums + extra, f"backward of {self.embedding.backward.op}"
        )
        if not summed and self.converts and not fresh and not self.by_loss:
            moments.mark(
                0.0, base + params + sums + self.summed(root) + self.last_of_root, "backward of a sum of gradients"
            )

    def sent_before(self, passing: Passing) -> Num:
        """Bytes of the gradient that the previous micro-batch has sent: 1F1B with one chunk keeps it until the next one is sent.

        schedules.py, the operations of Schedule1F1B._step_microbatches.
        """
        return self.x if self.keeps_sent and passing.gradients.summed and not self.chunk.embedding else 0.0

    def one_half(self, passing: Passing, moments: Moments) -> None:
        """A backward for inputs, or for weights; the latter frees what was kept for it layer by layer."""
        kept, peak = self.half
        params = self.root.unsharded + (self.parameters if passing.gathered or passing.kind == "I" else 0.0)
        now, then = self.gradient_bytes(passing.gradients), self.gradient_bytes(passing.gradients.after(passing.kind))
        if passing.kind == "I":
            moments.mark(0.0, self.output + params + now + peak, "gradients of the inputs")
            moments.mark(kept, self.output + params + then, "gradients of the inputs")
            return
        left, added = kept, self.head_grad
        for layer, waits in zip(reversed(self.layers), reversed(self.waits), strict=True):
            added = added + layer.buffers.gradients
            moments.mark(left, params + now + minimum(added, then - now), "gradients of the weights")
            left = left - waits

    def reduction(self, gradients: Gradients) -> PeakMoment:
        """The worst moment of the reduction: root first, each group's parameters freed before its gradients are copied in."""
        moments = Moments(0.0)
        params, left = self.parameters, self.gradient_bytes(gradients)
        shards: Num = 0.0
        roots = [(root, self.last_of_root) for root in self.roots]
        for of, last in [*roots, *((w.buffers, w.last) for w in self.layers)]:
            params = params - (0.0 if of is self.root else of.unsharded)
            moments.mark(0.0, params + left + shards + of.reduce_input, "reduction of gradients")
            left = left - self.summed(of)
            shards = shards + of.reduce_output
            moments.mark(0.0, params + left + shards + of.reduce_input + last, "reduction of gradients")
        return moments.worst


def chunk_bytes(
    assembly: Assembly, chunk: Chunk, memories: PartMemories, plain: PartMemories, *, split: bool
) -> ShardedChunk:
    """Sizes of one chunk. `memories` keep the gradients of a part until its backward ends, `plain` do not."""
    job, found = assembly.job, groups(assembly, chunk)
    itemsize = job.software.itemsize
    embedding = memories.embedding if chunk.embedding else ABSENT
    head = memories.head if chunk.head else ABSENT
    layers = wrapped(assembly, memories, chunk, every=True)
    added = [w.memory for w in wrapped(assembly, plain, chunk)]
    x = 1.0 * assembly.boundary_bytes
    if layers and not chunk.embedding:  # its input lies in the pipeline's own buffer
        counted = input_kept(chunk.runs[0][0]) or job.recompute.granularity == "full"
        mine = (1.0 - float(job.performance.activation_offload or 0.0)) * x if counted else 0.0
        layers[0] = replace(layers[0], memory=in_buffer(layers[0].memory, x, mine))
        added[0] = in_buffer(added[0], x, mine)
    halves = memories.split(chunk) if split else None
    waits = [memories.split_part(part).kept for part, count in chunk.runs for _ in range(count)] if split else []
    return ShardedChunk(
        assembly, chunk, job.schedule == "1f1b" and job.parallelism.vpp == 1, buffers(assembly, found.root),
        found.root.last * itemsize, layers, added,
        embedding, head,
        assembly.local_head_params.total * itemsize if chunk.head else 0.0,
        logits_kept(assembly) if chunk.head else x,
        (halves.kept, halves.inputs.bytes) if halves else (0.0, 0.0), waits, x, by_micro_batch(assembly, chunk),
    )  # fmt: skip


def in_buffer(memory: PartMemory, x: Num, kept: Num) -> PartMemory:
    """A layer whose input is stored elsewhere; `kept` bytes of it were counted as saved."""
    return memory._replace(
        saved=memory.saved - kept,
        forward=Peak(memory.forward.bytes - x, memory.forward.op),
        backward=Peak(memory.backward.bytes - kept, memory.backward.op),
    )
