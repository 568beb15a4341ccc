"""Low-precision recipes: bytes, copies, saved tensors, gathers and rates of small layers, by hand."""

from __future__ import annotations

from dataclasses import replace

import jobs
import numpy as np
import pytest
import rates
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.answer.result import estimate
from steptime.cost import compute
from steptime.cost.compute import gemm_backward, gemm_traffic
from steptime.cost.rates import rates as rates_of
from steptime.job.assembly import Assembly
from steptime.memory.op_walk import quantized_gradients
from steptime.memory.states import stage_states
from steptime.model.blocks import block_ops
from steptime.model.ops import Comm, Gemm, Move, Op, Param
from steptime.model.quantize import cast_bytes
from steptime.report.explain import explain
from steptime.software.performance import Performance, resolve
from steptime.software.precision import RECIPES, recipe, weight_bytes
from steptime.timing.optimizer import quantize_bytes_per_weight
from steptime.validation.recipes import recipe_of

NAMES = [name for name, of in RECIPES.items() if of.casts is None]
RATES = rates.RATES._replace(recipe_flops=400e12)
WEIGHT = (Param("w", (2560, 800)),)


def layer_job(precision="fp8_delayed", node="dgx-h100", tp=1, **performance):
    """One layer of T = 4,096 tokens: h 1,024, 8 heads of 128, i 4,096, SwiGLU."""
    model = {"n_layers": 1, "hidden_sz": 1024, "inter_sz": 4096, "n_q_heads": 8, "vocab_sz": 1024}
    performance["precision"] = precision
    return jobs.job(model, gbs=8 // tp, hardware=node, performance=performance, tp=tp, dp=8 // tp, sp=tp > 1)


def block(*args, **kwargs) -> dict[str, Op]:
    return {op.name: op for op in Assembly(layer_job(*args, **kwargs)).kinds[0].ops}


def saved(ops: dict[str, Op]) -> dict[str, float]:
    """Bytes of each tensor that the block keeps, its input apart."""
    sizes = {t.name: float(t.bytes) for op in ops.values() for t in op.allocates}
    kept = {name for op in ops.values() for name in op.saves}
    return {name: sizes[name] for name in kept if name in sizes}


# --- one weight, one cast, one product ---


@pytest.mark.parametrize(
    ("name", "any_layout", "copies", "beside", "stored"),
    [
        # bf16 and two fp8 copies; on a machine that takes any layout one of them serves both directions
        ("fp8_delayed", False, 2, 4.0, 2.0),
        ("fp8_delayed", True, 1, 3.0, 1.0),
        ("fp8_current", False, 2, 4.0, 2.0),
        # an fp32 scale per 128 x 128
        ("fp8_blockwise", False, 2, 4.0 + 2 * 4 / 16384, 2.0 + 2 * 4 / 16384),
        # a byte per 32
        ("mxfp8", True, 2, 4.0 + 2 / 32, 2.0 + 2 / 32),
        # half a byte and a byte per 16
        ("nvfp4", True, 2, 3.0 + 2 / 16, 1.0 + 2 / 16),
    ],
)
def test_bytes_of_a_weight(name, any_layout, copies, beside, stored):
    found = recipe(name, any_layout=any_layout)
    assert found is not None
    assert found.copies == copies
    assert weight_bytes(found, 2.0, stored=False) == beside
    assert weight_bytes(found, 2.0, stored=True) == stored


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("fp8_delayed", 2 + 2 * 1),  # read bf16 once, write both copies
        ("fp8_current", 2 * 2 + 2 * 1),  # read for the maximum too
        ("fp8_blockwise", 2 + 2 * (1 + 4 / 128)),
        ("mxfp8", 2 + 2 * (1 + 1 / 32)),
        ("nvfp4", 3 * 2 + 2 * (0.5 + 1 / 16)),  # maximum, rows, columns: three kernels
    ],
)
def test_bytes_of_a_cast(name, moved):
    assert cast_bytes(1000.0, RECIPES[name], 2.0, 2.0) == 1000 * moved


