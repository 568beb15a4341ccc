"""States of optimizers other than Adam against torch's own, tensor by tensor. Zero tolerance."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch_blocks import Kernels
from torch_fsdp import Fsdp, run, sharded, world
from torch_jobs import Layout, job
from torch_ours import built

from steptime.answer.result import estimate
from steptime.bench.runs.probes import Collectives
from steptime.model.model import Model
from steptime.timing.orthogonalize import calls

SEQLEN, VOCAB = 16, 101


def muon(module, vocab=VOCAB):
    """Muon for matrices, AdamW for embedding, head and the rest, as its users split them."""
    matrices = [p for p in module.parameters() if p.dim() == 2 and vocab not in p.shape]
    rest = [p for p in module.parameters() if p.dim() != 2 or vocab in p.shape]
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


def test_muon_under_fsdp2():
    """torch.optim.Muon on DTensors of 8 ranks: momenta are shards of 4 bytes an element, and every product is a collective.

    A matrix of more rows than columns all-reduces its Gram matrix and the square of it, bf16, in each of five iterations; any
    other gathers itself twice, and the Gram matrix once. All all-reduce a norm.
    """
    model = Model(n_layers=2, hidden_sz=64, inter_sz=96, n_q_heads=4, vocab_sz=104)
    kernels, expected = Kernels(precision="bf16"), Counter()
    with world(8) as mesh:
        module = sharded(model, kernels, Fsdp(), SEQLEN, mesh)
        run(module, 1, SEQLEN)
        optimizers = muon(module, 104)
        with Collectives() as seen:
            optimizers[0].step()
        optimizers[1].step()
        states = [
            value for o in optimizers for state in o.state.values() for key, value in state.items() if key != "step"
        ]
        held = sum(value.to_local().nbytes for value in states)
        for p in optimizers[0].state:
            for _, kind, size, times in calls(*p.shape):
                expected[kind, 8, size] += times
    assert Counter({(c.kind, c.ranks, c.bytes): n for c, n in seen.calls.items()}) == expected
    ours = job(model, kernels, SEQLEN, Layout(dp=8, fsdp=Fsdp())).replace(**{"performance.optimizer": "muon"})
    answer, listed = estimate(ours), Counter()
    for row in answer.collectives:
        if row.name.startswith("Muon"):
            listed[row.kind, row.ranks, row.bytes] += row.count_per_step
    assert listed == expected
    assert answer.memory.stages[0].optimizer_bytes == held
