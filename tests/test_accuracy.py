"""benchmarks/accuracy.md says what the shipped rows give now; `--update-golden` writes it anew."""

from __future__ import annotations

from pathlib import Path

import accuracy
import pytest

from steptime.report.format import percent
from steptime.validation.judgement import judge_shipped
from steptime.validation.slices import experts_of_others, headline, native, step_errors
from steptime.validation.stats import stats

PAGE = accuracy.PAGE
KNOWN = Path(__file__).parents[1] / "docs" / "known-errors.md"
TOLD = {
    "Experts on other trainers": experts_of_others,
    "torchtitan and other PyTorch-native trainers": native,
}


@pytest.fixture(scope="module")
def made():
    return accuracy.page()


def test_the_page_is_that_of_now(made, update_golden):
    if update_golden:
        PAGE.write_text(made, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == made, (
        "accuracy.md is out of date; if the new output is right: python benchmarks/accuracy.py"
    )


def test_the_page_has_every_analysis(made):
    headings = [line.removeprefix("## ") for line in made.splitlines() if line.startswith("## ")]
    for start in (
        "Step time: NVIDIA's frameworks",
        "Step time: other trainers",
        "Test rows: the estimate and simpler baselines",
        "Noise floor",
        "Ratios",
        "Regret",
        "Fits or not, hagemann",
        "Fits or not, others",
        "Peak memory by mechanism",
        "Ablation",
    ):
        assert any(heading.startswith(start) for heading in headings), start
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize("heading", TOLD)
def test_figures_in_the_text_of_known_errors(heading, update_golden):
    rows = [j for j in headline(judge_shipped()) if j.row.text("split") == "test" and TOLD[heading](j)]
    found = stats(step_errors(rows))
    sizes = ", ".join(f"{name} {percent(getattr(found, name))}" for name in ("median", "mean", "p90"))
    made = f"`test` rows: {sizes}, bias {percent(found.bias, signed=True)}"
    text = KNOWN.read_text(encoding="utf-8")
    before, start, after = text.partition(f"## {heading}\n\n`test` rows:")
    assert start, f"docs/known-errors.md: no figures under {heading!r}"
    end = min(at for at in (after.find(";"), after.find(". ")) if at >= 0)
    if update_golden:
        text = f"{before}## {heading}\n\n{made}{after[end:]}"
        KNOWN.write_text(text, encoding="utf-8")
    assert f"## {heading}\n\n{made}" in text, "out of date: pytest tests/test_accuracy.py --update-golden"
