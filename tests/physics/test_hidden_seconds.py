"""What hides under compute, in the table of a step's parts."""

from __future__ import annotations

from physics_jobs import job, machine

from steptime.answer.result import estimate


def test_sharded_parameters_without_overlap_hide_nothing():
    """FSDP on links of 1 B/s whose collectives all show."""
    found = estimate(job("fsdp2", on=machine(link=1.0), dp=2, fsdp={}, performance={"overlap": {"dp": False}}))
    assert found.time.parts_s["dp_comm"] > 0.0
    assert "dp_comm" not in found.time.hidden_s
