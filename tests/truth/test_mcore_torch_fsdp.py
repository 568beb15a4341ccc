"""Megatron-Core's TorchFullyShardedDataParallel and its optimizer on a CPU, against the profile megatron-core-fsdp2.

Proved to the byte: parameters, gradients, master weights and moments of a rank; every collective of a micro-batch, and that each
micro-batch repeats them. Peaks of forward and backward within 1 % where a layer decides them. Where the loss does, ours is above
by the parameters of the head, which Megatron reshards before the loss, and of the last layer, gathered after it.
Not proved: TransformerEngine's kernels, the caching allocator.
"""

from __future__ import annotations

from functools import cache

import pytest
from mcore_ask import ask, checked, model

from steptime.fsdp.passes import pass_moments
from steptime.fsdp.sharded_states import states
from steptime.job.assembly import Assembly
from steptime.job.job import Job

DP = 8
SIZE = {
    "do": "torch_fsdp",
    "layers": 4,
    "h": 64,
    "nq": 4,
    "nkv": 4,
    "d": 16,
    "i": 2048,
    "s": 64,
    "b": 2,
    "vocab": 256,
    "fused_softmax": True,
    "norm": "LayerNorm",
    "micro_batches": 2,
}
FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
VARIANTS = {
    "mlp": {},
    "gpt": {"glu": False, "bias": True, "learned_positions": True},
    "stays": {"reshard": False},
    "full": FULL,
    "full, stays": FULL | {"reshard": False},
    "loss": {"i": 256, "vocab": 8192},
}
LAYERS = [name for name in VARIANTS if name != "loss"]
SCRATCH = 16
"""Bytes a token beside activations: labels and scratch of the loss (test_mcore_peaks.py)."""


@cache
def answers():
    return dict(zip(VARIANTS, ask([SIZE | v for v in VARIANTS.values()], tp=1, pp=1, dp=DP), strict=True))


def theirs(variant):
    return checked(answers()[variant])


def ours(variant):
    c = SIZE | VARIANTS[variant]
    performance = {
        "software": "megatron-core-fsdp2",
        "attention_impl": "unfused",
        "scores_in_buffer": True,
        "softmax_impl": "fused",
        "norm_impl": "composite",
        "rope_impl": "own_tables",
    }
    if said := c.get("recompute"):
        performance["recompute"] = {{"num_layers": "n_layers"}.get(key, key): value for key, value in said.items()}
    fsdp = {"reshard_after_forward": c.get("reshard", True)}  # reduced in the dtype of the parameters by default
    return Assembly(
        Job(
            model=model(c),
            parallelism={"tp": 1, "pp": 1, "dp": DP, "fsdp": fsdp},
            performance=performance,
            data={"gbs": DP * c["b"] * c["micro_batches"], "seqlen": c["s"], "microbatch_sz": c["b"]},
            hardware="dgx-h100",
        )
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_of_a_rank(variant):
    """Shards and gradients in bf16, the optimizer's fp32 copies and two fp32 moments: 2 + 2 + 4 + 8 bytes a parameter."""
    found, held = states(ours(variant))[0], theirs(variant)["bytes"]
    assert (found.params_bytes, found.gradients_bytes) == (held["params"], held["gradients"])
    assert found.optimizer_bytes == held["masters"] + held["moments"]
    assert held["masters"] + held["moments"] == 6 * held["params"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_collectives_of_a_micro_batch(variant):
    """Final norm, embedding, layers and head are gathered for forward, and for backward unless they stay; all is reduced in bf16.

    Bytes of a group by hand, at 2 a parameter: vocabulary x h for either end; a norm h, or 2 h with its bias.
    """
    c, found = SIZE | VARIANTS[variant], theirs(variant)
    h, biased = c["h"], 2
    end = 2 * c["vocab"] * h
    glu = 2 if c.get("glu", True) else 1
    layer = 4 * h * h + (glu + 1) * h * c["i"] + 2 * biased * h
    layer += 5 * h + c["i"] if c.get("bias") else 0
    first = end + (2 * c["s"] * h if c.get("learned_positions") else 0)
    groups = sorted([2 * biased * h, first, *[2 * layer] * c["layers"], end])
    gathers, reductions = (
        sorted(bytes_ for kind, ranks, bytes_, dtype in found[half] if (kind, ranks, dtype) == (of, DP, "bfloat16"))
        for half, of in (("forward", "all_gather"), ("backward", "reduce_scatter"))
    )
    again = sorted(bytes_ for kind, _, bytes_, _ in found["backward"] if kind == "all_gather")
    assert (gathers, reductions, again) == (groups, groups, groups if c.get("reshard", True) else [])


def test_the_update_exchanges_a_norm_alone():
    """Shards are updated where they are; the gradients' norm is summed over the ranks: one fp32 number."""
    calls = [call for call in theirs("mlp")["update"] if call[1] > 1]
    assert calls == [["all_reduce", DP, 4, "float32"]]


def peaks(variant):
    """Forward and backward: theirs without states, shared buffer, causal mask, SCRATCH and softmax's scales; and ours."""
    c, answer = SIZE | VARIANTS[variant], theirs(variant)
    held = answer["bytes"]
    beside = sum(held.values()) + answer["buffer_bytes"] + c["s"] ** 2 + SCRATCH * c["s"] * c["b"] + 4 * c["layers"]
    most = [answer["peaks"][half][0] - beside for half in ("forward", "backward")]
    return most, [moment.activations_bytes + moment.transient_bytes for moment in pass_moments(ours(variant))]


@pytest.mark.parametrize("variant", LAYERS)
def test_peaks_of_layers(variant):
    measured, found = peaks(variant)
    assert found == pytest.approx(measured, rel=0.01)


def test_peaks_of_the_loss():
    """The head is 2 x 8,192 x 64 bytes, a layer 2 (4 x 64^2 + 3 x 64 x 256 + 4 x 64)."""
    (ahead, back), (our_ahead, our_back) = peaks("loss")
    assert our_ahead - 2 * 8192 * 64 == pytest.approx(ahead, rel=0.01)
    assert our_back - 2 * (4 * 64**2 + 3 * 64 * 256 + 4 * 64) == pytest.approx(back, rel=0.01)
