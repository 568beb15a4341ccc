"""FSDP 1's memory: flat parameters, which compute reads as they are gathered.

Source: torch 2.13, torch/distributed/fsdp/_flat_param.py and _runtime_utils.py.
"""

from __future__ import annotations

from steptime.base.num import Num, maximum
from steptime.fsdp.groups import Buffers, group_of, options
from steptime.fsdp.memory_walk import Moments, Wrapped, by_module
from steptime.fsdp.replays import gathered_ahead, gathers_after, runs_again
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
