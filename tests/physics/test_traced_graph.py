"""A traced graph whose nodes the host runs one by one (`performance.step_graph`), on a host that takes 1 ms for each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from physics_jobs import job, machine

from steptime import estimate
from steptime.cost.nodes import IDLE_SHARE, Nodes, of_op
from steptime.cost.work import Work
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.ops import Comm, Gemm, Move, Param, Tensor
from steptime.timing.node_waits import exposed_past_host, without_waits

NODE = 0.001
FORWARD, BACKWARD = 7 * 5 + 2 * 4 + 21.5 + 7 + 2 + 2, 7 * 7 + 2 * 4 + 21.5 + 8 + 3 + 5
"""A Llama layer: 7 products, 2 norms, rotary embeddings (10 kernels of 2.15 nodes), attention, the activation's two kernels, two
residuals. Backward adds gradients 5 times: the layer's input and the tensor between its halves are each read twice, the output of
the first norm by three products, of the second by two."""
IDLE = 7 * (1 + 3) + 2 * 2 + 2
"""Nodes without effect of the products, the norms and attention."""
WEIGHTS = 9


def on(node_s: float = NODE, **figures: Any) -> Machine:
    """A device that computes in no time unless said otherwise, and its host."""
    figures = {"flops": 1e30, "memory": 1e30, "kernels": {"host_kernel_s": 2.0}} | figures
    host = {"memory_bytes_per_s": 1e12, "node_s": node_s}
    return Machine(**machine(**figures).model_dump(exclude={"host"}), host=host)


def layer_s(software: str = "torch", of: Machine | None = None, graph: str = "simplified", **said: Any) -> float:
    """Launch gaps that a second layer adds to a step."""
    layout = {key: said.pop(key) for key in ("dp",) if key in said}
    performance = {"step_graph": graph} | said

    def gaps(layers: int) -> float:
        plan = job(software, on=of or on(), model={"n_layers": layers}, performance=performance, **layout)
        return estimate(plan).time.parts_s.get("launch", 0.0)

    return gaps(2) - gaps(1)


def test_a_device_waits_for_every_node():
    assert layer_s() == pytest.approx(NODE * (FORWARD + BACKWARD))


def test_nodes_without_effect_take_a_share_of_the_time():
    """31 of 77 us (pytorch/torchtitan@7a8e76d1 autoresearch/results.tsv)."""
    assert pytest.approx(31 / 77, abs=0.01) == IDLE_SHARE
    assert layer_s(graph="traced") == pytest.approx(NODE * (FORWARD + BACKWARD + 0.4 * IDLE))


def test_a_step_that_waits_for_its_graph_says_so():
    """Nodes of a graph are not launches of a model, and `performance.compile` is refused with one."""
    found = estimate(job("torch", on=on(), model={"n_layers": 2}, performance={"step_graph": "simplified"}))
    [line] = [line for line in found.assumptions if line.startswith("host-bound")]
    assert "waits for the nodes of a traced graph" in line
    assert line.endswith("; larger micro-batches or CUDA graphs shorten it")


def test_a_slower_device_does_not_wait():
    assert layer_s(of=on(flops=1.0)) == 0.0


def test_cuda_graphs_run_no_nodes():
    assert layer_s(cuda_graphs=True) == 0.0


def test_graphs_of_attention_leave_the_nodes_of_the_mlp():
    """Forward 3 products, a norm, two kernels of the activation, a residual; backward two sums of gradients and the rest."""
    left = 3 * 5 + 4 + 2 + 1 + 3 * 7 + 4 + 3 + 2
    assert layer_s(cuda_graphs=["attn"]) == pytest.approx(NODE * left)


def test_a_replay_runs_the_nodes_of_what_runs_again():
    """A whole layer but its last product, 5 nodes, and the residual behind it, in each of two layers (test_launch_gaps.py)."""
    performance = {"step_graph": "simplified", "activation_checkpointing_type": "full"}
    found = estimate(job("torch", on=on(), performance=performance))
    assert found.time.parts_s["recompute"] == pytest.approx(2 * NODE * (FORWARD - 5 - 1))


def test_without_a_time_per_node_launches_count():
    """24 kernels forward and 29 backward (test_launch_gaps.py), 2 s each."""
    assert layer_s(of=on(node_s=0.0)) == pytest.approx(2.0 * (24 + 29))


def test_a_sharded_weight_adds_its_gather_and_its_reduction():
    """All-gather, reduce-scatter and a wait for each: 4 nodes of each of 9 weights."""
    assert layer_s("fsdp2", dp=2) == pytest.approx(NODE * (FORWARD + BACKWARD + 4 * WEIGHTS))


@pytest.mark.parametrize("slow", [1e9, 3e6, 1e3])
def test_communication_passes_while_the_device_waits(slow):
    """The step takes the longer of the host's nodes and of what the network leaves exposed.

    At 1e9 B/s gathers and reductions of 590,464 weights take about 5 ms of a step of 0.5 s, at 3e6 B/s 0.7 s, at 1e3 B/s
    thousands of seconds.
    """
    steps = {}
    for link in (1e30, slow):
        for graph in ("simplified", "none"):
            plan = job("fsdp2", on=on(link=link, kernels={}), performance={"step_graph": graph}, dp=2)
            steps[link, graph] = estimate(plan).step_s
    longer = max(steps[1e30, "simplified"], steps[slow, "none"])
    assert steps[slow, "none"] > 0.001
    assert steps[slow, "simplified"] == pytest.approx(longer, rel=1e-3)


@pytest.mark.parametrize(("graph", "exposed", "left"), [("simplified", 60, 3), ("traced", 50, 0), ("none", 60, 60)])
def test_waits_of_a_step(graph, exposed, left):
    """Two layers wait 3 s in forward and 4 s in backward, five replays 1 s: 19 s, and 57 s of three micro-batches. What a layer's
    last work takes, after the micro-batches, is not beside them.
    """
    plan = job("fsdp2", on=on(), performance={"step_graph": graph}, dp=2, microbatches=3)
    layer = tuple(Work(host_s=seconds) for seconds in (3.0, 4.0, 100.0))
    parts: Any = SimpleNamespace(
        works=lambda _: [(2, "layer")], of={"layer": layer}, replays=lambda _: [(5, "layer", Work(host_s=1.0))]
    )
    assert exposed_past_host(Assembly(plan), parts, float(exposed)) == left


def test_a_work_without_waits_is_as_long_as_its_kernels():
    """Of 7 s of gaps the host takes 5: the kernels too small to be listed, 2 s, and the products, 11, remain."""
    assert without_waits(Work(gemm_s=11.0, launch_s=7.0, host_s=5.0)) == Work(gemm_s=11.0, launch_s=2.0, host_s=0.0)


def test_nodes_of_rows_that_are_routed():
    """Router, dispatch and combination of DeepSeek-V3's block over tp 2 and ep 2: 36 kernels, traced as 99 and 38 nodes.

    The counts come from one mean per kernel, so 4 % are allowed.
    """
    experts = {"n_experts": 4, "experts_per_token": 2, "expert_inter_sz": 64, "n_shared_experts": 1}
    of = Assembly(job("torchtitan", model={"n_q_heads": 2, "moe": experts}, tp=2, dp=2, ep=2))
    moves = [op for op in of.kinds[0].ops if isinstance(op, Move) and op.role in {"moe", "router"}]
    assert sum(op.kernels for op in moves) == 36
    forward, backward = zip(*(of_op(op, 2, sharded=False) for op in moves), strict=True)
    assert sum(one.working for one in forward) == pytest.approx(99, rel=0.04)
    assert sum(one.working for one in backward) == pytest.approx(38, rel=0.04)


@pytest.mark.parametrize(("tp", "sharded"), [(1, False), (2, False), (2, True)])
def test_nodes_that_tensor_parallelism_and_fsdp_add_to_a_weight(tp, sharded):
    """A product has 5 nodes forward and 7 backward, and 1 and 3 without effect, a norm 4 and 4, and 1 and 1.

    Split over ranks or repeated on them a weight has 3 views forward and 1 backward, and a norm's gradient is summed, 2 nodes.
    FSDP adds 2 each way, and a slice.
    """
    weight, out = Param("w", (8, 8)), Tensor("y", 8.0, 2.0)
    found = [
        of_op(of, tp, sharded=sharded)
        for of in (Gemm("p", ("x",), (out,), params=(weight,)), Move("n", ("x",), (out,), params=(weight,)))
    ]
    split, more = float(tp > 1), 2.0 * sharded
    views = 3.0 * split + sharded
    assert found == [
        (Nodes(5.0 + more, 1.0 + views), Nodes(7.0 + more, 3.0 + split)),
        (Nodes(4.0 + more, 1.0 + views), Nodes(4.0 + 2.0 * split + more, 1.0 + split)),
    ]


@pytest.mark.parametrize(
    ("kind", "nodes"), [("all_gather", 3), ("reduce_scatter", 4 + 8), ("all_reduce", 2), ("all_to_all", 2), (None, 0)]
)
def test_nodes_of_a_collective(kind, nodes):
    """Over 8 ranks: it and the wait for it; what was gathered is viewed; what is scattered is split, 8 pieces, and joined."""
    found = [of_op(Comm("c", ("x",), **said), 8, sharded=True) for said in ({"kind": kind}, {"backward": kind})]
    assert found == [(Nodes(nodes), Nodes()), (Nodes(), Nodes(nodes))]
