"""What a Hugging Face config.json leaves unsaid, by family: the defaults of transformers' configuration classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from steptime.base.config import ConfigError
from steptime.model.hf import read_hf_config, shown
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


LINEAR_SIZES = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 1_000,
    "num_local_experts": 16,
    "hidden_size": 640,
    "head_dim": 10,
}


@pytest.mark.parametrize(
    ("model_type", "said", "freq"),
    [
        ("minimax", {}, [0, 1, 0, 1, 0, 1]),
        ("minimax", {"head_dim": None}, [0, 1, 0, 1, 0, 1]),
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
    found = read(tmp_path, model_type, **EXPERTS | LINEAR_SIZES | said).linear_attention
    assert found is not None
    assert found.freq == freq
    if model_type.startswith("minimax"):  # a head's width unsaid: 640 / 64
        assert (found.n_value_heads, found.key_head_dim, found.value_head_dim) == (64, 10, 10)


@pytest.mark.parametrize(("said", "window"), [({}, 8_192), ({"attention_chunk_size": None}, None)])
def test_chunks_of_llama_4(tmp_path, said, window):
    """configuration_llama4.py, line 324: 8,192 tokens, in all but each fourth layer; null: every layer sees all."""
    found = read(tmp_path, "llama4_text", num_attention_heads=8, vocab_size=1_000, **NEEDED["llama4_text"], **said)
    assert found.attention.window == window
    assert found.name == "llama4_text"


PLAIN = ("mixtral", "gpt_oss", "qwen3_moe", "granitemoe", "minimax")
SIGMOID = {"score_function": "sigmoid", "expert_bias": True}
GATED = {"shared_expert_gate": True}
ROUTERS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "dots1", "solar_open", "minimax_m2", "nemotron_h"), SIGMOID),
    "deepseek_v2": {"pre_softmax": True},
    "olmoe": {"pre_softmax": True},
    "qwen2_moe": {"pre_softmax": True, **GATED},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), GATED),
    "ernie4_5_moe": {"pre_softmax": True, "expert_bias": True},
    "llama4_text": {"score_function": "sigmoid"},
}


@pytest.mark.parametrize("model_type", [*ROUTERS, *PLAIN])
def test_what_a_router_does(tmp_path, model_type):
    """modeling_FAMILY.py: sigmoids with e_score_correction_bias; the softmax of all scores, of which the best are taken without
    another one; shared_expert_gate. A softmax over the chosen otherwise, or, the same, weights divided by their sum.
    """
    plain = {"score_function": "softmax", "expert_bias": False, "pre_softmax": False, "shared_expert_gate": False}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **required(model_type)}), encoding="utf-8")
    moe = read_hf_config(path)["moe"]
    assert isinstance(moe, dict)
    assert {key: moe.get(key, value) for key, value in plain.items()} == plain | ROUTERS.get(model_type, {})


@pytest.mark.parametrize("key", ["num_experts", "moe_intermediate_size", "num_experts_per_tok", "decoder_sparse_step"])
def test_no_number_of_experts_is_zero(tmp_path, key):
    """A missing one is told by the family's own key; one is enough; transformers 5 saves num_local_experts."""
    said = NEEDED["qwen2_moe"] | {"num_attention_heads": 16, "vocab_size": 1_000}
    with pytest.raises(ConfigError, match=rf"config\.json: {key}: expected a whole number of at least 1, got 0$"):
        read(tmp_path, "qwen2_moe", **said | {key: 0})
    with pytest.raises(ConfigError, match=rf"config\.json: {key}: expected a whole number of at least 1, got None$"):
        read(tmp_path, "qwen2_moe", **said | {key: None})
    one = read(tmp_path, "qwen2_moe", **said | {"num_experts_per_tok": 1, key: 1}).moe
    assert one is not None
    assert {"num_experts": one.n_experts, "moe_intermediate_size": one.expert_inter_sz}.get(key, 1) == 1
    none = read(tmp_path, "qwen2_moe", **said | {"shared_expert_intermediate_size": 0}).moe
    assert none is not None
    assert (none.n_shared_experts, none.n_experts) == (0, 16)
    del said["num_experts"]
    other = read(tmp_path, "qwen2_moe", num_local_experts=12, **said).moe
    assert other is not None
    assert other.n_experts == 12
    with pytest.raises(
        ConfigError, match=r"config\.json: num_experts: expected a whole number of at least 1, got None$"
    ):
        read(tmp_path, "qwen2_moe", **said)


