"""`3dtrn validate`: what was measured beside the estimate, arithmetic of the summary, files, exit codes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from own_rows import BASE, own, write

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.base.document import read_source
from steptime.validation import error_summary, judgement, measurements, row_plan, stats
from steptime.validation.measured_figures import memory_metric
from steptime.validation.measurements import REQUIRED, MeasuredRow
from steptime.validation.select import select

ROOT = Path(__file__).parents[1]


# --- measured and predicted ------------------------------------------------------------------------------------------------


def test_tokens_per_second_give_the_step():
    """128 x 4096 tokens at 1,000 tokens/s on each of 64 devices: 8.192 s."""
    assert judgement.measured_step_s(own(step_time_s="", tokens_per_s_per_gpu=1000)) == 128 * 4096 / 64_000
    assert judgement.measured_step_s(own(tokens_per_s_per_gpu=1000)) == 2.5


@pytest.mark.parametrize(
    ("metric", "name", "unit"),
    [
        ("", "allocated", 1e9),
        ("GiB max_allocated, max over ranks (reserved 70.88 GiB)", "allocated", 2.0**30),
        ("GB as printed (torchtitan max_reserved)", "reserved", 1e9),
        ("GB nvidia-smi, first/last stage", "nvidia-smi", 1e9),
        ("GB as printed (max reserved/allocated not stated)", "unstated", 1e9),
        ("GB", "unstated", 1e9),
    ],
)
def test_memory_metrics(metric, name, unit):
    assert memory_metric(own(mem_metric=metric)) == (name, unit)


def test_mib_over_1024_are_gib():
    row = MeasuredRow(BASE | {"peak_memory_gb": "40", "mem_metric": "nvidia-smi memory.used, MiB/1024"}, "native", 2)
    assert memory_metric(row) == ("nvidia-smi", 2.0**30)


@pytest.mark.parametrize("metric", ["resreved", "MB", "peak", "MiB allocated", "bytes reserved"])
def test_own_row_with_an_unreadable_memory_metric_is_not_judged(metric):
    judged = judgement.judge(own(peak_memory_gb=40, mem_metric=metric))
    said = f"(got {metric.lower()!r})"
    assert judged.skipped == f"mem_metric: expected allocated, reserved or nvidia-smi, and GB or GiB {said}"
    published = judgement.judge(MeasuredRow(BASE | {"peak_memory_gb": "40", "mem_metric": metric}, "other", 2))
    assert published.skipped is None


def test_memory_is_compared_with_what_was_read():
    found = estimate(row_plan.to_job(row_plan.to_config(own()))).memory
    cells = {"step_time_s": "", "peak_memory_gb": 40}

    def predicted(**more):
        return judgement.judge(own(**cells, **more)).predicted_bytes

    assert predicted() == found.peak_allocated_bytes
    assert predicted(mem_metric="GB max_reserved") == found.peak_reserved_bytes
    assert predicted(mem_metric="nvidia-smi") == found.peak_reserved_bytes + sum(found.overhead_bytes)
    logged = judgement.judge(MeasuredRow(BASE | {"peak_memory_gb": "40"}, "nvidia", 2))
    assert logged.predicted_bytes == found.stages[-1].allocated_bytes < found.peak_allocated_bytes


# --- arithmetic ------------------------------------------------------------------------------------------------------------


def test_stats_by_hand():
    """Four cells of one row: sizes .1 .2 .3 .4, median .25, mean .25; 90 % of four votes is passed by the fourth."""
    found = stats.stats([(("a",), 0.1), (("b",), -0.2), (("c",), 0.3), (("d",), -0.4)])
    assert found[:2] == (4, 4)
    assert found[2:] == pytest.approx((0.25, 0.25, 0.4, -0.05))


def test_rows_of_a_cell_share_one_vote():
    """Ten rows at .1 in one cell and one at .5 in another: each cell has one vote, so the mean is .3 and the median between."""
    found = stats.stats([*((("a",), 0.1) for _ in range(10)), (("b",), -0.5)])
    assert found[:2] == (11, 2)
    assert found[2:] == pytest.approx((0.3, 0.3, 0.5, -0.2))


def test_no_rows_no_figures():
    assert stats.stats([]) is None
    assert stats.interval([]) == {}


def test_the_interval_is_fixed_and_holds_the_figures():
    errors = [((str(i),), math.sin(i) / 4) for i in range(60)]
    found, figures = stats.interval(errors), stats.stats(errors)._asdict()
    assert found == stats.interval(list(reversed(errors)))
    assert all(low < figures[name] < high for name, (low, high) in found.items())


def test_one_cell_has_no_spread():
    found = stats.interval([(("a",), 0.1), (("a",), 0.1)])
    assert {tuple(map(round, ends, (9, 9))) for ends in found.values()} == {(0.1, 0.1)}


def test_reasons_are_counted_without_their_numbers():
    a = "parallelism.tp: must divide n_q_heads 24 (got 32); valid: 1, 2"
    b = "parallelism.tp: must divide n_q_heads 40 (got 16); valid: 1, 2"
    assert error_summary.skip_kind(a) == error_summary.skip_kind(b) == "parallelism.tp: must divide n_q_heads N"
    assert error_summary.skip_kind("gpu: unknown accelerator (got 'a; (b)'); x") == "gpu: unknown accelerator"


def test_the_worst_are_named_in_order():
    judged = [judgement.judge(own(id=name, step_time_s=value)) for name, value in (("a", 2), ("b", 90), ("c", 0.01))]
    worst = error_summary.worst_rows(judged, 2)
    assert [j.row.id for j in worst] == ["c", "b"]
    assert all(j.step_error == j.predicted_step_s / j.measured_step_s - 1 for j in judged)


# --- the command -----------------------------------------------------------------------------------------------------------


def test_a_selection_prints_the_summary_first(run_validate):
    code, out, err = run_validate("--source", "KOR22", "--worst", "1")
    assert (code, err) == (0, "")
    assert out.startswith("step time")
    assert "10 measured rows: 10 judged, 0 skipped" in out
    assert out.index("step time") < out.index("by accelerator") < out.index("worst rows")
    assert "a100-sxm4-80" in out


def test_selections(run_validate):
    assert {r.group for r in select(None, "dgxc", None, "all")} == {"DGXC"}
    assert {r.id for r in select(None, "KOR22-00", None, "all")} == {f"KOR22-00{i}" for i in range(1, 10)}
    assert {r.group for r in select(None, "2205.05198", None, "all")} == {"KOR22"}
    assert {r.text("gpu") for r in select(None, None, "gb200", "test")} == {"GB200-NVL72", "GB200-186GB"}
    assert {r.text("split") for r in select(None, "mosaic", None, "fit")} == {"fit"}
    for option in (["--source", "nobody"], ["--gpu", "abacus"], ["--split", "left"]):
        code, out, err = run_validate(*option)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"{option[0]}: no row has {option[1]!r}; ")


def test_json_keeps_the_contract(run_validate):
    code, out, _ = run_validate("--source", "simumax", "--json")
    found = json.loads(out)
    assert code == 0
    assert found.keys() == {"summary", "rows"}
    names = {
        "id", "split", "measured_step_s", "predicted_step_s", "step_time_error", "measured_memory_gib",
        "predicted_memory_gib", "memory_error", "assumed", "skipped",
    }  # fmt: skip
    assert all(names <= row.keys() for row in found["rows"])
    judged = [row for row in found["rows"] if row["skipped"] is None and row["measured_step_s"]]
    for row in judged:
        assert row["step_time_error"] == pytest.approx(row["predicted_step_s"] / row["measured_step_s"] - 1, abs=1e-12)
    first = next(row for row in found["rows"] if row["id"] == "simumax-001")
    assert first["measured_memory_gib"] == 66.55
    assert abs(first["memory_error"]) < 0.1
    assert {"median", "mean", "p90", "bias"} <= found["summary"]["step_time"].keys()


def test_an_own_file(run_validate, tmp_path):
    path = write(tmp_path / "own.csv", {}, {"id": "own-2", "split": "night", "note": "extra, ignored"})
    code, out, err = run_validate("--measurements", path, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["split"] for row in found["rows"]] == ["", "night"]
    assert found["summary"]["judged"] == 2
    assert found["rows"][0]["apart"] is None


def test_a_bad_row_gives_one_line_and_the_rest_is_judged(run_validate, tmp_path):
    bad = (
        {"id": "b", "tp": "x"},
        {"id": "c", "gpu": "Cray-1"},
        {"id": "d", "precision": "int8"},
        {"id": "e", "tp": "3"},
    )
    path = write(tmp_path / "own.csv", {}, *bad)
    code, out, err = run_validate("--measurements", path)
    assert code == 0
    assert [line.removeprefix(f"{path}: ").partition(": ")[0] for line in err.splitlines()] == [
        "line 3, b", "line 4, c", "line 5, d", "line 6, e",
    ]  # fmt: skip
    assert "5 measured rows: 1 judged, 4 skipped" in out


def test_no_row_could_be_judged(run_validate, tmp_path):
    code, out, err = run_validate(
        "--measurements", write(tmp_path / "own.csv", {"precision": "int8"}, {"tp": ""}), "--json"
    )
    assert code == 2
    assert json.loads(out)["summary"]["judged"] == 0
    assert err.count("\n") == 2


@pytest.mark.parametrize("column", REQUIRED)
def test_a_missing_column(run_validate, tmp_path, column):
    path = write(tmp_path / "own.csv", {}, columns=[name for name in BASE if name != column])
    assert run_validate("--measurements", path) == (2, "", f"{path}: column {column}: missing\n")


def test_a_file_without_measurements(run_validate, tmp_path):
    path = write(tmp_path / "own.csv", {}, columns=list(REQUIRED))
    code, _, err = run_validate("--measurements", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "one of step_time_s, tokens_per_s_per_gpu, peak_memory_gb" in err


@pytest.mark.parametrize("text", [b"", b"\n\n", b"id,gpu\n", b"\xff\xfe\x00", b"id\0,gpu\n1,2\n", b'id,gpu\n"1,2\n'])
def test_files_that_are_no_table(run_validate, tmp_path, text):
    path = tmp_path / "bad.csv"
    path.write_bytes(text)
    code, out, err = run_validate("--measurements", path)
    assert (code, out) == (2, "")
    assert all(line.startswith(str(path)) for line in err.splitlines())


def test_no_such_file(run_validate, tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        code, out, err = run_validate("--measurements", path)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_odd_tables_are_read(tmp_path):
    """A byte-order mark, capitals and blanks in the header, CRLF, quotes with commas, empty lines, short and long rows."""
    path = tmp_path / "odd.csv"
    head = ",".join(BASE).replace("id,gpu", "ID ,gpu")
    good = ",".join(BASE.values())
    text = f'\ufeff{head},Note\r\n\r\n{good},"a, b"\r\n{good}\r\n{good},x,surplus\r\n'
    path.write_bytes(text.encode("utf-8"))
    found = measurements.read(str(path))
    assert [(row.line, row.text("note"), row.surplus) for row in found] == [(3, "a, b", 0), (4, "", 0), (5, "x", 1)]
    assert [judgement.judge(row).skipped for row in found[:2]] == [None, None]
    assert judgement.judge(found[2]).skipped.startswith("1 more cells than the header has columns")


def test_a_color_in_a_cell_does_not_reach_the_terminal(run_validate, tmp_path):
    path = tmp_path / "own.csv"
    row = ",".join({**BASE, "id": "a\x1b[31mb"}.values())
    path.write_text(",".join(BASE) + f"\n{row},x,surplus\n", encoding="utf-8")
    _, _, err = run_validate("--measurements", path)
    assert "line 2, a?[31mb: 2 more cells" in err
    assert "\x1b" not in err


def test_a_table_must_have_rows(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(",".join(BASE) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no rows; expected a header and one measured run per line"):
        measurements.read(str(path))


def test_neither_numpy_nor_torch_is_imported():
    code = (
        "import sys; from steptime.commands.cli import main; assert main(['validate', '--source', 'KOR22']) == 0; "
        "assert not {'numpy', 'torch', 'tabulate'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_long_path_of_a_config_is_told_in_short():
    with pytest.raises(ConfigError, match=r"^a{500}\.\.\.a{500}: cannot be read") as caught:
        read_source("a" * 5000)
    assert len(caught.value.problems[0]) < 1100
