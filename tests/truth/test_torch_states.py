"""Parameters, gradients and Adam's states against torch's own MemTracker. Zero tolerance."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch_blocks import Kernels
from torch_jobs import Layout, torch_job
from torch_ours import built

from steptime.answer.result import estimate
from steptime.model.blocks import n_params
from steptime.model.model import Model

SEQLEN = 16


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "kind", [{}, {"glu": False, "bias": True, "norm": "layernorm", "learned_positions": True}], ids=["llama", "gpt"]
)
def test_states(precision, kind, tied):
    """After a step: one gradient per parameter, two moments, all in the parameters' dtype."""
    model = Model(
        n_layers=2,
        hidden_sz=48,
        inter_sz=96,
        n_q_heads=4,
        vocab_sz=101,
        max_positions=SEQLEN,
        tie_embeddings=tied,
        **kind,
    )
    kernels = Kernels(precision=precision)
    module, tokens = built(model, kernels, SEQLEN), torch.zeros(1, SEQLEN, dtype=torch.long)
    optimizer = torch.optim.AdamW(module.parameters())
    tracker = MemTracker()
    tracker.track_external(module, optimizer)
    with tracker:
        module(tokens, tokens).backward()
        optimizer.step()
    (held,) = tracker.get_tracker_snapshot("current").values()
    by_kind = {getattr(kind, "value", kind): size for kind, size in held.items()}
    counters = 4 * len(list(module.parameters()))  # Adam's step counts: one fp32 scalar per parameter
    ours = estimate(torch_job(model, kernels, SEQLEN, Layout())).memory.stages[0]
    assert by_kind["Parameter"] == ours.params_bytes
    assert by_kind["Optstate"] - counters == ours.optimizer_bytes
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in module.parameters())
    assert by_kind["Gradient"] == gradients == n_params(model) * kernels.dtype.itemsize
