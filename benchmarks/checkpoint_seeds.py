"""Small checkpoints in every format, as bytes by file name: what benchmarks/fuzz_checkpoint.py damages. Needs the test extra."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import struct
import tempfile
from pathlib import Path
from typing import Any

Files = dict[str, bytes]


def state() -> dict[str, Any]:
    """A model of two layers with what a reader looks at: tied, half-precision and empty tensors, experts, biases."""
    import torch

    found = {"model.embed_tokens.weight": torch.zeros(32, 8), "model.norm.weight": torch.ones(8)}
    for layer in range(2):
        p = f"model.layers.{layer}."
        found |= {f"{p}self_attn.{name}_proj.weight": torch.zeros(8, 8).bfloat16() for name in "qkvo"}
        found |= {f"{p}mlp.experts.{e}.w{n}.weight": torch.zeros(4, 8).half() for e in range(2) for n in (1, 2, 3)}
        found |= {
            f"{p}input_layernorm.weight": torch.ones(8),
            f"{p}self_attn.q_proj.bias": torch.zeros(8),
            f"{p}none": torch.ones(0),
        }
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def saved(value: Any, **options: Any) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def torch_seeds() -> dict[str, Files]:
    """What torch itself writes: containers, optimizers, TorchScript, an exported program, a distributed save."""
    import torch
    import torch.distributed.checkpoint as dcp

    weights = state()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    whole = {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(num_layers=2),
        "iteration": 7,
    }
    script, exported = io.BytesIO(), io.BytesIO()
    torch.jit.save(torch.jit.trace(model, torch.ones(1, 3)), script)
    torch.export.save(torch.export.export(model, (torch.ones(1, 3),)), exported)
    ranks = {}
    for tp in range(2):
        ranks[f"iter_0000007/mp_rank_{tp:02d}/model_optim_rng.pt"] = saved(whole)
    zero = {
        f"t/zero_pp_rank_{r}_mp_rank_00_optim_states.pt": saved({"optimizer_state_dict": optimizer.state_dict()})
        for r in (0, 1)
    }
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(dict(weights), checkpoint_id=folder, no_dist=True)
        distributed = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return {
        "zip": {"a.pt": saved(whole)}, "legacy": {"a.pt": saved(whole, _use_new_zipfile_serialization=False)},
        "protocol 4": {"a.pt": saved(weights, pickle_protocol=4)}, "script": {"a.pt": script.getvalue()},
        "exported": {"a.pt2": exported.getvalue()}, "dcp": distributed,
        "megatron dist": distributed | {"metadata.json": b'{"sharded_backend":"torch_dist"}', "common.pt": saved(whole)},
        "megatron": ranks | {"latest_checkpointed_iteration.txt": b"7"},
        "deepspeed": zero | {"latest": b"t", "t/mp_rank_00_model_states.pt": saved({"module": weights, "param_shapes": [{}]})},
        "meta": {f"consolidated.{n:02d}.pth": saved(weights) for n in (0, 1)} | {"params.json": b'{"dim":8,"n_layers":2}'},
        "ranks": {f"model_world_size_2_rank_{n}.pt": saved(weights) for n in (0, 1)},
    }  # fmt: skip


def array_seeds() -> dict[str, Files]:
    """numpy, Equinox, zarr, Orbax without its store, Flax's msgpack and Keras' HDF5."""
    import h5py
    import msgpack
    import numpy as np

    npy, npz, hdf5 = io.BytesIO(), io.BytesIO(), io.BytesIO()
    for shape in ((2, 3), (4,)):
        np.save(npy, np.ones(shape))
    np.savez_compressed(npz, a=np.ones((2, 3)), b=np.array([1, {"c": 2}], object))
    with h5py.File(hdf5, "w") as file:
        file["dense/kernel"] = np.ones((4, 8))
    array = msgpack.ExtType(1, msgpack.packb(((2, 3), "float32", bytes(24))))
    flax = msgpack.packb({"params": {"dense": {"kernel": array}}, "step": 3})
    zarr = b'{"shape":[2,3],"dtype":"<f4","chunks":[2,3],"zarr_format":2}'
    keys = [{"key": "params", "key_type": 2}, {"key": "w", "key_type": 2}]
    tree = {"tree_metadata": {"x": {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}}}
    return {
        "npy": {"a.npy": npy.getvalue()}, "eqx": {"a.eqx": b"{}\n" + npy.getvalue()}, "npz": {"a.npz": npz.getvalue()},
        "hdf5": {"a.h5": hdf5.getvalue()}, "flax": {"a.msgpack": flax},
        "flax folder": {"checkpoint_5": flax, "checkpoint_10": flax},
        "zarr": {"w/.zarray": zarr, "params.w/.zarray": zarr, "_METADATA": json.dumps(tree).encode()},
        "bare": {"a.pkl": pickle.dumps({"a": np.ones(3), "b": [1, 2, {"c": (None, 1.5)}]})},
    }  # fmt: skip


def other_seeds() -> dict[str, Files]:
    """Safetensors in its layouts, GGUF, nanotron, and a folder of everything."""
    from safetensors.torch import save

    weights = {name: tensor.clone() for name, tensor in state().items()}
    names, config = (
        list(weights),
        json.dumps({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}).encode(),
    )
    shards = {f"model-{n + 1:05d}-of-00002.safetensors": {k: weights[k] for k in names[n::2]} for n in (0, 1)}
    index = {"metadata": {"total_size": 1}, "weight_map": {k: file for file, part in shards.items() for k in part}}
    gguf = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + struct.pack("<Q1sIQ3s", 1, b"k", 8, 3, b"abc")
    gguf += (
        struct.pack("<Q1sIIQ3I", 1, b"a", 9, 4, 3, 1, 2, 3) + struct.pack("<Q1sIQIQ", 1, b"a", 1, 4, 0, 0) + bytes(64)
    )
    adapter = {f"base.layers.0.q_proj.lora_{k}.weight": weights[names[2]].clone() for k in "AB"}
    packed = {
        "layers.0.q.qweight": weights[names[0]].int(),
        "layers.0.q.scales": weights[names[1]],
        "layers.0.q.qzeros": weights[names[0]].int().clone(),
    }
    nanotron = {f"model/w/model_weight_tp-rank-{n}-of-2.safetensors": save({"data": weights[names[0]]}) for n in (0, 1)}
    whole = {"config.json": config, "model.safetensors": save(weights)}
    return {
        "safetensors": whole, "gguf": {"a.gguf": gguf},
        "shards": {"model.safetensors.index.json": json.dumps(index).encode(), "config.json": config}
        | {file: save(part) for file, part in shards.items()},
        "adapter": {"adapter_model.safetensors": save(adapter), "adapter_config.json": b'{"r":8,"peft_type":"LORA"}'},
        "packed": {"m.safetensors": save(packed), "config.json": b'{"quantization_config":{"quant_method":"gptq","bits":4}}'},
        "nanotron": nanotron | {"checkpoint_metadata.json": b'{"metas":{"last_train_step":3}}'},
        "pipeline": {"model_index.json": b'{"_class_name":"P"}', "unet/m.safetensors": save(weights),
                     "vae/m.safetensors": save(weights)},
    }  # fmt: skip


def seeds() -> dict[str, Files]:
    """{what it is: {file: bytes}} of small checkpoints in every format."""
    return torch_seeds() | array_seeds() | other_seeds()
