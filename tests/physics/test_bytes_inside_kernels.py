"""What kernels keep, move and hold besides operands and results, term by term: no two terms of a formula are equal."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from physics_jobs import job, machine
from rates import RATES

from steptime.cost.compute import parameter_gradients
from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.mamba import Widths, temporaries
from steptime.model.mlp import clamped
from steptime.model.model import Mamba
from steptime.model.moe import EXPERTS
from steptime.model.ops import NO_CAST, VECTORIZED, Attention, Casting, Comm, Gemm, Move, Op, Param, Tensor
from steptime.model.scans import Chunked, Scan
from steptime.software.precision import RECIPES
from steptime.timing.orthogonalize import iterations_s

MOE = {"n_experts": 8, "expert_inter_sz": 64, "experts_per_token": 2}
HEADS = {"n_q_heads": 4, "n_kv_heads": 2}


def ops_of(*args, **said) -> dict[str, Op]:
    """The ops of a job's first kind of layer by name."""
    return {op.name: op for op in Assembly(job(*args, **said)).kinds[0].ops}


def rule(**linear) -> tuple[dict[str, Op], Chunked]:
    """The ops of a layer of linear attention with 4 heads of values of 16 and keys of 32, 64 tokens; and its chunked kernel."""
    widths = {"n_value_heads": 4, "key_head_dim": 32, "value_head_dim": 16, "freq": 2}
    ops = ops_of(model={"linear_attention": widths | linear}, seqlen=64)
    [kernel] = [op for op in ops.values() if isinstance(op, Chunked)]
    return ops, kernel


def test_a_scan_whose_states_are_larger_than_its_output():
    """10 tokens, 3 heads of 2, 64 states of one group, chunks of 2; bf16. States 10 / 2 * 6 * 64 = 1,920. Channels (6 + 2 * 64) *
    10 * 2 = 2,680 B; dt and its sums 2 * 4 * 3 * 10 = 240; C B^T 4 * 10 * 2 = 80.

    Forward, before there is output: 2,680 + 240 + 6 * 1,920 - 2 * 2 * 10 * 6 = 14,200. Backward 2 * 2,680 + 240 + 2 * 3 * 10 +
    80 + 2 * 10 * 6 + 2 * 6 * 1,920 = 28,900.
    """
    w = Widths(Mamba(n_heads=3, head_dim=2, state_dim=64, n_groups=1, chunk_sz=2), 6.0, 3.0, 1.0, 10.0)
    assert temporaries(w, 2.0) == (14_200, 28_900)


def test_a_gated_delta_net():
    """64 tokens, one chunk, 4 heads: sums of decays in fp32 4 * 256 = 1,024 B, a matrix 2 * 64 * 256 = 32,768. States 2 * 4 * 32
    * 16 = 4,096 B; forward w, u and new values 2 * 256 * (32 + 2 * 16) and states: 36,864. Backward 2 * 256 * 3 * (32 + 16) and
    states twice: 81,920. Frameworks count 2 (4 * 4 * 16^2 + 4 * (2 * 64 + 64)) FLOPs a token with 2 heads of keys, so 64 wide.
    """
    ops, kernel = rule(n_key_heads=2)
    assert [t.bytes for t in kernel.stats] == [1_024, 32_768]
    assert (kernel.forward_temp_bytes, kernel.backward_temp_bytes) == (36_864, 81_920)
    assert kernel.counted == 2 * (4_096 + 4 * 192)
    gates = ops["attn.gates"]
    assert isinstance(gates, Move)
    # 256 numbers: copies and sigmoid 2 * 3 in bf16; upcast, sum, softplus and product 4 * 2 in fp32
    assert (gates.forward_bytes, gates.backward_bytes, gates.kernels) == (256 * 44, 256 * 44, 9)
    assert [t.bytes for t in gates.outputs] == [1_024, 512]
    assert [t.bytes for t in gates.stats] == [1_024, 1_024, 2 * 4 * 2]


