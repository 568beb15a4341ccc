"""States of optimizers other than Adam against torch's own, tensor by tensor. Zero tolerance."""

from __future__ import annotations

import pytest
import torch
from torch_blocks import Kernels
from torch_jobs import Layout, job
from torch_ours import built

from steptime.answer.result import estimate
from steptime.model.model import Model

SEQLEN, VOCAB = 16, 101


def muon(module):
    """Muon for matrices, AdamW for embedding, head and the rest, as its users split them."""
    matrices = [p for p in module.parameters() if p.dim() == 2 and VOCAB not in p.shape]
    rest = [p for p in module.parameters() if p.dim() != 2 or VOCAB in p.shape]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]


OPTIMIZERS = {
    "sgd": lambda module: [torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)],
    "adafactor": lambda module: [torch.optim.Adafactor(module.parameters())],
    "muon": muon,
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [{}, {"glu": False, "bias": True, "norm": "layernorm"}], ids=["llama", "gpt"])
def test_states_after_a_step(kind, name, precision):
    """One momentum (sgd); a row and a column of mean squares of each matrix, a whole one of each vector (adafactor)."""
    model = Model(n_layers=2, hidden_sz=48, inter_sz=96, n_q_heads=4, vocab_sz=VOCAB, **kind)
    kernels = Kernels(precision=precision)
    module, tokens = built(model, kernels, SEQLEN), torch.zeros(1, SEQLEN, dtype=torch.long)
    optimizers = OPTIMIZERS[name](module)
    module(tokens, tokens).backward()
    for optimizer in optimizers:
        optimizer.step()
    held = [
        t
        for o in optimizers
        for state in o.state.values()
        for key, t in state.items()
        if torch.is_tensor(t) and key != "step"
    ]
    ours = estimate(job(model, kernels, SEQLEN, Layout()).replace(**{"performance.optimizer": name})).memory.stages[0]
    assert ours.optimizer_bytes == sum(t.nbytes for t in held)
