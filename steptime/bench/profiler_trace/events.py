"""Reading torch.profiler traces (Kineto's Chrome JSON): what ran where and when, and nothing else of the file.

The format is that of libkineto's ChromeTraceLogger (pytorch/kineto, libkineto/src/output_json.cpp). Memory grows with the
operators and kernels kept, not with the file: Python frames, flow arrows and most arguments are dropped as they are read. Times
become whole nanoseconds, so that sums are exact.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import unreadable
from steptime.bench.profiler_trace.chrome_json import events, unpacked
from steptime.bench.profiler_trace.kernel_names import BYTES, DEVICE_WORK, TRANSFERS

_STEP = re.compile(r"ProfilerStep#(\d+)")


class TraceGroup(NamedTuple):
    """A process group as torch.distributed describes it."""

    name: str
    """Its description ("default_pg", "mesh_dp", "TENSOR_MODEL_PARALLEL_GROUP"), or "" where the trace has none."""
    ranks: int
    """0 where the trace has no size."""


class HostOp(NamedTuple):
    """An operator, a runtime call or a user's range on a host thread [ns]."""

    start: int
    end: int
    name: str
    kind: str
    """op, call (of the driver) or range."""
    correlation: int
    """Correlation of what it launched, 0 for nothing."""
    builds_graph: bool
    """It ran with gradients enabled: autograd gave it a sequence number, and it is not a backward node."""


class Activity(NamedTuple):
    """A kernel, copy or collective [ns]."""

    start: int
    end: int
    name: str
    correlation: int
    kind: str
    """Kind of collective (all_reduce, send ...), "" for other kernels."""
    group: TraceGroup
    bytes: int
    """Bytes of the larger side of a collective, 0 where the trace has no size."""


class ProfilerStep(NamedTuple):
    """A ProfilerStep range of the host [ns]."""

    number: int
    start: int
    end: int


class Trace(NamedTuple):
    """One rank's trace."""

    path: str
    rank: int
    world_size: int | None
    """None where torch.distributed was not initialized."""
    groups: list[TraceGroup]
    steps: list[ProfilerStep]
    threads: dict[Any, list[HostOp]]
    """By thread: operators that compute, launch or wait, without those inside a collective of the host's."""
    kernels: list[Activity]
    """Kernels on the device; empty for a run on the CPU."""
    transfers: list[Activity]
    """Collectives that the host itself ran (gloo, MPI)."""

    @property
    def on_cpu(self) -> bool:
        """Whether the operators are the work itself (a CPU run)."""
        return not self.kernels


def read_all(paths: list[str]) -> list[Trace]:
    """Traces of several ranks, by rank.

    Raises:
        ConfigError: a file is missing, is no trace, ends early or holds no work; two files are of one rank. One line each.
    """
    problems, traces = [], []
    for path in dict.fromkeys(paths):
        try:
            traces.append(read(path, alone=len(set(paths)) == 1))
        except ConfigError as error:
            problems += error.problems
    first: dict[int, str] = {}
    for trace in traces:
        if trace.rank in first:
            problems.append(f"{trace.path}: same rank {trace.rank} as {first[trace.rank]}; give one file per rank")
        first.setdefault(trace.rank, trace.path)
    if problems:
        raise ConfigError(problems)
    return sorted(traces, key=lambda trace: trace.rank)


def read(path: str, *, alone: bool = True) -> Trace:
    """One trace, .json or .json.gz.

    Args:
        path: the file.
        alone: a file without a rank is rank 0.

    Raises:
        ConfigError: see `read_all`.
    """
    head: dict[str, Any] = {}
    found: dict[str, Any] = {"steps": [], "threads": {}, "kernels": [], "transfers": []}
    try:
        with unpacked(path) as stream:
            for event in events(stream, path, head):
                _sort(event, found)
    except OSError as error:
        raise unreadable(path, error, "the file of a trace") from None
    except (EOFError, zlib.error):
        raise ConfigError(f"{path}: ends early; the profiler had not finished writing it?") from None
    if not any(found["threads"].values()) and not found["kernels"]:
        raise ConfigError(f"{path}: no operators or kernels; was it exported after the profiler had stopped?")
    _outside_transfers(found)
    about = head.get("distributedInfo")
    about = about if isinstance(about, dict) else {}
    groups = [
        TraceGroup(str(row.get("pg_desc", "")), _whole(row.get("pg_size")))
        for row in about.get("pg_config") or []
        if isinstance(row, dict)
    ]
    world = _whole(about.get("world_size")) or None
    return Trace(path, _rank(path, about, alone=alone), world, groups, **found)


