"""Terms of one second, one element or one op, each worked out where nothing larger hides it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.cost.comm import FREE
from steptime.cost.part_seconds import PartTime
from steptime.cost.rates import rates
from steptime.cost.work import Work
from steptime.fsdp.calls import Calls
from steptime.fsdp.groups import flat_group
from steptime.fsdp.pipeline_chunks import chunk_bytes
from steptime.fsdp.pipeline_seconds import PipelineSeconds, chunk_seconds, sums_s
from steptime.fsdp.seconds import CommSeconds
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.memory.allocator_blocks import LARGE, LargeBlocks
from steptime.memory.block_rests import MIB
from steptime.memory.part_memories import PartMemories
from steptime.model.embedding_and_head import loss_ops
from steptime.model.graphs import captured
from steptime.model.grouped_heads import as_read, gather
from steptime.model.lora_ops import copy
from steptime.model.mamba import exchange
from steptime.model.mtp import inside, project
from steptime.model.offload import Module, modules_of
from steptime.model.ops import Attention, Comm, Gemm, Move, Op, Param, Tensor
from steptime.model.presets import _sort_key, aliases
from steptime.model.routing import Rows
from steptime.model.segments import Segment, covered, feeds, read_by_backward, replayed, rotations
from steptime.model.torch_dispatch import scatter
from steptime.model.torch_experts import shared
from steptime.schedule.actions import Action
from steptime.schedule.live import State
from steptime.timing.step_time import Reduce

LAYOUT = {"dp": 2, "pp": 2, "fsdp": {"reduce_dtype": "bf16", "reshard_after_forward": False}}


def pipeline(share: bool | float) -> tuple[Assembly, PipelineSeconds]:
    """Two stages of two layers; nodes of two devices, links and memory of 1 B/s."""
    on = machine(memory=1.0, link=1.0, node=2)
    assembly = Assembly(job("fsdp2", on=on, model={"n_layers": 4}, performance={"overlap": {"dp": share}}, **LAYOUT))
    parts = dict.fromkeys((assembly.embedding, *assembly.kinds, assembly.head), PartTime(Work(), Work(), Work()))
    priced = rates(on.accelerator, assembly.job.software)
    return assembly, PipelineSeconds(assembly, tuple(on.tiers), parts, [{}, {}], priced)


def test_gradients_that_add_up_in_their_own_dtype():
    """torch's AccumulateGrad: the first becomes the sum; a later one is read with the sum, which is written: 3 * 2 B each."""
    assembly, found = pipeline(True)
    assert sums_s(assembly, found.rates, 100.0) == (0.0, 600.0)


def test_a_root_has_no_compute_to_hide_a_layers_gather():
    """Root 3 s, layers 2 s each; embedding and layers compute nothing, so each gather shows: 3 + 2 + 2, without the root
    2 + 2.
    """
    assembly, found = pipeline(True)
    chunk, [layer] = assembly.stages[0][0], assembly.kinds
    every = [CommSeconds(3.0, 0.0), CommSeconds(2.0, 0.0), CommSeconds(2.0, 0.0)]
    free = dict.fromkeys((assembly.embedding, layer, assembly.head), PartTime(Work(), Work(), Work()))
    around = assembly, tuple(assembly.job.machine.tiers), found.rates, chunk, every, 100.0
    of = chunk_seconds(*around, free, {})
    assert (of.forward_s, of.forward_layers_s, of.backward_s, of.gather_s) == (7.0, 4.0, 4.0, 7.0)
    assert (of.copies_s, of.reduce_s, of.first_sum_s, of.sum_s) == (0.0, 0.0, 0.0, 600.0)


@pytest.mark.parametrize(("share", "shown"), [(False, 1.0), (0.25, 0.75)])
def test_what_shows_of_a_prefetched_gather(share, shown):
    """A share of it is hidden."""
    _, found = pipeline(share)
    assert [stage[0] for stage in found.shown] == [pytest.approx(shown * chunks[0].gather_s) for chunks in found.chunks]


