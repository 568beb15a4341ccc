"""Drawn configs for property tests: models, layouts, frameworks and machines."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from steptime.base.config import ConfigError
from steptime.job.job import Job


@st.composite
def models(draw):
    """Small decoder models of every kind that is modeled."""
    heads = draw(st.sampled_from([8, 16]))
    learned = draw(st.booleans())
    return {
        "hidden_sz": draw(st.sampled_from([256, 1024])),
        "inter_sz": draw(st.sampled_from([768, 2816])),
        "n_q_heads": heads,
        "n_kv_heads": draw(st.sampled_from([2, 8])),
        "head_dim": draw(st.sampled_from([32, 128])),
        "vocab_sz": draw(st.sampled_from([1024, 50256])),
        "glu": draw(st.booleans()),
        "activation": draw(st.sampled_from(["silu", "gelu", "relu", "relu2"])),
        "learned_positions": learned,
        "max_positions": 4096 if learned else None,
        "dropout": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
    }


@st.composite
def plans(draw):
    """The sections of a config: most combinations run; those that cannot are skipped by `job`."""
    tp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 8], [1, 2, 4], [1, 2, 8]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    batch, rounds = draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    microbatches = rounds * pp if vpp > 1 else draw(st.integers(1, 5))
    software = draw(st.sampled_from(["megatron-core", "megatron-core", "megatron-2021", "torch", "fsdp2", "deepspeed"]))
    layout = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, **draw(layouts(software, pp))}
    performance = draw(performances())
    if software != "megatron-2021" and draw(st.integers(0, 3)) == 0:
        layout["cp"], performance["attention_impl"] = draw(st.sampled_from([2, 4])), "flash"
        if software == "megatron-core":
            layout["cp_comm_type"] = draw(st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"]))
            layout["cp_a2a"] = 2 if layout["cp_comm_type"] == "a2a+p2p" else 1
    layers = pp * vpp * draw(st.integers(1, 3))
    if draw(st.booleans()):
        layout["layers_per_stage"], layers = "auto", layers + draw(st.integers(0, 3))
    plan = {
        "model": {**draw(models()), "n_layers": layers},
        "parallelism": layout,
        "performance": {"software": software, **performance},
        "data": {
            "gbs": dp * batch * microbatches,
            "seqlen": draw(st.sampled_from([256, 2048])),
            "microbatch_sz": batch,
        },
        "hardware": draw(st.sampled_from(["dgx-h100", "dgx-a100-80", "mi300x-node", "gb200-nvl72"])),
    }
    if dp > 1 and draw(st.integers(0, 4)) == 0:
        plan["cross_dc"] = {"n_dcs": 2, "interconnect_bandwidth_gbps": 1000, "interconnect_latency_s": 0.002}
    return plan


@st.composite
def layouts(draw, software, pp):
    """What a framework lets one say of its sharding and buckets."""
    if software == "megatron-core":
        level = draw(st.integers(0, 3 if pp == 1 else 1))
        buckets = draw(st.sampled_from([{}, {"n_param_buckets": 3}, {"bucket_size_mb": 10}]))
        return {"zero_level": level, "sp": draw(st.booleans()), **buckets}
    if software == "fsdp2":
        options = {
            "reshard_after_forward": draw(st.booleans()),
            "prefetch": draw(st.integers(0, 2)),
            "reduce_dtype": draw(st.sampled_from(["fp32", "bf16"])),
            "wrap": draw(st.sampled_from(["block", "block", "model"])),
        }
        return {"fsdp": options, "replicas": draw(st.sampled_from([1, 1, 2]))}
    return {}


@st.composite
def performances(draw):
    """Recomputation, kernels and overlap."""
    full = {
        "granularity": "full",
        "method": draw(st.sampled_from(["uniform", "block"])),
        "n_layers": draw(st.integers(1, 2)),
    }
    word = draw(st.sampled_from(["none", "selective", "super-selective", "full"]))
    return {
        **({"recompute": full} if draw(st.integers(0, 4)) == 0 else {"activation_checkpointing_type": word}),
        "attention_impl": draw(st.sampled_from(["flash", "unfused"])),
        "norm_impl": draw(st.sampled_from(["fused", "composite"])),
        "loss_impl": draw(st.sampled_from(["fused", "composite"])),
        "overlap": {axis: draw(st.sampled_from([True, False, 0.5])) for axis in ("tp", "dp", "pp", "cp")},
    }


def drawn_job(plan, **changes) -> Job:
    """The job of a drawn plan; a layout that its framework cannot run is drawn again."""
    try:
        return Job(**plan).replace(**changes)
    except ConfigError:
        assume(False)
        raise
