"""Archives and headers that lie or break off: zip, safetensors, GGUF; each ends in one clear line and its exit code."""

import io
import json
import os
import struct
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp


def saved(state):
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


ONE = {"a": torch.ones(3)}


def zip_rows():
    whole = saved(ONE)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        stream = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))

    def built(*entries, method=zipfile.ZIP_STORED):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as archive:
            for name, data in entries:
                archive.writestr(name, data)
        return out.getvalue()

    good = built(("archive/data.pkl", stream), ("archive/data/0", bytes(12)))
    encrypted = bytearray(good)
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        encrypted[good.index(signature) + at] |= 1
    return {
        "cut_at_10_bytes": (whole[:10], 2, "TRUNCATED"),
        "no_end_record": (whole[:-22], 1, "TRUNCATED"),
        "compressed": (built(("archive/data.pkl", stream), method=zipfile.ZIP_DEFLATED), 2, "COMPRESSED"),
        "zip_bomb": (built(("archive/data.pkl", bytes(20_000_000)), method=zipfile.ZIP_DEFLATED), 2, "COMPRESSED"),
        "encrypted": (bytes(encrypted), 2, "COMPRESSED"),
        "two_pickles": (
            built(("archive/data.pkl", stream), ("archive/data/0", bytes(12)), ("x/data.pkl", b"\x80\x02N.")), 1, "TWO_PICKLES",
        ),
        "path_escape": (
            built(("archive/data.pkl", stream), ("archive/data/0", bytes(12)), ("../../x", b"")), 1, "PATH_ESCAPE",
        ),
        "no_pickle": (built(("readme.txt", b"hello")), 2, "NOT_TORCH"),
        "bad_crc": (good.replace(stream, stream[:-1] + b"."), 0, None),
        "prefix": (b"", 0, None),
        "garbage_directory": (good[:-22] + good[-22:-6] + b"\xff\xff\xff\x7f" + good[-2:], 2, "BAD_ZIP"),
    }  # fmt: skip


@pytest.mark.parametrize("name", [n for n in zip_rows() if n != "prefix"])
def test_zip_archives(make, summarize, codes, name):
    data, code, problem = zip_rows()[name]
    summary = summarize(make.write("z.pt", data))
    assert summary.exit_code == code
    assert codes(summary) == ({problem} if problem else set())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_pickle_entries(make, summarize, codes):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/data.pkl", b"\x80\x02]q\x00.")
    assert codes(summarize(make.write("d.pt", out.getvalue()))) == {"TWO_PICKLES"}


def test_wrong_checksum_is_ignored_as_torch_does(make, summarize):
    data = bytearray(saved(ONE))
    at = data.index(b"PK\x01\x02") + 16
    data[at] ^= 255
    assert summarize(make.write("crc.pt", bytes(data))).exit_code == 0


def test_million_entries(make, run_limited):
    names = b"".join(
        struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0)
        + b"a/data/%06d" % (n % 10**6)
        for n in range(1_000_000)
    ).replace(b"a/data/", b"a/data/")
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, len(names), 4, 0)
    assert run_limited(make.write("m.pt", b"PK\x03\x04" + names + end))[0] == 2


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def pairs(*items):
    return ("{" + ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in items) + "}").encode()


