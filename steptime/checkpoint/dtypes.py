"""Element types of every format under one name (torch's), with their size in bits."""

from __future__ import annotations

from math import prod

from steptime.checkpoint.name_tables import table
from steptime.checkpoint.stored_records import Shape

_TABLES = {key: about["names"] for key, about in table("element_types").items()}
BITS: dict[str, int] = _TABLES["bits"]
SAFETENSORS: dict[str, str] = _TABLES["safetensors"]
TORCH_STORAGES: dict[str, str] = _TABLES["torch_storages"]
TORCH_EXPORT: dict[int, str] = {int(number): name for number, name in _TABLES["torch_export"].items()}
NUMPY: dict[str, str] = _TABLES["numpy"]
GGML: dict[int, tuple[str, int, int]] = {int(number): tuple(about) for number, about in _TABLES["ggml"].items()}
"""Name, elements per block, bytes per block."""
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def short(dtype: str) -> str:
    """The usual short name: bf16 for bfloat16, fp8_e4m3fn for float8_e4m3fn; other names unchanged."""
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
