"""Activation memory by walking a part's ops forward and backward, the way autograd allocates and frees.

A part is a list of ops from one input tensor to one output (a block, the embedding, the head). Its walk gives what it keeps
for backward and the most it holds at once in either direction; `Chunk` strings parts together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from steptime.model.ops import Attention, Comm, Gemm, Move, Op, Tensor, tensor_bytes
from steptime.model.segments import Segment, find_segments, kept_names, replayed


class Peak(NamedTuple):
    """Most bytes held at once, and the op that holds them."""

    bytes: float
    op: str


class PartMemory(NamedTuple):
    """Memory of one part for one micro-batch [B]. Both peaks include what the part itself keeps."""

    saved: float
    forward: Peak
    backward: Peak


@dataclass
class Ledger:
    """Bytes now, and the most there has been."""

    bytes: float = 0.0
    peak: Peak = field(default_factory=lambda: Peak(0.0, ""))

    def add(self, bytes_: float) -> None:
        """Allocate (or free, when negative)."""
        self.bytes += bytes_

    def mark(self, op: str, extra: float = 0.0) -> None:
        """Note the moment, with `extra` bytes that live only now."""
        if self.bytes + extra > self.peak.bytes:
            self.peak = Peak(self.bytes + extra, op)


class Autograd(NamedTuple):
    """How the framework's backward treats memory."""

    tp: float = 1.0
    weight_grad_itemsize: float = 0.0
    """Bytes per element of a weight gradient that lives beside the accumulated one; 0 with gradient-accumulation fusion."""
    weight_grads_stay: bool = False
    """It lives until its part's backward ends (FSDP, first micro-batch of torch), else for its op alone."""
    stops_early: bool = False
    """Replays end when the last saved tensor is back."""
    elsewhere: frozenset[str] = frozenset()
    """Tensors that live in a permanent buffer, counted apart."""


def walk_part(ops: list[Op], x: Tensor, out: str, modules: frozenset[str], autograd: Autograd) -> PartMemory:
    """Walk one part with `modules` recomputed; `out` is the tensor it hands on."""
    sizes = tensor_bytes(ops, x) | dict.fromkeys(autograd.elsewhere, 0.0)
    segments = find_segments(ops, modules) if modules else []
    kept = kept_names(ops, segments)
    saved = sum(sizes[name] for name in kept)
    forward = walk_forward(ops, sizes, kept, x.name, out)
    return PartMemory(saved, forward, BackwardWalk(ops, sizes, segments, kept, autograd).run(out))


def walk_forward(ops: list[Op], sizes: dict[str, float], kept: set[str], x: str, out: str) -> Peak:
    """Forward: outputs appear, and go after their last reader unless kept or handed on."""
    last_use = {name: i for i, op in enumerate(ops) for name in op.inputs}
    stay = kept | {out}
    ledger = Ledger(sizes[x])
    for i, op in enumerate(ops):
        made = [t.name for t in op.made]
        ledger.add(sum([sizes[name] for name in made]))
        ledger.mark(op.name, forward_temp(op))
        gone = [name for name in made if name not in last_use] + [
            name for name in dict.fromkeys(op.inputs) if last_use[name] == i
        ]
        ledger.add(-sum([sizes[name] for name in gone if name not in stay]))
    return ledger.peak


def forward_temp(op: Op) -> float:
    """Bytes that live only while an op runs forward."""
    return float(op.forward_temp_bytes) if isinstance(op, (Move, Attention)) else 0.0


