"""Predicted beside measured: signs, statistics, summaries, and layouts over the ranks there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime import estimate
from steptime.base.config import ConfigError
from steptime.bench import comparison, timings
from steptime.bench.comparison import PredictionRow, summarize
from steptime.bench.conclude import crosses, of_block
from steptime.bench.device import BenchDevice
from steptime.bench.runs.block import BlockRow
from steptime.bench.runs.clock import Timing
from steptime.bench.spread import LAYOUTS, named, spread

CONFIG = Path(__file__).parents[2] / "configs" / "bench" / "cpu_tiny.yaml"


def test_an_error_is_predicted_over_measured_less_one():
    assert PredictionRow("step", "single", "s", 1.1, 1.0).error == pytest.approx(0.1)
    assert PredictionRow("exact", "calls", "count", 0.0, 0.0).error == 0.0
    assert PredictionRow("exact", "calls", "count", 1.0, 0.0).error == float("inf")


def test_summaries_are_by_kind_and_name_the_worst():
    found = [
        PredictionRow("gemm", "a", "s", 1.1, 1.0),
        PredictionRow("gemm", "b", "s", 0.7, 1.0),
        PredictionRow("step", "c", "s", 1.0, 1.0),
    ]
    gemm, step = summarize(found)
    assert (gemm.what, gemm.n, gemm.worst_name) == ("gemm", 2, "b")
    assert (gemm.median, gemm.mean, gemm.worst) == pytest.approx((0.2, 0.2, 0.3))
    assert gemm.bias == pytest.approx(-0.1)
    assert step.worst == 0.0


def test_a_cpu_is_judged_by_its_fastest_call_and_a_gpu_by_its_median(job):
    found = estimate(job)
    row = next(g for g in found.gemms if g.pass_ == "forward")
    timing = Timing(1.0, 2.0, 3.0, 5)
    measured = [
        timings.GemmTiming(row.name, "forward", "fp32", 1, 1, 1, timing),
        timings.GemmTiming("other", "forward", "fp32", 1, 1, 1, timing),
    ]
    (least,), (middle,) = (comparison.gemms(found, measured, "fp32", s) for s in ("min_s", "median_s"))
    assert (least.measured, middle.measured) == (1.0, 2.0)
    assert least.predicted == row.time_s
    assert least.spread == 1.0
    assert comparison.gemms(found, measured, "bf16", "min_s") == []


def test_only_the_config_s_own_attention_is_compared(job):
    found = estimate(job)
    one = timings.AttentionTiming(
        "default", "forward", "fp32", 2, 512, 8, 4, 64, causal=True, timing=Timing(1.0, 1.0, 1.0, 5)
    )
    others = [
        one._replace(seqlen=256),
        one._replace(backend="math"),
        one._replace(causal=False),
        one._replace(dtype="bf16"),
    ]
    (row,) = comparison.attention(found, [one, *others], "fp32", "min_s")
    assert row.predicted > 0
    assert row.name == "forward"


# --- over the ranks ---


def test_the_data_parallel_degree_follows_the_ranks(job):
    same, notes = spread(job, 1)
    assert same is job
    assert notes == []
    four, notes = spread(job, 4)
    assert (four.parallelism.dp, four.data.gbs, four.microbatches) == (4, 8, 1)
    assert "4 on 4 processes" in notes[0]


def test_a_layout_that_does_not_divide_the_ranks_is_refused(job):
    wide = job.replace(**{"parallelism.tp": 4})
    with pytest.raises(ConfigError, match="tp 4 x pp 1 x cp 1 does not divide 2 processes; start a multiple of 4"):
        spread(wide, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_named_layouts_use_all_ranks(job, name):
    found = named(job, name, 2)
    assert found.parallelism.devices == 2
    assert found.data.seqlen == job.data.seqlen
    assert found.data.gbs // found.parallelism.dp >= job.data.gbs
    if name == "pp":
        assert found.microbatches >= 2


def test_an_unknown_layout_is_one_line(job):
    with pytest.raises(ConfigError, match=r"--layouts: unknown layout \(got 'dpp'\); known: ddp, fsdp2, tp, pp"):
        named(job, "dpp", 2)


def test_which_axes_leave_the_node(job):
    wide = job.replace(**{"parallelism.tp": 2, "parallelism.dp": 2, "parallelism.pp": 2, "data.gbs": 8})
    assert [crosses(wide, axis, 4) for axis in ("tp", "dp", "pp")] == [False, False, True]
    assert [crosses(wide, axis, 2) for axis in ("tp", "dp", "pp")] == [False, True, True]


def test_a_block_is_predicted_with_the_kernels_of_its_device(job):
    """RMSNorm is one kernel on a GPU and several on a CPU: three accesses of 4 B against seventeen, say, backward."""
    timing = Timing(1.0, 1.0, 1.0, 5)
    block = BlockRow("none", "fp32", 2, 512, timing, timing, 0)
    cpu = BenchDevice("cpu", "a", 1e9, 1e9, 2)
    ours, other = (of_block(job, block, cpu._replace(kind=kind)) for kind in ("cpu", "cuda"))
    assert all(fused.predicted < composite.predicted for composite, fused in zip(ours, other, strict=True))
