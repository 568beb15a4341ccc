"""What jobs of the same parts and pipeline share: their chunks, and the parameters that stages hold."""

from __future__ import annotations

import pytest
from jobs import job

from steptime.answer.result import estimate
from steptime.cost.rates import RATES
from steptime.job.assembly import LAYOUTS, SHARED, Assembly
from steptime.job.parts import PARTS
from steptime.memory.stages import chunk_bytes
from steptime.memory.states import stage_states
from steptime.timing.step_time import PART_TIMES


def forget():
    for known in (PARTS, LAYOUTS, SHARED, RATES, PART_TIMES):
        known.clear()


def microbatches(assembly):
    return assembly.job.microbatches


@pytest.mark.parametrize(
    "change",
    [
        {"parallelism.dp": 4},
        {"data.gbs": 32},
        {"data.gbs": 2},
        {"hardware": "dgx-b200"},
        {"hardware": {"node_type": "dgx-h100", "overrides": {"tiers.0.efficiency": 0.5}}},
        {"cross_dc": {"n_dcs": 2, "interconnect_bandwidth_gbps": 100, "interconnect_latency_s": 0.01}},
        {"performance.software": "deepspeed"},
        {"performance.cpu_offload": {"optimizer": 0.5}},
        {"performance.recompute": {"granularity": "full", "method": "block", "n_layers": [4, 8]}},
        {"parallelism.layers_per_stage": [15, 17]},
        {"parallelism.zero_level": 0},
        {"model.tie_embeddings": True},
    ],
    ids=str,
)
def test_a_job_has_the_figures_that_it_has_alone(change):
    """Whatever was estimated before it."""
    forget()
    other = job(pp=2, dp=2, gbs=16).replace(**change)
    alone = estimate(other).to_dict()
    forget()
    first = estimate(job(pp=2, dp=2, gbs=16))
    assert estimate(other).to_dict() == alone
    same = Assembly(job(pp=2, dp=8, gbs=16))
    assert same.layout is first.assembly.layout


@pytest.mark.parametrize("software", ["deepspeed", "torch"])
def test_a_single_microbatch_shares_nothing_with_several(software):
    """Its gradients of weights become the gradients, where those of several are added up."""
    single, several = (Assembly(job(pp=2, dp=2, gbs=gbs, software=software)) for gbs in (2, 16))
    assert single.once(chunk_bytes) == chunk_bytes(single) != several.once(chunk_bytes) == chunk_bytes(several)


def test_steps_of_one_two_and_more_microbatches_share_nothing():
    """FSDP that reduces once a step walks the first micro-batch, one between where there is any, and the last
    (`no_sync_walk.phases`); whatever is between is alike."""
    forget()
    counts = [Assembly(job(dp=2, gbs=gbs)).once(microbatches) for gbs in (2, 4, 6, 16)]
    assert counts == [1, 2, 3, 3]


def test_a_larger_batch_finds_what_a_smaller_one_has():
    """States and bytes of chunks are those of the first job, not computed again."""
    forget()
    first, larger = Assembly(job(pp=2, dp=2, gbs=16)), Assembly(job(pp=2, dp=2, gbs=64))
    assert stage_states(first) is stage_states(larger)
    assert stage_states(first) is not stage_states(Assembly(job(pp=2, dp=4, gbs=64)))


def test_a_second_thread_does_not_add_to_what_the_first_holds(monkeypatch):
    """Both find nothing known of the layout; here the other one is done while this one still counts."""
    forget()
    one, other = Assembly(job(pp=4)), Assembly(job(pp=4, dp=2))
    assert one.layout is other.layout
    by_stage = one.by_stage

    def interrupted(of):
        assert len(other.stage_params) == 4
        return by_stage(of)

    monkeypatch.setattr(one, "by_stage", interrupted)
    assert len(one.stage_params) == 4
