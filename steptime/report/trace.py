"""One step as a trace that Perfetto and chrome://tracing open: `3dtrn PLAN --trace FILE.json`.

Each pipeline stage is a process: one device of it, of one replica. Its tracks are compute, one for each axis of
communication, and counters of memory. Arrows follow what one stage sends to another. The first micro-batch is drawn op by op,
the others action by action, with their communication as one slice per axis.

Format: "Trace Event Format" of the Chromium project: complete events (X), counters (C), flows (s, f), metadata (M); ts and dur in
microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steptime import __version__
from steptime.answer.memory_over_time import StageHolds, stage_holds
from steptime.answer.result import Estimate
from steptime.report.breakdown import part_name
from steptime.report.format import GIB
from steptime.report.headline import headline
from steptime.report.output_files import write_file
from steptime.schedule import Action, ActionSpan
from steptime.schedule.orders import described
from steptime.timing.op_times import Direction, LayerTimes, chunk_op_times
from steptime.timing.timeline import Sent, Timeline

TRACKS = ("compute", "tp", "cp", "ep", "dp", "pp", "embedding")
"""Tracks in the order in which they are shown; others follow in that of their first slice."""
PASSES = {"F": "forward", "B": "backward", "I": "gradients of the inputs", "W": "gradients of the weights"}
"""Kinds of action in words."""
LANES = 64
"""Track numbers reserved for one axis: overlapping slices go to lanes next to each other."""
NOTES = (
    "one device of each stage, of one replica",
    "the first micro-batch is drawn op by op; of the others, an axis has one slice per action, as long as all of its calls",
    "memory is the peak of each action, and between actions what stays allocated",
    "FSDP's exposed communication is spread evenly over the actions",
)


def write(estimate: Estimate, path: str) -> None:
    """Write the trace; a path that ends in .gz is compressed.

    Raises:
        ConfigError: the path cannot be written.
    """
    text = trace(estimate)
    raw = text.encode("utf-8")
    write_file("--trace", path, gzip.compress(raw, 1, mtime=0) if Path(path).suffix == ".gz" else raw)


def trace(estimate: Estimate) -> str:
    """The document, one event a line."""
    about = {
        "steptime": __version__,
        "job": " | ".join(" ".join(line.split()) for line in headline(estimate)),
        "step_s": estimate.step_s,
        "notes": list(NOTES),
    }
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about}, allow_nan=False)
    return head[:-1] + ', "traceEvents": [\n' + ",\n".join(events(estimate)) + "\n]}\n"


def events(estimate: Estimate) -> Iterator[str]:
    """Every event as JSON, stage by stage, then the arrows."""
    timeline = Timeline(estimate.timing)
    sent: list[list[tuple[int, Sent]]] = [[] for _ in estimate.memory.stages]
    for number, each in enumerate(timeline.sent()):
        sent[each.stage].append((number, each))
    for holds in stage_holds(estimate.assembly, estimate.timing.states):
        stage = _TraceStage(estimate, timeline, holds)
        yield from stage.events()
        for number, each in sent[holds.stage]:
            yield from stage.send(number, each)
        yield from stage.names()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(ns: int) -> str:
    """Nanoseconds as microseconds, exactly."""
    return f"{ns / 1000:.3f}"


class _TraceStage:
    """The events of one stage."""

    def __init__(self, estimate: Estimate, timeline: Timeline, holds: StageHolds) -> None:
        self.estimate, self.timeline, self.holds = estimate, timeline, holds
        self.stage = holds.stage
        self.free: dict[str, list[int]] = {"compute": [0]}
        """By track: when each of its lanes is free [ns]."""
        self.tracks = [*TRACKS]
        self.known: dict[tuple[str, int, bool], list[tuple[str, str, int, str]]] = {}
        row = estimate.memory.stages[self.stage]
        self.states = (row.params_bytes + row.optimizer_bytes) / GIB

    def lane(self, track: str, name: str, start: int, end: int, args: str = "") -> str:
        """A slice on the first free lane of its track."""
        lanes = self.free.setdefault(track, [])
        lane = next((i for i, free in enumerate(lanes) if free <= start), len(lanes))
        if lane == len(lanes):
            lanes.append(0)
        lanes[lane] = end
        return self.event(self.number(track) + lane, track, name, start, end, args)

    def event(self, number: int, category: str, name: str, start: int, end: int, args: str = "") -> str:
        """A complete event; `name` needs no escape."""
        return (
            f'{{"ph": "X", "name": "{name}", "cat": "{category}", "pid": {self.stage + 1}, "tid": {number + 1}, '
            f'"ts": {_us(start)}, "dur": {_us(end - start)}{args}}}'
        )

    def number(self, track: str) -> int:
        """The track's first number."""
        if track not in self.tracks:
            self.tracks.append(track)
        return LANES * self.tracks.index(track)

    def events(self) -> Iterator[str]:
        """Actions with their communication and memory, and the work before and after the pipeline."""
        spans = self.timeline.times[self.stage].spans
        whole = not described(self.estimate.job.schedule).split
        texts: dict[tuple[str, int], str] = {}
        for span in spans:
            kind, microbatch, chunk = span.action
            start, end = _ns(span.start_s), _ns(span.end_s)
            if (kind, chunk) not in texts:
                texts[kind, chunk] = self.about(span)
            args = f', "args": {{"micro-batch": {microbatch}, {texts[kind, chunk]}}}'
            yield self.event(0, "compute", f"{kind} {microbatch}", start, end, args)
            if microbatch == 0 and whole:
                yield from self.ops(span, end)
            for track, name, length, more in self.communication(span.action, detailed=microbatch == 0 and whole):
                yield self.lane(track, name, start, start + length, more)
        yield from self.memory(spans)
        for of in self.timeline.around(self.stage):
            args = f', "args": {{"part of the step": {json.dumps(part_name(of.kind))}}}'
            yield self.lane(of.track, of.name, _ns(of.start_s), _ns(of.end_s), args)

    def about(self, span: ActionSpan) -> str:
        """The pass of an action, equal for all micro-batches."""
        kind, _, virtual = span.action
        chunk = self.timeline.chunk(self.stage, virtual)
        parts = [
            *["embedding"] * chunk.embedding,
            layer_range(self.timeline, self.stage, virtual),
            *["head"] * chunk.head,
        ]
        return f'"pass": "{PASSES[kind]}", "chunk": {virtual}, "holds": "{", ".join(part for part in parts if part)}"'

    def communication(self, action: Action, *, detailed: bool) -> list[tuple[str, str, int, str]]:
        """An action's communication by axis, with the total length of its calls: track, name, nanoseconds, arguments.

        `detailed`: its ops are drawn one by one, so only FSDP's collectives are left, which belong to no op.
        """
        kind, _, chunk = action
        if (kind, chunk, detailed) not in self.known:
            way: Direction = "F" if kind == "F" else "B"
            found = self.timeline.sharded(way) if detailed else self.timeline.traffic(self.stage, chunk, way)
            self.known[kind, chunk, detailed] = [
                (
                    of.axis,
                    f"{of.axis} communication",
                    _ns(of.busy_s),
                    f', "args": {{"calls": {of.calls:g}, "exposed_us": {1e6 * of.exposed_s:.3f}}}',
                )
                for of in found
                if of.busy_s and kind != "W"
            ]
        return self.known[kind, chunk, detailed]

    def send(self, number: int, sent: Sent) -> Iterator[str]:
        """A send on its track, and the arrow from its action to the waiting one."""
        kind, microbatch, _ = sent.action
        start, end = _ns(sent.start_s), _ns(sent.end_s)
        name = f"{kind} {microbatch}"
        if end > start:
            yield self.lane("pp", f"send {name}", start, end, f', "args": {{"to stage": {sent.to_stage}}}')
        what = f'"name": "{name}", "cat": "send", "id": {number}'
        yield f'{{"ph": "s", {what}, "pid": {self.stage + 1}, "tid": 1, "ts": {_us(start - 1)}}}'
        yield f'{{"ph": "f", "bp": "e", {what}, "pid": {sent.to_stage + 1}, "tid": 1, "ts": {_us(_ns(sent.used_s))}}}'

    def ops(self, span: ActionSpan, end: int) -> Iterator[str]:
        """An action op by op: layers inside it, ops inside these, collectives on their own tracks."""
        chunk = self.timeline.chunk(self.stage, span.action.chunk)
        at = span.start_s
        for layer in chunk_op_times(self.estimate.timing, chunk, "F" if span.action.kind == "F" else "B"):
            after = at + self.timeline.stretch * sum(op.seconds for op in layer.ops)
            yield self.event(0, "layer", layer.name, _ns(at), min(_ns(after), end))
            yield from self.layer_ops(layer, at, end)
            at = after

    def layer_ops(self, layer: LayerTimes, at: float, end: int) -> Iterator[str]:
        """The ops of one layer."""
        for op in layer.ops:
            after = at + self.timeline.stretch * op.seconds
            if op.seconds:
                args = f', "args": {{"part of the step": {json.dumps(part_name(op.kind))}}}'
                yield self.event(0, op.kind, op.name, _ns(at), min(_ns(after), end), args)
            if op.call is not None:
                whole = float(op.call.cost.time_s) * float(op.call.count)
                start = at if op.before else max(after - whole, 0.0)
                calls = f'"bytes": {float(op.call.bytes):.0f}, "calls": {float(op.call.count):g}'
                args = f', "args": {{"kind": "{op.call.kind}", {calls}}}'
                yield self.lane(op.call.axis, op.name, _ns(start), _ns(start) + _ns(whole), args)
            at = after

    def memory(self, spans: list[ActionSpan]) -> Iterator[str]:
        """Counters: each action's peak at its start, and at its end the kept memory if the stage then waits."""
        yield self.counter(0, self.holds.first_gradients, 0.0, 0.0)
        actions = self.holds.actions([span.action for span in spans])
        following = [_ns(span.start_s) for span in spans[1:]]
        for span, of, then in zip(spans, actions, [*following, -1], strict=True):
            end = _ns(span.end_s)
            yield self.counter(_ns(span.start_s), of.gradients_bytes, of.activations_bytes, of.transient_bytes)
            if then != end:
                yield self.counter(end, of.gradients_kept_bytes, of.kept_bytes, 0.0)
        update = [each for each in self.timeline.around(self.stage) if each.kind == "optimizer"]
        for each in update:
            temporary = float(self.holds.optimizer_step.transient_bytes)
            yield self.counter(_ns(each.start_s), self.holds.gradients, 0.0, temporary)
            yield self.counter(_ns(each.end_s), self.holds.first_gradients, 0.0, 0.0)

    def counter(self, at: int, gradients: float, activations: float, transient: float) -> str:
        """The memory of the device at one moment [GiB]."""
        values = f'"parameters and optimizer": {self.states:.6f}, "gradients": {gradients / GIB:.6f}, '
        values += f'"activations": {activations / GIB:.6f}, "transient": {max(transient, 0.0) / GIB:.6f}'
        name = '"name": "memory (GiB)", "cat": "memory"'
        return f'{{"ph": "C", {name}, "pid": {self.stage + 1}, "tid": 1, "ts": {_us(at)}, "args": {{{values}}}}}'

    def names(self) -> Iterator[str]:
        """Names and order of the process and its tracks."""
        chunks = range(len(self.timeline.timing.assembly.stages[self.stage]))
        layers = ", ".join(filter(None, [layer_range(self.timeline, self.stage, chunk) for chunk in chunks]))
        yield self.meta("process_name", 0, {"name": f"stage {self.stage}"})
        yield self.meta("process_labels", 0, {"labels": layers or "no layers"})
        yield self.meta("process_sort_index", 0, {"sort_index": self.stage})
        for track, lanes in self.free.items():
            for lane in range(len(lanes)):
                number = self.number(track) + lane
                yield self.meta("thread_name", number, {"name": track if lane == 0 else f"{track} ({lane + 1})"})
                yield self.meta("thread_sort_index", number, {"sort_index": number})

    def meta(self, name: str, number: int, args: dict[str, Any]) -> str:
        """One metadata event."""
        return json.dumps({"ph": "M", "name": name, "pid": self.stage + 1, "tid": number + 1, "ts": 0, "args": args})


def layer_range(timeline: Timeline, stage: int, virtual: int) -> str:
    """The layers of a chunk in words, "" where it has none."""
    chunk = timeline.chunk(stage, virtual)
    first = sum(timeline.timing.job.layers_per_chunk[: chunk.depth])
    if chunk.layers <= 1:
        return f"layer {first}" if chunk.layers else ""
    return f"layers {first}-{first + chunk.layers - 1}"
