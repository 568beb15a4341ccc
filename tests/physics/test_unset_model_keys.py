"""What a model section means where it does not say so, and the smallest and largest figures that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from steptime.base.config import Config, ConfigError
from steptime.model.model import AttentionKind, LayerRun, LinearAttention, Mamba, Model, Moe

MODEL = {"n_layers": 1, "hidden_sz": 8, "inter_sz": 1, "n_q_heads": 2, "vocab_sz": 1}
EXPERTS = {"n_experts": 1, "expert_inter_sz": 1, "experts_per_token": 1}


@pytest.mark.parametrize(
    ("of", "said", "expected"),
    [
        # a Llama: as many heads of keys as of queries, which share the hidden size, gated silu, nothing dropped, no biases
        (Model, MODEL, {
            "n_kv_heads": 2, "head_dim": 4, "glu": True, "activation": "silu", "learned_positions": False, "max_positions": None,
            "rotary_embeds": True, "dropout": 0.0, "attention_dropout": 0.0, "tie_embeddings": False, "norm": "rmsnorm",
            "bias": False, "qkv_bias": False, "norm_bias": False, "qk_norm": False, "pre_norms": True, "post_norms": False,
            "parallel_residual": False, "shared_norm": False, "mtp": 0, "mtp_repeated": False, "moe": None, "mamba": None,
            "swiglu_limit": None, "lora": None, "layers": None, "linear_attention": None, "head_widths": (4, 4),
        }),
        (Model, MODEL | {"bias": True, "glu": False, "learned_positions": True, "dropout": True}, {
            "qkv_bias": True, "norm_bias": True, "activation": "gelu", "rotary_embeds": False,
            "dropout": 0.1, "attention_dropout": 0.1,
        }),
        (Moe, EXPERTS, {
            "n_dense_layers": 0, "moe_frequency": 1.0, "n_shared_experts": 0, "shared_expert_inter_sz": 0, "latent_sz": None,
            "shared_expert_gate": False, "score_function": "softmax", "pre_softmax": False, "expert_bias": False,
            "node_limit": None, "n_groups": None, "load_balancing": "none", "z_loss": False, "capacity_factor": None,
            "pad_to_capacity": False, "imbalance_factor": 1.0, "balancing_loss": False,
        }),
        # DeepSeek-V3: 256 experts, at most 4 nodes, 8 groups; 12 experts have no divisor from 8 to 11
        (Moe, EXPERTS | {"n_experts": 256, "node_limit": 4}, {"n_groups": 8}),
        (Moe, EXPERTS | {"n_experts": 12, "node_limit": 2}, {"n_groups": 4}),
        (Moe, EXPERTS | {"n_experts": 10, "node_limit": 2}, {"n_groups": 5}),
        (Moe, EXPERTS | {"n_experts": 12, "node_limit": 4}, {"n_groups": 12}),
        (Moe, EXPERTS | {"expert_inter_sz": 3, "n_shared_experts": 2}, {"shared_expert_inter_sz": 6}),
        (AttentionKind, {}, {
            "kind": "gqa", "window": None, "window_pattern": None, "chunked": False, "sinks": False, "gated": False,
            "latent_widths": (0, 0, 0, 0), "whole_heads": False, "q_lora_rank": None,
        }),
        (AttentionKind, {"kind": "mla"}, {"q_lora_rank": None, "latent_widths": (512, 128, 64, 128)}),
        # megatron/core/transformer/transformer_config.py and ssm/mamba_mixer.py
        (Mamba, {}, {
            "n_heads": None, "head_dim": 64, "state_dim": 128, "n_groups": 8, "conv_width": 4, "chunk_sz": 128,
        }),
        (LinearAttention, {}, {
            "n_value_heads": 32, "n_key_heads": 16, "key_head_dim": 128, "value_head_dim": 128, "conv_width": 4, "freq": 4,
        }),
        (LinearAttention, {"kind": "kda", "n_value_heads": 6}, {"n_key_heads": 6}),
        (LayerRun, {}, {"repeat": 1, "kind": "dense", "widths": {}}),
    ],
)  # fmt: skip
def test_what_is_not_said(of: type[Config], said: dict[str, Any], expected: dict[str, Any]):
    found = of(**said)
    assert {key: getattr(found, key) for key in expected} == expected


def test_layers_in_letters():
    """M: Mamba-2 with its own defaults; other letters need none."""
    assert Model(**MODEL, hybrid_pattern="M-").mamba == Mamba()
    assert Model(**MODEL, hybrid_pattern="*-").mamba is None


@pytest.mark.parametrize(("norm", "kind", "whole"), [(True, "per_layer", True), (True, "per_head", False)])
def test_norms_of_all_heads_together(norm, kind, whole):
    """Where there is one, and it is said to cover the layer."""
    assert Model(**MODEL, qk_norm=norm, qk_norm_type=kind).whole_qk_norm is whole
    assert Model(**MODEL, qk_norm=False, qk_norm_type=kind).whole_qk_norm is False


NO_MOST = None


@pytest.mark.parametrize(
    ("of", "said", "key", "least", "most"),
    [
        *((Model, MODEL, key, 1, NO_MOST) for key in ("n_layers", "hidden_sz", "inter_sz", "vocab_sz", "n_kv_heads")),
        *((Model, MODEL, key, 1, NO_MOST) for key in ("n_q_heads", "head_dim", "max_positions")),
        (Model, MODEL, "mtp", 0, NO_MOST),
        *((Moe, EXPERTS, key, 1, NO_MOST) for key in EXPERTS),
        *((Moe, EXPERTS, key, 0, NO_MOST) for key in ("n_dense_layers", "n_shared_experts", "shared_expert_inter_sz")),
        *((Moe, EXPERTS, key, 1, NO_MOST) for key in ("latent_sz", "node_limit", "n_groups", "expert_tp_degree")),
        (Moe, EXPERTS, "imbalance_factor", 1, NO_MOST),
        *((AttentionKind, {"kind": "mla"}, key, 1, 100_000) for key in ("q_lora_rank", "kv_lora_rank")),
        *((AttentionKind, {"kind": "mla"}, key, 1, 10_000) for key in ("qk_nope_head_dim", "qk_rope_head_dim")),
        (AttentionKind, {"kind": "mla"}, "v_head_dim", 1, 10_000),
        *((AttentionKind, {}, key, 1, NO_MOST) for key in ("window", "window_pattern")),
        *((Mamba, {}, key, 1, 10_000) for key in ("n_heads", "n_groups")),
        *((Mamba, {}, key, 1, 2_000) for key in ("head_dim", "state_dim")),
        (Mamba, {}, "conv_width", 1, 64),
        (Mamba, {}, "chunk_sz", 1, 1_000_000),
        (LinearAttention, {}, "n_value_heads", 1, 10_000),
        (LinearAttention, {}, "n_key_heads", 1, NO_MOST),
        *((LinearAttention, {}, key, 1, 2_000) for key in ("key_head_dim", "value_head_dim")),
        (LinearAttention, {}, "conv_width", 1, 64),
        (LinearAttention, {}, "freq", 2, NO_MOST),
        *((LayerRun, {}, key, 1, NO_MOST) for key in ("repeat", "inter_sz", "n_q_heads", "n_kv_heads", "head_dim")),
    ],
)
def test_the_least_and_the_most(of: type[Config], said: dict[str, Any], key: str, least: int, most: int | None):
    """A figure is accepted up to its limits and refused beyond them."""
    for value in (least, most):
        if value is not None:
            assert getattr(of(**(said | {key: value})), key) == value
    for value in (least - 1, most and most + 1):
        if value is not None:
            with pytest.raises(ConfigError):
                of(**(said | {key: value}))


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("moe_frequency", (0.01, 1.0), (0.0, 1.01)),
        ("capacity_factor", (0.5, 100_000), (0.0, 100_001)),
    ],
)
def test_shares_of_experts(key, inside, outside):
    """More than nothing."""
    for value in inside:
        assert getattr(Moe(**EXPERTS, **{key: value}), key) == value
    for value in outside:
        with pytest.raises(ConfigError):
            Moe(**EXPERTS, **{key: value})


@pytest.mark.parametrize("key", ["dropout", "attention_dropout"])
def test_a_probability_is_below_one(key):
    for value in (0.0, 0.5):
        assert getattr(Model(**MODEL, **{key: value}), key) == value
    for value in (-0.5, 1.0):
        with pytest.raises(ConfigError):
            Model(**MODEL, **{key: value})


@pytest.mark.parametrize(
    ("said", "length", "share", "seen"),
    [
        ({}, 4, 0.5, 4),
        ({"window": 2}, 4, 6 / 16, 2),  # w s - w^2 / 2 = 8 - 2 of 4 * 4
        ({"window": 8}, 4, 0.5, 4),
        ({"window": 2, "chunked": True}, 4, 4 / 16, 2),  # c s / 2
        ({"window": 2}, 0, 0.5, 1),  # a rank without positions counts as one
    ],
)
def test_shares_of_scores_by_hand(said, length, share, seen):
    assert AttentionKind(**said).shares(length) == (share, seen)


def test_layers_with_a_window():
    """All but the last of every three; without a pattern all; without a window none."""
    assert [AttentionKind(window=2, window_pattern=3).at(layer) for layer in range(6)] == [True, True, False] * 2
    assert [AttentionKind(**said).at(0) for said in ({"window": 2}, {"window_pattern": 3}, {})] == [True, False, False]
    assert [AttentionKind(**{key: True}).whole_heads for key in ("chunked", "sinks", "gated")] == [True, True, False]


def test_layers_with_linear_attention():
    """The last of every two has full attention; a list says it layer by layer, and no more than its own."""
    assert [LinearAttention(freq=3).at(layer) for layer in range(6)] == [True, True, False] * 2
    assert [LinearAttention(freq=[0, 1]).at(layer) for layer in range(3)] == [False, True, False]
    assert [LinearAttention(freq=freq).listed for freq in (2, [0, 1])] == [0, 2]


def test_layers_with_experts():
    """After the dense ones, the last of each 1 / moe_frequency."""
    said = EXPERTS | {"n_dense_layers": 1}
    assert [Moe(**said).at(layer) for layer in range(3)] == [False, True, True]
    assert [Moe(**said, moe_frequency=0.5).at(layer) for layer in range(5)] == [False, False, True, False, True]
    assert [Moe(**EXPERTS, moe_frequency=1 / 3).at(layer) for layer in range(6)] == [False, False, True] * 2
    assert [Moe(**EXPERTS, n_dense_layers=2).at(layer) for layer in range(3)] == [False, False, True]
    # as a float 49 * (1 / 49) is less than 1
    assert [Moe(**EXPERTS, moe_frequency=1 / 49).at(layer) for layer in (47, 48, 49, 97)] == [False, True, False, True]


def test_heads_of_a_state_space():
    """Twice the hidden size over head_dim, rounded down: 2 * 128 / 64, 2 * 100 / 64."""
    assert (Mamba().heads(128), Mamba().heads(100), Mamba(n_heads=3).heads(128)) == (4, 3, 3)


def test_widths_of_all_heads():
    """Of queries, or keys, and of values; a head of attention has the hidden size over their number, rounded down."""
    said = {"n_key_heads": 3, "key_head_dim": 5, "n_value_heads": 6, "value_head_dim": 7}
    assert LinearAttention(**said).widths == (15, 42)
    assert Model(**MODEL | {"hidden_sz": 9}).head_dim == 4
