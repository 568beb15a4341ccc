"""What modules with experts refer to after their backward, and dummy gradients: bytes that a stage keeps beside activations."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.job.assembly import Assembly
from steptime.job.local_params import Pieces
from steptime.memory.kept_buffers import ByExperts, dummy_wgrad_bytes, stage_experts
from steptime.memory.kept_ops import kept_of_chunk
from steptime.memory.part_memories import PartMemories
from steptime.memory.states import bucket_size

MOE = {"n_experts": 8, "expert_inter_sz": 256, "experts_per_token": 2}
PIECES = {"overlap": {"ep": True}, "moe": {"overlap_keeps_pieces": True}}


def kept(performance: dict, microbatches: int = 2, **changes) -> ByExperts:
    """That of two layers with 8 tokens of 128 in bf16, 2,048 B; two experts for each: 16 rows, 4,096 B."""
    model = {"moe": MOE} | changes.pop("model", {})
    found = job(
        on=machine(host_bytes_per_s=1e9),
        model=model,
        performance=performance,
        dp=2,
        ep=2,
        microbatches=microbatches,
        **changes,
    )
    return stage_experts(Assembly(found), 0)


@pytest.mark.parametrize(
    ("performance", "graph"),
    [
        ({"overlap": {"ep": True}}, 2 * 2 * 2048),
        ({"overlap": {"ep": True}, "offload_modules": ["mlp_norm"]}, 2 * 2048),
        ({"overlap": {"ep": True}, "moe": {"dispatcher": "flex"}}, 0),
        ({"overlap": {"ep": False}}, 0),
    ],
)
def test_graphs_of_routers(performance, graph):
    """The all-to-all dispatcher's `self.probs` holds the router's graph, back to the input of its piece: that and its gradient
    in each of two layers, unless the input went to the host with the norm that reads it (token_dispatcher.py,
    dispatch_preprocess)."""
    assert kept(performance).graph == graph


def test_pieces_of_woven_layers():
    """Before core_v0.16 a layer keeps five of its input's size, 10,240 B, and the gradients of the rows before and after the
    dispatch and before the combine, 12,288 B: 22,528 B in each of two. A single micro-batch is not woven with another."""
    assert kept(PIECES).pieces == 2 * 22_528
    assert kept(PIECES, microbatches=1).pieces == 0
    assert kept({"overlap": {"ep": True}}).pieces == 0


def test_pieces_are_those_of_one_chunk():
    """Two chunks of one layer each: 22,528 B, as the chunks run in turn; the graphs are those of both."""
    found = kept(PIECES, pp=2, vpp=2, model={"n_layers": 4})
    assert (found.pieces, found.graph) == (22_528, 2 * 2 * 2048)


@pytest.mark.parametrize("way", ["none", "freed"])
def test_dummy_gradients_that_are_not_kept(way):
    """Also where gradients are added to the accumulated ones in the product: megatron-core's own kept ones are of 4 shapes, qkv
    49,152, the projection 16,384, gate and up 65,536, down 32,768, and of the head, 131,072 elements."""
    assert dummy_wgrad_bytes(Assembly(job(performance={"dummy_wgrads": way})), 0) == 0
    assert dummy_wgrad_bytes(Assembly(job()), 0) == 2 * (49_152 + 16_384 + 65_536 + 32_768 + 131_072)


def test_pieces_of_a_layer_whose_fullest_rank_has_more_rows():
    """1.25 times 4,096 B arrive and go back. Of each of two layers five inputs of its router, 2,048 B; 4,096 B before the
    dispatch, and 5,120 after it and before the combine.
    """
    found = kept(PIECES, model={"moe": MOE | {"imbalance_factor": 1.25}})
    assert found.pieces == 2 * (5 * 2_048 + 4_096 + 2 * 5_120)


@pytest.mark.parametrize(("mtp", "bytes_"), [(0, 0), (1, 2 * 131_072)])
def test_the_embeddings_gradient_of_a_deeper_prediction(mtp, bytes_):
    """Looked up there it is dense: 131,072 numbers in bf16, where fused accumulation leaves none of the head's to wait."""
    memories = PartMemories(Assembly(job(model={"tie_embeddings": True, "mtp": mtp})))
    assert memories.waiting_gradient == bytes_


def test_only_the_first_stage_keeps_token_ids():
    """Eight of 8 B each; the last stage has as many labels."""
    of = Assembly(job("torch", pp=2))
    kept = [{tensor.name: tensor.bytes for tensor in kept_of_chunk(PartMemories(of), chunk)} for (chunk,) in of.stages]
    assert [stage.get("embedding.ids", 0.0) for stage in kept] == [64, 0]
    assert [stage.get("loss.targets", 0.0) for stage in kept] == [0, 64]


def test_a_count_of_buckets():
    """Twice three tensors of 10 and one of 6: 72 elements in four buckets."""
    plan = job(dp=2, n_param_buckets=4)
    assert bucket_size(plan, [([Pieces(10.0, 3.0), Pieces(6.0, 1.0)], 2)]) == 18
