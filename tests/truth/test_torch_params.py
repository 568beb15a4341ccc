"""Parameter counts against torch modules, zero tolerance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_blocks import Kernels, Transformer
from torch_ours import shard_of

from steptime.model.blocks import block_ops, embedding_ops, head_ops, n_params, params_of
from steptime.model.model import Model


def module(model: Model, seqlen: int = 8) -> Transformer:
    """The torch model without storage."""
    with torch.device("meta"):
        return Transformer(model, Kernels(), seqlen)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@st.composite
def models(draw: st.DrawFn) -> Model:
    n_kv = draw(st.integers(1, 4))
    norm = draw(st.sampled_from(["rmsnorm", "layernorm"]))
    glu, learned = draw(st.booleans()), draw(st.booleans())
    return Model(
        n_layers=draw(st.integers(1, 5)),
        hidden_sz=draw(st.integers(1, 40)),
        inter_sz=draw(st.integers(1, 90)),
        n_kv_heads=n_kv,
        n_q_heads=n_kv * draw(st.integers(1, 4)),
        head_dim=2 * draw(st.integers(1, 8)),
        vocab_sz=draw(st.integers(1, 200)),
        max_positions=draw(st.integers(8, 64)) if learned else None,
        learned_positions=learned,
        glu=glu,
        norm=norm,
        bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        norm_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        activation=draw(st.sampled_from(["silu", "gelu", "relu", "relu2"])),
    )


@settings(max_examples=80, deadline=None)
@given(models())
def test_random_models(model):
    assert n_params(model) == count(module(model))


@settings(max_examples=40, deadline=None)
@given(models())
def test_each_part(model):
    """Embedding, one block, and final norm with head, each by itself; the shapes too."""
    torch_model, shard = module(model), shard_of(model, Kernels(), 1, 8)
    block = params_of(block_ops(model, shard))
    assert sorted(p.shape for p in block) == sorted(tuple(p.shape) for p in torch_model.blocks[0].parameters())
    embedding = [torch_model.tokens.weight.numel()]
    if torch_model.positions is not None:
        embedding.append(torch_model.positions.weight.numel())
    assert [p.elements for p in params_of(embedding_ops(model, shard))] == embedding
    head = count(torch_model.norm) + torch_model.head.weight.numel()
    assert sum(p.elements for p in params_of(head_ops(model, shard))) == head


LLAMA3_70B = Model(n_layers=80, hidden_sz=8192, inter_sz=28672, n_q_heads=64, n_kv_heads=8, vocab_sz=128256)
GPT2_SMALL = Model(
    n_layers=12,
    hidden_sz=768,
    inter_sz=3072,
    n_q_heads=12,
    vocab_sz=50257,
    glu=False,
    norm="layernorm",
    bias=True,
    learned_positions=True,
    max_positions=1024,
    tie_embeddings=True,
)
GPT2_NO_BIAS = GPT2_SMALL.model_copy(update={"bias": False, "qkv_bias": False, "norm_bias": False})


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(LLAMA3_70B, 70_553_706_496), (GPT2_SMALL, 124_439_808), (GPT2_NO_BIAS, 124_337_664)],
    ids=["llama3-70b", "gpt2-small", "gpt2-small without biases"],
)
def test_known_models(model, parameters):
    assert count(module(model)) == parameters
    assert n_params(model) == parameters
