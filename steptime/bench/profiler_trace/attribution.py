"""A measured step sorted into the parts of an estimate: `3dtrn explain PLAN --trace FILE...`. No torch: traces are JSON."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from steptime.base.config import ConfigError
from steptime.base.rows import Time
from steptime.base.words import counted
from steptime.bench.profiler_trace.axes import TracedAxes, with_issuers
from steptime.bench.profiler_trace.events import Activity, Trace
from steptime.bench.profiler_trace.intervals import Frame, PartInterval, device_part, host_intervals, share_out
from steptime.bench.profiler_trace.kernel_names import COMM, WORK
from steptime.job.job import Job

SecondsByPart = dict[str, float]
StepWindow = tuple[int, int]
NS = 1e-9


class CollectiveTime(NamedTuple):
    """One kind of collective of one axis, over a step of a rank [s]."""

    part: str
    kind: str
    calls: int
    bytes: int
    """Of all calls, the larger side of each; 0 where the trace has no size."""
    total_s: float
    """Time in which at least one ran."""
    hidden_s: float
    """The part overlapped with work or another collective, to which the time counts."""
    exposed_s: float


class Kernel(NamedTuple):
    """Kernels (on the CPU: operators) of one name that went to memory-bound work, over a step of a rank."""

    name: str
    calls: int
    """0 on the CPU, where an operator's own time comes in pieces."""
    seconds: float


class RankStep(NamedTuple):
    """A step of one rank [s]: the one of median length, the faster of two in the middle."""

    rank: int
    path: str
    step: int | None
    """The profiler's number of it; None where the whole trace counts as a step."""
    steps: int
    """How many there were to choose from."""
    step_s: float
    parts_s: SecondsByPart
    """Exposed; they sum to step_s."""
    hidden_s: SecondsByPart
    """Communication overlapped with work."""
    collectives: list[CollectiveTime]
    kernels: list[Kernel]
    """Widest first."""
    by_name: tuple[int, int]
    """Kernels without a launching operator, classified by name only; and all kernels."""

    @property
    def work_s(self) -> float:
        """What the rank itself computes."""
        return sum(self.parts_s.get(part, 0.0) for part in WORK)


class PartRow(NamedTuple):
    """One part, predicted and measured [s]."""

    part: str
    predicted_s: float
    measured_s: float
    predicted_hidden_s: float
    measured_hidden_s: float

    @property
    def difference_s(self) -> float:
        """Measured minus predicted."""
        return self.measured_s - self.predicted_s


class Attribution(NamedTuple):
    """Where a measured step spent its time, compared with the prediction."""

    ranks: list[RankStep]
    busiest: RankStep
    """The rank with the most compute: the others wait for it, and an estimate describes it as well."""
    rows: list[PartRow]
    """Largest difference first."""
    notes: list[str]
    """Assumptions made, and what cannot be determined."""


class RankTimeline(NamedTuple):
    """A rank's intervals and steps [ns]."""

    trace: Trace
    intervals: list[PartInterval]
    windows: dict[int | None, StepWindow]
    calls: list[tuple[str, Activity]]
    """Collectives with their part."""
    launched: dict[int, Frame]


def attribute(traces: list[Trace], job: Job, predicted: Time) -> Attribution:
    """Sort one step of every rank, and compare the busiest rank's with the estimate.

    Args:
        traces: one per rank, as `read_all` gives them.
        job: what was run; its degrees distinguish groups without names.
        predicted: the time of `estimate(job)`.

    Raises:
        ConfigError: a trace is of another world size than the job.
    """
    devices = job.parallelism.devices
    wrong = [t for t in traces if t.world_size not in {None, devices} or t.rank >= devices]
    if wrong:
        raise ConfigError(_not_of_this_job(trace, devices) for trace in wrong)
    axes = TracedAxes(job)
    lines = [timeline(trace, axes) for trace in traces]
    ranks = [rank_step(line) for line in lines]
    busiest = max(ranks, key=lambda rank: (rank.work_s, -rank.rank))
    rows = compare(predicted, busiest)
    return Attribution(ranks, busiest, rows, [*axes.notes, *_notes(lines, ranks, rows, devices)])


def _not_of_this_job(trace: Trace, devices: int) -> str:
    what = f"rank {trace.rank}" if trace.world_size in {None, devices} else f"world size {trace.world_size}"
    return (
        f"{trace.path}: {what}, but the plan has {counted(devices, 'device')} (tp cp pp dp); give the plan of that run"
    )


def timeline(trace: Trace, axes: TracedAxes) -> RankTimeline:
    """A rank's work, communication and launches as intervals, and the limits of its steps."""
    launched: dict[int, Frame] = {}
    intervals = host_intervals(trace, launched)
    calls = []
    for work in (*trace.kernels, *with_issuers(trace)):
        part = axes.part(work, trace) if work.kind else device_part(work, launched)
        intervals.append(PartInterval(work.start, work.end, part, work.kind or work.name))
        if work.kind:
            calls.append((part, work))
    return RankTimeline(trace, intervals, dict(_windows(trace, launched)), calls, launched)


