"""`3dtrn explain` of parts of a step and of a stage's memory: numbers from their formula by hand, sums as the step has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.report.explain import explain, names
from steptime.report.explain_parts import PARTS
from steptime.report.kernel_table import op_times

PLAN = Path(__file__).parents[1] / "configs" / "llama3_70b.yaml"


@pytest.fixture(scope="module")
def found():
    return estimate(Job.load(PLAN))


def words(found, name):
    (section,) = explain(found, name)
    return section.title, {fact.label: " ".join(fact.lines) for fact in section.facts}


def test_every_part_and_stage_has_a_name(found):
    assert {*PARTS, "stage 0", "stage 3"} <= set(names(found))


def test_launch_gaps_by_hand(found):
    """20 layers on each of 4 stages, 64 micro-batches, 0.5 ms: 0.64 s."""
    title, facts = words(found, "launch")
    assert facts["gaps"] == "layer_gap_s 500.0 us x 20 layers x 64 micro-batches = 640.0 ms"
    assert title.startswith("launch: 640.0 ms")


def test_stragglers_by_hand(found):
    """min(32 replicas, 128 nodes) = 32, a tree of depth 5."""
    facts = words(found, "stragglers")[1]
    assert facts["replicas"] == "min(dp x cp, nodes) = min(32, 128) = 32"
    assert " x 5 x " in facts["numbers"]


def test_optimizer_by_hand(found):
    """Adam: gradient 4, master 2 x 4, moments 2 x 8, parameter 2; clipping reads the gradient twice and writes it: 12."""
    assert words(found, "optimizer")[1]["bytes"].startswith("adamw 30 + clipping 12 bytes")


def test_muon_explains_its_iterations(found):
    """The optimizer takes its update, the iterations, and what zeroing gradients adds."""
    muon = estimate(found.job.replace(**{"performance.optimizer": "dist_muon"}))
    facts = words(muon, "optimizer")[1]
    iterated = float(facts["orthogonalize"].split("matrix: ")[1].split(" ms")[0]) / 1e3
    updated = float(facts["update"].split("= ")[1].split(" ms")[0]) / 1e3
    assert 0 < muon.timing.optimizer_s - iterated - updated < 0.01 * found.step_s


def test_the_kernels_listed_sum_to_their_part(found):
    for name in ("attention", "memory_bound"):
        total = sum(row.step_s for row in op_times(found) if row.part == name)
        assert total == pytest.approx(found.time.parts_s[name])
        assert f"{100 * total / found.step_s:.1f} %" in words(found, name)[0]


def test_a_stage_has_its_states_by_the_byte(found):
    """2.27e9 parameters at 2 bytes are 4.23 GiB, at 4 twice that, and 12 bytes over 32 ranks 0.79 GiB."""
    facts = words(found, "stage 0")[1]
    for label, size in (("parameters", 4.231), ("gradients", 8.462), ("optimizer", 0.793)):
        assert facts[label].startswith(f"{size} GiB")
