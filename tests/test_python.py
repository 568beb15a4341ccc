"""Asking from Python: a path is enough, answers name themselves in a line, tables become frames."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
import yaml
from jobs import DEVICES_PLAN

import steptime


@pytest.fixture(scope="module")
def answer():
    return steptime.estimate(DEVICES_PLAN)


def test_a_notebook_needs_two_names(tmp_path, answer):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(DEVICES_PLAN))
    assert steptime.estimate(str(path)).step_s == answer.step_s
    assert answer.fits
    assert answer.mfu == answer.throughput.mfu
    assert repr(answer.job) == "<Job llama3-70b on 512 devices of dgx-h100: tp 8 pp 4 dp 16, gbs 1,024 x 8,192>"
    assert str(answer.job) == repr(answer.job)  # not every field, as print would show of a pydantic model
    assert issubclass(steptime.ConfigError, ValueError)


def test_a_frame_of_the_parts(monkeypatch, answer):
    """What pandas is given: one mapping for each row."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert sum(row["seconds"] for row in answer.to_frame()) == pytest.approx(answer.step_s)
    assert [row["stage"] for row in answer.to_frame("stages")] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"must be one of parts, stages, .* \(got 'fits'\)"):
        answer.to_frame("fits")


def test_a_frame_without_pandas_says_what_to_install(monkeypatch, answer):
    """Of an estimate and of a search; `None` in sys.modules makes an import fail as one that is not installed."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    found = steptime.search(DEVICES_PLAN)
    for made in (answer, found):
        with pytest.raises(ImportError, match=r"^to_frame: needs pandas; pip install pandas$"):
            made.to_frame()


def test_a_notebook_completes_the_arguments_of_a_search():
    """`steptime.search` is a package that is called; its signature is that of the function."""
    from steptime.search.run import search  # which imports the package, too

    ours, real = inspect.signature(sys.modules["steptime.search"]), inspect.signature(search)
    assert [*ours.parameters] == [*real.parameters]
    assert [one.default for one in ours.parameters.values()] == [one.default for one in real.parameters.values()]
