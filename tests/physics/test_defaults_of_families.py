"""What a Hugging Face config.json leaves unsaid, by family: the defaults of transformers' configuration classes."""

from __future__ import annotations

import json

import pytest

from steptime.base.config import ConfigError
from steptime.model.hf import read_hf_config
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
