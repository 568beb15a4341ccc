"""Terms of torchao's grouped products of experts that a whole job hides: rates, short-lived operands, rows padded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from physics_jobs import job, machine

from steptime.base.config import ConfigError
from steptime.cost.expert_rates import experts_flops
from steptime.cost.product_rates import asymptote_of, grouped_rate, wgrad_share
from steptime.cost.rates import rates, sustained_flops
from steptime.hardware.machine import Accelerator
from steptime.job.assembly import Assembly
from steptime.model.grouped_casts import low_precision
from steptime.model.ops import Gemm, Param
from steptime.model.padded_groups import padded, without_padding
from steptime.model.routing import Rows
from steptime.software.efficiency import Efficiency, using
from steptime.software.precision import RECIPES

MOE = {"n_experts": 4, "experts_per_token": 2, "expert_inter_sz": 256}
SHARES = Efficiency({"toy": {"mxfp8": 0.5, "fp8": 0.25}, "twin": {"mxfp8": 0.75}}, 1.0, 1.0, {})


def device(peaks: dict[str, float], **figures: Any) -> Accelerator:
    """A device with these dense peaks, all of which a long product reaches unless `figures` say otherwise."""
    said: dict[str, Any] = {"peak_flops": peaks, "sustained_flops": peaks, "compute_capability": 10.0} | figures
    return machine(**({"microscaling": True} | said)).accelerator


def expert_rate(precision: str, of: Accelerator, *, measured: bool = False) -> float:
    """`measured`: the profile's constants come from the device itself."""
    timing = SimpleNamespace(measured=measured)
    with using(SHARES):
        return experts_flops(
            of, SimpleNamespace(timing=timing, moe=SimpleNamespace(grouped_precision=precision)), sustained_flops
        )


PEAKS = {"bf16": 100.0, "fp8": 1000.0}


@pytest.mark.parametrize(
    ("precision", "peaks", "figures", "rate"),
    [
        ("none", PEAKS, {}, 0.0),
        ("mxfp8_torchao", PEAKS, {}, 594 * 0.5),
        ("mxfp8_torchao", PEAKS | {"mxfp8": 900.0}, {}, 0.594 * 900 * 0.5),  # the rate of its own comes first
        ("mxfp8_torchao", PEAKS, {"sustained_flops": {"fp8": 400.0}}, 400 * 0.5),  # less than the kernel reaches
        ("mxfp8_torchao", PEAKS, {"same_chip_as": "twin"}, 594 * 0.75),
        ("mxfp8_torchao", PEAKS, {"sustained_flops": {"bf16": 1.0}, "best_flops": {"fp8": 500.0}}, 0.8 * 500 * 0.5),
        ("fp8_rowwise", PEAKS, {}, 1000 * 0.25),
        ("fp8_rowwise", PEAKS, {"sustained_flops": {"fp8": 1200.0}}, 1000 * 0.25),
    ],
)
def test_rate_of_a_long_product(precision, peaks, figures, rate):
    """torch._scaled_grouped_mm reaches 0.594 of the fp8 peak in MXFP8; a step reaches a half of it on this device, by rows a
    quarter of the dense rate, on its twin three quarters.
    """
    assert expert_rate(precision, device(peaks, **figures)) == pytest.approx(rate)


@pytest.mark.parametrize(("precision", "rate"), [("mxfp8_torchao", 594.0), ("fp8_rowwise", 1000.0)])
def test_shares_of_other_steps_do_not_count_where_all_was_measured(precision, rate):
    assert expert_rate(precision, device(PEAKS), measured=True) == pytest.approx(rate)


def test_only_torchaos_experts_have_rates_of_their_own():
    """Other grouped products take a share of the asymptote of their operands."""
    plan = job("torchtitan")
    r = rates(plan.machine.accelerator, plan.software)._replace(
        gemm_flops=3.0, recipe_flops=5.0, experts_flops=7.0, grouped_share=0.5
    )
    fp8 = RECIPES["fp8_rowwise"]
    found = {}
    for name, recipe in {"bf16": None, "fp8": fp8, "torchao": fp8._replace(of_experts=True)}.items():
        grouped, alone = (
            Gemm("e", params=(Param("w", (1, 1, 4), n_experts=4),), m=1, n=1, k=1, grouped=together, recipe=recipe)
            for together in (True, False)
        )
        found[name] = (asymptote_of(grouped, r), grouped_rate(grouped, r), grouped_rate(alone, r))
    assert found == {"bf16": (3.0, 0.5, 1.0), "fp8": (5.0, 0.5, 1.0), "torchao": (7.0, 1.0, 1.0)}


