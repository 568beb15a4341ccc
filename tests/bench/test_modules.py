"""The benchmark's modules against the estimate: parameters, FLOPs, saved bytes, peaks. Zero tolerance."""

from __future__ import annotations

import pytest
import torch
from bench_jobs import GPT, job

from steptime import estimate
from steptime.base.config import ConfigError
from steptime.bench.runnable import alone, as_run
from steptime.bench.runs.block import OneBlock
from steptime.bench.runs.chunks import CheckpointSpan, ModelSlice, slices, spans_of
from steptime.bench.runs.engines import lay_out
from steptime.bench.runs.modules import whole
from steptime.bench.runs.step import allocated
from steptime.bench.runs.training import Trainer
from steptime.bench.runs.truths import truths
from steptime.job.job import Job
from steptime.software.recomputation import Recomputation

MODELS = {
    "llama": {},
    "gpt-2": GPT,
    "tied": {"tie_embeddings": True},
    "qk_norm": {"qk_norm": True},
    "wide heads, relu": {"head_dim": 24, "activation": "relu", "glu": False, "rotary_embeds": False},
    "qwen2": {"qkv_bias": True, "n_kv_heads": 2},
}
PERFORMANCE = {
    "flash": {},
    "bf16": {"precision": "bf16"},
    "native loss": {"precision": "bf16", "loss_impl": "fused"},
    "unfused": {"attention_impl": "unfused"},
    "unfused, selective": {"attention_impl": "unfused", "activation_checkpointing_type": "selective"},
    "selective": {"activation_checkpointing_type": "selective"},
    "full": {"activation_checkpointing_type": "full"},
}


EACH = [
    *(("llama", performance) for performance in PERFORMANCE),
    ("gpt-2", "flash"),
    ("gpt-2", "unfused, selective"),
    ("tied", "native loss"),
    ("qk_norm", "bf16"),
    ("qk_norm", "full"),
    ("wide heads, relu", "flash"),
    ("wide heads, relu", "selective"),
    ("qwen2", "unfused"),
]
"""Every kernel with Llama's block, and every other block with those kernels that are not alike for it."""


@pytest.mark.parametrize(("model", "performance"), EACH)
def test_torch_counts_what_the_estimate_says(model, performance):
    rows = truths(job(MODELS[model], PERFORMANCE[performance]))
    assert [row for row in rows if row.difference] == []
    assert {row.unit for row in rows} == {"parameters", "FLOP", "B"}


def test_a_large_model_takes_no_memory():
    """Llama-3 8B: meta and fake tensors, and a small copy for the peak."""
    config = {"parallelism": {"tp": 1, "pp": 1, "dp": 8}, "data": {"gbs": 8, "seqlen": 8192, "microbatch_sz": 1}}
    rows = truths(Job(model="llama3-8b", performance={"software": "fsdp2"}, hardware="dgx-h100", **config))
    assert [row for row in rows if row.difference] == []
    assert rows[0].observed == 8_030_261_248
    assert [row.name for row in rows if "2 layers" in row.name or "small model" in row.name] == [
        "FLOPs, 2 layers, attention in full",
        "saved by the model, 2 layers",
        "peak of a step, small model",
    ]


def test_what_a_block_keeps_by_hand():
    """T = 32 tokens in fp32: two norms keep x and x/rms (4h) and a rstd; q, o, k, v; their inputs; gate, up, silu, product."""
    h, i, nq, nkv, d = 64, 160, 8, 4, 8
    elements = (
        4 * h + 2 * h + 2 * nq * d + 2 * nkv * d + 4 * i
    )  # x and x/rms of two norms, both norms' outputs, the rest
    kept = 32 * (4 * elements + 4 * nq + 2 * 4)  # log-sum-exp and two rstd, fp32
    assert OneBlock(alone(job()), torch.device("cpu")).saved().bytes == kept


def test_other_profiles_are_refused():
    with pytest.raises(ConfigError, match=r"performance\.software: megatron-core is not plain torch"):
        truths(job(performance={"software": "megatron-core"}))


def test_chunks_of_a_pipeline_are_the_whole_model():
    parts = slices(job({"n_layers": 5}, None, {"pp": 2, "vpp": 2, "layers_per_stage": [2, 1, 1, 1]}))
    assert [(part.first, part.layers) for part in parts] == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert [part.embedding for part in parts] == [True, False, False, False]
    assert [part.head for part in parts] == [False, False, False, True]


def test_spans():
    """Uniform groups with a short last one; the first blocks alone; nothing."""
    assert spans_of(Recomputation("full", "uniform", (2,)), 0, 5) == [
        CheckpointSpan(2, True),
        CheckpointSpan(2, True),
        CheckpointSpan(1, True),
    ]
    assert spans_of(Recomputation("full", "block", (1, 4)), 1, 3) == [CheckpointSpan(1, True)] * 3
    assert spans_of(Recomputation("full", "block", (1,)), 0, 2) == [CheckpointSpan(1, True), CheckpointSpan(1, False)]
    assert spans_of(Recomputation(), 0, 2) == [CheckpointSpan(1, False)] * 2
    assert ModelSlice(0, 0, [CheckpointSpan(2, True), CheckpointSpan(1, True)], embedding=False, head=False).layers == 3


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_changes_no_number(kind):
    """Loss and gradients are those without."""
    tokens = torch.arange(32)[None] % 96
    grads = []
    for performance in ({}, {"activation_checkpointing_type": kind}):
        torch.manual_seed(0)
        module = whole(as_run(job(performance=performance), "cpu")[0])
        loss = module(tokens, tokens.roll(-1))
        loss.backward()
        grads.append([loss, *(p.grad for p in module.parameters())])
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(plain, again, rtol=0, atol=0)


@pytest.mark.parametrize("n_kv_heads", [1, 4, 8])
def test_unfused_attention_is_flash(n_kv_heads):
    """The same loss by both ways."""
    tokens, losses = torch.arange(32)[None] % 96, []
    for attention in ("flash", "unfused"):
        torch.manual_seed(0)
        module = whole(as_run(job({"n_kv_heads": n_kv_heads}, {"attention_impl": attention}), "cpu")[0])
        losses.append(module(tokens, tokens.roll(-1)))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_tied_weight_has_two_gradients_and_their_sum(batches):
    """The head's waits for the embedding's; with a wide vocabulary that is the peak of the step."""
    wide = {"tie_embeddings": True, "vocab_sz": 8192, "n_layers": 1}
    one = as_run(job(wide, gbs=batches, seqlen=8), "cpu")[0]
    trainer = Trainer(lay_out(one, torch.device("cpu")))
    trainer.step()
    table = 8192 * 64 * 4
    peak, _ = allocated(trainer)
    states = 4 * sum(p.numel() for p in trainer.laid.params) * 4  # parameters, gradients, two moments in fp32
    assert peak - states == pytest.approx((batches + 1) * table, rel=0.02)  # the first sum becomes the gradient
    assert estimate(one).memory.peak_allocated_bytes == pytest.approx(peak, rel=0.005)