def test_kimi_delta_attention():
    """As above with 4 heads of keys, 128 wide: q and k of length one 2 * 64 * 128 = 16,384 B each, a length 1,024 each, beta as
    much, two matrices of 32,768. Forward 256 * (4 * 32 + 2 * (2 * 32 + 2 * 16)) and states, 4,096. Backward 256 * (4 * (7 * 32 +
    2 * 64) + 2 * (3 * 32 + 4 * 16)) and states twice. Counted are 2 (4,096 + 4 * (2 * 128 + 64)).
    Convolutions of four positions of each channel.
    """
    ops, kernel = rule(kind="kda", n_key_heads=4)
    assert [ops[f"attn.{name}_conv"].params[0].elements for name in "qkv"] == [128 * 4, 128 * 4, 64 * 4]
    assert [t.bytes for t in kernel.stats] == [16_384, 16_384, 1_024, 1_024, 1_024, 32_768, 32_768]
    assert kernel.forward_temp_bytes == 256 * 320 + 4_096
    assert kernel.backward_temp_bytes == 256 * 1_728 + 8_192
    assert kernel.counted == 2 * (4_096 + 1_280)
    assert [t.bytes for t in ops["attn.out_norm"].stats] == [64 * 4 * 4]  # one number a token and head
    assert {p.name: p.elements for p in kernel.params} == {"attn.A_log": 4, "attn.dt_bias": 128}


@pytest.mark.parametrize(("batch", "turned"), [(1, set()), (2, {"attn.mixed.turn"})])
def test_sequences_of_a_delta_net_are_put_first_only_where_there_are_several(batch, turned):
    linear = {"n_key_heads": 2, "n_value_heads": 4, "freq": 2}
    found = ops_of(model={"linear_attention": linear}, batch=batch)
    assert {name for name in found if name.endswith("mixed.turn")} == turned


def test_heads_that_are_exchanged_for_tokens():
    """4 of 8 tokens: queries 4 * 128 in bf16, 1,024 B; keys and values of 2 heads as many. In order before and after, read and
    written: 4 * (2,048 + 1,024 of the output). Held are what was there before, and copies that were sent: 2 * 2,048.
    """
    [kernel] = [op for op in ops_of(model=HEADS, cp=2, cp_comm_type="a2a").values() if isinstance(op, Attention)]
    assert (kernel.merge_forward_bytes, kernel.merge_backward_bytes, kernel.merge_kernels) == (12_288, 12_288, 8)
    assert (kernel.forward_temp_bytes, kernel.backward_temp_bytes) == (4_096, 4_096)
    assert (kernel.q_len, kernel.n_q_heads, kernel.n_kv_heads) == (8, 2, 1)


@pytest.mark.parametrize(
    ("way", "held"), [("p2p", 2 * 1_024 + 4 * 2_048 + 512), ("all_gather", 4 * 1_024 + 3 * 2_048 + 3 * 1_024)]
)
def test_what_torchs_ring_of_four_merges(way, held):
    """2 of 8 tokens: an output of 256. Five casts, 6 B; three times a difference, a product and a sum, 12 B each. Keys and
    values, 1,024 B, read and written in order. Backward: 768 gradients zeroed, 4 B; four blocks' cast up and added, 6 + 4;
    the sum cast down, 6. Keys' and values' in fp32, 2,048 B, written and read for each rank. Held besides blocks: dq
    in fp32, 1,024 B, and of 2,048 B four and half a block's 1,024, or three with three copies.
    """
    [kernel] = [op for op in ops_of("fsdp2", cp=4, cp_comm_type=way).values() if isinstance(op, Attention)]
    assert kernel.merge_forward_bytes == 256 * (5 * 6 + 3 * 3 * 12) + 2 * 1_024
    assert kernel.merge_backward_bytes == 768 * (4 + 4 * 10 + 6) + 2 * 4 * 2_048
    assert (kernel.merge_kernels, kernel.backward_temp_bytes) == (32, held + 1_024)


