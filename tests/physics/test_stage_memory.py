"""What a stage holds at its peak beside its states, added up tensor by tensor."""

from __future__ import annotations

import pytest
from physics_jobs import FREE, job, machine

from steptime.answer.result import estimate
from steptime.base.rows import StageMemory
from steptime.job.assembly import Assembly
from steptime.memory.forward_walk import walk_forward
from steptime.memory.kept_buffers import dummy_wgrad_bytes
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.part_memories import PartMemories
from steptime.memory.stages import PeakMoment, first_backward_moments, moments_of_first
from steptime.model.ops import Move, Tensor
from steptime.model.segments import find_segments, kept_names, replayed

WIDE = {"n_layers": 1, "hidden_sz": 1024, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 8192}
"""In units of 1024 * 1024 weights: qkv 3, projection 1, gate and up 4, down 2, the head 8."""
UNIT = 2 * 1024 * 1024


def stages(software="megatron-core", **said) -> list[StageMemory]:
    return estimate(job(software, **said)).memory.stages


# --- dummy weight gradients ---


@pytest.mark.parametrize(
    ("layout", "units"),
    [
        ({}, [18]),
        ({"tp": 2}, [9]),
        ({"model": WIDE | {"n_layers": 3}}, [18]),  # of one shape one serves all layers
        ({"model": WIDE | {"inter_sz": 1024}}, [14]),  # gate and up 2, down 1: the projection's own shape
        ({"model": WIDE | {"n_layers": 2}, "pp": 2}, [10, 18]),  # the head is the last stage's
    ],
)
def test_fused_accumulation_keeps_a_dummy_gradient_of_each_shape(layout, units):
    """Two tokens: beside 2 bytes for a weight of each shape (TransformerEngine's get_dummy_wgrad) all else is below 2 %."""
    for stage, expected in zip(stages(**({"model": WIDE, "seqlen": 2} | layout)), units, strict=True):
        assert stage.transient_bytes == pytest.approx(expected * UNIT, rel=0.02)


def test_biases_of_experts_have_no_dummy_gradient():
    """Of 4 experts: qkv 3 units, projection 1, router 4 / 1024, one expert's gate and up 4 and down 2, the head 8."""
    moe = {"n_experts": 4, "expert_inter_sz": 2048, "experts_per_token": 1}
    found = Assembly(job("megatron-core", model=WIDE | {"bias": True, "moe": moe}))
    assert dummy_wgrad_bytes(found, 0) == 18 * UNIT + 2 * 4 * 1024


def test_biases_of_experts_are_not_quantized():
    """qkv 3 units, projection 1 and 4 experts of 6: the router's weight, in fp32, and biases keep no fp8 copy."""
    moe = {"n_experts": 4, "expert_inter_sz": 2048, "experts_per_token": 1}
    on = machine(peak_flops={"bf16": FREE, "fp8": FREE}, sustained_flops={"bf16": FREE, "fp8": FREE})
    given = {"on": on, "performance": {"precision": "fp8_current"}}
    for bias in (False, True):
        (layer,) = Assembly(job("megatron-core", model=WIDE | {"bias": bias, "moe": moe}, **given)).kinds
        assert layer.n_quantized == 28 * 1024 * 1024


def test_without_fusion_one_true_gradient_lives_for_a_moment():
    """The head's, the largest: 8 units, added to the main gradient and gone."""
    (stage,) = stages(model=WIDE, seqlen=2, performance={"grad_accumulation_fusion": False})
    assert stage.transient_bytes == pytest.approx(8 * UNIT, rel=0.02)


# --- a gathered input that comes back ---