class BackwardWalk:
    """Backward over one part: gradients appear op by op, saved tensors go, recomputed segments come back first."""

    def __init__(
        self, ops: list[Op], sizes: dict[str, float], segments: list[Segment], kept: set[str], autograd: Autograd
    ) -> None:
        """Start with what forward kept."""
        self.ops, self.sizes, self.autograd = ops, sizes, autograd
        self.saved = set(kept)
        own = (t for op in ops for t in op.made if t.grad_itemsize and t.name not in autograd.elsewhere)
        self.grad_sizes = sizes | {t.name: float(t.grad_bytes) for t in own}
        self.regathers = {t.name for op in ops if isinstance(op, Comm) and op.regather for t in op.outputs}
        self.ledger = Ledger(sum(sizes[name] for name in kept))
        self.replays = {segment.trigger: segment for segment in segments}
        self.first_need: dict[str, int] = {}
        for i in range(len(ops) - 1, -1, -1):
            for name in ops[i].saves:
                self.first_need[name] = i
        for segment in segments:
            for name in segment.reads:
                self.first_need[name] = min(segment.first, self.first_need.get(name, segment.first))
        self.last_needed: dict[int, list[str]] = {}
        for name, i in self.first_need.items():
            self.last_needed.setdefault(i, []).append(name)
        self.grads: dict[str, list[float]] = {}
        """Gradient buffer of each tensor: [bytes, users]; an aliased buffer is shared by several names."""

    def run(self, out: str) -> Peak:
        """The most bytes held, from the gradient of `out` to that of the input."""
        if out in self.sizes:
            self.grads[out] = [self.grad_sizes[out], 1.0]
            self.ledger.add(self.grad_sizes[out])
        for i in range(len(self.ops) - 1, -1, -1):
            if i in self.replays:
                self.replay(self.replays[i])
            self.step(i)
        return self.ledger.peak

    def replay(self, segment: Segment) -> None:
        """Run a segment's forward again; what backward will read stays."""
        for i in replayed(self.ops, segment.first, segment.last, stops_early=self.autograd.stops_early):
            op = self.ops[i]
            fresh = [t.name for t in op.made if t.name not in self.saved]
            self.ledger.add(sum(self.sizes[name] for name in fresh))
            self.ledger.mark(op.name, forward_temp(op))
            stay = {name for name in fresh if name in self.first_need}
            self.saved |= stay
            self.ledger.add(-sum(self.sizes[name] for name in fresh if name not in stay))

    def step(self, i: int) -> None:
        """One op's backward."""
        op = self.ops[i]
        arrived = [self.grads[t.name] for t in op.outputs if t.name in self.grads]
        if isinstance(op, Move) and op.same_grad and arrived:
            self.share(op, arrived[0])
        else:
            self.produce(op)
        for t in op.outputs:
            self.release(self.grads.pop(t.name, None))
        for name in self.last_needed.get(i, ()):
            if name in self.saved:
                self.saved.discard(name)
                self.ledger.add(-self.sizes[name])

    def share(self, op: Op, grad: list[float]) -> None:
        """Inputs take the output's gradient as it is."""
        for name in op.inputs:
            if name in self.grads:
                self.accumulate(name, op.name)
            else:
                self.grads[name] = grad
                grad[1] += 1.0

    def produce(self, op: Op) -> None:
        """Inputs get gradients of their own; the op's temporaries and weight gradient live for the moment."""
        second = [name for name in op.inputs if name in self.grads]
        for name in op.inputs:
            if name not in self.grads:
                self.grads[name] = [self.grad_sizes[name], 1.0]
                self.ledger.add(self.grad_sizes[name])
        extra = sum(self.grad_sizes[name] for name in second) + self.regathered(op) + quantised(op)
        if self.autograd.weight_grads_stay:
            self.ledger.add(self.weight_grad(op))
        else:
            extra += self.weight_grad(op)
        if isinstance(op, (Move, Attention)):
            extra += float(op.backward_temp_bytes)
        self.ledger.mark(op.name, extra)
        for name in second:
            self.accumulate(name, op.name)

    def accumulate(self, name: str, op: str) -> None:
        """A second gradient of one tensor: added in place where nobody shares the first, else into a new buffer.

        torch/csrc/autograd/input_buffer.cpp, accumulate.
        """
        grad = self.grads[name]
        if grad[1] > 1.0:
            self.ledger.add(self.grad_sizes[name])
            self.ledger.mark(op, self.grad_sizes[name])
            grad[1] -= 1.0
            self.grads[name] = [self.grad_sizes[name], 1.0]

    def release(self, grad: list[float] | None) -> None:
        """One user of a gradient buffer less; the last one frees it."""
        if grad is None:
            return
        grad[1] -= 1.0
        if grad[1] == 0.0:
            self.ledger.add(-grad[0])

    def weight_grad(self, op: Op) -> float:
        """Bytes of the gradient of this op's parameters before it is accumulated."""
        return self.autograd.weight_grad_itemsize * sum(
            p.elements / (self.autograd.tp if p.shard else 1.0) for p in op.params
        )

    def regathered(self, op: Op) -> float:
        """Bytes of a projection's input gathered again because only its shard was kept."""
        if not isinstance(op, Gemm) or op.inputs[0] not in self.regathers:
            return 0.0
        return self.sizes[op.inputs[0]]


def quantised(op: Op) -> float:
    """Bytes of the quantised gradient of a projection's output, and of its input where only the other direction is kept."""
    if not isinstance(op, Gemm) or op.recipe is None:
        return 0.0
    recipe = op.recipe
    kept = op.keeps_columns or recipe.copies == 1.0
    inputs = 0.0 if kept else op.m * op.k
    return float(recipe.itemsize * (recipe.copies * op.m * op.n + inputs))


def chunk_peaks(parts: list[tuple[int, PartMemory]]) -> PartMemory:
    """Parts in a row, each repeated: what all of them keep, and the peaks of one micro-batch's forward and backward."""
    saved, forward, backward = 0.0, Peak(0.0, ""), Peak(0.0, "")
    for count, part in parts:
        if count == 0:
            continue
        below = saved + (count - 1) * part.saved
        saved += count * part.saved
        forward = max(forward, Peak(below + part.forward.bytes, part.forward.op))
        backward = max(backward, Peak(below + part.backward.bytes, part.backward.op))
    return PartMemory(saved, forward, backward)
