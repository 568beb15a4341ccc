"""A model whose layers are not all alike: every figure is that of its parts, kind by kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steptime import Job, estimate
from steptime.base.config import ConfigError
from steptime.base.recent import Recent
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories, groups_of
from steptime.model import blocks
from steptime.model.blocks import n_params
from steptime.model.model import Model
from steptime.model.ops import Attention

H, HEADS, VOCAB, WIDE, NARROW = 1024, 16, 51200, 4096, 2048
LAYERS = [{"repeat": 3, "inter_sz": WIDE}, {"repeat": 5}]
MODEL = {"n_layers": 8, "hidden_sz": H, "inter_sz": NARROW, "n_q_heads": HEADS, "vocab_sz": VOCAB, "layers": LAYERS}


def plan(parallelism=None, performance=None, **model):
    return Job(
        model=MODEL | model,
        parallelism={"tp": 1, "pp": 2, "dp": 1} | (parallelism or {}),
        performance={"software": "megatron-core"} | (performance or {}),
        data={"gbs": 4, "seqlen": 2048, "microbatch_sz": 1},
        hardware="dgx-h100",
    )


def layer_params(inter):
    """Two RMSNorms, q, k, v and output projection of full attention, gate, up and down."""
    return 2 * H + 4 * H * H + 3 * H * inter


def test_parameters_by_hand():
    """Stage 0 holds layers 1 to 4: three wide, one narrow, and the embedding; stage 1 four narrow ones, final norm and head.

    3 x 16,779,264 + 10,487,808 + 51200 x 1024 = 113,254,400 and 4 x 10,487,808 + 1024 + 52,428,800 = 94,381,056.
    """
    assert (layer_params(WIDE), layer_params(NARROW)) == (16_779_264, 10_487_808)
    params = estimate(plan()).params
    assert params.per_stage == [113_254_400, 94_381_056]
    assert params.total == 207_635_456 == n_params(plan().model)


def test_flops_by_hand():
    """Per token and layer 2 FLOPs a weight (4 H^2 + 3 H inter) and 4 s H of full attention, half of it under the causal mask.

    Weights: 8 x 4 x 1024^2 + 1024 x 3 x (3 x 4096 + 5 x 2048) + 51200 x 1024 = 155,189,248. Attention: 8 x 4 x 2048 x 1024 / 2.
    Forward and backward are three times that, over 4 x 2048 tokens.
    """
    per_token = 2 * 155_189_248 + 8 * 4 * 2048 * 1024 // 2
    assert 8 * 4 * H * H + H * 3 * (3 * WIDE + 5 * NARROW) + VOCAB * H == 155_189_248
    assert estimate(plan()).flops.model_per_step == 3 * 4 * 2048 * per_token


def test_seconds_and_saved_bytes_add_up_by_kind():
    """A stage of three wide layers and a narrow one: what models of one width each give, layer by layer."""
    mixed = Assembly(plan())
    wide, narrow = Assembly(plan(layers=None, inter_sz=WIDE)), Assembly(plan(layers=None))
    saved = [PartMemories(of).plain[of.kinds[0]].saved for of in (wide, narrow)]
    assert PartMemories(mixed).chunk(mixed.chunks[1]).saved == 4 * saved[1] + PartMemories(narrow).head.saved
    both = PartMemories(mixed)
    assert both.chunk(mixed.chunks[0]).saved == 3 * saved[0] + saved[1] + both.embedding.saved
    ours, (a, b) = estimate(plan()).timing, (estimate(of.job).timing.parts.layer for of in (wide, narrow))
    expected = 3 * a.forward.seconds + b.forward.seconds + ours.parts.embedding.forward.seconds
    assert ours.chunks[0][0].forward_s == pytest.approx(expected, rel=1e-12)


def test_states_buckets_and_collectives_hold_every_kind():
    """Eight ranks share 12 bytes a parameter of optimizer states; each padded to 64 elements, none here needs it."""
    found = estimate(plan({"dp": 2}))
    for states, params in zip(found.timing.states, found.params.per_stage, strict=True):
        assert sum(bucket.elements for chunk in states.buckets for bucket in chunk) == params
        assert (states.params_bytes, states.gradients_bytes, states.optimizer_bytes) == (
            2 * params,
            4 * params,
            6 * params,
        )


def test_products_are_listed_by_kind():
    names = {(row.name, row.n, row.count_per_step) for row in estimate(plan()).gemms if row.pass_ == "forward"}
    assert {("dense1.mlp.gate_up", 2.0 * WIDE, 12.0), ("dense2.mlp.gate_up", 2.0 * NARROW, 4.0)} <= names


def test_equal_groups_in_a_row_are_counted():
    """Layers a b a b a a a a by twos: twice (a, b), then twice (a, a); by threes: (a, b, a), (b, a, a) and a last (a, a)."""
    a, b = "attention", "another kind"
    runs = ((a, 1), (b, 1), (a, 1), (b, 1), (a, 4))
    assert groups_of(runs, 2) == [(2, ((a, 1), (b, 1))), (2, ((a, 2),))]
    assert groups_of(runs, 3) == [(1, ((a, 1), (b, 1), (a, 1))), (1, ((b, 1), (a, 2))), (1, ((a, 2),))]


def test_layers_recomputed_in_groups_of_different_kinds():
    """Groups of two: wide wide, wide narrow, and two of narrow narrow; each keeps only its input, 2048 x 1024 x 2 bytes."""
    job = plan({"pp": 1}, {"recompute": {"granularity": "full", "n_layers": 2}})
    assembly = Assembly(job)
    wide, narrow = assembly.kinds
    assert groups_of(tuple(assembly.runs), 2) == [
        (1, ((wide, 2),)),
        (1, ((wide, 1), (narrow, 1))),
        (2, ((narrow, 2),)),
    ]
    memories = PartMemories(assembly)
    saved = sum(times * memory.saved for times, _, memory in memories.layers(assembly.chunks[0]))
    assert saved == 4 * 2048 * 1024 * 2


def test_fsdp_gathers_each_layer_in_its_own_width():
    """A group's all-gather returns its parameters in bf16, rows rounded up to the ranks, which divide every row count here."""
    layout = {"pp": 1, "dp": 4, "fsdp": {"reshard_after_forward": True}}
    rows = {row.name: row for row in estimate(plan(layout, {"software": "fsdp2"})).collectives}
    assert rows["block 0 parameters"].bytes == 2 * layer_params(WIDE)
    assert rows["block 1 parameters"].bytes == 2 * layer_params(NARROW)
    assert (rows["block 0 gradients"].count_per_step, rows["block 1 gradients"].count_per_step) == (3.0, 5.0)


