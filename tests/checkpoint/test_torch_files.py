"""torch's own files, read without torch and compared with what torch loads."""

import math
import warnings
import zipfile

import numpy as np
import pytest
import torch

KINDS = {
    "plain": lambda: torch.ones(3, 4),
    "bf16": lambda: torch.ones(5, dtype=torch.bfloat16),
    "zero_d": lambda: torch.tensor(3.0),
    "empty": lambda: torch.ones(0, 7),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "fp8": lambda: torch.ones(6).to(torch.float8_e4m3fn),
    "fp8_e5m2": lambda: torch.ones(6).to(torch.float8_e5m2),
    "uint16": lambda: torch.ones(6, dtype=torch.uint16),
    "transposed": lambda: torch.ones(3, 4).t(),
    "strided": lambda: torch.ones(8, 8)[::2, ::3],
    "expanded": lambda: torch.ones(1, 4).expand(1000, 4),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_shape_dtype_and_bytes_as_torch(make, summarize, kind, legacy):
    tensor = KINDS[kind]()
    path = make.folder / "t.pt"
    torch.save({"a": tensor}, path)
    loaded = torch.load(path)["a"]
    if legacy:  # torch 2.13 writes float8 in this form but cannot load it
        torch.save({"a": tensor}, path, _use_new_zipfile_serialization=False)
    summary = summarize(path)
    (seen,) = summary.tensors
    assert (seen.name, seen.shape, seen.dtype) == ("a", tuple(loaded.shape), str(loaded.dtype).removeprefix("torch."))
    assert seen.nbytes == loaded.numel() * loaded.element_size()
    assert summary.totals["stored_bytes"] == loaded.untyped_storage().nbytes()
    assert summary.exit_code == 0


def test_parameter_with_attributes_keeps_its_shape(make, summarize):
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.partition_dim = 0
    torch.save({"w": parameter}, make.folder / "p.pt")
    assert summarize(make.folder / "p.pt").tensors[0].shape == (2, 3)


def test_special_tensors(make, summarize):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "quantized": torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8),
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "meta": torch.empty(3, 4, device="meta"),
            "storage": torch.ones(2).untyped_storage(),
            "numpy": np.ones((2, 3), dtype=np.float32),
        }
        torch.save(state, make.folder / "s.pt")
    summary = summarize(make.folder / "s.pt")
    seen = {t.name: t for t in summary.tensors}
    assert (seen["quantized"].dtype, seen["quantized"].shape) == ("qint8", (3, 4))
    assert (seen["sparse"].whole, seen["sparse"].numel) == ((3, 3), 3)
    assert seen["sparse"].nbytes == 2 * 3 * 8 + 3 * 4
    assert (seen["csr"].whole, seen["csr"].nbytes) == ((3, 3), 4 * 8 + 3 * 8 + 3 * 4)
    assert (seen["meta"].shape, seen["meta"].nbytes) == ((3, 4), 0)
    assert seen["storage"].nbytes == 8
    assert (seen["numpy"].shape, seen["numpy"].dtype, seen["numpy"].nbytes) == ((2, 3), "float32", 24)
    assert summary.exit_code == 0


def test_tied_weights_count_once(make, summarize):
    state = make.llama(tied=True)
    torch.save(state, make.folder / "tied.pt")
    summary = summarize(make.folder / "tied.pt")
    assert summary.params == make.count(state)
    assert summary.totals["logical_params"] == make.count(state) + 512 * 64
    head = next(t for t in summary.tensors if t.name == "lm_head.weight")
    assert head.alias_of == "model.embed_tokens.weight"
    assert summary.architecture["tie_embeddings"]["value"] is True


def test_column_views_of_a_fused_matrix_are_not_aliases(make, summarize):
    fused = torch.ones(6, 9)
    torch.save({"q": fused[:, :3], "k": fused[:, 3:6], "v": fused[:, 6:]}, make.folder / "v.pt")
    assert summarize(make.folder / "v.pt").params == 54


def test_view_of_a_large_storage_is_warned_about(make, summarize, codes):
    torch.save({"row": torch.zeros(1000, 1000)[0]}, make.folder / "view.pt")
    summary = summarize(make.folder / "view.pt")
    assert codes(summary) == {"VIEW_DRAGS_STORAGE"}
    assert summary.exit_code == 0
    assert summarize(make.folder / "view.pt", strict=True).exit_code == 1
    assert (summary.totals["logical_bytes"], summary.totals["stored_bytes"]) == (4000, 4_000_000)


def test_roles_of_a_training_state(make, summarize):
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, make.folder / "t.pt")
    summary = summarize(make.folder / "t.pt")
    assert (summary.params, summary.step) == (16, 7)
    assert {t.name for t in summary.model} == {"weight", "bias"}
    assert summary.by_role["optimizer"] == {"kind": "adam", "states": ["exp_avg", "exp_avg_sq", "step"], "bytes": 136}


