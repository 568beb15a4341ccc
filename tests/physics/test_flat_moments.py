"""FSDP 1 by hand: every moment of the walk over flat parameters, which compute reads as they were gathered.

Three layers of 1,000 B saved, 1,700 B at most in forward and 1,900 B in backward. Each flat parameter: its shard in the gathered
dtype 5,000 (sent), gathered 10,000, gradients 3,000, reduced 400; the root's: 50,000, 100,000, 30,000 and 4,000. fp32 gradients
are a copy of 20,000 (root 200,000) that is reduced. Two tokens of 128: embedding keeps 16 B of ids, x has 512 B.
Source: torch 2.13, torch/distributed/fsdp/_runtime_utils.py: _pre_backward_hook, _post_backward_hook, _reduce_grad.
"""

from __future__ import annotations

import pytest
from physics_jobs import job
from walked_moments import LAYER, Every

from steptime.fsdp.flat_walk import flat_backward, flat_forward, gathered_before
from steptime.fsdp.groups import Buffers, flat_group
from steptime.fsdp.memory_walk import Wrapped
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories
from steptime.model.ops import Param

FLAT = Buffers(5_000.0, 10_000.0, 0.0, 3_000.0, 20_000.0, 0.0, 400.0, 0.0, last=0.0, sums=0.0)
ROOT = Buffers(50_000.0, 100_000.0, 0.0, 30_000.0, 200_000.0, 0.0, 4_000.0, 0.0, last=0.0, sums=0.0)
ENDS = 2 * 131_200
"""Gradients of head and final norm in bf16, which wait for the root's reduction."""


def walked(software: str = "fsdp2", recompute: str = "none", **fsdp: object) -> tuple[Every, Every]:
    layout = {"dp": 2, "fsdp": {"version": 1, "reduce_dtype": "fp32"} | fsdp}
    performance = {"activation_checkpointing_type": recompute}
    assembly = Assembly(job(software, seqlen=2, microbatches=2, performance=performance, **layout))
    memories = PartMemories(assembly, weight_grads_stay=True)
    layers = [Wrapped(LAYER, [FLAT], [0.0], 0.0, 0.0)] * 3
    there, back = Every(), Every()
    flat_forward(assembly, memories, there, ROOT, layers)
    flat_backward(assembly, memories, back, ROOT, layers)
    return there, back


def test_a_layers_flat_parameter_goes_after_it():
    """Gather: the root's 100,000, its own shard 5,000 and 10,000, the input 512. In a layer: 10,000 and 1,700 - 1,000."""
    there, _ = walked()
    gather, run = 100_000 + 5_000 + 10_000 + 512, 100_000 + 10_000 + 700
    root = (0.0, 100_000 + 50_000)
    assert there.of("forward of an all-gather")[:4] == [root, *((16.0 + 1_000 * i, gather) for i in range(3))]
    assert there.of("forward of mlp") == [(1_016.0 + 1_000 * i, run) for i in range(3)]


def test_without_resharding_all_stay():
    """Each layer finds 10,000 of each one before it; the backward gathers nothing and drops 10,000 after each layer."""
    there, back = walked(reshard_after_forward=False)
    assert there.of("forward of mlp") == [(1_016.0 + 1_000 * i, 100_000 + 10_000 * (i + 1) + 700) for i in range(3)]
    assert [held for _, held in back.of("backward of mlp")] == [100_000 + ENDS + 10_000 * i + 900 for i in (3, 2, 1)]


def test_the_next_flat_parameter_comes_before_a_layers_backward():
    """First the last layer's: 10,000 and its shard 5,000 beside the root. Then two at a time, 20,000, the coming one's shard and
    the gradient that came in, 512; the first layer has none before it. A layer's gradients are copied into one flat gradient of
    10,000 beside its 3,000, then into fp32, 20,000, and reduced into 400, its own parameter gone.
    """
    _, back = walked()
    base, first = 100_000 + ENDS, back.of("backward of an all-gather")[0]
    gathers = back.of("backward of an all-gather")[1:]
    assert first[1] == 100_000 + 10_000 + 5_000
    assert gathers == [(3_016.0, base + 20_000 + 5_000 + 512), (2_016.0, base + 20_000 + 5_000 + 512)]
    there = (20_000, 20_000, 10_000)
    assert back.of("backward of mlp") == [(3_016.0 - 1_000 * i, base + there[i] + 900) for i in range(3)]
    left = [2_016.0, 1_016.0, 16.0]
    flat = [held + 3_000 + 10_000 + 512 for held in there]
    assert back.of("backward of a flat gradient") == [(left[i], base + flat[i]) for i in range(3)]
    reduce = [held + 10_000 + 20_000 + 400 + 512 - 10_000 for held in there]
    assert back.of("backward of a reduce-scatter") == [(left[i], base + reduce[i]) for i in range(3)]


