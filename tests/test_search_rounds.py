"""A bounded search in rounds: what is left out of it is slower than what it finds, by seconds that no layout undercuts."""

from __future__ import annotations

import numpy as np
import pytest

from steptime import Job, estimate
from steptime.search.found_fixes import Faster, axes, lists
from steptime.search.run import run
from steptime.search.screen import Screen
from steptime.search.search import Asked

PLAN = """\
model: {preset: mixtral-8x7b, n_layers: 16}
parallelism: {tp: 2, pp: 2, dp: 8, ep: 2}
data: {gbs: 64, seqlen: 8192, microbatch_sz: 4}
hardware: dgx-h100
"""


@pytest.fixture(scope="module")
def plan():
    return Job.load(PLAN)


@pytest.fixture(scope="module")
def every(plan):
    return run(plan, asked_of(plan))


def asked_of(job):
    return Asked((job.parallelism.devices,), (job.data.gbs,), axes(job))


def test_the_lists_are_those_of_all_layouts_whatever_is_screened_first(plan, every):
    """With the plan's step known, unknown, or so short that no layout is as fast: the fastest lists do not depend on it."""
    wanted = [(layout.changes, layout.step_s) for layout in lists(every)]
    assert wanted
    for step_s in (0.0, 1e-6, estimate(plan).step_s):
        some = run(plan, asked_of(plan), bound=Faster(plan, step_s))
        assert sum(len(of.row) for of in some.found) < sum(len(of.row) for of in every.found)
        assert [(layout.changes, layout.step_s) for layout in lists(some)] == wanted


def test_no_layout_takes_less_than_the_seconds_of_its_parts(monkeypatch, plan, every):
    """Of every row of the screen: the least seconds, nothing recomputed, against the step with any recomputation."""
    seen = []

    class Asking(Faster):
        def near(self, shape, rows, least):
            seen.append(
                {
                    (shape.pp, shape.vpp, at, sp): s
                    for at, sp, s in zip(rows.at, rows.sp, least(shape, rows), strict=True)
                }
            )
            return rows.tp > 0

    monkeypatch.setattr(Screen, "useful", lambda _self, found, *_: found)
    run(plan, asked_of(plan), bound=Asking(plan))
    least = {key: seconds for of in seen for key, seconds in of.items()}
    for found in every.found:
        rows, stages = found.block.rows, found.block.stages
        mine = np.array([least[stages.pp, stages.vpp, rows.at[i], rows.sp[i]] for i in found.row])
        assert (mine <= found.step_s).all()