SAFETENSORS = {
    "length_2_63": (struct.pack("<Q", 2**63) + b"{}", 2, "HEADER_TOO_LARGE"),
    "length_2_64": (struct.pack("<Q", 2**64 - 1) + b"{}", 2, "HEADER_TOO_LARGE"),
    "length_beyond_file": (struct.pack("<Q", 5000) + b"{}", 2, "INVALID_HEADER_LENGTH"),
    "length_over_limit": (struct.pack("<Q", 100_000_001) + b"{}", 2, "HEADER_TOO_LARGE"),
    "length_0": (struct.pack("<Q", 0), 2, "INVALID_HEADER"),
    "three_bytes": (b"abc", 2, "HEADER_TOO_SMALL"),
    "no_bytes": (b"", 2, "EMPTY"),
    "duplicate": ((pairs(("a", entry()), ("a", entry())), 8), 1, {"DUPLICATE_KEY", "OVERLAP"}),
    "overlap": ((pairs(("a", entry()), ("b", entry(offsets=(4, 12)))), 12), 1, "OVERLAP"),
    "hole": ((pairs(("a", entry()), ("b", entry(offsets=(12, 20)))), 20), 1, "HOLE"),
    "trailing": ((pairs(("a", entry())), 20), 1, "TRAILING_BYTES"),
    "past_end": ((pairs(("a", entry(shape=(4,), offsets=(0, 16)))), 8), 1, "TRUNCATED"),
    "size_mismatch": ((pairs(("a", entry(shape=(3,)))), 8), 1, "SIZE_MISMATCH"),
    "negative_shape": ((pairs(("a", entry(shape=(-1,)))), 8), 1, {"BAD_TENSOR", "TRAILING_BYTES"}),
    "huge_shape": ((pairs(("a", entry(shape=(2**62, 2**62)))), 8), 1, {"SIZE_MISMATCH", "BAD_TENSOR"}),
    "float_offset": ((b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e9]}}', 8), 1, {"BAD_TENSOR", "TRAILING_BYTES"}),
    "long_integer": ((pairs(("a", entry())).replace(b"[2]", b"[" + b"9" * 5000 + b"]"), 8), 1, {"BAD_TENSOR", "TRAILING_BYTES"}),
    "deep_json": ((b'{"a":' * 100_000, 0), 2, "INVALID_HEADER"),
    "array_root": ((b"[1,2,3]", 0), 2, "INVALID_HEADER"),
    "metadata_of_numbers": ((b'{"__metadata__":{"a":1},"a":' + json.dumps(entry()).encode() + b"}", 8), 1, "METADATA"),
    "leading_space": ((b" " + pairs(("a", entry())), 8), 2, "INVALID_HEADER"),
    "not_utf8": ((b'{"\xff":1}', 0), 2, "INVALID_HEADER"),
    "lone_surrogate": ((b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", 8), 1, "BAD_NAME"),
    "escape_in_name": ((pairs(("a\x1b[31m\x07\n\u202e", entry())), 8), 0, None),
    "unknown_dtype": ((pairs(("a", entry(dtype="I4"))), 8), 0, None),
    "fp6": ((pairs(("a", entry(dtype="F6_E2M3", shape=(4,), offsets=(0, 3)))), 3), 0, None),
    "fp4": ((pairs(("a", entry(dtype="F4", shape=(4,), offsets=(0, 2)))), 2), 0, None),
    "e8m0": ((pairs(("a", entry(dtype="F8_E8M0", shape=(4,), offsets=(0, 4)))), 4), 0, None),
    "no_dtype": ((b'{"a":{}}', 0), 1, "BAD_TENSOR"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors_headers(make, command, name):
    data, code, problem = SAFETENSORS[name]
    if isinstance(data, tuple):
        data = make.raw_safetensors(data[0], bytes(data[1]))
    path = make.write("h.safetensors", data)
    got, out, _ = command(path, "--json")
    document = json.loads(out)
    assert got == code == document["exit_code"]
    expected = problem if isinstance(problem, set) else {problem} if problem else set()
    assert {p["code"] for p in document["problems"]} == expected
    got, out, err = command(path, "--tensors")
    assert got == code
    assert "\x1b" not in out + err
    assert "\u202e" not in out + err


def test_unknown_dtype_keeps_its_name_and_bytes(make, summarize):
    path = make.write("d.safetensors", make.raw_safetensors({"a": entry(dtype="Q7")}, bytes(8)))
    tensor = summarize(path).tensors[0]
    assert (tensor.dtype, tensor.nbytes, tensor.note) == ("Q7", 8, "unknown dtype")


GGUF = {
    "tensors_2_60": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), 2),
    "keys_2_60": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), 2),
    "version": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), 2),
    "short": (b"GGUF\x03", 2),
    "nested_arrays": (
        b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 50 + bytes(99), 2,
    ),
    "string_2_60": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60) + bytes(99), 2),
    "none": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(32), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_gguf_headers(make, summarize, name):
    data, code = GGUF[name]
    assert summarize(make.write("g.gguf", data)).exit_code == code


def test_file_that_shrinks_while_it_is_read(make, summarize, monkeypatch):
    header = {f"t{i}": entry(offsets=(8 * i, 8 * i + 8)) for i in range(1000)}
    path = make.write("s.safetensors", make.raw_safetensors(header, bytes(8000)))
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, n: real(fd, min(n, 100)) if n < 20_000 else b"")
    summary = summarize(path)
    assert (summary.exit_code, summary.all_problems[0].code) == (2, "TRUNCATED")


def test_tar_and_unknown_bytes(make, summarize, codes):
    import tarfile

    with tarfile.open(make.folder / "old.pt", "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    assert codes(summarize(make.folder / "old.pt")) == {"UNSUPPORTED"}
    summary = summarize(make.write("noise.bin", b"\x00\x01noise and more noise"))
    assert (summary.exit_code, codes(summary)) == (2, {"UNKNOWN_FORMAT"})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("argv", [(), ("--tensors",), ("--json",)])
def test_words_of_a_file_cannot_move_the_cursor(make, command, argv):
    """A type of elements and the name of a backend that hold escape codes."""
    path = make.write("s.safetensors", make.raw_safetensors({"a": entry(dtype="F\x1b[31m32\x7f")}, bytes(8)))
    out = command(path, *argv)[1]
    assert "\\x1b[31m" in out
    assert set(out) - {"\n"} <= {c for c in out if c.isprintable()}
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=make.folder / "d")
    make.write("d/metadata.json", json.dumps({"sharded_backend": "torch\x1b[2J_dist"}).encode())
    out = command(make.folder / "d", *argv)[1]
    assert set(out) - {"\n"} <= {c for c in out if c.isprintable()}
