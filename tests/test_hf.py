"""Hugging Face config.json: every family, its defaults, its refusals."""

from __future__ import annotations

import json

import pytest
import test_expert_presets
from hypothesis import given
from hypothesis import strategies as st

from steptime.model.blocks import n_params
from steptime.model.hf import read_hf_config
from steptime.model.hf_families import FAMILIES
from steptime.model.hf_family import UNMODELED
from steptime.model.model import Model
from steptime.model.presets import load_model

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}
GPT2_SIZES = {"n_layer": 3, "n_embd": 64, "n_head": 8, "n_positions": 96, "vocab_size": 1000}
OPT_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "ffn_dim": 160,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 96,
    "word_embed_proj_dim": 64,
}

FALCON_SIZES = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
MOE_SIZES = SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA_SIZES = SIZES | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

# (model_type, keys of the file, parameters of the AutoModelForCausalLM of transformers 4.57.1 built from these keys alone,
# dropout keys aside; of 5.23.0 for families that came later). Every key that is not here is a class default. Biases that
# balance experts (ernie4_5_moe: 8 here) are no parameters.
COUNTED = [
    ("llama", SIZES, 269_760),
    ("llama", SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 16}, 218_048),
    ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}, 271_680),
    ("granite", SIZES | {"num_key_value_heads": 4}, 257_472),
    ("mistral", SIZES | {"sliding_window": None}, 269_760),
    ("mistral", SIZES | {"sliding_window": None, "num_key_value_heads": 4, "head_dim": 16}, 294_336),
    ("qwen2", SIZES | {"num_key_value_heads": 2}, 251_616),
    ("qwen2", SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True}, 187_616),
    ("qwen3", SIZES | {"num_key_value_heads": 2}, 712_896),
    ("gpt2", GPT2_SIZES, 220_224),
    ("gpt_bigcode", GPT2_SIZES, 198_384),
    ("gpt_neox", SIZES | {"use_parallel_residual": False}, 240_928),
    ("gpt_neox", SIZES, 240_928),
    ("arcee", SIZES | {"num_key_value_heads": 2}, 220_608),
    ("cohere", SIZES | {"num_key_value_heads": 2}, 187_136),
    ("cohere2", SIZES | {"num_key_value_heads": 2, "sliding_window": 32}, 187_136),
    ("ernie4_5", SIZES, 648_128),
    ("exaone4", SIZES | {"num_key_value_heads": 2}, 251_376),
    ("falcon", FALCON_SIZES, 190_464),
    ("falcon", FALCON_SIZES | {"bias": True, "parallel_attn": False}, 192_240),
    ("falcon", FALCON_SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 160}, 157_056),
    (
        "falcon",
        FALCON_SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        193_536,
    ),
    ("glm", SIZES, 716_736),
    ("glm4", SIZES, 717_120),
    ("hunyuan_v1_dense", SIZES | {"num_key_value_heads": 2, "head_dim": 8}, 251_376),
    ("olmo2", SIZES | {"num_key_value_heads": 2}, 251_568),
    ("olmo3", SIZES | {"num_key_value_heads": 2}, 251_568),
    ("seed_oss", SIZES, 1_016_256),
    ("smollm3", SIZES, 193_472),
    ("ministral3", SIZES, 1_007_040),
    ("granitemoe", SIZES | {"num_local_experts": 4}, 547_008),
    ("ernie4_5_moe", SIZES | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48}, 243_144 - 8),
    ("minimax_m2", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, 547_392),
    ("solar_open", MOE_SIZES | {"n_routed_experts": 4}, 1_053_888),
    (
        "dots1",
        MOE_SIZES
        | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"sliding_window": None, "num_key_value_heads": 2},
        301_040,
    ),
    ("qwen3_5_text", DELTA_SIZES, 828_552),
    (
        "qwen3_5_moe_text",
        DELTA_SIZES | MOE_SIZES | {"num_hidden_layers": 4, "num_experts": 4} | {"shared_expert_intermediate_size": 32},
        813_448,
    ),
    ("opt", OPT_SIZES | {"attention_dropout": 0.1}, 183_200),
    ("phi3", SIZES | {"num_key_value_heads": 2}, 251_328),
    ("gemma", SIZES | {"num_key_value_heads": 1, "num_attention_heads": 4}, 648_128),
    ("starcoder2", SIZES, 158_208),
    ("starcoder2", SIZES | {"use_bias": False}, 157_056),
    ("nemotron", SIZES | {"num_key_value_heads": 2}, 221_056),
    ("stablelm", SIZES | {"num_key_value_heads": 8}, 270_208),
    ("stablelm", SIZES | {"num_key_value_heads": 8, "use_parallel_residual": True}, 269_824),
]


