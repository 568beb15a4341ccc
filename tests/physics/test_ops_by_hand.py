"""Bytes of the ops of rare layouts, each worked out by hand: tensors, what their kernels move, and what they hold."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.model.ops import Attention, Comm, Move, Op

MOE = {"n_experts": 8, "expert_inter_sz": 64, "experts_per_token": 2, "imbalance_factor": 1.25}
ROW = 128 * 2
"""Bytes of a token of 128 values in bf16."""


def ops_of(software: str = "megatron-core", **said: object) -> dict[str, Op]:
    """Those of a layer by name."""
    return {op.name: op for op in Assembly(job(software, **said)).kinds[0].ops}


def tensors(op: Op) -> dict[str, float]:
    """Bytes of the tensors that an op makes, the elements' dtype aside."""
    return {t.name: t.bytes for t in op.allocates}


def move(ops: dict[str, Op], name: str) -> tuple[float | None, float | None, float]:
    """Bytes that a kernel moves forward and backward, and the kernels that it stands for."""
    op = ops[name]
    assert isinstance(op, Move)
    return op.forward_bytes, op.backward_bytes, op.kernels


def test_minimal_async_ep():
    """8 tokens to 2 experts each are 16 rows. A buffer has room for the rows of both ranks, 32. Origins: rank and row of each
    place, 2 * 32, and where each sent row is, 16, in int64; places: 3 * 16. Both are written and read once. In backward the
    gradients of 16 rows are summed into 8 tokens. Three kernels sort and 24 count. The fullest rank receives 1.25 * 16 rows. The
    sum of 16 rows into 8 reads and writes these; backward writes their gradients, and reads the rows for those of the scores.
    """
    how = {"moe": {"dispatcher": "flex", "flex_backend": "minimal_async_ep"}}
    ops = ops_of("torchtitan", model={"moe": MOE}, performance=how, dp=2, ep=2, microbatches=2)
    origins, places = 8 * (2 * 32 + 16), 8 * 3 * 16
    assert tensors(ops["moe.sort"]) == {"moe.origins": origins, "moe.places": places}
    assert move(ops, "moe.sort") == (2 * (origins + places), (16 + 8) * ROW, 3 + 24)
    assert tensors(ops["moe.dispatch"]) == {"moe.rows": 32 * ROW}
    assert tensors(ops["moe.combine"]) == {"moe.returned": 16 * ROW}
    assert tensors(ops["moe.sum_rows"]) == {"moe.out": 8 * ROW}
    assert move(ops, "moe.sum_rows") == (24 * ROW, 2 * 24 * ROW, 1)
    for name in ("moe.dispatch", "moe.combine"):
        op = ops[name]
        assert isinstance(op, Comm)
        assert (op.bytes, op.kind, op.backward, op.axis) == (20 * ROW, "all_to_all", "all_to_all", "ep")


