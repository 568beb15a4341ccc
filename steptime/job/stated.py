"""Which settings of a resolved plan the plan itself states; the others are defaults, most of them of its software profile."""

from __future__ import annotations

from typing import Any

from steptime.base.declared import Settings
from steptime.job.job import Job

RECOMPUTE, WORD = "performance.recompute", "performance.activation_checkpointing_type"


def stated(job: Job, path: str) -> Any:
    """What a plan states at a dotted key of its resolved form; None where it does not. Recomputation has two keys."""
    if path.startswith((RECOMPUTE, WORD)):
        return job.performance.recompute or job.performance.activation_checkpointing_type
    node: Any = job
    for name in path.split("."):
        if isinstance(node, Settings):  # else a mapping, which is stated as a whole
            node = getattr(node, name) if name in node.model_fields_set else None
    return node
