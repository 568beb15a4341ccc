"""Two estimates side by side: `3dtrn diff A B`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.base.words import flow
from steptime.report.breakdown import part_name
from steptime.report.format import COUNT, GIB, TIME, column, percent, quantity, seconds, unit_for, whole
from steptime.report.headline import VERDICTS
from steptime.report.table import Table
from steptime.validation.setting_costs import leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.answer.result import Estimate
    from steptime.base.rows import StageMemory

Pair = tuple[str, float, float]
CELL = 17
"""Longest setting that a terminal shows in full."""
WHOLE = 1000
"""The same for a page, and for JSON."""


def diff(a: Estimate, b: Estimate, labels: tuple[str, str], notes: list[str], *, whole: bool = False) -> list[Table]:
    """The settings in which two jobs differ, then answer, parts and memory with their change from `a` to `b`.

    `whole`: long settings too, for which a page has room and a terminal has not.
    """
    most = WHOLE if whole else CELL
    rows = [
        [one.path, setting(one.a, most), setting(one.b, most)]
        for one in leaves(a.job.to_config(), b.job.to_config())
        if not one.path.endswith(".source") and one.path != "notes"
    ]
    changed = Table(
        "settings that differ" if rows else "no setting differs", ["", *labels] if rows else [], rows, notes
    )
    return [changed, _answer(a, b, labels), _parts(a, b, labels), _memory(a, b, labels)]


def setting(value: Any, most: int) -> str:
    """A setting as a plan writes it; "-" where a plan has none.

    >>> setting({"n_dcs": 2, "fast": True}, 40), setting("megatron-core", 11), setting(600.0, 9), setting(15e12, 9)
    ('{n_dcs: 2, fast: true}', 'megatron-c…', '600', '1.5e+13')
    """
    text = "-" if value is None else f"{value:.12g}" if isinstance(value, float) else flow(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def change(a: float, b: float) -> str:
    """A relative change; "" where the first value is 0.

    >>> change(2.0, 3.0), change(0.0, 1.0)
    ('+50.0 %', '')
    """
    return f"{100.0 * (b - a) / a:+,.1f} %" if a and a != b else ""


def _answer(a: Estimate, b: Estimate, labels: tuple[str, str]) -> Table:
    rows = [["verdict", VERDICTS[a.memory.verdict][0], VERDICTS[b.memory.verdict][0], ""]]
    left, right = a.throughput, b.throughput
    figures: tuple[tuple[str, float, float, Callable[[float], str]], ...] = (
        ("devices", float(a.devices), float(b.devices), whole),
        ("step", a.time.step_s, b.time.step_s, seconds),
        ("tokens/s", left.tokens_per_s, right.tokens_per_s, lambda x: quantity(x, COUNT)),
        ("tokens/s/device", left.tokens_per_s_per_device, right.tokens_per_s_per_device, lambda x: f"{x:,.1f}"),
        ("MFU (causal halved)", left.mfu, right.mfu, percent),
        ("HFU", left.hfu, right.hfu, percent),
        ("parameters", float(a.params.total), float(b.params.total), lambda x: quantity(x, COUNT)),
    )
    rows += [[label, show(x), show(y), change(x, y)] for label, x, y, show in figures]
    return Table("answer", ["", *labels, "change"], rows)


def _parts(a: Estimate, b: Estimate, labels: tuple[str, str]) -> Table:
    left, right = a.time.parts_s, b.time.parts_s
    pairs = [(part_name(name), left.get(name, 0.0), right.get(name, 0.0)) for name in left | right]
    pairs = sorted((pair for pair in pairs if pair[1] or pair[2]), key=lambda pair: -max(pair[1:]))
    pairs.append(("sum", a.time.step_s, b.time.step_s))
    unit = unit_for(max(a.time.step_s, b.time.step_s), TIME)
    return Table(f"step time breakdown ({unit.name})", ["", *labels, "change"], _rows(pairs, unit.size, 4))


def _memory(a: Estimate, b: Estimate, labels: tuple[str, str]) -> Table:
    worst = (a.memory.stages[a.memory.worst_stage], b.memory.stages[b.memory.worst_stage])
    keys = ("params", "gradients", "optimizer", "activations", "transient", "allocated", "reserved")

    def stage_bytes(row: StageMemory, key: str) -> float:
        return float(getattr(row, key + "_bytes"))

    pairs = [(key, stage_bytes(worst[0], key), stage_bytes(worst[1], key)) for key in keys]
    pairs.append(("context, communicators", sum(a.memory.overhead_bytes), sum(b.memory.overhead_bytes)))
    pairs.append(("usable", a.memory.capacity_bytes, b.memory.capacity_bytes))
    return Table("memory of the worst stage (GiB)", ["", *labels, "change"], _rows(pairs, GIB, 4))


def _rows(pairs: list[Pair], size: float, digits: int) -> list[list[str]]:
    shown = column([value for _, *both in pairs for value in both], size, digits)
    return [[label, shown[2 * i], shown[2 * i + 1], change(x, y)] for i, (label, x, y) in enumerate(pairs)]