def test_each_group_is_gathered_and_reduced_once_a_step():
    """One micro-batch, gathered groups stay: the root once; both layers, which are alike, once each."""
    _, found = pipeline(True)
    calls = found.calls(0)
    assert {kind: calls for (kind, _), calls in calls.items()} == {"root": Calls(1.0, 1.0), "block": Calls(2.0, 2.0)}


def test_blocks_at_the_allocators_limits():
    """c10/cuda/CUDACachingAllocator.cpp: below kMinLargeAlloc of 10 MiB 20 MiB, from it on multiples of 2 MiB."""
    blocks = LargeBlocks()
    block = blocks.allocate(LARGE)
    assert block is not None
    assert (block.length, blocks.rest) == (10 * MIB, 0.0)
    blocks.allocate(LARGE - 512)
    assert blocks.rest == 0.0  # of 20 MiB, the rest of which is free
    block = blocks.allocate(10 * MIB)
    assert block is not None
    assert block.address == 12 * MIB + LARGE - 512
    assert blocks.rest == 512


def op(name: str, role: str, *, gemm: bool = False, **said: object) -> Op:
    """An op that reads the one of its name's first letter, if any."""
    if gemm:
        return Gemm(name, (), (Tensor(f"{name}.out", 1.0, 2.0),), m=1.0, n=1.0, k=1.0, itemsize=2.0, role=role, **said)  # type: ignore[arg-type]
    return Move(name, (), (Tensor(f"{name}.out", 1.0, 2.0),), role=role, **said)  # type: ignore[arg-type]


LAYER = [
    op("norm", "norm"), op("qkv", "attn", gemm=True), op("core", "core_attn"), op("proj", "attn_proj", gemm=True),
    op("add", ""), op("norm2", "norm"), op("up", "moe", gemm=True), op("act", "moe_act"), op("down", "moe", gemm=True),
    op("add2", ""),
]  # fmt: skip
MODULES = [
    ("attn_norm", range(1), 4), ("qkv_linear", range(1, 2), 1), ("core_attn", range(2, 3), 2), ("attn_proj", range(3, 4), 3),
    ("mlp_norm", range(5, 6), 9), ("expert_fc1", range(6, 7), 6), ("moe_act", range(7, 8), 8),
]  # fmt: skip


def test_modules_that_offload():
    """The norm before attention is sent when the op before the next norm is done, that of the MLP at the layer's end; products
    and attention after themselves; the activation of experts after the product that reads it (transformer/moe/experts.py,
    TEGroupedMLP.forward: fine_grained_offloading_group_commit follows linear_fc2).
    """
    assert modules_of(LAYER) == [Module(*of) for of in MODULES]
    twice = [replace(of, depth=depth) for depth in (1, 2) for of in LAYER]
    further = [Module(name, range(run.start + 10, run.stop + 10), at + 10) for name, run, at in MODULES]
    assert modules_of([op("embed", ""), *twice]) == [
        Module(of.name, range(of.ops.start + 1, of.ops.stop + 1), of.commit + 1)
        for of in [*map(Module._make, MODULES), *further]
    ]


def test_what_a_replay_runs():
    """Up to the last op with something saved: itself only where it makes what it saves. Nothing saved: nothing runs."""
    made, read = Tensor("s", 1.0, 2.0), Tensor("o", 1.0, 2.0)
    plain, saves = Move("a", (), (read,)), Move("b", ("o",), (), ("o",))
    makes = Move("c", ("o",), (), ("o", "s"), (made,))
    assert replayed([plain, saves, plain], 0, 2, stops_early=False) == range(3)
    assert replayed([plain, saves, plain], 0, 2, stops_early=True) == range(1)
    assert replayed([plain, makes, plain], 0, 2, stops_early=True) == range(2)
    assert replayed([plain, plain], 1, 1, stops_early=True) == range(1, 1)


