"""Weights that were quantized: the tensors as they were before, method and bits, from names and shapes.

A quantized matrix is stored as packed integers and scales; the names of the parts determine the method, and the ratios of their
shapes the bits. Layouts: AutoGPTQ `nn_modules/qlinear` (qweight, qzeros, scales, g_idx), AutoAWQ `modules/linear/gemm.py`,
bitsandbytes `functional.py` (QuantState.as_dict) and `nn/modules.py` (SCB), HQQ `core/quantize.py` and `core/bitpack.py`,
compressed-tensors `compressors` (weight_packed), NVIDIA ModelOpt `torch/quantization/qtensor` (weight_scale, weight_scale_2),
gpt-oss (blocks, scales), MLX `mlx/nn/layers/quantized.py`, torchao `prototype/safetensors/safetensors_support.py`, optimum-quanto
`tensor/weights`; DeepSeek-V3 `weight_scale_inv`; BitNet transformers `integrations/bitnet.py`; ExLlamaV2 `linear.py` (q_weight,
q_invperm).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from steptime.checkpoint import packed
from steptime.checkpoint.confignames import from_config
from steptime.checkpoint.dtypes import BITS
from steptime.checkpoint.stored_records import StoredTensor

Named = dict[str, StoredTensor]
_PARTS: tuple[tuple[str, str, Callable[[packed.PackedParts], packed.Weight | None], tuple[str, ...]], ...] = (
    # (end of the packed tensor's name, end of the weight's, rule, parts beside it)
    (".qweight", ".weight", packed.integers, ("qzeros", "scales", "g_idx")),
    (".q_weight", ".weight", packed.exl2, ("q_scale", "q_scale_max", "q_groups", "q_invperm", "q_perm", "q_group_map")),
    (".W_q", ".weight", packed.hqq, packed.HQQ_PARTS),
    (".weight_packed", ".weight", packed.compressed, (
        "weight_scale", "weight_global_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_global_scale",
        "input_scale")),
    ("._weight_qdata", ".weight", packed.torchao, ("_weight_scale", "_weight_zero_point", "_weight_zero",
                                                   "_weight_scale_and_zero", "_weight_per_tensor_scale",
                                                   "_weight_act_per_tensor_scale", "_weight_act_pre_scale")),
    (".weight._data._data", ".weight", packed.quanto, ("weight._scale", "weight._shift", "input_scale", "output_scale")),
    (".weight._data", ".weight", packed.quanto, ("weight._scale", "weight._shift", "input_scale", "output_scale")),
    ("_blocks", "", packed.microscaled, ("_scales",)),
    (".blocks", "", packed.microscaled, (".scales",)),
)  # fmt: skip
_ENDS = tuple(end for end, *_ in _PARTS)
_HINTS = (".W_q", ".quant_map")  # of packed weights that are stored as floats; all others have a part of integers
_PACKED = {name for name, bits in BITS.items() if bits == 8} | {"int32", "uint32"}
_OWN_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4",
           "quant_state.bitsandbytes__fp4")  # fmt: skip
_SCALES = ("_scale", "_scale_inv", "_scale_2", "_weight_scale", "_weight_scale_2", "_input_scale", "_zero_point")
_MODULE_PARTS = ("SCB", "CB", "weight_format", "scales", "biases", "input_scale", "output_scale", "input_global_scale",
                 "input_zero_point", "pre_quant_scale")  # fmt: skip
_TORCHAO = re.compile(r"^(?!Sharded|D)\w+Tensor$")


class Row(NamedTuple):
    """Weights of one kind: elements before quantization, bytes stored for them with their scales."""

    method: str
    bits: int | None
    group_size: int | None
    tensors: int
    params: int
    bytes: int


@dataclass(slots=True)
class Restored:
    """The model's `tensors` as before quantization, and what was quantized by method, most first."""

    tensors: list[StoredTensor]
    rows: list[Row]

    @property
    def params(self) -> int:
        """Unique elements of the model before quantization."""
        return sum(tensor.unique for tensor in self.tensors)


