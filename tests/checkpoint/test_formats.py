"""Files of other libraries, made by them and compared with what they say."""

import argparse
import io
import json
import os
import struct
import time

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from steptime.checkpoint import summarize_checkpoint
from steptime.checkpoint.dtypes import GGML, SAFETENSORS
from steptime.checkpoint.scan import FolderScan
from steptime.checkpoint.stored_records import UnreadableError


def test_safetensors_agree_with_the_library(make, summarize):
    state = make.llama(2)
    for name, dtype in {"f8": torch.float8_e4m3fn, "i": torch.int64, "b": torch.bool, "c": torch.complex64}.items():
        state[name] = torch.ones(2, 3).to(dtype)
    state["zero_d"] = torch.tensor(1.0)
    state["empty"] = torch.ones(0, 4)
    make.save_safetensors(state, make.folder / "m.safetensors", metadata={"format": "pt"})
    summary = summarize(make.folder / "m.safetensors")
    with safe_open(make.folder / "m.safetensors", "pt") as file:
        expected = {
            k: (tuple(file.get_slice(k).get_shape()), SAFETENSORS[file.get_slice(k).get_dtype()])
            for k in list(file.keys())
        }
    assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == expected
    assert summary.totals["logical_bytes"] == sum(t.numel() * t.element_size() for t in state.values())
    assert summary.sections[0].facts["metadata"] == {"format": "pt"}
    assert summary.exit_code == 0


def test_sharded_model_with_index(make, summarize):
    state = make.llama()
    make.shards(state, 3)
    summary = summarize(make.folder)
    assert (summary.exit_code, summary.complete) == (0, True)
    assert summary.params == make.count(state)
    assert summary.sections[0].container == "3 shards + index"
    assert [node.name for node in summary.tree.children.values()] == ["model", "lm_head.weight"]


