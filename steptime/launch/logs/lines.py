"""Formats of the lines of a training log, by framework, each with its source.

Megatron-LM and its derivatives (Megatron-DeepSpeed, GPT-NeoX, Primus, Megatron-Bridge) and NeMo 2 print fields between
bars, `iteration 5/ 100 | elapsed time per iteration (ms): 1234.5 | ...`: one table of field names reads them all, in any order.
torchtitan and NeMo's progress bars have their own formats; those of Trainer and Lightning are in `trainer_lines`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

from steptime.launch.keys import table_file
from steptime.launch.logs.after_dump import vocabulary, zero_stage
from steptime.launch.logs.entries import (
    AcceleratorName,
    Iteration,
    LogEntry,
    MemoryPeak,
    ParameterCount,
    Pause,
    WorldSize,
)
from steptime.launch.logs.files import plain
from steptime.launch.logs.trainer_lines import bars, run_length, whole_run, whole_run_row

GIB = 2.0**30
LARGEST = 1e18
"""Largest figure that is accepted from a log."""
_NUMBER = re.compile(r"\s*([-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+)")
_STREAM = re.compile(r"\[(?:rank|default)\s*(\d{1,15})\]|^\s*(\d{1,15}):\s|\[1,(\d{1,15})\]<std")
"""Ranks as torchrun, srun -l and mpirun --tag-output put them before a line."""
PREFIX = 120
"""Characters that may contain a rank prefix; a time stamp and a job's name may come first."""
_NUMBERED = re.compile(r"\biteration[=\s]\s*(\d{1,15})\s*/\s*\d+\s*\|")
_RANK = re.compile(r"\[Rank (\d{1,15})\]\s*\(")
_TITAN = re.compile(
    r"(?<!validate )\bstep:\s*(\d{1,15})\s.{0,300}?\bmemory:\s*([\d.]+)GiB.{0,90}?\b(?:tps|wps):\s*([\d,]+)"
    r"(?:.{0,90}?\btflops:\s*([\d,.]+))?"
)
"""pytorch/torchtitan torchtitan/components/metrics.py, MetricsProcessor.log: memory is the reserved peak since the last line."""
_BRIDGE = re.compile(r"Step Time : (?P<s>[\d.]+)s GPU utilization: (?P<tflops>[\d.]+) ?(?:MODEL_)?TFLOP/s/GPU")
"""NVIDIA-NeMo/Megatron-Bridge train_utils.py, training_log; printed next to the numbered line."""
_BAR = re.compile(r"global_step=(?P<step>[\d.e+]+).*?train_step_timing in s=(?P<s>[\d.]+)")
"""NVIDIA/NeMo before 2.0: Lightning's progress bar."""
_MLPERF = re.compile(
    r'"key": "tracked_stats", "value": \{[^{}]{0,300}?"train_step_tim(?:e|ing in s)": (?P<s>[\d.]{1,20})'
)
"""mlcommons/training_results_v4.1 and v5.0 NVIDIA/benchmarks/*/custom_callbacks.py: after every step, without its number."""
_SAMPLES = re.compile(
    r"(?:micro_step=(\d{1,15})/)?(?:global_step=|\b\d+/)(\d{1,15}), "
    r"(?:RunningAvgSamplesPerSec=[\d.]+, )?(?:Curr)?SamplesPerSec=([\d.]+)(?:.{0,120}?MaxMemAllocated=([\d.]+) ?GB)?"
)
"""deepspeedai/DeepSpeed deepspeed/utils/timer.py, ThroughputTimer.stop: the global batch over the time of a step; GB is 2**30."""
_PIPELINE = re.compile(r"\bsteps: (?P<step>\d{1,15}) loss: .{0,120}?iter time \(s\): (?P<s>[\d.]+)")
"""deepspeedai/DeepSpeed deepspeed/runtime/pipe/engine.py, train_batch: the mean of the steps since the last line."""
_SWIFT = re.compile(
    r"'(?:global_step/max_steps|iteration)': '(\d{1,15})/\d+'"
    r".*?'elapsed_time': '(?:(\d{1,6})d )?(?:(\d\d?)h )?(?:(\d\d?)m )?(\d\d?)s'"
    r".*?'memory\(GiB\)': '?([\d.]+)'?, 'train_speed\((iter/s|s/it)\)': '?([\d.]{1,12})"
)
"""modelscope/ms-swift swift/trainers/patcher.py, add_train_message, and swift/megatron/callbacks/print.py: the reserved peak, and
the mean since the run began, which releases before 4 print as a rate."""
_COUNT = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d{1,15}) ?, ?(\d{1,15})\): (\d{1,15})(?![\d.]*[BM])"
)
"""Megatron-LM megatron/training/training.py, get_model."""
_PAUSES = (
    re.compile(r"validation loss at iteration\s+(\d{1,15})"),  # Megatron-LM, evaluate_and_print_results; then
    re.compile(r"(?:saving|successfully saved) checkpoint (?:at|from) iteration\s+(\d{1,15})"),  # save_checkpoint
    re.compile(r"Global Checkpoint Save\b.*?\bIteration\s*:\s*(\d{1,15})"),  # NeMo, megatron_strategy
    re.compile(r"validate step:\s*(\d{1,15})"),  # torchtitan, MetricsProcessor.log_validation
    re.compile(r"Saving the checkpoint()|Validation epoch \d+()"),  # torchtitan, components/checkpoint.py; NeMo 2
)
_WORLD = (  # the first: torchtitan, distributed/parallel_dims.py
    re.compile(r"Building \d-D device mesh with \[[^]]{0,120}\], \[(\d{1,7}(?:, \d{1,7}){0,7})\]"),
    re.compile(r"mesh with parallelism: ((?:\w{2,12}=\d{1,9}, ){4}tp=\d{1,9})"),  # the same since pull request 1660
    re.compile(r"\bdist_world_size=(\d{1,9})\b"),  # deepspeedai/DeepSpeed deepspeed/launcher/launch.py
    re.compile(r"\busing world size: (\d{1,9}),"),  # Megatron-LM megatron/arguments.py
)
_DEVICES = (
    re.compile(r"capacity: (NVIDIA .+?|AMD .+?) with [\d.]+GiB memory"),  # torchtitan, build_device_memory_monitor
    re.compile(r"^\|\s+\d+\s+(NVIDIA [\w-]+(?: [\w-]+)*?)\s{2,}"),  # nvidia-smi
    re.compile(r"^GPU \d+: (NVIDIA .+?) \(UUID"),  # nvidia-smi -L
)


