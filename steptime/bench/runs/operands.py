"""Operands as in training: random, so that power draw is realistic, and not cached, since other layers run in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from math import ceil, prod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

_DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
CACHES = {"cuda": 64 * 2**20}
"""Last-level cache where torch does not report it [B]: 50 MB on H100 and H200."""
CPU_CACHE = 32 * 2**20
"""Assumed share of a CPU's last level, and assumed size for MPS [B]."""
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
    """Normally distributed numbers, DRAWN of them repeated; with zeros a GPU would clock higher than in training."""
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
    """Free memory [B]."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    import psutil

    return float(psutil.virtual_memory().available)


def copies(bytes_: float, device: torch.device) -> int:
    """Number of sets of operands of `bytes_` to use in turns so that none is in the cache when used."""
    return min(max(ceil(2.0 * cache_bytes(device) / bytes_), 1), MOST_COPIES)


def rotate(items: Sequence[T]) -> Callable[[], T]:
    """The next of `items` at every call, cyclically."""
    turns = cycle(items)
    return lambda: next(turns)


def first_line(error: Exception) -> str:
    """The first line of torch's error, for a note."""
    return str(error).partition("\n")[0][:160]


def release(device: torch.device) -> None:
    """Release the memory that torch's allocator caches, so that the next sweep can use it."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