def test_one_width_listed_is_the_same_model():
    listed, said = plan(layers=[{"repeat": 8}]), plan(layers=None)
    ours, theirs = estimate(listed).to_dict(), estimate(said).to_dict()
    for document in (ours, theirs):
        document["config"]["model"].pop("layers", None)
    assert ours == theirs


def test_what_cannot_run_is_told_for_every_width():
    with pytest.raises(ConfigError) as error:
        plan({"tp": 8, "pp": 1}, layers=[{"repeat": 3, "inter_sz": 4097}, {"repeat": 4}])
    assert error.value.problems == [
        (
            "model.n_layers: must be the 7 layers that model.layers lists, repeats included (got 8); set it to that, or change "
            "the list"
        ),
        "parallelism.tp: must divide inter_sz 4097 (got 8); valid: 1",
    ]


def windowed(model: Model, shard):
    """A dense layer whose attention reaches 512 tokens back."""
    return [replace(op, kv_len=512.0) if isinstance(op, Attention) else op for op in blocks.block_ops(model, shard)]


def test_a_kind_with_ops_of_its_own(monkeypatch):
    """Six windowed layers among eight: a kind is its ops; chunks, seconds and memory follow from them alone."""
    monkeypatch.setitem(blocks.LAYERS, "windowed", windowed)
    one = plan(layers=None).model
    dense, window = blocks.Layer("dense", one), blocks.Layer("windowed", one)
    monkeypatch.setattr("steptime.job.parts.layers", lambda _: [(window, 3), (dense, 1), (window, 3), (dense, 1)])
    monkeypatch.setattr("steptime.job.parts.PARTS", Recent(1))
    found = estimate(plan(layers=None))
    kinds = {part.kind: found.timing.parts.of[part] for part in found.assembly.kinds}
    assert list(kinds) == ["windowed", "dense"]
    assert kinds["windowed"].forward.attention_s < kinds["dense"].forward.attention_s
    assert kinds["windowed"].forward.gemm_s == kinds["dense"].forward.gemm_s
    stage = found.timing.chunks[0][0].forward_s - found.timing.parts.embedding.forward.seconds
    assert stage == pytest.approx(3 * kinds["windowed"].forward.seconds + kinds["dense"].forward.seconds, rel=1e-12)
    assert [chunk.runs for chunk in found.assembly.chunks] == [
        ((found.assembly.kinds[0], 3), (found.assembly.kinds[1], 1))
    ] * 2
