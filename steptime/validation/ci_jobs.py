"""Megatron-LM's functional tests as measured rows: their launch command, read like a user's, and the memory of their records.

`data/measurements/megatron_ci.csv.gz` has a row for each job, `megatron_ci_configs.jsonl.gz` its flags and environment, once for
all jobs that share them. Both are written by `benchmarks/build_megatron_ci.py`.
"""

from __future__ import annotations

import gzip
import json
import shlex
from functools import cache
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping, read_source
from steptime.job.job import Job
from steptime.launch.megatron.sources import read_megatron
from steptime.launch.reading import LaunchFlag, Reading, to_job
from steptime.validation.measurements import CI_FILE, FOLDER, MeasuredRow, SkipRowError
from steptime.validation.row_machine import hardware_of, machine

PROGRAMS = {"hybrid": "pretrain_hybrid.py"}
"""Kind of test -> script that it launches; the others launch pretrain_gpt.py."""
PER_NODE = {"GB200-NVL72": 4}
"""Devices of a node by GPU; the others have 8."""
SINGLE = "gpt3_mcore_reruns_resume_check_grads"
"""A test of one step whose persistent states are those of one device, although its recipe has eight."""
SINGLE_STEP = "a single step on one device (from its states): the peak is that of the first step"
INFERRED = "devices inferred from persistent states; natural routing, ranks have uneven numbers of rows"
REASONS = (
    "mixture of experts", "multi-head latent attention", "hybrid layers", "multi-token prediction",
    "another optimizer",
)  # fmt: skip
"""First words of the reasons that take precedence when a job lacks several things."""
HOLD_MEMORY = frozenset(
    f"--{name}"
    for name in (
        "optimizer", "delay-wgrad-compute", "nccl-ub", "fp16-lm-cross-entropy",
        "reuse-grad-buf-for-mxfp8-param-ag", "no-bias-dropout-fusion",
        "overlap-param-gather-with-optimizer-step",
    )
)  # fmt: skip
"""Flags that are only approximated for the step time but change the memory."""
RESUMED = "resumed from a checkpoint: memory left by loading is not part of a step"
COMPILED = "the peak is that of the first iteration, which compiles the loss"


class AllocatorMemory(NamedTuple):
    """Bytes in torch's allocator on the last rank, measured and predicted; None where the record has no figure."""

    persisting: tuple[float, float] | None
    """Between two steps."""
    first_peak: tuple[float, float] | None
    """In the first step, before the optimizer's moments exist."""
    excluded: str
    """Why the row is not part of the headline figures; "" where it is."""


class CiPlan(NamedTuple):
    """A job of the tests as a plan."""

    job: Job
    assumed: tuple[str, ...]


