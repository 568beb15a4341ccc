"""A backward in two halves, tensor by tensor: what the gradients of the inputs leave for those of the weights.

Source: torch 2.13 distributed/pipelining/_backward.py, stage_backward_input and stage_backward_weight.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job
from plain_backward import AUTOGRAD

from steptime.job.assembly import Assembly
from steptime.memory.ledger import NO_BYTES, PartMemory, Peak
from steptime.memory.op_walk import quantized_gradients, walk_part
from steptime.memory.part_memories import PartMemories, weight_grad_itemsize
from steptime.memory.split_backward import SplitMemory, chunk_split, walk_split
from steptime.memory.stages import PeakMoment, before_gradients, moment_op, split_bytes
from steptime.model.ops import Gemm, Move, Param, Tensor
from steptime.software.precision import RECIPES

X = Tensor("x", 10, 1.0)
OPS = [
    Move("a", ("x",), (Tensor("y", 20, 1.0),), ("x",), params=(Param("v", (7,)),)),
    Move("b", ("y",), (Tensor("z", 30, 1.0),), ("y",)),
    Move("c", ("z",), (Tensor("o", 5, 1.0),), ("z",), params=(Param("w", (3,)),)),
]


def test_outputs_gradients_of_ops_with_parameters_stay():
    """Saved x, y and z: 60 B, all of which stays. The first half: do 5 and dz 30 (95 B), then dy 20 while dz is there (115 B),
    then dx 10 once dz is freed (95 B). dx is sent: do and dy are left beside what is saved, 85 B. The largest gradient of
    weights has 7 elements of 2 B.
    """
    assert walk_split(OPS, X, "o", AUTOGRAD._replace(weight_grad_itemsize=2.0)) == SplitMemory(
        85.0, Peak(115.0, "b"), 14.0
    )


def test_the_first_half_makes_no_gradient_of_weights():
    """The same where b has a parameter too: dz stays, so that dx makes 60 + 5 + 30 + 20 + 10 B at a. 115 B stay."""
    ops = [OPS[0], replace(OPS[1], params=(Param("u", (4,)),)), OPS[2]]
    assert walk_split(ops, X, "o", AUTOGRAD._replace(weight_grad_itemsize=2.0)) == SplitMemory(
        115.0, Peak(125.0, "a"), 14.0
    )


def test_a_gradient_that_a_residual_shares_stays_with_both():
    """o = x + z, 10 B each: do is the gradient of both, and stays for c's weight. Saved x and y, 30, do 10; c: dy 20, 60. a adds
    its own dx 10 to x's, which is do, into a new buffer 10: 80. dy goes, dx is sent: do is left beside what is saved.
    """
    z, o = Tensor("z", 10, 1.0), Tensor("o", 10, 1.0)
    ops = [
        Move("a", ("x",), (Tensor("y", 20, 1.0),), ("x",)),
        Move("c", ("y",), (z,), ("y",), params=(Param("w", (3,)),)),
        Move("r", ("x", "z"), (o,), same_grad=True),
    ]
    assert walk_split(ops, X, "o", AUTOGRAD._replace(weight_grad_itemsize=2.0)) == SplitMemory(
        40.0, Peak(80.0, "a"), 6.0
    )


def test_a_part_without_weights_has_no_second_half():
    """b alone keeps y, 20 B; dz has 30 and dy 20."""
    found = walk_split([OPS[1]], Tensor("y", 20, 1.0), "z", AUTOGRAD._replace(weight_grad_itemsize=2.0))
    assert (found.inputs.bytes, found.weights) == (20 + 30 + 20, 0.0)


@pytest.fixture
def memories() -> PartMemories:
    """Of two stages of two layers each; halves of the embedding keep 1 B, of a layer 10 B, of the head 100 B."""
    assembly = Assembly(job("torch", model={"n_layers": 4}, pp=2, microbatches=4, schedule="zero_bubble"))
    found = PartMemories(assembly)
    (layer,) = assembly.kinds
    sizes = ((assembly.embedding, 1.0), (layer, 10.0), (assembly.head, 100.0))
    found._split = {part: SplitMemory(kept, Peak(kept + 5_000.0, ""), 2.0 * kept) for part, kept in sizes}
    return found


def test_halves_of_a_stage(memories):
    """1 + 2 * 10, and 2 * 10 + 100."""
    assert [memories.split(chunk).kept for (chunk,) in memories.assembly.stages] == [21.0, 120.0]


def test_first_halves_are_counted_beyond_what_is_saved(memories):
    """Their peak less the 400 B, or 500 B, that the stage saves for the micro-batch."""
    first, last = (memories.split(chunk).inputs.bytes for (chunk,) in memories.assembly.stages)
    walked = [[PartMemory(saved, NO_BYTES, NO_BYTES)] for saved in (400.0, 500.0)]
    found = split_bytes(memories, walked)
    assert found.kept == [[21.0], [120.0]]
    assert found.input_extra == [[first - 400.0], [last - 500.0]]
    assert found.weight_extra == [[20.0], [200.0]]


@pytest.mark.parametrize(
    ("microbatches", "later"), [(1, None), (2, PeakMoment(5.0, 1e12, "backward of a later micro-batch"))]
)
def test_the_backward_after_the_first_finds_all_gradients(microbatches, later):
    """GPipe's two stages: the second of two backwards has 1e12 B at most, beside the other micro-batch's 5 B. A single one has no
    second.
    """
    assembly = Assembly(job("torch", pp=2, microbatches=microbatches, schedule="gpipe"))
    found = before_gradients(assembly, 0, [5.0], [1e12])
    assert found is not None
    assert found == later if later else found.transient_bytes < 1e9


def test_what_runs_before_lies_beneath():
    """Two layers save 10 B each and keep 3 B: the head's first half of 50 B runs beside both, 20 + 50; its peak decides."""
    layer, head = (PartMemory(saved, NO_BYTES, NO_BYTES) for saved in (10.0, 4.0))
    split = [SplitMemory(3.0, Peak(15.0, "layer"), 7.0), SplitMemory(3.0, Peak(50.0, "head"), 2.0)]
    found = chunk_split(
        [(0, layer, SplitMemory(0.0, Peak(1e6, "none"), 1e6)), (2, layer, split[0]), (1, head, split[1])]
    )
    assert found == SplitMemory(9.0, Peak(70.0, "head"), 7.0)


