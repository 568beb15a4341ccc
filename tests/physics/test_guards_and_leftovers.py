"""Where a guard decides between two formulas, and what is left over once a loop or a replay is done."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from types import SimpleNamespace
from typing import cast as as_type

import numpy as np
import pytest
from physics_jobs import job, machine
from plain_backward import AUTOGRAD
from rates import RATES

from steptime.answer.result import estimate
from steptime.cost.comm import collective
from steptime.cost.compute import forward, move_pass
from steptime.fsdp.groups import quantized_saving, transposed_bytes
from steptime.hardware.machine import Machine, Tier
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.job.local_params import Pieces
from steptime.job.mesh import Group
from steptime.memory.buckets import run_buckets
from steptime.memory.buffers import deferred_wgrad_bytes, gradient_copies
from steptime.memory.ledger import Ledger
from steptime.memory.op_walk import BackwardWalk, walk_part
from steptime.memory.states import States
from steptime.model.blocks import n_params, pattern
from steptime.model.ops import ByElement, Comm, Gemm, Move, Op, Tensor
from steptime.model.segments import Segment, find_segments
from steptime.software.precision import RECIPES
from steptime.timing.optimizer import optimizer_step
from steptime.timing.part_times import part_times, pricing

MOE = {"n_experts": 8, "expert_inter_sz": 64, "experts_per_token": 2}
HEADS = {"n_q_heads": 4, "n_kv_heads": 4}


def ops_of(*args, **said) -> dict[str, Op]:
    """The ops of a job's first kind of layer by name."""
    return {op.name: op for op in Assembly(job(*args, **said)).kinds[0].ops}


@pytest.mark.parametrize(("limit", "bytes_"), [(0, 0), (1, 22_528), (2, 43_008)])
def test_how_many_gradients_of_the_head_wait(limit, bytes_):
    """Of three micro-batches two are earlier: 22,528 B each, less 2,048 B where both wait (`test_held_states`)."""
    said = {"pp": 2, "microbatches": 3, "performance": {"deferred_head_wgrads": limit}}
    assembly = Assembly(job(**said))
    assert [deferred_wgrad_bytes(assembly, chunks) for chunks in assembly.stages] == [0, bytes_]


X = Tensor("x", 10, 1.0)
REPLAYED: list[Op] = [
    Move("a", ("x",), (Tensor("y", 20, 1.0),)),
    Move("b", ("y",), (Tensor("z", 30, 1.0),), ("z",)),
]


def test_a_replay_frees_what_no_backward_reads():
    """x is kept, 10 B, and the output's gradient is 30. The replay makes y, 20, which only b's forward reads, and z, 30: 90 B.
    y is freed after its producer, z stays: 10 + 30 + 30. The backward of b makes dy, 20: 90 B; z and dz are freed, dx comes, 10.
    """
    segment = Segment(0, 1, 1, ("x",), frozenset({"y", "z"}))
    walk = BackwardWalk(REPLAYED, {"x": 10.0, "y": 20.0, "z": 30.0}, [segment], ["x"], AUTOGRAD)
    assert [ledger.bytes for ledger in walk.steps("z")] == [10 + 20, 10]
    assert walk.ledger.peak.bytes == 90


def test_quantized_gradients_exist_only_during_their_product():
    """MXFP8, 33/32 B an element: the output's gradient of 10 x 3 both ways, and the input of 10 x 4 by columns. Beside them
    the input in bf16, 80 B, its gradient and that of the output, 60.
    """
    op = Gemm("w", ("x",), (Tensor("y", 30, 2.0),), ("x",), m=10, n=3, k=4, recipe=RECIPES["mxfp8"])
    plain = walk_part([replace(op, recipe=None)], Tensor("x", 40, 2.0), "y", frozenset(), AUTOGRAD)
    found = walk_part([op], Tensor("x", 40, 2.0), "y", frozenset(), AUTOGRAD)
    assert plain.backward.bytes == 80 + 80 + 60
    assert found.backward.bytes == plain.backward.bytes + 33 / 32 * (2 * 30 + 40)


