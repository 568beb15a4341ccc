"""Exchanges of experts' rows that do not wait for their number: tensors with room for the most that can arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job
from plain_backward import AUTOGRAD

from steptime.base.config import ConfigError
from steptime.job.assembly import Assembly
from steptime.memory.op_walk import walk_part
from steptime.memory.overhead import overhead
from steptime.memory.receive_buffers import receive_buffer_bytes
from steptime.model.ops import Move, Tensor
from steptime.model.routing import Rows
from steptime.model.torch_dispatch import combine, dispatch
from steptime.model.torch_experts import grouped_experts
from steptime.report.breakdown import outside

MOE = {"n_experts": 8, "expert_inter_sz": 256, "experts_per_token": 2}


def assembly(backend: str, factor: float | None = None, software: str = "fsdp2", **changes):
    """8 tokens of 128 numbers on each of ep 2 ranks, to 2 of 8 experts: 16 rows sent, at most 2 * 8 * min(2, 4) = 32 arrive."""
    how = {"moe": {"dispatcher": "flex", "flex_backend": backend, "non_blocking_capacity_factor": factor}}
    moe = MOE | changes
    return Assembly(job(software, model={"moe": moe, "n_q_heads": 2}, performance=how, dp=2, ep=2))


def rows_of(found: Assembly) -> Rows:
    return Rows(found.job.model.moe, 128, replace(found.shard, etp=1))


@pytest.mark.parametrize(
    ("backend", "factor", "room"),
    [
        ("minimal_async_ep", None, 32),
        ("hybridep", 1.0, 32),
        ("hybridep", 0.5, 16),
        ("hybridep", None, 16),
        ("deepep", None, 16),
    ],
)
def test_room_of_tensors_between_the_exchanges(backend, factor, room):
    """MinimalAsyncEP and HybridEP with factor 1: 32 rows. Where the host waits for counts: the 16 that arrive at even routing."""
    found = assembly(backend, factor)
    sizes = {t.name: t.elements for op in found.kinds[0].ops for t in op.allocates}
    assert sizes["experts.gate"] == sizes["experts.act.out"] == room * 256
    assert sizes["experts.out"] == sizes["moe.rows"] == room * 128


def test_rows_beyond_the_room_are_dropped():
    """Three times the mean would be 48 rows; a buffer for 0.75 of 32 takes 24, of 32 all 32."""
    assert rows_of(assembly("hybridep", 0.75, imbalance_factor=3.0)).here == 24
    assert rows_of(assembly("minimal_async_ep", imbalance_factor=3.0)).here == 32


def test_peak_of_minimal_async_ep():
    """Rows that arrive, those that return and the gradients of the experts' outputs are in symmetric memory: 0 bytes each.

    A tensor of 32 rows of 256 takes 16,384 B. Kept: gate, up and their product, 3 * 16,384; where rows came from and went,
    (2 * 32 + 16) * 8 = 640 and 3 * 16 * 8 = 384; the scores, 16 * 4 = 64: 50,240. Peak, in backward of the activation: gate and
    up, the gradient of their product and both of theirs, 5 * 16,384, beside 640 and the gradients of the scores, 64: 82,624.
    """
    found = assembly("minimal_async_ep")
    rows = rows_of(found)
    x = Tensor("n", 8 * 128, 2.0)
    choose = Move("choose", ("n",), (Tensor("moe.probs", 16, 4.0),))
    sent, name = dispatch(rows, "n", "moe.probs")
    inner, y = grouped_experts(found.job.model, rows, 1, name)
    back, out = combine(rows, y, "moe.probs")
    memory = walk_part([choose, *sent, *inner, *back], x, out, frozenset(), AUTOGRAD)
    assert memory.saved == 50_240
    assert (memory.backward.bytes, memory.backward.op) == (82_624, "experts.act")


def test_kernels_that_skip_the_rest_and_one_that_does_not():
    """Of 32 rows the activation reads gate and up of 16 and writes 16, 3 * 8,192 B, backward 5 * 8,192; the sum of both
    gradients of the rows reads two and writes one of all 32, 3 * 32 * 256 B."""
    ops = {op.name: op for op in assembly("minimal_async_ep").kinds[0].ops}
    assert (ops["experts.act"].forward_bytes, ops["experts.act"].backward_bytes) == (24_576, 40_960)
    assert (ops["experts.sum"].forward_bytes, ops["experts.sum"].backward_bytes) == (0, 24_576)
    assert ops["moe.dispatch"].bytes == 16 * 256
    assert "experts.sum" not in {op.name for op in assembly("deepep").kinds[0].ops}


@pytest.mark.parametrize(
    ("backend", "held"), [("minimal_async_ep", 2 * 32 * 256), ("hybridep", 16 * (256 + 2 * 4 * 4)), ("deepep", 0)]
)
def test_buffers_outside_the_allocator(backend, held):
    """Two of 32 rows of 256 B; or 16 rows with 4 B for each of 4 experts of 2 ranks. Beside them data-parallel ranks and those of
    experts have a communicator each, a quarter of a GiB."""
    over = overhead(assembly(backend).job)
    assert over.receive_buffers == held
    rows = outside(over)
    assert rows[0] == ("context, communicators", over.context + 2 * 2**28)
    assert rows[1:] == ([("buffers for rows of experts", held)] if held else [])


HYBRID = {"moe": {"dispatcher": "flex", "flex_backend": "hybridep"}}


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ({"tp": 2, "batch": 2}, 2 * 8 * (256 + 4 * 4 * 2)),
        ({"tp": 2, "batch": 2, "etp": 2}, 4 * 8 * (256 + 4 * 4 * 4)),
        ({"cp": 2}, 2 * 4 * (256 + 4 * 4 * 2)),
        ({"moe": {"latent_sz": 64}}, 2 * 8 * (128 + 4 * 4 * 2)),
    ],
)
def test_hybrideps_rows_are_those_of_all_ranks(layout, held):
    """Ranks * tokens of one * (bytes of a row + 4 B * 4 experts of each * ranks). A rank has its part of the sequences, 16 tokens
    of two over tp 2, 8 over cp 2; rows are 128 wide, or as wide as the experts' latent."""
    moe = MOE | layout.get("moe", {})
    layout = {"dp": 2, "ep": 2} | {key: value for key, value in layout.items() if key != "moe"}
    assert receive_buffer_bytes(job(model={"moe": moe, "n_q_heads": 2}, performance=HYBRID, **layout)) == held


