"""Parts of models: one shard of a set, adapters without their base, pipelines of several models."""

import json
from math import prod

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from steptime.checkpoint import tree
from steptime.checkpoint.stored_records import StoredTensor


@pytest.fixture
def shard(make):
    """The first of two shards, beside the config of the whole model."""
    config = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 160, "num_attention_heads": 8}
    make.write("config.json", json.dumps(config).encode())
    return make.folder / make.shards(make.llama())[0]


def test_one_shard_is_told_and_no_error(shard, command, summarize, codes):
    summary = summarize(shard)
    assert codes(summary) == set()
    assert (summary.exit_code, summary.complete) == (0, False)
    assert summary.architecture["n_layers"] == {"value": 4, "from": "config.json"}
    assert {entry["from"] for entry in summary.architecture.values()} == {"config.json"}  # shapes are of a part
    code, out, _ = command(shard)
    assert code == 0
    assert "safetensors, shard 1 of 2: give the directory, part of a set" in out.replace("\n ", ",").replace(",,", ",")


def test_one_of_metas_slices_is_told(make, summarize, codes):
    """Half of a matrix of 8 x 4 beside the other half: no model by itself; a lone consolidated.00.pth is one."""
    for rank in range(2):
        torch.save({"output.weight": torch.ones(4, 4)}, make.folder / f"consolidated.0{rank}.pth")
    summary = summarize(make.folder / "consolidated.01.pth")
    assert (summary.exit_code, summary.complete, codes(summary)) == (0, False, set())
    assert summary.counted[0].container == "slice 2 of 2: give the directory"
    assert summarize(make.folder).params == 32
    (make.folder / "consolidated.01.pth").unlink()
    assert summarize(make.folder / "consolidated.00.pth").complete


def test_without_a_config_a_shard_has_no_architecture(shard, summarize):
    (shard.parent / "config.json").unlink()
    summary = summarize(shard)
    assert (summary.architecture, summary.exit_code) == ({}, 0)


def test_one_gguf_of_a_split(make, summarize, codes):
    """llama.cpp's gguf-split numbers files in split.no (from 0) and split.count, whatever they are called."""
    path = make.folder / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.add_tensor("blk.1.attn_q.weight", torch.zeros(32, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    summary = summarize(path)
    assert codes(summary) == set()
    assert summary.counted[0].container == "shard 2 of 3: give the directory"


def lora(prefix="base_model.model.model.layers.0.self_attn", rank=8):
    """PEFT's names: A [rank, in], B [out, rank] for q (64 x 64) and v (16 x 64): 8 x (64 + 64 + 64 + 16) = 1,664."""
    return {
        f"{prefix}.{name}.lora_{end}.weight": torch.zeros(shape)
        for name, out in (("q_proj", 64), ("v_proj", 16))
        for end, shape in (("A", (rank, 64)), ("B", (out, rank)))
    }


def test_peft_folder_is_an_adapter(make, command, summarize, codes):
    folder = make.folder / "adapter"
    folder.mkdir()
    save_file(lora(), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]}
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "meta-llama/Llama-3.1-8B"})
    )
    summary = summarize(folder)
    assert codes(summary) == set()
    assert (summary.params, summary.architecture) == (1_664, {})
    assert summary.to_dict()["adapter"] == {
        "kind": "LORA", "rank": 8, "ranks": [8], "alpha": 16, "targets": ["q_proj", "v_proj"], "base": "meta-llama/Llama-3.1-8B",
    }  # fmt: skip
    text = command(folder)[1]
    assert "adapter: LORA, base model not included" in text
    assert "base     meta-llama/Llama-3.1-8B" in text


def test_adapter_by_its_names_alone(make, summarize):
    save_file(lora(rank=4), make.folder / "style.safetensors")
    found = summarize(make.folder / "style.safetensors").adapter
    assert (found["rank"], found["targets"], found["base"]) == (4, ["q_proj", "v_proj"], None)


def test_base_with_lora_beside_it_is_a_model(make, summarize):
    save_file(make.llama() | lora("model.layers.0.self_attn"), make.folder / "model.safetensors")
    summary = summarize(make.folder / "model.safetensors")
    assert summary.adapter is None
    assert summary.architecture["n_layers"]["value"] == 4


