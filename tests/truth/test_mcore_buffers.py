"""Megatron-Core's parameter and gradient buffers, optimizer states and data-parallel collectives against ours.

Proved, to the element and byte: buckets and padding of `_ParamAndGradBuffer` for random parameter lists; for whole models under
DistributedDataParallel and the distributed optimizer, run on a CPU for one step with torch's AdamW: both buffers, every bucket,
fp32 master copies and moments, the gradient reduction and parameter gather of every bucket, the all-reduces of a tied
embedding and of the parameters that sequence parallelism leaves partial.
Not proved: fp8 parameter buffers, precision-aware optimizer states, several optimizer instances, Megatron's FSDP.
"""

from __future__ import annotations

import random
from functools import cache

import jobs
import pytest
from mcore_ask import ask, cases, checked, model

from steptime.job.assembly import Assembly
from steptime.memory.buckets import Pieces, run_buckets
from steptime.memory.states import stage_states
from steptime.model.shard import padded_vocab
from steptime.timing.step_time import step_time

SMALL = {"layers": 4, "h": 64, "nq": 4, "nkv": 2, "d": 16, "i": 176, "s": 32, "b": 2, "vocab": 500}
GPT = {"nkv": 4, "glu": False, "bias": True, "norm": "LayerNorm", "learned_positions": True, "tied": True}