def test_the_order_of_a_gathered_projection():
    """8 tokens of 128 in bf16 are gathered as parts of rows, 2,048 B, read and written; backward takes a rank's part of it."""
    found = {op.name: op for op in Assembly(job(model=HEADS | {"mtp": 1}, tp=2)).head.ops}
    order = found["mtp.1.eh_proj.order"]
    assert isinstance(order, Move)
    assert (order.forward_bytes, order.backward_bytes) == (4_096, 2_048)


@pytest.mark.parametrize("name", ["moe.local_permute", "moe.scatter"])
def test_permutation_by_hybrid_ep(name):
    """88/7 rows of 256 B arrive (`test_hybrid_ep`), and are written for 16 pairs of a token and an expert, in one kernel."""
    how = {"moe": {"dispatcher": "flex", "flex_backend": "hybridep"}}
    ops = ops_of("fsdp2", model={"moe": MOE, "n_q_heads": 2}, performance=how, dp=2, ep=2, microbatches=2)
    op = ops[name]
    assert isinstance(op, Move)
    assert (op.forward_bytes, op.backward_bytes) == (pytest.approx((88 / 7 + 16) * 256),) * 2
    assert op.kernels == 1


@pytest.mark.parametrize("halves", [True, False])
def test_clamps_of_gate_and_up(halves):
    """1,000 results in bf16. Forward reads and writes, 4 B. Backward compares with each limit, 2 + 1 B, joins two masks, 3, and
    chooses, 1 + 2 * 2: 8 B for one limit, 14 for two. Halves are read row by row: forward's one kernel; backward's comparisons
    and choice, 2 of 8 B and 3 of 11.
    """
    ops, _, _ = clamped("a", "a" if halves else "b", Tensor("y", 1_000.0, 2.0), EXPERTS)
    slow = [(1_000, 4_000, 2_000, 8_000), (1_000, 4_000, 3_000, 11_000)] if halves else [(0, 0, 0, 0)] * 2
    for op, moved, kernels, by_element in zip(ops, (8_000, 14_000), (1.5, 2.5), slow, strict=True):
        assert isinstance(op, Move)
        assert (op.forward_bytes, op.backward_bytes, op.kernels) == (4_000, moved, kernels)
        assert (*op.forward_by_element, *op.backward_by_element) == by_element


def test_casts_in_a_projection_of_torchaos_nvfp4():
    """The MLP's second weight, 256 x 128, and in eager torch its input, 8 x 256: each element twice read in bf16 and twice
    written, 9/16 B each: 41/8 B, by three kernels. Work of a weight 1.569, of an input 0.205 + 0.704 (`torchao_fp4`); of the
    weight's bytes 2 are read at the rate of memory. Kept are both casts in the other direction.
    """
    how = {"precision": "nvfp4_torchao", "compile": "none"}
    op = ops_of("torchtitan", on=Machine.load("dgx-b200"), performance=how)["mlp.down"]
    assert isinstance(op, Gemm)
    weight, inputs = 256 * 128, 8 * 256
    assert op.forward_cast.bytes == (weight + inputs) * 41 / 8
    assert op.forward_cast.kernels == 6
    assert op.forward_cast.slow.elements == pytest.approx(weight * 1.569 + inputs * 0.909)
    assert op.forward_cast.slow.bytes == weight * 25 / 8 + inputs * 41 / 8
    assert sorted(t.bytes for t in op.stats) == [inputs * 9 / 16, weight * 9 / 16]


def test_a_compiled_projection_of_torchaos_nvfp4_casts_its_weight():
    how = {"precision": "nvfp4_torchao", "compile": "blocks"}
    op = ops_of("torchtitan", on=Machine.load("dgx-b200"), performance=how)["mlp.down"]
    assert isinstance(op, Gemm)
    assert (op.forward_cast.bytes, op.forward_cast.kernels) == (256 * 128 * 41 / 8, 3)