def test_a_ring_between_ranks_that_exchange_heads():
    """16 tokens on 4 ranks, of which 2 exchange heads: 4 tokens of 4 heads of 32, 1,024 B of queries and of outputs, and of 2
    heads of keys and of values, 512 B each. The ring of 2 merges five times (3 * 2 - 1) and puts keys and values in order. The
    exchange copies queries, keys, values and output before and after, read and written; in backward two outputs. Two kernels
    each of four and of five tensors are 18, half of it in either pass. Held: the ring's 2 * (1,024 + 1,024 + 64) - 1,024, keys
    and values, three outputs; in backward 4 * 1,024 + 1,024, two outputs, two copies of all, the values.
    """
    ops = ops_of(model={"n_q_heads": 4, "n_kv_heads": 2}, cp=4, cp_comm_type="a2a+p2p", cp_a2a=2, seqlen=16)
    sent = {name.split(".")[-1]: op for name, op in ops.items() if isinstance(op, Comm) and name.endswith("_a2a")}
    assert {name: (op.bytes, op.kind, op.backward) for name, op in sent.items()} == {
        "q_a2a": (1_024, "all_to_all", "all_to_all"),
        "k_a2a": (512, "all_to_all", "all_to_all"),
        "v_a2a": (512, "all_to_all", "all_to_all"),
        "out_a2a": (1_024, "all_to_all", "all_to_all"),
        "out_again_a2a": (1_024, None, "all_to_all"),
    }
    kernel = ops["attn.core"]
    assert isinstance(kernel, Attention)
    assert tensors(kernel) == {
        "attn.core.out": 1_024, "attn.core.lse": 4 * 4 * 4, "attn.core.kv": 1_024, "attn.core.q.heads": 1_024,
    }  # fmt: skip
    assert [t.itemsize for t in kernel.stats] == [4, 2, 2]
    assert kernel.merge_forward_bytes == 5 * 1_024 + 2 * 1_024 + 4 * (2_048 + 1_024)
    assert kernel.merge_backward_bytes == 5 * (1_024 + 1_024) + 2 * 1_024 + 4 * (2_048 + 2 * 1_024)
    assert (kernel.merge_kernels, kernel.calls) == (2 * 2 + 9, 2)
    assert kernel.forward_temp_bytes == 2 * (1_024 + 1_024 + 64) - 1_024 + 1_024 + 3 * 1_024
    assert kernel.backward_temp_bytes == 4 * 1_024 + 1_024 + 2 * 1_024 + 2 * 2_048 + 512
    assert (kernel.q_len, kernel.n_q_heads, kernel.n_kv_heads) == (8, 2, 1)
    ring, back = ops["attn.core.ring"], ops["attn.core.ring_grad"]
    assert isinstance(ring, Comm)
    assert isinstance(back, Comm)
    assert (ring.bytes, ring.count, back.bytes, back.count) == (1_024, 1, 1_024, 2)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_that_see_every_token(fused):
    """Of 2 ranks 16 tokens, one byte for each of 8 experts: the map. Their scores in the router's dtype. A rank's 4 experts
    compute 16 rows. Kept are masks of 16 * 4, their scores, and TransformerEngine's map in int32, of 2 * 4 + 1 columns, or the
    16 rows' origins in int64. The dispatcher keeps a map of booleans. Rows and scores are read and written, and what is kept is.
    """
    how = {"moe": {"dispatcher": "allgather", "permute_fusion": fused}}
    ops = ops_of(model={"moe": MOE | {"imbalance_factor": 1.0}}, performance=how, dp=2, ep=2, microbatches=2)
    gather, permute = ops["moe.map"], ops["moe.permute"]
    assert isinstance(gather, Comm)
    assert isinstance(permute, Move)
    assert (gather.bytes, gather.kind, gather.backward, gather.axis) == (16 * 8, "all_gather", None, "ep_etp")
    score = ops["moe.gather.probs"].outputs[0].itemsize
    assert tensors(ops["moe.gather.probs"]) == {"moe.every.probs": 16 * 8 * score}
    order = {"moe.row_map": 4 * 16 * (2 * 4 + 1)} if fused else {"moe.sorted": 8 * 16}
    kept = order | {"moe.mask": 16 * 4, "moe.mask.probs": 16 * 4 * score}
    rows = {"moe.permute.out": 16 * ROW, "moe.permute.probs": 16 * score}
    assert tensors(permute) == rows | kept
    assert {*permute.saves} == {*kept}
    moved = 2 * sum(rows.values()) + sum(kept.values())
    assert move(ops, "moe.permute") == (moved, moved, 1 if fused else 6)
    assert permute.stays_bytes == 16 * 4
    assert move(ops, "moe.unpermute") == (32 * ROW, 32 * ROW, 1 if fused else 3)


@pytest.mark.parametrize("etp", [1, 2])
def test_rows_that_are_sent_once_to_each_rank(etp):
    """A token has experts on 2 (1 - C(4, 2) / C(8, 2)) = 11/7 of two ranks: of 8 tokens 88/7 rows arrive, on each of etp ranks
    of both, 1.25 of them on the fullest. Kept: int64 numbers of the experts of the tokens, which etp gathers; a byte for each
    pair of a row that arrived; two int64 for each of the 16 * 1.25 rows of every rank that are computed; the row map in int32.
    """
    how = {"moe": {"dispatcher": "flex", "flex_backend": "deepep"}}
    ops = ops_of(model={"moe": MOE, "n_q_heads": 2}, performance=how, dp=2, tp=etp, ep=2, etp=etp, microbatches=2)
    tokens, computed = 8 / etp, 1.25 * 16
    rows = tokens * 11 / 7 * etp * 1.25
    assert tensors(ops["moe.dispatch"]) == pytest.approx({
        "moe.arrived": rows * ROW, "moe.arrived.probs": rows * 4 * 4, "moe.flex.indices": 8 * tokens * 2 * etp,
        "moe.flex.valid": rows * 2 * etp, "moe.flex.rows": 8 * 2 * computed,
    })  # fmt: skip
    assert tensors(ops["moe.permute"])["moe.row_map"] == pytest.approx(4 * rows * (2 * 4 + 1))
    combine = ops["moe.combine"]
    assert isinstance(combine, Comm)
    assert combine.bytes == pytest.approx(rows * ROW)
    assert tensors(combine) == {"moe.returned": tokens * ROW}


