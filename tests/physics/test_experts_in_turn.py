"""Experts that are not grouped: an MLP of its own for each, whose kernels run one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rates import RATES

from steptime.cost.compute import backward, forward, parameter_gradients
from steptime.model.dispatch import DispatchedTensors
from steptime.model.model import Model
from steptime.model.moe import experts
from steptime.model.ops import Gemm, Move, Op, Param
from steptime.model.routing import Rows
from steptime.model.shard import Shard
from steptime.model.torch_experts import grouped_experts
from steptime.software.performance import load_software
from steptime.timing.part_times import launches

ROWS, HIDDEN, WIDTH, EXPERTS = 1024, 64, 32, 4
MODEL = Model.model_validate(
    {
        "n_layers": 1, "hidden_sz": HIDDEN, "inter_sz": WIDTH, "n_q_heads": 2, "vocab_sz": 128, "glu": True,
        "moe": {"n_experts": EXPERTS, "expert_inter_sz": WIDTH, "experts_per_token": 1},
    }
)  # fmt: skip
WEIGHT = (Param("w", (EXPERTS, 1024, 1024), n_experts=EXPERTS),)


def ops(
    *,
    grouped: bool,
    precision: str = "bf16",
    profile: str = "megatron-core",
    ep: float = 1.0,
    bias: bool = False,
    router: str = "",
) -> dict[str, Op]:
    """The experts' ops, of 1,024 rows on one device."""
    software = load_software(profile).replace(precision=precision)
    changes = {"grouped_gemm": grouped} | ({"router_dtype": router} if router else {})
    software = software.model_copy(update={"moe": software.moe.model_copy(update=changes)})
    shard = Shard(1.0, float(ROWS), float(ROWS), 1.0, False, 128.0, software, ep=ep)
    assert MODEL.moe is not None
    rows = Rows(MODEL.moe, HIDDEN, shard)
    made = experts(MODEL.model_copy(update={"bias": bias}), rows, DispatchedTensors("rows", "probs"))
    found, _ = made if profile == "megatron-core" else grouped_experts(MODEL, rows, 1, "rows")
    return {op.name: op for op in found}


def product(*, grouped: bool) -> Gemm:
    return Gemm("up", m=1024.0, n=1024.0, k=1024.0, count=float(EXPERTS), params=WEIGHT, grouped=grouped)


@pytest.mark.parametrize(("grouped", "waves", "kernels"), [(True, 1.28, 1), (False, 0.32, 4)])
def test_each_product_fills_the_processors_by_itself(grouped, waves, kernels):
    """Four products of 8 x 4 tiles on 100 SMs: 1.28 waves of 2 together, or .32 of 1 each; and a fixed time of 4 us each.

    Four times 2 * 1024^3 FLOP at 200 TFLOP/s, depth 1024 / (1024 + 200), rows 1024 / (1024 + 120), and .75 + .25 * the share of
    the waves that is filled: .64, or .32. Both are slower one after the other.
    """
    done = forward(product(grouped=grouped), RATES, {})
    filled = 0.75 + 0.25 * waves / -(-waves // 1)
    compute_s = 4 * 2 * 1024**3 / (200e12 * 1024 / 1224 * 1024 / 1144 * filled)
    assert done.compute_s == pytest.approx(compute_s)
    assert done.time_s == pytest.approx(compute_s + kernels * 4e-6)
    assert (done.kernels, launches(product(grouped=grouped))) == (kernels, 1 + 3 / 4 if grouped else 4)
    assert [one.kernels for one in backward(product(grouped=grouped), RATES, {})] == [kernels, kernels]


def test_gradients_are_added_expert_by_expert():
    """8 bytes a weight of 4 x 1024 x 1024 at 1 TB/s, and 3 us for each of four kernels."""
    rates = RATES._replace(accumulate_bytes=8.0)
    assert parameter_gradients(product(grouped=False), rates) == pytest.approx(8 * 4 * 1024**2 / 1e12 + 4 * 3e-6)


@pytest.mark.parametrize(("grouped", "casts", "kernels"), [(True, 1, 1), (False, 4, 4)])
def test_each_projection_casts_its_own_input(grouped, casts, kernels):
    """With delayed scaling one kernel casts all rows of grouped products; in turn each expert's projections cast their own, which
    the host launches one by one.
    """
    made = ops(grouped=grouped, precision="fp8_delayed")
    cast, down = made["experts.cast"], made["experts.down"]
    assert isinstance(cast, Move)
    assert isinstance(down, Gemm)
    assert (cast.kernels, down.cast_kernels) == (casts, casts)
    assert forward(cast, RATES, {"rows": 0.0}).kernels == kernels
    assert launches(cast) == kernels


@pytest.mark.parametrize("profile", ["megatron-core", "torchtitan"])
def test_activations_run_for_each_expert_and_outputs_are_concatenated(profile):
    """Kernels four times as many, bytes the same; a copy of 1,024 x 64 in bf16 joins the outputs, backward the gradients."""
    together, apart = ops(grouped=True, profile=profile), ops(grouped=False, profile=profile)
    assert apart.keys() - together.keys() == {"experts.join"}
    for name, op in together.items():
        if isinstance(op, Move):
            assert apart[name] == replace(op, kernels=4 * op.kernels)
    join = apart["experts.join"]
    assert isinstance(join, Move)
    assert (join.forward_bytes, join.backward_bytes) == (2 * ROWS * HIDDEN * 2, 2 * ROWS * HIDDEN * 2)


@pytest.mark.parametrize(
    ("router", "forward_bytes", "backward_bytes", "mixed"),
    [("compute", 8, 12, (2, 8)), ("fp32", 12, 30, (12, 22))],
)
def test_biases_are_added_in_place(router, forward_bytes, backward_bytes, mixed):
    """A product and a sum for each of 4 experts of 256 rows.

    In bf16 forward writes 2 bytes an element, then reads twice 2 and writes 2; backward has twice a product (2 read, 2 written)
    and a sum (2 read). With fp32 probabilities 4 + 4 + 2 + 2, and twice 12 and a cast from 2 to 4. Without vector loads run what
    broadcasts (2 or 4; twice 4 or 8) and what casts (2 + 4 + 2; 2 + 4).
    """
    added = ops(grouped=False, bias=True, router=router)["experts.bias"]
    assert isinstance(added, Move)
    elements, wide = ROWS * HIDDEN, 4 if router == "fp32" else 2
    assert (added.forward_bytes, added.backward_bytes) == (forward_bytes * elements, backward_bytes * elements)
    assert (added.forward_by_element.bytes, added.backward_by_element.bytes) == (
        mixed[0] * elements,
        mixed[1] * elements,
    )
    assert (added.kernels, added.saves, added.outputs) == (8, ("probs",), ())
    assert (added.forward_temp_bytes, added.backward_temp_bytes) == (wide * elements / 4, 2 * wide * elements / 4)


def test_one_expert_needs_no_concatenation():
    assert ops(grouped=False, ep=4.0).keys() == ops(grouped=True, ep=4.0).keys()
