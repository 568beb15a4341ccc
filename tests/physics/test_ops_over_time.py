"""Ops of a part in time: their seconds add up to those of its pass, and what hides a collective runs before or after it."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.timing.op_times import chunk_op_times, part_op_times
from steptime.timing.step_parts import hardware_flops

MOE = {"n_experts": 8, "expert_inter_sz": 64, "experts_per_token": 2}
SLOW = machine(flops=1e6, memory=1e6, link=1e6, kernels={"host_kernel_s": 1e-3})
TIGHT = machine(link=1e6, host_bytes_per_s=1e3)


@pytest.mark.parametrize("way", ["F", "B"])
@pytest.mark.parametrize(
    "said",
    [
        {"model": {"n_q_heads": 2}, "tp": 2},
        {"model": {"moe": MOE}, "dp": 2, "ep": 2, "performance": {"overlap": {"ep": True}}, "microbatches": 2},
        {"on": machine(kernels={"host_kernel_s": 1e-3}), "software": "torch"},
        {"on": TIGHT, "performance": {"offload_modules": ["attn_norm", "core_attn"]}},
    ],
)
def test_seconds_of_ops_are_those_of_the_pass(said, way):
    """Each in its own rate of 1e6 a second, launch gaps of 1 ms a kernel, and copies to a host at 1 kB/s."""
    timing = estimate(job(**{"on": SLOW, "software": "megatron-core"} | said)).timing
    for part in (timing.assembly.embedding, *timing.assembly.kinds, timing.assembly.head):
        works = timing.parts.of[part]
        whole = works.forward if way == "F" else works.backward
        assert sum(op.seconds for op in part_op_times(timing, part, way)) == pytest.approx(whole.seconds, rel=1e-9)


def test_a_collective_before_what_hides_it():
    """In forward a gather comes before the product that it feeds, a reduce-scatter after the one that makes it; in backward the
    gathers of both come first.
    """
    timing = estimate(job(on=SLOW, tp=2, model={"n_q_heads": 2})).timing
    [layer] = timing.assembly.kinds
    there = {op.name: op.before for op in part_op_times(timing, layer, "F") if op.call}
    assert {before for name, before in there.items() if "gather" in name} == {True}
    assert {before for name, before in there.items() if "scatter" in name} == {False}
    assert all(op.before for op in part_op_times(timing, layer, "B") if op.call)


def test_ops_of_a_chunk_whose_layers_run_again():
    """Two layers, each with a replay of its own, before its backward; forward has none. A chunk's parts turn around."""
    performance = {"activation_checkpointing_type": "full"}
    timing = estimate(job(on=SLOW, performance=performance)).timing
    [chunk] = timing.assembly.chunks
    there, back = (chunk_op_times(timing, chunk, way) for way in ("F", "B"))
    assert [one.name.split(" (")[0] for one in there] == ["embedding", "layer 0", "layer 1", "head"]
    assert [one.name.split(" (")[0] for one in back] == ["head", "layer 1", "layer 0", "embedding"]
    assert [one.ops[0].name == "recomputation" for one in back] == [False, True, True, False]
    again = sum(n * float(work.seconds) for n, _, work in timing.parts.replays(chunk))
    assert sum(one.ops[0].seconds for one in back[1:3]) == pytest.approx(again)


def test_flops_of_layers_that_run_again():
    """Forward once more in both layers, 16 for each of 163,840 weights and attention's 8 * 8 * 2 * 128 * 2 / 2."""
    found = []
    for recompute in ("none", "full"):
        performance = {"activation_checkpointing_type": recompute}
        found.append(hardware_flops(estimate(job(on=SLOW, performance=performance, microbatches=3, dp=2)).timing))
    assert found[1] - found[0] == pytest.approx(2 * 3 * 2 * (16 * 163_840 + 16_384))
