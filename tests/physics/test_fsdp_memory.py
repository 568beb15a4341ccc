"""What FSDP2 holds at its peak, buffer by buffer: two tokens, so activations are below 2 % of the buffers.

A layer has L = 164,096 elements, the root (embedding, head, final norm) 262,272, of which head and norm 131,200. Unsharded
parameters, gathered flat buffers and gradients are bf16; gradients are reduced in fp32 unless said.
"""

from __future__ import annotations

import pytest
from physics_jobs import FREE, job, machine

from steptime.answer.result import estimate
from steptime.fsdp.groups import ParamGroup, buffers, group_of, groups
from steptime.fsdp.memory_walk import left_behind
from steptime.job.assembly import Assembly
from steptime.model.ops import Param

LAYER, ROOT, HEAD = 164_096, 262_272, 131_200


def peak(layers: int, *, dp=4, microbatches=2, replicas=1, **fsdp):
    layout = {"dp": dp, "replicas": replicas, "fsdp": {"reduce_dtype": "fp32"} | fsdp}
    (stage,) = estimate(
        job("fsdp2", model={"n_layers": layers}, seqlen=2, microbatches=microbatches, **layout)
    ).memory.stages
    return stage.activations_bytes + stage.transient_bytes, stage.peak_op


def bytes_(expected: float):
    return pytest.approx(expected, rel=0.02)


UNDER = 2 * ROOT + 2 * HEAD
"""Beside every layer's backward: the root's parameters, which stay from forward, and the gradients of head and norm."""


def test_a_layer_between_two_others():
    """Backward of the second of three: its parameters 2, the flat buffer of the first, fetched ahead, 2, its own gradients 2, and
    the input of the third's reduce-scatter, which is let go when the next one starts, 4: 10 * L.
    """
    held, op = peak(3)
    assert held == bytes_(UNDER + 10 * LAYER)
    assert op.startswith("backward of attn")  # at the layer's end all its gradients are there


def test_two_layers_have_no_third():
    """The first one's backward: parameters 2, gradients 2, the second's reduction 4; as its buffer is copied out 2 + 2 + 4; the
    second's reduction: the first's flat buffer 2, gradients 2, input 4. All 8 * L.
    """
    assert peak(2)[0] == bytes_(UNDER + 8 * LAYER)


def test_a_bf16_reduction_is_half_as_large():
    assert peak(3, reduce_dtype="bf16")[0] == bytes_(UNDER + 8 * LAYER)


def test_without_resharding_every_layer_stays_gathered():
    """Third of four layers: parameters of the first three 6, its gradients 2, the fourth's reduction 4: 12 * L."""
    assert peak(4, reshard_after_forward=False)[0] == bytes_(UNDER + 12 * LAYER)


def test_replicas_leave_their_reduced_shards_until_backward_ends():
    """Two copies of four shards, a second micro-batch: each layer done leaves a quarter of 4 bytes (_fsdp_param_group.py,
    AllReduceState): one of them beside the second layer of three. The first micro-batch's becomes the gradient.
    """
    assert peak(3, dp=8, replicas=2)[0] == bytes_(UNDER + 11 * LAYER)


def test_the_root_reduces_last():
    """No layer counts beside a vocabulary of 8192, 1,048,576 elements twice: the root's gradients 2, their reduction 4."""
    layout = {"dp": 4, "fsdp": {"reduce_dtype": "fp32"}}
    (stage,) = estimate(
        job("fsdp2", model={"n_layers": 1, "vocab_sz": 8192}, seqlen=2, microbatches=2, **layout)
    ).memory.stages
    assert stage.peak_op == "backward of the root's reduce-scatter"
    assert stage.activations_bytes + stage.transient_bytes == bytes_(6 * (2 * 1_048_576 + 128))


def test_two_shards_are_as_large_as_the_gradients_they_replace():
    """The same on two ranks: the input 4, its half 2, and the last gradient, 2 * 1,048,576, which a loop still names."""
    layout = {"dp": 2, "fsdp": {"reduce_dtype": "fp32"}}
    (stage,) = estimate(
        job("fsdp2", model={"n_layers": 1, "vocab_sz": 8192}, seqlen=2, microbatches=2, **layout)
    ).memory.stages
    root = 2 * 1_048_576 + 128
    assert stage.activations_bytes + stage.transient_bytes == bytes_((4 + 4 / 2) * root + 2 * 1_048_576)


def test_one_group_is_the_whole_model():
    """All 590,464 elements: gradients 2 and the reduction's input 4, when all of backward is done."""
    held, op = peak(2, wrap="model")
    assert held == bytes_(6 * 590_464)
    assert op == "backward of the root's reduce-scatter"


def test_gradients_of_a_single_micro_batch_come_layer_by_layer():
    """A rank's gradients are fp32 shards, L for a layer of four ranks; at the middle of three layers those of the first two
    and of the root are still to come, and only the last one's is there.
    """
    layout = {"dp": 4, "fsdp": {"reduce_dtype": "fp32"}}
    (one,), (two,) = (
        estimate(job("fsdp2", model={"n_layers": 3}, seqlen=2, microbatches=m, **layout)).memory.stages for m in (1, 2)
    )
    assert two.gradients_bytes == 3 * LAYER + ROOT
    assert one.peak_op == two.peak_op
    assert one.gradients_bytes == LAYER


