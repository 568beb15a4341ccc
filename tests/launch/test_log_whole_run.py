"""Logs of the Trainer without progress bars, which have only the mean of the run; the machine by its name."""

from __future__ import annotations

import pytest
from launch_logs import MEGATRON, document, run, write

from steptime.launch.logs.entries import RunLength, WholeRun
from steptime.launch.logs.job_log import read_log
from steptime.launch.logs.lines import said

PLAN = (
    "{model: llama3-8b, parallelism: {dp: 8, fsdp: {}}, data: {gbs: 8, seqlen: 8192, microbatch_sz: 1}, hardware: h100}"
)
LENGTH = "[INFO|trainer.py:2141] 2025-01-01 10:00:00,000 >>   Total optimization steps = 1,200"


def end(seconds, rate, quote=""):
    """What the Trainer prints at the end; release 5 prints numbers as text."""
    named = {"train_runtime": seconds, "train_samples_per_second": 8 * rate, "train_steps_per_second": rate}
    return f"{{{', '.join(f'{name!r}: {quote}{value}{quote}' for name, value in named.items())}, 'epoch': 1.0}}"


def step_s(tmp_path, *lines):
    return [line.step_s for line in read_log([write(tmp_path / "x.log", list(lines))]).steps.lines()]


def test_the_lines():
    assert [*said(end(131.0, 0.763).encode())] == [WholeRun(131.0, 0.763, 8 * 0.763)]
    assert [*said(end(131.0, 0.763, "'").encode())] == [WholeRun(131.0, 0.763, 8 * 0.763)]
    bare = "{'train_runtime': 131.0, 'train_steps_per_second': 0.763}"
    assert [*said(bare.encode())] == [WholeRun(131.0, 0.763)]
    assert [*said(LENGTH.encode())] == [RunLength(1200, 0)]
    assert [*said(b"  Continuing training from global step 500")] == [RunLength(0, 500)]
    assert [*said(end(0.0, 0.0).encode())] == []


def test_the_mean_of_the_announced_steps(tmp_path):
    """1,200 steps in 25,000 s are 20.8333 s each; the rate, rounded to 0.048, alone would give 1 / 0.048 = 20.8333 by chance of
    its digits, and 24,100 s with the same rate 20.0833 s."""
    assert step_s(tmp_path, LENGTH, end(25000.0, 0.048)) == [pytest.approx(25000 / 1200)]
    assert step_s(tmp_path, LENGTH, end(24800.0, 0.048)) == [pytest.approx(24800 / 1200)]
    assert step_s(tmp_path, end(24800.0, 0.048)) == [pytest.approx(1 / 0.048)]


TABLE = """***** train metrics *****
  epoch                    =     2.9987
  total_flos               = 94629384GF
  train_loss               =     1.1502
  train_runtime            = {}
  train_samples            =       9600
  train_samples_per_second =      0.384
  train_steps_per_second   =      0.048"""


def test_the_table_of_metrics(tmp_path):
    """transformers' trainer_pt_utils.py, metrics_format: 6:56:40.00 are 25,000 s, of 1,200 steps; a day more is 111,400 s, of
    which 1,200 steps are not 0.048 a second. 0.384 samples over 0.048 steps a second are 8 a step."""
    rows = TABLE.format("6:56:40.00").splitlines()
    assert step_s(tmp_path, LENGTH, *rows) == [pytest.approx(25000 / 1200)]
    assert step_s(tmp_path, LENGTH, end(25000.0, 0.048), *rows) == [pytest.approx(25000 / 1200)]
    assert step_s(tmp_path, LENGTH, *TABLE.format("1 day, 6:56:40.00").splitlines()) == [pytest.approx(1 / 0.048)]
    assert [*said(rows[4].encode())] == [WholeRun(25000.0, 0.0)]
    low, high = read_log([write(tmp_path / "y.log", rows)]).whole_batch
    assert low < 8.0 < high