def test_a_bucket_of_its_own_in_columns():
    """On 2 ranks buckets end at multiples of 128. 100 elements end at 128; one that is alone starts and ends a bucket of its own,
    of 300 elements 384; and 100 again. In columns as in rows.
    """
    pieces = [Pieces(100, 1), Pieces(300, 1, alone=True), Pieces(100, 1), Pieces(300, 1, alone=True)]
    for dp in (2, np.array([2.0])):
        assert [float(np.sum(each)) for each in run_buckets([(pieces, 1)], dp, 10_000) if np.sum(each)] == [
            128,
            384,
            128,
            384,
        ]


def test_a_moment_of_numpys_numbers_names_its_op():
    ledger = Ledger(np.float64(3.0))
    ledger.mark("a", np.float64(2.0))
    ledger.mark("b", np.float64(1.0))
    assert ledger.peak == (5.0, "a")


@pytest.mark.parametrize(
    ("software", "split", "overlap", "gathered"),
    [
        ("megatron-core", "both", False, False),  # TransformerEngine returns what it gathered
        ("megatron-core", "both", True, True),
        ("megatron-core", "one", False, True),
        ("megatron-core", "one", True, True),
    ],
)
def test_adapters_that_gather_their_own_input(software, split, overlap, gathered):
    """Of 8 tokens of 128 in bf16 with sequence parallelism over 2 ranks."""
    ops = ops_of(
        software,
        model=HEADS | {"lora": {"rank": 4, "split": split}},
        performance={"overlap": {"tp": overlap}},
        tp=2,
    )
    assert {name: op.bytes for name, op in ops.items() if isinstance(op, Comm) and name.endswith("lora.gather")} == (
        {"attn.qkv.lora.gather": 2_048, "mlp.gate_up.lora.gather": 2_048} if gathered else {}
    )


@pytest.mark.parametrize(
    ("precision", "stored", "bytes_", "saved"),
    [
        ("fp8_delayed", True, 1, 1),
        ("fp8_delayed", False, 0, 0),
        ("fp8_blockwise", True, 1, 1),
        ("mxfp8", True, 0, 1),
        ("bf16", False, 0, 0),
    ],
)
def test_transposes_of_gathered_weights(precision, stored, bytes_, saved):
    """Megatron-FSDP makes one of every weight that it stores in fp8; of MXFP8 both directions are gathered.

    Gathered is a byte of a weight instead of two.
    """
    said = {"precision": precision, **({"fp8_params": True} if stored else {})}
    device = Machine.load("dgx-b200" if precision == "mxfp8" else "dgx-h100")
    plan = job(on=device, performance=said, dp=2)
    assert (transposed_bytes(plan), quantized_saving(plan)) == (bytes_, saved)


def test_what_per_op_checkpointing_keeps_of_a_router():
    """The choice of experts does not run again, the router's product does."""
    ops = Assembly(job("torchtitan", model={"moe": MOE})).kinds[0].ops
    [segment] = find_segments(ops, frozenset({"per_op"}))
    kept = {ops[i].name for i in segment.skips}
    assert ("moe.top_k" in kept, "moe.router" in kept, "attn.core" in kept) == (True, False, True)
    assert {t.name for op in ops if op.name == "moe.top_k" for t in op.allocates} <= set(segment.keeps)


def test_outputs_are_exchanged_again_in_backward_alone():
    """All-to-alls of heads beside a ring: 2 tokens of 128 in bf16, 512 B; the output a second time in backward."""
    ops = ops_of(model=HEADS, cp=4, cp_comm_type="a2a+p2p", cp_a2a=2)
    found = {name: op for name, op in ops.items() if isinstance(op, Comm) and op.axis == "cp_a2a"}
    again = found.pop("attn.core.out_again_a2a")
    assert (again.kind, again.backward, again.bytes) == (None, "all_to_all", 512)
    assert {(op.kind, op.backward, op.bytes) for op in found.values()} == {("all_to_all", "all_to_all", 512)}


