"""FSDP's memory: parameter groups walked as allocations and frees, together with the activations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

from steptime.base.num import Num, maximum, same
from steptime.fsdp.ends import GatheredEnds, ends_of, head_gradients, sum_of_tied_gradients
from steptime.fsdp.groups import Buffers, buffers, flat_group, group_of, groups, options
from steptime.fsdp.loss_chunks import chunks_backward, in_chunks, rooted_chunks
from steptime.fsdp.moments import Moments
from steptime.fsdp.of_job import reduced_in, unsynced
from steptime.fsdp.replays import kept_bytes
from steptime.fsdp.sharded_states import sharded_elements
from steptime.job.assembly import Assembly, Chunk
from steptime.memory.ledger import PartMemory
from steptime.memory.part_memories import PartMemories
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


def wrapped(assembly: Assembly, memories: PartMemories, chunk: Chunk, *, every: bool = False) -> list[Wrapped]:
    """The layers of a chunk in depth order. Layers checkpointed together count as one, with the first group or `every` one."""
    job, found = assembly.job, groups(assembly, chunk)
    size = 0.0 if job.performance.cpu_offload.share else job.software.state_bytes.gradients
    walked: list[Wrapped] = []
    at = 0
    for times, layers, memory in memories.resident(chunk):
        count = sum([count for _, count in layers])
        of = [one for layer in found.layers[at : at + (count if every else 1)] for one in layer.all]
        each = [buffers(assembly, one) for one in of]
        if by_module(assembly):
            each = [largest_module(assembly, layers[0][0].params)]
        waits = sum([left_behind(assembly, layers[0][0].params, sizes) for sizes in each])
        last = reduce(maximum, [one.last for one in of]) * job.software.itemsize
        walked += [Wrapped(memory, each, [one.trained_shard * size for one in of], waits, last)] * times
        at += count * times
    return walked


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


def copied_parameters(assembly: Assembly, of: Buffers) -> Num:
    """Of `copied_out` what the computing stream allocates: the parameters, and copies of those cut along dimension 1."""
    return of.unsharded + of.turned if options(assembly).reshard_after_forward else 0.0


def copied_out(assembly: Assembly, layers: list[Wrapped], i: int) -> Num:
    """Bytes gathered when layer i's parameters are copied out in backward: theirs twice, and those ahead."""
    if not options(assembly).reshard_after_forward:
        return 0.0
    return layers[i].buffers.unsharded + layers[i].copying + gathered_backward_ahead(assembly, layers, i, arrived=True)


def forward(assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]) -> None:
    """Root first, then layers in order; an all-gather's output stays until the next group has copied out."""
    below = memories.embedding.saved
    embedding, ends = memories.embedding.forward, ends_of(assembly, root)
    ahead = gathered_forward_ahead(assembly, layers)
    there = ends.first.gathered + ahead[0]
    moments.send(ends.first.sent)
    moments.mark(0.0, ends.first.unsharded + there + embedding.bytes, f"forward of {embedding.op}", there)
    x = 1.0 * assembly.head.x.bytes
    previous, kept = (0.0 if ends.traced else ends.first.gathered), 0.0
    for i, layer in enumerate(layers):
        memory, block = layer.memory, layer.buffers
        arrived: Num = 0.0
        coming = ahead[i]
        for one in layer.each:
            coming = maximum(coming, one.gathered)
            arrived = arrived + one.unsharded
            transient = ends.between + previous + coming + kept + x + arrived + one.turned
            moments.mark(below, transient, "forward of an all-gather", previous + coming)
            moments.send(one.sent)
            coming, previous = coming - one.gathered, one.gathered
        previous = root.gathered if options(assembly).wrap == "model" else previous
        extra = memory.forward.bytes - memory.saved
        there = previous + ahead[i + 1]
        transient = ends.between + block.unsharded + there + kept
        moments.mark(below + memory.saved, transient + extra, f"forward of {memory.forward.op}", there)
        below = below + memory.saved
        kept = kept + kept_bytes(assembly, block)
    head, base = memories.head, kept + ends.gathered_during_head + ends.last.unsharded
    if ends.separate and not ends.traced:
        there, previous = previous + ends.last.gathered, ends.last.gathered
        moments.mark(below, base + there + x, "forward of an all-gather", there)
        moments.send(ends.last.sent)
    extra = head.forward.bytes - head.saved
    moments.mark(below + head.saved, base + previous + extra, f"forward of {head.forward.op}", previous)


def backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]
) -> None:
    """Last layer first: the next groups arrive while this one computes; a reduce-scatter's input outlives one layer.

    `waiting` grows with each layer done: its gradients where the model is one group, its all-reduced shard where replicas
    reduce and it does not become the gradient itself (_fsdp_param_group.py, AllReduceState).
    """
    embedding, ends = memories.embedding, ends_of(assembly, root)
    below = embedding.saved + sum([layer.memory.saved for layer in layers])
    kept: Num = sum([kept_bytes(assembly, layer.buffers) for layer in layers])
    head_grad, reducing = head_backward(assembly, memories, moments, ends, layers, below, kept)
    x, waiting = 1.0 * assembly.head.x.bytes, 0.0
    for i in range(len(layers) - 1, -1, -1):
        memory, block, waits = layers[i].memory, layers[i].buffers, layers[i].waits
        base = ends.between + head_grad + waiting
        following = ends.regathered_bytes if i == 0 else gathered_backward_ahead(assembly, layers, i)
        copying = copied_out(assembly, layers, i)
        transient = base + kept + copying + reducing + x
        moments.mark(below, transient, "backward of an all-gather", copying - copied_parameters(assembly, block))
        moments.send(block.sent)
        kept = kept - kept_bytes(assembly, block)
        mine = kept + block.unsharded
        extra = memory.backward.bytes - memory.saved
        moments.mark(below, base + mine + following + reducing + extra, f"backward of {memory.backward.op}", following)
        below = below - memory.saved
        rest = following + kept
        reducing, left = 0.0, block.gradients
        for j in range(len(layers[i].each) - 1, -1, -1):
            one = layers[i].each[j]
            left = left - one.gradients
            mine = maximum(one.reducing, one.reduced) + left + sum([of.unsharded for of in layers[i].each[:j]])
            reducing = reducing + one.reduce_input
            transient = base + rest + mine + reducing + x
            moments.mark(below, transient, "backward of a reduce-scatter", following, reduced=output_of(one))
            moments.allocated(layers[i].gradients[j])
        waiting = waiting + waits
    transient = ends.between + ends.regathered_unsharded + reducing + head_grad + waiting
    tied = 0.0 if ends.separate else sum_of_tied_gradients(assembly)
    embedding_backward(moments, embedding, transient, tied)
    mine = 0.0 if options(assembly).wrap == "model" else waiting
    transient = reduction_of(ends.first) + mine
    moments.mark(0.0, transient, "backward of the root's reduce-scatter", reduced=output_of(ends.first))


def embedding_backward(moments: Moments, embedding: PartMemory, transient: Num, tied: Num, gathered: Num = 0.0) -> None:
    """The embedding's backward beside `transient`, then, where there is one, the sum of a `tied` weight's gradients."""
    extra = embedding.backward.bytes - embedding.saved
    moments.mark(embedding.saved, transient + extra, f"backward of {embedding.backward.op}", gathered)
    if same(tied > 0.0):
        moments.mark(0.0, transient + tied, f"backward of {embedding.backward.op}", gathered)


def head_backward(
    assembly: Assembly,
    memories: PartMemories,
    moments: Moments,
    ends: GatheredEnds,
    layers: list[Wrapped],
    below: Num,
    kept: Num,
) -> tuple[Num, Num]:
    """The head's backward, while `below` is saved below it and `kept` of the layers' parameters is there.

    Returns: bytes of its gradients that stay until the root reduces them, and of a reduction's input.
    """
    head, x = memories.head, 1.0 * assembly.head.x.bytes
    arriving = gathered_backward_ahead(assembly, layers, len(layers))
    base = kept + ends.gathered_during_head
    chunks = in_chunks(assembly, ends)
    if chunks and ends.separate:
        return 0.0, chunks_backward(assembly, moments, ends, head, below=below, kept=base, arriving=arriving)
    if chunks:
        rooted_chunks(assembly, moments, ends, head, below, base, arriving)
    else:
        transient = base + ends.last.unsharded + arriving + head.backward.bytes - head.saved
        moments.mark(
            below + head.saved, transient, f"backward of {head.backward.op}", arriving, gap=gap_of_logits(assembly)
        )
    if not ends.separate:
        return head_gradients(assembly), 0.0
    transient = base + arriving + reduction_of(ends.last) + x
    moments.mark(below, transient, "backward of a reduce-scatter", arriving, reduced=output_of(ends.last))
    moments.allocated(ends.last.stored)
    return 0.0, ends.last.reduce_input


def gap_of_logits(assembly: Assembly) -> Num:
    """Bytes of the logits if the loss upcasts them in a kernel of its own, and nothing keeps them.

    A training loop frees them before backward. Next to them the upcast logits have been freed, whose place the gradient of the
    log probabilities takes; what is left of both, the logits' bytes, is too small for the gradient of the upcast logits. A loss
    that works in place leaves the place of the upcast logits free.
    """
    cast = next((op for op in assembly.head.ops if op.name == "loss.cast"), None)
    if cast is None or cast.inputs[0] in cast.saves or assembly.job.software.kernels.loss_impl != "composite":
        return 0.0
    return assembly.head.sizes[cast.inputs[0]]


def reduction_of(of: Buffers) -> Num:
    """Bytes of a group's reduction: its input, and the gradients or what replaces them."""
    return maximum(of.reducing, of.reduced) + of.reduce_input


def output_of(of: Buffers) -> Num:
    """Bytes by which what a reduction returns exceeds the gradients that it replaces: it has memory of its own."""
    return maximum(0.0, of.reduced - of.reducing)


def left_behind(assembly: Assembly, params: list[Param], sizes: Buffers) -> Num:
    """Bytes that a layer leaves behind until the end of backward."""
    said, job = options(assembly), assembly.job
    if said.wrap == "model":
        return group_of(params, assembly.head.tp, 1).shard * job.software.itemsize
    if said.version == 1:
        return 0.0
    same = ITEMSIZE[reduced_in(job)] == job.software.state_bytes.gradients
    becomes = same and (job.single_microbatch or unsynced(job))
    return 0.0 if becomes or job.parallelism.replicas == 1 else sizes.reduce_output


def sharded_gradients(assembly: Assembly) -> Num:
    """Bytes of all sharded gradients in their stored dtype that stay on the device."""
    if assembly.job.performance.cpu_offload.share:
        return 0.0
    return sharded_elements(assembly, assembly.chunks) * assembly.job.software.state_bytes.gradients
