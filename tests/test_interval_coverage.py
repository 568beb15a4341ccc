"""Intervals of the shipped measured runs: how many measured values they hold, and the file that they rest on."""

from __future__ import annotations

import json
from math import exp, log

import accuracy
import pytest

from steptime.answer.measured import INTERVALS_FILE, measured
from steptime.validation import interval_coverage, judgement
from steptime.validation.measured_figures import ALLOCATOR
from steptime.validation.slices import headline


@pytest.fixture(scope="module")
def judged():
    return headline(judgement.judge_shipped())


@pytest.fixture(scope="module")
def covered():
    """The coverage of step time and of memory that the accuracy page tells, whose test runs in the same process."""
    return accuracy.summary()["intervals"]


@pytest.fixture(scope="module")
def lines(covered):
    return covered["step"]


MANY = 25


def may_be_meant(line, effect):
    """Whether some share between 75 and 85 % is within two standard errors of the rows inside, with a series as one draw.

    Where nearly all rows are inside their own error vanishes (Wilson 1927): above, that of rows at 85 % counts too, with
    `effect` times the variance of independent rows.
    """
    above = max(line["error"], (effect * 0.85 * 0.15 / line["rows"]) ** 0.5)
    return line["covered"] + 2.0 * line["error"] >= 0.75 and line["covered"] - 2.0 * above <= 0.85


def design_effect(line):
    """Variance of a share of rows in series over that of independent rows (Kish 1965, section 8.2)."""
    return line["error"] ** 2 * line["rows"] / (line["covered"] * (1.0 - line["covered"]))


@pytest.mark.parametrize(("inside", "meant"), [(25, False), (24, True), (19, True), (18, False)])
def test_shares_that_may_be_meant(inside, meant):
    """25 independent rows, errors of their own 0: at most 0.85 + 2 * 0.0714 = 0.993, at least 0.75."""
    assert may_be_meant({"covered": inside / 25, "error": 0.0, "rows": 25}, 1.0) is meant


def test_rows_in_pairs_have_twice_the_variance():
    """100 rows, 80 inside: 0.04 if independent, 0.04 * 2 ** 0.5 in pairs."""
    assert design_effect({"covered": 0.8, "error": 0.04 * 2**0.5, "rows": 100}) == pytest.approx(2.0)


def test_the_intervals_cover_test_rows(lines):
    """80 % is meant. Of all cells, and of all rows, 75 to 85 % are inside; of each slice with 25 rows a share that may be meant.

    Smaller slices are of few series; docs/known-errors.md (Intervals) names the one that is far off."""
    found = [line for line in lines if line["split"] == "test"]
    assert (found[0]["what"], found[0]["rows"] >= 700) == ("all", True)
    assert 0.75 <= found[0]["covered"] <= 0.85
    assert 0.75 <= found[0]["of_rows"] <= 0.85
    assert found[0]["width"] < 0.16
    assert sum(line["rows"] >= MANY for line in found) >= 13
    effect = design_effect(found[0])
    assert [line["what"] for line in found if line["rows"] >= MANY and not may_be_meant(line, effect)] == []


def test_mixtures_of_experts_are_slices_of_their_own(lines):
    """All of them, NVIDIA's frameworks' and other trainers'; the two groups add up, and count as no accelerator or framework."""
    test = {line["what"]: line for line in lines if line["split"] == "test"}
    whole, *parts = (test[name] for name in interval_coverage.GROUPS)
    assert whole["rows"] == sum(part["rows"] for part in parts)
    inside = sum(part["rows"] * part["of_rows"] for part in parts)
    assert whole["rows"] * whole["of_rows"] == pytest.approx(inside)
    assert 0.75 <= whole["covered"] <= 0.85
    assert 0.75 - whole["error"] <= whole["of_rows"] <= 0.85 + whole["error"]
    rest = [line for line in lines if line["what"] not in interval_coverage.GROUPS]
    assert interval_coverage.near_80(lines) == interval_coverage.near_80(rest)