def test_a_compiled_cast_by_rows_keeps_its_columns():
    """The input of attention's output projection, 8 x 128 in fp8."""
    on, how = Machine.load("dgx-h100"), {"precision": "fp8_rowwise", "compile": "blocks"}
    cast = ops_of("fsdp2", on=on, performance=how)["attn.proj.cast"]
    assert [t.bytes for t in cast.stats] == [1_024]
    assert cast.saves == tuple(t.name for t in cast.stats)


def test_one_hierarchical_tier_is_crossed_in_one_pass():
    """A ring of four over 1 GB/s: 8.4 us and six hops of 1 us, 3/4 of 2 MB in 1.5 ms; a tree over the tier has no hops of its
    own, so the ramp is 0.6 times the geometric mean of 1.5 ms and 8.4 us (`test_collective_seconds`).
    """
    one = Tier(name="one", size=inf, bytes_per_s=1e9, latency_s=1e-6, efficiency=1.0, hierarchical=True)
    found = collective("all_reduce", 1e6, Group("dp", 4, 1), (one,))
    assert found.time_s == pytest.approx(14.4e-6 + 1.5e-3 + 0.6 * sqrt(1.5e-3 * 8.4e-6))


def test_what_a_compiled_replay_leaves_out():
    """Nothing reads experts' results once they are weighed: a compiled replay stops before. Only memory takes time, 1 B/s."""
    how = {"compile": "blocks", "recompute": {"granularity": "selective", "modules": ["per_op"]}}
    assembly = Assembly(job("torchtitan", on=machine(memory=1.0), model={"moe": MOE}, performance=how))
    [layer], priced = assembly.kinds, pricing(assembly.job)
    [segment] = find_segments(layer.ops, frozenset({"per_op"}))
    end = [op.name for op in layer.ops].index("moe.weigh")
    ran = [op for i, op in enumerate(layer.ops[:end]) if i not in segment.skips and isinstance(op, Move)]
    expected = sum(forward(op, priced.context.rates, layer.sizes).time_s for op in ran)
    assert part_times(assembly, priced).of[layer].replay.memory_s == pytest.approx(expected)


@pytest.mark.parametrize(("share", "left"), [(False, 1.0), (0.5, 0.5), (1.0, 0.0)])
def test_a_share_of_short_collectives_is_hidden(share, left):
    """Gradients of 590,464 elements in fp32, of which a rank sends half: 1,180,928 B at 1e9 B/s, 1.18 ms."""
    answer = estimate(job("torch", on=machine(link=1e9), dp=2, performance={"overlap": {"dp": share}}))
    assert sum(row.exposed_s for row in answer.collectives) == pytest.approx(
        left * answer.collectives[0].time_s * answer.collectives[0].count_per_step
    )


# --- terms of kernels ---


def test_rows_summed_back_on_every_rank():
    """Experts on two ranks, all rows gathered: each has half of the 2 * 8 * 2 choices, 16 rows, unless the router is uneven; sums
    are of all 16 tokens. 128 in bf16: 32 * 256 B moved, 16 * 128 numbers made.
    """
    layout = {"ep": 2, "dp": 2, "performance": {"moe": {"dispatcher": "allgather"}}}
    for k in (1, 2):
        op = ops_of(model=HEADS | {"moe": MOE | {"experts_per_token": k}}, **layout)["moe.unpermute"]
        assert isinstance(op, Move)
        assert (op.forward_bytes, [t.elements for t in op.outputs]) == ((8 * k + 16) * 256, [16 * 128])


def test_a_sink_beside_the_kernel():
    """8 tokens of 4 heads of 32. Output 2,048 B; log-sum-exp, and so sigmoid, 32 numbers of 4 B. Forward reads and writes both,
    backward accesses the output six times.
    """
    model = HEADS | {"attention": {"sinks": True}}
    op = ops_of("automodel", model=model, performance={"attention_kernel": "flex"})["attn.core.sink"]
    assert isinstance(op, Move)
    assert (op.forward_bytes, op.backward_bytes, op.backward_temp_bytes) == (2 * (2_048 + 128), 6 * 2_048, 2_048)
    assert [t.bytes for t in op.stats] == [128, 64]


