"""Pickles that attack, lie or break off: what they would run is named, nothing of it runs, within 5 s and 500 MB."""

import os
import pickle
import struct

import pytest
import torch


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
    assert "opcode at 11 needs 1099511627776 bytes, 4 left" in message


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


def test_code_in_distributed_metadata_is_named(make, summarize, codes):
    stream = evil(make.folder / "sentinel")["reduce"]
    make.write("d/.metadata", stream)
    make.write("d/__0_0.distcp", b"x")
    summary = summarize(make.folder / "d")
    assert (summary.exit_code, summary.complete) == (1, False)
    assert codes(summary) == {"DANGEROUS_PICKLE", "NOT_DCP"}
    assert summary.to_dict()["pickle"]["dangerous"]
    assert not (make.folder / "sentinel").exists()
