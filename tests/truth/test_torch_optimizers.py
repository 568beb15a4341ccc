"""States of optimizers other than Adam against torch's own, tensor by tensor. Zero tolerance."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from mcore_peak import Live
from torch_blocks import Kernels
from torch_fsdp import Fsdp, run, sharded, world
from torch_jobs import Layout, torch_job
from torch_ours import built

from steptime.answer.result import estimate
from steptime.answer.verdict import update_temporaries
from steptime.bench.runs.probes import Collectives
from steptime.job.assembly import Assembly
from steptime.memory.states import stage_states
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
    ours = estimate(
        torch_job(model, kernels, SEQLEN, Layout()).replace(**{"performance.optimizer": name})
    ).memory.stages[0]
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
    ours = torch_job(model, kernels, SEQLEN, Layout(dp=8, fsdp=Fsdp())).replace(**{"performance.optimizer": "muon"})
    answer, listed = estimate(ours), Counter()
    for row in answer.collectives:
        if row.name.startswith("Muon"):
            listed[row.kind, row.ranks, row.bytes] += row.count_per_step
    assert listed == expected
    assert answer.memory.stages[0].optimizer_bytes == held


@pytest.mark.parametrize(("how", "expected"), [("foreach", 1), ("for_loop", 2)])
def test_temporaries_of_an_update_by_operation(how, expected):
    """foreach: the roots of all second moments. for_loop: of the tensor it works on the root, and the root over its correction.

    One matrix of 20,480 elements and three of 4,096 in fp32: 32,768 * 4 bytes, or 2 * 20,480 * 4. Scalars are left out, and so is
    the quotient of the tensor before, which the loop's variable still holds: the first, as an embedding is, has none.
    """
    sizes = [(320, 64), *[(64, 64)] * 3]
    params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = torch.optim.AdamW(params, foreach=how == "foreach", fused=False)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    held = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    with Live([*params, *[p.grad for p in params], *held]) as live:
        optimizer.step()
    assert live.most // 1024 * 1024 == 4 * {"foreach": 32_768, "for_loop": 2 * 20_480}[how]
    model = Model(n_layers=2, hidden_sz=48, inter_sz=96, n_q_heads=4, vocab_sz=VOCAB)
    plan = torch_job(model, Kernels(precision="fp32"), SEQLEN, Layout()).replace(**{"performance.optimizer_impl": how})
    state = stage_states(Assembly(plan))[0]
    # all 2 * (4 * 48 * 48 + 3 * 48 * 96 + 2 * 48) + 2 * 101 * 48 + 48 parameters, or the largest: embedding or head
    of = {"foreach": 2 * (4 * 48**2 + 3 * 48 * 96 + 96) + 2 * VOCAB * 48 + 48, "for_loop": VOCAB * 48}[how]
    assert update_temporaries(plan, state) == 4 * expected * of