def test_a_reduction_beside_the_layers_own_gradient():
    """64 tokens, one layer, a vocabulary of 128, to the byte: the root's parameters 2 * 32,896, gradients of head and norm
    2 * 16,512; the layer's gradients 2 * L and their reduction's input 4 * L; the gradient of its input 64 * 128 * 2; ids 64 * 8.
    """
    layout = {"dp": 4, "fsdp": {"reduce_dtype": "fp32"}}
    (stage,) = estimate(
        job("fsdp2", model={"n_layers": 1, "vocab_sz": 128}, seqlen=64, microbatches=2, **layout)
    ).memory.stages
    assert stage.peak_op == "backward of a reduce-scatter"
    held = 2 * 32_896 + 2 * 16_512 + 6 * LAYER + 64 * 128 * 2 + 64 * 8
    assert stage.activations_bytes + stage.transient_bytes == held


@pytest.mark.parametrize(
    ("fsdp", "segments", "share"),
    [
        ({"wrap": "model"}, {}, 0.2),
        ({"wrap": "parameter"}, {"expandable_segments": True}, 0.024),  # a traced graph: all in the pool of one stream
        ({"wrap": "parameter"}, {}, 0.2),
    ],
    ids=["model", "parameter", "parameter, fixed segments"],
)
def test_what_the_allocator_keeps_in_one_pool(fsdp, segments, share):
    """20 % of activations and transients; 2.4 % with expandable segments. With FSDP's streams: test_pools_of_streams.py."""
    said = {"dp": 4, "fsdp": {"reduce_dtype": "fp32"} | fsdp}
    (stage,) = estimate(
        job("fsdp2", model={"n_layers": 3}, seqlen=2, microbatches=2, performance=segments, **said)
    ).memory.stages
    moving = stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes
    assert stage.reserved_bytes - stage.allocated_bytes == pytest.approx(share * moving)


@pytest.mark.parametrize(
    ("layout", "left"),
    [
        ({"wrap": "model"}, 2 * LAYER),  # one group: every gradient waits for the others, in bf16
        ({"replicas": 2}, 4 * LAYER / 2),  # an all-reduced shard of two, in fp32 (AllReduceState)
        ({"replicas": 2, "version": 1}, 0),
        ({}, 0),
        (
            {"replicas": 2, "microbatches": 1},
            0,
        ),  # the only micro-batch's, in the dtype of gradients: it becomes the gradient
        ({"replicas": 2, "microbatches": 1, "reduce_dtype": "bf16"}, 2 * LAYER / 2),  # a copy of it in fp32 does
        ({"replicas": 2, "no_sync": True}, 0),  # the last micro-batch's is the only one reduced
    ],
    ids=str,
)
def test_what_a_layers_backward_leaves_until_all_is_done(layout, left):
    apart = {"replicas": 1, "microbatches": 2} | {
        key: layout[key] for key in layout.keys() & {"replicas", "microbatches"}
    }
    fsdp = {"reduce_dtype": "fp32"} | {key: layout[key] for key in layout.keys() - apart.keys()}
    assembly = Assembly(job("fsdp2", dp=4, fsdp=fsdp, **apart))
    group = groups(assembly, assembly.chunks[0]).layers[0]
    assert left_behind(assembly, assembly.kinds[0].params, buffers(assembly, group)) == left


def test_a_group_without_trained_parameters_has_no_last_gradient():
    """4 frozen rows of 2 on 3 ranks are 6 padded ones, of which no matrix is reduced; a middle stage has an empty root."""
    assert group_of([], 1, 4) == ParamGroup(0, 0, 4, 0)
    frozen = ParamGroup(12, 8, 3, 0, frozen=8, frozen_padded=12)
    assert group_of([Param("w", (4, 2), group="frozen")], 1, 3) == frozen


def test_shards_of_what_torchao_gathers_in_fp8_are_whole():
    """Its weights stay in fp32, 4 B of each of 590,464 over two ranks; the cast is made as a shard is sent
    (pytorch/ao torchao/float8/fsdp_utils.py, fsdp_pre_all_gather): 163,840 of a layer's 164,096 in a byte.
    """
    on = machine(peak_flops={"bf16": FREE, "fp8": FREE}, sustained_flops={"bf16": FREE, "fp8": FREE})
    performance = {"precision": "fp8_tensorwise", "fp8_params": True}
    found = estimate(job("torchtitan", on=on, dp=2, performance=performance, fsdp={}))
    assert found.memory.stages[0].params_bytes == 4 * 590_464 / 2
    [sent] = [row.bytes for row in found.collectives if row.name == "block parameters"]
    assert sent == 163_840 + 2 * 256


def test_gradients_that_stay_are_there_in_forward():
    """Three layers on four ranks, one micro-batch, fp32 gradients: 4 / 4 bytes an element on each rank.

    At the peak, the backward of the second layer, freed ones exist of the third alone: 2 * L + R bytes less. Setting them to zero
    writes all once a step: with a memory of 1 GB/s, 3 * L + R ns.
    """
    held, seconds = {}, {}
    for stay in (False, True):
        plan = job(
            "fsdp2", model={"n_layers": 3}, seqlen=2, dp=4, fsdp={"gradients_stay": stay}, on=machine(memory=1e9)
        )
        answer = estimate(plan)
        held[stay] = answer.memory.stages[0].allocated_bytes
        assert answer.memory.stages[0].peak_op.startswith("backward of attn"), answer.memory.stages[0].peak_op
        seconds[stay] = answer.time.parts_s["optimizer"]
    assert held[True] - held[False] == 2 * LAYER + ROOT
    assert seconds[True] - seconds[False] == pytest.approx((3 * LAYER + ROOT) / 1e9, rel=1e-6)