def restore(tensors: list[StoredTensor], facts: list[dict[str, Any]]) -> Restored:
    """Undo what names and shapes show of quantization; tensors that are not quantized stay themselves."""
    stated = stated_method(facts)
    packs = not _PACKED.isdisjoint({t.dtype for t in tensors}) or {t.note for t in tensors} - {""}
    if not (stated or packs or True in {t.name.endswith(_HINTS) for t in tensors}):
        return Restored(tensors, [])
    named = {tensor.name: tensor for tensor in tensors}
    width = _width(tensors, facts)
    stated = stated or packed.read_bits(tensors, width)
    gone: set[str] = set()
    found: list[StoredTensor] = []
    sums: dict[tuple[str, int | None, int | None], list[int]] = {}
    for tensor in tensors:
        parts = _parts(tensor, named, stated, width)
        weight = parts and parts.rule(parts)
        if not parts or weight is None:
            found.append(tensor)
            continue
        stored = [tensor, *parts.others.values()]
        gone.update(part.name for part in stored if part.name != parts.name)
        unique = prod(weight.shape) if tensor.unique else 0
        nbytes = sum(part.nbytes for part in stored)
        whole = replace(tensor, name=parts.name, shape=weight.shape, nbytes=nbytes, global_shape=None, offsets=None)
        whole.unique = unique
        found.append(whole)
        row = sums.setdefault((weight.method, weight.bits, weight.group), [0, 0, 0])
        for i, n in enumerate((1, unique, nbytes)):
            row[i] += n
    rows = sorted((Row(*kind, *row) for kind, row in sums.items()), key=lambda row: -row.params)
    if not rows and stated.get("quant_method"):
        rows = [Row(str(stated["quant_method"]), packed.stated_bits(stated), None, 0, 0, 0)]
    return Restored([t for t in found if t.name not in gone] if gone else tensors, rows)


def stated_method(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The config's quantization section: `quantization_config` (Hugging Face) or `quantization` (MLX)."""
    for fact in facts:
        config = fact.get("config")
        for key in ("quantization_config", "compression_config", "quantization"):
            stated: Any = config.get(key) if isinstance(config, dict) else None
            if isinstance(stated, dict) and stated:
                return ({"quant_method": "mlx"} if key == "quantization" else {}) | stated
    return {}


def _width(tensors: list[StoredTensor], facts: list[dict[str, Any]]) -> int:
    """The model's width, which determines the rows of a flat weight: from a config, else the most common length of a norm."""
    for fact in facts:
        for _, known in from_config(fact):
            if type(known.get("hidden_sz")) is int:
                return int(known["hidden_sz"])
    widths = [t.shape[0] for t in tensors if len(t.shape) == 1 and "norm" in t.name]
    return max(set(widths), key=widths.count) if widths else 0


def _parts(tensor: StoredTensor, named: Named, stated: dict[str, Any], width: int) -> packed.PackedParts | None:
    """The parts of the weight that `tensor` is the packed matrix of; None for every other tensor."""
    name = tensor.name
    for end, weight, rule, endings in _PARTS if name.endswith(_ENDS) else ():
        if name.endswith(end):
            stem, joint = name.removesuffix(end), "." if weight else ""
            parts = {key.lstrip("._"): part for key in endings if (part := named.get(f"{stem}{joint}{key}"))}
            return packed.PackedParts(f"{stem}{weight}", tensor, parts, stated, width, rule)
    if _TORCHAO.match(tensor.note):
        return packed.PackedParts(name, tensor, {}, stated, width, packed.subclass)
    if tensor.shape and (tensor.dtype in _PACKED or f"{name}.quant_map" in named):
        return _scaled_parts(tensor, named, stated, width)
    return None


def _scaled_parts(tensor: StoredTensor, named: Named, stated: dict[str, Any], width: int) -> packed.PackedParts | None:
    """A tensor under the weight's own name with scales: bitsandbytes, FP8, INT8, NVFP4, MLX."""
    name = tensor.name
    stem = name.removesuffix(".weight")
    keys = {key: f"{name}.{key}" for key in _OWN_PARTS} | {key.lstrip("_"): f"{name}{key}" for key in _SCALES}
    if stem != name:
        keys |= {key: f"{stem}.{key}" for key in _MODULE_PARTS}
    parts = {key: part for key, other in keys.items() if (part := named.get(other)) is not None and part is not tensor}
    if not parts or parts.keys() <= {"input_scale", "output_scale", "pre_quant_scale"}:
        return None
    return packed.PackedParts(name, tensor, parts, stated, width, packed.scaled)
