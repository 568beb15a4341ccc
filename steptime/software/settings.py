"""The switches of a software profile, grouped by what they decide: layout, kernels, activations, states, comm, overlap, timing.

A profile's file and a config's `performance` section write them flat, by the names of the fields here, which no two groups share.
"""

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from steptime.base.config import Config
from steptime.base.core_schemas import Field
from steptime.base.records import Switches
from steptime.base.units import SECOND_UNITS, Seconds, read_quantity
from steptime.schedule.stage_exchange import Exchange
from steptime.software.grouped_precision import GroupedPrecision

S = TypeVar("S", bound=Switches)
Dtype: TypeAlias = Literal["fp32", "bf16", "fp16"]
StateDtype: TypeAlias = Literal["fp32", "bf16", "fp16", "compute"]
"""A dtype of a profile; "compute" is the precision's dtype."""
Master: TypeAlias = Literal["fp32", "remainder", "none"]
OptimizerName: TypeAlias = Literal["adamw", "lion", "sgd", "adamw_8bit", "adafactor", "muon", "dist_muon"]
"""adamw also means Adam, sgd has a momentum; dist_muon: whole matrices distributed over data-parallel ranks."""
MuonTpMode: TypeAlias = Literal["blockwise", "duplicated", "distributed"]
Impl: TypeAlias = Literal["fused", "composite"]
"""One kernel, or one per operation."""
NormImpl: TypeAlias = Literal["fused", "composite", "eager"]
LossImpl: TypeAlias = Literal["fused", "native", "composite", "traced", "compiled", "in_place", "pieces"]
"""One kernel; Megatron's compiled functions; one per operation; so in a traced graph; torch.compile's; Unsloth's; by pieces."""
AttentionImpl: TypeAlias = Literal["flash", "unfused"]
AttentionBackend: TypeAlias = Literal["auto", "flash", "cudnn", "direct"]
AttentionKernel: TypeAlias = Literal[
    "best", "cudnn-9.19", "sdpa", "sdpa-9.19", "fa2", "fa1", "triton", "flex", "flex_eager", "efficient"
]
Compile: TypeAlias = Literal["none", "blocks", "all"]
"""What torch.compile (inductor) compiles: nothing, each block separately, or the loss too; see `COMPILED`."""
_BLOCK = {"norm_impl": "fused", "activation_impl": "fused", "rope_impl": "fused", "recompute_stops_early": True}
COMPILED: dict[Compile, dict[str, Any]] = {"none": {}, "blocks": _BLOCK, "all": _BLOCK | {"loss_impl": "compiled"}}
"""Effect of inductor on a block and on the loss: consecutive element-wise operations and row sums are fused into one kernel.

The tensors saved for backward are then those of AOTAutograd's min-cut partitioner, byte for byte (tests/truth/
test_torch_compile.py): inputs of matrix multiplies and attention, which cannot be fused, and row sums. A checkpoint is traced
with its block, and its recomputation reduced to what backward reads, independent of early_stop (same test)."""
RopeImpl: TypeAlias = Literal["fused", "composite", "own_tables", "complex", "upcast", "eager"]
Module: TypeAlias = Literal[
    "core_attn", "layernorm", "mlp", "act", "dropout", "after_qkv", "moe_act", "mla_up_proj", "moe", "shared_experts", "per_op",
    "per_op_all", "per_op_resend",
]  # fmt: skip
OffloadModule: TypeAlias = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
"""Megatron-Core's names (megatron/core/transformer/transformer_config.py, offload_modules)."""


class LayoutSettings(Switches):
    """Defaults for what a config's `parallelism` does not set."""

    sp: bool
    zero_level: Literal[0, 1, 2, 3]
    schedule: Literal["gpipe", "1f1b"]
    cp_comm_type: Literal["p2p", "all_gather", "a2a"]
    """How context parallelism exchanges keys and values: a ring (p2p), all gathered, or heads for tokens (a2a, Ulysses)."""
    bucket_elements: float
    """Gradient bucket size [elements]; Megatron: max(40e6, 1e6 * dp), which `bucket_elements_per_dp` adds."""
    bucket_elements_per_dp: float
    lone_experts: Literal["wrapped", "plain"]
    fsdp_ends: Literal["root", "apart", "head"]
    fsdp_reduce_dtype: Literal["fp32", "compute"]
    no_sync: bool
    """FSDP: whether experts that no ranks share are a group; groups of embedding and head; dtype of reductions; one a step."""
    stage_exchange: Exchange
    """How stages of several chunks exchange; time_steps, torch's pipelining as of 2.6, also gathers nothing ahead, and
    reduces a chunk's gradients, except one group's, before the last gradient of its input is sent."""
    vocab_multiple: int
    """The vocabulary is padded to a multiple of this times tp; 1 pads nothing."""


