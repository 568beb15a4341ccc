"""Nodes of a traced block: torch's make_fx of forward and backward, on a CPU, against the count from the ops of a layer.

The block is Llama's as torchtitan writes it (torchtitan/models/common: attention.py, feed_forward.py, rope.py), its weights cast
from fp32 as SimpleFSDP does. LayerNorm stands for RMSNorm, which is one kernel on CUDA only: it has one output more, the mean.
"""

from __future__ import annotations

import pytest
import torch
from physics_jobs import job
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from steptime.cost.nodes import backward_nodes, forward_nodes
from steptime.job.assembly import Assembly

BATCH, SEQUENCE, HIDDEN, HEADS, INNER = 2, 16, 64, 4, 128
HEAD = HIDDEN // HEADS
VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.slice.Tensor}
TURN = torch.ops.aten.t.default
BF16 = torch.bfloat16


def without_effect(node: torch.fx.Node) -> bool:
    """Whether GraphTrainer's passes remove a node (torchtitan/experiments/graph_trainer/remove_noop_passes.py)."""
    if node.target is torch.ops.aten.detach.default:
        return True
    before = node.args[0]
    if not isinstance(before, torch.fx.Node):
        return False
    if node.target in VIEWS:
        return bool(before.meta["val"].shape == node.meta["val"].shape)
    return node.target is TURN and before.target is TURN


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


def block(x: torch.Tensor, table: torch.Tensor, at: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    first, second, q, k, v, out, gate, up, down = [weight.to(BF16) for weight in weights]
    y = functional.layer_norm(x, (HIDDEN,), first)
    heads = [functional.linear(y, weight).view(BATCH, SEQUENCE, -1, HEAD) for weight in (q, k, v)]
    turned = table[at.squeeze(0)].view(1, SEQUENCE, 1, HEAD // 2)
    queries, keys, values = (one.transpose(1, 2) for one in (*(rotated(one, turned) for one in heads[:2]), heads[2]))
    mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)
    x = x + functional.linear(mixed.reshape(BATCH, SEQUENCE, -1), out)
    y = functional.layer_norm(x, (HIDDEN,), second)
    return x + functional.linear(functional.silu(functional.linear(y, gate)) * functional.linear(y, up), down)


def traced() -> list[torch.fx.Node]:
    """The nodes of a block's forward and backward."""
    shapes = [(HIDDEN,)] * 2 + [(HIDDEN, HIDDEN)] * 4 + [(INNER, HIDDEN)] * 2 + [(HIDDEN, INNER)]
    weights = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    x = torch.zeros(BATCH, SEQUENCE, HIDDEN, dtype=BF16, requires_grad=True)
    table, at = torch.zeros(SEQUENCE, HEAD // 2, dtype=torch.complex64), torch.arange(SEQUENCE).view(1, -1)

    def step(grad: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(block(x, *rest), [x, *rest[2:]], grad)

    graph = make_fx(step, tracing_mode="fake")(torch.zeros_like(x), x, table, at, *weights).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def test_the_nodes_of_a_llama_block_are_those_of_its_ops():
    """Working nodes: 7 linears of 5 + 7, two norms of 4 + 4, attention of 7 + 8, 43 of the rotary embeddings, silu and product of
    2 + 3, two residuals, 5 sums of gradients: 170. The count of embeddings is a mean per kernel, so 3 % are allowed.
    """
    nodes = traced()
    working = sum(not without_effect(node) for node in nodes) - 2  # the mean of each LayerNorm
    heads = {"n_layers": 1, "n_q_heads": HEADS, "n_kv_heads": HEADS}
    of = Assembly(job("torchtitan-ddp@2026-05", model=heads, performance={"step_graph": "traced"}))
    timing, part = of.job.software.timing.replace(node_s=1.0), of.kinds[0]
    counted = forward_nodes(part.ops, timing, range(len(part.ops)), 1, sharded=False).working
    counted += backward_nodes(part.ops, timing, 1, sharded=False).working
    assert counted == pytest.approx(170.0)
    assert working == pytest.approx(counted, rel=0.03)
