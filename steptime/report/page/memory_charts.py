"""Memory charts: a bar for every stage with the device's capacity, and the worst stage over the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from steptime.answer.memory_over_time import stage_holds
from steptime.answer.result import Estimate
from steptime.base.rows import StageMemory
from steptime.report.format import GIB, gib
from steptime.report.page.axis_ticks import round_ticks, time_ticks
from steptime.report.page.markup import Html, el, join, legend, table
from steptime.timing.timeline import Timeline

PARTS = {
    "params_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer states",
    "activations_bytes": "activations",
    "buffers_bytes": "workspaces, buffers",
    "transient_bytes": "transient at the peak",
    "fragmentation": "reserved by the allocator beyond that",
    "overhead": "outside the allocator",
}
"""Parts of a stage, in the order of its bar."""
REACH = "90th percentile (p90)"
"""Name of the line at the end of a bar."""
WIDTH, HEIGHT = 1000.0, 240.0
OVER_TIME = {"transient_bytes": "workspaces and transients"} | {
    key: PARTS[key] for key in ("activations_bytes", "gradients_bytes", "optimizer_bytes", "params_bytes", "overhead")
}
"""Parts of the chart over time, the uppermost first."""
SCALE = 59
"""Pixels for the labels of its y axis: with the gap beside them, as wide as the names of the stages in the schedule above."""
PIECES = 400
"""Most intervals in the chart over time."""


def parts_of(row: StageMemory, overhead_bytes: float) -> dict[str, float]:
    """Bytes of a stage by part of its bar."""
    found = {key: max(0.0, float(getattr(row, key))) for key in PARTS if key.endswith("_bytes")}
    found["transient_bytes"] = max(0.0, row.transient_bytes - row.buffers_bytes)
    return found | {"fragmentation": max(0.0, row.reserved_bytes - row.allocated_bytes), "overhead": overhead_bytes}


def stage_bars(estimate: Estimate) -> Html:
    """A table with a bar for every stage; a line marks the device's capacity."""
    memory = estimate.memory
    overhead = float(sum(memory.overhead_bytes))
    needs = [memory.most_of(row.reserved_bytes) for row in memory.stages]
    scale = 1.02 * max([*needs, memory.capacity_bytes])
    body = []
    for row, need in zip(memory.stages, needs, strict=True):
        worst = row.stage == memory.worst_stage
        left = memory.capacity_bytes - need
        body.append(
            el(
                "tr",
                el("th", _stage_name(estimate, row.stage), scope="row"),
                el("td", memory_bar(parts_of(row, overhead), need, memory.capacity_bytes, scale), class_="bar"),
                el("td", f"{gib(memory.least_of(row.allocated_bytes))} to {gib(need)}", class_="n"),
                el("td", gib(left) if left >= 0 else f"-{gib(-left)}", class_="n"),
                el("td", row.peak_op),
                class_="worst" if worst else None,
            )
        )
    left_of = f"left of {gib(memory.capacity_bytes)}"
    head = [("stage", ""), ("what it holds", "bar"), ("GiB needed", "n"), (left_of, "n"), ("peak at", "")]
    return join(memory_legend(), table(head, body, "bars memory"))


def _stage_name(estimate: Estimate, stage: int) -> str:
    return f"stage {stage}" if len(estimate.memory.stages) > 1 else "device"


def memory_bar(parts: dict[str, float], need: float, capacity: float, scale: float) -> Html:
    """One stage and how far it may reach; the tooltip of every part gives its GiB."""
    pieces, at = [], 0.0
    for key, bytes_ in parts.items():
        width = WIDTH * bytes_ / scale
        if width > 0.0:
            title = el("title", f"{PARTS[key]}: {gib(bytes_)} GiB")
            pieces.append(el("rect", title, x=at, y=0, width=width, height=16, class_=f"m-{key} edge"))
        at += width
    reach = WIDTH * need / scale
    title = el("title", f"{REACH}: {gib(need)} GiB")
    far = el("path", title, d=f"M{at:.2f} 8H{reach:.2f}M{reach:.2f} 4V12", class_="reach")
    line = WIDTH * capacity / scale
    mark = el("line", x1=line, x2=line, y1=-2, y2=18, class_="cap")
    words = ", ".join(f"{PARTS[key]} {gib(bytes_)}" for key, bytes_ in parts.items() if bytes_)
    box = f"0 -2 {WIDTH:.0f} 20"
    told = f"{words} GiB; at most {gib(need)}"
    return el("svg", *pieces, far, mark, viewBox=box, preserveAspectRatio="none", role="img", aria_label=told)


