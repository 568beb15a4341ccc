"""A plain eager torch transformer, configured by the words of `steptime.Model`: what the op lists are checked against.

Where only a CUDA kernel shows what a GPU run saves, an `autograd.Function` or an aten op stands in for it: fused norms keep
(x, statistics in fp32), a rotary kernel nothing, dropout a one-byte mask (`aten::native_dropout`, which `F.dropout` runs on a
GPU), a fused gated activation its two inputs, a compiled squared ReLU its input. Everything else is the torch function a user
would write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from live_bytes import one_kernel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_lora import adapt, with_gradient

from steptime.model.model import Model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Kernels:
    """How the modules compute: the options of `steptime.software.performance.OPTIONS` that plain torch has."""

    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    attention: Literal["flash", "unfused"] = "flash"
    norm: Literal["fused", "composite"] = "fused"
    activation: Literal["fused", "composite"] = "composite"
    loss: Literal["native", "fp32"] = "fp32"
    """Cross entropy on the logits as they are, or on an fp32 copy."""
    recompute: Literal["none", "selective", "full"] = "none"
    reentrant: bool = False
    """Blocks run again by torch's reentrant checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]


class FusedNorm(torch.autograd.Function):
    """RMSNorm or LayerNorm as one kernel: keeps x and the fp32 statistics of each row, as CUDA's kernels do."""

    @staticmethod
    def forward(ctx, x, weight, bias, rms):
        with one_kernel("fused norm"):
            wide = x.float()
            mean = None if rms else wide.mean(-1, keepdim=True)
            centred = wide if rms else wide - mean
            rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
            y = (centred * rstd).to(x.dtype) * weight
            y = y if bias is None else y + bias
            del wide, centred
        ctx.save_for_backward(x, weight, rstd, *(() if rms else (mean,)))
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, *_ = ctx.saved_tensors
        rows = tuple(range(grad.dim() - 1))
        with one_kernel("fused norm backward"):
            return grad * weight, (grad * x).sum(rows), grad.sum(rows) if ctx.has_bias else None, None


