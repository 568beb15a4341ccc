"""How the framework runs the model: recomputation, precision, kernels, optimizer states, overlap.

`Performance` is what a config file says; what it leaves unsaid comes from a software profile. `resolve` joins the two into
a `Software`, in which nothing is unset: that is what the model's blocks and the cost functions see.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from steptime.base.config import Config, build
from steptime.base.units import Seconds
from steptime.hardware.machine import Accelerator
from steptime.software.calibration import Calibration
from steptime.software.precision import RECIPES, Recipe, RecipeName, recipe
from steptime.software.profiles import profile_mapping, profile_names

Dtype: TypeAlias = Literal["fp32", "bf16", "fp16"]
ITEMSIZE: dict[str, float] = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
"""Bytes per element."""
Precision: TypeAlias = Annotated[
    Dtype | RecipeName, BeforeValidator(lambda word: "fp8_delayed" if word == "fp8" else word)
]
"""What the projections of the blocks are computed in: a dtype, or a recipe of `precision.py` over bf16."""

CheckpointType: TypeAlias = Literal["none", "selective", "super-selective", "full"]
Module: TypeAlias = Literal[
    "core_attn", "layernorm", "mlp", "act", "dropout", "after_qkv", "moe_act", "mla_up_proj", "moe", "shared_experts"
]
Share: TypeAlias = bool | float
"""How much of a communication hides under compute: a bool, or a share from 0 to 1."""


class Recompute(Config):
    """Megatron's recompute_granularity, _method, _num_layers, _modules (megatron/core/transformer/transformer_config.py)."""

    granularity: Literal["selective", "full"]
    method: Literal["uniform", "block"] | None = None
    n_layers: int | list[int] | None = None
    """Layers of each pipeline stage and virtual chunk: one number for all, or one per stage (pp) or per chunk (pp*vpp)."""
    modules: list[Module] | None = None


class Overlap(Config):
    """What hides under compute; unsaid axes follow the profile."""

    tp: Share | None = None
    dp: Share | None = None
    pp: Share | None = None
    ep: Share | None = None
    cp: Share | None = None


class Options(Config):
    """The switches a profile sets and a config file may override."""

    precision: Precision | None = None
    fp8_params: bool | None = None
    attention_impl: Literal["flash", "unfused"] | None = None
    attention_kernel: Literal["best", "fa2", "fa1", "triton"] | None = None
    norm_impl: Literal["fused", "composite"] | None = None
    activation_impl: Literal["fused", "composite"] | None = None
    loss_impl: Literal["fused", "composite"] | None = None
    softmax_impl: Literal["fused", "composite"] | None = None
    rope_impl: Literal["fused", "composite", "own_tables"] | None = None
    sp_regather: bool | None = None
    grad_accumulation_fusion: bool | None = None
    cuda_graphs: bool | None = None
    param_dtype: Dtype | None = None
    main_grad_dtype: Dtype | None = None
    master_dtype: Literal["fp32", "remainder", "none"] | None = None
    moment_dtype: Dtype | None = None
    deallocate_pipeline_outputs: bool | None = None
    clip_grad: bool | None = None
    recompute_stops_early: bool | None = None
    vocab_multiple: int | None = Field(default=None, ge=1)


