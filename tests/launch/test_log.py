"""Reading training logs: line formats, joining, steady state, bounded memory, and what is no log."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_logs import MEGATRON, dump, head, iteration, memory, write

from steptime.base.config import ConfigError
from steptime.launch.logs.entries import AcceleratorName, Iteration, MemoryPeak, ParameterCount, Pause, Vocabulary
from steptime.launch.logs.files import LONGEST, pieces
from steptime.launch.logs.job_log import read_log
from steptime.launch.logs.lines import said
from steptime.launch.logs.logged_steps import LoggedSteps
from steptime.launch.logs.steady import PAUSE, RAMP, RESTART, WARM, median_interval, quantile, steady

GIB, MIB = 2.0**30, 2.0**20


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
    " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 6.73B": (),
    " validation loss at iteration 100 on validation set | lm loss value: 2.0 | lm loss PPL: 7.4 |": Pause(100),
    "saving checkpoint at iteration      20 to /ckpt in torch_dist format": Pause(20),
    "[titan] validate step: 30  loss:  7.1  memory: 40.00GiB(50.00%)  tps: 1,000": Pause(30),
    "[titan] Saving the checkpoint (or staging if async is enabled).": Pause(-1),
    " > padded vocab (size: 50257) with 431 dummy tokens (new size: 50688)": Vocabulary(50257, 50688),
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


# --- steady state ---


def log_of(tmp_path, lines, name="run.log"):
    return read_log([write(tmp_path / name, lines)])


def test_the_fixture_by_hand():
    """Of 30 lines the first 3 (10 %) and iterations 20, 21 (a checkpoint) are out. The other 25 are 14.50 (5 times), 14.51 (4),
    14.52 (5), 14.53 (5) and 14.54 s (6): the 13th is 14.52. 10th percentile: place 2.4; 90th: place 21.6. For n = 25 the 95 %
    interval of the median is x_8 to x_18 (tables of the sign test)."""
    found = steady(read_log([str(MEGATRON)]))
    assert (found.used, found.logged, found.interval, found.first, found.last) == (25, 30, 1, 4, 30)
    assert found.left_out == {WARM: 3, PAUSE: 2}
    assert found.step_s == pytest.approx(14.52)
    assert (found.step_s_p10, found.step_s_p90) == pytest.approx((14.50, 14.54))
    assert (found.median_low_s, found.median_high_s) == pytest.approx((14.51, 14.53))
    assert (found.batch, found.restarts, found.notes) == (128, [], [])
    assert found.tflops == pytest.approx(464.6, abs=0.05)


def test_memory_and_parameters_of_the_fixture():
    log = read_log([str(MEGATRON)])
    assert log.allocated == {0: 41250.5 * MIB, 1: 41250.5 * MIB, 4: 35800.25 * MIB, 5: 35800.25 * MIB}
    assert log.reserved[5] == 38410.0 * MIB
    assert log.parameters[1, 1] == 2007633920
    assert (log.vocabulary, log.framework, log.local_ranks) == (Vocabulary(128256, 128256), "Megatron-LM", False)


def test_lines_of_several_iterations(tmp_path):
    """--log-interval 10 over 100 iterations: warm-up is 10 of them, so the line at 10 is out, that at 20 is in; the checkpoint
    after 60 takes out the lines of 51-60 and 61-70."""
    lines = [iteration(n, 1000.0 + n) for n in range(10, 101, 10)]
    lines.insert(6, "saving checkpoint at iteration      60 to /ckpt in torch_dist format")
    found = steady(log_of(tmp_path, lines))
    assert (found.interval, found.logged, found.used) == (10, 10, 7)
    assert found.left_out == {WARM: 1, PAUSE: 2}
    assert found.step_s == pytest.approx(1.050)  # of 1.02 1.03 1.04 1.05 1.08 1.09 1.10


def test_ramp_up_counts_the_final_batch_only(tmp_path):
    lines = [iteration(n, 100.0 * (1 + n // 10), batch=64 * (1 + n // 10)) for n in range(1, 30)]
    found = steady(log_of(tmp_path, lines))
    assert found.batch == 192
    assert found.used == 10
    assert found.step_s == pytest.approx(0.3)
    assert found.left_out == {WARM: 3, RAMP: 16}  # 10 % of 29 reaches into the third


@pytest.mark.parametrize(
    ("times", "median", "note"), [([9000.0], 9.0, "last line"), ([9000.0, 1000.0], 1.0, "last line")]
)
def test_short_logs_say_so(tmp_path, times, median, note):
    found = steady(log_of(tmp_path, [iteration(n, ms) for n, ms in enumerate(times, 1)]))
    assert found.step_s == pytest.approx(median)
    assert found.used == 1
    assert note in found.notes[0]
    assert found.median_low_s is None


def test_a_log_of_nothing_but_pauses_keeps_them(tmp_path):
    lines = [
        line
        for n in range(1, 21)
        for line in (iteration(n, 1000.0), f" validation loss at iteration {n} | lm loss value: 1")
    ]
    found = steady(log_of(tmp_path, lines))
    assert found.used == 18
    assert PAUSE in found.notes[0]


def test_torchtitan_rates_become_step_times(tmp_path):
    """1,000 tokens/s per device at 4,096 tokens per device and step: 4.096 s."""
    lines = [
        f"[rank0]:[titan] step: {n:2}  loss:  7.7  memory: 40.25GiB(50.1%)  tps: 1,000  tflops: 50.00  mfu: 5%"
        for n in range(1, 12)
    ]
    log = log_of(tmp_path, lines)
    found = steady(log, 4096.0)
    assert found.step_s == pytest.approx(4.096)
    assert found.flops_per_device == pytest.approx(50e12 * 4.096)
    with pytest.raises(ConfigError, match="tokens of a step"):
        steady(log)


def test_bridge_tells_tflops_on_lines_of_their_own(tmp_path):
    """Times of the numbered lines; FLOPs of the others: 2 s x 300 TFLOP/s."""
    lines = []
    for n in range(1, 11):
        lines += ["job/0 Step Time : 2.00s GPU utilization: 300.0MODEL_TFLOP/s/GPU", iteration(n, 2001.0)]
    found = steady(log_of(tmp_path, lines))
    assert (found.step_s, found.tflops, found.flops_per_device) == pytest.approx((2.001, 300.0, 600e12))
    alone = steady(log_of(tmp_path, lines[::2], "alone.log"))
    assert (alone.step_s, alone.used) == (pytest.approx(2.0), 8)


def test_quantiles_and_median_interval():
    """Order statistics for n = 10: x_2 to x_9 (97.9 %); for n = 20: x_6 to x_15 (tables of the sign test)."""
    assert quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert median_interval([float(x) for x in range(1, 6)]) == (None, None)
    assert median_interval([float(x) for x in range(1, 11)]) == (2.0, 9.0)
    assert median_interval([float(x) for x in range(1, 21)]) == (6.0, 15.0)
    low, high = median_interval([float(x) for x in range(1, 401)])
    assert (low, high) == (180.0, 221.0)  # 200 -+ 1.96 * 10, outwards


# --- several files, restarts ---


def test_node_files_and_restarts_are_joined(tmp_path):
    """The first run logs 1 to 60, its node's copy says the same; the second begins again at 51 with a slow iteration."""
    first = [*head(), *(iteration(n, 1000.0) for n in range(1, 61))]
    second = [*head(), iteration(51, 5000.0), *(iteration(n, 1000.0) for n in range(52, 101))]
    files = [write(tmp_path / name, lines) for name, lines in (("a", first), ("copy", first[-60:]), ("b", second))]
    for order in (files, files[::-1]):
        found = steady(read_log(order))
        assert found.logged == 100
        assert found.restarts == [51]
        assert found.left_out == {WARM: 10, RESTART: 2}
        assert found.step_s == pytest.approx(1.0)
    appended = steady(log_of(tmp_path, [*first, *second], "both"))
    assert (appended.logged, appended.restarts, appended.step_s) == (100, [51], pytest.approx(1.0))


