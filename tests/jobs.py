"""Jobs for tests: the usual plan, and what a test says of it."""

from __future__ import annotations

from typing import Any

from steptime.job.job import Job


def job(
    model: Any = "llama3-8b",
    *,
    gbs: int = 8,
    seqlen: int = 4096,
    microbatch_sz: int = 1,
    hardware: Any = "dgx-h100",
    software: str | None = None,
    performance: dict[str, Any] | None = None,
    **parallelism: Any,
) -> Job:
    """A job on one device unless `parallelism` (tp, pp, dp ...) says more; `Job.replace` takes dotted changes."""
    return Job(
        model=model,
        parallelism={"tp": 1, "pp": 1, "dp": 1} | parallelism,
        performance=({"software": software} if software else {}) | (performance or {}),
        data={"gbs": gbs, "seqlen": seqlen, "microbatch_sz": microbatch_sz},
        hardware=hardware,
    )
