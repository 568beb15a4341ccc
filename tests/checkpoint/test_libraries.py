"""Checkpoints by the libraries that write them, as they install from PyPI; those that are not here are left out.

    pip install -r tests/checkpoint/writers.txt
    pytest -n0 -m libraries tests/checkpoint/test_libraries.py

`.ci/run` does so in an environment of its own.

The llama by hand (test_quantized.py): 524,928 parameters, 393,216 of them in the matrices of its layers. The perceptron:
4 x 8 + 8 + 8 x 2 + 2 = 58. LoRA of rank 8 on q (128 x 128) and v (64 x 128): 2 x 8 x (256 + 192) = 7,168.

Vision-language models, all with a language model of width 64, MLP 96, 4 heads of 16, 2 key heads, 3 layers, 128 tokens:
a layer 2 x 64^2 + 2 x 32 x 64 + 3 x 64 x 96 + 2 x 64 = 30,848; with embedding and norm 3 x 30,848 + 8,192 + 64 = 100,800. Biases
of q, k and v are 128 a layer (Qwen2), an output layer 8,192. Images of 16 x 16 in patches of 4, an encoder of width 32, MLP 48:
- SigLIP: 2 layers of 4 x 1,056 + 1,584 + 1,568 + 128 = 7,504; patches 1,568, positions 512, norm 64, pooling 7,472: 24,624.
- InternVL: 2 layers of 3 x 1,024 + 1,056 + 3,152 + 192 = 7,472, patches 1,568, token and positions 32 + 17 x 32: 17,088.
- Qwen2-VL, MLP 64: 2 layers of 3,168 + 1,056 + 2,112 + 2,080 + 128 = 8,544, two frames of patches 3,072: 20,160.
- Mllama: 2 layers of 4 x 1,024 + 3,152 + 128 = 7,376, a gated one of 7,378, token 32, patches 1,536, gated positions
  17 x 32 + 1 + 9 x 2,176, tiles 2 x (9 x 128 + 1), norms 128: 46,261. Its language model has 8 more tokens, one layer of
  three attends to the image (norms 32, gates 2): 100,800 + 512 + 34 = 101,346, and an output layer.
Projectors: 32 x 64 + 64 = 2,112; with a second layer of 4,160 6,272; of four patches 256 + 8,256 + 4,160 = 12,672; Qwen2-VL's
64 + 128 x 129 + 64 x 129 = 24,832; Mllama's 4,160.

CLIP, text of width 64, MLP 96, 3 layers, 128 tokens, 20 positions: a layer 4 x 4,160 + 6,240 + 6,208 + 256 = 29,344, tokens
8,192, positions 1,280, norm 128, projection to 24 1,536: 99,168. Images: 2 layers of 7,504, patches 1,536, class 32, positions
544, two norms 128, projection 768: 18,016. A temperature: 117,185.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest
import yaml

from steptime import Model, summarize_checkpoint
from steptime.checkpoint.model_yaml import model_yaml
from steptime.checkpoint.weight_names import BUFFERS
from steptime.model.blocks import n_params

pytestmark = pytest.mark.libraries
SCRIPT = Path(__file__).parent / "writers.py"
LLAMA, IN_LAYERS = 524_928, 393_216
TRAINED = {  # writer: (libraries, parameters, problems)
    "transformers": ("transformers", LLAMA), "transformers_shards": ("transformers", LLAMA),
    "transformers_trainer": ("transformers accelerate", LLAMA), "peft": ("peft", 7_168), "accelerate": ("accelerate", 58),
    "lightning": ("lightning", 58), "deepspeed_1": ("deepspeed", 58), "deepspeed_2": ("deepspeed", 58),
    "deepspeed_3": ("deepspeed", 58), "orbax": ("orbax", 40), "flax": ("flax optax orbax", 40),
    "flax_msgpack": ("flax optax orbax", 40), "equinox": ("equinox", 58), "keras": ("keras", 58), "gguf": ("gguf", 512),
}  # fmt: skip
QUANTIZED = {  # writer: (libraries, method, bits, group)
    "bitsandbytes_4": ("transformers bitsandbytes accelerate", "bitsandbytes NF4", 4, 64),
    "bitsandbytes_8": ("transformers bitsandbytes accelerate", "bitsandbytes LLM.int8()", 8, None),
    "torchao_int8": ("transformers torchao accelerate", "torchao", 8, None),
    "torchao_fp8": ("transformers torchao accelerate", "torchao FP8", 8, None),
    "torchao_pickled": ("transformers torchao", "torchao Int8Tensor", 8, None),
    "hqq": ("transformers hqq", "HQQ", 4, 64), "quanto": ("transformers optimum.quanto", "quanto", 8, None),
    "quanto_4": ("transformers optimum.quanto", "quanto", 4, 128),
    "compressed_int4": ("transformers compressed_tensors", "compressed-tensors", 4, 128),
    "compressed_int3": ("transformers compressed_tensors", "compressed-tensors", 3, 128),
    "compressed_mxfp6": ("transformers compressed_tensors", "MXFP6", 6, 32),
    "compressed_nvfp4": ("transformers compressed_tensors", "NVFP4", 4, 16),
    "compressed_mxfp4": ("transformers compressed_tensors", "MXFP4", 4, 32),
    "compressed_fp8": ("transformers compressed_tensors", "FP8", 8, None), "mlx": ("transformers mlx", "MLX", 4, 64),
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {  # family: further options of its config
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32}, "mistral": {}, "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16},
    "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {}, "cohere": {}, "starcoder2": {}, "stablelm": {}, "granite": {}, "glm": {},
    "mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "olmoe": {"num_experts": 4}, "gpt_neox": {}, "opt": {"ffn_dim": 96}, "bert": {}, "roberta": {},
}  # fmt: skip
ENCODER_DECODER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 128,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
LAYERNORM, RMSNORM, BIASED = (
    {"norm": "layernorm", "norm_bias": False},
    {"norm": "rmsnorm"},
    {"norm_bias": True, "bias": True},
)
T5 = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 3, "num_heads": 4, "vocab_size": 128}
NO_HEADS = {"n_q_heads": None, "q_rows": None, "head_dim": None, "bias": False}
MAMBA2 = {"n_groups": 2, "state_size": 8, "num_heads": 8, "head_dim": 16}
ARCHITECTURES = {  # family: (further options, what is found with its config and without, what only a config tells)
    "cohere": ({}, {"norm_bias": False}, LAYERNORM), "cohere2": ({}, {"norm_bias": False}, LAYERNORM),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 128}, {"inter_sz": 256, "norm_bias": False}, LAYERNORM),
    "modernbert": ({"num_key_value_heads": 4}, {"glu": True, "kv_cache_bytes_per_token": None}, LAYERNORM),
    "dbrx": (
        {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 128,
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
         "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
        {"glu": True, "norm_bias": False}, LAYERNORM | {"moe": {"n_experts": 4, "expert_inter_sz": 96, "experts_per_token": 2}}),
    "t5": (T5, RMSNORM | {"encoder": {"n_layers": 3, "hidden_sz": 64, "params": 3 * (4 * 4096 + 2 * 6144 + 128) + 64 + 128}}, {}),
    "bart": (ENCODER_DECODER, BIASED | {"learned_positions": True, "glu": False}, {"n_q_heads": 4}),
    "whisper": (ENCODER_DECODER | {"num_mel_bins": 8, "bos_token_id": 1, "eos_token_id": 2}, BIASED, {"n_q_heads": 4}),
    "mamba": ({"state_size": 8}, RMSNORM | NO_HEADS | {"layer_kinds": {"mamba": 3}}, {}),
    "mamba2": (MAMBA2, RMSNORM | NO_HEADS | {"hybrid_pattern": "MMM"}, {}),
    "rwkv": ({"attention_hidden_size": 64}, {"layer_kinds": {"rwkv": 3}, "inter_sz": 96, "norm_bias": True, "glu": False}, {}),
    "vit": (
        {"image_size": 16, "patch_size": 4}, BIASED | {"max_positions": 17, "vision": None}, {"n_q_heads": 4}),
    "gptj": ({"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128}, BIASED | {"inter_sz": 256}, {}),
    "distilbert": ({"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}, BIASED | {"projector": None}, {}),
    "granitemoe": ({"num_local_experts": 4}, RMSNORM | {"glu": True, "moe": {"n_experts": 4, "expert_inter_sz": 96}}, {"moe": {
        "n_experts": 4, "expert_inter_sz": 96, "experts_per_token": 2}}),
    "nemotron_h": (
        MAMBA2 | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "hybrid_override_pattern": "M*-",
                  "num_key_value_heads": 2, "head_dim": 16},
        RMSNORM | {"hybrid_pattern": "M*-", "layer_kinds": {"mamba": 1, "attention": 1, "mlp": 1}}, {"n_q_heads": 4}),
}  # fmt: skip
PLANS = {  # families whose --emit-config has the parameters of the checkpoint, buffers aside
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, "granitemoe": {"num_local_experts": 4},
    "llama4_text": {"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 128, "num_hidden_layers": 4},
    "deepseek_v3": {
        "n_routed_experts": 4, "moe_intermediate_size": 32, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "qwen3_next": {
        "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "gemma3_text": {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 16}, "gemma2": {"head_dim": 16},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "n_group": 1, "topk_group": 1},
    "minimax": {"num_local_experts": 4, "head_dim": 16, "num_hidden_layers": 4}, "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "nemotron_h": ARCHITECTURES["nemotron_h"][0],
    "llama": {}, "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4}, "phi3": {}, "qwen2": {}, "starcoder2": {},
}  # fmt: skip
TEXT = SMALL | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SIGLIP = VIT | {"model_type": "siglip_vision_model"}
QWEN2 = SMALL | {"model_type": "qwen2"}
CLIP = {"text_config": SMALL | {"max_position_embeddings": 20}, "vision_config": VIT, "projection_dim": 24}
VISION_LANGUAGE = {  # family: (its config, parameters, those of vision, of the projector)
    "qwen2_vl": ({
        "text_config": TEXT, "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
    }, 101_184 + 8_192 + 20_160 + 24_832, 20_160, 24_832),
    "paligemma": ({
        "text_config": SMALL | {"model_type": "gemma", "head_dim": 16}, "vision_config": SIGLIP, "projection_dim": 64,
        "image_token_index": 1,
    }, 100_800 + 24_624 + 2_112, 24_624, 2_112),
    "llava_onevision": ({
        "text_config": QWEN2, "vision_config": SIGLIP, "image_token_index": 1, "video_token_index": 2,
    }, 101_184 + 8_192 + 24_624 + 6_272 + 64, 24_688, 6_272),  # 64: image_newline
    "internvl": ({
        "text_config": QWEN2, "image_token_id": 1,
        "vision_config": VIT | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
    }, 101_184 + 17_088 + 12_672, 17_088, 12_672),
    "mllama": ({
        "text_config": SMALL | {"model_type": "mllama_text_model", "cross_attention_layers": [1]}, "image_token_index": 1,
        "vision_config": VIT | {
            "model_type": "mllama_vision_model", "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
        },
    }, 101_346 + 8_192 + 46_261 + 4_160, 46_261, 4_160),
}  # fmt: skip


def here(libraries):
    return all(find_spec(name.partition(".")[0]) and find_spec(name) for name in libraries.split())


def write(folder, *argv):
    """A writer, as a fork of a process that has imported what most of them need."""
    server = forked.server("transformers.models.llama.modeling_llama" if here("transformers") else "torch")
    done = forked.run(server, SCRIPT, *argv, timeout_s=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", [name for name, (libraries, _) in TRAINED.items() if here(libraries)])
def test_totals_are_those_by_hand(tmp_path, summarize, name):
    write(tmp_path, name, tmp_path)
    summary = summarize(tmp_path)
    assert [problem.message for problem in summary.all_problems if problem.severity == "error"] == []
    assert (summary.params, summary.complete) == (TRAINED[name][1], True)
    if TRAINED[name][1] == LLAMA:
        found = {key: entry["value"] for key, entry in summary.architecture.items()}
        assert (found["n_layers"], found["inter_sz"], found["n_q_heads"], found["n_kv_heads"]) == (2, 384, 4, 2)
        assert found["kv_cache_bytes_per_token"] == 2 * 2 * 64 * 2
    assert (summary.adapter is not None) == (name == "peft")


@pytest.mark.parametrize("name", [name for name, (libraries, *_) in QUANTIZED.items() if here(libraries)])
def test_quantized_models_are_what_they_were(tmp_path, summarize, name):
    _, *about = QUANTIZED[name]
    write(tmp_path, name, tmp_path)
    folder = tmp_path / "model" if (tmp_path / "model").exists() else tmp_path
    summary = summarize(folder)
    assert [problem.message for problem in summary.all_problems if problem.severity == "error"] == []
    assert summary.restored.params == LLAMA
    assert [list(row[:3]) for row in summary.restored.rows] == [about]
    assert summary.restored.rows[0].params == IN_LAYERS
    assert summary.architecture["inter_sz"]["value"] == 384


@pytest.mark.parametrize("name", [name for name in ("diffusers",) if here("diffusers transformers")])
def test_pipeline_has_the_parameters_of_its_models(tmp_path, summarize, name):
    """As torch counts them in the three models before they are saved."""
    expected = int(write(tmp_path, name, tmp_path).split()[-1])
    assert summarize(tmp_path).params == expected


@pytest.mark.parametrize("family", [family for family in FAMILIES if here("transformers")])
def test_families_of_transformers(tmp_path, summarize, codes, family):
    """Random weights, the config's own numbers, without the config and with it."""
    write(tmp_path, "family", tmp_path, family, json.dumps(SMALL | FAMILIES[family]))
    config = json.loads((tmp_path / "config.json").read_text())
    with_config = summarize(tmp_path)
    assert codes(with_config) == set()
    (tmp_path / "config.json").unlink()
    for summary in (with_config, summarize(tmp_path)):
        found = {key: entry["value"] for key, entry in summary.architecture.items()}
        assert (found["n_layers"], found["hidden_sz"], found["vocab_sz"]) == (3, 64, 128)
        assert found["inter_sz"] == config.get("moe_intermediate_size", 96)
        assert (found.get("moe") or {}).get("n_experts") == (4 if family in ("mixtral", "olmoe", "qwen3_moe") else None)


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if here("transformers")])
def test_architectures_that_are_no_llama(tmp_path, summarize, codes, family):
    """With the config beside the weights and without it; None is a field that is not there."""
    options, found, stated = ARCHITECTURES[family]
    small = {} if {"d_model", "n_embd"} & options.keys() else SMALL
    write(tmp_path, "family", tmp_path, family, json.dumps(small | options))
    with_config = summarize(tmp_path)
    (tmp_path / "config.json").unlink()
    for summary, expected in ((with_config, found | stated), (summarize(tmp_path), found)):
        assert codes(summary) == set()
        about = {key: entry["value"] for key, entry in summary.architecture.items()}
        assert {key: about.get(key) for key in expected} == expected
        assert (about["n_layers"], about["hidden_sz"]) == (3, 64)


