"""The parallelism of a job: its axes, their order over the devices, and the ranks of each group.

Devices are numbered with tp innermost, then cp, dp, pp: Megatron's order "tp-cp-ep-dp-pp"
(megatron/core/parallel_state.py, initialize_model_parallel). With several data centers dp is split over them, and that part
of dp is outermost: every center holds whole pipelines.
"""

from typing import Literal, NamedTuple, Self, TypeAlias

from steptime.base.config import Config, ConfigError
from steptime.base.core_schemas import Field, model_validator
from steptime.base.num import Num, ceil, maximum, minimum, where

GroupAxis: TypeAlias = Literal[
    "tp", "cp", "cp_a2a", "cp_p2p", "dp", "pp", "embedding", "shards", "replicas", "ep", "etp", "ep_etp",
    "expert_shards", "tp_cp",
]  # fmt: skip


ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
"""Names of the pipeline schedules in `steptime.schedule`."""
ReduceDtype: TypeAlias = Literal["fp32", "bf16", "fp16"]


class Fsdp(Config):
    """Options of torch's `fully_shard` (torch/distributed/fsdp/_fully_shard/_fully_shard.py), or of FullyShardedDataParallel."""

    version: Literal[1, 2] = 2
    """2: `fully_shard`. 1: FullyShardedDataParallel, each group one flat parameter (torch/distributed/fsdp/_flat_param.py)."""
    reshard_after_forward: bool | int = True
    """A number of ranks: neighbors that share a group from its forward to its backward, which gathers it among them."""
    prefetch: int = Field(default=1, ge=0)
    backward_prefetch: Literal["pre", "post"] = "pre"
    """Version 1: whether backward gathers the next group before a group's own backward, or after it and before its reduction
    (BACKWARD_PRE, BACKWARD_POST). Both queue the same collectives in the same order, so seconds do not differ."""
    original_params: bool = True
    """Version 1: whether flat parameters keep their parameters apart (use_orig_params), each at a multiple of 16 bytes."""
    reduce_dtype: ReduceDtype | None = None
    """Dtype of gradient reduction (MixedPrecisionPolicy); default: the profile's."""
    wrap: Literal["block", "model", "module", "parameter"] = "block"
    """Unit that is gathered and freed. module: each that has its own parameters (version 1); parameter: each, within a graph of
    forward and backward that is traced (SimpleFSDP, arXiv 2411.00284), which has one pool of memory. Seconds of both are those of
    blocks, to which the graph's passes join parameters."""
    ends: Literal["root", "apart", "head"] | None = None
    """Groups of what is outside of blocks; default: the profile's. root: one, gathered throughout. apart: the embedding, and
    final norm with head. head: the head, and a root of the rest. Memory only, of version 2 with wrap block and pp 1."""
    no_sync: bool | None = None
    """Whether only the last micro-batch of a step reduces gradients, which earlier ones accumulate unsharded (FSDP 1's `no_sync`,
    `set_requires_gradient_sync(False)`); default: the profile's. Pipelines always do so."""
    reshard_after_backward: bool = True
    """False keeps parameters gathered from the first micro-batch of a step to its last (`set_reshard_after_backward(False)`)."""
    shard_dim: Literal[0, 1] = 0
    """Version 2: the dimension of matrices that is cut (`shard_placement_fn`); vectors have one."""
    gradients_stay: bool = False
    """Sharded gradients are set to zero between steps, not freed (torch/optim/optimizer.py, zero_grad(set_to_none=False))."""

    @property
    def zero_level(self) -> Literal[2, 3]:
        """The ZeRO level that it implies: 2 where parameters stay gathered after forward."""
        return 3 if self.reshard_after_forward else 2

    @model_validator(mode="after")
    def _fewer_ranks(self) -> Self:
        ranks, path = self.reshard_after_forward, "parallelism.fsdp.reshard_after_forward"
        if isinstance(ranks, bool):
            return self
        if ranks < 2:
            raise ConfigError(f"{path}: a number of ranks must be 2 or more (got {ranks}); 1 rank is false")
        if self.version == 1 or self.wrap != "block":
            raise ConfigError(
                f"{path}: a number of ranks needs version 2 and wrap block; set them, or use true or false"
            )
        return self

    @model_validator(mode="after")
    def _of_version_1(self) -> Self:
        path = "parallelism.fsdp"
        if self.backward_prefetch == "post" and (self.version != 1 or self.wrap != "block" or not self.prefetch):
            raise ConfigError(f"{path}.backward_prefetch: post needs version 1, wrap block and prefetch 1; use pre")
        if self.version != 1 and not self.original_params:
            raise ConfigError(f"{path}.original_params: false needs version 1; set it, or use true")
        return self

    @model_validator(mode="after")
    def _along_columns(self) -> Self:
        """Torch's copy-out after a gather of fewer ranks has no columns to join (foreach_all_gather_copy_out, an IndexError)."""
        plain = self.version == 2 and self.wrap != "parameter" and isinstance(self.reshard_after_forward, bool)
        if self.shard_dim and not plain:
            raise ConfigError(
                "parallelism.fsdp.shard_dim: 1 needs version 2, wrap block or model, no number in reshard_after_forward; use 0"
            )
        return self

    @model_validator(mode="after")
    def _by_parameter(self) -> Self:
        if self.wrap == "parameter" and (self.version == 1 or self.no_sync or not self.reshard_after_backward):
            raise ConfigError(
                "parallelism.fsdp.wrap: parameter needs version 2, no_sync false and reshard_after_backward true; use block"
            )
        return self

    @model_validator(mode="after")
    def _by_module(self) -> Self:
        if self.wrap == "module" and (self.version != 1 or not self.reshard_after_forward):
            raise ConfigError(
                "parallelism.fsdp.wrap: module is modeled for version 1 with reshard_after_forward true; use block"
            )
        return self


