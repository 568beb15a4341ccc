"""Which CUDA graphs Megatron-Core's own TransformerConfig accepts, against those that are proposed for a job with experts.

Proved: modules in graphs together with recomputed modules, of experts without a capacity. Not proved: that a graph runs, which
needs a GPU. Run by `test_mcore_alone.py`.
"""

from __future__ import annotations

import mcore_imports  # noqa: F401  Megatron is imported without CUDA
import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from steptime import Job
from steptime.answer.switches import SWITCHES

PLAN = {
    "model": "qwen3-30b-a3b",
    "parallelism": {"tp": 1, "pp": 1, "dp": 16, "ep": 16},
    "data": {"gbs": 512, "seqlen": 4096, "microbatch_sz": 1},
    "hardware": "gb200-nvl72",
}
CONFIG = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "cuda_graph_impl": "transformer_engine", "num_moe_experts": 8, "moe_ffn_hidden_size": 64, "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip


def proposed(modules):
    """The modules in graphs that are proposed for a job that recomputes some."""
    recompute = {"granularity": "selective", "modules": modules}
    job = Job.load(PLAN).replace(**{"performance.recompute": recompute})
    graphs = next(switch for switch in SWITCHES if switch.name == "CUDA graphs").change(job)
    return list(graphs["performance.cuda_graphs"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("modules", [["core_attn"], ["moe"]])
def test_megatron_accepts_what_is_proposed(modules):
    selective = {"recompute_granularity": "selective", "recompute_modules": modules}
    found = TransformerConfig(**CONFIG, **selective, cuda_graph_scope=proposed(modules))
    assert [scope.name for scope in found.cuda_graph_scope] == proposed(modules)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_megatron_refuses_what_is_not_proposed():
    """A router in a graph whose layer is recomputed, and any module of layers that are recomputed whole."""
    of_experts = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    with pytest.raises(AssertionError, match="moe_router"):
        TransformerConfig(**CONFIG, **of_experts, cuda_graph_scope=proposed(["core_attn"]))
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with pytest.raises(AssertionError, match="full recompute"):
        TransformerConfig(**CONFIG, **whole, cuda_graph_scope=["attn"])
