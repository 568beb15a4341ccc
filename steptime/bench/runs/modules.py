"""The transformer of a job as plain PyTorch modules, as the profiles torch and fsdp2 describe it.

Every kernel is torch's own on every device: F.rms_norm, F.layer_norm, scaled_dot_product_attention, cross_entropy,
torch.utils.checkpoint (non-reentrant). Shapes: b sequences, s positions, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steptime.bench.runs.chunks import ModelSlice, ModulePlan, plan_of, slices
from steptime.bench.runs.operands import torch_dtype
from steptime.job.job import Job
from steptime.model.model import Model

NORM_EPS = 1e-5
INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2's)."""


def squared_relu(x: Tensor) -> Tensor:
    """Squared ReLU as transformers runs it (activations.py, ReLUSquaredActivation)."""
    return torch.square(F.relu(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": squared_relu,
}


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension."""

    def __init__(self, width: int, model: Model) -> None:
        super().__init__()
        self.rms, self.width = model.norm == "rmsnorm", width
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if model.norm_bias and not self.rms else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        if self.rms:
            return F.rms_norm(x, (self.width,), self.weight, NORM_EPS)
        return F.layer_norm(x, (self.width,), self.weight, self.bias, NORM_EPS)


def dropout(x: Tensor, p: float) -> Tensor:
    """The kernel of F.dropout on a GPU, with a mask of one byte per element."""
    return torch.native_dropout(x, p, True)[0] if p else x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (b, s, heads, d) in halves."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, p: float) -> Tensor:
    """softmax(q k' / sqrt(d) + mask) v over (b, heads, s, d), keys and values repeated to the query heads."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    b, n, s, d = q.shape
    q, k, v = (t.reshape(b * n, s, d) for t in (q, k, v))
    scores = torch.baddbmm(mask.expand(b * n, s, s), q, k.transpose(1, 2), alpha=d**-0.5)
    del q, k  # free what autograd does not keep
    probs = torch.softmax(scores, -1)
    del scores
    return (dropout(probs, p) @ v).view(b, n, s, d)


class SelfAttention(nn.Module):
    """Grouped-query self-attention, causal."""

    def __init__(self, plan: ModulePlan) -> None:
        super().__init__()
        model = plan.model
        self.head_dim, self.p, self.flash = model.head_dim, model.attention_dropout, plan.flash
        self.checkpointed = "core_attn" in plan.recompute.modules
        hidden, width, kv_width = model.hidden_sz, model.n_q_heads * model.head_dim, model.n_kv_heads * model.head_dim
        self.q = nn.Linear(hidden, width, bias=model.qkv_bias)
        self.k = nn.Linear(hidden, kv_width, bias=model.qkv_bias)
        self.v = nn.Linear(hidden, kv_width, bias=model.qkv_bias)
        self.o = nn.Linear(width, hidden, bias=model.bias)
        self.q_norm = Norm(model.head_dim, model) if model.qk_norm else None
        self.k_norm = Norm(model.head_dim, model) if model.qk_norm else None

    def core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Scores to context, (b, heads, s, d)."""
        if mask is not None:
            return unfused(q, k, v, mask, self.p)
        p = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, None, p, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
        """(b, s, h) to (b, s, h); under tensor parallelism the projections hold this rank's heads."""
        b, s, _ = x.shape
        q, k, v = (linear(x).view(b, s, -1, self.head_dim) for linear in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None and sin is not None:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = (
            checkpoint(self.core, q, k, v, mask, use_reentrant=False) if self.checkpointed else self.core(q, k, v, mask)
        )
        del q, k, v
        projected: Tensor = self.o(out.transpose(1, 2).reshape(b, s, -1))
        return projected


class Mlp(nn.Module):
    """down(act(up)), or down(act(gate) * up)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.act = ACTIVATIONS[model.activation]
        self.up = nn.Linear(model.hidden_sz, model.inter_sz, bias=model.bias)
        self.gate = nn.Linear(model.hidden_sz, model.inter_sz, bias=model.bias) if model.glu else None
        self.down = nn.Linear(model.inter_sz, model.hidden_sz, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) to the same."""
        inner = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out


class TorchBlock(nn.Module):
    """Attention and MLP, each after a norm, each added to its input."""

    def __init__(self, plan: ModulePlan) -> None:
        super().__init__()
        self.p = plan.model.dropout
        self.norm1, self.attn = Norm(plan.model.hidden_sz, plan.model), SelfAttention(plan)
        self.norm2, self.mlp = Norm(plan.model.hidden_sz, plan.model), Mlp(plan.model)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None) -> Tensor:
        """(b, s, h) to the same."""
        x = x + dropout(self.attn(self.norm1(x), cos, sin, mask), self.p)
        return x + dropout(self.mlp(self.norm2(x)), self.p)


class Transformer(nn.Module):
    """A model, or one pipeline stage's chunk of it."""

    def __init__(self, plan: ModulePlan, chunk: ModelSlice) -> None:
        super().__init__()
        self.plan, self.chunk = plan, chunk
        model = plan.model
        self.tokens = nn.Embedding(model.vocab_sz, model.hidden_sz) if chunk.embedding else None
        rows = model.max_positions or plan.seqlen
        learned = chunk.embedding and model.learned_positions
        self.positions = nn.Embedding(rows, model.hidden_sz) if learned else None
        # named by their position in the whole model, so that a parameter has one name in every layout
        self.blocks = nn.ModuleDict({str(chunk.first + i): TorchBlock(plan) for i in range(chunk.layers)})
        self.norm = Norm(model.hidden_sz, model) if chunk.head else None
        self.head = nn.Linear(model.hidden_sz, model.vocab_sz, bias=False) if chunk.head else None
        self.tie()
        self.cos, self.sin, self.mask = tables(plan)  # no buffers: DDP would broadcast them

    @property
    def tables(self) -> list[Tensor]:
        """Rotary and mask tables, which every block reads."""
        return [t for t in (self.cos, self.sin, self.mask) if t is not None]

    def tie(self) -> None:
        """Tie the head's weight to the embedding's, where the model does so and both are on this stage."""
        if self.plan.model.tie_embeddings and self.tokens is not None and self.head is not None:
            self.head.weight = self.tokens.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """(b, s) ids to (b, s, h)."""
        assert self.tokens is not None
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            b, s = tokens.shape
            x = x + self.positions(torch.arange(s, device=tokens.device).repeat(b, 1))
        return dropout(x, self.plan.model.dropout)

    def through(self, blocks: list[nn.Module], x: Tensor) -> Tensor:
        """Consecutive blocks."""
        for block in blocks:
            x = block(x, self.cos, self.sin, self.mask)
        return x

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Token ids (b, s), or the previous chunk's hidden states, to hidden states, logits, or with targets the loss."""
        x = self.embed(x) if self.tokens is not None else x
        blocks, at = list(self.blocks.values()), 0
        for count, checkpointed in self.chunk.spans:
            here = blocks[at : at + count]
            x = checkpoint(self.through, here, x, use_reentrant=False) if checkpointed else self.through(here, x)
            at += count
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))  # held while the loss runs, as in a loop that reads them
        return logits if targets is None else self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        logits = logits.float() if self.plan.wide_loss else logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def tables(plan: ModulePlan) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Rotary cos and sin (1, s, 1, d), and for unfused attention the additive causal mask (s, s), in the compute dtype."""
    mask = None if plan.flash else torch.full((plan.seqlen, plan.seqlen), float("-inf"), dtype=plan.dtype).triu(1)
    if not plan.model.rotary_embeds:
        return None, None, mask
    d = plan.model.head_dim
    rates = 1.0 / 10000.0 ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    angles = torch.outer(torch.arange(plan.seqlen, dtype=torch.float32), rates).repeat(1, 2)[None, :, None, :]
    return angles.cos().to(plan.dtype), angles.sin().to(plan.dtype), mask


def whole(job: Job, device: torch.device | str = "cpu") -> Transformer:
    """The whole model of a job on one device, parameters in their stored dtype, whatever its layout."""
    spans = [span for chunk in slices(job) for span in chunk.spans]
    with building(torch_dtype(job.software.states.param_dtype), device):
        return Transformer(plan_of(job), ModelSlice(0, 0, spans, embedding=True, head=True))


@contextmanager
def building(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Context in which new parameters have this dtype and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