class ZeroPlusPlus(Config):
    """DeepSpeed's ZeRO++ at stage 3 (Wang et al. 2023, arXiv 2306.10209; deepspeed/runtime/zero/config.py)."""

    hpz_partition_size: int = Field(default=1, ge=1)
    """Neighbors that share a second copy of the parameters, among which all gathers but the first of a step run; 1: none."""
    quantized_weights: bool = False
    """Gathers send int8 (qwZ)."""
    quantized_gradients: bool = False
    """Gradients are reduced in int4, by all-to-alls within nodes and between them (qgZ)."""


class Parallelism(Config):
    """How the job is spread over devices: devices = tp*cp*pp*dp."""

    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    dp: int = Field(ge=1)
    vpp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] | None = None
    """How cp ranks reach each other's keys and values: ring, all-gather, all-to-all (Ulysses), or a ring of groups of all-to-all;
    default: the profile's."""
    cp_a2a: int = Field(1, ge=1)
    """Adjacent cp ranks that exchange by all-to-all under a2a+p2p (first of Megatron's hierarchical-context-parallel-sizes)."""
    ep: int = Field(1, ge=1)
    etp: int = Field(default_factory=lambda data: data.get("tp", 1) if data.get("ep", 1) == 1 else 1, ge=1)
    """Ranks that share each expert's weights, like tp for dense layers; default: 1, or tp where ep is 1."""
    sp: bool | None = None
    zero_level: Literal[0, 1, 2, 3] | None = None
    bucket_size_mb: float | None = Field(None, gt=0)
    n_param_buckets: int | None = Field(None, ge=1)
    schedule: ScheduleName | None = None
    microbatch_group_sz: int | None = Field(None, ge=1)
    """Micro-batches that an interleaved stage runs through one chunk before the next (Megatron's
    microbatch_group_size_per_vp_stage); default: pp, or the smallest that runs (`schedule.default_group`)."""
    pipeline_passes: int = Field(1, ge=1)
    """Local batches of a step, whose micro-batches go through torch's pipeline one local batch after the other: it drains between
    them (pytorch/torchtitan@b5bcd76c torchtitan/trainer.py, train_step: gradient_accumulation_steps)."""
    layers_per_stage: list[int] | Literal["auto"] | None = None
    embedding_and_loss_count_as_layers: bool = False
    replicas: int = Field(1, ge=1)
    fsdp: Fsdp | None = None
    zero_plus_plus: ZeroPlusPlus | None = None

    @property
    def devices(self) -> int:
        """All devices of the job."""
        return self.tp * self.cp * self.pp * self.dp


class Group(NamedTuple):
    """The ranks of one collective: `ranks` devices, `stride` apart inside a center, starting at device `first`."""

    axis: str
    ranks: Num
    stride: Num
    first: Num = 0.0
    centers: Num = 1.0
    """Data centers over which the ranks are spread evenly."""
    width: Num | None = None
    """Adjacent devices that each start a group like this one; `stride` where not set."""


_COUNTED_AS = {"cp_a2a": "cp", "cp_p2p": "cp", "edp": "dp", "etp": "ep", "ep_etp": "ep", "tp_cp": "ep"}


def comm_part(axis: str) -> str:
    """The part of the step to which collectives of an axis belong.

    Collectives of experts' tokens are one part, those of a sequence's ranks another; experts' gradients are data-parallel ones.

    >>> comm_part("cp_a2a"), comm_part("tp"), comm_part("edp")
    ('cp_comm', 'tp_comm', 'dp_comm')
    """
    return f"{_COUNTED_AS.get(axis, axis)}_comm"


def shown_axis(of: Group) -> str:
    """The name of a group in tables: what is sharded or copied over data-parallel ranks is dp, of experts edp.

    >>> shown_axis(Group("expert_shards", 4, 2)), shown_axis(Group("shards", 8, 1)), shown_axis(Group("tp", 2, 1))
    ('edp', 'dp', 'tp')
    """
    return {"expert_shards": "edp", "shards": "dp", "replicas": "dp"}.get(of.axis, of.axis)


