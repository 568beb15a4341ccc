"""How the framework runs the model: recomputation, precision, kernels, optimizer states, overlap.

`Performance` is what a config says, the rest a software profile's; `resolve` joins them into a `Software`, with nothing unset.
"""

from functools import cache, cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from steptime.base.config import Config
from steptime.base.core_schemas import BeforeValidator, Field, model_validator
from steptime.base.defaults import always
from steptime.hardware.machine import Machine
from steptime.software.calibration import Calibration
from steptime.software.cpu_offload import CpuOffload
from steptime.software.device_kernels import kernels_on
from steptime.software.hidden_shares import Overlap, Share, waits_at_once
from steptime.software.precision import RECIPES, Recipe, RecipeName, recipe
from steptime.software.profiles import profile_mapping
from steptime.software.settings import (
    COMPILED,
    ActivationSettings,
    AttentionBackend,
    AttentionImpl,
    AttentionKernel,
    BufferSettings,
    CommSettings,
    Compile,
    Dtype,
    Impl,
    KernelSettings,
    LayoutSettings,
    LossImpl,
    Master,
    Module,
    MoeSettings,
    MuonTpMode,
    NormImpl,
    OffloadModule,
    OptimizerName,
    RopeImpl,
    StateSettings,
    as_written,
)
from steptime.software.state_bytes import StateBytes, state_bytes
from steptime.software.timing_settings import OF_MACHINE, Graphs, StepGraph, TimingSettings

ITEMSIZE = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}  # bytes per element
STATE_ITEMSIZE = ITEMSIZE | {"none": 0.0, "remainder": 2.0}
Precision: TypeAlias = Annotated[Dtype | RecipeName, BeforeValidator(lambda w: "fp8_delayed" if w == "fp8" else w)]
"""What the projections of the blocks are computed in: a dtype, or a recipe of `precision.py` on top of bf16."""
CheckpointType: TypeAlias = Literal["none", "selective", "super-selective", "per-op", "full"]
"""selective and super-selective are Megatron's; per-op is torchtitan's selective checkpointing (`model.segments.per_op`)."""


class Recompute(Config):
    """Megatron's recompute_granularity, _method, _num_layers, _modules (megatron/core/transformer/transformer_config.py)."""

    granularity: Literal["selective", "full"]
    method: Literal["uniform", "block", "every"] | None = None
    """every: each n_layers-th layer is checkpointed (torchtitan's selective_ac_option as a number)."""
    n_layers: int | list[int] | None = None  # for all stages, one per stage (pp) or per chunk (pp*vpp)
    modules: list[Module] | None = None
    memory_budget: float | None = Field(default=None, ge=0.7, le=1)
    """activation_memory_budget: the share of what a block would save, without its input; below 0.7 matrix products run again."""


class Performance(Config):
    """The `performance` section of a config file: first the switches that a profile sets and a plan may override (`OPTIONS`)."""

    precision: Precision | None = None
    fp8_params: bool | None = None
    attention_impl: AttentionImpl | None = None
    attention_kernel: AttentionKernel | None = None
    attention_backend: AttentionBackend | None = None
    deterministic: bool | None = None
    norm_impl: NormImpl | None = None
    activation_impl: Impl | None = None
    loss_impl: LossImpl | None = None
    loss_chunks: int | None = Field(default=None, ge=1)
    gathered_logits: bool | None = None
    compile: Compile | None = None
    softmax_impl: Impl | None = None
    rope_impl: RopeImpl | None = None
    repeat_kv: bool | None = None
    qk_norm_gathered: bool | None = None
    sp_regather: bool | None = None
    grad_accumulation_fusion: bool | None = None
    cuda_graphs: Graphs | None = None
    step_graph: StepGraph | None = None
    dummy_wgrads: Literal["none", "freed", "kept"] | None = None
    param_dtype: Dtype | None = None
    main_grad_dtype: Dtype | None = None
    master_dtype: Master | None = None
    moment_dtype: Dtype | None = None
    optimizer: OptimizerName | None = None
    optimizer_impl: Literal["fused", "foreach", "for_loop"] | None = None
    muon_tp_mode: MuonTpMode | None = None
    deallocate_pipeline_outputs: bool | None = None
    clip_grad: bool | None = None
    recompute_stops_early: bool | None = None
    vocab_multiple: int | None = Field(default=None, ge=1, le=1_000_000)
    scores_in_buffer: bool | None = None
    attention_mask: bool | None = None
    batches_stay: bool | None = None
    deferred_head_wgrads: int | None = Field(default=None, ge=0)
    expandable_segments: bool | None = None
    te_workspaces: int | None = Field(default=None, ge=0)
    grouped_workspaces: int | None = Field(default=None, ge=0)
    cublas_workspace: str | None = Field(default=None, pattern=r"^(default|(:\d+:\d+)+)$")

    activation_checkpointing_type: CheckpointType | None = None
    recompute: Recompute | None = None
    saved_fp8_weights: bool = False
    quantized_head: bool = False
    offload_modules: list[OffloadModule] | None = None
    bf16_layers_at_start: int | None = Field(default=None, ge=0)
    bf16_layers_at_end: int | None = Field(default=None, ge=0)
    activation_offload: Share | None = None
    cpu_offload: CpuOffload = Field(default_factory=always(CpuOffload.model_construct()))
    overlap: Overlap | None = None
    moe: MoeSettings = Field(default_factory=always(MoeSettings.model_construct()))
    software: str | None = None
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.software is not None:
            load_software(self.software)
        return self


