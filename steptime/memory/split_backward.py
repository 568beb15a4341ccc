"""Memory of a backward that runs in two halves: the gradients of the inputs, and some time later those of the weights.

torch/distributed/pipelining/_backward.py (2.13): stage_backward_input runs autograd with retain_graph=True, so that nothing that
forward saved is freed, and holds the gradient of the output of every op that has parameters; stage_backward_weight starts from
these and frees all of it.
"""

from __future__ import annotations

from typing import NamedTuple

from steptime.base.num import Num, maximum
from steptime.memory.ledger import NO_BYTES, PartMemory, Peak, in_allocator
from steptime.memory.op_walk import Autograd, BackwardWalk
from steptime.model.ops import Op, Tensor, tensor_bytes
from steptime.model.segments import kept_names


class SplitMemory(NamedTuple):
    """Memory of one part, or of a chunk, for one micro-batch whose backward is split [B]."""

    kept: Num
    """Bytes held until the weights' gradients are made."""
    inputs: Peak
    """Most bytes while the gradients of the inputs are made, with what the part itself keeps."""
    weights: Num
    """The largest weight gradient that exists besides what is kept."""


class InputGradients(BackwardWalk):
    """The first half: saved tensors stay, and so does the output gradient of every op with parameters."""

    def step(self, i: int) -> None:
        """One op's backward for its inputs only."""
        op = self.ops[i]
        if op.params:
            for grad in [self.grads[t.name] for t in op.outputs if t.name in self.grads]:
                grad.users += 1
        super().step(i)

    def forget(self, i: int) -> None:
        """Nothing is freed: the graph is retained."""

    def weight_grad(self, op: Op) -> Num:  # noqa: ARG002
        """No weight gradient in this half."""
        return 0.0


def walk_split(ops: list[Op], x: Tensor, out: str, autograd: Autograd) -> SplitMemory:
    """Walk one part's backward in two halves; nothing is recomputed."""
    sizes = in_allocator(ops, tensor_bytes(ops, x))
    walk = InputGradients(ops, sizes, [], kept_names(ops, []), autograd)
    peak = walk.run(out)
    walk.release(x.name)  # sent to the stage before, or read by the part before
    largest: Num = 0.0
    for op in ops:
        largest = maximum(largest, BackwardWalk.weight_grad(walk, op))
    return SplitMemory(walk.ledger.bytes, peak, largest)


def chunk_split(parts: list[tuple[int, PartMemory, SplitMemory]]) -> SplitMemory:
    """Consecutive parts, each repeated: those after the current one have run, those before it hold what forward saved.

    An input's backward leaves as much or more than it found, so of equal parts the last to run in backward is the worst, or the
    first where it leaves less.
    """
    kept: Num = sum([count * split.kept for count, _, split in parts])
    before: Num = 0.0
    after = kept
    inputs, weights = NO_BYTES, before
    for count, part, split in parts:
        if count == 0:
            continue
        after = after - count * split.kept
        others = maximum((count - 1) * part.saved, (count - 1) * split.kept)
        inputs = inputs.worse(Peak(before + others + after + split.inputs.bytes, split.inputs.op))
        before = before + count * part.saved
        weights = maximum(weights, split.weights)
    return SplitMemory(kept, inputs, weights)
