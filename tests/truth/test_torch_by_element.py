"""Bytes of Megatron-Core's eager kernels, and those without vector loads, as torch runs them on a CPU.

A kernel of torch uses vector loads where all operands are contiguous, of one shape and of one dtype, or where it casts fp32 down
(aten/src/ATen/native/cuda/CUDALoops.cuh; Copy.cu). Concatenations and sums are kernels of their own kind.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steptime.model.mamba import reordered
from steptime.model.mlp import Words, clamped
from steptime.model.moe import add_bias
from steptime.model.ops import Tensor
from steptime.model.rotary import ROTATIONS

BF16 = torch.bfloat16
WHOLE = {"cat", "sum"}
"""Kernels that read rows, whatever their strides."""


class Kernels(TorchDispatchMode):
    """Bytes of every kernel of `least` elements or more, and elements and bytes of those without vector loads."""

    def __init__(self, least):
        super().__init__()
        self.least, self.bytes, self.elements, self.slow = least, 0, 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        read = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        name = op.__name__.split(".")[0]
        views = {
            "view",
            "split",
            "split_with_sizes",
            "slice",
            "detach",
            "alias",
            "transpose",
            "ones_like",
            "scalar_tensor",
            "_unsafe_view",
        }
        if name in views or not made or max(t.numel() for t in (*made, *read)) < self.least:
            return out
        read = [t for t in read if t.numel() >= self.least]
        if name == "slice_backward":  # zeros alone, where nothing of the slice is left
            read = []
        moved = sum(t.numel() * t.itemsize for t in (*made, *read) if t.numel() >= self.least)
        self.bytes += moved
        result = made[0]
        operands = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        alike = all(
            t.is_contiguous() and t.shape == result.shape and t.dtype in {result.dtype, torch.bool} for t in operands
        )
        down = name == "_to_copy" and result.dtype == BF16
        compares = name in {"ge", "le"} and operands[0].is_contiguous()
        if name not in WHOLE | {"slice_backward"} and not (alike or down or compares):
            self.elements += result.numel()
            self.slow += moved
        return out


def run(least, function, *inputs):
    """(bytes, elements, slow bytes) of forward and of backward."""
    with Kernels(least) as forward:
        out = function(*inputs)
    gradient = torch.ones_like(out)
    with Kernels(least) as backward:
        out.backward(gradient)
    return tuple((k.bytes, k.elements, k.slow) for k in (forward, backward))


def ours(op):
    """The same of an op."""
    pairs = ((op.forward_bytes, op.forward_by_element), (op.backward_bytes, op.backward_by_element))
    return tuple((moved, slow.elements, slow.bytes) for moved, slow in pairs)


def clamp_and_join(x):
    """Of megatron/core/fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl."""
    gate, up = x.chunk(2, -1)
    return torch.cat((gate.clamp(min=None, max=1.0), up.clamp(min=-1.0, max=1.0)), -1)


def test_halves_clamped_and_joined():
    """Bytes per element of a half.

    Clamps: 2 + 2 forward; backward for each limit a mask 2 + 1, two masks joined 3, chosen 1 + 2 + 2: 8 for the gate's one limit,
    14 for up's two. Joined and, backward, their gradients: 2 * (2 + 2).
    """
    n = 256 * 64
    x = torch.randn(256, 128, dtype=BF16, requires_grad=True)
    forward, backward = run(n, lambda: clamp_and_join(x))
    assert forward == ((2 * 4 + 8) * n, 2 * n, 2 * 4 * n)
    assert backward == ((8 + 14 + 8) * n, (2 + 3) * n, (8 + 11) * n)
    ops, _, _ = clamped("x", "x", Tensor("y", float(n), 2.0), Words("experts", "moe", "moe_act"))
    joined = 8 * n, 0, 0
    assert forward == tuple(sum(parts) for parts in zip(joined, *(ours(op)[0] for op in ops), strict=True))
    assert backward == tuple(sum(parts) for parts in zip(joined, *(ours(op)[1] for op in ops), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_biases_by_row():
    """4 experts of 128 rows of 64 with fp32 probabilities, as TEGroupedMLP._apply_bias adds them.

    28 bytes an element forward, 40 backward; of these 14 in two kernels and 22 in three without vector loads.
    """
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    rows, hidden, experts = 512, 64, 4
    x = torch.randn(rows, hidden, dtype=BF16, requires_grad=True)
    biases = [torch.randn(hidden, dtype=BF16, requires_grad=True) for _ in range(experts)]
    probs = torch.rand(rows, 1, requires_grad=True)
    splits = [rows // experts] * experts
    forward, backward = run(rows * hidden // experts, lambda: TEGroupedMLP._apply_bias(x, biases, splits, probs))
    n = rows * hidden
    assert forward == (28 * n, 2 * n, 14 * n)
    assert backward == (40 * n, 3 * n, 22 * n)
    assert (forward, backward) == ours(
        add_bias(SimpleNamespace(prob=4.0, local_experts=experts), Tensor("x", float(n), 2.0), "probs")
    )


@pytest.mark.filterwarnings("ignore")
def test_rotation_by_eager_kernels():
    """Accesses of query or key, _apply_rotary_pos_emb_bshd: 12 forward, 14 backward, 5 of each without vector loads."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    t = torch.randn(32, 2, 4, 16, dtype=BF16, requires_grad=True)
    angles = torch.randn(32, 1, 1, 16)
    forward, backward = run(t.numel() // 2, lambda: _apply_rotary_pos_emb_bshd(t, angles, mscale=1.3))
    turn, size = ROTATIONS["own_tables"], t.numel() * 2
    assert forward == (turn.forward * size, turn.by_element * t.numel(), 2 * turn.by_element * size)
    assert backward == (turn.backward * size, turn.by_element * t.numel(), 2 * turn.by_element * size)


def test_batch_and_sequence_exchanged():
    """x of (sequence, batch, width) made contiguous as (batch, sequence, width): one kernel, 2 + 2 bytes an element."""
    n = 32 * 4 * 16
    x = torch.randn(32, 4, 16, dtype=BF16)
    with Kernels(n) as one:
        x.transpose(0, 1).contiguous()
    op = reordered("mamba.batch_first", "x", Tensor("y", float(n), 2.0))
    assert (one.bytes, one.elements, one.slow) == (4 * n, n, 4 * n)
    assert (op.forward_by_element.elements, op.forward_by_element.bytes) == (n, 4 * n)
    assert op.backward_by_element == op.forward_by_element