def test_a_rotation_made_again_for_attention():
    """A product, a norm, a rotation of it, attention, which reads the rotated: norm and rotation are made again."""
    x, normed, turned, other = (Tensor(name, 1.0, 2.0) for name in ("x", "normed", "turned", "other"))
    stat = Tensor("norm.rstd", 1.0, 4.0)
    core = Attention(
        "core", ("turned",), (Tensor("y", 1.0, 2.0),), ("turned",),
        batch=1.0, q_len=1.0, kv_len=1.0, n_q_heads=1.0, n_kv_heads=1.0, d_qk=1.0, d_v=1.0, itemsize=2.0,
    )  # fmt: skip
    product = Gemm("qkv", (), (x,), m=1.0, n=1.0, k=1.0, itemsize=2.0)
    ops = [product, Move("elsewhere", ("x",), (other,)), Move("norm", ("x",), (normed,), ("x", stat.name), (stat,)),
           Move("rope", ("normed",), (turned,)), core]  # fmt: skip
    [found] = rotations(ops)
    assert (found.first, found.last, found.keeps) == (2, 3, ("norm.rstd",))
    assert [feeds(ops, i, range(3, 5)) for i in range(3)] == [False, False, True]
    assert read_by_backward(ops, {0}) == ({"turned", "x", "norm.rstd", "normed"}, {1, 4})


def test_a_copy_in_another_dtype():
    """10 numbers of 2 B read, of 4 B written: 60 B; what it makes has 40."""
    found = copy("up", "x", 10.0, 4.0, 2.0)
    assert (found.forward_bytes, found.backward_bytes) == (60.0, 60.0)
    assert [(t.name, t.elements, t.itemsize) for t in found.outputs] == [("up.out", 10.0, 4.0)]


def test_an_exchange_of_a_state_space():
    """8 tokens over two ranks, 4 each, 30 wide, in bf16: 240 B, five calls of 48."""
    assembly = Assembly(job(cp=2))
    [swap, order], name = exchange("e", "x", 30.0, 5.0, assembly.shard)
    assert isinstance(swap, Comm)
    assert (swap.bytes, swap.count, swap.outputs[0].bytes, name) == (48.0, 5.0, 240.0, "e.ordered")
    assert order.inputs == ("e.out",)


@pytest.mark.parametrize(
    ("sp", "keeps_x", "kept"), [(True, True, ("x.others",)), (True, False, ()), (False, True, None)]
)
def test_a_projection_of_two_hidden_states(sp, keeps_x, kept):
    """8 tokens of 128 over two ranks: 64 columns each of 256 inputs, gathered, 2,048 B, and put in order: read and written. With
    sequence parallelism a rank goes on with 4 tokens and the other 4 stay where the layer keeps its input.
    """
    assembly = Assembly(job(tp=2, sp=sp, model={"n_q_heads": 2}))
    ops = {of.name: of for of in project(assembly.job.model, assembly.shard, "joined", keeps_x=keeps_x)}
    product, collect, order = ops["eh_proj"], ops["eh_proj.collect"], ops["eh_proj.order"]
    assert isinstance(product, Gemm)
    assert isinstance(collect, Comm)
    assert isinstance(order, Move)
    assert (product.m, product.k, product.n, collect.bytes) == (8.0, 256.0, 64.0, 2_048.0)
    assert (order.forward_bytes, order.backward_bytes) == (4_096.0, 2_048.0)
    rows = 4 if sp else 8
    assert [t.elements for t in order.outputs] == [128.0 * rows, *([512.0] if sp else [])]
    assert (ops["eh_proj.scatter"].saves if sp else None) == kept


def test_no_nvfp4_inside_a_further_depth():
    """MultiTokenPredictionLayer runs its modules without it, and with fp8 recipes as everywhere."""
    for precision, expected in (("nvfp4", None), ("mxfp8", "mxfp8")):
        shard = Assembly(job(on=Machine.load("dgx-b200"), performance={"precision": precision})).shard
        recipe = inside(shard).software.recipe
        assert (recipe.name if recipe else None) == expected


