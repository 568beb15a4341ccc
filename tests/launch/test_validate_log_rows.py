"""`3dtrn validate --log --csv`: a measured job as a row that reads straight back."""

from __future__ import annotations

import csv
import json

import pytest
from launch_logs import MEGATRON, head, iteration, memory, run, write

from steptime.validation import judgement as judging
from steptime.validation.measurements import MeasuredRow, read

MIB = 2.0**20
H100 = "--set", "hardware.node_type=dgx-h100"


# --- CSV ---


def test_the_row_reads_straight_back(capsys, tmp_path):
    """The same prediction, digit by digit, though columns alone could not say what is set here; measured figures as logged."""
    out = tmp_path / "runs.csv"
    extra = "--set", "performance.main_grad_dtype=bf16", "--set", "model.qk_norm=true", "--save-csv", out
    code, printed, err = run(capsys, "--log", MEGATRON, *H100, *extra, "--json")
    first = json.loads(printed)
    assert (code, err) == (0, f"{out}: row megatron-llama3-8b\n")
    rows = json.loads(run(capsys, "--measurements", out, "--json")[1])["rows"]
    assert [row["id"] for row in rows] == ["megatron-llama3-8b"]
    assert rows[0]["predicted_step_s"] == first["predicted"]["step_s"]
    assert rows[0]["measured_step_s"] == first["measured"]["step_s"]
    assert rows[0]["step_time_error"] == first["step_time_error"]
    assert rows[0]["measured_memory_gib"] == 41250.5 / 1024
    assert rows[0]["predicted_memory_gib"] == max(s["allocated_bytes"] for s in first["predicted"]["stages"]) / 2**30
    assert (rows[0]["memory_metric"], rows[0]["skipped"], rows[0]["assumed"]) == ("allocated", None, [])


def test_the_columns_alone_come_near(capsys, tmp_path):
    """Without the plan in `config` the columns are a row like any other's; here they say all that matters."""
    out = tmp_path / "runs.csv"
    first = json.loads(run(capsys, "--log", MEGATRON, *H100, "--save-csv", out, "--json")[1])
    row = read(str(out))[0]
    judged = judging.judge(MeasuredRow({name: cell for name, cell in row.cells.items() if name != "config"}, "", 2))
    assert judged.skipped is None
    assert judged.predicted_step_s == pytest.approx(first["predicted"]["step_s"], rel=0.02)


def test_rows_are_appended_under_ids_of_their_own(capsys, tmp_path):
    out = tmp_path / "runs.csv"
    for _ in range(3):
        assert run(capsys, "--log", MEGATRON, *H100, "--save-csv", out)[0] == 0
        out.write_text(out.read_text().rstrip("\n"))  # an editor that drops the last line end
    assert [row.id for row in read(str(out))] == ["megatron-llama3-8b", "megatron-llama3-8b-2", "megatron-llama3-8b-3"]


def test_a_peak_of_some_stages_is_no_peak_of_the_job(tmp_path, capsys):
    lines = [*head(), *(iteration(n, 14520.0) for n in range(1, 31)), memory(4, 30000.0, 33000.0)]
    out = tmp_path / "runs.csv"
    assert run(capsys, "--log", write(tmp_path / "x.log", lines), *H100, "--save-csv", out)[0] == 0
    assert read(str(out))[0].text("peak_memory_gb") == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [("id,gpu\n", "has no column n_gpus"), (b"\xff\xfe\x00", "not UTF-8")],
    ids=["other columns", "not text"],
)
def test_a_file_that_cannot_take_the_row(capsys, tmp_path, content, message):
    out = tmp_path / "runs.csv"
    out.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, printed, err = run(capsys, "--log", MEGATRON, *H100, "--save-csv", out)
    assert (code, printed) == (2, "")
    assert err.startswith(f"{out}: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "expected a plan as JSON"),
        ("{}", "expected a plan as JSON"),
        ('{"hardware": {"node_type": "nope"}}', "config.hardware"),
    ],
)
def test_a_bad_plan_in_a_row_is_a_reason(capsys, tmp_path, config, message):
    out = tmp_path / "runs.csv"
    assert run(capsys, "--log", MEGATRON, *H100, "--save-csv", out)[0] == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerow(rows[0] | {"config": config})
    code, _, err = run(capsys, "--measurements", out)
    assert code == 2
    assert message in err
