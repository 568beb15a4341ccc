"""FSDP's memory: parameter groups walked as allocations and frees, together with the activations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

from steptime.base.num import Num, made, maximum, same
from steptime.fsdp.groups import Buffers, buffers, flat_group, group_of, groups, options
from steptime.fsdp.of_job import unsynced
from steptime.fsdp.replays import gathered_ahead, gathers_after, kept_bytes, runs_again
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
        self.worst = PeakMoment(0.0, 0.0, "", grads_not_yet_allocated)

    def mark(self, saved: Num, transient: Num, op: str) -> None:
        """Record a moment that holds `saved` bytes for backward and `transient` other bytes."""
        self.worst = self.worst.worse(made(PeakMoment, (saved, self.beside + transient, op, self.to_come)))


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


def forward(assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]) -> None:
    """Root first, then layers in order; an all-gather's output stays until the next group has copied out."""
    below = memories.embedding.saved
    embedding = memories.embedding.forward
    ahead = gathered_forward_ahead(assembly, layers)
    moments.mark(0.0, root.unsharded + root.gathered + ahead[0] + embedding.bytes, f"forward of {embedding.op}")
    x = 1.0 * assembly.head.x.bytes
    previous, kept = root.gathered, 0.0
    for i, layer in enumerate(layers):
        memory, block = layer.memory, layer.buffers
        arrived: Num = 0.0
        coming = ahead[i]
        for one in layer.each:
            coming = maximum(coming, one.gathered)
            arrived = arrived + one.unsharded
            arriving = root.unsharded + previous + coming + kept
            moments.mark(below, arriving + x + arrived + one.turned, "forward of an all-gather")
            coming, previous = coming - one.gathered, one.gathered
        previous = root.gathered if options(assembly).wrap == "model" else previous
        extra = memory.forward.bytes - memory.saved
        held = root.unsharded + block.unsharded + previous + kept + ahead[i + 1]
        moments.mark(below + memory.saved, held + extra, f"forward of {memory.forward.op}")
        below = below + memory.saved
        kept = kept + kept_bytes(assembly, block)
    head = memories.head
    extra = head.forward.bytes - head.saved
    moments.mark(below + head.saved, root.unsharded + previous + kept + extra, f"forward of {head.forward.op}")


def backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]
) -> None:
    """Last layer first: the next groups arrive while this one computes; a reduce-scatter's input outlives one layer.

    `waiting` grows with each layer done: its gradients where the model is one group, its all-reduced shard where replicas
    reduce and it does not become the gradient itself (_fsdp_param_group.py, AllReduceState).
    """
    head, embedding = memories.head, memories.embedding
    below = embedding.saved + sum([layer.memory.saved for layer in layers])
    arriving = gathered_backward_ahead(assembly, layers, len(layers))
    kept: Num = sum([kept_bytes(assembly, layer.buffers) for layer in layers])
    held = root.unsharded + arriving + kept + head.backward.bytes - head.saved
    moments.mark(below + head.saved, held, f"backward of {head.backward.op}")
    head_grad = group_of(assembly.head_params, assembly.head.tp, 1).shard * assembly.job.software.itemsize
    x, reducing, waiting = 1.0 * assembly.head.x.bytes, 0.0, 0.0
    for i in range(len(layers) - 1, -1, -1):
        memory, block, waits = layers[i].memory, layers[i].buffers, layers[i].waits
        base = root.unsharded + head_grad + waiting
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
    held = root.unsharded + reducing + embedding.backward.bytes - embedding.saved + head_grad + waiting
    moments.mark(embedding.saved, held, f"backward of {embedding.backward.op}")
    mine = 0.0 if options(assembly).wrap == "model" else waiting
    left = maximum(root.gradients, root.reduced)
    moments.mark(0.0, left + root.reduce_input + mine, "backward of the root's reduce-scatter")


def flat_forward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]
) -> None:
    """FSDP 1: compute reads the gathered flat parameter itself, which is freed after its layer.

    Source: torch 2.13, torch/distributed/fsdp/_flat_param.py, pre_unshard, unshard, reshard. The root's stays; where every module
    is wrapped, it has none.
    """
    reshard, x = options(assembly).reshard_after_forward, 1.0 * assembly.head.x.bytes
    embedding, head = memories.embedding, memories.head
    moments.mark(0.0, root.gathered + root.sent, "forward of an all-gather")
    moments.mark(0.0, root.gathered + embedding.forward.bytes, f"forward of {embedding.forward.op}")
    below, kept = embedding.saved, 0.0 if by_module(assembly) else root.gathered
    for layer in layers:
        memory, flat = layer.memory, layer.buffers
        moments.mark(below, kept + flat.sent + flat.gathered + x, "forward of an all-gather")
        extra = memory.forward.bytes - memory.saved
        below = below + memory.saved
        moments.mark(below, kept + flat.gathered + extra, f"forward of {memory.forward.op}")
        kept = kept + (0.0 if reshard else flat.gathered)
    moments.mark(below + head.saved, kept + head.forward.bytes - head.saved, f"forward of {head.forward.op}")


