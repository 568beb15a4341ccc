"""`3dtrn diff` where one of the two is a training log: the cost of each difference by the model, and what it did cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch_logs import MEGATRON, head, iteration, write

from steptime.answer.result import estimate
from steptime.commands import cli
from steptime.job.job import Job
from steptime.validation.log_file import is_log
from steptime.validation.logged import read_run
from steptime.validation.setting_costs import differences, settings

PLAN = Path(__file__).parents[2] / "configs" / "llama3_8b_fsdp.yaml"
H100 = "--set", "hardware.node_type=dgx-h100"


def run(capsys, *args):
    code = cli.main(["diff", *map(str, args)])
    return (code, *capsys.readouterr())


def log(tmp_path, ms, name="b.log", **changes):
    return write(tmp_path / name, [*head(**changes), *(iteration(n, ms) for n in range(1, 31))])


@pytest.fixture
def base():
    return read_run([str(MEGATRON)], H100[1:]).job


# --- the cost of each difference ---


def test_each_difference_alone_and_together(base):
    """Two settings: each alone is the first job with that one changed; the interaction is what is left of the whole."""
    changes = {"performance.overlap.dp": False, "data.microbatch_sz": 2}
    other = base.replace(**changes)
    found = differences(base, other)
    before, after = estimate(base).step_s, estimate(other).step_s
    alone = {path: estimate(base.replace(**{path: value})).step_s - before for path, value in changes.items()}
    assert {one.settings[0].path: one.step_change_s for one in found.each} == pytest.approx(alone, rel=1e-9)
    assert found.together_s == pytest.approx(after - before, rel=1e-9)
    assert found.interaction_s == pytest.approx(after - before - sum(alone.values()), rel=1e-6, abs=1e-9)
    peaks = [one.peak_change_bytes for one in found.each]
    both = estimate(other).memory.peak_reserved_bytes - estimate(base).memory.peak_reserved_bytes
    assert found.peak_interaction_bytes == pytest.approx(both - sum(peaks), abs=1)
    assert [abs(one.rate_change) for one in found.each] == sorted(
        (abs(one.rate_change) for one in found.each), reverse=True
    )


def test_one_difference_has_no_interaction(base):
    found = differences(base, base.replace(**{"performance.overlap.dp": False}))
    assert len(found.each) == 1
    assert found.interaction_s == pytest.approx(0.0, abs=1e-12)
    assert found.rate_interaction == pytest.approx(0.0, abs=1e-12)


def test_equal_jobs_differ_in_nothing(base):
    found = differences(base, base)
    assert (found.each, found.together_s, found.interaction_s) == ([], 0.0, 0.0)


def test_degrees_of_as_many_devices_change_together(base):
    """tp 4 alone would be a job of 16 devices."""
    found = differences(base, base.replace(**{"parallelism.tp": 4, "parallelism.dp": 1}))
    assert [[s.path for s in one.settings] for one in found.each] == [["parallelism.tp", "parallelism.dp"]]


def test_what_cannot_run_alone_runs_with_what_it_needs(base):
    """A batch of 6 sequences is not a multiple of dp 4; nor are 4 ranks able to share 6: both change together."""
    small = base.replace(**{"data.gbs": 12, "parallelism.dp": 6})
    found = differences(small, small.replace(**{"data.gbs": 8, "parallelism.dp": 4}))
    assert len(found.each) == 1
    assert {s.path for s in found.each[0].settings} == {"data.gbs", "parallelism.dp"}
    assert found.interaction_s == pytest.approx(0.0, abs=1e-12)


def test_names_and_notes_are_no_differences(base):
    assert differences(base, base.replace(**{"model.name": "x", "notes": ["y"]})).each == []


def test_the_overlap_of_an_axis_with_one_rank_is_no_difference(base):
    """cp is 1 on both sides, dp 2; gradients are reduced over cp, too, so that dp 1 leaves nothing to overlap only with cp 1."""
    changes = {"performance.overlap.cp": False, "performance.overlap.dp": False}

    def found(job):
        return [one.settings[0].path for one in differences(job, job.replace(**changes)).each]

    assert found(base) == ["performance.overlap.dp"]
    assert found(base.replace(**{"parallelism.tp": 4, "parallelism.dp": 1})) == []
    assert sorted(found(base.replace(**{"parallelism.cp": 2, "parallelism.dp": 1}))) == sorted(changes)


def test_settings_by_path():
    found = settings({"a": {"b": 1, "c": 2}, "d": None}, {"a": {"b": 1, "c": 3}, "d": 4})
    assert [tuple(one) for one in found] == [("a.c", 2, 3), ("d", None, 4)]


def test_every_difference_of_two_machines_is_one(base):
    found = differences(base, base.replace(**{"hardware.node_type": "dgx-a100"}))
    assert [one.settings[0].path for one in found.each] == ["hardware.node_type"]
    assert found.each[0].step_change_s > 0


# --- the command ---


def test_two_logs(capsys, tmp_path):
    """Measured 14.52 to 19.00 s: +4.48 s, +30.9 %."""
    other = log(tmp_path, 19000.0, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    code, out, err = run(capsys, MEGATRON, other, *H100)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].split() == ["measured", "14.52", "s", "19.00", "s", "+30.9", "%", "(+4.480", "s)"]
    assert lines[2].startswith("  predicted")
    assert "recompute none to full uniform" in out
    a, b = (estimate(read_run([str(path)], H100[1:]).job).step_s for path in (MEGATRON, other))
    assert f"{100 * (b - a) / a:+,.1f} %" in lines[2]
    assert "settings that differ" in out
    assert "memory of the worst stage" in out


def test_a_plan_and_a_log_in_either_order(capsys, tmp_path):
    """The measured figure stands under the log; between a plan and a log nothing was measured."""
    plan = tmp_path / "plan.yaml"
    job = read_run([str(MEGATRON)], H100[1:]).job.replace(**{"data.microbatch_sz": 2})
    plan.write_text(json.dumps(job.to_config()))
    code, out, _ = run(capsys, plan, MEGATRON, *H100)
    assert code == 0
    assert out.splitlines()[1].split() == ["measured", "-", "14.52", "s"]
    assert "there is no measured change" in out
    assert "microbatch_sz 2 to 1" in out
    _, out, _ = run(capsys, MEGATRON, plan, *H100)
    assert out.splitlines()[1].split() == ["measured", "14.52", "s", "-"]
    assert "microbatch_sz 1 to 2" in out


def test_the_plan_says_what_a_silent_log_ran_on(capsys):
    """The log does not name its accelerator: the plan's is taken, and told."""
    code, out, _ = run(capsys, PLAN, MEGATRON)
    assert code == 0
    assert "hardware.node_type" not in out.partition("\n\n")[2]
    assert "taken from the other side" in " ".join(out.split())


