"""A layer's backward that takes turns with another micro-batch's forward, op by op, by hand.

Of x, 1 B, the router makes 2 B, the dispatch 4, the experts 8 and then 16, the combine the output, 32; nothing is kept. Turns:
combine back, router forward, both experts back, dispatch forward and back, experts and combine forward, router back
(megatron/core/models/common/model_chunk_schedule_plan.py, TransformerLayerSchedulePlan.run).

Backward holds 32; combine 32 + 16, then 16; experts 16 + 8, 8, then 8 + 4, 4; dispatch 4 + 2, then 2; router 2 + 1.
Forward holds 1; router 1 + 2, then 2; dispatch 2 + 4, then 4; experts 4 + 8, 8, then 8 + 16, 16; combine 16 + 32, then 32.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pytest
from physics_jobs import job, machine
from plain_backward import AUTOGRAD

from steptime.job.assembly import Assembly
from steptime.memory.ledger import NO_BYTES
from steptime.memory.op_walk import kept_by_part
from steptime.memory.part_memories import PartMemories, walk
from steptime.memory.woven import walks, woven_peak
from steptime.model.ops import Move, Tensor

CHAIN = (
    ("router", "x", "a"),
    ("moe.dispatch", "a", "b"),
    ("up", "b", "c"),
    ("down", "c", "d"),
    ("moe.combine", "d", "y"),
)
STEPS: dict[str, Literal["dispatch", "combine"]] = {"moe.dispatch": "dispatch", "moe.combine": "combine"}
BYTES = {"x": 1.0, "a": 2.0, "b": 4.0, "c": 8.0, "d": 16.0, "y": 32.0}


def chain_of(chain=CHAIN, forward: str = "", backward: str = "") -> list[Move]:
    """Ops of which one takes 1,000 B while it runs in one direction."""
    return [
        Move(
            name,
            (read,),
            (Tensor(made, BYTES[made], 1.0),),
            forward_temp_bytes=1_000.0 * (name == forward),
            backward_temp_bytes=1_000.0 * (name == backward),
            step=STEPS.get(name, ""),
        )
        for name, read, made in chain
    ]


def peak(chain=CHAIN, *, forward: str = "", backward: str = ""):
    ops = chain_of(chain, forward, backward)
    x = Tensor("x", 1.0, 1.0)
    return woven_peak(ops, walks(ops, x, chain[-1][2], kept_by_part(ops, x, frozenset(), AUTOGRAD), AUTOGRAD))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("router", 1 + 2 + 16),
        ("moe.dispatch", 2 + 4 + 4),
        ("up", 4 + 8 + 2),
        ("down", 8 + 16 + 2),
        ("moe.combine", 16 + 32 + 2),
    ],
)
def test_an_op_of_the_forward_beside_what_backward_holds(op, expected):
    assert peak(forward=op) == (1_000 + expected, op)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("moe.combine", 32 + 16 + 1),
        ("down", 16 + 8 + 2),
        ("up", 8 + 4 + 2),
        ("moe.dispatch", 4 + 2 + 4),
        ("router", 2 + 1 + 32),
    ],
)
def test_an_op_of_the_backward_beside_what_forward_holds(op, expected):
    assert peak(backward=op) == (1_000 + expected, op)


def test_a_layer_that_sends_no_rows_alternates_with_none():
    assert peak(CHAIN[:1]) == peak((("up", "x", "b"), ("moe.combine", "b", "y"))) == NO_BYTES


def test_a_layer_of_another_depth_does_not_alternate_with_itself():
    """A module of multi-token prediction is the first to run backward and the last to run forward: where there are two layers it
    takes turns with another one (TransformerModelChunkSchedulePlan.run: get_layer(i) with pop_layer()).
    """
    ops = [replace(op, depth=1) for op in chain_of()]
    x = Tensor("x", 1.0, 1.0)
    assert woven_peak(ops, walks(ops, x, "y", kept_by_part(ops, x, frozenset(), AUTOGRAD), AUTOGRAD)) == NO_BYTES


def test_bytes_that_come_back_from_the_host():
    """8,192 tokens of 128 in bf16, which the norm of the experts reads: 2 MiB go to the host, and come back for the backward."""
    moe = {"n_experts": 8, "expert_inter_sz": 256, "experts_per_token": 2}
    how = {"overlap": {"ep": True}, "offload_modules": ["mlp_norm"]}
    layout = {"dp": 2, "ep": 2, "microbatches": 2, "seqlen": 8192}
    memories = PartMemories(
        Assembly(job(on=machine(host_bytes_per_s=1e9), model={"moe": moe}, performance=how, **layout))
    )
    assert memories.woven.woven
    assert [memories.selective[part].ahead for part in memories.assembly.kinds] == [2 * 2**20]


def test_a_layer_is_as_large_as_the_worse_of_both_walks():
    """Where down takes 1,000 B in its forward: 8 + 16 + 2 beside it. Alone, backward is largest at the combine, 32 + 16."""
    ops = chain_of(forward="down")
    part = SimpleNamespace(ops=ops, x=Tensor("x", 1.0, 1.0), out="y", sizes=None, n_params=3.0)
    both, alone = (walk(part, frozenset(), AUTOGRAD._replace(woven=woven)) for woven in (True, False))
    assert both.backward == (1_026, "down")
    assert alone.backward == (48, "moe.combine")
    assert both.n_params == alone.n_params == 3.0
