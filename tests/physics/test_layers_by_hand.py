"""Tensors and kernels of whole layers of rare kinds, each worked out by hand: 8 tokens of 128 values in bf16, 2,048 B."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.job.parts import Part
from steptime.model.attention import copies_of
from steptime.model.lora import NF4
from steptime.model.ops import Comm, Gemm, Move, Op, Tensor

ROWS = 8 * 128 * 2
MOE = {"n_experts": 8, "expert_inter_sz": 64, "experts_per_token": 2, "shared_expert_inter_sz": 64}


def made(part: Part, prefix: str) -> dict[str, tuple[float, ...]]:
    """Elements of what the ops of a part make and keep, by their names without a prefix."""
    return {
        op.name.removeprefix(prefix): tuple(float(t.elements) for t in op.allocates)
        for op in part.ops
        if op.name.startswith(prefix) and op.allocates
    }


def moved(op: Op) -> tuple[float | None, float | None, float]:
    """Bytes that a kernel moves forward and backward, and the kernels that it stands for."""
    assert isinstance(op, Move)
    return op.forward_bytes, op.backward_bytes, op.kernels


def test_a_gated_delta_net_split_over_two_ranks():
    """Of 2 heads of keys of 16 and 4 of values of 32 a rank has half: q and k 16 wide each, v and gate 64, 2 betas and 2 decays:
    164 columns. The convolution passes q, k and v, 96. q and k of length one keep a number a head; both are repeated for two
    heads of values. A decay and a beta a head and token, the decay's input and softplus, two rates a head; sums of the decays
    and a C x C matrix of 64 a head and token. The norm of each head keeps a number.
    """
    linear = {"n_key_heads": 2, "n_value_heads": 4, "key_head_dim": 16, "value_head_dim": 32}
    [layer] = Assembly(job(model={"linear_attention": linear, "n_q_heads": 2}, tp=2)).kinds
    found = made(layer, "attn.")
    expected = {
        "in_proj": (8 * 164,), "conv.turn": (8 * 96,), "conv": (8 * 96,),
        "v.copy": (8 * 64,), "gate.copy": (8 * 64,), "rule": (8 * 64, 8 * 2, 8 * 2 * 64),
        "gates": (8 * 2, 8 * 2, 8 * 2, 8 * 2, 2 * 2), "out_norm": (8 * 64, 8 * 2), "gated": (8 * 64,), "proj": (8 * 128,),
    }  # fmt: skip
    for name in "qk":
        expected |= {f"{name}.copy": (8 * 16,), f"{name}.norm": (8 * 16, 8), f"{name}.repeat": (8 * 32,)}
    assert {name: found[name] for name in expected} == expected
    ops = {op.name: op for op in layer.ops}
    for name, columns in (("conv.turn", 96), ("q.copy", 16), ("v.copy", 64), ("gate.copy", 64)):
        assert moved(ops[f"attn.{name}"]) == (2 * 2 * 8 * columns, 2 * 2 * 8 * columns, 1)
    shapes = {p.name.removeprefix("attn."): (p.shape, p.split_dim) for op in layer.ops for p in op.params}
    assert shapes["in_proj.weight"] == ((2 * (32 + 128 + 4), 128), 0)
    assert shapes["conv.weight"] == ((2 * 32 + 128, 1, 4), 0)


def test_experts_of_torchtitan_spread_over_two_ranks():
    """8 tokens to 2 of 8 experts: 16 rows, sorted with an int64 each for their order and token. They are gathered by index, sent,
    put into the order of the rank's 4 experts, and all of that back; a count is sent for each expert. 16 rows are weighed in fp32
    and added at their tokens: zeros, a read and a write of the sum beside the rows, and a copy. Backward reads and writes rows.
    """
    [layer] = Assembly(job("torchtitan", model={"moe": MOE, "n_q_heads": 2}, dp=2, ep=2)).kinds
    rows = 16 * 128
    expected = {
        "sort": (16, 16, 16), "permute": (rows,), "dispatch": (rows,), "local_permute": (rows, 16),
        "local_unpermute": (rows,), "combine": (rows,), "weigh": (rows, rows), "scatter": (8 * 128,), "add": (8 * 128,),
    }  # fmt: skip
    found = made(layer, "moe.")
    assert {name: found[name] for name in expected} == expected
    ops = {op.name: op for op in layer.ops}
    counts, sort, scatter = ops["moe.counts"], ops["moe.sort"], ops["moe.scatter"]
    assert isinstance(counts, Comm)
    assert (counts.bytes, counts.kind, counts.backward) == (8 * 8, "all_to_all", None)
    assert isinstance(sort, Move)
    assert (sort.forward_temp_bytes, sort.kernels) == (8 * 16, 6)
    assert [t.itemsize for t in sort.allocates] == [4, 8, 8]
    assert isinstance(scatter, Move)
    assert moved(scatter) == (2 * ROWS + 3 * ROWS, 2 * 2 * ROWS, 3)
    assert scatter.forward_temp_bytes == ROWS
    assert moved(ops["moe.local_permute"])[0] == 2 * 2 * ROWS
    shared = made(layer, "shared.")
    assert shared["gate_proj"] == shared["up_proj"] == shared["act.mul"] == (8 * 64,)
    assert shared["down"] == (8 * 128,)


def test_a_gate_of_shared_experts():
    """tp 2 with sp: 4 tokens a rank, each with one score in bf16, which two kernels make; what it scales is kept, and it is."""
    model = {"moe": MOE | {"shared_expert_gate": True}, "n_q_heads": 2}
    [layer] = Assembly(job(model=model, tp=2)).kinds
    found, ops = made(layer, "shared."), {op.name: op for op in layer.ops}
    assert (found["gate"], found["scale"]) == ((4,), (4 * 128,))
    assert [t.itemsize for t in ops["shared.gate"].allocates] == [2]
    assert (moved(ops["shared.gate"])[2], ops["shared.scale"].saves) == (
        2,
        ("shared.down.out.scattered", "shared.score"),
    )
    assert found["gate_up"] == (8 * 2 * 32,)


def test_the_loss_of_a_deeper_prediction_split_over_two_ranks():
    """tp 2 with sp. Ids and labels are rolled by 8 kernels. Two norms of 4 tokens are put together, gathered, projected to 64 of
    128 columns, which are gathered, put in order and cut to a share of the tokens; a copy of the others is kept. Its loss is
    scaled: a mask, the scaled loss of each token and a count. The last loss holds the logits of the other.
    """
    head = Assembly(job(model={"mtp": 1, "n_q_heads": 2}, tp=2)).head
    expected = {
        "ids.roll": (16,), "labels.roll": (16,), "enorm": (4 * 128, 4), "hnorm": (4 * 128, 4), "concat": (4 * 256,),
        "eh_proj.gather": (8 * 256,), "eh_proj": (8 * 64,), "eh_proj.collect": (8 * 128,),
        "eh_proj.order": (4 * 128, 4 * 128), "final_norm": (4 * 128, 4), "head.gather": (8 * 128,),
        "head.proj": (8 * 512,), "loss": (8 * 512, 8, 8), "loss.scale": (8, 8, 1),
    }  # fmt: skip
    found = made(head, "mtp.1.")
    assert {name: found[name] for name in expected} == expected
    ops = {op.name: op for op in head.ops}
    assert moved(ops["mtp.1.ids.roll"]) == (4 * 8 * 16, None, 8)
    assert moved(ops["mtp.1.eh_proj.order"]) == (2 * ROWS, ROWS, 1)
    assert [t.itemsize for t in ops["mtp.1.loss.scale"].allocates] == [4, 4, 4]
    assert moved(ops["mtp.1.loss.scale"])[2] == 5
    last = ops["loss"]
    assert isinstance(last, Move)
    assert last.forward_temp_bytes == 8 * 512 * 2
    names = {p.name for op in head.ops for p in op.params if p.name.startswith("mtp.")}
    assert {"mtp.1.enorm.weight", "mtp.1.eh_proj.weight", "mtp.1.attn.qkv.weight"} <= {
        name.replace("mtp.0.", "mtp.1.") for name in names
    }


def test_adapters_of_automodel():
    """Beside a projection to 256 columns, whose own result is kept by nothing: an input with a mask of a byte an element, A's 4
    columns, B's 256, scaled and added. Norms keep what their input's gradient needs alone.
    """
    [layer] = Assembly(job("automodel", model={"lora": {"rank": 4, "dropout": 0.1}})).kinds
    found, ops = made(layer, "mlp.up_proj"), {op.name: op for op in layer.ops}
    assert found == {
        "": (8 * 256,), ".lora.dropout": (8 * 128, 8 * 128), ".lora_a": (8 * 4,), ".lora_b": (8 * 256,),
        ".lora.scale": (8 * 256,), ".lora.add": (8 * 256,),
    }  # fmt: skip
    assert (ops["mlp.up_proj"].saves, ops["mlp.up_proj"].params[0].group) == ((), "frozen")
    assert [t.itemsize for t in ops["mlp.up_proj.lora.dropout"].allocates] == [2, 1]
    a, b = ops["mlp.down.lora_a"], ops["mlp.down.lora_b"]
    assert isinstance(a, Gemm)
    assert isinstance(b, Gemm)
    assert ((a.m, a.k, a.n), (b.m, b.k, b.n)) == ((8, 256, 4), (8, 4, 128))
    assert ops["mlp.norm"].saves == ("x2", "mlp.norm.rstd")
    embedding = Assembly(job("automodel", model={"lora": {"rank": 4}})).embedding
    assert all(not op.saves and not op.allocates[1:] for op in embedding.ops)


def test_weights_that_are_packed_are_unpacked_before_each_product():
    """256 * 128 of down's: half a byte and a scale in, bf16 out, in both passes; the copy is held while it multiplies. A frozen
    embedding has no backward.
    """
    assembly = Assembly(job("accelerate-ddp", model={"lora": {"rank": 4, "base_dtype": "nf4"}}))
    [layer], ops = assembly.kinds, {op.name: op for op in assembly.kinds[0].ops}
    unpack, down = ops["mlp.down.dequantize"], ops["mlp.down"]
    assert moved(unpack)[:2] == ((NF4 + 2) * 256 * 128, (NF4 + 2) * 256 * 128)
    assert isinstance(down, Gemm)
    assert down.temp_bytes == 2 * 256 * 128
    assert layer.ops.index(unpack) + 1 == layer.ops.index(down)
    for op in assembly.embedding.ops:
        assert isinstance(op, Move)
        assert op.backward_bytes == 0


def test_softmax_and_scale_of_scores_in_memory():
    """One head's 8 x 8 scores: upcast, mask, softmax and downcast, 4 kernels: twice 2 B and five times 4 B each, either way; fp32
    probabilities are kept.
    """
    how = {"attention_impl": "unfused", "softmax_impl": "composite"}
    [layer] = Assembly(job(performance=how)).kinds
    [op] = [op for op in layer.ops if op.name == "attn.core.softmax"]
    assert moved(op) == (24 * 64, 24 * 64, 4)
    assert [(t.elements, t.itemsize) for t in op.stats] == [(64, 4)]


@pytest.mark.parametrize(("compiled", "parts", "kernels"), [("none", 4 + 2 + 2, 2), ("blocks", 2, 1)])
def test_copies_of_a_fused_projection(compiled, parts, kernels):
    """8 tokens of 4 queries, 2 keys and 2 values of 32: each read and written; compiled, the values alone."""
    shard = Assembly(job("torchtitan", performance={"compile": compiled})).shard
    split = tuple(Tensor(name, 8.0 * 32 * heads, 2.0) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    op = copies_of(shard, "attn.qkv", split)
    assert moved(op) == (2 * 2 * 8 * 32 * parts, 2 * 2 * 8 * 32 * parts, kernels)


def test_lightning_attention():
    """The gate's kernels: q, k and v put apart by three."""
    linear = {"kind": "lightning", "n_key_heads": 4, "n_value_heads": 4, "key_head_dim": 16, "value_head_dim": 24}
    [layer] = Assembly(job(model={"linear_attention": linear})).kinds
    found, ops = made(layer, "attn."), {op.name: op for op in layer.ops}
    assert found["split"] == (8 * 64, 8 * 64, 8 * 96)
    assert moved(ops["attn.split"])[2] == 3
    assert found["gate.act"] == found["gated"] == (8 * 96,)


def test_labels_and_ids_that_roll_over_ranks():
    """cp 2, 4 tokens a rank: ids and positions of 8 B, which two kernels' worth of steps copy twice, in and out; each end of both
    stretches goes to a neighbor, 8 B in four sends.
    """
    head = Assembly(job(model={"mtp": 1, "n_q_heads": 2}, cp=2)).head
    ops = {op.name: op for op in head.ops}
    assert moved(ops["mtp.1.ids.roll"])[0] == 2 * 2 * 2 * 4 * 8
    ends = ops["mtp.1.ids.roll.ends"]
    assert isinstance(ends, Comm)
    assert (ends.bytes, ends.count, ends.axis, ends.kind) == (8, 4, "cp", "send_recv")
