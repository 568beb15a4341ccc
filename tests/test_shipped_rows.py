"""The shipped measured runs: every one judged or skipped with its reason, on one side, near where it must be."""

import math
import re
from pathlib import Path

import accuracy
import pytest
from own_rows import SHIPPED

from steptime.report.validation_tables import tables
from steptime.validation import judgement, measurements

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def judged():
    return judgement.judge_shipped()


def test_nothing_is_dropped(judged):
    found = accuracy.summary()
    assert found["rows"] == len(judged) == len(SHIPPED) == 6038
    assert found["judged"] + found["skipped"] == found["rows"]
    assert sum(found["skipped_by_reason"].values()) == found["skipped"]
    timed = [j for j in judged if j.step_error is not None]
    assert found["step_time"]["rows"] + sum(f["rows"] for f in found["apart"].values()) == len(timed)
    for group in found["by"].values():
        assert sum(figures["rows"] for figures in group.values()) == found["step_time"]["rows"]


def test_every_row_has_an_error_or_a_reason(judged):
    for j in judged:
        assert (j.skipped is None) == (j.config is not None)
        errors = [error for error in (j.step_error, j.memory_error) if error is not None]
        assert bool(errors) or j.ran_out or j.skipped
        assert all(math.isfinite(error) for error in errors)


def test_every_row_names_its_source_and_side():
    for row in SHIPPED.values():
        assert row.text("source")
        assert row.text("split") in {"fit", "test"}
        assert row.text("quality") in {"A", "B", "C"}


def test_a_cell_is_on_one_side(judged):
    sides = {}
    for j in judged:
        if j.step_error is not None and j.excluded is None:
            sides.setdefault(j.cell, set()).add(j.row.text("split"))
    assert all(len(side) == 1 for side in sides.values())


def test_rows_in_doubt_and_tiny_models_stand_apart(judged):
    found = {j.row.id: j.excluded for j in judged if j.skipped is None}
    assert found["MLM-CI-008"] == "doubtful inputs: functional test, not a tuned run"
    assert {why for name, why in found.items() if name.startswith("vtrain-single")} == {
        "vtrain-single: tiny models, bound by kernel launches"
    }
    assert found["KOR22-001"] is None
    assert {j.excluded for j in judged if j.row.text("quality") == "C" and j.skipped is None} & {None} == set()


def test_korthikanti_stays_near(judged):
    errors = [j.step_error for j in judged if re.fullmatch(r"KOR22-00[1-8]", j.row.id)]
    assert len(errors) == 8
    assert sum(map(abs, errors)) / 8 < 0.04


def test_the_report_fits_the_page():
    from steptime.report.table import WIDTH, Style, layout

    found = tables(accuracy.summary())
    assert found[0].title == "step time: NVIDIA's frameworks"
    assert all(len(line) <= WIDTH for section in found for line in layout(section, Style()))


def test_the_page_counts_what_the_collection_holds():
    page = (ROOT / "steptime/data/measurements/README.md").read_text(encoding="utf-8")
    for name in measurements.FILES:
        count = sum(row.file == name for row in SHIPPED.values())
        assert re.search(rf"\| {name}\.csv\.gz \| {count:,} \|", page), name
    accuracy_page = (ROOT / "docs/validation.md").read_text(encoding="utf-8")
    assert f"{len(SHIPPED):,} rows from papers" in " ".join(accuracy_page.split())


def test_accelerate_upcasts_weights_under_fsdp(judged):
    """Trainer's bf16=True with weights loaded in bf16 (accelerate accelerator.py, prepare_model): FSDP's shards become fp32.

    Weights, gradients, both moments and AdamW's temporaries are then 20 bytes for each of Mistral's 7,241,732,096 parameters,
    33.72 GiB on each of 4 GPUs; on one GPU nothing is upcast: 10 bytes, 67.44 GiB. Two workspaces of cuBLAS take 16 MiB.
    """
    parameters, workspaces = 7_241_732_096, 2 * 8.125 * 2**20
    found = {j.row.id: j for j in judged if j.row.group == "fms-accel"}
    for name, bytes_each, gpus in (("n001", 10, 1), ("n004", 10, 2), ("n021", 10, 1), ("n027", 20, 4), ("n030", 20, 4)):
        row = found[f"fms-accel-{name}"]
        by_hand = (parameters * bytes_each / gpus + workspaces) / 2**30
        assert (row.row.whole("n_gpus"), row.measured_bytes / 2**30) == (gpus, pytest.approx(by_hand, abs=0.01))
        assert row.predicted_bytes / 2**30 == pytest.approx(by_hand, abs=0.01)
