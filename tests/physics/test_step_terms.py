"""Terms of a step that few jobs show: which stage's, which direction's, and of how many micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from physics_jobs import job, machine
from rates import RATES

from steptime.answer.result import estimate
from steptime.cost.comm import CommCost
from steptime.cost.compute import gemm_pass
from steptime.cost.exchange import Passage, passages
from steptime.fsdp.groups import one_group
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories, hooked
from steptime.model.ops import Gemm, Param
from steptime.schedule import walk
from steptime.schedule.live import states
from steptime.software.state_bytes import StateBytes
from steptime.timing.gradients_down import SumCopies, most_of_one
from steptime.timing.host_update import HostUpdate
from steptime.timing.op_times import OpTime, chunk_op_times, replayed_times
from steptime.timing.optimizer import (
    OptimizerStep,
    adafactor_bytes_per_param,
    foreach_bytes_per_param,
    quantize_bytes_per_weight,
    updated,
)
from steptime.timing.orthogonalize import iterations_s, sharded
from steptime.timing.part_times import part_times, pricing
from steptime.timing.step_time import sends

TWO = {"n_q_heads": 2}


def test_what_runs_again_sends_again_in_view():
    """Two ranks of tensor parallelism on links of 1 B/s, nothing hidden: a layer run again whole sends its forward's two
    collectives once more, so that what shows is half as much again.
    """

    def shown(how: str) -> tuple[float, dict[str, float]]:
        performance = {"activation_checkpointing_type": how, "overlap": {"tp": False}, "recompute_stops_early": False}
        time = estimate(job("torch", on=machine(link=1.0), model=TWO, tp=2, performance=performance)).time
        return time.parts_s["tp_comm"], time.hidden_s

    plain, hidden = shown("none")
    again, hidden_again = shown("full")
    assert again > plain
    assert hidden.get("tp_comm", 0.0) == hidden_again.get("tp_comm", 0.0) == 0.0


@pytest.mark.parametrize(("passes", "held"), [(1, 4.0), (2, 2.0)])
def test_a_pass_holds_its_own_micro_batches(passes, held):
    """GPipe holds all micro-batches of a pass: four, or two of four."""
    layout = {
        "pp": 2,
        "dp": 2,
        "schedule": "gpipe",
        "pipeline_passes": passes,
        "fsdp": {"reshard_after_forward": False},
    }
    found = estimate(job("fsdp2", microbatches=4, **layout))
    assert found.pipeline is not None
    assert found.pipeline.in_flight == [held, held]


SIZE = StateBytes(params=2.0, gradients=3.0, master=5.0, moments=14.0)


def test_bytes_of_updates_op_by_op():
    """The master, or the parameter where there is none, is read and written; a parameter rounded from a master is written."""
    assert foreach_bytes_per_param(SIZE) == 4 * 5 + 14 * 7 + 2 * 3 + 2
    assert foreach_bytes_per_param(SIZE._replace(master=0.0)) == 4 * 2 + 14 * 7 + 2 * 3
    assert adafactor_bytes_per_param(SIZE) == 5 * 5 + 3 * 3 + 11 * 4 + 2
    assert adafactor_bytes_per_param(SIZE._replace(master=0.0)) == 5 * 2 + 3 * 3 + 11 * 4


@pytest.mark.parametrize(
    ("software", "layout", "cut"),
    [
        ("fsdp2", {"fsdp": {}}, True),
        ("fsdp2", {"fsdp": {"reshard_after_forward": False}}, True),  # level 2: gradients and states alone are sharded
        ("megatron-core", {"zero_level": 1}, False),
    ],
)
def test_matrices_that_fsdp_cuts_by_rows(software, layout, cut):
    assert sharded(job(software, dp=2, **layout)) is cut


def test_iterations_of_rows_by_columns():
    """Five products of 128 x 1,024 by 64, which on 100 processors fill 4 of them, the transpose's 8; bytes of both operands, and
    of the result twice.
    """
    op = Gemm("newton_schulz", (), (), m=128, n=1_024, k=64)
    moved = 2 * (128 * 64 + 64 * 1_024 + 2 * 128 * 1_024)
    for r in (RATES, RATES._replace(bytes_per_s=float("inf"))):
        assert iterations_s([(128, 1_024, 64)], r) == pytest.approx(5 * gemm_pass(op, r, 128, 1_024, 64, moved).time_s)
    wide, tall = (iterations_s([(m, n, 64)], r) for m, n in ((128, 1_024), (1_024, 128)))
    assert wide > tall


@pytest.mark.parametrize(
    ("start", "elements", "stretch", "most"),
    [
        (0, 10, 10, 10),  # a whole stretch
        (4, 10, 10, 6),  # 6 of the first, 4 of the second
        (7, 10, 10, 7),  # 3, then 7
        (8, 12, 10, 10),
        (5, 3, 2, 2),  # 1 of its first, then 2
        (9, 2, 10, 1),
    ],
)
def test_what_a_bucket_shares_with_one_stretch(start, elements, stretch, most):
    assert most_of_one(float(start), float(elements), float(stretch)) == most


@pytest.mark.parametrize(("share", "left"), [(True, 8.0), (0.25, 6.0), (False, 8.0)])
def test_what_a_send_delays_its_receiver(share, left):
    """Whole, whether its sender waits or not; a share of overlap takes that much off."""
    plan = job(pp=2, microbatches=2, performance={"overlap": {"pp": share}})
    assert sends(plan, [CommCost(0.0, 8.0, "inside", 8.0, "pair")]) == [left]
    assert sends(plan, []) == [0.0]


@pytest.mark.parametrize(("zero", "ranks"), [(0, 1), (1, 2)])
def test_tensors_that_a_rank_updates(zero, ranks):
    """Of each of two layers q, k and v in one, projection, gate and up in one, down and two norms; embedding, head and norm. A
    flat buffer is cut into two shards.
    """
    assembly = Assembly(job("megatron-core", dp=2, zero_level=zero))
    found = updated(assembly.job, assembly.stage_params[0])
    assert (found.tensors, found.owned, found.on_device) == ((2 * 6 + 3) / ranks, 590_464 / ranks, 590_464)


@pytest.mark.parametrize(
    ("on", "precision", "said", "moved"),
    [
        # read in bf16, one copy by rows and one by columns, of 33/32 B each
        ("gb200-nvl72", "mxfp8", {}, 2 + 2 * 33 / 32),
        ("gb200-nvl72", "mxfp8", {"fp8_params": True}, 2 + 2 * 33 / 32),  # bf16 is gathered, and cast in any case
        # read for the maximum and to cast; a byte each way where products take one layout only, on Hopper
        ("dgx-h100", "fp8_current", {}, 2 * 2 + 2),
        ("gb200-nvl72", "fp8_current", {}, 2 * 2 + 1),
        ("dgx-h100", "fp8_current", {"fp8_params": True}, 2.0),  # the transpose alone: a byte read, a byte written
        ("dgx-h100", "fp8_current", {"fp8_params": True, "zero_level": 3}, 0.0),  # cast by its owner
    ],
)
def test_bytes_that_quantize_a_weight(on, precision, said, moved):
    performance, layout = {"precision": precision} | said, {"dp": 2, "zero_level": said.get("zero_level", 1)}
    performance.pop("zero_level", None)
    plan = job(on=Machine.load(on), performance=performance, **layout)
    assert quantize_bytes_per_weight(plan) == pytest.approx(moved)


def test_where_nothing_goes_to_the_host():
    assert SumCopies() == (0.0, 0.0)
    assert OptimizerStep(3.0, HostUpdate(), 0.0).in_turn == 0.0


def test_a_stage_without_the_head_replays_none_of_it():
    """Layers of two stages run again; of a head that has checkpointed modules the last stage's alone."""
    performance = {"recompute": {"granularity": "selective", "modules": ["core_attn"]}}
    plan = job(pp=2, microbatches=2, model={"n_layers": 4, "mtp": 1}, performance=performance)
    assembly = Assembly(plan)
    assert assembly.head_modules
    parts = part_times(assembly, pricing(plan))
    kinds = [[part is assembly.head for _, part, _ in parts.replays(chunk)] for (chunk,) in assembly.stages]
    assert kinds == [[False], [False, True]]


