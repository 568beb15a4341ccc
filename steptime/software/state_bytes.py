"""Bytes per parameter of weights, gradients, master copies and the optimizer's moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.software.settings import StateSettings

PER_ELEMENT = {"adamw": 2.0, "lion": 1.0, "sgd": 1.0}
"""Moments per parameter of the optimizers that treat every element alike: Adam's two, the momentum of Lion and of SGD."""
BLOCK = 256.0
"""Elements that share a scale in 8-bit states (torchao/optim/adam.py; bitsandbytes/functional.py, quantize_blockwise)."""
FP32 = 4.0
"""Bytes of one fp32 number."""
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
    """The states of a dtype recipe; `bytes_of`: bytes per element of a dtype.

    Megatron bf16: 2 + 4 + 4 + 8, the 6 + 12/d of docs/user-guide/features/dist_optimizer.md (NVIDIA/Megatron-LM).
    """
    moments = {"adamw_8bit": QUANTIZED, "adafactor": 0.0}.get(states.optimizer)
    if moments is None:
        moments = PER_ELEMENT.get(states.optimizer, 1.0) * bytes_of(states.moment_dtype)
    params, gradients = bytes_of(states.param_dtype), bytes_of(states.main_grad_dtype)
    return StateBytes(params, gradients, bytes_of(states.master_dtype), moments)
