"""Operands as training has them: random, so that the arithmetic draws its power, and cold, since other layers came between."""

from __future__ import annotations

from itertools import cycle
from math import ceil, prod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
CACHES = {"cuda": 64 * 2**20}
"""Last-level cache where torch does not tell it [B]: 50 MB on H100 and H200."""
CPU_CACHE = 32 * 2**20
"""Assumed share of a CPU's last level, and what MPS is taken to have [B]."""
MOST_COPIES = 16
DRAWN = 2**22
T = TypeVar("T")


def torch_dtype(dtype: str) -> torch.dtype:
    """The type that torch has for fp32, tf32, bf16, fp16, fp8 (e4m3)."""
    import torch

    found = getattr(torch, _DTYPES[dtype])
    assert isinstance(found, torch.dtype)
    return found


def random(shape: Sequence[int], dtype: str, device: torch.device) -> torch.Tensor:
    """Normally distributed numbers, DRAWN of them again and again; zeros would let a GPU clock higher than training does."""
    import torch

    count = prod(shape)
    drawn = torch.randn(min(count, DRAWN), device=device).to(torch_dtype(dtype))
    return drawn.repeat(ceil(count / DRAWN))[:count].view(*shape) if count > DRAWN else drawn.view(*shape)


def cache_bytes(device: torch.device) -> int:
    """The last-level cache of a device [B]."""
    import torch

    if device.type == "cuda":
        known = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        return int(known or CACHES["cuda"])
    return CPU_CACHE


def free_bytes(device: torch.device) -> float:
    """Memory that can still be had [B]."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    import psutil

    return float(psutil.virtual_memory().available)


def copies(bytes_: float, device: torch.device) -> int:
    """How many sets of operands of `bytes_` to take in turns so that none is in the cache when its turn comes."""
    return min(max(ceil(2.0 * cache_bytes(device) / bytes_), 1), MOST_COPIES)


def rotate(items: Sequence[T]) -> Callable[[], T]:
    """The next of `items` at every call, round and round."""
    turns = cycle(items)
    return lambda: next(turns)


def release(device: torch.device) -> None:
    """Hand back what torch's allocator holds for later, so that one sweep leaves the next its memory."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