def test_casts_of_weights_that_autocast_keeps():
    """fp32 weights without FSDP, copied in bf16: q 128 x 128 and its adapter's, of rank 4, 4 x 128 and 128 x 4; down 128 x 256,
    4 x 256, 128 x 4.
    """
    ops = ops_of("torch", model={"lora": {"rank": 4}}, performance={"param_dtype": "fp32"})
    found = {name: sum(t.bytes for t in op.stats) for name, op in ops.items() if name.startswith(("attn.q_", "mlp.d"))}
    assert {name: bytes_ / 2 for name, bytes_ in found.items() if isinstance(ops[name], Gemm)} == {
        "attn.q_proj": 128 * 128,
        "attn.q_proj.lora_a": 4 * 128,
        "attn.q_proj.lora_b": 128 * 4,
        "mlp.down": 128 * 256,
        "mlp.down.lora_a": 4 * 256,
        "mlp.down.lora_b": 128 * 4,
    }


@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_state_space_keeps(batch):
    """8 tokens a sequence, 8 heads of 32: the output before its gate in bf16; per head three numbers in fp32. Of z, x, B, C and
    dt, 2 * 256 + 2 * 64 + 8 wide with one group of 64 states, two sequences are put in order first.
    """
    mamba = {"n_heads": 8, "head_dim": 32, "state_dim": 64, "n_groups": 1}
    ops = ops_of(model={"glu": False, "hybrid_pattern": "M-", "mamba": mamba}, batch=batch)
    assert [t.bytes for t in ops["mamba.scan"].stats] == [8 * batch * 256 * 2, 8 * 3 * 4]
    orders = [[t.elements for t in ops[name].outputs] for name in ops if name.endswith("_first")]
    assert orders == ([] if batch == 1 else [[16 * (2 * 256 + 2 * 64 + 8)], [16 * 256]])


def test_an_activation_in_a_buffer_with_room():
    """MinimalAsyncEP: of the room for 32 rows, all of both ranks, 16 arrive: 64 wide in bf16, 2,048 B, two read and one written;
    backward reads three and writes two.
    """
    moe = {"dispatcher": "flex", "flex_backend": "minimal_async_ep"}
    op = ops_of("torchtitan", model=HEADS | {"moe": MOE}, performance={"moe": moe}, ep=2, dp=2)["experts.act"]
    assert isinstance(op, Move)
    assert (op.forward_bytes, op.backward_bytes) == (3 * 2_048, 5 * 2_048)
    assert [t.bytes for t in op.outputs] == [2 * 2_048]


@pytest.mark.parametrize("how", ["kept", "freed"])
def test_copies_of_half_precision_gradients(how):
    """4 B for each of 10 parameters. Both stay until the next step; where they are kept they are there at the peak, and in the
    next step with the gradients of the last, 20 B (Megatron-LM of 2021).
    """
    plan = job()
    said = plan.software.replace(gradient_copies=how, main_grad_dtype="bf16", master_dtype="fp32")
    states = States(0.0, 20.0, 0.0, [], owned=10.0)
    found = gradient_copies(as_type("Job", SimpleNamespace(software=said)), states)
    kept = how == "kept"
    assert [(one.bytes, one.stays, one.at_peak, one.carried) for one in found] == [
        (40, True, kept, kept),
        *([(20, False, True, True)] if kept else []),
    ]


def test_an_update_of_half_the_parameters_hides_under_the_others():
    """Of 295,232 parameters half are on the host: 28 B each at an eighth of 1 B/s, while the device moves 30 B for each other
    one, at 2 B/s, and reads its 4 B of gradient again.
    """
    link = machine(host_bytes_per_s=1.0, memory=2.0)
    rates = {"memory_bytes": 1e15, "memory_bytes_per_s": 1.0, "core_bytes_per_s": 1.0}
    on = Machine(**link.model_dump(exclude={"host"}), host=rates)
    plan = job(on=on, dp=2, zero_level=1, performance={"cpu_offload": {"optimizer": 0.5}})
    found = optimizer_step(Assembly(plan), pricing(plan).context)
    assert found.host.waited_s == pytest.approx(295_232 / 2 * (28 * 8 - 34 / 2))