FULL, NEAR = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kinds", "window", "every"),
    [
        ([NEAR, NEAR, FULL] * 2, 4_096, 3),
        ([NEAR, FULL] * 3, 4_096, 2),
        ([NEAR] * 6, 4_096, None),
        ([FULL] * 6, None, None),
    ],
)
def test_layers_with_a_window(tmp_path, kinds, window, every):
    """layer_types: the last of every n sees all, or no layer does, or each."""
    found = read(tmp_path, "gemma3_text", layer_types=kinds).attention
    assert (found.window, found.window_pattern) == (window, every)


def test_windows_in_another_order(tmp_path):
    with pytest.raises(ConfigError, match="layer_types: only one full-attention layer at the end"):
        read(tmp_path, "gemma3_text", layer_types=[FULL, NEAR] * 3)


def test_a_long_value_is_cut():
    """40 characters are shown; of more the first 37 and three dots."""
    assert shown("x" * 38) == '"' + "x" * 38 + '"'
    assert shown("x" * 39) == '"' + "x" * 36 + "..."


HYBRID = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1_000, "head_dim": 8}


def test_a_pattern_that_is_no_text(tmp_path):
    with pytest.raises(ConfigError, match="hybrid_override_pattern: expected the layers in order"):
        read(tmp_path, "nemotron_h", hybrid_override_pattern=5, **HYBRID)


def test_a_further_depth_of_a_hybrid_is_attention_and_experts(tmp_path):
    """configuration_nemotron_h.py: mtp_layers_block_type is full_attention, moe unless said."""
    said = HYBRID | {"hybrid_override_pattern": "M-*EM-", "num_nextn_predict_layers": 1}
    assert read(tmp_path, "nemotron_h", **said).mtp == 1
    with pytest.raises(ConfigError, match="mtp_hybrid_override_pattern: 'M' is not modeled"):
        read(tmp_path, "nemotron_h", mtp_hybrid_override_pattern="M", **said)


def test_no_layer_of_full_attention(tmp_path):
    """A list of linear layers alone stays a list."""
    found = read(tmp_path, "minimax", **EXPERTS, **LINEAR_SIZES, layer_types=["linear_attention"] * 6)
    assert found.linear_attention is not None
    assert found.linear_attention.freq == [1] * 6


QK_NORM = {
    "gemma3_text", "dots1", "minimax_m2", "olmoe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "hunyuan_v1_dense", "olmo2", "olmo3", "exaone4",
}  # fmt: skip
BIAS = {"gpt_oss", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "starcoder2"}
QKV_BIAS = BIAS | {"qwen2", "qwen2_moe", "glm", "glm4", "seed_oss"}
POST_NORMS = {"gemma2", "gemma3_text", "glm4", "olmo2", "olmo3", "exaone4"}
WINDOWS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "llama4_text": 4, "cohere2": 4, "exaone4": 4, "olmo3": 4}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_what_the_modeling_code_fixes(tmp_path, model_type):
    """modeling_FAMILY.py: norms of q and k, biases of all projections or of q, k and v, norms after a sublayer; the classes'
    layer_types: which layer of how many sees all tokens.
    """
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **required(model_type)}), encoding="utf-8")
    found = Model(**read_hf_config(path))
    assert found.bias == (model_type in BIAS)
    assert (found.qk_norm, found.qkv_bias) == (model_type in QK_NORM, model_type in QKV_BIAS)
    assert (found.post_norms, found.attention.window_pattern) == (model_type in POST_NORMS, WINDOWS.get(model_type))


@pytest.mark.parametrize("model_type", ["dots1", "glm4_moe", "solar_open"])
def test_a_file_with_groups_of_experts_alone(tmp_path, model_type):
    """topk_group is 1 in the three classes: a token's experts lie in one of the 4 groups."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **required(model_type), "n_group": 4}), encoding="utf-8")
    moe = Model(**read_hf_config(path)).moe
    assert moe is not None
    assert (moe.node_limit, moe.n_groups) == (1, 4)


@pytest.mark.parametrize(("model_type", "positions"), [("phi3", 4_096), ("mistral", 131_072), ("starcoder2", 4_096)])
def test_a_window_as_long_as_all_positions_is_none(tmp_path, model_type, positions):
    """max_position_embeddings of the classes: a window that reaches all of them leaves full attention."""
    sizes = {"num_attention_heads": 8, "vocab_size": 1_000}
    for window, expected in ((positions, None), (positions - 1, positions - 1)):
        assert read(tmp_path, model_type, sliding_window=window, **sizes).attention.window == expected
