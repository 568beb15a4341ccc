"""The run section by hand: days, money, energy, checkpoints, failures."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.answer.result import estimate
from steptime.answer.whole_run import goodput_fraction, whole_run, young_daly_s
from steptime.base.config import ConfigError
from steptime.hardware.machine import Machine, machine_names
from steptime.job.job import Job

PARAMS = 70_553_706_496
DEVICES = 1024


def plan(**run) -> Job:
    return Job(
        model="llama3-70b",
        parallelism={"tp": 8, "pp": 4, "dp": 32},
        data={"gbs": 2048, "seqlen": 8192, "microbatch_sz": 1},
        hardware="dgx-h100",
        run=run,
    )


def whole(step_s=10.0, **run):
    return whole_run(plan(**run), step_s, PARAMS, DEVICES)


def test_no_run_section_no_answer():
    job = plan().replace(run=None)
    assert estimate(job).run is None
    assert "run" not in estimate(job).to_dict()


def test_days_and_device_hours_by_hand():
    """1.6777216e13 tokens are a million steps of 2048 * 8192: at 10 s a step 1e7 s, 115.74 days, 2.844 M device-hours."""
    found = whole(tokens=2048 * 8192 * 1e6)
    assert found["steps"] == 1e6
    assert found["days"] == pytest.approx(1e7 / 86400)
    assert found["wall_days"] == found["days"]
    assert found["device_hours"] == pytest.approx(1e7 / 3600 * 1024)
    assert found["energy_kwh"] == pytest.approx(1e7 / 3600 * 1024 * 0.7)  # 700 W each
    assert "goodput" not in found
    assert found["cost"] == pytest.approx(found["device_hours"] * plan().machine.price_per_device_hour)


def test_a_started_step_is_a_step():
    assert whole(tokens=1)["steps"] == 1
    assert whole(tokens=2048 * 8192 + 1)["steps"] == 2


def test_price():
    found = whole(tokens=2048 * 8192 * 1e6, price_per_device_hour=2.5)
    assert found["cost"] == pytest.approx(1e7 / 3600 * 1024 * 2.5)
    assert whole(tokens=2048 * 8192 * 1e6, price_per_device_hour=0)["cost"] == 0
    assert found["price_source"] == "run.price_per_device_hour"


def test_no_price_in_a_machine_file_is_without_a_source():
    """A price enters the cost where the plan has none, so it says who asked it; where nobody is found to, there is no cost."""
    priced = [machine for machine in map(Machine.load, machine_names()) if machine.price_per_device_hour is not None]
    assert len(priced) > 10
    for machine in priced:
        source = machine.source("price_per_device_hour") or ""
        assert "price" in source, machine.name
        assert "not found" not in source, machine.name


def test_goodput_counts_what_the_plan_gives():
    """A start-up is no share of a run; a failure rate with a restart is, and its absence leaves the goodput out."""
    tokens = 2048 * 8192 * 1e6
    assert "goodput" not in whole(tokens=tokens, startup_s=600)
    found = whole(tokens=tokens, mtbf_device_hours=100 * 1024, restart_s=900)
    assert found["goodput"] == pytest.approx(1 - 900 / 360_000)
    assert found["counted"] == ["restarts after failures"]
    assert [line.partition(" (")[0] for line in found["not_counted"]] == [
        "start-up",
        "checkpoint writes",
        "work redone after failures",
    ]


def test_a_machines_own_price_is_the_default():
    job = plan(tokens=1e9)
    machine = job.machine.model_copy(update={"price_per_device_hour": 4.0})
    found = whole_run(job.replace(hardware=machine), 10.0, PARAMS, DEVICES)
    assert found["cost"] == pytest.approx(found["device_hours"] * 4.0)


def test_a_checkpoint_holds_parameters_master_and_moments_once():
    """bf16 parameters, fp32 master copy and two fp32 moments: 14 bytes a parameter, at 100 GB/s 9.9 s."""
    found = whole(checkpoint_bytes_per_s=100e9)
    assert found["checkpoint_bytes"] == PARAMS * 14
    assert found["checkpoint_write_s"] == pytest.approx(PARAMS * 14 / 100e9)
    assert whole(checkpoint_write_s=60)["checkpoint_write_s"] == 60


def test_young_and_daly():
    """sqrt(2 C M): 50,000 device-hours over 1,024 devices are 48.83 hours between failures; 60 s to write: 76.5 minutes."""
    found = whole(checkpoint_write_s=60, mtbf_device_hours=50_000)
    assert found["mtbf_s"] == pytest.approx(50_000 * 3600 / 1024)
    assert found["best_checkpoint_interval_s"] == pytest.approx(sqrt(2 * 60 * 175_781.25))
    assert young_daly_s(50.0, 3600.0) == 600.0


def test_goodput_by_hand():
    """An hour of work, a minute to write it; a failure every 100 hours costs 15 minutes and half of 61 minutes."""
    assert goodput_fraction(3600, 60, None, 900) == pytest.approx(3600 / 3660)
    assert goodput_fraction(3600, 60, 360_000, 900) == pytest.approx(3600 / 3660 * (1 - (900 + 1830) / 360_000))
    assert goodput_fraction(None, None, None, 0) == 1.0
    assert goodput_fraction(3600, 60, 1000, 900) == 0.0  # fails before it ever gets anywhere


def test_wall_time_has_start_up_and_what_is_lost():
    found = whole(
        tokens=2048 * 8192 * 1e6,
        startup_s=600,
        checkpoint_interval_s=3600,
        checkpoint_write_s=60,
        restart_s=900,
        mtbf_device_hours=100 * 1024,
    )
    good = 3600 / 3660 * (1 - (900 + 1830) / 360_000)
    assert found["goodput"] == pytest.approx(good)
    assert found["wall_days"] == pytest.approx((1e7 / good + 600) / 86400)
    assert found["days"] == pytest.approx(1e7 / 86400)


def test_no_progress_has_no_end():
    found = whole(tokens=1e12, checkpoint_interval_s=3600, checkpoint_write_s=60, mtbf_device_hours=1)
    assert found["goodput"] == 0.0
    assert not found.keys() & {"wall_days", "device_hours", "cost"}


def test_the_estimate_and_its_document_have_it():
    answer = estimate(plan(tokens=15e12))
    assert answer.run == whole_run(answer.job, answer.step_s, PARAMS, DEVICES)
    assert answer.to_dict()["run"] == answer.run


@settings(deadline=None, max_examples=50)
@given(st.floats(1, 1e4), st.floats(1e3, 1e8), st.floats(0.1, 10.0))
def test_the_best_interval_loses_least(write_s, mtbf_s, factor):
    """Near the optimum, where a failure is rare against an interval (Daly 2006: first order in C/M)."""
    best = young_daly_s(write_s, mtbf_s)
    if best < mtbf_s / 10:
        at_best = goodput_fraction(best, write_s, mtbf_s, 0.0)
        assert at_best >= goodput_fraction(best * factor, write_s, mtbf_s, 0.0) * (1 - 2 * write_s / mtbf_s)
        assert 0 < at_best <= 1


@pytest.mark.parametrize(
    "bad", [{"tokens": 0}, {"tokens": -1}, {"mtbf_device_hours": 0}, {"price_per_device_hour": -1}]
)
def test_nonsense_is_refused(bad):
    with pytest.raises(ConfigError, match=rf"run\.{next(iter(bad))}"):
        plan(**bad)


def test_a_set_speed_of_checkpoints_takes_the_other_away():
    job = plan(checkpoint_bytes_per_s="100 GB/s")
    assert job.run is not None
    assert job.run.checkpoint_bytes_per_s == 100e9
    changed = job.replace(**{"run.checkpoint_write_s": 3.0}).run
    assert changed is not None
    assert (changed.checkpoint_write_s, changed.checkpoint_bytes_per_s) == (3.0, None)
    with pytest.raises(
        ConfigError, match=r"^run: checkpoint_write_s and checkpoint_bytes_per_s are both set; use one$"
    ):
        plan(checkpoint_write_s=3.0, checkpoint_bytes_per_s=1e9)