def launch_script(config: dict[str, Any], devices: int, per_node: int, kind: str) -> str:
    """The shell script that starts a test: its environment, and torchrun with its flags.

    Backslashes in a value are for the shells that it goes through (shell_test_utils/_run_training.sh, eval).
    """
    env, args = config["env"], config["args"]
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in env.items()]
    words: list[str] = []
    for flag, value in args.items():
        if value is False or value is None:
            continue
        said = [] if value is True else value if isinstance(value, list) else str(value).replace("\\", "").split()
        words += [flag, *(shlex.quote(str(item)) for item in said)]
    nodes = -(-devices // per_node)
    start = f"torchrun --nnodes {nodes} --nproc-per-node {devices // nodes} {PROGRAMS.get(kind, 'pretrain_gpt.py')}"
    return "\n".join([*lines, f"{start} {' '.join(words)}", ""])


def plan_of(row: MeasuredRow) -> CiPlan:
    """The plan of a row; built once for all rows with one configuration, machine and image.

    Raises:
        SkipRowError: the one reason for which the job is not judged.
    """
    test = row.id.partition("/")[0]
    devices = 1 if test == SINGLE else row.whole("n_gpus") or records()["devices"].get(test)
    if devices is None:
        raise SkipRowError("n_gpus: not stated")
    found = _plan(row.text("config"), row.text("kind"), devices, row)
    if isinstance(found, str):
        raise SkipRowError(found)
    return found if row.text("n_gpus") else found._replace(assumed=(*found.assumed, f"n_gpus: {devices}, inferred"))


_PLANS: dict[tuple[object, ...], CiPlan | str] = {}


def _plan(key: str, kind: str, devices: int, row: MeasuredRow) -> CiPlan | str:
    """The plan, or the reason why there is none."""
    place = (key, kind, devices, row.text("gpu"), row.text("container"), row.text("first_recorded"))
    if place not in _PLANS:
        name = f"{row.text('model_name')}/{key}"
        try:
            reading = read_ci(name, kind, devices, PER_NODE.get(row.text("gpu"), 8))
            _PLANS[place] = reading if isinstance(reading, str) else _on_image(reading, row)
        except ConfigError as error:
            _PLANS[place] = error.problems[0].removeprefix(f"{name}: ")
    return _PLANS[place]


@cache
def read_ci(name: str, kind: str, devices: int, per_node: int) -> Reading | str:
    """Flags, environment and script of a configuration (model/key) as a reading, or the reason why it is not judged.

    Raises:
        ConfigError: the job cannot be read.
    """
    script = launch_script(configurations()[name.rpartition("/")[2]], devices, per_node, kind)
    reading = read_megatron(name, script, {}, {})
    approximated = [flag for flag in reading.of("approximated") if flag.name in HOLD_MEMORY]
    lacking = [*reading.of("unmodeled"), *approximated]
    return f"not modeled yet: {first_reason(lacking)}" if lacking else reading


def _on_image(reading: Reading, row: MeasuredRow) -> CiPlan:
    """The plan on the row's machine, with the settings that its image overrides.

    Raises:
        ConfigError: its layout cannot run.
        SkipRowError: the machine is unknown.
    """
    hardware = machine(hardware_of(row).section["node_type"], ())
    capability = hardware.accelerator.compute_capability or 0.0
    settings, assumed = _of_image(reading, row, capability)
    sets = {f"performance.{name}": value for name, value in settings.items()}
    job = to_job(reading, {"hardware.node_type": hardware.name, **sets}, allow_unmodeled=True)
    return CiPlan(job, tuple(assumed))


def first_reason(lacking: list[LaunchFlag]) -> str:
    """Of the features of a job that are not modeled, the most important one."""
    notes = [flag.note.partition(":")[0] for flag in lacking]
    return next((word for word in REASONS for note in notes if note.startswith(word)), notes[0])


def _of_image(reading: Reading, row: MeasuredRow, capability: float) -> tuple[dict[str, Any], list[str]]:
    """Settings that a test's image and the Megatron code of that date override, and why, one line each."""
    said, image = reading.config["performance"], _image(row)
    settings = dict(image["always"])
    if said.get("deterministic") and "attention_backend" not in said and said.get("attention_impl") == "flash":
        settings |= image["deterministic"]
    if said.get("moe") and said.get("scores_in_buffer"):
        settings |= image["local_experts"]
    if int(said.get("te_workspaces") or 0) > 1:
        settings |= image["userbuffers"]
    if capability >= 10.0 and "cublas_workspace" not in said:
        settings |= image["blackwell"]
    code, when = _images()["code"], row.text("first_recorded")
    if said.get("moe") and when < code["experts"]["until"]:
        settings |= code["experts"]["settings"]
    if said.get("overlap", {}).get("ep") and when < code["pieces"]["until"]:
        settings |= code["pieces"]["settings"]
    # the last rank is the first of its tensor-parallel group where that is of one
    alone = code["one_tp_rank"]
    if alone["from"] <= when < alone["until"] and reading.config["parallelism"].get("tp", 1) == 1:
        settings |= alone["settings"]
    why = _images()["why"]
    return settings, [f"{name}: {value}, as of image {image['image']} {why[name]}" for name, value in settings.items()]


def _image(row: MeasuredRow) -> dict[str, Any]:
    """The image of a row's container on the day of its record; a container of a release has that of lts."""
    images = _images()["images"]
    found = images.get(row.text("container"), images["lts"])
    when = row.text("first_recorded")
    current: dict[str, Any] = [image for image in found if image["from"] <= when][-1]
    return current


@cache
def _images() -> dict[str, Any]:
    return parse_mapping(*read_source(FOLDER / "megatron_ci_images.yaml"))


@cache
def records() -> dict[str, Any]:
    """Corrections to the records: `devices` of release tests, and `copies`, records copied from another test."""
    return parse_mapping(*read_source(FOLDER / "megatron_ci_records.yaml"))


@cache
def configurations() -> dict[str, dict[str, Any]]:
    """Flags (`args`) and environment (`env`) of every configuration by its key."""
    with gzip.open(FOLDER / "megatron_ci_configs.jsonl.gz", "rt", encoding="utf-8") as file:
        return {found["config"]: found for found in map(json.loads, file)}


def is_ci(row: MeasuredRow) -> bool:
    """Whether a row is of Megatron-LM's own tests."""
    return row.file == CI_FILE


def allocator_memory(row: MeasuredRow, job: Job, persisting: float, first_peak: float) -> AllocatorMemory:
    """The other measured figures of the row, with those of the estimate."""
    measured = row.number("allocated_bytes"), row.number("first_iteration_peak_bytes")
    states, first = measured
    resumed = "_2nd@" in row.id
    why = RESUMED if resumed else "" if row.text("n_gpus") else INFERRED
    if row.id.startswith(f"{SINGLE}/"):
        why = SINGLE_STEP
    for one in records()["copies"]:
        here = one["test"] in row.id and row.text("gpu").startswith(one["gpu"])
        if here and row.number("peak_allocated_bytes") in one["peaks"]:
            why = records()["why"][one["why"]]
    if not why and job.software.kernels.loss_impl == "native" and first == row.number("peak_allocated_bytes"):
        why = COMPILED
    return AllocatorMemory(
        None if states is None or why == INFERRED else (states, persisting),
        None if first is None or resumed else (first, first_peak),
        why,
    )
