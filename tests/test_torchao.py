"""Torchao's float8 projections by hand: casts, what is kept, what tensor parallelism and FSDP gather in a byte."""

import pytest

from steptime import Job, estimate

TOKENS, HIDDEN, INTER = 8192, 4096, 14336
"""Llama-3 8B at micro-batch 1 of 8,192 tokens."""


def llama(tp=1, **performance):
    return estimate(
        Job(
            model="llama3-8b",
            parallelism={"tp": tp, "pp": 1, "dp": 8, "fsdp": {}},
            data={"gbs": 8, "seqlen": TOKENS, "microbatch_sz": 1},
            performance={"software": "torchtitan@0.2", **performance},
            hardware="grand-teton-h100",
        )
    )


def cast_bytes(found, name):
    """Bytes that the forward cast before a projection moves, and those of a projection's backward."""
    ops = {op.name: op for op in found.assembly.kinds[0].ops}
    return ops["attn.qkv.cast"].forward_bytes, ops[name].cast_bytes


@pytest.mark.parametrize(
    ("recipe", "input_forward", "input_backward", "gradient", "weight"),
    [
        ("fp8_tensorwise", 3, 3, 6, 8),
        ("fp8_rowwise", 3, 5, 8, 10),
        ("fp8_rowwise_gw_hp", 3, 0, 3, 6),
    ],
)
def test_casts_of_torchao(recipe, input_forward, input_backward, gradient, weight):
    """Bytes per element of torchao's roofline: of the query projection, T x h by h x h."""
    found = llama(precision=recipe, compile="all")
    square = HIDDEN * HIDDEN
    back = TOKENS * HIDDEN * (gradient + input_backward) + square * weight
    assert cast_bytes(found, "attn.q_proj") == (TOKENS * HIDDEN * input_forward, back)


def test_casts_of_torchao_in_eager_torch():
    """33 bytes per element: by tensor of input and gradient once, transposed too, of weights twice; by rows of each twice."""
    square, x = 33 * HIDDEN * HIDDEN, 33 * TOKENS * HIDDEN
    assert cast_bytes(llama(precision="fp8_tensorwise"), "attn.q_proj") == (x, x + 4 * TOKENS * HIDDEN + 2 * square)
    assert cast_bytes(llama(precision="fp8_rowwise"), "attn.q_proj") == (x, 3 * x + 2 * square)


def test_saved_float8_weights():
    """A byte for each weight of a layer's projections, 218,103,808, until its backward, which then casts no weight.

    torchao 0.11 on a CPU: by tensor a linear layer of 64 x 128 saves its bf16 input and a float8 tensor of 64 x 128, with and
    without force_recompute_fp8_weight_in_bwd; by rows it saves the bf16 weight. Casts compiled: 5 bytes of 8, in eager torch 33
    of 66.
    """
    square = HIDDEN * HIDDEN
    for compiled, less in (("all", 3), ("none", 33)):
        plain, kept = (
            llama(
                precision="fp8_tensorwise",
                compile=compiled,
                saved_fp8_weights=said,
                activation_checkpointing_type="none",
            )
            for said in (False, True)
        )
        saved = kept.memory.stages[0].activations_bytes - plain.memory.stages[0].activations_bytes
        assert saved == 32 * 218_103_808
        assert kept.memory.stages[0].params_bytes == plain.memory.stages[0].params_bytes
        assert cast_bytes(plain, "attn.q_proj")[1] - cast_bytes(kept, "attn.q_proj")[1] == less * square
        launched = [{op.name: op for op in found.assembly.kinds[0].ops}["attn.q_proj"] for found in (plain, kept)]
        assert launched[1].cast_kernels / launched[0].cast_kernels == 3 / 4  # gradient, input, and the weight once


def test_torchao_keeps_what_bf16_keeps():
    """Input and weight stay in bf16 (save_for_backward(input_hp, weight_hp)): as much for backward as without a recipe."""
    plain, low = (llama(precision=p, compile="all").memory.stages[0] for p in ("bf16", "fp8_rowwise"))
    assert low.activations_bytes == plain.activations_bytes
    assert low.params_bytes == plain.params_bytes


def test_fp8_all_gather_sends_a_byte_for_each_weight_of_the_blocks():
    """A Llama-3 8B block: 218,112,000 parameters, of which 218,103,808 in projections; norms go out in bf16."""
    sent = {}
    for stored in (False, True):
        found = llama(precision="fp8_tensorwise", fp8_params=stored)
        [sent[stored]] = [row.bytes for row in found.collectives if row.name == "block parameters"]
    assert sent == {False: 2 * 218_112_000, True: 218_103_808 + 2 * 8_192}


def test_a_high_precision_weight_gradient_runs_at_the_rate_of_bf16():
    """rowwise_with_gw_hp: two products of three in fp8; wgrad of each projection takes what bf16's takes."""
    plain, low = (llama(precision=p, compile="all") for p in ("bf16", "fp8_rowwise_gw_hp"))
    times = [{row.pass_: row.compute_s for row in found.gemms if row.name == "mlp.down"} for found in (plain, low)]
    assert times[1]["wgrad"] == times[0]["wgrad"]
    assert times[1]["dgrad"] < times[0]["dgrad"]


def test_tensor_parallel_ranks_gather_what_they_have_cast():
    """tp 8, by tensor: T x h bytes gathered before query and gate and, as gradients, before the backward of both outputs.

    Forward each rank casts its T / 8 tokens once, 3 bytes an element; query and gate keep the gathered ones and turn them: 1 + 1.
    The output's gradient: largest value 2, read 2 and written 1 on T / 8 tokens, turned 1 + 1 on T. Sums stay in bf16, 2 T h.
    """
    whole = TOKENS * HIDDEN
    ops = {op.name: op for op in llama(8, precision="fp8_tensorwise", compile="all").assembly.kinds[0].ops}
    for at, first, last, width in (("attn", "q_proj", "proj", HIDDEN / 8), ("mlp", "gate_proj", "down", INTER / 8)):
        enter, leave = ops[f"{at}.gather"], ops[f"{at}.scatter"]
        assert (enter.bytes, enter.backward_bytes) == (whole, 2 * whole)
        assert (leave.bytes, leave.backward_bytes) == (2 * whole, whole)
        assert ops[f"{at}.cast"].forward_bytes == 3 * whole / 8
        assert ops[f"{at}.{first}"].saves == (enter.outputs[0].name,)
        assert ops[f"{at}.{first}"].cast_bytes == 6 * TOKENS * width + 2 * whole + 8 * HIDDEN * width
        back = (5 / 8 + 2) * whole + 3 * TOKENS * width + 8 * HIDDEN * width
        assert ops[f"{at}.{last}"].cast_bytes == back
    assert "attn.qkv.cast" not in ops


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rowwise", "fp8_rowwise_gw_hp"])
def test_other_recipes_gather_bf16(recipe):
    """torchtitan@31a17bfd models/llama3/infra/parallelize.py: regular tensor parallelism for scales by row."""
    ops = {op.name: op for op in llama(8, precision=recipe, compile="all").assembly.kinds[0].ops}
    assert ops["attn.gather"].bytes == 2 * TOKENS * HIDDEN
    assert ops["mlp.scatter"].backward_bytes == 2 * TOKENS * HIDDEN
