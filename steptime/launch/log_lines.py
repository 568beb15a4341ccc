"""What the lines of a training log say, framework by framework; every format names where it was read.

Megatron-LM and what descends from it (Megatron-DeepSpeed, GPT-NeoX, Primus, Megatron-Bridge) and NeMo 2 print fields between
bars, `iteration 5/ 100 | elapsed time per iteration (ms): 1234.5 | ...`: one table of field names reads them all, in any order.
torchtitan and NeMo's progress bars have shapes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

MIB, GIB = 2.0**20, 2.0**30


class Iteration(NamedTuple):
    """One logged iteration; 0 where the line does not say."""

    framework: str
    number: int
    """-1: the line does not number it."""
    step_s: float
    tokens_per_s: float = 0.0
    """Per device; torchtitan prints it in place of the step time."""
    tflops: float = 0.0
    """TFLOP/s per device, by the log's own convention."""
    batch: int = 0
    """Sequences of this step, all devices."""
    stream: str = ""
    """The rank prefix, as printed: lines of one stream come in order."""


class Peak(NamedTuple):
    """Peak memory of a rank [B]; 0 where the line does not say."""

    rank: int
    """-1: the line does not say whose."""
    allocated_bytes: float = 0.0
    reserved_bytes: float = 0.0
    local: bool = False
    """The rank is one of its node (a launcher's prefix), not of the job."""


class Pause(NamedTuple):
    """An evaluation or a checkpoint; at the last logged iteration where `number` is -1."""

    number: int


class Count(NamedTuple):
    """Parameters on a model-parallel rank."""

    tp_rank: int
    pp_rank: int
    parameters: int


class Device(NamedTuple):
    """What the log calls the accelerator: "NVIDIA H100 80GB HBM3"."""

    name: str


Said = Iteration | Peak | Pause | Count | Device

STEP = {
    # Megatron-LM megatron/training/training.py, training_log; of 2020 on (megatron/training.py), and Megatron-Bridge
    # src/megatron/bridge/training/utils/train_utils.py, training_log
    "elapsed time per iteration (ms)": ("Megatron-LM", 1e-3),
    # bigscience-workshop/Megatron-DeepSpeed megatron/training.py, training_log
    "elapsed time per iteration (s)": ("Megatron-DeepSpeed", 1.0),
    # NVIDIA/NeMo nemo/lightning/pytorch/callbacks/progress_printer.py, and its bars before 2.0
    "train_step_timing in s": ("NeMo", 1.0),
}
"""Field -> framework, and the unit of its number [s]."""

TFLOPS = (
    "throughput per GPU (TFLOP/s/GPU)",  # Megatron-LM since 2023, under --log-throughput
    "TFLOPs",  # Megatron-DeepSpeed
    "approx flops per GPU",  # EleutherAI/gpt-neox megatron/logging.py: "45.6TFLOPS"
    "TFLOPS_per_GPU",  # NeMo nemo/lightning/pytorch/callbacks/flops_callback.py
)
BATCH = ("global batch size", "global_batch_size")

MEMORY = {
    # Megatron-LM megatron/training/utils (report_memory): mega_bytes = 1024.0 * 1024.0
    "max allocated": ("allocated", MIB),
    "max reserved": ("reserved", MIB),
    # Megatron-Bridge train_utils.py, report_memory: memory_stats[...] / 1.0e9
    "mem-max-allocated-gigabytes": ("allocated", 1e9),
    "mem-max-reserved-gigabytes": ("reserved", 1e9),
}
"""Field of a rank's own line -> what it is the peak of, and the unit of its number [B]."""
OWN_MEMORY = {
    # Megatron-LM's TensorBoard tag (--log-memory-to-tensorboard), as exported text has it
    "mem-max-allocated-bytes": ("allocated", 1.0),
    # NeMo before 2.1 and dgxc recipes: torch.cuda.max_memory_allocated() of the rank that prints
    "peak_memory_usage": ("allocated", 1.0),
}
"""The same for lines that do not begin with a rank."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""A control sequence of a terminal: colours, cursor moves (ECMA-48)."""
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+")
_STREAM = re.compile(r"\[(?:rank|default)\s*(\d+)\]|^\s*(\d+):\s|\[1,(\d+)\]<std")
"""Ranks as torchrun, srun -l and mpirun --tag-output put them before a line."""
_NUMBERED = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_RANK = re.compile(r"\[Rank (\d+)\]\s*\(")
_TITAN = re.compile(
    r"(?<!validate )\bstep:\s*(\d+)\s.*?\bmemory:\s*([\d.]+)GiB.*?\b(?:tps|wps):\s*([\d,]+)(?:.*?\btflops:\s*([\d,.]+))?"
)
"""pytorch/torchtitan torchtitan/components/metrics.py, MetricsProcessor.log: memory is the reserved peak since the last line."""
_BRIDGE = re.compile(r"Step Time : ([\d.]+)s GPU utilization: ([\d.]+) ?MODEL_TFLOP/s/GPU")
"""NVIDIA-NeMo/Megatron-Bridge train_utils.py, training_log; printed beside the numbered line."""
_BAR = re.compile(r"global_step=([\d.e+]+).*?train_step_timing in s=([\d.]+)")
"""NVIDIA/NeMo before 2.0: Lightning's progress bar."""
_COUNT = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d+) ?, ?(\d+)\): (\d+)(?![\d.]*[BM])"
)
"""Megatron-LM megatron/training/training.py, get_model."""
_PAUSES = (
    re.compile(r"validation loss at iteration\s+(\d+)"),  # Megatron-LM, evaluate_and_print_results
    re.compile(r"saving checkpoint (?:at|from) iteration\s+(\d+)"),  # Megatron-LM, save_checkpoint
    re.compile(r"successfully saved checkpoint (?:at|from) iteration\s+(\d+)"),
    re.compile(r"Global Checkpoint Save\b.*?\bIteration\s*:\s*(\d+)"),  # NeMo, megatron_strategy
    re.compile(r"validate step:\s*(\d+)"),  # torchtitan, MetricsProcessor.log_validation
    re.compile(r"Saving the checkpoint()|Validation epoch \d+()"),  # torchtitan, components/checkpoint.py; NeMo 2
)
_DEVICES = (
    re.compile(r"capacity: (NVIDIA .+?|AMD .+?) with [\d.]+GiB memory"),  # torchtitan, build_device_memory_monitor
    re.compile(r"^\|\s+\d+\s+(NVIDIA [\w-]+(?: [\w-]+)*?)\s{2,}"),  # nvidia-smi
    re.compile(r"^GPU \d+: (NVIDIA .+?) \(UUID"),  # nvidia-smi -L
)

