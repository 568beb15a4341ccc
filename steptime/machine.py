"""Machines: an accelerator and the network tiers around it."""

from __future__ import annotations

from pydantic import Field

from steptime.config import Config


class Tier(Config):
    """One network level: `size` devices reach each other at `bytes_per_s`. Tiers stand innermost first."""

    name: str
    size: float = Field(gt=0)
    """Devices in one domain of this tier; inf for the outermost."""
    bytes_per_s: float = Field(gt=0)
    """Per device, one way [B/s]: the wire rate."""
    latency_s: float = Field(ge=0)
    """One hop [s]."""
    efficiency: float = Field(0.8, gt=0, le=1)
    """Share of the wire rate that a large ring collective reaches."""
    nics_per_node: float | None = Field(None, gt=0)
    in_network_reduction: bool = False


class Accelerator(Config):
    """One device: dense peaks, what long GEMMs sustain, and memory."""

    name: str
    peak_flops: dict[str, float]
    """Dense peak by dtype [FLOP/s]. Never a sparse one."""
    sustained_flops: dict[str, float] = Field(default_factory=dict)
    """What a large GEMM sustains, by dtype [FLOP/s]."""
    memory_bytes: float = Field(gt=0)
    usable_memory_bytes: float = Field(gt=0)
    """What a program can have before any context is made [B]."""
    memory_bytes_per_s: float = Field(gt=0)
    memory_efficiency: float = Field(0.85, gt=0, le=1)
    """Share of memory_bytes_per_s that streaming kernels reach."""
    attention_forward_efficiency: float = Field(0.5, gt=0, le=1)
    """Flash attention: share of the dense peak, counting only the causal half."""
    attention_backward_efficiency: float = Field(0.4, gt=0, le=1)
    sm_count: int | None = None
    power_w: float | None = None


class Machine(Config):
    """A node type and its network."""

    name: str
    aliases: list[str] = Field(default_factory=list)
    accelerator: Accelerator
    devices_per_node: int = Field(ge=1)
    tiers: list[Tier] = Field(min_length=1)
    price_per_device_hour: float | None = None
    measured: bool = False
    """Whether published training runs on this machine are part of the validation."""
    provenance: dict[str, str] = Field(default_factory=dict)
    """Dotted path of a figure -> where it comes from."""
