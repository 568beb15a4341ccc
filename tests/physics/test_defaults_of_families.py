"""What a Hugging Face config.json leaves unsaid, by family: the defaults of transformers' configuration classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from steptime.base.config import ConfigError
from steptime.model.hf import read_hf_config
from steptime.model.hf_families import FAMILIES
from steptime.model.model import Model

SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 160}


def read(tmp_path, model_type: str, **said: object) -> Model:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **SIZES, **said}), encoding="utf-8")
    return Model(**read_hf_config(path))


def test_a_gemma_of_the_third_generation(tmp_path):
    """transformers models/gemma3/configuration_gemma3.py, Gemma3TextConfig.__init__: 262,208 tokens, 8 heads of 256, 4 of keys, a
    window of 4,096 in five of six layers, tied.
    """
    found = read(tmp_path, "gemma3_text")
    assert (found.vocab_sz, found.n_q_heads, found.n_kv_heads, found.head_dim) == (262_208, 8, 4, 256)
    assert found.tie_embeddings
    assert found.attention.window == 4_096


@pytest.mark.parametrize(("said", "heads"), [({}, 8), ({"num_key_value_heads": 2}, 2)])
def test_a_llama_has_as_many_heads_of_keys_unless_it_says(tmp_path, said, heads):
    """models/llama/configuration_llama.py: num_key_value_heads is num_attention_heads where it is None."""
    found = read(tmp_path, "llama", num_attention_heads=8, vocab_size=1_000, **said)
    assert (found.n_q_heads, found.n_kv_heads, found.head_dim) == (8, heads, 8)


MIXTRAL = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1_000, "num_local_experts": 4}


def test_one_expert_for_each_token(tmp_path):
    """Fewer is no mixture."""
    found = read(tmp_path, "mixtral", num_experts_per_tok=1, **MIXTRAL)
    assert found.moe is not None
    assert (found.moe.experts_per_token, found.moe.n_experts) == (1, 4)
    with pytest.raises(ConfigError, match="num_experts_per_tok: expected a whole number of at least 1, got 0"):
        read(tmp_path, "mixtral", num_experts_per_tok=0, **MIXTRAL)


def test_state_spaces_of_nemotron_h(tmp_path):
    """transformers models/nemotron_h/configuration_nemotron_h.py: 128 heads of 64, 128 states, 8 groups, a convolution of 4,
    chunks of 128. The letters give the number of layers; where there are none of either, a line says so.
    """
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1_000, "head_dim": 8}
    found = read(tmp_path, "nemotron_h", num_hidden_layers=None, hybrid_override_pattern="M-M*", **sizes)
    mamba = found.mamba
    assert mamba is not None
    assert (mamba.n_heads, mamba.head_dim, mamba.state_dim) == (128, 64, 128)
    assert (mamba.n_groups, mamba.conv_width, mamba.chunk_sz) == (8, 4, 128)
    assert found.n_layers == 4
    with pytest.raises(ConfigError):
        read(tmp_path, "nemotron_h", num_hidden_layers=None, **sizes)


DEFAULTS = yaml.safe_load((Path(__file__).parents[1] / "data" / "hf_defaults.yaml").read_text(encoding="utf-8"))
SPELLED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
NEEDED = {
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 48},
    "llama4_text": {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size_mlp": 320},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "solar_open"), EXPERTS | {"n_routed_experts": 16}
    ),
    **dict.fromkeys(("gpt_oss", "minimax", "mixtral", "minimax_m2"), EXPERTS | {"num_local_experts": 16}),
    **dict.fromkeys(("olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"), EXPERTS | {"num_experts": 16}),
    "nemotron_h": {"hybrid_override_pattern": "M-*EM-"},
}
NEEDED["qwen2_moe"] = NEEDED["qwen2_moe"] | {"shared_expert_intermediate_size": 96}


def required(model_type: str) -> dict[str, object]:
    """The keys without which a file of the family is refused, in its own spelling: 6 layers of 640, 64 heads."""
    sizes = dict(zip(SPELLED, (6, 640, 64, 1_280, 1_000), strict=True))
    names, said = FAMILIES[model_type].names, DEFAULTS[model_type]["says"]
    return {names.get(key, key): size for key, size in sizes.items() if key not in said} | NEEDED.get(model_type, {})


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_a_key_left_out_is_the_configuration_classes_own(tmp_path, model_type):
    """data/hf_defaults.yaml holds the arguments of transformers' classes and their lines; written out, they change no field."""
    path, least = tmp_path / "config.json", {"model_type": model_type, **required(model_type)}
    path.write_text(json.dumps(least), encoding="utf-8")
    short = read_hf_config(path)
    path.write_text(json.dumps(least | DEFAULTS[model_type]["says"]), encoding="utf-8")
    assert short == read_hf_config(path)
    assert (short["n_layers"], short["hidden_sz"]) == (6, 640)


