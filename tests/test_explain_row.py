"""`3dtrn explain ROW_ID`: a measured row traced to op, formula, constant and source."""

import io
import json
import random
import re
import sys
from pathlib import Path

import pytest
import yaml

from steptime import Job, estimate
from steptime.commands import cli
from steptime.report import constants, explain, kernel_table, row_tables
from steptime.report.table import Style, layout
from steptime.validation.judgement import judge_shipped
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config, to_job

ROOT = Path(__file__).parents[1]
ROWS = {found.id: found for found in shipped()}
OWN = "tests/data/validate/own.csv"
PLAIN = Style()
FILES = sorted((ROOT / "steptime" / "data" / "software").glob("*.yaml"))


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(ROOT)

    def call(*args):
        code = cli.main(list(map(str, args)))
        return (code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def judged():
    """Every row with what became of it, by id."""
    return {j.row.id: j for j in judge_shipped()}


def words(text):
    return " ".join(text.split())


# --- the way of one row ----------------------------------------------------------------------------------------------------


def test_a_published_row_says_where_it_comes_from_and_how_far_off_we_are(run, judged):
    code, out, err = run("explain", "KOR22-004")
    assert (code, err) == (0, "")
    text = words(out)
    assert "Korthikanti et al. 2022 (arXiv 2205.05198) Table 5" in text
    assert "quality A; split test" in text
    assert "step_time_s 13.75" in text
    found = judged["KOR22-004"]
    assert f"{100 * found.step_error:+.1f} %" in text
    assert "predicted vs. measured" in out
    # tokens/s/device as measured: 64 x 2048 / 13.75 / 64 = 148.9
    assert re.search(r"tokens/s/device +[\d.]+ +148\.9 ", out)


def test_it_goes_down_to_formula_constant_and_source(run):
    out = run("explain", "KOR22-004")[1]
    text = words(out)
    assert "mlp.down gemm 768" in text
    assert "cost.compute.gemm_pass: One matrix product" in text
    assert "K_OVERHEAD = 200: A tile's prologue" in text
    assert "microsoft/vidur@7d47513" in text
    assert "accelerator.sustained_flops.bf16 = " in text
    assert "layer_gap_s = " in text
    assert "software profile megatron-2021" in out
    assert "precision = fp16: this config" in text


def test_lines_fit_the_page_but_for_words_that_cannot_be_broken(run):
    lines = run("explain", "KOR22-004")[1].splitlines()
    assert not [line for line in lines if len(line) > 80 and " " in line.strip()]


def test_case_does_not_count_and_a_name_is_explained(run):
    assert run("explain", "kor22-004")[1] == run("explain", "KOR22-004")[1]
    code, out, _ = run("explain", "KOR22-004", "mfu")
    assert code == 0
    assert "64 devices x 312 TFLOP/s fp16 dense" in words(out)
    assert "did you mean mlp.down" in run("explain", "KOR22-004", "mlp.dwn")[2]


def test_a_skipped_row_says_why_and_a_row_apart_too(run, judged):
    skipped = next(name for name, j in judged.items() if j.skipped == "not modeled yet: activation offloading")
    code, out, _ = run("explain", skipped)
    assert code == 0
    assert "\nskipped\n  not modeled yet: activation offloading\n" in out
    assert "predicted beside" not in out
    code, out, err = run("explain", skipped, "--yaml")
    assert (code, out, err) == (2, "", f"{skipped}: not modeled yet: activation offloading\n")
    apart = next(name for name, j in judged.items() if j.excluded)
    assert "judged, but not in the headline figures" in run("explain", apart)[1]


def test_a_memory_row_shows_its_metric(run, judged):
    name = next(name for name, j in judged.items() if name.startswith("simumax") and j.memory_error is not None)
    out = run("explain", name)[1]
    assert re.search(r"memory, allocated +[\d.]+ GiB +[\d.]+ GiB +[+-]\d+\.\d %", out)


def test_own_measurements(run):
    code, out, err = run("explain", "run-2", "--measurements", OWN)
    assert (code, err) == (0, "")
    assert out.startswith("run-2 as measured (line 3 of your file)")
    assert "step_time_s 71.5" in words(out)


# --- the config ------------------------------------------------------------------------------------------------------------


def test_the_yaml_runs_through_standard_input(run, monkeypatch, judged):
    text = run("explain", "KOR22-004", "--yaml")[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, err = run("-", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["time"]["step_s"] == judged["KOR22-004"].predicted_step_s


def test_the_yaml_of_judged_rows_is_the_job_that_was_judged(judged):
    """Text to plan and back is the same plan, name and all: 80 rows drawn from all."""
    drawn = {name: judged[name] for name in random.Random(7).sample(sorted(ROWS), 80)}
    drawn = {name: j for name, j in drawn.items() if j.skipped is None}
    assert len(drawn) > 50
    for name, found in drawn.items():
        text = row_tables.config_yaml(found.row)
        assert yaml.safe_load(text) == found.config
        again, job = Job.load(text), to_job(to_config(ROWS[name]))
        assert again.machine == job.machine
        beside = {"hardware": {}, "notes": []}  # notes of a launch file are no part of the plan
        assert again.to_config() | beside == job.to_config() | beside, name


# --- all rows --------------------------------------------------------------------------------------------------------------


def test_twenty_rows_are_explained(run):
    for name in random.Random(20260101).sample(sorted(ROWS), 20):
        code, out, err = run("explain", name)
        assert (code, err) == (0, ""), name
        assert out.startswith(f"{name} as published")
        assert ("skipped" in out) != ("predicted vs. measured" in out)


# --- kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["KOR22-001", "KOR22-004", "mosaic-190", "bs-v100-069", "maxtext-017"])
def test_kernels_sum_to_the_parts_of_the_step(name):
    found = estimate(to_job(to_config(ROWS[name])))
    rows = kernel_table.op_times(found)
    for part in ("gemm", "attention", "memory_bound"):
        total = sum(op.step_s for op in rows if op.part == part)
        assert total == pytest.approx(found.time.parts_s[part], rel=1e-9)


def test_a_rate_is_taken_apart_into_its_constants(run):
    """mlp.down of KOR22-004, forward: m 2048, k 49152 / 8 = 6144, n 12288.

    ceil(2048/128) x ceil(12288/256) = 16 x 48 = 768 tiles on 108 SMs are 7.11 waves in 8: 0.889 full, so 0.75 + 0.25 x 0.889.
    """
    text = words(run("explain", "KOR22-004", "mlp.down")[1])
    assert "TFLOP/s sustained x 6,144 / (6,144 + 200) x 0.972 for waves of tiles" in text
    assert "x 2,048 / (2,048 + 200) x WGRAD_RATE 0.95 x " in text


@pytest.mark.parametrize(
    ("precision", "kinds"),
    [
        ("bf16", ("", "", " x WGRAD_RATE 0.95")),
        ("fp8_delayed", ("", " x fp32 accumulation 0.87", " x fp32 accumulation 0.87 x WGRAD_RATE 0.95")),
        (
            "fp8_blockwise",
            (" x fp32 accumulation 0.87", " x fp32 accumulation 0.87", " x fp32 accumulation 0.87 x WGRAD_RATE 0.95"),
        ),
    ],
)
def test_what_is_left_of_a_rate_is_waves_of_tiles_alone(precision, kinds):
    """mlp.down on H100, m 8192, k 28672 / 8 = 3584, n 8192: 2048 tiles on 132 SMs, 896 in the two backward products.

    15.52 waves in 16 and 6.79 in 7 are both 0.970 full, so 0.75 + 0.25 x 0.970 = 0.992.
    """
    found = estimate(Job.load(ROOT / "configs" / "llama3_70b.yaml", [f"performance.precision={precision}"]))
    explained = explain.explain(found, "mlp.down")[:3]  # then the constants
    for facts, kind, k in zip(explained, kinds, (3584, 8192, 8192), strict=True):
        [said] = [line for fact in facts.facts for line in fact.lines if "waves of tiles" in line]
        ratio = found.timing.rates.recipe_flops / found.timing.rates.gemm_flops
        overhead = 200 * (1 if precision == "bf16" else ratio)
        assert said.endswith(f" x {k:,} / ({k:,} + {overhead:.4g}){kind} x 0.992 for waves of tiles")


# --- constants -------------------------------------------------------------------------------------------------------------


def test_every_shared_constant_says_where_it_comes_from():
    found = constants.shared_constants()
    assert len(found) > 25
    assert [c.name for c in found if not c.source] == []
    by_name = {c.name: c for c in found}
    assert by_name["cost.compute.TILE_N"].value == 256.0
    assert by_name["cost.compute.TILE_N"].source == by_name["cost.compute.TILE_M"].source
    assert "nccl-tests" not in by_name["timing.step_time.STRAGGLER"].source
    assert "dgxc-benchmarking" in by_name["timing.step_time.STRAGGLER"].source


def test_every_setting_of_a_profile_and_figure_of_a_machine_has_a_source():
    for plan in ("llama3_70b", "llama3_8b_fsdp", "gpt3_175b_a100", "llama2_7b_1gpu"):
        job = Job.load(ROOT / "configs" / f"{plan}.yaml")
        said = [line for table in (constants.software(job), constants.machine(job)) for [line] in table.rows]
        unsaid = {line.partition(" = ")[0] for line in said if "not in its file: default" in line}
        given = {key for path in FILES for key in yaml.safe_load(path.read_text(encoding="utf-8"))}
        assert unsaid.isdisjoint(given)
        assert all(re.search(r" = .+: .{3}", line) for line in said)


def test_abbreviations_of_a_profile_are_spelled_out():
    text = words("\n".join(layout(constants.software(Job.load(ROOT / "configs" / "llama3_70b.yaml")), PLAIN)))
    assert "core = megatron-core" in text


def test_pricing_functions_speak_through_their_docstrings():
    assert kernel_table.said(kernel_table.compute.move_pass).startswith("A memory-bound kernel")
    collective = kernel_table.said(kernel_table.comm.collective)
    assert "All-reduce takes the best of ring, tree" in collective
    assert "Raises" not in collective
    assert "bytes_:" not in collective


# --- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["KOR22-04"], "KOR22-04: no such file, and no measured row has that id; did you mean KOR22-0"),
        (["no_such_plan.yaml"], "no_such_plan.yaml: no such file"),
        (
            ["zzzzzzzz"],
            "zzzzzzzz: no such file, and no measured run has that id; give a PLAN, or the id of a run (3dtrn ",
        ),
        (["llama3-70b", "mfu"], "llama3-70b: a model preset, not a PLAN; 3dtrn init --model llama3-70b writes a plan"),
        (["run-9", "--measurements", OWN], "run-9: no such file, and no measured row of tests/data/validate/own.csv"),
        (["qqq", "--measurements", OWN], "qqq: no row of tests/data/validate/own.csv has that id; ids in the file: "),
        (["run-1", "--measurements", "no.csv"], "no.csv: no such file or directory"),
        (["KOR22-004", "--set", "data.gbs=1"], "--set: not valid for a measured row; 3dtrn explain KOR22-004 --yaml"),
        (["configs/llama3_70b.yaml", "--yaml"], "--yaml: only for a measured row"),
    ],
)
def test_a_wrong_name_is_one_line(args, line, run):
    code, out, err = run("explain", *args)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_file_called_like_a_row_is_a_file(run, tmp_path, monkeypatch):
    (tmp_path / "KOR22-004").write_text((ROOT / "configs" / "gpt2_1gpu.yaml").read_text(), encoding="utf-8")
    args = ["explain", str(tmp_path / "KOR22-004"), "mfu"]
    assert "1 device x" in words(run(*args)[1])
