"""Reserved memory, overhead, and the verdict at its edges."""

from __future__ import annotations

import pytest
from jobs import job

from steptime.answer.result import estimate
from steptime.job.job import Job

CONTEXT = 2**29
"""Half a GiB: 0.47 measured on A100 (stas00/ml-engineering@744d01e training/performance/README.md)."""


def with_memory(plan: Job, usable: float) -> str:
    roomy = plan.replace(hardware={"node_type": "dgx-h100", "overrides": {"accelerator.usable_memory_bytes": usable}})
    return estimate(roomy).memory.verdict


def test_verdicts_at_their_edges():
    """Allocated and overhead decide whether it fits at all; reserved, or its p90, and overhead whether it fits well."""
    plan = job(tp=4, dp=2, gbs=8)
    memory = estimate(plan).memory
    assert memory.overhead_bytes == (CONTEXT, 2 * 2**28, 0.0)  # a quarter GiB per communicator in use
    outside = sum(memory.overhead_bytes)
    likely = max(memory.peak_reserved_bytes, memory.peak_reserved_bytes_p90)
    assert with_memory(plan, likely + outside + 1) == "fits"
    assert with_memory(plan, likely + outside - 1) == "tight"
    assert with_memory(plan, memory.peak_reserved_bytes + outside - 1) == "tight"
    assert with_memory(plan, memory.peak_allocated_bytes + outside) == "tight"
    assert with_memory(plan, memory.peak_allocated_bytes + outside - 1) == "does_not_fit"


def test_reserved_memory_is_states_and_more_than_what_comes_and_goes():
    """A fifth of what comes and goes: runs on 8 x B200 that report both lie at 0.14 to 0.6 (MooreThreads/SimuMax@4dcaae5)."""
    stage = estimate(job(tp=4, dp=2)).memory.stages[0]
    moving = stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes
    assert stage.reserved_bytes == pytest.approx(stage.allocated_bytes + 0.2 * moving)


def test_one_device_has_no_communicator():
    assert estimate(job()).memory.overhead_bytes == (CONTEXT, 0.0, 0.0)


def test_a_p90_far_above_the_device_is_no_figure():
    """1.5 times the device is the edge: what is needed at most is 1 byte below it, then 1 above."""
    memory = estimate(job(tp=4, dp=2)).memory
    outside = sum(memory.overhead_bytes)
    for over, told in ((-1.0, False), (1.0, True)):
        p90 = 1.5 * memory.capacity_bytes - outside + over
        assert memory._replace(peak_reserved_bytes_p90=p90).open_ended is told
    small = memory._replace(capacity_bytes=memory.least_bytes / 2.0)
    for over, told in ((-1.0, False), (1.0, True)):  # where more is needed, 1.5 times that is the edge
        assert small._replace(peak_reserved_bytes_p90=1.5 * memory.least_bytes - outside + over).open_ended is told
