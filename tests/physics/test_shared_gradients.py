"""The gradient of a parameter that several ops use waits until the last of them has run, byte by byte.

A parameter of 7 elements, 2 B each. x has 10 B, y 20, z 30, the outputs 5 and 4; every op saves its input.
"""

from __future__ import annotations

import pytest
from physics_jobs import job
from plain_backward import AUTOGRAD

from steptime.job.assembly import Assembly
from steptime.memory.ledger import Peak
from steptime.memory.op_walk import BackwardWalk
from steptime.memory.part_memories import PartMemories
from steptime.model.ops import Move, Op, Param, Tensor, tensor_bytes

WITH_GRADIENTS = AUTOGRAD._replace(weight_grad_itemsize=2.0)
OWN, AGAIN = Param("w", (7,)), Param("w", (7,), shared=True)


def op(name: str, input_: str, output: Tensor, *params: Param) -> Op:
    return Move(name, (input_,), (output,), (input_,), params=params)


def walked(*ops: Op) -> tuple[list[float], Peak]:
    """Bytes held after each op's backward, the last op's first, and the peak."""
    sizes = tensor_bytes(list(ops), Tensor("x", 10, 1.0))
    walk = BackwardWalk(list(ops), sizes, [], [name for one in ops for name in one.saves], WITH_GRADIENTS)
    return [ledger.bytes for ledger in walk.steps(ops[-1].outputs[0].name)], walk.ledger.peak


FIRST = op("a", "x", Tensor("y", 20, 1.0), OWN)
SECOND = op("b", "y", Tensor("z", 30, 1.0))
THIRD = op("c", "z", Tensor("o", 5, 1.0), AGAIN)


def test_two_uses():
    """Saved 60, do 5. c: dz 30 and the gradient 14 (109), which waits; do and z go: 74. b: dy 20, dz and y go: 44. a: dx 10, its
    own 14; both gradients, dy and x go: 10.
    """
    assert walked(FIRST, SECOND, THIRD) == ([74.0, 44.0, 10.0], Peak(109.0, "c"))


def test_a_third_use_waits_with_the_first():
    """Saved 65, dp 4. d: do 5, 14 waits, dp and o go: 65 + 5 + 14 - 5 = 79. c adds its own to what waits: dz 30, 79 + 30 + 14 =
    123; do and z go: 74. Then as above.
    """
    fourth = op("d", "o", Tensor("p", 4, 1.0), AGAIN)
    assert walked(FIRST, SECOND, THIRD, fourth) == ([79.0, 74.0, 44.0, 10.0], Peak(123.0, "c"))


def test_a_single_use_waits_for_none():
    """Saved 60, do 5. c: dz 30; do and z go: 60. a: 10."""
    assert walked(FIRST, SECOND, op("c", "z", Tensor("o", 5, 1.0))) == ([60.0, 30.0, 10.0], Peak(95.0, "c"))


def test_a_sum_of_gradients_beside_a_shared_buffer():
    """x 10 B, y, z and o 20 each; o = z + y passes its gradient on to both. a and b save x and y, 30. r: do 20 serves z and y. b:
    its dy 20, do 20 and their sum 20 (input_buffer.cpp, accumulate: do is still z's), 90; then dz's buffer and y go: 30. a: dx.
    """
    y, z = Tensor("y", 20, 1.0), Tensor("z", 20, 1.0)
    residual = Move("r", ("z", "y"), (Tensor("o", 20, 1.0),), same_grad=True)
    assert walked(op("a", "x", y), op("b", "y", z), residual) == ([50.0, 30.0, 10.0], Peak(90.0, "b"))


def test_a_second_gradient_is_added_in_place():
    """o = z * y makes a gradient of each: with the 30 saved and do 90, then do goes. b's dy, 20, is added to the one there."""
    y, z = Tensor("y", 20, 1.0), Tensor("z", 20, 1.0)
    product = Move("m", ("z", "y"), (Tensor("o", 20, 1.0),))
    assert walked(op("a", "x", y), op("b", "y", z), product) == ([70.0, 30.0, 10.0], Peak(90.0, "m"))


def test_two_uses_of_another_parts_parameter():
    """Neither is the first of its name: as `test_two_uses`."""
    assert walked(op("a", "x", Tensor("y", 20, 1.0), AGAIN), SECOND, THIRD) == ([74.0, 44.0, 10.0], Peak(109.0, "c"))


def test_the_gradient_of_a_quantized_copy_is_in_bf16():
    """x 10 elements of 1 B; y is a copy of 20 in a byte each, whose gradient has two. Saved x and y, 30, and do 5. b: dy 40 (75),
    do and y go: 50. a: dx 10 (60), dy and x go.
    """
    y = Tensor("y", 20, 1.0, grad_itemsize=2.0)
    assert walked(op("a", "x", y), op("b", "y", Tensor("o", 5, 1.0))) == ([50.0, 10.0], Peak(75.0, "b"))


@pytest.mark.parametrize(("tied", "elements"), [(True, 128), (False, 1_024 * 128 + 128)])
def test_a_tied_heads_weight_has_its_gradient_with_the_embedding(tied, elements):
    """Of the head the final norm of 128 stays."""
    assembly = Assembly(job(model={"tie_embeddings": tied}))
    assert PartMemories(assembly).head.n_params == elements