def test_a_product_by_hand():
    """1280 x 800 by 800 x 2560 at 400 TFLOP/s: 10 x 10 tiles fill 100 SMs once; at twice bf16's rate a tile's fixed time is
    a depth of 400, so one of 800 runs at 800/1200."""
    op = Gemm("mlp.up", m=1280.0, n=2560.0, k=800.0, params=WEIGHT, recipe=recipe("fp8_delayed", any_layout=False))
    forward, (dgrad, wgrad) = compute.forward(op, RATES, {}), gemm_backward(op, RATES)
    assert forward.compute_s == pytest.approx(op.flops / (400e12 * 800 / 1200))
    assert forward.bytes == 1280 * 800 + 800 * 2560 + 2 * 1280 * 2560
    assert dgrad.bytes == 1280 * 2560 + 800 * 2560 + 2 * 1280 * 800
    assert wgrad.bytes == 1280 * 2560 + 1280 * 800 + 2 * 4 * 800 * 2560  # the fp32 gradient read and written
    slow = (
        2560 / 2960 / 1.15
    )  # backward adds up in fp32: fast accumulation is 1.1 to 1.2 times as fast (pytorch/ao#2377)
    waves = 0.75 + 0.25 * 40 / 100  # 10 x 4 tiles
    assert dgrad.compute_s == pytest.approx(op.flops / (400e12 * slow * waves))


def test_products_in_blocks_lay_out_their_scales():
    plain = Gemm("g", m=1280.0, n=2560.0, k=800.0, params=WEIGHT, recipe=recipe("fp8_current", any_layout=True))
    block_scaled = replace(plain, recipe=recipe("mxfp8", any_layout=True))
    more = compute.forward(block_scaled, RATES, {}).time_s - compute.forward(plain, RATES, {}).time_s
    assert more == pytest.approx(2 * 3e-6)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(size=st.tuples(*[st.integers(1, 4096).map(lambda x: 8.0 * x)] * 3))
def test_no_product_moves_more_than_bf16(name, size):
    m, n, k = size
    wide = Gemm("g", m=m, n=n, k=k, params=WEIGHT)
    for any_layout in (True, False):
        narrow = replace(wide, recipe=recipe(name, any_layout=any_layout))
        pairs = zip(gemm_traffic(narrow, RATES), gemm_traffic(wide, RATES), strict=True)
        assert all(sum(a) <= sum(b) for a, b in pairs)


# --- a block ---

T, H, INNER = 4096, 1024, 4096


def test_what_a_block_keeps_with_delayed_scaling():
    """One byte for what the projections read; the bf16 originals go, save those that others keep."""
    kept = saved(block("fp8_delayed"))
    assert kept["attn.norm.out.rows"] == kept["mlp.norm.out.rows"] == T * H
    assert kept["attn.core.out"] == 2 * T * H  # attention's own
    assert kept["attn.core.out.columns"] == T * H  # the projection's
    assert kept["mlp.gate_up"] == 2 * T * 2 * INNER
    assert kept["mlp.act.out.columns"] == T * INNER
    assert not kept.keys() & {"attn.norm.out", "mlp.norm.out", "mlp.act.out", "mlp.act.out.rows"}


@pytest.mark.parametrize("name", ["fp8_current", "fp8_blockwise"])
def test_the_output_projection_keeps_attentions_own(name):
    kept = saved(block(name))
    assert kept["attn.core.out"] == 2 * T * H
    assert not any(key.startswith("attn.core.out.") for key in kept)


