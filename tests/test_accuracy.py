"""benchmarks/accuracy.md says what the shipped rows give now; `--update-golden` writes it anew."""

from __future__ import annotations

import accuracy
import pytest

PAGE = accuracy.PAGE


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
        "Test rows, compared with simpler predictors",
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
