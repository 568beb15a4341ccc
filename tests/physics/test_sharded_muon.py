"""torch.optim.Muon on matrices whose rows FSDP2 shards over four ranks, by hand: its collectives and its products.

torch/optim/_muon.py (2.13), _zeropower_via_newtonschulz: five iterations of A = X X^T, B = b A + c A A, X = a X + B X.
"""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.model.ops import Param
from steptime.timing.orthogonalize import MOMENTA, NORMS, PRODUCTS, calls, matrix_s
from steptime.timing.part_times import pricing

NORM = (NORMS, "all_reduce", 2.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (4, 3, [(PRODUCTS, "all_reduce", 18.0, 10.0)]),  # terms of A and of A A, 3 x 3 in bf16
        # X twice, 3 x 4, and A, 3 x 3
        (3, 4, [(MOMENTA, "all_gather", 24.0, 10.0), (PRODUCTS, "all_gather", 18.0, 5.0)]),
        (3, 3, [(MOMENTA, "all_gather", 18.0, 10.0), (PRODUCTS, "all_gather", 18.0, 5.0)]),  # not turned
    ],
)
def test_collectives(rows, columns, expected):
    """First the norm, one number."""
    assert calls(rows, columns) == [NORM, *expected]


@pytest.mark.parametrize(
    ("rows", "columns", "multiplied", "sent"),
    [
        # A of a rank's 33 rows, its square of 128, X of 33 columns; A is all-reduced, 3/4 of it sent twice
        (130, 128, 2 * 128 * 128 * 33 + 128**3, 10 * 2 * 128 * 128 * 3 / 2),
        # a rank's 16 rows of A, of A A, of X; 3/4 of X and A come from others
        (64, 128, 2 * 16 * 64 * 128 + 16 * 64 * 64, (10 * 2 * 64 * 128 + 5 * 2 * 64 * 64) * 3 / 4),
    ],
)
def test_seconds(rows, columns, multiplied, sent):
    """Two FLOPs a multiplication at 1 FLOP/s, five times; bytes at 1 B/s. The norm's 2 B add 3 s."""
    for on, expected in ((machine(flops=1.0), 5 * 2 * multiplied), (machine(link=1.0), sent + 3)):
        plan = job("fsdp2", on=on, dp=4, performance={"optimizer": "muon"}, fsdp={"reduce_dtype": "fp32"})
        found = matrix_s(plan, Param("w", (rows, columns)), rows * columns / 4, pricing(plan).context)
        assert found == pytest.approx(expected, rel=SLIGHTLY)
