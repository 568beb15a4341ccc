"""DeepSpeed's ZeRO-Offload: what a ds_config or accelerate's own keys put into host memory."""

from __future__ import annotations

from typing import Any

from steptime.launch.job_keys import JobKeys

_OPTIMIZER_AT = ("zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload")
_RATIO = "zero_optimization.offload_optimizer.ratio"
_ROUND_ROBIN = "zero_optimization.round_robin_gradients"
_PARAMS_AT = (
    "zero_optimization.offload_param.device", "zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params",
)  # fmt: skip


def offload_of(
    keys: JobKeys, level: int, optimizer: tuple[str, ...] = _OPTIMIZER_AT, params: tuple[str, ...] = _PARAMS_AT
) -> dict[str, Any]:
    """What ZeRO-Offload keeps on the host: optimizer states, or a ratio of them, and parameters.

    `optimizer` and `params`: the keys that set it, the device first, then older switches.
    """
    found: dict[str, Any] = {}
    for part, names, what in (("optimizer", optimizer, "optimizer states"), ("params", params, "parameters")):
        said = [name for name in names if str(keys.get(name)).lower() not in {"none", "null", "false"}]
        if not said:
            continue
        device = str(keys.get(said[0]))
        if part == "params" and level != 3:
            keys.without_effect(said[0], f"parameters leave the device only at stage 3 (got {level}; zero/config.py)")
        elif device not in {"cpu", "True"}:
            keys.leave_out(said[0], f"{what} on {device}")
        elif not level:
            keys.leave_out(said[0], f"{what} in host memory at stage 0")
        elif part == "optimizer":
            found |= _states_of(keys, level)
        else:
            found["params"] = True
    if "params" in found and "optimizer" not in found:  # partitions on the host, updated on the device
        keys.leave_out(params[0], "parameters in host memory without optimizer states")
        return {}
    return found


def _states_of(keys: JobKeys, level: int) -> dict[str, Any]:
    """The share of the states, which is 1 below stage 3 (zero/config.py, offload_ratio_check), and who owns what there."""
    share = float(keys.get(_RATIO) or 1.0)
    if level == 3:
        return {"optimizer": share}
    if share < 1.0:
        keys.fail(_RATIO, f"DeepSpeed needs stage 3 for less than 1 (got {share:g}, stage {level})")
    return {"optimizer": share} | ({"round_robin": True} if keys.on(_ROUND_ROBIN) else {})
