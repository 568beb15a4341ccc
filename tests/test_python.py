"""Asking from Python: a path is enough, answers name themselves in a line, tables become frames."""

from __future__ import annotations

import inspect
import pydoc
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from jobs import DEVICES_PLAN

import steptime
from steptime.base.config import ConfigError


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


def test_answers_to_equal_plans_are_equal(answer):
    same, other = steptime.estimate(DEVICES_PLAN), steptime.estimate(answer.job.replace(devices=1024))
    assert (same == answer, hash(same) == hash(answer), other == answer, answer == 1) == (True, True, False, False)


def test_a_job_is_made_of_keywords_and_not_changed(answer):
    with pytest.raises(TypeError, match=r"^Job\(\) takes keywords only; Job.load reads a file$"):
        steptime.Job("plan.yaml")
    with pytest.raises(
        ConfigError, match=r"^Job.model: cannot be assigned to; make a new one with job.replace\(model=...\)$"
    ):
        answer.job.model = "llama3-8b"


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
    found = steptime.search(DEVICES_PLAN, axes={"tp": [1], "pp": [1], "cp": [1]})
    for made in (answer, found):
        with pytest.raises(ImportError, match=r"^to_frame: needs pandas; pip install pandas$"):
            made.to_frame()


def test_a_model_a_machine_and_a_number_of_devices_are_enough():
    """The same plan and the same seconds as the command's, with its defaults named; settings are kept."""
    from steptime.commands.quick import job

    answer = steptime.quick("llama3-8b", "h100", 16, **{"data.gbs": 64, "parallelism.tp": 2})
    assert isinstance(answer, steptime.Estimate)
    assert answer.job == job("llama3-8b", "h100", 16, ["data.gbs=64", "parallelism.tp=2"])
    assert (answer.job.parallelism.devices, answer.job.parallelism.tp, answer.job.data.gbs) == (16, 2, 64)
    assert "defaults without a plan: " in answer.job.notes[0]
    assert "<table>" in answer._repr_html_()


def test_a_found_plan_keeps_its_devices():
    """Replacing tp of a plan for 16 devices changes dp, as `--set parallelism.tp=4` of the same plan does."""
    found = steptime.quick("llama3-8b", "h100", 16, **{"data.gbs": 64}).job
    changed = found.replace(**{"parallelism.tp": 4, "parallelism.pp": 1}).parallelism
    assert (changed.dp, changed.devices) == (4, 16)
    assert found.replace(devices=32).parallelism.devices == 32


def test_long_steps_are_written_out():
    """70.6 B parameters x 6 x 4 Mi tokens on one H100 are over an hour: no powers of ten."""
    answer = steptime.quick("llama3-70b", "h100", 1)
    assert answer.step_s > 1000.0
    assert f"{answer.step_s:,.0f} s a step" in repr(answer)


@pytest.mark.parametrize(
    ("words", "changes", "line"),
    [
        (("llama3-8b", "h101"), {}, "machine: unknown machine 'h101'; did you mean h100? 3dtrn machines lists them"),
        (("llama3-8b", "h100", "16"), {}, "devices: expected a whole number of at least 1 (got '16')"),
        (("llama3-8b", "h100", 0), {}, "devices: expected a whole number of at least 1 (got 0)"),
        (
            ("llama9", "h100"),
            {},
            "model: unknown model 'llama9'; did you mean 'llama3-8b' or 'llama3-3b' or 'llama3-1b'? (3dtrn models lists them)",
        ),
        ((8,), {}, "model: expected a name (got 8)"),
        ((None,), {}, "model: expected a name (got nothing)"),
        (("llama3-8b", "h100"), {"hardware": "a100"}, "machine h100: hardware=a100 states another; give one of them"),
        (("llama3-8b", None, 8), {"hardware.nodes": 2}, "devices: 8, but hardware.nodes=2 makes 16 devices; remove one"),
        (("llama3-8b",), {"data.gsb": 4}, "data.gsb: unknown key (got 4); did you mean 'gbs'?"),
        (("llama3-8b",), {"gpus": 8}, "gpus=8: unknown key; did you mean devices=8?"),
        (("--set x",), {}, "model: unknown model '--set x' (3dtrn models lists them)"),
        (("llama3-8b",), {"data.gbs": {4}}, "data.gbs: expected a number, text, a list or a mapping (got set)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_few_words_is_one_line(words, changes, line):
    with pytest.raises(steptime.ConfigError) as caught:
        steptime.quick(*words, **changes)
    assert caught.value.problems == [line]


def test_a_list_that_contains_itself_is_one_line():
    endless = []
    endless.append(endless)
    with pytest.raises(steptime.ConfigError, match=r"^data.gbs: expected a number, text, a list or a mapping"):
        steptime.quick("llama3-8b", **{"data.gbs": endless})


def test_help_is_about_the_function_and_the_plan_alone():
    """help(steptime.search) explains the arguments, not the package; help(Job) has no names of pydantic."""
    assert pydoc.render_doc(steptime.search, renderer=pydoc.plaintext).startswith(
        "Python Library Documentation: function search"
    )
    told = pydoc.render_doc(steptime.Job, renderer=pydoc.plaintext)
    assert "replace(self, **changes: Any)" in told
    assert "data (gbs, seqlen, microbatch_sz)" in told
    assert not re.findall(r"__pydantic\w*|model_\w+\(|__class_vars__|__annotations__", told)


def test_a_notebook_completes_the_arguments_of_a_search():
    """`steptime.search` is a package that is called; its signature is that of the function."""
    from steptime.search.run import search  # which imports the package, too

    ours, real = inspect.signature(sys.modules["steptime.search"]), inspect.signature(search)
    assert [*ours.parameters] == [*real.parameters]
    assert [one.default for one in ours.parameters.values()] == [one.default for one in real.parameters.values()]


def test_completion_of_a_job_shows_our_names_alone():
    """Fields, and what the classes define; of pydantic's models nothing (model_dump, copy, json ...)."""
    job = steptime.Job.load(DEVICES_PLAN)
    shown = {name for name in dir(job) if not name.startswith("_")}
    assert {"parallelism", "data", "replace", "to_config", "machine"} <= shown
    assert not {name for name in shown if name.startswith(("model_", "json", "dict", "copy", "parse_"))}
    assert {"tp", "devices"} <= set(dir(job.parallelism))


def test_numbers_of_other_integer_types_are_numbers():
    """As loops over numpy arrays give; a bool is none."""
    found = steptime.quick("llama3-8b", "h100", np.int64(8), **{"data.gbs": np.int32(64)})
    assert (found.job.parallelism.devices, found.job.data.gbs) == (8, 64)
    with pytest.raises(ConfigError, match="devices: expected a whole number of at least 1"):
        steptime.quick("llama3-8b", "h100", True)