class Performance(Options):
    """The `performance` section of a config file."""

    activation_checkpointing_type: CheckpointType | None = None
    recompute: Recompute | None = None
    overlap: Overlap | None = None
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
    """The profile that it extends in the end, which says what its framework can run."""
    description: str
    # layout defaults
    sp: bool
    zero_level: Literal[0, 1, 2, 3]
    schedule: Literal["gpipe", "1f1b"]
    bucket_elements: float
    """Gradient bucket size [elements]; Megatron: max(40e6, 1e6 * dp), which `bucket_elements_per_dp` adds."""
    bucket_elements_per_dp: float
    vocab_multiple: int
    """The vocabulary is padded to a multiple of this times tp; 1 pads nothing."""
    # kernels
    precision: Precision
    attention_impl: Literal["flash", "unfused"]
    attention_kernel: Literal["best", "fa2", "fa1", "triton"] = "best"
    """Which flash kernel: the best of the device (FlashAttention-3, cuDNN), FlashAttention-2, which torch runs, or those before
    it: FlashAttention-1, and its Triton version, which takes a bias."""
    norm_impl: Literal["fused", "composite"]
    activation_impl: Literal["fused", "composite"]
    loss_impl: Literal["fused", "composite"]
    softmax_impl: Literal["fused", "composite"] = "fused"
    """Softmax of unfused attention: one kernel that keeps the probabilities, or upcast, softmax and downcast that keep both."""
    rope_impl: Literal["fused", "composite", "own_tables"] = "fused"
    """composite: eager kernels over shared tables. own_tables: cos and sin are made and kept by every layer as well (Megatron
    without apply_rope_fusion)."""
    vocab_parallel: bool = True
    """Megatron's vocabulary-parallel embedding and cross entropy: masks of the rows that other ranks hold are kept."""
    gathered_logits: bool = False
    """Every tensor-parallel rank gathers the logits of all before the loss."""
    padded_buckets: bool = False
    """Gradients and parameters live in flat buffers, padded per parameter and bucket (Megatron's distributed optimizer)."""
    dummy_wgrads: Literal["none", "freed", "kept"] = "none"
    """Weight-shaped buffers in the compute dtype that stand in for gradients which wgrad adds to the main ones: freed at once, or
    one per shape kept for ever (megatron/core/tensor_parallel/layers.py,
    LinearWithGradAccumulationAndAsyncCommunication.backward; TransformerEngine's get_dummy_wgrad)."""
    reducer_buckets: bool = False
    """Data-parallel ranks without ZeRO reduce copies of the gradients, in buckets that stay (torch's DistributedDataParallel)."""
    gradients_persist: bool = True
    """The gradient buffer lives for the whole run; else gradients appear in backward and are freed after the step (torch)."""
    optimizer_temp_copies: float = 0.0
    """Copies of the updated parameters, in the moments' dtype, that live only in the optimizer step (torch's foreach Adam: 1),
    which then runs op by op."""
    clip_grad: bool = True
    """Gradients are scaled down to a norm before the optimizer's step."""
    scatter_gather_sends: bool = False
    """Without sequence parallelism each tensor-parallel rank sends its 1/tp of a stage's output, gathered again on arrival
    (Narayanan et al. 2021, section 4.1)."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How context parallelism exchanges keys and values: a ring (p2p), all gathered, or heads for tokens (a2a, Ulysses)."""
    cp_impl: Literal["transformer_engine", "torch"] = "transformer_engine"
    """Whose: TransformerEngine's autograd functions, or torch's (partial results and gradients merged in fp32 step by step; an
    all-to-all is autograd's own)."""
    tp_backward_overlap: bool = False
    """Backward of a column-parallel projection runs its collectives beside dgrad and wgrad (Megatron's asynchronous ones)."""
    comm_buffer: bool = False
    """Megatron's grow-only "mpu" buffer that sequence-parallel gathers and unfused scores share (megatron/core/utils.py)."""
    fp8_params: bool = False
    """Parameters of quantised projections are stored, and gathered, in the recipe's own format; no bf16 copy (Megatron's
    fp8_param_gather, off by default)."""
    fused_projections: bool
    """One GEMM for q, k, v and one for gate and up (Megatron); else one each (HF, torchtitan)."""
    sp_regather: bool
    """Sequence parallelism saves the shard and gathers again for wgrad (Megatron); else the gathered input is saved (torch)."""
    dropout_mask_bytes: float
    recompute_stops_early: bool
    """Recomputation ends when the last saved tensor is back (torch's non-reentrant checkpoint)."""
    # states
    param_dtype: Literal["fp32", "bf16", "fp16", "compute"]
    """What parameters are stored in; "compute" is the precision."""
    main_grad_dtype: Literal["fp32", "bf16", "fp16", "compute"]
    master_dtype: Literal["fp32", "remainder", "none"]
    """A separate master copy; "remainder": the 16 bits that bf16 dropped; "none": the parameters are their own master."""
    moment_dtype: Literal["fp32", "bf16", "fp16", "compute"]
    grad_accumulation_fusion: bool
    """wgrad adds into the main gradient inside the GEMM; else a gradient in the compute dtype lives for a moment."""
    deallocate_pipeline_outputs: bool
    # overlap and time
    overlap: Overlap
    gemm_kernel_s: Seconds
    """Fixed time of one GEMM kernel: launch, prologue, drain [s]."""
    move_kernel_s: Seconds
    """Fixed time of one memory-bound kernel [s]."""
    layer_gap_s: Seconds = 0.0
    """Gaps between the kernels of one layer, forward and backward of one micro-batch: launches that the host is late with, and
    kernels too small to be listed [s]."""
    move_rate: float = 1.0
    """Rate of memory-bound kernels over that of a long copy."""
    host_kernel_s: Seconds = 0.0
    """What the host needs to launch a kernel: Python, autograd, driver [s]. A block whose kernels are shorter waits for it."""
    blocking_launches: bool = False
    """The host waits for every kernel (CUDA_LAUNCH_BLOCKING=1), so that its own time adds to the device's."""
    node_links: Literal["all", "one"] = "all"
    """Network links that a data-parallel collective over all ranks of a node has: those of all ranks, or of one."""
    tp_comm_factor: float = 1.0
    """Seconds of tensor-parallel collectives in a run over those of the collective alone: ranks that wait for each other."""
    sharded_reduction: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    """What ZeRO 1 and 2 do with gradients: every rank gets its shard of the sums, or all of them."""
    sharded_gather: Literal["all_gather", "broadcast"] = "all_gather"
    """How updated parameters return: gathered, or sent from each owner in turn after the step, which nothing hides."""
    reduce_dtype: Literal["main", "fp32"] = "main"
    """What gradients are reduced in over data-parallel ranks: the main gradient's dtype, or a copy in fp32."""
    cuda_graphs: bool = False
    """Kernels of a layer or a whole step are launched from CUDA graphs, which shrinks the gaps."""
    compute_factor: float = 1.0
    """Seconds of kernels and launches over what the constants give: how well a release's kernels run."""
    sources: dict[str, str]
    """Field -> framework file and line, document, or `assumed`."""

    _any_layout: bool = PrivateAttr(default=False)
    _measured_kernels: bool = PrivateAttr(default=False)

    def on(self, device: Accelerator) -> Self:
        """The profile on a device: with the kernel times that eager torch was measured to have there, if it was."""
        own = device.kernels if self.family in EAGER_TORCH else None
        found = self.model_copy(update=own.model_dump() if own else {})
        found._any_layout, found._measured_kernels = device.microscaling, own is not None  # noqa: SLF001
        return found

    @property
    def measured_kernels(self) -> bool:
        """Whether the kernel times are the device's own, not the profile's."""
        return self._measured_kernels

    @property
    def itemsize(self) -> float:
        """Bytes per activation element."""
        return ITEMSIZE[self.compute_dtype]

    @property
    def compute_dtype(self) -> Dtype:
        """The dtype of all that no recipe quantises."""
        return "bf16" if self.precision in RECIPES else cast("Dtype", self.precision)

    @property
    def recipe(self) -> Recipe | None:
        """The low-precision recipe of the projections, if any."""
        return recipe(self.precision, any_layout=self._any_layout)

    def bytes_of(self, dtype: str) -> float:
        """Bytes per element of a state dtype, where "compute" is the precision and "none" nothing."""
        if dtype == "none":
            return 0.0
        if dtype == "remainder":
            return 2.0
        return ITEMSIZE[self.compute_dtype if dtype == "compute" else dtype]


