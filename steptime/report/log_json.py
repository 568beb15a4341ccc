"""The document of `3dtrn validate --log --json`: raw SI figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.answer.result import config, finite

if TYPE_CHECKING:
    from steptime.validation.logged import Compared


def to_dict(compared: Compared) -> dict[str, Any]:
    """A compared log as plain data: the plan, measured, predicted, errors (predicted / measured - 1), memory by rank."""
    run, ours = compared.run, compared.estimate
    step_s, tokens = run.steady.step_s, compared.tokens_per_step
    return {
        "files": list(run.log.files),
        "framework": run.reading.framework,
        "config": config(ours),
        "assumptions": list(ours.assumptions),
        "flags": [flag._asdict() for flag in run.reading.flags],
        "notes": list(run.notes),
        "measured": {**run.steady._asdict(), **_rates(compared, step_s, tokens)},
        "predicted": {
            "step_s": ours.step_s,
            "step_s_p10": ours.time.step_s_p10,
            "step_s_p90": ours.time.step_s_p90,
            **_rates(compared, ours.step_s, tokens),
            "verdict": ours.memory.verdict,
            "stages": [row._asdict() for row in ours.memory.stages],
        },
        "step_time_error": ours.step_s / step_s - 1.0,
        "flops_convention": _convention(compared),
        "memory": [
            {
                **row._asdict(),
                "allocated_error": _error(row.predicted_allocated_bytes, row.allocated_bytes),
                "reserved_error": _error(row.predicted_reserved_bytes, row.reserved_bytes),
            }
            for row in compared.memory
        ],
        "parameters": [row._asdict() for row in compared.parameters],
    }


def _rates(compared: Compared, step_s: float, tokens: float) -> dict[str, float]:
    devices = compared.estimate.devices
    return {
        "tokens_per_s": tokens / step_s,
        "tokens_per_s_per_device": tokens / step_s / devices,
        "tflops_per_device": compared.flops_per_step / step_s / devices / 1e12,
    }


def _convention(compared: Compared) -> dict[str, Any] | None:
    """The log's own FLOPs per step, the convention that reproduces them (null: none within 1 %), and what each would give."""
    found = compared.counted
    if found is None:
        return None
    return {
        "logged_flops_per_step": found.logged_flops_per_step,
        "matches": [c.name for c in found.matches],
        "known": {c.name: finite(c.flops_per_step) for c in found.known},
    }


def _error(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1.0 if measured else None
