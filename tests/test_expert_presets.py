"""Presets and Hugging Face configs with experts, latent attention or windows: totals and active parameters as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from steptime.answer.result import estimate
from steptime.base.config import ConfigError, build
from steptime.model.blocks import n_params, params
from steptime.model.hf import read_hf_config
from steptime.model.hf_experts import pattern
from steptime.model.model import Model
from steptime.model.presets import load_model, model_names
from steptime.model.shard import Shard
from steptime.software.performance import load_software

# Parameters by preset. The Hub's pages print, from the safetensors: Mixtral-8x7B 46,702,792,704; gpt-oss 20,914,757,184 and
# 116,829,156,672; Qwen3 30,532,122,624 and 235,093,634,560; Gemma 2 2,614,341,888, 9,241,705,984, 27,227,128,320; Gemma 3 1B
# 999,885,952; DeepSeek-V2 235,741,434,880 and Lite 15,706,484,224. DeepSeek-V3 has 671,026,419,200 with the 58 * 256 balancing
# biases, which are no parameters here; OLMoE 6,919,161,856. Those with linear
# attention are worked out in test_linear_attention.py.
#
# Nemotron 3 Nano, 31.6 B by its model card: 23 Mamba-2 layers (z and x 4,096 each, B and C 8 * 128 each, 64 steps; a convolution
# of width 4 and its bias; A, D and the steps' bias; a gated norm; the output), 6 of attention (32 and 2 heads of 128), 23 with
# 128 experts of 1,856, a shared one of 3,712 and a router; a norm before each.
#
# Nemotron 3 Super, 120 B with 12 B active by its page (research.nvidia.com/labs/nemotron; its weights without the layer of
# multi-token prediction are 121 B on the Hub): 40 of Mamba-2 (z and x 8,192 each, 128 steps), 8 of attention, 40 with 512
# experts of 2,688 on a latent of 1,024 (two projections), a shared one of 5,376 and a router.


def scan(h, inner, steps):
    """Parameters of a Mamba-2 layer with 8 groups of 128."""
    return h * (2 * inner + 2 * 1024 + steps) + 5 * (inner + 2 * 1024) + 3 * steps + inner + inner * h + h


def around(h):
    """Those of an attention layer, and of embedding, head and last norm."""
    return h * (32 + 2 * 2) * 128 + 32 * 128 * h + h, 2 * 131072 * h + h


H, S = 2688, 4096
NANO = 23 * (scan(H, 4096, 64) + 2 * H * (128 * 1856 + 3712) + 128 * H + H) + 6 * around(H)[0] + around(H)[1]
LATENT = 2 * (1024 * 512 * 2688 + S * 1024 + S * 5376) + 512 * S + S
SUPER = 40 * (scan(S, 8192, 128) + LATENT) + 8 * around(S)[0] + around(S)[1]
# Qwen1.5-MoE, 14.3 B by its card: biases of query, key and value; a shared expert of 5,632 with a gate. Qwen3.5 35B-A3B: 10
# layers of gated attention (twice the query, 2 key heads of 256, two norms), 30 of the delta rule (16 key and 32 value heads of
# 128, a convolution of width 4, A, the steps' bias and a norm).
QWEN2_ATTENTION, QWEN2_EXPERTS = 4 * 2048**2 + 3 * 2048, 60 * 2048 + 3 * 2048 * (60 * 1408 + 5632) + 2048
QWEN35_EXPERTS = 256 * 2048 + 3 * 2048 * 512 * (256 + 1) + 2048
GATED = 2048 * 256 * (2 * 16 + 2 * 2 + 16) + 2 * 256
DELTA = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4 * (2 * 2048 + 4096) + 2 * 32 + 128 + 4096 * 2048
COUNTED = {
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "kimi-k2": 1_026_408_209_408,
    "kimi-linear-48b-a3b": 49_122_675_072,
    "llama4-maverick": 400_711_848_960,
    "llama4-scout": 107_769_861_120,
    "minimax-text-01": 456_089_655_296,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "moonlight-16b-a3b": 15_960_108_544,
    "nemotron-3-nano-30b-a3b": NANO,
    "nemotron-3-super-120b-a12b": SUPER,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen1.5-moe-a2.7b": 2 * 151936 * 2048 + 24 * (QWEN2_ATTENTION + QWEN2_EXPERTS + 2 * 2048) + 2048,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-35b-a3b": 2 * 248320 * 2048 + 40 * (QWEN35_EXPERTS + 2 * 2048) + 10 * GATED + 30 * DELTA + 2048,
}
ACTIVE = {  # billions that the model cards print; "without": of embedding, or of embedding and head
    "deepseek-v2": (21, 0),
    "deepseek-v2-lite": (2.4, 1),
    "deepseek-v3": (37, 0),
    "glm-4.5": (32, 2),
    "glm-4.5-air": (12, 2),
    "gpt-oss-20b": (3.61, 1),
    "gpt-oss-120b": (5.13, 1),
    "kimi-k2": (32, 0),
    "llama4-maverick": (17, 0),
    "minimax-text-01": (45.9, 2),
    "llama4-scout": (17, 0),
    "mixtral-8x7b": (12.9, 0),
    "mixtral-8x22b": (39, 0),
    "nemotron-3-nano-30b-a3b": (3.6, 0),
    "nemotron-3-super-120b-a12b": (12, 1),
    "olmoe-1b-7b": (1.3, 0),
    "qwen3-30b-a3b": (3.3, 0),
    "qwen3-235b-a22b": (22, 0),
    # "80B in total and 3B activated" rounds: 48 * 11 experts of 3 * 2048 * 512, 12 attention and 36 delta-rule layers make 3.25
    "qwen3-next-80b-a3b": (3.25, 2),
}


def active(model: Model) -> float:
    one = Shard(1.0, 1.0, 1.0, 1.0, sp=False, vocab=model.vocab_sz, software=load_software("megatron-core"))
    return sum(p.active for p in params(model, one))


@pytest.mark.parametrize("name", COUNTED)
def test_parameters(name):
    assert n_params(load_model(name)) == COUNTED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters(name):
    model = load_model(name)
    said, without = ACTIVE[name]
    assert (active(model) - without * model.vocab_sz * model.hidden_sz) / 1e9 == pytest.approx(said, rel=0.03)


FILES = yaml.safe_load((Path(__file__).parent / "data" / "hf_configs.yaml").read_text())


def read(tmp_path, name, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FILES[name] | changes))
    return read_hf_config(path)


@pytest.mark.parametrize("name", FILES)
def test_a_config_json_is_its_preset(tmp_path, name):
    """Every field; presets leave out the layers of multi-token prediction that some files state."""
    ours = build(Model, read(tmp_path, name))
    preset = load_model(name, mtp=FILES[name].get("num_nextn_predict_layers", 0))
    assert ours.model_copy(update={"name": preset.name, "source": preset.source}) == preset


def test_every_preset_with_other_layers_than_dense_ones_has_its_file():
    """Experts, latents, windows, linear attention, Mamba-2: each is read from its own file too, but for windows alone."""
    kinds = [
        name
        for name in model_names()
        if (model := load_model(name)).moe or model.hybrid_pattern or model.attention.window
    ]
    assert set(kinds) - {"mistral-7b", "ministral-8b"} == set(FILES)


def test_the_words_of_transformers_5(tmp_path):
    """Kinds of layer as a list, in the words of files on the Hub and of transformers 5, which count the layers."""
    pattern = FILES["nemotron-3-nano-30b-a3b"]["hybrid_override_pattern"]
    expected = load_model("nemotron-3-nano-30b-a3b").hybrid_pattern
    for m, attention in (("mamba", "attention"), ("linear_attention", "full_attention")):
        listed = [{"M": m, "*": attention, "E": "moe"}[letter] for letter in pattern]
        changes = {"layers_block_type": listed, "hybrid_override_pattern": None, "num_hidden_layers": None}
        model = build(Model, read(tmp_path, "nemotron-3-nano-30b-a3b", **changes))
        assert (model.hybrid_pattern, model.n_layers) == (expected, 52)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"hybrid_override_pattern": "M|E"},
            "hybrid_override_pattern: expected the layers in order, of the letters M, *, - and E",
        ),
        ({"mtp_hybrid_override_pattern": "*-"}, "mtp_hybrid_override_pattern: '*-' is not modeled, only '*E'"),
        ({"n_shared_experts": 2}, "n_shared_experts: 2 is not modeled, only 1"),
        ({"moe_latent_size": "narrow"}, "moe_latent_size: expected a whole number of at least 1, got 'narrow'"),
    ],
)
def test_what_is_wrong_with_a_hybrid_is_told(tmp_path, changes, line):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "nemotron-3-super-120b-a12b", **changes)
    assert [told.partition("config.json: ")[2] for told in error.value.problems] == [line]


def test_qwen3_next_with_its_layer_of_prediction():
    """The Hub's page of Qwen/Qwen3-Next-80B-A3B-Instruct prints 81,324,862,720; its card 79 B without embedding and head."""
    assert n_params(load_model("qwen3-next-80b-a3b", mtp=1)) == 81_324_862_720
    plain = load_model("qwen3-next-80b-a3b")
    assert round((n_params(plain) - 2 * plain.vocab_sz * plain.hidden_sz) / 1e9) == 79