def test_a_restart_without_overlap(tmp_path):
    lines = [
        *head(),
        *(iteration(n, 1000.0) for n in range(1, 51)),
        *head(),
        *(iteration(n, 1000.0) for n in range(51, 101)),
    ]
    assert steady(log_of(tmp_path, lines)).restarts == [51]


def test_gzip_plain_and_cut(tmp_path):
    raw = MEGATRON.read_bytes()
    whole, cut = tmp_path / "run.log.gz", tmp_path / "cut.gz"
    whole.write_bytes(gzip.compress(raw))
    cut.write_bytes(gzip.compress(raw * 20, compresslevel=0)[:45_000])
    assert steady(read_log([str(whole)])) == steady(read_log([str(MEGATRON)]))
    log = read_log([str(cut)])
    assert "cut" in log.notes[0]
    assert len(log.series)


def test_a_log_cut_in_an_iteration_counts_the_whole_ones(tmp_path):
    text = "\n".join([*head(), *(iteration(n, 1000.0) for n in range(1, 31))])
    (tmp_path / "cut.log").write_text(text[:-250])
    assert steady(read_log([str(tmp_path / "cut.log")])).logged == 29


def test_ansi_progress_bars_and_prefixes(tmp_path):
    """The same iterations under colors, srun's ranks, time stamps, and after a progress bar on the same line."""
    plain = log_of(tmp_path, [iteration(n, 1000.0 + n) for n in range(1, 21)])
    dressed = [
        f"7: 2025-11-20T14:55:23+08:00 50%|##### |\r\x1b[32m[default7]:{iteration(n, 1000.0 + n)}\x1b[0m"
        for n in range(1, 21)
    ]
    assert steady(log_of(tmp_path, dressed, "dressed")) == steady(plain)


