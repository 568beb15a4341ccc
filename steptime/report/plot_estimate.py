"""Plots of an estimate: `3dtrn PLAN --plot FILE` and `3dtrn scale PLAN --plot FILE`."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from steptime.answer.result import Estimate
from steptime.report.breakdown import part_name, shown_parts
from steptime.report.format import GIB, TIME, percent, seconds, unit_for
from steptime.report.headline import VERDICTS, headline, phrases
from steptime.report.page.memory_charts import PARTS, REACH, parts_of, pieces, stacked
from steptime.report.palette import MEMORY, PASSES, time_color
from steptime.report.palette import TIME as COLORS
from steptime.report.plot_style import EDGE, picture
from steptime.report.trace import PASSES as WORDS
from steptime.schedule import ActionSpan
from steptime.timing.timeline import Timeline

COLUMNS = 2400
"""Columns of the schedule's picture; narrower actions may not show."""


def draw(estimate: Estimate, path: str) -> None:
    """The parts of the step, the memory of every stage, the schedule, and the worst stage's memory over the step.

    Raises:
        ConfigError: the file cannot be written.
    """
    timeline = Timeline(estimate.timing)
    stages = len(estimate.memory.stages)
    with picture(path, 11.5, 8.0 + min(stages, 64) * 0.05) as figure:
        grid = figure.add_gridspec(3, 2, height_ratios=(3.0, 1.0 + min(stages, 32) * 0.08, 1.8))
        _step(figure.add_subplot(grid[0, 0]), estimate)
        _memory(figure.add_subplot(grid[0, 1]), estimate)
        _schedule(figure.add_subplot(grid[1, :]), estimate, timeline)
        _over_time(figure.add_subplot(grid[2, :]), estimate, timeline)
        verdict = VERDICTS[estimate.memory.verdict][0]
        step = f"{seconds(estimate.step_s)} a step, MFU {percent(estimate.throughput.mfu)}"
        figure.suptitle(f"{verdict}: {step}\n{_job(estimate)}", x=0.01, ha="left", fontsize=9)


def _job(estimate: Estimate) -> str:
    """The job in one line."""
    return ", ".join(phrase for line in headline(estimate) for phrase in phrases(line))


def _step(axes: Any, estimate: Estimate) -> None:
    """Bars by part, the largest on top; hidden communication hatched."""
    time = estimate.time
    names = shown_parts(estimate, 1e-6)[::-1]
    unit = unit_for(time.step_s, TIME)
    for i, name in enumerate(names):
        own, hidden = (max(0.0, of.get(name, 0.0)) / unit.size for of in (time.parts_s, time.hidden_s))
        axes.barh(i, own, color=time_color(name), **EDGE)
        if hidden:
            label = "hidden under compute" if not axes.get_legend_handles_labels()[0] else None
            axes.barh(
                i, hidden, left=own, color="white", hatch="////", edgecolor=time_color(name), linewidth=0.5, label=label
            )
    axes.set_yticks(range(len(names)), [part_name(name) for name in names])
    axes.set(xlabel=f"seconds of the step [{unit.name}]", title="where the step goes")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")