def test_products_of_an_iteration_of_little_depth():
    """A tile's fixed time is that of a depth of 64 (`compute.shape_efficiency`). 2 * 1,280 * 2,560 * 64 = 419,430,400 FLOPs at 1
    TFLOP/s, five times: a depth of 64 takes 128/64 as long, one of 2,560 only 2,624/2,560.
    """
    r = rates(machine(flops=1e12, gemm_overhead_k=64.0).accelerator, job("torch").software)
    assert iterations_s([(1_280, 2_560, 64)], r) == pytest.approx(5 * 419.4304e-6 * 128 / 64)
    assert iterations_s([(1_280, 64, 2_560)], r) == pytest.approx(5 * 419.4304e-6 * 2_624 / 2_560)


SLOWED = {
    "gemm_flops", "attention_forward_flops", "attention_backward_flops", "bytes_per_s", "recipe_flops", "scan_flops",
    "conv_bytes_per_s", "elements_per_s", "drawn_per_s", "chunk_flops",
}  # fmt: skip
LONGER = {"gemm_kernel_s", "move_kernel_s", "slowness"}


def test_a_framework_that_computes_slower():
    """A compute factor of 2 halves every rate of a device and doubles its kernels' own times; shares and counts stay."""
    device = machine(flops=1e12, memory=1e9, sm_count=100).accelerator
    found = job("torch", on=machine(kernels={"gemm_kernel_s": 1e-6, "move_kernel_s": 2e-6})).software
    plain, slow = (rates(device, found.replace(compute_factor=factor))._asdict() for factor in (1.0, 2.0))
    for name, value in plain.items():
        if name in SLOWED:
            assert slow[name] == pytest.approx(value / 2), name
        elif name in LONGER:
            assert slow[name] == pytest.approx(value * 2), name
        else:
            assert slow[name] == value, name


def test_what_context_parallelism_by_gathers_moves():
    """4 of 8 tokens: queries and the output 1,024 B each, keys and values of 4 heads 1,024 B each, 4,096 B of both ranks. Forward
    puts these in order and copies the query's two chunks: 2 * 4,096 + 2 * 1,024. Backward that again, of the whole's gradients
    zeros, sums and order, 6 * 4,096, and of the output's gradient as of the query's: 4 * 1,024 + 2 * 1,024. The output's chunks
    are put together, 2 * 1,024. Held are keys or values of both ranks, 2,048 B, and the gradients of both.
    """
    ops = ops_of(model={"n_q_heads": 4}, cp=2, cp_comm_type="all_gather")
    [kernel] = [op for op in ops.values() if isinstance(op, Attention)]
    copy = ops["attn.core.copy"]
    assert isinstance(copy, Move)
    assert (kernel.merge_forward_bytes, kernel.merge_backward_bytes) == (10_240, 8 * 4_096 + 6 * 1_024)
    assert (kernel.forward_temp_bytes, kernel.backward_temp_bytes) == (2_048, 8_192)
    assert (copy.forward_bytes, kernel.merge_kernels, kernel.calls) == (2_048, 6, 2)


def test_kernels_beside_a_projections_products():
    """m 8, n 32, k 16 in bf16 at 1 B/s. A bias's gradient reads 8 * 32 * 2 B; casts move 40 B by 3 kernels with a recipe only; a
    gradient of 16 * 32 is added to the main one at 10 B each. A kernel takes 0.5 s.
    """
    slow = RATES._replace(bytes_per_s=1.0, move_kernel_s=0.5, accumulate_bytes=10.0)
    op = Gemm("w", params=(Param("w", (32, 16)),), m=8, n=32, k=16, cast_bytes=40.0, cast_kernels=3.0)
    added = 5_120.5
    assert parameter_gradients(op, slow) == added
    assert parameter_gradients(replace(op, recipe=RECIPES["mxfp8"]), slow) == added + 41.5
    assert parameter_gradients(replace(op, params=(*op.params, Param("b", (32,)))), slow) == added + 512.5
    assert parameter_gradients(replace(op, params=()), slow) == 0
    assert parameter_gradients(op, slow._replace(accumulate_bytes=0.0)) == 0


