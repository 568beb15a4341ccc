"""What holds for every op: the size of an element, the sizes of operands and results, which kernels pass a gradient on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import fmean

import pytest
from physics_jobs import job

from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.ops import NO_CAST, Attention, Comm, Gemm, Move, Op
from steptime.model.scans import Chunked, Scan

MOE = {"n_experts": 8, "expert_inter_sz": 192, "experts_per_token": 2, "shared_expert_inter_sz": 64}
LINEAR = {"n_key_heads": 2, "n_value_heads": 4, "freq": 2, "key_head_dim": 24, "value_head_dim": 24}
HEADS = {"n_q_heads": 4, "n_kv_heads": 2}
HYBRID = {"n_q_heads": 4, "glu": False, "hybrid_pattern": "M-", "mamba": {"n_heads": 8, "head_dim": 32, "n_groups": 2}}
LATENT = {"n_q_heads": 4, "attention": {"kind": "mla", "q_lora_rank": 96}}
FP8 = {"on": "dgx-h100", "performance": {"precision": "fp8_current"}}
SPREAD = {"model": HEADS | {"moe": MOE}, "ep": 2, "dp": 2}
JOBS = {
    "a deeper prediction": {"model": {"mtp": 1, "moe": MOE}},
    "positions": {"model": {"learned_positions": True, "dropout": True, "norm": "layernorm"}},
    "torchtitan": {"software": "torchtitan", "model": {"moe": MOE}},
    "eager torch": {"software": "fsdp2", "model": {"moe": MOE}, "performance": {"compile": "none"}},
    "mxfp8": {"on": "dgx-b200", "performance": {"precision": "mxfp8"}},
    "fp8 by tensor": FP8,
    "fp8 by rows": {"software": "fsdp2", "on": "dgx-h100", "performance": {"precision": "fp8_rowwise"}},
    "nvfp4": {"software": "torchtitan", "on": "dgx-b200", "performance": {"precision": "nvfp4_torchao"}},
    "ring": {"software": "fsdp2", "cp": 4},
    "split": {"model": HEADS | {"moe": MOE}, "tp": 2, "ep": 2, "dp": 2},
    "split experts of torchtitan": {"software": "torchtitan", "model": HEADS | {"moe": MOE}, "tp": 2},
    "hybrid": {
        "model": {"n_q_heads": 4, "glu": False, "hybrid_pattern": "M-", "mamba": {"n_heads": 8, "head_dim": 32}}
    },
    "linear": {"model": {"linear_attention": LINEAR}},
    "latents": {"model": {"attention": {"kind": "mla"}}},
    "adapters": {"software": "automodel", "model": {"lora": {"rank": 4}}},
    "scores in memory": {"model": HEADS, "performance": {"attention_impl": "unfused"}},
    "latents with scores in memory": {
        "model": {"n_q_heads": 4, "attention": {"kind": "mla", "q_lora_rank": 96}},
        "performance": {"attention_impl": "unfused"},
    },
    "heads exchanged": {"model": HEADS, "cp": 2, "cp_comm_type": "a2a"},
    "experts in turn": {"model": {"moe": MOE}, "performance": {"moe": {"grouped_gemm": False}}},
    "lightning": {"model": {"linear_attention": LINEAR | {"kind": "lightning", "n_key_heads": 4}}},
    "Kimi's": {"model": {"linear_attention": LINEAR | {"kind": "kda", "n_key_heads": 4}}},
    "positions split": {"model": HEADS | {"learned_positions": True, "norm": "layernorm"}, "tp": 2},
    "linear, two sequences": {"model": {"linear_attention": LINEAR}, "batch": 2},
    "rows of experts gathered": {
        "model": HEADS | {"moe": MOE},
        "performance": {"moe": {"dispatcher": "allgather", "router_dtype": "fp32"}},
        "tp": 2,
        "ep": 2,
        "dp": 2,
    },
    "split experts": {
        "model": HEADS | {"moe": MOE},
        "performance": {"moe": {"router_dtype": "fp32"}},
        "tp": 2,
        "ep": 2,
        "etp": 2,
        "dp": 2,
    },
    "rows sent once": {
        "model": HEADS | {"moe": MOE},
        "performance": {"moe": {"dispatcher": "flex", "flex_backend": "deepep"}},
        "ep": 2,
        "dp": 2,
    },
    "torchtitan, experts spread": {"software": "torchtitan", "model": HEADS | {"moe": MOE}, "ep": 2, "dp": 2},
    "clamped": {"model": {"moe": MOE, "swiglu_limit": 7.0}},
    "clamped, torchtitan": {"software": "torchtitan", "model": {"moe": MOE, "swiglu_limit": 7.0}},
    "gated": {"model": HEADS | {"attention": {"gated": True}}, "tp": 2},
    "latents split": {"model": {"n_q_heads": 4, "attention": {"kind": "mla"}}, "tp": 2},
    "fp8 by rows, compiled": {
        "software": "fsdp2",
        "on": "dgx-h100",
        "performance": {"precision": "fp8_rowwise", "compile": "blocks"},
    },
    "a library": {"software": "automodel", "model": HEADS | {"moe": MOE}},
    "projections of predictions split": {"model": HEADS | {"mtp": 1}, "tp": 2},
    "HybridEP": SPREAD | {"performance": {"moe": {"dispatcher": "flex", "flex_backend": "hybridep"}}},
    "DeepEP of torch": SPREAD | {"software": "fsdp2", "performance": {"moe": {"dispatcher": "flex"}}},
    "HybridEP of a library": SPREAD
    | {"software": "automodel", "performance": {"moe": {"dispatcher": "flex", "flex_backend": "hybridep"}}},
    "rows gathered, kernel by kernel": SPREAD
    | {"performance": {"moe": {"dispatcher": "allgather", "permute_fusion": False}}},
    "rows, kernel by kernel": SPREAD | {"performance": {"moe": {"permute_fusion": False, "deterministic": True}}},
    "full and empty rows": {
        "model": HEADS | {"moe": MOE | {"capacity_factor": 1.0, "pad_to_capacity": True}},
        "ep": 2,
        "dp": 2,
    },
    "balanced in turns": {"model": {"moe": MOE | {"load_balancing": "sinkhorn", "experts_per_token": 1}}},
    "experts with biases": {"software": "torchtitan", "model": HEADS | {"moe": MOE, "bias": True}},
    "a ring of heads": {"model": HEADS, "cp": 4, "cp_comm_type": "a2a+p2p", "cp_a2a": 2, "seqlen": 16},
    "latents of torchtitan": {"software": "torchtitan", "model": LATENT, "tp": 2},
    "latents of torch, queries without": {"software": "fsdp2", "model": {"attention": {"kind": "mla"}}},
    "hybrid, split, dropped": {"model": HYBRID | {"dropout": True}, "tp": 2},
    "hybrid, heads exchanged": {"model": HYBRID, "cp": 2},
    "hybrid, two sequences in fp8": FP8 | {"model": HYBRID, "batch": 2},
    "linear, split": {"model": HEADS | {"linear_attention": LINEAR}, "tp": 2},
    "a deeper prediction in fp8": FP8 | {"model": {"mtp": 1}},
    "latent experts in fp8": FP8 | {"model": {"moe": MOE | {"latent_sz": 64}}},
    "a loss in place": {"software": "fsdp2", "performance": {"loss_impl": "in_place"}},
    "sigmoid": {"model": {"moe": MOE | {"score_function": "sigmoid", "expert_bias": True}}},
    "sigmoid of torchtitan": {"software": "torchtitan", "model": {"moe": MOE | {"score_function": "sigmoid"}}},
    "in fp32": {"software": "fsdp2", "performance": {"precision": "fp32", "norm_impl": "composite", "compile": "none"}},
    "norms of all heads together": {"model": HEADS | {"qk_norm": True, "qk_norm_type": "per_layer"}},
}
PASSING = {"residual", "add", "concat", "roll", "positions", "cast"}
"""Last words of kernels whose result has the gradient of their operand."""
PARTS = {"attn.k_rope"}
"""Collectives of a part of a tensor."""
SAME_SIZE = {
    *(
        "residual",
        "add",
        "mul",
        "bias",
        "norm",
        "enorm",
        "hnorm",
        "final_norm",
        "gated_norm",
        "out_norm",
        "q_norm",
        "gated",
    ),
    *("dropout", "cast", "rope", "positions", "softmax", "log_softmax", "weigh", "scale", "score", "silu", "unsort"),
    *("conv", "q_conv", "k_conv", "v_conv", "widen", "narrow", "batch_first", "sequence_first"),
}
"""Of kernels whose first result has as many elements as their first operand."""


@cache
def parts_of(name: str) -> tuple[Assembly, tuple[tuple[Op, ...], ...]]:
    """A job of `JOBS` and the ops of each of its parts."""
    said = {"seqlen": 48} | JOBS[name]  # so that no number of tokens is a number's size
    if "on" in said:
        said["on"] = Machine.load(said["on"])
    found = Assembly(job(**said))
    return found, tuple(tuple(part.ops) for part in (*found.kinds, found.embedding, found.head))


def ops_of(name: str) -> list[Op]:
    """All ops of a job by its name in `JOBS`."""
    return [op for ops in parts_of(name)[1] for op in ops]


def sized(name: str) -> Iterator[tuple[Op, list[float], list[float]]]:
    """Each op with the elements of its operands and of its results."""
    found, parts = parts_of(name)
    for part, ops in zip((*found.kinds, found.embedding, found.head), parts, strict=True):
        elements = {part.x.name: part.x.elements} | {t.name: t.elements for op in ops for t in op.allocates}
        for op in ops:
            if all(x in elements for x in op.inputs):
                yield op, [elements[x] for x in op.inputs], [t.elements for t in op.outputs]


@pytest.mark.parametrize("name", JOBS)
def test_sizes_of_elements(name):
    """Numbers of 1, 2, 4 or 8 bytes; with a scale of one byte for 32 elements 1 + 1/32, for 16 of half a byte 1/2 + 1/16."""
    found = {(t.name, t.itemsize) for op in ops_of(name) for t in op.allocates}
    assert {size for _, size in found} <= {1.0, 2.0, 4.0, 8.0, 33 / 32, 9 / 16}
    assert {size for op in ops_of(name) for t in op.allocates if (size := t.grad_itemsize)} <= {2.0, 4.0}


@pytest.mark.parametrize("name", JOBS)
def test_operands_are_made_before_they_are_read(name):
    """The input of a part, or a tensor of an op before. An op keeps what it reads, or what was made by then, itself included."""
    found, parts = parts_of(name)
    for part, ops in zip((*found.kinds, found.embedding, found.head), parts, strict=True):
        made = {part.x.name}
        for op in ops:
            assert made.issuperset(op.inputs), op.name
            made |= {t.name for t in op.allocates}
            assert made.issuperset(op.saves), op.name


@pytest.mark.parametrize("name", JOBS)
def test_products_that_quantize_their_operands(name):
    """In forward, of all recipes torchao's NVFP4 alone; elsewhere casts are kernels of their own."""
    casts = [op.forward_cast != NO_CAST for op in ops_of(name) if isinstance(op, Gemm) and op.params]
    assert any(casts) == (name == "nvfp4")