def random_lists():
    """Parameter lists with small, odd and large tensors, tied copies at either end or inside."""
    draw = random.Random(20261121)
    kinds = (lambda: draw.randint(1, 300), lambda: draw.randint(1, 100_000), lambda: 64 * draw.randint(1, 4000))
    lists = []
    for _ in range(300):
        n = draw.randint(1, 30)
        lists.append(
            {
                "do": "buckets",
                "params": [draw.choice(kinds)() for _ in range(n)],
                "dp": draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 64]),
                "sharded": draw.random() < 0.8,
                "bucket_size": draw.choice([None, 1, 1000, 50_000, 100_000, 1_000_000]),
                "alone": draw.choice([[], [], [0], [n - 1], [n // 2], sorted({0, n - 1})]),
                "high_busbw": draw.random() < 0.3,
            }
        )
    return lists


@cache
def buffers():
    return list(zip(random_lists(), ask(random_lists()), strict=True))


def our_buckets(c):
    pieces = [Pieces(elements, 1, position in c["alone"]) for position, elements in enumerate(c["params"])]
    return run_buckets(
        [(pieces[::-1], 1)],
        c["dp"],
        c["bucket_size"],
        sharded=c["sharded"],
        alignment=2**16 if c["high_busbw"] else 128,
    )


def test_buckets_of_random_parameters():
    for c, answer in ((c, checked(a)) for c, a in buffers()):
        assert our_buckets(c) == answer["buckets"], c
        assert sum(answer["buckets"]) == answer["numel"]


def test_shares_hold_the_parameters_and_never_more_than_an_even_part():
    for c, answer in ((c, checked(a)) for c, a in buffers()):
        if c["sharded"]:
            assert sum(answer["shares"]) == sum(c["params"])
            assert max(answer["shares"]) <= sum(our_buckets(c)) // c["dp"]


LAYOUTS = {
    "dp1": {"tp": 1, "pp": 1, "dp": 1},
    "dp4": {"tp": 1, "pp": 1, "dp": 4},
    "tp2 dp3": {"tp": 2, "pp": 1, "dp": 3},
    "tp2 dp2, first of 2 stages": {"tp": 2, "pp": 2, "dp": 2, "rank": 0},
    "tp2 dp2, last of 2 stages": {"tp": 2, "pp": 2, "dp": 2, "rank": 4},
    "dp8, first of 4 stages": {"tp": 1, "pp": 4, "dp": 8, "rank": 0},
    "dp8, second of 4 stages": {"tp": 1, "pp": 4, "dp": 8, "rank": 8},
    "dp8, last of 4 stages": {"tp": 1, "pp": 4, "dp": 8, "rank": 24},
}
"""The rank is the first of its data-parallel group: its shards hold no end-of-buffer padding unless the buffer is all padding."""
VARIANTS = {
    "llama": {},
    "tied": {"tied": True},
    "gpt": GPT,
    "qk norm, qkv bias": {"qk_norm": True, "bias": True},
    "one bucket": {"bucket_size": 10**9},
    "every parameter a bucket": {"bucket_size": 1},
    "default bucket": {"bucket_size": None},
    "bf16 gradients": {"fp32_grads": False},
    "replicated optimizer": {"sharded": False},
    "replicated optimizer, tied": {"sharded": False, "tied": True},
    "Muon": {"sharded": False, "muon": True},
    "Muon, tied, biases": {**GPT, "sharded": False, "muon": True},
    "prediction of two tokens": {"mtp": 1},
    "of three, replicated optimizer": {"mtp": 2, "sharded": False},
    "of two, learned positions": {"mtp": 1, "learned_positions": True},
}
CASES = cases(LAYOUTS, VARIANTS, whole=("dp4", "tp2 dp2, last of 2 stages"))


def config(layout, variant):
    """One configuration, its vocabulary padded as Megatron's scripts do before they build the model."""
    world = LAYOUTS[layout]
    c = {**SMALL, "do": "train", "sharded": True, "bucket_size": 20_000, "sp": world["tp"] > 1, **VARIANTS[variant]}
    return c | {"vocab": padded_vocab(c["vocab"], world["tp"], 128)}


@cache
def answers(layout):
    asked = [variant for at, variant in CASES if at == layout]
    return dict(zip(asked, ask([config(layout, v) for v in asked], **LAYOUTS[layout]), strict=True))


def bucketed_job(layout, variant):
    """The same as a job of ours."""
    world, c = LAYOUTS[layout], config(layout, variant)
    grads = "fp32" if c.get("fp32_grads", True) else "bf16"
    size = c["bucket_size"]
    # megabytes back to whole elements: half an element more than the size counts as the size
    megabytes = None if size is None else (size - 0.5) * (4 if grads == "fp32" else 2) / 1e6
    return jobs.job(
        model(c | {"vocab": SMALL["vocab"]}),
        gbs=world["dp"] * c["b"],
        seqlen=c["s"],
        microbatch_sz=c["b"],
        performance={"main_grad_dtype": grads, "optimizer": "muon" if c.get("muon") else "adamw"},
        **{axis: world[axis] for axis in ("tp", "pp", "dp")},
        zero_level=1 if c["sharded"] else 0,
        bucket_size_mb=megabytes,
    )


def our_stage(layout, variant):
    world = LAYOUTS[layout]
    stage = world.get("rank", 0) // (world["tp"] * world["dp"])
    assembly = Assembly(bucketed_job(layout, variant))
    return assembly, stage, stage_states(assembly)[stage]


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_buffers_and_states(layout, variant):
    c, answer = config(layout, variant), checked(answers(layout)[variant])
    _, _, ours = our_stage(layout, variant)
    (theirs,) = answer["buffers"]
    assert [[bucket.elements for bucket in chunk] for chunk in ours.buckets] == [theirs["buckets"]]
    assert ours.gradients_bytes == theirs["grad_bytes"]
    elements = sum(n for _, n, _ in answer["params"])
    assert ours.params_bytes == (theirs["param_bytes"] if c["sharded"] else 2 * elements)
    held = answer["master_bytes"] + answer["moment_bytes"]
    if c["sharded"]:  # ours is the even share of the padded buffer: the rank with the least padding in its share
        padding = 4 * 3 * (sum(theirs["buckets"]) - elements)
        assert 0 <= ours.optimizer_bytes - held <= padding
    else:
        assert round(ours.optimizer_bytes, 6) == held


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_data_parallel_collectives(layout, variant):
    world, c, answer = LAYOUTS[layout], config(layout, variant), checked(answers(layout)[variant])
    assembly, stage, ours = our_stage(layout, variant)
    timing = step_time(assembly)
    size = 4 if c.get("fp32_grads", True) else 2
    reduce, after = answer["reduce"][: len(ours.buckets[0])], answer["reduce"][len(ours.buckets[0]) :]
    if world["dp"] > 1:
        calls = timing.dp.reductions[stage][0]
        assert [[r.kind, world["dp"], r.bytes] for r in calls] == [call[:3] for call in reduce]
    gathers = [call[:3] for call in answer["step"] if call[0] == "all_gather" and world["dp"] > 1]
    ours_gather = timing.dp.gathers[stage][0] if world["dp"] > 1 and c["sharded"] else []
    assert sorted([g.kind, world["dp"], g.bytes] for g in ours_gather) == sorted(gathers)
    ends = (c.get("tied") or c.get("mtp")) and world["pp"] > 1 and stage in {0, world["pp"] - 1}
    tied = [["all_reduce", 2, timing.embedding_reduce.bytes]] if ends else []
    partial = [["all_reduce", world["tp"], partial_grad_bytes(assembly, stage, size)]] if c["sp"] else []
    assert [call[:3] for call in after] == partial + tied
    if c["sp"] and stage == timing.busiest:
        assert timing.norm_reduce.bytes == partial[0][2]


def partial_grad_bytes(assembly, stage, size):
    """Gradients of one stage's blocks and head that each tensor-parallel rank has for its own tokens only."""
    chunk = assembly.stages[stage][0]
    owners = assembly.kinds[0].params * chunk.layers + (assembly.head.params if chunk.head else [])
    return sum(p.elements for p in owners if p.split_dim is None) * size
