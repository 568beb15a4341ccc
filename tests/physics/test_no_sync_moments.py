"""Every moment of an FSDP2 backward whose last micro-batch alone reduces gradients, to the byte.

The others add theirs up whole, in the dtype of the reduction: here fp32, twice the bf16 gradients, so that a layer's are copied
(torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward; _fsdp_param.py, to_accumulated_grad_if_needed).
Three layers of 1,000 B saved and 1,900 B at most in backward. A group: gathered 10,000, unsharded 30,000, gradients 3,000, their
sums 6,000, the reduction's input 6,000, what takes the sums' place 700, its last gradient 70; the root's: 100,000, 300,000,
50,000, 100,000, 60,000, 7,000 and 200. Two tokens of 128: the embedding keeps 16 B of ids, x has 512 B.
"""

from __future__ import annotations

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.calls import Calls, calls_without_pipeline
from steptime.fsdp.groups import Buffers
from steptime.fsdp.memory_walk import Wrapped
from steptime.fsdp.no_sync_walk import Phase, WalkedChunk, backward, flat_backward
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories

BLOCK = Buffers(0.0, 10_000.0, 30_000.0, 3_000.0, 6_000.0, 400.0, 700.0, 50.0, last=70.0, sums=6_000.0)
ROOT = Buffers(0.0, 100_000.0, 300_000.0, 50_000.0, 60_000.0, 4_000.0, 7_000.0, 0.0, last=200.0, sums=100_000.0)
BASE = 300_000 + 2 * 131_200
"""Beside every layer's backward: the root's parameters, and the gradients of head and norm in bf16."""
SUMS = 100_000 + 3 * 6_000
EMBEDDING = 2 * 131_072 + 512
"""Its gradient in bf16, and the gradient that came in."""


def walked(phase: Phase, block: Buffers = BLOCK) -> Every:
    """The backward of a micro-batch; each layer's reduction leaves 400 B until it ends."""
    assembly = Assembly(job("fsdp2", seqlen=2, microbatches=3, dp=2, fsdp={"reduce_dtype": "fp32", "no_sync": True}))
    layers, found = [Wrapped(LAYER, [block], [0.0], 400.0, 70.0)] * 3, Every()
    memories = PartMemories(assembly, weight_grads_stay=True)
    backward(WalkedChunk(assembly, memories, ROOT, layers, layers), found, phase)
    return found


def test_the_first_micro_batch_makes_the_sums():
    """Each layer done leaves 6,000. While they are made its last gradient 70 is there, the next layer's flat buffer 10,000, the
    gradient that came in 512. At the end the root's: 100,000 and its last gradient 200 beside all layers' sums.
    """
    found = walked(Phase(summed=False, last=False))
    gather, run, add = BASE + 30_000 + 10_050 + 512, BASE + 30_000 + 900, BASE + 512 + 70
    assert found.of("backward of an all-gather") == [(3_016.0 - 1_000 * i, gather + 6_000 * i) for i in range(3)]
    assert found.of("backward of mlp") == [
        (3_016.0, run + 10_000),
        (2_016.0, run + 10_000 + 6_000),
        (1_016.0, run + 12_000),
    ]
    assert found.of("backward of a sum of gradients") == [
        (2_016.0, add + 10_000 + 6_000),
        (1_016.0, add + 10_000 + 12_000),
        (16.0, add + 18_000),
        (0.0, 18_000 + 100_000 + 200),
    ]
    assert found.of("backward of embedding") == [(16.0, BASE + 18_000 + EMBEDDING)]


def test_one_in_the_middle_adds_to_them():
    """All sums are there from the start, and nothing is made anew."""
    found = walked(Phase(summed=True, last=False))
    run = SUMS + BASE + 30_000 + 900
    assert found.of("backward of mlp") == [(3_016.0, run + 10_000), (2_016.0, run + 10_000), (1_016.0, run)]
    assert found.of("backward of embedding") == [(16.0, SUMS + BASE + EMBEDDING)]
    assert not found.of("backward of a sum of gradients")
    assert not found.of("backward of a reduce-scatter")


