"""Which ops of a layer Megatron-Core's partial CUDA graphs launch (transformer_layer.py, moe_layer.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.model.graphs import captured
from steptime.model.ops import Comm, Gemm, Move, Op

MOE = {"moe": {"n_experts": 4, "expert_inter_sz": 256, "experts_per_token": 2, "n_shared_experts": 1}}
ATTENTION = ["attn.norm", "attn.qkv", "attn.rope", "attn.core", "attn.proj", "attn.residual"]
ROUTER = ["mlp.norm", "shared.gate_up", "shared.act", "shared.down", "moe.router", "moe.top_k"]
SENT = ["moe.counts", "moe.permute"]


def names(modules: bool | tuple[str, ...]) -> list[str]:
    """The ops that graphs launch of a layer with experts on two ranks, in order."""
    ops = Assembly(job(model=MOE, dp=2, ep=2)).kinds[0].ops
    return [ops[i].name for i in sorted(captured(ops, modules))]


@pytest.mark.parametrize(
    ("modules", "launched"),
    [
        (False, []),
        (("attn",), ATTENTION),
        (("moe_router",), ROUTER),
        (("moe_router", "moe_preprocess"), ROUTER + SENT),
        (("attn", "moe_router", "moe_preprocess"), ATTENTION + ROUTER + SENT),
        (("mlp",), []),
    ],
)
def test_a_layer_with_experts(modules, launched):
    """Experts take any number of rows, so that what follows the preprocessing is launched by the host."""
    assert names(modules) == launched


def test_all_of_a_layer():
    """Padded experts are static: moe is the rest of the layer, which attn completes."""
    assert names(("attn", "moe")) == names(True)


LAYER: list[Op] = [
    Move("norm", role="norm"), Gemm("qkv", role="attn"), Move("core", role="core_attn"), Move("add"),
    Move("norm2", role="norm"), Gemm("router", role="router"), Move("permute", role="moe"),
    Comm("counts", kind="all_gather", role="moe"), Comm("dispatch", kind="all_to_all", backward="all_to_all", role="moe"),
    Gemm("experts", role="moe"), Move("add2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "launched"),
    [
        (["attn"], [0, 1, 2, 3]),
        (["moe_router"], [4, 5]),
        (["moe_preprocess"], [6, 7]),  # counts are gathered before rows are sent, which has a backward
        (["moe_router", "moe_preprocess"], [4, 5, 6, 7]),
        (["moe"], [4, 5, 6, 7, 8, 9, 10]),
        (["attn", "moe"], list(range(11))),
        (["mlp", "mamba"], []),
    ],
)
def test_layers_of_two_depths(modules, launched):
    """Both have the same ops in graphs; the op before them has none."""
    assert captured(LAYER, modules) == frozenset(launched)
    twice: list[Op] = [Move("embed"), *(replace(op, depth=depth) for depth in (1, 2) for op in LAYER)]
    assert captured(twice, modules) == frozenset(i + 1 + at for at in (0, 11) for i in launched)


@pytest.mark.parametrize(("modules", "launched"), [(["mlp"], [0, 1]), (["attn"], []), (["moe"], []), (["mamba"], [])])
def test_a_layer_of_an_mlp_alone(modules, launched):
    """Of a hybrid model: without attention its first norm is the MLP's."""
    assert captured([Move("norm", role="norm"), Gemm("up", role="mlp")], modules) == frozenset(launched)


@pytest.mark.parametrize(("modules", "launched"), [(["attn"], [0, 1]), (["mlp"], [])])
def test_a_layer_of_attention_alone(modules, launched):
    """There is no MLP to launch."""
    assert captured([Move("norm", role="norm"), Move("core", role="core_attn")], modules) == frozenset(launched)


def test_a_head_is_in_no_layers_graph():
    """Its norm and its projection belong to no module of a layer."""
    for part in (Assembly(job()).head, Assembly(job()).embedding):
        assert captured(part.ops, ["attn", "mlp", "moe", "moe_router", "mamba"]) == frozenset()
