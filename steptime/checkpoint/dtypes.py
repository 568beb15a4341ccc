"""Element types of every format under one name (torch's), with their size in bits.

Sources: safetensors README "Format" and `safetensors/src/tensor.rs` (Dtype); torch `torch/storage.py`
(_dtype_to_storage_type_map, _new_dtypes); ggml `ggml/src/ggml-common.h` block sizes as listed in
gguf-py `gguf/constants.py` (GGML_QUANT_SIZES); numpy array-interface type strings.
"""

from __future__ import annotations

from math import prod

from steptime.checkpoint.records import Shape

BITS: dict[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "complex32": 32, "complex64": 64, "complex128": 128,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "bool": 8,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e8m0fnu": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8,
    "float8_e4m3": 8, "float4_e2m1fn_x2": 8, "float4_e2m1": 4, "float6_e2m3": 6, "float6_e3m2": 6,
    "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "qint8": 8, "quint8": 8, "qint32": 32, "quint4x2": 8, "quint2x4": 8,
    "bits8": 8, "bits16": 16, "bits1x8": 8, "bits2x4": 8, "bits4x2": 8,
}  # fmt: skip

SAFETENSORS: dict[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F6_E2M3": "float6_e2m3", "F6_E3M2": "float6_e3m2", "F4": "float4_e2m1",
}  # fmt: skip

TORCH_STORAGES: dict[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}  # fmt: skip

NUMPY: dict[str, str] = {
    "f8": "float64", "f4": "float32", "f2": "float16", "c8": "complex64", "c16": "complex128",
    "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8", "u8": "uint64", "u4": "uint32", "u2": "uint16",
    "u1": "uint8", "b1": "bool", "V2": "bfloat16", "bfloat16": "bfloat16", "?": "bool",
}  # fmt: skip

GGML: dict[int, tuple[str, int, int]] = {  # number: (name, elements per block, bytes per block)
    0: ("float32", 1, 4), 1: ("float16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 40), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("int8", 1, 1), 25: ("int16", 1, 2), 26: ("int32", 1, 4), 27: ("int64", 1, 8), 28: ("float64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bfloat16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
}  # fmt: skip

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def short(dtype: str) -> str:
    """The name people write: bf16 for bfloat16, fp8_e4m3fn for float8_e4m3fn; other names unchanged."""
    return _SHORT.get(dtype, dtype.replace("float8", "fp8"))


def nbytes(shape: Shape, dtype: str) -> int | None:
    """Bytes of a dense tensor of `shape` elements (sub-byte types rounded up); None when the type is not known."""
    bits = BITS.get(dtype)
    return None if bits is None else (prod(shape) * bits + 7) // 8


def itemsize(dtype: str) -> int:
    """Bytes of one element, 1 at least; 0 when the type is not known."""
    return max(1, BITS[dtype] // 8) if dtype in BITS else 0


def from_numpy(descr: str) -> str:
    """The name of a numpy type string such as '<f4', '|b1' or 'float32'; unknown ones come back as they are."""
    bare = descr.lstrip("<>|=")
    return NUMPY.get(bare, bare)
