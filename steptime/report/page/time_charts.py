"""Time charts: the parts of the step, the interval, weak scaling."""

from __future__ import annotations

from math import log2

from steptime.answer.result import Estimate
from steptime.base.words import counted
from steptime.report.breakdown import part_name, shown_parts
from steptime.report.format import TIME, column, percent, seconds, unit_for, whole
from steptime.report.page.axis_ticks import round_ticks
from steptime.report.page.markup import Html, el, join, table
from steptime.report.palette import time_class

WIDTH = 1000.0


def step_bars(estimate: Estimate) -> Html:
    """A bar for every part of the step, largest first; hatched: communication overlapped with compute."""
    time = estimate.time
    parts, hidden = time.parts_s, time.hidden_s
    names = shown_parts(estimate)
    widest = max(max(0.0, parts.get(n, 0.0)) + hidden.get(n, 0.0) for n in names)
    unit = unit_for(time.step_s, TIME)
    shown = column([parts.get(n, 0.0) for n in names] + [hidden.get(n, 0.0) for n in names], unit.size, 4)
    rows = []
    for i, name in enumerate(names):
        own, hidden_s = max(0.0, parts.get(name, 0.0)), hidden.get(name, 0.0)
        cells = [
            el("th", part_name(name), scope="row"),
            el("td", _bar(name, own / widest, hidden_s / widest), class_="bar"),
            el("td", shown[i], class_="n"),
            el("td", percent(own / time.step_s), class_="n"),
            el("td", shown[len(names) + i] if hidden_s else "", class_="n"),
        ]
        rows.append(el("tr", *cells))
    head = [("part", ""), ("seconds", "bar"), (unit.name, "n"), ("share", "n"), (f"hidden [{unit.name}]", "n")]
    total = [el("th", "the step", scope="row"), el("td"), el("td", column([time.step_s], unit.size, 4)[0], class_="n"),
             el("td", "100 %", class_="n"), el("td")]  # fmt: skip
    note = "solid: exposed, these sum to the step; hatched: hidden under compute"
    return join(table(head, rows, "bars", el("tfoot", el("tr", *total))), el("p", note, class_="note"))


def _bar(name: str, own: float, hidden: float) -> Html:
    """Exposed time solid, hidden time hatched next to it."""
    css = time_class(name)
    pieces = [el("rect", x=0, y=0, width=WIDTH * own, height=16, class_=f"{css} edge")] if own else []
    if hidden:
        pieces.append(el("rect", x=WIDTH * own, y=0, width=WIDTH * hidden, height=16, class_=f"{css} hidden"))
        pieces.append(el("rect", x=WIDTH * own, y=0, width=WIDTH * hidden, height=16, class_="hatch edge"))
    return el("svg", *pieces, viewBox="0 -2 1000 20", preserveAspectRatio="none", aria_hidden="true")


def interval(estimate: Estimate) -> Html:
    """The step between its 10th and 90th percentile."""
    time = estimate.time
    low, high = 0.9 * time.step_s_p10, 1.1 * time.step_s_p90
    if not low < high:
        return join()
    left, at, right = (40.0 + 560.0 * (x - low) / (high - low) for x in (time.step_s_p10, time.step_s, time.step_s_p90))
    words = f"80 % interval {seconds(time.step_s_p10)} to {seconds(time.step_s_p90)}, estimate {seconds(time.step_s)}"
    marks = [
        el("rect", x=left, y=22, width=right - left, height=12, class_="t-attention edge"),
        el("line", x1=at, x2=at, y1=18, y2=38, class_="cap"),
        el("text", f"p10 {seconds(time.step_s_p10)}", x=left, y=50, text_anchor="end"),
        el("text", f"estimate {seconds(time.step_s)}", x=at, y=12, text_anchor="middle"),
        el("text", f"p90 {seconds(time.step_s_p90)}", x=right, y=50),
    ]
    return el(
        "div", el("svg", *marks, viewBox="0 0 640 56", role="img", aria_label=words, class_="chart"), class_="scroll"
    )


def weak_scaling(estimate: Estimate) -> Html:
    """Efficiency over devices at fixed work per device: a line over the sizes that hold the job, and a table of all."""
    rows = estimate.weak_scaling
    here = estimate.job.parallelism.dp
    spots = [(row.devices, row.efficiency, row.dp == here) for row in rows if row.verdict != "does_not_fit"]
    line = _scaling_line(spots) if len(spots) > 1 else None
    cells = [
        el(
            "tr",
            el("th", f"dp {row.dp:,}" + (" (this plan)" if row.dp == here else ""), scope="row"),
            el("td", whole(row.devices), class_="n"),
            el("td", whole(row.gbs), class_="n"),
            el("td", seconds(row.step_s), class_="n"),
            el("td", "" if row.verdict == "does_not_fit" else percent(row.efficiency), class_="n"),
            el("td", "" if row.verdict == "fits" else row.verdict.replace("_", " ")),
        )
        for row in rows
    ]
    head = [("replicas", ""), *((text, "n") for text in ("devices", "gbs", "step", "efficiency")), ("", "")]
    return join(line, table(head, cells))


def _scaling_line(rows: list[tuple[int, float, bool]]) -> Html:
    """Efficiency over the logarithm of the devices."""
    width, height, edge = 640.0, 170.0, 84.0
    first, last = log2(rows[0][0]), log2(rows[-1][0])
    top = max(1.0, *(efficiency for _, efficiency, _ in rows))
    low = min(0.5, *(efficiency for _, efficiency, _ in rows))
    spots = [
        (edge + (width - 2 * edge) * (log2(devices) - first) / max(last - first, 1e-9),
         10 + (height - 44) * (top - efficiency) / (top - low), devices, efficiency, here)
        for devices, efficiency, here in rows
    ]  # fmt: skip
    line = el("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in spots), class_="line")
    marks, every = [], max(1, len(spots) // 8)
    for i, (x, y, devices, efficiency, here) in enumerate(spots):
        title = el("title", f"{counted(devices, 'device')}: {percent(efficiency)}")
        marks.append(el("circle", title, cx=x, cy=y, r=6.0 if here else 4.0, class_="here" if here else "dot"))
        if i % every == 0 or here:
            marks.append(el("text", f"{devices:,}", x=x, y=height - 14, text_anchor="middle"))
    levels = []
    for level in round_ticks(low, top, 4):
        y = 10 + (height - 44) * (top - level) / (top - low)
        levels += [
            el("line", x1=edge - 14, x2=width - edge + 14, y1=y, y2=y, class_="grid"),
            el("text", f"{100.0 * level:g} %", x=edge - 22, y=y + 4, text_anchor="end"),
        ]
    words = f"weak scaling: {percent(rows[-1][1])} at {counted(rows[-1][0], 'device')}"
    middle = 10 + (height - 44) / 2
    names = [
        el("text", "devices", x=width / 2, y=height, text_anchor="middle"),
        el("text", "efficiency", x=12, y=middle, transform=f"rotate(-90 12 {middle:.0f})", text_anchor="middle"),
    ]
    chart = el("svg", *levels, line, *marks, *names, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=words,
               class_="chart")  # fmt: skip
    return el("div", chart, class_="scroll")
