"""Reading training logs: line formats, joining, steady state, bounded memory, and what is no log."""

from __future__ import annotations

import gzip
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_logs import MEGATRON, dump, head, iteration, memory, write

from steptime.base.config import ConfigError
from steptime.launch.logs.entries import Iteration, Vocabulary
from steptime.launch.logs.job_log import read_log
from steptime.launch.logs.logged_steps import LoggedSteps
from steptime.launch.logs.steady import PAUSE, RAMP, RESTART, WARM, median_interval, quantile, steady

GIB, MIB = 2.0**30, 2.0**20


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
    """2.3 MB of iterations, and a line of 1 MB, under 2.5 MB traced; the reader holds arrays and no lines."""
    path = tmp_path / "large.log"
    with path.open("w") as file:
        file.write("\n".join(head()) + "\n" + "x" * 1_000_000 + "\n")
        for n in range(1, 7_001):
            file.write(iteration(n, 1000.0 + n % 7, total=7_000) + "\n")
    assert path.stat().st_size > 3e6
    tracemalloc.start()
    try:
        log = read_log([str(path)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5e6, peak
    assert steady(log).logged == 7_000


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
        (b"", "no iterations logged"),
        (b"hello\nworld\n", "no iterations logged"),
        (bytes(range(256)) * 100, r"x\.log: not a text file \(NUL byte\)"),
        ("\n".join(dump()).encode(), "no iterations logged"),
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