class KernelSettings(Switches):
    """Which kernels compute a block, the embedding and the loss."""

    attention_impl: AttentionImpl
    attention_kernel: AttentionKernel
    """Which flash kernel: the device's best, FlashAttention-2, FlashAttention-1 or its Triton version; torch's FlexAttention,
    compiled (flex) or with scores in memory (flex_eager); torch's memory-efficient kernel, for keys wider than values."""
    attention_backend: AttentionBackend
    """Library of the flash kernel: TransformerEngine's FlashAttention, which needs the batch dimension first; cuDNN's; auto:
    TransformerEngine's own choice between the two; direct: a kernel that accepts any tensor layout."""
    deterministic: bool
    """Kernels that give the same bits every time (NVTE_ALLOW_NONDETERMINISTIC_ALGO=0)."""
    norm_impl: NormImpl
    """composite: RMSNorm as torch decomposes its own; eager: as Hugging Face writes it (`model.sublayers`)."""
    activation_impl: Impl
    loss_impl: LossImpl
    """composite: the upcast logits become the softmax and the gradient in place. traced: so in a graph, which frees what nothing
    reads any more. native: compiled by Megatron, with a second fp32 copy in backward. in_place: Unsloth's, on an fp32 copy.
    pieces: composite, of loss_chunks pieces of all logits in turn (`model.loss_of_pieces`)."""
    loss_chunks: int
    """Chunks of tokens that head and loss process in turn, forward and backward of each (torchtitan's ChunkedCELoss)."""
    compile: Compile
    softmax_impl: Impl
    """Softmax of unfused attention: one kernel that keeps the probabilities, or upcast, softmax and downcast that keep both."""
    rope_impl: RopeImpl
    """composite: torch's own functions over shared tables of cos and sin in the compute dtype; upcast: in fp32, between casts;
    complex: one product with a table of complex numbers; eager: composite as measured in transformers, over transposed tensors;
    own_tables: cos and sin are also computed and saved by every layer (Megatron without apply_rope_fusion)."""
    repeat_kv: bool
    """Keys and values of grouped heads are copied for each of their queries before a flash kernel reads them."""
    qk_norm_gathered: bool
    """After their norms, tensor-parallel ranks gather all heads of q and k, rotate them, and keep their own."""
    cp_impl: Literal["transformer_engine", "torch"]
    """TransformerEngine's autograd functions, or torch's, which merges partial results and gradients in fp32 step by step."""
    fused_projections: bool | Literal["qkv", "qkv_copied"]
    """One GEMM for q, k, v and one for gate and up (Megatron), one for q, k, v only, which are views of its output (litgpt) or
    copied from it (torchtitan), or none (HF)."""
    separate_adapters: bool
    """Whether the adapter of one GEMM for q, k and v has an A and a B for each of them (litgpt), or one A and one B."""
    vocab_parallel: bool
    """Megatron's vocabulary-parallel embedding and cross entropy: masks of the rows that other ranks hold are kept."""


class ActivationSettings(Switches):
    """What stays in memory between forward and backward."""

    sp_regather: bool
    """Sequence parallelism saves the shard and gathers again for wgrad (Megatron); else the gathered input is saved (torch)."""
    dropout_mask_bytes: float
    recompute_stops_early: bool
    """Whether recomputation ends with the last saved tensor (torch's non-reentrant checkpoint)."""
    recompute_reentrant: bool
    """Unless it ends so: torch's reentrant checkpoint, one function that holds a layer's output and its gradient meanwhile."""
    deallocate_pipeline_outputs: bool
    pipeline_keeps: bool
    """FSDP2 in a pipeline keeps every micro-batch's output for the whole step, and what the last group's reduction sends until
    the next step's (torch's pipelining as of 2.6, `fsdp.left_by_pipeline`)."""
    comm_buffer: bool
    """Megatron's grow-only "mpu" buffer that sequence-parallel gathers and unfused scores share (megatron/core/utils.py)."""
    scores_in_buffer: bool
    """Whether unfused scores are stored in that buffer, as by Megatron's own attention; TransformerEngine's allocates them."""

    @property
    def reentrant(self) -> bool:
        """Whether checkpoints are reentrant ones; those that stop early are not."""
        return self.recompute_reentrant and not self.recompute_stops_early


