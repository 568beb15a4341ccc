"""Latent attention of torchtitan by hand: 8 tokens of 128 values, two heads of 16 + 8 for q and k and 16 for v, latents of 32."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.model.ops import Op

MLA = {"kind": "mla", "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def ops(rope: str, tp: int) -> dict[str, Op]:
    """Those of a layer by name."""
    model = {"attention": MLA, "n_q_heads": 2}
    made = Assembly(job("fsdp2", tp=tp, dp=2, model=model, performance={"rope_impl": rope}))
    return {op.name: op for op in made.kinds[0].ops}


@pytest.mark.parametrize("tp", [1, 2])
def test_widths_of_the_projections(tp):
    """A query without a latent is projected from the input, to two heads of 24; keys and values from 32 to 2 * (16 + 16)."""
    found = ops("composite", tp)
    assert [(found[name].k, found[name].n) for name in ("attn.q_up", "attn.kv_up")] == [(128, 48 / tp), (32, 64 / tp)]


def test_rotation_and_join():
    """tp 2: one head of queries and the keys' one part turn, 8 * 2 * 8 * 2 = 256 bytes, which eager kernels pass 10 times forward
    (three for turned halves, four for two products, three for their sum) and 15 times backward (two products, gradients of two
    halves, one of which is negated, 9, and two sums, 6); then q and k of 8 * 24 * 2 = 384 bytes are read and written. A fused
    kernel for each does that alone.
    """
    eager, fused = ops("composite", 2), ops("fused", 2)
    assert (eager["attn.rope"].forward_bytes, eager["attn.rope"].backward_bytes) == (10 * 256, 15 * 256)
    assert eager["attn.join"].forward_bytes == 2 * 2 * 384
    assert (fused["attn.rope"].forward_bytes, fused["attn.rope"].kernels) == (2 * 2 * 384, 2)
    assert fused["attn.rope"].backward_bytes == 2 * 2 * 384
    assert "attn.join" not in fused


@pytest.mark.parametrize(("rope", "passes", "kernels"), [("fused", 2, 2), ("composite", 4, 14)])
def test_heads_of_megatron(rope, passes, kernels):
    """q and k of two heads of 24, v of two of 16: 8 * 2 * 64 * 2 = 2,048 bytes, which fused kernels for queries and for keys read
    and write; in eager torch what is turned is put together once more.
    """
    made = Assembly(job(model={"attention": MLA, "n_q_heads": 2}, performance={"rope_impl": rope}))
    [op] = [op for op in made.kinds[0].ops if op.name == "attn.rope"]
    assert (op.forward_bytes, op.backward_bytes, op.kernels) == (passes * 2_048, passes * 2_048, kernels)