def test_rate_of_the_product_for_a_weights_gradient():
    """Divided by that of the others: `usual` of a weight, 0.72 of torchao's MXFP8, 1 of two tensors that are no weights."""
    own = RECIPES["mxfp8"]._replace(wgrad_rate=0.72)
    for said, share in (({}, 0.95), ({"recipe": RECIPES["mxfp8"]}, 0.95), ({"recipe": own}, 0.72)):
        assert wgrad_share(Gemm("p", params=(Param("w", (4, 4)),), m=1, n=4, k=4, **said), 0.95) == share
    assert wgrad_share(Gemm("scores", m=1, n=4, k=4), 0.95) == 1.0


def shard(precision: str, *, any_layout: bool = True) -> Any:
    said = SimpleNamespace(name="torchtitan", moe=SimpleNamespace(grouped_precision=precision), any_layout=any_layout)
    return SimpleNamespace(software=said)


@pytest.mark.parametrize(
    ("precision", "kernels", "held"),
    [
        ("mxfp8_torchao", (3, 9), 1.03125 * (4_194_304 + 2_097_152)),
        ("mxfp8_torchao_wgrad_hp", (3, 2), 1.03125 * (4_194_304 + 524_288)),
        ("fp8_rowwise", (4, 8), 4_194_304 + 2_097_152),
    ],
)
def test_kernels_of_casts_and_what_they_leave_for_a_moment(precision, kernels, held):
    """8,192 rows of 512 values, 4,194,304, by 4 experts' weights, 524,288, to 2,097,152 of 256 each.

    Where rows are many the product for the weights' gradients holds most, of gradient and input by columns; in bf16 it casts
    nothing, and the forward holds most, of input and weight. Casts: of input and weight, the layout of its scales or two
    reciprocals; backward as `software.grouped_precision` lists them.
    """
    found = low_precision(shard(precision), 4, 8_192, 512, 256)
    assert (found["forward_cast"].kernels, found["cast_kernels"]) == kernels
    assert found["temp_bytes"] == held


@pytest.mark.parametrize(("any_layout", "rate"), [(False, 0.75), (True, 0.5)])
def test_products_by_rows_are_slower_on_blackwell(any_layout, rate):
    """Rate over that with one scale per tensor: Hopper's products take one layout only (pytorch/ao workflows/training.md)."""
    recipe = low_precision(shard("fp8_rowwise", any_layout=any_layout), 4, 8_192, 512, 256)["recipe"]
    assert (recipe.forward_rate, recipe.backward_rate) == (rate, rate)


def rows(precision: str) -> Rows:
    """16 rows of 128 values: 8 tokens, each to 2 of 4 experts on one device."""
    on = machine(compute_capability=10.0, microscaling=True, peak_flops=PEAKS, sustained_flops=PEAKS)
    of = Assembly(job("torchtitan", on=on, model={"moe": MOE}, performance={"moe": {"grouped_precision": precision}}))
    return Rows(of.job.model.moe, 128, of.shard)


def test_rows_are_padded_and_put_back():
    """By rows to multiples of 16: room for 16 + 4 * 16 = 80 rows, each with its place in 8 B. Rows are read and written in bf16
    by an index and its fill; so are their gradients.
    """
    of = rows("fp8_rowwise")
    ((pad,), name), ((unpad,), back) = padded(of, "x"), without_padding(of, "y")
    (out,), (places,), (alone,) = pad.outputs, pad.stats, unpad.outputs
    assert (out.name, out.bytes, alone.name, alone.bytes) == (name, 80 * 128 * 2, back, 16 * 128 * 2)
    assert (places.elements, places.bytes, unpad.stats) == (80, 80 * 8, ())
    assert pad.saves == unpad.saves == (places.name,)
    assert (pad.inputs, unpad.inputs) == (("x",), ("y",))
    for op in (pad, unpad):
        moved = 2 * op.outputs[0].bytes
        assert (op.forward_bytes, op.backward_bytes, op.kernels, op.params) == (moved, moved, 2, ())


def test_rows_in_the_compute_dtype_are_not_padded():
    of = rows("none")
    assert padded(of, "x") == without_padding(of, "x") == ([], "x")


@pytest.mark.parametrize("precision", ["mxfp8_torchao", "fp8_rowwise"])
def test_a_device_without_a_rate_in_fp8_is_refused(precision):
    on = machine(compute_capability=10.0, microscaling=True)
    with pytest.raises(ConfigError) as caught:
        job("torchtitan", on=on, model={"moe": MOE}, performance={"moe": {"grouped_precision": precision}})
    assert str(caught.value) == (
        "performance.moe.grouped_precision: toy states no rate of products in fp8 (peak_flops.fp8); add it, or use none"
    )
