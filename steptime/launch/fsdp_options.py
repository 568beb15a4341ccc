"""Options of torch's first FSDP in a trainer's job."""

from __future__ import annotations

from typing import Any

from steptime.launch.figures import Figures


def of_version_1(found: Figures) -> dict[str, Any]:
    """When backward gathers, and whether parameters are kept apart; what is not said stays open.

    Source: accelerate utils/dataclasses.py, FullyShardedDataParallelPlugin (backward_prefetch, use_orig_params).
    """
    words: dict[str, dict[str, Any]] = {
        "backward_post": {"backward_prefetch": "post"},
        "no_prefetch": {"prefetch": 0},
        "none": {"prefetch": 0},
    }
    said = words.get(str(found.get("@fsdp_prefetch") or "").lower(), {})
    flat = str(found.get("@fsdp_original_params")).lower() == "false"
    return said | ({"original_params": False} if flat else {})
