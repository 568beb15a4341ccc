"""Which ops of a layer Megatron-Core's partial CUDA graphs launch (transformer_layer.py, moe_layer.py)."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.model.graphs import captured

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
