"""FSDP 1's memory: flat parameters, which compute reads as they are gathered.

Source: torch 2.13, torch/distributed/fsdp/_flat_param.py and _runtime_utils.py.
"""

from __future__ import annotations

from steptime.base.num import Num
from steptime.fsdp.ends import head_gradients, sum_of_tied_gradients
from steptime.fsdp.groups import Buffers, options
from steptime.fsdp.memory_walk import Wrapped, by_module, embedding_backward, gap_of_logits
from steptime.fsdp.moments import Moments
from steptime.fsdp.of_job import reduced_in
from steptime.fsdp.replays import gathered_ahead, gathers_after, reentrant_checkpoints
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories


def flat_forward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]
) -> None:
    """FSDP 1: compute reads the gathered flat parameter itself, which is freed after its layer.

    Source: torch 2.13, torch/distributed/fsdp/_flat_param.py, pre_unshard, unshard, reshard. The root's stays; where every module
    is wrapped, it has none.
    """
    reshard, x = options(assembly).reshard_after_forward, 1.0 * assembly.head.x.bytes
    embedding, head = memories.embedding, memories.head
    moments.send(root.sent)
    moments.mark(0.0, root.gathered + root.sent, "forward of an all-gather", root.gathered)
    moments.mark(0.0, root.gathered + embedding.forward.bytes, f"forward of {embedding.forward.op}", root.gathered)
    below, kept = embedding.saved, 0.0 if by_module(assembly) else root.gathered
    for layer in layers:
        memory, flat = layer.memory, layer.buffers
        there = kept + flat.gathered
        moments.send(flat.sent)
        moments.mark(below, there + flat.sent + x, "forward of an all-gather", there)
        extra = memory.forward.bytes - memory.saved
        below = below + memory.saved
        moments.mark(below, there + extra, f"forward of {memory.forward.op}", there)
        kept = kept + (0.0 if reshard else flat.gathered)
    moments.mark(below + head.saved, kept + head.forward.bytes - head.saved, f"forward of {head.forward.op}", kept)


def flat_backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, layers: list[Wrapped]
) -> None:
    """FSDP 1: the next flat parameter is gathered before a layer computes; gradients are joined once all of a layer's are there.

    Source: torch 2.13, torch/distributed/fsdp/_runtime_utils.py, _pre_backward_hook, _post_backward_hook, _reduce_grad. Where
    every module is wrapped, the loss runs before the first is gathered, and the head's gradient is reduced at once. Under a
    reentrant checkpoint a layer's gradients are reduced while its input, its output and the gradient of that are still held.
    """
    separate = by_module(assembly)
    ahead, reshard = gathered_ahead(assembly), options(assembly).reshard_after_forward
    head, embedding, x = memories.head, memories.embedding, 1.0 * assembly.head.x.bytes
    kept_x, first = 3.0 * x if reentrant_checkpoints(assembly) else 0.0, layers[-1:] if ahead else []
    below = embedding.saved + sum([layer.memory.saved for layer in layers])
    there = sum([layer.buffers.gathered for layer in (first if reshard else layers)])
    coming = first[0].buffers.sent if reshard and first else 0.0
    stays = 0.0 if separate else root.gathered
    moments.mark(below + head.saved, stays + there + coming, "backward of an all-gather", stays + there)
    bytes_, gap = stays + (0.0 if separate else there), gap_of_logits(assembly)
    mine = bytes_ + head.backward.bytes - head.saved
    moments.mark(below + head.saved, mine, f"backward of {head.backward.op}", bytes_, gap=gap)
    waiting: Num = 0.0 if separate else head_gradients(assembly)
    for i in range(len(layers) - 1, -1, -1):
        memory, flat = layers[i].memory, layers[i].buffers
        base = stays + waiting
        if (following := gathered_before(assembly, layers, i)) is not None:
            there = there + following.gathered
            moments.mark(below, base + there + following.sent + x, "backward of an all-gather", stays + there)
        extra = memory.backward.bytes - memory.saved
        moments.mark(below, base + there + extra, f"backward of {memory.backward.op}", stays + there)
        below = below - memory.saved
        if options(assembly).wrap != "model":
            bytes_ = base + there + x + kept_x
            moments.mark(below, bytes_ + flat.gradients + flat.gathered, "backward of a flat gradient", stays + there)
            if (following := gathered_after(assembly, layers, i)) is not None:
                there, bytes_ = there + following.gathered, bytes_ + following.gathered
                moments.mark(below, bytes_ + following.sent, "backward of an all-gather", stays + there)
            reducing = bytes_ + reduction(assembly, flat) - flat.gathered
            moments.mark(below, reducing, "backward of a reduce-scatter", stays + there - flat.gathered)
        moments.allocated(sum(layers[i].gradients))
        there, waiting = there - flat.gathered, waiting + layers[i].waits
    tied = 0.0 if separate else sum_of_tied_gradients(assembly)
    embedding_backward(moments, embedding, stays + waiting, tied, stays)
    flat_root(assembly, moments, root)


def flat_root(assembly: Assembly, moments: Moments, root: Buffers) -> None:
    """The root's gradients joined, then reduced."""
    bytes_ = root.gathered + root.gradients + root.gathered
    moments.mark(0.0, bytes_, "backward of the root's flat gradient", root.gathered)
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
    as_it_is = reduced_in(assembly.job) == assembly.job.software.compute_dtype
    return flat.gathered + (0.0 if as_it_is else flat.reduce_input) + flat.reduced
