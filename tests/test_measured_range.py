"""The range that was measured, of one software family and one kind of layers, and the words where a job is outside of it."""

from __future__ import annotations

from steptime.answer.distance import distances
from steptime.answer.evidence import projected
from steptime.answer.interval import beyond, interval_at
from steptime.answer.measured import AXES, FEW_RUNS, FitRun, Measured, RunKind, RunPlace, measured

DENSE = RunKind("h100-sxm5-80", "bf16", "torchtitan", "fsdp2", "none")
EXPERTS = DENSE._replace(layers="moe")
OTHER = DENSE._replace(software="nemo", family="megatron-core")
PP = AXES.index("pp")


def place(kind, pp):
    at = [8192.0, 80.0, 4096.0, 1024.0, 8.0, 1.0, 1.0, 1.0]
    at[PP] = pp
    return RunPlace(kind, tuple(at))


def words(where, runs):
    found = Measured(runs, {"machine_step": 1.0})
    away = distances(where, found)
    return [axis.text for axis in beyond(where, projected(where, found, away), found, away) if axis.text]


def test_a_pipeline_of_experts_is_none_of_a_dense_model():
    """Ten dense runs without a pipeline and ten with experts, one of them on 4 stages: each kind of layers has its own range.

    With nine dense runs, too few for a range, theirs is that of the family; another family's pipelines are in neither.
    """
    assert FEW_RUNS == 10
    places = [place(DENSE, 1.0)] * 10 + [place(EXPERTS, 1.0)] * 9 + [place(EXPERTS, 4.0), place(OTHER, 8.0)]
    runs = [FitRun(f"r{i}", i, i, "step", where, 1.0, 0.0) for i, where in enumerate(places)]
    assert words(place(DENSE, 4.0), runs) == ["pp 4, measured up to 1"]
    assert words(place(EXPERTS, 4.0), runs) == []
    assert words(place(EXPERTS, 8.0), runs) == ["pp 8, measured up to 4"]
    assert words(place(DENSE, 4.0), runs[1:]) == []
    assert words(place(DENSE, 8.0), runs[1:]) == ["pp 8, measured up to 4"]


def test_dense_models_in_pipelines_of_fsdp2_are_extrapolated():
    """No measured dense run of FSDP2's trainers, JAX's among them, has a pipeline; one with experts has four stages."""
    runs = [run for run in measured("step").runs if run.place.kind.family == "fsdp2"]
    assert {(run.place.kind.layers, run.place.at[PP]) for run in runs if run.place.at[PP] > 1.0} == {("moe", 4.0)}
    of_titan = [run.place for run in runs if run.place.kind.profile == "torchtitan"]
    without = next(where for where in of_titan if where.kind.layers == "dense")
    piped = without._replace(at=(*without.at[:PP], 4.0, *without.at[PP + 1 :]))
    assert interval_at("step", without).evidence.word == "measured nearby"
    evidence = interval_at("step", piped).evidence
    assert (evidence.word, evidence.beyond) == ("extrapolated", ["pp 4, measured up to 1"])
