"""The peak of a whole step (forward, backward, Adam) against the storages alive in torch. Zero tolerance.

With Adam's states, the optimizer's temporaries, gradients as they appear, the cross entropy's three copies, replays, and FSDP2's
buffers. Left out, and known: under full recomputation a linear layer's bias gradient is summed after its input has gone (ours
is larger by that bias); under tensor parallelism DTensor holds copies of its own (there the bytes per layer are compared).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch_blocks import Kernels
from torch_fsdp import Fsdp
from torch_jobs import Layout, covering, held, torch_job

from steptime.answer.result import estimate
from steptime.base.rows import StageMemory
from steptime.model.model import Model

SHAPES = {
    "wide mlp": {
        "n_layers": 3,
        "hidden_sz": 64,
        "inter_sz": 512,
        "n_q_heads": 8,
        "n_kv_heads": 8,
        "head_dim": 8,
        "vocab_sz": 80,
    },
    "large vocabulary": {"n_layers": 1, "hidden_sz": 32, "inter_sz": 64, "n_q_heads": 4, "vocab_sz": 1000},
    "gqa": {
        "n_layers": 2,
        "hidden_sz": 48,
        "inter_sz": 160,
        "n_q_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "vocab_sz": 251,
    },
}
KINDS = {
    "llama": {},
    "tied qwen": {"qk_norm": True, "tie_embeddings": True},
    "relu mlp": {
        "glu": False,
        "activation": "relu",
        "norm": "layernorm",
        "dropout": 0.1,
        "learned_positions": True,
        "max_positions": 64,
    },
    "squared relu mlp": {"glu": False, "activation": "relu2", "norm": "layernorm"},
    "squared relu glu": {"activation": "relu2"},
    "olmo2": {"post_norms": True, "pre_norms": False, "qk_norm": True, "qk_norm_type": "per_layer"},
    "gpt neox": {"glu": False, "norm": "layernorm", "bias": True, "parallel_residual": True},
    "falcon": {"glu": False, "norm": "layernorm", "norm_bias": True, "parallel_residual": True, "shared_norm": True},
}
KERNELS = {
    "flash": Kernels(),
    "native loss": Kernels(loss="native", activation="fused"),
    "unfused": Kernels(attention="unfused"),
    "core attention recomputed": Kernels(attention="unfused", recompute="selective"),
    "fully recomputed": Kernels(recompute="full"),
    "fp32": Kernels(precision="fp32"),
}


def allocated(model: Model, kernels: Kernels, seqlen: int, layout: Layout) -> StageMemory:
    return estimate(torch_job(model, kernels, seqlen, layout)).memory.stages[0]


@pytest.mark.parametrize(("shape", "kind", "kernels", "micro_batches"), covering(SHAPES, KINDS, KERNELS, (1, 2)))
def test_one_device(shape, kind, kernels, micro_batches):
    model, layout = Model(**SHAPES[shape], **KINDS[kind]), Layout(micro_batches=micro_batches)
    torch_holds = held(model, KERNELS[kernels], 64, layout)
    ours = allocated(model, KERNELS[kernels], 64, layout)
    assert (ours.allocated_bytes, ours.optimizer_bytes) == (torch_holds.peak, torch_holds.optimizer), torch_holds.op


@pytest.mark.parametrize("bias", [False, True])
def test_biases(bias):
    """Linear biases, without recomputation."""
    model = Model(**SHAPES["wide mlp"], glu=False, norm="layernorm", bias=bias)
    for micro_batches in (1, 2):
        layout = Layout(micro_batches=micro_batches)
        assert allocated(model, Kernels(), 64, layout).allocated_bytes == held(model, Kernels(), 64, layout).peak


FSDP = {
    "default": Fsdp(),
    "no reshard": Fsdp(reshard_blocks=False),
    "bf16 reduction": Fsdp(reduce="bf16"),
    "bf16 parameters": Fsdp(params="bf16", reduce="bf16"),
}
FEWER = {
    "2 of 8": Layout(8, fsdp=Fsdp(reshard_blocks=2)),
    "4 of 8": Layout(8, micro_batches=2, fsdp=Fsdp(reshard_blocks=4)),
    "4 of 8, bf16 parameters": Layout(8, micro_batches=2, fsdp=Fsdp(reshard_blocks=4, params="bf16", reduce="bf16")),
    "2 of 8, no_sync": Layout(8, micro_batches=3, fsdp=Fsdp(reshard_blocks=2, no_sync=True)),
    "2 of 8, bf16 reduction, no_sync": Layout(
        8, micro_batches=2, fsdp=Fsdp(reshard_blocks=2, reduce="bf16", no_sync=True)
    ),
    "4 of 8, 2 replicas": Layout(16, replicas=2, fsdp=Fsdp(reshard_blocks=4)),
}


COLUMNS = {
    "default": Layout(8, fsdp=Fsdp(shard_dim=1)),
    "no reshard, 2 micro-batches": Layout(8, micro_batches=2, fsdp=Fsdp(reshard_blocks=False, shard_dim=1)),
    "bf16 reduction": Layout(8, fsdp=Fsdp(reduce="bf16", shard_dim=1)),
    "bf16 parameters": Layout(8, micro_batches=2, fsdp=Fsdp(params="bf16", reduce="bf16", shard_dim=1)),
    "2 replicas": Layout(16, replicas=2, fsdp=Fsdp(shard_dim=1)),
    "2 groups ahead": Layout(8, fsdp=Fsdp(prefetch=2, shard_dim=1)),
    "one group": Layout(8, fsdp=Fsdp(wrap="model", shard_dim=1)),
    "no_sync": Layout(8, micro_batches=3, fsdp=Fsdp(no_sync=True, shard_dim=1)),
    "no_sync, bf16 reduction": Layout(8, micro_batches=3, fsdp=Fsdp(no_sync=True, reduce="bf16", shard_dim=1)),
    "tp 2": Layout(8, tp=2, fsdp=Fsdp(shard_dim=1)),
}
EVEN = Model(n_layers=3, hidden_sz=64, inter_sz=160, n_q_heads=8, n_kv_heads=4, head_dim=16, vocab_sz=250)


@pytest.mark.parametrize("name", COLUMNS)
def test_matrices_cut_along_columns(name):
    """Shard(1) of every matrix: copies of gathered parameters, and of gradients before their reduction.

    In turn with long sequences and nothing recomputed, and with short ones and all of it.
    """
    kernels, seqlen = (("flash", 64), ("fully recomputed", 8))[list(COLUMNS).index(name) % 2]
    torch_holds = held(EVEN, KERNELS[kernels], seqlen, COLUMNS[name])
    ours = allocated(EVEN, KERNELS[kernels], seqlen, COLUMNS[name])
    assert (ours.allocated_bytes, ours.optimizer_bytes) == (torch_holds.peak, torch_holds.optimizer), torch_holds.op


LENGTHS = {"8": (1, 8), "two of 32": (2, 32), "128": (1, 128)}


@pytest.mark.parametrize(
    ("shape", "fsdp", "kernels", "length"), covering(SHAPES, FSDP, ("flash", "fully recomputed", "fp32"), LENGTHS)
)
def test_fsdp(shape, fsdp, kernels, length):
    """Short sequences peak in FSDP's buffers or the optimizer, long ones in a block or the loss. 251 rows are padded to 256."""
    fsdp, (micro_batches, seqlen) = FSDP[fsdp], LENGTHS[length]
    if fsdp.params == "bf16" and kernels == "fp32":
        fsdp = Fsdp(reshard_root=None, reduce="fp32", params="fp32", reshard_blocks=True)
    model, layout = Model(**SHAPES[shape]), Layout(dp=8, micro_batches=micro_batches, fsdp=fsdp)
    torch_holds = held(model, KERNELS[kernels], seqlen, layout)
    ours = allocated(model, KERNELS[kernels], seqlen, layout)
    assert (ours.allocated_bytes, ours.optimizer_bytes) == (torch_holds.peak, torch_holds.optimizer), torch_holds.op


