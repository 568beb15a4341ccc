"""The parallelism of a job: its axes, their order over the devices, and which ranks form a group."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from steptime.config import Config


class Fsdp(Config):
    """torch FSDP2's `fully_shard` options (torch/distributed/fsdp/_fully_shard/_fully_shard.py)."""

    reshard_after_forward: bool = True
    prefetch: int = Field(1, ge=0)
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    wrap: Literal["block", "model"] = "block"


class Parallelism(Config):
    """How the job is spread over devices: devices = tp*cp*pp*dp."""

    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    dp: int = Field(ge=1)
    vpp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    sp: bool | None = None
    zero_level: Literal[0, 1, 2, 3] | None = None
    bucket_size_mb: float | None = Field(None, gt=0)
    n_param_buckets: int | None = Field(None, ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    layers_per_stage: list[int] | Literal["auto"] | None = None
    embedding_and_loss_count_as_layers: bool = False
    replicas: int = Field(1, ge=1)
    fsdp: Fsdp | None = None

    @property
    def devices(self) -> int:
        """All devices of the job."""
        return self.tp * self.cp * self.pp * self.dp