def test_biases_of_experts_are_no_matrix_multiplies():
    """gpt-oss-20b over 128 tokens, which its window does not cut: 2 FLOPs a weight that a token uses, 4 of 32 experts.

    A layer: q and the output 2,880 * 4,096 each, k and v 2,880 * 512 each, router 2,880 * 32, an expert 2,880 * (5,760 + 2,880);
    attention under the causal mask 2 * 64 heads * (64 + 64) * 128 / 2 a token. The logits: 201,088 * 2,880. Three times that.
    """
    layer = 2 * 2880 * 4096 + 2 * 2880 * 512 + 2880 * 32 + 4 * 2880 * (5760 + 2880)
    per_token = 2 * (24 * layer + 201_088 * 2880) + 24 * 2 * 64 * 128 * 128 / 2
    plan = {"model": "gpt-oss-20b", "parallelism": {"tp": 1, "pp": 1, "dp": 1}, "hardware": "h100",
            "data": {"gbs": 1, "seqlen": 128, "microbatch_sz": 1}}  # fmt: skip
    assert estimate(plan).flops.model_per_step == pytest.approx(3 * 128 * per_token, rel=1e-12)


def test_minimax_in_the_words_of_transformers(tmp_path):
    kinds = (["linear_attention"] * 7 + ["full_attention"]) * 10
    theirs = read(tmp_path, "minimax-text-01", model_type="minimax", attn_type_list=None, layer_types=kinds)
    assert build(Model, theirs).linear_attention == load_model("minimax-text-01").linear_attention


def test_what_is_wrong_with_experts_is_told(tmp_path):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "qwen3-30b-a3b", num_experts="many", mlp_only_layers=[3])
    assert [line.partition(": ")[2] for line in error.value.problems] == [
        "num_experts: expected a whole number of at least 1, got 'many'",
        "mlp_only_layers: only the first layers, or every n-th one, can be dense",
    ]


@pytest.mark.parametrize(
    ("kinds", "every"), [("sf", 2), ("sssfsssf", 4), ("ff", 1), ("ssss", 5), ("fs", None), ("sfsff", None)]
)
def test_the_pattern_of_full_layers(kinds, every):
    words = {"s": "sliding_attention", "f": "full_attention"}
    assert pattern([words[kind] for kind in kinds]) == every


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_latent_attention_has_all_its_widths(key):
    with pytest.raises(ConfigError, match=f"model.attention.{key}: mla needs a width; remove the key for its default"):
        Model(n_layers=1, hidden_sz=64, inter_sz=64, n_q_heads=2, vocab_sz=64, attention={"kind": "mla", key: None})
