"""Bounds that no file may break: 5 s and 500 MB, for a million tensors 10 s and 1 GB; every number in 64 bits."""

import argparse
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steptime.checkpoint.readers import safetensors
from steptime.checkpoint.source import Source

ROOT = Path(__file__).parents[2]
BUSY = 3  # times as slow a machine may be that runs other tests beside these


def npy(shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def gguf(dims):
    """A GGUF file of one float32 tensor "a" of these dimensions."""
    return (
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", 0, 0) + bytes(64)
    )  # fmt: skip


def entry(shape):
    return {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}


ASTRONOMIC = {
    "safetensors": lambda raw: raw(entry([10**18] * 60), bytes(8)),
    "safetensors, one dimension": lambda raw: raw(entry([10**400]), bytes(8)),
    "gguf": lambda raw: gguf([2**63] * 60),
    "npy": lambda raw: npy(", ".join(["9" * 18] * 60)),
    "npy, long dimension": lambda raw: npy("9" * 4000 + ","),
}


@pytest.mark.parametrize("name", ASTRONOMIC)
@pytest.mark.parametrize("text", [False, True])
def test_astronomic_shapes_are_one_line(make, run_limited, name, text):
    path = make.write("file.npy" if "npy" in name else "file.bin", ASTRONOMIC[name](make.raw_safetensors))
    code, out = run_limited(path, text=text)
    assert code in (1, 2)
    if not text:
        assert len(out["problems"]) <= 3
        assert {problem["code"] for problem in out["problems"]} & {"BAD_TENSOR", "INVALID_HEADER"}


@pytest.mark.parametrize("text", [False, True])
def test_long_integers_and_odd_floats_in_arguments(make, run_limited, text):
    """Integers of 5,000 digits, infinities and NaN in pickled arguments, and of 4,000 digits in a config."""
    args = argparse.Namespace(num_layers=10**5000, lr=float("inf"), eps=float("nan"), hidden_size=-(10**5000))
    torch.save({"args": args, "iteration": 10**5000, "model": make.llama()}, make.folder / "a.pt")
    make.write("config.json", json.dumps({"hidden_size": 10**4000, "num_hidden_layers": 10**4000}).encode())
    code, out = run_limited(make.folder / "a.pt", text=text)
    assert code == 0
    assert text or out["totals"]["params"] == 229_952


def closed(command, path, *argv):
    code = "import sys; from steptime.commands.summarize_ckpt import main; sys.exit(main())"
    words = " ".join(f'"{word}"' for word in (sys.executable, "-c", code, path, *argv))
    return subprocess.run(f"{words} {command}", shell=True, capture_output=True, cwd=ROOT, timeout=60, check=False)


@pytest.mark.parametrize("argv", [(), ("--json",), ("--tensors",), ("--id",)])
def test_closed_standard_output_is_no_traceback(make, argv):
    torch.save({"w": torch.zeros(3)}, make.folder / "w.pt")
    done = closed(">&-", make.folder / "w.pt", *argv)
    assert (done.returncode, done.stderr) == (0, b"")


def test_full_disk_is_one_line(make):
    torch.save({"w": torch.zeros(3)}, make.folder / "w.pt")
    done = closed("> /dev/full", make.folder / "w.pt", "--json")
    assert done.returncode == 2
    assert done.stderr == b"summarize-ckpt: cannot write to standard output (No space left on device)\n"


@pytest.mark.parametrize("name", [
    "zero_pp_rank_20000000_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_20000000_optim_states.pt",
    "model_world_size_999999_rank_7.pt", "mp_rank_20000000_model_states.pt", "layer_99999999-model_00-model_states.pt",
])  # fmt: skip
def test_numbers_in_names_cost_nothing(make, run_limited, name):
    torch.save({"module": {"w": torch.zeros(2)}}, make.folder / name)
    code, out = run_limited(make.folder, nbytes=100 << 20)
    assert code in (0, 1)
    assert len(out["problems"]) <= 12


def headers(folder, tensors, count):
    folder.mkdir()
    for number in range(count):
        header, at = {}, 0
        for name in tensors(number):
            header[name] = {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]}
            at += 8
        raw = json.dumps(header).encode()
        (folder / f"part{number}.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))


@pytest.mark.parametrize(("tensors", "params"), [
    (lambda n: [f"layer.{n}.weight"], 10_000), (lambda n: ["a.weight", "b.weight"], 20_000),
])  # fmt: skip
def test_five_thousand_small_files(make, run_limited, tensors, params):
    """One tensor each with names of their own, and two of equal names in every file, none of them a copy."""
    headers(make.folder / "many", tensors, 5_000)
    code, out = run_limited(make.folder / "many", seconds=1.25 * BUSY)
    assert (code, out["totals"]["params"]) == (0, params)


def test_a_quarter_of_a_million_tensors(make, run_limited):
    """25,000 layers of ten matrices 2 x 2: 1,000,000 parameters."""
    path = make.folder / "many.safetensors"
    text = ",".join(
        f'"model.layers.{n // 10}.mlp.w{n % 10}.weight":{{"dtype":"BF16","shape":[2,2],"data_offsets":[{8 * n},{8 * n + 8}]}}'
        for n in range(250_000)
    )
    raw = f"{{{text}}}".encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + 2_000_000)
    del text, raw
    code, out = run_limited(path, text=True, seconds=2.5 * BUSY, nbytes=1 << 28)
    assert (code, "parameters 1,000,000" in out, "model.layers.* x25000" in out) == (0, True, True)


