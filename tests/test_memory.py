"""Memory by hand: published activation formulas, states by recipe and ZeRO level, and peaks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import job
from plain_backward import AUTOGRAD

from steptime.answer.result import estimate
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory import buckets
from steptime.memory.buckets import Pieces, run_buckets
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.op_walk import chunk_peaks, walk_part
from steptime.memory.part_memories import PartMemories
from steptime.model.ops import Gemm, Move, Param, Tensor
from steptime.model.presets import load_model

S, B, H, A = 512, 2, 1024, 16
SBH = S * B * H
GPT = {
    "n_layers": 4,
    "hidden_sz": H,
    "inter_sz": 4 * H,
    "n_q_heads": A,
    "vocab_sz": 51200,
    "glu": False,
    "learned_positions": True,
    "dropout": True,
    "norm": "layernorm",
    "bias": True,
    "tie_embeddings": True,
}


def saved_by_a_layer(plan: Job) -> float:
    memories = PartMemories(Assembly(plan))
    return memories.layers(memories.assembly.chunks[0])[0][2].saved


# --- activations of a layer, as published ---


def korthikanti(kind: str, t: int, *, sp: bool) -> float:
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 2 and section 4.1: bytes a layer saves. Norm statistics aside."""
    scores = {"none": 5 * A * S / H, "selective": 0.0}[kind]
    if t == 1 or sp:
        return SBH * (34 + scores) / t
    return SBH * (10 + 24 / t + scores / t)


@pytest.mark.parametrize("kind", ["none", "selective"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (8, False), (8, True)])
def test_korthikanti_table_2(kind, tp, sp):
    performance = {"software": "megatron-2021", "activation_checkpointing_type": kind}
    plan = job(GPT, tp=tp, sp=sp, seqlen=S, microbatch_sz=B, performance=performance)
    statistics = 2 * 2 * 4 * S * B / (tp if sp else 1)  # fp32 mean and rstd of two norms, which the paper leaves out
    assert saved_by_a_layer(plan) == korthikanti(kind, tp, sp=sp) + statistics


@pytest.mark.parametrize(("tp", "sp", "kept"), [(1, False, 2.0), (8, False, 2.0), (8, True, 2.0 / 8)])
def test_full_recomputation_keeps_the_input(tp, sp, kept):
    """Korthikanti et al. 2022, table 2: 2sbh; with sequence parallelism the input is a shard."""
    performance = {"software": "megatron-2021", "activation_checkpointing_type": "full"}
    plan = job(GPT, tp=tp, sp=sp, seqlen=S, microbatch_sz=B, performance=performance)
    assert saved_by_a_layer(plan) == kept * SBH


def test_super_selective_drops_norms_activation_and_masks_too():
    """Of selective's 34: two norm outputs (4), the GELU's output (8) and two dropout masks (2) come back by recomputation."""
    performance = {"software": "megatron-2021", "activation_checkpointing_type": "super-selective"}
    assert saved_by_a_layer(job(GPT, seqlen=S, microbatch_sz=B, performance=performance)) == SBH * 20


def test_an_eager_llama_layer():
    """torch, flash attention: x and both norm outputs and x2; q, k, v, their projections' input; four MLP tensors; rstd, lse.

    Every q, k, v counts once more before its rotation only where something keeps it: nothing does, so the output of attention
    is the second n_q d.
    """
    m = load_model("llama3-8b")
    tokens, h, nq, nkv, d, i = 4096, m.hidden_sz, m.n_q_heads, m.n_kv_heads, m.head_dim, m.inter_sz
    by_hand = tokens * (2 * (4 * h + 2 * nq * d + 2 * nkv * d + 4 * i) + 4 * nq + 8)
    assert saved_by_a_layer(job(performance={"software": "torch"})) == by_hand == 688_422_912


def test_megatrons_swiglu_keeps_fc1s_output_and_fc2s_input():
    """Three halves of the MLP's width in place of eager's four; the norms' outputs as shards under sequence parallelism."""
    m = load_model("llama3-8b")
    tokens, h, nq, nkv, d, i = 4096, m.hidden_sz, m.n_q_heads, m.n_kv_heads, m.head_dim, m.inter_sz
    whole = saved_by_a_layer(job())
    assert whole == tokens * (2 * (4 * h + 2 * nq * d + 2 * nkv * d + 3 * i) + 4 * nq + 8)
    shards = saved_by_a_layer(job(tp=4))
    assert shards == whole / 4


