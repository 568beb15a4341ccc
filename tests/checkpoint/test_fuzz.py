"""Arbitrary and damaged bytes: every reader ends in a summary or one clear problem, with nothing executed.

Few examples of each: benchmarks/fuzz.py, of which the last test runs the first cases, goes on for as long as it is asked to.
"""

import io
import json
import pickle
import pickletools
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.launch import fork
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from steptime.checkpoint import summarize_checkpoint
from steptime.checkpoint.pickles.interpreter import MalformedError, PickleInterpreter
from steptime.checkpoint.pickles.object_graph import tensors
from steptime.checkpoint.pickles.values import CallRecord, Pairs, Ref
from steptime.checkpoint.readers.torch_file import MAGIC

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FUZZ = settings(max_examples=50, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
OPCODES = [op.code.encode("latin-1") for op in pickletools.opcodes]
SNIPPETS = [
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"cos\nsystem\n", b"ctorch\nFloatStorage\n", b"X\x01\x00\x00\x00a",
    b"K\x01", b"K\x02",
    b"\x85", b"\x86", b"\x87", b"(", b")", b"}", b"]", b"R", b"b", b"u", b"e", b"Q", b"q\x00", b"h\x00", b"\x94", b"\x93",
]  # fmt: skip
streams = st.one_of(
    st.binary(max_size=400),
    st.lists(st.sampled_from(OPCODES + SNIPPETS), max_size=80)
    .map(b"".join)
    .map(lambda data: b"\x80\x02" + data + b"."),
)


@given(streams)
@settings(FUZZ, max_examples=250)
@example(b"\x80\x02]q\x00h\x00a.")
def test_pickle_machine_never_crashes(data):
    machine = PickleInterpreter(data)
    try:
        root = machine.run()
    except MalformedError:
        root = machine.salvage()
    assert 0 <= machine.end <= len(data) + 8
    for path, tensor in tensors(root):
        assert all(type(part) is str for part in path)
        assert tensor.numel >= 0


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def built(value):
    """What the machine's records stand for."""
    if type(value) is Pairs:
        return {built(k): built(v) for k, v in zip(value[::2], value[1::2], strict=True)}
    if type(value) is CallRecord:  # bytes before protocol 3
        assert value.path in ("_codecs.encode", "builtins.bytes", "__builtin__.bytes")
        return value.args[0].encode(value.args[1]) if value.args else b""
    if type(value) in (list, tuple):
        return type(value)(map(built, value))
    assert type(value) is not Ref
    return value


@given(plain, st.integers(0, pickle.HIGHEST_PROTOCOL))
@settings(FUZZ)
def test_plain_data_comes_out_as_it_went_in(value, protocol):
    data = pickle.dumps(value, protocol)
    machine = PickleInterpreter(data)
    assert built(machine.run()) == value
    assert machine.end == len(data)


def samples():
    out = io.BytesIO()
    state = {"a.weight": torch.ones(3, 4), "b": {"c": torch.ones(5).bfloat16()}}
    torch.save(state, out)
    legacy = io.BytesIO()
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    npy, npz = io.BytesIO(), io.BytesIO()
    np.save(npy, np.ones((2, 3)))
    np.savez_compressed(npz, a=np.ones((2, 3)))
    gguf = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q1sIQ3s", 1, b"k", 8, 3, b"abc")
    gguf += struct.pack("<Q1sIQIQ", 1, b"a", 1, 4, 0, 0) + bytes(64)
    flax = b"\x81\xa6params\x81\xa1w\xc7\x14\x01\x93\x91\x03\xa7float32\xc4\x06" + bytes(6)
    return {
        "zip": out.getvalue(), "legacy": legacy.getvalue(), "npy": npy.getvalue(), "npz": npz.getvalue(), "gguf": gguf,
        "flax": flax, "safetensors": save({"a": torch.ones(3), "b": torch.ones(2, 2)}),
        "bare": pickle.dumps({"a": np.ones(3), "b": [1, 2, {"c": (None, 1.5)}]}),
    }  # fmt: skip


SAMPLES = samples()


@pytest.mark.parametrize("kind", SAMPLES)
@given(data=st.data())
@settings(FUZZ, max_examples=25)
def test_damaged_files(tmp_path, kind, data):
    raw = bytearray(SAMPLES[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    path = tmp_path / "fuzzed.pt"
    path.write_bytes(bytes(raw[:end]))
    summary = summarize_checkpoint(path)
    assert summary.exit_code in (0, 1, 2)
    json.dumps(summary.to_dict(summary.tensors), allow_nan=False)
    assert bool(summary.sections) == (summary.exit_code != 2)


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"GGUF\x03\0\0\0", b"\x93NUMPY\x01\0", b"PK\x03\x04", pickle.dumps(MAGIC, 2), b"\x81\xa1a"]),
)
@settings(FUZZ)
def test_arbitrary_bytes_behind_every_magic(tmp_path, data, magic):
    path = tmp_path / "noise.bin"
    path.write_bytes(magic + data)
    summary = summarize_checkpoint(path)
    assert summary.exit_code in (0, 1, 2)
    assert summary.exit_code != 2 or len(summary.all_problems) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=6), json_values | st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "BF16", "F4", "??"]), "shape": st.lists(st.integers(-2, 9), max_size=3),
    "data_offsets": st.lists(st.integers(-5, 90), min_size=2, max_size=2),
}), max_size=5), st.integers(0, 100))  # fmt: skip
@settings(FUZZ)
def test_any_json_header_of_safetensors(tmp_path, header, size):
    text = json.dumps(header).encode()
    path = tmp_path / "h.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    summary = summarize_checkpoint(path)
    assert summary.exit_code in (0, 1)
    json.dumps(summary.to_dict(summary.tensors))


@given(json_values)
@settings(FUZZ)
def test_any_json_as_index_or_config(tmp_path, value):
    for name in (
        "model.safetensors.index.json",
        "config.json",
        "metadata.json",
        "_METADATA",
        "checkpoint_metadata.json",
    ):
        (tmp_path / name).write_text(json.dumps(value))
    header = json.dumps(
        {"layers.0.embed_tokens.weight": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}
    ).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (tmp_path / "model").mkdir(exist_ok=True)
    summary = summarize_checkpoint(tmp_path)
    assert summary.exit_code in (0, 1)
    json.dumps(summary.to_dict(), allow_nan=False)


PROGRAM = f"""
import runpy, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(BENCHMARKS)!r})
runpy.run_path({str(BENCHMARKS / "fuzz.py")!r}, run_name="__main__")
"""


def test_damaged_checkpoints_of_every_format(tmp_path):
    """The first cases of the program that runs for an hour."""
    script = tmp_path / "run_fuzz.py"
    script.write_text(PROGRAM, encoding="utf-8")
    done = fork(script, "checkpoints", "--cases", "150")
    assert (done.returncode, "150 cases" in done.stdout) == (0, True), done.stdout + done.stderr
