"""Bytes and kernels of what torch runs around products and attention: clamps, biases by row, repeated heads, a ring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.model.grouped_heads import repeat
from steptime.model.mtp import rolled, scale
from steptime.model.ops import Comm, Gemm, Move, Tensor
from steptime.model.rotary import rotary
from steptime.model.routing import Rows
from steptime.model.scans import Chunked
from steptime.model.shard import Shard
from steptime.model.torch_clamped import clamped_swiglu, row_bias
from steptime.software.performance import load_software

MOE = {"n_experts": 8, "expert_inter_sz": 256, "experts_per_token": 2}


def test_a_clamped_swiglu_of_1000_elements():
    """2,000 B are one unit w. Forward 6 + 4 + 5 + 3 = 18 w: 36,000 B, clamps of two halves element by element, 6 w. Backward 12 +
    3 + 2 + 3 + 8 + 10 + 6 = 44 w: 88,000 B; seven kernels element by element, 8 + 6 = 14 w.
    """
    op = clamped_swiglu("x", Tensor("y", 1_000.0, 2.0))
    assert isinstance(op, Move)
    assert (op.forward_bytes, op.backward_bytes, op.kernels) == (36_000, 88_000, 11)
    assert tuple(op.forward_by_element) == (2_000, 12_000)
    assert tuple(op.backward_by_element) == (7_000, 28_000)
    assert (op.forward_temp_bytes, op.backward_temp_bytes) == (2_000, 8_000)
    assert sum(t.bytes for t in op.stats) == 4 * 2_000


@pytest.mark.parametrize(("eager", "expected"), [(True, (32_768, 8_192, 8, 8_192)), (False, (0, 8_192, 1, 0))])
def test_a_bias_by_row(eager, expected):
    """16 rows of 256 in bf16, 8,192 B: eager torch writes biases, reads both, writes a sum; a row's expert is an int64."""
    found = Assembly(job("fsdp2", model={"moe": MOE}))
    rows = Rows(found.job.model.moe, 128, replace(found.shard, etp=1))
    op, _ = row_bias(rows, Tensor("experts.gate", 16 * 256.0, 2.0), eager=eager)
    assert isinstance(op, Move)
    assert (op.forward_bytes, op.backward_bytes, op.kernels, op.forward_temp_bytes) == expected
    assert [t.bytes for t in op.stats] == [16 * 8]


@pytest.mark.parametrize(
    ("names", "ranks", "compile_", "forward", "backward"),
    [
        ("qkv", 1.0, "none", 6_144, 6_144),
        ("qkv", 1.0, "blocks", 6_144, 12_288),
        ("qkv", 2.0, "none", 6_144 + 3_072, 6_144),
        ("xxx", 1.0, "none", 10_240, 10_240),
    ],
)
def test_repeated_heads(names, ranks, compile_, forward, backward):
    """8 tokens; 4 query heads of 32 in bf16 are 2,048 B, 2 key-value heads 1,024 B. Keys and values are read, 2,048 B, and
    written four heads wide, 4,096 B; compiled, backward repeats them again. Those of a second rank are read and written too,
    3,072 B. Of a fused projection's view queries are copied with them: 2,048 B read, 2,048 B written.
    """
    model = {"n_q_heads": 4, "n_kv_heads": 2}
    found = Assembly(job("fsdp2", model=model, performance={"compile": compile_, "repeat_kv": True}))
    [op], _ = repeat(found.job.model, found.shard, *names, ranks)
    assert (op.forward_bytes, op.backward_bytes) == (forward, backward)
    assert op.kernels == len(op.outputs) == (3 if names == "xxx" else 2)


@pytest.mark.parametrize(
    ("way", "name", "bytes_", "count", "held"),
    [("p2p", "ring", 1_024, 3, 2 * 1_024), ("all_gather", "gather", 4 * 1_024, 1, 4 * 1_024)],
)
def test_torchs_ring_of_four(way, name, bytes_, count, held):
    """2 tokens of each rank: keys and values of 128, 1,024 B in bf16, passed on three times or gathered at once; their
    gradients in fp32 three times and once more. Beside what a rank holds of them: four times the output in fp32, 1,024 B, and
    two of 8 B.
    """
    layer = Assembly(job("fsdp2", cp=4, cp_comm_type=way)).kinds[0]
    calls = {op.name.split(".")[-1]: op for op in layer.ops if isinstance(op, Comm) and op.axis == "cp"}
    assert (calls[name].bytes, calls[name].count) == (bytes_, count)
    assert {op.attention_share for key, op in calls.items() if key != "last_grad"} == {0.25}
    assert (calls["ring_grad"].bytes, calls["ring_grad"].count) == (2_048, 3)
    assert (calls["last_grad"].bytes, calls["last_grad"].count) == (2_048, 1)
    [kernel] = [op for op in layer.ops if op.name == "attn.core"]
    assert kernel.forward_temp_bytes == held + 4 * 1_024 + 2 * 8