def test_gguf_agrees_with_the_library(make, summarize):
    path = make.folder / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(1000)])
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_q.weight", np.zeros((64, 64), np.float16))
        writer.add_tensor(f"blk.{layer}.attn_k.weight", np.zeros((16, 64), np.float16))
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
    packed = gguf.quants.quantize(np.zeros((8, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q8", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    summary = summarize(path)
    expected = {t.name: (tuple(int(n) for n in t.shape[::-1]), t.n_bytes) for t in gguf.GGUFReader(path).tensors}
    assert {t.name: (t.shape, t.nbytes) for t in summary.tensors} == expected
    assert summary.exit_code == 0
    assert summary.architecture["n_q_heads"] == {"value": 4, "from": "GGUF key-values"}
    assert summary.architecture["head_dim"]["value"] == 16
    data = path.read_bytes()
    cut = summarize(make.write("cut.gguf", data[: len(data) // 2]))
    assert (cut.exit_code, [p.code for p in cut.all_problems]) == (1, ["TRUNCATED"])


def test_ggml_sizes_are_those_of_the_library():
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.value in GGML:
            assert GGML[kind.value][1:] == (block, size), kind


def test_unknown_ggml_type_is_shown(make, summarize):
    tensor = struct.pack("<Q1sIQIQ", 1, b"a", 1, 4, 999, 0)
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor
    summary = summarize(make.write("x.gguf", data + bytes(64)))
    assert (summary.tensors[0].dtype, summary.exit_code) == ("ggml#999", 0)


@pytest.mark.parametrize("compressed", [False, True])
def test_npy_and_npz(make, summarize, compressed):
    arrays = {
        "a": np.ones((2, 3), np.float32),
        "b": np.ones(4, np.int64, order="F"),
        "c": np.float64(1),
        "d": np.ones((1, 0)),
    }
    (np.savez_compressed if compressed else np.savez)(make.folder / "z.npz", **arrays)
    summary = summarize(make.folder / "z.npz")
    assert {t.name: (t.shape, t.dtype, t.nbytes) for t in summary.tensors} == {
        k: (v.shape, str(v.dtype), v.nbytes) for k, v in arrays.items()
    }
    np.save(make.folder / "one.npy", arrays["a"])
    assert [t.shape for t in summarize(make.folder / "one.npy").tensors] == [(2, 3)]


def test_npy_of_objects_is_not_loaded(make, summarize, codes):
    np.save(make.folder / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    summary = summarize(make.folder / "o.npy")
    assert (summary.exit_code, codes(summary)) == (1, {"PICKLED_OBJECTS"})


def test_nanotron(make, summarize, codes):
    def save(name, tensor, **metadata):
        path = make.folder / f"model/model/decoder/0/{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        make.save_safetensors({"data": tensor}, path, metadata=metadata)

    for rank in range(2):
        save(
            f"qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2", torch.ones(4, 6), version="1.4",
            unsharded_shape="(8, 6)", local_global_slices_pairs=f"((0, 4), (0, 6)), (({4 * rank}, {4 * rank + 4}), (0, 6))",
        )  # fmt: skip
    save("norm/model_weight", torch.ones(6))
    metadata = {"version": "1.4", "tp": 2, "dp": 1, "metas": {"last_train_step": 50}}
    make.write("checkpoint_metadata.json", json.dumps(metadata).encode())
    summary = summarize(make.folder)
    assert (summary.params, summary.step, summary.exit_code) == (8 * 6 + 6, 50, 0)
    assert {t.name for t in summary.tensors} == {"model.decoder.0.qkv_proj.weight", "model.decoder.0.norm.weight"}
    next(make.folder.rglob("*tp-rank-1*")).unlink()
    assert "MISSING_RANK" in codes(summarize(make.folder))


def test_nanotron_directory_that_cannot_be_read_is_told(make, summarize, monkeypatch):
    """It holds parameters that are then not counted."""
    for name in ("norm", "head"):
        path = make.folder / f"model/{name}/model_weight.safetensors"
        path.parent.mkdir(parents=True)
        make.save_safetensors({"data": torch.ones(6)}, path)
    make.write("checkpoint_metadata.json", b"{}")
    folder = FolderScan.folder

    def refused(scan, path, rel="", depth=0):
        if rel == "model/head":
            raise UnreadableError("PERMISSION", "cannot read: Permission denied", rel)
        return folder(scan, path, rel, depth)

    monkeypatch.setattr(FolderScan, "folder", refused)
    summary = summarize(make.folder)
    assert (summary.params, summary.complete, summary.exit_code) == (6, False, 1)
    assert [(p.code, p.file) for p in summary.all_problems] == [("PERMISSION", "model/head")]


def test_dcp_in_hf_form_is_stitched(make, summarize, codes):
    for shard in range(2):
        info = {"w": {"saved_offsets": [shard * 3, 0]}}
        name = f"shard-{shard + 1:05d}-model-00001-of-00001.safetensors"
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"}
        make.save_safetensors({"w": torch.ones(3 - shard, 5)}, make.folder / name, metadata=metadata)
    summary = summarize(make.folder)
    assert [t.whole for t in summary.tensors] == [(5, 5), (5, 5)]
    assert (summary.params, codes(summary)) == (25, set())


def test_mixed_directory_counts_the_model_once(make, summarize):
    state = make.llama()
    make.shards(state)
    torch.save(state, make.folder / "pytorch_model.bin")
    torch.save({"state": {0: {"exp_avg": torch.ones(7)}}}, make.folder / "optimizer.pt")
    torch.save({"cpu": torch.ones(3)}, make.folder / "rng_state_0.pth")
    make.write("README.md", b"# hello")
    summary = summarize(make.folder)
    assert summary.exit_code == 0
    assert summary.params == make.count(state)
    assert [s.same_as for s in summary.sections if s.path == "pytorch_model.bin"] == ["safetensors"]
    assert summary.by_role["optimizer"]["bytes"] == 28
    assert summary.by_role["other"]["bytes"] == 12


def test_a_metadata_or_index_file_stands_for_its_directory(make, summarize):
    state = make.llama(2)
    make.shards(state)
    assert summarize(make.folder / "model.safetensors.index.json").params == make.count(state)


def test_config_beside_a_single_file_tells_the_head_width(make, summarize):
    make.save_safetensors(make.llama(2), make.folder / "model.safetensors")
    make.write("config.json", json.dumps({"num_attention_heads": 8}).encode())
    summary = summarize(make.folder / "model.safetensors")
    assert summary.architecture["head_dim"]["value"] == 8
    make.write("config.json", json.dumps({"num_attention_heads": 8, "hidden_size": 65}).encode())
    assert summarize(make.folder / "model.safetensors").exit_code == 1


def test_slow_file_systems_are_read_by_threads(make, summarize, monkeypatch):
    """Where opening a file waits, the files after the first few are opened together."""
    state = make.llama(8)
    make.shards(state, 40)
    real, running, most = os.open, [0], [0]

    def slow(path, *rest, **more):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        running[0] -= 1
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", slow)
    summary = summarize(make.folder)
    assert (summary.params, summary.exit_code) == (make.count(state), 0)
    assert most[0] > 4


def test_classes_that_training_arguments_need(make, summarize):
    make.save_safetensors(make.llama(2), make.folder / "model.safetensors")
    torch.save(argparse.Namespace(lr=0.1), make.folder / "training_args.bin")
    document = summarize(make.folder).to_dict()
    assert document["pickle"]["needs"] == ["argparse.Namespace"]
    assert document["pickle"]["weights_only_loadable"] is False
    assert [section["format"] for section in document["sections"]] == ["safetensors"]


def test_progress_is_told_file_by_file(make):
    make.shards(make.llama(4), 4)
    told = []
    summarize_checkpoint(make.folder, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 0x91, 0x81])
def test_header_lengths_that_look_like_other_formats(make, summarize, length):
    """The bytes of these lengths are those that begin a pickle or a msgpack map."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(length)
    summary = summarize(make.write("m.bin", make.raw_safetensors(header, bytes(4))))
    assert (summary.sections[0].format, summary.params, summary.exit_code) == ("safetensors", 1, 0)


def test_bytes_decide_not_the_name(make, summarize):
    out = io.BytesIO()
    torch.save({"a": torch.ones(2)}, out)
    assert summarize(make.write("lies.safetensors", out.getvalue())).sections[0].format == "torch zip"


def _llama_gguf(path, state, layers):
    names = {
        "model.layers.": "blk.", "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
        "self_attn.o_proj": "attn_output", "self_attn.": "attn_", "mlp.": "ffn_", "_proj": "",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    for name, tensor in state.items():
        renamed = name
        for old, new in names.items():
            renamed = renamed.replace(old, new)
        writer.add_tensor(renamed, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("layers", "factor"), [(4, 1), (2, 2)])
def test_gguf_beside_the_model_it_was_made_from_is_counted_once(make, summarize, layers, factor):
    """A GGUF file of another model is a set of its own, and its key-values say nothing about the first."""
    state = make.llama(4)
    make.save_safetensors(state, make.folder / "model.safetensors")
    other = make.llama(layers)
    _llama_gguf(make.folder / "m.gguf", other, layers)
    summary = summarize(make.folder)
    assert summary.counted[0].format == "safetensors"
    assert summary.params == make.count(state) + (factor - 1) * make.count(other)
    assert (summary.exit_code, len(summary.sections)) == (0, 2)