@pytest.mark.parametrize("name", JOBS)
def test_ids_are_int64(name):
    for op in ops_of(name):
        for t in op.allocates:
            if t.name.endswith((".ids", ".targets", ".position_ids")):
                assert t.itemsize == 8.0


@pytest.mark.parametrize("name", JOBS)
def test_which_kernels_pass_a_gradient_on(name):
    """The gradient of a sum is that of each addend, of a cast that of its operand; of tensors put together it is a view, and ids
    have none. Backward of all others runs kernels of its own: but that of a cast of the logits, to fp32, which is cast back.
    """
    for op in ops_of(name):
        if isinstance(op, Move) and not op.name.endswith("loss.cast"):
            assert op.same_grad == (op.name.split(".")[-1] in PASSING), op.name


@pytest.mark.parametrize("name", JOBS)
def test_operands_and_results_of_products(name):
    """m x k by k x n: m k elements of the first operand, m n of the results, k n of the weight or of the second operand, each
    `count` times. The logits of a loss in chunks never exist whole.
    """
    shard = parts_of(name)[0].shard
    for op, read, made in sized(name):
        if not isinstance(op, Gemm):
            continue
        assert read[0] == pytest.approx(op.m * op.k * op.count), op.name
        assert sum(made) == pytest.approx(op.m * op.n * op.count) or op.name.endswith("head.proj"), op.name
        assert len(op.inputs) == 1 or not op.params, op.name
        if not op.params:
            assert read[-1] == pytest.approx(op.k * op.n * op.count), op.name
        elif op.params[0].multiplies:
            held = op.params[0].local(shard.tp, shard.ep * shard.etp)
            assert held == pytest.approx(op.n * op.k * (op.count if op.routed else 1.0)), op.name


