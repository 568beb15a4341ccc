"""Adapters under Megatron's tensor parallelism, worked out by hand: parameters on a rank, collectives, states."""

import pytest

from steptime import Job, estimate
from steptime.model.blocks import layers, load_software
from steptime.model.model import Model
from steptime.model.ops import Comm, Gemm, Move
from steptime.model.shard import Shard

SIZES = {"n_layers": 2, "hidden_sz": 64, "inter_sz": 256, "n_q_heads": 8, "n_kv_heads": 4, "vocab_sz": 1024}
TOKENS, TP, RANK = 128, 4, 8


def ops_of(split, *, sp, targets=None, tp=TP):
    lora = {"rank": RANK, "split": split} | ({"targets": targets} if targets else {})
    model = Model(**SIZES, lora=lora)
    shard = Shard(1.0, TOKENS, TOKENS, tp, sp, 1024, load_software("megatron-core"))
    return layers(model)[0][0].ops(shard)


@pytest.mark.parametrize(("split", "by_hand"), [("both", (384, 256, 1152, 640)), ("one", (768, 640, 1536, 1024))])
def test_parameters_of_a_rank(split, by_hand):
    """qkv is 64 -> (8 + 2 x 4) heads of 8 = 128, proj 64 -> 64, gate and up 64 -> 512, down 256 -> 64; rank 8, tp 4.

    both: every matrix is split, (64 + 128) 8 / 4 = 384 for qkv; (64 + 64) 8 / 4 = 256 for proj; (64 + 512) 8 / 4 = 1,152 for gate
    and up; (256 + 64) 8 / 4 = 640 for down. one: A of qkv is whole, 64 x 8 + 128 x 8 / 4 = 768; B of proj is whole, 64 x 8 / 4 +
    64 x 8 = 640; gate and up 64 x 8 + 512 x 8 / 4 = 1,536; down 256 x 8 / 4 + 64 x 8 = 1,024.
    """
    ops = ops_of(split, sp=False)
    names = ("attn.qkv", "attn.proj", "mlp.gate_up", "mlp.down")
    held = tuple(sum(p.local(TP) for op in ops if op.name.startswith(f"{n}.lora") for p in op.params) for n in names)
    assert held == by_hand


def test_products_are_those_of_a_rank():
    """By the split of both of qkv's: A makes 8 / 4 of the low columns of all 128 tokens, B 128 / 4 of the output's."""
    of = {op.name: (op.m, op.n, op.k) for op in ops_of("both", sp=True) if isinstance(op, Gemm)}
    assert of["attn.qkv.lora_a"] == (128, 2, 64)
    assert of["attn.qkv.lora_b"] == (128, 32, 8)
    assert of["mlp.down.lora_a"] == (128, 8, 64)
    assert of["mlp.down.lora_b"] == (128, 16, 8)


WHOLE = 128 * 64 * 2
"""Bytes of all tokens' hidden states in bf16."""
LOW = 128 * 8 * 2
"""Bytes of all tokens' low columns."""
COLLECTIVES = {  # forward and backward of the adapters of qkv and proj, then those of the frozen projections
    ("both", False): {
        "attn.qkv.lora_a.copy": (None, "all_reduce", WHOLE),
        "attn.qkv.lora_a.gather": ("all_gather", None, LOW),
        "attn.qkv.lora_b.copy": (None, "all_reduce", LOW),
        "attn.proj.lora_a.reduce": ("all_reduce", None, LOW),
        "attn.proj.lora_b.copy": (None, "all_reduce", LOW),
        "attn.proj.lora_b.gather": ("all_gather", None, WHOLE),
    },
    ("both", True): {
        "attn.qkv.lora_a.gather": ("all_gather", None, LOW),
        "attn.qkv.lora_b.copy": (None, "all_reduce", LOW),
        "attn.proj.lora_a.reduce": ("all_reduce", None, LOW),
        "attn.proj.lora_b.copy": (None, "all_reduce", LOW),
        "attn.proj.lora_b.gather": ("all_gather", None, WHOLE),
        "attn.proj.lora_b.scatter": (None, "all_gather", WHOLE),
    },
    ("one", False): {
        "attn.qkv.lora_b.copy": (None, "all_reduce", LOW),
        "attn.proj.lora_a.reduce": ("all_reduce", None, LOW),
    },
    ("one", True): {
        "attn.qkv.lora.gather": ("all_gather", "reduce_scatter", WHOLE),
        "attn.qkv.lora_b.copy": (None, "all_reduce", LOW),
        "attn.proj.lora_a.reduce": ("all_reduce", None, LOW),
        "attn.proj.lora_b.scatter": (None, "all_gather", WHOLE),
    },
}