def test_layers_that_keep_less_than_they_save():
    """Three of 10 B saved and 3 B kept: the last in depth runs first, beside two that hold all they saved: 20 + 15."""
    layer = PartMemory(10.0, NO_BYTES, NO_BYTES)
    assert chunk_split([(3, layer, SplitMemory(3.0, Peak(15.0, "layer"), 7.0))]).inputs == Peak(35.0, "layer")


def test_what_runs_at_a_stages_worst_moment():
    """Gradients of weights have no op of their own; the first half counts as the backward that it is."""
    memory = PartMemory(0.0, Peak(1.0, "a"), Peak(2.0, "b"))
    found = [moment_op(memory, kind) for kind in ("F", "B", "I", "W")]
    assert found == ["forward of a", "backward of b", "backward of b", "gradients of the weights"]


def test_what_a_product_unpacks_is_there_while_it_runs():
    """Its weight in the compute dtype, 1,000 B, in both passes; x has 10 B, which are saved, y and its gradient 20 B each."""
    ops = [Gemm("a", ("x",), (Tensor("y", 20, 1.0),), ("x",), temp_bytes=1_000.0)]
    found = walk_part(ops, X, "y", frozenset(), AUTOGRAD)
    assert (found.saved, found.forward, found.backward) == (10, Peak(1_030.0, "a"), Peak(1_040.0, "a"))


def test_a_pooled_tensor_counts_unless_a_buffer_stores_it():
    """y of 20 B, which the next op saves, beside its gradient and that of z, 30 B. Megatron's permanent buffer, which counts them
    elsewhere, holds y and its gradient (megatron/core/utils.py, GlobalMemoryBuffer).
    """
    ops = [
        Move("a", ("x",), (Tensor("y", 20, 1.0, pooled=True),)),
        Move("b", ("y",), (Tensor("z", 30, 1.0),), ("y",)),
    ]
    alone, pooled = (walk_part(ops, X, "z", frozenset(), of) for of in (AUTOGRAD, AUTOGRAD._replace(pool=True)))
    assert (alone.saved, pooled.saved) == (20, 0)
    assert (alone.backward.bytes, pooled.backward.bytes) == (20 + 30 + 20, 30)


@pytest.mark.parametrize(
    ("software", "said", "microbatches", "itemsize"),
    [
        ("torch", {}, 1, 0.0),  # it becomes the gradient
        ("torch", {}, 2, 2.0),  # it is added to one
        ("torch", {"main_grad_dtype": "fp32"}, 1, 2.0),  # it is cast into one
        ("megatron-core", {"grad_accumulation_fusion": False}, 1, 2.0),  # the main gradient is in fp32, and persists
        ("megatron-core", {"grad_accumulation_fusion": False, "main_grad_dtype": "bf16"}, 1, 2.0),
        (
            "megatron-core",
            {"dummy_wgrads": "freed"},
            1,
            2.0,
        ),  # added by the product; an empty one of its size is returned
        ("megatron-core", {"dummy_wgrads": "none"}, 1, 0.0),
    ],
)
def test_a_weights_gradient_beside_the_accumulated_one(software, said, microbatches, itemsize):
    """bf16 where there is one (torch/csrc/autograd/functions/accumulate_grad.h; megatron/core/tensor_parallel/layers.py)."""
    assert weight_grad_itemsize(job(software, performance=said, microbatches=microbatches)) == itemsize


def test_quantized_gradients_of_a_product():
    """8 x 16 by 16 x 32 with MXFP8, 33/32 of a byte for an element, in both directions: the gradient of 8 x 32 twice, and the
    input by columns, 8 x 16, unless it was kept so.
    """
    op = Gemm("w", m=8, n=32, k=16, recipe=RECIPES["mxfp8"])
    assert quantized_gradients(op) == 33 / 32 * (2 * 256 + 128)
    assert quantized_gradients(replace(op, keeps_columns=True)) == 33 / 32 * 2 * 256
