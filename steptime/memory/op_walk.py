"""Activation memory by walking a part's ops forward and backward, the way autograd allocates and frees.

A part is a list of ops from one input tensor to one output (a layer, the embedding, the head). Its walk gives what it keeps for
backward and the most it holds at once in either direction; `chunk_peaks` strings parts together. Peaks of columns name no op.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from steptime.base.num import Num
from steptime.memory.forward_walk import forward_temp, walk_forward
from steptime.memory.ledger import NO_BYTES, GradBuffer, Ledger, PartMemory, Peak, in_allocator
from steptime.model.offload import OffloadGroup, copied_bytes, groups, moved_names
from steptime.model.ops import Attention, Comm, Gemm, Move, Op, Param, Tensor, tensor_bytes
from steptime.model.scans import Chunked, Scan
from steptime.model.segments import Segment, cast_from_inputs, find_segments, kept_names, rerun


class Autograd(NamedTuple):
    """How the framework's backward treats memory."""

    tp: Num
    experts: Num
    """Devices that share the weights of experts."""
    weight_grad_itemsize: float
    """Bytes per element of a weight gradient that exists besides the accumulated one; 0 with gradient-accumulation fusion."""
    weight_grads_stay: bool
    """It is held until its part's backward ends (FSDP, first micro-batch of torch), else only during its op."""
    stops_early: bool
    """Replays end when the last saved tensor is back."""
    pool: bool
    """Pooled tensors are stored in a permanent buffer and counted there."""
    compiled: bool
    """torch.compile compiles forward and backward of a part."""
    offload: AbstractSet[str] = frozenset()
    """Modules of a layer whose kept tensors are offloaded to host memory."""
    reentrant: bool = False
    """The function that runs a layer again holds the gradient of its output until its backward ends."""
    woven: bool = False
    """Backward takes turns with the forward of another micro-batch's layer."""


class Kept(NamedTuple):
    """What the forward of one part keeps for its backward."""

    names: list[str]
    """Tensors that stay on the device."""
    sizes: dict[str, Num]
    """Bytes of every tensor of the part; 0 for those stored in a permanent buffer."""
    segments: list[Segment]
    """Ops that run again before their backward."""
    sent: list[OffloadGroup]
    """Tensors offloaded to host memory."""


def kept_by_part(
    ops: list[Op], x: Tensor, modules: AbstractSet[str | float], autograd: Autograd, sizes: dict[str, Num] | None = None
) -> Kept:
    """Bytes that one part keeps with `modules` recomputed; `sizes`: those of its tensors, where they are known."""
    sizes = in_allocator(ops, tensor_bytes(ops, x)) if sizes is None else sizes
    if autograd.pool:
        sizes = sizes | {t.name: 0.0 for op in ops for t in op.allocates if t.pooled}
    segments = find_segments(ops, modules, compiled=autograd.compiled) if modules else []
    if autograd.compiled and not segments:
        segments = cast_from_inputs(ops)
    sent = groups(ops, x, segments, autograd.offload)
    away = moved_names(sent)
    return Kept([name for name in kept_names(ops, segments) if name not in away], sizes, segments, sent)


def walk_part(
    ops: list[Op],
    x: Tensor,
    out: str,
    modules: AbstractSet[str | float],
    autograd: Autograd,
    sizes: dict[str, Num] | None = None,
) -> PartMemory:
    """Walk one part with `modules` recomputed; `out` is its output tensor, `sizes` as of `kept_by_part`."""
    kept, sizes, segments, sent = kept_by_part(ops, x, modules, autograd, sizes)
    saved = sum([sizes[name] for name in kept])
    forward = walk_forward(ops, sizes, kept, x.name, out)
    backward = BackwardWalk(ops, sizes, segments, kept, autograd, sent).run(out)
    return PartMemory(saved, forward, backward, ahead=copied_bytes(sent, sizes))


