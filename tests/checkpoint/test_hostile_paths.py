"""Folders that lie or lack something, and paths that are no checkpoint: one clear line and the exit code."""

import json
import os
import socket

import pytest
import torch


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


def test_config_is_not_held_against_half_of_a_model(make, summarize, codes):
    """A folder whose second shard of two, with the last layer, is missing: no layer number of the config is wrong."""
    make.shards(make.llama(2))
    make.write("config.json", json.dumps({"num_hidden_layers": 2, "hidden_size": 64}).encode())
    (make.folder / "model-00002-of-00002.safetensors").unlink()
    summary = summarize(make.folder)
    assert codes(summary) == {"MISSING_SHARD"}
    assert summary.architecture["n_layers"] == {"value": 2, "from": "config.json"}


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
        make.folder / "nothing.pt": "no such file", loop: "symbolic links", "a" * 5000: "File name too long",
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
    assert (code, err) == (2, "summarize-ckpt: p.safetensors: cannot read: Permission denied\n")


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
        f"summarize-ckpt: {name}: a git-lfs pointer; the file itself was not downloaded\n",
    )
    make.write(name, b"<!DOCTYPE html><html><title>404</title></html>")
    assert command(make.folder / name)[0] == 2
    assert "a web page" in command(make.folder / name)[2]
