"""A job: exactly what a config file holds, read, resolved and checked.

Sections stand side by side: model, parallelism, performance, data, hardware, and optionally cross_dc, run and notes. What they
leave unsaid comes from a software profile; the properties of `Job` give the resolved values, and nothing downstream looks at
the unresolved ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from steptime import rules
from steptime.assumptions import assumptions
from steptime.config import Config, ConfigError, build
from steptime.document import parse_mapping, read_source
from steptime.facts import facts, layers_per_chunk
from steptime.limits import NOT_MODELLED
from steptime.machine import Machine
from steptime.mesh import Parallelism
from steptime.model.model import Model
from steptime.performance import Options, Performance, Software, resolve
from steptime.plan import RecomputePlan, plan_recompute
from steptime.sections import anchor, apply_setting, mend, one_line, put, read_hardware, read_model
from steptime.units import BytesPerS, Seconds


class Data(Config):
    """The batch: gbs sequences of seqlen tokens per step, in micro-batches of microbatch_sz sequences."""

    gbs: int = Field(ge=1)
    seqlen: int = Field(ge=1)
    microbatch_sz: int = Field(ge=1)


class Hardware(Config):
    """The machine: a shipped one by name or alias, a file by path, or a `Machine`; `overrides` are dotted machine keys."""

    node_type: str | Machine
    overrides: dict[str, Any] = Field(default_factory=dict)

    @cached_property
    def machine(self) -> Machine:
        """The machine with the overrides applied.

        Raises:
            ConfigError: the name is unknown, or a figure is bad.
        """
        if isinstance(self.node_type, Machine):
            if self.overrides:
                raise ConfigError(
                    "hardware.overrides: only for a machine given by name or path; change the machine itself"
                )
            return self.node_type
        try:
            return Machine.load(self.node_type, self.overrides)
        except ValueError as error:
            raise ConfigError(self._located(line) for line in str(error).splitlines()) from None

    def _located(self, line: str) -> str:
        """A machine's problem under the key of this section that it comes from."""
        if line.startswith("hardware."):
            return line
        path = line.partition(":")[0]
        overridden = any(key == path or key.startswith(f"{path}.") for key in self.overrides)
        return f"hardware.overrides.{line}" if overridden else f"hardware.node_type: {line}"

    @model_validator(mode="after")
    def _exists(self) -> Self:
        _ = self.machine
        return self


class CrossDc(Config, allow_inf_nan=False):
    """Data parallelism over several data centres."""

    n_dcs: int = Field(ge=2)
    interconnect_bandwidth_gbps: float = Field(gt=0)
    """Total per link between two centres [Gbit/s]."""
    interconnect_latency_s: Seconds = Field(ge=0)


class Run(Config, allow_inf_nan=False):
    """The whole training run: what it takes in days, money and failures."""

    tokens: float | None = Field(None, gt=0)
    price_per_device_hour: float | None = Field(None, ge=0)
    startup_s: float = Field(0.0, ge=0)
    checkpoint_interval_s: float | None = Field(None, gt=0)
    checkpoint_write_s: float | None = Field(None, gt=0)
    checkpoint_bytes_per_s: BytesPerS | None = Field(None, gt=0)
    restart_s: float = Field(0.0, ge=0)
    mtbf_device_hours: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _one_speed(self) -> Self:
        if self.checkpoint_write_s is not None and self.checkpoint_bytes_per_s is not None:
            raise ConfigError("run: checkpoint_write_s and checkpoint_bytes_per_s are both given; keep one")
        return self