def _memory(axes: Any, estimate: Estimate) -> None:
    """A stacked bar for every stage and a line at the device's capacity."""
    memory = estimate.memory
    overhead = float(sum(memory.overhead_bytes))
    stages = [row.stage for row in memory.stages]
    left = [0.0] * len(stages)
    for key, name in PARTS.items():
        gibs = [parts_of(row, overhead)[key] / GIB for row in memory.stages]
        axes.barh(
            stages, gibs, left=left, height=0.8 if len(stages) > 2 else 0.4, color=MEMORY[key], label=name, **EDGE
        )
        left = [a + b for a, b in zip(left, gibs, strict=True)]
    needs = [memory.most_of(row.reserved_bytes) / GIB for row in memory.stages]
    above = [need - used for need, used in zip(needs, left, strict=True)]
    reach = {"xerr": [[0.0] * len(stages), above], "capsize": 2, "linewidth": 0.8, "label": REACH}
    axes.errorbar(left, stages, fmt="none", ecolor="black", **reach)
    axes.axvline(memory.capacity_bytes / GIB, color="black", linewidth=1.5, label="usable")
    _stages(axes, len(stages))
    axes.set(xlabel="GiB of a device", title="memory at the peak")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _stages(axes: Any, stages: int) -> None:
    """The axis of the stages from the top down: whole numbers, all of them as long as they have room; none for a single one."""
    axes.set_ylim(stages - 0.5, -0.5)
    if stages == 1:
        axes.set_yticks([])
        return
    axes.set_yticks(range(0, stages, -(-stages // 16)))
    axes.set_ylabel("stage")


def _schedule(axes: Any, estimate: Estimate, timeline: Timeline) -> None:
    """One row per stage: forwards light, backwards dark, idle gray."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    step_s = estimate.step_s
    rows = [[to_rgb(color) for color in _colors(spans, timeline, i)] for i, spans in enumerate(timeline.actions)]
    unit = unit_for(step_s, TIME)
    axes.imshow(rows, aspect="auto", interpolation="nearest", extent=(0.0, step_s / unit.size, len(rows) - 0.5, -0.5))
    kinds = {span.action.kind for span in timeline.actions[0]}
    legend = [Patch(facecolor=PASSES[kind], label=words) for kind, words in WORDS.items() if kind in kinds]
    others = (("bubble", "idle"), ("optimizer", "optimizer"), ("stragglers", "wait for the slowest replica"))
    legend += [Patch(facecolor=COLORS[key], label=name) for key, name in others]
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    _stages(axes, len(rows))
    axes.set_title("the schedule")


def _colors(spans: list[ActionSpan], timeline: Timeline, stage: int) -> list[str]:
    """The color in the middle of every column of one stage."""
    starts = [span.start_s for span in spans]
    own = [each for each in timeline.around(stage) if each.track == "compute"]
    found = []
    for column in range(COLUMNS):
        at = (column + 0.5) * timeline.step_s / COLUMNS
        i = bisect_right(starts, at) - 1
        inside = timeline.start_s <= at <= timeline.end_s
        color = COLORS["bubble"] if inside else "#ffffff"
        if i >= 0 and at <= spans[i].end_s:
            color = PASSES[spans[i].action.kind]
        color = next((time_color(each.kind) for each in own if each.start_s <= at <= each.end_s), color)
        found.append(color)
    return found


def _over_time(axes: Any, estimate: Estimate, timeline: Timeline) -> None:
    """The worst stage, stacked from permanent to transient memory."""
    memory = estimate.memory
    row = memory.stages[memory.worst_stage]
    found = pieces(estimate, timeline, row.stage)
    unit = unit_for(estimate.step_s, TIME)
    edges = [*(piece.start_s / unit.size for piece in found), found[-1].end_s / unit.size]
    for key, below, above in stacked(found, row, float(sum(memory.overhead_bytes))):
        low, high = ([value / GIB for value in (*values, values[-1])] for values in (below, above))
        axes.fill_between(edges, low, high, step="post", color=MEMORY[key], linewidth=0)
    axes.axhline(memory.capacity_bytes / GIB, color="black", linewidth=1.5)
    axes.set(xlim=(0.0, edges[-1]), ylim=(0.0, None), xlabel=f"time [{unit.name}]", ylabel="GiB")
    name = f"stage {row.stage}" if len(memory.stages) > 1 else "a device"
    axes.set_title(f"memory of {name} over the step (colors as above, line: usable)")


def draw_scaling(found: Estimate, path: str) -> None:
    """Efficiency over devices at fixed work per device, and at a fixed batch, the plan's own devices marked.

    Sizes that cannot hold the job are left out, where any can.

    Raises:
        ConfigError: the file cannot be written.
    """
    with picture(path, 7.0, 4.2) as figure:
        axes = figure.subplots()
        weak, strong = (
            [row for row in rows if row.verdict != "does_not_fit"] or rows
            for rows in (found.weak_scaling, found.strong_scaling)
        )
        for rows, name, style in (
            (weak, "weak: the same work per device", "o-"),
            (strong, "strong: the same batch", "s--"),
        ):
            color = COLORS["gemm"] if style == "o-" else COLORS["tp_comm"]
            shares = [100.0 * row.efficiency for row in rows]
            axes.plot([row.devices for row in rows], shares, style, color=color, label=name, markersize=5)
        axes.axvline(found.devices, color="#59616c", linewidth=0.8, linestyle=":", label="this plan")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        most = 100.0 * max(row.efficiency for row in (*weak, *strong))
        axes.set(xlabel="devices", ylabel="efficiency [%]", ylim=(0.0, 1.05 * most))
        axes.set_title(_job(found).replace(", tp ", "\ntp ", 1), fontsize=8)
        axes.legend(loc="lower left")
