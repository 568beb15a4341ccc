"""Predicted vs. measured: every row judged, or skipped with a reason.

Errors are signed, predicted / measured - 1: positive means that the estimate is too slow, or too large.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from math import exp
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeAlias

from steptime.answer.flops import step_flops
from steptime.answer.interval import interval_at
from steptime.answer.measured import RunPlace, place_of
from steptime.answer.result import estimate
from steptime.answer.verdict import between_steps, stage_memory
from steptime.base.collector import without_collector
from steptime.base.rows import Memory
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.overhead import GIB
from steptime.memory.states import stage_states
from steptime.validation.ci_jobs import AllocatorMemory, allocator_memory, is_ci
from steptime.validation.exclusion import exclusion
from steptime.validation.measured_figures import measured_memory, measured_step_s
from steptime.validation.measurements import MeasuredRow, SkipRowError, shipped
from steptime.validation.row_plan import Mapped, to_config, to_job
from steptime.validation.row_software import precision_family

LONGEST = 300
"""Length limit of a reason."""


class Judgement(NamedTuple):
    """One row and its result; None where a figure is missing."""

    row: MeasuredRow
    skipped: str | None = None
    excluded: str | None = None
    """Why a judged row is left out of the headline figures."""
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
    """Predicted peak (reserved, context and communicators) divided by the memory that the device has."""
    model_flops: float | None = None
    """Model FLOPs of a step per device, attention halved."""
    tokens_per_device: float | None = None
    """Tokens of a step per device."""
    allocator: AllocatorMemory | None = None
    """Further readings of torch's allocator in a job of Megatron-LM's tests."""
    place: RunPlace | None = None
    """The job's place among the measured runs behind the intervals."""

    @property
    def step_error(self) -> float | None:
        """Signed relative error of the step time."""
        return _error(self.predicted_step_s, self.measured_step_s)

    @property
    def memory_error(self) -> float | None:
        """Signed relative error of the peak memory."""
        return _error(self.predicted_bytes, self.measured_bytes)

    @property
    def measured_tokens_per_s(self) -> float | None:
        """Tokens per second and device from the measured step time."""
        return _rate(self.tokens_per_device, self.measured_step_s)

    @property
    def predicted_tokens_per_s(self) -> float | None:
        """Tokens per second and device of the estimate."""
        return _rate(self.tokens_per_device, self.predicted_step_s)

    @property
    def step_span(self) -> list[float] | None:
        """10th and 90th percentile of the step time [s], with the row itself left out."""
        return self._span("step", self.predicted_step_s)

    @property
    def memory_span(self) -> list[float] | None:
        """10th and 90th percentile of the peak memory [GiB], with the row itself left out."""
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
        if is_ci(self.row):
            return (self.accelerator, self.row.text("config"), self.row.text("container"))
        columns = ("model_name", "n_layers", "hidden", "n_gpus", "tp", "pp", "cp", "vpp")
        batch = ("seq_len", "global_batch_size", "micro_batch_size")
        of_experts = ("ep",) if self.row.text("n_experts") not in {"", "0", "1"} else ()
        return (self.accelerator, self.precision, *(self.row.text(name) for name in (*columns, *batch, *of_experts)))

    @property
    def series(self) -> tuple[str, ...]:
        """Rows of one series tend to share one error: source, accelerator, model."""
        return (self.row.group, self.accelerator, *(self.row.text(name) for name in ("family", "hidden", "n_layers")))

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
    """The figures that a row takes from an estimate."""

    step_s: float
    memory: Memory
    model_flops: float
    """FLOPs per step of the whole job."""


RowEstimates: TypeAlias = dict[str, RowEstimate]
"""Answers by config text: many rows repeat one config."""


def judge_all(rows: Iterable[MeasuredRow], *, known_release: bool = True) -> list[Judgement]:
    """Every row with its estimate; a config that several rows share is estimated once."""
    answers: RowEstimates = {}
    with without_collector():  # it takes a sixth of the time
        return [judge(row, answers, known_release=known_release) for row in rows]


@cache
def judge_shipped() -> tuple[Judgement, ...]:
    """Every row of the included collection, judged once per process, with the shipped constants."""
    return tuple(judge_all(shipped()))


def judge(row: MeasuredRow, answers: RowEstimates | None = None, *, known_release: bool = True) -> Judgement:
    """One row with its estimate; a problem with the row becomes a reason, never an exception.

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
    """The row with its estimate. A run out of memory also gets a predicted step time, for searches."""
    assumed = list(mapped.assumed)
    if measured.metric and not measured.row.text("mem_metric") and not measured.row.published:
        assumed.append("mem_metric: allocated, in GB of 1e9 bytes")
    timed = measured.measured_step_s is not None or measured.ran_out
    memory = found.memory
    return measured._replace(
        excluded=exclusion(measured.row, mapped.assumed),
        allocator=_allocator_memory(measured.row, job, memory),
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


def _allocator_memory(row: MeasuredRow, job: Job, memory: Memory) -> AllocatorMemory | None:
    """The persisting bytes and the first peak of a job of Megatron-LM's tests, which logs those of its last stage."""
    last = memory.stages[-1]
    return allocator_memory(row, job, last.persisting_bytes, last.first_peak_bytes) if is_ci(row) else None


def _answer(mapped: Mapped, job: Job, answers: RowEstimates) -> RowEstimate:
    """The estimate of a job."""
    key = json.dumps(mapped.config, sort_keys=True)
    if key not in answers and mapped.job is not None:  # nothing but memory was measured
        assembly = Assembly(job)
        states = stage_states(assembly)
        answers[key] = RowEstimate(0.0, between_steps(stage_memory(assembly, states), assembly, states), 0.0)
    elif key not in answers:
        found = estimate(job)
        answers[key] = RowEstimate(found.step_s, found.peaks, step_flops(found.assembly, 0.0).model_per_step)
    return answers[key]


def _predicted_bytes(measured: Judgement, memory: Memory) -> float:
    """The estimate of what was read; Megatron-LM logs the memory of the last rank, which is of the last stage."""
    if measured.metric == "allocated":
        last_only = measured.row.file == "nvidia" or is_ci(measured.row)
        return memory.stages[-1].allocated_bytes if last_only else memory.peak_allocated_bytes
    if measured.metric == "nvidia-smi":
        return memory.peak_reserved_bytes + sum(memory.overhead_bytes)
    return memory.peak_reserved_bytes


FEWEST = 500
"""Number of rows below which processes cost more than they save."""
PIECES = 8
"""Pieces per core: rows differ in cost; neighbors stay together, since they often share a config."""


def judge_rows(rows: Sequence[MeasuredRow], *, known_release: bool = True) -> list[Judgement]:
    """`judge_all`, in several processes where that is safe and faster."""
    cores = len(os.sched_getaffinity(0)) if forks() else 1
    if cores == 1 or len(rows) < FEWEST:
        return judge_all(rows, known_release=known_release)
    size = -(-len(rows) // (PIECES * cores))
    pieces = [rows[at : at + size] for at in range(0, len(rows), size)]
    with ProcessPoolExecutor(cores, mp_context=get_context("fork")) as pool:
        return [j for piece in pool.map(partial(judge_all, known_release=known_release), pieces) for j in piece]


def forks() -> bool:
    """Whether a fork of this process is safe: on Linux, with one thread, and no library loaded that starts threads of its own."""
    alone = threading.active_count() == 1 and not {"torch", "numpy"} & sys.modules.keys()
    return sys.platform == "linux" and alone
