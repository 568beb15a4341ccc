"""Plans of every kind that a search screens in columns, and the layouts of its screen."""

from __future__ import annotations

import csv
import random
from typing import Any

import numpy as np

from steptime import Job
from steptime.search.screen import Screen
from steptime.search.search import Layout, Search
from steptime.search.space import Axes, Counts

MODEL = {"n_layers": 12, "hidden_sz": 1024, "inter_sz": 3072, "n_q_heads": 16, "n_kv_heads": 4, "vocab_sz": 50257}


ONE = ("--top", "1", "--csv")
"""Options of a search whose best layout is all that is asked for: other forms estimate the best for each choice, too."""


def first_of(text: str) -> dict[str, str]:
    """The best layout of the CSV of a search."""
    return next(csv.DictReader(text.splitlines()))


def job_of(**said: Any) -> Job:
    """A job from plain values."""
    return Job(**said)


def best_of(found: Search) -> Layout:
    """The best of a search that found one."""
    assert found.best is not None
    return found.best


def plan(parallelism=None, performance=None, hardware="dgx-h100", **model):
    return job_of(
        model=MODEL | model,
        parallelism={"tp": 1, "pp": 1, "dp": 4} | (parallelism or {}),
        performance={"software": "megatron-core"} | (performance or {}),
        data={"gbs": 64, "seqlen": 2048, "microbatch_sz": 1},
        hardware=hardware,
    )


PLANS = {
    "distributed optimizer": plan(),
    "unfused, dropout, biases": plan(
        performance={"attention_impl": "unfused"}, dropout=0.1, bias=True, norm="layernorm"
    ),
    "tied": plan(tie_embeddings=True),
    "fp8": plan(performance={"precision": "fp8_current"}),
    "small buckets": plan({"n_param_buckets": 4}),
    "uneven": plan({"pp": 4, "dp": 1, "layers_per_stage": "auto"}, n_layers=10),
    "ends counted": plan(
        {"pp": 3, "dp": 1, "embedding_and_loss_count_as_layers": True}, n_layers=10, hidden_sz=2048, inter_sz=6144
    ),
    "2021": plan(performance={"software": "megatron-2021"}),
    "batches stay": plan(performance={"batches_stay": True}),
    "gradients twice": plan(performance={"software": "megatron-2021@2021-03"}),
    "layers of two widths": plan(layers=[{"repeat": 5, "inter_sz": 4096}, {"repeat": 7}]),
    "a100, overlap off": plan(performance={"overlap": {"dp": False, "pp": False, "tp": 0.5}}, hardware="dgx-a100-80"),
    "experts": plan(moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2, "n_dense_layers": 1}),
    "shared experts, capacity": plan(
        moe={
            "n_experts": 4,
            "expert_inter_sz": 1024,
            "experts_per_token": 1,
            "n_shared_experts": 1,
            "shared_expert_inter_sz": 512,
            "capacity_factor": 1.25,
        }
    ),
    "prediction of two tokens": plan(mtp=1),
    "Gated DeltaNet": plan(linear_attention={"n_key_heads": 8, "n_value_heads": 16}),
    "prediction of three, experts": plan(mtp=2, moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2}),
    "prediction, exchange overlapped": plan(
        {"pp": 2, "vpp": 2, "dp": 2, "ep": 2},
        {"overlap": {"ep": True}},
        mtp=1,
        moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2},
    ),
    "exchange overlapped, pieces kept": plan(
        {"pp": 2, "vpp": 2, "dp": 2, "ep": 2},
        {"overlap": {"ep": True}, "moe": {"overlap_keeps_pieces": True}},
        mtp=1,
        moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2},
    ),
    "exchange overlapped": plan(
        {"dp": 4, "ep": 2},
        {"overlap": {"ep": True}},
        vocab_sz=2048,
        moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2},
    ),
    "two data centers": job_of(
        model=MODEL,
        parallelism={"tp": 1, "pp": 1, "dp": 4},
        data={"gbs": 64, "seqlen": 2048, "microbatch_sz": 1},
        hardware="dgx-h100",
        cross_dc={"n_dcs": 2, "interconnect_bandwidth_gbps": 400, "interconnect_latency_s": 0.005},
    ),
    "replicas": plan({"replicas": 2}),
    "latent attention, experts in groups": plan(
        attention={"kind": "mla", "q_lora_rank": 512, "kv_lora_rank": 256},
        n_kv_heads=16,
        moe={
            "n_experts": 16,
            "expert_inter_sz": 512,
            "experts_per_token": 4,
            "n_dense_layers": 2,
            "node_limit": 2,
        },
    ),
    "windows": plan(attention={"window": 512, "window_pattern": 3, "sinks": True}),
    "adapters": plan(lora={"rank": 16}, hidden_sz=2048, inter_sz=6144),
    "lightning attention": plan(linear_attention={"kind": "lightning", "freq": 6}),
    "latents of experts": plan(moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2, "latent_sz": 512}),
    "mxfp8": plan(performance={"precision": "mxfp8"}, hardware="dgx-b200"),
    "some layers in bf16": plan(
        performance={"precision": "fp8_current", "bf16_layers_at_start": 1, "bf16_layers_at_end": 2}
    ),
    "offloaded": plan(performance={"offload_modules": ["core_attn", "attn_proj", "mlp_norm"]}, hidden_sz=2048),
    "offloaded experts": plan(
        performance={"offload_modules": ["expert_fc1", "moe_act", "attn_norm"]},
        mtp=1,
        moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2},
    ),
    "hybrid": plan(
        hybrid_pattern="M-M-M*-M-M-M", mamba={"n_heads": 32, "head_dim": 64, "state_dim": 64, "n_groups": 4}
    ),
}


FLEETING = {
    "torch": plan(performance={"software": "torch"}),
    "torch, GPipe": plan({"pp": 2, "dp": 2, "schedule": "gpipe"}, {"software": "torch"}, tie_embeddings=True),
    "torch, zero-bubble": plan({"pp": 2, "dp": 2, "schedule": "zero_bubble"}, {"software": "torch"}),
    "torch, ZBV": plan({"pp": 2, "dp": 2, "vpp": 2, "schedule": "zbv"}, {"software": "torch"}),
    "torch, DualPipeV": plan({"pp": 2, "dp": 2, "vpp": 2, "schedule": "dualpipev"}, {"software": "torch"}),
    "torch, full groups": plan(performance={"software": "torch", "recompute": {"granularity": "full", "n_layers": 2}}),
    "deepspeed": plan({"zero_level": 2}, {"software": "deepspeed"}),
    "aleph-alpha": plan(performance={"software": "aleph-alpha"}),
    "internevo": plan(performance={"software": "internevo"}),
    "nanotron": plan(performance={"software": "nanotron"}),
}
"""Gradients that do not stay from step to step."""


def blocks_of(job, devices):
    return [block for _, block in Screen(job, Axes(), Counts()).blocks(devices, job.data.gbs)]


def sampled(blocks, count, seed=1):
    """Layouts that can run: (block, recomputation, row)."""
    draw = random.Random(seed)
    for _ in range(count):
        block = draw.choice(blocks)
        yield block, draw.randrange(len(block.choices)), int(draw.choice(np.flatnonzero(block.legal)))