class FusedGlu(torch.autograd.Function):
    """act(gate) * up as one kernel: keeps its two inputs."""

    @staticmethod
    def forward(ctx, gate, up, act):
        ctx.save_for_backward(gate, up)
        with one_kernel("fused glu"):
            return act(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        with one_kernel("fused glu backward"):
            return grad * up, grad * gate, None


class FusedSquaredRelu(torch.autograd.Function):
    """relu(x)**2 as one kernel: keeps its input, as torch.compile has it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with one_kernel("fused squared relu"):
            return F.relu(x).square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with one_kernel("fused squared relu backward"):
            return grad * 2.0 * F.relu(x)


class Rotate(torch.autograd.Function):
    """Rotary embedding of (b, s, heads, d), in halves, as one kernel: keeps the shared tables only."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        with one_kernel("rotary"):
            return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        with one_kernel("rotary backward"):
            return rotated(grad, cos, -sin), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class MaskedSoftmax(torch.autograd.Function):
    """softmax(scale * scores + mask) as one kernel: keeps its output."""

    @staticmethod
    def forward(ctx, scores, scale, mask):
        with one_kernel("masked softmax"):
            probs = torch.softmax(scores * scale + mask, -1)
        ctx.save_for_backward(probs)
        ctx.scale = scale
        return probs

    @staticmethod
    def backward(ctx, grad):
        (probs,) = ctx.saved_tensors
        with one_kernel("masked softmax backward"):
            return torch._softmax_backward_data(grad, probs, -1, probs.dtype) * ctx.scale, None, None


class FlashWithDropout(torch.autograd.Function):
    """Flash attention with dropout: as without, since the mask is drawn again from its seed (the CPU kernel has no dropout)."""

    @staticmethod
    def forward(ctx, q, k, v):
        b, nq, s, d = q.shape
        out = q.new_empty(b, s, nq, d).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(b, nq, s, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class Norm(nn.Module):
    def __init__(self, width: int, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.rms, self.kernels, self.width = model.norm == "rmsnorm", kernels, width
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if model.norm_bias and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:
        if self.rms and self.kernels.norm == "composite":
            return F.rms_norm(x, (self.width,), self.weight, 1e-5)
        if (
            not self.rms and x.dtype == torch.float32
        ):  # below fp32 the CPU's kernel keeps narrow statistics, CUDA's does not
            return F.layer_norm(x, (self.width,), self.weight, self.bias)
        return FusedNorm.apply(x, self.weight, self.bias, self.rms)


def dropout(x: Tensor, p: float) -> Tensor:
    """What `F.dropout` runs on a GPU: the mask is one byte per element."""
    return torch.native_dropout(x, p, train=True)[0] if p else x


def flash(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    if p:
        return FlashWithDropout.apply(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, p: float) -> Tensor:
    """softmax(q k' + mask) v by separate kernels, keys and values repeated to the query heads (HF eager, Megatron local)."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores, scale = q @ k.transpose(-1, -2), q.shape[-1] ** -0.5
    del q, k  # what autograd does not keep goes
    probs = MaskedSoftmax.apply(scores, scale, mask)
    del scores
    return dropout(probs, p) @ v


class Attention(nn.Module):
    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.head_dim, self.p = kernels, model.head_dim, model.dropout
        q_width, kv_width = model.n_q_heads * model.head_dim, model.n_kv_heads * model.head_dim
        self.q = nn.Linear(model.hidden_sz, q_width, bias=model.qkv_bias)
        self.k = nn.Linear(model.hidden_sz, kv_width, bias=model.qkv_bias)
        self.v = nn.Linear(model.hidden_sz, kv_width, bias=model.qkv_bias)
        self.o = nn.Linear(q_width, model.hidden_sz, bias=model.bias)
        self.whole = model.qk_norm_type == "per_layer"
        q_norm, k_norm = (q_width, kv_width) if self.whole else (model.head_dim, model.head_dim)
        self.q_norm = Norm(q_norm, model, kernels) if model.qk_norm else None
        self.k_norm = Norm(k_norm, model, kernels) if model.qk_norm else None

    def core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if self.kernels.attention == "flash":
            return flash(q, k, v, self.p)
        return unfused(q, k, v, mask, self.p)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.whole:  # transformers modeling_olmo2.py, Olmo2Attention.forward
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(b, s, -1, self.head_dim) for t in (q, k, v))
        if self.q_norm is not None and not self.whole:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None:
            q, k = Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.kernels.recompute == "selective":
            out = checkpoint(self.core, q, k, v, mask, use_reentrant=False)
        else:
            out = self.core(q, k, v, mask)
        return self.o(out.transpose(1, 2).reshape(b, s, -1))


def squared_relu(x: Tensor) -> Tensor:
    """As transformers/activations.py has it, ReLUSquaredActivation."""
    return torch.square(F.relu(x))


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu2": squared_relu}


class Mlp(nn.Module):
    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.act, self.fused = ACTIVATIONS[model.activation], kernels.activation == "fused"
        if self.fused and model.activation == "relu2" and not model.glu:
            self.act = FusedSquaredRelu.apply
        self.up = nn.Linear(model.hidden_sz, model.inter_sz, bias=model.bias)
        self.gate = nn.Linear(model.hidden_sz, model.inter_sz, bias=model.bias) if model.glu else None
        self.down = nn.Linear(model.inter_sz, model.hidden_sz, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.act(self.up(x)))
        if self.fused:
            return self.down(FusedGlu.apply(self.gate(x), self.up(x), self.act))
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        self.p, self.parallel = model.dropout, model.parallel_residual

        def norm(there: bool) -> Norm | nn.Identity:
            return Norm(model.hidden_sz, model, kernels) if there else nn.Identity()

        self.norm1, self.attn = norm(model.pre_norms), Attention(model, kernels)
        self.norm2 = None if model.shared_norm else norm(model.pre_norms)
        self.mlp = Mlp(model, kernels)
        self.post1, self.post2 = norm(model.post_norms), norm(model.post_norms)
        if model.lora is not None:
            adapt(self, model.lora)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor) -> Tensor:
        if (
            self.parallel
        ):  # transformers modeling_gpt_neox.py, GPTNeoXLayer.forward; modeling_phi.py, PhiDecoderLayer.forward
            first = self.norm1(x)
            branch = dropout(self.post1(self.attn(first, cos, sin, mask)), self.p)
            second = first if self.norm2 is None else self.norm2(x)
            del first
            return dropout(self.post2(self.mlp(second)), self.p) + branch + x
        x = x + dropout(self.post1(self.attn(self.norm1(x), cos, sin, mask)), self.p)
        return x + dropout(self.post2(self.mlp(self.norm2(x))), self.p)


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head; `forward` returns the mean cross entropy."""

    def __init__(self, model: Model, kernels: Kernels, seqlen: int) -> None:
        super().__init__()
        self.model, self.kernels = model, kernels
        self.tokens = nn.Embedding(model.vocab_sz, model.hidden_sz)
        rows = model.max_positions or seqlen
        self.positions = nn.Embedding(rows, model.hidden_sz) if model.learned_positions else None
        self.blocks = nn.ModuleList(Block(model, kernels) for _ in range(model.n_layers))
        self.norm = Norm(model.hidden_sz, model, kernels)
        self.head = nn.Linear(model.hidden_sz, model.vocab_sz, bias=False)
        if model.tie_embeddings:
            self.head.weight = self.tokens.weight
        if model.lora is not None:
            for module in (self.tokens, self.norm, self.head):
                module.requires_grad_(False)
            if self.positions is not None:
                self.positions.requires_grad_(False)
            self.tokens.register_forward_hook(with_gradient)
        cos, sin, mask = (None if t is None else t.to(kernels.dtype) for t in tables(model, seqlen))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            ids = torch.arange(tokens.shape[1], device=tokens.device).repeat(
                tokens.shape[0], 1
            )  # (b, s), as loaders give them
            x = x + self.positions(ids)
        return dropout(x, self.model.dropout)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.float() if self.kernels.loss == "fp32" else logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.kernels.recompute == "full":
                x = checkpoint(block, x, self.cos, self.sin, self.mask, use_reentrant=self.kernels.reentrant)
            else:
                x = block(x, self.cos, self.sin, self.mask)
        logits = self.logits(x)  # held while the loss runs, as a training loop that reads them holds them
        return self.loss(logits, targets)


def tables(model: Model, seqlen: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Rotary cos and sin, (1, s, 1, d), and the additive causal mask (s, s)."""
    mask = torch.full((seqlen, seqlen), float("-inf")).triu(1)
    if not model.rotary_embeds:
        return None, None, mask
    rates = 1.0 / 10000.0 ** (torch.arange(0, model.head_dim, 2) / model.head_dim)
    angles = torch.outer(torch.arange(seqlen), rates).repeat(1, 2)[None, :, None, :]
    return angles.cos(), angles.sin(), mask
