"""FSDP2's memory: parameter groups walked as allocations and frees beside the activations."""

from __future__ import annotations

from steptime.assembly import Assembly
from steptime.fsdp.groups import Buffers, buffers, group_of, groups, options, sharded_elements
from steptime.stage_memory import Held, PartMemories
from steptime.states import state_bytes


class Moments:
    """The worst moment so far: activations, other bytes, and what was going on."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.worst = Held(0.0, 0.0, "")

    def mark(self, saved: float, beside: float, op: str) -> None:
        """Note a moment that holds `saved` bytes for backward and `beside` others."""
        if saved + beside > self.worst.activations_bytes + self.worst.transient_bytes:
            self.worst = Held(saved, beside, op)


def held(assembly: Assembly) -> Held:
    """Activations and transients at the worst moment of a micro-batch, FSDP buffers among the transients.

    Sharded gradients are counted as states, there from the start; of a single micro-batch those not yet made are taken off.
    """
    memories = PartMemories(assembly, weight_grads_stay=True)
    g = groups(assembly)
    root, block = buffers(assembly, g.root), buffers(assembly, g.block)
    reshard = options(assembly).reshard_after_forward
    moments = Moments()
    forward(assembly, memories, moments, root, block, reshard=reshard)
    backward(assembly, memories, moments, root, block, reshard=reshard)
    return moments.worst


def forward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, block: Buffers, *, reshard: bool
) -> None:
    """Root first, then blocks in order; an all-gather's output stays until the next group has copied out."""
    moments.mark(0.0, root.copy_in + root.gathered + root.unsharded, "forward of the root's all-gather")
    below = memories.embedding.saved
    embedding = memories.embedding.forward
    moments.mark(0.0, root.unsharded + root.gathered + embedding.bytes, f"forward of {embedding.op}")
    x = float(assembly.block.x.bytes)
    previous, kept = root.gathered, 0.0
    for count, memory in memories.blocks(assembly.chunks[0]):
        for _ in range(count):
            arriving = root.unsharded + previous + block.gathered + kept
            moments.mark(below, arriving + x + max(block.copy_in, block.unsharded), "forward of an all-gather")
            held_now = root.unsharded + block.unsharded + block.gathered + kept
            extra = memory.forward.bytes - memory.saved
            moments.mark(below + memory.saved, held_now + extra, f"forward of {memory.forward.op}")
            below += memory.saved
            previous = block.gathered
            kept += 0.0 if reshard else block.unsharded
    extra = memories.head.forward.bytes - memories.head.saved
    moments.mark(
        below + memories.head.saved, root.unsharded + previous + kept + extra, f"forward of {memories.head.forward.op}"
    )


def backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, block: Buffers, *, reshard: bool
) -> None:
    """Last block first: the next group arrives while this one computes; a reduce-scatter's input outlives one block."""
    blocks = [memory for count, memory in memories.blocks(assembly.chunks[0]) for _ in range(count)]
    head, embedding = memories.head, memories.embedding
    below = embedding.saved + sum(memory.saved for memory in blocks)
    arriving = block.gathered if reshard and blocks else 0.0
    unsharded = 0.0 if reshard else len(blocks) * block.unsharded
    due = sharded_gradients(assembly) if assembly.job.microbatches == 1 else 0.0
    moments.mark(
        below + head.saved,
        root.unsharded + arriving + unsharded + head.backward.bytes - head.saved - due,
        f"backward of {head.backward.op}",
    )
    head_grad = group_of(assembly.head_params, assembly.block.tp, 1).elements * assembly.job.software.itemsize
    x, reducing = float(assembly.block.x.bytes), 0.0
    for i in range(len(blocks) - 1, -1, -1):
        memory = blocks[i]
        base = root.unsharded + head_grad - due
        mine = block.unsharded if reshard else unsharded
        following = block.gathered if reshard and i else 0.0
        moments.mark(
            below, base + mine + (block.gathered if reshard else 0.0) + reducing + x, "backward of an all-gather"
        )
        extra = memory.backward.bytes - memory.saved
        moments.mark(below, base + mine + following + reducing + extra, f"backward of {memory.backward.op}")
        below -= memory.saved
        unsharded -= 0.0 if reshard else block.unsharded
        rest = following if reshard else unsharded
        moments.mark(below, base + rest + block.gradients + block.reduce_input + x, "backward of a reduce-scatter")
        reducing = block.reduce_input
        due = max(0.0, due - block.reduce_output)
    moments.mark(
        embedding.saved,
        root.unsharded + reducing + embedding.backward.bytes - embedding.saved + head_grad - due,
        f"backward of {embedding.backward.op}",
    )
    moments.mark(0.0, root.gradients + root.reduce_input - due, "backward of the root's reduce-scatter")


def sharded_gradients(assembly: Assembly) -> float:
    """Bytes of all sharded gradients in their stored dtype."""
    return sharded_elements(assembly) * state_bytes(assembly.job).gradients