def test_the_next_flat_parameter_may_come_after_a_layers_backward():
    """BACKWARD_POST: the last layer gathers its own, 10,000, from a shard of 5,000. Each layer that is done gathers the next
    one's beside its flat gradient, before it reduces; a reduction holds 10,000, 20,000 and 400 beside the next one's 10,000.
    """
    _, back = walked(backward_prefetch="post")
    base = 100_000 + ENDS
    assert back.of("backward of an all-gather") == [
        (back.of("backward of an all-gather")[0][0], 100_000),
        (3_016.0, base + 10_000 + 5_000 + 512),
        (2_016.0, base + 10_000 + 512 + 10_000 + 5_000),
        (1_016.0, base + 10_000 + 512 + 10_000 + 5_000),
    ]
    assert back.of("backward of mlp") == [(3_016.0 - 1_000 * i, base + 10_000 + 900) for i in range(3)]
    reduce = base + 512 + 30_400
    assert back.of("backward of a reduce-scatter") == [
        (2_016.0, reduce + 10_000),
        (1_016.0, reduce + 10_000),
        (16.0, reduce),
    ]


@pytest.mark.parametrize("prefetch", ["pre", "post"])
def test_under_a_reentrant_checkpoint_each_layer_gathers_its_own(prefetch):
    """Whatever is said of the prefetch. Until its gradient is reduced the layer's input, output and the gradient of that are
    there too, 3 * 512 (torch/utils/checkpoint.py, CheckpointFunction.backward).
    """
    _, back = walked("accelerate", "full", backward_prefetch=prefetch)
    base, left = 100_000 + ENDS + 10_000, [2_016.0, 1_016.0, 16.0]
    gathers = back.of("backward of an all-gather")[1:]
    assert gathers == [(1_000 + below, base + 5_000 + 512) for below in left]
    assert back.of("backward of mlp") == [(1_000 + below, base + 900) for below in left]
    assert back.of("backward of a flat gradient") == [(below, base + 4 * 512 + 3_000 + 10_000) for below in left]
    assert back.of("backward of a reduce-scatter") == [(below, base + 4 * 512 + 20_400) for below in left]


def test_the_roots_gradient_comes_last():
    """Embedding: its gradient 2 * 131,072 and the one that came in, 512. The root's flat gradient: gathered, its gradients 30,000
    and the flat one of 100,000; its reduction: 100,000, the fp32 copy 200,000 and the outcome 4,000.
    """
    _, back = walked()
    assert back.of("backward of embedding") == [(16.0, 100_000 + ENDS + 2 * 131_072 + 512)]
    assert back.of("backward of the root's flat gradient") == [(0.0, 100_000 + 30_000 + 100_000)]
    assert back.of("backward of the root's reduce-scatter") == [(0.0, 100_000 + 200_000 + 4_000)]


@pytest.mark.parametrize(
    ("said", "gathers", "there", "reduced"),
    [
        ({}, [1, 2, 2], [2, 2, 1], [1, 1, 0]),  # beside a layer's own the next one's, with which its reduction is alone
        ({"backward_prefetch": "post"}, [0, 1, 2, 2], [1, 1, 1], [1, 1, 0]),  # the next one's once it is done
        ({"reshard_after_forward": False}, [3], [3, 2, 1], [2, 1, 0]),
    ],
)
def test_what_flat_parameters_take_of_the_gathers_pool(said, gathers, there, reduced):
    """The root's 100,000 and 10,000 for each layer whose flat parameter exists; a reduction has dropped its own layer's. In
    forward one layer's at a time, or all so far.
    """
    before, back = walked(**said)
    ahead = [1, 2, 3] if said.get("reshard_after_forward") is False else [1, 1, 1]
    for walk, op, layers in (
        (before, "forward of an all-gather", [0, *ahead]),
        (before, "forward of mlp", ahead),
        (back, "backward of an all-gather", gathers),
        (back, "backward of mlp", there),
        (back, "backward of a flat gradient", there),
        (back, "backward of a reduce-scatter", reduced),
        (back, "backward of embedding", [0]),
        (back, "backward of the root's flat gradient", [0]),
    ):
        assert walk.gathered_in(op) == [100_000 + 10_000 * n for n in layers], op


@pytest.mark.parametrize(("original", "padded"), [(True, 16), (False, 8)])
def test_a_flat_parameter_of_two_tensors(original, padded):
    """3 and 5 elements in bf16 on 4 ranks: the second starts at 8, a multiple of 16 bytes, and ends at 13, which 16 rounds to
    whole shards. Without original parameters it starts at 3, and all 8 are 2 for each rank (_init_flat_param_and_metadata).
    """
    assembly = Assembly(job("fsdp2", dp=4, fsdp={"version": 1, "original_params": original}))
    flat = flat_group(assembly, [Param("a", (3,)), Param("b", (5,))], 1)
    assert (flat.padded, flat.elements, flat.ranks) == (padded, 8, 4)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, [None, 0, 1]),  # the next one's; before the first there is none
        ({"prefetch": 0}, [0, 1, 2]),  # each its own
        ({"backward_prefetch": "post"}, [None, None, 2]),  # the last one alone gathers for itself
        ({"reshard_after_forward": False}, [None] * 3),
    ],
)
def test_which_parameter_is_gathered_before_a_backward(said, expected):
    """Of layers 0, 1 and 2 (_runtime_utils.py, _prefetch_handle)."""
    assembly = Assembly(job("fsdp2", dp=2, fsdp={"version": 1} | said))
    layers = [Wrapped(LAYER, [FLAT._replace(gathered=float(i))], [0.0], 0.0, 0.0) for i in range(3)]
    found = [gathered_before(assembly, layers, i) for i in range(3)]
    assert [None if of is None else of.gathered for of in found] == expected