def test_what_a_further_depth_of_prediction_moves():
    """8 tokens. Ids and positions are shifted, 2 * 8 int64 = 128 B, and summed: read and written twice, in four kernels for each.
    Mask, loss and count are kept, 32, 32 and 4 B; five kernels read and write 32.
    """
    shard = Assembly(job("megatron-core", model={"mtp": 1})).shard
    [roll] = rolled("ids", shard)
    [score] = [scale(shard)]
    assert isinstance(roll, Move)
    assert isinstance(score, Move)
    assert ([t.bytes for t in roll.outputs], roll.forward_bytes, roll.kernels) == ([128], 2 * 2 * 128, 8)
    assert ([t.bytes for t in score.stats], score.forward_bytes, score.kernels) == ([32, 32, 4], 5 * 2 * 32, 5)


@pytest.mark.parametrize(("delta", "flops"), [(False, 64 * 2 * 12_288), (True, 64 * 2 * 26_624)])
def test_linear_attention_in_chunks(delta, flops):
    """64 tokens, 2 heads with keys and values of 32, chunks of 64 (arXiv 2412.06464): per token and head 2 * 64 * 64 for Q K^T
    and its product with V, 4 * 32 * 32 into and out of states: 12,288. The delta rule: 2 * 64 * 96 + 2 * 32 * 32 = 14,336 more.
    """
    op = Chunked("rule", tokens=64.0, n_heads=2.0, d_k=32, d_v=32, chunk_sz=64, delta=delta)
    assert op.flops == flops


def test_lightning_attention():
    """8 tokens, 4 heads of 32, chunks of 64: 12,288 FLOPs a token and head as above, of which 4 * 32 * 32 are counted. Kept is a
    decay of each head in fp32, 4 B. States 8 / 64 * 4 * 32 * 32 = 512: in bf16 forward, in fp32 with their gradient backward
    (fla/ops/simple_gla/chunk.py).
    """
    linear = {"kind": "lightning", "n_value_heads": 4, "key_head_dim": 32, "value_head_dim": 32, "freq": 2}
    layer = Assembly(job(model={"linear_attention": linear})).kinds[0]
    [kernel] = [op for op in layer.ops if isinstance(op, Chunked)]
    assert kernel.flops == 8 * 4 * 12_288
    assert kernel.counted == 4 * 4_096
    assert [t.bytes for t in kernel.stats] == [4 * 4]
    assert (kernel.forward_temp_bytes, kernel.backward_temp_bytes) == (2 * 512, 2 * 4 * 512)


def test_projection_and_convolution_of_a_gated_delta_net():
    """8 tokens; 2 heads of keys and 4 of values, of 32: q and k 64 each, v and its gate 128 each, beta and alpha 4 each: 392
    outputs of the 128 inputs. q, k and v pass through the convolution (megatron/core/ssm/gated_delta_net.py).
    """
    linear = {"n_key_heads": 2, "n_value_heads": 4, "key_head_dim": 32, "value_head_dim": 32, "freq": 2}
    ops = {op.name: op for op in Assembly(job(model={"linear_attention": linear})).kinds[0].ops}
    project, convolution = ops["attn.in_proj"], ops["attn.conv"]
    assert isinstance(project, Gemm)
    assert (project.m, project.k, project.n) == (8, 128, 392)
    assert [t.bytes for t in project.outputs] == [2 * 8 * 392]
    assert [(t.elements, t.itemsize) for t in convolution.outputs] == [(8 * 256, 2)]


def test_one_device_shares_nothing():
    """Of what is not said there is one: no sequence is split, and the 8 tokens are its own."""
    alone = Shard(1.0, 8.0, 8.0, 1.0, sp=False, vocab=1024.0, software=load_software("torch"))
    assert (alone.cp, alone.cp_a2a, alone.ep, alone.etp, alone.context_split) == (1, 1, 1, 1, False)


@pytest.mark.parametrize(("ranks", "heads"), [(1.0, (1.0, 1.0)), (2.0, (2.0, 1.0))])
def test_rotations_with_tables_of_their_own(ranks, heads):
    """8 tokens of 128 in bf16, 2,048 B a head: 12 times those of q and k in forward, 14 in backward of a rank's own heads. 2.5 of
    these are elements that kernels without vector loads read, and 2.5 they write. The tables are cos and sin, for q and for k.
    """
    assembly = Assembly(job(performance={"rope_impl": "own_tables"}))
    [op] = rotary(assembly.job.model, assembly.shard, ("q", "k"), heads, ranks)
    assert isinstance(op, Move)
    mine = 2_048 * sum(heads)
    assert (op.forward_bytes, op.backward_bytes, op.kernels) == (12 * mine * ranks, 14 * mine, 19)
    assert tuple(op.forward_by_element) == (2.5 * mine / 2 * ranks, 5 * mine * ranks)
    assert tuple(op.backward_by_element) == (2.5 * mine / 2, 5 * mine)
    assert [t.bytes for t in op.stats] == [4 * 8 * 128 * 2]
    assert [t.elements for t in op.outputs] == [1_024 * n * ranks for n in heads]
