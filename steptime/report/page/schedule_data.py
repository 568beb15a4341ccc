"""The pipeline schedule as data for the page's script: every action to the tick, a few bits each.

By stage, every action is three whole numbers. `gaps`: ticks between the end of the one before and its start. `order`: which pass
of which chunk, and how its micro-batch differs from the next one of that pass and chunk. In a steady pipeline these repeat, so
deflate makes 65,536 actions a few tens of kilobytes.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from functools import lru_cache
from itertools import chain
from operator import add, sub
from typing import Any

from steptime.answer.result import Estimate
from steptime.base.words import counted
from steptime.report.breakdown import part_name
from steptime.report.format import seconds
from steptime.report.page.markup import Html, el, join, legend
from steptime.report.trace import PASSES, layer_range
from steptime.schedule import StageTimes
from steptime.schedule.orders import described, order
from steptime.timing.timeline import Timeline

TICKS = 10_000_000
"""Ticks per step."""
BESIDE = 3000
"""Most slices before and after the pipeline (buckets of gradients and parameters) that are drawn one by one."""
KINDS = ("F", "B", "I", "W")
CANVAS = 1072
"""Width before the script knows the window's: that of the page's column."""


def schedule_data(estimate: Estimate, timeline: Timeline) -> dict[str, Any]:
    """Input of the script: `gaps` and `order` as above, deflated; the rest plain."""
    job, tick = estimate.job, estimate.step_s / TICKS
    p = job.parallelism
    codes, coded = _coded(job.schedule, p.pp, p.vpp, job.schedule_microbatches, p.microbatch_group_sz)
    found = [_ticks(times, of, tick) for times, of in zip(timeline.times, codes, strict=True)]
    stages = range(len(found))
    around = [[s for s in timeline.around(stage) if s.end_s > s.start_s] for stage in stages]
    few = sum(map(len, around)) <= BESIDE
    slices_of = [
        [
            [s.track, s.name, s.kind, round(s.start_s / tick), round((s.end_s - s.start_s) / tick)]
            for s in slices
            if few or s.track == "compute"
        ]
        for slices in around
    ]
    return {
        "ticks": TICKS, "step_s": estimate.step_s, "vpp": p.vpp, "microbatches": job.schedule_microbatches,
        "lengths": [[of.get(code, 0) for code in range(len(KINDS) * p.vpp)] for of, _ in found],
        "start": round(timeline.start_s / tick), "end": round(timeline.end_s / tick),
        "layers": [[layer_range(timeline, stage, chunk) for chunk in range(p.vpp)] for stage in stages],
        "beside": slices_of, "gaps": deflated([gaps for _, gaps in found]), "order": coded,
    }  # fmt: skip


def deflated(rows: list[list[int]]) -> str:
    """Numbers as text that the script inflates."""
    return b64encode(zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 6)).decode()


@lru_cache(maxsize=8)
def _coded(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None) -> tuple[list[list[int]], str]:
    """By stage, the code of every action; and `order`: plans that differ in their seconds only have it in common."""
    first = {kind: vpp * number for number, kind in enumerate(KINDS)}
    codes, rows = [], []
    for actions in order(schedule, pp, vpp, microbatches, group):
        codes.append([first[kind] + chunk for kind, _, chunk in actions])
        following = [0] * (len(KINDS) * vpp)
        row: list[int] = []
        for (_, microbatch, _), code in zip(actions, codes[-1], strict=True):
            row += (code, microbatch - following[code])
            following[code] = microbatch + 1
        rows.append(row)
    return codes, deflated(rows)


def _ticks(times: StageTimes, codes: list[int], tick: float) -> tuple[dict[int, int], list[int]]:
    """The length of every pass of every chunk, by code; and the gap before every action."""
    starts_s = times.starts_s
    first = [codes.index(code) for code in dict.fromkeys(codes)]
    lengths = {codes[at]: max(1, round((times.end_s(at) - starts_s[at]) / tick)) for at in first}
    starts = [round(start_s / tick) for start_s in starts_s]
    ends = map(add, starts, map(lengths.__getitem__, codes))
    return lengths, list(map(sub, starts, chain((0,), ends)))


def schedule(estimate: Estimate) -> Html:
    """The drawing area with its buttons; the script fills it."""
    line = estimate.pipeline
    stages = f"{line.stages} stages" if line.stages > 1 else "one device"
    words = f"{stages}, {counted(line.microbatches, 'micro-batch')}, {seconds(estimate.step_s)}; bubble {seconds(line.bubble_s)}"
    buttons = [
        el("button", text, type="button", data_zoom=kind, title=title)
        for text, kind, title in (
            ("+", "in", "zoom in"), ("-", "out", "zoom out"), ("whole step", "all", "show the whole step"),
            ("first micro-batches", "first", "the warm-up of the pipeline"), ("end", "last", "the end of the step"),
        )
    ]  # fmt: skip
    kinds = described(estimate.job.schedule).kinds
    keys = [(f"p-{kind}", PASSES[kind]) for kind in kinds] + [("t-bubble hatched", "idle: bubble and waits")]
    keys += [
        ("t-dp_comm", part_name("dp_comm")),
        ("t-optimizer", "optimizer"),
        ("t-stragglers", "wait for the slowest replica"),
    ]
    height = 36 + max(1, min(line.stages, 128)) * row_height(line.stages)
    canvas = el("canvas", width=CANVAS, height=height, tabindex=0, role="img", aria_label=f"the schedule of one step: {words}",
                data_schedule="", data_row=row_height(line.stages))  # fmt: skip
    note = (
        "wheel or + and - zoom, drag or arrow keys move, point at an action to read it; a thin line under a stage is its "
        "data-parallel communication"
    )
    script = el("noscript", el("p", "The schedule is drawn by JavaScript, which is off.", class_="note"))
    return join(legend(keys), el("div", *buttons, class_="tools"), canvas, script,
                el("p", "", class_="readout", aria_live="polite"), el("p", note, class_="note"))  # fmt: skip


def row_height(stages: int) -> int:
    """Pixels of a stage's row."""
    return 30 if stages <= 8 else 20 if stages <= 24 else 12 if stages <= 64 else 8
