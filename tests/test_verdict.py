"""Reserved memory, overhead, and the verdict at its edges."""

from __future__ import annotations

import pytest

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.memory.overhead import COMMUNICATOR_BYTES, CONTEXT_BYTES, FRAGMENTATION


def job(
    model="llama3-8b", *, gbs=8, seqlen=4096, microbatch_sz=1, hardware="dgx-h100", performance=None, **layout
) -> Job:
    return Job(
        model=model,
        parallelism={"tp": 1, "pp": 1, "dp": 1, **layout},
        performance=performance or {},
        data={"gbs": gbs, "seqlen": seqlen, "microbatch_sz": microbatch_sz},
        hardware=hardware,
    )


def with_memory(plan: Job, usable: float) -> str:
    roomy = plan.replace(hardware={"node_type": "dgx-h100", "overrides": {"accelerator.usable_memory_bytes": usable}})
    return estimate(roomy).memory.verdict


def test_verdicts_at_their_edges():
    """Allocated and overhead decide whether it fits at all; reserved, or its p90, and overhead whether it fits well."""
    plan = job(tp=4, dp=2, gbs=8)
    memory = estimate(plan).memory
    assert memory.overhead_bytes == (CONTEXT_BYTES, 2 * COMMUNICATOR_BYTES)
    outside = sum(memory.overhead_bytes)
    likely = max(memory.peak_reserved_bytes, memory.peak_reserved_bytes_p90)
    assert with_memory(plan, likely + outside + 1) == "fits"
    assert with_memory(plan, likely + outside - 1) == "tight"
    assert with_memory(plan, memory.peak_reserved_bytes + outside - 1) == "tight"
    assert with_memory(plan, memory.peak_allocated_bytes + outside) == "tight"
    assert with_memory(plan, memory.peak_allocated_bytes + outside - 1) == "does_not_fit"


def test_reserved_memory_is_states_and_more_than_what_comes_and_goes():
    stage = estimate(job(tp=4, dp=2)).memory.stages[0]
    moving = stage.activations_bytes + stage.transient_bytes
    assert stage.reserved_bytes == pytest.approx(stage.allocated_bytes + FRAGMENTATION * moving)


def test_one_device_has_no_communicator():
    assert estimate(job()).memory.overhead_bytes == (CONTEXT_BYTES, 0.0)