def _windows(trace: Trace, launched: dict[int, Frame]) -> Iterator[tuple[int | None, StepWindow]]:
    """Where each profiled step begins and ends.

    On the CPU that is the host's own range. A device lags behind its host, so there a step runs from its first kernel to the
    first of the next step; the last one to its last kernel or the end of the host's range, whichever is later.
    """
    steps = sorted(trace.steps, key=lambda step: step.start)
    if not steps:
        spans = [(op.start, op.end) for ops in trace.threads.values() for op in ops]
        if not trace.on_cpu:
            spans = [(work.start, work.end) for work in trace.kernels]
        yield None, (min(start for start, _ in spans), max(end for _, end in spans))
        return
    begins = [step.start for step in steps]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for work in trace.kernels:
        source = launched.get(work.correlation)
        at = bisect_right(begins, source.start) - 1 if source else -1
        if at >= 0 and source and source.start < steps[at].end:
            first[at] = min(first.get(at, work.start), work.start)
            last[at] = max(last.get(at, work.end), work.end)
    for at, step in enumerate(steps):
        begin, end = first.get(at, step.start), max(last.get(at, step.end), step.end)
        if at in first and at + 1 in first and steps[at + 1].number == step.number + 1:
            end = max(begin, first[at + 1])
        yield step.number, (begin, end)


def rank_step(line: RankTimeline) -> RankStep:
    """The median step of a rank: exposed seconds by part, and what communication hid."""
    by_length = sorted(line.windows, key=lambda number: line.windows[number][1] - line.windows[number][0])
    number = by_length[(len(by_length) - 1) // 2]
    start, end = line.windows[number]
    inside = [item for item in line.intervals if item.start < end and item.end > start]
    spans = share_out((item._replace(what="") for item in inside), start, end)
    parts = {part: span.exposed * NS for (part, _), span in spans.items() if span.exposed}
    hidden = {
        part: (span.covered - span.exposed) * NS
        for (part, _), span in spans.items()
        if part in COMM and span.covered > span.exposed
    }
    kernels = [work for work in line.trace.kernels if work.start < end and work.end > start]
    unknown = sum(work.correlation not in line.launched and not work.kind for work in kernels)
    return RankStep(
        line.trace.rank,
        line.trace.path,
        number,
        len(by_length),
        (end - start) * NS,
        parts,
        hidden,
        _collectives(line, inside, (start, end)),
        _memory_bound(inside, (start, end), on_cpu=line.trace.on_cpu),
        (unknown, len(kernels)),
    )


def _collectives(line: RankTimeline, inside: list[PartInterval], window: StepWindow) -> list[CollectiveTime]:
    """By axis and kind, most exposed first."""
    calls: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for part, work in line.calls:
        if work.start < window[1] and work.end > window[0]:
            calls[part, work.kind] += 1
            size[part, work.kind] += work.bytes
    rows = [
        CollectiveTime(
            *key, calls[key], size[key], span.covered * NS, (span.covered - span.exposed) * NS, span.exposed * NS
        )
        for key, span in share_out(inside, *window).items()
        if key in calls
    ]
    return sorted(rows, key=lambda row: (-row.exposed_s, -row.total_s, row.part, row.kind))


def _memory_bound(inside: list[PartInterval], window: StepWindow, *, on_cpu: bool) -> list[Kernel]:
    """Kernels counted as memory-bound work because no table of names lists them, by name."""
    calls: Counter[str] = Counter()
    length: Counter[str] = Counter()
    for item in inside:
        if item.part == "memory_bound":
            calls[item.what] += not on_cpu
            length[item.what] += min(item.end, window[1]) - max(item.start, window[0])
    return [Kernel(name, calls[name], long * NS) for name, long in length.most_common()]


def compare(predicted: Time, rank: RankStep) -> list[PartRow]:
    """Every part of either side, largest difference first.

    A receive that waits for its sender looks like one that transfers, so the predicted bubble is compared with the same time.
    """
    parts = dict(predicted.parts_s)
    if "bubble" in parts:
        parts["pp_comm"] = parts.pop("bubble") + parts.get("pp_comm", 0.0)
    names = dict.fromkeys([*parts, *rank.parts_s, *predicted.hidden_s, *rank.hidden_s])
    rows = [
        PartRow(
            name,
            parts.get(name, 0.0),
            rank.parts_s.get(name, 0.0),
            predicted.hidden_s.get(name, 0.0),
            rank.hidden_s.get(name, 0.0),
        )
        for name in names
    ]
    return sorted(rows, key=lambda row: (-abs(row.difference_s), row.part))


def _notes(lines: list[RankTimeline], ranks: list[RankStep], rows: list[PartRow], devices: int) -> list[str]:
    """Notes that a reader needs to interpret the table."""
    shown = {row.part: row for row in rows}
    notes = []
    if any(rank.step is None for rank in ranks):
        notes.append("no ProfilerStep in the trace (profiler.step() not called): the whole trace counts as one step")
    if len(lines) < devices:
        notes.append(f"traces of {len(lines)} of {devices} ranks: the slowest rank may be one without a trace")
    if not any(rank.parts_s.get("optimizer") for rank in ranks):
        notes.append(
            "no optimizer in the step: is profiler.step() called once per optimizer step, not per micro-batch?"
        )
    if shown.get("recompute") and not shown["recompute"].measured_s:
        notes.append(
            "recomputation cannot be distinguished here: no operator marks it, so its kernels are counted by type"
        )
    unknown, kernels = (sum(rank.by_name[i] for rank in ranks) for i in (0, 1))
    if unknown:
        notes.append(
            f"{unknown:,} of {kernels:,} kernels are classified by name only: the operator that launched them is not recorded"
        )
    if any(line.trace.on_cpu for line in lines):
        notes.append("CPU: operators are the work; views, allocations and autograd overhead count as launch time")
    if "pp_comm" in shown and shown["pp_comm"].predicted_s:
        notes.append(
            "pipeline sends: predicted with the bubble, because a waiting receive cannot be distinguished from a transfer"
        )
    if "stragglers" in shown:
        notes.append("stragglers: waiting for slower ranks is included in the measured collectives")
    return [
        *notes,
        "a profiled step is longer than an unprofiled one: profiler overhead is included, mostly in launch time",
    ]