def said(line: bytes) -> Iterator[LogEntry]:
    """The entries of one line; if two ranks wrote into the same line, both count."""
    for words, parse in PARSERS:
        for word in words:  # plain loops: most lines of a large log contain nothing
            if word in line:
                yield from parse(plain(line.decode("utf-8", "replace")))
                break


def _numbered(text: str) -> Iterator[Iteration]:
    """Iterations from fields between bars."""
    fields = table_file("log_fields")
    starts = [found.start() for found in _NUMBERED.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        part = text[start:end]
        head = _NUMBERED.match(part)
        for name, (framework, unit) in fields["step"].items():
            if head and (step_s := field(part, name) * unit):
                counted = int(field(part, "global_step")) if "global_step:" in part else int(head[1])
                tflops = next((found for key in fields["tflops"] if (found := field(part, key))), 0.0)
                batch = next((found for key in fields["batch"] if (found := field(part, key))), 0.0)
                yield Iteration(framework, counted, step_s, 0.0, tflops, int(batch), _stream(text))


def _titan(text: str) -> Iterator[Iteration | MemoryPeak]:
    for found in _TITAN.finditer(text):
        stream, rate, tflops = _stream(text), number(found[3]), number(found[4] or "")
        if rate:
            yield Iteration("torchtitan", int(found[1]), 0.0, rate, tflops, stream=stream)
        yield MemoryPeak(_rank(text), 0.0, number(found[2]) * GIB, local=True)


def _timed(framework: str, pattern: re.Pattern[str], text: str) -> Iterator[Iteration]:
    """Iterations of a pattern with the step time in its group `s`, and its number and TFLOP/s where it has such groups."""
    for found in pattern.finditer(text):
        if step_s := number(found["s"]):
            said = {name: number(figure) for name, figure in found.groupdict().items()}
            yield Iteration(
                framework, int(said.get("step", -1)), step_s, 0.0, said.get("tflops", 0.0), stream=_stream(text)
            )


def _swift(text: str) -> Iterator[Iteration | MemoryPeak]:
    for found in _SWIFT.finditer(text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups()[1:5])
        if speed := number(found[8]):
            mean_s = speed if found[7] == "s/it" else 1.0 / speed
            elapsed_s = ((24.0 * days + hours) * 60 + minutes) * 60 + seconds
            yield Iteration("ms-swift", int(found[1]), mean_s, mean_s=mean_s, elapsed_s=elapsed_s, stream=_stream(text))
        yield MemoryPeak(_rank(text), 0.0, number(found[6]) * GIB, local=True)


def _samples(text: str) -> Iterator[Iteration | MemoryPeak]:
    for found in _SAMPLES.finditer(text):
        if rate := number(found[3]):
            step, timed = int(found[2]), int(found[1] or 0)
            yield Iteration("DeepSpeed", step, 0.0, stream=_stream(text), samples_per_s=rate, timed=timed)
        if found[4]:
            yield MemoryPeak(_rank(text), number(found[4]) * GIB, 0.0, local=True)


def _peaks(text: str) -> Iterator[MemoryPeak]:
    """Peak memory, one entry for each rank that the line names."""
    heads, fields = list(_RANK.finditer(text)), table_file("log_fields")
    starts = [head.start() for head in heads]
    for head, (start, end) in zip(heads, pairwise([*starts, len(text)]), strict=True):
        yield _peak(text[start:end], int(head[1]), fields["memory"])
    if not heads:
        yield _peak(text, _rank(text), fields["own_memory"], local=True)


def _peak(text: str, rank: int, known: Mapping[str, list[Any]], *, local: bool = False) -> MemoryPeak:
    peaks = {"allocated": 0.0, "reserved": 0.0}
    for name, (what, unit) in known.items():
        peaks[what] = max(peaks[what], field(text, name) * unit)
    return MemoryPeak(rank, peaks["allocated"], peaks["reserved"], local)


def _pauses(text: str) -> Iterator[Pause]:
    for pattern in _PAUSES:
        yield from (Pause(int(found[1] or -1)) for found in pattern.finditer(text))


def _counts(text: str) -> Iterator[ParameterCount]:
    yield from (ParameterCount(int(found[1]), int(found[2]), int(found[3])) for found in _COUNT.finditer(text))


def _world(text: str) -> Iterator[WorldSize]:
    """Of a mesh the product of its degrees."""
    sizes = (prod(map(int, re.findall(r"\d+", found[1]))) for pattern in _WORLD if (found := pattern.search(text)))
    yield from (WorldSize(size) for size in sizes if size)


def _devices(text: str) -> Iterator[AcceleratorName]:
    yield from (AcceleratorName(found[1]) for pattern in _DEVICES if (found := pattern.search(text)))


PARSERS: tuple[tuple[tuple[bytes, ...], Callable[[str], Iterator[LogEntry]]], ...] = (
    ((b"elapsed time per iteration", b"train_step_timing in s: ", b"elapsed_time_per_iteration"), _numbered),
    ((b"train_step_timing in s=",), partial(_timed, "NeMo", _BAR)),
    ((b"Step Time : ",), partial(_timed, "Megatron-Bridge", _BRIDGE)),
    ((b'"tracked_stats"',), partial(_timed, "MLPerf", _MLPERF)),
    ((b"s/it", b"it/s"), bars),
    ((b"'train_runtime'",), whole_run),
    ((b"train_runtime ", b"_per_second "), whole_run_row),
    ((b"optimization steps = ", b"from global step "), run_length),
    ((b"train_speed(",), _swift),
    ((b"SamplesPerSec=",), _samples),
    ((b"iter time (s): ",), partial(_timed, "DeepSpeed pipeline", _PIPELINE)),
    ((b"tps: ", b"wps: "), _titan),
    ((b"memory (MB)", b"memory (GB)", b"peak_memory_usage:", b"mem-max-allocated-bytes:"), _peaks),
    ((b"validation loss at", b"heckpoint", b"validate step", b"Validation epoch"), _pauses),
    ((b"parameters on (tensor",), _counts),
    ((b"padded vocab",), vocabulary),
    ((b"zero_optimization_stage ",), zero_stage),
    ((b"device mesh with", b"dist_world_size=", b"using world size: "), _world),
    ((b"NVIDIA ", b"GiB memory"), _devices),
)
"""Words of which every parsed line contains one; lines without any are not even decoded."""


def field(text: str, name: str) -> float:
    """The number of a field of `a: 1 | b (ms): 2 |` or `a=1 | b=2 |`; 0 where there is none.

    >>> field("iteration 5/ 10 | lm loss: 1.0 | global batch size:   256 |", "global batch size")
    256.0
    """
    at = max(text.find(name + ":"), text.find(name + "="))
    if at < 0 or (at and text[at - 1] not in " |"):
        return 0.0
    start = at + len(name) + 1
    return number(text[start : start + 40])


def number(text: str) -> float:
    """The number at the beginning of a text; 0 where there is none, or it is implausible for a run.

    >>> number("1,234"), number("13372.8/13364.7"), number("45.6TFLOPS"), number("nan")
    (1234.0, 13372.8, 45.6, 0.0)
    """
    found = _NUMBER.match(text)
    value = float(found[1].replace(",", "")) if found else 0.0
    return value if 0.0 < value < LARGEST else 0.0


def _stream(text: str) -> str:
    """The launcher's rank prefix, as printed; "" where there is none."""
    found = _STREAM.search(text[:PREFIX])
    return found[0].strip() if found else ""


def _rank(text: str) -> int:
    """The rank in torchrun's or srun's prefix, -1 where there is none."""
    found = _STREAM.search(text[:PREFIX])
    return int(next(group for group in found.groups() if group)) if found else -1