OTHERS = {
    "one group": Layout(8, fsdp=Fsdp(wrap="model")),
    "one group, bf16 reduction": Layout(8, fsdp=Fsdp(wrap="model", reduce="bf16")),
    "2 replicas": Layout(8, replicas=2, fsdp=Fsdp()),
    "4 replicas, bf16 reduction": Layout(8, replicas=4, fsdp=Fsdp(reduce="bf16")),
    "2 replicas, 2 micro-batches": Layout(8, replicas=2, micro_batches=2, fsdp=Fsdp()),
    "2 replicas, 2 micro-batches, bf16 reduction": Layout(8, replicas=2, micro_batches=2, fsdp=Fsdp(reduce="bf16")),
}


@pytest.mark.parametrize(("shape", "layout", "seqlen"), covering(("wide mlp", "gqa"), OTHERS, (8, 128)))
def test_fsdp_in_one_group_and_with_replicas(shape, layout, seqlen):
    model, layout = Model(**SHAPES[shape]), OTHERS[layout]
    torch_holds = held(model, Kernels(), seqlen, layout)
    assert allocated(model, Kernels(), seqlen, layout).allocated_bytes == torch_holds.peak, torch_holds.op


@pytest.mark.parametrize(("shape", "layout", "length"), covering(("wide mlp", "gqa"), FEWER, (8, 32)))
def test_fsdp_resharded_to_fewer_ranks(shape, layout, length):
    model, layout = Model(**SHAPES[shape]), FEWER[layout]
    torch_holds = held(model, Kernels(), length, layout)
    assert allocated(model, Kernels(), length, layout).allocated_bytes == torch_holds.peak, torch_holds.op


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("wide mlp", Layout(8, fsdp=Fsdp())),
        ("gqa", Layout(8, replicas=2, fsdp=Fsdp(params="bf16", reduce="bf16"))),
        ("large vocabulary", Layout(4, tp=2, fsdp=Fsdp())),
    ],
    ids=["fp32", "bf16 of 2 replicas", "tensor parallel"],
)
def test_adam_over_dtensors_takes_what_it_takes_over_their_shards(shape, layout):
    """Which is how the other tests run it: as many bytes at the worst moment of its lists of temporaries, and as many states."""
    over, shards = (held(Model(**SHAPES[shape]), Kernels(), 8, layout, dtensors=dtensors) for dtensors in (True, False))
    assert over == shards