def test_models_of_a_pipeline_keep_their_names_apart(make, command, summarize, codes):
    """Both models call a tensor conv_in.weight, [8, 4] and [6, 3]: 32 + 18 parameters and two names."""
    for name, shape in (("unet", (8, 4)), ("vae", (6, 3))):
        (make.folder / "sd" / name).mkdir(parents=True)
        save_file(
            {"conv_in.weight": torch.zeros(shape)}, make.folder / "sd" / name / "diffusion_pytorch_model.safetensors"
        )
    make.write("sd/model_index.json", json.dumps({"_class_name": "StableDiffusionPipeline"}).encode())
    summary = summarize(make.folder / "sd")
    assert codes(summary) == set()
    assert summary.params == 50
    assert {t.name for t in summary.tensors} == {"unet.conv_in.weight", "vae.conv_in.weight"}
    assert [child.name.partition(".")[0] for child in summary.tree.children.values()] == ["unet", "vae"]
    assert "Diffusers (safetensors), StableDiffusionPipeline" in command(make.folder / "sd")[1]


def test_models_of_a_parent_folder_are_not_mixed(make, command, summarize, codes, tmp_path):
    """A llama of width 64 (229,952 parameters, docs/checkpoints.md) and one of width 128 with other names, 2 x 32 x 128
    + 2 x (2 x 128^2 + 2 x 16 x 128 + 3 x 96 x 128 + 2 x 128) + 128 = 156,288: no architecture of both."""
    for name, state in (("a", make.llama()), ("b", make.llama(2, hidden=128, inter=96, vocab=32))):
        (make.folder / name).mkdir()
        own = state if name == "a" else {key.replace("model.", "transformer."): tensor for key, tensor in state.items()}
        save_file(own, make.folder / name / "model.safetensors")
    make.write("a/config.json", json.dumps({"hidden_size": 64, "num_hidden_layers": 4}).encode())
    summary = summarize(make.folder)
    assert codes(summary) == set()
    assert summary.architecture == {}
    found = {m.path: (m.params, m.architecture["n_layers"]["value"]) for m in summary.models}
    assert found == {"a/model.safetensors": (229_952, 4), "b/model.safetensors": (156_288, 2)}
    code, out, _ = command(make.folder)
    assert code == 0
    assert "2 models: give the path of one to see its architecture" in out
    code, _, err = command(make.folder, "--emit-config", tmp_path / "x.yaml")
    assert (code, "2 models here: give one of them" in err) == (2, True)
    assert summarize(make.folder / "a").models == []


def test_two_files_of_one_folder_are_told_apart_by_their_names(make, summarize):
    for name in ("generator", "judge"):
        save_file({"conv.weight": torch.zeros(3, 3), "out.weight": torch.zeros(2)}, make.folder / f"{name}.safetensors")
    summary = summarize(make.folder)
    assert summary.params == 2 * 11
    assert sorted({t.name for t in summary.tensors})[:2] == ["generator.conv.weight", "generator.out.weight"]


NAMES = st.lists(st.sampled_from(["", "0", "1", "12", "a", "b"]), min_size=1, max_size=5).map(".".join)


@given(st.lists(st.tuples(NAMES, st.sampled_from([(2,), (3, 4)])), max_size=30))
def test_a_tree_holds_every_tensor_once(named):
    """Modules that are tensors too, pieces of one name and names of dots alone included: a module without a tensor of its
    own has the elements of its parts, as often as it is repeated; the root has them all."""
    tensors = [StoredTensor(name, shape, "float32", 4 * prod(shape), unique=prod(shape)) for name, shape in named]
    root = tree.build(tensors)
    assert root.params == sum(t.unique for t in tensors)
    assert root.nbytes == sum(t.nbytes for t in tensors)
    stack = [root]
    while stack:
        node = stack.pop()
        below = list(node.children.values())
        parts = node.repeat * sum(child.params for child in below)
        assert parts == node.params if below and node.shape is None else parts <= node.params
        stack += below


def test_equal_layers_are_folded_and_others_are_not():
    """Layers 0, 1 and 3 are alike, layer 2 is wider: [0-1,3] of 3 * (4 + 2) elements beside 2 of 8 + 2."""
    shapes = {f"h.{n}.{part}": shape for n in range(4) for part, shape in (("w", (2, 4 if n == 2 else 2)), ("b", (2,)))}
    root = tree.build([StoredTensor(k, v, "float32", 4 * prod(v), unique=prod(v)) for k, v in shapes.items()])
    (layers,) = root.children.values()
    found = {node.name: (node.params, node.repeat) for node in layers.children.values()}
    assert found == {"[0-1,3]": (18, 3), "2": (10, 1)}