def test_a_table_of_an_evaluation_is_no_run(tmp_path):
    rows = [row.replace("train_", "eval_") for row in TABLE.format("6:56:40.00").splitlines()]
    assert [*said(rows[4].encode())] == [*said(rows[7].encode())] == []


def test_another_runs_length_does_not_count(tmp_path):
    """1,200 steps at 0.763 a second take 1,573 s, not 131 s: the announced steps are not those of this run."""
    assert step_s(tmp_path, LENGTH, end(131.0, 0.763)) == [pytest.approx(1 / 0.763)]


def test_a_continued_run_made_only_its_last_steps(tmp_path):
    """The Trainer divides all 1,200 steps by the time of the last 700: 14,000 s / 700 = 20 s, not 14,000 / 1,200."""
    continued = "  Continuing training from global step 500"
    assert step_s(tmp_path, LENGTH, continued, end(14000.0, 0.086)) == [pytest.approx(20.0)]


def test_step_times_count_before_the_mean(tmp_path):
    bar = "  5%|5         | 5/100 [00:05<02:10,  1.25s/it]"
    assert step_s(tmp_path, bar, end(131.0, 0.763)) == [1.25]


def test_validate_says_that_it_is_a_mean(capsys, tmp_path):
    """131 s / 0.763 steps a second: 1 / 0.763 = 1.3106 s."""
    (plan := tmp_path / "plan.yaml").write_text(PLAN)
    log = write(tmp_path / "x.log", ["{'loss': 1.2, 'epoch': 0.1}", end(131.0, 0.763)])
    found = document(capsys, "--log", log, "--plan", plan)
    assert found["measured"]["step_s"] == pytest.approx(1.3106, rel=1e-4)
    assert any("only the mean of the whole run" in note for note in found["notes"])


def test_another_batch_than_the_logs_is_told(capsys, tmp_path):
    """6.104 samples / 0.763 steps a second are 8 a step: a plan of 64 is told, one of 8 is not.

    At 0.010 steps and 0.08 samples a second the rounding alone allows 0.0795 / 0.0105 = 7.6 to 0.0805 / 0.0095 = 8.5.
    """
    (plan := tmp_path / "plan.yaml").write_text(PLAN)
    log = write(tmp_path / "x.log", [end(131.0, 0.763)])
    told = "the plan has 64 sequences a step, the log 8 samples a step"
    found = document(capsys, "--log", log, "--plan", plan, "--set", "data.gbs=64")
    assert any(note.startswith(told) for note in found["notes"])
    assert "--set data.gbs=N" in run(capsys, "--log", log, "--plan", plan, "--set", "data.gbs=64")[1]
    assert not any("samples" in note for note in document(capsys, "--log", log, "--plan", plan)["notes"])
    assert read_log([write(tmp_path / "y.log", [end(900.0, 0.010)])]).whole_batch == pytest.approx(
        (7.571, 8.474), abs=1e-3
    )


def test_a_log_without_a_plan_asks_for_it_only(capsys, tmp_path):
    log = write(tmp_path / "x.log", [end(131.0, 0.763)])
    told = f"{log}: a log of Hugging Face Trainer does not state the job's model and layout; give the plan, config or launch "
    assert run(capsys, "--log", log) == (2, "", told + "script of the job with --plan FILE\n")


def test_the_machine_by_its_name(capsys):
    found = document(capsys, "--log", MEGATRON, "--machine", "h100")
    assert found["config"]["hardware"]["node_type"] == "dgx-h100"
    assert document(capsys, "--log", MEGATRON, "--machine", "h100", "--devices", "8") == found
    code, out, err = run(capsys, "--log", MEGATRON, "--machine", "h100", "--set", "hardware.node_type=a100")
    assert (code, out) == (2, "")
    assert "states another" in err
    assert run(capsys, "--machine", "h100", "--devices", "8") == (
        2, "", "--machine: only with --log\n--devices: only with --log\n",
    )  # fmt: skip
