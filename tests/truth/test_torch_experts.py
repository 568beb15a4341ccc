"""torchtitan's mixtures of experts and latent attention under FSDP2: parameters, saved storages, collectives, peaks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from live_bytes import LiveCalls
from torch_blocks import Block, Kernels, Transformer, tables
from torch_experts import expert_world, fitted, sharded
from torch_fsdp import Fsdp, run
from torch_jobs import Layout, covering, torch_job
from torch_ours import block_input, kept, kept_by_torch, shard_of

from steptime.answer.result import estimate
from steptime.bench.runs.probes import Saved
from steptime.job.job import Job
from steptime.model.blocks import layers
from steptime.model.model import Model

SIZES = {"hidden_sz": 32, "inter_sz": 48, "n_q_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_sz": 96, "n_layers": 3}
MLA = {"kind": "mla", "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_experts": 8, "expert_inter_sz": 48, "experts_per_token": 2}
MODELS = {
    "qwen3 moe": {"moe": EXPERTS, "qk_norm": True},
    "deepseek": {
        "moe": EXPERTS | {"n_shared_experts": 2, "n_dense_layers": 1, "score_function": "sigmoid", "expert_bias": True},
        "attention": MLA | {"q_lora_rank": 20},
    },
    "deepseek 16b": {
        "moe": EXPERTS | {"n_shared_experts": 1, "pre_softmax": True, "expert_bias": True},
        "attention": MLA,
    },
    "llama4": {"moe": EXPERTS | {"experts_per_token": 1, "n_shared_experts": 1, "score_function": "sigmoid"}},
}
BATCH, SEQLEN = 2, 16
KERNELS = {"eager": Kernels(), "fused activation": Kernels(activation="fused"), "fp32": Kernels(precision="fp32")}


def model_of(kind: str) -> Model:
    return Model(**SIZES, **MODELS[kind])


def expert_job(
    model: Model, kernels: Kernels, ep: int, fsdp: Fsdp, dp: int = 8, micro_batches: int = 1, replicas: int = 1
) -> Job:
    """As `torch_jobs.job`, with experts on `ep` ranks."""
    base = torch_job(model, kernels, SEQLEN, Layout(dp, 1, micro_batches, fsdp, replicas), BATCH)
    return base.model_copy(update={"parallelism": base.parallelism.model_copy(update={"ep": ep})})


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("kind", MODELS)
def test_saved_storages(kind, kernels):
    """Of a layer with experts, one storage after the other; the grouped product's row ends, an int32 each, apart."""
    model = model_of(kind)
    torch.set_default_dtype(kernels.dtype)
    try:
        module = fitted(Transformer(model, kernels, SEQLEN))
    finally:
        torch.set_default_dtype(torch.float32)
    block: Block = module.blocks[-1]
    x = torch.zeros(BATCH, SEQLEN, model.hidden_sz, dtype=kernels.dtype, requires_grad=True)
    rotary = [None if t is None else t.to(kernels.dtype) for t in tables(model, SEQLEN)]
    with Saved([*block.parameters(), *(t for t in rotary if t is not None)]) as saved:
        block(x, *rotary)
    shard = shard_of(model, kernels, BATCH, SEQLEN)
    layer = layers(model)[-1][0]
    assert kept_by_torch(saved) == kept(layer.ops(shard), block_input(model, shard))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_parameters(kind, ep):
    """Elements on one rank, padded as FSDP2 cuts them."""
    model = model_of(kind)
    with expert_world(8, ep) as meshes:
        module = sharded(model, Kernels(), Fsdp(), SEQLEN, meshes)
        local = sum(p.to_local().numel() for p in module.parameters())
    states = estimate(expert_job(model, Kernels(), ep, Fsdp())).memory.stages[0]
    assert states.params_bytes == 4 * local


LAYOUTS = {
    "ep 1": (8, 1, Fsdp()),
    "ep 1, more ranks than experts": (16, 1, Fsdp()),
    "ep 2": (8, 2, Fsdp()),
    "ep 4, no reshard": (8, 4, Fsdp(reshard_blocks=False)),
    "ep 4, more ranks than experts": (16, 4, Fsdp(reduce="bf16")),
    "ep 8 of 16": (16, 8, Fsdp()),
    "ep 2, 2 replicas": (8, 2, Fsdp(), 2),
    "ep 4, 2 replicas": (16, 4, Fsdp(reduce="bf16"), 2),
}


@pytest.mark.parametrize(
    ("recompute", "kind", "layout", "micro_batches"),
    covering(("none", "full"), ("qwen3 moe", "deepseek", "deepseek 16b"), LAYOUTS, (1, 2)),
)
def test_collectives_and_peak(kind, layout, recompute, micro_batches):
    """FSDP's collectives of both groups, and the exchanges of tokens and of their counts: kind, ranks, bytes, how often.

    Bytes of all storages at the worst moment of forward and backward, Adam's states apart. One micro-batch or two.

    Where scores are multiplied, backward sums their gradient beside the rows' own; of a replayed layer what it has read is gone
    by then, which the op lists do not see: N fp32 numbers.
    """
    model, kernels = model_of(kind), Kernels(recompute=recompute)
    dp, ep, fsdp, *more = LAYOUTS[layout]
    with expert_world(dp, ep, *more) as meshes:
        module = sharded(model, kernels, fsdp, SEQLEN, meshes)
        buffers = list(module.buffers())
        tables_ = sum(t.untyped_storage().nbytes() for t in buffers)
        with LiveCalls([*module.parameters(), *buffers]) as live:
            run(module, BATCH, SEQLEN, micro_batches)
    found = estimate(expert_job(model, kernels, ep, fsdp, dp, micro_batches, *more))
    stated: Counter[tuple[str, int, float]] = Counter()
    for row in found.collectives:
        stated[row.kind, row.ranks, row.bytes] += row.count_per_step
    assert Counter({(c.kind, c.ranks, c.bytes): n for c, n in live.calls.items()}) == stated
    ours = found.memory.stages[0]
    summed = 4 * BATCH * SEQLEN * model.moe.experts_per_token if recompute == "full" else 0
    excess = ours.allocated_bytes - ours.optimizer_bytes - (live.peak.total - tables_)
    assert excess in {0, summed}, (live.peak.op, ours.peak_op)