def test_other_batches_compare_by_tokens(capsys, tmp_path):
    other = write(
        tmp_path / "b.log", [*head(global_batch_size=256), *(iteration(n, 28000.0, batch=256) for n in range(1, 31))]
    )
    code, out, _ = run(capsys, MEGATRON, other, *H100)
    assert code == 0
    assert "compare tokens/s/device" in out
    measured = next(line for line in out.splitlines() if "tokens/s/device, measured" in line)
    assert measured.split()[2:5] == ["9,027.0", "9,362.3", "+3.7"]  # 128 x 8192 / 14.52 / 8, 256 x 8192 / 28 / 8


def test_two_plans_are_compared_as_before(capsys):
    code, out, _ = run(capsys, PLAN, PLAN)
    assert code == 0
    assert out.startswith("no setting differs")
    assert "by the model" not in out


def test_bad_input_is_one_line(capsys, tmp_path):
    dump_alone = write(tmp_path / "x.txt", head())
    for other, message in ((dump_alone, "no iterations logged"), (tmp_path / "none", "no such file")):
        code, out, err = run(capsys, MEGATRON, other, *H100)
        assert (code, out) == (2, "")
        assert err.startswith(str(other))
        assert message in err
        assert len(err.splitlines()) == 1


# --- what a log is ---


def test_a_log_is_known_by_its_content(tmp_path):
    text = MEGATRON.read_text()
    cases = {
        "plan.yaml": (text, True),
        "iterations.txt": (iteration(1, 1000.0), True),
        "x.log": ("model: llama3-8b\nparallelism: {tp: 1, pp: 1, dp: 1}\n", False),
        "empty.log": ("", False),
        "large": ("# no config is as large as this\n" * 50_000, True),
    }
    for name, (content, expected) in cases.items():
        path = tmp_path / name
        path.write_text(content)
        assert is_log(str(path)) is expected, name
    assert not is_log("-")
    assert not is_log(str(tmp_path))
    assert not is_log(str(tmp_path / "none"))


def test_the_plan_of_a_log_is_a_job(base):
    assert isinstance(base, Job)
    assert Job.load(json.dumps(base.to_config())) == base
