"""Context parallelism: what is exchanged, kept and computed, by hand."""

from __future__ import annotations

import pytest
from drawn import drawn_job, plans
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import EIGHT_HEADS, context_job

from steptime.answer.assumptions import assumptions
from steptime.answer.result import estimate
from steptime.cost.comm import collective
from steptime.cost.neighbors import neighbor
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.job.mesh import group
from steptime.model.ops import Attention, Comm
from steptime.model.segments import find_segments, kept_names
from steptime.timing.step_time import step_time

# h 1024 in 8 heads of 128, 4 key-value heads; 4096 tokens of bf16
MODEL = EIGHT_HEADS
SEQLEN = 4096
METHODS = ("p2p", "all_gather", "a2a")


def rows(of):
    return {row.name.removeprefix("attn.core."): row for row in estimate(of).collectives if row.axis == "cp"}


def attention(of):
    return next(op for op in Assembly(of).kinds[0].ops if isinstance(op, Attention))


# --- what is exchanged ---

# on a rank of 4: 1024 tokens; q or out 1024 * 8 * 128 * 2 B = 2 MiB, k or v half of it
Q, K = 1024 * 8 * 128 * 2, 1024 * 4 * 128 * 2
CALLS = {
    # forward hands k and v on 3 times; backward 4 times: once k and v, twice these and their gradients, once gradients
    ("megatron-core", "p2p"): {
        "ring": ("send_recv", 3, 2 * K),
        "ring_grad.grad": ("send_recv", 4, (2 + 4 + 4 + 2) / 4 * K),
    },
    ("megatron-core", "all_gather"): {
        "k_gather": ("all_gather", 1, 4 * K),
        "v_gather": ("all_gather", 1, 4 * K),
        "k_gather.again": ("all_gather", 1, 4 * K),
        "v_gather.again": ("all_gather", 1, 4 * K),
        "k_gather.grad": ("reduce_scatter", 1, 4 * K),
        "v_gather.grad": ("reduce_scatter", 1, 4 * K),
    },
    **{
        (software, "a2a"): {
            f"{name}_a2a{back}": ("all_to_all", 1, size)
            for name, size in (("q", Q), ("k", K), ("v", K), ("out", Q))
            for back in ("", ".grad")
        }
        for software in ("megatron-core", "deepspeed")
    },
    # torch gathers k and v together, and hands gradients on in fp32, four times
    ("fsdp2", "all_gather"): {
        "gather": ("all_gather", 1, 8 * K),
        "gather.grad": ("all_gather", 1, 8 * K),
        "ring_grad.grad": ("send_recv", 3, 4 * K),
        "last_grad.grad": ("send_recv", 1, 4 * K),
    },
    ("fsdp2", "p2p"): {
        "ring": ("send_recv", 3, 2 * K),
        "ring.grad": ("send_recv", 3, 2 * K),
        "ring_grad.grad": ("send_recv", 3, 4 * K),
        "last_grad.grad": ("send_recv", 1, 4 * K),
    },
}


@pytest.mark.parametrize(("software", "how"), CALLS)
def test_calls_of_one_layer(software, how):
    """4 micro-batches of 4 layers: 16 times the calls of one layer."""
    seen = {name: (r.kind, r.count_per_step / 16, r.bytes) for name, r in rows(context_job(4, how, software)).items()}
    assert seen == CALLS[software, how]
    assert all(r.ranks == 4 for r in rows(context_job(4, how, software)).values())


def test_core_attention_run_again_exchanges_again():
    for how in METHODS:
        again = {"activation_checkpointing_type": "selective"}
        once, twice = rows(context_job(4, how)), rows(context_job(4, how, performance=again))
        for name, row in once.items():
            forward = not name.endswith((".grad", ".again"))
            assert twice[name].count_per_step == row.count_per_step * (2 if forward else 1)
        full = rows(context_job(4, how, performance={"activation_checkpointing_type": "full"}))
        assert {n: r.count_per_step for n, r in full.items()} == {n: r.count_per_step for n, r in twice.items()}