def test_models_are_listed_by_size():
    """8 b before 70 b before 1 t; 135 m before 1 b; words after none."""
    assert _sort_key("llama3-8b") == ("llama3-", 8e9)
    assert _sort_key("smollm2-135m") == ("smollm2-", 135e6)
    assert _sort_key("moe-1t") == ("moe-", 1e12)
    assert _sort_key("gpt2-xl") == ("gpt2-xl", 0.0)
    assert all(name != stem for name, stem in aliases().items())
    assert aliases()


def test_the_last_gradient_of_a_root():
    """A loop over the parameters still names the last one: the embedding's 1,024 x 128 in bf16, or the head's."""
    assembly, _ = pipeline(True)
    memories = PartMemories(assembly)
    found = [chunk_bytes(assembly, chunk, memories, memories, split=False) for (chunk,) in assembly.stages]
    assert [of.last_of_root for of in found] == [2 * 131_072] * 2
    assert [of.waits for of in found] == [[], []]


def test_heads_gathered_after_their_norms():
    """8 tokens; 4 and 2 heads of 32 over two ranks: 2 and 1 here, all of which every rank gathers, in bf16: 2,048 and 1,024 B. A
    rank then takes its own contiguous ones: 1,024 and 512 B read and written by two kernels, in backward too. Without compile
    the 2 keys here are repeated for 2 queries each, of both ranks.
    """
    said = {"qk_norm_gathered": True, "attention_impl": "flash"}
    model = {"n_q_heads": 4, "n_kv_heads": 2, "qk_norm": True}
    assembly = Assembly(job("torchtitan", model=model, tp=2, performance=said))
    of, shard = assembly.job.model, assembly.shard
    ops, q, k = gather(of, shard, "q", "k")
    assert (q, k) == ("attn.q.every", "attn.k.every")
    assert [(op.inputs, op.bytes, op.joined) for op in ops if isinstance(op, Comm)] == [
        (("q",), 2_048.0, True),
        (("k",), 1_024.0, True),
    ]
    take = as_read(of, shard, (q, k, "v")).ops[-1]
    assert isinstance(take, Move)
    own = [t.bytes for t in take.outputs]
    assert own[0] == 1_024.0
    assert (take.forward_bytes, take.backward_bytes, take.kernels) == (2 * sum(own), 2 * sum(own), 2)
    plain = Assembly(job("torchtitan", model=model, tp=2, performance={"attention_impl": "flash"}))
    assert gather(of, plain.shard, "q", "k") == ([], "q", "k")


def test_shared_experts_on_an_input_that_was_gathered():
    """8 tokens of 128; 64 columns over two ranks: 32 each, and the weights that tp splits are 64 whole."""
    moe = {"n_experts": 8, "expert_inter_sz": 256, "experts_per_token": 2, "shared_expert_inter_sz": 64}
    assembly = Assembly(job("torchtitan", model={"moe": moe, "n_q_heads": 2}, tp=2))
    model = assembly.job.model
    assert model.moe is not None
    ops, _ = shared(model, model.moe, assembly.shard, "x", gathered=True)
    products = [op for op in ops if isinstance(op, Gemm)]
    assert [(op.k, op.n) for op in products] == [(128, 32), (128, 32), (32, 128)]
    assert [op.params[0].shape for op in products] == [(64, 128), (64, 128), (128, 64)]
    assert [len(op.params) for op in products] == [1, 1, 1]


DELTA = {"n_key_heads": 2, "n_value_heads": 2, "key_head_dim": 32, "value_head_dim": 32, "freq": 2}
SPACE = {"n_heads": 2, "head_dim": 32, "state_dim": 16, "n_groups": 2, "chunk_sz": 64}
CAST = {
    "attn.in_proj": (128, 260),  # q and k 64 each, v and gate 64 each, beta and alpha 2 each
    "attn.proj": (0, 128),
    "mlp.gate_up": (128, 512),
    "mlp.up_proj": (128, 256),
    "mamba.in_proj": (128, 194),  # z and x 64 each, B and C 32 each, 2 steps
    "mamba.out_proj": (0, 128),
}


