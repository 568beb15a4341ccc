"""FSDP2 under a fake process group: collectives, and which buffer lives when (FSDP2.md). Zero tolerance."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from live_bytes import LiveBytes, Moment
from torch_blocks import DTYPES, Kernels, Transformer
from torch_fsdp import Fsdp, padded, run, sharded, world
from torch_jobs import Layout, held, torch_job

from steptime.answer.result import estimate
from steptime.bench.runs.probes import Collectives
from steptime.model.model import Model

DP, SEQLEN, BATCH = 8, 32, 2
MODEL = Model(n_layers=3, hidden_sz=60, inter_sz=150, n_q_heads=4, n_kv_heads=2, head_dim=16, vocab_sz=251)
SPLIT = MODEL.model_copy(update={"hidden_sz": 64, "inter_sz": 160, "n_q_heads": 8, "n_kv_heads": 4, "vocab_sz": 240})


class Group(NamedTuple):
    """One FSDP group: elements padded and not."""

    padded: int
    elements: int
    last: int
    """Elements of its last parameter."""


def groups(model: Model, dp: int = DP) -> tuple[Group, Group]:
    """A block's group and the root's."""
    module = Transformer(model, Kernels(), SEQLEN)
    block = module.blocks[0]
    rest = torch.nn.ModuleList([module.tokens, module.norm, module.head])
    return tuple(
        Group(padded(m, dp), sum(p.numel() for p in m.parameters()), list(m.parameters())[-1].numel())
        for m in (block, rest)
    )


OPTIONS = {
    "default": (Fsdp(), Kernels(), 1),
    "no reshard": (Fsdp(reshard_blocks=False), Kernels(), 1),
    "resharded to 2": (Fsdp(reshard_blocks=2), Kernels(), 1),
    "resharded to 4": (Fsdp(reshard_blocks=4), Kernels(), 2),
    "root resharded": (Fsdp(reshard_root=True), Kernels(), 1),
    "bf16 reduction": (Fsdp(reduce="bf16"), Kernels(), 1),
    "bf16 parameters": (Fsdp(params="bf16", reduce="bf16"), Kernels(), 1),
    "fp32": (Fsdp(), Kernels(precision="fp32"), 1),
    "full recompute": (Fsdp(), Kernels(recompute="full"), 1),
    "core attention recompute": (Fsdp(), Kernels(recompute="selective"), 1),
    "4 micro-batches": (Fsdp(), Kernels(), 4),
    "4 micro-batches, no reshard": (Fsdp(reshard_blocks=False), Kernels(recompute="full"), 4),
}


def issued(model: Model, kernels: Kernels, layout: Layout) -> Counter[tuple[str, int, float]]:
    """What torch issues in a step: (kind, ranks, bytes of the full tensor)."""
    with world(layout.dp // layout.replicas, layout.tp, layout.replicas) as mesh:
        module = sharded(model, kernels, layout.fsdp, SEQLEN, mesh)
        with Collectives() as seen:
            run(module, BATCH, SEQLEN, layout.micro_batches, tp=layout.tp > 1, fsdp=layout.fsdp)
    return Counter({(c.kind, c.ranks, c.bytes): n for c, n in seen.calls.items()})


def stated(model: Model, kernels: Kernels, layout: Layout) -> Counter[tuple[str, int, float]]:
    """What the estimate's table says."""
    calls: Counter[tuple[str, int, float]] = Counter()
    for row in estimate(torch_job(model, kernels, SEQLEN, layout, BATCH)).collectives:
        calls[row.kind, row.ranks, row.bytes] += row.count_per_step
    return calls


def ranks_again(fsdp: Fsdp) -> int:
    """The ranks among which backward gathers the blocks."""
    return fsdp.reshard_blocks if type(fsdp.reshard_blocks) is int else DP


