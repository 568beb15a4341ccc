"""What comes back from the host, and the copies that updated parameters pass through, by hand."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.on_host import on_host, staging_bytes
from steptime.memory.part_memories import PartMemories
from steptime.memory.states import stage_states
from steptime.model.offload import large_tensors
from steptime.model.ops import Move, Op, Tensor
from steptime.timing.host_update import HostUpdate, host_update
from steptime.timing.optimizer import clip_bytes_per_param, optimizer_step
from steptime.timing.part_times import away_bytes, pricing
from steptime.timing.step_parts import host_seconds

LINK = machine(host_bytes_per_s=1.0)
HOST = Machine(
    **LINK.model_dump(exclude={"host"}),
    host={"memory_bytes": 1e15, "memory_bytes_per_s": 1.0, "core_bytes_per_s": 1.0},
)


def test_a_layer_that_is_back_lies_beside_those_that_send_nothing():
    """Layers send 70 B each. In a layer's own forward its 70 B are there; its backward has counted them. Beside the ends, which
    send nothing, lie 70 B of the next layer in both passes.
    """
    assembly = Assembly(job(on=LINK, performance={"offload_modules": ["attn_norm"]}))
    memories = PartMemories(assembly)
    (layer,) = assembly.kinds
    memories.embedding = PartMemory(1.0, Peak(10.0, "a"), Peak(20.0, "b"))
    memories.head = PartMemory(2.0, Peak(30.0, "c"), Peak(40.0, "d"))
    memories.selective = {layer: PartMemory(3.0, Peak(50.0, "e"), Peak(60.0, "f"), ahead=70.0)}
    found = [(n, part.forward.bytes, part.backward.bytes) for n, part in memories.parts(assembly.chunks[0])]
    assert found == [(1, 10.0 + 70, 20.0 + 70), (2, 50.0 + 70, 60.0), (1, 30.0 + 70, 40.0 + 70)]


@pytest.mark.parametrize(("owned", "elements"), [(1e6, 131_072), (1_000.0, 1_000)])
def test_an_updated_parameter_is_rounded_from_a_copy(owned, elements):
    """fp32, of one tensor at a time: the largest, embedding or head, or all that the device owns."""
    said = {"optimizer": 0.5}
    plan = job(on=HOST, dp=2, performance={"cpu_offload": said})
    held = Assembly(plan)
    assert staging_bytes(plan, held.counted_params(held.stages[0]), owned) == 4 * elements
    assert [of.update_bytes for of in stage_states(held)] == [4 * 131_072]
    masters = job(on=HOST, dp=2, performance={"cpu_offload": said | {"keep_masters": True}})
    assert staging_bytes(masters, held.counted_params(held.stages[0]), owned) == 0.0
    # FSDP's parameters go up before each gather, into the shard that is gathered
    sharded = job("fsdp2", on=HOST, dp=2, performance={"cpu_offload": {"optimizer": 1.0, "params": True}})
    assert staging_bytes(sharded, held.counted_params(held.stages[0]), owned) == 0.0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_seconds_that_a_device_waits_for_its_host(recompute):
    """Kernels take no time, so the device waits for each launch: 1 ms for each kernel of embedding, two layers and head, in both
    passes and, where layers run again, in their replays; three micro-batches.
    """
    on, performance = machine(kernels={"host_kernel_s": 1e-3}), {"activation_checkpointing_type": recompute}
    timing = estimate(job("torch", on=on, performance=performance, microbatches=3)).timing
    parts = timing.parts
    works = [(n, work) for n, part in parts.works(timing.assembly.chunks[0]) for work in parts.of[part][:2]]
    works += [(n, work) for n, _, work in parts.replays(timing.assembly.chunks[0])]
    assert len(works) == (7 if recompute == "full" else 6)
    launched = sum(n * work.kernels for n, work in works)
    assert sum(host_seconds(timing).values()) == pytest.approx(3 * launched * 1e-3, rel=1e-2)


@pytest.mark.parametrize(("software", "offload", "bytes_"), [
    ("megatron-core", {}, 12), ("megatron-core", {"optimizer": 0.5}, 12), ("fsdp2", {}, 12), ("fsdp2", {"params": True}, 0),
])  # fmt: skip
def test_who_clips_gradients(software, offload, bytes_):
    """Two reads and a write of fp32: on the device, except where FSDP's gradients are in host memory. Megatron-Core clips before
    it copies them.
    """
    layout = {"fsdp": {"reduce_dtype": "fp32"}} if software == "fsdp2" else {}
    plan = job(software, on=HOST, dp=2, performance={"cpu_offload": offload, "clip_grad": True}, **layout)
    assert clip_bytes_per_param(plan) == bytes_


@pytest.mark.parametrize("layers", [[1, 3], [3, 1]])
def test_tensors_of_the_stage_with_the_most_parameters(layers):
    """Three layers of 6 tensors (two norms, qkv, projection, gate with up, down), and the embedding or norm and head: copies to
    and from the host overlap tensor by tensor, so the two shorter of three legs count for one of 19 or 20,
    half of which a rank owns.
    """
    performance = {"cpu_offload": {"optimizer": 1.0, "overlap": True}}
    layout = {"pp": 2, "dp": 2, "layers_per_stage": layers, "zero_level": 1}
    plan = job(on=HOST, model={"n_layers": 4}, performance=performance, **layout)
    assembly = Assembly(plan)
    host = optimizer_step(assembly, pricing(plan).context).host
    tensors, owned = (20 / 2, 623_488 / 2) if layers[1] == 3 else (19 / 2, 623_360 / 2)
    legs = host.down_s, host.update_s, host.up_s
    assert host.down_s == pytest.approx(4 * owned)
    assert host.exposed_s == pytest.approx(max(legs) + (sum(legs) - max(legs)) / tensors, rel=1e-4)


@pytest.mark.parametrize(
    ("overlap", "device_s", "copied", "waited"),
    [
        (False, 0.0, 1_200, 22_400),  # in turn: 400 down, 22,400 on the host, 800 up
        (False, 22_000.0, 1_200, 400),  # the device's own update hides as much of the host's
        (False, 30_000.0, 1_200, 0),
        # the longest leg, and a quarter of the others: 22,700
        (True, 0.0, 300, 22_400),
        (True, 22_000.0, 300, 400),
        (True, 22_500.0, 200, 0),
        (True, 30_000.0, 0, 0),
    ],
)
def test_an_update_on_the_host_beside_that_of_the_device(overlap, device_s, copied, waited):
    """100 parameters in four tensors. 4 B down and up at 1 B/s, 6 B cast at 1.5 B/s, 28 B in host memory, of whose 1 B/s each of
    eight devices has an eighth.
    """
    performance = {"cpu_offload": {"optimizer": 1.0, "overlap": overlap}}
    plan = job(on=HOST, dp=2, performance=performance)
    found = host_update(plan, 100.0, 4.0, device_s, 1.5)
    assert found == pytest.approx((400, 22_400, 400 + 600 / 1.5, copied, waited))
    assert found.exposed_s == pytest.approx(copied + waited)
    assert found.hidden_s == pytest.approx(400 + 800 - copied)


def test_nothing_on_the_host_takes_no_time():
    """Neither legs nor a wait, with no share there or on a machine whose host is unknown."""
    assert host_update(job(on=HOST, dp=2), 100.0, 4.0, 0.0, 1.0) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert HostUpdate() == (0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("performance", "seconds"),
    [
        ({"activation_offload": 1.0}, 2 * 2 * 2 * 32_864),
        ({"cpu_offload": {"params": True}}, 4 * 295_232),
        ({"activation_offload": 1.0, "cpu_offload": {"params": True}}, 2 * 2 * 2 * 32_864 + 4 * 295_232),
    ],
)
def test_copies_of_activations_and_of_gradients_add_up(performance, seconds):
    """At 1 B/s, beside free compute: what two layers keep goes and comes back in two micro-batches; after them the fp32 gradients
    of a rank's half of the parameters go.

    A layer keeps 16 tensors of 2,048 B: its input and the residual, both normed, q, k, v and attention's output, and twice as
    wide gate, up, SiLU's output and the product; 32 B each of two rstd and of attention's sums.
    """
    found = estimate(job("fsdp2", on=HOST, dp=2, microbatches=2, performance=performance, fsdp={})).time
    assert found.parts_s["host_comm"] == pytest.approx(seconds)


@pytest.mark.parametrize(("share", "whole", "bytes_"), [
    (0.25, False, 32_864 / 4), (0.25, True, 2_048 / 4), (1.0, False, 32_864), (1.0, True, 2_048), (None, False, 0),
])  # fmt: skip
def test_bytes_that_a_layer_sends(share, whole, bytes_):
    """A share of what it keeps, as above, or of its input where all of it runs again; the head sends nothing."""
    performance = {"activation_offload": share} if share else {}
    assembly = Assembly(job("fsdp2", on=LINK, performance=performance))
    (layer,) = assembly.kinds
    assert away_bytes(assembly, layer, [], whole=whole) == bytes_
    assert away_bytes(assembly, assembly.head, [], whole=whole) == 0


@pytest.mark.parametrize(("clip", "bytes_"), [(False, 28), (True, 40)])
def test_the_host_clips_where_the_plan_clips(clip, bytes_):
    """torch's fused AdamW on fp32: parameter and moments read and written, 2 * 4 + 2 * 8, the gradient read, 4. Clipping reads
    the gradient, reads and writes it: 12. The host holds 4 + 4 + 8; a parameter of 4 goes up, its gradient of 4 comes down beside
    the collectives, and a further micro-batch's is added: two read, one written. Nothing moves after backward or the update.
    """
    plan = job("fsdp2", on=HOST, dp=2, performance={"cpu_offload": {"params": True}, "clip_grad": clip}, fsdp={})
    assert on_host(plan) == (16, bytes_, 0, 0, 0, 0, 4, 4, 12, 0, 0)


def test_tensors_large_enough_to_be_sent():
    """A norm reads x of 2^19 elements and ids that no op of the layer makes, and writes y of 2^20, the least that is sent
    (megatron/core/pipeline_parallel/fine_grained_activation_offload.py, min_offloaded_tensor_size).
    """
    ops: list[Op] = [
        Move("norm", ("x", "ids"), (Tensor("y", 2.0**20, 2.0),), ("x",), role="norm"),
        Move("core", ("y",), (Tensor("z", 2.0**21, 2.0),), ("y",), role="core_attn"),
    ]
    assert large_tensors(ops, Tensor("x", 2.0**19, 2.0), {"attn_norm"}) == [False, True]


def test_legs_of_a_hosts_update_that_hide_are_in_the_table():
    """295,232 parameters, half of all, go down and come up in 4 B at 1 B/s. Most of both legs hides beside the host's work
    (`host_update`): what shows and what hides are all 2,361,856 s.
    """
    performance = {"cpu_offload": {"optimizer": 1.0, "overlap": True}}
    found = estimate(job(on=HOST, dp=2, performance=performance))
    legs = 2_361_856
    assert found.time.parts_s["host_comm"] + found.time.hidden_s["host_comm"] == pytest.approx(legs)
    assert found.time.hidden_s["host_comm"] > legs / 2