@pytest.mark.parametrize(
    ("which", "dense", "sparse"), [({}, 0, 3), ({"n_dense_layers": 1}, 1, 2), ({"moe_frequency": 0.5}, 2, 1)]
)
def test_each_layer_counts_once(which, dense, sparse):
    """Of three: projections of attention 65,536 and two norms of 128; an MLP of 3 * 128 * 256, or 8 experts of 3 * 128 * 64 and
    a router of 8 * 128. Embedding and head have 131,072 each, the last norm 128.
    """
    model = job(model={"n_layers": 3, "moe": MOE | which}).model
    each = 65_536 + 256
    assert [(run.kind, n) for run, n in pattern(model)].count(("moe", 1)) == sparse
    assert n_params(model) == 262_272 + 3 * each + dense * 98_304 + sparse * (8 * 24_576 + 1_024)


@pytest.mark.parametrize(
    ("fused", "name", "bytes_"), [(True, "moe.row_map", 8 * 17 * 4), (False, "moe.sorted", 48 * 8)]
)
def test_what_permuting_to_a_capacity_keeps(fused, name, bytes_):
    """8 tokens, 2 of 8 experts each, with a capacity factor of 1.5 three rows an expert: 24. Fused, a row map in int32 of 2 * 8
    + 1 columns; else indices in int64 of rows and of probabilities.
    """
    moe = MOE | {"capacity_factor": 1.5, "pad_to_capacity": True}
    op = ops_of(model=HEADS | {"moe": moe}, performance={"moe": {"permute_fusion": fused}})["moe.permute"]
    assert [(t.name, t.bytes) for t in op.stats] == [(name, bytes_)]


def test_parameters_that_a_prediction_shares():
    """Embedding and head of the model, whose gradients come from both (DeepSeek-V3, arXiv 2412.19437, 2.2)."""
    ops = Assembly(job(model={"mtp": 1})).head.ops
    assert {p.name for op in ops for p in op.params if p.shared} == {"embedding.weight", "head.weight"}
    assert [op.name for op in ops if any(p.shared for p in op.params)] == ["mtp.1.embedding", "mtp.1.head.proj"]


@pytest.mark.parametrize(("software", "weighs"), [("torchtitan", []), ("automodel", ["moe.ranked"])])
def test_tokens_that_deepep_brings(software, weighs):
    """Of 8 tokens on each of two ranks one with 2 of 8 experts goes to 2 (1 - C(4, 2) / C(8, 2)) = 11/7 of the ranks: 88/7
    arrive, of 128, with two scores. 16 rows are made. AutoModel's activation applies the scores.
    """
    moe = {"dispatcher": "flex", "flex_backend": "deepep"}
    ops = ops_of(software, model=HEADS | {"moe": MOE}, performance={"moe": moe}, ep=2, dp=2)
    assert [t.elements for t in ops["moe.dispatch"].outputs] == pytest.approx([88 / 7 * 128, 88 / 7 * 2])
    assert [t.elements for t in ops["moe.local_permute"].outputs] == [16 * 128, 16]
    assert [name for name in ops["experts.act"].inputs if name == "moe.ranked"] == weighs
    assert ("moe.weigh" in ops) == (not weighs)


@pytest.mark.parametrize("slow", [ByElement(), ByElement(20.0, 2.0)])
def test_kernels_below_the_rate_of_memory(slow):
    """8 B at half of 4 B/s: 4 s, and 1 s for the kernel; 2 B of it at 10 elements/s take 2 s for 20 elements instead of 1."""
    r = RATES._replace(bytes_per_s=4.0, move_rate=0.5, move_kernel_s=1.0, elements_per_s=10.0)
    assert move_pass(8.0, 1.0, r, slow).time_s == (5 if slow == ByElement() else 6)
