"""Files that lie, break off or attack: each ends in one clear line and its exit code, within 5 s and 500 MB."""

import io
import json
import os
import pickle
import socket
import struct
import zipfile

import pytest
import torch


def op(*parts):
    return b"".join(p if isinstance(p, bytes) else bytes([p]) for p in parts)


def evil(sentinel):
    """Streams that would write `sentinel` when unpickled, by every opcode that calls."""
    command = f"touch {sentinel}".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    short = bytes([0x8C, 5]) + b"posix" + bytes([0x8C, 6]) + b"system" + b"\x93"
    return {
        "reduce": b"cposix\nsystem\n" + text + b"\x85R.",
        "reduce_proto2": b"\x80\x02cos\nsystem\n" + text + b"\x85R.",
        "stack_global": b"\x80\x04" + short + text + b"\x85R.",
        "inst": b"(" + b"S'" + command + b"'\n" + b"iposix\nsystem\n.",
        "obj": b"(cposix\nsystem\n" + text + b"o.",
        "newobj": b"\x80\x02csubprocess\nPopen\n" + text + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + short + text + b"\x85}\x92.",
        "eval": b"\x80\x02cbuiltins\neval\n" + text + b"\x85R.",
        "python2": b"\x80\x02c__builtin__\neval\n" + text + b"\x85R.",
        "dotted": b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93" + text + b"\x85R.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\nctorch.serialization\nos\nX\x06\x00\x00\x00system\x86R" + text + b"\x85R.",
        "getattr_of_computed": b"\x80\x02cbuiltins\ngetattr\n)X\x05\x00\x00\x00count\x86R.",
        "getattr_dunder": b"\x80\x02cbuiltins\ngetattr\ncmymodule\nf\nX\x0b\x00\x00\x00__globals__\x86R.",
        "memo_out_of_order": b"\x80\x02cos\nsystem\nq\x05" + b"0h\x05" + text + b"\x85R.",
        "text_memo": b"cos\nsystem\np9\n0g9\n(S'x'\ntR.",
        "dup_pop": b"\x80\x02cos\nsystem\n20" + text + b"\x85R.",
        "extension": b"\x80\x02\x82\x07" + text + b"\x85R.",
        "computed_name": b"\x80\x04\x8c\x02os\x8c\x03str" + b"\x8c\x08builtins\x8c\x03str\x93" + text + b"\x85R\x93)R.",
        "in_dict_key": b"\x80\x02}cos\nsystem\n" + text + b"\x85RK\x01s.",
        "build_state": b"\x80\x02ctorch\nTensor\n)\x81}X\x01\x00\x00\x00acos\nsystem\n" + text + b"\x85Rsb.",
    }  # fmt: skip


@pytest.mark.parametrize("form", list(evil("x")))
@pytest.mark.parametrize("container", ["bare", "zip"])
def test_code_is_named_and_never_run(make, summarize, codes, form, container):
    sentinel = make.folder / "sentinel"
    stream = evil(sentinel)[form]
    data = stream if container == "bare" else make.torch_zip(stream)
    summary = summarize(make.write("evil.pkl", data))
    assert summary.exit_code == 1
    assert {"DANGEROUS_PICKLE"} <= codes(summary) <= {"DANGEROUS_PICKLE", "UNKNOWN_GLOBAL"}
    assert summary.all_problems[0].message.startswith("DANGER ")
    assert not sentinel.exists()
    if container == "zip":
        assert summary.to_dict()["pickle"]["weights_only_loadable"] is False


def test_tensors_beside_malicious_code_are_still_listed(make, summarize, codes):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch sentinel",)

    torch.save({"w": torch.ones(3, 4), "x": Evil()}, make.folder / "m.pt")
    summary = summarize(make.folder / "m.pt")
    assert (summary.exit_code, codes(summary), summary.params) == (1, {"DANGEROUS_PICKLE"}, 12)
    assert "posix.system called with 1 argument at byte" in summary.all_problems[0].message


