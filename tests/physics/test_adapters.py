"""Parameters of a model with adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): A of rank rows, B of rank columns."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.answer.result import estimate
from steptime.job.assembly import Assembly
from steptime.memory.states import partial_gradients
from steptime.model.blocks import n_params, n_trained


@pytest.mark.parametrize(
    ("lora", "adapters"),
    [
        # q, k, v and output 4 * (128 + 128) each, gate, up and down 4 * (128 + 256) each, in two layers
        ({"rank": 4}, 2 * (4 * 1_024 + 3 * 1_536)),
        ({"rank": 8, "targets": ["q_proj", "down_proj"]}, 2 * 8 * (256 + 384)),
    ],
)
def test_adapters_alone_are_trained(lora, adapters):
    """The model's own 590,464 parameters stay, frozen."""
    plan = job("torch", model={"lora": lora})
    assert n_params(plan.model) == 590_464 + adapters
    assert n_trained(plan.model, 8, plan.software) == adapters


@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        ({"lora": {"rank": 4}}, 2 * 590_464),
        # one vector of 131,072 for embedding and head
        ({"lora": {"rank": 4}, "tie_embeddings": True}, 2 * (590_464 - 131_072)),
        # projections in 4 bits, a byte for the scale of 64 of them, and 4 for that of 256 scales (QLoRA, arXiv 2305.14314)
        ({"lora": {"rank": 4, "base_dtype": "nf4"}}, 327_680 * (0.5 + 1 / 64 + 4 / (64 * 256)) + 2 * 262_784),
        ({"lora": {"rank": 4, "base_dtype": "fp32"}}, 4 * 590_464),
    ],
    ids=["bf16", "tied", "nf4", "fp32"],
)
def test_bytes_of_what_is_frozen_and_of_what_is_trained(model, frozen):
    """17,408 trained parameters: 2 bytes each, 2 of gradients and 2 x 2 of moments; the frozen ones are stored alone.

    Of the 590,464 327,680 are in projections; embedding, head and norms have the other 262,784.
    """
    (stage,) = estimate(job("torch", model=model)).memory.stages
    assert stage.params_bytes == frozen + 2 * 17_408
    assert (stage.persisting_bytes - stage.params_bytes - stage.buffers_bytes, stage.optimizer_bytes) == (
        2 * 17_408 + 4 * 17_408,
        4 * 17_408,
    )


@pytest.mark.parametrize("one_by_one", [False, True])
def test_adapters_leave_no_partial_gradients(one_by_one):
    """Norms, whose gradients tp would sum under sequence parallelism, are frozen; each rank makes all of an adapter's."""
    assembly = Assembly(job(tp=2, model={"n_q_heads": 2, "lora": {"rank": 4}}))
    assert partial_gradients(assembly, 0, one_by_one=one_by_one) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("targets", "adapters"),
    [
        # 128 columns of q, 64 of k and of v: A 2 * 8 x 128, B 8 columns of 128 + 64 rows
        (["q_proj", "v_proj"], 2 * (16 * 128 + (128 + 64) * 8)),
        (["k_proj"], 2 * (8 * 128 + 64 * 8)),
        (["q_proj", "k_proj", "v_proj"], 2 * (24 * 128 + 256 * 8)),
        (["o_proj"], 2 * 8 * 256),
    ],
)
def test_litgpt_has_an_adapter_for_each_of_q_k_and_v(targets, adapters):
    """Lightning-AI/litgpt litgpt/lora.py, LoRAQKVLinear: lora_A (r * sum(enable_lora), in), lora_B (sum(qkv_shapes), r)."""
    plan = job("litgpt-ddp", model={"n_kv_heads": 2, "n_q_heads": 4, "lora": {"rank": 8, "targets": targets}})
    assert n_trained(plan.model, 8, plan.software) == adapters
    one = job("llm-foundry", model={"n_kv_heads": 2, "n_q_heads": 4, "lora": {"rank": 8, "targets": targets}})
    assert n_trained(one.model, 8, one.software) == (2 * 8 * (128 + 256) if targets != ["o_proj"] else adapters)