@pytest.mark.parametrize(("again", "expected"), [(True, 8_084_480), (False, 8_084_480 + 1_048_576 // 2)])
def test_sequence_parallelism_gathers_a_projections_input_again(again, expected):
    """nanotron keeps a shard of each gathered input and gathers into a buffer of its own for wgrad.

    1024 tokens of 512 values, tp 2: A = 1,048,576 bytes whole, a half of it per rank in the sequence-parallel region, or of 256
    columns of q, k, v or attention's output. Where the head's backward multiplies, one rank holds
        of the layer: input, normed shard, q, k, v, output, second residual, its normed shard: 8 * A / 2; 64 columns of gate and
            up 131,072, 32 each of SiLU's output, up and the product 3 * 65,536; log-sum-exp of 2 heads 8,192, two rstd 4,096
        ids and mask of the vocabulary: 9 * 1024 = 9,216
        of the head: input and its normed shard 2 * A / 2, rstd 2,048
        the gradient of 128 columns of logits 262,144, that of the gathered input A, the gathered input A
        wgrad before it is added: 2 * 128 * 512 = 131,072
    7 * A + 744,448 = 8,084,480. Kept whole, three gathered inputs stand for their shards (3 * A / 2) and none comes back (- A).
    """
    model = {"n_layers": 1, "hidden_sz": 512, "inter_sz": 64, "n_q_heads": 4, "vocab_sz": 256}
    (stage,) = stages("nanotron", model=model, tp=2, seqlen=1024, microbatches=2, performance={"sp_regather": again})
    assert stage.peak_op == "backward of head.proj"
    assert stage.activations_bytes + stage.transient_bytes == expected


def test_megatrons_buffer_holds_the_gathered_input_and_not_its_gradient():
    """The same job in Megatron-Core: the gathered input lies in the grow-only buffer, A for good; dgrad's output does not
    (core/tensor_parallel/layers.py: grad_output.matmul(weight)).

    Beside 7 * A: gate and up 131,072, SwiGLU's output 65,536, log-sum-exp and rstd as above 8,192 + 4,096 + 2,048, ids 9,216, the
    logits' gradient 262,144; dummies of 638,976 weights (qkv 393,216, projection 131,072, gate and up 32,768, down 16,384, head
    65,536): 1,277,952; the data loader's causal mask of 1024 x 1024 bytes. In all 10,148,864.
    """
    model = {"n_layers": 1, "hidden_sz": 512, "inter_sz": 64, "n_q_heads": 4, "vocab_sz": 256}
    (stage,) = stages(model=model, tp=2, seqlen=1024, microbatches=2)
    assert stage.peak_op == "backward of head.proj"
    assert stage.activations_bytes + stage.transient_bytes == 10_148_864


# --- logits that torch's pipeline holds ---


@pytest.mark.parametrize(("loss", "kept"), [("composite", 2), ("fused", 2)])
def test_torchs_pipeline_holds_the_logits(loss, kept):
    """A stage's output waits in fwd_cache for its backward (torch/distributed/pipelining/stage.py): on the last stage the logits,
    which the loss of an eager model does not keep: 64 tokens of 1024 in bf16.

    By hand for 64 tokens of 128 values, A = 16,384 bytes: input, two normed, second residual, q, k, v, output 8 * A; gate, up,
    SiLU's and the product's output 4 * 2 * A; log-sum-exp of one head 256, two rstd 512. Head: norm's input, its output 2 * A,
    rstd 256, log-probabilities 64 * 1024 of 4 bytes (of 2 where the logits are not upcast), targets 512; logits 131,072.
    """
    log_probs = 64 * 1024 * (4 if loss == "composite" else 2)
    by_hand = 16 * 16_384 + 256 + 512 + 2 * 16_384 + 256 + log_probs + 512 + kept * 64 * 1024
    last = stages("torch", pp=2, microbatches=4, seqlen=64, performance={"loss_impl": loss})[1]
    assert last.activations_bytes == by_hand


def test_a_stage_of_two_chunks_that_holds_every_micro_batch():
    """Two micro-batches through two chunks on each of two stages: stage 0 holds all four when the first backward reaches it.

    Each chunk keeps a layer, 16 * A + 768 as above, and its output A; the first the ids of 64 tokens, 512, as well.
    """
    layout = {"pp": 2, "vpp": 2, "model": {"n_layers": 4}, "microbatches": 2, "seqlen": 64}
    first = stages("torch", **layout)[0]
    assert first.activations_bytes == 4 * (17 * 16_384 + 768) + 2 * 512


def test_without_a_pipeline_the_logits_go_with_the_loss():
    """Two layers of one stage: the same sums, no logits, and the ids of 64 tokens at the embedding."""
    by_hand = 2 * (16 * 16_384 + 256 + 512) + 2 * 16_384 + 256 + 64 * 1024 * 4 + 512 + 512
    (stage,) = stages("torch", microbatches=4, seqlen=64)
    assert stage.peak_op.endswith("loss.log_softmax")
    assert stage.activations_bytes == by_hand


# --- a tied weight's gradients ---


@pytest.mark.parametrize(("microbatches", "own"), [(1, 0), (2, 1)])
def test_a_tied_weights_two_gradients_lie_beside_their_sum(microbatches, own):
    """Two tokens, a vocabulary of 65,536: V = 65,536 * 128 * 2 = 16,777,216 bytes is all but everything.

    The head's gradient waits in autograd's input buffer, the embedding's comes, and their sum goes into a new one
    (torch/csrc/autograd/input_buffer.cpp): 3 * V. Where an earlier micro-batch has left a gradient, that is beside them.
    """
    (stage,) = stages("torch", model={"tie_embeddings": True, "vocab_sz": 65_536}, seqlen=2, microbatches=microbatches)
    assert stage.peak_op == "backward of embedding"
    table = 16_777_216
    assert stage.transient_bytes == pytest.approx(3 * table, rel=0.03)
    assert stage.gradients_bytes == pytest.approx(own * table, abs=0.05 * table)


def test_two_tables_have_a_gradient_each():
    """Untied, the head's is a gradient before the embedding's is made: none waits, and Adam's temporaries are the peak."""
    (stage,) = stages("torch", model={"vocab_sz": 65_536}, seqlen=2, microbatches=1)
    assert stage.peak_op == "optimizer step"
    assert stage.transient_bytes == 2 * (2 * 65_536 * 128 + 2 * 164_096 + 128)


# --- a layer's backward ---


@pytest.mark.parametrize(
    ("software", "layout", "buffers"),
    [
        ("torch", {}, 0),
        # FSDP2 on two ranks: unsharded parameters of the root (4,224) and of the layer (164,096), gradients of head and norm
        # (2,176) and of down (32,768), 2 bytes each
        ("fsdp2", {"dp": 2, "fsdp": {}}, 2 * (4_224 + 164_096 + 2_176 + 32_768)),
    ],
)
def test_an_eager_layer_peaks_at_the_product_of_its_mlp(software, layout, buffers):
    """2048 tokens of 128 values: A = 524,288; the vocabulary of 16 is small.

    Saved at the start: input, two normed, second residual, q, k, v, output: 8 * A; gate, up, SiLU's and the product's output:
    8 * A. down makes the product's gradient, 2 * A, and lets its input go; the product makes those of both factors, 4 * A, beside
    that, the gradient of the layer's output A, and 14 * A: 21 * A. Log-sum-exp 8,192, two rstd 16,384, ids 16,384.
    """
    (stage,) = stages(software, model={"n_layers": 1, "vocab_sz": 16}, seqlen=2048, microbatches=2, **layout)
    assert stage.peak_op == "backward of mlp.act.mul"
    assert stage.activations_bytes + stage.transient_bytes == 21 * 524_288 + 40_960 + buffers


def test_fsdp_without_resharding_peaks_where_the_loss_begins():
    """64 tokens of 128 values, A = 16,384: two layers keep 16 * A + 768 each, the look-up 512 bytes of ids.

    The loss holds input and normed 2 * A, rstd 256, logits, upcast and log-probabilities (2 + 4 + 4) * 64 * 1024. FSDP2 holds the
    root's parameters and both layers', and the last gathered buffer: 2 * (262,272 + 3 * 164,096).
    """
    layout = {"dp": 2, "fsdp": {"reshard_after_forward": False}}
    (stage,) = stages("fsdp2", seqlen=64, microbatches=2, **layout)
    assert stage.peak_op == "forward of loss.log_softmax"
    held = 2 * (16 * 16_384 + 768) + 512 + 2 * 16_384 + 256 + 10 * 64 * 1024
    assert stage.activations_bytes + stage.transient_bytes == held + 2 * (262_272 + 3 * 164_096)


# --- gradients that are not there yet ---


def test_a_group_of_recomputed_layers_brings_the_gradients_of_all_of_them():
    """torch's first micro-batch, four layers recomputed two at a time: 2 bytes for every parameter whose backward is to come.

    By hand: a layer of 128 values, one head of 128 and an MLP of 256 has q, k, v, projection 4 * 16,384, gate, up, down
    3 * 32,768 and two norms 256, 164,096 in all; embedding and head 1024 * 128 each, the head's norm 128.
    """
    layer, table = 164_096, 131_072
    recompute = {"granularity": "full", "n_layers": 2}
    made = job("torch", model={"n_layers": 4}, microbatches=1, seqlen=64, performance={"recompute": recompute})
    assembly = Assembly(made)
    moments = first_backward_moments(assembly, assembly.chunks[0], 0.0, None)
    to_come = [moment.grads_not_yet_allocated_bytes for moment in moments]
    everything = 2 * table + 128 + 4 * layer
    after_head = everything - table - 128
    assert to_come == [2 * n for n in (everything, everything, after_head, after_head - 2 * layer, table)]


def test_a_first_backward_begins_with_all_that_its_forward_left():
    """Two layers that keep 10 B each, with 25 B at most in forward and 40 in backward, and 3 parameters with bf16 gradients;
    100 B of other micro-batches. Forward holds 15 B besides what is kept when it ends. That is 20 B; or 50 where a pipeline holds
    the output too, which stays until the end.
    """
    parts = [(2, PartMemory(10.0, Peak(25.0, "f"), Peak(40.0, "b"), 3.0))]
    layout = job("torch", pp=2, microbatches=4)
    for own, kept in ((None, 20.0), (50.0, 50.0)):
        found = list(moments_of_first(layout, parts, 6.0, 100.0, own))
        assert found == [
            PeakMoment(100.0 + kept, 15.0, "forward of f", 12.0),
            PeakMoment(100.0 + kept, 30.0, "backward of b", 12.0),
            PeakMoment(100.0 + kept - 10.0, 30.0, "backward of b", 6.0),
        ]


# --- all after the projections runs again ---


def test_what_stays_of_a_layer_when_all_after_the_projections_runs_again():
    """MaxText's save_qkv_proj under sequence parallelism: a layer keeps its input, q, k and v; the norm comes back for wgrad.

    64 tokens of 128 values on tp 2: input 32 * 128 * 2 = 8,192 bytes; of two heads of 64 one per rank, q, k and v 64 * 64 * 2
    = 8,192 each.
    """
    assembly = Assembly(job("megatron-core", tp=2, sp=True, model={"n_q_heads": 2}, seqlen=64))
    (layer,) = assembly.kinds
    kept = kept_names(layer.ops, find_segments(layer.ops, frozenset({"after_qkv"})))
    sizes = {name: layer.sizes[name] for name in kept}
    assert sorted(sizes.values()) == [8_192] * 4, sizes


@pytest.mark.parametrize(("tied", "waits"), [(True, 2 * 131_072), (False, 0)])
def test_a_tied_heads_gradient_waits_for_the_embeddings(tied, waits):
    """Autograd holds its 131,072 elements in bf16 through the backward of every layer; then it, the embedding's and their sum are
    there. Forwards, and the head's own backward, hold nothing more.
    """
    assembly = Assembly(job("torch", microbatches=2, model={"tie_embeddings": tied}))
    memories, [chunk] = PartMemories(assembly), assembly.chunks
    usual = [memories.embedding, *(memory for _, _, memory in memories.resident(chunk)), memories.head]
    found = [memory for _, memory in memories.alone(chunk)]
    assert [one.forward for one in found] == [one.forward for one in usual]
    more = [one.backward.bytes - other.backward.bytes for one, other in zip(found, usual, strict=True)]
    assert more == [2 * waits, *[waits] * (len(usual) - 2), 0]


def test_what_nobody_reads_is_freed_at_once():
    """An input of 5 B. The first op makes 10 and 20 B that nobody reads, 35 in all, the next one 100 B: 105."""
    unread = Move("unread", ("x",), (Tensor("a", 10.0, 1.0), Tensor("b", 20.0, 1.0)))
    last = Move("last", ("x",), (Tensor("y", 100.0, 1.0),))
    sizes = {"x": 5.0, "a": 10.0, "b": 20.0, "y": 100.0}
    assert walk_forward([unread, last], sizes, [], "x", "y") == Peak(105.0, "last")
    both = Move("both", ("a", "b"), (Tensor("z", 1.0, 1.0),))
    read = [unread, both, last]
    assert walk_forward(read, sizes | {"z": 1.0}, ["x"], "x", "y") == Peak(105.0, "last")


def test_a_kernel_with_the_batch_first_has_its_output_copied():
    """Two sequences of 8 tokens of 128 values in bf16: both orders, 4,096 B each, are kept; the copy's time is in the fitted
    constants, so it is no kernel and moves nothing. One sequence has the same order both ways.
    """
    [layer] = Assembly(job("megatron-core", batch=2, performance={"attention_backend": "flash"})).kinds
    [copy] = [op for op in layer.ops if op.name == "attn.core.turn"]
    assert [layer.sizes[name] for name in ("attn.core.out", "attn.core.out.turned")] == [4_096, 4_096]
    assert (copy.forward_bytes, copy.backward_bytes, copy.kernels) == (0, 0, 0)
    [alone] = Assembly(job("megatron-core", performance={"attention_backend": "flash"})).kinds
    assert not any(op.name == "attn.core.turn" for op in alone.ops)


# --- layers run again ---


def test_a_replay_ends_with_the_last_op_that_saves():
    """The first op saves its input, the second its own output, the third nothing. Up to the second a replay runs both, up to the
    first none, as its input is there; of the third alone nothing comes back. One that does not stop runs all.
    """
    out = Tensor("b", 1.0, 1.0)
    ops = [Move("1", ("x",), (Tensor("a", 1.0, 1.0),), ("x",)), Move("2", ("a",), (out,), ("b",)), Move("3", ("b",))]
    assert [replayed(ops, 0, last, stops_early=True) for last in (0, 1, 2)] == [range(0), range(2), range(2)]
    assert len(replayed(ops, 2, 2, stops_early=True)) == 0
    assert replayed(ops, 0, 2, stops_early=False) == range(3)


@pytest.mark.parametrize(("layers", "below"), [(1, 0), (2, 14 * 2_048 + 96)])
def test_a_layer_run_again_holds_what_a_plain_one_holds(layers, below):
    """8 tokens of 128 values: A = 2,048 bytes. A layer saves input, normed, q, k, v, output, residual and normed again, 8 A; gate
    and up 4 A, their product 2 A; log-sum-exp and two rstd 96 bytes. In the activation's backward the product is gone (- 2 A);
    there are the gradients of the layer's output, A, of the product, 2 A, and of gate and up, 4 A. Of two layers run again
    together the first one holds its 14 A + 96 below. Kept between forward and backward is one input.
    """
    recompute = {"granularity": "full", "method": "uniform", "n_layers": layers}
    assembly = Assembly(job("megatron-core", microbatches=2, performance={"recompute": recompute}))
    (layer,) = assembly.kinds
    found = PartMemories(assembly).checkpointed(((layer, layers),))
    assert (found.saved, found.backward.op) == (2_048, "mlp.act")
    assert found.backward.bytes == 14 * 2_048 + 96 - 2 * 2_048 + 7 * 2_048 + below
