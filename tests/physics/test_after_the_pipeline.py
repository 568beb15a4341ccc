"""What follows a step's last backward: the optimizer, the norms' gradients, the wait for the slowest replica."""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.result import estimate

PARAMS = 590_464

# --- the optimizer, on a device of 1 B/s ---


@pytest.mark.parametrize(
    ("layout", "seconds"),
    [
        # Adam reads the fp32 gradient, reads and writes master and both moments, writes bf16: 4 + 8 + 16 + 2 = 30; clipping reads
        # the gradient twice and writes it: 12; the gradients of all parameters are zeroed: 4
        ({"zero_level": 0}, 590_464 * 46),
        # a rank updates half of the parameters, and zeroes the gradients of all
        ({"zero_level": 1}, 295_232 * 42 + 590_464 * 4),
        # it holds half of the gradients
        ({"zero_level": 2}, 295_232 * 46),
        # two copies of the shards: 4 ranks share a copy's states in halves
        ({"zero_level": 1, "dp": 4, "replicas": 2}, 295_232 * 42 + 590_464 * 4),
        # context-parallel ranks share them too
        ({"zero_level": 1, "cp": 2}, 147_616 * 42 + 590_464 * 4),
    ],
)
def test_zero_1_shares_the_update_and_not_the_zeroing(layout, seconds):
    """DistributedDataParallel.zero_grad_buffer clears the whole buffer; ZeRO-1 shards only the optimizer's states."""
    found = estimate(job(on=machine(memory=1.0), **({"dp": 2} | layout))).time.parts_s
    assert found["optimizer"] == pytest.approx(seconds)


def test_torch_drops_its_gradients_and_zeroes_nothing():
    """Foreach AdamW: 20 accesses of 2 bytes; clipping 3 of 2 bytes: 46 bytes a parameter."""
    found = estimate(job("torch", on=machine(memory=1.0))).time.parts_s
    assert found["optimizer"] == pytest.approx(PARAMS * 46)


def test_the_optimizer_of_a_pipeline_is_the_fullest_stages():
    """Three layers and the head, 3 * 164,096 + 131,200 = 623,488, against one and the embedding. 46 bytes each."""
    layout = {"pp": 2, "layers_per_stage": [1, 3], "model": {"n_layers": 4}, "zero_level": 0}
    found = estimate(job(on=machine(memory=1.0), **layout)).time.parts_s
    assert found["optimizer"] == pytest.approx(623_488 * 46)


# --- gradients of norms under sequence parallelism ---


def norm_gradients(software="megatron-core", **said):
    """The table's row of them: (calls a step, bytes of one)."""
    layout = {"model": {"n_q_heads": 2} | said.pop("model", {}), "tp": 2} | said
    (row,) = [r for r in estimate(job(software, **layout)).collectives if r.name == "norm gradients"]
    assert (row.kind, row.axis, row.ranks) == ("all_reduce", "tp", 2)
    return row.count_per_step, row.bytes


@pytest.mark.parametrize(
    ("layout", "elements"),
    [
        # two norms of 128 in each of two layers, and the final norm
        ({}, 2 * 256 + 128),
        # LayerNorms with biases have 512 a layer and 256 at the end; biases behind the reduction are whole too: 2 * 128
        ({"model": {"norm": "layernorm", "bias": True}}, 2 * 768 + 256),
        # the busier stage is the last, which has one layer and the head
        ({"pp": 2}, 256 + 128),
        # the first, which has three layers and no head
        ({"pp": 2, "layers_per_stage": [3, 1], "model": {"n_layers": 4, "vocab_sz": 128}}, 3 * 256),
        # tokens of several micro-batches are summed before
        ({"microbatches": 4}, 2 * 256 + 128),
    ],
)
def test_megatron_reduces_all_of_a_stage_at_once(layout, elements):
    """megatron/core/distributed/finalize_model_grads.py flattens the fp32 gradients of what tp does not split: one all-reduce."""
    assert norm_gradients(**layout) == (1, 4 * elements)


def test_fsdp_reduces_each_norm_of_every_micro_batch():
    """Five norms of 128 in bf16, three micro-batches: 15 calls of 256 bytes (_fsdp_param.py, before each reduce-scatter)."""
    layout = {"dp": 2, "fsdp": {}, "microbatches": 3}
    assert norm_gradients("fsdp2", **layout) == (15, 256)


