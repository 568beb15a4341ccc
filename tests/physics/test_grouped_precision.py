"""torchao's low precision of the grouped products of experts: bytes, times, padding, memory, and where it is refused."""

from types import SimpleNamespace

import jobs
import pytest

from steptime import ConfigError, estimate
from steptime.cost import compute
from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.model.grouped_casts import low_precision
from steptime.model.ops import Gemm, Param, Tensor
from steptime.software.efficiency import NOTHING_FITTED, using
from steptime.software.performance import Performance, resolve


def software(precision, machine="dgx-b200"):
    said = Performance(software="torchtitan", precision="bf16", moe={"grouped_precision": precision})
    return resolve(said).on(Machine.load(machine))


def product(precision, rows, n, k, experts):
    fields = low_precision(SimpleNamespace(software=software(precision)), experts, rows, k, n)
    weight, out = Param("w", (experts, n, k)), Tensor("out", float(rows * n), 2.0)
    return Gemm(
        "e", ("x",), (out,), ("x",), (), (weight,), m=rows / experts, n=n, k=k, count=experts, grouped=True, **fields
    )


def experts_job(precision="none", machine="dgx-b200", name="torchtitan", moe=None, model=None, **parallelism):
    experts = {"n_experts": 8, "expert_inter_sz": 512, "experts_per_token": 2} | (model or {})
    sizes = {"n_layers": 2, "hidden_sz": 1024, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 8192, "moe": experts}
    performance = {
        "software": name, "precision": "bf16", "activation_checkpointing_type": "none",
        "moe": {"grouped_precision": precision} | (moe or {}),
    }  # fmt: skip
    batch = {"gbs": 16, "seqlen": 2048, "microbatch_sz": 2}
    return jobs.job(sizes, hardware=machine, performance=performance, **batch, **{"dp": 8, "ep": 4} | parallelism)


def gemms(of):
    ops = [op for part in estimate(of).assembly.kinds for op in part.ops]
    return {op.name: op for op in ops if isinstance(op, Gemm)}


@pytest.mark.parametrize(
    ("precision", "forward", "backward", "kept_for_a_moment"),
    [
        # 524,288 elements of input and of weight, 262,144 of the gradient; 2 + 1 + 1/32 bytes for one cast of one element:
        # forward both; backward the gradient twice, the input and the weight: 4 x 262,144 x 3.03125 x 1.5
        ("mxfp8_torchao", 3.03125 * 1_048_576, 3.03125 * (2 * 262_144 + 1_048_576), 1.03125 * 1_048_576),
        # with the weights' gradients in bf16 the gradient once, the weight
        ("mxfp8_torchao_wgrad_hp", 3.03125 * 1_048_576, 3.03125 * (262_144 + 524_288), 1.03125 * 1_048_576),
        # by rows 2 + 1; by columns 2 + 2 + 1, of gradient, input and transposed weight
        ("fp8_rowwise", 3 * 1_048_576, 3 * 262_144 + 5 * (262_144 + 1_048_576), 1_048_576),
    ],
)
def test_bytes_of_casts(precision, forward, backward, kept_for_a_moment):
    """1,024 rows of 4 experts, 512 x 256; formulas of roofline_unified.py and of the kernels of fp8_grouped_mm.py."""
    op = product(precision, 1024, 256, 512, 4)
    assert op.forward_cast.bytes == forward
    assert op.cast_bytes == backward
    assert op.temp_bytes == kept_for_a_moment
    assert op.saves == ("x",)


def test_times_of_the_kernels_of_a_pass():
    """pytorch/ao@36027d82 torchao/prototype/moe_training/README.md, B200, 131,072 rows of 8 experts, 7,168 x 2,048, in us.

    Products 1,671.2 + 1,683.4 + 2,103.3 = 5,457.9. Casts forward 525.3 + 65.4 + 13.3 = 604.0 (the layout of the input's scales
    has since become part of its cast), backward 144.4 + 70.7 + 141.5 + 472.2 = 828.8; layouts of both by columns 199.8 + 207.9 =
    407.7. Casts are counted at the rate of any copy, 6.7 TB/s; measured are 5.4 forward and 5.8 backward.
    """
    machine, op = Machine.load("dgx-b200"), product("mxfp8_torchao", 131_072, 2048, 7168, 8)
    with using(NOTHING_FITTED):
        r = rates(machine.accelerator, software("mxfp8_torchao"))
    passes = [compute.forward(op, r, {}), *compute.backward(op, r, {})]
    products = [1e6 * done.time_s for done in passes]
    assert sum(products) == pytest.approx(5457.9, rel=0.05)
    assert products == pytest.approx([1671.2, 1683.4, 2103.3], rel=0.12)
    assert 1e6 * compute.operand_casts(op, r).time_s == pytest.approx(604.0, rel=0.22)
    assert 1e6 * compute.move_pass(op.cast_bytes, op.cast_kernels, r).time_s == pytest.approx(828.8, rel=0.15)
    assert 1e6 * op.in_turn_s == pytest.approx(407.7, rel=0.01)