def test_unknown_class_is_needed_not_dangerous(make, summarize):
    stream = b"\x80\x02cmegatron.core.enums\nModelType\nK\x01\x85R."
    summary = summarize(make.write("c.pt", make.torch_zip(stream)))
    document = summary.to_dict()["pickle"]
    assert (summary.exit_code, document["needs"], document["dangerous"]) == (0, ["megatron.core.enums.ModelType"], [])
    assert document["weights_only_loadable"] is False


MALFORMED = {
    "long_binput": b"\x80\x02]r\x00\x00\x00\x80.",
    "binbytes8": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"abcd",
    "bytearray8": b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"abcd",
    "long4": b"\x80\x02\x8b" + struct.pack("<i", 200_000_000) + b"1234",
    "binunicode": b"\x80\x02X" + struct.pack("<I", 2**31) + b"abcd",
    "no_stop": b"\x80\x02]",
    "mark_underflow": b"\x80\x02t.",
    "stack_underflow": b"\x80\x020.",
    "bad_memo": b"\x80\x02h\x05.",
    "setitem_on_int": b"\x80\x02K\x01K\x02K\x03s.",
    "append_on_int": b"\x80\x02K\x01K\x02a.",
    "odd_setitems": b"\x80\x02}(K\x01u.",
    "unknown_opcode": b"\x80\x02\xff.",
    "pop_past_mark": b"\x80\x02K\x01(00t.",
    "empty": b"\x80\x02",
    "bad_int": b"\x80\x02Ixyz\n.",
    "bad_utf8": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "truncated_short": b"\x80\x04\x8c\x20ab",
}


@pytest.mark.parametrize("name", [n for n in MALFORMED if n != "long_binput"])
def test_malformed_pickles(make, summarize, codes, name):
    summary = summarize(make.write("m.pkl", MALFORMED[name]))
    assert (summary.exit_code, codes(summary)) == (2, {"MALFORMED_PICKLE"})
    assert "malformed pickle near byte" in summary.all_problems[0].message


def test_length_beyond_the_file_names_both_numbers(make, summarize):
    message = summarize(make.write("m.pkl", MALFORMED["binbytes8"])).all_problems[0].message
    assert "opcode at 11 wants 1099511627776 bytes, 4 left" in message


def test_odd_but_legal_streams(make, summarize):
    for stream in (MALFORMED["long_binput"], b"I" + b"1" * 1_000_000 + b"\n.", b"\x80\x04\x95" + b"\xff" * 8 + b"]."):
        assert summarize(make.write("m.pkl", stream if stream[:1] == b"\x80" else b"\x80\x02" + stream)).exit_code == 0


def test_second_pickle_behind_the_first(make, summarize, codes):
    summary = summarize(make.write("m.pkl", pickle.dumps({}, 2) * 2))
    assert (summary.exit_code, codes(summary)) == (0, {"SEVERAL_PICKLES"})
    summary = summarize(make.write("m.pkl", pickle.dumps({}, 2) + b"\x00\x01"))
    assert (summary.exit_code, codes(summary)) == (1, {"TRAILING_BYTES"})
    summary = summarize(make.write("m.pkl", pickle.dumps({}, 2) + evil(make.folder / "sentinel")["reduce"]))
    assert (summary.exit_code, codes(summary)) == (1, {"SEVERAL_PICKLES", "DANGEROUS_PICKLE"})
    assert "of stream 2 of the pickle" in summary.all_problems[0].message


def _billion_laughs():
    return b"\x80\x02]" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60)) + b"."


