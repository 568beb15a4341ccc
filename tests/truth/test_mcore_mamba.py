"""What Megatron-Core's own MambaModel keeps for backward, sends, and counts as parameters, on a CPU, against our op lists.

Proved, to the byte, over tp and sp: layers of Mamba-2, attention, MLP and experts in hybrid patterns. Not proved, because it
needs a GPU: mamba_ssm's kernels (stand-ins keep what their source says, `mcore_mamba.py`); what their temporaries come to is held
against measured peaks of whole jobs instead.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod

import pytest
from mcore_ask import ask, checked, model, shard
from test_mcore_moe import EXPERTS, our_collectives, theirs

from steptime.model.blocks import embedding_ops, head_ops, layers, params_of
from steptime.model.ops import Tensor, tensor_bytes
from steptime.model.segments import kept_names

SMALL = {"h": 64, "nq": 4, "nkv": 2, "d": 16, "i": 176, "s": 32, "b": 2, "vocab": 256}
NARROW = {"mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 2}
CASES = {
    "M": {},
    "MM*-": {},
    "M-M*-": {"glu": False, "activation": "relu2", "fused_activation": False},
    "M*-E": {"moe": EXPERTS},
    "MEM*E": {"moe": EXPERTS | {"moe_shared_expert_intermediate_size": 96}},
    "MM-": {"b": 1},
    "M*": {"mamba": {**NARROW, "mamba_num_heads": 12, "mamba_state_dim": 32}},
}
LAYOUTS = {
    "tp1": {"tp": 1, "dp": 2, "pp": 1, "ep": 1},
    "tp2 sp": {"tp": 2, "dp": 2, "pp": 1, "ep": 1, "etp": 2},
    "ep2": {"tp": 1, "dp": 2, "pp": 1, "ep": 2},
}


def config(layout, pattern):
    mine = CASES[pattern]
    return SMALL | {"layers": len(pattern), "hybrid": pattern, "mamba": NARROW, "sp": LAYOUTS[layout]["tp"] > 1} | mine


@cache
def answers(layout):
    return dict(zip(CASES, ask([config(layout, pattern) for pattern in CASES], **LAYOUTS[layout]), strict=True))


def ours(layout, pattern):
    c, world = config(layout, pattern), LAYOUTS[layout]
    our_model, seen = model(c), shard(c, world["tp"], world["ep"], world.get("etp"))
    return our_model, seen, [layer.ops(seen) for layer, count in layers(our_model) for _ in range(count)]


@pytest.mark.parametrize("pattern", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_bytes_of_every_layer(layout, pattern):
    answer = checked(answers(layout)[pattern])
    our_model, seen, parts = ours(layout, pattern)
    x = Tensor("x", seen.sequence_tokens * our_model.hidden_sz, seen.itemsize)
    for number, ops in enumerate(parts):
        sizes, kept = tensor_bytes(ops, x), kept_names(ops, [])
        mine = Counter(sizes[name] for name in kept)
        their = [
            (name, size)
            for name, _, _, size, _ in answer["saved"]
            if f"{name}.".startswith(f"decoder.layers.{number}.")
        ]
        mask = config(layout, pattern)["s"] ** 2 if pattern[number] == "*" else 0  # of booleans, once in a model
        assert sum(size * n for size, n in mine.items()) + mask == sum(size for _, size in their), (
            pattern[number],
            their,
        )


@pytest.mark.parametrize("pattern", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_and_parameters(layout, pattern):
    answer = checked(answers(layout)[pattern])
    our_model, seen, parts = ours(layout, pattern)
    every = [embedding_ops(our_model, seen), *parts, head_ops(our_model, seen)]
    layout_of = {"ep1": "tp1", "tp2 etp2 ep1": "tp2 sp", "ep2": "ep2"}
    name = next(key for key, value in layout_of.items() if value == layout)
    assert our_collectives(name, every, frozenset()) == (theirs(answer["forward"]), theirs(answer["backward"]))
    local = [p.local(seen.tp, seen.ep * seen.etp) for part in every for p in params_of(part)]
    assert sum(local) == sum(prod(shape) for _, shape in answer["params"])
