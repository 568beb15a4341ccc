"""A device and a network slowed by one factor, for a calibration."""

from __future__ import annotations

from steptime.cost.rates import Rates
from steptime.hardware.machine import Tier

RATES = (
    "gemm_flops",
    "recipe_flops",
    "experts_flops",
    "attention_forward_flops",
    "attention_backward_flops",
    "bytes_per_s",
    "elements_per_s",
    "drawn_per_s",
    "scan_flops",
    "conv_bytes_per_s",
    "chunk_flops",
)
TIMES = ("gemm_kernel_s", "move_kernel_s", "slowness")


def slower_rates(rates: Rates, factor: float) -> Rates:
    """Every rate divided and every time multiplied by the factor."""
    if factor == 1.0:
        return rates
    slower = {name: getattr(rates, name) / factor for name in RATES}
    return rates._replace(**slower, **{name: getattr(rates, name) * factor for name in TIMES})


def slower_tiers(tiers: tuple[Tier, ...], factor: float) -> tuple[Tier, ...]:
    """Links and hops slowed by the factor. The fixed cost of a collective is not scaled: tens of microseconds."""
    if factor == 1.0:
        return tiers
    return tuple(
        tier.model_copy(
            update={
                "bytes_per_s": tier.bytes_per_s / factor,
                "link_bytes_per_s": None if tier.link_bytes_per_s is None else tier.link_bytes_per_s / factor,
                "latency_s": tier.latency_s * factor,
            }
        )
        for tier in tiers
    )
