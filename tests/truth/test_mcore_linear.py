"""What Megatron-Core's own Gated DeltaNet keeps for backward, sends and counts as parameters, on a CPU, against our ops.

Proved, to the byte, over tp, sp, one sequence and several, with dense layers and experts. Not proved, because it needs a GPU: the
kernels of flash-linear-attention and causal_conv1d (stand-ins keep what their source says, `mcore_linear.py`).
"""

from __future__ import annotations

from functools import cache
from math import prod

import pytest
import torch
from functorch.compile import make_boxed_func
from mcore_ask import ask, checked, model, shard
from test_mcore_moe import EXPERTS, our_collectives, theirs
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from steptime.model.blocks import embedding_ops, head_ops, layers, params_of
from steptime.model.ops import Tensor, tensor_bytes
from steptime.model.segments import find_segments, kept_names

SMALL = {"h": 64, "nq": 4, "nkv": 4, "d": 16, "i": 176, "s": 128, "b": 2, "vocab": 256, "layers": 3}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "linear_attention_freq": [1, 1, 0],
}
VARIANTS = {
    "two values a key": {},
    "one value a key": {"linear": LINEAR | {"linear_num_value_heads": 4}},
    "one sequence": {"b": 1},
    "full first": {"linear": LINEAR | {"linear_attention_freq": [0, 1, 1]}},
    "layernorm": {"norm": "LayerNorm", "bias": True},
    "dropout": {"dropout": 0.1},
    "experts": {"moe": EXPERTS},
    "recomputed norms": {"recompute": {"granularity": "selective", "modules": ["layernorm", "core_attn"]}},
}
LAYOUTS = {
    "tp1": {"tp": 1, "dp": 2, "pp": 1, "ep": 1},
    "tp2 sp": {"tp": 2, "dp": 2, "pp": 1, "ep": 1, "etp": 2},
    "tp4 sp": {"tp": 4, "dp": 2, "pp": 1, "ep": 1, "etp": 4},
}
CASES = [(layout, variant) for layout in LAYOUTS for variant in VARIANTS]


def config(layout, variant):
    """`experts` are split over one rank or two here."""
    return SMALL | {"linear": LINEAR, "sp": LAYOUTS[layout]["tp"] > 1} | VARIANTS[variant]


@cache
def answers(layout):
    return dict(zip(VARIANTS, ask([config(layout, v) for v in VARIANTS], **LAYOUTS[layout]), strict=True))


def ours(layout, variant):
    c, world = config(layout, variant), LAYOUTS[layout]
    our_model, seen = model(c), shard(c, world["tp"], world["ep"], world.get("etp"))
    return our_model, seen, [layer.ops(seen) for layer, count in layers(our_model) for _ in range(count)]


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_saved_bytes_of_every_layer(layout, variant):
    c, answer = config(layout, variant), checked(answers(layout)[variant])
    our_model, seen, parts = ours(layout, variant)
    x = Tensor("x", seen.sequence_tokens * our_model.hidden_sz, seen.itemsize)
    modules = frozenset(c.get("recompute", {}).get("modules", ()))
    linear = our_model.linear_attention
    for number, ops in enumerate(parts):
        if not linear.at(number):
            continue
        sizes = tensor_bytes(ops, x)
        mine = {name: sizes[name] for name in kept_names(ops, find_segments(ops, modules))}
        their = [
            (name, shape, dtype, 2 * size if "norm" in name and shape[-1] == 1 and dtype == "bfloat16" else size)
            for name, shape, dtype, size, _ in answer["saved"]
            if f"{name}.".startswith(f"decoder.layers.{number}.") and (shape != [1] or name.endswith("self_attention"))
        ]
        assert sum(mine.values()) == sum(size for *_, size in their), (mine, their)


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_collectives_and_parameters(layout, variant):
    c, answer = config(layout, variant), checked(answers(layout)[variant])
    our_model, seen, parts = ours(layout, variant)
    every = [embedding_ops(our_model, seen), *parts, head_ops(our_model, seen)]
    local = [p.local(seen.tp, seen.ep * seen.etp) for part in every for p in params_of(part)]
    assert sum(local) == sum(prod(shape) for _, shape in answer["params"])
    if layout == "tp1":
        name = "ep1"
        modules = frozenset(c.get("recompute", {}).get("modules", ()))
        assert our_collectives(name, every, modules) == (theirs(answer["forward"]), theirs(answer["backward"]))


def test_the_compiled_gate_keeps_what_it_reads():
    """Its norm's output and the gate, both in bf16, as the partitioner of torch.compile cuts it."""

    def gate(y, z):
        return (y * torch.nn.functional.silu(z.float())).to(torch.bfloat16)

    kept = []

    def forward(graph, inputs):
        made = next(node for node in graph.graph.nodes if node.op == "output").args[0][1:]
        kept.extend((n.meta["val"].dtype, tuple(n.meta["val"].shape)) for n in made)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    y, z = (torch.randn(6, 24, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    torch.compile(gate, backend=backend)(y, z).sum().backward()
    assert kept == [(torch.bfloat16, (6, 24))] * 2
