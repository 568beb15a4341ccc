"""Quantized weights: parameters, architecture, method and bits of one model, packed as each library packs it.

The model: 512 tokens, width 128, MLP 384, 2 layers, 64 key rows, no tied head. By hand: two tables of 512 x 128 = 131,072; a
layer has q and o of 128 x 128 = 32,768, k and v of 64 x 128 = 16,384, three MLP matrices of 384 x 128 = 147,456, two norms of
128 = 256, together 196,864; the last norm 128. 131,072 + 2 x 196,864 + 128 = 524,928, of which 2 x 196,608 = 393,216 are in
the matrices of layers.
"""

import json
import math
import re

import pytest

PARAMS, IN_LAYERS = 524_928, 393_216
WIDTHS = {"F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "U32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4}
MATRICES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (384, 128), "mlp.up_proj": (384, 128), "mlp.down_proj": (128, 384),
}  # fmt: skip


def gptq(out, inp, bits=4, group=64):
    """AutoGPTQ: packed along the input, zero points along the output."""
    return {
        ".qweight": ("I32", (inp * bits // 32, out)), ".qzeros": ("I32", (inp // group, out * bits // 32)),
        ".scales": ("F16", (inp // group, out)), ".g_idx": ("I32", (inp,)),
    }  # fmt: skip


def awq(out, inp):
    """AutoAWQ GEMM: packed along the output."""
    return {
        ".qweight": ("I32", (inp, out // 8)), ".qzeros": ("I32", (inp // 64, out // 8)),
        ".scales": ("F16", (inp // 64, out)),
    }  # fmt: skip


def awq_gemv(out, inp):
    """AutoAWQ GEMV: rows are outputs, scales are padded."""
    return {
        ".qweight": ("I32", (out, inp // 8)), ".qzeros": ("I32", (out, 1)), ".scales": ("F16", (out, 8)),
    }  # fmt: skip


def nf4(out, inp):
    """bitsandbytes: flat bytes, blocks of 64, scales quantized in blocks of 256."""
    blocks = out * inp // 64
    return {
        ".weight": ("U8", (out * inp // 2, 1)), ".weight.absmax": ("U8", (blocks,)), ".weight.quant_map": ("F32", (16,)),
        ".weight.nested_absmax": ("F32", (math.ceil(blocks / 256),)), ".weight.nested_quant_map": ("F32", (256,)),
        ".weight.quant_state.bitsandbytes__nf4": ("U8", (170,)),
    }  # fmt: skip


def nf4_in_bfloat16(out, inp):
    """bitsandbytes with bnb_4bit_quant_storage=bfloat16, as FSDP needs it: four numbers an element."""
    return nf4(out, inp) | {".weight": ("BF16", (out * inp // 4, 1))}


def int8(out, inp):
    """bitsandbytes LLM.int8()."""
    return {".weight": ("I8", (out, inp)), ".SCB": ("F32", (out,)), ".weight_format": ("U8", ())}


def hqq(out, inp):
    """HQQ, axis 1: a row per group of 64, two numbers a byte along the rows."""
    groups = out * inp // 64
    return {
        ".W_q": ("U8", (groups // 2, 64)), ".scale": ("F16", (groups, 1)), ".zero": ("F16", (groups, 1)),
        ".shape": ("I64", (2,)), ".nbits": ("I32", ()), ".group_size": ("I32", ()), ".axis": ("I32", ()),
        ".packing": ("U8", (7,)),
    }  # fmt: skip


def hqq_upright(out, inp):
    """HQQ, axis 0, 3 bits: groups are columns of 64, ten numbers an int32."""
    groups = out * inp // 64
    return {".W_q": ("I32", (7, groups)), ".scale": ("F16", (1, groups)), ".zero": ("F16", (1, groups))}


def hqq_columns(bits, group):
    """HQQ, axis 0: groups are columns, 8 / bits rows of numbers a row of bytes."""
    return lambda out, inp: {
        ".W_q": ("U8", (group * bits // 8, out * inp // group)), ".scale": ("F16", (1, out * inp // group)),
        ".zero": ("F16", (1, out * inp // group)),
    }  # fmt: skip


def nvfp4(out, inp):
    """NVIDIA ModelOpt: a scale in FP8 per 16 elements and one per tensor."""
    return {
        ".weight": ("U8", (out, inp // 2)), ".weight_scale": ("F8_E4M3", (out, inp // 16)), ".weight_scale_2": ("F32", ()),
        ".input_scale": ("F32", ()),
    }  # fmt: skip


def nvfp4_compressed(out, inp):
    """compressed-tensors, nvfp4-pack-quantized."""
    return {
        ".weight_packed": ("U8", (out, inp // 2)), ".weight_scale": ("F8_E4M3", (out, inp // 16)),
        ".weight_global_scale": ("F32", (1,)), ".input_global_scale": ("F32", (1,)),
    }  # fmt: skip


def mxfp4(out, inp):
    """OCP microscaling: a power of two per 32 elements."""
    return {".weight": ("U8", (out, inp // 2)), ".weight_scale": ("U8", (out, inp // 32))}


def packed_int4(out, inp):
    """compressed-tensors, pack-quantized."""
    return {
        ".weight_packed": ("I32", (out, inp // 8)), ".weight_scale": ("BF16", (out, inp // 128)), ".weight_shape": ("I64", (2,)),
    }  # fmt: skip


def mlx(out, inp, bits=4):
    """MLX: packed along the input, scales and biases per group of 64."""
    return {
        ".weight": ("U32", (out, inp * bits // 32)), ".scales": ("F16", (out, inp // 64)), ".biases": ("F16", (out, inp // 64)),
    }  # fmt: skip


def torchao_int4(out, inp):
    """torchao Int4Tensor in safetensors: two numbers a byte, scales [in / group, out]."""
    return {
        "._weight_qdata": ("U8", (out, inp // 2)), "._weight_scale": ("BF16", (inp // 64, out)),
        "._weight_zero_point": ("BF16", (inp // 64, out)),
    }  # fmt: skip


def torchao_fp8(out, inp):
    """torchao Float8Tensor in safetensors."""
    return {"._weight_qdata": ("F8_E4M3", (out, inp)), "._weight_scale": ("F32", (out, 1))}


def fp8_blocks(out, inp):
    """DeepSeek-V3: a scale per block of 128 x 128."""
    return {
        ".weight": ("F8_E4M3", (out, inp)),
        ".weight_scale_inv": ("F32", (math.ceil(out / 128), math.ceil(inp / 128))),
    }


def bitnet(out, inp):
    """transformers `integrations/bitnet.py`: four numbers a byte along the output, one scale a matrix."""
    return {".weight": ("U8", (out // 4, inp)), ".weight_scale": ("BF16", (1,))}


def modelopt_int4(out, inp):
    """NVIDIA ModelOpt W4A16_AWQ (`export/quant_utils.py` pack_int4_in_uint8): two numbers a byte along the output."""
    return {
        ".weight": ("U8", (out // 2, inp)), ".weight_scale": ("F32", (out, inp // 128)), ".pre_quant_scale": ("BF16", (inp,)),
    }  # fmt: skip


def exl2(out, inp):
    """ExLlamaV2 at 4 bits: rows of int32 along the input, an inverse permutation of the inputs."""
    return {
        ".q_weight": ("I32", (inp * 4 // 32, out)), ".q_scale": ("I32", (inp // 32, out // 8)), ".q_groups": ("I32", (8,)),
        ".q_scale_max": ("F16", (inp // 32,)), ".q_invperm": ("I32", (inp,)),
    }  # fmt: skip


def packed_bits(bits):
    """compressed-tensors packs words densely: of 3 bits 32 numbers in 3 words."""
    return lambda out, inp: packed_int4(out, inp) | {".weight_packed": ("I32", (out, inp * bits // 32))}


def mlx_nvfp4(out, inp):
    """MLX's mode nvfp4: a scale of 8 bits per 16 elements, no biases."""
    return {".weight": ("U32", (out, inp // 8)), ".scales": ("U8", (out, inp // 16))}


def mxfp6(out, inp):
    """compressed-tensors, mxfp6-pack-quantized: four numbers in three bytes."""
    return {".weight_packed": ("U8", (out, inp * 6 // 8)), ".weight_scale": ("U8", (out, inp // 32))}


def marlin_24(out, inp):
    """compressed-tensors, marlin-24: of four weights two are kept, which no rule reads."""
    return {".weight_packed": ("I32", (inp // 32, 2 * out)), ".scale_packed": ("F16", (1, out))}


CASES = {
    "gptq": (gptq, {}, "GPTQ", 4, 64), "awq": (awq, {"quant_method": "awq", "bits": 4}, "AWQ", 4, 64),
    "gptq 3 bits": (lambda o, i: gptq(o, i, 3), {}, "GPTQ", 3, 64),
    "gptq 8 bits": (lambda o, i: gptq(o, i, 8), {"quant_method": "gptq", "bits": 8}, "GPTQ", 8, 64),
    "auto-round": (gptq, {"quant_method": "auto-round", "bits": 4}, "auto-round (GPTQ layout)", 4, 64),
    "awq gemv": (awq_gemv, {"quant_method": "awq", "bits": 4, "group_size": 64}, "AWQ", 4, 64),
    "nf4": (nf4, {}, "bitsandbytes NF4", 4, 64), "nf4 in bf16": (nf4_in_bfloat16, {}, "bitsandbytes NF4", 4, 64),
    "int8": (int8, {}, "bitsandbytes LLM.int8()", 8, None),
    "hqq 8 bits in columns": (hqq_columns(8, 64), {}, "HQQ", 8, 64),
    "hqq 2 bits in columns": (hqq_columns(2, 16), {}, "HQQ", 2, 16),
    "hqq": (hqq, {}, "HQQ", 4, 64), "hqq upright": (hqq_upright, {}, "HQQ", 3, 64),
    "nvfp4": (nvfp4, {}, "NVFP4", 4, 16), "nvfp4 compressed": (nvfp4_compressed, {}, "NVFP4", 4, 16),
    "mxfp4": (mxfp4, {}, "MXFP4", 4, 32), "pack-quantized": (packed_int4, {}, "compressed-tensors", 4, 128),
    "mlx": (mlx, {}, "MLX", 4, 64), "mlx 6 bits": (lambda o, i: mlx(o, i, 6), {}, "MLX", 6, 64),
    "torchao int4": (torchao_int4, {}, "torchao", 4, 64), "torchao fp8": (torchao_fp8, {}, "torchao FP8", 8, None),
    "bitnet": (bitnet, {}, "BitNet", 2, None), "modelopt int4": (modelopt_int4, {}, "ModelOpt INT4", 4, 128),
    "exl2": (exl2, {}, "EXL2", 4, None), "3 bits": (packed_bits(3), {}, "compressed-tensors", 3, 128),
    "8 bits": (packed_bits(8), {}, "compressed-tensors", 8, 128), "mlx nvfp4": (mlx_nvfp4, {}, "MLX", 4, 16),
    "mxfp6": (mxfp6, {}, "MXFP6", 6, 32),
    "fp8 blocks": (fp8_blocks, {}, "FP8", 8, None),
}  # fmt: skip


def shapes_of(rule):
    """{name: (dtype, shape)} of the model with the matrices of its layers packed by `rule`."""
    found = {f"{name}.weight": ("BF16", (512, 128)) for name in ("model.embed_tokens", "lm_head")}
    found["model.norm.weight"] = ("BF16", (128,))
    for layer in (f"model.layers.{n}." for n in range(2)):
        found |= {f"{layer}{norm}_layernorm.weight": ("BF16", (128,)) for norm in ("input", "post_attention")}
        for name, shape in MATRICES.items():
            found |= {f"{layer}{name}{end}": part for end, part in rule(*shape).items()}
    return found


def write(make, shapes, config):
    header, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        end = at + math.prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    make.write("q/config.json", json.dumps(config).encode())
    return make.write("q/model.safetensors", len(text).to_bytes(8, "little") + text + bytes(at)).parent


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_what_it_was_before(make, summarize, codes, case):
    rule, stated, method, bits, group = CASES[case]
    shapes = shapes_of(rule)
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    summary = summarize(write(make, shapes, config | ({"quantization_config": stated} if stated else {})))
    assert codes(summary) == set()
    assert summary.restored.params == PARAMS
    assert summary.params == sum(math.prod(shape) for _, shape in shapes.values())  # elements as stored
    (row,) = summary.restored.rows
    assert (row.method, row.bits, row.group_size, row.tensors, row.params) == (method, bits, group, 14, IN_LAYERS)
    found = {key: entry["value"] for key, entry in summary.architecture.items()}
    assert (found["inter_sz"], found["q_rows"], found["kv_rows"], found["n_layers"]) == (384, 128, 64, 2)
    document = summary.to_dict()
    assert document["quantization"]["params"] == PARAMS
    assert document["totals"]["params"] == summary.params


@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case][1]])
def test_no_config_is_needed(make, summarize, case):
    summary = summarize(write(make, shapes_of(CASES[case][0]), {}))
    assert summary.restored.params == PARAMS
    assert summary.architecture["inter_sz"]["value"] == 384


def test_mixture_of_gpt_oss(make, summarize):
    """gpt-oss: blocks [experts, rows, groups of 32, 16 bytes]; 4 experts of [2 x 96, 64] and [64, 96], biases beside them.

    4 x (192 x 64 + 64 x 96) = 73,728 packed parameters.
    """
    shapes = {"model.embed_tokens.weight": ("BF16", (256, 64)), "model.norm.weight": ("BF16", (64,))}
    shapes |= {f"model.layers.0.self_attn.{name}_proj.weight": ("BF16", (64, 64)) for name in "qkvo"}
    shapes["model.layers.0.mlp.router.weight"] = ("BF16", (4, 64))
    for name, rows, columns in (("gate_up", 192, 64), ("down", 64, 96)):
        stem = f"model.layers.0.mlp.experts.{name}_proj"
        shapes[f"{stem}_blocks"] = ("U8", (4, rows, columns // 32, 16))
        shapes[f"{stem}_scales"] = ("U8", (4, rows, columns // 32))
        shapes[f"{stem}_bias"] = ("BF16", (4, rows))
    summary = summarize(write(make, shapes, {}))
    (row,) = summary.restored.rows
    assert (row.method, row.bits, row.group_size, row.tensors, row.params) == ("MXFP4", 4, 32, 2, 73_728)
    assert summary.architecture["moe"]["value"]["expert_inter_sz"] == 96
    assert summary.architecture["moe"]["value"]["n_experts"] == 4


def aqlm(out, inp):
    """AQLM: a code per 8 inputs and a codebook."""
    return {".codes": ("I8", (out, inp // 8, 1)), ".codebooks": ("F16", (1, 256, 1, 8))}


@pytest.mark.parametrize(("rule", "method"), [(aqlm, "aqlm"), (marlin_24, "compressed-tensors")])
def test_unknown_packing_leaves_shapes_out(make, summarize, command, rule, method):
    """A method whose parts are not known: the config's widths stand, the packed ones do not, and the report says so."""
    stated = {"hidden_size": 128, "intermediate_size": 384, "quantization_config": {"quant_method": method}}
    path = write(make, shapes_of(rule), stated)
    summary = summarize(path)
    assert summary.architecture["inter_sz"]["value"] == 384
    assert summary.to_dict()["quantization"]["weights"][0]["method"] == method
    assert f"{method}: unknown packing, counted in stored elements" in " ".join(command(path)[1].split())


def test_embedding_of_mlx_and_mixed_bits(make, summarize):
    """MLX quantises tables too, and may give some matrices more bits: one row for each."""
    shapes = {k: v for k, v in shapes_of(mlx).items() if k != "lm_head.weight" and "embed" not in k}
    for table in ("model.embed_tokens", "lm_head"):
        shapes |= {f"{table}{end}": part for end, part in mlx(512, 128, 8).items()}
    summary = summarize(write(make, shapes, {}))
    assert summary.restored.params == PARAMS
    assert [(row.bits, row.params) for row in summary.restored.rows] == [(4, IN_LAYERS), (8, 131_072)]
    assert summary.architecture["vocab_sz"]["value"] == 512


def test_report_says_both_numbers(make, command):
    code, out, _ = command(write(make, shapes_of(gptq), {}))
    text = " ".join(out.split())
    assert code == 0
    assert "parameters 524,928 (525 k)" in text
    assert "stored elements): GPTQ, 4 bits, groups of 64, 393,216 parameters" in text
    shares = [
        float(share) for share in re.findall(r"([\d.]+)% ", out.partition("modules")[2].partition("architecture")[0])
    ]
    assert sum(shares) == pytest.approx(100, abs=0.2)  # of the parameters before packing


def test_plan_is_compared_with_the_model_before(make, command):
    plan = make.write(
        "plan.yaml",
        b"model: {n_layers: 2, hidden_sz: 128, inter_sz: 384, n_q_heads: 4, n_kv_heads: 2, vocab_sz: 512}\n"
        b"parallelism: {tp: 1, pp: 1, dp: 1}\ndata: {gbs: 1, seqlen: 128, microbatch_sz: 1}\nhardware: dgx-h100\n",
    )
    code, out, err = command(write(make, shapes_of(gptq), {}), "--model", plan)
    assert (code, err) == (0, "")
    assert "against the plan: equal" in out
