"""Fixes out of the search: no single change that fits is cheaper than those told, and lists of several are there."""

from __future__ import annotations

import shlex

import pytest

from steptime import Job, estimate
from steptime.answer import fixes as single
from steptime.base.config import ConfigError
from steptime.search import found_fixes as search_fixes
from steptime.search.found_fixes import Faster, axes, lists
from steptime.search.recompute import usual
from steptime.search.run import run
from steptime.search.search import Asked

PLAN = """\
model: llama3-70b
parallelism: {tp: 8, pp: 4, vpp: 5, dp: 32}
data: {gbs: 2048, seqlen: 8192, microbatch_sz: 4}
hardware: dgx-h100
"""


@pytest.fixture(scope="module")
def answer():
    """Micro-batches of 4 do not fit on 80 GB."""
    return estimate(Job.load(PLAN))


def test_every_list_runs_as_printed_and_fits(answer):
    assert 1 <= len(answer.fixes) <= 3
    assert [fix.step_s for fix in answer.fixes] == sorted(fix.step_s for fix in answer.fixes)
    for fix in answer.fixes:
        sets = shlex.split(fix.set)[1::2]
        found = estimate(Job.load(PLAN, sets))
        assert found.memory.verdict == "fits"
        assert found.step_s == fix.step_s
        assert found.memory.peak_reserved_bytes == fix.peak_reserved_bytes
        assert found.devices == answer.devices
        assert fix.step_change == fix.step_s / answer.step_s - 1.0


def test_no_single_change_is_cheaper(answer):
    """Every single change of the plain enumeration that fits, estimated: the fastest one told is at least as fast."""
    seconds = []
    for change in single.candidates(answer.job):
        try:
            found = estimate(answer.job.replace(**change))
        except ConfigError:
            continue
        if found.memory.fits:
            seconds.append(found.step_s)
    assert answer.fixes[0].step_s <= min(seconds)
    shortest = min(answer.fixes, key=lambda fix: fix.set.count("--set"))
    assert shortest.step_s <= min(seconds)


def test_a_smaller_micro_batch_is_offered_before_dearer_layouts():
    """Only layouts, micro-batch and words are tried where the search is off: of micro-batches all smaller divisors."""
    job = Job.load(PLAN)
    assert [c["data.microbatch_sz"] for c in single.candidates(job) if "data.microbatch_sz" in c] == [1, 2]


@pytest.mark.parametrize(
    "sets",
    [
        ["parallelism.dp=8", "data.gbs=512", "parallelism.vpp=1", "parallelism.zero_level=0", "parallelism.sp=false"],
        ["model=nemotron-h-8b", "parallelism.pp=1", "parallelism.vpp=1", "parallelism.tp=1", "parallelism.dp=64"],
    ],
)
def test_what_is_left_out_of_the_search_is_in_no_list(sets):
    """The lists of changes out of all layouts, and out of those that may still be faster, are the same."""
    job = Job.load(PLAN, sets)
    asked = Asked((job.parallelism.devices,), (job.data.gbs,), axes(job))
    every, some = run(job, asked), run(job, asked, bound=Faster(job))
    assert sum(len(of.row) for of in some.found) < sum(len(of.row) for of in every.found)
    assert told(lists(some)) == told(lists(every))


def told(layouts):
    return [(layout.changes, layout.step_s) for layout in layouts]


def test_a_model_of_experts_alone_is_not_searched_twice_over_its_mlp():
    """The module `mlp` names nothing where every layer has experts; the first dense layers of DeepSeek-V3 have one."""
    data = {"gbs": 64, "seqlen": 4096, "microbatch_sz": 1}
    for model, named in (("qwen3-235b-a22b", False), ("deepseek-v3", True)):
        layout = {"tp": 1, "pp": 1, "dp": 8, "ep": 8}
        job = Job.load({"model": model, "parallelism": layout, "data": data, "hardware": "dgx-h100"})
        modules = [one.modules for one in usual(job)]
        assert any("mlp" in some for some in modules) == named
        assert frozenset({"layernorm"}) in modules


def test_many_depths_of_prediction_are_told_single_changes(monkeypatch):
    """All layouts are searched up to a number of depths that models have; beyond it single changes are estimated."""
    monkeypatch.setattr(search_fixes, "run", lambda *_, **__: pytest.fail("all layouts were searched"))
    layout = ["model={preset: mixtral-8x22b, mtp: 5}", "parallelism.vpp=1", "parallelism.dp=8", "parallelism.ep=8"]
    found = estimate(Job.load(PLAN, [*layout, "data.gbs=256", "data.seqlen=4096", "data.microbatch_sz=8"]))
    assert found.memory.verdict == "does_not_fit"
    assert found.fixes
    for fix in found.fixes:  # dp follows from another degree
        assert {word.partition("=")[0] for word in shlex.split(fix.set)[1::2]} - {"parallelism.dp"}
        assert fix.set.count("--set") - ("parallelism.dp" in fix.set) == 1
