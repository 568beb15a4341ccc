"""Lines of logs: what each framework's say, and what no line is."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_logs import memory

from steptime.base.config import ConfigError
from steptime.launch.logs.entries import (
    AcceleratorName,
    Iteration,
    MemoryPeak,
    ParameterCount,
    Pause,
    Vocabulary,
    ZeroStage,
)
from steptime.launch.logs.files import LONGEST, pieces
from steptime.launch.logs.job_log import read_log
from steptime.launch.logs.lines import said
from steptime.launch.logs.logged_steps import LoggedSteps

GIB = 2.0**30

# --- lines ---

LINES = {
    # Megatron-LM of 2020: no throughput, no memory
    " iteration       10/  500000 | consumed samples:         5120 | elapsed time per iteration (ms): 1234.5 | learning rate:"
    " 4.438E-07 | global batch size:   512 | lm loss: 1.010967E+01 | loss scale: 4096.0 |": Iteration(
        "Megatron-LM", 10, 1.2345, batch=512
    ),
    # Megatron-LM of 2026, Megatron-Bridge: a time stamp before
    " [2026-08-21 10:19:42.123456] iteration        4/   25000 | consumed samples:         4096 | elapsed time per iteration"
    " (ms): 2701.4 | throughput per GPU (TFLOP/s/GPU): 449.6 | energy per GPU (J/iter/GPU): 1.0 | global batch size:  1024 |": (
        Iteration("Megatron-LM", 4, 2.7014, tflops=449.6, batch=1024)
    ),
    # Megatron-DeepSpeed, as torchrun of 2022 prefixes it (BigScience's logs)
    "[default7]: iteration    12695/  115311 | consumed samples:      9841584 | elapsed time per iteration (s): 105.22 |"
    " global batch size:  2048 | samples per second: 19.463 | TFLOPs: 149.02 |": Iteration(
        "Megatron-DeepSpeed", 12695, 105.22, tflops=149.02, batch=2048, stream="[default7]"
    ),
    # GPT-NeoX: fields before the number
    " samples/sec: 12.5 | iteration      10/  320000 | elapsed time per iteration (ms): 81920.0 | learning rate: 6.0E-5 |"
    " approx flops per GPU: 45.6TFLOPS | lm_loss: 1.0E+01 |": Iteration("Megatron-LM", 10, 81.92, tflops=45.6),
    # Primus (AMD): this line's value before the mean, usage fields between
    "[20251202 09:12:08][rank-7/8][INFO ] : iteration 126/ 5000 | consumed samples: 16128 | elapsed time per iteration (ms):"
    " 13372.8/13364.7 | hip mem usage/free/total: 1GB/1GB/2GB | throughput per GPU (TFLOP/s/GPU): 567.6/568.0 |"
    " global batch size: 128 |": Iteration("Megatron-LM", 126, 13.3728, tflops=567.6, batch=128),
    # NeMo 2 (progress_printer.py): numbered from 0, the step across epochs in global_step
    "0: Training epoch 1, iteration 5/99 | global_batch_size: 4 | global_step: 105 | train_step_timing in s: 2.008"
    " | consumed_samples: 8": Iteration("NeMo", 105, 2.008, batch=4, stream="0:"),
    # NeMo before 2: Lightning's bar
    "Epoch 0: : 100%|████| 100/100 [10:48<00:00, reduced_train_loss=0.01, global_step=99.00, train_step_timing in s=3.130]": (
        Iteration("NeMo", 99, 3.13)
    ),
    # Megatron-Bridge, beside the numbered line
    "ain_fp8_mx/0 Step Time : 9.09s GPU utilization: 663.5MODEL_TFLOP/s/GPU": Iteration(
        "Megatron-Bridge", -1, 9.09, tflops=663.5
    ),
    # torchtitan, with colors
    "[rank0]:[titan] 2025-11-25 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.7012  \x1b[38;2;180;60;0mgrad_norm: 1.1  "
    "\x1b[36mmemory: 40.25GiB(50.1%)  \x1b[34mtps: 1,234  \x1b[36mtflops: 56.70  \x1b[35mmfu: 12.30%\x1b[39m": (
        Iteration("torchtitan", 10, 0.0, 1234.0, 56.7, stream="[rank0]"),
        MemoryPeak(0, 0.0, 40.25 * GIB, local=True),
    ),
    # torchtitan of 2024: wps, no tflops
    "[rank0]:step: 20  loss:  7.5  memory: 40.00GiB(50.0%)  wps: 2,000  mfu: 41.00%": (
        Iteration("torchtitan", 20, 0.0, 2000.0, stream="[rank0]"),
        MemoryPeak(0, 0.0, 40.0 * GIB, local=True),
    ),
    # Megatron's report_memory: MB of 2**20 bytes; two ranks that wrote into one line
    memory(3, 1024.0, 2048.0) + memory(7, 3072.0, 4096.0): (
        MemoryPeak(3, 1.0 * GIB, 2.0 * GIB),
        MemoryPeak(7, 3.0 * GIB, 4.0 * GIB),
    ),
    # Megatron-Bridge's: GB of 1e9 bytes
    "p4/0 [Rank 1] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 63.66 | mem-max-allocated-gigabytes: 153.4 |"
    " mem-max-reserved-gigabytes: 182.2 | mem-alloc-retires: 0": MemoryPeak(1, 153.4e9, 182.2e9),
    " > number of parameters on (tensor, pipeline) model parallel rank (1, 3): 673286144": ParameterCount(
        1, 3, 673286144
    ),
    # rounded by a later Megatron: no count
    # ms-swift 3 (a rate) and 4, and its `megatron sft`: means since the run began
    "{'loss': 1.5, 'global_step/max_steps': '5/94', 'elapsed_time': '10s', 'remaining_time': '3m 12s', 'memory(GiB)': 5.5,"
    " 'train_speed(iter/s)': 0.5}": (
        Iteration("ms-swift", 5, 2.0, mean_s=2.0, elapsed_s=10.0),
        MemoryPeak(-1, 0.0, 5.5 * GIB, local=True),
    ),
    "{'iteration': '40/90', 'elapsed_time': '1h 2m 5s', 'memory(GiB)': 5.5, 'train_speed(s/it)': 3.125}": (
        Iteration("ms-swift", 40, 3.125, mean_s=3.125, elapsed_s=3725.0),
        MemoryPeak(-1, 0.0, 5.5 * GIB, local=True),
    ),
    # with transformers 5, whose progress bar prints numbers as text
    "{'global_step/max_steps': '3/9', 'elapsed_time': '2m 44s', 'memory(GiB)': '5.5', 'train_speed(s/it)': '54.59'}": (
        Iteration("ms-swift", 3, 54.59, mean_s=54.59, elapsed_s=164.0),
        MemoryPeak(-1, 0.0, 5.5 * GIB, local=True),
    ),
    " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 6.73B": (),
    " validation loss at iteration 100 on validation set | lm loss value: 2.0 | lm loss PPL: 7.4 |": Pause(100),
    "saving checkpoint at iteration      20 to /ckpt in torch_dist format": Pause(20),
    "[titan] validate step: 30  loss:  7.1  memory: 40.00GiB(50.00%)  tps: 1,000": Pause(30),
    "[titan] Saving the checkpoint (or staging if async is enabled).": Pause(-1),
    " > padded vocab (size: 50257) with 431 dummy tokens (new size: 50688)": Vocabulary(50257, 50688),
    "[2022-09-18 23:39:55,069] [INFO] [config.py:991:print]   zero_optimization_stage ...... 2": ZeroStage(2),
    ':::MLLOG {"namespace": "", "time_ms": 17, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": '
    '{"train_step_timing in s": 18.25}, "metadata": {"lineno": 488, "step": 4194304}}': Iteration("MLPerf", -1, 18.25),
    ':::MLLOG {"key": "tracked_stats", "value": {"train_step_time": 8.5, "reduced_train_loss": 7.0}, "metadata": {}}': (
        Iteration("MLPerf", -1, 8.5)
    ),
    ':::MLLOG {"key": "tracked_stats", "value": {"throughput": 3.5}, "metadata": {"step": 3072}}': (),
    "[titan] CUDA capacity: NVIDIA H100 80GB HBM3 with 79.18GiB memory": AcceleratorName("NVIDIA H100 80GB HBM3"),
    "|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |": AcceleratorName("NVIDIA A100-SXM4-80GB"),
    "GPU 0: NVIDIA H200 (UUID: GPU-0)": AcceleratorName("NVIDIA H200"),
    "NCCL INFO max allocated: 5 GB | step: iteration": (),
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:40])
def test_what_a_line_says(line):
    expected = LINES[line]
    found = tuple(said(line.encode()))
    wanted = expected if isinstance(expected, tuple) and not hasattr(expected, "_fields") else (expected,)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert type(one) is type(other)
        assert one == pytest.approx(other) if not any(isinstance(x, str) for x in one) else _near(one, other)


def _near(one, other):
    return all(a == b if isinstance(a, str) else a == pytest.approx(b) for a, b in zip(one, other, strict=True))


@settings(max_examples=300, deadline=None)
@given(line=st.sampled_from(sorted(LINES)), data=st.data())
def test_a_damaged_line_says_something_sane_or_nothing(line, data):
    """Digits and signs put anywhere: figures stay finite and positive, numbers stay within what arrays hold."""
    for _ in range(3):
        at = data.draw(st.integers(0, len(line)))
        line = (
            line[:at]
            + data.draw(st.sampled_from(["9" * 400, "-", "1e999", "nan", ".", "/", "|", "[Rank 1] (", " "]))
            + line[at:]
        )
    series = LoggedSteps()
    for entry in said(line.encode()):
        if isinstance(entry, Iteration):
            assert 0 <= entry.step_s < 1e18
            assert entry.step_s or entry.tokens_per_s
            series.add(entry, max(entry.number, 0))
        if isinstance(entry, MemoryPeak):
            assert all(0 <= value < 1e30 for value in (entry.allocated_bytes, entry.reserved_bytes))
    series.lines()


@pytest.mark.parametrize(
    ("lines", "unit"),
    [
        # one step in 3 s, then 1 s each: 11 in 13 s, 21 in 23 s
        ([(1, 3, 0.333333), (11, 13, 0.846154), (21, 23, 0.913043)], "iter/s"),
        # the same after iteration 100, where an earlier run ended
        ([(101, 3, 3.0), (111, 13, 1.181818), (121, 23, 1.095238)], "s/it"),
    ],
)
def test_means_since_the_beginning_are_taken_apart(tmp_path, lines, unit):
    path = tmp_path / "swift.log"
    path.write_text(
        "".join(
            f"{{'global_step/max_steps': '{step}/900', 'elapsed_time': '{s}s', 'memory(GiB)': 9.0, 'train_speed({unit})': {v}}}\n"
            for step, s, v in lines
        )
    )
    found = read_log([str(path)])
    assert [line.step_s for line in found.series.lines()] == pytest.approx([3.0, 1.0, 1.0], rel=1e-4)
    assert found.reserved == {-1: 9 * GIB}


@settings(max_examples=50, deadline=None)
@given(blob=st.binary(max_size=300))
def test_bytes_that_are_no_log_are_an_error_of_one_line(tmp_path_factory, blob):
    path = tmp_path_factory.mktemp("blob") / "x.log"
    path.write_bytes(blob)
    with pytest.raises(ConfigError) as caught:
        read_log([str(path)])
    assert len(caught.value.problems) == 1


def test_lines_end_at_either_return_and_are_cut():
    """A progress bar overwrites itself with carriage returns; a line of three megabytes is looked at by its first 64 KiB."""
    file = io.BytesIO(b"a\rb\r\nc\n" + b"x" * 3_000_000 + b"\nlast")
    lines = [line for chunk in pieces(file) for line in chunk]
    assert lines == [b"a", b"b", b"", b"c", b"x" * LONGEST, b"last"]
