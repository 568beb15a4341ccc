"""Arguments that cannot be: every subcommand answers with one line, exit code 2, nothing on standard output, and no traceback."""

from __future__ import annotations

import pytest
import yaml
from jobs import DEVICES_PLAN

from steptime import ConfigError, estimate, search
from steptime.commands.cli import main

COMMANDS = [
    "serve --port 99999999", "serve --port -1", "serve --port abc", "serve --port 1.5", "serve nope.yaml",
    "serve --host 8.8.8.8 --port 0", "init nodir/x.yaml", "init there.yaml", "init folder", "init - --model nope",
    "init - --machine nope", "init - --devices 0", "init - --devices -4", "search a.yaml --top 0", "search a.yaml --top -3",
    "search a.yaml --top x", "search a.yaml --objective foo", "search a.yaml --fix tp", "search a.yaml --fix tp=0",
    "search a.yaml --fix tp=3", "search a.yaml --over foo=1", "search a.yaml --over data.gbs=4", "search a.yaml --devices 0",
    "search a.yaml --devices 8:4", "search a.yaml --gbs 0", "search a.yaml --machine nope", "search a.yaml --csv --json",
    "search a.yaml --save nodir/x.yaml", "search a.yaml --save there.yaml", "search a.yaml --plot x.foo",
    "search a.yaml --html nodir/x.html", "bench --layouts foo", "bench a.yaml --layouts foo", "bench nope.yaml",
    "a.yaml --html nodir/x.html", "a.yaml --plot x.foo", "a.yaml --plot nodir/x.png", "a.yaml --trace folder",
    "a.yaml --trace x.foo", "a.yaml --trace-memory nodir/x.pickle", "a.yaml --set foo", "a.yaml --set =3",
    "a.yaml --set data.gbs=", "a.yaml --set data.gbs=[1", "a.yaml --set data=3", "a.yaml --set model.foo=3",
    "a.yaml --set parallelism.tp=0", "a.yaml --set parallelism.tp=1.5", "a.yaml --set parallelism.tp=-1",
    "a.yaml --set data.seqlen=0", "a.yaml --set data.seqlen=-5", "a.yaml --set data.seqlen=1e18",
    "a.yaml --set data.microbatch_sz=0", "a.yaml --devices 0", "a.yaml --devices 1e9", "a.yaml --devices 1000000000",
    "a.yaml --devices -8", "--model llama3-8b --devices 1000000000", "--model llama3-8b --devices 0",
    "--model llama3-8b --set data.seqlen=0", "--model llama3-8b --set data.seqlen=abc", "--model llama3-8b --machine folder",
    "--model llama3-8b --machine nope.yaml", "--model folder", "--model nope.json", "a.yaml --machine folder",
    "a.yaml --calibrate nope.yaml", "a.yaml --calibrate a.yaml", "a.yaml --export foo", "a.yaml --from foo",
    "--from megatron nope.sh", "--from megatron", "--from megatron folder", "a.yaml --save x.yaml",
    "--from auto there.yaml --save -", "search a.yaml --save -", "validate --log a.log --save-csv -", "a.yaml --min-mfu -1",
    "a.yaml --min-mfu x", "a.yaml --json --brief", "- --watch", "folder", "nope.yaml", "sensitivity nope.yaml", "sensitivity",
    "sensitivity a.yaml --plot x.foo", "scale a.yaml --devices 16", "scale a.yaml --best --devices 0",
    "scale a.yaml --best --plot x.png", "scale a.yaml --plot nodir/x.png", "diff a.yaml", "diff", "diff a.yaml nope.yaml",
    "diff a.yaml a.yaml --html nodir/x.html", "explain", "explain a.yaml foo", "explain a.yaml step extra",
    "explain FOO-123", "explain --key", "explain --key foo", "explain a.yaml --trace there.yaml",
    "validate --measurements nope.csv", "validate --gpu nope", "validate --source nope", "validate --split nope",
    "validate --log nope.log", "validate --worst -1", "validate --plot x.foo", "machines foo", "models --foo", "show",
    "show nope", "show a b", "schema foo", "--completion foo", "--color foo a.yaml", "a.yaml there.yaml",
    "a.yaml --devices 8 --set devices=64", "a.yaml --devices 64 --set parallelism.dp=4",
    "a.yaml --machine h100 --set hardware=a100", "a.yaml --model llama3-8b --set model=llama3-70b",
    "--model llama3-8b --devices 16 --set hardware.nodes=1", "--from auto there.yaml --machine h100 --set hardware=a100",
    "--model llama3-8b --machine h100 --set hardware.node_type=a100 --devices 8",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.yaml").write_text("x: 1\n", encoding="utf-8")
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(DEVICES_PLAN | {"devices": 64}), encoding="utf-8")
    before = {path.name for path in tmp_path.iterdir()}
    code = main(command.split())
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert {path.name for path in tmp_path.iterdir()} == before


