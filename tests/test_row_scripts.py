"""Settings that a measured row takes from its source's launch scripts, and the same script read as a launch script."""

from __future__ import annotations

import pytest

from steptime.launch.megatron.sources import read_megatron
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config

FLAGPERF = """
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \\
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \\
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --normalization RMSNorm \\
    --norm-epsilon 1.0e-5 --global-batch-size 512 --attention-softmax-in-fp32 --clip-grad 1.0 \\
    --tokenizer-type Llama3Tokenizer --tokenizer-model t --split 100,0,0 --micro-batch-size 1 \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel --bf16 \\
    --transformer-impl transformer_engine --use-distributed-optimizer --use-mcore-models --use-flash-attn --log-interval 1
"""
"""The flags of FlagOpen/FlagPerf@1b5a0303 training/benchmarks/llama3_8B/megatron/pretrain_llama3.sh that state the job."""


def mapped_row(name: str):
    return next(row for row in shipped() if row.id == name)


def mapped(name: str):
    return to_config(mapped_row(name))


def test_flagperfs_llama3_has_megatrons_defaults():
    """No --position-embedding-type, --disable-bias-linear or dropout flags: learned positions, biases, dropout of 0.1."""
    said = read_megatron("pretrain_llama3.sh", FLAGPERF, {}).config["model"]
    row = mapped("flagperf-n002")
    for key in ("bias", "norm_bias", "rotary_embeds", "learned_positions", "dropout", "norm", "tie_embeddings"):
        assert row.config["model"][key] == said[key], key
    assert said["dropout"] == 0.1
    assert any(text.startswith("dropout: 0.1, from the scripts") for text in row.assumed)


@pytest.mark.parametrize(
    ("name", "performance", "model"),
    [
        ("flagperf-n022", {"activation_impl": "composite", "rope_impl": "own_tables"}, {"norm": "rmsnorm"}),
        ("flagperf-n016", {"activation_impl": "composite", "norm_impl": "eager"}, {"bias": False}),
        (
            "flagperf-n033",
            {"activation_impl": "composite", "rope_impl": "composite"},
            {"norm": "layernorm", "bias": True, "vocab_sz": 50304},
        ),
        (
            "flagperf-n018",
            {"rope_impl": "own_tables", "moe": {"dispatcher": "allgather", "permute_fusion": False}},
            {"dropout": 0.1},
        ),
        (
            "megatron-sft-recipes-n003",
            {"rope_impl": "own_tables", "loss_impl": "fused", "attention_mask": False},
            {"qkv_bias": True},
        ),
        ("megatron-sft-recipes-n009", {"rope_impl": "own_tables", "loss_impl": "fused"}, {}),
        ("thunder-litgpt-n010", {"norm_impl": "eager"}, {}),  # its config has compile = false
        ("qwen-readme-n002", {"norm_impl": "fused", "rope_impl": "composite"}, {}),
        ("AUTOMODEL-005", {"rope_impl": "complex", "software": "automodel@2025-10"}, {}),
        ("AUTOMODEL-007", {"rope_impl": "composite"}, {}),
        ("AUTOMODEL-008", {"rope_impl": "composite", "attention_kernel": "flex"}, {}),
    ],
)
def test_what_scripts_say(name, performance, model):
    found = mapped(name).config
    assert performance.items() <= found["performance"].items()
    assert model.items() <= found["model"].items()


def test_other_rows_of_a_source_keep_their_own():
    """FlagPerf's DeepSpeed and Llama rows of Paddle have other scripts."""
    for name in ("flagperf-n029", "flagperf-n043"):
        assert not any("from the scripts" in text for text in mapped(name).assumed)


def test_flagperfs_pipelines_have_no_virtual_stages():
    """Its scripts pass none, so that one chunk a stage is stated, not assumed; other sources leave it open."""
    assert "vpp: 1" not in mapped("flagperf-n007").assumed
    assert mapped("flagperf-n007").config["parallelism"].get("vpp", 1) == 1
    row = mapped_row("flagperf-n007")
    assert "vpp: 1" in to_config(row._replace(cells=row.cells | {"source_group": "another"})).assumed


@pytest.mark.parametrize(
    ("name", "expandable"),
    [("megatron-sft-recipes-n009", True), ("torchtitan-pr-n117", False), ("torchtitan-ar-n043", None)],
)
def test_segments_as_the_source_starts_the_run(name, expandable):
    """fyh2001/megatron-sft-recipes@d16a2d1 scripts/_common.sh exports PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'.

    pytorch/torchtitan@bcc09297 nvfp4.md has torchrun's command, without run_train.sh, which sets it. Else a profile decides.
    """
    assert mapped(name).config["performance"].get("expandable_segments") is expandable
