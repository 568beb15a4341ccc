"""From the parts of one quantized weight: its shape before, its bits, how many elements share a scale.

Every rule takes the parts and gives the weight, or None where the shapes do not match the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from steptime.checkpoint import weight_names as names
from steptime.checkpoint.dtypes import BITS
from steptime.checkpoint.stored_records import Shape, StoredTensor

HQQ_PARTS = (
    "nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize",
    "round_zero",
)  # fmt: skip
_GROUP = 64  # MLX's and HQQ's default
_E4M3, _PER_INT32 = "float8_e4m3fn", 10  # HQQ packs ten numbers of 3 bits into an int32


class Weight(NamedTuple):
    """A weight before quantization: its shape, and how it was packed."""

    shape: Shape
    method: str
    bits: int | None
    group: int | None = None


class PackedParts(NamedTuple):
    """The `main` packed tensor of the weight `name`, its other parts (`others`) by name, the config's words."""

    name: str
    main: StoredTensor
    others: dict[str, StoredTensor]
    stated: dict[str, Any]
    width: int
    rule: Callable[[PackedParts], Weight | None]

    def shape(self, part: str) -> Shape:
        """Shape of a part; () where there is none."""
        found = self.others.get(part)
        return () if found is None else found.whole


def stated_bits(stated: dict[str, Any]) -> int | None:
    """Bits that a quantization config names under any of its keys."""
    groups = stated.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    nested = stated.get("quant_config")
    hqq = nested.get("weight_quant_params") if isinstance(nested, dict) else None
    values = [stated.get("bits"), stated.get("w_bit"), stated.get("nbits")]
    values += [weights.get("num_bits")] if isinstance(weights, dict) else []
    values += [hqq.get("nbits")] if isinstance(hqq, dict) else []
    return next((v for v in values if type(v) is int and 1 <= v <= 16), None)


def _words(main: StoredTensor) -> int:
    """Bits of one stored element."""
    return BITS.get(main.dtype, 8)


def read_bits(tensors: list[StoredTensor], width: int) -> dict[str, int]:
    """Bits where no config states them: of words that read the model's `width`, or of HQQ's query as wide as the model."""
    ends = tuple(f".{name}.weight_packed" for name in ("q_proj", "qkv_proj", "up_proj", "gate_up_proj"))
    one = next((t for t in tensors if t.name.endswith((*ends, ".q_proj.W_q")) and len(t.shape) == 2), None)
    if one is None:
        return {}
    read = width * width if one.name.endswith("W_q") else width * one.shape[0]
    bits = _exact(_words(one) * one.numel, read)
    return {"bits": bits} if bits else {}


def _exact(whole: int, parts: int) -> int | None:
    return whole // parts if parts and whole % parts == 0 else None


