"""FSDP2: parameter groups walked as all-gathers, frees and reduce-scatters, in bytes and in seconds.

What a job without FSDP does not need is imported when it is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from steptime.fsdp.of_job import applies, pooled, unsynced

if TYPE_CHECKING:
    from steptime.fsdp.calls import rows
    from steptime.fsdp.groups import Buffers, buffers, options
    from steptime.fsdp.no_sync_walk import summed_bytes
    from steptime.fsdp.passes import pass_moments
    from steptime.fsdp.pipeline_chunks import ShardedChunk
    from steptime.fsdp.pipeline_memory import peak_moments, stage_actions, stage_chunks, stage_steps
    from steptime.fsdp.pipeline_seconds import PipelineSeconds
    from steptime.fsdp.seconds import (
        CommSeconds,
        StepSeconds,
        exposed_s,
        group_seconds,
        micro_batch_exposed,
        step_exposed,
        step_seconds,
    )
    from steptime.fsdp.sharded_states import sharded_elements, states

__all__ = [
    "Buffers",
    "CommSeconds",
    "PipelineSeconds",
    "ShardedChunk",
    "StepSeconds",
    "applies",
    "buffers",
    "exposed_s",
    "group_seconds",
    "micro_batch_exposed",
    "options",
    "pass_moments",
    "peak_moments",
    "pooled",
    "rows",
    "sharded_elements",
    "stage_actions",
    "stage_chunks",
    "stage_steps",
    "states",
    "step_exposed",
    "step_seconds",
    "summed_bytes",
    "unsynced",
]

_HOMES = {
    **dict.fromkeys(("Buffers", "buffers", "options"), "groups"),
    **dict.fromkeys(("sharded_elements", "states"), "sharded_states"),
    "rows": "calls",
    "pass_moments": "passes",
    "summed_bytes": "no_sync_walk",
    "ShardedChunk": "pipeline_chunks",
    **dict.fromkeys(("peak_moments", "stage_actions", "stage_chunks", "stage_steps"), "pipeline_memory"),
    "PipelineSeconds": "pipeline_seconds",
}


def __getattr__(name: str) -> Any:
    """Import a name's module when the name is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'seconds')}"), name)
