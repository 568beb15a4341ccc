"""A training log and its job: measured vs. predicted, from the log only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from steptime.answer.result import Estimate, estimate
from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping
from steptime.job.edit import put, read_settings
from steptime.job.job import Job
from steptime.job.sections import Hardware
from steptime.launch.devices import states_devices
from steptime.launch.kinds import KINDS, TABLES, is_plan
from steptime.launch.logs.job_log import JobLog, TellProgress, read_log
from steptime.launch.logs.printed_config import other_devices, started_by
from steptime.launch.logs.steady import Steady, steady
from steptime.launch.megatron.sources import from_arguments, of_dump
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.read import read, read_as, read_text
from steptime.launch.reading import Reading, to_job
from steptime.validation.conventions import ComparedFlops, counted
from steptime.validation.measurements import MeasuredRow, SkipRowError
from steptime.validation.row_machine import hardware_of
from steptime.validation.setting_costs import settings

CONFIG_OF = {"torchtitan": "torchtitan", "NeMo": "nemo"}
"""Framework of a log's lines -> kind of the config printed at its beginning; else Megatron's argument dump."""
ANY_MACHINE = "dgx-h100"
"""Replaces an unknown machine while a plan is checked for other problems."""
BRIDGE = re.compile(rb"Task Configuration|ConfigContainer")
"""Megatron-Bridge logs iterations like Megatron-LM, and prints its own config."""


class LoggedRun(NamedTuple):
    """A job and what its logs measured."""

    job: Job
    reading: Reading
    config: dict[str, Any]
    """The plan as a YAML file would hold it: the log's, with the settings applied."""
    log: JobLog
    steady: Steady
    notes: list[str]
    """Assumptions, and values taken from the log, that were needed to combine both."""


class RankMemory(NamedTuple):
    """Peaks of one rank and of its stage [B]; None where the log has no figure."""

    rank: int
    """-1 where the log does not name the rank."""
    stage: int | None
    allocated_bytes: float | None
    reserved_bytes: float | None
    predicted_allocated_bytes: float
    predicted_reserved_bytes: float


class RankParameters(NamedTuple):
    """Parameters of one model-parallel rank, from the log and from the plan."""

    tp_rank: int
    stage: int
    logged: int
    predicted: int


class Compared(NamedTuple):
    """Measured and predicted."""

    run: LoggedRun
    estimate: Estimate
    memory: list[RankMemory]
    parameters: list[RankParameters]
    counted: ComparedFlops | None
    """The log's FLOPs by convention; None where it prints no TFLOP/s."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step, all devices."""
        return float(self.run.job.data.gbs) * self.run.job.data.seqlen

    @property
    def flops_per_step(self) -> float:
        """FLOPs of a step by the convention that matches the log's figure, else by ours (causal attention halved)."""
        if self.counted is not None and self.counted.matches:
            return self.counted.matches[0].flops_per_step
        return self.estimate.flops.model_per_step


def read_run(
    paths: Sequence[str],
    sets: Sequence[str] = (),
    *,
    kind: str | None = None,
    plan: str | None = None,
    allow_unmodeled: bool = False,
    hardware: Hardware | None = None,
    progress: TellProgress | None = None,
) -> LoggedRun:
    """The job of one run's logs and its steady state; `sets` are `a.b=c` applied to its config, `kind` as in `3dtrn --from`.

    `plan`: a plan, config or launch script of the same job, for a log that does not print its own.
    `hardware` is used where neither the logs nor `sets` name the machine.

    Raises:
        ConfigError: one line per problem: no iterations, no or a cut argument dump, dumps of different jobs, a layout that
            cannot run, flags that are not modeled.
    """
    log = read_log(paths, progress)
    changes, unread = read_settings(sets)
    if unread:
        raise ConfigError(unread)
    reading = _reading(log, kind, changes) if plan is None else _plan_file(plan, kind, changes, log)
    notes, problems = _name_machine(reading, log, changes, hardware)
    known = changes | ({"hardware": ANY_MACHINE} if problems else {})
    try:
        job = to_job(reading, known, allow_unmodeled=allow_unmodeled)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    tokens = float(job.data.gbs) * job.data.seqlen / (log.job_devices or job.parallelism.devices)
    _check_timer(log, job)
    found = steady(log, tokens, job.data.gbs)
    if found.batch and found.batch != job.data.gbs and "data.gbs" not in changes:
        notes.append(f"data.gbs: {found.batch:,} in the lines used, not {job.data.gbs:,} ({plan or 'arguments'})")
        changes["data.gbs"] = found.batch
        pair = reading._replace(source=f"{log.files[0]}: {notes[-1]}, which another job has")
        job = to_job(pair, changes, allow_unmodeled=allow_unmodeled)
    config = {key: value for key, value in reading.config.items() if key != "notes"}
    for path, value in changes.items():
        put(config, path, value)
    return LoggedRun(job, reading, config, log, found, [*notes, *log.notes, *found.notes])