# --- states ---


def states(plan: Job) -> tuple[float, float, float]:
    stage = estimate(plan).memory.stages[0]
    return stage.params_bytes, stage.gradients_bytes, stage.optimizer_bytes


PSI = 7_467_786_240


@pytest.mark.parametrize(("level", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_figure_1(level, gigabytes):
    """Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: 7.5 billion parameters on 64 devices, fp16 gradients, K = 12."""
    plan = job("megatron-7.5b", gbs=128, seqlen=2048, dp=64, zero_level=level, performance={"software": "deepspeed"})
    held = [2 * PSI, 2 * PSI, 12 * PSI]
    for i in range(3):
        held[i] /= 64 if level >= 3 - i else 1
    assert sum(states(plan)) == pytest.approx(sum(held), rel=1e-3)  # FSDP's rows are whole
    assert sum(states(plan)) / 1e9 == pytest.approx(gigabytes * PSI / 7.5e9, rel=0.02)


@pytest.mark.parametrize(
    ("dp", "performance", "fixed", "sharded"),
    [
        (16, {}, 6, 12),
        (64, {}, 6, 12),
        (16, {"main_grad_dtype": "bf16"}, 4, 12),
        (16, {"main_grad_dtype": "bf16", "master_dtype": "remainder", "moment_dtype": "bf16"}, 4, 6),
        (16, {"param_dtype": "fp32"}, 8, 8),
    ],
)
def test_megatrons_distributed_optimizer(dp, performance, fixed, sharded):
    """6 + 12/d bytes a parameter (docs/user-guide/features/dist_optimizer.md, NVIDIA/Megatron-LM), and its other recipes."""
    held = sum(states(job(gbs=dp, tp=2, dp=dp, performance=performance)))
    local = (8_030_261_248 - 65 * 4096) / 2 + 65 * 4096  # norms are whole on both ranks
    assert held == pytest.approx(local * (fixed + sharded / dp), rel=1e-5)  # padding of buckets
    assert held >= local * (fixed + sharded / dp)


def test_without_sharding_a_parameter_takes_18_bytes():
    held = states(job(gbs=16, dp=16, zero_level=0))
    assert held == (8_030_261_248 * 2, 8_030_261_248 * 4, 8_030_261_248 * 12)


def test_pure_bf16_takes_8_bytes_and_fp32_takes_16():
    assert sum(states(job(performance={"software": "torch"}))) == 8_030_261_248 * 8
    assert sum(states(job(performance={"software": "torch", "precision": "fp32"}))) == 8_030_261_248 * 16


def test_gradients_not_made_yet_count_in_their_own_dtype():
    """One micro-batch of an fp32 model with bf16 gradients: at the head, where its backward begins, none is there yet."""
    model = {"n_layers": 1, "hidden_sz": 1000, "inter_sz": 16, "n_q_heads": 10, "vocab_sz": 2, "tie_embeddings": True}
    performance = {"software": "torch", "precision": "fp32", "main_grad_dtype": "bf16"}
    stage = estimate(job(model, gbs=8, microbatch_sz=8, performance=performance)).memory.stages[0]
    assert stage.peak_op == "backward of head.proj"
    assert stage.gradients_bytes == 0


def test_both_ends_of_a_tied_pipeline_hold_the_table():
    """The last stage has a copy of its own, its gradient and its optimizer share: GPT-2 small, six blocks a stage."""
    plan = job("gpt2-small", seqlen=1024, pp=2, performance={"software": "torch"})
    block, table, positions, norm = 7_087_872, 50257 * 768, 1024 * 768, 2 * 768
    first, last = estimate(plan).memory.stages
    assert first.params_bytes == 2 * (6 * block + table + positions)
    assert last.params_bytes == 2 * (6 * block + table + norm)
    assert last.optimizer_bytes == 2 * last.params_bytes


def test_the_vocabulary_is_padded_in_megatron_only():
    whole = sum(states(job("gpt2-small", seqlen=1024, tp=4, performance={"software": "megatron-2021"})))
    padded = -(-50257 // 512) * 512
    split = 12 * (7_087_872 - 6 * 768) + padded * 768  # two norms, proj's and fc2's biases are whole on every rank
    assert whole == 18 * (split / 4 + 12 * 6 * 768 + 1024 * 768 + 2 * 768)


# --- what a pipeline holds ---


def test_1f1b_holds_fewer_micro_batches_on_later_stages():
    plan = job(pp=4, gbs=16, performance={"software": "megatron-core"})
    memories = PartMemories(Assembly(plan))
    per_stage = [memories.chunk(c).saved for c in memories.assembly.chunks]
    held = [stage.activations_bytes for stage in estimate(plan).memory.stages]
    assert held == pytest.approx([4 * per_stage[0], 3 * per_stage[1], 2 * per_stage[2], per_stage[3]])


def test_gpipe_holds_them_all():
    plan = job(pp=2, gbs=16, schedule="gpipe")
    memories = PartMemories(Assembly(plan))
    first = memories.chunk(memories.assembly.chunks[0]).saved
    assert estimate(plan).memory.stages[0].activations_bytes == 16 * first


def test_interleaving_holds_more():
    """Korthikanti et al. 2022, section 4.2.3: L (1 + (p - 1) / (p v)) layers on the first stage: 8 (1 + 3/8) = 11."""
    plan = job({"preset": "llama3-8b", "n_layers": 8}, pp=4, vpp=2, gbs=8)
    memories = PartMemories(Assembly(plan))
    held = estimate(plan).memory.stages[0].activations_bytes
    ids = held - 11 * memories.plain[memories.assembly.kinds[0]].saved  # of the first chunk's micro-batches
    assert 0 < ids <= 8 * memories.embedding.saved


@pytest.mark.parametrize(
    ("plan", "inputs", "whole"),
    [
        ({"method": "uniform", "n_layers": 1}, 32, 0),
        ({"method": "uniform", "n_layers": 4}, 8, 0),
        ({"method": "uniform", "n_layers": 5}, 7, 0),
        ({"method": "block", "n_layers": 8}, 8, 24),
        ({"method": "block", "n_layers": 0}, 0, 32),
    ],
)
def test_full_recomputation_by_groups_and_blocks(plan, inputs, whole):
    """Uniform keeps one input a group, the last one shorter; block recomputes the first layers one by one and keeps the rest."""
    performance = {"recompute": {"granularity": "full", **plan}, "software": "torch"}
    memories = PartMemories(Assembly(job(performance=performance)))
    kept = sum(count * part.saved for count, _, part in memories.layers(memories.assembly.chunks[0]))
    assert kept == inputs * 4096 * 4096 * 2 + whole * 688_422_912


def test_logits_and_loss_are_on_the_last_stage():
    """fp32 softmax of the padded vocabulary, targets, the mask of foreign rows; the norm's input and rstd, the head's input."""
    memories = PartMemories(Assembly(job(tp=8, pp=2)))
    tokens, vocab, h = 4096, 129024, 4096
    kept = tokens * (4 * vocab / 8 + 8 + 1) + tokens / 8 * (2 * h + 2 * h + 4)
    assert memories.head.saved == kept
    assert memories.embedding.saved == tokens * (8 + 1)
    assert "loss" in estimate(job(tp=8, pp=2)).memory.stages[1].peak_op


# --- the walk ---

X = Tensor("x", 100.0, 1.0)


def chain() -> list:
    """x -> up (400) -> act (400) -> down (100)."""
    return [
        Gemm("mlp.up_proj", ("x",), (Tensor("up", 400.0, 1.0),), ("x",), (), (Param("w", (10, 10)),)),
        Move("mlp.act", ("up",), (Tensor("act", 400.0, 1.0),), ("up",), role="act"),
        Gemm("mlp.down", ("act",), (Tensor("y", 100.0, 1.0),), ("act",), (), (Param("v", (10, 10)),)),
    ]


def test_a_part_by_hand():
    """Kept: x, up, act. Backward of down holds dy and makes dact beside them; of act, dup once act is gone."""
    memory = walk_part(chain(), X, "y", frozenset(), AUTOGRAD)
    assert memory.saved == 900
    assert memory.forward == Peak(1000.0, "mlp.down")
    assert memory.backward == Peak(900.0 + 100.0 + 400.0, "mlp.down")


def test_a_weights_gradient_lives_for_a_moment_or_stays():
    moment = walk_part(chain(), X, "y", frozenset(), AUTOGRAD._replace(weight_grad_itemsize=2.0))
    assert moment.backward == Peak(1400.0 + 200.0, "mlp.down")
    stays = walk_part(
        chain(), X, "y", frozenset(), AUTOGRAD._replace(weight_grad_itemsize=20.0, weight_grads_stay=True)
    )
    assert stays.backward.bytes == 100 + 400 + 100 + 4000  # at up_proj: x, dup, dx and both gradients


def test_recomputing_the_activation_keeps_less_and_brings_it_back():
    memory = walk_part(chain(), X, "y", frozenset({"act"}), AUTOGRAD)
    assert memory.saved == 500
    assert memory.backward.bytes == 500 + 100 + 400 + 400  # dy, act again, dact


def test_parts_in_a_row():
    part = PartMemory(10.0, Peak(25.0, "f"), Peak(40.0, "b"))
    last = PartMemory(5.0, Peak(6.0, "loss"), Peak(20.0, "loss"))
    whole = chunk_peaks([(4, part), (1, last)])
    assert whole == PartMemory(45.0, Peak(55.0, "f"), Peak(70.0, "b"))


@given(
    st.lists(st.tuples(st.sampled_from([1, 63, 64, 100, 129, 1000]), st.integers(1, 40)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([None, 100, 1000, 5000]),
    st.booleans(),
)
def test_tensors_laid_down_at_once_fill_the_same_buckets(runs, dp, bucket_size, sharded):
    """One by one, and in columns, where every tensor has an entry: 0 where no bucket ends with it."""
    one_by_one = [Pieces(elements, 1) for elements, times in runs for _ in range(times)]
    pieces = [Pieces(*run) for run in runs]
    at_once = run_buckets([(pieces, 1)], dp, bucket_size, sharded=sharded)
    assert at_once == run_buckets([(one_by_one, 1)], dp, bucket_size, sharded=sharded)
    columns = run_buckets([(pieces, 1)], np.array([dp]), bucket_size, sharded=sharded)
    assert [float(size[0]) for size in map(np.atleast_1d, columns) if size[0]] == at_once


LAYERS = st.lists(
    st.tuples(
        st.lists(
            st.builds(
                Pieces,
                st.sampled_from([1, 63, 64, 100, 129, 1000, 7000]),
                st.integers(1, 9),
                st.sampled_from([False] * 5 + [True]),
            ),
            min_size=1,
            max_size=4,
        ),
        st.integers(1, 60),
    ),
    min_size=1,
    max_size=3,
)


@settings(deadline=None)
@given(LAYERS, st.sampled_from([1, 2, 3, 8]), st.sampled_from([None, 100, 1000, 5000, 90000.0]), st.booleans())
def test_layers_laid_down_at_once_fill_the_same_buckets(runs, dp, bucket_size, sharded):
    """As with every layer written out, and as tensor by tensor in columns."""
    written_out = [piece for pieces, times in runs for piece in pieces * times]
    at_once = run_buckets(runs, dp, bucket_size, sharded=sharded)
    assert at_once == run_buckets([(written_out, 1)], dp, bucket_size, sharded=sharded)
    columns = run_buckets(runs, np.array([dp]), bucket_size, sharded=sharded)
    assert [float(size[0]) for size in map(np.atleast_1d, columns) if size[0]] == at_once


@pytest.mark.parametrize(("bucket_size", "most"), [(None, 1), (40e6, 30), (400e6, 30), (2e9, 80)])
def test_buckets_of_many_layers_take_the_work_of_few(monkeypatch, bucket_size, most):
    """4,096 layers of 8B's shape at tp 8, of 27 M parameters: buckets of less than a layer, of some, of 74."""
    calls = []
    lay = buckets._lay
    monkeypatch.setattr(buckets, "_lay", lambda *args, **kwargs: calls.append(1) or lay(*args, **kwargs))
    layer = [Pieces(n, 1) for n in (4096, 4096 * 1792, 4096 * 3584, 4096, 4096 * 512, 4096 * 768)]
    sizes = run_buckets([(layer, 4096)], 64, bucket_size)
    assert sum(sizes) >= 4096 * sum(piece.elements for piece in layer)
    assert len(calls) <= most
