"""The whole order of each stage under ZB-V and DualPipeV, worked out by hand from the steps of torch's generators."""

from __future__ import annotations

import pytest

from steptime.schedule import order


def orders(schedule: str, microbatches: int, pp: int = 2, vpp: int = 2) -> list[str]:
    """The actions of every stage of a pipeline: kind, micro-batch, and a prime for the second chunk."""
    found = order(schedule, pp, vpp, microbatches)
    return [" ".join(f"{a.kind}{a.microbatch}{chr(39) * a.chunk}" for a in stage) for stage in found]


@pytest.mark.parametrize(
    ("microbatches", "first", "second"),
    [
        (
            3,
            "F0 F1 F2 F0' I0' W0' F1' I1' W1' I0 W0 F2' I2' W2' I1 W1 I2 W2",
            "F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' I1 I2' I2 W1 W2' W2",
        ),
        # the order of 2 pp - 1 = 3, without the third micro-batch
        (2, "F0 F1 F0' I0' W0' F1' I1' W1' I0 W0 I1 W1", "F0 F0' F1 F1' I0' W0' I0 W0 I1' W1' I1 W1"),
    ],
)
def test_zb_v(microbatches, first, second):
    """schedules.py, ScheduleZBVZeroBubble, of n = pp - rank: warm-up 2 n - 1 F, then rank times F' F, then n times F' I' W'; the
    steady state F I W F' I' W' until all F and F' have run; cool-down rank times I I', then n times I and the oldest W of the
    first chunk; the W that are left, of the second chunk first.

    Stage 0: F0 F1 F2; F0' I0' W0' F1' I1' W1'; no F is left: I0 W0 F2' I2' W2'; I1 W1 I2 W2. Stage 1: F0; F0' F1;
    F1' I0' W0'; F2 I0 W0 F2' I1' W1'; I1 I2'; I2, of W1 and W2 the older; W2' W2.
    """
    assert orders("zbv", microbatches) == [first, second]


@pytest.mark.parametrize(
    ("microbatches", "first", "second"),
    [
        (
            4,
            "F0 F1 F2 F0' I0' W0' F1' F3 B1' F2' B0 B2' F3' B1 B3' I2 W2 I3 W3",
            "F0 F0' F1 F1' F2 B0' F2' B0 F3 B1' F3' B1 B2' B2 I3' I3 W3' W3",
        ),
        (
            5,
            "F0 F1 F2 F0' I0' W0' F1' F3 B1' F2' B0 F4 B2' F3' B1 B3' F4' B2 B4' I3 W3 I4 W4",
            "F0 F0' F1 F1' F2 B0' F2' B0 F3 B1' F3' B1 F4 B2' F4' B2 B3' B3 I4' I4 W4' W4",
        ),
    ],
)
def test_dualpipe_v(microbatches, first, second):
    """schedules.py, ScheduleDualPipeV, of n = pp - 1 - rank: 2 n F; rank + 1 times F F'; n times I' W F'; m - 2 pp + rank + 1
    times the pairs F B' and F' B; n times B' and the pair F' B; rank + 1 times B' B, of which from the (rank + 1) // 2-th on,
    there from B' on odd ranks and from B on even ones, gradients of inputs alone; n times W I; rank + 1 times W.

    Of four micro-batches stage 0, n = 1: F0 F1; F2 F0'; I0' W0' F1'; once F3 B1' F2' B0; B2' F3' B1; B3' I2; W2 I3; W3. Stage 1,
    n = 0: F0 F0' F1 F1'; twice, F2 B0' F2' B0 and F3 B1' F3' B1; B2' B2, then I3' I3; W3' W3.
    """
    assert orders("dualpipev", microbatches) == [first, second]


def test_dualpipe_v_of_three_stages():
    """By the same steps, six micro-batches.

    Stage 0, n = 2: F0 to F3; F4 F0'; I0' W0' F1' I1' W1' F2'; once F5 B2' F3' B0; B3' F4' B1 B4' F5' B2; B5' I3; W3 I4 W4 I5; W5.
    Stage 1, n = 1: F0 F1; F2 F0' F3 F1'; I0' W0' F2'; twice, to F5 B2' F4' B1; B3' F5' B2; B4' B3 I5' I4, split from the second
    B' on; the oldest W, 5', then I5; W4 W5.
    Stage 2, n = 0: three F F'; three times, to F5 B2' F5' B2; B3' B3 B4' I4 I5' I5, split from the second B on; W4 W5' W5.
    """
    assert orders("dualpipev", 6, pp=3) == [
        "F0 F1 F2 F3 F4 F0' I0' W0' F1' I1' W1' F2' F5 B2' F3' B0 B3' F4' B1 B4' F5' B2 B5' I3 W3 I4 W4 I5 W5",
        "F0 F1 F2 F0' F3 F1' I0' W0' F2' F4 B1' F3' B0 F5 B2' F4' B1 B3' F5' B2 B4' B3 I5' I4 W5' I5 W4 W5",
        "F0 F0' F1 F1' F2 F2' F3 B0' F3' B0 F4 B1' F4' B1 F5 B2' F5' B2 B3' B3 B4' I4 I5' I5 W4 W5' W5",
    ]


def test_zero_bubble_of_one_chunk():
    """ZB-H1: stage r runs the weights' gradients r micro-batches after the inputs', and pp - 1 - r forwards ahead."""
    assert orders("zero_bubble", 3, vpp=1) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