def _sort(event: dict[str, Any], found: dict[str, Any]) -> None:
    """Keep an event of a kind that is used here."""
    category, name = event.get("cat"), event.get("name")
    if event.get("ph") != "X" or not isinstance(category, str) or not isinstance(name, str):
        return
    try:
        start, long = _ns(event["ts"]), _ns(event.get("dur", 0))
    except (KeyError, TypeError, ValueError, OverflowError):
        return
    end, name = start + max(0, long), intern(name)
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    thread = (event.get("pid"), event.get("tid"))
    if category in DEVICE_WORK:
        found["kernels"].append(_work(start, end, name, args))
    elif category == "user_annotation" and (step := _STEP.match(name)):
        found["steps"].append(ProfilerStep(int(step[1]), start, end))
    elif category == "user_annotation" and (transfer := TRANSFERS.match(name)):
        group = _group(args)
        work = Activity(start, end, name, 0, transfer[1], group, _size(args))
        found["transfers"].append(work)
        found["threads"].setdefault(("transfers", thread), []).append(work)
    else:
        kind = {"cpu_op": "op", "user_annotation": "range"}.get(category)
        if kind is None and category.endswith(("_runtime", "_driver")):
            kind = "call"
        if kind:
            sequence, forward = args.get("Sequence number"), args.get("Fwd thread id")
            grad = kind == "op" and sequence is not None and not forward
            op = HostOp(start, end, name, kind, _whole(args.get("correlation")) if kind == "call" else 0, grad)
            found["threads"].setdefault(thread, []).append(op)


def _work(start: int, end: int, name: str, args: dict[str, Any]) -> Activity:
    """A piece of device work; NCCL's kernels carry what the host knew of the collective."""
    correlation = _whole(args.get("correlation"))
    if not name.startswith(("nccl", "rccl", "void nccl")):
        return Activity(start, end, name, correlation, "", TraceGroup("", 0), 0)
    kind = _kind(name)
    # several operations use these kernels: the host's name is more specific
    if kind in {"send_recv", "generic", "collective"}:
        kind = str(args.get("Collective name") or kind).strip("_")
    return Activity(start, end, name, correlation, intern(kind), _group(args), _size(args))


def _kind(name: str) -> str:
    """ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL is a reduce_scatter."""
    found = re.search(r"Kernel_?([A-Za-z]+)", name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found[1]).lower() if found else "collective"


def _group(args: dict[str, Any]) -> TraceGroup:
    """The group of a collective."""
    name = args.get("Process Group Description") or args.get("Process Group Name") or ""
    name = "" if name == "undefined" else str(name)
    return TraceGroup(intern(name), _whole(args.get("Group size")))


def _size(args: dict[str, Any]) -> int:
    """Bytes of a collective's larger side."""
    elements = max(_whole(args.get("In msg nelems")), _whole(args.get("Out msg nelems")))
    return elements * BYTES.get(str(args.get("dtype")), 0)


def _outside_transfers(found: dict[str, Any]) -> None:
    """Drop a thread's ops inside its own collective (gloo copies in and out); sends only start there."""
    threads = found["threads"]
    for key in [key for key in threads if key[0] == "transfers"]:
        spans = [(work.start, work.end) for work in threads.pop(key) if work.kind not in {"send", "recv"}]
        ops = threads.get(key[1], [])
        if spans and ops:
            threads[key[1]] = _without(ops, sorted(spans))


def _without(ops: list[HostOp], spans: list[tuple[int, int]]) -> list[HostOp]:
    """The ops outside of all spans, which do not overlap."""
    left, at = [], 0
    for op in sorted(ops):
        while at < len(spans) and spans[at][1] < op.start:
            at += 1
        if at == len(spans) or not (spans[at][0] <= op.start and op.end <= spans[at][1]):
            left.append(op)
    return left


def _rank(path: str, about: dict[str, Any], *, alone: bool) -> int:
    """The rank in the trace, else in the file's name."""
    if isinstance(about.get("rank"), int):
        return int(about["rank"])
    named = re.search(r"rank[-_=.]?(\d+)", Path(path).name, re.IGNORECASE)
    if named:
        return int(named[1])
    if alone:
        return 0
    raise ConfigError(
        f"{path}: rank unknown: neither the trace nor its file name gives it; rename it, for example trace_rank0.json"
    )


def _ns(microseconds: float) -> int:
    """Whole nanoseconds."""
    return microseconds * 1000 if isinstance(microseconds, int) else round(float(microseconds) * 1000)


def _whole(value: Any) -> int:
    """A count; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
