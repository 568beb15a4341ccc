"""Candidates side by side: rules, states and memory in columns equal one job at a time, bit for bit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from steptime import Job
from steptime.answer.verdict import stage_memory, stage_rows
from steptime.base.config import ConfigError
from steptime.fsdp import applies
from steptime.fsdp import states as fsdp_states
from steptime.job.assembly import Assembly
from steptime.job.candidates import Candidates
from steptime.job.job import facts
from steptime.memory.overhead import overhead
from steptime.memory.states import stage_states
from steptime.search.grid import checked
from steptime.search.space import Counts

MODEL = {"n_layers": 12, "hidden_sz": 1024, "inter_sz": 3072, "n_q_heads": 16, "n_kv_heads": 4, "vocab_sz": 50257}


MOE = {"n_experts": 16, "expert_inter_sz": 512, "experts_per_token": 4, "n_dense_layers": 1, "n_shared_experts": 1}


def plan(parallelism=None, performance=None, **model):
    return Job(
        model=MODEL | model,
        parallelism={"tp": 1, "pp": 1, "dp": 4} | (parallelism or {}),
        performance={"software": "megatron-core"} | (performance or {}),
        data={"gbs": 64, "seqlen": 2048, "microbatch_sz": 1},
        hardware="dgx-h100",
    )


PLANS = {
    "distributed optimizer": plan(),
    "sequence parallelism off": plan({"sp": False}),
    "unfused, dropout, biases": plan(
        performance={"attention_impl": "unfused"}, dropout=0.1, bias=True, norm="layernorm"
    ),
    "tied, ZeRO 0": plan({"zero_level": 0}, tie_embeddings=True),
    "selective": plan(performance={"activation_checkpointing_type": "super-selective"}),
    "full, block": plan(performance={"recompute": {"granularity": "full", "method": "block", "n_layers": 1}}),
    "full, groups of 2": plan(performance={"recompute": {"granularity": "full", "n_layers": 2}}),
    "fp8": plan(performance={"precision": "fp8_delayed"}),
    "small buckets": plan({"n_param_buckets": 4}),
    "2021": plan(performance={"software": "megatron-2021"}),
    "FSDP": plan({"fsdp": {"reshard_after_forward": True}}, {"software": "fsdp2"}, vocab_sz=50176),
    "hybrid": plan(n_layers=12, hybrid_pattern="M-M*-MM-M*-M", mamba={"head_dim": 32, "state_dim": 64}),
    "experts": plan(
        {"ep": 2, "sp": True}, moe={"n_experts": 8, "expert_inter_sz": 768, "experts_per_token": 2, "n_dense_layers": 2}
    ),
    "experts over two ranks": plan({"ep": 2}, moe=MOE),
    "latent attention": plan(attention={"kind": "mla"}, n_kv_heads=16),
    "prediction of three tokens": plan({"ep": 2}, mtp=2, moe=MOE, tie_embeddings=True),
    "Gated DeltaNet": plan(linear_attention={"n_key_heads": 8, "n_value_heads": 16, "freq": 3}),
    "layers of two widths": plan(layers=[{"repeat": 4, "inter_sz": 4096}, {"repeat": 8}]),
}


def layouts(turn):
    """A fifth of all products of the degrees, each turn another: tp beyond the key-value heads too, dp of up to 64 devices."""
    rows = list(product((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 8)))[turn % 5 :: 5]
    names = ("tp", "pp", "vpp", "cp", "microbatch_sz", "dp")
    return {name: np.array(column, dtype=float) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def one_job(job, columns, row):
    """The same layout as a job of its own, or None where it cannot run."""
    sections = {"microbatch_sz": "data"}
    changes = {f"{sections.get(key, 'parallelism')}.{key}": int(column[row]) for key, column in columns.items()}
    try:
        return job.replace(**changes)
    except ConfigError:
        return None


def held(job):
    """The parts of a job, and its model states."""
    assembly = Assembly(job)
    return assembly, fsdp_states(assembly) if applies(job) else stage_states(assembly)


@pytest.mark.parametrize("name", PLANS)
def test_columns_equal_one_job_at_a_time(name):
    """Which layouts can run, and of these every byte, on a fifth of all layouts; each fifth is that of three plans or more.

    That is of every stage's states, activations and transients, and the overhead.
    """
    job, columns = PLANS[name], layouts(list(PLANS).index(name))
    candidates = Candidates(job, **columns)
    every = np.ones(columns["tp"].size, dtype=bool)
    legal = checked([facts(candidates.as_job)], every, Counts(), 1)
    jobs = [one_job(job, columns, row) for row in range(legal.size)]
    assert legal.tolist() == [one is not None for one in jobs]
    assert legal.sum() >= 10
    indices = np.flatnonzero(legal)
    seen = []
    for which, group in candidates.rows(indices).alike():
        stages = [row._asdict() for row in stage_rows(*held(group.as_job))]
        outside = overhead(group.as_job)
        for at, row in enumerate(indices[which]):
            found = stage_memory(*held(jobs[row]))
            for ours, theirs in zip(stages, found.stages, strict=True):
                mine = {key: np.broadcast_to(value, len(which))[at] for key, value in ours.items() if key != "peak_op"}
                assert mine == {key: value for key, value in theirs._asdict().items() if key != "peak_op"}
            assert np.broadcast_to(outside.communicators, len(which))[at] == found.overhead_bytes.communicators
        seen += which.tolist()
    assert sorted(seen) == list(range(len(indices)))


def test_an_unknown_column_is_refused():
    with pytest.raises(ValueError, match="no columns: tq"):
        Candidates(plan(), tq=np.array([1.0]))
