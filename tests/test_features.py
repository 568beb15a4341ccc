"""Where a measured run differs from a job: what models have that is no distance."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime import Job, estimate
from steptime.answer.evidence import differences
from steptime.answer.features import FEATURES, features_of, of_run
from steptime.answer.measured import measured, place_of
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config, to_job

CONFIGS = Path(__file__).parents[1] / "configs"


def test_a_latent_model_names_its_attention_and_experts_beside_a_run_of_another():
    """DeepSeek-V3 (latent attention, 256 experts and a shared one) beside Qwen3-235B (grouped heads, 128 experts, none)."""
    found = estimate(Job.load(CONFIGS / "deepseek_v3.yaml"))
    differs = {run["id"]: run["differs"] for run in found.time.basis.nearest}
    assert {"attention grouped heads", "experts 128", "shared experts 0"} <= set(differs["xtuner-001"])
    same = next(run for run in measured("step").runs if run.id == "MBRIDGE-181")  # DeepSeek-V3 too
    assert not any(text.startswith(tuple(FEATURES)) for text in differences(place_of(found.job), same))


def test_a_dense_model_names_no_experts():
    """The kind of layers says it: "layers moe"."""
    place = place_of(Job.load(CONFIGS / "llama3_70b.yaml"))
    assert place.features == ("grouped heads", None, None, place.features[-1])
    run = next(run for run in measured("step").runs if run.id == "xtuner-001")
    found = differences(place, run)
    assert "layers moe" in found
    assert not any("experts" in text for text in found)


def test_every_run_of_the_step_has_its_features():
    """As its row gives them, of every 40th row."""
    ids = [run.id for run in measured("step").runs]
    assert [name for name in ids if len(of_run(name)) != len(FEATURES)] == []
    rows = {row.id: row for row in shipped()}
    for name in sorted(ids)[::40]:
        assert of_run(name) == features_of(to_job(to_config(rows[name])))


@pytest.mark.parametrize("name", ["", "no such run"])
def test_an_unknown_run_has_no_features(name):
    assert of_run(name) == ()
