"""A device and a network on which everything takes longer by one factor: what a calibration asks for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from steptime.cost.rates import Rates
from steptime.hardware.machine import Tier


def slower_rates(rates: Rates, factor: float) -> Rates:
    """Every rate (`_flops`, `_per_s`) divided and every time (`_s`, slowness) multiplied by the factor; names carry the units."""
    if factor == 1.0:
        return rates
    changed: dict[str, Any] = {}
    for field in fields(rates):
        value = getattr(rates, field.name)
        if field.name.endswith(("_flops", "_per_s")):
            changed[field.name] = value / factor
        elif field.name.endswith("_s") or field.name == "slowness":
            changed[field.name] = value * factor
    return replace(rates, **changed)


def slower_tiers(tiers: tuple[Tier, ...], factor: float) -> tuple[Tier, ...]:
    """Links and hops slowed by the factor. What a collective costs before its first hop stays: tens of microseconds."""
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
