"""Whole pipeline stages of a job against Megatron-Core: saved bytes and collectives under every kind of recomputation.

Proved: what one micro-batch leaves saved on the first, a middle and the last stage, and the tensor-parallel collectives of a
step, for none, selective, full uniform and full block recomputation, with and without sequence parallelism.
Not proved here: what the schedule itself holds (a stage's received input, which a block with composite norms does not save,
stays with the schedule until backward), and everything `test_mcore_saved.py` lists.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from mcore_ask import ask, cases, checked, model

from steptime.answer.tables import part_rows
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.kept_buffers import comm_buffer_bytes
from steptime.memory.part_memories import PartMemories
from steptime.timing.step_time import step_time

SIZE = {"layers": 8, "h": 64, "nq": 4, "nkv": 2, "d": 16, "i": 176, "s": 32, "b": 2, "vocab": 512}
GPT = {"glu": False, "bias": True, "norm": "LayerNorm", "learned_positions": True, "nkv": 4, "dropout": 0.1}


def recompute(granularity, **how):
    return {"recompute": {"granularity": granularity, **how}}


VARIANTS = {
    "none": {},
    "gpt": {**GPT, "tied": True},
    "selective": recompute("selective", modules=["core_attn"]),
    "selective modules": recompute("selective", modules=["core_attn", "layernorm", "mlp"]),
    "uniform 1": recompute("full", method="uniform", num_layers=1),
    "uniform 2": recompute("full", method="uniform", num_layers=2),
    "block 0": recompute("full", method="block", num_layers=0),
    "block 1": recompute("full", method="block", num_layers=1),
    "block all": recompute("full", method="block", num_layers=8),
    "gpt uniform 1": {**GPT, **recompute("full", method="uniform", num_layers=1)},
    "gpt block 1": {**GPT, **recompute("full", method="block", num_layers=1)},
}
LAYOUTS = {
    "one stage": {"tp": 1, "pp": 1},
    "tp2": {"tp": 2, "pp": 1},
    "tp2 sp": {"tp": 2, "pp": 1, "sp": True},
    "first of 4, tp2 sp": {"tp": 2, "pp": 4, "rank": 0, "sp": True},
    "second of 4, tp2 sp": {"tp": 2, "pp": 4, "rank": 2, "sp": True},
    "last of 4, tp2 sp": {"tp": 2, "pp": 4, "rank": 6, "sp": True},
}
CASES = cases(LAYOUTS, VARIANTS, whole=("tp2 sp", "last of 4, tp2 sp"))


def config(layout, variant):
    return SIZE | {"sp": LAYOUTS[layout].get("sp", False)} | VARIANTS[variant]


@cache
def answers(layout):
    world = {key: value for key, value in LAYOUTS[layout].items() if key != "sp"}
    asked = [variant for at, variant in CASES if at == layout]
    return dict(zip(asked, ask([config(layout, v) for v in asked], **world), strict=True))


def assembly(layout, variant):
    """The same as a job of ours, with the kernels of Megatron's local spec."""
    world, c = LAYOUTS[layout], config(layout, variant)
    performance = {
        "attention_impl": "unfused",
        "scores_in_buffer": True,
        "norm_impl": "composite",
        "softmax_impl": "composite",
        "rope_impl": "own_tables",
    }
    if said := c.get("recompute"):
        names = {"num_layers": "n_layers"}
        performance["recompute"] = {names.get(key, key): value for key, value in said.items()}
    return Assembly(
        Job(
            model=model(c),
            parallelism={"tp": world["tp"], "pp": world["pp"], "dp": 1, "sp": c["sp"]},
            performance=performance,
            data={"gbs": c["b"] * world["pp"], "seqlen": c["s"], "microbatch_sz": c["b"]},
            hardware="dgx-h100",
        )
    )


def their_saved(c, answer):
    """Bytes saved, without the causal mask, one-element tensors, and the one fp32 rotary table that all checkpoints share."""
    total = 0
    for module, shape, dtype, size, _ in answer["saved"]:
        mask = dtype == "bool" and shape == [1, 1, c["s"], c["s"]]
        shared = dtype == "float32" and shape == [c["s"], 1, 1, c["d"]]
        if not mask and not shared and shape != [1]:
            on_cuda = "norm" in module and shape[-1] == 1 and dtype == "bfloat16"
            total += 2 * size if on_cuda else size
    return total


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_saved_by_a_stage(layout, variant):
    world, c = LAYOUTS[layout], config(layout, variant)
    ours = assembly(layout, variant)
    (chunk,) = ours.stages[world.get("rank", 0) // world["tp"]]
    assert PartMemories(ours).chunk(chunk).saved == their_saved(c, checked(answers(layout)[variant]))


@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_shared_buffer(layout, variant):
    """Megatron gathers into, and scores attention in, one buffer that grows and is never given back."""
    assert comm_buffer_bytes(assembly(layout, variant)) == checked(answers(layout)[variant])["buffer_bytes"]


@pytest.mark.parametrize(("layout", "variant"), [case for case in CASES if case[0] in {"tp2", "tp2 sp"}])
def test_tensor_parallel_collectives_of_a_step(layout, variant):
    ours, answer = assembly(layout, variant), checked(answers(layout)[variant])
    rows = [r for r in part_rows(step_time(ours)) if r.axis == "tp" and r.name != "norm gradients"]
    counted = Counter()
    for r in rows:
        counted[r.kind, r.ranks, r.bytes] += r.count_per_step
    theirs = Counter((kind, ranks, float(size)) for kind, ranks, size, _ in answer["forward"] + answer["backward"])
    assert counted == theirs
