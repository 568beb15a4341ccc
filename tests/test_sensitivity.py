"""Sensitivity, scaling of best layouts, and many plans side by side."""

from __future__ import annotations

import json
from functools import cache
from math import log
from pathlib import Path

import pytest

from steptime import Job, estimate
from steptime.answer.distance import RECOMPUTE
from steptime.commands.cli import main
from steptime.report.format import seconds
from steptime.report.sensitivity_tables import sections
from steptime.search.fastest import Fastest, fastest, within
from steptime.search.run import run, search
from steptime.search.screen import Screen
from steptime.search.search import Asked
from steptime.search.sensitivity import FASTEST, scaled, sensitivity, with_chip, with_tiers

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(scope="module")
def found():
    return sensitivity(Job.load(CONFIGS / "llama3_70b.yaml"), best=False)


def test_more_of_anything_is_no_slower(found):
    assert all(gain.change <= 0.0 for gain in found.gains)
    assert [gain.change for gain in found.gains] == sorted(gain.change for gain in found.gains)
    names = [gain.name for gain in found.gains]
    assert {"peak FLOP/s", "memory bandwidth", "nvlink bandwidth", "network bandwidth", "latency (10 % less)"} <= {
        *names
    }


def test_devices_that_cannot_double_are_named_with_the_reason(found):
    """8 sequences on dp 8 are one each: dp 16 would leave half the devices without work."""
    assert found.left_out == []
    plan = Job(
        model="llama3-8b",
        parallelism={"tp": 1, "pp": 1, "dp": 8},
        data={"gbs": 8, "seqlen": 2048, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    one = sensitivity(plan, best=False)
    assert "devices (twice)" not in {gain.name for gain in one.gains}
    (line,) = one.left_out
    assert line.startswith("devices (twice): dp 8 cannot double: data.gbs: ")


def test_arithmetic_is_all_that_faster_arithmetic_changes(found):
    """Peak and sustained rates times 1.1: matrix products and attention shrink by at most 1/1.1, nothing else by itself."""
    gain = next(gain for gain in found.gains if gain.name == "peak FLOP/s")
    parts = found.given.time.parts_s
    most = (parts["gemm"] + parts["attention"]) * (1.0 - 1.0 / 1.1)
    assert 0.9 * most < found.given.step_s - gain.step_s < 1.03 * most


def test_a_rate_that_hides_a_collective_hides_it():
    """Gradients over 1 GB/s Ethernet show; at the rate found they are 1 % of the step, at 10 % less they are more."""
    from steptime.search.sensitivity import scaled, with_tiers

    job = Job(
        model="llama3-8b",
        parallelism={"tp": 8, "pp": 1, "dp": 4},
        data={"gbs": 64, "seqlen": 8192, "microbatch_sz": 1},
        hardware={"node_type": "dgx-h100", "overrides": {"tiers.1.bytes_per_s": 2e9}},
    )
    row = next(row for row in sensitivity(job, best=False).hiding if row.name == "dp_comm")
    assert row.tier == "infiniband"
    assert row.times is not None

    def shows(times):
        faster = estimate(job.replace(hardware=with_tiers(job.machine, scaled(times, [1]))))
        return faster.time.parts_s.get("dp_comm", 0.0) / faster.step_s

    assert shows(row.times) <= 0.01 < shows(0.9 * row.times)


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b"])
def test_what_leaves_slower_layouts_out_finds_the_same_best(name):
    """With a fraction of the layouts kept; also where less memory is of interest."""
    plan = Job.load(CONFIGS / f"{name}.yaml", ["model.n_layers=16"])
    every = search(plan)
    asked = Asked((plan.parallelism.devices,), (plan.data.gbs,))
    few = fastest(plan, asked)
    assert few.best.changes == every.best.changes
    assert few.best.estimate.step_s == every.best.estimate.step_s
    assert few.counts.fitting < every.counts.fitting
    small = with_memory(plan, 0.8)
    assert within(fastest(plan, asked, small), small).best.step_s == within(every, small).best.step_s


@pytest.mark.parametrize("more", [False, True])
def test_the_best_behind_many_that_are_tight(monkeypatch, more):
    """A screen that counts half of what is held: more than 20 TIGHT layouts are faster than any that fits.

    The first pass, which keeps 20, has a limit below the best; the search finds it. `more`: where it is that of less memory.
    """
    plan = Job.load(CONFIGS / "llama3_8b.yaml")
    small, asked = with_memory(plan, 0.7), Asked((plan.parallelism.devices,), (plan.data.gbs,))
    best_step_s = seconds_of_best(small)
    monkeypatch.setattr(Screen, "margin", dict.fromkeys(RECOMPUTE, -log(2.0)))
    of, bound = plan if more else small, Fastest(small, small.machine.accelerator.usable_memory_bytes)
    run(of, asked, bound=bound)
    assert bound.limit_s() < best_step_s
    assert within(fastest(of, asked, small), small).best.step_s == best_step_s


@cache
def seconds_of_best(plan):
    """With the screen as it is."""
    return search(plan).best.step_s


def with_memory(plan, share):
    chip = plan.machine.accelerator
    less = {name: share * getattr(chip, name) for name in ("memory_bytes", "usable_memory_bytes")}
    return plan.replace(hardware=with_chip(plan.machine, chip.model_copy(update=less)))


def test_the_command(capsys):
    assert main(["sensitivity", str(CONFIGS / "llama3_8b.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"step_s", "gains", "hiding", "left_out", "settings", "best_layouts"} == found.keys()
    assert all(gain["change"] == gain["step_s"] / found["step_s"] - 1.0 for gain in found["gains"])
    (memory,) = (gain for gain in found["gains"] if gain["name"] == "memory size")
    best = found["best_layouts"]
    assert best["with_more_memory_s"] <= best["step_s"] < memory["step_s"] == found["step_s"]
    assert f"{best['step_s']:.4g} s without" in memory["note"]


def test_a_job_that_does_not_fit_is_said_beside_its_step():
    """70 B parameters without sharding take over 1,000 GiB a device."""
    job = Job.load(CONFIGS / "llama3_70b.yaml", ["parallelism.tp=1", "parallelism.pp=1", "parallelism.vpp=1"])
    (step, _) = sections(sensitivity(job, best=False))[0].facts
    assert step.lines[0].endswith(" s, does not fit")


def test_sizes_that_cannot_hold_the_job_are_marked(capsys):
    """8 B parameters take 16 B + 4 B + 12 B / devices each: 4 x 80 GB do not hold 70 B, 64 do."""
    assert main(["scale", str(CONFIGS / "llama3_70b.yaml"), "--best", "--devices", "4,64", "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)["sizes"]
    assert (small["fits"], small["efficiency"], large["fits"], large["efficiency"]) == (False, None, True, 1.0)
    assert "needs" in small["why"]


def test_scaling_of_one_layout_marks_what_does_not_fit(capsys):
    """FSDP of 70 B on one device is no 100 %."""
    config = str(CONFIGS / "llama3_8b_fsdp.yaml")
    assert main(["scale", config, "--set", "model=llama3-70b", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["weak_scaling"]
    assert rows[0]["verdict"] == "does_not_fit"
    first = next(row for row in rows if row["verdict"] != "does_not_fit")
    assert first["efficiency"] == 1.0
    assert main(["scale", config, "--set", "model=llama3-70b"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_many_plans_side_by_side(capsys):
    names = [str(CONFIGS / name) for name in ("llama3_8b.yaml", "llama3_70b.yaml", "gpt3_175b_h100.yaml")]
    assert main(["diff", *names, "--set", "data.gbs=512"]) == 0
    out = capsys.readouterr().out
    steps = [estimate(Job.load(name, ["data.gbs=512"])).step_s for name in names]
    row = next(line for line in out.splitlines() if line.startswith("  step "))
    assert [float(word) for word in row.split() if word[0].isdigit()] == pytest.approx(steps, rel=1e-3)
    assert max(map(len, out.splitlines())) <= 80


def test_devices_of_scale_go_with_best(capsys):
    assert main(["scale", str(CONFIGS / "llama3_8b.yaml"), "--devices", "8"]) == 2
    assert capsys.readouterr().err == "--devices: only with --best\n"


@pytest.fixture(scope="module")
def sharded():
    """FSDP over 8 nodes: an all-gather of a block runs on nvlink and infiniband at once."""
    data = {"gbs": 128, "seqlen": 8192, "microbatch_sz": 1}
    performance = {"software": "torchtitan", "activation_checkpointing_type": "per-op"}
    layout = {"tp": 1, "pp": 1, "dp": 64}
    plan = Job(model="llama3-8b", parallelism=layout, performance=performance, data=data, hardware="dgx-h100")
    return sensitivity(plan, best=False)


def test_communication_that_no_network_hides_alone_is_hidden_by_all(sharded):
    """An estimate with all networks that many times faster has 1 % of the step exposed, as the table says."""
    (row,) = sharded.hiding
    job = sharded.given.job
    assert (row.name, row.tier, row.times, row.left_s) == ("dp_comm", "infiniband", None, 0.0)
    every = list(range(len(job.machine.tiers)))
    alone, both = (
        estimate(job.replace(hardware=with_tiers(job.machine, scaled(times, which))))
        for times, which in ((FASTEST, [every[-1]]), (row.every_times, every))
    )
    assert alone.time.parts_s["dp_comm"] > 0.01 * alone.step_s
    assert both.time.parts_s["dp_comm"] == pytest.approx(0.01 * both.step_s, rel=0.05)
    text = " ".join(sections(sharded)[2].rows[0])
    assert text.endswith(f"all networks {row.every_times:.1f} x")


def test_latency_that_no_bandwidth_hides_is_told_in_seconds(found):
    """80 layers over tensor parallelism of 8: what is left with 64 x all networks is exposed in that estimate."""
    row = next(row for row in found.hiding if row.name == "tp_comm")
    job = found.given.job
    fast = estimate(job.replace(hardware=with_tiers(job.machine, scaled(FASTEST, list(range(len(job.machine.tiers)))))))
    assert (row.times, row.every_times) == (None, None)
    assert row.left_s == fast.time.parts_s["tp_comm"] > 0.01 * fast.step_s
    table = sections(found)[2]
    assert [line[-1] for line in table.rows if line[0].startswith("tensor")] == [f"never: {seconds(row.left_s)} left"]
    assert any(note.startswith("never: ") for note in table.notes)
    assert not any(note.startswith("all networks") for note in table.notes)