@pytest.fixture
def read(tmp_path):
    """Read a config given as keys, or as raw bytes."""

    def write_and_read(config, model_type=None):
        path = tmp_path / "config.json"
        if model_type:
            config = {"model_type": model_type, **config}
        path.write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
        return read_hf_config(path)

    return write_and_read


@pytest.fixture
def problems(read):
    """The lines told of a bad config, without the path."""

    def lines(config, model_type=None):
        with pytest.raises(ValueError) as caught:
            read(config, model_type)
        told = str(caught.value).splitlines()
        assert all("config.json: " in line for line in told)
        return [line.partition("config.json: ")[2] for line in told]

    return lines


@pytest.mark.parametrize(("model_type", "config", "count"), COUNTED)
def test_parameters_as_transformers_counts_them(read, model_type, config, count):
    model = Model(**read(config, model_type))
    assert n_params(model) == count


@pytest.mark.parametrize(
    ("said", "limit"), [({}, (None, None)), ({"n_group": 4}, (1, 4)), ({"n_group": 4, "topk_group": 3}, (3, 4))]
)
def test_groups_of_experts_that_a_file_does_not_say(read, said, limit):
    """SolarOpenConfig of transformers 5.23.0: n_group 1 and topk_group 1, so a token may take experts of every group."""
    moe = Model(**read(MOE_SIZES | {"n_routed_experts": 8} | said, "solar_open")).moe
    assert (moe.node_limit, moe.n_groups) == limit


def test_every_family_is_counted():
    with_experts = {config["model_type"] for config in test_expert_presets.FILES.values()}
    assert {model_type for model_type, _, _ in COUNTED} | with_experts == set(FAMILIES) - {
        "minimax",
    }


