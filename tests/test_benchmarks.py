"""The benchmark compares like with like, and measures what it says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from steptime import Job

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def speed():
    return runpy.run_path(str(ROOT / "benchmarks" / "estimate.py"))


def test_both_programs_get_the_same_job(speed):
    ours, theirs = Job.load(speed["OURS"]), Job.load(speed["THEIRS"])
    said = {"name", "source", "max_positions"}
    assert ours.model.model_dump(exclude=said) == theirs.model.model_dump(exclude=said)
    assert ours.data == theirs.data
    assert ours.parallelism.devices == theirs.parallelism.devices
    for key in ("tp", "pp", "dp", "vpp", "cp"):
        assert getattr(ours.parallelism, key) == getattr(theirs.parallelism, key)
    assert (ours.sp, ours.zero_level) == (theirs.sp, theirs.zero_level)
    assert ours.machine.accelerator.name == theirs.machine.accelerator.name


def test_a_process_is_measured_as_what_it_does(speed):
    busy = "import time; block = b'x' * 50_000_000\nwhile time.process_time() < 0.1: pass\ntime.sleep(0.1)"
    found = speed["run"]([sys.executable, "-I", "-c", busy])
    assert found.cpu_s >= 0.1
    assert found.wall_s >= 0.2
    assert found.peak_mb > 50


def test_a_program_that_fails_is_no_measurement(speed):
    with pytest.raises(SystemExit, match="exit code 3"):
        speed["run"]([sys.executable, "-I", "-c", "raise SystemExit(3)"])


def test_a_plan_is_timed(speed):
    first, again, with_blocks = speed["best_s"](ROOT / "configs" / "gpt2_1gpu.yaml")
    assert 0.0 < again <= with_blocks < 1.0
    assert again < first < 1.0
