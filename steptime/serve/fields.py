"""The fields of the what-if page: which settings, and their valid values, from the classes of a plan's sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args, get_origin

from steptime.hardware.machine import is_shipped, machine_names, shipped_name
from steptime.job.job import Job
from steptime.job.mesh import Parallelism
from steptime.model.presets import model_names
from steptime.software.performance import Performance
from steptime.software.profiles import profile_names


class Field(NamedTuple):
    """One setting of the form."""

    path: str
    label: str
    kind: Literal["choice", "number", "power"]
    """power: a slider over powers of two next to the number."""
    required: bool = False
    most: int = 0
    """For a slider, the largest power of two."""


FIELDS = (
    Field("model.preset", "model", "choice", required=True),
    Field("hardware.node_type", "machine", "choice", required=True),
    Field("parallelism.tp", "tensor parallel (tp)", "power", required=True, most=6),
    Field("parallelism.pp", "pipeline stages (pp)", "power", required=True, most=7),
    Field("parallelism.cp", "context parallel (cp)", "power", most=6),
    Field("parallelism.ep", "expert parallel (ep)", "power", most=8),
    Field("parallelism.dp", "replicas (dp)", "power", required=True, most=12),
    Field("parallelism.vpp", "chunks per stage (vpp)", "number"),
    Field("parallelism.sp", "sequence parallel", "choice"),
    Field("parallelism.zero_level", "ZeRO level", "choice"),
    Field("parallelism.schedule", "schedule", "choice"),
    Field("data.gbs", "global batch [sequences]", "power", required=True, most=14),
    Field("data.microbatch_sz", "micro-batch [sequences]", "power", required=True, most=6),
    Field("data.seqlen", "sequence length", "power", required=True, most=20),
    Field("performance.activation_checkpointing_type", "recomputation", "choice"),
    Field("performance.precision", "precision", "choice"),
    Field("performance.software", "software", "choice"),
)
"""In the order of the form."""


def choices(path: str) -> list[str]:
    """What a choice may be, as text."""
    section, _, name = path.partition(".")
    named: dict[str, Callable[[], list[str]]] = {
        "model.preset": model_names,
        "hardware.node_type": machine_names,
        "performance.software": profile_names,
        "parallelism.sp": lambda: ["true", "false"],
    }
    if path in named:
        return named[path]()
    fields = Parallelism.model_fields if section == "parallelism" else Performance.model_fields
    return [str(word) for word in words_of(fields[name].annotation)]


def words_of(annotation: Any) -> list[Any]:
    """The words of a Literal, at any depth of an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in words_of(part)]


def values(data: dict[str, Any], job: Job) -> dict[str, dict[str, Any]]:
    """The plan's value of every field, and the resolved value."""
    resolved: dict[str, Any] = {
        "model.preset": job.model.name,
        "hardware.node_type": job.machine.name,
        "parallelism.sp": job.sp,
        "parallelism.zero_level": job.zero_level,
        "parallelism.schedule": job.schedule,
        "performance.activation_checkpointing_type": job.recompute.granularity,
        "performance.precision": job.software.precision,
        "performance.software": job.software.name,
    }
    return {f.path: {"said": said(data, f.path), "is": resolved.get(f.path, at(job, f.path))} for f in FIELDS}


def said(data: dict[str, Any], path: str) -> Any:
    """A plan's value at a path; short forms of model and hardware are expanded, a machine's alias is its name."""
    section, _, name = path.partition(".")
    found = data.get(section)
    short = isinstance(found, str) and path in {"model.preset", "hardware.node_type"}
    value = found if short else found.get(name) if isinstance(found, dict) else None
    if path == "hardware.node_type" and isinstance(value, str) and is_shipped(value):
        return shipped_name(value)
    return value if isinstance(value, str | int | float | None) else None


def at(job: Job, path: str) -> Any:
    """The value of a job at a path."""
    section, _, name = path.partition(".")
    return getattr(getattr(job, section), name, None)
