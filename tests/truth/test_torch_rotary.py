"""torchtitan's rotary embedding, repeated key-value heads and Qwen3's gathered heads against torch's kernels. Zero tolerance."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as OnDim
from torch.utils._python_dispatch import TorchDispatchMode
from torch_blocks import Kernels
from torch_fsdp import world
from torch_ours import shard_of

from steptime.bench.runs.probes import Collectives
from steptime.cost import dtensor
from steptime.model.attention import attention_ops
from steptime.model.model import Model
from steptime.model.ops import Comm, Move
from steptime.model.rotary import ROTATIONS
from steptime.software.performance import load_software

BATCH, SEQLEN, TP = 16, 64, 4
QWEN = Model(
    n_layers=1, hidden_sz=96, inter_sz=160, n_q_heads=16, n_kv_heads=4, head_dim=16, vocab_sz=240, qk_norm=True
)
VIEWS = frozenset({
    "view", "_unsafe_view", "slice", "transpose", "unsqueeze", "squeeze", "detach", "alias", "view_as_real", "view_as_complex",
    "expand", "t", "split", "chunk", "_conj",
})  # fmt: skip
NETWORK = frozenset({"all_gather_into_tensor", "wait_tensor", "_wrap_tensor_autograd"})
TABLE = 4096
"""Bytes of a larger tensor than any table of cosines here."""


class Moved(TorchDispatchMode):
    """Bytes that every kernel on local data reads and writes, views and tables aside, by the kernel's name."""

    def __init__(self):
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name, out = func.__name__.split(".")[0], attended(func, args) or func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else [out]
        tensors = [t for arg in (*args, *results) for t in (arg if isinstance(arg, tuple | list) else [arg])]
        tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
        outside = any(isinstance(t, FakeTensor) or t.device.type == "meta" for t in tensors)
        if not outside and name not in VIEWS and not name.startswith("empty"):
            again = tensors[:1] if name == "slice_backward" else []  # a half is copied into zeros
            self.bytes[name] += sum(size for t in (*tensors, *again) if (size := distinct(t)) > TABLE)
        return out


def distinct(t: torch.Tensor) -> int:
    """Bytes of a tensor's own elements: an expanded view has fewer than it shows."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def attended(func, args):
    """Results of the flash kernel, which has no version for a CPU."""
    name = func.__name__.split(".")[0]
    if name == "_scaled_dot_product_flash_attention_backward":
        return tuple(torch.empty_like(t) for t in args[1:4])
    if name == "_scaled_dot_product_flash_attention":
        none, state = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        out = torch.empty_like(args[0].transpose(1, 2).contiguous()).transpose(1, 2)
        return (out, torch.zeros(args[0].shape[:3]), None, None, SEQLEN, SEQLEN, state, state.clone(), none)
    return None


def turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def composite(x, tables):
    """pytorch/torchtitan@d66b72a6 torchtitan/experiments/qwen3/model/model.py, apply_rotary_emb."""
    cos, sin, _ = tables
    return x * cos.to(x.dtype) + turned(x) * sin.to(x.dtype)


def upcast(x, tables):
    """torchtitan/models/common/rope.py@b5bcd76c, CosSinRoPE."""
    (cos, sin, _), wide = tables, x.float()
    return (wide * cos + turned(wide) * sin).type_as(x)


def complex_product(x, tables):
    """torchtitan/models/common/rope.py@b5bcd76c, ComplexRoPE."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * tables[2]).flatten(-2).type_as(x)