def test_every_family_of_transformers_has_its_defaults():
    """These three are read by the code beside their weights alone: configuration_deepseek.py, configuration_kimi.py and
    configuration_minimax_text_01.py on the Hub.
    """
    assert set(FAMILIES) - set(DEFAULTS) == {"kimi_k2", "kimi_linear", "minimax_text_01"}


def test_experts_and_layers_of_kimi_that_a_file_does_not_say(tmp_path):
    """KimiLinearConfig of configuration_kimi.py: no shared expert and no dense layer; DeepseekV3Config beside Kimi K2 the same.

    linear_attn_config of 4 layers of which the first three are KDA: the fourth has full attention; 32 heads of 128 and a
    convolution of 4 as the published file has them.
    """
    sizes = {"num_attention_heads": 8, "vocab_size": 1_000, "moe_intermediate_size": 48, "num_hidden_layers": 4}
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    kda = {"linear_attn_config": {"kda_layers": [1, 2, 3]}, "num_experts": 4, "num_experts_per_token": 2}
    k2 = read(tmp_path, "kimi_k2", n_routed_experts=4, num_experts_per_tok=2, **sizes, **latent)
    found = read(tmp_path, "kimi_linear", **kda, **sizes, **latent)
    for model in (k2, found):
        assert model.moe is not None
        assert (model.moe.n_shared_experts, model.moe.n_dense_layers, model.moe.experts_per_token) == (0, 0, 2)
        assert (model.tie_embeddings, model.activation) == (False, "silu")
    linear = found.linear_attention
    assert linear is not None
    assert (linear.n_value_heads, linear.key_head_dim, linear.value_head_dim, linear.conv_width) == (32, 128, 128, 4)
    assert linear.freq == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("model_type", "said", "freq"),
    [
        ("minimax", {}, [0, 1, 0, 1, 0, 1]),
        ("minimax_text_01", {"attn_type_list": [0, 0, 1, 0, 0, 1]}, 3),
        ("qwen3_next", {"num_experts": 16}, 4),
        ("qwen3_next", {"num_experts": 16, "full_attention_interval": 3}, 3),
        ("qwen3_next", {"num_experts": 16, "layer_types": ["linear_attention", "full_attention"] * 3}, 2),
    ],
)
def test_layers_of_linear_attention(tmp_path, model_type, said, freq):
    """configuration_minimax.py, lines 224-226: layer i has full attention where (i + 1) % 2 is not 0: the first of every two.
    attn_type_list of the Hub's files: 0 is linear. configuration_qwen3_next.py, lines 246-250: the last of every four.
    """
    sizes = {
        "num_attention_heads": 64,
        "vocab_size": 1_000,
        "num_local_experts": 16,
        "hidden_size": 640,
        "head_dim": 10,
    }
    found = read(tmp_path, model_type, **EXPERTS, **sizes, num_key_value_heads=8, **said).linear_attention
    assert found is not None
    assert found.freq == freq