def test_weight_gradients_in_bf16_run_at_bf16_rates():
    """Forward and the input's gradient as with MXFP8, the weights' as without."""
    machine = Machine.load("dgx-b200")
    each = {
        name: [done.time_s for done in compute.backward(product(name, 131_072, 2048, 7168, 8), r, {})]
        for name in ("none", "mxfp8_torchao", "mxfp8_torchao_wgrad_hp")
        for r in [rates(machine.accelerator, software(name))]
    }
    assert each["mxfp8_torchao_wgrad_hp"] == [each["mxfp8_torchao"][0], each["none"][1]]


@pytest.mark.parametrize(("precision", "multiple"), [("none", 0), ("mxfp8_torchao", 128), ("fp8_rowwise", 16)])
@pytest.mark.parametrize("ep", [1, 4])
def test_groups_are_padded(precision, multiple, ep):
    """2 x 2,048 tokens, 2 experts each: 8,192 rows, and for each of the 8 / ep experts of a device a multiple more at most."""
    ops = [op for part in estimate(experts_job(precision, ep=ep)).assembly.kinds for op in part.ops]
    out = next(t for op in ops for t in op.outputs if t.name == "experts.out")
    assert out.elements == 1024 * (8192 + multiple * 8 / ep)
    names = {op.name for op in ops}
    assert ({"moe.pad", "moe.unpad"} <= names) == (multiple > 0 and ep == 1)


def test_only_routed_products_are_cast():
    converted = gemms(experts_job("mxfp8_torchao"))
    assert {name for name, op in converted.items() if op.recipe} == {"experts.gate", "experts.up", "experts.down"}
    assert not any(op.recipe for op in gemms(experts_job()).values())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"precision": "mxfp8_torchao", "machine": "dgx-h100"}, "needs a device with block scales"),
        ({"precision": "fp8_rowwise", "machine": "dgx-a100-80"}, "compute capability 9 or 10"),
        ({"precision": "mxfp8_torchao", "name": "megatron-core"}, "is torchtitan's (got software megatron-core)"),
        ({"precision": "mxfp8_torchao", "moe": {"dispatcher": "flex"}}, "flex with hybridep (got flex with deepep)"),
        ({"precision": "mxfp8_torchao", "moe": {"grouped_gemm": False}}, "needs one grouped GEMM"),
        ({"precision": "mxfp8_torchao", "model": {"expert_inter_sz": 528}}, "multiples of 32 (got 1024 and 528)"),
    ],
)
def test_where_it_is_refused(said, words):
    with pytest.raises(ConfigError) as caught:
        experts_job(**said)
    lines = [line for line in str(caught.value).splitlines() if "grouped_precision" in line]
    assert len(lines) == 1
    assert words in lines[0]


def test_rowwise_runs_on_hopper():
    assert gemms(experts_job("fp8_rowwise", "dgx-h100"))["experts.down"].recipe.forward_rate == 0.75


def automodel(precision, **said):
    """A job of NeMo AutoModel on B200, one projection of 8 / 4 experts, 1,024 x 1,024 (gate and up) and 512 x 1,024 (down)."""
    return experts_job(precision, name="automodel", moe={"dispatcher": "flex"} | said)


def test_automodel_lays_the_weight_out_again():
    """mxfp8.py, _mxfp8_weight_relayout: a copy of each weight, 2 + 2 bytes an element, kept for backward; its gradient is
    copied back, 2 + 2 bytes. Of torchtitan's function with weight gradients in bf16, nothing else differs; no group is padded.

    2 experts of 1,024 x 1,024 are 2,097,152 elements, of 512 x 1,024 1,048,576.
    """
    ours, theirs = gemms(automodel("mxfp8_torchao_wgrad_hp")), software("mxfp8_torchao_wgrad_hp")
    for name, k, n in (("experts.gate_up", 1024, 1024), ("experts.down", 512, 1024)):
        op, weight = ours[name], 2 * k * n
        plain = low_precision(SimpleNamespace(software=theirs), 2, 8192, k, n)
        assert op.forward_cast.bytes - plain["forward_cast"].bytes == 4 * weight
        assert op.cast_bytes - plain["cast_bytes"] == 4 * weight
        assert (op.forward_cast.kernels, op.cast_kernels) == (4, 3)
        assert [(t.name, t.bytes) for t in op.stats] == [(f"{name}.relaid", 2 * weight)]
        assert op.stats[0].name in op.saves
        assert op.outputs[0].elements == 8192 * n


def test_automodel_keeps_the_copies_of_every_layer():
    """Without checkpointing, 2 layers keep 2 x (2,097,152 + 1,048,576) elements of 2 bytes more than in bf16."""
    kept = [estimate(automodel(name)).memory.peak_allocated_bytes for name in ("none", "mxfp8_torchao_wgrad_hp")]
    assert kept[1] - kept[0] == pytest.approx(2 * 2 * 3_145_728)


def test_automodel_has_one_recipe():
    with pytest.raises(ConfigError, match=r"is torchtitan's \(got software automodel\)"):
        automodel("mxfp8_torchao")