def test_fifo_inside_a_store_does_not_block(make, run_limited):
    make.write("d/manifest.ocdbt", b"\x0c\xdb\x3a\x2a" + bytes(60))
    os.mkfifo(make.folder / "d" / "pipe")
    code, out = run_limited(make.folder / "d", seconds=10, nbytes=1 << 30)
    assert code == 2
    assert out["problems"][0]["code"] == "NOT_A_FILE"


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | names,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=3),
    max_leaves=6,
)  # fmt: skip
tensors = st.builds(
    lambda shape, start: {"dtype": "F32", "shape": shape, "data_offsets": [start, start + 4 * (shape or [1])[0]]},
    st.lists(st.integers(0, 9), max_size=2), st.integers(0, 99),
)  # fmt: skip


TENSOR_KEYS = {"dtype", "shape", "data_offsets"}


@given(
    st.dictionaries(names, tensors | json_values, max_size=4),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
)
def test_header_is_read_as_json_reads_it(tmp_path_factory, header, separators):
    """Every spelling gives the entries that json.loads gives, in order."""
    text = json.dumps(header, separators=separators, ensure_ascii=len(header) % 2 == 0)
    path = tmp_path_factory.getbasetemp() / "h.safetensors"
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + bytes(200))
    with Source(str(path), "h") as source:
        found = safetensors.read(source)
    valid = {name: entry for name, entry in header.items() if type(entry) is dict and entry.keys() == TENSOR_KEYS}
    assert [t.name for t in found.tensors] == list(valid)
    assert [list(t.shape) for t in found.tensors] == [entry["shape"] for entry in valid.values()]
    assert [[t.start, t.start + t.nbytes] for t in found.tensors] == [e["data_offsets"] for e in valid.values()]
    bad = [problem.tensor for problem in found.problems if problem.code == "BAD_TENSOR"]
    assert bad == [name for name in header if name not in valid]


@pytest.mark.parametrize(
    "text", ["{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":1,}', "{,}", '{"a":1}x', '{"a" 1}', "{1:2}", "{}}"]
)
def test_broken_headers_are_refused(make, text):
    path = make.write("x.safetensors", make.raw_safetensors(text.encode()))
    with Source(str(path), "x") as source, pytest.raises(safetensors.UnreadableError, match="header is not JSON"):
        safetensors.read(source)


def test_a_number_of_5000_digits_is_a_bad_tensor(make, summarize, codes):
    """More digits than Python converts (4,300): one problem of that tensor, and the others are read."""
    header = (
        json.dumps(entry([2]))[:-1] + ', "b": {"dtype": "F32", "shape": [' + "9" * 5000 + '], "data_offsets": [8, 8]}}'
    )
    found = summarize(make.write("x.safetensors", make.raw_safetensors(header.encode(), bytes(8))))
    assert codes(found) == {"BAD_TENSOR"}
    assert found.params == 2


def test_null_is_no_metadata(make, summarize, codes):
    """MLX writes null; the library reads it as none."""
    path = make.write("x.safetensors", make.raw_safetensors({"__metadata__": None} | entry([2]), bytes(8)))
    assert codes(summarize(path)) == set()