def test_reduced_norm_gradients_are_in_the_step():
    """640 elements of 4 bytes over two ranks on a link of 1 B/s: 2,560 s beside the layers' own collectives.

    A ring of two passes each half twice. Of a layer four collectives forward, of which two are repeated for wgrad in backward and
    four come back: ten of A = 2,048 B, half of it sent: 10,240 s a layer. Embedding: one forward, one backward: 2,048. Head: one
    forward, two backward: 3,072; three of the loss's sums: 8 tokens * 4 B, 32 each.
    """
    layout = {"model": {"n_q_heads": 2}, "tp": 2, "performance": {"overlap": {"tp": False}}}
    answer = estimate(job(on=machine(link=1.0), **layout))
    (row,) = [r for r in answer.collectives if r.name == "norm gradients"]
    assert row.exposed_s == pytest.approx(2_560, rel=1e-2)
    rest = 2 * 10 * 1_024 + 2 * 1_024 + 3 * 1_024 + 3 * 32
    assert answer.time.parts_s["tp_comm"] + answer.time.hidden_s["tp_comm"] == pytest.approx(2_560 + rest, rel=1e-2)


# --- stragglers ---


@pytest.mark.parametrize(
    ("layout", "node", "doublings"),
    [
        ({"dp": 8}, 1, 3),
        ({"dp": 8}, 4, 1),  # two nodes: the devices of one wait for nobody outside
        ({"dp": 8}, 8, 0),
        ({"dp": 2, "cp": 4}, 1, 3),  # ranks that share a sequence wait as replicas do
        ({"dp": 3, "tp": 2}, 2, 2),  # three nodes: the tree over them has two levels
        ({"dp": 2, "tp": 4}, 1, 1),  # eight nodes of two replicas
    ],
)
def test_replicas_wait_for_the_slowest(layout, node, doublings):
    """0.36 % of the pipeline's time for each doubling of the replicas, or of the nodes where these are fewer (1.8 % from 64 to
    2,048 H100: NVIDIA/dgxc-benchmarking v25.02). Reductions, gathers and the optimizer are outside it.
    """
    said = {"model": {"n_q_heads": 4}, "seqlen": 32, "performance": {"overlap": {"tp": False, "dp": False}}}
    answer = estimate(job(on=machine(flops=1.0, link=1.0, memory=1.0, node=node), **said, **layout))
    parts = answer.time.parts_s
    norms = sum(row.exposed_s for row in answer.collectives if row.name == "norm gradients")
    outside = ("stragglers", "dp_comm", "optimizer", "embedding_comm")
    pipeline_s = sum(seconds for name, seconds in parts.items() if name not in outside) - norms
    assert parts.get("stragglers", 0.0) == pytest.approx(0.0036 * doublings * pipeline_s, rel=SLIGHTLY)
    assert pipeline_s > 0


def test_replicas_wait_for_fsdps_communication_too():
    """Two nodes of one rank; compute is free, and half of each tensor is sent at 1 B/s. Forward gathers all 590,464 elements, 1 s
    each, backward the layers' 328,192 again, and fp32 gradients of all are reduced, 2 s each: 2,099,584 s, with one doubling.
    """
    said = {"dp": 2, "fsdp": {"reduce_dtype": "fp32"}, "performance": {"overlap": {"dp": False}}}
    timing = estimate(job("fsdp2", on=machine(link=1.0, node=1), **said)).timing
    assert timing.fsdp_exposed_s == pytest.approx(2_099_584, rel=SLIGHTLY)
    assert timing.straggler_s == pytest.approx(0.0036 * 2_099_584, rel=SLIGHTLY)


def test_only_sharded_states_are_gathered_after_an_update():
    """Without ZeRO every rank updates all of its parameters: gradients are all-reduced, half of 4 B an element there and back."""
    for level, kinds in (
        (0, {("gradients", "all_reduce")}),
        (1, {("gradients", "reduce_scatter"), ("parameters", "all_gather")}),
    ):
        answer = estimate(job(on=machine(link=1.0), dp=2, zero_level=level, performance={"overlap": {"dp": False}}))
        assert {(row.name, row.kind) for row in answer.collectives if row.axis == "dp"} == kinds
        assert answer.time.parts_s["dp_comm"] == pytest.approx(PARAMS * (4 if level == 0 else 2 + 1), rel=1e-3)


def test_tied_tables_and_norms_follow_the_last_backward():
    """Two stages that share a table, tp 2 with sequence parallelism: the all-reduces of the table's gradient and the norms'
    both lengthen the step, as do the host's 15 ms. Each rank of two sends as much as it reduces: half of the table, 65,536
    elements of 4 bytes; on the slower stage two norms and the final one, 384 elements of 4 bytes.
    """
    layout = {"pp": 2, "tp": 2, "sp": True, "model": {"n_q_heads": 2, "tie_embeddings": True}}
    timing = estimate(job(on=machine(link=1e6, outside=1e6, node=4), **layout)).timing
    assert timing.embedding_reduce.time_s == pytest.approx(65_536 * 4 / 1e6, rel=1e-2)
    assert timing.norm_reduce.time_s == pytest.approx(384 * 4 / 1e6, rel=0.1)
    reduced_s = timing.embedding_reduce.time_s + timing.norm_reduce.time_s
    assert timing.after_s == pytest.approx(reduced_s + 0.015, rel=SLIGHTLY)
