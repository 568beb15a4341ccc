"""FSDP's memory: parameter groups walked as allocations and frees, together with the activations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

from steptime.base.num import Num, made, maximum, same
from steptime.fsdp.groups import Buffers, buffers, flat_group, group_of, groups, one_group, options
from steptime.fsdp.of_job import unsynced
from steptime.fsdp.replays import kept_bytes
from steptime.fsdp.sharded_states import sharded_elements
from steptime.job.assembly import Assembly, Chunk
from steptime.memory.ledger import PartMemory
from steptime.memory.part_memories import PartMemories
from steptime.memory.stages import PeakMoment
from steptime.model.ops import Param
from steptime.software.performance import ITEMSIZE


@dataclass(frozen=True, eq=False)
class Wrapped:
    """A layer, or the layers that are checkpointed together, with the buffers of its parameter group."""

    memory: PartMemory
    each: list[Buffers]
    """Buffers of its group, and of its experts' group where there is one."""
    gradients: list[Num]
    """Bytes of the sharded gradients of each group."""
    waits: Num
    """Bytes that its backward leaves allocated until the whole backward ends."""
    last: Num
    """Bytes of its last gradient in the compute dtype."""

    @cached_property
    def buffers(self) -> Buffers:
        """Sums over all of its groups."""
        return Buffers(*[sum(sizes) for sizes in zip(*self.each, strict=True)])

    @property
    def copying(self) -> Num:
        """The most that gathered buffers take in addition to the unsharded parameters: groups copy out one after another."""
        return reduce(maximum, [one.gathered + one.turned for one in self.each], 0.0)


def by_module(assembly: Assembly) -> bool:
    """Whether the modules of a block are gathered one by one; gradients that add up whole are walked by block."""
    return options(assembly).wrap == "module" and not unsynced(assembly.job)


def largest_module(assembly: Assembly, params: list[Param]) -> Buffers:
    """Buffers of the module that has the largest of some parameters; a norm or projection without biases has one."""
    alone = [buffers(assembly, flat_group(assembly, [p], assembly.head.tp)) for p in params]
    return reduce(lambda one, other: other if same(other.gathered > one.gathered) else one, alone)


class Moments:
    """The worst moment so far."""

    def __init__(self, grads_not_yet_allocated: Num) -> None:
        """`grads_not_yet_allocated`: bytes of sharded gradients that are still to be allocated."""
        self.to_come = grads_not_yet_allocated
        self.beside: Num = 0.0
        """Bytes that all moments hold besides, among the transients."""
        self.most: Num = 0.0
        """Most activations and transients of any moment."""
        self.worst = PeakMoment(0.0, 0.0, "", grads_not_yet_allocated)

    def mark(self, saved: Num, transient: Num, op: str) -> None:
        """Record a moment that holds `saved` bytes for backward and `transient` other bytes."""
        self.most = maximum(self.most, saved + self.beside + transient)
        self.worst = self.worst.worse(made(PeakMoment, (saved, self.beside + transient, op, self.to_come, 0.0)))


def wrapped(assembly: Assembly, memories: PartMemories, chunk: Chunk, *, every: bool = False) -> list[Wrapped]:
    """The layers of a chunk in depth order. Layers checkpointed together count as one, with the first group or `every` one."""
    job, found = assembly.job, groups(assembly, chunk)
    size = 0.0 if job.performance.cpu_offload.share else job.software.state_bytes.gradients
    made: list[Wrapped] = []
    at = 0
    for times, layers, memory in memories.resident(chunk):
        count = sum([count for _, count in layers])
        of = [one for layer in found.layers[at : at + (count if every else 1)] for one in layer.all]
        each = [buffers(assembly, one) for one in of]
        if by_module(assembly):
            each = [largest_module(assembly, layers[0][0].params)]
        waits = sum([left_behind(assembly, layers[0][0].params, sizes) for sizes in each])
        last = reduce(maximum, [one.last for one in of]) * job.software.itemsize
        made += [Wrapped(memory, each, [one.trained_shard * size for one in of], waits, last)] * times
        at += count * times
    return made