@pytest.mark.parametrize("model", [{"linear_attention": DELTA}, {"hybrid_pattern": "M-", "glu": False, "mamba": SPACE}])
def test_casts_of_backward_by_current_scaling(model):
    """TransformerEngine, fp8 by current scaling, 8 tokens: a bf16 gradient is read for its maximum and to be cast into rows and
    columns, 2 + 2 + 1 + 1 B; an input kept by rows after a norm is transposed, 1 + 1 B. Outputs of other kernels come in both.
    """
    assembly = Assembly(job(on=Machine.load("dgx-h100"), model=model, performance={"precision": "fp8_current"}))
    every = [op for kind in assembly.kinds for op in kind.ops if isinstance(op, Gemm)]
    products = {op.name: op for op in reversed(every) if op.name in CAST}
    assert len(products) == 3
    for name, product in products.items():
        kept, outputs = CAST[name]
        assert (name, product.n, product.cast_bytes) == (name, outputs, 8 * (6 * outputs + 2 * kept))


def test_a_state_of_later_micro_batches():
    """The same chunks; micro-batch 2 becomes 5."""
    assert State((1,), (1,), Action("B", 2, 0)).later(3) == State((1,), (1,), Action("B", 5, 0))


def test_states_that_hold_no_more():
    """Two in full and one half, against three in full: no fewer of either kind, only from another state."""
    less, more = State((3,), (2,), Action("B", 0, 0)), State((4,), (3,), Action("B", 1, 0))
    halves = State((5,), (2,), Action("B", 2, 0))
    assert less.below(more)
    assert not more.below(less)
    assert less.below(halves)
    assert not halves.below(more)
    assert not less.below(less)


def test_rows_added_at_their_tokens():
    """10 rows of 128 in bf16, 2,560 B, into 8 tokens, 2,048 B: zeros, a read and a write of those; backward gathers the rows."""
    moe = {"n_experts": 8, "expert_inter_sz": 256, "experts_per_token": 2}
    assembly = Assembly(job("torchtitan", model={"moe": moe}))
    assert assembly.job.model.moe is not None
    op = scatter(Rows(assembly.job.model.moe, 128, assembly.shard), Tensor("x", 1_280.0, 2.0), 8.0, ())
    assert [t.bytes for t in op.outputs] == [2_048.0]
    assert (op.forward_bytes, op.backward_bytes, op.kernels) == (2_560 + 3 * 2_048, 2 * 2_560, 3)
    assert op.forward_temp_bytes == 2_048.0


@pytest.mark.parametrize(("how", "itemsize", "moved"), [("eager", 2, (9, 23)), ("composite", 4, (10, 20))])
def test_a_norm_in_several_kernels(how, itemsize, moved):
    """What it keeps: the input in fp32, the normalized one in bf16 or fp32, and a number a token; its docstring counts bytes."""
    software = "torch" if how == "eager" else "fsdp2"
    assembly = Assembly(job(software, performance={"norm_impl": how, "compile": "none"}))
    [op] = [op for op in assembly.kinds[0].ops if op.name == "mlp.norm"]
    assert isinstance(op, Move)
    assert [(t.elements, t.itemsize) for t in op.allocates[1:]] == [(1_024, 4), (1_024, itemsize), (8, 4)]
    assert (op.forward_bytes, op.backward_bytes) == tuple(4 * 1_024 * each for each in moved)


@pytest.mark.parametrize(("software", "backward"), [("torch", 2 * 8_192), ("aleph-alpha", 4 * 8_192)])
def test_logits_of_all_ranks_joined(software, backward):
    """8 tokens x 512 columns a rank in bf16, 8,192 B, of two ranks: read and written whole, 4 * 8,192. DTensor's backward copies
    a rank's own part, 2 * 8,192.
    """
    layout = {"tp": 2, "sp": False, "model": {"n_q_heads": 2}}
    shard = Assembly(job(software, performance={"gathered_logits": True}, **layout)).shard
    gather, cat, *_ = loss_ops(shard, Tensor("logits", 8.0 * 512, 2.0))
    assert isinstance(gather, Comm)
    assert isinstance(cat, Move)
    assert (gather.bytes, gather.count) == (2 * 8_192, 1)
    assert (cat.forward_bytes, cat.backward_bytes, cat.kernels) == (4 * 8_192, backward, 1)