TRIGGER = re.compile(
    rb"elapsed time per iteration|train_step_timing|Step Time :|[tw]ps: |(?:max |-)allocated|peak_memory_usage|"
    rb"number of parameters on|validation loss at|aving (?:the )?checkpoint|saved checkpoint|Checkpoint Save|validate step|"
    rb"Validation epoch|NVIDIA |GiB memory"
)
"""Bytes of which one stands in every line that says something; all other lines are not decoded."""


def plain(line: bytes) -> str:
    """A line as text, without the colours of a terminal."""
    text = line.decode("utf-8", "replace")
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def said(line: bytes) -> Iterator[Said]:
    """What one line says; two ranks that wrote into the same line both count."""
    if not TRIGGER.search(line):
        return
    text = plain(line)
    yield from _iterations(text)
    yield from _peaks(text)
    for pattern in _PAUSES:
        yield from (Pause(int(found[1] or -1)) for found in pattern.finditer(text))
    yield from (Count(int(found[1]), int(found[2]), int(found[3])) for found in _COUNT.finditer(text))
    for pattern in _DEVICES:
        if found := pattern.search(text):
            yield Device(found[1])


def _iterations(text: str) -> Iterator[Iteration]:
    """Every iteration that a line logs."""
    stream = _stream(text)
    starts = [found.start() for found in _NUMBERED.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        if found := _barred(text[start:end], stream):
            yield found
    for titan in _TITAN.finditer(text):
        rate, tflops = number(titan[3]), number(titan[4] or "")
        yield Iteration("torchtitan", int(titan[1]), 0.0, rate, tflops, stream=stream)
    for bridge in _BRIDGE.finditer(text):
        yield Iteration("Megatron-Bridge", -1, number(bridge[1]), tflops=number(bridge[2]), stream=stream)
    for bar in _BAR.finditer(text):
        yield Iteration("NeMo", int(number(bar[1])), number(bar[2]), stream=stream)


def _barred(text: str, stream: str) -> Iteration | None:
    """An iteration of fields between bars; None where it has no step time."""
    fields = fields_of(text)
    for name, (framework, unit) in STEP.items():
        if step_s := number(fields.get(name, "")) * unit:
            head = _NUMBERED.match(text)
            counted = fields.get("global_step") or (head[1] if head else "-1")
            tflops = next((number(fields[key]) for key in TFLOPS if key in fields), 0.0)
            batch = next((number(fields[key]) for key in BATCH if key in fields), 0.0)
            return Iteration(framework, int(number(counted)), step_s, 0.0, tflops, int(batch), stream)
    return None


def _peaks(text: str) -> Iterator[Peak]:
    """Peak memory that a line reports, one entry for each rank."""
    heads = list(_RANK.finditer(text))
    starts = [head.start() for head in heads]
    found = [
        _peak(text[start:end], int(head[1]), MEMORY)
        for head, (start, end) in zip(heads, pairwise([*starts, len(text)]), strict=True)
    ]
    if not heads:
        rank = _rank(text)
        found.append(_peak(text, rank, OWN_MEMORY, local=True))
        found += [Peak(rank, 0.0, number(titan[2]) * GIB, local=True) for titan in _TITAN.finditer(text)]
    yield from (peak for peak in found if peak.allocated_bytes or peak.reserved_bytes)


def _peak(text: str, rank: int, known: Mapping[str, tuple[str, float]], *, local: bool = False) -> Peak:
    fields = fields_of(text)
    peaks = {"allocated": 0.0, "reserved": 0.0}
    for name, (what, unit) in known.items():
        if name in fields:
            peaks[what] = max(peaks[what], number(fields[name]) * unit)
    return Peak(rank, peaks["allocated"], peaks["reserved"], local)


def fields_of(text: str) -> dict[str, str]:
    """The fields of `a: 1 | b (ms): 2 |`.

    >>> fields_of("iteration 5/ 10 | lm loss: 1.0 | global batch size:   256 |")
    {'lm loss': '1.0', 'global batch size': '256'}
    """
    pairs = (part.partition(":") for part in text.split("|"))
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def number(text: str) -> float:
    """The first number of a text; 0 where there is none.

    >>> number("1,234"), number("13372.8/13364.7"), number("45.6TFLOPS"), number("nan")
    (1234.0, 13372.8, 45.6, 0.0)
    """
    found = _NUMBER.match(text.strip())
    return float(found[0].replace(",", "")) if found else 0.0


def _stream(text: str) -> str:
    found = _STREAM.search(text)
    return found[0].strip() if found else ""


def _rank(text: str) -> int:
    """The rank in torchrun's or srun's prefix, -1 where there is none."""
    found = _STREAM.search(text)
    return int(next(group for group in found.groups() if group)) if found else -1