@pytest.mark.parametrize(("fsdp", "kernels", "micro_batches"), OPTIONS.values(), ids=OPTIONS)
def test_collectives_by_hand(fsdp, kernels, micro_batches):
    """Per micro-batch a block is gathered twice (once without resharding; the second time among the ranks that it was resharded
    to), the root once unless resharded, each reduced once.
    """
    block, root = groups(MODEL)
    param, reduce = kernels.dtype.itemsize, DTYPES[fsdp.reduce].itemsize
    expected: Counter[tuple[str, int, float]] = Counter()
    for group, count, again in (
        (block, MODEL.n_layers, fsdp.reshard_blocks is not False),
        (root, 1, bool(fsdp.reshard_root)),
    ):
        expected["all_gather", DP, group.padded * param] += count * micro_batches
        if again:
            expected["all_gather", ranks_again(fsdp), group.padded * param] += count * micro_batches
        expected["reduce_scatter", DP, group.padded * reduce] += count * micro_batches
    assert issued(MODEL, kernels, Layout(DP, 1, micro_batches, fsdp)) == expected


LAYOUTS = {
    "8 shards": Layout(8, fsdp=Fsdp()),
    "resharded to 2": Layout(8, micro_batches=2, fsdp=Fsdp(reshard_blocks=2)),
    "2 replicas of 8, resharded to 4": Layout(16, replicas=2, fsdp=Fsdp(reshard_blocks=4)),
    "no reshard, 3 micro-batches": Layout(8, micro_batches=3, fsdp=Fsdp(reshard_blocks=False)),
    "bf16 reduction": Layout(8, micro_batches=2, fsdp=Fsdp(reduce="bf16")),
    "2 replicas of 4 shards": Layout(8, replicas=2, fsdp=Fsdp()),
    "4 replicas of 2 shards, bf16": Layout(8, replicas=4, micro_batches=2, fsdp=Fsdp(reduce="bf16")),
    "4 shards, tp 2": Layout(4, tp=2, fsdp=Fsdp()),
    "columns": Layout(8, micro_batches=2, fsdp=Fsdp(shard_dim=1)),
    "columns, 4 shards, tp 2": Layout(4, tp=2, fsdp=Fsdp(shard_dim=1)),
    "2 shards, tp 4, 2 micro-batches": Layout(2, tp=4, micro_batches=2, fsdp=Fsdp(reshard_blocks=False)),
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_collectives(layout, recompute):
    """FSDP's, the replicas' all-reduces, tensor parallelism's, and those of the norms' partial gradients."""
    kernels = Kernels(recompute=recompute)
    assert issued(SPLIT, kernels, layout) == stated(SPLIT, kernels, layout)


class Buffers(NamedTuple):
    """FSDP's buffers at one moment [B]: the letters of FSDP2.md."""

    C: int
    A: int
    U: int
    G: int
    R: int


EVENTS = {
    "c10d._allgather_base_": "gather",
    "fsdp.split_with_sizes_copy": "copy out",
    "fsdp.chunk_cat": "copy in",
    "c10d._reduce_scatter_base_": "reduce",
}
ROLES = ("copy_in", "all_gather_output", "unsharded_param", "unsharded_grad", "reduce_input")


def measured(moments: list[Moment]) -> list[tuple[str, Buffers]]:
    """The buffers right after each of FSDP's own steps."""
    return [(EVENTS[m.op], Buffers(*(m.role(role) for role in ROLES))) for m in moments if m.op in EVENTS]


def table(fsdp: Fsdp, kernels: Kernels, layers: int) -> list[tuple[str, Buffers]]:
    """FSDP2.md as code: the buffers at each step of one micro-batch. The root has index -1, a block its depth."""
    block, root = groups(MODEL)
    p, r = kernels.dtype.itemsize, DTYPES[fsdp.reduce].itemsize
    cast = DTYPES[fsdp.params] != kernels.dtype
    A = {i: (root if i < 0 else block).padded * p for i in range(-1, layers)}
    U, C = A, {i: a // DP if cast else 0 for i, a in A.items()}
    again = A[0] // ranks_again(fsdp) if cast else 0  # C of a block in backward
    R = {i: a // p * r for i, a in A.items()}
    head = MODEL.vocab_sz * MODEL.hidden_sz * p + MODEL.hidden_sz * p  # the head's and the final norm's gradients
    G, leftover = block.elements * p, block.last * p
    keep = fsdp.reshard_blocks is False
    steps = [("gather", Buffers(C[-1], A[-1], 0, 0, 0)), ("copy out", Buffers(0, A[-1], U[-1], 0, 0))]
    for i in range(layers):
        others = U[-1] + (i * U[0] if keep else 0)
        steps.append(("gather", Buffers(C[i], A[i - 1] + A[i], others, 0, 0)))
        steps.append(("copy out", Buffers(0, A[i - 1] + A[i], others + U[i], 0, 0)))
    above = 0  # the reduce-scatter input of the block above
    if fsdp.reshard_root:
        steps += [("gather", Buffers(C[-1], A[-1], 0, 0, 0)), ("copy out", Buffers(0, A[-1], U[-1], 0, 0))]
    if not keep:
        steps.append(("gather", Buffers(again, A[0], U[-1], 0, 0)))  # the last block, fetched ahead
    for i in reversed(range(layers)):
        ahead = A[0] if not keep and i > 0 else 0
        if not keep:
            steps.append(("copy out", Buffers(0, A[0], U[-1] + U[0], head, above)))
            if ahead:
                steps.append(("gather", Buffers(again, A[0], U[-1] + U[0], head, above)))
        stay = U[-1] + (i * U[0] if keep else 0)
        steps.append(("copy in", Buffers(0, ahead, stay, head + G, R[0])))
        steps.append(("reduce", Buffers(0, ahead, stay, head + leftover, R[0])))
        above = R[0]
    whole = root.elements * p
    steps.append(("copy in", Buffers(0, 0, 0, whole, R[-1])))
    return [*steps, ("reduce", Buffers(0, 0, 0, root.last * p, R[-1]))]


ONE_MICRO_BATCH = [k for k, (_, _, micro) in OPTIONS.items() if micro == 1]


@pytest.mark.parametrize("option", ONE_MICRO_BATCH)
def test_buffers_live_as_the_table_says(option):
    fsdp, kernels, _ = OPTIONS[option]
    with world(DP) as mesh:
        module = sharded(MODEL, kernels, fsdp, SEQLEN, mesh)
        with LiveBytes(module.parameters(), log=True) as live:
            run(module, BATCH, SEQLEN)
    assert measured(live.moments) == table(fsdp, kernels, MODEL.n_layers)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_blocks_keep_a_share_between_forward_and_backward(ranks, params):
    """A copy of 1/ranks of the padded parameters in bf16, from each block's forward to its backward; the root keeps none."""
    block, _ = groups(MODEL)
    with world(DP) as mesh:
        module = sharded(MODEL, Kernels(), Fsdp(reshard_blocks=ranks, params=params), SEQLEN, mesh)

        def kept(part: torch.nn.Module) -> int:
            (group,) = part._get_fsdp_state()._fsdp_param_groups
            shards = [getattr(p, "_sharded_post_forward_param_data", None) for p in group.fsdp_params]
            return sum(t.nbytes for t in shards if t is not None)

        parts = [*module.blocks, module]
        tokens = torch.zeros(BATCH, SEQLEN, dtype=torch.long)
        loss = module(tokens, tokens)
        assert list(map(kept, parts)) == [*[block.padded * 2 // ranks] * MODEL.n_layers, 0]
        loss.backward()
        assert not any(map(kept, parts))


@pytest.mark.parametrize("seqlen", [8, 128])
@pytest.mark.parametrize("reshard", [None, False])
def test_reentrant_checkpoints(reshard, seqlen):
    """Two micro-batches: collectives, and the peak of a step."""
    kernels, layout = Kernels(recompute="full", reentrant=True), Layout(DP, micro_batches=2, fsdp=Fsdp(reshard))
    assert issued(SPLIT, kernels, layout) == stated(SPLIT, kernels, layout)
    torch_holds = held(SPLIT, kernels, seqlen, layout)
    assert estimate(torch_job(SPLIT, kernels, seqlen, layout)).memory.stages[0].allocated_bytes == torch_holds.peak
