"""Formats by other names: Keras archives, Flax's own saves, and what is refused by name."""

import io
import zipfile

import h5py
import msgpack
import numpy as np
import pytest


def keras(method=zipfile.ZIP_STORED):
    """A .keras archive as Keras 3 writes it: dense of 4 x 8 + 8 = 40 parameters, one optimizer slot of 40."""
    inside = io.BytesIO()
    with h5py.File(inside, "w") as file:
        for group in ("layers/dense/vars", "optimizer/vars"):
            file[f"{group}/0"] = np.zeros((4, 8), "float32")
            file[f"{group}/1"] = np.zeros(8, "float32")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("metadata.json", '{"keras_version": "3.15.1"}')
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", inside.getvalue())
    return out.getvalue()


def test_keras_archive(make, summarize, codes):
    summary = summarize(make.write("m.keras", keras()))
    assert codes(summary) == set()
    assert (summary.params, summary.counted[0].format) == (40, "Keras")
    assert summary.by_role["optimizer"]["bytes"] == 160
    assert codes(summarize(make.write("z.keras", keras(zipfile.ZIP_DEFLATED)))) == {"COMPRESSED"}


def flax(rows):
    """flax/serialization.py: an array is extension 1 = [shape, dtype, bytes]."""
    array = msgpack.packb([[rows, 4], "float32", bytes(16 * rows)], use_bin_type=True)
    return msgpack.packb({"params": {"kernel": msgpack.ExtType(1, array)}, "step": 1})


def test_saves_of_flax_are_files_without_a_suffix(make, summarize, codes):
    """checkpoint_10 is newer than checkpoint_9; 3 x 4 parameters, not 3 x 4 + 2 x 4."""
    make.write("run/checkpoint_9", flax(2))
    make.write("run/checkpoint_10", flax(3))
    summary = summarize(make.folder / "run")
    assert codes(summary) == set()
    assert (summary.params, summary.step, summary.others) == (12, 10, ["checkpoint_9"])
    assert summarize(make.folder / "run", everything=True).params == 20


FILES = {
    "m.onnx": (b"\x08\x0e\x3a\x03\x12\x01g", "an ONNX model"), "m.pte": (b"\x18\0\0\0ET12" + bytes(20), "an ExecuTorch program"),
    "renamed.bin": (b"\x18\0\0\0ET12" + bytes(20), "an ExecuTorch program"),
    "m.tflite": (b"\x1c\0\0\0TFL3" + bytes(20), "a TensorFlow Lite model"),
    "saved_model.pb": (b"\x08\x01\x12\x02", "a TensorFlow SavedModel"),
    "model.ckpt-7.index": (b"\x00\x00\x01", "a TensorFlow checkpoint"),
    "model.ckpt-7.data-00000-of-00001": (bytes(9), "a TensorFlow checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_is_not_read_is_named(make, command, name):
    data, what = FILES[name]
    code, out, err = command(make.write(name, data))
    assert (code, out) == (2, "")
    assert err == f"summarize-ckpt: {name}: {what}: not supported; give the checkpoint that it was exported from\n"


@pytest.mark.parametrize(("names", "what"), [
    (("saved_model.pb", "variables/variables.index", "fingerprint.pb"), "a TensorFlow SavedModel"),
    (("checkpoint", "model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001", "graph.pbtxt"), "a TensorFlow checkpoint"),
    (("model.onnx", "README.md"), "an ONNX model"),
])  # fmt: skip
def test_folders_that_are_not_read_are_named(make, command, names, what):
    for name in names:
        make.write(f"folder/{name}", b"\x08\x01\x12\x02")
    code, _, err = command(make.folder / "folder")
    assert code == 2
    assert err.endswith(f"{what}: not supported; give the checkpoint that it was exported from\n")


def test_graph_beside_weights_is_no_problem(make, summarize, codes):
    make.save_safetensors(make.llama(), make.folder / "model.safetensors")
    make.write("onnx/model.onnx", b"\x08\x0e")
    assert codes(summarize(make.folder)) == set()