def test_the_last_one_reduces_them():
    """A layer's sums go into the input of its reduction, 6,000 each, which outlives one layer; 400 wait for the end. The sums are
    6,000 and what takes their place, 700 and its last gradient, 70 more as it is fp32, less. The root's 100,000 likewise.
    """
    found = walked(Phase(summed=True, last=True))
    run, reduce = BASE + 30_000 + 900, BASE + 512 + 6_000 + 6_000
    assert found.of("backward of mlp") == [
        (3_016.0, SUMS + run + 10_000),
        (2_016.0, SUMS - 6_000 + run + 10_000 + 6_000 + 400),
        (1_016.0, SUMS - 12_000 + run + 6_000 + 800),
    ]
    assert found.of("backward of a reduce-scatter") == [
        (2_016.0, SUMS - 6_000 + reduce + 10_000),
        (1_016.0, SUMS - 12_000 + reduce + 10_000 + 400),
        (16.0, SUMS - 18_000 + reduce + 800),
    ]
    assert found.of("backward of embedding") == [(16.0, 100_000 + BASE + 6_000 + 1_200 + EMBEDDING)]
    assert found.of("backward of the root's reduce-scatter") == [(0.0, 100_000 + 60_000 + 1_200)]


def test_what_takes_the_place_of_sums_may_be_larger():
    """With few ranks: 7,000 in place of sums of 6,000; the last gradient counts 70 there, in bf16, and is an fp32 sum of 140."""
    found = walked(Phase(summed=True, last=True), BLOCK._replace(reduced=7_000.0))
    first = found.of("backward of a reduce-scatter")[0]
    assert first == (2_016.0, SUMS - 6_000 + BASE + 512 + 10_000 + 7_070 + 6_000)


# --- FSDP 1 ---

FLAT = Buffers(5_000.0, 10_000.0, 0.0, 3_000.0, 20_000.0, 0.0, 400.0, 0.0, last=0.0, sums=10_000.0)
FLAT_ROOT = Buffers(50_000.0, 100_000.0, 0.0, 30_000.0, 200_000.0, 0.0, 4_000.0, 0.0, last=0.0, sums=100_000.0)
FLAT_BASE = 100_000 + 2 * 131_200
"""Beside every layer's backward: the root's flat parameter, and the gradients of head and norm in bf16."""
FLAT_SUMS = 100_000 + 3 * 10_000


def flat(phase: Phase, software: str = "fsdp2", recompute: str = "none", **said: object) -> Every:
    """The backward over three flat parameters: 10,000 gathered from a shard of 5,000, gradients 3,000, reduced in fp32 to 400."""
    fsdp = {"version": 1, "reduce_dtype": "fp32", "no_sync": True} | said
    performance = {"activation_checkpointing_type": recompute}
    assembly = Assembly(job(software, seqlen=2, microbatches=3, dp=2, performance=performance, fsdp=fsdp))
    layers, found = [Wrapped(LAYER, [FLAT], [0.0], 0.0, 0.0)] * 3, Every()
    flat_backward(assembly, PartMemories(assembly, weight_grads_stay=True), found, FLAT_ROOT, layers, phase)
    return found


def test_flat_sums_of_the_first_micro_batch():
    """Each layer done leaves its flat gradient, 10,000, and drops its parameter; two of these are there, at last one."""
    found = flat(Phase(summed=False, last=False))
    there = (20_000, 20_000, 10_000)
    assert found.of("backward of an all-gather")[0][1] == 100_000 + 10_000 + 5_000
    assert found.of("backward of an all-gather")[1:] == [
        (3_016.0 - 1_000 * i, FLAT_BASE + 10_000 * i + 20_000 + 5_000 + 512) for i in (0, 1)
    ]
    run, join = FLAT_BASE + 900, FLAT_BASE + 3_000 + 512 + 10_000
    assert found.of("backward of mlp") == [(3_016.0 - 1_000 * i, run + 10_000 * i + there[i]) for i in range(3)]
    assert found.of("backward of a flat gradient") == [
        (2_016.0 - 1_000 * i, join + 10_000 * i + there[i]) for i in range(3)
    ]
    assert not found.of("backward of a reduce-scatter")
    assert found.of("backward of embedding") == [(16.0, FLAT_BASE + 30_000 + EMBEDDING)]
    assert found.of("backward of the root's flat gradient") == [(0.0, 30_000 + 100_000 + 30_000 + 100_000)]


def test_flat_parameters_that_stay():
    """All three, 30,000, are there to the end, where each layer has left its sum."""
    found = flat(Phase(summed=False, last=False), reshard_after_forward=False)
    assert found.of("backward of embedding") == [(16.0, FLAT_BASE + 30_000 + 30_000 + EMBEDDING)]
    assert found.of("backward of the root's flat gradient") == [(0.0, 30_000 + 30_000 + 100_000 + 30_000 + 100_000)]


def test_flat_sums_of_one_in_the_middle():
    """All sums, 130,000, are there from the start to the end."""
    found, there = flat(Phase(summed=True, last=False)), (20_000, 20_000, 10_000)
    run = FLAT_SUMS + FLAT_BASE + 900
    assert found.of("backward of mlp") == [(3_016.0 - 1_000 * i, run + there[i]) for i in range(3)]
    assert found.of("backward of embedding") == [(16.0, FLAT_SUMS + FLAT_BASE + EMBEDDING)]