def _check_timer(log: JobLog, job: Job) -> None:
    """Refuse times of DeepSpeed's timer that leave out micro-batches.

    It starts at each micro-batch (deepspeed/runtime/engine.py, forward) and adds up what it has when it stops, in step(): where
    a training loop calls step() once for several micro-batches, all but the last are left out.
    """
    micro_batches = job.data.gbs // (job.data.microbatch_sz * job.parallelism.dp)
    if log.steps is log.timer and 0 < log.timed_per_step < 1.5 <= micro_batches:
        raise ConfigError(
            f"{log.files[0]}: DeepSpeed's timer stopped once in a step of {micro_batches:,} micro-batches, and its samples/s "
            "leave out all but the last; give a log with the step times of the training loop"
        )


def compare(run: LoggedRun) -> Compared:
    """The estimate of a run with its measured figures."""
    found = estimate(run.job)
    work = run.steady.flops_per_device * (run.log.job_devices or found.devices)
    return Compared(
        run, found, _memory(run, found), _parameters(run, found), counted(found.assembly, work) if work else None
    )


def _reading(log: JobLog, kind: str | None, sets: dict[str, Any]) -> Reading:
    """The config of the job: from the argument dump, else from what the framework prints at the beginning of the log."""
    if kind is not None and kind not in {*KINDS, *TABLES}:
        raise ConfigError(f"--from {kind}: unknown kind; one of {', '.join([*KINDS, *TABLES])}")
    if kind in {None, "megatron"} and log.arguments is not None:
        reading = _plan_of(log, log.arguments, log.arguments_file)
        _check_same_job(log, reading)
        return reading
    if log.cut_dump is not None and kind in {None, "megatron"}:
        raise log.cut_dump
    chosen = kind or CONFIG_OF.get(log.framework) or ("nemo" if BRIDGE.search(log.head) else None)
    nearby = NearbyFiles(Path(log.files[0]).parent)
    if chosen is None and (command := started_by(bytes(log.head).decode("utf-8", "replace"))):
        return read_as("auto", log.files[0], command, {}, sets, nearby)
    if chosen is None or chosen == "megatron":
        given = "the plan, config or launch script of the job with --plan FILE"
        if log.framework and not log.framework.startswith("Megatron"):
            raise ConfigError(
                f"{log.files[0]}: a log of {log.framework} does not state the job's model and layout; give {given}"
            )
        raise ConfigError(
            f"{log.files[0]}: no argument dump (a line 'arguments' between dashes) before the iterations; give the log "
            f"from its beginning, or {given}"
        )
    try:
        return read_as(chosen, log.files[0], bytes(log.head).decode("utf-8", "replace"), {}, sets, nearby)
    except ConfigError as error:
        lacks = "does not print the job's config"
        raise ConfigError(f"{line}; or add --plan FILE" if lacks in line else line for line in error.problems) from None


def _plan_file(path: str, kind: str | None, sets: dict[str, Any], log: JobLog) -> Reading:
    """The config of a plan, or of a framework's config or launch script, given with a log; the latter with the log's devices."""
    text = read_text(path.partition(".py:")[0] + (".py" if ".py:" in path else ""))
    if is_plan(text):
        return Reading(path, "a plan", parse_mapping(text, path), [])
    if log.devices and not states_devices(sets):
        with suppress(ConfigError):  # a file that does not say how many
            log.notes += other_devices(read(kind or "auto", path, sets), log.devices)
        sets["devices"] = log.devices
    return read(kind or "auto", path, sets)