SECOND = {
    "two micro-batches": Layout(8, micro_batches=2, fsdp=Fsdp()),
    "2 of 8, 2 groups ahead": Layout(8, fsdp=Fsdp(reshard_blocks=2, prefetch=2)),
    "no_sync": Layout(8, micro_batches=2, fsdp=Fsdp(no_sync=True, reshard_blocks=False, reshard_after_backward=False)),
    "2 replicas, bf16": Layout(16, replicas=2, fsdp=Fsdp(params="bf16", reduce="bf16")),
    "tensor parallel": Layout(4, tp=2, fsdp=Fsdp()),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_step_holds_what_the_first_does(name):
    """FSDP2 comes into being in a first step, which is the one that the other tests watch. Every other case recomputes all."""
    kernels, layout = Kernels(recompute=("full", "none")[list(SECOND).index(name) % 2]), SECOND[name]
    first, second = (held(Model(**SHAPES["gqa"]), kernels, 8, layout, after=after) for after in (False, True))
    assert first == second


AHEAD = {
    "default": Fsdp(),
    "no reshard": Fsdp(reshard_blocks=False),
    "2 of 8": Fsdp(reshard_blocks=2),
    "bf16 parameters": Fsdp(params="bf16", reduce="bf16"),
    "no_sync": Fsdp(no_sync=True),
    "no_sync, bf16 reduction": Fsdp(no_sync=True, reduce="bf16"),
}


SEVERAL = [(option, (2, 9)[turn % 2], "none") for turn, option in enumerate(AHEAD)]
MORE = [("no_sync", 9, "none"), ("default", 2, "full"), ("2 of 8", 3, "full")]


@pytest.mark.parametrize(("option", "prefetch", "recompute"), [*SEVERAL, *MORE])
def test_fsdp_gathers_several_groups_ahead(option, prefetch, recompute):
    """Explicit prefetch over five blocks, forward and backward; also of more groups than there are.

    Left out, and known: under full recomputation so many that forward peaks; torch then holds one activation of a block more.
    """
    model, kernels = Model(**SHAPES["wide mlp"] | {"n_layers": 5}), Kernels(recompute=recompute)
    layout = Layout(8, micro_batches=2, fsdp=replace(AHEAD[option], prefetch=prefetch))
    torch_holds = held(model, kernels, 8, layout)
    assert allocated(model, kernels, 8, layout).allocated_bytes == torch_holds.peak, torch_holds.op


def test_each_group_ahead_takes_its_gathered_parameters():
    """By hand: 4 x 64 x 64 + 3 x 512 x 64 + 2 x 64 = 114,816 parameters of a block, gathered in bf16: 229,632 bytes each."""
    model = Model(**SHAPES["wide mlp"] | {"n_layers": 5})
    one, two, three = (
        allocated(model, Kernels(), 64, Layout(8, fsdp=Fsdp(prefetch=n))).allocated_bytes for n in (1, 2, 3)
    )
    assert (two - one, three - two) == (229_632, 229_632)


@pytest.mark.parametrize("seqlen", [8, 128])
@pytest.mark.parametrize("kind", ["olmo2", "gpt neox", "falcon"])
def test_fsdp_of_other_blocks(kind, seqlen):
    model, layout = Model(**SHAPES["wide mlp"], **KINDS[kind]), Layout(8, micro_batches=2, fsdp=Fsdp())
    torch_holds = held(model, Kernels(), seqlen, layout)
    assert allocated(model, Kernels(), seqlen, layout).allocated_bytes == torch_holds.peak, torch_holds.op


FEW = FSDP | {"one group": Fsdp(wrap="model")}


@pytest.mark.parametrize(("shape", "fsdp", "dp"), covering(("wide mlp", "large vocabulary"), FEW, (2, 3)))
def test_fsdp_over_few_ranks(shape, fsdp, dp):
    """A shard of a half or a third of the fp32 gradients is as large as the bf16 ones whose place it takes."""
    model, layout = Model(**SHAPES[shape]), Layout(dp, micro_batches=2, fsdp=FEW[fsdp])
    torch_holds = held(model, Kernels(), 8, layout)
    assert allocated(model, Kernels(), 8, layout).allocated_bytes == torch_holds.peak, torch_holds.op


@pytest.mark.parametrize("kernels", [Kernels(), Kernels(precision="fp32")], ids=["bf16", "fp32"])
def test_fsdp_with_tensor_parallelism_layer_by_layer(kernels):
    """What two more layers add: saved activations with the gathered inputs that torch keeps, and the sharded states."""
    layout = Layout(dp=4, tp=2, micro_batches=2, fsdp=Fsdp())
    peaks = []
    for layers in (2, 4):
        model = Model(**{**SHAPES["large vocabulary"], "n_layers": layers})
        torch_holds, ours = held(model, kernels, 64, layout), allocated(model, kernels, 64, layout)
        peaks.append((torch_holds.peak, ours.allocated_bytes))
    (torch_2, ours_2), (torch_4, ours_4) = peaks
    assert torch_4 - torch_2 == ours_4 - ours_2