@pytest.mark.parametrize(("name", "size"), [("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)])
def test_blocks_are_quantized_both_ways(name, size):
    kept = saved(block(name, "dgx-b200"))
    assert kept["attn.norm.out.columns"] == size * T * H
    assert kept["mlp.act.out.columns"] == size * T * INNER
    assert not any(key.endswith(".rows") for key in kept)


def test_one_copy_where_any_layout_will_do():
    kept = saved(block("fp8_delayed", "dgx-b200"))
    assert kept["mlp.act.out.rows"] == T * INNER
    assert not any(key.endswith(".columns") for key in kept)


def test_norms_write_the_copies_or_a_cast_follows():
    delayed, current = block("fp8_delayed"), block("fp8_current")
    assert "attn.norm.cast" not in delayed
    cast = current["attn.norm.cast"]
    assert isinstance(cast, Move)
    assert (cast.forward_bytes, cast.kernels) == (T * H * (2 + 2 + 1), 2.0)
    assert current["mlp.act.cast"].forward_bytes == T * INNER * (2 + 2 + 1 + 1)


def test_only_projections_of_blocks_are_quantized():
    assembly = Assembly(layer_job("fp8_current"))
    gemms = [op for op in assembly.kinds[0].ops if isinstance(op, Gemm)]
    assert [op.name for op in gemms] == ["attn.qkv", "attn.proj", "mlp.gate_up", "mlp.down"]
    assert all(op.recipe for op in gemms)
    assert not any(op.recipe for op in assembly.head.ops if isinstance(op, Gemm))
    assert assembly.kinds[0].n_quantized == 4 * H * H + 3 * H * INNER


def test_backward_casts_by_hand():
    """fp8_delayed on Hopper: the gradient cast to two copies, and the input that a norm left by rows transposed."""
    ops = block("fp8_delayed")
    up, down = ops["mlp.gate_up"], ops["mlp.down"]
    assert isinstance(up, Gemm)
    assert isinstance(down, Gemm)
    assert up.cast_bytes == T * 2 * INNER * (2 + 1 + 1) + 2 * T * H
    assert down.cast_bytes == T * H * (2 + 1 + 1)
    assert quantized_gradients(up) == 2 * T * 2 * INNER + T * H
    assert quantized_gradients(down) == 2 * T * H
    proj = block("fp8_current")["attn.proj"]
    assert isinstance(proj, Gemm)
    assert proj.cast_bytes == T * H * (2 + 2 + 1 + 1) + T * H * (2 + 2 + 1)  # its bf16 input cast again


@pytest.mark.parametrize(("name", "down", "proj"), [("fp8_delayed", 3, 0), ("fp8_current", 5, 2 + 2 + 1)])
def test_backward_casts_of_sequence_parallel_ranks(name, down, proj):
    """Hopper, tp 2: each rank casts its half of a gradient to one layout, 2 + 1 bytes, or 2 + 2 + 1 where the maximum is read
    first; all of what was gathered is transposed, 1 + 1. The output projection's half of its heads is cast again if kept in bf16.
    The gradient of gate and up is a rank's own half, in both layouts; its input, kept by rows, is transposed (TransformerEngine
    pytorch/module/base.py, grad_output_preprocess).
    """
    ops = block(name, tp=2)
    gemms = {short: op for short, op in ops.items() if isinstance(op, Gemm)}
    maximum = name == "fp8_current"
    assert gemms["mlp.down"].cast_bytes == down * T * H / 2 + 2 * T * H
    assert gemms["mlp.down"].cast_kernels == 1 + maximum + 1
    assert gemms["attn.proj"].cast_bytes == down * T * H / 2 + 2 * T * H + proj * T * H / 2
    assert gemms["attn.proj"].cast_kernels == (1 + maximum + 1) + 2 * maximum
    assert gemms["mlp.gate_up"].cast_bytes == (down + 1) * T * INNER + 2 * T * H
    assert gemms["mlp.gate_up"].cast_kernels == 1 + maximum + 1


def test_sequence_parallelism_gathers_quantized():
    """Forward and again one byte, gradients reduced in bf16; after the down projection bf16 reduced, one byte gathered."""
    ops = block("fp8_delayed", tp=2)
    enter, leave = ops["mlp.gather"], ops["mlp.scatter"]
    assert isinstance(enter, Comm)
    assert isinstance(leave, Comm)
    assert (enter.bytes, enter.backward_bytes) == (T * H, 2 * T * H)
    assert (leave.bytes, leave.backward_bytes) == (2 * T * H, T * H)
    assert saved(ops)["mlp.norm.out.rows"] == T * H / 2
    both = block("mxfp8", "dgx-b200", tp=2)["mlp.scatter"]
    assert isinstance(both, Comm)
    assert both.backward_bytes == 2 * (1 + 1 / 32) * T * H


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_batches_equals_its_rows(name):
    assembly = Assembly(layer_job(name, "dgx-b200", tp=2))
    rates = rates_of(assembly.job.machine.accelerator, assembly.job.software)

    def costs(batch) -> list[object]:
        ops = block_ops(assembly.job.model, replace(assembly.shard, batch=batch))
        sizes = {t.name: t.bytes for op in ops for t in op.allocates} | {"x": assembly.kinds[0].x.bytes * batch}
        passes = [compute.forward(op, rates, sizes).time_s for op in ops if not isinstance(op, Comm)]
        passes += [done.time_s for op in ops if not isinstance(op, Comm) for done in compute.backward(op, rates, sizes)]
        passes += [compute.parameter_gradients(op, rates) for op in ops]
        return passes + [field for op in ops if isinstance(op, Comm) for field in (op.bytes, op.backward_bytes)]

    batches = [1.0, 2.0, 7.0]
    columns, rows = costs(np.array(batches)), [costs(batch) for batch in batches]
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        assert np.broadcast_to(column, 3).tolist() == list(values)


def test_ranks_agree_on_a_maximum_before_they_cast_their_shares():
    calls = [op for op in block("fp8_current", tp=2).values() if isinstance(op, Comm) and op.name.endswith(".amax")]
    assert [(op.name, op.kind, op.backward, op.bytes) for op in calls] == [
        ("attn.norm.amax", "all_reduce", None, 4),
        ("attn.amax", None, "all_reduce", 4),
        ("mlp.norm.amax", "all_reduce", None, 4),
        ("mlp.amax", None, "all_reduce", 4),
    ]
    for quiet in (block("fp8_delayed", tp=2), block("fp8_current")):
        assert not any(name.endswith(".amax") for name in quiet)


# --- states, gathers, weights ---


def test_states_and_gathers():
    """4 h^2 + 3 h i weights are quantized; table, head (1,024 x h each) and three norms are not."""
    weights, rest = 4 * H * H + 3 * H * INNER, 2 * 1024 * H + 3 * H
    plain = stage_states(Assembly(layer_job("fp8_delayed")))[0]
    stored = stage_states(Assembly(layer_job("fp8_delayed", fp8_params=True)))[0]
    wide = stage_states(Assembly(layer_job("bf16")))[0]
    padded = sum(bucket.elements for chunk in wide.buckets for bucket in chunk)
    assert wide.params_bytes == 2 * padded
    assert plain.params_bytes == 2 * padded + 2 * weights
    assert stored.params_bytes == 2 * padded
    assert plain.gathered_itemsize == wide.gathered_itemsize == 2.0
    assert stored.gathered_itemsize == pytest.approx((weights + 2 * rest) / (weights + rest))
    assert plain[1:3] == wide[1:3]  # gradients and optimizer as ever
    shared = stage_states(Assembly(layer_job("mxfp8", "dgx-b200", fp8_params=True)))[0]
    assert shared.gathered_itemsize == 2.0  # gathered in bf16, in the gradient buffer


@pytest.mark.parametrize(
    ("name", "stored", "moved"),
    [
        ("bf16", False, 0.0),
        ("fp8_delayed", False, 2 + 2),
        ("fp8_delayed", True, 1 + 1),  # the transpose alone
        ("fp8_current", False, 2 * 2 + 2),
    ],
)
def test_weights_are_quantized_once_a_step(name, stored, moved):
    assert quantize_bytes_per_weight(layer_job(name, **({"fp8_params": True} if stored else {}))) == moved


def test_one_copy_for_both_directions_has_no_transpose():
    """Blackwell's tensor cores read either layout: a weight that is stored quantized by its whole tensor is not touched again."""
    assert quantize_bytes_per_weight(layer_job("fp8_current", "dgx-b200", fp8_params=True)) == 0.0


# --- the words of measured rows ---


@pytest.mark.parametrize(
    ("said", "framework", "precision", "stored", "assumed"),
    [
        ("fp8-delayed(hybrid, fp8_params)", "NeMo 24.09", "fp8_delayed", True, []),
        ("fp8-delayed", "NeMo 24.07", "fp8_delayed", False, ["fp8_params: no"]),
        ("fp8-delayed", "NeMo 2.0 25.02", "fp8_delayed", True, ["fp8_params: yes"]),
        ("fp8 (per-tensor)", "NeMo 25.04.x (NeMo 2.0)", "fp8_current", True, ["fp8_params: yes"]),
        ("fp8", "NeMo 25.04.rc2", "fp8_current", True, ["precision: fp8_current for 'fp8'", "fp8_params: yes"]),
        ("fp8", "NeMo 24.03.01", "fp8_delayed", False, ["precision: fp8_delayed for 'fp8'", "fp8_params: no"]),
        (
            "fp8-hybrid",
            "Megatron-LM/Core",
            "fp8_delayed",
            False,
            ["precision: fp8_delayed for 'fp8-hybrid'", "fp8_params: no"],
        ),
        ("fp8-cs", "Megatron-Bridge NeMo 26.02", "fp8_current", True, ["fp8_params: yes"]),
        ("mxfp8", "Megatron-Bridge NeMo 25.09", "mxfp8", False, ["fp8_params: no"]),
        ("mxfp8", "Megatron-Bridge NeMo 25.11", "mxfp8", True, ["fp8_params: yes"]),
        ("fp8-mxfp8", "Megatron-LM CI dev", "mxfp8", False, ["fp8_params: no"]),
        ("fp8-blockwise", "Megatron-Core", "fp8_blockwise", False, ["fp8_params: no"]),
        ("nvfp4", "Megatron-Bridge NeMo 26.02", "nvfp4", False, ["fp8_params: no"]),
    ],
)
def test_recipes_of_measured_rows(said, framework, precision, stored, assumed):
    told: list[str] = []
    assert recipe_of(said, framework, "", told) == {"precision": precision, "fp8_params": stored}
    assert told == assumed


def test_other_words_name_no_recipe():
    assert not any(recipe_of(word, "NeMo 24.05", "", []) for word in ("bf16", "", "int8 (folder named fp8)", "fp16"))
    assert recipe_of("fp8-tensorwise", "Megatron-LM CI dev", "gpt3_native_fp8_tp", [])["fp8_params"]


# --- a job ---


def test_words():
    assert resolve(Performance(precision="fp8")).precision == "fp8_delayed"
    found = resolve(Performance(precision="mxfp8"))
    assert (found.compute_dtype, found.itemsize, found.states.param_dtype, found.states.main_grad_dtype) == (
        "bf16",
        2,
        "bf16",
        "fp32",
    )
    assert resolve(Performance()).recipe is None


def test_the_answer_names_the_rate():
    fast, wide = estimate(layer_job("fp8")).throughput, estimate(layer_job("bf16")).throughput
    assert (fast.peak_dtype, fast.peak_flops_used) == ("fp8", 1979e12)
    assert (wide.peak_dtype, wide.peak_flops_used) == ("bf16", 989e12)
    assert estimate(layer_job("nvfp4", "gb200-nvl72")).throughput.peak_dtype == "fp4"


def test_each_product_is_held_against_its_own_peak():
    found = estimate(layer_job("fp8_current"))
    assert "1.98 PFLOP/s dense peak" in str(explain(found, "mlp.gate_up"))
    assert "989 TFLOP/s dense peak" in str(explain(found, "head.proj"))
    assert "fp8_current projections" in " ".join(found.assumptions)


def test_rows_of_products():
    rows = {(row.name, row.pass_): row for row in estimate(layer_job("fp8_current")).gemms}
    up, head = rows["mlp.gate_up", "forward"], rows["head.proj", "forward"]
    assert (up.input_bytes, up.weight_bytes, up.output_bytes) == (T * H, 2 * H * INNER, 2 * 2 * T * INNER)
    assert (head.input_bytes, head.weight_bytes) == (2 * T * H, 2 * H * 1024)
    wgrad = rows["mlp.gate_up", "wgrad"]
    assert (wgrad.input_bytes, wgrad.weight_bytes, wgrad.output_bytes) == (T * H, 2 * T * INNER, 8 * 2 * H * INNER)
    assert up.flops == 2 * T * H * 2 * INNER


RUNS = [(name, "dgx-b200") for name in NAMES] + [(n, "dgx-h100") for n in NAMES if not RECIPES[n].microscaling]


@pytest.mark.parametrize(("name", "node"), RUNS)
def test_large_products_are_faster_than_in_bf16(name, node):
    large = layer_job().replace(
        **{"model.hidden_sz": 16384, "model.inter_sz": 65536, "model.n_q_heads": 128, "hardware": node}
    )
    wide = estimate(large.replace(**{"performance.precision": "bf16"}))
    fast = estimate(large.replace(**{"performance.precision": name}))
    for a, b in zip(fast.gemms, wide.gemms, strict=True):
        assert (a.name, a.flops) == (b.name, b.flops)
        assert a.time_s <= b.time_s
        assert (a.time_s < b.time_s) == (a.name != "head.proj")
    assert fast.step_s < wide.step_s


@pytest.mark.parametrize("name", NAMES)
def test_recompute_and_layouts_run(name):
    wide = layer_job(name, "gb200-nvl72", tp=4)
    for recompute in ("full", "selective", "super-selective")[: 2 if name == "fp8_delayed" else 3]:
        found = estimate(wide.replace(**{"performance.activation_checkpointing_type": recompute}))
        assert found.memory.peak_allocated_bytes <= estimate(wide).memory.peak_allocated_bytes * 1.001
