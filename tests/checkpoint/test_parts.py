"""Parts of models: one shard of a set, adapters without their base, pipelines of several models."""

import json

import gguf
import pytest
import torch
from safetensors.torch import save_file


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
    code, out, _ = command(shard)
    assert code == 0
    assert "safetensors, shard 1 of 2: give the directory, part of a set" in out.replace("\n ", ",").replace(",,", ",")


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
    assert "adapter: LORA, the base model is not in it" in text
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


def test_two_files_of_one_folder_are_told_apart_by_their_names(make, summarize):
    for name in ("generator", "judge"):
        save_file({"conv.weight": torch.zeros(3, 3), "out.weight": torch.zeros(2)}, make.folder / f"{name}.safetensors")
    summary = summarize(make.folder)
    assert summary.params == 2 * 11
    assert sorted({t.name for t in summary.tensors})[:2] == ["generator.conv.weight", "generator.out.weight"]