def integers(parts: PackedParts) -> Weight | None:
    """GPTQ packs along the input, AWQ along the output; zero points are packed along the output in both."""
    main, scales, zeros = parts.main.whole, parts.shape("scales"), parts.shape("qzeros")
    if len(main) != 2 or len(scales) != 2:
        return None
    word = _words(parts.main)
    bits = (_exact(word * zeros[1], scales[1]) if len(zeros) == 2 else None) or stated_bits(parts.stated) or 4
    if main[1] == scales[1] and (parts.stated.get("quant_method") != "awq"):  # [in * bits / 32, out]
        inputs = prod(parts.shape("g_idx")) or main[0] * word // bits
        return Weight((scales[1], inputs), _named(parts, "GPTQ"), bits, _exact(inputs, scales[0]))
    if main[1] * word == scales[1] * bits:  # [in, out * bits / 32]
        return Weight((scales[1], main[0]), "AWQ", bits, _exact(main[0], scales[0]))
    if main[0] in scales:  # AWQ's GEMV: [out, in * bits / 32], scales padded
        bits = stated_bits(parts.stated) or 4
        group = parts.stated.get("group_size")
        return Weight((main[0], main[1] * word // bits), "AWQ", bits, group if type(group) is int else None)
    return None


def _named(parts: PackedParts, method: str) -> str:
    """The config's name for a layout that several methods share (AutoRound and others write GPTQ's)."""
    stated = str(parts.stated.get("quant_method", method))
    return method if stated.lower() == method.lower() else f"{stated} ({method} layout)"


def hqq(parts: PackedParts) -> Weight | None:
    """Rows of groups: [groups * bits / 8, group] with a scale per row, or the transpose."""
    main, scale = parts.main.whole, parts.shape("scale")
    if len(main) != 2 or len(scale) != 2:
        return None
    stored = prod(main) * _words(parts.main)
    if scale[1] == 1:
        count, group = scale[0] * main[1], main[1]
        bits = 3 if parts.main.dtype == "int32" else _exact(stored, count)
    else:
        bits = 3 if parts.main.dtype == "int32" else stated_bits(parts.stated) or _exact(8 * main[0], _GROUP) or 4
        rows = main[0] * (_PER_INT32 if bits == 3 else _words(parts.main) // bits)
        group = 1 << (rows.bit_length() - 1) if bits == 3 else rows
        count = group * main[1]
    return Weight(unflattened(parts, count), "HQQ", bits, group)


def unflattened(parts: PackedParts, count: int) -> Shape:
    """[out, in] of a weight stored flat: one side is the model's width; the name determines which."""
    other = _exact(count, parts.width)
    if other is None:
        return (count,)
    down = any(names.ends(parts.name, name) for name in (*names.DOWN, *names.OUT))
    return (parts.width, other) if down else (other, parts.width)


def compressed(parts: PackedParts) -> Weight | None:
    """compressed-tensors: integers packed along the input in int32, or two FP4 numbers in a byte."""
    main, scale = parts.main.whole, parts.shape("weight_scale")
    if len(main) < 2:
        return None
    if parts.main.dtype == "uint8":
        return _microfloat(main, parts.others.get("weight_scale"), "weight_global_scale" in parts.others)
    if not scale:
        return None
    bits = stated_bits(parts.stated) or 4
    inputs = main[-1] * _words(parts.main) // bits
    return Weight((*main[:-1], inputs), "compressed-tensors", bits, _exact(inputs, scale[-1]))


def _microfloat(main: Shape, scale: StoredTensor | None, nvidia: bool) -> Weight | None:
    """Packed along the input: NVFP4 has a scale per 16 elements and one for the tensor, MXFP4 and MXFP6 one per 32."""
    if nvidia:
        return Weight((*main[:-1], 2 * main[-1]), "NVFP4", 4, 16)
    inputs = 32 * scale.whole[-1] if scale is not None and scale.shape else 0
    bits = _exact(8 * main[-1], inputs)
    return Weight((*main[:-1], inputs), f"MXFP{bits}", bits, 32) if bits in (4, 6) else None


def _rows(main: Shape, scale: StoredTensor) -> Weight | None:
    """Packed along the output: BitNet has four numbers a byte and one scale, ModelOpt's INT4 two and a scale per group."""
    if prod(scale.whole) == 1:
        return Weight((4 * main[0], *main[1:]), "BitNet", 2)
    if len(main) == len(scale.whole) and scale.whole[-2] == 2 * main[-2]:
        return Weight((*scale.whole[:-1], main[-1]), "ModelOpt INT4", 4, _exact(main[-1], scale.whole[-1]))
    return None


def exl2(parts: PackedParts) -> Weight | None:
    """ExLlamaV2: each group of inputs has its own bits; a permutation has as many entries as there are inputs."""
    main, inputs = parts.main.whole, parts.shape("q_invperm")
    if len(main) != 2 or len(inputs) != 1:
        return None
    return Weight((main[1], *inputs), "EXL2", round(32 * main[0] / max(1, *inputs)))


def microscaled(parts: PackedParts) -> Weight | None:
    """gpt-oss: blocks [..., groups, 16] of two FP4 numbers a byte, scales [..., groups]."""
    main, scales = parts.main.whole, parts.shape("scales")
    if parts.main.dtype != "uint8" or len(main) < 3 or main[:-1] != scales:
        return None
    group = 2 * main[-1]
    return Weight((*main[:-2], main[-2] * group), "MXFP4", 4, group)


def torchao(parts: PackedParts) -> Weight | None:
    """A torchao tensor in safetensors: data under its own name; a byte of uint8 holds two numbers."""
    main, scale = parts.main.whole, parts.shape("weight_scale")
    if len(main) == 4 and parts.main.dtype == "int32":  # tile-packed for tinygemm: eight numbers of 4 bits
        return Weight(unflattened(parts, 8 * prod(main)), "torchao", 4)
    if parts.main.dtype == "uint8" and len(main) >= 2:
        inputs = 2 * main[-1]
        groups = scale[-1] if scale and scale[0] == main[0] else scale[0] if scale else 0
        fp4 = parts.others.get("weight_scale")
        method = "torchao NVFP4" if fp4 is not None and fp4.dtype == _E4M3 else "torchao"
        return Weight((*main[:-1], inputs), method, 4, _exact(inputs, groups))
    group = _exact(main[-1], scale[-1]) if main and len(scale) == len(main) > 1 and scale[-1] > 1 else None
    return Weight(main, "torchao FP8" if "float8" in parts.main.dtype else "torchao", _words(parts.main), group)


def subclass(parts: PackedParts) -> Weight | None:
    """A pickled tensor subclass, whose record has the shape before; the bytes are those of its parts."""
    main = parts.main
    if not main.nbytes or not main.numel:
        return None
    bits = max((b for b in (1, 2, 3, 4, 8, 16) if b * main.numel <= 8 * main.nbytes), default=None)
    return Weight(main.whole, f"torchao {main.note}", bits) if bits and bits < 16 else None


def quanto(parts: PackedParts) -> Weight | None:
    """optimum-quanto: int8 or FP8 as it is; below 8 bits rows of groups, packed along the rows."""
    main, scale = parts.main.whole, parts.shape("weight._scale")
    if parts.main.dtype != "uint8":
        return Weight(main, "quanto", _words(parts.main))
    if len(main) != 2 or len(scale) != 2 or scale[1] != 1:
        return None
    count = scale[0] * main[1]
    return Weight(unflattened(parts, count), "quanto", _exact(8 * prod(main), count), main[1])


def scaled(parts: PackedParts) -> Weight | None:
    """A quantized matrix stored under the weight's own name; the tensors next to it determine the method."""
    main, others = parts.main, parts.others
    shape = main.whole
    if "quant_map" in others:
        kind = "NF4" if "quant_state.bitsandbytes__nf4" in others else "FP4"
        count = 2 * prod(shape) * _words(main) // 8
        group = _exact(count, prod(parts.shape("absmax")))
        return Weight(unflattened(parts, count), f"bitsandbytes {kind}", 4, group)
    if "SCB" in others:
        return Weight(shape, "bitsandbytes LLM.int8()", 8)
    if main.dtype in ("uint32", "int32") and "scales" in others:
        return _mlx(parts)
    scale = next((others[key] for key in ("scale", "weight_scale", "scale_inv") if key in others), None)
    if scale is None or len(shape) < 2:
        return None
    if main.dtype == "uint8":
        return _rows(shape, scale) or _microfloat(shape, scale, scale.dtype == _E4M3)
    if main.dtype == "int8" or "float8" in main.dtype:  # rows or blocks of rows share a scale
        return Weight(shape, "INT8" if main.dtype == "int8" else "FP8", 8)
    return None


def _mlx(parts: PackedParts) -> Weight | None:
    """MLX: [out, in * bits / 32] with scales [out, in / group]; else the group is 64, of micro-floats 32 (NVFP4 16)."""
    shape, scales = parts.main.whole, parts.shape("scales")
    if len(scales) != len(shape) or not scales[-1]:
        return None
    group = parts.stated.get("group_size")
    if type(group) is not int or group < 1:
        micro = parts.others["scales"].dtype == "uint8"
        group = _GROUP if not micro else 16 if shape[-1] == 2 * scales[-1] else 32
    inputs = scales[-1] * group
    bits = _exact(shape[-1] * 32, inputs)
    return Weight((*shape[:-1], inputs), "MLX", bits, group) if bits in (2, 3, 4, 5, 6, 8) else None
