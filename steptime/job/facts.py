"""The input of the rules: numbers and words of a job, flat. Numbers may be columns of a search's candidates."""

from typing import Literal, NamedTuple

from steptime.base.num import Num
from steptime.job.choices import divisors, tp_degrees
from steptime.job.mesh import ZeroPlusPlus
from steptime.model.lora import Lora
from steptime.model.model import LinearAttention, Moe
from steptime.schedule import SCHEDULES, default_group
from steptime.software.cpu_offload import CpuOffload
from steptime.software.frameworks import FRAMEWORKS, Framework, framework_of
from steptime.software.performance import Recompute
from steptime.software.settings import KernelSettings, MoeSettings, StateSettings


class Facts(NamedTuple):
    """Input of the rules. Numbers may be columns of candidates; everything else is plain."""

    n_layers: Num
    hidden_sz: Num
    inter_sz: Num
    n_q_heads: Num
    n_kv_heads: Num
    head_dim: Num
    vocab_sz: Num
    max_positions: Num
    tp: Num
    pp: Num
    dp: Num
    vpp: Num
    cp: Num
    ep: Num
    etp: Num
    replicas: Num
    gbs: Num
    seqlen: Num
    microbatch_sz: Num
    n_dcs: Num
    head_dim_said: bool
    moe: bool
    n_experts: Num
    experts_per_token: Num
    expert_groups: Num
    node_limit: Num
    expert_inter_sz: Num
    shared_inter_sz: Num
    dense_layers: Num
    expert_tp_degree: Num  # 0 where not set
    experts: Moe
    experts_run: MoeSettings
    grouped_refusal: str
    fused_activation: bool
    megatron_only: str  # a key of model.moe that only Megatron's experts support
    kinds: frozenset[str]  # of layer in model.layers or model.hybrid_pattern
    layers_listed: int | None
    listed_by: str  # the one of the two that is set; `layers_listed`: number of layers in it
    patterned: bool
    mamba_heads: int  # 0 without Mamba layers
    mamba_groups: int
    lora: Lora | None
    attention: str
    kernels: KernelSettings
    cp_comm_type: str
    cp_a2a: Num
    window: int | None
    window_pattern: int | None
    whole_heads: bool
    switches: frozenset[str]
    linear: LinearAttention | None
    mtp: int
    last_kind: str
    sp: bool
    schedule_said: str | None
    microbatch_group_sz: int | None
    pipeline_passes: int
    tie_embeddings: bool
    zero_level: int
    zero_said: int | None
    fsdp: Literal[2, 3] | None  # the ZeRO level that it implies
    plus_plus: ZeroPlusPlus | None
    node_devices: int
    fsdp_version: int
    fsdp_wrap: str
    fsdp_ranks: int  # reshard_after_forward where it is a number of ranks, else 0
    no_sync: bool
    stays_gathered: bool  # whether the plan keeps FSDP's parameters gathered after backward
    gradients_stay: bool
    shard_dim: int
    layers_per_stage: tuple[int, ...] | Literal["auto"] | None
    ends_count: bool
    both_buckets: bool
    software: str
    family: str
    vocab_multiple: int
    precision: str
    recipe: bool
    saved_fp8_weights: bool
    states: StateSettings
    machine: str
    machine_dtypes: tuple[str, ...]
    no_cudnn: bool  # whether the device is another than NVIDIA's
    attention_said: tuple[str | None, str | None]  # attention_kernel and attention_backend of the plan itself
    torch_said: tuple[bool, bool]  # the plan, other than its profile, asks for whole logits, or an AdamW not fused
    checkpoint_word: str | None
    step_graph: str
    recompute: Recompute | None
    offload: frozenset[str]
    offload_share: float
    cpu_offload: CpuOffload
    bf16_layers: tuple[int, int]
    host_link: bool
    host: bool
    graphs: bool
    overlap: tuple[tuple[str, float], ...]

    @property
    def split_backward(self) -> bool:
        """Whether the schedule splits backward into gradients of inputs and of weights."""
        return self.schedule_said in SCHEDULES and SCHEDULES[self.schedule_said].split

    @property
    def chunks_needed(self) -> int | None:
        """Model chunks per stage that the schedule requires; None for any number."""
        return SCHEDULES[self.schedule_said].vpp if self.schedule_said in SCHEDULES else None

    @property
    def schedule_words(self) -> str:
        """The schedules that the framework runs."""
        return ", ".join(self.framework.schedules)

    @property
    def group_choice(self) -> int:
        """The smallest group of micro-batches with which interleaving runs."""
        return default_group(int(self.pp), int(self.microbatches))

    @property
    def chunks(self) -> Num:
        """Model chunks: pp * vpp."""
        return self.pp * self.vpp

    @property
    def units(self) -> Num:
        """Layers to distribute; includes embedding and loss where they count as layers."""
        return self.n_layers + (2 if self.ends_count else 0)

    @property
    def or_ends(self) -> str:
        """The end of an error on too few layers, where embedding and loss are the two that are missing."""
        missing = not self.ends_count and self.chunks == self.n_layers + 2
        return ", or set parallelism.embedding_and_loss_count_as_layers to true" if missing else ""

    @property
    def devices(self) -> Num:
        """All devices."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shards(self) -> Num:
        """Ranks that share one copy of the model's states under FSDP."""
        return self.dp * self.cp // self.replicas

    @property
    def stage_ranks(self) -> Num:
        """Devices of one pipeline stage: dp * cp * tp."""
        return self.dp * self.cp * self.tp

    @property
    def expert_ranks(self) -> Num:
        """Devices over which one layer's experts lie: ep * etp."""
        return self.ep * self.etp

    @property
    def ep_choices(self) -> str:
        """Degrees that must divide n_experts."""
        return divisors(self.n_experts)

    @property
    def batch(self) -> Num:
        """Sequences that all pipelines process at once: dp * microbatch_sz."""
        return self.dp * self.microbatch_sz

    @property
    def chunks_of_cp(self) -> Num:
        """Pieces of a sequence under context parallelism: two per rank, one in Ulysses of DeepSpeed."""
        return self.cp if self.framework.only_swaps_heads else 2 * self.cp

    @property
    def copied_ranks(self) -> Num:
        """Ranks that are divided by `replicas`, the copies of the shards: dp, or dp * cp."""
        return self.dp * self.cp if self.framework.copies_cut_cp else self.dp

    @property
    def copied_words(self) -> str:
        """The name of those ranks."""
        return f"dp*cp = {self.copied_ranks}" if self.framework.copies_cut_cp and self.cp > 1 else f"dp {self.dp}"

    @property
    def head_ranks(self) -> Num:
        """Ranks over which an all-to-all distributes heads."""
        return self.tp * self.cp

    @property
    def microbatches(self) -> Num:
        """Micro-batches per pipeline and step, rounded down."""
        return self.gbs // self.batch

    @property
    def microbatches_of_a_pass(self) -> Num:
        """Micro-batches that go through the pipeline before it drains."""
        return self.microbatches // self.pipeline_passes

    @property
    def framework(self) -> Framework:
        """What the profile's framework supports, or that of the profile it extends."""
        return framework_of(self.software, self.family)

    @property
    def modules(self) -> frozenset[str]:
        """Modules that `recompute` names."""
        return frozenset((self.recompute.modules if self.recompute else None) or ())

    @property
    def op_policies(self) -> frozenset[str]:
        """Those of them that decide on every op (`model.segments.PER_OP`)."""
        return frozenset(name for name in self.modules if name.startswith("per_op"))

    @property
    def recompute_counts(self) -> tuple[int, ...]:
        """recompute.n_layers as a tuple; empty where not set."""
        said = self.recompute.n_layers if self.recompute else None
        return () if said is None else tuple(said) if isinstance(said, list) else (said,)

    # words for the messages of one config
    @property
    def tp_choices(self) -> str:
        """Powers of two that tensor parallelism can have."""
        sizes = (self.n_q_heads, self.inter_sz, self.shared_inter_sz)
        return tp_degrees(sizes, self.n_kv_heads, replicated=self.framework.replicates_kv)

    @property
    def chunk_choices(self) -> str:
        """Model chunks that divide the layers to distribute."""
        return divisors(self.units)

    @property
    def gbs_choices(self) -> str:
        """The batch sizes nearest to gbs that fit dp, microbatch_sz and an interleaved schedule."""
        unit = int(self.batch) * self.pipeline_passes * (1 if self.vpp == 1 or self.framework.groups else int(self.pp))
        low = int(self.gbs) // unit * unit
        return " or ".join(str(gbs) for gbs in (low, low + unit) if gbs)

    @property
    def split_words(self) -> str:
        """layers_per_stage as written."""
        return f"[{', '.join(map(str, self.stage_counts))}]"

    @property
    def recompute_words(self) -> str:
        """recompute.n_layers as written."""
        return f"[{', '.join(map(str, self.recompute_counts))}]"

    @property
    def module_words(self) -> str:
        """recompute.modules, sorted."""
        return ", ".join(sorted(self.modules))

    @property
    def dtype_words(self) -> str:
        """Precisions that the machine has a rate for and the model supports."""
        return ", ".join(d for d in ("bf16", "fp16", "fp32", *self.framework.recipes) if d in self.machine_dtypes)

    @property
    def recipe_words(self) -> str:
        """Recipes of the framework, or where it has none the frameworks that have the plan's."""
        having = [name for name, one in FRAMEWORKS.items() if self.precision in one.recipes]
        return ", ".join(self.framework.recipes) or f"software {' or '.join(having)}"

    @property
    def granularity(self) -> str:
        """recompute.granularity; empty where not set."""
        return self.recompute.granularity if self.recompute else ""

    @property
    def recompute_method(self) -> str:
        """recompute.method; empty where not set."""
        return (self.recompute.method if self.recompute else None) or ""

    @property
    def stage_counts(self) -> tuple[int, ...]:
        """layers_per_stage where it is counts; else empty."""
        return self.layers_per_stage if isinstance(self.layers_per_stage, tuple) else ()

    @property
    def bad_shares(self) -> str:
        """Overlap shares outside 0..1."""
        return ", ".join(f"{axis} {share:g}" for axis, share in self.overlap if not 0 <= share <= 1)