PLAN = """devices: 64
model: llama3-70b
parallelism: {tp: 8, pp: 4}
data: {gbs: 128, seqlen: 8192, microbatch_sz: 1}
hardware: h100
"""
SAID = {
    "a.yaml search": "3dtrn: the subcommand comes first: 3dtrn search a.yaml",
    "validate runs.csv": "3dtrn validate: one argument too many: runs.csv; a CSV of measured runs is --measurements runs.csv, a "
    "training log --log runs.csv, the plan of a log --plan runs.csv",
    "validate --log runs.csv": "runs.csv: no iterations logged; give the log of a training run (with step times); a CSV of "
    "measured runs is for 3dtrn validate --measurements",
    "sensitivity a.yaml b.yaml": "3dtrn sensitivity: one argument too many: b.yaml; 3dtrn sensitivity --help lists its arguments",
    "estimate a.yaml": "3dtrn: no subcommand 'estimate'; for a report: 3dtrn a.yaml",
    "a.yaml --gpus 512": "3dtrn: unrecognized arguments: --gpus 512; did you mean '--devices'?",
    "--from auto run.sh --save -": "3dtrn: --save: - is no file name, and standard output has the report; give a file",
    "a.yaml --device 512": "3dtrn: unrecognized arguments: --device 512; did you mean '--devices'?",
    "a.yaml --tp 4": "3dtrn: unrecognized arguments: --tp 4; did you mean '--set parallelism.tp=...'?",
    "a.yaml --parallelism.tp 4": "3dtrn: unrecognized arguments: --parallelism.tp 4; did you mean '--set parallelism.tp=...'?",
    "run.sh": "run.sh: a shell script, not a plan; to read it: 3dtrn --from auto run.sh",
    "search run.sh": "run.sh: a shell script, not a plan; to read it: 3dtrn --from auto run.sh",
    "diff a.yaml run.toml": "run.toml: a TOML file, not a plan; to read it: 3dtrn --from auto run.toml",
    "out.json": "out.json: the output of --json, not a plan; its plan is under config",
    "config.json": "config.json: a Hugging Face config, not a plan; name it in a plan as model: {hf: config.json}",
    "search a.yaml --fix tpp=4": "--fix tpp=4: no axis 'tpp'; did you mean 'tp'?",
    "a.yaml --machine h1000": "--machine: unknown machine 'h1000'; did you mean h100 or v100 or h800 or h200? "
    "3dtrn machines lists them",
    "search a.yaml --model llama9": "--model: unknown model 'llama9'; did you mean 'llama3-8b' or 'llama3-3b' or 'llama3-1b'? "
    "(3dtrn models lists them)",
    "init - --model llama3": "--model: unknown model 'llama3'; did you mean 'llama3-1b' or 'llama3-3b' or 'llama3-8b'? "
    "(3dtrn models lists them)",
}