def reference_ring(cp, seqlen, heads, kv_heads, d):
    """Every rank of a causal ring with two chunks a rank: (multiply-adds, kernel calls, elements sent in forward)."""
    chunk = seqlen // (2 * cp)
    owned = [(rank, 2 * cp - 1 - rank) for rank in range(cp)]
    holds, done = list(range(cp)), [[0, 0, 0] for _ in range(cp)]
    for step in range(cp):
        for rank in range(cp):
            pairs = [(q, k) for q in owned[rank] for k in owned[holds[rank]] if k <= q]
            scores = sum(chunk * chunk if k < q else chunk * chunk / 2 for q, k in pairs)
            done[rank][0] += 2 * heads * d * scores
            done[rank][1] += 1
            done[rank][2] += 2 * (seqlen // cp) * kv_heads * d if step < cp - 1 else 0
        holds = [holds[(rank - 1) % cp] for rank in range(cp)]
    return done


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_ring_run_by_hand(cp):
    """Every rank has the same work, that of the estimate; so many kernels, so many bytes."""
    ranks = reference_ring(cp, SEQLEN, 8, 4, 128)
    assert all(rank == ranks[0] for rank in ranks)
    op, ring = attention(context_job(cp, gbs=8)), rows(context_job(cp, gbs=8))["ring"]
    assert op.full_flops * op.causal_share == 2 * ranks[0][0]
    assert op.calls == ranks[0][1]
    assert ring.bytes * ring.count_per_step / 16 == 2 * ranks[0][2]


# --- latent attention, windows ---

# 8 heads of 128 + 64 for q and k and of 128 for v: on a rank of 4, 1024 tokens of 8 * 192 and of 8 * 128, 2 B each
MLA = {"kind": "mla", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT = MODEL | {"n_kv_heads": 8, "attention": MLA}
WIDE, NARROW = 1024 * 8 * 192 * 2, 1024 * 8 * 128 * 2
LATENT_CALLS = {
    "p2p": {"ring": (3, WIDE + NARROW), "ring_grad.grad": (4, (1 + 2 + 2 + 1) / 4 * (WIDE + NARROW))},
    "all_gather": {
        f"{name}_gather{back}": (1, 4 * size)
        for name, size in (("k", WIDE), ("v", NARROW))
        for back in ("", ".again", ".grad")
    },
    "a2a": {
        f"{name}_a2a{back}": (1, size)
        for name, size in (("q", WIDE), ("k", WIDE), ("v", NARROW), ("out", NARROW))
        for back in ("", ".grad")
    },
}


def with_model(model, cp, how, **more):
    return context_job(cp, how, model=model, **more)


@pytest.mark.parametrize("how", METHODS)
def test_heads_of_latent_attention_are_exchanged_in_their_own_widths(how):
    """Up-projected: keys of 192 with the rope part in each head, values of 128 (context_parallel.py, k_numel and v_shape)."""
    seen = {name: (r.count_per_step / 16, r.bytes) for name, r in rows(with_model(LATENT, 4, how)).items()}
    assert seen == LATENT_CALLS[how]


@pytest.mark.parametrize("how", METHODS)
def test_latent_attention_shrinks_with_cp(how):
    """Kept activations of a device are a cp-th, but for the output that all but the ring keep twice; so are FLOPs."""
    one, four = (estimate(with_model(LATENT, cp, how)) for cp in (1, 4))
    extra = 0.0 if how == "p2p" else 4 * NARROW
    kept = [answer.memory.stages[0].activations_bytes for answer in (one, four)]
    assert kept[1] == pytest.approx(kept[0] / 4 + extra, rel=1e-9)
    assert attention(four.job).full_flops * 4 == attention(one.job).full_flops
    assert four.params == one.params


def test_a_ring_keeps_keys_and_values_though_their_up_projections_run_again():
    """It keeps the block that came last, which is another rank's; with an all-to-all the projections' outputs go."""
    again = {"recompute": {"granularity": "selective", "modules": ["mla_up_proj"]}}
    kept = {}
    for how in METHODS:
        ops = Assembly(with_model(LATENT, 4, how, performance=again)).kinds[0].ops
        names = set(kept_names(ops, find_segments(ops, frozenset({"mla_up_proj"}))))
        kept[how] = names & {"attn.q", "attn.k", "attn.v", "attn.core.kv", "attn.core.k.heads"}
    assert kept == {"p2p": {"attn.core.kv"}, "all_gather": set(), "a2a": {"attn.core.k.heads"}}


@pytest.mark.parametrize("how", ["all_gather", "a2a"])
def test_a_window_leaves_as_much_of_the_scores_on_the_mean_rank(how):
    """1024 of 4096 positions: 1024 * 4096 - 1024^2 / 2 scores of 4096^2, 7/32, over 4 ranks; full layers see a half."""
    windows = MODEL | {"attention": {"window": 1024, "window_pattern": 2}}
    kinds = [kind.ops for kind in Assembly(with_model(windows, 4, how)).kinds]
    shares = {next(op for op in ops if isinstance(op, Attention)).causal_share for ops in kinds}
    assert shares == {7 / 32, 0.5}


def test_sinks_are_in_the_layer_whatever_the_ranks():
    sinks = MODEL | {"attention": {"sinks": True}}
    assert estimate(with_model(sinks, 4, "a2a")).params == estimate(with_model(sinks, 1, "a2a")).params


# --- time ---


def test_an_exchange_hides_under_the_block_beside_it():
    """By hand: cp - 1 exchanges forward and cp backward, each beside a cp-th of the kernel, NVLink taking its share."""
    timing = step_time(Assembly(context_job(4)))
    part, ops = timing.parts.layer, timing.assembly.kinds[0].ops
    over = group(timing.job.parallelism, "cp")
    at = next(i for i, op in enumerate(ops) if isinstance(op, Comm) and op.axis == "cp")
    assert isinstance(ops[neighbor(ops, at)], Attention)
    for work, count, bytes_ in ((part.forward, 3, 2 * K), (part.backward, 4, 3 * K)):
        one = collective("send_recv", bytes_, over, timing.context.tiers).time_s
        hidden = count * min(one, work.attention_s / 4) * 0.85  # 15 % slow the compute beside them (calculon)
        (call,) = [call for call in work.calls if call.axis == "cp"]
        assert call.hidden_s == pytest.approx(hidden)
        assert call.exposed_s == pytest.approx(count * one - hidden)


@pytest.mark.parametrize("how", METHODS)
def test_overlap_cp_governs_what_hides(how):
    def exposed(share):
        answer = estimate(context_job(4, how, performance={"overlap": {"cp": share}}))
        return answer.time.parts_s["cp_comm"], sum(
            r.time_s * r.count_per_step for r in answer.collectives if r.axis == "cp"
        )

    none, sent = exposed(share=False)
    assert none == pytest.approx(sent)
    assert exposed(share=0.25)[0] == pytest.approx(sent * 0.75)
    shown = exposed(share=True)[0]
    assert shown < sent * 0.5 if how == "p2p" else shown == pytest.approx(sent)  # only the ring is pipelined


def test_a_ring_that_leaves_the_node_is_slower():
    """tp innermost, then cp: 8 tensor-parallel ranks fill the node, so the ring runs between nodes."""
    inside, outside = rows(context_job(2, tp=4))["ring"], rows(context_job(2, tp=8, gbs=8))["ring"]
    assert (inside.tier, outside.tier) == ("nvlink", "infiniband")
    assert outside.time_s > 3 * inside.time_s / 2
    assert any(
        "context-parallel communication uses the next network tier" in line
        for line in assumptions(context_job(2, tp=8))
    )


# --- properties ---


@settings(max_examples=25, deadline=None)
@given(plans())
def test_one_rank_exchanges_nothing(plan):
    """cp 1 is the job without the key, whatever the exchange would be."""
    plan["parallelism"].pop("cp", None)
    plan["parallelism"].pop("cp_comm_type", None)
    plain = estimate(drawn_job(plan))
    for how in METHODS:
        said = {**plan, "parallelism": {**plan["parallelism"], "cp": 1, "cp_comm_type": how}}
        assert estimate(drawn_job(said)).step_s == plain.step_s
    assert not [row for row in plain.collectives if row.axis == "cp"]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(METHODS), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.booleans())
def test_the_work_is_shared_out(how, cp, tp, full):
    """FLOPs of the step do not depend on cp; those of a device times cp are constant."""
    type_ = {"activation_checkpointing_type": "full" if full else "none"}
    if how == "a2a" and tp * cp > 4:
        return
    one, many = (estimate(context_job(n, how, tp=tp, performance=type_)) for n in (1, cp))
    assert many.flops == pytest.approx(one.flops)
    assert attention(many.job).full_flops * cp == attention(one.job).full_flops
    assert many.devices == one.devices * cp
    assert many.params == one.params


@pytest.mark.parametrize("how", METHODS)
def test_what_is_kept_shrinks_with_cp(how):
    """Activations of a device are a cp-th.

    The all-gather keeps the output twice (partial ones, and what they go into), the all-to-all too (before it and after it).
    """
    one, four = (estimate(context_job(cp, how)).memory.stages[0] for cp in (1, 4))
    extra = 0.0 if how == "p2p" else 4 * Q  # 4 layers
    assert four.activations_bytes == pytest.approx(one.activations_bytes / 4 + extra, rel=1e-9)


@pytest.mark.parametrize("how", METHODS)
def test_recomputed_attention_keeps_the_output_that_the_projection_reads(how):
    """Of the core alone: its inputs are those of the projections before it, or are exchanged again."""
    ops = Assembly(context_job(4, how)).kinds[0].ops
    kept = kept_names(ops, find_segments(ops, frozenset({"core_attn"})))
    assert {name for name in kept if name.startswith("attn.core")} == {"attn.core.out"}


def test_ulysses_of_deepspeed_keeps_its_own_output():
    one, four = (estimate(context_job(cp, "a2a", "deepspeed")).memory.stages[0] for cp in (1, 4))
    assert four.activations_bytes == pytest.approx(one.activations_bytes / 4 + 4 * Q, rel=1e-9)


def test_a_ring_holds_all_blocks_and_partial_outputs_for_a_moment():
    """TransformerEngine's forward: cp buffers of k and v, of which it keeps the last, cp partial outputs and log-sum-exps.

    Backward: 4 of k and v, one dq.
    """
    op = attention(context_job(4))
    lse = 1024 * 8 * 4
    assert op.forward_temp_bytes + sum(t.bytes for t in op.stats) - lse == 4 * (2 * K + Q + lse)
    assert op.backward_temp_bytes == 4 * 2 * K + Q


@pytest.mark.parametrize(
    ("how", "held"),
    [
        (
            "p2p",
            2 * 2 * K + 4 * 4 * K + K,
        ),  # two blocks; what came, the sum, what goes and comes; half of the block sent last
        (
            "all_gather",
            4 * 2 * K + 3 * 4 * K + 3 * 2 * K,
        ),  # all blocks; the first three of these; three copies of a block
    ],
)
def test_torchs_ring_holds_blocks_and_their_gradients_in_fp32(how, held):
    """Keys and values of a block are 2 K in bf16, 4 K in fp32; besides, the query's gradient in fp32 (torch 2.13, _attention.py,
    _templated_ring_attention_backward; counted in tests/truth/test_torch_context.py).
    """
    assert attention(context_job(4, how, "fsdp2")).backward_temp_bytes == held + 2 * Q


@pytest.mark.parametrize(
    ("software", "how", "forward", "backward", "kernels"),
    [
        ("megatron-core", "p2p", 11 * Q + 2 * 2 * K, 11 * (Q + 2 * K) + 2 * 2 * K, 8),
        ("megatron-core", "a2a", 4 * (2 * Q + 2 * K), 4 * (2 * Q + 2 * K), 8),
        ("megatron-core", "all_gather", 2 * 8 * K + 2 * Q, (2 + 6) * 8 * K + (4 + 2) * Q, 6),
        ("fsdp2", "p2p", 138 * Q / 2 + 2 * 2 * K, 50 * (Q + 2 * K) / 2 + 2 * 4 * 4 * K, 32),
        ("fsdp2", "all_gather", 138 * Q / 2 + 2 * 2 * K, 50 * (Q + 2 * K) / 2 + 2 * 4 * 4 * K, 32),
    ],
)
def test_bytes_and_kernels_that_merge_the_calls_of_a_kernel(software, how, forward, backward, kernels):
    """Four ranks. TransformerEngine's ring: of four partial outputs the first is read and written, the others read, added to what
    is read and written, 2 + 3 * 3 = 11; two kernels each; backward likewise the gradients of query, key and value; a block is
    copied in order. All-to-all: four tensors, in order before and after, a copy of 2 each. All-gather: the whole of keys and
    values, 8 K, is copied in order, and the query's two chunks; backward that again, gradients of the whole zeroed, added to
    twice in part and copied in order, 6, and the gradient of the output.

    torch, an element: all blocks' outputs cast up and the merged one down, 5 * (2 + 4); for each of three blocks a difference, a
    product and a difference, 3 * 12: 138. Backward: zeroed, 4; four blocks in bf16 added in place in fp32, 2 + 4 + 4 each; cast
    down, 6: 50. Keys' and values' gradients are packed in fp32, 4 K, at each of four turns. Kernels of a block: sub, sigmoid,
    sub, mul, sub; sub, logsigmoid, sub: 8 (torch 2.13 _context_parallel/_attention.py, _SDPAMerger._merge_one).
    """
    op = attention(context_job(4, how, software))
    assert (op.merge_forward_bytes, op.merge_backward_bytes, op.merge_kernels) == (forward, backward, kernels)


# --- what is said ---


def test_the_exchange_that_is_taken_is_said():
    layout = {"tp": 1, "pp": 1, "dp": 2, "cp": 2}
    for software, taken in (
        ("megatron-core", "p2p"),
        ("fsdp2", "all_gather"),
        ("torch", "all_gather"),
        ("deepspeed", "a2a"),
    ):
        plan = context_job(2, taken, software).to_config()
        unsaid = Job.model_validate({**plan, "parallelism": layout})
        assert unsaid.cp_comm_type == taken
        assert any(f"cp_comm_type {taken}" in line for line in assumptions(unsaid))
        assert any(f"context parallelism by {taken}" in line for line in assumptions(unsaid))
        assert unsaid.to_config()["parallelism"]["cp_comm_type"] == taken


def test_all_after_the_projections_may_run_again():
    """Of a block only its input and q, k and v stay, all 4 heads of 2 as many; the rest comes back before its backward."""
    ops = Assembly(context_job(1, "p2p")).kinds[0].ops
    kept = kept_names(ops, find_segments(ops, frozenset({"after_qkv"})))
    assert {name for name in kept if not name.endswith((".rstd", ".mean"))} <= {"x", "attn.q", "attn.k", "attn.v"} | {
        "attn.rope.q",
        "attn.rope.k",
    }
    assert {"x", "attn.v"} <= set(kept)