def memory_legend() -> Html:
    """The parts of a bar, the line at its end, and the line of the device."""
    far = el("svg", el("path", d="M0 6H11M11 2V10", class_="reach"), viewBox="0 0 12 12")
    full = el("svg", el("line", x1=6, x2=6, y1=0, y2=12, class_="cap"), viewBox="0 0 12 12")
    return legend(
        ((f"m-{key}", name) for key, name in PARTS.items()), el("li", far, REACH), el("li", full, "usable memory")
    )


# --- over time -------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Memory held for an interval [B]."""

    start_s: float
    end_s: float
    gradients: float
    activations: float
    transient: float

    @property
    def moving(self) -> float:
        """Everything that varies over time."""
        return self.gradients + self.activations + self.transient


def pieces(estimate: Estimate, timeline: Timeline, stage: int) -> list[Piece]:
    """What a stage holds from the step's start to its end, besides parameters and optimizer states."""
    holds = stage_holds(estimate.assembly, estimate.timing.states)[stage]
    spans = timeline.times[stage].spans
    found, at, kept, gradients = [], 0.0, 0.0, holds.first_gradients
    for span, action in zip(spans, holds.actions([span.action for span in spans]), strict=True):
        if span.start_s > at:
            found.append(Piece(at, span.start_s, gradients, kept, 0.0))
        found.append(
            Piece(span.start_s, span.end_s, action.gradients_bytes, action.activations_bytes, action.transient_bytes)
        )
        at, kept = span.end_s, action.kept_bytes
        gradients = action.gradients_kept_bytes
    for update in [each for each in timeline.around(stage) if each.kind == "optimizer"]:
        found.append(Piece(at, update.start_s, gradients, kept, 0.0))
        temporary = float(holds.optimizer_step.transient_bytes)
        found.append(Piece(update.start_s, update.end_s, holds.gradients, kept, temporary))
        at, gradients = update.end_s, holds.first_gradients
    return [*found, Piece(at, estimate.step_s, gradients, kept, 0.0)]


def drawn(found: Sequence[Piece], step_s: float) -> list[Piece]:
    """The pieces themselves where they are few; else the largest in each of `PIECES` equal slots."""
    if len(found) <= PIECES:
        return [piece for piece in found if piece.end_s > piece.start_s]
    slots: list[Piece | None] = [None] * PIECES
    for piece in found:
        first = min(int(PIECES * piece.start_s / step_s), PIECES - 1)
        last = min(int(PIECES * piece.end_s / step_s), PIECES - 1)
        for slot in range(first, last + 1):
            before = slots[slot]
            if before is None or piece.moving > before.moving:
                slots[slot] = piece
    width = step_s / PIECES
    return [p._replace(start_s=i * width, end_s=(i + 1) * width) for i, p in enumerate(slots) if p is not None]