def flat_backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]
) -> None:
    """FSDP 1: the next flat parameter is gathered before a layer computes; gradients are joined once all of a layer's are there.

    Source: torch 2.13, torch/distributed/fsdp/_runtime_utils.py, _pre_backward_hook, _post_backward_hook, _reduce_grad. Where
    every module is wrapped, the loss runs before the first is gathered, and the head's gradient is reduced at once. Under a
    reentrant checkpoint a layer's gradients are reduced while its input, its output and the gradient of that are still held.
    """
    apart = by_module(assembly)
    ahead, reshard = gathered_ahead(assembly), options(assembly).reshard_after_forward
    head, embedding, x = memories.head, memories.embedding, 1.0 * assembly.head.x.bytes
    held_x = 3.0 * x if runs_again(assembly) else 0.0
    below = embedding.saved + sum([layer.memory.saved for layer in layers])
    first = layers[-1:] if ahead else []
    there = sum([layer.buffers.gathered for layer in (first if reshard else layers)])
    coming = first[0].buffers.sent if reshard and first else 0.0
    stays = 0.0 if apart else root.gathered
    moments.mark(below + head.saved, stays + there + coming, "backward of an all-gather")
    held = stays + (0.0 if apart else there) + head.backward.bytes - head.saved
    moments.mark(below + head.saved, held, f"backward of {head.backward.op}")
    waiting: Num = 0.0
    if not apart:
        waiting = group_of(assembly.head_params, assembly.head.tp, 1).shard * assembly.job.software.itemsize
    for i in range(len(layers) - 1, -1, -1):
        memory, flat = layers[i].memory, layers[i].buffers
        base = stays + waiting
        if (following := gathered_before(assembly, layers, i)) is not None:
            there = there + following.gathered
            moments.mark(below, base + there + following.sent + x, "backward of an all-gather")
        moments.mark(below, base + there + memory.backward.bytes - memory.saved, f"backward of {memory.backward.op}")
        below = below - memory.saved
        if options(assembly).wrap != "model":
            held = base + there + x + held_x
            moments.mark(below, held + flat.gradients + flat.gathered, "backward of a flat gradient")
            if (following := gathered_after(assembly, layers, i)) is not None:
                there, held = there + following.gathered, held + following.gathered
                moments.mark(below, held + following.sent, "backward of an all-gather")
            moments.mark(below, held + reduction(assembly, flat) - flat.gathered, "backward of a reduce-scatter")
        moments.to_come = maximum(0.0, moments.to_come - sum(layers[i].gradients))
        there, waiting = there - flat.gathered, waiting + layers[i].waits
    held = stays + waiting + embedding.backward.bytes - embedding.saved
    moments.mark(embedding.saved, held, f"backward of {embedding.backward.op}")
    moments.mark(0.0, root.gathered + root.gradients + root.gathered, "backward of the root's flat gradient")
    moments.mark(0.0, reduction(assembly, root), "backward of the root's reduce-scatter")


def gathered_before(assembly: Assembly, layers: list[Wrapped], i: int) -> Buffers | None:
    """The flat parameter that is gathered before layer i's backward computes: the next layer's, or its own."""
    there = gathers_after(assembly) and i < len(layers) - 1
    if not options(assembly).reshard_after_forward or there or (gathered_ahead(assembly) and not i):
        return None
    return layers[i - 1 if gathered_ahead(assembly) else i].buffers


def gathered_after(assembly: Assembly, layers: list[Wrapped], i: int) -> Buffers | None:
    """The flat parameter that is gathered once layer i's has been freed, before its gradient is reduced."""
    reshard = options(assembly).reshard_after_forward
    return layers[i - 1].buffers if reshard and i and gathers_after(assembly) else None


def reduction(assembly: Assembly, flat: Buffers) -> Num:
    """Bytes of a flat gradient during its reduction: as autograd made it, a copy in another dtype, and the result."""
    as_it_is = options(assembly).reduce_dtype == assembly.job.software.compute_dtype
    return flat.gathered + (0.0 if as_it_is else flat.reduce_input) + flat.reduced


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
