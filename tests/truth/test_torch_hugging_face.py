"""A Llama layer as Hugging Face's modules write it (models/llama/modeling_llama.py), against torch's kernels on a CPU.

Bytes of every kernel of the norm, what the norm keeps, and how many kernels the forward of a layer launches.
"""

from collections import Counter

import torch
import torch.nn.functional as F  # noqa: N812
from test_torch_by_element import run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.model.blocks import block_ops
from steptime.model.model import Model
from steptime.model.shard import Shard
from steptime.model.sublayers import norm
from steptime.software.performance import load_software

BF16 = torch.bfloat16
HIDDEN, INNER, HEADS, HEAD, BATCH, TOKENS = 64, 160, 4, 16, 2, 128
MODEL = Model(
    n_layers=1, hidden_sz=HIDDEN, inter_sz=INNER, n_q_heads=HEADS, n_kv_heads=HEADS, head_dim=HEAD, vocab_sz=240
)
VIEWS = {"view", "_unsafe_view", "slice", "transpose", "unsqueeze", "detach", "alias", "expand", "t", "empty_like"}


class Norm(nn.Module):
    """RMSNorm of several kernels that casts down before the product with its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, dtype=BF16))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def turned(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class Layer(nn.Module):
    """Seven projections, two norms, rotary embedding over transposed heads, scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        widths = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)}
        widths |= {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
        self.of = nn.ModuleDict({name: nn.Linear(*w, bias=False, dtype=BF16) for name, w in widths.items()})
        self.first, self.second = Norm(), Norm()

    def forward(self, x, cos, sin):
        normed = self.first(x)
        q, k, v = (self.of[name](normed).view(BATCH, TOKENS, HEADS, HEAD).transpose(1, 2) for name in "qkv")
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.of["o"](out)
        normed = self.second(x)
        return x + self.of["down"](F.silu(self.of["gate"](normed)) * self.of["up"](normed))


class Launched(TorchDispatchMode):
    """Kernels by name, views aside."""

    def __init__(self):
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.split(".")[0]
        self.count[name] += name not in VIEWS
        return op(*args, **(kwargs or {}))


def shard():
    """One device of the profile accelerate."""
    rows = float(TOKENS)
    return Shard(float(BATCH), rows, rows, 1.0, sp=False, vocab=240.0, software=load_software("accelerate"))


def norm_op():
    [op], _ = norm("n", "x", float(BATCH * TOKENS), HIDDEN, MODEL, shard())
    return op


def test_bytes_of_the_norm():
    """Bytes an element: forward 6 up, 8 squared, 4 mean, 8 and 4 products, 6 down: 36.

    Backward: 4 + 6 for the product with the weight and 2 for its sum; 6 up; 8 + 12 for the product with the statistics and 4 for
    its sum; 4 for the mean; 8 + 8 + 12 for the square; 12 for both gradients together; 6 down: 92. The gradient of the mean is a
    view of one number a row, which is counted here as 4 bytes made and 4 read.
    """
    n = BATCH * TOKENS * HIDDEN
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=BF16, requires_grad=True)
    forward, backward = run(n, Norm(), x)
    op = norm_op()
    assert (forward[0], backward[0] - 8 * n) == (36 * n, 92 * n) == (op.forward_bytes, op.backward_bytes)


def test_what_the_norm_keeps():
    """The input in fp32, the normalized input in bf16 and one fp32 number a row: 4 + 2 bytes an element, and 4 a row."""
    kept, module = {}, Norm()

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=BF16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = module(x)
    kept.pop(module.weight.untyped_storage().data_ptr())
    rows = BATCH * TOKENS
    assert sum(kept.values()) == 6 * rows * HIDDEN + 4 * rows
    assert sorted(kept.values()) == sorted(t.bytes for t in norm_op().stats)
    assert out.dtype == BF16


def test_kernels_that_a_layer_launches():
    """2 norms of 8, 7 projections, attention, SiLU and its product, 2 residuals; 10 of rotary embedding: 38.

    Those are 4 products, 2 negations, 2 joins and 2 sums.
    """
    cos = sin = torch.randn(BATCH, 1, TOKENS, HEAD, dtype=BF16)
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=BF16, requires_grad=True)
    layer = Layer()
    with Launched() as launched:
        layer(x, cos, sin)
    ours = sum(getattr(op, "kernels", 1.0) for op in block_ops(MODEL, shard()))
    assert sum(launched.count.values()) == 2 * 8 + 7 + 10 + 1 + 2 + 2 == 38 == ours
