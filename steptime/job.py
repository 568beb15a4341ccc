"""A job: exactly what a config file holds."""

from __future__ import annotations

from pydantic import Field

from steptime.config import Config
from steptime.machine import Machine
from steptime.mesh import Parallelism
from steptime.model.model import Model
from steptime.performance import Performance


class Data(Config):
    """The batch: gbs sequences of seqlen tokens per step, in micro-batches of microbatch_sz sequences."""

    gbs: int = Field(ge=1)
    seqlen: int = Field(ge=1)
    microbatch_sz: int = Field(ge=1)


class CrossDc(Config):
    """Data parallelism over several data centres."""

    n_dcs: int = Field(ge=2)
    interconnect_bandwidth_gbps: float = Field(gt=0)
    """Total per link between two centres [Gbit/s]."""
    interconnect_latency_s: float = Field(ge=0)


class Run(Config):
    """The whole training run: what it takes in days, money and failures."""

    tokens: float | None = Field(None, gt=0)
    price_per_device_hour: float | None = Field(None, ge=0)
    startup_s: float = Field(0.0, ge=0)
    checkpoint_interval_s: float | None = Field(None, gt=0)
    checkpoint_write_s: float | None = Field(None, gt=0)
    checkpoint_bytes_per_s: float | None = Field(None, gt=0)
    restart_s: float = Field(0.0, ge=0)
    mtbf_device_hours: float | None = Field(None, gt=0)


class Job(Config):
    """One training plan: model + parallelism + performance + data + machine."""

    model: Model
    parallelism: Parallelism
    performance: Performance = Field(default_factory=Performance)
    data: Data
    machine: Machine
    cross_dc: CrossDc | None = None
    run: Run | None = None