def test_an_action_ends_after_its_own_seconds():
    """Two stages of two chunks that exchange on one stream, F 1 s, B 2 s, sends of half a second."""
    found = walk("interleaved", 2, 2, 4, [[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2, [0.5] * 2, exchange="one_stream")
    assert found.first_forward_start[0][0] == 0.0
    for starts, ends in zip(found.last_backward_start, found.last_backward_end, strict=True):
        assert [end - start for start, end in zip(starts, ends, strict=True)] == [2.0, 2.0]


def test_tiers_that_an_exchange_passes():
    """Eight ranks in four nodes of two; a token has experts on half of any ranks or nodes. Inside a node half of the rows are for
    the other rank; between nodes two copies a token, less a fourth for its own node, of 1.5 rows.
    """
    tiers = machine(link=1.0, node=2).tiers
    routing: Any = SimpleNamespace(distinct=lambda n: n / 2)
    found = list(passages(routing, Group("ep", 8.0, 1.0), tiers, 1.5))
    assert found == [Passage(tiers[0], True, 8, 4, 0.5), Passage(tiers[1], True, 4, 2, 2 * 3 / 4 / 1.5)]
    one_node = list(passages(routing, Group("ep", 2.0, 1.0), tiers, 1.5))
    assert [(of.crossed, of.share) for of in one_node] == [(True, 0.5), (False, 0.0)]


@pytest.mark.parametrize(("version", "padded"), [(1, 24), (2, 28)])
def test_a_root_of_odd_sizes(version, padded):
    """3 x 5 and 7 elements on two ranks. FSDP 1: the second starts at a multiple of 16 B, 16 + 7, made even. FSDP 2 makes rows
    even: 4 x 5, and 8.
    """
    assembly = Assembly(job("fsdp2", dp=2, fsdp={"version": version}))
    found = one_group(assembly, [Param("w", (3, 5)), Param("b", (7,))])
    assert (found.elements, found.padded) == (22, padded)


@pytest.mark.parametrize(("overlap", "neighbor"), [(None, 0.25), (False, 0.0)])
def test_a_quarter_of_a_layer_is_on_the_host(overlap, neighbor):
    """1,000 B saved of which 750 stay. A neighbor's quarter is there as well unless copies wait for one another."""
    host = {"memory_bytes": 1e15, "memory_bytes_per_s": 1e12, "core_bytes_per_s": 1e12}
    on = Machine(**machine(host_bytes_per_s=1e12).model_dump(exclude={"host"}), host=host)
    performance = {"activation_offload": 0.25} | ({} if overlap is None else {"overlap": {"offload": overlap}})
    assembly = Assembly(job("fsdp2", on=on, performance=performance))
    memories = PartMemories(assembly)
    layer = PartMemory(1_000.0, Peak(1_700.0, "mlp"), Peak(1_900.0, "mlp"))
    [(_, _, whole)], [(_, _, found)] = (of(assembly.chunks[0]) for of in (memories.layers, memories.resident))
    assert found == hooked(whole, 0.25, neighbor)
    more = 1_000 * neighbor
    assert hooked(layer, 0.25, neighbor)[:3] == (750.0, (1_700 + more, "mlp"), (1_900 + more, "mlp"))


def test_what_a_head_runs_again_stands_with_the_head():
    """Its replay is one, whole, in the row of the head."""
    performance = {"recompute": {"granularity": "selective", "modules": ["core_attn"]}}
    on = machine(flops=1.0)
    timing = estimate(job(on=on, pp=2, microbatches=2, model={"n_layers": 4, "mtp": 1}, performance=performance)).timing
    chunk, head = timing.assembly.stages[1][0], timing.assembly.head
    [again] = [work for _, part, work in timing.parts.replays(chunk) if part is head]
    assert again.seconds > 0.0
    assert sum(op.seconds for op in replayed_times(timing, chunk)[head]) == pytest.approx(again.seconds)
    first = chunk_op_times(timing, chunk, "B")[0]
    assert first.name == "head"
    assert sum(op.seconds for op in first.ops if op.kind == "recompute") == pytest.approx(again.seconds)
    assert OpTime("a", "gemm", 1.0).before


def test_the_first_of_equal_states_is_named():
    """One stage of two chunks, 12 micro-batches: F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 ... With F0.1 it holds one of each chunk, with
    F1.0 two of the first; all that follow hold the same.
    """
    [found] = states("1f1b", 1, 2, 12)
    assert [(of.in_flight, of.action.kind, of.action.microbatch) for of in found] == [
        ((1, 1), "F", 0),
        ((1, 1), "B", 0),
        ((2, 0), "F", 1),
        ((2, 0), "B", 0),
    ]