def gathered_forward_ahead(assembly: Assembly, layers: list[Wrapped]) -> list[Num]:
    """Bytes gathered before each layer's own turn in forward, its own included; last, those behind the last layer: none.

    By explicit prefetch of several groups (set_modules_to_forward_prefetch), and of one group where experts are sharded, as
    torchtitan/distributed/fsdp.py sets it; else a gather starts when its own layer does.
    """
    if (most := options(assembly).prefetch) > 1:
        return [sum([layer.buffers.gathered for layer in layers[i : i + most]]) for i in range(len(layers) + 1)]
    sharded = 1.0 * (assembly.job.parallelism.ep != 1)
    return [*[sharded * layer.buffers.gathered for layer in layers], 0.0]


def gathered_backward_ahead(assembly: Assembly, layers: list[Wrapped], i: int, *, arrived: bool = False) -> Num:
    """Bytes gathered ahead while layer i's backward computes: the next group, or several by explicit prefetch.

    `arrived`: those before layer i's backward, which has gathered one more since (set_modules_to_backward_prefetch).
    """
    most = max(1, options(assembly).prefetch) - arrived if options(assembly).reshard_after_forward else 0
    return sum([layer.buffers.gathered for layer in layers[max(0, i - most) : i]])


def copied_out(assembly: Assembly, layers: list[Wrapped], i: int) -> Num:
    """Bytes gathered when layer i's parameters are copied out in backward: theirs twice, and those ahead."""
    if not options(assembly).reshard_after_forward:
        return 0.0
    return layers[i].buffers.unsharded + layers[i].copying + gathered_backward_ahead(assembly, layers, i, arrived=True)


class GatheredEnds(NamedTuple):
    """What is gathered of embedding and head while each part of a micro-batch runs."""

    first: Buffers
    """Of the embedding."""
    last: Buffers
    """Of the head."""
    between: Num
    """Bytes that stay gathered while layers run."""
    apart: bool = False
    """Whether each is gathered before its own forward, and reduced after its own backward."""


def ends_of(assembly: Assembly, root: Buffers) -> GatheredEnds:
    """The root stays gathered from its forward to the end of backward; in a traced graph neither does.

    A graph gathers a parameter for what reads it, and the embedding's backward reads none (pytorch/torchtitan@27aa4907
    torchtitan/experiments/graph_trainer/simple_fsdp.py, ReplicateComputation).
    """
    if options(assembly).wrap != "parameter":
        return GatheredEnds(root, root, root.unsharded)
    tied = [p for p in assembly.embedding.params if p.vocab and assembly.tied_here]
    first, last = (
        buffers(assembly, one_group(assembly, params))
        for params in (assembly.embedding.params, [*tied, *assembly.head_params])
    )
    return GatheredEnds(first, last, 0.0, apart=True)


def forward(assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]) -> None:
    """Root first, then layers in order; an all-gather's output stays until the next group has copied out."""
    below = memories.embedding.saved
    embedding, ends = memories.embedding.forward, ends_of(assembly, root)
    ahead = gathered_forward_ahead(assembly, layers)
    first = ends.first.unsharded + ends.first.gathered
    moments.mark(0.0, first + ahead[0] + embedding.bytes, f"forward of {embedding.op}")
    x = 1.0 * assembly.head.x.bytes
    previous, kept = (0.0 if ends.apart else root.gathered), 0.0
    stays = 0.0 if ends.apart else root.unsharded
    for i, layer in enumerate(layers):
        memory, block = layer.memory, layer.buffers
        arrived: Num = 0.0
        coming = ahead[i]
        for one in layer.each:
            coming = maximum(coming, one.gathered)
            arrived = arrived + one.unsharded
            arriving = stays + previous + coming + kept
            moments.mark(below, arriving + x + arrived + one.turned, "forward of an all-gather")
            coming, previous = coming - one.gathered, one.gathered
        previous = root.gathered if options(assembly).wrap == "model" else previous
        extra = memory.forward.bytes - memory.saved
        held = stays + block.unsharded + previous + kept + ahead[i + 1]
        moments.mark(below + memory.saved, held + extra, f"forward of {memory.forward.op}")
        below = below + memory.saved
        kept = kept + kept_bytes(assembly, block)
    head = memories.head
    extra = head.forward.bytes - head.saved
    moments.mark(below + head.saved, ends.last.unsharded + previous + kept + extra, f"forward of {head.forward.op}")


def backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]
) -> None:
    """Last layer first: the next groups arrive while this one computes; a reduce-scatter's input outlives one layer.

    `waiting` grows with each layer done: its gradients where the model is one group, its all-reduced shard where replicas
    reduce and it does not become the gradient itself (_fsdp_param_group.py, AllReduceState).
    """
    head, embedding, ends = memories.head, memories.embedding, ends_of(assembly, root)
    below = embedding.saved + sum([layer.memory.saved for layer in layers])
    arriving = gathered_backward_ahead(assembly, layers, len(layers))
    kept: Num = sum([kept_bytes(assembly, layer.buffers) for layer in layers])
    held = ends.last.unsharded + arriving + kept + head.backward.bytes - head.saved
    moments.mark(below + head.saved, held, f"backward of {head.backward.op}")
    head_grad = group_of(assembly.head_params, assembly.head.tp, 1).shard * assembly.job.software.itemsize
    x, reducing, waiting = 1.0 * assembly.head.x.bytes, 0.0, 0.0
    if ends.apart:
        head_grad, reducing = 0.0, ends.last.reduce_input
        moments.mark(below, arriving + kept + reduction_of(ends.last) + x, "backward of a reduce-scatter")
    for i in range(len(layers) - 1, -1, -1):
        memory, block, waits = layers[i].memory, layers[i].buffers, layers[i].waits
        base = ends.between + head_grad + waiting
        following = gathered_backward_ahead(assembly, layers, i)
        copying = copied_out(assembly, layers, i)
        moments.mark(below, base + kept + copying + reducing + x, "backward of an all-gather")
        kept = kept - kept_bytes(assembly, block)
        mine = kept + block.unsharded
        extra = memory.backward.bytes - memory.saved
        moments.mark(below, base + mine + following + reducing + extra, f"backward of {memory.backward.op}")
        below = below - memory.saved
        rest = following + kept
        reducing, left = 0.0, block.gradients
        for j in range(len(layers[i].each) - 1, -1, -1):
            one = layers[i].each[j]
            left = left - one.gradients
            mine = maximum(one.gradients, one.reduced) + left + sum([of.unsharded for of in layers[i].each[:j]])
            reducing = reducing + one.reduce_input
            moments.mark(below, base + rest + mine + reducing + x, "backward of a reduce-scatter")
            moments.to_come = maximum(0.0, moments.to_come - layers[i].gradients[j])
        waiting = waiting + waits
    held = ends.between + reducing + embedding.backward.bytes - embedding.saved + head_grad + waiting
    moments.mark(embedding.saved, held, f"backward of {embedding.backward.op}")
    mine = 0.0 if options(assembly).wrap == "model" else waiting
    moments.mark(0.0, reduction_of(ends.first) + mine, "backward of the root's reduce-scatter")


def reduction_of(of: Buffers) -> Num:
    """Bytes of a group's reduction: its input, and the gradients or what replaces them."""
    return maximum(of.gradients, of.reduced) + of.reduce_input


def left_behind(assembly: Assembly, params: list[Param], sizes: Buffers) -> Num:
    """Bytes that a layer leaves behind until the end of backward."""
    said, job = options(assembly), assembly.job
    if said.wrap == "model":
        return group_of(params, assembly.head.tp, 1).shard * job.software.itemsize
    if said.version == 1:
        return 0.0
    same = ITEMSIZE[said.reduce_dtype] == job.software.state_bytes.gradients
    becomes = same and (job.single_microbatch or unsynced(job))
    return 0.0 if becomes or job.parallelism.replicas == 1 else sizes.reduce_output


def sharded_gradients(assembly: Assembly) -> Num:
    """Bytes of all sharded gradients in their stored dtype that stay on the device."""
    if assembly.job.performance.cpu_offload.share:
        return 0.0
    return sharded_elements(assembly, assembly.chunks) * assembly.job.software.state_bytes.gradients