@pytest.mark.parametrize(("bias", "elements"), [(True, 8 * 128 + 8), (False, 8 * 128)])
def test_a_routers_bias(bias, elements):
    """8 experts of 128 inputs."""
    router = ops_of(model={"moe": MOE, "bias": bias})["moe.router"]
    assert sum(p.elements for p in router.params) == elements


@pytest.mark.parametrize(("fused", "kernels"), [(True, 1), (False, 3)])
def test_rows_summed_back(fused, kernels):
    """16 rows of 256 B are read and 8 tokens written, in one kernel or three: index, sum, cast."""
    op = ops_of(model={"moe": MOE}, performance={"moe": {"permute_fusion": fused}})["moe.unpermute"]
    assert isinstance(op, Move)
    assert (op.forward_bytes, op.backward_bytes, op.kernels) == (24 * 256, 24 * 256, kernels)


@pytest.mark.parametrize(
    ("impl", "forward", "backward"),
    [
        ("fused", 2, 2),
        ("composite", 10, 15),
        ("own_tables", 12, 14),
        ("complex", 10, 10),
        ("upcast", 26, 36),
        ("eager", 20, 20),
    ],
)
def test_tensors_that_rotations_move(impl, forward, backward):
    """In units of the tensor's bytes, counted kernel by kernel (`rotary.ROTATIONS`): queries and keys, 2 * 2,048 B."""
    op = ops_of(performance={"rope_impl": impl})["attn.rope"]
    assert isinstance(op, Move)
    assert (op.forward_bytes, op.backward_bytes) == (forward * 4_096, backward * 4_096)


def test_a_compiled_loss_reads_logits_once_and_once_more_for_their_gradient():
    """8 tokens of 1,024 logits in bf16, 16,384 B. Kept of each token: a target of 8 B, a maximum and a logarithm of 4 B."""
    said = job("fsdp2", performance={"compile": "blocks", "loss_impl": "compiled"})
    [loss] = [op for op in Assembly(said).head.ops if op.name == "loss"]
    assert isinstance(loss, Move)
    assert (loss.forward_bytes, loss.backward_bytes) == (16_384, 32_768)
    assert [t.bytes for t in loss.stats] == [64, 32, 32]


def test_positions_that_context_parallel_neighbors_exchange():
    """An id of 8 B for each of 3 sequences, two stretches of ids and two of positions: four calls."""
    ops = {op.name: op for op in Assembly(job(model={"mtp": 1}, cp=2, batch=3)).head.ops}
    ends = ops["mtp.1.ids.roll.ends"]
    assert isinstance(ends, Comm)
    assert (ends.bytes, ends.count) == (24, 4)


@pytest.mark.parametrize("of", [Gemm, Attention, Move, Comm, Chunked, Scan])
def test_what_an_op_does_not_say(of):
    """It computes, moves and holds nothing: one call or kernel of bf16, attention causal, backward of chunks twice as
    long as forward.
    """
    said = {f.name: f.default for f in fields(of) if isinstance(f.default, (bool, int, float))}
    ones = {"count", "kernels", "calls", "load", "slowness", "n_groups"}
    own = {"itemsize": 2.0, "causal_share": 0.5, "backward_times": 2.0}
    assert {name: value for name, value in said.items() if value} == {
        name: own.get(name, 1.0) for name in said if name in ones or name in own
    }


def test_what_quantizes_nothing():
    assert (*Casting(), *VECTORIZED) == (0, 0, (0, 0), 0, 0)
    assert Casting() == NO_CAST
