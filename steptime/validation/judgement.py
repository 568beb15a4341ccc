"""Predicted beside measured: every row judged, or skipped with its reason.

Errors are signed, predicted / measured - 1: positive means that the estimate is too slow, or too large.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from math import exp
from typing import Any, NamedTuple, TypeAlias

from steptime.answer.flops import step_flops
from steptime.answer.interval import interval_at
from steptime.answer.measured import RunPlace, place_of
from steptime.answer.result import estimate
from steptime.base.rows import Memory
from steptime.job.job import Job
from steptime.validation.exclusion import exclusion
from steptime.validation.measurements import MeasuredRow, SkipRowError, shipped
from steptime.validation.row_plan import Mapped, to_config, to_job
from steptime.validation.row_software import precision_family

GIB = 2.0**30
READABLE = re.compile(r"(?!.*\b(?:[kmt]i?b|bytes)\b).*(?:nvidia-smi|allocated|reserved|\bgi?b\b)")
"""A `mem_metric` in lower case that says what was read or its unit, and no unit other than GB and GiB."""
LONGEST = 300
"""Characters of a reason."""


class Metric(NamedTuple):
    """What a peak memory was read from."""

    name: str
    """allocated, reserved, nvidia-smi, or unstated (compared with reserved)."""
    unit_bytes: float


class Judgement(NamedTuple):
    """One row and what became of it; None where there is nothing to say."""

    row: MeasuredRow
    skipped: str | None = None
    excluded: str | None = None
    """Why a judged row stands beside the headline figures."""
    assumed: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    accelerator: str = ""
    precision: str = ""
    framework: str = ""
    measured_step_s: float | None = None
    predicted_step_s: float | None = None
    measured_bytes: float | None = None
    predicted_bytes: float | None = None
    metric: str = ""
    verdict: str = ""
    occupancy: float | None = None
    """Predicted peak (reserved, context and communicators) over the memory that the device has to give."""
    model_flops: float | None = None
    """Model FLOPs of a step per device, attention halved."""
    tokens_per_device: float | None = None
    """Tokens of a step per device."""
    place: RunPlace | None = None
    """Where the job stands among the measured runs that intervals rest on."""

    @property
    def step_error(self) -> float | None:
        """Signed error of the step time, a share."""
        return _error(self.predicted_step_s, self.measured_step_s)

    @property
    def memory_error(self) -> float | None:
        """Signed error of the peak memory, a share."""
        return _error(self.predicted_bytes, self.measured_bytes)

    @property
    def measured_tokens_per_s(self) -> float | None:
        """Tokens per second and device that the measured step time gives."""
        return _rate(self.tokens_per_device, self.measured_step_s)

    @property
    def predicted_tokens_per_s(self) -> float | None:
        """Tokens per second and device of the estimate."""
        return _rate(self.tokens_per_device, self.predicted_step_s)

    @property
    def step_span(self) -> list[float] | None:
        """10th and 90th percentile of the step time [s], without what the row itself says."""
        return self._span("step", self.predicted_step_s)

    @property
    def memory_span(self) -> list[float] | None:
        """10th and 90th percentile of the peak memory [GiB], without what the row itself says."""
        return self._span("memory", self.predicted_bytes, GIB)

    def _span(self, of: str, predicted: float | None, unit: float = 1.0) -> list[float] | None:
        if predicted is None or self.place is None:
            return None
        found = interval_at(of, self.place, self.row.id if self.row.published else "")
        return [predicted / unit * exp(end) for end in (found.low, found.high)]

    @property
    def ran_out(self) -> bool:
        """Whether the run ended out of memory."""
        return self.row.file == "out_of_memory" or self.row.text("row_type") == "oom"

    @property
    def cell(self) -> tuple[str, ...]:
        """Rows of one cell share one vote: model, accelerator, layout, batch, precision family."""
        columns = ("model_name", "n_layers", "hidden", "n_gpus", "tp", "pp", "cp", "vpp")
        batch = ("seq_len", "global_batch_size", "micro_batch_size")
        of_experts = ("ep",) if self.row.text("n_experts") not in {"", "0", "1"} else ()
        return (self.accelerator, self.precision, *(self.row.text(name) for name in (*columns, *batch, *of_experts)))

    def to_dict(self) -> dict[str, Any]:
        """The row of `3dtrn validate --json`."""
        return {
            "id": self.row.id,
            "split": self.row.text("split"),
            "source": self.row.group,
            "gpu": self.row.text("gpu"),
            "accelerator": self.accelerator,
            "measured_step_s": self.measured_step_s,
            "predicted_step_s": self.predicted_step_s,
            "predicted_step_s_p10_p90": self.step_span,
            "step_time_error": self.step_error,
            "measured_tokens_per_s_per_gpu": self.measured_tokens_per_s,
            "predicted_tokens_per_s_per_gpu": self.predicted_tokens_per_s,
            "measured_memory_gib": None if self.measured_bytes is None else self.measured_bytes / GIB,
            "predicted_memory_gib": None if self.predicted_bytes is None else self.predicted_bytes / GIB,
            "predicted_memory_gib_p10_p90": self.memory_span,
            "memory_error": self.memory_error,
            "memory_metric": self.metric or None,
            "verdict": self.verdict or None,
            "predicted_over_capacity": self.occupancy,
            "assumed": list(self.assumed),
            "apart": self.excluded,
            "skipped": self.skipped,
        }


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1.0


def _rate(tokens: float | None, step_s: float | None) -> float | None:
    return None if tokens is None or step_s is None else tokens / step_s


class RowEstimate(NamedTuple):
    """What a row takes from an estimate."""

    step_s: float
    memory: Memory
    model_flops: float
    """Of the whole job."""


RowEstimates: TypeAlias = dict[str, RowEstimate]
"""Answers by config, as its text: many rows repeat one."""


def judge_all(rows: Iterable[MeasuredRow], *, known_release: bool = True) -> list[Judgement]:
    """Every row against its estimate, a config that several rows share estimated once."""
    answers: RowEstimates = {}
    with _no_collection():
        return [judge(row, answers, known_release=known_release) for row in rows]


@cache
def judge_shipped() -> tuple[Judgement, ...]:
    """Every row of the shipped collection, judged once in a process, with the constants that ship."""
    return tuple(judge_all(shipped()))


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for reference cycles meanwhile: estimates leave none to speak of, and it takes a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def judge(row: MeasuredRow, answers: RowEstimates | None = None, *, known_release: bool = True) -> Judgement:
    """One row against its estimate; trouble with the row is a reason, never an exception.

    `answers` holds those of rows before it, and takes this one's.
    """
    measured = Judgement(row, precision=precision_family(row.text("precision")))
    try:
        step_s, (memory, metric) = measured_step_s(row), measured_memory(row)
        measured = measured._replace(measured_step_s=step_s, measured_bytes=memory, metric=metric)
        mapped = to_config(row, known_release=known_release)
        job = to_job(mapped)
    except SkipRowError as problem:
        text = str(problem)
        return measured._replace(skipped=text if len(text) <= LONGEST else text[: LONGEST - 4] + " ...")
    if step_s is None and memory is None and not measured.ran_out:
        return measured._replace(skipped="nothing measured: no step time, tokens/s or peak memory")
    return _predict(measured, mapped, _answer(mapped, job, {} if answers is None else answers), job)


def _predict(measured: Judgement, mapped: Mapped, found: RowEstimate, job: Job) -> Judgement:
    """The row with its estimate beside it. A run out of memory has a predicted step time too: a search would see it."""
    assumed = list(mapped.assumed)
    if measured.metric and not measured.row.text("mem_metric") and not measured.row.published:
        assumed.append("mem_metric: allocated, in GB of 1e9 bytes")
    timed = measured.measured_step_s is not None or measured.ran_out
    memory = found.memory
    return measured._replace(
        excluded=exclusion(measured.row, mapped.assumed),
        assumed=tuple(assumed),
        config=mapped.config,
        accelerator=job.machine.accelerator.name,
        framework=mapped.framework.family,
        predicted_step_s=found.step_s if timed else None,
        predicted_bytes=None if measured.measured_bytes is None else _predicted_bytes(measured, memory),
        verdict=memory.verdict,
        occupancy=(memory.peak_reserved_bytes + sum(memory.overhead_bytes)) / memory.capacity_bytes,
        model_flops=found.model_flops / job.parallelism.devices,
        tokens_per_device=float(job.data.gbs) * job.data.seqlen / job.parallelism.devices,
        place=place_of(job),
    )


def _answer(mapped: Mapped, job: Job, answers: RowEstimates) -> RowEstimate:
    """The estimate of a job."""
    key = json.dumps(mapped.config, sort_keys=True)
    if key not in answers:
        found = estimate(job)
        answers[key] = RowEstimate(found.step_s, found.memory, step_flops(found.assembly, 0.0).model_per_step)
    return answers[key]


def measured_step_s(row: MeasuredRow) -> float | None:
    """Seconds of a step as measured, or from tokens/s per device; None where neither is there, or it times the host.

    Raises:
        SkipRowError: a bad number, or an average over a whole run.
    """
    if row.file == "nvidia_ci":
        return None
    rate, step_s = row.number("tokens_per_s_per_gpu"), row.number("step_time_s")
    if re.search(r"end-to-end|average step|production average", row.text("row_type")):
        raise SkipRowError("average over a whole run, stops included")
    if step_s is None and rate is not None:
        tokens = row.needed("global_batch_size") * row.needed("seq_len")
        return tokens / (rate * row.needed("n_gpus"))
    return step_s


def measured_memory(row: MeasuredRow) -> tuple[float | None, str]:
    """Peak memory [B] and what it was read from: allocated, reserved, nvidia-smi or unstated.

    Raises:
        SkipRowError: a bad number.
    """
    value = row.number("peak_memory_gb")
    if value is None:
        return None, ""
    metric = memory_metric(row)
    return value * metric.unit_bytes, metric.name


def memory_metric(row: MeasuredRow) -> Metric:
    """The metric of `mem_metric`; NVIDIA's rows and a user's own say torch's peak allocation where it is empty.

    Raises:
        SkipRowError: a user's own row says neither what was read nor its unit, or another unit.
    """
    said = row.text("mem_metric").lower()
    unit = GIB if "gib" in said else 1e9
    if not row.published and said and not READABLE.match(said):
        raise SkipRowError(f"mem_metric: expected allocated, reserved or nvidia-smi, and GB or GiB (got {said[:40]!r})")
    if "not stated" in said:
        return Metric("unstated", unit)
    for word in ("nvidia-smi", "allocated", "reserved"):
        if word in said:
            return Metric(word, unit)
    if not said and row.file in {"", "nvidia", "nvidia_ci"}:
        return Metric("allocated", unit)
    return Metric("unstated", unit)


def _predicted_bytes(measured: Judgement, memory: Memory) -> float:
    """The estimate of what was read; Megatron-LM logs the memory of the last rank, which is of the last stage."""
    if measured.metric == "allocated":
        last_only = measured.row.file in {"nvidia", "nvidia_ci"}
        return memory.stages[-1].allocated_bytes if last_only else memory.peak_allocated_bytes
    if measured.metric == "nvidia-smi":
        return memory.peak_reserved_bytes + sum(memory.overhead_bytes)
    return memory.peak_reserved_bytes