class Job(Config):
    """One training plan. Two jobs are equal when they resolve to the same plan, however much of it was said.

    >>> job = Job(
    ...     model="llama3-70b",
    ...     parallelism=Parallelism(tp=8, pp=4, dp=32),
    ...     data={"gbs": 2048, "seqlen": 8192, "microbatch_sz": 1},
    ...     hardware="dgx-h100",
    ... )
    >>> job.microbatches
    64

    Raises:
        ConfigError: one line per problem: unknown, missing or wrong keys, and layouts that cannot run.
    """

    model: Annotated[Model, BeforeValidator(read_model)]
    parallelism: Parallelism
    performance: Performance = Field(default_factory=Performance)
    data: Data
    hardware: Annotated[Hardware, BeforeValidator(read_hardware)]
    cross_dc: CrossDc | None = None
    run: Run | None = None
    notes: list[Annotated[str, AfterValidator(one_line)]] = Field(default_factory=list)
    """What a reader of the plan should know, such as flags of a launch script that are left out; shown under assumptions."""

    not_modelled: ClassVar[Mapping[str, str]] = NOT_MODELLED

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        problems = rules.problems(facts(self))
        if problems:
            raise ConfigError(problems)
        return self

    # --- in and out ----------------------------------------------------------------------------------------------------

    @staticmethod
    def load(source: str | Path, sets: Iterable[str] = ()) -> Job:
        """A job from a YAML or JSON file, "-" (standard input) or the text itself, with `a.b=c` settings over it.

        Paths inside the config (a machine file, an HF config.json) are relative to the config file, those of settings to the
        working directory.

        Raises:
            ConfigError: one line per problem.
        """
        text, name = read_source(source)
        data = parse_mapping(text, name)
        is_file = isinstance(source, Path) or name == source
        anchor(data, Path(name).parent if is_file else Path())
        problems: list[str] = []
        for setting in sets:
            try:
                apply_setting(data, setting)
            except ConfigError as error:
                problems += error.problems
        return _build(data, problems)

    def replace(self, **changes: Any) -> Job:
        """This job with dotted keys changed, resolved and checked anew: `job.replace(**{"parallelism.tp": 4})`.

        What was unsaid stays unsaid and is resolved again.

        Raises:
            ConfigError: one line per problem.
        """
        data: dict[str, Any] = {key: getattr(self, key) for key in Job.model_fields}
        for path, value in changes.items():
            section = path.partition(".")[0]
            if path != section and isinstance(data.get(section), Config):
                data[section] = data[section].model_dump(exclude_unset=True)
            put(data, path, value)
        return build(Job, data)

    def to_config(self) -> dict[str, Any]:
        """The resolved job as plain data: complete and runnable, with nothing left to a profile."""
        parallelism = self.parallelism.model_dump(exclude_none=True)
        resolved: dict[str, Any] = {"sp": self.sp, "zero_level": self.zero_level, "schedule": self.schedule}
        if self.parallelism.cp > 1:
            resolved["cp_comm_type"] = self.cp_comm_type
        performance = {key: getattr(self.software, key) for key in Options.model_fields}
        config: dict[str, Any] = {
            "model": self.model.model_dump(exclude_none=True),
            "parallelism": parallelism | resolved,
            "performance": {
                "software": self.software.name,
                **self.recompute.to_config(),
                **performance,
                "overlap": self.software.overlap.model_dump(exclude_none=True),
            },
            "data": self.data.model_dump(),
            "hardware": self.hardware.model_dump(exclude_defaults=True),
        }
        if self.performance.calibration is not None:
            config["performance"]["calibration"] = self.performance.calibration.model_dump()
        for key, section in (("cross_dc", self.cross_dc), ("run", self.run)):
            if section is not None:
                config[key] = section.model_dump(exclude_none=True)
        return config | ({"notes": self.notes} if self.notes else {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.to_config() == other.to_config()

    def __hash__(self) -> int:
        return hash((self.model.n_layers, self.parallelism.devices, self.data.gbs))

    # --- resolved ------------------------------------------------------------------------------------------------------

    @property
    def machine(self) -> Machine:
        """The machine, overrides applied."""
        return self.hardware.machine

    @cached_property
    def software(self) -> Software:
        """The profile with this job's options over it; nothing in it is unset."""
        default = "fsdp2" if self.parallelism.fsdp is not None else "megatron-core"
        found = resolve(self.performance, default, interleaved=self.parallelism.vpp > 1)
        return found.on(self.machine.accelerator)

    @cached_property
    def microbatches(self) -> int:
        """Micro-batches per step and pipeline: gbs / (dp * microbatch_sz)."""
        return self.data.gbs // (self.parallelism.dp * self.data.microbatch_sz)

    @cached_property
    def sp(self) -> bool:
        """Sequence parallelism: as said, else the profile's; without tensor parallelism there is none."""
        said = self.parallelism.sp
        return (self.software.sp if said is None else said) and self.parallelism.tp > 1

    @cached_property
    def cp_comm_type(self) -> Literal["p2p", "all_gather", "a2a"]:
        """How the ranks that share a sequence exchange keys and values: as said, else the profile's."""
        return self.parallelism.cp_comm_type or self.software.cp_comm_type

    @cached_property
    def zero_level(self) -> Literal[0, 1, 2, 3]:
        """ZeRO level: as said; FSDP is 3, or 2 where parameters stay gathered after forward; else the profile's."""
        said, fsdp = self.parallelism.zero_level, self.parallelism.fsdp
        if said is not None:
            return said
        if fsdp is not None:
            return 3 if fsdp.reshard_after_forward else 2
        return self.software.zero_level

    @cached_property
    def schedule(self) -> Literal["gpipe", "1f1b", "interleaved"]:
        """Pipeline schedule: as said; interleaved where vpp > 1; else the profile's."""
        if self.parallelism.schedule is not None:
            return self.parallelism.schedule
        return "interleaved" if self.parallelism.vpp > 1 else self.software.schedule

    @cached_property
    def layers_per_chunk(self) -> list[int]:
        """Layers of each of the pp*vpp model chunks, in depth order: chunk c of stage r is entry c*pp + r.

        Source: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset.
        """
        return layers_per_chunk(facts(self))

    @cached_property
    def recompute(self) -> RecomputePlan:
        """Recomputation in its one normal form."""
        return plan_recompute(self.performance, self.parallelism.pp, self.parallelism.vpp)

    @cached_property
    def assumptions(self) -> list[str]:
        """What was unsaid and where its value comes from, what is unproved, and notes on the layout."""
        return assumptions(self)


def _build(data: dict[str, Any], problems: list[str]) -> Job:
    """The job, or all problems: those found before, those of the sections, and those that a typo would hide."""
    try:
        job = build(Job, data)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems, *_hidden_problems(data, error.problems)]) from None
    if problems:
        raise ConfigError(problems)
    return job


def _hidden_problems(data: dict[str, Any], problems: list[str]) -> list[str]:
    """What else is wrong once unknown keys and an unknown machine are mended: the rules look at sound sections only."""
    mended = mend(data, problems)
    if mended is None:
        return []
    try:
        build(Job, mended)
    except ConfigError as error:
        return [problem for problem in error.problems if problem not in problems]
    return []
