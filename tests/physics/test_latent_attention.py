"""Latent attention of torchtitan by hand: 8 tokens of 128 values, two heads of 16 + 8 for q and k and 16 for v, latents of 32."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.cost.rates import ELEMENTS_PER_SM
from steptime.job.assembly import Assembly
from steptime.model.latent_heads import JOINED
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
    assert (found["attn.kv_down"].k, found["attn.kv_down"].n) == (128, 32 + 8)
    assert [t.elements for t in found["attn.rope"].outputs] == [8 * (2 / tp + 1) * 8]
    assert [(p.shape, p.split_dim) for p in found["attn.q_up"].params] == [((48, 128), 0)]


def test_rotation_and_join():
    """tp 2: one head of queries and the keys' one part turn, 8 * 2 * 8 * 2 = 256 bytes, which eager kernels pass 10 times forward
    (three for turned halves, four for two products, three for their sum) and 15 times backward (two products, gradients of two
    halves, one of which is negated, 9, and two sums, 6); then q and k of 8 * 24 * 2 = 384 bytes are read and written. Backward
    joins the query's gradient, 384, and that of keys and values, 8 * 32 * 2 = 512, and reads the keys' rope part, 128.
    A fused kernel for each does that alone.
    """
    eager, fused = ops("composite", 2), ops("fused", 2)
    assert (eager["attn.rope"].forward_bytes, eager["attn.rope"].backward_bytes) == (10 * 256, 15 * 256)
    assert eager["attn.join"].forward_bytes == 2 * 2 * 384
    assert eager["attn.join"].backward_bytes == 2 * (384 + 512) + 128
    assert (fused["attn.rope"].forward_bytes, fused["attn.rope"].kernels) == (2 * 2 * 384, 2)
    assert fused["attn.rope"].backward_bytes == 2 * 2 * 384
    assert (eager["attn.rope"].kernels, eager["attn.join"].kernels) == (12, 2.5)
    assert "attn.join" not in fused


def test_concatenation_of_slices_without_vector_loads():
    """tp 1: two heads of 24 for q and for k, 8 * 48 elements each, and of 32 for keys and values: 768 elements forward and 896
    backward, each as slow as 1.7 of other kernels without vector loads. torch.compile makes one kernel with vector loads of it.
    """
    slow = ops("composite", 1)["attn.join"]
    assert slow.forward_by_element == (1.7 * 768, 2 * 2 * 768)
    assert slow.backward_by_element == (1.7 * (384 + 512), 2 * 2 * 896)
    model = {"attention": MLA, "n_q_heads": 2}
    compiled = Assembly(job("fsdp2", dp=2, model=model, performance={"compile": "blocks"}))
    assert "attn.join" not in {op.name for op in compiled.kinds[0].ops}


def test_time_of_the_traced_concatenation():
    """The trace behind `JOINED`: 34.4e9 elements at 2.6e9 / 1.7 a second on each of 132 SMs are 170 ms; 162 and 181 are measured.

    65,536 tokens of 16 heads: 201.3e6 elements of 192, twice forward and again for recomputation, 201.3e6 + 268.4e6 backward.
    """
    tokens, heads, layers = 65_536, 16, 27
    forward, backward = 2 * tokens * heads * 192, tokens * heads * (192 + 256)
    elements = layers * (2 * forward + backward)
    assert elements == pytest.approx(34.4e9, rel=0.002)
    assert 0.162 < elements * JOINED / (ELEMENTS_PER_SM * 132) < 0.181


def test_heads_of_automodel():
    """AutoModel around TransformerEngine rotated by its kernel, 384 bytes read and written (q's rope part of two heads and the
    keys' of one, 8 * 3 * 8 * 2), and since July 2026 by complex numbers in fp32, 10 times 384 (`rotary.ROTATIONS`). It joins as
    eager torch, and copies the values, 8 * 2 * 16 * 2 = 512 bytes, which attention reads.
    """
    model = {"attention": MLA, "n_q_heads": 2}
    made = {op.name: op for op in Assembly(job("automodel@2026-06", dp=2, model=model)).kinds[0].ops}
    assert (made["attn.rope"].forward_bytes, made["attn.rope"].backward_bytes) == (2 * 384, 2 * 384)
    assert made["attn.join"].forward_by_element.elements == 1.7 * 768
    assert (made["attn.value"].forward_bytes, made["attn.value"].forward_by_element) == (2 * 512, (256, 2 * 512))
    assert (made["attn.rope"].kernels, made["attn.value"].same_grad) == (2, True)
    assert "attn.v" in made["attn.core"].inputs
    unfused = Assembly(job("automodel", dp=2, model=model, performance={"rope_impl": "complex"}))
    [turn] = [op for op in unfused.kinds[0].ops if op.name == "attn.rope"]
    assert (turn.forward_bytes, turn.backward_bytes) == (10 * 384, 10 * 384)
    compiled = Assembly(job("automodel", dp=2, model=model, performance={"compile": "blocks"}))
    assert not {"attn.join", "attn.value"} & {op.name for op in compiled.kinds[0].ops}


@pytest.mark.parametrize(("rope", "passes", "kernels"), [("fused", 2, 2), ("composite", 4, 14)])
def test_heads_of_megatron(rope, passes, kernels):
    """q and k of two heads of 24, v of two of 16: 8 * 2 * 64 * 2 = 2,048 bytes, which fused kernels for queries and for keys read
    and write; in eager torch what is turned is put together once more.
    """
    made = Assembly(job(model={"attention": MLA, "n_q_heads": 2}, performance={"rope_impl": rope}))
    [op] = [op for op in made.kinds[0].ops if op.name == "attn.rope"]
    assert (op.forward_bytes, op.backward_bytes, op.kernels) == (passes * 2_048, passes * 2_048, kernels)