def test_no_buffer_where_nothing_arrives_in_one():
    """A dense model, and rows that all-to-all receives in tensors."""
    assert receive_buffer_bytes(job(performance=HYBRID, dp=2)) == 0
    other = {"moe": {"dispatcher": "alltoall", "flex_backend": "hybridep"}}
    assert receive_buffer_bytes(job(model={"moe": MOE}, performance=other, dp=2, ep=2)) == 0


@pytest.mark.parametrize(("software", "summed"), [("megatron-core", "moe.unpermute.out"), ("fsdp2", "moe.out")])
def test_rows_of_tokens_in_hybrideps_buffers(software, summed):
    """Those that arrive with their scores, and those that return, in either framework, with their gradients: the allocator has
    only the rows copied from there (executor.cu). DeepEP returns tensors.
    """
    for backend, away in (("hybridep", {"moe.arrived", "moe.arrived.probs", summed}), ("deepep", set())):
        made = [t for op in assembly(backend, software=software).kinds[0].ops for t in op.allocates]
        assert {t.name for t in made if t.outside == "both"} == away
        assert summed in {t.name for t in made}


@pytest.mark.parametrize(
    ("software", "layout", "how", "line"),
    [
        ("fsdp2", {"tp": 2, "dp": 2}, {"flex_backend": "minimal_async_ep"}, "minimal_async_ep is torchtitan's"),
        ("megatron-core", {"dp": 2}, {"flex_backend": "minimal_async_ep"}, "minimal_async_ep is torchtitan's"),
        ("fsdp2", {"dp": 2}, {"non_blocking_capacity_factor": 1.0}, "only dispatcher flex with HybridEP under FSDP2"),
        (
            "megatron-core",
            {"dp": 2},
            {"flex_backend": "hybridep", "non_blocking_capacity_factor": 1.0},
            "only dispatcher flex with HybridEP",
        ),
        (
            "fsdp2",
            {"dp": 2},
            {"dispatcher": "alltoall", "flex_backend": "hybridep", "non_blocking_capacity_factor": 1.0},
            "got dispatcher alltoall, flex_backend hybridep",
        ),
    ],
)
def test_what_they_do_not_support(software, layout, how, line):
    with pytest.raises(ConfigError, match=line):
        job(
            software,
            model={"moe": MOE, "n_q_heads": 2},
            performance={"moe": {"dispatcher": "flex"} | how},
            ep=2,
            **layout,
        )