# --- ranks in any order ---


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_how_ranks_interleave_does_not_matter(tmp_path_factory, seed):
    """Each rank's own lines stay in order; whose come first is up to chance."""
    rng = random.Random(seed)
    ranks = [
        [iteration(n, 1000.0 + 7 * n % 50) for n in range(1, 41)],
        *([memory(rank, 1000.0 + rank + after, 1500.0 + rank + after, after) for after in (1, 2)] for rank in range(4)),
        ["saving checkpoint at iteration      20 to /ckpt", " validation loss at iteration 30 | lm loss value: 1.0"],
        ["job/0 Step Time : 1.00s GPU utilization: 300.0MODEL_TFLOP/s/GPU"] * 5,
    ]
    waiting = [list(lines) for lines in ranks]
    mixed = []
    while any(waiting):
        mixed.append(rng.choice([lines for lines in waiting if lines]).pop(0))
    folder = tmp_path_factory.mktemp("mixed")
    log, ordered = log_of(folder, mixed), log_of(folder, [line for lines in ranks for line in lines], "ordered")
    assert steady(log) == steady(ordered)
    assert (log.allocated, log.reserved) == (ordered.allocated, ordered.reserved)


# --- bounded memory ---


def test_a_large_log_is_read_in_bounded_memory(tmp_path):
    """9 MB of iterations, and a line of 4 MB, under 10 MB traced; the reader holds arrays and no lines."""
    path = tmp_path / "large.log"
    with path.open("w") as file:
        file.write("\n".join(head()) + "\n" + "x" * 4_000_000 + "\n")
        for n in range(1, 28_001):
            file.write(iteration(n, 1000.0 + n % 7, total=28_000) + "\n")
    assert path.stat().st_size > 12e6
    tracemalloc.start()
    try:
        log = read_log([str(path)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6, peak
    assert steady(log).logged == 28_000


def test_a_series_beyond_its_limit_is_thinned_evenly():
    """Of 1 to 1,000 in at most 100 places, each twice: multiples of a power of two are left, at their shorter time."""
    series = LoggedSteps(limit=100)
    for n in range(1, 1001):
        for slower in (1.0, 0.0):
            series.add(Iteration("Megatron-LM", n, n + slower), n)
    lines = series.lines()
    assert len(series) <= 100
    assert series.stride in {16, 32, 64}
    assert [line.number for line in lines] == list(range(series.stride, 1001, series.stride))
    assert all(line.step_s == line.number for line in lines)
    assert series.interval == 1


def test_progress_is_told(tmp_path):
    told = []
    read_log([str(MEGATRON)], progress=lambda name, share: told.append((name, share)))
    assert told[-1] == (str(MEGATRON), 1.0)


# --- no logs ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no iteration is logged"),
        (b"hello\nworld\n", "no iteration is logged"),
        (bytes(range(256)) * 100, "no iteration is logged"),
        ("\n".join(dump()).encode(), "no iteration is logged"),
        (b"\x1f\x8b" + b"broken" * 10, "damaged gzip"),
    ],
    ids=["empty", "text", "binary", "dump alone", "gzip"],
)
def test_what_is_no_log(tmp_path, content, message):
    path = tmp_path / "x.log"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_log([str(path)])
    assert len(caught.value.problems) == 1
    assert str(path) in caught.value.problems[0]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_log([str(tmp_path / "none.log")])
    with pytest.raises(ConfigError, match="is a directory"):
        read_log([str(tmp_path)])
    with pytest.raises(ConfigError, match="given more than once"):
        read_log([str(MEGATRON), str(MEGATRON)])
