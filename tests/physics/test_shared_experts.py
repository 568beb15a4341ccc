"""Shared experts on a stream of their own, which hide the exchange of the routed ones."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.cost.neighbors import shared_expert_halves
from steptime.model.ops import Comm, Gemm, Move, Op
from steptime.timing import part_times

ROWS = {"moe.dispatch", "moe.combine", "moe.dispatch.grad", "moe.combine.grad"}


def exposed(flops: float, *, beside: bool) -> dict[str, float]:
    """Share of each exchange of rows that is waited for: 8 devices with an expert of 128 each, and a shared one."""
    moe = {"n_experts": 8, "expert_inter_sz": 128, "experts_per_token": 2, "n_shared_experts": 1}
    found = estimate(
        job(
            on=machine(flops=flops, link=1e9),
            model={"moe": moe},
            performance={"moe": {"shared_expert_overlap": beside}},
            seqlen=1024,
            microbatches=2,
            dp=8,
            ep=8,
        )
    )
    rows = [row for row in found.collectives if row.name in ROWS]
    return {row.name: row.exposed_s / (row.time_s * row.count_per_step) for row in rows}


def test_shared_experts_beside_hide_an_exchange(monkeypatch):
    """Slow products cover each exchange, which slows them by 15 %; free ones without pauses between them cover nothing."""
    monkeypatch.setattr(part_times, "layer_gap_s", lambda job, context: 0.0)
    assert exposed(1e9, beside=False) == pytest.approx(dict.fromkeys(ROWS, 1.0))
    assert exposed(1e9, beside=True) == pytest.approx(dict.fromkeys(ROWS, 0.15))
    assert exposed(1e30, beside=True) == pytest.approx(dict.fromkeys(ROWS, 1.0), rel=0.05)


def test_the_second_product_runs_beside_the_combine():
    """Up and activation beside the dispatch; down and what follows it, a gate, beside the combine. Its collectives, and what the
    routed experts run, beside neither (megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher).
    """
    ops: list[Op] = [
        Gemm("router", role="router"),
        Comm("gather", role="shared_experts"),
        Gemm("up", role="shared_experts"),
        Move("act", role="shared_experts"),
        Gemm("experts", role="moe"),
        Gemm("down", role="shared_experts"),
        Move("gate", role="shared_experts"),
    ]
    assert shared_expert_halves(ops, range(7)) == ([2, 3], [5, 6])
    assert shared_expert_halves(ops, range(2)) == ([], [])