class Software(Config):
    """A software profile (data/software/*.yaml) with a job's overrides applied: everything set."""

    name: str
    family: str
    """The profile at the end of its chain of `extends`; it decides what its framework can run."""
    description: str
    as_of: str = ""  # the release or date that the profile stands for; "" where its name has a release
    precision: Precision
    layout: LayoutSettings
    kernels: KernelSettings
    activations: ActivationSettings
    states: StateSettings
    buffers: BufferSettings
    comm: CommSettings
    overlap: Overlap
    timing: TimingSettings
    sources: dict[str, str]  # setting -> framework file and line, document, or `assumed`
    any_layout: bool = False  # whether fp8 products of the device take operands in any layout; set by `on`
    compute_capability: float = 0.0  # NVIDIA's, of the device; set by `on`, 0 where it has none
    moe: MoeSettings = Field(default_factory=always(MoeSettings.model_construct()))
    """How a mixture of experts runs: from the job, else as published recipes do."""
    saved_fp8_weights: bool = False  # see `quantize.saved_weight`; from the job
    quantized_head: bool = False  # see `embedding_and_head.output_ops`; from the job

    def settings(self) -> dict[str, Any]:
        """All switches as plain data, flat, by the keys that profiles and configs write them under."""
        said = {key: getattr(getattr(self, group) if group else self, key) for key, group in _GROUP_OF.items()}
        return said | {"overlap": dict(self.overlap)}

    def replace(self, **settings: Any) -> Self:
        """This software with some switches changed, each in its group: `software.replace(precision="fp16", norm_impl="fused")`.

        Raises:
            TypeError: there is no such switch.
        """
        if unknown := settings.keys() - _GROUP_OF.keys():
            raise TypeError(f"not an option of a profile: {', '.join(sorted(unknown))}")
        changes = {
            key: getattr(self, key).replace(**part) if key in SETTING_GROUPS else part
            for key, part in _grouped(settings).items()
        }
        return self.model_copy(update=changes)

    def on(self, machine: Machine, *, drops: bool = False) -> Self:
        """The profile on a machine: with the kernel times measured there for eager torch, else scaled by its hosts' pace.

        `drops`: attention has dropout.
        """
        device = machine.accelerator
        changes: dict[str, Any] = {
            "any_layout": device.microscaling,
            "compute_capability": device.compute_capability or 0.0,
            "kernels": kernels_on(self.kernels, device, drops=drops),
        }
        timing = self.timing.on_host(machine.host_factor, machine.host.node_s if machine.host else 0.0)
        if device.kernels is not None and self.family in EAGER_TORCH:
            timing = timing.replace(**device.kernels.model_dump(), measured=True)
        return self.model_copy(update=changes | {"timing": timing})

    @cached_property
    def itemsize(self) -> float:
        """Bytes per activation element."""
        return ITEMSIZE[self.compute_dtype]

    @cached_property
    def state_bytes(self) -> StateBytes:
        """Bytes per parameter of each state."""
        return state_bytes(self.states, self.bytes_of)

    @cached_property
    def compute_dtype(self) -> Dtype:
        """The dtype of everything that no recipe quantizes."""
        return "bf16" if self.precision in RECIPES else cast("Dtype", self.precision)

    @property
    def batch_first_attention(self) -> bool:
        """Whether attention is TransformerEngine's FlashAttention, which copies operands and output to have the batch first.

        TransformerEngine takes cuDNN's kernel from Hopper on, except on Blackwell with a deterministic backward, which cuDNN
        lacks there (TE pytorch/attention/dot_product_attention/utils.py, get_attention_backend).
        """
        kernels, chip = self.kernels, self.compute_capability
        if kernels.attention_impl != "flash" or kernels.attention_backend != "auto":
            return kernels.attention_impl == "flash" and kernels.attention_backend == "flash"
        return 0.0 < chip < 9.0 or (chip >= 10.0 and kernels.deterministic)

    @cached_property
    def recipe(self) -> Recipe | None:
        """The low-precision recipe of the projections, if any."""
        return recipe(self.precision, any_layout=self.any_layout)

    def bytes_of(self, dtype: str) -> float:
        """Bytes per element of a state dtype, where "compute" is the precision and "none" nothing."""
        return STATE_ITEMSIZE[self.compute_dtype if dtype == "compute" else dtype]


