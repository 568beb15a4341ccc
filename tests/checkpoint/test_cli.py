"""The command as a user meets it: what it prints, in which width, and the codes it returns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from steptime import Job, Model, Summary, estimate, summarize_checkpoint
from steptime.model.blocks import n_params

ROOT = Path(__file__).parents[2]
KEYS = [
    "schema", "path", "format", "container", "complete", "step", "id", "totals", "by_dtype", "by_role", "quantization",
    "adapter", "tree", "parallelism", "ranks", "architecture", "models", "pickle", "sections", "other_iterations",
    "problems", "io", "exit_code",
]  # fmt: skip


@pytest.fixture
def model(make):
    make.save_safetensors(make.llama(), make.folder / "model.safetensors")
    return make.folder / "model.safetensors"


def test_report_says_the_answer_first_in_80_columns(model, command):
    code, out, err = command(model)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1] == "safetensors, complete"
    assert lines[3].startswith("parameters 229,952 (230 k)   bytes 459,904")
    assert max(map(len, lines[1:])) <= 80  # the first line is the path, as long as it is
    assert len(lines) < 60
    assert re.search(r"layers\.\* x4 +41,088 each +bf16 +164,352 ", out)
    assert lines[-1] == "no problems found"
    assert not re.search(r"\b(safe|clean)\b", out, re.IGNORECASE)


def test_json_keys_are_stable(model, command):
    code, out, _ = command(model, "--json")
    document = json.loads(out)
    assert (code, list(document)) == (0, KEYS)
    assert document["totals"] == {
        "tensors": 39, "pieces": 39, "params": 229952, "buffers": 0, "logical_params": 229952, "stored_params": 229952,
        "logical_bytes": 459904, "stored_bytes": 459904, "file_bytes": model.stat().st_size,
    }  # fmt: skip
    assert document["by_dtype"] == [{"dtype": "bfloat16", "tensors": 39, "params": 229952, "bytes": 459904}]
    assert document["tree"][1]["children"][1]["name"] == "layers.*"
    assert document["architecture"]["hidden_sz"] == {"value": 64, "from": "model.embed_tokens.weight"}


def test_json_full_lists_tensors(model, command):
    document = json.loads(command(model, "--json=full")[1])
    first = document["tensors"][0]
    assert len(document["tensors"]) == 39
    assert list(first) == [
        "name", "role", "shape", "dtype", "bytes", "stored_in", "storage", "alias_of", "global_shape", "shard", "note",
    ]  # fmt: skip


def test_tensors_by_pattern(model, command):
    code, out, _ = command(model, "--tensors", "*.0.mlp.*")
    assert (code, len(out.splitlines())) == (0, 3)
    assert "model.layers.0.mlp.down_proj.weight  bf16 [64, 160]" in out


def test_depth(model, command):
    assert "self_attn" not in command(model, "--depth", "0")[1]
    assert "q_proj" in command(model, "--depth", "3")[1]


def test_same_structure_has_the_same_id_in_every_format(make, model, command):
    torch.save(make.llama(), make.folder / "model.pt")
    torch.save({"state_dict": make.llama()}, make.folder / "wrapped.ckpt")
    ids = {command(make.folder / name, "--id")[1] for name in ("model.safetensors", "model.pt", "wrapped.ckpt")}
    assert len(ids) == 1
    assert re.fullmatch(r"[0-9a-f]{32}\n", ids.pop())


def test_diff(make, model, command):
    torch.save(make.llama(), make.folder / "same.pt")
    code, out, _ = command(model, "--diff", make.folder / "same.pt")
    assert (code, out.startswith("same names, shapes and types: 39 tensors")) == (0, True)
    other = make.llama() | {"extra": torch.ones(1)}
    del other["lm_head.weight"]
    other["model.norm.weight"] = torch.ones(3)
    torch.save(other, make.folder / "other.pt")
    code, out, _ = command(model, "--diff", make.folder / "other.pt")
    assert code == 1
    assert out.splitlines() == [
        "- lm_head.weight bfloat16 [512, 64]", "+ extra float32 [1]",
        "~ model.norm.weight bfloat16 [64] -> float32 [3]",
    ]  # fmt: skip
    assert len(json.loads(command(model, "--json", "--diff", make.folder / "other.pt")[1])["diff"]) == 3


def test_usage_errors_are_two(command, model):
    assert command()[0] == 2
    assert command(model, "--units", "parsec")[0] == 2
    code, out, err = command("/nowhere/at/all")
    assert (code, out) == (2, "")
    assert err == "summarize-ckpt: /nowhere/at/all: no such file or directory\n"


def test_failure_is_still_json(command):
    code, out, err = command("/nowhere/at/all", "--json")
    assert (code, err, json.loads(out)["problems"][0]["code"]) == (2, "", "NOT_FOUND")


@pytest.mark.parametrize("option", ["--model", "--diff", "--emit-config"])
def test_unusable_other_side_is_still_json(model, command, option):
    code, out, err = command(model, "--json", option, "/nowhere/at/all")
    document = json.loads(out)
    assert (code, err, document["exit_code"], document["totals"]["params"]) == (2, "", 2, 229952)
    (problem,) = document["problems"]
    assert "/nowhere/at/all" in f"{problem['file']} {problem['message']}"


def test_emitted_config_is_a_model(make, command, tmp_path):
    make.save_safetensors(make.llama(kv=16), make.folder / "model.safetensors")
    config = {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 512, "hidden_size": 64}
    make.write("config.json", json.dumps(config).encode())
    code, _, _ = command(make.folder, "--emit-config", tmp_path / "plan.yaml")
    assert code == 0
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    model = Model(**written["model"])
    assert (model.n_layers, model.n_q_heads, model.n_kv_heads, model.head_dim) == (4, 4, 1, 16)
    assert n_params(model) == 229_952
    assert command(make.folder, "--emit-config", "-") == (0, (tmp_path / "plan.yaml").read_text(), "")


def test_a_config_that_cannot_be_written_is_one_line(model, command):
    code, _, err = command(model, "--emit-config", "/nowhere/at/all")
    line = "summarize-ckpt: --emit-config /nowhere/at/all: cannot be written (No such file or directory)\n"
    assert (code, err) == (2, line)


def test_config_is_not_written_when_nothing_is_known(make, command, tmp_path):
    make.save_safetensors({"w": torch.zeros(3, 4)}, make.folder / "w.safetensors")
    code, _, err = command(make.folder / "w.safetensors", "--emit-config", tmp_path / "plan.yaml")
    assert (code, err.count("\n"), (tmp_path / "plan.yaml").exists()) == (2, 1, False)
    assert "no transformer" in err


def test_unknown_head_width_stays_unset(model, command, tmp_path):
    command(model, "--emit-config", tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert (
        "# n_q_heads: not known: 64 query and 16 key rows, n_q_heads : n_kv_heads = 4 : 1, head_dim divides 16; a config.json "
        "next to the weights would determine it\n"
    ) in text
    assert "n_q_heads" not in yaml.safe_load(text)["model"]


PLAN = """
model: {n_layers: 4, hidden_sz: 64, inter_sz: 160, n_q_heads: 4, n_kv_heads: 1, head_dim: 16, vocab_sz: VOCAB}
parallelism: {tp: 1, pp: 1, dp: 1}
data: {gbs: 1, seqlen: 128, microbatch_sz: 1}
hardware: dgx-h100
"""


def test_plan_that_agrees_and_one_that_does_not(make, model, command):
    plan = make.write("plan.yaml", PLAN.replace("VOCAB", "512").encode())
    code, out, _ = command(model, "--model", plan)
    assert (code, "against the plan: equal" in out) == (0, True)
    plan = make.write("plan.yaml", PLAN.replace("VOCAB", "500").encode())
    code, out, _ = command(model, "--model", plan)
    assert code == 1
    assert re.search(r"embedding +32,768 +32,000 +\+768\n", out)
    assert "512 rows in the checkpoint, 500 in the plan" in out
    assert "n_layers" not in out[out.index("against the plan") :]
    plan = make.write("plan.yaml", PLAN.replace("VOCAB", "512").replace("n_layers: 4", "n_layers: 6").encode())
    assert "n_layers: 4 in the checkpoint, 6 in the plan" in command(model, "--model", plan)[1]
    plan = make.write("plan.yaml", PLAN.replace("VOCAB", "500").encode())
    document = json.loads(command(model, "--json", "--model", plan)[1])
    assert (document["exit_code"], document["plan"]["agrees"]) == (1, False)


def test_plan_that_is_wrong_is_an_error_of_its_own(make, model, command):
    plan = make.write("plan.yaml", b"model: {n_layer: 4}")
    code, _, err = command(model, "--model", plan)
    assert code == 2
    assert all(line.startswith("summarize-ckpt: ") for line in err.splitlines())


def test_weights_per_rank_against_the_plan(make, command):
    """Megatron ranks hold exactly the weights the plan gives each stage."""
    text = PLAN.replace("VOCAB", "512").replace("tp: 1, pp: 1", "tp: 1, pp: 2").replace("gbs: 1", "gbs: 2")
    plan = make.write("plan.yaml", text.encode())
    job = Job.load(plan)
    state = make.llama()
    for stage in range(2):
        own = {}
        for name, tensor in state.items():
            parts = name.split(".")
            layer = int(parts[2]) if parts[1] == "layers" else None
            first, last = name.startswith("model.embed"), name.startswith(("lm_head", "model.norm"))
            if (layer is not None and layer // 2 == stage) or (first and stage == 0) or (last and stage == 1):
                shifted = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer % 2}.")
                own[shifted] = tensor
        rank = make.folder / f"iter_0000001/mp_rank_00_{stage:03d}"
        rank.mkdir(parents=True)
        torch.save({"model": own, "iteration": 1, "checkpoint_version": 3.0}, rank / "model_optim_rng.pt")
    code, out, _ = command(make.folder / "iter_0000001", "--model", plan)
    assert "equal" in out, out
    stored = [round(stage.params_bytes) for stage in estimate(job).memory.stages]
    assert [f"{size:,}" in out for size in stored] == [True, True]
    assert (code, "against the plan: equal" in out) == (0, True)


def run(*argv, **more):
    code = "import sys; from steptime.commands.summarize_ckpt import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], capture_output=True, cwd=ROOT, timeout=60, check=False, **more
    )


def test_closed_pipe_is_no_error(model):
    code = "import sys; from steptime.commands.summarize_ckpt import main; sys.exit(main())"
    command = f'"{sys.executable}" -c "{code}" "{model}" --tensors | head -1'
    done = subprocess.run(command, shell=True, capture_output=True, cwd=ROOT, timeout=60, check=True)
    assert (done.stderr, len(done.stdout.splitlines())) == (b"", 1)


def test_no_color_in_a_pipe_and_ascii_terminals(make):
    name = "w\u00e9ight\u202e"
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    path = make.write("m.safetensors", make.raw_safetensors(header, bytes(4)))
    done = run(path, env=os.environ | {"PYTHONIOENCODING": "ascii", "FORCE_COLOR": ""})
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert b"w\\xe9ight\\u202e" in done.stdout


def test_terminal_gets_color_unless_told_not_to(make, model):
    import pty

    def on_terminal(**environment):
        parent, child = pty.openpty()
        code = "import sys; from steptime.commands.summarize_ckpt import main; sys.exit(main())"
        plain = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(model)], stdout=child, cwd=ROOT, env=plain | environment
        )
        os.close(child)
        out = b""
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:
                break
            if not part:
                break
            out += part
        os.close(parent)
        assert process.wait(timeout=30) == 0
        return out

    assert b"\x1b[1m" in on_terminal()
    assert b"\x1b" not in on_terminal(NO_COLOR="1")
    assert b"\x1b[1m" in run(model, env=os.environ | {"FORCE_COLOR": "1", "NO_COLOR": ""}).stdout
    assert b"\x1b" not in run(model, env=os.environ | {"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout


def test_neither_torch_nor_numpy_nor_pydantic_is_imported(model):
    code = (
        "import sys; from steptime.commands import summarize_ckpt; summarize_ckpt.main(sys.argv[1:]);"
        "print({'torch', 'numpy', 'pydantic', 'yaml', 'safetensors'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stderr == b"set()\n"


def test_large_checkpoints_have_short_reports(make, command):
    header = {f"t{n}.w{n}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n in range(20_000)}
    path = make.write("m.safetensors", make.raw_safetensors(header, bytes(80_000)))
    assert len(command(path)[1].splitlines()) < 60


def test_python_api_and_notebook_table(model):
    summary = summarize_checkpoint(model)
    assert isinstance(summary, Summary)
    assert summary.params == 229_952
    assert "safetensors, 229,952 parameters" in repr(summary)
    html = summary._repr_html_()
    assert "<table>" in html
    assert "229,952 parameters, complete" in html


def test_nothing_read_is_not_complete():
    summary = summarize_checkpoint("/nowhere/at/all")
    assert (summary.complete, summary.exit_code) == (False, 2)
    assert "incomplete" in summary._repr_html_()


def test_names_are_escaped_in_html(make):
    header = {"<script>alert(1)</script>": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    path = make.write("m.safetensors", make.raw_safetensors(header, bytes(4)))
    assert "<script>" not in summarize_checkpoint(path)._repr_html_()
