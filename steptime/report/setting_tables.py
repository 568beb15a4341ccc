"""Tables of `3dtrn diff` with a log on one side: the predicted cost of each difference, and the measured total."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.answer.result import Estimate
from steptime.base.words import flow
from steptime.report.diff_tables import change
from steptime.report.format import GIB, percent, seconds
from steptime.report.table import ReportSection, Table
from steptime.validation.logged import Compared
from steptime.validation.setting_costs import Differences, Setting, rate_of

RECOMPUTE = ("performance.activation_checkpointing_type", "performance.recompute")


def sections(
    found: Differences, measured: tuple[Compared | None, Compared | None], labels: tuple[str, str]
) -> list[ReportSection]:
    """The measured next to the predicted change, then the cost of each difference, if any."""
    return [outcome(found, measured, labels), *([costs(found, labels)] if found.each else [])]


def outcome(found: Differences, measured: tuple[Compared | None, Compared | None], labels: tuple[str, str]) -> Table:
    """Steps of both, measured and predicted, and the change from the first to the second."""
    rows = [["predicted", *(seconds(e.step_s) for e in (found.a, found.b)), _change(found.a.step_s, found.b.step_s)]]
    steps = [None if one is None else one.run.steady.step_s for one in measured]
    both = "" if None in steps else _change(*(step or 0.0 for step in steps))
    rows.insert(0, ["measured", *("-" if step is None else seconds(step) for step in steps), both])
    errors = [
        "-" if step is None else percent(estimate.step_s / step - 1.0, signed=True)
        for step, estimate in zip(steps, (found.a, found.b), strict=True)
    ]
    rows.append(["error", *errors, ""])
    told = [] if both else ["one of the two is a plan, so there is no measured change"]
    if _tokens(found.a) != _tokens(found.b) or found.a.devices != found.b.devices:
        told.append("tokens of a step or devices differ: compare tokens/s/device, below")
        rows.append([])
        rows += _rates(found, steps)
    return Table("step", ["", *labels, "change"], rows, told)


def _rates(found: Differences, steps: list[float | None]) -> list[list[str]]:
    """Tokens per second and device, measured and predicted."""
    pair = (found.a, found.b)
    of_log = [None if s is None else _tokens(e) / s / e.devices for s, e in zip(steps, pair, strict=True)]
    ours = [_tokens(e) / e.step_s / e.devices for e in pair]
    both = "" if None in of_log else change(*(rate or 0.0 for rate in of_log))
    return [
        ["tokens/s/device, measured", *("-" if rate is None else f"{rate:,.1f}" for rate in of_log), both],
        ["tokens/s/device, predicted", *(f"{rate:,.1f}" for rate in ours), change(*ours)],
    ]


def _tokens(estimate: Estimate) -> float:
    return float(estimate.job.data.gbs) * estimate.job.data.seqlen


def _change(a: float, b: float) -> str:
    return f"{change(a, b) or '0 %'} ({_signed(b - a)})"


def _signed(value: float) -> str:
    """A change of seconds with its sign; what only rounding leaves, less than a nanosecond, is 0.

    >>> _signed(-0.5), _signed(-1e-16)
    ('-500.0 ms', '+0 s')
    """
    value = 0.0 if abs(value) < 1e-9 else value
    return ("+" if value >= 0.0 else "-") + seconds(abs(value))


def costs(found: Differences, labels: tuple[str, str]) -> Table:
    """Each difference applied separately to the first job, the sum, and the effect of all together beyond it."""
    alike = _tokens(found.a) == _tokens(found.b) and found.a.devices == found.b.devices
    rows: list[list[str]] = []
    for one in found.each:
        first, *others = _words(one.settings)
        rows.append([first, *_cells(one.step_change_s, one.rate_change, one.peak_change_bytes, found, alike=alike)])
        rows += [[f"  with {words}", "", "", ""] for words in others]
    rows.append([])
    told = f"each difference applied separately to {labels[0]}"
    if found.interaction_s is not None:
        told += f"; interaction: all together {'minus the sum' if alike else 'over the product'} of the single effects"
        cells = _cells(found.interaction_s, found.rate_interaction, found.peak_interaction_bytes, found, alike=alike)
        rows.append(["interaction", *(cells if alike else ["", *cells[1:]])])
    rate = rate_of(found.b) / rate_of(found.a) - 1.0
    rows.append(["all together", *_cells(found.together_s, rate, found.together_peak_bytes, found, alike=alike)])
    alone = [f"{_words(one.settings)[0]}: cannot run by itself ({one.problem})" for one in found.each if one.problem]
    header = [f"{labels[0]} to {labels[1]}", "step", "change" if alike else "tokens/s/device", "peak GiB"]
    return Table("modeled cost of each difference", header, rows, [told, *alone])


def _cells(
    step_s: float | None, rate: float | None, peak_bytes: float | None, found: Differences, *, alike: bool
) -> list[str]:
    """Change of the step, of the step or the rate as a share, and of the reserved peak."""
    if step_s is None or rate is None or peak_bytes is None:
        return ["-", "-", "-"]
    share = percent(step_s / found.a.step_s if alike else rate, signed=True)
    return [_signed(step_s), share, f"{peak_bytes / GIB:+,.2f}"]


def _words(settings: list[Setting]) -> list[str]:
    """Each setting in words, "tp 2 to 4"; recomputation counts as one, however each side writes it."""
    if all(s.path.startswith(RECOMPUTE) for s in settings):
        a, b = (
            " ".join(_recompute(value) for s in settings if (value := s[side]) is not None) or "none" for side in (1, 2)
        )
        return [f"recompute {a} to {b}"]
    return [f"{s.path.partition('.')[2] or s.path} {_value(s.a)} to {_value(s.b)}" for s in settings]


def _recompute(value: Any) -> str:
    """Recomputation in words, the same for a section as for its keys.

    >>> _recompute({"granularity": "full", "method": "uniform", "n_layers": 1})
    'full uniform 1'
    """
    return " ".join(map(flow, value.values())) if isinstance(value, Mapping) else _value(value)


def _value(value: Any) -> str:
    """A value in words, "granularity: full, n_layers: 1"."""
    return "unset" if value is None else flow(value).strip("{}")
