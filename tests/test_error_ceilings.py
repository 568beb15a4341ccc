"""How far off the estimate may be on measured runs that no constant was fitted to: a change that errs by more fails here.

`python benchmarks/accuracy.py` prints the figures of now; a model that errs by less may lower the ceilings.
"""

from __future__ import annotations

import pytest

from steptime.validation.job_memory import gpu_memory
from steptime.validation.judgement import judge_shipped
from steptime.validation.slices import (
    experts_of_nvidia,
    experts_of_others,
    headline,
    leads,
    memory_errors,
    native,
    others,
    step_errors,
    with_experts,
)
from steptime.validation.stats import stats


@pytest.fixture(scope="module")
def of_test():
    """Test rows that count, their release known."""
    return [j for j in headline(judge_shipped()) if j.row.text("split") == "test"]


@pytest.mark.parametrize(
    ("group", "rows", "ceilings"),
    [
        (leads, 171, {"median": 2.9, "mean": 4.1, "p90": 9.2}),  # NVIDIA's frameworks; of now 2.8, 4.0 and 9.1
        (others, 335, {"median": 3.6, "mean": 5.5, "p90": 12.6}),  # other trainers; of now 3.5, 5.4 and 12.5
        # the PyTorch-native stack; of now 3.7, 8.5 and 22.9, its targets are 5, 8 and 18; packed documents stand apart
        (native, 103, {"median": 6.0, "mean": 9.5, "p90": 25.0}),
        # mixtures of experts of NVIDIA's frameworks; of now 6.5, 9.0 and 21.5 (the same cell in another release: 1.7, 7.3, 26.6)
        (experts_of_nvidia, 78, {"median": 7.0, "mean": 12.0, "p90": 30.0}),
        # those of other trainers; of now 6.5, 11.7 and 28.3
        (experts_of_others, 33, {"median": 10.0, "mean": 18.0, "p90": 40.0}),
    ],
    ids=["NVIDIA's frameworks", "other trainers", "PyTorch-native stack", "mixtures of experts", "experts of others"],
)
def test_step_time(of_test, group, rows, ceilings):
    """Sizes of the errors of test rows, in per cent; one vote per cell. No row may leave."""
    found = stats(step_errors(j for j in of_test if group(j)))
    assert found is not None
    assert found.rows >= rows
    too_far = {name: 100 * getattr(found, name) for name in ceilings if 100 * getattr(found, name) > ceilings[name]}
    assert too_far == {}


def test_peak_memory():
    """Megatron-LM on 8 x B200: 14 dense runs within 0.15 % in the mean, of now 0.09; 4 of DeepSeek within 0.6 %, of now 0.46."""
    runs = [j for j in judge_shipped() if j.row.group == "simumax"]
    dense = stats(memory_errors(j for j in runs if not with_experts(j)))
    experts = stats(memory_errors(j for j in runs if with_experts(j)))
    assert dense is not None
    assert experts is not None
    assert (dense.rows, experts.rows) == (14, 4)
    assert (100 * dense.mean <= 0.15, 100 * experts.mean <= 0.6) == (True, True)


@pytest.mark.parametrize(
    ("kind", "rows", "persisting", "peak"),
    [
        # of now 0.14 and 1.1; 0.12, 0.33 and 0.98
        ("dense", 438, {"median": 0.2, "worst": 1.5}, {"median": 0.2, "mean": 0.45, "p90": 1.2}),
        # of now 0.06 and 0.09; 0.8, 0.9 and 1.6
        ("mixture of experts", 230, {"median": 0.1, "mean": 0.15}, {"median": 0.9, "mean": 1.2, "p90": 2.5}),
        # of now 0.001 and 0.004; 0.05, 0.05 and 0.07
        ("hybrid", 13, {"median": 0.01, "mean": 0.02}, {"median": 0.1, "mean": 0.1, "p90": 0.1}),
        # of now 0.3 and 0.5; 0.2, 0.2 and 0.3
        ("latent attention", 18, {"median": 0.4, "mean": 0.6}, {"median": 0.3, "mean": 0.3, "p90": 0.4}),
    ],
)
def test_memory_of_gpu_jobs(kind, rows, persisting, peak):
    """Megatron-LM's own tests, per cent of torch's bytes; no constant is fitted, no row may leave."""
    found = gpu_memory(judge_shipped(), 0)["kinds"][kind]["test"]
    assert found["peak"]["rows"] >= rows
    for name, ceilings in (("persisting", persisting), ("peak", peak)):
        assert {key: 100 * found[name][key] for key, most in ceilings.items() if 100 * found[name][key] > most} == {}