@pytest.mark.parametrize("command", SAID)
def test_meant_command(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {
        "a.yaml": PLAN, "run.sh": "#!/bin/bash\ntorchrun train.py\n", "run.toml": "[model]\nname = 'llama3'\n",
        "out.json": '{"schema": "3dtrn/1", "config": {}}', "config.json": '{"model_type": "llama", "hidden_size": 4096}',
        "runs.csv": "id,gpu,n_gpus\na,h100,8\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(command.split()) == 2
    assert capsys.readouterr().err == SAID[command] + "\n"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("tp:", "TP:", "parallelism.TP: unknown key (got 8); did you mean 'tp'?"),
        ("tp:", "tensor_parallel:", "parallelism.tensor_parallel: unknown key (got 8); did you mean 'tp'?"),
        ("gbs:", "global_batch_size:", "data.global_batch_size: unknown key (got 128); did you mean 'gbs'?"),
        ("hardware: h100", "hardware: {node_type: h100, nodes: 32}",
         "devices: 64, but hardware.nodes: 32 nodes of 8 = 256; remove one"),
        ("hardware: h100", "hardware: {node_type: h100, nodes: 7}",
         "devices: 64, but hardware.nodes: 7 nodes of 8 = 56; remove one"),
        ("devices: 64", "devices: 100000000",
         "devices: 100,000,000 devices are too many; with tp*cp*pp = 32 at most 32,000,000"),
        ("model: llama3-70b", "model: [llama3-70b]",
         "model: expected a name (3dtrn models) or a mapping (got a list of 1)"),
        ("model: llama3-70b", "model: {hf: meta-llama/Llama-3-70B}",
         "model.hf: meta-llama/Llama-3-70B: no such file; give the path of a downloaded config.json, or model: llama3-70b"),
        ("model: llama3-70b", "model: {preset: llama3-70b, lora: {targets: []}}",
         "model.lora.targets: expected at least one entry (got a list of 0)"),
        ("parallelism: {tp: 8, pp: 4}", "parallelism:\n\ttp: 8", "line 4: a tab; YAML is indented with spaces"),
    ],
)  # fmt: skip
def test_plan_in_one_line(old, new, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(PLAN.replace(old, new), encoding="utf-8")
    assert main(["a.yaml"]) == 2
    assert capsys.readouterr().err == f"a.yaml: {line}\n"


def test_devices_that_agree_or_are_given(tmp_path, monkeypatch, capsys):
    """8 nodes of 8 are 64 devices; --devices replaces both."""
    monkeypatch.chdir(tmp_path)
    for nodes, more, devices in ((8, [], 64), (32, ["--devices", "512"], 512)):
        text = PLAN.replace("hardware: h100", f"hardware: {{node_type: h100, nodes: {nodes}}}")
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
        assert main(["a.yaml", "--brief", *more]) == 0
        assert f"{devices} x h100" in capsys.readouterr().out


def test_python_calls(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(PLAN, encoding="utf-8")
    calls = {
        "axes: expected {name: [value, ...]} (got 'tp')": lambda: search(path, axes="tp"),
        "axes: tp: expected a list of values (got 8)": lambda: search(path, axes={"tp": 8}),
        "axes: no axis 'tpp'; valid: cp, dp, ep, etp, microbatch_sz, pp, schedule, sp, tp, vpp, zero_level; for other keys "
        "use over": lambda: search(path, axes={"tpp": [8]}),
        "over: 'tp' is an axis of the search; fix it with axes={'tp': [value, ...]}": lambda: search(
            path, over={"tp": [8]}
        ),
        "over: performance.precision: expected a list of values (got 'bf16')": lambda: search(
            path, over={"performance.precision": "bf16"}
        ),
        "plan: empty text; give a path, YAML text or a mapping": lambda: estimate(""),
        "model: llama3-8b: no such file; YAML text on one line ends with a line break": lambda: estimate(
            "model: llama3-8b"
        ),
    }
    for line, call in calls.items():
        with pytest.raises(ConfigError) as error:
            call()
        assert error.value.problems == [line]