@pytest.mark.parametrize("how", ["fsdp2", "automodel"])
def test_rows_of_deepep_under_torch(how):
    """88/7 rows arrive as above, with fp32 scores of 2 experts each; 16 are computed, of which torch keeps int64 places. A gather
    by index reads and writes them. Its backward in eager torch reads 16 gradients, writes 88/7 zeros, and reads and writes these
    sums; AutoModel's one kernel moves 16 rows three times. They are weighed, where the activation has not done so, and eager
    torch holds their product. Combined, the rows that arrived are sent back.
    """
    moe = {"moe": MOE | {"imbalance_factor": 1.0}}
    said = {"model": moe, "dp": 2, "ep": 2, "microbatches": 2}
    ops = ops_of(how, **said, performance={"moe": {"dispatcher": "flex"}, "compile": "none"})
    rows = 88 / 7
    assert tensors(ops["moe.dispatch"]) == pytest.approx({"moe.arrived": rows * ROW, "moe.arrived.probs": rows * 2 * 4})
    assert tensors(ops["moe.local_permute"]) == {"moe.rows": 16 * ROW, "moe.ranked": 16 * 4, "moe.places": 16 * 8}
    summed = (16 + 3 * rows) * ROW if how == "fsdp2" else 3 * 16 * ROW
    assert move(ops, "moe.local_permute") == pytest.approx((2 * 16 * ROW, summed, 6))
    for name in ("moe.dispatch", "moe.combine"):
        op = ops[name]
        assert isinstance(op, Comm)
        assert op.bytes == pytest.approx(rows * ROW)
    assert tensors(ops["moe.combine"]) == {"moe.home": 8 * ROW}
    assert ("moe.weigh" in ops) == (how == "fsdp2")
    if how == "fsdp2":
        weigh = ops["moe.weigh"]
        assert isinstance(weigh, Move)
        assert (tensors(weigh), weigh.kernels, weigh.backward_temp_bytes) == ({"moe.weighed": 16 * ROW}, 2, 16 * ROW)
        compiled = ops_of(how, **said, performance={"moe": {"dispatcher": "flex"}, "compile": "blocks"})["moe.weigh"]
        assert isinstance(compiled, Move)
        assert compiled.backward_temp_bytes == 0


BIAS = {
    ("fp32", True): ((28, 40, 2 * 8 + 2), (2, 14), (3, 22), (6, 8), 4),
    ("fp32", False): ((12, 30, 2 * 8), (2, 12), (3, 22), (4 / 8, 8 / 8), None),
    ("compute", True): ((12, 16, 2 * 8 + 1), (1, 2), (2, 8), (2, 4), 3),
    ("compute", False): ((8, 12, 2 * 8), (1, 2), (2, 8), (2 / 8, 4 / 8), None),
}
"""Of each element: bytes forward and backward, and kernels; elements and bytes without vector loads, forward and backward; bytes
held forward and backward; launches."""


@pytest.mark.parametrize(("router", "grouped"), BIAS)
def test_biases_of_experts_times_scores(router, grouped):
    """16 rows of 128 values, 8 experts. In fp32, 4 B: product, sum and concatenation read and write 5 wide numbers and one narrow
    one, with a cast 6 and 2; backward casts, puts together and multiplies twice, 6 and 2, with casts 8 and 4. In turns nothing
    is concatenated, and an eighth is held at a time. A kernel for product and sum of each expert.
    """
    figures, slow, slow_back, held, gaps = BIAS[router, grouped]
    performance = {"moe": {"router_dtype": router, "grouped_gemm": grouped}}
    op = ops_of(model={"moe": MOE, "bias": True}, performance=performance)["experts.bias"]
    assert isinstance(op, Move)
    elements = 16 * 128
    assert (op.forward_bytes, op.backward_bytes, op.kernels) == (
        figures[0] * elements,
        figures[1] * elements,
        figures[2],
    )
    assert op.forward_by_element == (slow[0] * elements, slow[1] * elements)
    assert op.backward_by_element == (slow_back[0] * elements, slow_back[1] * elements)
    assert (op.forward_temp_bytes, op.backward_temp_bytes) == (held[0] * elements, held[1] * elements)
    assert gaps is None or op.gaps == gaps


def test_sequences_of_a_state_space_are_put_first():
    """Two sequences of 8 tokens: 1,032 projected columns and 256 of the output, copied element by element in both passes. One
    fp32 number a token and group of the gated norm.
    """
    mamba = {"n_heads": 8, "head_dim": 32, "n_groups": 2}
    ops = ops_of(model={"glu": False, "hybrid_pattern": "M-", "mamba": mamba}, batch=2)
    for name, columns in (("mamba.batch_first", 1_032), ("mamba.sequence_first", 256)):
        op = ops[name]
        assert isinstance(op, Move)
        assert op.forward_by_element == op.backward_by_element == (16 * columns, 2 * 2 * 16 * columns)
    assert [t.bytes for t in ops["mamba.gated_norm"].stats] == [16 * 2 * 4]


