"""Logs with DeepSpeed's timer next to other step times: which of them count."""

from __future__ import annotations

import pytest

from steptime.base.config import ConfigError
from steptime.launch.logs.entries import Iteration
from steptime.launch.logs.lines import said
from steptime.validation.logged import read_run

PLAN = """\
model: gpt2-xl
parallelism: {tp: 1, pp: 1, dp: 8}
data: {gbs: 256, seqlen: 1024, microbatch_sz: 4}
hardware: dgx-h100
"""
TIMER = (
    "[INFO] [timer.py:260:stop] epoch=0/micro_step={micro}/global_step={step}, RunningAvgSamplesPerSec=74.7, "
    "CurrSamplesPerSec=64.0, MemAllocated=4.7GB, MaxMemAllocated=15.5GB"
)
ARGONNE = (
    "[2024-04-21 02:45:24][INFO][training:1251] -  iteration={step:8d}/  317892 | consumed_samples=         512 | "
    "elapsed_time_per_iteration_ms=16030.6 | learning_rate=1e-8 | global_batch_size=  256 | lm loss=11.208171 | TFLOPs=160.07 |"
)
OLDER = (
    " iteration {step:8d}/  317892 | consumed samples:          512 | elapsed time per iteration (s): 16.03 | "
    "global batch size:   256 | TFLOPs: 160.07 |"
)


def run(tmp_path, *lines):
    (tmp_path / "train.log").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    return read_run([str(tmp_path / "train.log")], plan=str(tmp_path / "plan.yaml"))


def test_fields_with_equals_signs():
    """argonne-lcf/Megatron-DeepSpeed megatron/training_log.py, training_log."""
    assert list(said(ARGONNE.format(step=2).encode())) == [
        Iteration("Megatron-DeepSpeed", 2, 16.0306, tflops=160.07, batch=256)
    ]


@pytest.mark.parametrize("line", [ARGONNE, OLDER])
def test_the_loops_own_times_count_not_the_timers(tmp_path, line):
    """The timer says 256 / 64 = 4 s, the training loop 16.03 s; and the timer also has steps that the loop does not print."""
    steps = range(1, 9)
    found = run(
        tmp_path,
        *(text for step in steps for text in (TIMER.format(micro=step, step=step), line.format(step=step))),
        *(TIMER.format(micro=step, step=step) for step in (9, 10)),
    )
    assert found.steady.step_s == pytest.approx(16.03, rel=1e-3)
    assert found.steady.last == 8
    assert found.log.allocated == {-1: 15.5 * 2**30}


def test_a_timer_that_leaves_out_micro_batches(tmp_path):
    """256 sequences are 8 micro-batches of 4 on 8 devices; a timer that stopped 10 times in 10 steps has seen one of each."""
    with pytest.raises(ConfigError, match="stopped once in a step of 8 micro-batches"):
        run(tmp_path, *(TIMER.format(micro=step, step=step) for step in (10, 20, 30)))
    found = run(tmp_path, *(TIMER.format(micro=8 * step, step=step) for step in (10, 20, 30)))
    assert found.steady.step_s == pytest.approx(4.0)


def test_the_pipeline_engine_prints_step_times(tmp_path):
    """deepspeed/runtime/pipe/engine.py, train_batch."""
    text = "steps: {} loss: 2.3456 iter time (s): 3.250 samples/sec: 78.769"
    found = run(tmp_path, *(text.format(step) for step in range(10, 80, 10)))
    assert found.steady.step_s == pytest.approx(3.25)
    assert found.log.framework == "DeepSpeed pipeline"