def over_time(estimate: Estimate, timeline: Timeline) -> Html:
    """The worst stage from the step's start to its end, with its device's capacity."""
    memory = estimate.memory
    row = memory.stages[memory.worst_stage]
    overhead = float(sum(memory.overhead_bytes))
    found = drawn(pieces(estimate, timeline, row.stage), estimate.step_s)
    capacity = memory.capacity_bytes
    top = 1.1 * max(capacity, row.allocated_bytes + overhead)
    areas = list(_areas(found, row, overhead, top, estimate.step_s))
    level = HEIGHT * (1.0 - capacity / top)
    marks = [el("line", x1=0, x2=WIDTH, y1=level, y2=level, class_="cap")]
    name = _stage_name(estimate, row.stage)
    words = f"{name} has a peak of {gib(row.allocated_bytes + overhead)} of {gib(capacity)} GiB, at {row.peak_op}"
    levels = [(bytes_ * GIB, f"{bytes_:g} GiB" if bytes_ else "0") for bytes_ in round_ticks(0.0, top / GIB)]
    times = time_ticks(0.0, estimate.step_s)
    lines = [_grid(y1=y, y2=y, x1=0, x2=WIDTH) for y in (HEIGHT * (1.0 - bytes_ / top) for bytes_, _ in levels)]
    lines += [_grid(x1=x, x2=x, y1=0, y2=HEIGHT) for x in (WIDTH * at / estimate.step_s for at, _ in times)]
    drawing = el("svg", *lines, *areas, *marks, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", preserveAspectRatio="none",
                 width="100%", height=HEIGHT)  # fmt: skip
    usable = el("text", f"{gib(capacity)} GiB usable", x="99.6%", y=level - 6, text_anchor="end")
    chart = el("svg", drawing, usable, role="img", aria_label=words, class_="area", height=HEIGHT)
    note = f"{words}; the areas are the peak of each action"
    colors = legend((f"m-{key}", OVER_TIME[key]) for key in OVER_TIME)
    axes = _level_names(levels, top), chart, _time_names(times, estimate.step_s)
    return join(colors, el("div", *axes, class_="over-time"), el("p", note, class_="note"))


def _grid(**ends: float) -> Html:
    return el("line", **ends, class_="grid")


def _level_names(levels: Sequence[tuple[float, str]], top: float) -> Html:
    """GiB on the y axis."""
    names = [
        el("text", text, x=SCALE, y=min(max(HEIGHT * (1.0 - bytes_ / top) + 4.0, 10.0), HEIGHT), text_anchor="end")
        for bytes_, text in levels
    ]
    return el("svg", *names, width=SCALE, height=HEIGHT, class_="levels", aria_hidden="true")


def _time_names(times: Sequence[tuple[float, str]], step_s: float) -> Html:
    """Seconds on the x axis."""
    names = [
        el("text", text, x=f"{100.0 * at / step_s:.2f}%", y=13,
           text_anchor="start" if at == 0.0 else "end" if at > 0.96 * step_s else "middle")
        for at, text in times
    ]  # fmt: skip
    return el("svg", *names, width="100%", height=17, class_="axis", aria_hidden="true")


def _areas(found: Sequence[Piece], row: StageMemory, overhead: float, top: float, step_s: float) -> Iterator[Html]:
    """Stacked areas from the bottom up."""
    for key, below, above in stacked(found, row, overhead):
        upper = _steps(found, above, top, step_s)
        lower = _steps(found, below, top, step_s)[::-1]
        points = " ".join(f"{x:.1f},{y:g}" for x, y in [*upper, *lower])
        bytes_ = max((high - low for low, high in zip(below, above, strict=True)), default=0.0)
        yield el(
            "polygon",
            el("title", f"{OVER_TIME[key]}: at most {bytes_ / GIB:.2f} GiB"),
            points=points,
            class_=f"m-{key}",
        )


def stacked(
    found: Sequence[Piece], row: StageMemory, overhead: float
) -> Iterator[tuple[str, list[float], list[float]]]:
    """Each part of a stage's memory, from permanent to transient, with its lower and upper edge in each piece [B]."""
    below = [0.0] * len(found)
    for key, bytes_ in (
        ("overhead", [overhead] * len(found)),
        ("params_bytes", [row.params_bytes] * len(found)),
        ("optimizer_bytes", [row.optimizer_bytes] * len(found)),
        ("gradients_bytes", [piece.gradients for piece in found]),
        ("activations_bytes", [piece.activations for piece in found]),
        ("transient_bytes", [max(0.0, piece.transient) for piece in found]),
    ):
        above = [low + more for low, more in zip(below, bytes_, strict=True)]
        yield key, below, above
        below = above


def _steps(found: Sequence[Piece], values: Sequence[float], top: float, step_s: float) -> list[tuple[float, float]]:
    """Corners of a line that is constant within each piece; equal neighbors are joined."""
    corners: list[tuple[float, float]] = []
    for piece, value in zip(found, values, strict=True):
        y, end = round(HEIGHT * (1.0 - value / top), 1), WIDTH * piece.end_s / step_s
        if len(corners) > 1 and corners[-1][1] == y:
            corners[-1] = (end, y)
        else:
            corners += [(WIDTH * piece.start_s / step_s, y), (end, y)]
    return corners