HEAVY = {
    "deep_tuple_key": (b"\x80\x02})" + b"\x85" * 2_000_000 + b"K\x01s.", 0),
    "deep_list": (b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".", 0),
    "self_reference": (b"\x80\x02]q\x00h\x00a.", 0),
    "billion_laughs": (_billion_laughs(), 0),
    "dup": (b"\x80\x02](" + b"N" + b"2" * 3_000_000 + b"e.", 0),
    "nested_rebuilds": (
        b"\x80\x02" + b"ctorch._utils\n_rebuild_parameter\n" * 50_000 + b")" + b"\x85R" * 50_000 + b".",
        0,
    ),
    "many_marks": (b"\x80\x02" + b"(" * 1_000_000 + b".", 2),
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_streams(make, name, run_limited):
    stream, code = HEAVY[name]
    assert run_limited(make.write("h.pt", make.torch_zip(stream)))[0] == code


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
    "long_integer": ((b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', 8), 2, "INVALID_HEADER"),
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


def index_rows(make):
    def change(**replacements):
        path = make.folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps(index | replacements))
        return index

    def weights(**more):
        index = json.loads((make.folder / "model.safetensors.index.json").read_text())
        change(weight_map=index["weight_map"] | more)

    return {
        "path_escape": (lambda: weights(a="../../etc/passwd"), {"PATH_ESCAPE"}),
        "absolute": (lambda: weights(a="/etc/passwd"), {"PATH_ESCAPE"}),
        "nested": (lambda: weights(a="a/b"), {"PATH_ESCAPE"}),
        "missing_shard": ((make.folder / "model-00001-of-00002.safetensors").unlink, {"MISSING_SHARD"}),
        "tensor_not_in_shard": (lambda: weights(ghost="model-00001-of-00002.safetensors"), {"MISSING_TENSOR"}),
        "total_size": (lambda: change(metadata={"total_size": 5}), {"TOTAL_SIZE"}),
        "map_is_a_list": (lambda: change(weight_map=[1]), {"BAD_INDEX"}),
        "no_json": (lambda: make.write("model.safetensors.index.json", b"{"), {"BAD_INDEX"}),
    }


@pytest.mark.parametrize(
    "name",
    [
        "path_escape",
        "absolute",
        "nested",
        "missing_shard",
        "tensor_not_in_shard",
        "total_size",
        "map_is_a_list",
        "no_json",
    ],
)
def test_index_files(make, summarize, codes, name):
    make.shards(make.llama(2))
    act, expected = index_rows(make)[name]
    act()
    summary = summarize(make.folder)
    assert (summary.exit_code, codes(summary)) == (1, expected)
    assert summary.params > 0


def test_shard_not_in_index(make, summarize, codes):
    state = make.llama(2)
    make.shards(state)
    make.save_safetensors({"more": torch.ones(3)}, make.folder / "model-00003-of-00003.safetensors")
    assert "MISSING_SHARD" in codes(summarize(make.folder))


def test_numbered_shards_without_index(make, summarize, codes):
    for part in (1, 3):
        make.save_safetensors({f"w{part}": torch.ones(3)}, make.folder / f"model-{part:05d}-of-00003.safetensors")
    summary = summarize(make.folder)
    assert (summary.exit_code, codes(summary)) == (1, {"MISSING_SHARD"})
    assert summary.all_problems[0].file == "model-00002-of-00003.safetensors"


def test_paths_that_are_no_checkpoint(make, command):
    fifo = make.folder / "x.pt"
    os.mkfifo(fifo)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(make.folder / "s.pt"))
    loop = make.folder / "loop.pt"
    loop.symlink_to(loop)
    rows = {
        fifo: "not a regular file", make.folder / "s.pt": "", "/dev/zero": "not a regular file",
        make.folder / "nothing.pt": "No such file", loop: "symbolic links", "a" * 5000: "File name too long",
        make.write("sub/README.md", b"x").parent: "no checkpoint found", "nul\0byte": "null byte",
    }  # fmt: skip
    try:
        for path, text in rows.items():
            code, out, err = command(path)
            assert (code, out) == (2, "")
            assert text in err
            assert len(err.splitlines()) == 1
    finally:
        listening.close()


def test_permission_denied(make, command, monkeypatch):
    path = make.write("p.safetensors", make.raw_safetensors({}))
    real = os.open

    def refuse(name, *rest, **more):
        if str(name).endswith("p.safetensors"):
            raise PermissionError(13, "Permission denied")
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    code, _, err = command(path)
    assert (code, err) == (2, "summarize-ckpt: p.safetensors: cannot read: Permission denied [PERMISSION]\n")


def test_file_that_shrinks_while_it_is_read(make, summarize, monkeypatch):
    header = {f"t{i}": entry(offsets=(8 * i, 8 * i + 8)) for i in range(1000)}
    path = make.write("s.safetensors", make.raw_safetensors(header, bytes(8000)))
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, n: real(fd, min(n, 100)) if n < 20_000 else b"")
    summary = summarize(path)
    assert (summary.exit_code, summary.all_problems[0].code) == (2, "TRUNCATED")


