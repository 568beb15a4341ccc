"""Megatron-Core's buffers, optimizer states and collectives of dense and expert parameters, on a CPU, against ours.

Proved, to the element and byte: which parameters are experts' and over how many ranks they are reduced, every bucket of both
buffers, gradient reductions and parameter gathers of each, fp32 master copies and moments, the all-reduce of what sequence
parallelism leaves partial (router and norms); all of it for two instances of the optimizer as well. Layers are dense and with
experts by turns, or the first one dense.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from mcore_ask import ask, checked, model

from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.states import shard_ranks, stage_states
from steptime.timing.step_time import step_time

EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
SMALL = {"layers": 2, "h": 64, "nq": 4, "nkv": 2, "d": 16, "i": 176, "s": 32, "b": 2, "vocab": 512, "do": "train"}
LAYOUTS = {
    "ep1": {"tp": 1, "dp": 4, "ep": 1, "etp": 1},
    "ep2": {"tp": 1, "dp": 4, "ep": 2, "etp": 1},
    "ep4": {"tp": 1, "dp": 8, "ep": 4, "etp": 1},
    "ep8": {"tp": 1, "dp": 8, "ep": 8, "etp": 1},
    "ep2, six ranks": {"tp": 1, "dp": 6, "ep": 2, "etp": 1},
    "tp2 ep2 etp2": {"tp": 2, "dp": 4, "ep": 2, "etp": 2},
    "tp2 ep4 etp1": {"tp": 2, "dp": 4, "ep": 4, "etp": 1},
    "ep2, two instances": {"tp": 1, "dp": 8, "ep": 2, "etp": 1, "instances": 2},
    "tp2 ep2 etp2, two instances": {"tp": 2, "dp": 4, "ep": 2, "etp": 2, "instances": 2},
}
VARIANTS = {
    "plain": {},
    "small buckets": {"bucket_size": 10_000},
    "replicated optimizer": {"sharded": False},
    "shared experts": {"moe": {"moe_shared_expert_intermediate_size": 96}},
    "first dense": {"layers": 3, "moe": {"moe_layer_freq": [0, 1, 1]}},
    "prediction of two tokens": {"mtp": 1},
}
CASES = [
    (layout, variant)
    for layout, world in LAYOUTS.items()
    for variant in VARIANTS
    if "instances" not in world or variant != "replicated optimizer"  # instances are the distributed optimizer's
]


def config(layout, variant):
    c = {**SMALL, "sharded": True, "bucket_size": None, "sp": LAYOUTS[layout]["tp"] > 1} | VARIANTS[variant]
    return c | {"moe": EXPERTS | c.get("moe", {})}


@cache
def answers(layout):
    return dict(zip(VARIANTS, ask([config(layout, v) for v in VARIANTS], **LAYOUTS[layout]), strict=True))


def assembly(layout, variant):
    world, c = LAYOUTS[layout], config(layout, variant)
    ours = model(c)
    dense = c["moe"].get("moe_layer_freq", []).count(0)
    ours = ours.model_copy(update={"moe": ours.moe.model_copy(update={"n_dense_layers": dense})})
    size = c["bucket_size"]
    job = Job(
        model=ours,
        parallelism={
            **{axis: world[axis] for axis in ("tp", "dp", "ep", "etp")},
            "pp": 1,
            "zero_level": 1 if c["sharded"] else 0,
            "replicas": world.get("instances", 1),
            "bucket_size_mb": None if size is None else (size - 0.5) * 4 / 1e6,
        },
        data={"gbs": world["dp"] * c["b"], "seqlen": c["s"], "microbatch_sz": c["b"]},
        hardware="dgx-h100",
    )
    return Assembly(job)


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_buffers_states_and_collectives(layout, variant):
    c, answer = config(layout, variant), checked(answers(layout)[variant])
    whole = assembly(layout, variant)
    (ours,) = stage_states(whole)
    mine = {}
    for bucket in ours.buckets[0]:
        mine.setdefault(bucket.group, []).append(bucket.elements)
    theirs = [(b["buckets"], b["ranks"]) for b in answer["buffers"]]
    assert [(buckets, shard_ranks(whole.job, group)) for group, buckets in mine.items()] == theirs
    assert ours.gradients_bytes == sum(b["grad_bytes"] for b in answer["buffers"])
    elements = sum(n for _, n, _ in answer["params"])
    held = answer["master_bytes"] + answer["moment_bytes"]
    if c["sharded"]:
        padding = 4 * 3 * (sum(map(sum, mine.values())) - elements)
        assert 0 <= ours.optimizer_bytes - held <= padding
        assert ours.params_bytes == sum(b["param_bytes"] for b in answer["buffers"])
    else:
        assert ours.optimizer_bytes == held
    timing = step_time(whole)
    reduced = timing.dp.reductions[0][0]
    calls = [(r.kind, r.over.ranks, r.bytes) for r in reduced if r.over.ranks > 1]
    copies = LAYOUTS[layout].get("instances", 1)
    calls += [("all_reduce", copies, r.bytes / r.over.ranks) for r in reduced if copies > 1]
    norm = [("all_reduce", LAYOUTS[layout]["tp"], timing.norm_reduce.bytes)] if c["sp"] else []
    assert Counter(calls + norm) == Counter((kind, n, size) for kind, n, size, _ in answer["reduce"] if n > 1)
    if c["sharded"]:
        gathered = {(g.kind, g.over.ranks, g.bytes) for g in timing.dp.gathers[0][0] if g.over.ranks > 1}
        assert gathered == {(kind, n, size) for kind, n, size, _ in answer["step"] if kind == "all_gather" and n > 1}