def tables_of(width: int):
    angles = torch.rand(1, 2, 1, width)
    half = angles[..., : width // 2]
    return angles.cos(), angles.sin(), torch.polar(torch.ones_like(half), half)


@pytest.mark.parametrize(
    ("how", "rotate"), [("composite", composite), ("upcast", upcast), ("complex", complex_product)]
)
def test_accesses_of_a_rotated_element(how, rotate):
    x = torch.randn(256, 2, 8, 32, dtype=torch.bfloat16, requires_grad=True)
    tables, gradient = tables_of(32), torch.zeros_like(x)
    with Moved() as forward:
        y = rotate(x, tables)
    with Moved() as backward:
        y.backward(gradient)
    unit = x.numel() * x.element_size()
    assert (forward.bytes.total() / unit, backward.bytes.total() / unit) == ROTATIONS[how][:2]


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """pytorch/torchtitan@d66b72a6 torchtitan/experiments/qwen3/model/model.py, repeat_kv."""
    batch, seqlen, heads, width = x.shape
    return x[:, :, :, None].expand(batch, seqlen, heads, times, width).reshape(batch, seqlen, heads * times, width)


def attended_heads(q, k, v, tables):
    """Its Attention.forward from the norms of q and k to the output of the kernel."""
    q, k = composite(q, tables), composite(k, tables)
    q, k, v = (t.transpose(1, 2) for t in (q, repeated(k, 4), repeated(v, 4)))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def whole(t: DTensor) -> DTensor:
    """What NoParallel(use_local_output=False) makes of a norm's output (torchtitan/distributed/__init__.py@d66b72a6)."""
    return t.redistribute(placements=[Replicate()], async_op=True)


@pytest.mark.parametrize("gathered", [False, True])
def test_copies_before_the_attention_of_qwen3_under_tensor_parallelism(gathered):
    """Sent: q and k of all ranks, in forward alone. Moved: every kernel from the norms' outputs to attention's.

    On a rank q has 4 heads and k one: Q = 16 * 64 * 4 * 16 * 2 = 131,072 bytes and K = 32,768, together 163,840. Not gathered:
    positions 10 (Q + K), keys and values repeated 2 (Q + K), 1,966,080; backward 15 (Q + K) and 2 (Q + K), 2,785,280. Gathered
    from 4 ranks: joined 2 * 4 (Q + K) = 1,310,720; positions 4 * 10 (Q + K) = 6,553,600; keys of 4 ranks and values of one
    repeated, 5 (Q + K) = 819,200; q and k of this rank taken, 2 * 2 Q = 524,288: 9,207,808. Backward has this rank's own heads,
    and takes them again: 2,785,280 + 524,288 = 3,309,568.
    """
    batch, seqlen, size = BATCH, SEQLEN, 2
    q_bytes, k_bytes = batch * seqlen * 4 * 16 * size, batch * seqlen * 16 * size
    with world(1, TP) as mesh:
        q, k, v = (
            DTensor.from_local(
                torch.zeros(batch, seqlen, heads, 16, dtype=torch.bfloat16), mesh["tp"], [OnDim(2)], run_check=False
            ).requires_grad_()
            for heads in (4, 1, 1)
        )
        tables = [
            DTensor.from_local(torch.zeros(1, seqlen, 1, 16), mesh["tp"], [Replicate()], run_check=False) for _ in "cs"
        ]
        with Collectives() as sent, Moved() as forward:
            out = attended_heads(*((whole(q), whole(k)) if gathered else (q, k)), v, (*tables, None))
        gradient = DTensor.from_local(torch.zeros_like(out.to_local()), mesh["tp"], [OnDim(1)], run_check=False)
        with Collectives() as back, Moved() as backward:
            out.backward(gradient)
    shard = shard_of(QWEN, Kernels(), batch, seqlen, tp=TP, sp=True)
    software = shard.software.replace(repeat_kv=True, qk_norm_gathered=gathered)
    ops = attention_ops(QWEN, replace(shard, software=software))
    names = [op.name for op in ops]
    first = names.index("attn.k_norm") + 1
    between = ops[first : names.index("attn.core")]
    gathers = [op for op in between if isinstance(op, Comm)]
    assert Counter({c.bytes: n for c, n in sent.calls.items()}) == Counter(op.bytes for op in gathers)
    assert sorted(op.bytes for op in gathers) == ([4 * k_bytes, 4 * q_bytes] if gathered else [])
    assert not back.calls
    assert all(op.joined and dtensor.copies(load_software("torchtitan"), "all_gather") for op in gathers)
    joined = sum(2 * op.bytes for op in gathers)
    moves = [op for op in between if isinstance(op, Move)]
    assert joined + sum(op.forward_bytes for op in moves) == moved_by(forward) == (9_207_808 if gathered else 1_966_080)
    assert sum(op.backward_bytes for op in moves) == moved_by(backward) == (3_309_568 if gathered else 2_785_280)


def moved_by(seen: Moved) -> int:
    """Bytes of all kernels but attention's and the network's own."""
    return sum(n for name, n in seen.bytes.items() if "flash" not in name and name not in NETWORK)