def group(parallelism: Parallelism, axis: GroupAxis, *, stage: Num = 0, n_dcs: Num = 1) -> Group:
    """The group of device 0 along an axis, or, for "pp", the pair of stages `stage` and `stage` + 1.

    - tp, cp, dp: the axis itself; cp_a2a, cp_p2p: `context_group`.
    - pp: the two neighbors of one stage boundary, sender and receiver.
    - embedding: first and last stage, which both hold a tied embedding; one rank where pp is 1.
    - shards: dp with cp folded in, over which gradients are reduced and a distributed optimizer is sharded; hybrid sharding
      (HSDP) cuts it into `replicas` copies of adjacent shards.
    - etp, ep, expert_shards: a stage's devices dealt to experts, etp innermost (megatron/core/parallel_state.py,
      expert_decoder_rank_generator); ep_etp, tp_cp: two adjacent axes at once.

    `n_dcs` data centers share dp evenly. Fields of `parallelism` may be columns. Raises ValueError for an unknown axis.
    """
    p = parallelism
    per_stage = p.tp * p.cp * p.dp / n_dcs
    match axis:
        case "tp":
            return Group(axis, p.tp, 1)
        case "cp" | "cp_a2a" | "cp_p2p":
            return context_group(p, axis)
        case "dp":
            return Group(axis, p.dp, p.tp * p.cp, centers=n_dcs)
        case "pp":
            return Group(axis, minimum(p.pp, 2), per_stage, first=stage * per_stage)
        case "embedding":
            return Group(axis, minimum(p.pp, 2), per_stage * maximum(p.pp - 1, 1), width=per_stage)
        case "shards":
            return Group(axis, p.dp * p.cp / p.replicas, p.tp, centers=maximum(n_dcs / p.replicas, 1.0))
        case "etp":
            return Group(axis, p.etp, 1)
        case "ep":
            return Group(axis, p.ep, p.etp)
        case "ep_etp":
            return Group(axis, p.ep * p.etp, 1)
        case "expert_shards":
            return expert_shards(p, n_dcs)
        case "tp_cp":
            return Group(axis, p.tp * p.cp, 1)
        case "replicas":
            return Group(axis, p.replicas, p.tp * p.cp * p.dp / p.replicas, centers=minimum(p.replicas, n_dcs))
    raise ValueError(f"axis {axis!r}: unknown")


def context_group(p: Parallelism, axis: Literal["cp", "cp_a2a", "cp_p2p"]) -> Group:
    """The ranks of a sequence; a2a+p2p cuts them into groups of adjacent ones, and rings through one of each.

    megatron/core/parallel_state.py, create_hierarchical_groups.
    """
    inner = p.cp_a2a
    ranks, stride = {"cp": (p.cp, 1), "cp_a2a": (inner, 1), "cp_p2p": (p.cp / inner, inner)}[axis]
    return Group(axis, ranks, p.tp * stride)


def expert_shards(p: Parallelism, n_dcs: Num) -> Group:
    """The ranks that share one copy of the same experts' weights."""
    inner = p.ep * p.etp
    return Group(
        "expert_shards", p.dp * p.cp * p.tp / (inner * p.replicas), inner, centers=maximum(n_dcs / p.replicas, 1.0)
    )


def fewer_shards(p: Parallelism, n_dcs: Num) -> Group:
    """The shards among which a backward gathers its parameters: all, or as many as FSDP reshards to or ZeRO++ says.

    They are neighbors: torch views the mesh as rows of so many ranks (torch 2.13,
    torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _get_post_forward_mesh_info); DeepSpeed numbers ranks in a row, all
    where there are fewer (deepspeed/utils/groups.py, _create_zero_param_parallel_group).
    """
    second = p.zero_plus_plus.hpz_partition_size if p.zero_plus_plus else 1
    said = p.fsdp.reshard_after_forward if p.fsdp else minimum(second, p.dp * p.cp) if second > 1 else True
    if isinstance(said, bool):
        return group(p, "shards", n_dcs=n_dcs)
    return Group("shards", said, p.tp, centers=maximum(n_dcs * said / (p.dp * p.cp), 1.0))


def members_per_domain(group: Group, tier_size: Num) -> Num:
    """How many ranks of one group lie in one domain of `tier_size` adjacent devices (at least 1).

    Of the groups that start side by side that with the fewest: it sets the pace.

    >>> members_per_domain(Group("dp", 16, 2), 8.0)
    4.0
    """
    spread = where(tier_size == _EVERYWHERE, 1.0, group.centers)
    width = group.stride if group.width is None else group.width
    reach = (tier_size - group.first % tier_size - width) / group.stride + 1.0
    return maximum(1.0, -ceil(-minimum(group.ranks / spread, reach)) * 1.0)


_EVERYWHERE = float("inf")
