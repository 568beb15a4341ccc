"""A job: the content of a config file, read, resolved and checked.

The sections are: model, parallelism, performance, data, hardware, and optionally cross_dc, run and notes. What they
do not set comes from a software profile; the properties of `Job` give the resolved values, and nothing downstream looks at
the unresolved ones.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from steptime.base.config import Config, ConfigError, ConfigProblem, Wording, build
from steptime.base.core_schemas import AfterValidator, BeforeValidator, Field, model_validator
from steptime.base.defaults import no_items
from steptime.base.recent import Recent
from steptime.base.words import counted
from steptime.hardware.machine import Machine
from steptime.job import pipeline_rules, rules
from steptime.job.device_count import AUTO, DEGREES, spread
from steptime.job.edit import apply_settings, one_line, put, read_hardware, read_model, read_plan
from steptime.job.expert_rules import expert_facts
from steptime.job.facts import Facts
from steptime.job.fsdp_rules import fsdp_facts, resolved_fsdp
from steptime.job.layer_counts import layers_per_chunk
from steptime.job.layer_rules import default_profile, layer_facts
from steptime.job.limits import NOT_MODELED
from steptime.job.mesh import Parallelism, ScheduleName
from steptime.job.names import FIXES, MISSING, PATHS
from steptime.job.offload_rules import OF_NO_PROFILE, offload_facts
from steptime.job.performance_rules import performance_facts
from steptime.job.sections import CrossDc, Data, Hardware, Run
from steptime.model.model import Model
from steptime.software.device_kernels import has_cudnn
from steptime.software.performance import OPTIONS, Performance, Software, resolve
from steptime.software.precision import precisions
from steptime.software.recomputation import Recomputation, resolve_recompute

SOFTWARE: Recent[Software] = Recent(4)  # equal profiles are one object, which estimates compare at once


class Job(Config):
    """One training plan. Two jobs are equal when they resolve to the same plan, whichever defaults were written out.

    Sections: model, parallelism, performance, data (gbs, seqlen, microbatch_sz), hardware, cross_dc, run; see docs/config.md.

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
    notes: list[Annotated[str, AfterValidator(one_line)]] = Field(default_factory=no_items)
    """What a reader of the plan should know, such as flags of a launch script that are left out; shown under assumptions."""

    devices: int | None = Field(default=None, ge=1)
    """Total number of devices; parallelism.dp may then be omitted or auto, and follows from tp, pp and cp."""

    @model_validator(mode="before")
    @classmethod
    def _share_devices(cls, data: Any) -> Any:
        return spread(data)

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        widths = [{}, *[run.widths for run in self.model.layers or []]]  # layers may have their own
        found = [problem for each in widths for problem in rules.problems(self.facts._replace(**each))]
        if problems := list(dict.fromkeys(found)):
            raise ConfigError(problems)
        return self

    @staticmethod
    def load(source: str | Path | Mapping[str, Any], sets: Iterable[str] = ()) -> "Job":
        """A job from a YAML or JSON file, "-" (standard input), the text itself or a mapping, with `a.b=c` settings applied.

        Paths inside the file (a machine file, an HF config.json) are relative to the file, all others to the working directory.

        Raises:
            ConfigError: one line per problem.
        """
        data = read_plan(source)
        return _build(data, apply_settings(data, sets))

    def replace(self, **changes: Any) -> "Job":
        """This job with dotted keys changed and checked anew, unset keys resolved again: `job.replace(**{"parallelism.tp": 4})`.

        Raises:
            ConfigError: one line per problem.
        """
        data: dict[str, Any] = {key: getattr(self, key) for key in Job.model_fields}
        fixed = self.devices is not None or self.hardware.nodes is not None
        if fixed and "parallelism.dp" not in changes and changes.keys() & {f"parallelism.{axis}" for axis in DEGREES}:
            changes |= {"parallelism.dp": AUTO}
        for path, value in changes.items():
            section = path.partition(".")[0]
            if path != section and isinstance(data.get(section), Config):
                data[section] = data[section].model_dump(exclude_unset=True)
            put(data, path, value)
        return build(Job, data)

    def to_config(self) -> dict[str, Any]:
        """The resolved job as plain data: complete and runnable, with nothing left to a profile."""
        parallelism = self.parallelism.model_dump(exclude_none=True, exclude=set() if self.model.moe else {"ep", "etp"})
        resolved: dict[str, Any] = {"sp": self.sp, "zero_level": self.zero_level, "schedule": self.schedule}
        resolved |= {"cp_comm_type": self.cp_comm_type} if self.parallelism.cp > 1 else {}
        if fsdp := self.parallelism.fsdp:
            parallelism["fsdp"] = resolved_fsdp(fsdp, self.software)
        parallelism |= resolved | pipeline_rules.group_taken(self.facts)
        settings = self.software.settings()
        performance = {key: settings[key] for key in OPTIONS}
        away = self.performance.cpu_offload
        config: dict[str, Any] = {
            "model": self.model.model_dump(exclude_none=True),
            "parallelism": parallelism,
            "performance": {
                "software": self.software.name,
                **self.recompute.to_config(),
                **performance,
                **{key: said for key in OF_NO_PROFILE if (said := getattr(self.performance, key))},
                **({"cpu_offload": away.model_dump(exclude_none=True)} if away.share else {}),
                "overlap": self.software.overlap.model_dump(exclude_none=True),
            },
            "data": self.data.model_dump(),
            "hardware": self.hardware.to_config(),
        }
        if self.model.moe:
            config["performance"]["moe"] = self.software.moe.model_dump()
        if self.performance.calibration is not None:
            config["performance"]["calibration"] = self.performance.calibration.model_dump()
        for key, section in (("cross_dc", self.cross_dc), ("run", self.run)):
            if section is not None:
                config[key] = section.model_dump(exclude_none=True)
        return config | ({"notes": self.notes} if self.notes else {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.to_config() == other.to_config()

    def __repr__(self) -> str:
        """One line; `to_config` has everything."""
        p, data = self.parallelism, self.data
        layout = f"tp {p.tp} pp {p.pp} dp {p.dp}" + f" cp {p.cp}" * (p.cp > 1)
        where = f"{counted(p.devices, 'device')} of {self.machine.name}"
        return f"<Job {self.model.name or 'unnamed model'} on {where}: {layout}, gbs {data.gbs:,} x {data.seqlen:,}>"

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash((self.model.n_layers, self.parallelism.devices, self.data.gbs))

    # --- resolved ------------------------------------------------------------------------------------------------------

    @property
    def machine(self) -> Machine:
        """The machine with the overrides applied."""
        return self.hardware.machine

    @cached_property
    def software(self) -> Software:
        """The profile with this job's options applied; every switch has a value."""
        default = default_profile(self.model, fsdp=self.parallelism.fsdp is not None)
        drops = self.model.attention_dropout > 0.0
        found = resolve(self.performance, default, interleaved=self.parallelism.vpp > 1).on(self.machine, drops=drops)
        return SOFTWARE.of(found, lambda: found)

    @cached_property
    def microbatches(self) -> int:
        """Micro-batches per step and pipeline: gbs / (dp * microbatch_sz)."""
        return self.data.gbs // (self.parallelism.dp * self.data.microbatch_sz)

    @property
    def single_microbatch(self) -> bool:
        """Whether a step has a single micro-batch."""
        return self.microbatches == 1

    @property
    def schedule_microbatches(self) -> int:
        """Micro-batches of the pipeline schedule, which runs `pipeline_passes` times a step."""
        return self.microbatches // self.parallelism.pipeline_passes

    @cached_property
    def sp(self) -> bool:
        """Sequence parallelism: from the plan, else the profile's; none without tensor parallelism."""
        said = self.parallelism.sp
        return (self.software.layout.sp if said is None else said) and self.parallelism.tp > 1

    @cached_property
    def cp_comm_type(self) -> Literal["p2p", "all_gather", "a2a", "a2a+p2p"]:
        """How the ranks that share a sequence exchange keys and values: from the plan, else the profile's."""
        return self.parallelism.cp_comm_type or self.software.layout.cp_comm_type

    @cached_property
    def zero_level(self) -> Literal[0, 1, 2, 3]:
        """ZeRO level: from the plan; FSDP is 3, or 2 where parameters stay gathered; ZeRO++ is 3; else the profile's."""
        said, fsdp = self.parallelism.zero_level, self.parallelism.fsdp
        if said is not None:
            return said
        if fsdp is not None:
            return fsdp.zero_level
        return 3 if self.parallelism.zero_plus_plus else self.software.layout.zero_level

    @cached_property
    def schedule(self) -> ScheduleName:
        """Pipeline schedule: from the plan; interleaved where vpp > 1; else the profile's."""
        if self.parallelism.schedule is not None:
            return self.parallelism.schedule
        return "interleaved" if self.parallelism.vpp > 1 else self.software.layout.schedule

    @cached_property
    def facts(self) -> Facts:
        """What the rules read."""
        return facts(self)

    @cached_property
    def layers_per_chunk(self) -> list[int]:
        """Layers of each of the pp*vpp model chunks, in depth order: chunk c of stage r is entry c*pp + r.

        Source: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset.
        """
        return layers_per_chunk(self.facts)

    @cached_property
    def recompute(self) -> Recomputation:
        """Recomputation in its one normal form."""
        return resolve_recompute(self.performance, self.parallelism.pp, self.parallelism.vpp)


Job.wording = Wording(NOT_MODELED, PATHS, MISSING, FIXES)

_MODEL = ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "n_kv_heads", "head_dim", "vocab_sz", "tie_embeddings")
_LAYOUT = ("tp", "pp", "dp", "vpp", "cp", "cp_a2a", "ep", "etp", "replicas", "microbatch_group_sz", "pipeline_passes")
_BATCH = ("gbs", "seqlen", "microbatch_sz")


def facts(job: Job) -> Facts:
    """The facts of one job."""
    model, layout, batch, said = job.model, job.parallelism, job.data, job.performance
    software, machine, split = job.software, job.machine, layout.layers_per_stage
    sections = ((model, _MODEL), (layout, _LAYOUT), (batch, _BATCH))
    numbers: dict[str, Any] = {name: getattr(section, name) for section, names in sections for name in names}
    return Facts(
        **numbers,
        max_positions=model.max_positions or 0 if model.learned_positions else 0,
        n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1,
        head_dim_said="head_dim" in model.model_fields_set,
        **expert_facts(model, software),
        **layer_facts(model),
        attention=model.attention.kind,
        kernels=software.kernels,
        cp_comm_type=job.cp_comm_type,
        sp=job.sp,
        schedule_said=layout.schedule,
        **offload_facts(said, software, machine),
        zero_level=job.zero_level,
        zero_said=layout.zero_level,
        **fsdp_facts(layout, software, machine.devices_per_node),
        layers_per_stage=tuple(split) if isinstance(split, list) else split,
        ends_count=layout.embedding_and_loss_count_as_layers,
        both_buckets=layout.bucket_size_mb is not None and layout.n_param_buckets is not None,
        software=software.name,
        family=software.family,
        vocab_multiple=software.layout.vocab_multiple,
        precision=software.precision,
        recipe=software.recipe is not None,
        saved_fp8_weights=software.saved_fp8_weights,
        states=software.states,
        machine=machine.name,
        no_cudnn=not has_cudnn(machine.accelerator),
        machine_dtypes=precisions(tuple(machine.accelerator.peak_flops), microscaling=machine.accelerator.microscaling),
        **performance_facts(said, software),
    )


def _build(data: dict[str, Any], problems: list[ConfigProblem]) -> Job:
    """The job, or all problems: those found before, those of the sections, and those that another problem would hide."""
    try:
        job = build(Job, data)
    except ConfigError as error:
        from steptime.job.mend import hidden_problems

        raise ConfigError([*problems, *error.details, *hidden_problems(Job, data, error)]) from None
    if problems:
        raise ConfigError(problems)
    return job
