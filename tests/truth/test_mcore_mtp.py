"""What Megatron-Core's multi-token prediction keeps for backward, sends and counts as parameters, on a CPU, against our ops.

Proved, to the byte, for depths 1 and 2, tp, sp, ep and the last of two stages: everything after the decoder's last layer, whose
copy each depth repeats (dense, experts, latent attention, both), with recomputed modules and whole layers. Not proved, because
it needs a GPU: TransformerEngine's norms and projections, flash attention, context parallelism.
"""

from __future__ import annotations

from functools import cache
from math import prod

import pytest
from mcore_ask import ask, cases, checked, model, shard
from test_mcore_mla import LATENT
from test_mcore_moe import EXPERTS, SHARED, our_collectives, theirs

from steptime.model.blocks import embedding_ops, head_ops, layers, params
from steptime.model.ops import Move, Tensor, tensor_bytes
from steptime.model.segments import find_segments, kept_names

SMALL = {"layers": 1, "h": 64, "nq": 4, "nkv": 4, "d": 16, "i": 176, "s": 32, "b": 2, "vocab": 256}
MOE, MLA = {"moe": EXPERTS}, {"mla": LATENT, "qk_norm": True}


def recompute(*modules):
    return {"recompute": {"granularity": "selective", "modules": list(modules)}}


FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
VARIANTS = {
    "dense": {"mtp": 1},
    "two depths": {"mtp": 2},
    "layernorm": {"mtp": 1, "norm": "LayerNorm", "glu": False, "bias": True},
    "dropout": {"mtp": 1, "dropout": 0.1},
    "learned positions": {"mtp": 2, "learned_positions": True},
    "tied": {"mtp": 1, "tied": True},
    "experts": {"mtp": 1, **MOE},
    "shared experts, two depths": {"mtp": 2, "moe": EXPERTS | SHARED},
    "first layer dense": {"mtp": 1, "layers": 2, "moe": EXPERTS | {"moe_layer_freq": [0, 1]}},
    "latent": {"mtp": 1, **MLA},
    "latent, experts": {"mtp": 2, **MLA, **MOE},
    "core_attn": {"mtp": 1, **recompute("core_attn")},
    "layernorm, recomputed": {"mtp": 1, "norm": "LayerNorm", **recompute("layernorm", "core_attn")},
    "moe, recomputed": {"mtp": 1, "norm": "LayerNorm", **MOE, **recompute("moe", "layernorm")},
    "full": {"mtp": 2, **FULL},
    "full, experts": {"mtp": 1, **MOE, **FULL},
    "full, latent": {"mtp": 1, **MLA, **FULL},
}
LAYOUTS = {
    "ep1": {"tp": 1, "dp": 2, "pp": 1, "ep": 1},
    "tp2 etp2 ep1": {"tp": 2, "dp": 2, "pp": 1, "ep": 1, "etp": 2},
    "tp2 etp1 ep4": {"tp": 2, "dp": 4, "pp": 1, "ep": 4, "etp": 1},
    "tp4 etp1 ep8": {"tp": 4, "dp": 4, "pp": 1, "ep": 8, "etp": 1},
    "ep4": {"tp": 1, "dp": 8, "pp": 1, "ep": 4},
}


def config(layout, variant):
    return SMALL | {"sp": LAYOUTS[layout]["tp"] > 1} | VARIANTS[variant]


@cache
def answers(layout):
    asked = [variant for at, variant in CASES if at == layout]
    return dict(zip(asked, ask([config(layout, v) for v in asked], **LAYOUTS[layout]), strict=True))


def ours(layout, variant):
    """Our model, shard, and its parts in depth order: embedding, layers, all that follows."""
    c, world = config(layout, variant), LAYOUTS[layout]
    our_model, seen = model(c), shard(c, world["tp"], world["ep"], world.get("etp"))
    if dense := c.get("moe", {}).get("moe_layer_freq", []).count(0):
        moe = our_model.moe.model_copy(update={"n_dense_layers": dense})
        our_model = our_model.model_copy(update={"moe": moe})
    inside = [layer.ops(seen) for layer, count in layers(our_model) for _ in range(count)]
    return our_model, seen, [embedding_ops(our_model, seen), *inside, head_ops(our_model, seen)]


def again(c):
    """Modules that are recomputed in the decoder's layers, and in what follows."""
    said = c.get("recompute", {})
    modules = frozenset(said.get("modules", ()))
    return modules, frozenset(("mtp",)) if said.get("granularity") == "full" else modules


def saved(ops, seen, hidden, modules=frozenset()):
    """Bytes that a part keeps."""
    sizes = tensor_bytes(ops, Tensor("x", seen.sequence_tokens * hidden, seen.itemsize))
    return sum(sizes[name] for name in kept_names(ops, find_segments(ops, modules)))


def their_saved(c, answer):
    """Bytes saved outside the decoder's layers, without masks and the angles that rotations and checkpoints share."""
    angles = [c["s"], 1, 1, c["mla"]["qk_pos_emb_head_dim"] if "mla" in c else c["d"]]
    left_out = ([1], [1, 1, c["s"], c["s"]])
    total = 0
    for module, shape, dtype, size, _ in answer["saved"]:
        no_activation = shape in left_out or (dtype == "float32" and shape == angles)
        if not no_activation and not module.startswith("decoder.layers") and module != "decoder":
            total += 2 * size if "norm" in module and shape[-1] == 1 and dtype == "bfloat16" else size
    return total


CASES = cases(LAYOUTS, VARIANTS, whole=("tp2 etp1 ep4",))


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_saved_bytes(layout, variant):
    c, answer = config(layout, variant), checked(answers(layout)[variant])
    our_model, seen, parts = ours(layout, variant)
    hidden, (_, in_head) = our_model.hidden_sz, again(c)
    mine = saved(parts[0], seen, hidden) + saved(parts[-1], seen, hidden, in_head)
    assert mine == their_saved(c, answer)


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_parameters_and_what_dispatchers_hold(layout, variant):
    answer = checked(answers(layout)[variant])
    our_model, seen, parts = ours(layout, variant)
    local = sum(p.local(seen.tp, seen.ep * seen.etp) for p in params(our_model, seen))
    assert local == sum(prod(shape) for _, shape in answer["params"])
    if "recompute" not in config(layout, variant):
        stays = [op.stays_bytes for part in parts for op in part if isinstance(op, Move)]
        assert sum(stays) == answer["held_bytes"]


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_collectives(layout, variant):
    c, answer = config(layout, variant), checked(answers(layout)[variant])
    _, _, parts = ours(layout, variant)
    modules, in_head = again(c)
    ahead, back = our_collectives(layout, parts[:-1], modules)
    if in_head == {"mtp"}:  # whole layers run again
        back += our_collectives(layout, parts[1:-1], frozenset())[0]
    more = our_collectives(layout, parts[-1:], in_head)
    assert (ahead + more[0], back + more[1]) == (theirs(answer["forward"]), theirs(answer["backward"]))