@pytest.mark.parametrize("name", JOBS)
def test_which_side_of_a_weight_is_split(name):
    """n x k as this device multiplies it: the side that is shorter than the whole weight's is the one that is split, by tp."""
    shard = parts_of(name)[0].shard
    for op in ops_of(name):
        if not isinstance(op, Gemm) or not op.params or not op.params[0].multiplies or len(op.params[0].shape) < 2:
            continue
        p = op.params[0]
        for at, mine in ((-2, op.n), (-1, op.k)):
            split = p.split_dim == len(p.shape) + at
            if mine != p.shape[at] and not op.routed and not p.vocab:
                assert split, op.name
            if split and not op.routed and not p.vocab:
                assert mine * shard.tp == p.shape[at], op.name


@pytest.mark.parametrize("name", JOBS)
def test_operands_and_results_of_attention(name):
    """Queries b s n d, an output b s n d_v; of keys and values those of this rank."""
    for op, read, made in sized(name):
        if isinstance(op, Attention):
            rows = op.batch * op.q_len * op.n_q_heads
            assert (read[0], made[0]) == (rows * op.d_qk, rows * op.d_v), op.name


@pytest.mark.parametrize("name", JOBS)
def test_kernels_that_leave_sizes_as_they_are(name):
    """Element by element; an activation with a gate has half as many results. The norm of latents reads a part of a tensor."""
    for op, read, made in sized(name):
        last = op.name.split(".")[-1]
        if op.name in {"attn.rope", "attn.join"} and name.startswith("latents of"):
            continue  # parts of queries and keys, which turn, and are joined to the others
        if isinstance(op, Move) and last in SAME_SIZE and read and made:
            assert made[0] == read[0], op.name
        if isinstance(op, Move) and last == "act" and made:
            assert made[0] in {read[0], read[0] / 2}, op.name
        if isinstance(op, Move) and last in {"split", "join", "order"}:
            assert sum(made) == sum(read), op.name


