"""gpt-oss's experts and sinks as torchtitan writes them: what torch keeps for backward, storage by storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_blocks import Kernels
from torch_experts import product
from torch_ours import kept, kept_by_torch, shard_of

from steptime.bench.runs.probes import Saved
from steptime.model import ops
from steptime.model.attention import scaled_by_sinks
from steptime.model.model import Model
from steptime.model.routing import Rows
from steptime.model.shared_sequence import Local
from steptime.model.torch_experts import grouped_experts

BATCH, SEQLEN, HIDDEN, WIDTH, EXPERTS, TOP_K = 2, 16, 32, 48, 8, 2
MODEL = Model(
    n_layers=1, hidden_sz=HIDDEN, inter_sz=WIDTH, n_q_heads=4, n_kv_heads=2, head_dim=8, vocab_sz=96, bias=True,
    swiglu_limit=7.0, attention={"sinks": True},
    moe={"n_experts": EXPERTS, "expert_inter_sz": WIDTH, "experts_per_token": TOP_K},
)  # fmt: skip
ROWS = BATCH * SEQLEN * TOP_K


def swiglu(x: Tensor, limit: float) -> Tensor:
    """torchtitan/models/gpt_oss/moe.py, swiglu."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def experts(x: Tensor, counts: Tensor, params: tuple[Tensor, ...], limit: float) -> Tensor:
    """GptOssGroupedExperts._experts_forward."""
    w1, b1, w2, b2 = params
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    h = product(x, w1, ends)
    h = h + b1.repeat_interleave(counts, dim=0, output_size=len(x)).to(h.dtype)
    h = swiglu(h, limit)
    h = product(h, w2, ends)
    return h + b2.repeat_interleave(counts, dim=0, output_size=len(x)).to(h.dtype)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_saved_storages_of_experts(precision):
    """In bf16, w = 64 rows * 48 * 2 B: x, the product's sum with its bias 2 w, four w of the activation, w of its output, and
    the expert of each row twice, 64 * 8 B."""
    kernels = Kernels(precision=precision)
    shapes = ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, 2 * WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, HIDDEN))
    params = tuple(torch.nn.Parameter(torch.zeros(shape, dtype=kernels.dtype)) for shape in shapes)
    x = torch.zeros(ROWS, HIDDEN, dtype=kernels.dtype, requires_grad=True)
    with Saved(params) as saved:
        experts(x, torch.full((EXPERTS,), ROWS // EXPERTS), params, 7.0)
    size = kernels.dtype.itemsize
    assert MODEL.moe is not None
    rows = Rows(MODEL.moe, HIDDEN, shard_of(MODEL, kernels, BATCH, SEQLEN))
    made, _ = grouped_experts(MODEL, rows, 1, "x")
    ours = kept(made, ops.Tensor("x", float(ROWS * HIDDEN), float(size)))
    w = ROWS * WIDTH * size
    assert sorted(ours.elements()) == sorted([ROWS * HIDDEN * size, 2 * w, w, w, w, w, w, 8 * ROWS, 8 * ROWS])
    assert kept_by_torch(saved) == ours


def test_saved_storages_of_sinks():
    """Of 2 * 16 positions with 4 heads of 8 in bf16: the output, 2,048 B, a sigmoid for each head, 512 B, and its cast, 256 B."""
    out = torch.zeros(BATCH, SEQLEN, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    lse = torch.zeros(BATCH, SEQLEN, 4, requires_grad=True)
    sinks = torch.nn.Parameter(torch.zeros(4))
    with Saved([sinks]) as saved:
        out * torch.sigmoid(lse - sinks.view(1, 1, -1)).unsqueeze(-1).to(out.dtype)
    shard = shard_of(MODEL, Kernels(precision="bf16"), BATCH, SEQLEN)
    local = Local(shard, 4.0, 2.0, 8.0, 8.0)
    made, _ = scaled_by_sinks(local.kernel(("q", "k", "v"), local.out, ()), local.out, local.lse)
    sizes = {t.name: int(t.bytes) for op in made for t in op.allocates}
    ours = sorted(sizes[name] for name in made[1].saves)
    assert sorted(kept_by_torch(saved).elements()) == ours == [256, 512, 2048]


def test_bytes_of_a_clamped_swiglu():
    """Fused it reads 2 w and writes w; eager it moves 18 w forward and 44 w backward, as `clamped_swiglu` adds them up; the
    bias before it 8 w forward, 2 w backward (w = 64 rows * 48 * 2 B)."""
    assert MODEL.moe is not None
    rows = Rows(MODEL.moe, HIDDEN, shard_of(MODEL, Kernels(precision="bf16"), BATCH, SEQLEN))
    made = {op.name: op for op in grouped_experts(MODEL, rows, 1, "x")[0]}
    w = 64 * 48 * 2
    act, bias = made["experts.act"], made["experts.gate_up.bias"]
    assert isinstance(act, ops.Move)
    assert isinstance(bias, ops.Move)
    assert (act.forward_bytes, act.backward_bytes) == (18 * w, 44 * w)
    # two clamps of every other element; three comparisons, two choices beside a scalar tensor, two copies into slices
    assert act.forward_by_element == (2 * 64 * 48, 6 * w)
    assert act.backward_by_element == (7 * 64 * 48, (8 + 6) * w)
    assert (bias.forward_bytes, bias.backward_bytes) == (8 * w, 2 * w)