class StateSettings(Switches):
    """Parameters, gradients and optimizer states: their dtypes, and when they are allocated."""

    param_dtype: StateDtype
    main_grad_dtype: StateDtype
    master_dtype: Master
    """A separate master copy; "remainder": the 16 bits that bf16 dropped; "none": the parameters are their own master."""
    moment_dtype: StateDtype
    optimizer: OptimizerName
    """What keeps moments, and updates (`memory.optimizer_moments`)."""
    muon_tp_mode: MuonTpMode
    """What Muon orthogonalizes where tensor parallelism splits a matrix: each rank its block, each rank the gathered matrix, or
    all ranks together."""
    fp8_params: bool
    """Parameters of quantized projections are stored, and gathered, in the recipe's own format; no bf16 copy (Megatron's
    fp8_param_gather, off by default)."""
    grad_accumulation_fusion: bool
    """Whether wgrad adds into the main gradient inside the GEMM; else a gradient in the compute dtype exists for a moment."""
    dummy_wgrads: Literal["none", "freed", "kept"]
    """Placeholder gradients in the compute dtype, returned by autograd where wgrad accumulates into main gradients: freed at
    once, or one per shape kept for the run (megatron/core/tensor_parallel/layers.py,
    LinearWithGradAccumulationAndAsyncCommunication.backward; TransformerEngine's get_dummy_wgrad)."""
    gradients_persist: bool
    """The gradient buffer lives for the whole run; else gradients appear in backward and are freed after the step (torch)."""
    padded_buckets: bool
    """Gradients and parameters live in flat buffers, padded per parameter and bucket (Megatron's distributed optimizer)."""
    reducer_buckets: bool
    """Data-parallel ranks without ZeRO reduce copies of the gradients, in buckets that stay (torch's DistributedDataParallel)."""
    clip_grad: bool
    """Gradients are scaled down to a norm before the optimizer's step."""
    optimizer_impl: Literal["fused", "foreach", "for_loop"]
    """AdamW: one kernel in place; op by op over all parameters, with a copy of them in the moments' dtype; op by op over each
    tensor, with two copies of it (torch/optim/adam.py, _multi_tensor_adam, _single_tensor_adam)."""


class BufferSettings(Switches):
    """What torch's allocator holds in addition to states and activations."""

    cublas_handles: int
    """Pairs of a cuBLAS handle and a stream on which torch multiplies, each with a workspace. 2: forward's thread, autograd's."""
    cublas_workspace: str
    """The size of each: CUBLAS_WORKSPACE_CONFIG, such as ":4096:8", or "default", torch's own by architecture."""
    te_workspaces: int
    """Workspaces that TransformerEngine's matrix products keep."""
    grouped_workspaces: int
    """The same of its grouped products, one for each stream that they run on."""
    expandable_segments: bool
    """torch's allocator maps pages as it needs them (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): it cuts every block to
    its size, and hardly fragments."""
    attention_mask: bool
    """The data loader makes a mask of one byte for each pair of positions, which every micro-batch has on the device."""
    batches_stay: bool
    """All micro-batches of a step stay on the device until the next one, masks included, so that it can be replayed (Megatron-LM
    core_v0.18, tensor-parallel rank 0 of the first and last stage)."""
    deferred_head_wgrads: int
    """Micro-batches of a step whose weight gradient of the head waits for the end of the pipeline (Megatron's
    defer_embedding_wgrad_compute): what it multiplies is kept."""
    stage_inputs_stay: bool
    """Every model chunk keeps its last micro-batch's input, received from the stage before, and the gradient of it."""
    logits_stay: bool
    """The last stage keeps the logits of a micro-batch until the next one's replace them in its output buffers."""
    loss_by_token: bool
    """A loss in chunks cuts all tokens at once, no chunk a copy, and gathers the head outside of FSDP's hooks, which keep it."""
    gradient_copies: Literal["none", "freed", "kept"]
    """The optimizer copies half-precision main gradients to fp32: freed when the next step begins, or kept until that step's
    copies replace them, in addition to the gradients they were made from (Megatron-LM of March to July 2021)."""


