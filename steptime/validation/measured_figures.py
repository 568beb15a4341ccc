"""The figures that a row measured: seconds of a step, and a peak memory with the counter it was read from."""

from __future__ import annotations

import re
from typing import NamedTuple

from steptime.memory.overhead import GIB
from steptime.validation.ci_jobs import is_ci
from steptime.validation.exclusion import leak
from steptime.validation.measurements import MeasuredRow, SkipRowError

READABLE = re.compile(r"(?!.*\b(?:[kmt]i?b|bytes)\b).*(?:nvidia-smi|allocated|reserved|\bgi?b\b)")
"""A `mem_metric` in lower case that names the counter or its unit, and no unit other than GB and GiB."""

ALLOCATOR = frozenset({"allocated", "reserved"})
"""Counters of torch's allocator, which the memory interval is based on. nvidia-smi also counts memory cached by the
allocator, which the job does not need, and other programs; what an unstated figure counts is unknown; a leak of one program
says nothing about others."""
LEAK = "leak"
"""Counter of a published row whose peak consists to a large part of tensors that a defect of its program keeps
(`measurements/exclusions.yaml`)."""


class Metric(NamedTuple):
    """The counter that a peak memory was read from."""

    name: str
    """allocated, reserved, nvidia-smi, or unstated or leak (compared with reserved)."""
    unit_bytes: float


def measured_step_s(row: MeasuredRow) -> float | None:
    """Seconds of a step as measured, or from tokens/s per device; None where neither is given, or it times the host.

    Raises:
        SkipRowError: a bad number, or an average over a whole run.
    """
    if is_ci(row):
        return None
    rate, step_s = row.number("tokens_per_s_per_gpu"), row.number("step_time_s")
    if re.search(r"end-to-end|average step|production average", row.text("row_type")):
        raise SkipRowError("average over a whole run, including interruptions")
    if step_s is None and rate is not None:
        tokens = row.needed("global_batch_size") * row.needed("seq_len")
        return tokens / (rate * row.needed("n_gpus"))
    return step_s


def measured_memory(row: MeasuredRow) -> tuple[float | None, str]:
    """Peak memory [B] and its counter (`Metric`).

    Raises:
        SkipRowError: a bad number.
    """
    if is_ci(row):
        return row.number("peak_allocated_bytes"), "allocated"
    value = row.number("peak_memory_gb")
    if value is None:
        return None, ""
    metric = memory_metric(row)
    return value * metric.unit_bytes, LEAK if leak(row) else metric.name


def memory_metric(row: MeasuredRow) -> Metric:
    """The counter named by `mem_metric`; empty means torch's peak allocation in NVIDIA's rows and a user's own.

    Raises:
        SkipRowError: a user's own row says neither what was read nor its unit, or another unit.
    """
    said = row.text("mem_metric").lower()
    unit = GIB if re.search(r"gib|mib ?/ ?1024", said) else 1e9
    if not row.published and said and not READABLE.match(said):
        raise SkipRowError(f"mem_metric: expected allocated, reserved or nvidia-smi, and GB or GiB (got {said[:40]!r})")
    if "not stated" in said:
        return Metric("unstated", unit)
    for word in ("nvidia-smi", "allocated", "reserved"):
        if word in said:
            return Metric(word, unit)
    if re.search(r"\bactive\b|max_active", said):
        return Metric("allocated", unit)  # and what another stream still uses (torch/cuda/memory.py, memory_stats)
    if not said and row.file in {"", "nvidia"}:
        return Metric("allocated", unit)
    return Metric("unstated", unit)