@pytest.mark.parametrize("case", COLLECTIVES, ids=str)
def test_collectives(case):
    """From ParallelLinearAdapter (both) and LoraParallelLinear (one), read module by module.

    Both, column: ColumnParallelLinear(gather_output) all-gathers the low columns and without sp all-reduces its input's gradient;
    the second ColumnParallelLinear all-reduces its input's gradient, the low columns'. Row: RowParallelLinear all-reduces the low
    columns, ColumnParallelLinear(gather_output) all-gathers the output; with sp each rank keeps its tokens of it, and gathers
    their gradients. One: the whole matrix sends nothing.
    """
    split, sp = case
    found = {
        op.name: (op.kind, op.backward, op.bytes)
        for op in ops_of(split, sp=sp, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
        if isinstance(op, Comm) and ".lora" in op.name
    }
    assert found == COLLECTIVES[case]


@pytest.mark.parametrize("split", ["both", "one"])
@pytest.mark.parametrize("sp", [False, True])
def test_the_sum_is_after_the_projections_own_collective(split, sp):
    """A row-parallel projection's sum over ranks comes first; the adapter's output, whole, is added once."""
    ops = ops_of(split, sp=sp)
    at = {op.name: i for i, op in enumerate(ops)}
    left, add = ("attn.scatter" if sp else "attn.reduce"), ops[at["attn.proj.lora.add"]]
    assert at["attn.proj"] < at[left] < at["attn.proj.lora.add"]
    assert isinstance(add, Move)
    assert add.outputs[0].elements == TOKENS * 64 / (TP if sp else 1)
    made = {t.name: t.elements for op in ops for t in op.outputs}
    assert {made[name] for name in add.inputs} == {add.outputs[0].elements}


def test_a_frozen_projection_does_not_gather_its_input_again():
    """Without a weight gradient the input's shards are not needed; a split A keeps the gathered input for its own."""
    ops = {op.name: op for op in ops_of("both", sp=True)}
    assert not ops["attn.gather"].regather
    assert ops["attn.qkv"].saves == ()
    assert ops["attn.qkv.lora_a"].saves == ("attn.norm.out.gathered",)


def test_without_tp_the_split_changes_nothing():
    assert ops_of("both", sp=False, tp=1) == ops_of("one", sp=False, tp=1)


@pytest.mark.parametrize("split", ["both", "one"])
def test_states_and_step(split):
    """Two layers of 384 + 256 + 1,152 + 640 = 2,432 (both) or 768 + 640 + 1,536 + 1,024 = 3,968 (one) trained parameters a rank:
    4 bytes of gradient each; norms are frozen, so that nothing is summed over tp at the end of a step."""
    job = Job(
        model={**SIZES, "lora": {"rank": RANK, "split": split}},
        parallelism={"tp": TP, "pp": 1, "dp": 2, "sp": True, "zero_level": 0},
        data={"gbs": 4, "seqlen": TOKENS, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    found = estimate(job)
    assert found.memory.stages[0].gradients_bytes == 4 * 2 * (2432 if split == "both" else 3968)
    assert found.trained_params == 2 * RANK * ((64 + 128) + (64 + 64) + (64 + 512) + (256 + 64))
    assert not any(row.name == "norm gradients" and row.count_per_step for row in found.collectives)
    assert not any(row.name == "embedding.reduce.grad" for row in found.collectives)
    assert any(row.name == "attn.proj.lora_a.reduce" for row in found.collectives)