def test_lightning(make, summarize):
    state = {
        "pytorch-lightning_version": "2.4.0", "epoch": 3, "global_step": 120, "state_dict": make.llama(2),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}], "hyper_parameters": {"lr": 0.1},
    }  # fmt: skip
    torch.save(state, make.folder / "last.ckpt")
    summary = summarize(make.folder / "last.ckpt")
    assert "Lightning 2.4.0" in summary.sections[0].format
    assert (summary.params, summary.step) == (make.count(state["state_dict"]), 120)
    assert summary.by_role["optimizer"]["bytes"] == 12


@pytest.mark.filterwarnings("ignore")
def test_torchscript_and_export(make, summarize):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    torch.jit.script(model).save(make.folder / "scripted.pt")
    summary = summarize(make.folder / "scripted.pt")
    assert summary.sections[0].format == "TorchScript"
    assert sorted(t.shape for t in summary.tensors) == [(2,), (2, 4), (4,), (4, 3)]
    torch.export.save(torch.export.export(model, (torch.ones(3),)), make.folder / "model.pt2")
    summary = summarize(make.folder / "model.pt2")
    seen = {t.name: (t.shape, t.dtype) for t in summary.tensors}
    assert seen == {k: (tuple(v.shape), "float32") for k, v in model.state_dict().items()}


@pytest.mark.parametrize("cut", [0.3, 0.9, 0.999])
def test_truncated_download_lists_every_tensor(make, summarize, codes, cut):
    state = make.llama()
    torch.save(state, make.folder / "whole.pt")
    data = (make.folder / "whole.pt").read_bytes()
    summary = summarize(make.write("cut.pt", data[: int(cut * len(data))]))
    assert summary.exit_code == 1
    assert codes(summary) == {"TRUNCATED"}
    assert not summary.complete
    assert summary.params == make.count(state)


def test_truncated_inside_the_pickle_lists_what_came_before(make, summarize):
    torch.save(make.llama(40), make.folder / "whole.pt")
    data = (make.folder / "whole.pt").read_bytes()
    summary = summarize(make.write("cut.pt", data[:4000]))
    assert summary.exit_code == 1
    assert 5 < len(summary.tensors) < 60
    assert summary.tensors[0].name == "model.embed_tokens.weight"


def test_truncated_legacy_file(make, summarize, codes):
    state = make.llama()
    torch.save(state, make.folder / "whole.pt", _use_new_zipfile_serialization=False)
    data = (make.folder / "whole.pt").read_bytes()
    summary = summarize(make.write("cut.pt", data[:100_000]))
    assert (summary.exit_code, codes(summary)) == (1, {"TRUNCATED"})
    assert summary.params == make.count(state)


def test_a_download_that_stopped_before_its_first_byte_of_data(make, summarize, codes):
    """Only the header of data.pkl is there: 30 bytes and the name."""
    torch.save({"a": torch.ones(3)}, make.folder / "t.pt")
    data = (make.folder / "t.pt").read_bytes()
    at = data.index(b"data.pkl") + len(b"data.pkl")
    extra = int.from_bytes(data[28:30], "little")
    summary = summarize(make.write("stopped.pt", data[: at + extra]))
    assert (summary.exit_code, codes(summary)) == (2, {"TRUNCATED"})


def test_missing_and_small_storages(make, summarize, codes):
    torch.save({"a": torch.ones(3), "b": torch.ones(4)}, make.folder / "t.pt")
    import zipfile

    with zipfile.ZipFile(make.folder / "t.pt") as archive:
        pickled = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    summary = summarize(make.write("missing.pt", make.torch_zip(pickled, {"0": 12})))
    assert (summary.exit_code, codes(summary)) == (1, {"STORAGE_MISSING"})
    summary = summarize(make.write("small.pt", make.torch_zip(pickled, {"0": 4, "1": 16})))
    assert (summary.exit_code, codes(summary)) == (1, {"STORAGE_SMALL"})
    assert "needs 12 bytes, storage 0 has 4" in summary.all_problems[0].message


def test_bare_tensor_and_nested_containers(make, summarize):
    torch.save(torch.ones(2, 2), make.folder / "bare.pt")
    assert [t.shape for t in summarize(make.folder / "bare.pt").tensors] == [(2, 2)]
    torch.save([{"x": (torch.ones(1), torch.ones(2))}], make.folder / "nested.pt")
    assert {t.name for t in summarize(make.folder / "nested.pt").tensors} == {"0.x.0", "0.x.1"}


def test_params_of_a_real_module(make, summarize):
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32), 3, enable_nested_tensor=False)
    torch.save(model.state_dict(), make.folder / "m.pt")
    expected = sum(math.prod(p.shape) for p in model.parameters())
    assert summarize(make.folder / "m.pt").params == expected


def test_members_with_sizes_of_64_bits(make, summarize, codes, monkeypatch):
    """Above 4 GiB sizes and places are in an extra field; zipfile is told here that 10 bytes are so many."""
    path = make.folder / "w.pt"
    torch.save({"w": torch.ones(3, 4)}, path)
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    with zipfile.ZipFile(path, "w") as new:
        for name, data in members.items():
            new.writestr(name, data)
    assert torch.load(path)["w"].shape == (3, 4)
    assert b"\xff\xff\xff\xff" in path.read_bytes()
    summary = summarize(path)
    assert codes(summary) == set()
    assert [(t.shape, t.storage_nbytes) for t in summary.tensors] == [((3, 4), 48)]
