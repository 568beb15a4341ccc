"""The runs found after the model was built, benchmarks/later/: every plan is complete, and its table is the one of the docs.

`test_docs.py` recomputes the table. Nothing here bounds an error: the runs are reported, good and bad.
"""

from __future__ import annotations

import re

import later
import pytest

from steptime.job.job import Job

FILES = sorted(later.PLANS.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_plan_says_its_run_its_source_and_its_first_estimate(path):
    said = later.notes(path)
    assert said["group"] in later.GROUPS
    assert {"run", "measured step_time_s", "first estimate step_time_s"} <= said.keys()
    assert ("measured reserved_gib" in said) is ("first estimate reserved_gib" in said)
    first = path.read_text(encoding="utf-8").splitlines()[0]
    count = re.match(r"# ([0-9,]+) x ", first)
    assert count, first
    assert int(count[1].replace(",", "")) == Job.load(path).parallelism.devices


def test_the_error_of_a_run():
    """1.1 s of 1.0 measured is 10 % too slow, 0.8 s at first 20 % too fast; 30 of 40 GiB a quarter too little, 42 the bound."""
    run = later.Run("name", later.GROUPS[0], 1.0, 0.8, 1.1, True, 40.0, 30.0, 42.0)
    assert (round(run.error, 3), round(run.first_error, 3), run.memory_error) == (0.1, -0.2, "-25%, bound +5%")
    line = later.summary([run])[2]
    assert line == "| dense, NVIDIA's frameworks | 1 | 20.0% | 20.0% | -20.0% | 10.0% | 1 of 1 |"
