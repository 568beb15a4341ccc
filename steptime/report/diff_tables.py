"""Estimates side by side: `3dtrn diff A B ...`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from steptime.answer.result import Estimate
from steptime.base.words import counted, flow
from steptime.job.stated import stated
from steptime.report.breakdown import MEMORY_ROWS, RECEIVE_BUFFERS, memory_bytes, part_name
from steptime.report.format import COUNT, GIB, SI, TIME, column, percent, quantity, seconds, unit_for, whole
from steptime.report.headline import VERDICTS
from steptime.report.table import Fact, FactList, ReportSection, Table
from steptime.validation.setting_costs import leaves

CELL_OF_TWO, CELL = 17, 11
"""Longest setting of one of two plans, and of more, that a terminal shows in full."""
WHOLE = 1000
"""The same for a page, and for JSON."""
AT_ONCE = 4
"""Plans per table; more go into further tables."""

FIGURES: tuple[tuple[str, Callable[[Estimate], float], Callable[[float], str]], ...] = (
    ("devices", lambda e: float(e.devices), whole),
    ("step", lambda e: e.time.step_s, seconds),
    ("tokens/s", lambda e: e.throughput.tokens_per_s, lambda x: quantity(x, COUNT)),
    ("tokens/s/device", lambda e: e.throughput.tokens_per_s_per_device, lambda x: f"{x:,.1f}"),
    ("MFU (causal halved)", lambda e: e.throughput.mfu, percent),
    ("HFU", lambda e: e.throughput.hfu, percent),
    ("parameters", lambda e: float(e.params.total), lambda x: quantity(x, COUNT)),
)


def diff(
    estimates: Sequence[Estimate], labels: Sequence[str], notes: Sequence[str] = (), *, whole: bool = False
) -> list[Table]:
    """The settings that differ from the first plan's, then answer, parts and memory; of two plans with the change.

    `whole`: also long settings, which fit on a page but not on a terminal.
    """
    pair = len(estimates) == 2
    most = WHOLE if whole else CELL_OF_TWO if pair else CELL
    shown = []
    for start in range(0, len(estimates), AT_ONCE):
        some, names = estimates[start : start + AT_ONCE], labels[start : start + AT_ONCE]
        header = ["", *names, *(["change"] if pair else [])]
        shown += [
            _settings(estimates[0], some, names, most, notes, pair=pair, every=whole),
            _answer(some, header, pair=pair),
            _parts(some, header, pair=pair),
            _memory(some, header, pair=pair),
        ]
    return shown


def diff_many(
    estimates: Sequence[Estimate], paths: Sequence[str], notes: Sequence[str] = (), *, whole: bool = False
) -> list[ReportSection]:
    """Three plans or more: a letter for each, and `diff` of them."""
    labels = [letter(i) for i in range(len(paths))]
    names = FactList("plans", [Fact(label, [path]) for label, path in zip(labels, paths, strict=True)])
    return [names, *diff(estimates, labels, notes, whole=whole)]


def letter(i: int) -> str:
    """A, B ... Z, AA."""
    return chr(ord("A") + i) if i < 26 else letter(i // 26 - 1) + letter(i % 26)


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
    return percent((b - a) / a, signed=True) if a and a != b else ""


def _told(found: Estimate) -> dict[str, Any]:
    """The resolved config, without the head_dim that latent attention does not have: its heads have dims of their own."""
    config, model = found.job.to_config(), found.job.model
    if model.attention.kind == "mla":
        config["model"].pop("head_dim", None)
    return config


def _settings(
    first: Estimate,
    some: Sequence[Estimate],
    labels: Sequence[str],
    most: int,
    notes: Sequence[str],
    *,
    pair: bool,
    every: bool,
) -> Table:
    """A row for each setting in which any plan differs from the first; of more than two by name.

    Those that no plan states, which are defaults of model or software, are only named; with `every` they are rows, too.
    """
    base = _told(first)
    rows: dict[str, list[str]] = {}
    for at, one in enumerate(some):
        for found in leaves(base, _told(one)):
            if not found.path.endswith(".source") and found.path != "notes":
                row = rows.setdefault(found.path, [setting(found.a, most)] * len(some))
                row[at] = setting(found.b, most)
    follow = [] if every else [path for path in rows if all(stated(e.job, path) is None for e in (first, *some))]
    lines = [[path, *rows[path]] for path in (rows if pair else sorted(rows)) if path not in follow]
    if follow:
        names = ", ".join(path.rpartition(".")[2] for path in follow)
        which = "1 default that follows" if len(follow) == 1 else f"{counted(len(follow), 'default')} that follow"
        notes = [*notes, f"{which} from these, in full with --json: {names}"]
    title = "settings that differ" if lines else "no stated setting differs" if follow else "no setting differs"
    return Table(title, ["", *labels] if lines else [], lines, notes)


def _answer(some: Sequence[Estimate], header: list[str], *, pair: bool) -> Table:
    """Verdict, step, throughput."""
    rows = [["verdict", *(VERDICTS[e.memory.verdict][0] for e in some), *([""] if pair else [])]]
    for label, value_of, show in FIGURES:
        values = [value_of(e) for e in some]
        rows.append([label, *map(show, values), *([change(*values)] if pair else [])])
    return Table("answer", header, rows, _peaks(some, header))


def _peaks(some: Sequence[Estimate], header: list[str]) -> list[str]:
    """The peak that each plan's MFU is a share of, where they differ."""
    rates = [e.throughput for e in some]
    peaks = [f"{quantity(rate.peak_flops_used, SI, 'FLOP/s')} {rate.peak_dtype}" for rate in rates]
    if len(set(peaks)) == 1:
        return []
    each = ", ".join(f"{name} {peak}" for name, peak in zip(header[1:], peaks, strict=False))
    return [f"MFU and HFU are shares of each plan's own dense peak, which differ: {each}"]


def _parts(some: Sequence[Estimate], header: list[str], *, pair: bool) -> Table:
    """The parts of each step, largest first."""
    names = dict.fromkeys(name for e in some for name in e.time.parts_s)
    parts = [(part_name(name), [e.time.parts_s.get(name, 0.0) for e in some]) for name in names]
    parts = sorted((part for part in parts if any(part[1])), key=lambda part: -max(part[1]))
    steps = [e.time.step_s for e in some]
    unit = unit_for(max(steps), TIME)
    rows = _rows([*parts, ("sum", steps)], unit.size, pair=pair)
    return Table(f"step time breakdown ({unit.name})", header, rows)


def _memory(some: Sequence[Estimate], header: list[str], *, pair: bool) -> Table:
    """The worst stage of each."""
    worst = [e.memory.stages[e.memory.worst_stage] for e in some]
    figures = [(name, [memory_bytes(row, key) for row in worst]) for name, key in MEMORY_ROWS]
    over = [e.memory.overhead_bytes for e in some]
    figures.append(("context, communicators", [of.context + of.communicators for of in over]))
    if any(of.receive_buffers for of in over):
        figures.append((RECEIVE_BUFFERS, [of.receive_buffers for of in over]))
    figures.append(("usable", [e.memory.capacity_bytes for e in some]))
    return Table("memory of the worst stage (GiB)", header, _rows(figures, GIB, pair=pair))


def _rows(figures: Sequence[tuple[str, list[float]]], size: float, *, pair: bool) -> list[list[str]]:
    """A row for each figure, with equal decimals; of two plans with the change."""
    shown = iter(column([value for _, values in figures for value in values], size, 4))
    return [[label, *(next(shown) for _ in values), *([change(*values)] if pair else [])] for label, values in figures]