def test_tables_of_their_own_are_not_reduced_together():
    """Without tied tables there is no all-reduce between the first and the last stage: no call, no byte."""
    assert estimate(job(pp=2)).timing.embedding_reduce == Reduce(0.0, 0.0, FREE)


def test_adapters_kept_in_fp32():
    """peft casts their input to fp32 and autocast casts it back: 8 tokens of 256 values, with a mask of a byte each; A and B keep
    casts of their weights, 4 x 256 and 128 x 4. Up 2 + 4 B a value moved, down as many.
    """
    said = {"model": {"lora": {"rank": 4, "dropout": 0.1}}, "performance": {"param_dtype": "fp32"}}
    ops = {op.name.removeprefix("mlp.down."): op for op in Assembly(job("torch", **said)).kinds[0].ops}
    sizes = {
        "lora.upcast": [(2_048, 4)], "lora.dropout": [(2_048, 4), (2_048, 1)], "lora.cast": [(2_048, 2)],
        "lora_a": [(32, 2), (1_024, 2)], "lora_b": [(1_024, 2), (512, 2)],
    }  # fmt: skip
    assert {name: [(t.elements, t.itemsize) for t in ops[name].allocates] for name in sizes} == sizes
    for name in ("lora.upcast", "lora.cast"):
        op = ops[name]
        assert isinstance(op, Move)
        assert op.forward_bytes == 6 * 2_048
    plain = Assembly(job("fsdp2", **said)).kinds[0].ops
    assert not [op for op in plain if op.name.endswith(("lora.upcast", "lora.cast"))]


@pytest.mark.parametrize(("tp", "elements", "padded"), [(1.0, 15, 22), (2.0, 10, 14)])
def test_a_flat_parameter_of_two(tp, elements, padded):
    """10 elements that tp cuts and 5 that it does not, in bf16: each starts at a multiple of 8, and two ranks share the whole: 16
    + 5 = 21 and one more, over tp 8 + 5 = 13 and one more.
    """
    assembly = Assembly(job("fsdp2", dp=2, fsdp={"version": 1}))
    found = flat_group(assembly, [Param("cut", (10,), 0), Param("whole", (5,))], tp)
    assert (found.elements, found.padded) == (elements, padded)


def test_ops_inside_a_segment():
    """From its first to its last."""
    assert [covered(i, [Segment(2, 4, 4, (), frozenset())]) for i in range(1, 6)] == [False, True, True, True, False]


@pytest.mark.parametrize(("modules", "share"), [(["mamba"], 1), (["attn"], 0)])
def test_a_state_space_is_captured_whole(modules, share):
    """Or not at all: of the modules of CUDA graphs it is mamba."""
    scan, *_ = Assembly(job(model={"hybrid_pattern": "M-", "glu": False, "mamba": SPACE})).kinds
    assert len(captured(scan.ops, modules)) == share * len(scan.ops)


def test_what_choosing_biased_experts_takes():
    """8 tokens, 2 of 8 experts: 64 scores and their copy with the bias, in fp32, 16 chosen; a mask of a byte each."""
    moe = {
        "n_experts": 8,
        "expert_inter_sz": 256,
        "experts_per_token": 2,
        "score_function": "sigmoid",
        "expert_bias": True,
    }
    [layer] = Assembly(job("torchtitan", model={"moe": moe}, performance={"compile": "none"})).kinds
    [op] = [op for op in layer.ops if op.name == "moe.top_k"]
    assert isinstance(op, Move)
    assert op.forward_temp_bytes == 4 * (64 + 16) + 64
    assert op.forward_bytes == 4 * 64 * 3 + (4 + 8) * 16