class CommSettings(Switches):
    """Which collectives run, over which links, in which dtype."""

    tp_comm_factor: float
    """Time of tensor-parallel collectives in a training run / that of the collective in isolation; ranks wait for each other."""
    tp_backward_overlap: bool
    """Backward of a column-parallel projection overlaps its collectives with dgrad and wgrad (Megatron's asynchronous ones)."""
    gathered_logits: bool
    """Every tensor-parallel rank gathers the logits of all before the loss."""
    scatter_gather_sends: bool
    """Without sequence parallelism each tensor-parallel rank sends its 1/tp of a stage's output, gathered again on arrival
    (Narayanan et al. 2021, section 4.1)."""
    node_links: Literal["all", "one"]
    """Network links that a data-parallel collective over all ranks of a node uses: those of all ranks, or of one."""
    sharded_reduction: Literal["reduce_scatter", "all_reduce"]
    """How ZeRO 1 and 2 reduce gradients: every rank gets its shard of the sums, or all of them."""
    sharded_gather: Literal["all_gather", "broadcast"]
    """How updated parameters are distributed: by all-gather, or by one exposed broadcast per owner after the step."""
    reduce_dtype: Literal["main", "fp32"]
    """Dtype of gradient reduction over data-parallel ranks: the main gradient's dtype, or a copy in fp32."""


class MoeSettings(Config):
    """How the framework runs a mixture of experts; defaults of runtime configs of yanring/Megatron-MoE-ModelZoo."""

    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens are sent to experts: an all-to-all of one copy per expert, an all-gather, or a library's copy for each rank."""
    flex_backend: Literal["deepep", "hybridep", "minimal_async_ep"] = "deepep"
    """That library. HybridEP gathers all maps first and sends the scores of all experts of a node (`model.dispatch`)."""
    deepep_sms: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Multiprocessors of DeepEP's kernels; else what the framework gives them (`cost.exchange`)."""
    non_blocking_capacity_factor: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Without waiting for counts, room of HybridEP's rows: this share of the most that can arrive (`model.receive_buffers`)."""
    permute_fusion: bool = True
    """Tokens are sorted by expert in one kernel (TransformerEngine's), not by index operations."""
    router_dtype: Literal["compute", "fp32"] = "fp32"
    """Dtype of the router's logits and probabilities."""
    grouped_gemm: bool = True
    """One grouped GEMM for all local experts (TEGroupedMLP); else one GEMM per expert."""
    grouped_precision: GroupedPrecision = "none"
    """Recipe of torchao in which torchtitan's grouped products of experts run; none: the compute dtype."""
    fused_mlp: bool = False
    """Activation, bias and casts between the GEMMs run in their epilogues (--use-transformer-engine-op-fuser;
    TransformerEngine transformer_engine/pytorch/ops/fused/grouped_mlp.py@d0067d0d)."""
    paged_stash: bool = False
    """What the experts keep for backward is copied out of buffers with room for more rows and back (--moe-paged-stash)."""
    deterministic: bool = False
    """Unfused rows are summed into tokens by index_add_, which keeps them for backward, scores placed by index_put_
    (--deterministic-mode; moe_utils.py, unpermute and topk_routing_with_score_function)."""
    shared_expert_overlap: bool = False
    """Shared experts overlap the dispatch; with sequence parallelism their gathered input is saved."""
    delay_wgrad_compute: bool = False
    """With `overlap.ep`, weight gradients are computed after input gradients (--delay-wgrad-compute)."""
    overlap_keeps_pieces: bool = False
    """With `overlap.ep`, inputs and gradients of a chunk's layers stay until its whole backward has run (Megatron-Core before
    core_v0.16)."""


def as_written(cls: type[S], values: dict[str, Any]) -> S:
    """Settings of a profile's file, its seconds read and its numbers floats where they are to be."""
    floats = [key for key in values if cls.__annotations__[key] in (float, Seconds)]
    return cls(**values | {key: float(read_quantity(values[key], SECOND_UNITS, "")) for key in floats})
