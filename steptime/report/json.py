"""The `--json` document: raw SI figures under stable keys (schema "3dtrn/1")."""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING, Any

from steptime.estimate import SCHEMA

if TYPE_CHECKING:
    from steptime.step import Estimate


def to_dict(estimate: Estimate) -> dict[str, Any]:
    """An estimate as plain data: bytes, seconds and FLOPs, per device unless the key says otherwise."""
    time = estimate.time
    document = {
        "schema": SCHEMA,
        "config": config(estimate),
        "assumptions": list(estimate.assumptions),
        "devices": estimate.devices,
        "nodes": estimate.nodes,
        "params": estimate.params._asdict(),
        "flops": estimate.flops._asdict(),
        "memory": memory(estimate),
        "gemms": [{key.rstrip("_"): value for key, value in row._asdict().items()} for row in estimate.gemms],
        "collectives": [row._asdict() for row in estimate.collectives],
        "pipeline": estimate.pipeline._asdict(),
        "time": {
            "step_s": time.step_s,
            "step_s_p10": time.step_s_p10,
            "step_s_p90": time.step_s_p90,
            "parts_s": dict(time.parts_s),
            "basis": time.basis._asdict(),
        },
        "throughput": estimate.throughput._asdict(),
        "weak_scaling": [row._asdict() for row in estimate.weak_scaling],
    }
    return document | ({"run": dict(estimate.run)} if estimate.run else {})


def memory(estimate: Estimate) -> dict[str, Any]:
    """Memory with its fixes; these are looked for only where the job does not fit."""
    held = estimate.memory
    document = held._asdict()
    document["stages"] = [row._asdict() for row in held.stages]
    document["overhead_bytes"] = held.overhead_bytes._asdict()
    document["fixes"] = [] if held.fits else [fix._asdict() for fix in estimate.fixes]
    return document


def config(estimate: Estimate) -> dict[str, Any]:
    """The job as it was understood, every default filled in."""
    return {key: finite(value) for key, value in estimate.job.to_config().items()}


def finite(value: Any) -> Any:
    """`value` with an endless tier's size as the text "inf", which JSON has no number for and a config file accepts."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return "inf" if isinstance(value, float) and isinf(value) else value
