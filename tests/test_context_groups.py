"""Context parallelism by a ring of groups, inside which heads are exchanged (a2a+p2p), by hand."""

from __future__ import annotations

import pytest
from jobs import EIGHT_HEADS, context_job

from steptime.answer.result import estimate
from steptime.job.assembly import Assembly
from steptime.job.mesh import group
from steptime.model.ops import Attention

# h 1024 in 8 heads of 128, 4 key-value heads; 4096 tokens of bf16
# on a rank of 4: 1024 tokens; q or out 1024 * 8 * 128 * 2 B = 2 MiB, k or v half of it
Q, K = 1024 * 8 * 128 * 2, 1024 * 4 * 128 * 2


def grouped_job(cp, model=EIGHT_HEADS, *, how="a2a+p2p", **more):
    inner = {"cp_a2a": 2} if how == "a2a+p2p" else {}
    return context_job(cp, how, model=model, **inner, **more)


def attention(of):
    return next(op for op in Assembly(of).kinds[0].ops if isinstance(op, Attention))


# groups of 2 adjacent ranks, and a ring of 2 between them: of its heads a rank has as many elements as of its tokens
GROUPS_OF_2 = {
    **{
        f"{name}_a2a{back}": (2, 1, size)
        for name, size in (("q", Q), ("k", K), ("v", K), ("out", Q))
        for back in ("", ".grad")
    },
    "out_again_a2a.grad": (2, 1, Q),  # the output is kept as the projection reads it
    "ring": (2, 1, 2 * K),
    "ring_grad.grad": (2, 2, (2 + 2) / 2 * K),  # once k and v, once their gradients
}


def test_calls_of_a_ring_of_groups():
    of = estimate(grouped_job(4))
    seen = {row.name.removeprefix("attn.core."): row for row in of.collectives if row.axis in {"cp_a2a", "cp_p2p"}}
    assert {name: (r.ranks, r.count_per_step / 16, r.bytes) for name, r in seen.items()} == GROUPS_OF_2
    assert {row.axis for name, row in seen.items() if name.startswith("ring")} == {"cp_p2p"}


def test_bytes_and_kernels_that_merge_and_put_in_order():
    """The ring of two has two partial outputs, 2 + 3 passes, and copies a block of 2 K; its kernels are 2 * 2. Around it a tensor
    is put in order before and after, 4 passes: query, keys, values and output; backward the output's gradient too. Two a tensor.
    """
    op = attention(grouped_job(4))
    assert op.merge_forward_bytes == 5 * Q + 2 * 2 * K + 4 * (2 * Q + 2 * K)
    assert op.merge_backward_bytes == 5 * (Q + 2 * K) + 2 * 2 * K + 4 * (3 * Q + 2 * K)
    assert op.merge_kernels == 2 * 2 + (2 * 4 + 2 * 5) / 2


def test_groups_of_a_node_and_a_ring_between_nodes():
    """tp 4 and groups of 2 fill a node of 8; the ring's ranks are 8 devices apart."""
    of = grouped_job(4, EIGHT_HEADS | {"n_kv_heads": 8}, tp=4)
    assert group(of.parallelism, "cp_a2a")[1:3] == (2, 4)
    assert group(of.parallelism, "cp_p2p")[1:3] == (2, 8)
    tiers = {row.axis: row.tier for row in estimate(of).collectives if row.axis.startswith("cp_")}
    assert tiers == {"cp_a2a": "nvlink", "cp_p2p": "infiniband"}


def test_exchanges_of_groups_show_and_the_ring_hides():
    """All of the all-to-alls, of the ring what a half of the kernel does not hide; together they are the step's cp_comm."""
    of = estimate(grouped_job(4, performance={"overlap": {"cp": True}}))
    cp = [row for row in of.collectives if row.axis.startswith("cp_")]
    for row in cp:
        whole = row.time_s * row.count_per_step
        assert row.exposed_s < 0.5 * whole if row.axis == "cp_p2p" else row.exposed_s == pytest.approx(whole)
    assert of.time.parts_s["cp_comm"] == pytest.approx(sum(row.exposed_s for row in cp))


def test_a_ring_of_groups_keeps_what_a_ring_keeps():
    """Query, last block, output and log-sum-exp of a rank's heads are as many bytes as of its tokens."""
    kept = [estimate(grouped_job(4, how=how)).memory.stages[0] for how in ("p2p", "a2a+p2p")]
    assert kept[0].activations_bytes == kept[1].activations_bytes
    op = attention(grouped_job(4))
    assert op.saves == ("attn.core.q.heads", "attn.core.kv", "attn.core.out", "attn.core.lse")
    assert (op.calls, op.q_len, op.n_q_heads, op.n_kv_heads) == (2, 2048, 4, 2)


def test_a_ring_of_groups_holds_both_sides_of_its_exchanges_for_a_moment():
    """Forward: a block of k and v beside that which is kept, 2 partial outputs, k and v of its heads; 3 copies of the output.

    Backward: the ring's 4 of k and v and one dq; output and its gradient of its heads; the three gradients sent and received,
    the last one in order.
    """
    op, lse = attention(grouped_job(4)), 1024 * 8 * 4
    assert op.forward_temp_bytes == 2 * K + 2 * (Q + lse) + 2 * K + 3 * Q
    assert op.backward_temp_bytes == (4 * 2 * K + Q) + 2 * Q + 2 * (Q + 2 * K) + K


def test_two_communicators_of_a_sequence():
    one, two = (sum(estimate(grouped_job(4, how=how)).memory.overhead_bytes) for how in ("p2p", "a2a+p2p"))
    assert two - one == 2**28


def test_latent_attention_takes_a_ring_of_groups():
    """Keys of 128 + 64 and values of 128 a head, each in an all-to-all of its own."""
    latent = {"kind": "mla", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    of = estimate(grouped_job(4, EIGHT_HEADS | {"n_kv_heads": 8, "attention": latent}))
    sizes = {row.name: row.bytes / (1024 * 8 * 2) for row in of.collectives if row.axis == "cp_a2a"}
    assert [sizes[f"attn.core.{name}_a2a"] for name in ("q", "k", "v", "out")] == [192, 192, 128, 128]
