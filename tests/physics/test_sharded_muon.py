"""torch.optim.Muon on matrices whose rows FSDP2 shards over four ranks, by hand: its collectives and its products.

torch/optim/_muon.py (2.13), _zeropower_via_newtonschulz: five iterations of A = X X^T, B = b A + c A A, X = a X + B X.
"""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.job.assembly import Assembly
from steptime.model.ops import Param
from steptime.timing.orthogonalize import MOMENTA, NORMS, PRODUCTS, calls, calls_of_step, matrix_calls, matrix_s
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
        # a square is not turned: 16 rows of each
        (64, 64, 3 * 16 * 64 * 64, (10 * 2 * 64 * 64 + 5 * 2 * 64 * 64) * 3 / 4),
    ],
)
def test_seconds(rows, columns, multiplied, sent):
    """Two FLOPs a multiplication at 1 FLOP/s, five times; bytes at 1 B/s. The norm's 2 B add 3 s."""
    for on, expected in ((machine(flops=1.0), 5 * 2 * multiplied), (machine(link=1.0), sent + 3)):
        plan = job("fsdp2", on=on, dp=4, performance={"optimizer": "muon"}, fsdp={"reduce_dtype": "fp32"})
        found = matrix_s(plan, Param("w", (rows, columns)), rows * columns / 4, pricing(plan).context)
        assert found == pytest.approx(expected, rel=SLIGHTLY)


def test_collectives_of_a_step():
    """Two layers of four matrices 128 x 128, two of 256 x 128 (gate and up) and one of 128 x 256 (down): 14 norms. The first
    eight gather X, 32,768 B, ten times each, down's two 65,536 B; these ten gather A, 32,768 B, five times each; the four with
    more rows all-reduce 32,768 B ten times each. Embedding and head are AdamW's.
    """
    plan = job("fsdp2", on=machine(link=1.0), dp=4, performance={"optimizer": "muon"}, fsdp={"reduce_dtype": "fp32"})
    assembly = Assembly(plan)
    held = assembly.counted_params(assembly.stages[0])
    found = calls_of_step(plan, held, pricing(plan).context)
    assert {(call.name, call.kind, call.bytes): call.count for call in found} == {
        (NORMS, "all_reduce", 2.0): 14.0,
        (MOMENTA, "all_gather", 32_768.0): 80.0,
        (MOMENTA, "all_gather", 65_536.0): 20.0,
        (PRODUCTS, "all_gather", 32_768.0): 50.0,
        (PRODUCTS, "all_reduce", 32_768.0): 40.0,
    }
    assert {call.group.ranks for call in found} == {4}
    for call in found:  # of four ranks each sends three quarters, and of sums twice
        share = (1.5 if call.kind == "all_reduce" else 0.75) * call.bytes
        assert call.cost.bandwidth_s == pytest.approx(share)


@pytest.mark.parametrize(
    ("param", "short", "long"),
    [
        (Param("w", (128, 64)), 64, 128),  # whole on every rank: the shorter side's products are made
        (Param("w", (128, 64), 0), 64, 64),  # half of the rows: those of the 64 columns are added up
        (Param("w", (4, 128, 64), 1, n_experts=4, group="expert"), 64, 128),  # an expert's is not split
    ],
)
def test_only_split_matrices_are_distributed(param, short, long):
    """Megatron-Core's distributed mode over tp 2: five times 4 m^2 n + 2 m^3 FLOPs at 1 FLOP/s (newton_schulz_tp)."""
    performance = {"optimizer": "muon", "muon_tp_mode": "distributed"}
    plan = job(on=machine(flops=1.0), tp=2, model={"n_q_heads": 2}, performance=performance, zero_level=0)
    elements = 128 * 64 / (2 if param.split_dim is not None and not param.n_experts else 1)
    found = matrix_s(plan, param, elements, pricing(plan).context)
    assert found == pytest.approx(5 * (4 * short**2 * long + 2 * short**3), rel=1e-3)


def test_experts_that_fsdp2_shards_are_matrices():
    """Of 4 experts of 4 x 3 each: the norm, and sums of 3 x 3 in bf16."""
    plan = job("fsdp2", dp=4, performance={"optimizer": "muon"}, fsdp={"reduce_dtype": "fp32"})
    expert = Param("w", (4, 4, 3), n_experts=4)
    found = matrix_calls(plan, expert, 12.0, pricing(plan).context)
    assert [(one.name, one.bytes, one.count) for one in found] == [(NORMS, 2.0, 1.0), (PRODUCTS, 18.0, 10.0)]
