"""The sections of a config for batch, machine, data centers and the whole run."""

from functools import cached_property
from typing import Any, Self

from steptime.base.config import Config, ConfigError, ConfigProblem
from steptime.base.core_schemas import Field, model_validator
from steptime.base.defaults import no_entries
from steptime.base.units import BytesPerS, Seconds
from steptime.hardware.machine import Machine, shipped_name


class Data(Config):
    """The batch: gbs sequences of seqlen tokens per step, in micro-batches of microbatch_sz sequences."""

    gbs: int = Field(ge=1)
    seqlen: int = Field(ge=1)
    microbatch_sz: int = Field(ge=1)


class Hardware(Config):
    """The machine: a shipped one by name or alias, a file by path, or a `Machine`; `overrides` are dotted machine keys."""

    node_type: str | Machine
    overrides: dict[str, Any] = Field(default_factory=no_entries)
    nodes: int | None = Field(None, ge=1)

    @cached_property
    def machine(self) -> Machine:
        """The machine with the overrides applied.

        Raises:
            ConfigError: the name is unknown, or a figure is bad.
        """
        if isinstance(self.node_type, Machine):
            if self.overrides:
                line = "hardware.overrides: only for a machine given by name or path; change the machine itself"
                raise ConfigError(ConfigProblem(line, "hardware.overrides"))
            return self.node_type
        try:
            return Machine.load(self.node_type, self.overrides)
        except ConfigError as error:
            raise ConfigError(self._located(problem) for problem in error.details) from None

    def to_config(self) -> dict[str, Any]:
        """The section as plain data, a shipped machine by its name and not by an alias."""
        plain = self.model_dump(exclude_defaults=True, exclude={"nodes"})
        if isinstance(self.node_type, str):
            plain["node_type"] = shipped_name(self.node_type)
        return plain

    def _located(self, problem: ConfigProblem) -> ConfigProblem:
        """A machine's problem, with the key of this section that caused it."""
        path = problem.path
        if path.startswith("hardware."):
            return problem
        line = " ".join(problem.line.splitlines())  # file names are reported unchanged
        if any(key == path or key.startswith(f"{path}.") for key in self.overrides):
            return ConfigProblem(f"hardware.overrides.{line}", f"hardware.overrides.{path}")
        return ConfigProblem(f"hardware.node_type: {line}", "hardware.node_type")

    @model_validator(mode="after")
    def _exists(self) -> Self:
        _ = self.machine
        return self


class CrossDc(Config, allow_inf_nan=False):
    """Data parallelism over several data centers."""

    n_dcs: int = Field(ge=2)
    interconnect_bandwidth_gbps: float = Field(ge=1e-3)
    """Total per link between two centers [Gbit/s]."""
    interconnect_latency_s: Seconds = Field(ge=0, le=60)


class Run(Config, allow_inf_nan=False):
    """The whole training run: inputs for its days, cost and failures."""

    tokens: float | None = Field(None, gt=0)
    price_per_device_hour: float | None = Field(None, ge=0)
    startup_s: float = Field(0.0, ge=0)
    checkpoint_interval_s: float | None = Field(None, gt=0)
    checkpoint_write_s: float | None = Field(None, gt=0)
    checkpoint_bytes_per_s: BytesPerS | None = Field(None, ge=1)
    restart_s: float = Field(0.0, ge=0)
    mtbf_device_hours: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _one_speed(self) -> Self:
        if self.checkpoint_write_s is not None and self.checkpoint_bytes_per_s is not None:
            raise ConfigError("run: checkpoint_write_s and checkpoint_bytes_per_s are both set; use one")
        return self
