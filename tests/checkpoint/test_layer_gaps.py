"""A matrix that one layer lacks makes a checkpoint incomplete; layers that differ by a pattern do not."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

LOST = "model.layers.3.mlp.down_proj.weight"
LINE = "layer 3 lacks mlp.down_proj.weight, which 7 other layers of its kind have"


def without(state, *names):
    return {name: tensor for name, tensor in state.items() if name not in names}


def told(summary):
    """The problems that name missing tensors."""
    return [(p.tensor, p.message) for p in summary.all_problems if p.code == "MISSING_TENSOR"]


@pytest.mark.parametrize("parts", [1, 2])
def test_safetensors(make, summarize, command, parts):
    """In one file, and in shards whose index does not name the tensor either."""
    state = without(make.llama(layers=8), LOST)
    if parts == 1:
        make.save_safetensors(state, make.folder / "model.safetensors")
    else:
        make.shards(state)
    summary = summarize(make.folder)
    assert told(summary) == [(LOST, LINE)]
    assert not summary.complete
    code, out, _ = command(make.folder)
    assert code == 1
    assert "INCOMPLETE" in out
    assert "layer 3 lacks mlp.down_proj.weight" in out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp(make, summarize):
    save(without(make.llama(layers=8), LOST), storage_writer=FileSystemWriter(make.folder))
    summary = summarize(make.folder)
    assert told(summary) == [(LOST, LINE)]
    assert not summary.complete


def test_megatron(make, summarize):
    """Layer 1 of the second stage of two layers is layer 3 of the model."""
    make.megatron(make.folder)
    for file in make.folder.glob("iter_*/mp_rank_*_001/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        del state["model"]["decoder.layers.0.mlp.linear_fc2.weight"]
        torch.save(state, file)
    found = told(summarize(make.folder))
    lost = "mlp.linear_fc2.weight"
    assert found == [(f"decoder.layers.2.{lost}", f"layer 2 lacks {lost}, which 3 other layers of its kind have")]


def test_a_layer_that_is_left_out(make, summarize):
    state = {name: t for name, t in make.llama(layers=8).items() if ".layers.5." not in name}
    make.save_safetensors(state, make.folder / "model.safetensors")
    assert told(summarize(make.folder)) == [(None, "no layer 5 among model.layers.0 to model.layers.7")]


@pytest.mark.parametrize("sparse", [range(1, 8), range(1, 8, 2), [7], [0, 3, 6]])
def test_layers_of_two_kinds_lack_nothing(make, summarize, sparse):
    """Dense first layers, experts in every other layer, in the last one, in every third."""
    state = make.llama(layers=8)
    for layer in sparse:
        p = f"model.layers.{layer}.mlp."
        state = {name: tensor for name, tensor in state.items() if not name.startswith(p)}
        state[f"{p}gate.weight"] = torch.zeros(2, 64)
        for expert in range(2):
            own = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
            state |= {f"{p}experts.{expert}.{name}.weight": torch.zeros(shape) for name, shape in own.items()}
    make.save_safetensors(state, make.folder / "model.safetensors")
    assert summarize(make.folder).complete
    lost = f"model.layers.{sparse[-1]}.mlp.experts.1.down_proj.weight"
    make.save_safetensors(without(state, lost), make.folder / "model.safetensors")
    found = told(summarize(make.folder))
    assert [name for name, _ in found] == ([lost] if len(sparse) > 3 else [])


@pytest.mark.parametrize(
    "gone",
    [
        [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (6, 7) for p in "kv"],  # keys and values of layer 5
        [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (1, 3, 5, 7) for p in "kv"],
        ["model.layers.0.self_attn.v_lora.weight"],  # RWKV-7: the first layer mixes no value of another
        ["model.layers.7.self_attn.v_lora.weight"],
        [f"model.layers.{n}.extra.weight_scale_inv" for n in (2, 5)],  # layers that are not quantized
        ["model.layers.3.input_layernorm.weight"],
        [f"model.layers.{n}.mlp.{p}_proj.weight" for n in (2, 3, 5) for p in ("gate", "up", "down")],
    ],
)
def test_layers_that_differ_by_design(make, summarize, gone):
    state = make.llama(layers=8)
    for layer in range(8):
        state[f"model.layers.{layer}.self_attn.v_lora.weight"] = torch.zeros(4, 64)
        state[f"model.layers.{layer}.extra.weight_scale_inv"] = torch.zeros(2, 2)
    make.save_safetensors(without(state, *gone), make.folder / "model.safetensors")
    assert told(summarize(make.folder)) == []


def test_a_whole_module_is_missing_unless_the_config_says_so(make, summarize):
    own = [f"model.layers.3.self_attn.{p}_proj.weight" for p in "qkvo"]
    make.save_safetensors(without(make.llama(layers=8), *own), make.folder / "model.safetensors")
    ((name, message),) = told(summarize(make.folder))
    assert name in own
    assert all(f"self_attn.{p}_proj.weight" in message for p in "qkvo")
    make.write("config.json", b'{"model_type": "nemotron-nas", "block_configs": []}')
    assert told(summarize(make.folder)) == []


def test_one_layer_that_is_not_quantized_lacks_no_scale(make, summarize):
    """A recipe may leave one layer in bf16, whose scales are then in no file."""
    state = make.llama(layers=8)
    scale = "model.layers.{}.self_attn.q_proj.weight_scale_inv"
    state |= {scale.format(layer): torch.zeros(2, 2) for layer in range(8) if layer != 3}
    make.save_safetensors(state, make.folder / "model.safetensors")
    assert told(summarize(make.folder)) == []


@pytest.mark.parametrize("shared", [(7, 15, 23), (7, 15, 22)])
def test_few_layers_in_a_regular_pattern_lack_nothing(make, summarize, shared):
    """Three of 24 layers, as few as may be damaged: every eighth layer has another one's keys and values, by design."""
    gone = [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in shared for p in "kv"]
    make.save_safetensors(without(make.llama(layers=24), *gone), make.folder / "model.safetensors")
    regular = shared == (7, 15, 23)
    assert [name for name, _ in told(summarize(make.folder))] == ([] if regular else gone[::2])


@pytest.mark.parametrize(
    ("layers", "lost", "damaged"),
    [(24, (5, 12), True), (16, (7, 15), False), (16, (14, 15), False), (16, (0, 1), False), (16, (4, 5), True)],
)
def test_two_layers_are_damaged_unless_they_are_a_pattern(make, summarize, layers, lost, damaged):
    """5 and 12 leave room for 19, so that no period has both; 7 and 15 are every eighth of 16; a stack's ends may differ."""
    gone = [f"model.layers.{n}.mlp.down_proj.weight" for n in lost]
    make.save_safetensors(without(make.llama(layers=layers), *gone), make.folder / "model.safetensors")
    assert [name for name, _ in told(summarize(make.folder))] == (gone if damaged else [])


def test_layers_of_other_ranks_are_not_left_out(make, summarize):
    """Every second layer of 16, as a pipeline rank of one-layer chunks holds them."""
    state = {
        name: t
        for name, t in make.llama(layers=16).items()
        if not any(f".layers.{n}." in name for n in range(1, 16, 2))
    }
    make.save_safetensors(state, make.folder / "model.safetensors")
    assert told(summarize(make.folder)) == []