@pytest.mark.parametrize("name", JOBS)
def test_kernels_that_change_the_dtype_of_rows(name):
    """They widen rows or narrow them again, or they do not run."""
    for ops in parts_of(name)[1]:
        sizes = {t.name: t.itemsize for op in ops for t in op.allocates}
        for op in ops:
            if op.name.endswith((".widen", ".narrow")):
                assert (op.outputs[0].itemsize > sizes[op.inputs[0]]) == op.name.endswith(".widen"), op.name
                assert op.outputs[0].itemsize != sizes[op.inputs[0]], op.name


@pytest.mark.parametrize("name", JOBS)
def test_results_of_scans(name):
    """Linear attention and state spaces: a value of each head for each token."""
    for op, _, made in sized(name):
        if isinstance(op, Chunked):
            assert made == [op.tokens * op.n_heads * op.d_v]
        if isinstance(op, Scan):
            assert made == [op.tokens * op.n_heads * op.head_dim]


@pytest.mark.parametrize("name", JOBS)
def test_tensors_of_collectives(name):
    """`bytes` is the whole tensor: what an all-gather makes, what a reduce-scatter takes, what both are of an all-to-all."""
    for op, read, made in sized(name):
        if isinstance(op, Comm) and op.kind == "all_reduce" and op.backward == "all_gather":
            assert made[0] * parts_of(name)[0].shard.tp == read[0], op.name  # a share of the sum is kept
        elif isinstance(op, Comm) and read and made and not op.routing:
            whole = op.bytes * op.count
            [size] = {t.itemsize for t in op.outputs}
            assert {"all_gather": made, "reduce_scatter": read}.get(op.kind or "", made)[0] * size == whole, op.name
            if op.kind in {"all_gather", "reduce_scatter"} and op.name not in PARTS:
                ranks = max(read[0], made[0]) / min(read[0], made[0])
                shard = parts_of(name)[0].shard
                of = {"tp": shard.tp, "etp": shard.etp, "ep": shard.ep, "cp": shard.cp, "ep_etp": shard.ep * shard.etp}
                assert ranks == of[op.axis] > 1, op.name


