"""Formats of arrays in folders and containers: Zarr, Orbax, Flax and HDF5."""

import argparse
import base64
import json
import subprocess
import sys
import zlib

import h5py
import msgpack
import numpy as np
import pytest
import tensorstore
import torch
import zarr

from steptime.checkpoint.readers import hdf5
from steptime.report.checkpoint_summary import report


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [2, 3])
def test_zarr(make, summarize, version):
    for name, shape in {"decoder.w": (8, 4), "optimizer.state.exp_avg.decoder.w": (8, 4)}.items():
        zarr.create_array(make.folder / name, shape=shape, chunks=(4, 4), dtype="f4", zarr_format=version)
    summary = summarize(make.folder)
    assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == {
        "decoder.w": ((8, 4), "float32"), "optimizer.state.exp_avg.decoder.w": ((8, 4), "float32"),
    }  # fmt: skip
    assert summary.by_role["optimizer"]["bytes"] == 128
    assert summary.exit_code == 0


def test_megatron_zarr_backend(make, summarize):
    zarr.create_array(make.folder / "decoder.w", shape=(8, 4), chunks=(4, 4), dtype="f4", zarr_format=2)
    make.write("metadata.json", json.dumps({"sharded_backend": "zarr"}).encode())
    torch.save({"args": argparse.Namespace(hidden_size=4), "iteration": 12}, make.folder / "common.pt")
    summary = summarize(make.folder)
    assert summary.counted[0].format == "Megatron dist_checkpointing (zarr)"
    assert (summary.params, summary.step, summary.exit_code) == (32, 12, 0)


def _tree_metadata(names):
    return {
        "tree_metadata": {
            str(tuple(name.split("."))): {
                "key_metadata": [{"key": part, "key_type": 2} for part in name.split(".")],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": shape},
            }
            for name, shape in names.items()
        }
    }