def test_adapters_split_over_ranks():
    """tp 2, 8 tokens, rank 4. Beside q, k and v: a mask of a byte for each of 8 * 128 inputs; 2 columns of A on each rank, which
    are gathered to 4, 64 B, and joined, read and written; backward takes its own half again. Beside the projection: 64 inputs;
    64 of B's 128 columns, 1,024 B, are gathered, joined, and a share of the tokens is taken.
    """
    ops = ops_of(model={"lora": {"rank": 4, "dropout": 0.1}, "n_q_heads": 2}, tp=2)
    assert tensors(ops["attn.qkv.lora.dropout"])["attn.qkv.lora.dropout.mask"] == 8 * 128
    assert tensors(ops["attn.qkv.lora_a.gather"]) == {"attn.qkv.lora_a.out.pieces": 64}
    assert move(ops, "attn.qkv.lora_a.join") == (2 * 64, 2 * 32, 1)
    assert tensors(ops["attn.proj.lora.dropout"])["attn.proj.lora.dropout.mask"] == 8 * 64
    assert tensors(ops["attn.proj.lora_b.gather"]) == {"attn.proj.lora_b.out.pieces": 2_048}
    assert move(ops, "attn.proj.lora_b.join") == (2 * 2_048, 2 * 1_024, 1)
    assert tensors(ops["attn.proj.lora_b.scatter"]) == {"attn.proj.lora_b.out.mine": 1_024}
    sizes = {t.name: (t.elements, t.itemsize) for op in ops.values() for t in op.allocates if "lora" in t.name}
    assert {size for _, size in sizes.values()} == {1, 2}  # masks, and bf16
    assert sizes["attn.qkv.lora_a.out.pieces"] == (32, 2)


def test_keys_and_values_of_a_ring_and_of_a_gather():
    """2 of 8 tokens a rank: keys and values of the others come in three exchanges. 4 of 8: 2 heads of 32 are whole, 1,024 B."""
    heads = {"n_q_heads": 4, "n_kv_heads": 2}
    ring = ops_of("fsdp2", model=heads, cp=4, cp_comm_type="p2p")["attn.core.ring"]
    assert isinstance(ring, Comm)
    assert ring.count == 3
    gather = ops_of(model=heads, cp=2, cp_comm_type="all_gather")
    for part in "kv":
        assert tensors(gather[f"attn.core.{part}_gather"]) == {f"attn.core.{part}.whole": 8 * 2 * 32 * 2}
        assert [t.elements for t in gather[f"attn.core.{part}_gather"].outputs] == [8 * 2 * 32]


def test_norms_of_each_head():
    """Of 4 queries and 2 keys of 8 tokens: one fp32 number each."""
    ops = ops_of(model={"n_q_heads": 4, "n_kv_heads": 2, "qk_norm": True})
    assert [[t.bytes for t in ops[f"attn.{part}_norm"].stats] for part in "qk"] == [[8 * 4 * 4], [8 * 2 * 4]]


def test_clamped_experts_split_over_ranks():
    """16 rows; gate and up of 2 * 64 columns on 2 ranks, 2,048 B, of which the activation makes half."""
    moe = {"moe": MOE, "swiglu_limit": 7.0, "bias": True, "n_q_heads": 2}
    ops = ops_of("torchtitan", model=moe, tp=2, dp=2)
    assert tensors(ops["experts.gate_up"]) == {"experts.gate_up": 16 * 2 * 32 * 2}
    assert tensors(ops["experts.down"]) == {"experts.out": 16 * ROW}
    assert [t.bytes for t in ops["experts.act"].outputs] == [16 * 32 * 2]
    shapes = [ops[f"experts.{name}"].params[0] for name in ("gate_up", "down")]
    assert [(p.shape, p.split_dim) for p in shapes] == [((8, 128, 128), 1), ((8, 128, 64), 2)]
    assert [ops[f"experts.{name}"].params[1].shape for name in ("gate_up", "down")] == [(8, 128), (8, 128)]


def test_heads_of_a_state_space_exchanged_for_tokens():
    """4 of 8 tokens: z, x, B, C and dt, 1,032 columns in five calls; the output's 256 in one (mamba_context_parallel.py)."""
    mamba = {"n_heads": 8, "head_dim": 32, "n_groups": 2}
    ops = ops_of(model={"n_q_heads": 4, "glu": False, "hybrid_pattern": "M-", "mamba": mamba}, cp=2)
    for name, columns, calls in (("mamba.to_heads", 1_032, 5), ("mamba.to_tokens", 256, 1)):
        op = ops[name]
        assert isinstance(op, Comm)
        assert (op.count, op.bytes) == (calls, 2 * 4 * columns / calls)
