"""Experts whose activation, bias and casts run in the epilogues of their products."""

from __future__ import annotations

import pytest
from rates import RATES

from steptime.cost.compute import backward, forward
from steptime.model.dispatch import DispatchedTensors
from steptime.model.model import Model
from steptime.model.moe import experts
from steptime.model.ops import Gemm, Move, Op
from steptime.model.routing import Rows
from steptime.model.shard import Shard
from steptime.software.performance import load_software
from steptime.timing.part_times import launches

ROWS, HIDDEN, WIDTH = 1024, 64, 32
MODEL = Model.model_validate(
    {
        "n_layers": 1, "hidden_sz": HIDDEN, "inter_sz": WIDTH, "n_q_heads": 2, "vocab_sz": 128, "glu": True, "bias": True,
        "swiglu_limit": 7.0, "moe": {"n_experts": 4, "expert_inter_sz": WIDTH, "experts_per_token": 1},
    }
)  # fmt: skip


def ops(*, fused: bool, precision: str = "mxfp8", grouped: bool = True, stash: bool = False) -> dict[str, Op]:
    """The experts' ops, of 1,024 rows on one device."""
    software = load_software("megatron-core").replace(precision=precision)
    software = software.model_copy(
        update={
            "moe": software.moe.model_copy(update={"fused_mlp": fused, "grouped_gemm": grouped, "paged_stash": stash})
        }
    )
    shard = Shard(1.0, float(ROWS), float(ROWS), 1.0, False, 128.0, software)
    assert MODEL.moe is not None
    found, _ = experts(MODEL, Rows(MODEL.moe, HIDDEN, shard), DispatchedTensors("rows", "probs"))
    return {op.name: op for op in found}


def test_what_stands_between_the_products_has_no_kernels():
    """Of nine ops five stay: the rows' cast, two products, the activation, which moves nothing of its own, and the bias."""
    apart, fused = ops(fused=False), ops(fused=True)
    between = {"experts.act.clamp_gate", "experts.act.clamp_up", "experts.act.join", "experts.act.cast"}
    assert apart.keys() - fused.keys() == between
    act = fused["experts.act"]
    assert isinstance(act, Move)
    assert (act.forward_bytes, act.backward_bytes, act.kernels) == (0.0, 0.0, 0.0)


def test_gradients_between_the_products_are_cast_in_the_epilogue():
    """The first product's gradient comes cast; the second's is cast as before.

    1,024 x 64 read in bf16, two copies of 33 / 32 of a byte (a scale for each 32); gate and up of 32 are 64 wide together.
    """
    apart, fused = ([ops(fused=how)[f"experts.{which}"] for which in ("up", "down")] for how in (False, True))
    casts = [[op.cast_bytes for op in pair if isinstance(op, Gemm)] for pair in (apart, fused)]
    both = ROWS * HIDDEN * (2 + 2 * 33 / 32)
    assert casts == [[both, both], [0.0, both]]


def test_backward_reads_the_rows_gradient_for_their_bias():
    """Forward the bias is in the epilogue; backward one read of 1,024 x 64 in bf16 gives its gradient and the probabilities'."""
    bias = ops(fused=True)["experts.bias"]
    assert isinstance(bias, Move)
    assert (bias.forward_bytes, bias.backward_bytes) == (0.0, ROWS * HIDDEN * 2)
    assert bias.forward_by_element.elements == bias.backward_by_element.elements == 0


def test_what_is_kept_is_what_the_next_passes_read():
    """The first product's result, the probabilities, and the activation quantized by columns for the second's wgrad."""
    act = ops(fused=True)["experts.act"]
    assert act.saves == ("experts.up", "probs", "experts.act.out.columns")


@pytest.mark.parametrize(
    ("precision", "fused", "each"), [("mxfp8", False, 4), ("fp8_delayed", False, 1), ("mxfp8", True, 1)]
)
def test_each_experts_rows_are_cast_by_kernels_of_their_own(precision, fused, each):
    """Of four experts, forward and backward; one kernel casts all with delayed scaling, and all input rows of a fused MLP.

    The host launches such a loop as it does one kernel.
    """
    made = ops(precision=precision, fused=fused)
    cast, down = made["experts.cast"], made["experts.down"]
    assert isinstance(cast, Move)
    assert isinstance(down, Gemm)
    assert (cast.kernels, down.cast_kernels) == (each, each)
    assert forward(cast, RATES, {"rows": 0.0}).kernels == 1.0
    assert launches(cast) == 1.0


def test_what_is_kept_is_copied_into_pages_and_back():
    """Of 1,024 rows: 64 and 32 numbers by columns of 33 / 32 of a byte, gate and up of 2 * 32 in bf16, a probability in fp32.

    Read and written, of which other kernels lose half the time: 1,024 * (99 + 128 + 4) bytes either way. Nothing else changes.
    """
    plain, stashed = ops(fused=True), ops(fused=True, stash=True)
    assert stashed.keys() - plain.keys() == {"experts.stash"}
    stash = stashed["experts.stash"]
    assert isinstance(stash, Move)
    assert stash.forward_bytes == stash.backward_bytes == ROWS * ((HIDDEN + WIDTH) * 33 / 32 + 2 * WIDTH * 2 + 4)
    assert (stash.kernels, stash.saves, stash.allocates) == (6, (), ())


def test_layers_left_in_bf16_have_neither_fused_products_nor_a_stash():
    """What stands between the products of 1,024 rows has kernels, and the first product's input stays the rows themselves.

    The bias is still TransformerEngine's: its unfused grouped product computes both gradients in the same kernel.
    """
    found, apart = ops(fused=True, precision="bf16", stash=True), ops(fused=False, precision="bf16")
    assert found.keys() == apart.keys()
    assert found["experts.act"] == apart["experts.act"]
    assert found["experts.up"].saves == ("rows",)
    assert found["experts.bias"] == ops(fused=True)["experts.bias"]


@pytest.mark.parametrize(
    ("precision", "grouped", "copies"), [("mxfp8", True, 2), ("mxfp8", False, 0), ("bf16", True, 0)]
)
def test_rows_are_padded_for_quantized_products(precision, grouped, copies):
    """Before the first and after the second: a copy of 1,024 x 64 in bf16, read and written, forward and backward.

    Not counted for experts in turn; none in bf16.
    """
    made = ops(fused=False, precision=precision, grouped=grouped)
    pads = [made[name] for name in ("experts.pad", "experts.unpad") if name in made]
    sizes = {name: float(ROWS * HIDDEN * 2) for name in ("rows", "experts.out", "experts.biased")}
    moved = [(forward(op, RATES, sizes).bytes, sum(one.bytes for one in backward(op, RATES, sizes))) for op in pads]
    assert moved == [(2 * ROWS * HIDDEN * 2, 2 * ROWS * HIDDEN * 2)] * copies
