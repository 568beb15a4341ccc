"""Which layouts are tied: what measured pairs of layouts leave open, and two layouts that share less of their error."""

from __future__ import annotations

from math import exp, hypot

import pytest
from validation_rows import judged

from steptime import Job
from steptime.answer.interval import step_interval
from steptime.answer.measured import measured
from steptime.answer.ratio_interval import layouts_within, tied_within
from steptime.report.format import seconds
from steptime.report.search_tables import document, sections
from steptime.report.table import PLAIN, layout
from steptime.search.run import run, search
from steptime.search.search import Asked
from steptime.search.space import Axes
from steptime.validation.measurements import shipped
from steptime.validation.ratios import layout_error

PLAN = {
    "model": "llama3-8b",
    "parallelism": {"tp": 1, "pp": 1, "dp": 64},
    "performance": {"software": "torchtitan", "activation_checkpointing_type": "none"},
    "data": {"gbs": 128, "seqlen": 8192, "microbatch_sz": 1},
    "hardware": "dgx-h100",
}


def text(searched):
    """The report of a search, in one line."""
    return " ".join("\n".join(line for part in sections(searched) for line in layout(part, PLAIN)).split())


def test_pairs_by_hand():
    """Job A in three layouts, one measured twice: medians .02 (of .01 and .03), .12 and .05; pairs differ by .10, .03 and .07,
    a third of a vote each. Job B in two: .01, one vote. Of two votes, 1.6 must stay within: .01, .03 and .07 are 1.67 of them."""
    runs = [("a", 0.01, 1, "none"), ("b", 0.03, 1, "none"), ("c", 0.12, 2, "none"), ("d", 0.05, 1, "full")]
    rows = [(judged(name, tp=tp, recompute=kept).row, error) for name, error, tp, kept in runs]
    rows += [(judged(f"b{tp}", tp=tp, hidden=8192).row, 0.2 + 0.01 * tp) for tp in (1, 2)]
    rows += [(judged("alone", hidden=1024).row, 9.0)]
    assert layout_error(rows) == pytest.approx(0.07)
    assert layout_error(rows[:-3]) == pytest.approx(0.10)


def test_the_shipped_figure_is_that_of_the_shipped_runs():
    """`layouts` of intervals.json over the runs in the same file, which are fit rows: written by benchmarks/fit_intervals.py."""
    rows = {row.id: row for row in shipped()}
    runs = [(rows[run.id], run.log_ratio) for run in measured("step").runs]
    assert {row.text("split") for row, _ in runs} == {"fit"}
    assert layouts_within() == pytest.approx(layout_error(runs), abs=5e-5)


def test_layouts_of_one_job_share_their_error():
    """Recomputation, degrees and micro-batch change no machine, precision or profile; their own intervals are wider."""
    job = Job.load(PLAN)
    other = job.replace(
        **{"parallelism.tp": 2, "parallelism.dp": 32, "performance.activation_checkpointing_type": "full"}
    )
    assert tied_within(job, other) == layouts_within() == tied_within(other, job)


def test_errors_on_different_machines_are_independent():
    """The true ratio is that of the estimates times exp(error of slower - error of faster): the facing ends, in squares."""
    slow = Job.load(PLAN)
    for key, value in (("hardware", "dgx-b200"), ("performance.precision", "fp8_rowwise")):
        fast = slow.replace(**{key: value})
        expected = hypot(step_interval(fast).high, step_interval(slow).low)
        assert tied_within(fast, slow) == pytest.approx(expected, rel=1e-12)
        assert tied_within(fast, slow) != layouts_within()


def test_a_search_calls_no_clearly_slower_layout_tied():
    """Whole-layer recomputation replays every forward: a third more matrix multiplies, more than the error of comparing."""
    found = run(
        Job.load(PLAN), Asked((64,), (128,), Axes({"tp": (1,), "pp": (1, 2), "cp": (1,), "microbatch_sz": (1,)}))
    )
    count, _ = found.tied
    value, _ = found.ranking
    assert count == (value <= found.best.value * exp(layouts_within())).sum() - 1
    assert 0 < count < len(value) - 1
    assert f"tied {count} other layouts, up to {100.0 * exp(layouts_within()) - 100.0:.1f} % slower" in text(found)


def test_a_search_says_what_is_extrapolated():
    """8 B parameters over 64 B300, an accelerator without a measured run near: as the report of the layout itself says."""
    found = search({**PLAN, "hardware": "dgx-b300"}, axes={"tp": [1], "cp": [1], "microbatch_sz": [1, 2], "pp": [1]})
    best = document(found)["best"]
    known = {row["evidence"] for row in best}
    assert "extrapolated" in known
    shown = text(found)
    for layout_found, row in zip(found.top(), best, strict=True):
        basis = layout_found.estimate.time.basis
        assert (row["evidence"], row["extrapolation"]) == (basis.evidence, basis.extrapolation)
    if best[0]["evidence"] == "extrapolated":
        assert f"extrapolated: {best[0]['extrapolation'][0]}" in shown
    numbers = [str(at) for at, row in enumerate(best, 1) if row["evidence"] == "extrapolated"]
    assert all(row["extrapolation"] for row in best if row["evidence"] == "extrapolated")
    rows = "all rows" if len(numbers) == len(best) else f"row{'s' * (len(numbers) > 1)} "
    assert f"extrapolated, {rows}" in shown


def test_a_search_inside_the_measured_range_says_so_once():
    found = search(PLAN, axes={"tp": [1], "cp": [1], "microbatch_sz": [1], "pp": [1]})
    shown = text(found)
    assert "extrapolated" not in shown
    assert shown.count("80 % interval") == 2  # of the best and of the plan
    for each in (found.best.estimate, found.given):
        assert f"80 % interval {seconds(each.time.step_s_p10)} to {seconds(each.time.step_s_p90)}, " in shown
