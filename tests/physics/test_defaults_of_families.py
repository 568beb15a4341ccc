"""What a Hugging Face config.json leaves unsaid, by family: the defaults of transformers' configuration classes."""

from __future__ import annotations

import json

import pytest

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
