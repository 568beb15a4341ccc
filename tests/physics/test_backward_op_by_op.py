"""Bytes held while backward walks a few ops, and what replays bring back, worked out byte by byte.

x has 10 B, y 20, z 30, w 40, o 5 unless a test says more; an op saves its input.
"""

from __future__ import annotations

from plain_backward import AUTOGRAD

from steptime.memory.ledger import Peak
from steptime.memory.op_walk import Autograd, BackwardWalk
from steptime.model.ops import Gemm, Move, Op, Param, Tensor, tensor_bytes
from steptime.model.segments import Segment

Y, Z, W, OUT = Tensor("y", 20, 1.0), Tensor("z", 30, 1.0), Tensor("w", 40, 1.0), Tensor("o", 5, 1.0)


def walked(
    ops: list[Op], *segments: Segment, kept: str, x: float = 10, autograd: Autograd = AUTOGRAD
) -> tuple[list[float], Peak]:
    """Bytes held after each op's backward, the last op's first, and the peak, with the tensors `kept`."""
    walk = BackwardWalk(ops, tensor_bytes(ops, Tensor("x", x, 1.0)), [*segments], kept.split(), autograd)
    return [ledger.bytes for ledger in walk.steps(ops[-1].outputs[0].name)], walk.ledger.peak


A = Move("a", ("x",), (Y,), ("x",))
B = Move("b", ("y",), (Z,), ("y",))


def test_two_products_of_one_input():
    """x 100 B, u 2, v 3, o 1: 105 saved and do. m: du and dv, 111; o, u and v go: 105. g2: dx, 205; dv goes: 202. g1 makes a
    second dx, which is added to the first: 302.
    """
    u, v, o = Tensor("u", 2, 1.0), Tensor("v", 3, 1.0), Tensor("o", 1, 1.0)
    one, two = (Gemm(name, ("x",), (out,), ("x",), m=1, n=1, k=1) for name, out in (("g1", u), ("g2", v)))
    ops = [one, two, Move("m", ("u", "v"), (o,), ("u", "v"))]
    assert walked(ops, kept="x u v", x=100) == ([105.0, 202.0, 100.0], Peak(302.0, "g1"))


def test_a_gradient_that_other_ranks_write():
    """y's gradient lies in a buffer that other ranks write, outside the allocator. Saved 30 and do 5: b adds nothing, 35."""
    outside = Tensor("y", 20, 1.0, outside="gradient")
    ops = [Move("a", ("x",), (outside,), ("x",)), Move("b", ("y",), (OUT,), ("y",))]
    assert walked(ops, kept="x y") == ([10.0, 10.0], Peak(35.0, "b"))


def test_an_experts_gradient_is_that_of_its_device():
    """8 elements of 4 experts on 4 devices: 2 here, 2 B each. Saved 10, dy 20, dx 10 and the gradient 4."""
    weight = Param("w", (8,), group="expert", n_experts=4)
    ops: list[Op] = [Move("a", ("x",), (Y,), ("x",), params=(weight,))]
    four = AUTOGRAD._replace(tp=1, experts=4, weight_grad_itemsize=2.0)
    assert walked(ops, kept="x", autograd=four) == ([10.0], Peak(44.0, "a"))


def test_a_replays_input_stays_until_the_backward_of_its_first_op():
    """b runs again for c, which reads z; what b reads stays until b's own backward (megatron/core/tensor_parallel/random.py,
    CheckpointWithoutOutputFunction.backward). Saved 30, do 5, z again 30, dz 30: 95. o and z go: 60, y still there. b: dy 20,
    dz and y go: 30.
    """
    ops = [A, Move("b", ("y",), (Z,)), Move("c", ("z",), (OUT,), ("z",))]
    again = Segment(1, 1, 2, ("y",), frozenset({"z"}))
    assert walked(ops, again, kept="x y") == ([60.0, 30.0, 10.0], Peak(95.0, "c"))


def test_a_replays_input_that_a_later_op_saves_stays_as_long():
    """c reads y too. Saved 30, do 5, z again 30, dz 30, dy 20: 115. o and z go: 80, y still there. b: dz and y go: 30."""
    ops = [A, Move("b", ("y",), (Z,)), Move("c", ("z", "y"), (OUT,), ("z", "y"))]
    again = Segment(1, 1, 2, ("y",), frozenset({"z"}))
    assert walked(ops, again, kept="x y") == ([80.0, 30.0, 10.0], Peak(115.0, "c"))


def test_a_gradient_passed_on_twice():
    """o = x + y, where y is x seen otherwise: do, 10 B, is the gradient of both, so that c adds it to itself in a new buffer, 20
    (input_buffer.cpp, accumulate: a shared buffer is not written). Then do goes.
    """
    y, o = Tensor("y", 10, 1.0), Tensor("o", 10, 1.0)
    ops = [Move("c", ("x",), (y,), same_grad=True), Move("r", ("x", "y"), (o,), same_grad=True)]
    assert walked(ops, kept="") == ([10.0, 10.0], Peak(20.0, "c"))


def test_replays_that_stop_early():
    """b and c run again for c's backward, which reads z but not w. Saved 30 and dw 40: 70; z again: 100. Without stopping early w
    is there once more: 140, else the most is c's backward with dz: 130 (torch/utils/checkpoint.py, _StopRecomputationError).
    """
    ops = [A, B, Move("c", ("z",), (W,), ("z",))]
    again = Segment(1, 2, 2, ("y",), frozenset({"z", "w"}))
    peaks = [
        walked(ops, again, kept="x y", autograd=AUTOGRAD._replace(stops_early=early))[1] for early in (True, False)
    ]
    assert peaks == [Peak(130.0, "c"), Peak(140.0, "c")]


def test_a_kept_output_that_backward_reads_nowhere():
    """z stays from forward on, though no backward reads it, and goes when b would run again. Saved 60, do 5, dz 30: 95; o goes:
    90. z goes: 60; dy 20, dz and y go: 30.
    """
    ops = [A, B, Move("c", ("z",), (OUT,))]
    kept = Segment(1, 1, 1, ("y",), frozenset(), frozenset({1}), ("z",))
    assert walked(ops, kept, kept="x y z") == ([90.0, 30.0, 10.0], Peak(95.0, "c"))
