"""The command line: reports of the shipped configs, exit codes, streams and colors."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_lines import SCRIPT, close, process
from jobs import OF_EVERY_KIND

from steptime.commands import cli

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PLAN = ROOT / "configs" / "llama3_70b.yaml"
GOLDEN_CONFIGS = [
    "llama3_70b",
    "llama3_8b_fsdp",
    "gpt3_175b_a100",
    "gpt2_1gpu",
    "llama3_70b_cross_dc",
    "llama3_70b_run",
]
NEVER_FITS = ["--set", "parallelism.pp=1", "--set", "parallelism.vpp=1", "--set", "data.microbatch_sz=8"]


# --- reports of the shipped configs ----------------------------------------------------------------------------------------


def test_json_is_as_recorded(run, update_golden):
    code, out, err = run(PLAN, "--json")
    assert (code, err) == (0, "")
    path = ROOT / "tests" / "golden" / "llama3_70b.json"
    if update_golden:
        path.write_text(out, encoding="utf-8")
    # sum() of floats rounds otherwise from Python 3.12 on: the last digits are not part of the record
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert list(json.loads(out)) == list(recorded)
    assert close(json.loads(out), recorded), "the JSON changed; if that is right: pytest --update-golden"


KEYS = {
    "": "schema config assumptions devices nodes params flops memory gemms collectives pipeline time throughput weak_scaling "
    "settings",
    "params": "total active per_stage tied_copies",
    "flops": "model_per_step model_per_step_full_attention hardware_per_step",
    "memory": "stages peak_allocated_bytes peak_reserved_bytes peak_reserved_bytes_p10 peak_reserved_bytes_p90 overhead_bytes "
    "capacity_bytes verdict fits worst_stage fixes",
    "memory.stages": "stage params_bytes gradients_bytes optimizer_bytes activations_bytes transient_bytes allocated_bytes "
    "reserved_bytes peak_op buffers_bytes persisting_bytes first_peak_bytes",
    "memory.overhead_bytes": "context communicators receive_buffers",
    "gemms": "name stage pass count_per_step m n k flops compute_s input_bytes weight_bytes output_bytes bandwidth_s time_s",
    "collectives": "name kind axis ranks tier bytes count_per_step latency_s bandwidth_s time_s exposed_s",
    "pipeline": "schedule stages microbatches bubble_s bubble_fraction in_flight",
    "time": "step_s step_s_p10 step_s_p90 parts_s basis",
    "time.basis": "nearest n extrapolation evidence",
    "time.basis.nearest": "id distance measured_over_predicted differs",
    "throughput": "tokens_per_s tokens_per_s_per_device model_tflops_per_device mfu mfu_full_attention hfu peak_flops_used "
    "peak_dtype",
    "weak_scaling": "dp devices gbs step_s efficiency verdict",
    "settings": "name set step_s step_change verdict most_bytes note",
}


@pytest.mark.parametrize("name", OF_EVERY_KIND)
def test_json_keys_are_the_contract(run, name):
    code, out, _ = run(ROOT / "configs" / f"{name}.yaml", "--json")
    assert code == 0
    document = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    document.pop("run", None)
    for path, keys in KEYS.items():
        node = document
        for part in filter(None, path.split(".")):
            node = node[part]
        for row in node if isinstance(node, list) else [node]:
            assert sorted(row) == sorted(keys.split()), path
    assert sum(document["time"]["parts_s"].values()) == pytest.approx(document["time"]["step_s"], rel=1e-9)
    params = document["params"]
    assert sum(params["per_stage"]) == params["total"] + params["tied_copies"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_text_keeps_to_the_page_and_its_parts_sum_to_the_step(run, golden, config):
    """Some texts are as recorded."""
    code, out, err = run(config)
    assert (code, err) == (0, "")
    if config.stem in GOLDEN_CONFIGS:
        golden(f"{config.stem}.txt", out)
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    table = out[out.index("step time breakdown") :].split("\n\n")[0]
    rows = [re.match(r"  (.+?)\s{2,}([\d.,]+)\s+([\d.,]+) %", line) for line in table.splitlines()]
    *parts, total = [(float(row[2].replace(",", "")), float(row[3]), row[2]) for row in rows if row]
    ulp = 10.0 ** -len(total[2].partition(".")[2])
    assert sum(part[0] for part in parts) == pytest.approx(total[0], abs=0.5 * ulp * (len(parts) + 1))
    assert total[1] == 100.0


def test_the_echoed_config_is_a_config(run, tmp_path):
    _, out, _ = run(PLAN, "--json")
    first = json.loads(out)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(first["config"]))
    code, out, err = run(again, "--json")
    assert (code, err) == (0, "")
    second = json.loads(out)
    assert {**first, "assumptions": 0} == {**second, "assumptions": 0}


def test_a_config_from_standard_input(run):
    done = process("-", "--json", stdin=PLAN.read_bytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == run(PLAN, "--json")[1]


def test_set_changes_a_setting(run):
    _, out, _ = run(PLAN, "--json", "--set", "data.gbs=4096")
    assert json.loads(out)["config"]["data"]["gbs"] == 4096


def test_a_file_named_like_a_subcommand(run, tmp_path, monkeypatch):
    monkeypatch.setattr("steptime.commands.cli.sys.argv", ["3dtrn"])
    (tmp_path / "diff").write_text(PLAN.read_text())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["./diff", "--brief"]) == 0


# --- exit codes and streams ------------------------------------------------------------------------------------------------


def test_check_says_no_with_exit_code_1(run):
    assert run(PLAN, "--check")[0] == 0
    code, out, err = run(PLAN, "--check", *NEVER_FITS)
    assert code == 1
    assert err == "check: does not fit\n"
    assert "DOES NOT FIT" in out
    assert run(PLAN, "--brief", *NEVER_FITS)[0] == 0  # without --check it is an answer like any other


def test_a_tight_job_is_no_job_that_fits(run):
    memory = json.loads(run(PLAN, "--json")[1])["memory"]
    beside = sum(memory["overhead_bytes"].values())
    usable = beside + (memory["peak_allocated_bytes"] + memory["peak_reserved_bytes"]) / 2
    hardware = f"hardware={{node_type: p5.48xlarge, overrides: {{accelerator.usable_memory_bytes: {usable:.0f}}}}}"
    code, out, err = run(PLAN, "--check", "--set", hardware)
    assert code == 1
    assert "TIGHT" in out
    assert err == "check: tight: allocated memory fits, reserved memory or its 90th percentile does not\n"


@pytest.mark.parametrize(("least", "code"), [("0.01", 0), ("1%", 0), ("0.99", 1), ("99%", 1)])
def test_min_mfu(run, least, code):
    done = run(PLAN, "--check", "--min-mfu", least)
    assert done[0] == code
    assert ("is below 99 %" in done[2]) == bool(code)


def test_bad_input_is_one_line_per_problem(run, tmp_path):
    plan = yaml.safe_load(PLAN.read_text())
    plan["parallelism"]["tpp"] = 8
    plan["data"]["gbs"] = -1
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    code, out, err = run(path)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert any("parallelism.tpp" in line and "tp" in line for line in lines)


@pytest.mark.parametrize(
    "args",
    [
        ["nowhere.yaml"],
        ["configs"],
        [str(PLAN), "--set", "data.gbs"],
        [str(PLAN), "--set", "data.gsb=4"],
        [str(PLAN), "--min-mfu", "40"],
        [str(PLAN), "--json", "--brief"],
        [str(PLAN), "extra"],
        ["show"],
        ["show", "nothing-like-it"],
        ["show", "nowhere/machine.yaml"],
        ["diff", str(PLAN)],
        ["diff", str(PLAN), "nowhere.yaml"],
        ["explain", str(PLAN), "no-such-op"],
        ["scale", "nowhere.yaml"],
    ],
    ids=" ".join,
)
def test_bad_command_lines_exit_2_with_a_reason(run, args):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.strip()
    assert "Traceback" not in err


def test_no_colour_in_a_pipe_and_colour_on_request(run, monkeypatch):
    assert b"\x1b" not in process(PLAN, "--brief").stdout
    assert "\x1b[" in run(PLAN, "--brief", "--color", "always")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run(PLAN, "--brief")[1]
    assert "\x1b" not in run(PLAN, "--brief", "--color", "never")[1]


def test_colour_on_a_terminal_unless_no_color():
    for env, coloured in (({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)):
        ours, theirs = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(PLAN), "--brief"],
            stdout=theirs, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "utf-8", **env}, check=False,
        )  # fmt: skip
        os.close(theirs)
        assert done.returncode == 0
        assert (b"\x1b[" in os.read(ours, 65536)) is coloured
        os.close(ours)


def test_a_closed_pipe_is_quiet():
    command = shlex.join([sys.executable, "-c", SCRIPT, str(PLAN)])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert done.stdout.startswith(b"llama3-70b")


def test_a_closed_pipe_keeps_the_answer_of_a_check():
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(PLAN), "--min-mfu", "0.99"],
        stdout=theirs, stderr=subprocess.PIPE, cwd=ROOT, check=False,
    )  # fmt: skip
    os.close(theirs)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ("gpt2_1gpu.yaml >&-", 2, "cannot write to standard output (closed)\n"),
        ("show h100 --json >&-", 2, "cannot write to standard output (closed)\n"),
        ("--completion bash >&-", 2, "cannot write to standard output (closed)\n"),
        ("nowhere.yaml 2>&-", 2, ""),
        ("gpt2_1gpu.yaml >/dev/full", 2, "cannot write to standard output (No space left on device)\n"),
        ("- <&-", 2, "standard input is closed; pipe a plan into it\n"),
    ],
)
def test_streams_that_are_closed_or_full(arguments, code, error):
    command = f"{shlex.join([sys.executable, '-c', SCRIPT])} {arguments}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT / "configs", check=False)
    assert (done.returncode, done.stderr) == (code, error)


def test_an_interrupt_is_quiet(run, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("steptime.commands.plans.load", interrupted)
    assert run(PLAN) == (130, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_encodings_without_our_signs(encoding):
    done = process(PLAN, env={"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "模型"), ("ascii", "??")])
def test_names_of_any_script_print(encoding, shown):
    done = process(
        PLAN, "--brief", "--set", "model={preset: llama3-70b, name: 模型}", env={"PYTHONIOENCODING": encoding}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding).startswith(shown)


def test_bytes_that_are_no_text_are_bad_input_or_replaced(run):
    code, out, err = run(PLAN, "--brief", "--set", "model.name=\udcff")
    assert (code, err) == (0, "")
    assert out.startswith("\ufffd")
    code, out, err = run("--model", "llama3-8b", "--set", "data.g\udcff=1")
    assert (code, out) == (2, "")
    assert err.startswith("data.g\ufffd: unknown key (got 1)")