SETTING_GROUPS = {
    "layout": LayoutSettings,
    "kernels": KernelSettings,
    "activations": ActivationSettings,
    "states": StateSettings,
    "buffers": BufferSettings,
    "comm": CommSettings,
    "timing": TimingSettings,
}
_GROUP_OF: dict[str, str] = {
    "precision": "",
    **{key: group for group, cls in SETTING_GROUPS.items() for key in cls.__annotations__ if key not in OF_MACHINE},
    "overlap": "",
}
"""Switch -> the group that contains it; "": `Software` itself."""
OPTIONS = tuple([key for key in Performance.model_fields if key in _GROUP_OF and key != "overlap"])
"""The switches that a profile sets and a plan may override by a key of the same name."""
EAGER_TORCH = frozenset({"torch", "fsdp2"})
"""Profiles that launch torch's own kernels one by one, like the microbenchmark."""


def _grouped(settings: dict[str, Any]) -> dict[str, Any]:
    """A flat mapping with the switches of each group under its name."""
    grouped: dict[str, Any] = {}
    for key, value in settings.items():
        group = _GROUP_OF.get(key)
        (grouped.setdefault(group, {}) if group else grouped)[key] = value
    return grouped


@cache
def load_software(name: str) -> Software:
    """The profile `name`, or `name@release`, as its file states; the files ship with steptime, and its tests validate them.

    Raises:
        ConfigError: the name or the release is unknown (one line, with the near match).
    """
    found = _grouped(profile_mapping(name))
    found |= {key: as_written(cls, found[key]) for key, cls in SETTING_GROUPS.items()}
    return Software.model_construct(None, **found | {"overlap": Overlap.model_construct(None, **found["overlap"])})


def resolve(performance: Performance, default: str = "megatron-core", *, interleaved: bool = False) -> Software:
    """The profile that `performance` names (else `default`), overridden by the plan's switches, with "compute" made a dtype.

    A profile's overlap of pipeline sends holds for interleaved schedules only (Megatron-LM, megatron/training/arguments.py,
    validate_args: overlap_p2p_comm is off otherwise), that of torch's ring outside compiled graphs (`waits_at_once`).

    Raises:
        ConfigError: the profile is unknown.
    """
    profile = load_software(performance.software or default)
    said: dict[str, Any] = {key: value for key in OPTIONS if (value := getattr(performance, key)) is not None}
    said = COMPILED[compiled := said.get("compile", profile.kernels.compile)] | said
    if said.get("precision") in {"mxfp8", "nvfp4"} and profile.family == "fsdp2":
        said["precision"] = f"{said['precision']}_torchao"
    precision = said.get("precision", profile.precision)
    for key in ("param_dtype", "main_grad_dtype", "moment_dtype"):
        if said.get(key, getattr(profile.states, key)) == "compute":
            said[key] = "bf16" if precision in RECIPES else precision
    if said.get("param_dtype", profile.states.param_dtype) == "fp32":
        said.setdefault("master_dtype", "none")  # fp32 parameters are their own master
    shares = waits_at_once(profile.kernels.cp_impl, compiled) | ({} if interleaved else {"pp": False})
    shares |= {axis: share for axis, share in performance.overlap or () if share is not None}
    said |= {"overlap": profile.overlap.model_copy(update=shares)} if shares else {}
    moe = performance.moe
    if profile.family == "fsdp2" and "permute_fusion" not in moe.model_fields_set:  # torchtitan's rows move by index
        moe = moe.model_copy(update={"permute_fusion": False})
    own = {"moe": moe, **{key: getattr(performance, key) for key in ("saved_fp8_weights", "quantized_head")}}
    return profile.replace(**said).model_copy(update=own)
