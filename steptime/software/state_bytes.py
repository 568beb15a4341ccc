"""Bytes per parameter of what training keeps of it: the parameter, its gradient, a master copy, the optimizer's moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from steptime.software.settings import StateSettings

PER_ELEMENT = {"adamw": 2.0, "lion": 1.0, "sgd": 1.0}
"""Moments per parameter of the optimizers that treat every element the same way: Adam's two, the momentum of Lion and of SGD."""
FP32 = 4.0
"""Bytes of one fp32 number."""
BLOCK = 256.0
"""Elements that share a scale in 8-bit states (torchao/optim/adam.py; bitsandbytes/functional.py, quantize_blockwise)."""
QUANTIZED = 2.0 * (1.0 + FP32 / BLOCK)
"""Bytes per parameter of two 8-bit moments with their scales."""


class StateBytes(NamedTuple):
    """Bytes per parameter of each state, unsharded."""

    params: float
    gradients: float
    master: float
    moments: float
    """All moments together of a large matrix; no tensor has fewer (Adam: two for any tensor)."""


def state_bytes(states: StateSettings, bytes_of: Callable[[str], float]) -> StateBytes:
    """The dtype recipe of a profile; `bytes_of`: bytes per element of a state dtype.

    Megatron bf16: 2 + 4 + 4 + 8, the 6 + 12/d of docs/user-guide/features/dist_optimizer.md (NVIDIA/Megatron-LM).
    """
    gradients, master = bytes_of(states.main_grad_dtype), bytes_of(states.master_dtype)
    return StateBytes(bytes_of(states.param_dtype), gradients, master, least_moments(states, bytes_of))


def least_moments(states: StateSettings, bytes_of: Callable[[str], float]) -> float:
    """Bytes of moments per parameter of a large matrix; no tensor has fewer."""
    match states.optimizer:
        case "adamw_8bit":
            return QUANTIZED
        case "adafactor":
            return 0.0
        case _:
            return PER_ELEMENT.get(states.optimizer, 1.0) * bytes_of(states.moment_dtype)
