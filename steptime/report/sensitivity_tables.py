"""`3dtrn sensitivity`: the gain from increasing each figure of the machine, what hides communication, what settings save."""

from __future__ import annotations

from steptime.base.words import counted
from steptime.report import switch_tables
from steptime.report.breakdown import part_name
from steptime.report.format import percent, seconds
from steptime.report.headline import VERDICTS, layout_words
from steptime.report.palette import TIME
from steptime.report.plot_style import EDGE, picture
from steptime.report.table import Fact, FactList, ReportSection, Table
from steptime.search.sensitivity import FASTEST, Hiding, Sensitivity


def sections(found: Sensitivity) -> list[ReportSection]:
    """The job, then the tables."""
    given = found.given
    memory = given.memory
    step = seconds(given.step_s) + ("" if memory.fits else f", {VERDICTS[memory.verdict][0].lower()}")
    head = FactList(_job(found), [Fact("step", [step]), Fact("layout", [layout_words(given)])])
    rows = [[gain.name, gain.now, seconds(gain.step_s), _change(gain.change)] for gain in found.gains]
    notes = sorted({f"{gain.name}: {gain.note}" for gain in found.gains if gain.note}) + found.left_out
    shown: list[ReportSection] = [
        head,
        Table("step with 10 % more of", ["", "now", "step", "change"], rows, notes, left=2),
    ]
    if found.hiding:
        hidden = [_hiding(row) for row in found.hiding]
        told = ["hidden: at most 1 % of the step is exposed; rates per device and direction"]
        if any(row.every_times for row in found.hiding):
            told.append(
                f"all networks: faster together; the one named hides it at no rate up to {FASTEST:g} x by itself"
            )
        if any(row.left_s for row in found.hiding):
            told.append(f"never: what is left with {FASTEST:g} x the bandwidth of all networks is latency")
        header = ["", "exposed", "network", "now", "hidden at"]
        shown.append(Table("bandwidth that would hide communication", header, hidden, told, left=1))
    settings = switch_tables.table(found.savings)
    return [*shown, settings] if settings else shown


def _job(found: Sensitivity) -> str:
    """The job in one line."""
    given, job = found.given, found.given.job
    named = f"{job.model.name or 'unnamed model'} on {counted(given.devices, 'device')} of {job.machine.name}"
    return f"{named}, gbs {job.data.gbs:,} x {job.data.seqlen:,}, micro-batch {job.data.microbatch_sz}"


def _change(share: float) -> str:
    """A change of the step; one too small for its decimal in words.

    >>> _change(-0.078), _change(-0.0002), _change(0.0)
    ('-7.8 %', '< 0.1 %', 'no change')
    """
    if abs(share) < 0.0005:
        return "no change" if abs(share) < 1e-9 else "< 0.1 %"
    return percent(share, signed=True)


def _hiding(row: Hiding) -> list[str]:
    now = row.now_bytes_per_s
    if row.times is None and row.every_times is None:
        at = f"never: {seconds(row.left_s)} left"
    elif row.times is None:
        at = f"all networks {row.every_times:.1f} x"
    else:
        at = f"{row.times * now / 1e9:,.0f} GB/s ({row.times:.1f} x)"
    return [part_name(row.name), seconds(row.exposed_s), row.tier, f"{now / 1e9:,.0f} GB/s", at]


def draw(found: Sensitivity, path: str) -> None:
    """Write a bar chart with one bar per figure.

    Raises:
        ConfigError: the file cannot be written.
    """
    gains = found.gains[::-1]
    saved = [round(-100.0 * gain.change, 1) + 0.0 for gain in gains]  # no -0.0
    with picture(path, 7.0, 0.9 + 0.4 * len(gains)) as figure:
        axes = figure.subplots()
        bars = axes.barh([gain.name for gain in gains], saved, color=TIME["gemm"], **EDGE)
        axes.bar_label(bars, [f"{share:.1f} %" for share in saved], padding=3, fontsize=8)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.margins(x=0.12)
        axes.set_xlabel("% of the step saved by 10 % more, or by what a name says")
        axes.set_title(_job(found).replace(", gbs", f": {seconds(found.given.step_s)} a step\ngbs", 1), fontsize=9)
