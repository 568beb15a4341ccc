"""What pipeline stages hand on: 8 tokens of 128 bf16 values, 2,048 bytes, on links of 8 B/s in a node and 1 B/s between nodes."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.job.assembly import Assembly
from steptime.timing.part_times import part_times, pricing
from steptime.timing.step_time import time_parts

INSIDE_S, OUTSIDE_S = 2_048 / 8, 2_048
FOUR_STAGES = {"pp": 4, "vpp": 2, "model": {"n_layers": 8}}
LINKS = {"link": 8.0, "outside": 1.0, "node": 2}


def sends(**said):
    answer = estimate(job(on=machine(**LINKS), **said))
    return {row.name: row for row in answer.collectives if row.axis == "pp"}


def test_interleaved_stages_send_around():
    """Nodes of two devices: stages 0 and 1 share one, 2 and 3 the next. The last stage sends its first chunk's output to stage 0,
    from node to node.

    4 micro-batches, both chunks, forward and back: 16 sends over each boundary between stages; around only the first chunk: 8.
    """
    rows = sends(microbatches=4, **FOUR_STAGES)
    assert {name: (row.count_per_step, row.tier) for name, row in rows.items()} == {
        "stage 0 to 1": (16, "inside"),
        "stage 1 to 2": (16, "outside"),
        "stage 2 to 3": (16, "inside"),
        "stage 3 to 0": (8, "outside"),
    }
    assert {row.bytes for row in rows.values()} == {2_048}
    for row in rows.values():
        assert row.bandwidth_s == pytest.approx(INSIDE_S if row.tier == "inside" else OUTSIDE_S)


def test_a_micro_batch_passes_every_boundary_there_and_back():
    """Compute is free. Through both chunks: inside, outside, inside, around, inside, outside, inside; and the same way back."""
    answer = estimate(job("torch", on=machine(**LINKS), **FOUR_STAGES))
    assert answer.step_s == pytest.approx(2 * (4 * INSIDE_S + 3 * OUTSIDE_S), rel=1e-3)


def test_without_virtual_stages_nothing_goes_around():
    rows = sends(pp=4, model={"n_layers": 4})
    assert rows.keys() == {"stage 0 to 1", "stage 1 to 2", "stage 2 to 3"}
    assert {row.count_per_step for row in rows.values()} == {2}


def test_a_tensor_parallel_rank_sends_its_tokens_or_all():
    """With sequence parallelism a rank of two has half of the tokens; without it, all of them."""
    said = {"pp": 2, "tp": 2, "model": {"n_q_heads": 2}}
    assert sends(**said)["stage 0 to 1"].bytes == 1_024
    assert sends(**said, sp=False)["stage 0 to 1"].bytes == 2_048


def test_an_output_split_over_tensor_parallel_ranks_is_gathered_again():
    """Megatron-LM of 2021 (Narayanan et al. 2021, section 4.1): of 2,048 bytes a rank of two sends half from node to node, which
    takes 1,024 s, and the pair gathers them over its links of 8 B/s, each half of them: 128 s.
    """
    performance = {"precision": "bf16"}
    rows = sends(software="megatron-2021", pp=2, tp=2, model={"n_q_heads": 2}, performance=performance)
    [row] = rows.values()
    assert row.tier == "outside"
    assert row.bandwidth_s == pytest.approx(1_024 + 128)
    assert row.latency_s == pytest.approx(4.5e-6 + 8.4e-6)
    assert row.time_s == pytest.approx(1_152, rel=1e-3)


def test_a_share_of_overlap_takes_that_share_of_a_send():
    """A quarter of each send hides: three quarters of 2 * (256 + 2,048 + 256)."""
    said = {"pp": 4, "model": {"n_layers": 4}, "performance": {"overlap": {"pp": 0.25}}}
    assert estimate(job("torch", on=machine(**LINKS), **said)).step_s == pytest.approx(0.75 * 5_120, rel=1e-3)


@pytest.mark.parametrize("pp", [2, 4])
def test_kept_outputs_of_stages(pp):
    """Megatron frees a stage's output once it is sent (schedules.py, deallocate_output_tensor), keeping one element. Kept, it
    waits for its backward: 2,048 bytes for each of the pp - r micro-batches that stage r of 1F1B has in flight. The last stage's
    output is the loss.
    """
    freed, kept = (
        estimate(
            job(pp=pp, microbatches=8, model={"n_layers": 4}, performance={"deallocate_pipeline_outputs": how})
        ).memory.stages
        for how in (True, False)
    )
    more = [b.activations_bytes - a.activations_bytes for a, b in zip(freed, kept, strict=True)]
    assert more == [2_048 * (pp - stage) for stage in range(pp - 1)] + [0]


def test_a_pipeline_whose_sends_are_free():
    """One micro-batch through two stages: the sum of both chunks' seconds, without the 2,048 B there and back at 1 B/s."""
    assembly = Assembly(job(on=machine(flops=1e9, link=1.0), pp=2))
    priced = pricing(assembly.job)
    times = part_times(assembly, priced)
    alone, sent = (time_parts(assembly, priced, times, free_sends=free) for free in (True, False))
    both = sum(chunk.forward_s + chunk.backward_s for stage in alone.chunks for chunk in stage)
    assert alone.walk.makespan_s == pytest.approx(both)
    assert sent.walk.makespan_s == pytest.approx(both + 2 * 2_048, rel=1e-3)
