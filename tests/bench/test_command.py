"""`3dtrn bench` as a user runs it: one process, two ranks, its files fed back, its scripts, its logs, bad input."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.launch import fork, fork_ranks
from forked import clean

from steptime import Job, Machine, estimate
from steptime.bench.timings import SCHEMA

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "steptime" / "bench" / "__main__.py"
SMALL_STREAMS = Path(__file__).with_name("small_streams.py")
CONFIG = ROOT / "configs" / "bench" / "cpu_tiny.yaml"
SIZES = {"model.n_layers": 2, "model.hidden_sz": 128, "model.inter_sz": 352, "model.vocab_sz": 512, "data.seqlen": 64}
SETS = tuple(word for key, size in SIZES.items() for word in ("--set", f"{key}={size}"))
SMALL = (*SETS, "--seconds", "0.5", "--steps", "2")


def bench(*args, ranks=1):
    """The command in a process of its own, or one for each of several ranks, told what torchrun tells them."""
    return fork_ranks(SMALL_STREAMS, ranks, *args) if ranks > 1 else fork(SMALL_STREAMS, *args)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A whole benchmark of a small model in one process."""
    folder = tmp_path_factory.mktemp("one") / "results"
    done = bench(CONFIG, *SMALL, "--out", folder, "--trace")
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same on two ranks, in every layout."""
    folder = tmp_path_factory.mktemp("two") / "results"
    done = bench(CONFIG, *SMALL, "--out", folder, "--layouts", "ddp,fsdp2,tp,pp", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder, done


def rows_of(folder):
    with (folder / "predicted_vs_measured.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def results(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


# --- one process ---


def test_it_leaves_the_machine_the_results_and_the_rows(one):
    folder, done = one
    assert {path.name for path in folder.iterdir()} == {
        "machine.yaml", "results.json", "predicted_vs_measured.csv", "bench.log", "trace"
    }  # fmt: skip
    log = (folder / "bench.log").read_text(encoding="utf-8").replace("\r", "")
    assert done.stdout in log
    assert "\ntorch: version " in log  # the header of the results, for people
    assert (folder / "trace" / "single" / "rank0.json").stat().st_size > 1000


def test_the_machine_file_drives_the_calculator(one, tmp_path):
    folder, _ = one
    machine = Machine.load(str(folder / "machine.yaml"))
    assert machine.accelerator.sustained_flops.keys() >= {"fp32", "bf16"}
    assert machine.accelerator.usable_memory_bytes > 2**30
    job = Job.load(CONFIG, [f"hardware.node_type={folder / 'machine.yaml'}"])
    assert estimate(job).step_s > 0
    assert machine.source("accelerator.sustained_flops.fp32").startswith("measured: ")
    code = "import sys; from steptime.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(CONFIG), "--set", "hardware.node_type=machine.yaml"]
    done = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr  # a path of --set is relative to where one stands


def test_results_hold_all_rows_and_a_header(one):
    found = results(one[0])
    assert found["schema"] == SCHEMA
    header = found["diagnostics"]
    assert header["argv"][1].endswith("cpu_tiny.yaml")
    assert header["seed"] == 0
    assert header["config"]["model"]["n_layers"] == 2
    assert {row["dtype"] for row in found["gemms"]} >= {"fp32", "bf16"}
    for kind in ("gemms", "attention", "moves", "launches"):
        assert found[kind], kind
        assert all(0 < row["min_s"] <= row["median_s"] <= row["p90_s"] for row in found[kind])
    (step,) = found["steps"]
    assert (step["layout"], step["ranks"], step["reps"]) == ("single", 1, 2)
    assert step["predicted_step_s"] > 0
    assert found["machine"]["accelerator"]["peak_flops"]
    assert {row["recompute"] for row in found["blocks"]} == {"none", "selective", "full"}


def test_bytes_and_counts_are_exact(one):
    """What torch counts has no clock in it: every count, and the peak of the whole step, are the estimate's."""
    rows = results(one[0])["beside"]
    exact = [row for row in rows if row["what"] == "exact"]
    assert len(exact) == 7
    assert [row["name"] for row in exact if row["predicted"] != row["measured"]] == []
    (peak,) = [row for row in rows if row["what"] == "memory"]
    assert peak["predicted"] == peak["measured"]


