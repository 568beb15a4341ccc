"""torch's cross entropy over a split vocabulary, traced: how many fp32 copies of the logits live at once in its backward.

Eager, a function's arguments live until it returns; in a graph a tensor is freed after its last reader.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from physics_jobs import job
from torch.distributed.tensor.parallel import loss
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories

TOKENS, VOCAB = 64, 512
HEADS = {"n_q_heads": 2, "n_kv_heads": 2}
IN_PLACE = {torch.ops.aten.index_put_.default}


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield dist.init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def copies(graph: torch.fx.Graph) -> int:
    """The most tensors of the size of the logits that live at once; those that a node changes in place are its output."""
    nodes = list(graph.nodes)
    owner = {node: node for node in nodes}
    for node in nodes:
        if node.target in IN_PLACE:
            owner[node] = owner[node.args[0]]
    last = {owner[read]: at for at, node in enumerate(nodes) for read in node.all_input_nodes}
    live: set[torch.fx.Node] = set()
    most = 0
    for at, node in enumerate(nodes):
        made = node.meta.get("val")
        if owner[node] is node and isinstance(made, torch.Tensor) and made.numel() == TOKENS * VOCAB:
            live.add(node)
        most = max(most, len(live))
        live = {one for one in live if last.get(one, len(nodes)) > at}
    return most


def test_a_graph_frees_the_log_probabilities_before_the_sum(mesh):
    """Eager: log-probabilities, gradient, exponentials and the sum of these two; traced without the log-probabilities."""
    x, target = torch.randn(TOKENS, VOCAB), torch.randint(0, VOCAB, (TOKENS,))

    def backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shape = torch.Size([TOKENS, 2 * VOCAB])
        return loss._nll_loss_and_log_softmax_backward(grad, x, target, None, 1, -100, weight, shape, 1, mesh, 0)

    given = (torch.ones(()), x, target, torch.tensor(float(TOKENS)))
    assert copies(make_fx(backward, tracing_mode="fake")(*given).graph) == 3
    with LiveBytes(given) as live:
        backward(*given)
    assert live.peak.total // (4 * TOKENS * VOCAB) == 4  # the log-probabilities, an argument, included


@pytest.mark.parametrize(("impl", "count"), [("composite", 4), ("traced", 3)])
def test_copies_that_the_walk_counts(impl, count):
    """Of the loss in backward, over half of 1,024 words, beside smaller tensors of the head."""
    assembly = Assembly(job("fsdp2", model=HEADS, tp=2, seqlen=4096, performance={"loss_impl": impl}))
    head = PartMemories(assembly).head
    assert head.backward.op == "loss.log_softmax"
    assert head.backward.bytes // (4 * 4096 * 512) == count