class BackwardWalk:
    """Backward over one part: gradients are allocated op by op, saved tensors freed, recomputed segments run again first."""

    def __init__(
        self,
        ops: list[Op],
        sizes: dict[str, Num],
        segments: list[Segment],
        kept: list[str],
        autograd: Autograd,
        sent: Sequence[OffloadGroup] = (),
    ) -> None:
        """Start with what forward kept, and what has come back of the tensors that it `sent` to the host."""
        self.ops, self.sizes, self.autograd = ops, sizes, autograd
        self.back: dict[int, Num] = {}
        """Bytes of the preceding layer that come back before an op's backward."""
        self.copies: dict[int, Num] = {}
        """Bytes that came back and are freed after it."""
        for group in sent:
            for copy in group.copies:
                self.back[group.next_at] = self.back.get(group.next_at, 0.0) + sizes[copy.name]
                self.copies[copy.freed] = self.copies.get(copy.freed, 0.0) + sizes[copy.name]
        self.returned = moved_names(sent)
        self.saved = {*kept, *self.returned}
        self.regathers = {t.name for op in ops if isinstance(op, Comm) and op.regather for t in op.outputs}
        own = [t for op in ops for t in op.allocates if t.grad_itemsize or t.outside or t.name in self.regathers]
        self.grad_sizes = sizes | {t.name: t.grad_bytes * (t.outside not in {"gradient", "both"}) for t in own}
        self.ledger = Ledger(sum([sizes[name] for name in kept]) + copied_bytes(sent, sizes))
        self.replays = {segment.trigger: segment for segment in segments}
        self.first_need: dict[str, int] = {}
        """For each tensor that backward reads: the first op in depth order that needs it, which is the last one in backward."""
        for i in range(len(ops) - 1, -1, -1):
            for name in ops[i].saves:
                self.first_need[name] = i
        for segment in segments:
            for name in segment.reads:
                self.first_need[name] = min(segment.first, self.first_need.get(name, segment.first))
        self.last_needed: dict[int, list[str]] = {}
        for name, i in self.first_need.items():
            self.last_needed.setdefault(i, []).append(name)
        self.grads: dict[str, GradBuffer] = {}
        shared = {p.name for op in ops for p in op.params if p.shared}
        users = [p.name for op in ops for p in op.trained if p.name in shared] if shared else []
        self.to_come = {name: users.count(name) for name in users}
        """For each parameter that other ops also use: the number of backwards that add to its gradient."""
        self.waiting: dict[str, Num] = {}

    def run(self, out: str) -> Peak:
        """The peak from the gradient of `out` to that of the input."""
        for _ in self.steps(out):
            pass
        return self.ledger.peak

    def steps(self, out: str) -> Iterator[Ledger]:
        """Backward op by op, the last one first."""
        if out in self.sizes:
            self.allocate(out)
            self.grads[out].users += self.autograd.reentrant
        for i in range(len(self.ops) - 1, -1, -1):
            if i in self.back:
                self.ledger.bytes = self.ledger.bytes + self.back[i]
            if i in self.replays:
                self.replay(self.replays[i])
            self.step(i)
            yield self.ledger

    def allocate(self, name: str) -> None:
        """Allocate a tensor's own gradient buffer."""
        self.grads[name] = GradBuffer(self.grad_sizes[name])
        self.ledger.bytes = self.ledger.bytes + self.grad_sizes[name]

    def replay(self, segment: Segment) -> None:
        """Run a segment's forward again; tensors that backward will read are kept."""
        for i in rerun(self.ops, segment, stops_early=self.autograd.stops_early):
            op = self.ops[i]
            fresh = [t.name for t in op.allocates if t.name not in self.saved]
            self.ledger.bytes = self.ledger.bytes + sum([self.sizes[name] for name in fresh])
            self.ledger.mark(op.name, forward_temp(op))
            stay = {name for name in fresh if name in self.first_need}
            self.saved |= stay
            self.ledger.bytes = self.ledger.bytes - sum([self.sizes[name] for name in fresh if name not in stay])
        unread = [name for name in segment.keeps if name not in self.first_need]
        self.saved -= set(unread)
        self.ledger.bytes = self.ledger.bytes - sum([self.sizes[name] for name in unread])

    def step(self, i: int) -> None:
        """One op's backward."""
        op = self.ops[i]
        passes_on = isinstance(op, Move) and op.same_grad
        arrived = [self.grads[t.name] for t in op.outputs if t.name in self.grads] if passes_on else []
        if arrived:
            self.share(op, arrived[0])
        else:
            self.produce(op)
        for t in op.outputs:
            self.release(t.name)
        self.forget(i)

    def forget(self, i: int) -> None:
        """Free the saved tensors that no earlier op's backward reads, and copies that came back for this one."""
        if i in self.copies:
            self.ledger.bytes = self.ledger.bytes - self.copies[i]
        for name in self.last_needed.get(i, ()):
            if name in self.saved and name not in self.returned:
                self.saved.discard(name)
                self.ledger.bytes = self.ledger.bytes - self.sizes[name]

    def share(self, op: Op, grad: GradBuffer) -> None:
        """Inputs share the output's gradient unchanged."""
        for name in op.inputs:
            if name in self.grads:
                self.accumulate(name, op.name, 0.0)
            else:
                self.grads[name] = grad
                grad.users += 1

    def produce(self, op: Op) -> None:
        """Inputs get separate gradients; the op's temporaries and weight gradient exist only during the op."""
        second = [name for name in op.inputs if name in self.grads]
        extra: Num = sum([self.grad_sizes[name] for name in second])
        for name in op.inputs:
            if name not in self.grads:
                self.allocate(name)
        if isinstance(op, Gemm):
            extra = extra + self.regathered(op) + quantized_gradients(op)
        if op.params:
            if self.autograd.weight_grads_stay:
                self.ledger.bytes = self.ledger.bytes + self.weight_grad(op)
            else:
                extra = extra + self.weight_grad(op)
        if isinstance(op, Gemm):
            extra = extra + op.temp_bytes
        elif isinstance(op, (Move, Attention, Scan, Chunked)):
            extra = extra + op.backward_temp_bytes
        self.ledger.mark(op.name, extra)
        for name in second:
            self.accumulate(name, op.name, self.grad_sizes[name])
        if self.to_come:
            self.await_others(op)

    def await_others(self, op: Op) -> None:
        """The gradient of a parameter that several ops use is held until the last of them has run."""
        for p in op.trained:
            if p.name not in self.to_come:
                continue
            self.to_come[p.name] -= 1
            if self.to_come[p.name] and p.name not in self.waiting:
                self.waiting[p.name] = self.gradient_bytes(op, p)
                self.ledger.bytes = self.ledger.bytes + self.waiting[p.name]
            elif not self.to_come[p.name]:
                self.ledger.bytes = self.ledger.bytes - self.waiting.pop(p.name, 0.0)

    def accumulate(self, name: str, op: str, second: Num) -> None:
        """A second gradient of one tensor: added in place where the first is not shared, else into a new buffer.

        `second`: its bytes, 0 where it is a buffer that is held anyway. torch/csrc/autograd/input_buffer.cpp, accumulate.
        """
        grad = self.grads[name]
        if grad.users > 1:
            self.ledger.bytes = self.ledger.bytes + self.grad_sizes[name]
            self.ledger.mark(op, second)
            grad.users -= 1
            self.grads[name] = GradBuffer(self.grad_sizes[name])

    def release(self, name: str) -> None:
        """Remove one user of a gradient buffer; the last one frees it."""
        grad = self.grads.pop(name, None)
        if grad is None:
            return
        grad.users -= 1
        if grad.users == 0:
            self.ledger.bytes = self.ledger.bytes - grad.bytes

    def weight_grad(self, op: Op) -> Num:
        """Bytes of the gradient of this op's parameters before accumulation."""
        return sum([self.gradient_bytes(op, p) for p in op.trained])

    def gradient_bytes(self, op: Op, p: Param) -> Num:
        """Bytes for one parameter; the gradient of an embedding table that is looked up again is dense."""
        itemsize = self.autograd.weight_grad_itemsize
        if p.shared and isinstance(op, Move):
            itemsize = max(itemsize, op.outputs[0].itemsize)
        return itemsize * p.local(self.autograd.tp, self.autograd.experts)

    def regathered(self, op: Gemm) -> Num:
        """Bytes of a projection's input that is gathered again because only its shard was kept."""
        return self.sizes[op.inputs[0]] if op.inputs[0] in self.regathers else 0.0


def quantized_gradients(op: Gemm) -> Num:
    """Bytes of the quantized gradient of a projection's output, and of its input where only the other direction is kept."""
    if op.recipe is None or op.recipe.of_experts:  # whose casts are among `Gemm.temp_bytes`
        return 0.0
    recipe = op.recipe
    inputs = 0.0 if op.keeps_columns or recipe.copies == 1.0 else op.m * op.k
    return recipe.itemsize * (recipe.copies * op.m * op.n + inputs)


def chunk_peaks(parts: list[tuple[int, PartMemory]]) -> PartMemory:
    """Consecutive parts, each repeated: what all of them keep, and the peaks of one micro-batch's forward and backward."""
    saved: Num = 0.0
    n_params: Num = 0.0
    forward = backward = NO_BYTES
    for count, part in parts:
        if count == 0:
            continue
        below = saved + (count - 1) * part.saved
        saved = saved + count * part.saved
        n_params = n_params + count * part.n_params
        forward = forward.worse(Peak(below + part.forward.bytes, part.forward.op))
        backward = backward.worse(Peak(below + part.backward.bytes, part.backward.op))
    return PartMemory(saved, forward, backward, n_params)
