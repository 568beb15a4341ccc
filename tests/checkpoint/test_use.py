"""What an option means, how two checkpoints are compared, and what of a name and a type a row shows."""

import json
import re

import gguf
import pytest
import torch
from safetensors.torch import save_file

from steptime import summarize_checkpoint
from steptime.report.checkpoint_summary import report
from steptime.report.table import PLAIN


@pytest.fixture
def model(make):
    make.save_safetensors(make.llama(), make.folder / "model.safetensors")
    return make.folder / "model.safetensors"


def test_path_behind_an_option_is_the_path(model, command):
    """--json PATH and --tensors PATH mean the path; a glob or "full" goes with a path of its own."""
    assert json.loads(command("--json", model)[1])["totals"]["tensors"] == 39
    assert "tensors" not in json.loads(command("--json", model)[1])
    assert len(command("--tensors", model)[1].splitlines()) == 39
    assert len(command("--tensors", "*norm*", model)[1].splitlines()) == 9
    assert len(json.loads(command("--json", "full", model)[1])["tensors"]) == 39
    assert len(json.loads(command("--tensors", "*norm*", "--json", model)[1])["tensors"]) == 9
    for argv in (("--json", "brief", model), ("--json",), ("--tensors",), ("--json", "full")):
        code, out, err = command(*argv)
        assert (code, out, err[:16], len(err.splitlines())) == (2, "", "summarize-ckpt: ", 1)


@pytest.mark.parametrize(
    "more",
    [
        ["--json"],
        ["--tensors"],
        ["--depth", "2"],
        ["--diff", "x"],
        ["--units", "si"],
        ["--model", "x"],
        ["--all"],
        ["--strict"],
    ],
)
def test_id_refuses_other_options(model, command, more):
    code, out, err = command(model, "--id", *more)
    assert (code, out) == (2, "")
    assert f"--id: not together with {more[0]}" in err


def test_a_printed_config_stands_alone(command):
    code, _, err = command("x", "--emit-config", "-", "--json", "--strict")
    assert (code, err.splitlines()[0]) == (2, "summarize-ckpt: --emit-config -: not together with --json")


def test_depth_is_a_number_of_levels(model, command):
    for text in ("-1", "two"):
        code, out, err = command(model, "--depth", text)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"invalid count '{text}'" in err


def test_equal_rows_of_a_difference_are_one_line(make, command):
    """Two models of 4 layers, 4 x 3 MLP matrices of 160 and 192: three lines, not twelve."""
    for name, inter in (("a", 160), ("b", 192)):
        make.save_safetensors(make.llama(inter=inter), make.folder / f"{name}.safetensors")
    code, out, _ = command(make.folder / "a.safetensors", "--diff", make.folder / "b.safetensors")
    assert code == 1
    assert sorted(out.splitlines()) == [
        "~ model.layers.[0-3].mlp.down_proj.weight bfloat16 [64, 160] -> bfloat16 [64, 192]  x4",
        "~ model.layers.[0-3].mlp.gate_proj.weight bfloat16 [160, 64] -> bfloat16 [192, 64]  x4",
        "~ model.layers.[0-3].mlp.up_proj.weight bfloat16 [160, 64] -> bfloat16 [192, 64]  x4",
    ]
    document = json.loads(command("--json", make.folder / "a.safetensors", "--diff", make.folder / "b.safetensors")[1])
    assert len(document["diff"]) == 12


def test_config_of_another_folder_is_not_held_against_a_model(make, summarize, codes):
    for name, layers in (("a", 2), ("b", 4)):
        make.write(f"{name}/config.json", json.dumps({"num_hidden_layers": layers, "hidden_size": 64}).encode())
        make.save_safetensors(make.llama(layers), make.folder / name / "m.safetensors")
    summary = summarize(make.folder)
    assert codes(summary) == set()
    assert "and 1 other set of files, complete" in report(summary)
    assert "mlp                      down_proj [64,160] +2" in report(summarize(make.folder / "a"))