EAGER_TORCH = frozenset({"torch", "fsdp2"})
"""Profiles that launch torch's own kernels one by one, as the microbenchmark does."""
_UNSAID: frozenset[str] = frozenset(Performance.model_fields) - frozenset(Options.model_fields)


@cache
def software_names() -> list[str]:
    """Names of all profiles."""
    return profile_names()


@cache
def load_software(name: str) -> Software:
    """The profile `name`, or `name@release`, as its file says.

    Raises:
        ConfigError: the name or the release is unknown (one line, with the near match).
    """
    return build(Software, profile_mapping(name), name)


def resolve(performance: Performance, default: str = "megatron-core", *, interleaved: bool = False) -> Software:
    """The profile that `performance` names (else `default`), with what it says put over it and "compute" made a dtype.

    A profile's overlap of pipeline sends holds for interleaved schedules only (Megatron-LM, megatron/training/arguments.py,
    validate_args: overlap_p2p_comm is off otherwise).

    Raises:
        ConfigError: the profile is unknown.
    """
    profile = load_software(performance.software or default)
    said: dict[str, Any] = {key: value for key, value in performance if value is not None and key not in _UNSAID}
    precision = said.get("precision", profile.precision)
    for key in ("param_dtype", "main_grad_dtype", "moment_dtype"):
        if said.get(key, getattr(profile, key)) == "compute":
            said[key] = "bf16" if precision in RECIPES else precision
    if said.get("param_dtype", profile.param_dtype) == "fp32":
        said.setdefault("master_dtype", "none")  # fp32 parameters are their own master
    shares: dict[str, Share | None] = {} if interleaved else {"pp": False}
    if performance.overlap is not None:
        shares |= {axis: share for axis, share in performance.overlap if share is not None}
    if shares:
        said["overlap"] = profile.overlap.model_copy(update=shares)
    return profile.model_copy(update=said)