def test_every_kind_of_work_stands_beside_its_prediction(one):
    rows = results(one[0])["beside"]
    assert {row["what"] for row in rows} == {"step", "block", "memory", "exact", "gemm", "attention", "memory_bound"}
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in rows)
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1.0)


def test_rows_feed_validation(one, run_validate):
    folder, _ = one
    (row,) = rows_of(folder)
    code, out, _ = run_validate("--measurements", folder / "predicted_vs_measured.csv", "--json")
    assert code == 0
    (judged,) = json.loads(out)["rows"]
    assert judged["predicted_step_s"] == pytest.approx(float(row["predicted_step_s"]))
    assert judged["predicted_memory_gib"] == pytest.approx(float(row["predicted_memory_gib"]))
    assert judged["memory_error"] == pytest.approx(0.0)


def test_the_report_names_what_counts(one):
    out = one[1].stdout
    for words in ("predicted vs. measured", "whole steps", "counted by torch", "the machine file", "use it"):
        assert words in out
    assert max(len(line) for line in out.splitlines() if str(one[0]) not in line) <= 80
    assert "\x1b" not in out + one[1].stderr
    assert "phase first_step" in one[1].stderr


def test_its_log_tells_the_start_up(one, capsys):
    from steptime.commands import cli

    assert cli.main(["bench", "startup", str(one[0] / "bench.log"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["startup"]["started"]
    assert row["world_size"] == 1
    assert row["phases_s"].keys() >= {"imports", "init", "build", "first_step"}


def test_its_trace_is_explained(one, capsys):
    from steptime.commands import cli

    sets = [*SETS, "--set", f"hardware.node_type={one[0] / 'machine.yaml'}"]
    trace = str(one[0] / "trace" / "single" / "rank0.json")
    assert cli.main(["explain", str(CONFIG), *sets, "--trace", trace]) == 0
    assert "matrix multiplies" in capsys.readouterr().out


def test_results_are_not_overwritten(one, capsys):
    from steptime.commands import cli

    assert cli.main(["bench", str(CONFIG), *SMALL, "--out", str(one[0])]) == 2
    assert capsys.readouterr().err == f"--out {one[0]}: already contains results.json; use another folder\n"


# --- two ranks ---


def test_two_ranks_run_every_layout(two):
    found = results(two[0])
    assert [(step["layout"], step["ranks"]) for step in found["steps"]] == [
        ("ddp", 2), ("fsdp2", 2), ("tp", 2), ("pp", 2)
    ]  # fmt: skip
    assert {row["kind"] for row in found["collectives"]} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"
    }  # fmt: skip
    assert {line["kind"]: line["points"] > 5 for line in found["links"]}.keys() == {
        r["kind"] for r in found["collectives"]
    }
    assert "bus bandwidth" in two[1].stdout
    assert found["steps"][0]["ddp"]["comm_s"] > 0
    assert all(len(step["allocated_peak_bytes"]) == 2 for step in found["steps"])


def test_two_ranks_agree_on_counts(two):
    exact = [row for row in results(two[0])["beside"] if row["what"] == "exact"]
    assert {name.partition(":")[0] for row in exact if ":" in (name := row["name"])} == {"ddp", "fsdp2", "tp", "pp"}
    assert [row["name"] for row in exact if row["predicted"] != row["measured"]] == []


def test_two_ranks_speak_once(two):
    lines = two[1].stdout.splitlines()
    assert sum("predicted vs. measured" in line for line in lines) == 1
    assert any("rank 0 of 2, local rank 0, node 0 of 1, cpu, gloo, by torchrun" in line for line in lines)


def test_two_ranks_measure_the_network(two):
    machine = Machine.load(str(two[0] / "machine.yaml"))
    assert machine.devices_per_node == 2
    assert machine.source("tiers.0.bytes_per_s").startswith("measured: ")


def test_rows_of_several_layouts_have_ids_of_their_own(two):
    assert [row["id"] for row in rows_of(two[0])] == ["ddp-2", "fsdp2-2", "tp-2", "pp-2"]


def test_scaling_from_one_to_two(one, two, capsys):
    from steptime.commands import cli

    paths = [str(folder / "results.json") for folder in (one[0], two[0])]
    assert cli.main(["bench", "scaling", *paths]) == 0
    out = capsys.readouterr().out
    assert "weak" in out
    assert "1.00" in out


# --- scripts and bad input ---


def test_emit_repeats_the_arguments(capsys):
    from steptime.commands import cli

    args = ["bench", "--emit", "torchrun", str(ROOT / "configs" / "llama3_8b_fsdp.yaml"), "--set", "data.seqlen=4096"]
    assert cli.main([*args, "--only", "step", "--seconds", "5"]) == 0
    out = capsys.readouterr().out
    assert "--set data.seqlen=4096 --seconds 5 --only step" in out
    assert "torch.distributed.launch" not in out


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["bench", "startup"], "bench startup: at least one file is required"),
        (["bench", "a.yaml", "b.yaml"], "expected one PLAN, or startup, memory, scaling before files (got a.yaml b.yaml)"),
        (["bench", "no.yaml"], "no.yaml: no such file"),
        (["bench", "configs/llama3_70b.yaml"], "tp 8 x pp 4 x cp 1 does not divide 1 process; start a multiple of 32"),
        (["bench", "configs/llama2_7b_1gpu.yaml", "--set", "performance.software=megatron-core"], "is not plain torch"),
        (["bench", "configs/bench/cpu_tiny.yaml", "--layouts", "dpp"], "--layouts: unknown layout 'dpp'; use "),
        (["bench", "configs/bench/cpu_tiny.yaml", "--layouts", "ddp"], "--layouts ddp: needs more than one process"),
        (["bench", "configs/bench/cpu_tiny.yaml", "--device", "cuda"], "cuda"),
        (["bench", "configs/bench/cpu_tiny.yaml", "--steps", "0"], "--steps: at least 1 (got 0)"),
        (["bench", "configs/bench/cpu_tiny.yaml", "--seconds", "-1"], "--seconds: must be finite and at least 0 (got -1)"),
        (["bench", "configs/bench/cpu_tiny.yaml", "--seconds", "inf"], "--seconds: must be finite and at least 0 (got inf)"),
        (["bench", "configs/bench/cpu_tiny.yaml", "--set", "data.microbatch_sz=4096", "--set", "data.gbs=4096"], "single needs "),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(args, problem, capsys, monkeypatch, tmp_path):
    from steptime.commands import cli

    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD", "LOCAL_", "MASTER_", "SLURM_"))]:
        monkeypatch.delenv(name)
    more = ["--out", str(tmp_path)] if args[1] != "startup" and args[2:] != ["b.yaml"] else []
    assert cli.main([*args, *more]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "Traceback" not in said


def test_the_document_is_alone_on_standard_output(tmp_path):
    """Of the command as a user starts it."""
    done = fork(MAIN, CONFIG, *SMALL, "--only", "block", "--json", "--out", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["predicted_on"] == "cpu-2core"
    assert "phase init" in done.stderr


def test_without_torch_it_says_what_to_install(capsys, monkeypatch):
    from steptime.commands import bench_command, cli

    monkeypatch.setattr(bench_command, "find_spec", lambda name: None if name == "torch" else object())
    assert cli.main(["bench", str(CONFIG)]) == 2
    assert capsys.readouterr().err == "bench: needs torch; pip install 'steptime[bench]'\n"