def test_prefix_of_all_names_is_one_line(make, model, command):
    state = {f"module.{name}": tensor for name, tensor in make.llama().items()}
    make.save_safetensors(state, make.folder / "ddp.safetensors")
    code, out, _ = command(model, "--diff", make.folder / "ddp.safetensors")
    assert (code, out.splitlines()) == (1, [
        "all names start there with 'module.'; compared without it:",
        "shapes and types are the same: 39 tensors",
    ])  # fmt: skip
    state["module.model.norm.weight"] = torch.zeros(3)
    make.save_safetensors(state, make.folder / "ddp.safetensors")
    out = command(model, "--diff", make.folder / "ddp.safetensors")[1]
    assert out.splitlines()[1:] == ["~ model.norm.weight bfloat16 [64] -> float32 [3]"]


def test_stacked_layers_are_compared_layer_by_layer(make, command):
    stacked = {"decoder.layers.mlp.weight": torch.zeros(4, 6, 5), "decoder.norm.weight": torch.zeros(5)}
    single = {f"decoder.layers.{n}.mlp.weight": torch.zeros(6, 5) for n in range(3)} | {
        "decoder.norm.weight": torch.zeros(5)
    }
    for name, state in (("a", stacked), ("b", single)):
        make.save_safetensors(state, make.folder / f"{name}.safetensors")
    code, out, _ = command(make.folder / "a.safetensors", "--diff", make.folder / "b.safetensors")
    assert (code, out) == (1, "- decoder.layers.3.mlp.weight float32 [6, 5]\n")


def test_long_names_keep_their_end(make, command):
    """What tells names of one module apart stands at their end."""
    deep = ".".join(f"a_module_with_a_long_name_{n}" for n in range(4))
    make.save_safetensors(
        {f"{deep}.{end}": torch.zeros(2) for end in ("first", "second")}, make.folder / "deep.safetensors"
    )
    out = command(make.folder / "deep.safetensors", "--depth", "3")[1]
    assert re.search(r"…\S*first ", out)
    assert re.search(r"…\S*second ", out)
    assert max(map(len, out.splitlines()[1:])) <= 80


def test_terminal_gives_its_width(make, monkeypatch):
    deep = ".".join(f"a_module_with_a_long_name_{n}" for n in range(4))
    make.save_safetensors(
        {f"{deep}.{end}": torch.zeros(2) for end in ("first", "second")}, make.folder / "deep.safetensors"
    )
    summary = summarize_checkpoint(make.folder / "deep.safetensors")
    wide = report(summary, 3, style=PLAIN._replace(width=200))
    assert f"{deep}.second " in wide
    assert "…" not in wide


def test_types_stand_in_the_tree(make, command):
    """A type per row; "mixed" where the parts of a module differ."""
    state = make.llama()
    state["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    make.save_safetensors(state, make.folder / "mixed.safetensors")
    out = command(make.folder / "mixed.safetensors", "--depth", "2")[1]
    assert re.search(r"model\.norm +\[64\] +bf16 +64 ", out)
    assert re.search(r"\n    0 +.* mixed ", out)
    assert re.search(r"\n      self_attn +.* mixed ", out)
    assert re.search(r"\n    \[1-3\] x3 +.* bf16 ", out)


def test_metadata_and_key_values_are_shown(make, command):
    save_file(
        {"w": torch.zeros(2)}, make.folder / "w.safetensors", {"author": "somebody", "license": "x" * 500, "step": "7"}
    )
    out = command(make.folder / "w.safetensors")[1]
    assert re.search(r"metadata\n(.*\n)*  author +somebody\n", out)
    assert "1 more (--json shows them)" in out
    writer = gguf.GGUFWriter(make.folder / "m.gguf", "llama")
    writer.add_context_length(4096)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", torch.zeros(32, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = command(make.folder / "m.gguf")[1]
    assert re.search(r"GGUF key-values\n  general.architecture +llama\n  llama.context_length +4096\n", out)
    assert (
        json.loads(command(make.folder / "m.gguf", "--json")[1])["sections"][0]["metadata"]["llama.context_length"]
        == 4096
    )
