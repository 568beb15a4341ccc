"""Three or more plans side by side: `3dtrn diff A B C ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.report.breakdown import part_name
from steptime.report.diff_tables import WHOLE, setting
from steptime.report.format import COUNT, GIB, TIME, column, percent, quantity, seconds, unit_for, whole
from steptime.report.headline import VERDICTS
from steptime.report.table import Fact, FactList, ReportSection, Table
from steptime.validation.setting_costs import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from steptime.answer.result import Estimate

AT_ONCE = 4
"""Plans per table; more go into further tables."""
CELL = 11
"""Longest setting that a terminal shows in full."""


def diff_many(estimates: Sequence[Estimate], paths: Sequence[str], *, whole: bool = False) -> list[ReportSection]:
    """The names of the plans, the settings that differ from the first one's, and answer, parts and memory of each.

    `whole`: long settings too.
    """
    most = WHOLE if whole else CELL
    labels = [letter(i) for i in range(len(paths))]
    shown: list[ReportSection] = [
        FactList("plans", [Fact(label, [path]) for label, path in zip(labels, paths, strict=True)])
    ]
    for start in range(0, len(estimates), AT_ONCE):
        some, names = estimates[start : start + AT_ONCE], labels[start : start + AT_ONCE]
        shown += [
            _settings(estimates[0], some, names, most),
            _answers(some, names),
            _parts(some, names),
            _memory(some, names),
        ]
    return shown


def letter(i: int) -> str:
    """A, B ... Z, AA."""
    return chr(ord("A") + i) if i < 26 else letter(i // 26 - 1) + letter(i % 26)


def _settings(first: Estimate, some: Sequence[Estimate], labels: Sequence[str], most: int) -> Table:
    """A row for each setting in which any plan differs from the first."""
    base = first.job.to_config()
    rows: dict[str, list[str]] = {}
    for at, one in enumerate(some):
        for found in leaves(base, one.job.to_config()):
            if not found.path.endswith(".source") and found.path != "notes":
                row = rows.setdefault(found.path, [setting(found.a, most)] * len(some))
                row[at] = setting(found.b, most)
    lines = [[path, *cells] for path, cells in sorted(rows.items())]
    return Table("settings that differ" if lines else "no setting differs", ["", *labels] if lines else [], lines)


def _answers(some: Sequence[Estimate], labels: Sequence[str]) -> Table:
    """Verdict, step, throughput."""
    figures: tuple[tuple[str, Callable[[Estimate], str]], ...] = (
        ("verdict", lambda e: VERDICTS[e.memory.verdict][0]),
        ("devices", lambda e: whole(e.devices)),
        ("step", lambda e: seconds(e.time.step_s)),
        ("tokens/s", lambda e: quantity(e.throughput.tokens_per_s, COUNT)),
        ("tokens/s/device", lambda e: f"{e.throughput.tokens_per_s_per_device:,.1f}"),
        ("MFU (causal halved)", lambda e: percent(e.throughput.mfu)),
        ("HFU", lambda e: percent(e.throughput.hfu)),
    )
    return Table("answer", ["", *labels], [[name, *(show(e) for e in some)] for name, show in figures])


def _parts(some: Sequence[Estimate], labels: Sequence[str]) -> Table:
    """The parts of each step."""
    names = list(dict.fromkeys(name for e in some for name, s in e.time.parts_s.items() if s))
    names.sort(key=lambda name: -max(e.time.parts_s.get(name, 0.0) for e in some))
    unit = unit_for(max(e.time.step_s for e in some), TIME)
    each = [column([e.time.parts_s.get(name, 0.0) for name in names], unit.size, 4) for e in some]
    rows = [[part_name(name), *(of[i] for of in each)] for i, name in enumerate(names)]
    return Table(f"where the step goes ({unit.name})", ["", *labels], rows)


def _memory(some: Sequence[Estimate], labels: Sequence[str]) -> Table:
    """The worst stage of each."""
    keys = ("params", "gradients", "optimizer", "activations", "transient", "allocated", "reserved")
    worst = [e.memory.stages[e.memory.worst_stage] for e in some]
    rows = [[key, *(f"{getattr(stage, key + '_bytes') / GIB:,.2f}" for stage in worst)] for key in keys]
    rows.append(["context, communicators", *(f"{sum(e.memory.overhead_bytes) / GIB:,.2f}" for e in some)])
    rows.append(["usable", *(f"{e.memory.capacity_bytes / GIB:,.2f}" for e in some)])
    return Table("memory of the worst stage (GiB)", ["", *labels], rows)