@pytest.mark.parametrize("family", [family for family in PLANS if here("transformers")])
def test_emitted_plans_have_the_parameters_of_the_model(tmp_path, family):
    write(tmp_path, "family", tmp_path, family, json.dumps(SMALL | PLANS[family]))
    summary = summarize_checkpoint(tmp_path)
    model = Model.model_validate(yaml.safe_load(model_yaml(summary))["model"])
    assert n_params(model) == sum(t.unique for t in summary.tensors if not BUFFERS.search(t.name))


@pytest.mark.parametrize("family", [family for family in VISION_LANGUAGE if here("transformers")])
def test_vision_language_models(tmp_path, summarize, codes, family):
    """Parameters of each part by hand; the language model's own sizes, with the config and without."""
    config, total, vision, projector = VISION_LANGUAGE[family]
    write(tmp_path, "family", tmp_path, family, json.dumps(config))
    with_config = summarize(tmp_path)
    (tmp_path / "config.json").unlink()
    for summary in (with_config, summarize(tmp_path)):
        assert codes(summary) == set()
        assert (summary.params, summary.restored.params) == (total, total)
        found = {key: entry["value"] for key, entry in summary.architecture.items()}
        tokens = 136 if family == "mllama" else 128
        assert [found[key] for key in ("n_layers", "hidden_sz", "inter_sz", "vocab_sz")] == [3, 64, 96, tokens]
        assert (found["vision"]["params"], found["vision"]["n_layers"], found["vision"]["hidden_sz"]) == (vision, 2, 32)
        assert found["projector"]["params"] == projector
        assert found["qk_norm"] is False
        own = 2 if family == "mllama" else 3  # layers that keep keys of every token
        assert found["kv_cache_bytes_per_token"] == 2 * own * 32 * 2
    assert with_config.architecture["n_q_heads"]["value"] == 4


@pytest.mark.parametrize("family", [family for family in ("clip",) if here("transformers")])
def test_text_and_vision_encoders_of_clip(tmp_path, summarize, codes, family):
    """The text encoder has the tokens, so it is the model; both have attention in both directions and keep no cache."""
    write(tmp_path, "family", tmp_path, family, json.dumps(CLIP))
    with_config = summarize(tmp_path)
    (tmp_path / "config.json").unlink()
    for summary, heads in ((with_config, 4), (summarize(tmp_path), None)):
        assert (codes(summary), summary.params) == (set(), 99_168 + 18_016 + 1)
        found = {key: entry["value"] for key, entry in summary.architecture.items()}
        assert [found[key] for key in ("n_layers", "hidden_sz", "inter_sz", "vocab_sz", "max_positions")] == [
            3,
            64,
            96,
            128,
            20,
        ]
        assert found["vision"] == {"n_layers": 2, "hidden_sz": 32, "params": 18_016}
        assert [found[key] for key in ("norm", "norm_bias", "bias", "glu")] == ["layernorm", True, True, False]
        assert (found.get("n_q_heads"), found.get("kv_cache_bytes_per_token")) == (heads, None)
