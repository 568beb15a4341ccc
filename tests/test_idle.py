"""Settings that change nothing are refused or told: random mixtures of experts, one setting changed at a time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from steptime import Job, estimate
from steptime.base.config import ConfigError, build

MOE = {
    "dispatcher": ("alltoall", "allgather", "flex"),
    "flex_backend": ("hybridep",),
    "permute_fusion": (True, False),
    "router_dtype": ("fp32", "compute"),
    "grouped_gemm": (True, False),
    "grouped_precision": ("mxfp8_torchao", "fp8_rowwise"),
    "deterministic": (True,),
    "shared_expert_overlap": (True,),
    "overlap_keeps_pieces": (True,),
}
MODEL = {
    "n_shared_experts": (2,),
    "shared_expert_gate": (True,),
    "pre_softmax": (True,),
    "load_balancing": ("aux_loss", "sinkhorn"),
    "z_loss": (True,),
    "capacity_factor": (0.5, 1.0, 2.0),
    "pad_to_capacity": (True,),
    "imbalance_factor": (1.3,),
    "latent_sz": (512,),
    "score_function": ("sigmoid",),
    "expert_bias": (True,),
    "node_limit": (2,),
    "n_dense_layers": (1,),
}
PERFORMANCE = {
    "overlap": tuple({axis: True} for axis in ("tp", "cp", "ep")),
    "precision": ("fp8_current", "mxfp8", "nvfp4", "fp8_tensorwise"),
    "fp8_params": (True,),
    "optimizer": ("muon", "sgd"),
    "muon_tp_mode": ("duplicated",),
    "softmax_impl": ("composite",),
    "sp_regather": (False,),
    "grouped_workspaces": (0, 8),
    "deferred_head_wgrads": (2,),
    "deallocate_pipeline_outputs": (False,),
    "attention_impl": ("unfused",),
    "quantized_head": (True,),
    "recompute": tuple(
        {"granularity": "selective", "modules": [module]}
        for module in ("core_attn", "layernorm", "mlp", "moe_act", "moe", "shared_experts")
    ),
}
CHANGES = [
    *((f"performance.moe.{key}", value) for key, values in MOE.items() for value in values),
    *((f"model.moe.{key}", value) for key, values in MODEL.items() for value in values),
    *((f"performance.{key}", value) for key, values in PERFORMANCE.items() for value in values),
]


def drawn(draw: random.Random) -> Job:
    """A small mixture of experts of Megatron-Core or torchtitan."""
    tp, pp = draw.choice([1, 2]), draw.choice([1, 2])
    moe = {"n_experts": 8, "expert_inter_sz": 512, "experts_per_token": 2, "n_shared_experts": draw.choice([0, 1])}
    model = {"n_layers": 2, "hidden_sz": 1024, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 8192, "moe": moe}
    return build(
        Job,
        {
            "model": model,
            "parallelism": {"tp": tp, "pp": pp, "dp": 8 // tp, "ep": draw.choice([1, 4]), "sp": tp > 1},
            "performance": {"software": draw.choice(["megatron-core", "megatron-core", "torchtitan"])},
            "data": {"gbs": 32, "seqlen": 2048, "microbatch_sz": 2},
            "hardware": draw.choice(["dgx-h100", "dgx-b200"]),
        },
    )


def answer(job: Job) -> tuple[str, list[str]]:
    """Everything but the plan and the assumptions; and what is told to have no effect."""
    found = estimate(job).to_dict()
    told = [line for line in found.pop("assumptions") if line.startswith("no effect: ")]
    del found["config"], found["time"]["basis"]
    return json.dumps(found, sort_keys=True), told


def default(job: Job, path: str) -> Any:
    """What a setting is without being said."""
    found: Any = job.to_config()
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


@pytest.mark.parametrize("seed", range(6))
def test_no_setting_is_silent(seed):
    draw = random.Random(seed)
    job = drawn(draw)
    plain, _ = answer(job)
    silent = []
    for path, value in draw.sample(CHANGES, 24):
        usual = default(job, path)
        if usual == value or (isinstance(value, dict) and isinstance(usual, dict) and value.items() <= usual.items()):
            continue
        try:
            changed = job.replace(**{path: value})
        except ConfigError:
            continue
        found, told = answer(changed)
        if found == plain and not told:
            silent.append(f"{path} {value}")
    assert not silent


def test_a_setting_without_effect_names_its_reason():
    """32 sequences on one stage: what a pipeline or tensor parallelism would do is said and does nothing."""
    job = drawn(random.Random(0)).replace(**{"parallelism.tp": 1, "parallelism.pp": 1, "parallelism.dp": 8})
    job = job.replace(**{"performance.software": "megatron-core", "performance.overlap": {"tp": True}})
    found = job.replace(**{"performance.deferred_head_wgrads": 2, "performance.softmax_impl": "composite"})
    assert answer(found)[1] == [
        "no effect: performance.softmax_impl composite (flash attention has no separate softmax kernel)",
        "no effect: performance.deferred_head_wgrads 2 (there is no pipeline (pp 1))",
        "no effect: performance.overlap.tp true (there is no tensor parallelism (tp 1))",
    ]


@pytest.mark.parametrize(
    ("model", "performance", "told"),
    [
        ({}, {"repeat_kv": True}, True),  # as many key-value heads as query heads
        ({"n_kv_heads": 4}, {"repeat_kv": True}, False),
        ({"n_kv_heads": 4}, {"repeat_kv": True, "attention_impl": "unfused"}, True),
        ({}, {"qk_norm_gathered": True}, True),  # no norms
        ({"qk_norm": True}, {"qk_norm_gathered": True}, False),
        ({"qk_norm": True}, {"qk_norm_gathered": True, "attention_impl": "unfused"}, True),
    ],
)
def test_heads_that_cannot_be_repeated_or_gathered(model, performance, told):
    """torchtitan on tp 2: what changes nothing is told, what is not told changes the answer."""
    job = drawn(random.Random(3))
    plain = job.replace(
        **{"parallelism.tp": 2, "parallelism.sp": True, "parallelism.dp": 4, "performance.software": "torchtitan"}
    )
    plain = plain.replace(**{f"model.{key}": value for key, value in model.items()})
    plain = plain.replace(
        **{f"performance.{key}": value for key, value in performance.items() if key == "attention_impl"}
    )
    found, lines = answer(plain.replace(**{f"performance.{key}": value for key, value in performance.items()}))
    own = [line for line in lines if "has an effect only with" in line]
    assert (bool(own), found == answer(plain)[0]) == (told, told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, False),
        ({"parallelism.fsdp.version": 1}, True),
        ({"parallelism.fsdp.wrap": "model"}, True),
        ({"parallelism.pp": 2}, True),
        ({"model.tie_embeddings": True}, True),
        ({"data.gbs": 16, "parallelism.fsdp.no_sync": True}, True),
        ({"data.gbs": 16, "parallelism.fsdp.no_sync": False}, False),
    ],
)
def test_groups_of_embedding_and_head_that_are_the_roots(change, told):
    """FSDP on 8 ranks: wrapping embedding and head apart is told where it changes nothing, and only there."""
    model = {"n_layers": 2, "hidden_sz": 1024, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 32768}
    base = drawn(random.Random(1)).replace(
        model=model, parallelism={"tp": 1, "pp": 1, "dp": 8, "fsdp": {}}, performance={"software": "fsdp2"}
    )
    base = base.replace(**{"data.gbs": 8, "data.microbatch_sz": 1}).replace(**change)
    found, lines = answer(base.replace(**{"parallelism.fsdp.ends": "apart"}))
    own = [line for line in lines if "parallelism.fsdp.ends" in line]
    assert (bool(own), found == answer(base)[0]) == (told, told)


@pytest.mark.parametrize(
    ("software", "machine", "performance", "told"),
    [
        ("megatron-core", "dgx-b200", {"precision": "mxfp8", "quantized_head": True}, None),
        ("megatron-core", "dgx-b200", {"precision": "bf16", "quantized_head": True}, "performance.quantized_head true"),
        ("fsdp2", "dgx-b200", {"precision": "mxfp8", "quantized_head": True}, "performance.quantized_head true"),
        ("megatron-core", "dgx-h100", {"attention_kernel": "fa2"}, None),
        (
            "megatron-core",
            "dgx-h100",
            {"attention_impl": "unfused", "attention_kernel": "flex_eager"},
            "performance.attention_kernel flex_eager",
        ),
    ],
)
def test_heads_and_kernels_that_do_not_run(software, machine, performance, told):
    """torchao's mxfp8 has no quantized head; what changes nothing is told, and what is not told changes the answer."""
    model = {"n_layers": 2, "hidden_sz": 1024, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 8192}
    base = drawn(random.Random(1)).replace(
        model=model, parallelism={"tp": 1, "pp": 1, "dp": 8}, performance={"software": software}, hardware=machine
    )
    *kept, last = performance.items()
    plain = base.replace(**{f"performance.{key}": value for key, value in kept})
    found, lines = answer(plain.replace(**{f"performance.{last[0]}": last[1]}))
    assert [line.split(" (")[0] for line in lines] == ([f"no effect: {told}"] if told else [])
    assert (found == answer(plain)[0]) == (told is not None)
