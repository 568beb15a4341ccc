"""FLOPs of forward, backward and recomputation against torch's FlopCounterMode. Zero tolerance.

Attention runs as explicit matrix products (`SDPBackend.MATH`): the counter sees nothing of the CPU's flash kernel. So it counts
the whole score matrix and a backward of twice the forward; what flash itself costs is checked against torch's own formulas.
"""

from __future__ import annotations

import pytest
import torch
from live_bytes import LiveBytes
from rates import RATES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torch_blocks import Kernels
from torch_ours import built, replayed, shard_of

from steptime.cost import compute
from steptime.model.blocks import block_ops, embedding_ops, head_ops
from steptime.model.model import Model
from steptime.model.ops import Attention, Gemm, Op

BATCH, SEQLEN = 2, 16
MODELS = {
    "gqa": Model(n_layers=2, hidden_sz=48, inter_sz=80, n_q_heads=6, n_kv_heads=2, head_dim=8, vocab_sz=101),
    "mha gelu": Model(
        n_layers=3, hidden_sz=32, inter_sz=128, n_q_heads=4, vocab_sz=67, glu=False, bias=True, norm="layernorm"
    ),
    "wide heads, tied": Model(
        n_layers=1, hidden_sz=24, inter_sz=40, n_q_heads=4, n_kv_heads=1, head_dim=16, vocab_sz=50, tie_embeddings=True
    ),
    "dropout": Model(
        n_layers=2, hidden_sz=32, inter_sz=96, n_q_heads=4, vocab_sz=67, glu=False, dropout=0.1, qk_norm=True
    ),
}


def flops(ops: list[Op]) -> float:
    """Forward FLOPs with attention in full."""
    return sum(op.flops for op in ops if isinstance(op, Gemm)) + sum(
        op.full_flops for op in ops if isinstance(op, Attention)
    )


def counted(model: Model, kernels: Kernels) -> tuple[int, int]:
    """What torch counts in forward and in backward."""
    module = built(model, kernels, SEQLEN)
    tokens = torch.zeros(BATCH, SEQLEN, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = module(tokens, tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_forward_and_backward(model, attention):
    """Backward is a product for each operand: twice the forward."""
    if attention == "flash" and model.dropout:
        model = model.model_copy(update={"dropout": 0.0})  # the stand-in for flash with dropout multiplies nothing
    kernels = Kernels(attention=attention)
    shard = shard_of(model, kernels, BATCH, SEQLEN)
    ours = (
        model.n_layers * flops(block_ops(model, shard))
        + flops(head_ops(model, shard))
        + flops(embedding_ops(model, shard))
    )
    assert counted(model, kernels) == (ours, 2 * ours)


@pytest.mark.parametrize(
    ("attention", "recompute"), [("unfused", "selective"), ("unfused", "full"), ("flash", "full")], ids="-".join
)
@pytest.mark.parametrize("name", MODELS)
def test_recomputation_stops_early(name, attention, recompute):
    """torch's checkpoint ends when the last kept tensor is back.

    So the last GEMM of the stretch does not run again (it keeps its inputs, which are there before it starts), unless a dropout
    after it wants its mask.
    """
    model = MODELS[name]
    if attention == "flash" and model.dropout:
        model = model.model_copy(update={"dropout": 0.0})
    plain = Kernels(attention=attention)
    shard = shard_of(model, plain, BATCH, SEQLEN)
    extra = counted(model, Kernels(attention=attention, recompute=recompute))[1] - counted(model, plain)[1]
    assert extra == model.n_layers * flops(replayed(block_ops(model, shard), recompute))


def test_six_of_seven_projections_run_again():
    """One sequence of 8 tokens through two layers of 128, MLP 256 (`test_fsdp_seconds.test_layers_run_again_hide_more`).

    Products in a backward: two of each of 7 projections in 2 layers and of the head, 30; recomputed, 6 more in each layer, all
    but down. FLOPs of those: 16 for each of 163,840 - 32,768 weights. Both products of attention run again, here without a mask
    taken off: 2 * 8 * 8 * 256.
    """
    model = Model(n_layers=2, hidden_sz=128, inter_sz=256, n_q_heads=1, vocab_sz=1024)
    seen, flops = [], []
    for recompute in ("none", "full"):
        module, tokens = built(model, Kernels(recompute=recompute), 8), torch.zeros(1, 8, dtype=torch.long)
        with sdpa_kernel(SDPBackend.MATH):
            loss = module(tokens, tokens)
            with LiveBytes(log=True) as live, FlopCounterMode(display=False) as counter:
                loss.backward()
        seen.append(sum(moment.op == "aten.mm" for moment in live.moments))
        flops.append(counter.get_flop_counts()["Global"])
    assert seen == [2 * 15, 2 * 15 + 2 * 6]
    plain, again = flops
    assert again[torch.ops.aten.mm] - plain[torch.ops.aten.mm] == 2 * 16 * (163_840 - 32_768) == 2 * 2_097_152
    assert again[torch.ops.aten.bmm] - plain[torch.ops.aten.bmm] == 2 * 2 * 8 * 8 * 256
    assert 2_097_152 + 2 * 8 * 8 * 256 // 2 == 2_113_536  # with the half of attention that a causal mask leaves


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_flash_kernel_is_recomputed_whole(recompute):
    """It keeps its own output, so it must run again: once more per layer."""
    model, kernels = MODELS["gqa"], Kernels(recompute=recompute)
    module, tokens = built(model, kernels, SEQLEN), torch.zeros(BATCH, SEQLEN, dtype=torch.long)
    with LiveBytes(log=True) as live:
        module(tokens, tokens).backward()
    runs = sum(moment.op == "aten._scaled_dot_product_flash_attention_for_cpu" for moment in live.moments)
    assert runs == model.n_layers * (1 if recompute == "none" else 2)


@pytest.mark.parametrize(("n_q", "n_kv"), [(8, 8), (8, 2)])
def test_flash_by_torchs_formula(n_q, n_kv):
    """torch counts two matrix products forward and five backward, nothing off for a causal mask, which halves ours."""
    model = Model(n_layers=1, hidden_sz=64, inter_sz=64, n_q_heads=n_q, n_kv_heads=n_kv, head_dim=16, vocab_sz=8)
    (op,) = [op for op in block_ops(model, shard_of(model, Kernels(), 3, 32)) if isinstance(op, Attention)]
    q, k = (3, n_q, 32, 16), (3, n_q, 32, 16)  # keys repeated: the formula takes equal heads
    assert op.full_flops == sdpa_flop_count(q, k, k)
    assert compute.forward(op, RATES, {}).flops == sdpa_flop_count(q, k, k) / 2
    assert compute.backward(op, RATES, {})[0].flops == sdpa_backward_flop_count(q, q, k, k) / 2
    assert op.causal_share == 0.5


def test_llama3_70b_on_the_meta_device():
    """Forward and backward at 8192 tokens: three times the forward, head included, the embedding free."""
    model = Model(n_layers=2, hidden_sz=8192, inter_sz=28672, n_q_heads=64, n_kv_heads=8, vocab_sz=128256)
    with torch.device("meta"):
        module = built(model, Kernels(), 8192)
        tokens = torch.zeros(1, 8192, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            module(tokens, tokens).backward()
    shard = shard_of(model, Kernels(), 1, 8192)
    assert counter.get_total_flops() == 3 * (2 * flops(block_ops(model, shard)) + flops(head_ops(model, shard)))