@pytest.mark.parametrize("ocdbt", [False, True], ids=["plain", "ocdbt"])
def test_orbax(make, summarize, codes, ocdbt):
    names = {"params.dense.kernel": [4, 3], "params.dense.bias": [3]}
    for name, shape in names.items():
        store = {"driver": "file", "path": f"{make.folder}/{name}/"}
        if ocdbt:
            store = {"driver": "ocdbt", "base": f"file://{make.folder}/", "path": f"{name}/"}
        spec = {"driver": "zarr", "kvstore": store, "metadata": {"dtype": "<f4", "shape": shape}, "create": True}
        tensorstore.open(spec).result().write(np.ones(shape, np.float32)).result()
    make.write("_METADATA", json.dumps(_tree_metadata(names)).encode())
    make.write("_CHECKPOINT_METADATA", json.dumps({"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}).encode())
    summary = summarize(make.folder)
    assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == {
        "dense.kernel": ((4, 3), "float32"), "dense.bias": ((3,), "float32"),
    }  # fmt: skip
    assert summary.exit_code == 0
    assert "; read in " in report(summary), "what tensorstore reads is not told as 0 B"
    make.write("_CHECKPOINT_METADATA", json.dumps({"init_timestamp_nsecs": 1}).encode())
    assert codes(summarize(make.folder)) == {"UNCOMMITTED"}


def test_ocdbt_without_the_extra_says_what_to_install(make, summarize, monkeypatch):
    """`_METADATA` records the shape of one written shard, not of the array: no number is better than that one."""
    make.write("manifest.ocdbt", b"\x0c\xdb\x3a\x2a")
    make.write("_METADATA", json.dumps(_tree_metadata({"params.w": [4, 3]})).encode())
    monkeypatch.setitem(__import__("sys").modules, "tensorstore", None)
    summary = summarize(make.folder)
    assert (summary.exit_code, summary.tensors) == (2, [])
    assert "1 arrays" in summary.all_problems[0].message
    assert "steptime[checkpoint-formats]" in summary.all_problems[0].message


def _flax(array):
    return msgpack.ExtType(1, msgpack.packb([array.shape, array.dtype.name, array.tobytes()]))


def test_flax_msgpack(make, summarize, codes):
    big = np.ones((300, 70), np.float32)
    tree = {"params": {"dense": {"kernel": _flax(big), "bias": _flax(np.ones(3, np.int32))}}, "step": 3}
    halves = {str(i): _flax(half) for i, half in enumerate(np.split(big.reshape(-1), 2))}
    tree["params"]["chunked"] = {"__msgpack_chunked_array__": True, "shape": {"0": 300, "1": 70}, "chunks": halves}
    data = msgpack.packb(tree, strict_types=True)
    summary = summarize(make.write("m.msgpack", data))
    assert {t.name: (t.shape, t.dtype, t.nbytes) for t in summary.tensors} == {
        "dense.kernel": ((300, 70), "float32", 84000), "dense.bias": ((3,), "int32", 12),
        "chunked": ((300, 70), "float32", 84000),
    }  # fmt: skip
    assert summary.io.bytes_read < len(data)
    cut = summarize(make.write("cut.msgpack", data[: len(data) // 2]))
    assert (cut.exit_code, codes(cut)) == (1, {"TRUNCATED"})


def test_optax_states_are_called_what_they_are(make, summarize):
    """optax.adam of a layer: a count, and mu and nu of every parameter, whose names end in the parameter's."""
    layer = {"kernel": _flax(np.ones((4, 8), np.float32)), "bias": _flax(np.ones(8, np.float32))}
    state = {"0": {"count": _flax(np.array(3)), "mu": layer, "nu": layer}}
    data = msgpack.packb({"params": layer, "opt_state": state}, strict_types=True)
    summary = summarize(make.write("checkpoint_3", data))
    assert summary.by_role["optimizer"] == {"kind": "adam", "states": ["count", "mu", "nu"], "bytes": 2 * 40 * 4 + 8}


def test_hdf5(make, summarize, codes):
    with h5py.File(make.folder / "m.h5", "w") as file:
        file["dense/kernel"] = np.ones((3, 4), np.float32)
        file["dense/bias"] = np.ones(4, np.float64)
        file["optimizer_weights/m"] = np.ones(5, np.float32)
    summary = summarize(make.folder / "m.h5")
    assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == {
        "dense.kernel": ((3, 4), "float32"), "dense.bias": ((4,), "float64"), "optimizer_weights.m": ((5,), "float32"),
    }  # fmt: skip
    with h5py.File(make.folder / "m.h5", "a") as file:
        file["outside"] = h5py.ExternalLink("/etc/passwd", "/")
    assert codes(summarize(make.folder / "m.h5")) == {"LINK"}


def test_hdf5_with_more_objects_than_are_read_says_so(make, summarize, codes, monkeypatch):
    with h5py.File(make.folder / "m.h5", "w") as file:
        for name in ("a", "b", "c"):
            file[name] = np.ones(2, np.float32)
    monkeypatch.setattr(hdf5, "MAX_OBJECTS", 2)
    summary = summarize(make.folder / "m.h5")
    assert (summary.params, summary.exit_code, codes(summary)) == (4, 1, {"TOO_MANY"})


def test_hdf5_without_the_extra_says_what_to_install(make, summarize, monkeypatch):
    make.write("m.h5", b"\x89HDF\r\n\x1a\n" + bytes(100))
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    summary = summarize(make.folder / "m.h5")
    assert summary.exit_code == 2
    assert "pip install 'steptime[checkpoint-formats]'" in summary.all_problems[0].message


HUNGRY = (
    "c-rgqaB<`1lHy_j0S*oZ76t(ZWbhvf8n~c*hM@#JTpa^IbOe+S^V<m~RCOt-dBv$fnh~atLVFn*SV3k%!wx2z0GEY;4k*2X2`0`6"
    "mXm;r3qswCt}Z0V)fJ@rKN^79^MM^gb1;m8kq8Dj)x!;BWYB=nOb`JU2Gn$k&SwUue2_{(1$(HN1A_@SgUNqph&(G$6eQ2Y1Tl~U"
    "np2n=4Oq~!78Fzrg4p<AKT>I2<yizPG<MjDE6*%AN6WL(@(i;)o57B%E<3d-"
    "FExjH<yo+wzY8b@!_u7rD{3Kwo{mQWap9=IJQ^nC004pEbt?"
)
"""A file of 3 kB, found by fuzzing (zlib, base 85), for which libhdf5 allocated 1.6 GB."""


def test_hdf5_that_asks_for_memory(make):
    make.write("m.h5", zlib.decompress(base64.b85decode(HUNGRY)))
    code = "import re, sys; from steptime.commands.summarize_ckpt import main; main(sys.argv[1:]);"
    code += "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    argv = [sys.executable, "-c", code, str(make.folder / "m.h5")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "h5py cannot read it" in done.stderr
    assert int(done.stdout.split()[-1]) / 1024 < 200
