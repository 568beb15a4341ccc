"""What several tests of the benchmark ask for."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def job(request):
    """The job of the module's plan, CONFIG: a path or its text."""
    from steptime.job.job import Job

    return Job.load(request.module.CONFIG)


@pytest.fixture
def written(tmp_path):
    """Write events as a rank's trace and read it back."""
    from steptime.bench.profiler_trace.events import read

    def call(*events, rank=0, world=None):
        path = tmp_path / f"rank{rank}.json"
        about = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}} if world else {}
        path.write_text(
            json.dumps({"schemaVersion": 1, **about, "traceEvents": events, "traceName": "x"}), encoding="utf-8"
        )
        return read(str(path))

    return call
