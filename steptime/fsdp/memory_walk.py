"""FSDP2's memory: parameter groups walked as allocations and frees beside the activations."""

from __future__ import annotations

from steptime.fsdp.groups import Buffers, buffers, group_of, groups, options, sharded_elements
from steptime.job.assembly import Assembly
from steptime.memory.stages import Held, PartMemories
from steptime.memory.states import shard_ranks, state_bytes
from steptime.software.performance import ITEMSIZE


class Moments:
    """The worst moment so far: activations, other bytes, and what was going on."""

    def __init__(self, due: float) -> None:
        """`due`: sharded gradients not made yet [B]."""
        self.due = due
        self.worst = Held(0.0, 0.0, "", due)

    def mark(self, saved: float, beside: float, op: str) -> None:
        """Note a moment that holds `saved` bytes for backward and `beside` others."""
        moment = Held(saved, beside, op, self.due)
        if moment.beside_bytes > self.worst.beside_bytes:
            self.worst = moment


def held(assembly: Assembly) -> Held:
    """Activations and transients at the worst moment of a micro-batch, FSDP buffers among the transients.

    Sharded gradients are counted as states, there from the start; of a single micro-batch those not yet made are taken off.
    """
    memories = PartMemories(assembly, weight_grads_stay=True)
    g = groups(assembly)
    root, block = buffers(assembly, g.root), buffers(assembly, g.block)
    reshard = options(assembly).reshard_after_forward
    moments = Moments(sharded_gradients(assembly) if assembly.job.microbatches == 1 else 0.0)
    forward(assembly, memories, moments, root, block, reshard=reshard)
    backward(assembly, memories, moments, root, block, reshard=reshard)
    return moments.worst


def forward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, block: Buffers, *, reshard: bool
) -> None:
    """Root first, then blocks in order; an all-gather's output stays until the next group has copied out."""
    below = memories.embedding.saved
    embedding = memories.embedding.forward
    moments.mark(0.0, root.unsharded + root.gathered + embedding.bytes, f"forward of {embedding.op}")
    x = float(assembly.block.x.bytes)
    previous, kept = root.gathered, 0.0
    newest = root.gathered if options(assembly).wrap == "model" else block.gathered
    for count, memory in memories.blocks(assembly.chunks[0]):
        for _ in range(count):
            arriving = root.unsharded + previous + block.gathered + kept
            moments.mark(below, arriving + x + block.unsharded, "forward of an all-gather")
            held_now = root.unsharded + block.unsharded + newest + kept
            extra = memory.forward.bytes - memory.saved
            moments.mark(below + memory.saved, held_now + extra, f"forward of {memory.forward.op}")
            below += memory.saved
            previous = newest
            kept += 0.0 if reshard else block.unsharded
    extra = memories.head.forward.bytes - memories.head.saved
    moments.mark(
        below + memories.head.saved, root.unsharded + previous + kept + extra, f"forward of {memories.head.forward.op}"
    )


def backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, block: Buffers, *, reshard: bool
) -> None:
    """Last block first: the next group arrives while this one computes; a reduce-scatter's input outlives one block.

    `waiting` grows with each block done: its gradients where the model is one group, its all-reduced shard where replicas
    reduce and it does not become the gradient itself (_fsdp_param_group.py, AllReduceState).
    """
    blocks = [memory for count, memory in memories.blocks(assembly.chunks[0]) for _ in range(count)]
    head, embedding = memories.head, memories.embedding
    below = embedding.saved + sum(memory.saved for memory in blocks)
    arriving = block.gathered if reshard and blocks else 0.0
    unsharded = 0.0 if reshard else len(blocks) * block.unsharded
    held_now = root.unsharded + arriving + unsharded + head.backward.bytes - head.saved
    moments.mark(below + head.saved, held_now, f"backward of {head.backward.op}")
    head_grad = group_of(assembly.head_params, assembly.block.tp, 1).elements * assembly.job.software.itemsize
    x, reducing = float(assembly.block.x.bytes), 0.0
    waiting, wait = 0.0, waits(assembly, block)
    made = groups(assembly).block.padded / shard_ranks(assembly.job) * state_bytes(assembly.job).gradients
    for i in range(len(blocks) - 1, -1, -1):
        memory = blocks[i]
        base = root.unsharded + head_grad + waiting
        mine = block.unsharded if reshard else unsharded
        following = block.gathered if reshard and i else 0.0
        copying = block.gathered if reshard else 0.0
        moments.mark(below, base + mine + copying + reducing + x, "backward of an all-gather")
        extra = memory.backward.bytes - memory.saved
        moments.mark(below, base + mine + following + reducing + extra, f"backward of {memory.backward.op}")
        below -= memory.saved
        unsharded -= 0.0 if reshard else block.unsharded
        rest = following if reshard else unsharded
        moments.mark(
            below,
            base + rest + max(block.gradients, block.reduced) + block.reduce_input + x,
            "backward of a reduce-scatter",
        )
        reducing = block.reduce_input
        moments.due = max(0.0, moments.due - made)
        waiting += wait
    held_now = root.unsharded + reducing + embedding.backward.bytes - embedding.saved + head_grad + waiting
    moments.mark(embedding.saved, held_now, f"backward of {embedding.backward.op}")
    mine = 0.0 if options(assembly).wrap == "model" else waiting
    moments.mark(
        0.0, max(root.gradients, root.reduced) + root.reduce_input + mine, "backward of the root's reduce-scatter"
    )


def waits(assembly: Assembly, block: Buffers) -> float:
    """Bytes that a block leaves behind until the end of backward."""
    job = assembly.job
    if options(assembly).wrap == "model":
        return group_of(assembly.block.params, assembly.block.tp, 1).elements * job.software.itemsize
    same = ITEMSIZE[options(assembly).reduce_dtype] == state_bytes(job).gradients
    return 0.0 if (same and job.microbatches == 1) or job.parallelism.replicas == 1 else block.reduce_output


def sharded_gradients(assembly: Assembly) -> float:
    """Bytes of all sharded gradients in their stored dtype."""
    return sharded_elements(assembly) * state_bytes(assembly.job).gradients