def _plan_of(log: JobLog, arguments: dict[str, str], name: str) -> Reading:
    """The plan of Megatron's arguments, with the vocabulary size that is logged after them."""
    vocabulary = log.vocabulary.size if log.vocabulary is not None else None
    return from_arguments(of_dump(arguments, log.zero_stage), name, vocab_size=vocabulary)


def _check_same_job(log: JobLog, reading: Reading) -> None:
    """Raise where a later argument dump gives another plan: the first setting that differs, and both locations."""
    first = log.arguments or {}
    for name, changed in log.contradictions:
        try:
            other = _plan_of(log, first | changed, name).config
        except ConfigError as error:
            raise ConfigError(f"{name}: different job than {log.arguments_file}: {error.problems[0]}") from None
        if differ := settings(reading.config | {"notes": None}, other | {"notes": None}):
            path, ours, theirs = differ[0]
            raise ConfigError(
                f"{name}: different job than {log.arguments_file}: {path} is {theirs}, not {ours}; give the logs of one job"
            )


def _name_machine(
    reading: Reading, log: JobLog, changes: dict[str, Any], other: Hardware | None
) -> tuple[list[str], list[str]]:
    """Put the machine that the log names, else `other`, into `changes` where none is set.

    Returns notes and problems: the accelerator is not named, or it is unknown.
    """
    said = reading.config.get("hardware")
    known = said if isinstance(said, str) else (said or {}).get("node_type")
    if known or "hardware.node_type" in changes or "hardware" in changes:
        return [], []
    if not log.device and other is not None:
        changes["hardware"] = other.model_dump(exclude_defaults=True)
        return [f"hardware: {other.machine.name}, taken from the other side: the log does not name its accelerator"], []
    fix = "add --set hardware.node_type=NAME (3dtrn machines lists them)"
    if not log.device:
        return [], [f"{log.files[0]}: does not name its accelerator; {fix}"]
    try:
        found = hardware_of(MeasuredRow({"gpu": log.device}, "", 0))
    except SkipRowError as error:
        return [], [f"{log.files[0]}: {error}; {fix}"]
    changes["hardware.node_type"] = found.section["node_type"]
    return [f"hardware.node_type: {found.section['node_type']} for the log's {log.device!r}"], []


def stage_of(rank: int, run: LoggedRun) -> int | None:
    """The pipeline stage of a rank in Megatron's order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp where set; None if unknown.

    Source: megatron/core/parallel_state.py, initialize_model_parallel (RankGenerator); torchtitan's mesh has pp outermost too.
    """
    p, arguments = run.job.parallelism, run.log.arguments or {}
    if p.pp == 1:
        return 0
    several_nodes = p.devices > run.job.machine.devices_per_node
    if not 0 <= rank < p.devices or (run.log.local_ranks and several_nodes):
        return None
    if arguments.get("use_tp_pp_dp_mapping") == "True":
        return rank // (p.tp * p.cp) % p.pp
    return rank // (p.tp * p.cp * p.dp)


def _memory(run: LoggedRun, found: Estimate) -> list[RankMemory]:
    """Every rank that reports a peak, with the prediction for its stage; the largest stage where the rank is unknown."""
    rows = []
    for rank in sorted({*run.log.allocated, *run.log.reserved}):
        stage = stage_of(rank, run)
        memory = found.memory
        ours = None if stage is None else memory.stages[stage]
        rows.append(
            RankMemory(
                rank,
                stage,
                run.log.allocated.get(rank),
                run.log.reserved.get(rank),
                memory.peak_allocated_bytes if ours is None else ours.allocated_bytes,
                memory.peak_reserved_bytes if ours is None else ours.reserved_bytes,
            )
        )
    return rows


def _parameters(run: LoggedRun, found: Estimate) -> list[RankParameters]:
    """Every model-parallel rank whose parameters the log counts, with the plan's count."""
    stages = [sum(map(found.assembly.local_params, chunks)) for chunks in found.assembly.stages]
    return [
        RankParameters(tp_rank, stage, logged, stages[stage])
        for (tp_rank, stage), logged in sorted(run.log.parameters.items())
        if stage < len(stages)
    ]