# What the hub's own config.json says (the keys read here), against the preset of the same model.
PUBLISHED = {
    "llama3-8b": ("llama", 32, 4096, 14336, 32, 128256, {"num_key_value_heads": 8, "hidden_act": "silu"}),
    "llama3-3b": (
        "llama",
        28,
        3072,
        8192,
        24,
        128256,
        {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "mistral-7b": ("mistral", 32, 4096, 14336, 32, 32768, {"num_key_value_heads": 8, "sliding_window": None}),
    "mistral-nemo-12b": ("mistral", 40, 5120, 14336, 32, 131072, {"head_dim": 128, "sliding_window": None}),
    "qwen2.5-7b": (
        "qwen2",
        *(28, 3584, 18944, 28, 152064),
        {"num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 131072, "tie_word_embeddings": False},
    ),
    "qwen3-8b": (
        "qwen3",
        36,
        4096,
        12288,
        32,
        151936,
        {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": None},
    ),
    "qwen3-4b": ("qwen3", 36, 2560, 9728, 32, 151936, {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "gemma-7b": ("gemma", 28, 3072, 24576, 16, 256000, {"num_key_value_heads": 16, "hidden_act": "gelu"}),
    "phi3-mini": ("phi3", 32, 3072, 8192, 32, 32064, {"sliding_window": 262144, "max_position_embeddings": 131072}),
    "phi4": ("phi3", 40, 5120, 17920, 40, 100352, {"num_key_value_heads": 10, "sliding_window": None}),
    "nemotron4-15b": ("nemotron", 32, 6144, 24576, 48, 256000, {"num_key_value_heads": 8}),
    "smollm2-135m": ("llama", 30, 576, 1536, 9, 49152, {"num_key_value_heads": 3, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_its_preset(read, name):
    model_type, layers, hidden, inner, heads, vocab, rest = PUBLISHED[name]
    sizes = dict(zip(SIZES, (layers, hidden, inner, heads, vocab), strict=True))
    model = Model(**read(sizes | rest, model_type))
    assert model.model_dump(exclude={"name", "source"}) == load_model(name).model_dump(exclude={"name", "source"})


def test_gpt2_as_published(read):
    config = {"_name_or_path": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_ctx": 1024}
    config |= {
        "vocab_size": 50257,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }
    fields = read(config, "gpt2")
    assert n_params(Model(**fields)) == 124_439_808
    assert fields["name"] == "gpt2"
    assert fields["dropout"] == 0.1
    assert Model(**fields).model_dump(exclude={"name", "source"}) == load_model("gpt2").model_dump(
        exclude={"name", "source"}
    )


def test_a_folder_is_read_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    fields = read_hf_config(str(tmp_path))
    assert fields["n_layers"] == 3
    assert fields["source"] == f"{tmp_path} (model_type llama)"


@pytest.mark.parametrize(
    ("model_type", "config", "line"),
    [
        ("llama", SIZES | {"hidden_act": "swiglu2"}, 'hidden_act: "swiglu2" is not modeled (known: '),
        (
            "llama",
            SIZES | {"attention_bias": True},
            "attention_bias: true, mlp_bias: false: different values are not modeled",
        ),
        ("llama", SIZES | {"attention_dropout": 0.1}, "attention_dropout: 0.1 is not modeled, only 0.0"),
        ("llama", SIZES | {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 8"),
        ("llama", SIZES | {"num_attention_heads": 7}, "num_attention_heads: 7 does not divide 64"),
        ("llama", SIZES | {"vocab_size": "1000"}, 'vocab_size: expected a positive whole number, got "1000"'),
        ("llama", SIZES | {"vocab_size": True}, "vocab_size: expected a positive whole number, got true"),
        ("llama", SIZES | {"vocab_size": 0}, "vocab_size: expected a positive whole number, got 0"),
        ("llama", SIZES | {"tie_word_embeddings": "yes"}, 'tie_word_embeddings: "yes": expected true or false'),
        (
            "llama",
            SIZES | {"num_local_experts": 8},
            "num_local_experts: a mixture of experts of this family is not modeled",
        ),
        ("llama", SIZES | {"kv_lora_rank": 512}, "kv_lora_rank: latent attention of this family is not modeled"),
        (
            "qwen2",
            SIZES | {"use_sliding_window": True, "num_key_value_heads": 8},
            "sliding_window: 4096 from max_window_layers on is not modeled; set it to null for full attention",
        ),
        (
            "qwen3",
            SIZES | {"num_key_value_heads": 8, "attention_bias": True},
            "attention_bias: true is not modeled, only false",
        ),
        (
            "qwen3",
            SIZES | {"num_key_value_heads": 8, "layer_types": ["linear_attention"]},
            "layer_types: only full_attention and sliding_attention are modeled",
        ),
        (
            "gpt2",
            GPT2_SIZES | {"embd_pdrop": 0.0},
            "resid_pdrop: 0.1, embd_pdrop: 0.0: different values are not modeled",
        ),
        ("gpt2", GPT2_SIZES | {"n_head": 7}, "n_head: 7 does not divide 64"),
        ("gpt2", GPT2_SIZES | {"n_embd": None}, "n_embd: missing"),
        ("gpt2", GPT2_SIZES | {"add_cross_attention": True}, "add_cross_attention: cross attention is not modeled"),
        (
            "phi3",
            SIZES | {"resid_pdrop": 1.5},
            "resid_pdrop: 1.5, embd_pdrop: 0.0: expected a probability",
        ),
        ("gpt_neox", SIZES | {"use_parallel_residual": 1}, "use_parallel_residual: 1: expected true or false"),
        ("cohere", SIZES | {"use_qk_norm": True}, "use_qk_norm: true is not modeled, only false"),
        (
            "opt",
            OPT_SIZES | {"dropout": 0.0, "do_layer_norm_before": False},
            "do_layer_norm_before: false is not modeled",
        ),
        ("opt", OPT_SIZES | {"dropout": 0.0, "word_embed_proj_dim": 32}, "word_embed_proj_dim: only 64 (hidden_size)"),
        ("stablelm", SIZES | {"num_key_value_heads": 8, "use_qkv_bias": True}, "use_qkv_bias: true is not modeled"),
        ("jamba", SIZES, "model_type 'jamba' is not modeled: a hybrid of attention and state-space layers"),
        ("lama", SIZES, "unknown model_type 'lama'; did you mean 'llama'? (supported: deepseek_v2, "),
        ("llava", {"text_config": SIZES}, "text_config: a multimodal model"),
    ],
)
def test_refusals(problems, model_type, config, line):
    (told,) = problems(config, model_type)
    assert told.startswith(line)


def test_all_problems_at_once(problems):
    told = problems({"num_attention_heads": 8, "hidden_act": "mish", "attention_bias": 1}, "llama")
    keys = [line.partition(":")[0] for line in told]
    assert keys == [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "vocab_size",
        "hidden_act",
        "attention_bias",
    ]


def test_a_missing_model_type(problems):
    assert problems(SIZES) == ["no model_type: not a Hugging Face model config"]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"", "not JSON (line 1: Expecting value)"),
        (b"\x80\x02}q\x00.", "not JSON"),
        (b"[1, 2]", "expected a JSON object, got a list"),
        (b"model_type: llama", "not JSON (line 1: Expecting value)"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":[' * 100_000, "not JSON"),
        (b" " * 2_000_000, "2,000,000 bytes, not a model config"),
    ],
)
def test_files_that_are_no_config(problems, raw, line):
    assert problems(raw) == [line]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: No such file"):
        read_hf_config(tmp_path / "config.json")


def test_refused_families_are_not_read():
    assert not set(UNMODELED) & set(FAMILIES)


VALUES = st.sampled_from([None, True, False, -1, 0, 1, 8, 0.1, 1e400, "", "8", "silu", [], ["full_attention"], {}])
KEYS = st.sampled_from(
    [
        *(SIZES | GPT2_SIZES | FAMILIES["gpt_neox"].defaults | FAMILIES["opt"].defaults | FAMILIES["mistral"].defaults),
        *("head_dim", "layer_types", "attention_bias", "mlp_bias", "num_experts", "text_config", "_name_or_path"),
    ]
)


@given(st.sampled_from(sorted(FAMILIES)), st.lists(st.tuples(KEYS, VALUES), max_size=4))
def test_any_json_gives_a_model_or_lines(tmp_path_factory, model_type, changes):
    """Whatever stands under the keys: a model, or problems; never another exception."""
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(SIZES | GPT2_SIZES | OPT_SIZES | {"model_type": model_type} | dict(changes)))
    try:
        fields = read_hf_config(path)
    except ValueError as error:
        assert all(line.startswith(str(path)) for line in str(error).splitlines())  # noqa: PT017
    else:
        assert n_params(Model(**fields)) > 0


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("opt", OPT_SIZES, (0.1, 0.0)),  # OPTConfig's own defaults
        ("gpt2", GPT2_SIZES | {"attn_pdrop": 0.0}, (0.1, 0.0)),
        ("gpt2", GPT2_SIZES, (0.1, 0.1)),
        ("phi3", SIZES | {"attention_dropout": 0.2}, (0.0, 0.2)),
    ],
)
def test_dropout_of_scores_has_its_own_probability(read, model_type, config, expected):
    model = Model(**read(config, model_type))
    assert (model.dropout, model.attention_dropout) == expected


@pytest.mark.parametrize(
    ("changed", "window"),
    [
        ({}, 4096),
        ({"sliding_window": 96}, 96),
        ({"sliding_window": None}, None),
        ({"max_position_embeddings": 4096}, None),
    ],
)
def test_mistrals_window(read, changed, window):
    """4,096 unless the file says otherwise (transformers configuration_mistral.py), and none that reaches all positions."""
    attention = read(SIZES | changed, "mistral").get("attention", {})
    assert attention.get("window") == window