def test_unreadable_file_among_others(make, summarize):
    make.save_safetensors({"a": torch.ones(3)}, make.folder / "good.safetensors")
    make.write("bad.safetensors", b"xx")
    summary = summarize(make.folder)
    assert (summary.exit_code, summary.params, summary.complete) == (1, 3, False)


def test_links_and_leftovers_in_a_directory(make, summarize, codes):
    real = make.folder / "blobs"
    real.mkdir()
    make.save_safetensors({"a": torch.ones(3)}, real / "abc")
    snapshot = make.folder / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(real / "abc")
    (snapshot / "up").symlink_to("..")
    summary = summarize(snapshot)
    assert (summary.params, summary.exit_code) == (3, 0)
    make.write("snapshot/other.safetensors.tmp", b"x")
    summary = summarize(snapshot)
    assert (summary.exit_code, codes(summary)) == (1, {"LEFTOVER"})


def test_twenty_thousand_files(make, run_limited):
    folder = make.folder / "many"
    folder.mkdir()
    for number in range(20_000):
        os.close(os.open(folder / f"{number}.txt", os.O_CREAT))
    assert run_limited(folder)[0] == 2


def test_tar_and_unknown_bytes(make, summarize, codes):
    import tarfile

    with tarfile.open(make.folder / "old.pt", "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    assert codes(summarize(make.folder / "old.pt")) == {"UNSUPPORTED"}
    summary = summarize(make.write("noise.bin", b"\x00\x01noise and more noise"))
    assert (summary.exit_code, codes(summary)) == (2, {"UNKNOWN_FORMAT"})


def test_code_in_distributed_metadata_is_named(make, summarize, codes):
    stream = evil(make.folder / "sentinel")["reduce"]
    make.write("d/.metadata", stream)
    make.write("d/__0_0.distcp", b"x")
    summary = summarize(make.folder / "d")
    assert (summary.exit_code, summary.complete) == (1, False)
    assert codes(summary) == {"DANGEROUS_PICKLE", "NOT_DCP"}
    assert summary.to_dict()["pickle"]["dangerous"]
    assert not (make.folder / "sentinel").exists()


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"abc"])
def test_unreadable_shard_leaves_the_model_incomplete(make, summarize, codes, data):
    first, _ = make.shards(make.llama())
    make.write(first, data)
    summary = summarize(make.folder)
    assert (summary.exit_code, summary.complete) == (1, False)
    assert len(summary.all_problems) == 1
    assert codes(summary) <= {"EMPTY", "INVALID_HEADER", "HEADER_TOO_SMALL"}


@pytest.mark.parametrize("name", ["m.safetensors", "pytorch_model.bin"])
def test_what_a_failed_download_leaves_is_named(make, command, name):
    make.write(name, b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n")
    code, _, err = command(make.folder)
    assert (code, err) == (
        2,
        f"summarize-ckpt: {name}: a git-lfs pointer; the file itself was not downloaded [LFS_POINTER]\n",
    )
    make.write(name, b"<!DOCTYPE html><html><title>404</title></html>")
    assert command(make.folder / name)[0] == 2
    assert "a web page" in command(make.folder / name)[2]