@pytest.mark.parametrize(("dtype", "changed"), [("fp32", ["moe.narrow", "moe.widen"]), ("compute", [])])
def test_rows_are_summed_over_ranks_in_the_routers_dtype(dtype, changed):
    how = {"moe": {"dispatcher": "allgather", "router_dtype": dtype}}
    layer = Assembly(job(model=HEADS | {"moe": MOE}, performance=how, tp=2, ep=2, dp=2)).kinds[0]
    assert sorted(op.name for op in layer.ops if op.name in {"moe.narrow", "moe.widen"}) == changed


def test_what_attention_gathers_over_ranks():
    """48 tokens. Of the key's latent the part of 64 with positions, one head for all; of 8 tokens, with more ranks than keys,
    all heads, 4 of queries and 2 each of keys and values, of 32.
    """
    latent = {op.name: op for op in ops_of("latents split")}["attn.k_rope"]
    assert [t.elements for t in latent.outputs] == [48 * 64]
    spread = {op.name: op for op in Assembly(job(model=HEADS, tp=4)).kinds[0].ops}["attn.spread"]
    assert [t.elements for t in spread.outputs] == [8 * (4 + 2 * 2) * 32]


@pytest.mark.parametrize(("name", "delta"), [("linear", 9_216 + 1_152), ("Kimi's", 9_216 + 1_152), ("lightning", 0)])
def test_flops_of_linear_attention(name, delta):
    """Of a token and head, keys and values of 24, in chunks of 64: 2 * 64 * 48 for Q K^T and its product with V, 4 * 24 * 24 into
    and out of states; with the delta rule 2 * 64 * 72 and 2 * 24 * 24 more. 48 tokens, 4 heads.
    """
    [found] = {op.flops for op in ops_of(name) if isinstance(op, Chunked)}
    assert found == 48 * 4 * (6_144 + 2_304 + delta)


@pytest.mark.parametrize(
    ("name", "slower", "backward"),
    [
        ("linear", [1.0], [2.7, 2.5, 2.8]),
        ("Kimi's", [1.82, 1.78, 1.51, 1.58], [2.7, 2.5, 2.8]),
        ("lightning", [1.0], [2.3, 1.7, 2.5]),
    ],
)
def test_measured_times_of_linear_attention(name, slower, backward):
    """Means: KDA's forward beside Gated DeltaNet's (MoonshotAI/FlashKDA README), backward beside forward (benchmarks of
    fla-org/flash-linear-attention).
    """
    [found] = {(op.slowness, op.backward_times) for op in ops_of(name) if isinstance(op, Chunked)}
    assert found == (pytest.approx(fmean(slower), rel=0.05), pytest.approx(fmean(backward), rel=0.05))