def test_flat_sums_are_reduced_by_the_last():
    """A layer's sum is cast, 20,000, and reduced to 400, and is gone then; the root's 30,000 of gradients lie beside its own."""
    found, there = flat(Phase(summed=True, last=True)), (20_000, 20_000, 10_000)
    join = FLAT_SUMS + FLAT_BASE + 3_000 + 512
    assert found.of("backward of a flat gradient") == [
        (2_016.0 - 1_000 * i, join - 10_000 * i + there[i] + 10_000) for i in range(3)
    ]
    reduce = join - 10_000 + 10_000 + 20_000 + 400 - 10_000  # the sum, its cast and what is left; the parameter is gone
    assert found.of("backward of a reduce-scatter") == [
        (2_016.0 - 1_000 * i, reduce - 10_000 * i + there[i]) for i in range(3)
    ]
    assert found.of("backward of embedding") == [(16.0, 100_000 + FLAT_BASE + EMBEDDING)]
    assert found.of("backward of the root's reduce-scatter") == [(0.0, 100_000 + 200_000 + 4_000 + 30_000)]


def test_flat_sums_under_reentrant_checkpoints():
    """Each layer gathers its own parameter, and its input, output and the gradient of that are held, 3 * 512."""
    found = flat(Phase(summed=True, last=False), "accelerate", "full")
    base, left = FLAT_SUMS + FLAT_BASE + 10_000, [2_016.0, 1_016.0, 16.0]
    assert found.of("backward of an all-gather")[1:] == [(1_000 + below, base + 5_000 + 512) for below in left]
    assert found.of("backward of a flat gradient") == [(below, base + 3_000 + 4 * 512 + 10_000) for below in left]


def test_flat_parameters_gathered_after_a_layer():
    """BACKWARD_POST: the next one comes beside the sums; a flat gradient that was added to one, 10,000, is gone by then."""
    for phase, gone in ((Phase(summed=False, last=False), 0), (Phase(summed=True, last=False), 10_000)):
        found = flat(phase, backward_prefetch="post")
        before = FLAT_SUMS if phase.summed else 0
        held = before + FLAT_BASE + 20_000 + 3_000 + 512 + 5_000 - gone
        grown = 0 if phase.summed else 10_000
        gathers = found.of("backward of an all-gather")[1:]
        assert gathers == [
            (3_016.0, before + FLAT_BASE + 10_000 + 5_000 + 512),
            (2_016.0, held),
            (1_016.0, held + grown),
        ]


@pytest.mark.parametrize(
    ("said", "layers", "root"),
    [
        ({"version": 1, "no_sync": False, "reshard_after_forward": False}, Calls(2 * 3, 2 * 3), Calls(3, 3)),
        ({"version": 1, "no_sync": True, "reshard_after_forward": False}, Calls(2, 2), Calls(1, 1)),
        ({"version": 1, "no_sync": True}, Calls(2 * 2 * 3, 2), Calls(3, 1)),
        ({"no_sync": True, "reshard_after_forward": False}, Calls(2 * 3, 2), Calls(3, 1)),
        ({"no_sync": True, "reshard_after_forward": False, "reshard_after_backward": False}, Calls(2, 2), Calls(1, 1)),
    ],
    ids=str,
)
def test_gathers_and_reductions_of_three_micro_batches(said, layers, root):
    """Two layers, each gathered once or, resharded, twice a micro-batch. FSDP 1 without synchronization keeps what forward keeps
    (_runtime_utils.py, _should_free_in_backward), FSDP2 what is said to stay after backward; the last one alone reduces.
    """
    found = calls_without_pipeline(Assembly(job("fsdp2", microbatches=3, dp=2, fsdp=said)))
    assert {kind: calls for (kind, _), calls in found.items()} == {"root": root, "block": layers}


@pytest.mark.parametrize(("software", "gathers"), [("accelerate", 3), ("fsdp2", 2)])
def test_a_layer_under_a_reentrant_checkpoint_is_gathered_three_times(software, gathers):
    """For its forward, for the forward that runs again, and for its backward, as it is freed in between (_runtime_utils.py)."""
    performance = {"activation_checkpointing_type": "full"}
    plan = job(software, microbatches=3, dp=2, performance=performance, fsdp={"version": 1, "no_sync": False})
    [layer] = [calls for (kind, _), calls in calls_without_pipeline(Assembly(plan)).items() if kind == "block"]
    assert layer == Calls(2 * 3 * gathers, 2 * 3)
