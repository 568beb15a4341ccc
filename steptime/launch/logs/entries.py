"""Entries that a line of a training log can contain."""

from __future__ import annotations

from typing import NamedTuple


class Iteration(NamedTuple):
    """One logged iteration; 0 where the line has no value."""

    framework: str
    number: int
    """-1 where the line has no number."""
    step_s: float
    tokens_per_s: float = 0.0
    """Per device; torchtitan prints it instead of the step time."""
    tflops: float = 0.0
    """TFLOP/s per device, by the log's own convention."""
    batch: int = 0
    """Sequences of this step, all devices."""
    stream: str = ""
    """The rank prefix, as printed: lines of one stream come in order."""
    samples_per_s: float = 0.0
    """Sequences of all devices; DeepSpeed prints it instead of the step time."""
    timed: int = 0
    """Micro-batches of all steps so far that DeepSpeed's timer has stopped after; 0 where the line does not say."""
    mean_s: float = 0.0
    """Mean step time since the run began; ms-swift prints it instead of the step time."""
    elapsed_s: float = 0.0
    """Seconds since then, whole."""


class MemoryPeak(NamedTuple):
    """Peak memory of a rank [B]; 0 where the line has no value."""

    rank: int
    """-1 where the line does not name the rank."""
    allocated_bytes: float = 0.0
    reserved_bytes: float = 0.0
    local: bool = False
    """Whether the rank is one within its node (a launcher's prefix), not within the job."""


class Pause(NamedTuple):
    """An evaluation or a checkpoint; at the last logged iteration where `number` is -1."""

    number: int


class ParameterCount(NamedTuple):
    """Parameters on a model-parallel rank."""

    tp_rank: int
    pp_rank: int
    parameters: int


class AcceleratorName(NamedTuple):
    """The log's name for the accelerator: "NVIDIA H100 80GB HBM3"."""

    name: str


class Vocabulary(NamedTuple):
    """Entries of the tokenizer, and of the model's padded table."""

    size: int
    padded: int
    """0: the log does not say."""


class ZeroStage(NamedTuple):
    """The ZeRO stage of DeepSpeed's engine."""

    stage: int


class WorldSize(NamedTuple):
    """The processes of the job."""

    devices: int


class WholeRun(NamedTuple):
    """The end of a run of the Trainer, which does not time its steps: the run's seconds, steps and samples a second, rounded."""

    seconds: float
    steps_per_s: float
    samples_per_s: float = 0.0
    """0 where the line does not say."""


class RunLength(NamedTuple):
    """The steps of a run, or those that it had before it was continued; 0 where the line does not say."""

    steps: int
    done: int


LogEntry = (
    Iteration
    | MemoryPeak
    | Pause
    | ParameterCount
    | AcceleratorName
    | Vocabulary
    | ZeroStage
    | WorldSize
    | WholeRun
    | RunLength
)
