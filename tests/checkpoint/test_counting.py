"""Every element counts once: what is a copy, what is a slice, and what is another model."""

import collections
import io
import json
import pickle
import textwrap

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from bench.launch import fork

GENERATOR = torch.Generator().manual_seed(0)


def filled(*shape):
    """A tensor of random values, so that no two have the same bytes."""
    return torch.randn(shape, generator=GENERATOR).bfloat16()


DIM, FFN, VOCAB = 64, 160, 512


def meta_slice(rank, ways, old, make_tensor):
    """One of Meta's consolidated files; Llama 1 and 2 split the embedding by columns, Llama 3 by rows."""
    rows = (VOCAB, DIM // ways) if old else (VOCAB // ways, DIM)
    state = {"tok_embeddings.weight": make_tensor(*rows), "output.weight": make_tensor(VOCAB // ways, DIM)}
    for layer in range(2):
        for name, shape in {
            "attention.wq": (DIM // ways, DIM), "attention.wk": (16 // ways, DIM), "attention.wv": (16 // ways, DIM),
            "attention.wo": (DIM, DIM // ways), "feed_forward.w1": (FFN // ways, DIM),
            "feed_forward.w2": (DIM, FFN // ways), "feed_forward.w3": (FFN // ways, DIM), "attention_norm": (DIM,),
            "ffn_norm": (DIM,),
        }.items():  # fmt: skip
            state[f"layers.{layer}.{name}.weight"] = make_tensor(*shape)
    return state | {"norm.weight": make_tensor(DIM), "rope.freqs": make_tensor(4)}


# 2 x 512 x 64 embedding and output; per layer q, o 64 x 64, k, v 16 x 64, three 160 x 64 and two norms of 64; norm, freqs
WHOLE = 2 * VOCAB * DIM + 2 * (2 * DIM * DIM + 2 * 16 * DIM + 3 * FFN * DIM + 2 * DIM) + DIM + 4


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("make_tensor", [filled, torch.zeros], ids=["values", "zeros"])
@pytest.mark.parametrize("ways", [2, 8])
def test_tensor_parallel_slices_of_equal_names_are_one_model(make, summarize, ways, make_tensor, old):
    for rank in range(ways):
        torch.save(meta_slice(rank, ways, old, make_tensor), make.folder / f"consolidated.{rank:02d}.pth")
    make.write("params.json", json.dumps({"dim": DIM, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2}).encode())
    summary = summarize(make.folder)
    assert (summary.params, summary.exit_code, summary.complete) == (WHOLE, 0, True)
    found = {key: summary.architecture[key]["value"] for key in ("vocab_sz", "hidden_sz", "inter_sz", "n_kv_heads")}
    assert found == {"vocab_sz": VOCAB, "hidden_sz": DIM, "inter_sz": FFN, "n_kv_heads": 2}
    assert (summary.counted[0].format, summary.counted[0].parallelism["tp"]) == ("Meta consolidated", ways)


def test_a_missing_slice_is_named(make, summarize):
    for rank in (0, 1, 3):
        torch.save(meta_slice(rank, 4, False, filled), make.folder / f"consolidated.{rank:02d}.pth")
    problems = summarize(make.folder).all_problems
    assert [(p.code, p.file) for p in problems] == [("MISSING_RANK", "consolidated.02.pth")]


def test_equal_layers_of_a_pipeline_each_count(make, summarize):
    """Six layers of 8 x 8 + 8 = 72; a pipeline that is not tensor parallel has no model rank in its file names."""
    for layer in range(6):
        state = {"weight": torch.zeros(8, 8), "bias": torch.zeros(8)}
        torch.save(state, make.folder / f"layer_{layer:02d}-model_states.pt")
    torch.save({"module": None, "global_steps": 4}, make.folder / "mp_rank_00_model_states.pt")
    summary = summarize(make.folder)
    assert (summary.params, summary.step, summary.exit_code) == (432, 4, 0)


@pytest.mark.parametrize("other", ["consolidated.safetensors", "consolidated.00.pth", "original/consolidated.00.pth"])
def test_the_same_model_in_two_layouts_counts_once(make, summarize, other):
    """Mistral's and Llama's repositories hold Hugging Face's shards and the maker's own files, with other names."""
    state = make.llama(2)
    make.shards(state)
    parts = {"self_attn.": "attention.", "mlp.": "feed_forward.", "input_layernorm": "attention_norm",
             "post_attention_layernorm": "ffn_norm", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
             "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "model.embed_tokens": "tok_embeddings",
             "lm_head": "output", "model.": ""}  # fmt: skip
    renamed = {}
    for name, tensor in state.items():
        new_name = name
        for old, new in parts.items():
            new_name = new_name.replace(old, new)
        renamed[new_name] = tensor
    if other.endswith(".pth"):
        (make.folder / "original").mkdir()
        torch.save(renamed, make.folder / other)
    else:
        make.save_safetensors(renamed, make.folder / other)
    summary = summarize(make.folder)
    assert (summary.params, summary.exit_code) == (make.count(state), 0)
    assert [s.same_as is None for s in summary.sections].count(True) == 1


def test_slices_in_the_folder_original_are_the_model_above(make, summarize):
    """As Llama 3 70B has them beside its shards; another model in that folder counts."""
    whole = meta_slice(0, 1, False, filled)
    make.save_safetensors(whole, make.folder / "model.safetensors")
    (make.folder / "original").mkdir()
    for rank in range(2):
        torch.save(meta_slice(rank, 2, False, filled), make.folder / f"original/consolidated.{rank:02d}.pth")
    assert summarize(make.folder).params == WHOLE
    make.save_safetensors({"x.weight": filled(3, 4), "y.weight": filled(5)}, make.folder / "original/other.safetensors")
    assert summarize(make.folder).params == WHOLE + 17


def test_two_models_of_equal_names_and_shapes_both_count(make, summarize):
    for name in ("a", "b"):
        torch.save({"x.weight": filled(3, 4), "y.weight": filled(5)}, make.folder / f"{name}.pt")
    assert summarize(make.folder).params == 2 * 17
    (make.folder / "c.pt").write_bytes((make.folder / "b.pt").read_bytes())  # the same bytes are the same model
    assert summarize(make.folder).params == 2 * 17


def test_ranks_of_plain_tensors_are_told_apart_by_checksum(make, summarize):
    """Data-parallel ranks save the same bytes; slices of a name that nobody knows do not."""
    same, slices = filled(6), [filled(4, 5), filled(4, 5)]
    for rank in range(2):
        torch.save({"shared": same, "custom": slices[rank]}, make.folder / f"model_rank_{rank}.pt")
    summary = summarize(make.folder)
    assert (summary.params, summary.exit_code) == (6 + 2 * 20, 0)
    assert [t.note for t in summary.tensors] == ["", "", "replica", ""]


def trainer(make, steps=(10, 20)):
    state = make.llama(2)
    config = {"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 2}
    for folder in ("", *(f"checkpoint-{step}/" for step in steps)):
        make.write(f"{folder}config.json", json.dumps(config).encode())
        make.save_safetensors(state, make.folder / folder / "model.safetensors")
        torch.save({"lr": 0.1}, make.folder / folder / "training_args.bin")
        if folder:
            torch.save({"state": {0: {"exp_avg": torch.ones(7)}}}, make.folder / folder / "optimizer.pt")
            torch.save({"cpu": torch.zeros(9, dtype=torch.uint8)}, make.folder / folder / "rng_state.pth")
    return state


def test_a_trainers_folder_is_its_final_model(make, summarize):
    state = trainer(make)
    summary = summarize(make.folder)
    assert (summary.params, summary.exit_code) == (make.count(state), 0)
    assert (summary.by_role["optimizer"]["bytes"], summary.others) == (0, ["checkpoint-10", "checkpoint-20"])
    assert summary.architecture["n_q_heads"] == {"value": 8, "from": "config.json"}
    (make.folder / "model.safetensors").unlink()
    summary = summarize(make.folder)
    assert (summary.params, summary.step, summary.others) == (make.count(state), 20, ["checkpoint-10"])
    assert (summary.by_role["optimizer"]["bytes"], summary.by_role["other"]["bytes"]) == (28, 9)


def test_random_generators_of_ranks_are_no_parameters(make, summarize):
    for rank in range(2):
        torch.save({"w": torch.full((4,), rank)}, make.folder / f"model_world_size_2_rank_{rank}.pt")
        state = {"rng": {"cpu": torch.zeros(50, dtype=torch.uint8)}, "lr_scheduler": {"last_epoch": 1}}
        torch.save(state, make.folder / f"extra_state_world_size_2_rank_{rank}.pt")
    summary = summarize(make.folder)
    assert (summary.params, summary.by_role["other"]["bytes"]) == (8, 100)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_legacy_files_of_any_pickle_protocol(make, summarize, protocol):
    state = {"a.weight": filled(3, 4), "b": filled(5)}
    path = make.folder / "old.pt"
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    summary = summarize(path)
    assert (summary.counted[0].format, summary.params, summary.exit_code) == ("torch legacy", 17, 0)
    assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == {
        "a.weight": ((3, 4), "bfloat16"), "b": ((5,), "bfloat16"),
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [5, 5000])
def test_a_state_dict_by_plain_pickle(make, summarize, protocol, size):
    """torch pickles each storage as a call with the bytes of a legacy file: 12 + size elements, the tied ones once."""
    weight = torch.ones(3, 4)
    state = collections.OrderedDict({"a.weight": weight, "b": torch.ones(size), "tied": weight})
    summary = summarize(make.write("state.pkl", pickle.dumps(state, protocol)))
    assert (summary.params, summary.exit_code) == (12 + size, 0)
    assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == {
        "a.weight": ((3, 4), "float32"), "b": ((size,), "float32"), "tied": ((3, 4), "float32"),
    }  # fmt: skip


def test_a_generator_and_a_discriminator_both_count(make, summarize):
    state = {"generator": {"conv.weight": filled(4, 4)}, "discriminator": {"conv.weight": filled(5, 4)}, "epoch": 3}
    torch.save(state, make.folder / "gan.pt")
    summary = summarize(make.folder / "gan.pt")
    assert summary.params == 36
    assert {t.name for t in summary.model} == {"generator.conv.weight", "discriminator.conv.weight"}


LOCAL = textwrap.dedent(
    """
    import os, sys, warnings, torch, torch.distributed as dist
    warnings.simplefilter("ignore")
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
    rank, folder = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = FSDP(torch.nn.Sequential(FSDP(torch.nn.Linear(9, 5), device_id=torch.device("cpu")), torch.nn.Linear(5, 3)),
                 device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save({"model": model.state_dict()}, f"{folder}/model_rank_{rank}.pt")
    dist.barrier()
    os._exit(0)  # no teardown in which one rank could outlive the other
    """
)


def test_fsdp_local_state_dicts(make, summarize):
    """Flat parameters of 9 x 5 + 5 = 50 and 5 x 3 + 3 = 18 elements, halved over two ranks."""
    script = make.folder / "local.py"
    script.write_text(LOCAL, encoding="utf-8")
    done = fork(script, make.folder, ranks=[{"RANK": str(rank)} for rank in range(2)])
    assert done.returncode == 0, done.stderr
    script.unlink()
    summary = summarize(make.folder)
    assert (summary.params, summary.exit_code) == (68, 0)


@pytest.mark.parametrize("hyper", [None, {"width": 3}])
def test_arrays_in_a_row(make, summarize, codes, hyper):
    """Equinox writes one array behind the other, a line of JSON before them or not."""
    out = io.BytesIO()
    out.write(b"" if hyper is None else json.dumps(hyper).encode() + b"\n")
    for shape in ((3, 4), (3,), ()):
        np.save(out, np.ones(shape, np.float32))
    summary = summarize(make.write("model.eqx", out.getvalue()))
    assert ([t.shape for t in summary.tensors], summary.params, summary.exit_code) == ([(3, 4), (3,), ()], 16, 0)
    assert summary.counted[0].facts.get("args") == hyper
    summary = summarize(make.write("model.npy", out.getvalue() + b"more"))
    assert (summary.params, summary.exit_code, codes(summary)) == (16, 1, {"TRAILING_BYTES"})


def test_a_jagged_tensor_is_no_danger(make, summarize):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    torch.save({"x": nested}, make.folder / "jagged.pt")
    summary = summarize(make.folder / "jagged.pt")
    assert (summary.exit_code, summary.all_problems) == (0, [])
    assert summary.params == 2 * 3 + 4 * 3  # the offsets 0, 2, 6 are no parameters


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_of_numpy_by_plain_pickle(make, summarize, protocol):
    """Protocol 5 rebuilds an array from a buffer instead of a state: 12 + 5 elements; a column-major one is an array too."""
    state = {"a": np.asfortranarray(np.ones((3, 4), np.float32)), "b": np.ones(5, np.float16)}
    summary = summarize(make.write("state.pkl", pickle.dumps(state, protocol)))
    assert (summary.params, summary.exit_code) == (17, 0)
    assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == {"a": ((3, 4), "float32"), "b": ((5,), "float16")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("wrapper", ["app", "state_dict"])
def test_model_and_optimizer_below_one_key(make, summarize, wrapper):
    """As torch's tutorial on distributed checkpoints saves them: the optimizer's 2 x 12 elements are no parameters."""
    moments = {"w": {"exp_avg": torch.ones(3, 4), "exp_avg_sq": torch.ones(3, 4), "step": torch.tensor(1.0)}}
    state = {wrapper: {"model": {"w": torch.ones(3, 4)}, "optim": {"state": moments}}}
    torch.save(state, make.folder / "m.pt")
    dcp.save(state, checkpoint_id=make.folder / "dcp", no_dist=True)
    for name in ("m.pt", "dcp"):
        summary = summarize(make.folder / name)
        assert (summary.params, [t.name for t in summary.model]) == (12, ["w"])
        assert summary.by_role["optimizer"]["bytes"] == 2 * 12 * 4 + 4


def test_the_checksum_of_a_tied_weight_and_of_zeros(make, summarize):
    """Within one file equal bytes are not the same tensor: two layers of zeros are two."""
    torch.save({"a": torch.zeros(8), "b": torch.zeros(8)}, make.folder / "m.pt")
    assert summarize(make.folder / "m.pt").params == 16


def test_buffers_are_told_apart(make, command, summarize):
    """Conv 3 x 8 x 3 x 3 = 216, weight and bias 16; running mean and variance 16, a counter 1; rotary frequencies 4 a layer."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8))
    rotary = {f"layers.{n}.attn.rotary_emb.inv_freq": filled(4) for n in range(3)}
    torch.save(model.state_dict() | rotary, make.folder / "m.pt")
    totals = summarize(make.folder / "m.pt").totals
    assert (totals["params"], totals["buffers"]) == (216 + 16 + 17 + 12, 17 + 12)
    assert "of these 29 in buffers, which are not trained" in command(make.folder / "m.pt")[1]
