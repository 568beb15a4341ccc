"""What Kimi Delta Attention and Lightning Attention keep for backward, and their parameters, as torch modules on a CPU.

The modules are written after fla/layers/kda.py (flash-linear-attention v0.5.2) and modeling_minimax.py (transformers 4.57.1);
each kernel of that library is a stand-in whose backward keeps what the real one's does. Proved to the byte: everything around
them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from steptime.model.linear_attention import linear_attention_ops
from steptime.model.model import Model
from steptime.model.ops import Tensor, tensor_bytes
from steptime.model.segments import kept_names
from steptime.model.shard import Shard
from steptime.software.performance import load_software

H, HEADS, WIDTH, CHUNK = 96, 4, 16, 64
BF16, FP32 = torch.bfloat16, torch.float32


class Kernel(torch.autograd.Function):
    """Gives back a tensor like `out`, keeps `kept`."""

    @staticmethod
    def forward(ctx, out, kept, *inputs):
        ctx.save_for_backward(*kept)
        ctx.like = [(t.shape, t.dtype) for t in inputs]
        return torch.zeros_like(out)

    @staticmethod
    def backward(ctx, grad):
        return None, None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.like)


def norm(x, weight):
    """RMSNorm in one kernel: its input, its weight, one fp32 number a row."""
    return Kernel.apply(x, (x, weight, torch.ones(x.shape[:-1], dtype=FP32)), x, weight)


class Kda(nn.Module):
    """fla.layers.kda.KimiDeltaAttention, its gates without biases as in moonshotai/Kimi-Linear-48B-A3B."""

    def __init__(self):
        super().__init__()
        wide, linear = HEADS * WIDTH, lambda a, b: nn.Linear(a, b, bias=False, dtype=BF16)
        self.q, self.k, self.v = (linear(H, wide) for _ in range(3))
        self.conv = nn.ParameterList([nn.Parameter(torch.zeros(wide, 1, 4, dtype=BF16)) for _ in range(3)])
        self.f, self.g = (nn.Sequential(linear(H, WIDTH), linear(WIDTH, wide)) for _ in range(2))
        self.b, self.o = linear(H, HEADS), linear(wide, H)
        self.a_log, self.dt = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(wide))
        self.norm = nn.Parameter(torch.ones(WIDTH, dtype=BF16))

    def forward(self, x):
        made = [p(x) for p in (self.q, self.k, self.v)]
        q, k, v = (Kernel.apply(y, (y, w), y, w) for y, w in zip(made, self.conv, strict=True))
        f, beta = self.f(x), self.b(x)
        rows = x.shape[:-1]
        inside = [torch.zeros(*rows, HEADS * WIDTH, dtype=BF16) for _ in "qk"]
        inside += [torch.zeros(*rows, HEADS) for _ in ("q", "k", "beta")]
        inside += [torch.zeros(*rows, HEADS, CHUNK, dtype=BF16) for _ in ("qk", "kk")]
        inputs = (q, k, v, f, beta, self.a_log, self.dt)
        o = Kernel.apply(v, (v, f, beta, self.a_log, self.dt, *inside), *inputs).unflatten(-1, (HEADS, WIDTH))
        gate = self.g(x).unflatten(-1, (HEADS, WIDTH))
        kept = (o, gate, self.norm, torch.zeros(*rows, HEADS))
        return self.o(Kernel.apply(o, kept, o, gate, self.norm).flatten(-2))


class Lightning(nn.Module):
    """transformers' MiniMaxLightningAttention over chunk_lightning_attn."""

    def __init__(self):
        super().__init__()
        wide, linear = HEADS * WIDTH, lambda a, b: nn.Linear(a, b, bias=False, dtype=BF16)
        self.qkv, self.gate, self.o = linear(H, 3 * wide), linear(H, wide), linear(wide, H)
        self.norm = nn.Parameter(torch.ones(wide, dtype=BF16))

    def forward(self, x):
        qkv = functional.silu(self.qkv(x)).unflatten(-1, (HEADS, 3 * WIDTH))
        q, k, v = (t.contiguous() for t in qkv.split(WIDTH, -1))
        o = Kernel.apply(v, (q, k, v, torch.zeros(HEADS)), q, k, v).flatten(-2)
        return self.o(norm(o, self.norm) * torch.sigmoid(self.gate(x)))


class Half(nn.Module):
    """Norm, mixer, residual."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer, self.weight = mixer, nn.Parameter(torch.ones(H, dtype=BF16))

    def forward(self, x):
        return x + self.mixer(norm(x, self.weight))


@pytest.mark.parametrize(("kind", "mixer"), [("kda", Kda), ("lightning", Lightning)])
@pytest.mark.parametrize(("b", "s"), [(1, 128), (3, 64)])
def test_saved_bytes_and_parameters(kind, mixer, b, s):
    module = Half(mixer())
    params, found = {p.untyped_storage().data_ptr() for p in module.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(torch.zeros(b, s, H, dtype=BF16, requires_grad=True))
    out.sum().backward()
    linear = {"kind": kind, "n_value_heads": HEADS, "key_head_dim": WIDTH, "value_head_dim": WIDTH}
    model = Model(n_layers=1, hidden_sz=H, inter_sz=H, n_q_heads=4, vocab_sz=64, linear_attention=linear)
    seen = Shard(float(b), float(s), float(s), 1.0, sp=False, vocab=64, software=load_software("megatron-core"))
    ops = linear_attention_ops(model, seen)
    sizes = tensor_bytes(ops, Tensor("x", float(b * s * H), 2.0))
    assert sum(sizes[name] for name in kept_names(ops, [])) == sum(size for size, _ in found.values())
    assert sum(p.elements for op in ops for p in op.params) == sum(p.numel() for p in module.parameters())