def test_a_series_is_one_draw():
    """Ten rows, half inside: of ten series sqrt(0.5 * 0.5 / 9); of two, one inside and one outside, sqrt(2 * 2 * 2.5**2) / 10.

    Votes 3, inside, and 1, outside: the mean is 3/4, both sums are 3/4, sqrt(2 * 2 * 9/16) / 4 = 3/8."""
    error = interval_coverage.standard_error
    assert error([(i, float(i % 2), 1.0) for i in range(10)]) == pytest.approx((0.25 / 9) ** 0.5)
    assert error([(i % 2, float(i % 2), 1.0) for i in range(10)]) == pytest.approx(0.5)
    assert error([("a", 1.0, 3.0), ("b", 0.0, 1.0)]) == pytest.approx(0.375)
    assert error([("one", 1.0, 1.0)] * 10) == 0.5


def test_a_table_printed_again_does_not_count_again():
    """Two cells of one series each: one outside, one inside in three releases. Half of the cells are inside, 3 of 4 rows; widths
    are e - 1 of the first, e^2 - 1 of the others, whose votes of 1/3 end at one half only after the first's: e - 1 is the median.
    The error is that of two draws: sqrt(2 * (1/4 + 1/4)) / 2."""
    row = interval_coverage.CoveredRow
    again = [row(0.5, 0.0, 2.0, ("b",), ("b",))] * 3
    found = interval_coverage.coverage([row(-1.0, 0.0, 1.0, ("a",), ("a",)), *again])
    assert (found.rows, found.cells, found.series) == (4, 2, 2)
    assert (found.covered, found.below, found.above, found.of_rows) == pytest.approx((0.5, 0.5, 0.0, 0.75))
    assert found.width == pytest.approx(exp(1.0) - 1.0)
    assert found.error == pytest.approx(0.5)


def test_left_out_cells_are_covered_as_they_were_fitted(lines):
    everything = next(line for line in lines if (line["what"], line["split"]) == ("all", "fit"))
    assert 0.75 <= everything["covered"] <= 0.85
    assert 0.75 <= everything["of_rows"] <= 0.85


def test_memory_of_test_rows_is_covered(covered):
    """Counters of torch's allocator, which the interval is fitted on; others hold what the allocator caches, and more."""
    found = {line["what"]: line for line in covered["memory"] if line["split"] == "test"}
    assert may_be_meant(found["all"], 1.0)
    assert 0.75 <= found["all"]["covered"] <= 0.9
    assert 0.75 <= found["all"]["of_rows"] <= 0.9
    assert found["all"]["rows"] >= 100
    assert found[interval_coverage.OTHER_READINGS]["covered"] >= 0.33


def test_the_file_holds_the_fit_rows_and_none_else(judged):
    """Ids, kinds and votes; not the residuals, which move with the model."""
    document = json.loads(INTERVALS_FILE.read_bytes())
    for of, counted in (("step", "measured_step_s"), ("memory", "measured_bytes")):
        fit = [j for j in judged if j.row.text("split") == "fit" and getattr(j, counted) and j.place]
        ids = {j.row.id for j in fit if of == "step" or j.metric in ALLOCATOR}
        if of == "memory":  # the jobs of Megatron-LM's own tests stand beside the headline of the step time
            tests = [
                j
                for j in judgement.judge_shipped()
                if j.row.text("split") == "fit" and j.allocator and not j.allocator.excluded
            ]
            ids |= {j.row.id for j in tests}
        runs = measured(of).runs
        assert {run.id for run in runs} == ids
        assert document[of]["rows"] == len(runs)
        assert [run.log_ratio for run in runs] == sorted(run.log_ratio for run in runs)
        for cell in {run.cell for run in runs}:
            assert sum(run.vote for run in runs if run.cell == cell) == pytest.approx(1.0, abs=0.01)


def test_residuals_are_those_of_the_model(judged):
    """The file is made anew when the model changes: python benchmarks/fit_intervals.py DATE."""
    known = {run.id: run.log_ratio for run in measured("step").runs}
    stale = [
        j.row.id
        for j in judged
        if j.row.id in known and abs(known[j.row.id] - log(j.measured_step_s / j.predicted_step_s)) > 1e-3
    ]
    assert stale == []
