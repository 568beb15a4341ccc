"""The op vocabulary: a block states its work once, as a list of ops.

An op names the activations it reads (`inputs`), makes (`outputs`) and keeps for backward (`saves`), its parameters and its work.
Everything else is derived from such a list: parameters, FLOPs, bytes moved and saved, collectives, the memory walk, the seconds.

Shapes are those of one device for one micro-batch. Letters in formulas: T tokens, h hidden, b sequences, s positions.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from steptime.base.num import Num
from steptime.base.records import ByFields
from steptime.model.router_choice import Routing
from steptime.software.precision import Recipe

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv"]
Axis = Literal["tp", "cp", "cp_a2a", "cp_p2p", "pp", "dp", "ep", "etp", "ep_etp", "tp_cp", "embedding", "host"]
"""The ranks of a collective; "ep_etp" and "tp_cp" combine two axes; "host" is a copy to host memory, not a collective."""
Role = Literal[
    "", "norm", "core_attn", "attn_proj", "mlp", "act", "moe", "router", "moe_act", "shared_experts", "mla_up_proj"
]
"""Role of an op in its layer, in the words of Megatron's recompute_modules: a norm before attention or MLP, core attention, the
attention's output projection, the up projections of latent attention, the MLP with its activation, a mixture of experts with its
router, the activation of its experts and its shared experts; "" for all others."""


class Tensor(NamedTuple):
    """One activation storage on one device."""

    name: str
    elements: Num
    itemsize: float  # bytes per element
    grad_itemsize: float = 0.0
    """Bytes per element of its gradient where that differs (the gradient of a quantized copy), else 0."""
    pooled: bool = False
    """Whether Megatron's grow-only buffer stores it, where there is one (megatron/core/utils.py, GlobalMemoryBuffer)."""
    outside: Literal["", "tensor", "gradient", "both"] = ""
    """Which of it and its gradient lies outside the caching allocator, in a buffer that other ranks write."""
    for_weight: bool = False  # whether only the gradient of its op's parameters reads it

    @property
    def bytes(self) -> Num:
        """Its size [B]."""
        return self.elements * self.itemsize

    @property
    def grad_bytes(self) -> Num:
        """Size of its gradient [B]."""
        return self.elements * (self.grad_itemsize or self.itemsize)


class Param(NamedTuple):
    """One parameter tensor; `shape` is the unsharded one."""

    name: str
    shape: tuple[Num, ...]
    split_dim: int | None = None
    """The dimension that tensor parallelism splits: 0 if column-parallel, 1 if row-parallel; None: replicated."""
    group: Literal["dense", "expert", "frozen"] = "dense"
    """Which ranks reduce its gradient and shard its states: the data-parallel ones, or an expert's; frozen ones have neither."""
    vocab: bool = False
    """Whether its rows are the padded vocabulary: the embedding's and the head's weight, one tensor where they are tied."""
    n_experts: Num = 0
    """Number of experts whose weights it represents, each a separate tensor; 0: a tensor that all tokens use."""
    top_k: Num = 0
    """Number of them that a token uses."""
    shared: bool = False
    """Whether another op owns the tensor: this one uses it again, and its gradient is added to the owner's."""

    @property
    def trained(self) -> bool:
        """Whether it has a gradient."""
        return self.group != "frozen"

    @property
    def multiplies(self) -> bool:
        """Whether it is the weight of a matrix multiply, not a bias or a norm's: two extents besides that of experts."""
        return len(self.shape) > (2 if self.n_experts else 1)

    @property
    def active(self) -> Num:
        """Unsharded elements that one token uses."""
        return self.elements * self.top_k / self.n_experts if self.n_experts else self.elements

    @property
    def elements(self) -> Num:
        """Unsharded element count."""
        return prod(self.shape)

    def local(self, tp: Num, experts: Num = 1) -> Num:
        """Elements on one device; `experts` devices, ep * etp, share the weights of experts."""
        if self.n_experts:
            return -(-self.elements // experts)
        return self.elements if self.split_dim is None else -(-self.elements // tp)


@dataclass(slots=True, eq=False, repr=False)
class Op(ByFields):
    """Fields that all ops share: the dataflow.

    `inputs` are names of tensors made by earlier ops (or the block's own input "x"). `outputs` are new storages. `saves`
    are the names kept for backward: inputs, outputs, or `stats`, which are small tensors made only to be kept (log-sum-exp,
    rstd, dropout masks). A name saved by two ops is one storage, counted once.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    saves: tuple[str, ...] = ()
    stats: tuple[Tensor, ...] = ()
    params: tuple[Param, ...] = ()
    role: Role = field(default="", kw_only=True)
    step: Literal["", "dispatch", "dispatch_probs", "combine"] = field(default="", kw_only=True)
    """Of Megatron-Core's exchange of rows for experts: to the experts, their probabilities, back to the tokens."""
    depth: int = field(default=0, kw_only=True)
    """In multi-token prediction the depth whose projection and layer it belongs to; 0 elsewhere."""

    @property
    def trained(self) -> tuple[Param, ...]:
        """Its parameters that have a gradient."""
        params = self.params
        for p in params:
            if p.group == "frozen":
                return tuple([p for p in params if p.group != "frozen"])
        return params

    @property
    def allocates(self) -> tuple[Tensor, ...]:
        """Every storage this op allocates in forward."""
        return self.outputs + self.stats if self.stats else self.outputs


class ByElement(NamedTuple):
    """Eager kernels without vector loads (torch CUDALoops.cuh, gpu_kernel_impl): mixed dtypes, broadcasts, slices of rows."""

    elements: Num = 0.0  # of their results
    bytes: Num = 0.0
    """Bytes that they move, part of the op's [B]."""


VECTORIZED = ByElement()


class Casting(NamedTuple):
    """Kernels that quantize an operand."""

    bytes: Num = 0.0
    """Bytes that they move [B]."""
    kernels: float = 0.0
    slow: ByElement = VECTORIZED


NO_CAST = Casting()


@dataclass(slots=True, eq=False, repr=False)
class Gemm(Op):
    """`count` matrix products of m x k by k x n. With `params` it is a linear layer: forward, dgrad and wgrad.

    Without (`params` empty) both operands are activations (attention scores): backward is two products of the same size.
    """

    m: Num = 0.0
    n: Num = 0.0
    k: Num = 0.0
    count: Num = 1.0
    itemsize: float = 2.0
    recipe: Recipe | None = None
    """The quantization of its operands; its results have `itemsize`."""
    cast_bytes: Num = 0.0
    """Bytes that backward moves to quantize and transpose operands [B]."""
    cast_kernels: float = 0.0
    cast_slow: ByElement = VECTORIZED
    in_turn_s: Num = 0.0
    """Seconds of kernels in backward that pass the rows of a group one block after another."""
    forward_cast: Casting = NO_CAST
    """What forward quantizes: the weight, and the input where no other projection reads its cast."""
    keeps_columns: bool = False
    """Whether it keeps the copy quantized by columns for wgrad."""
    grouped: bool = False
    """Whether one kernel computes the products of all experts; `m` is the mean number of rows of each."""
    load: Num = 1.0
    """Rows of this device divided by the mean of all devices."""
    temp_bytes: Num = 0.0
    """Bytes that exist only while it runs, forward or backward: a packed weight in the compute dtype."""

    @property
    def flops(self) -> Num:
        """Forward FLOPs [2 per multiply-add]; dgrad and wgrad cost the same each."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def routed(self) -> bool:
        """Whether the products are those of experts, whose rows the router chooses."""
        return self.grouped or any(p.n_experts for p in self.params)

    @property
    def kernels(self) -> Num:
        """Kernels of one pass: one, which batches or groups the products, or one for each expert in turn."""
        return 1.0 if self.grouped or not self.params else self.count


@dataclass(slots=True, eq=False, repr=False)
class Attention(Op):
    """A fused (flash) attention kernel: scores never reach memory; `drops`: it draws their dropout mask, in backward again.

    `causal_share` is the share of the s x s scores that counts: 1/2 for a causal mask over equal lengths, less with a window.
    """

    batch: Num = 0.0
    q_len: Num = 0.0
    kv_len: Num = 0.0
    n_q_heads: Num = 0.0
    n_kv_heads: Num = 0.0
    d_qk: Num = 0.0
    d_v: Num = 0.0
    causal_share: Num = 0.5
    drops: bool = False
    reach: Num = 0.0
    """Keys that a query sees at most: less than `kv_len` with a window; 0 where all are seen."""
    itemsize: float = 2.0
    calls: Num = 1.0
    """Kernel calls of one pass: context parallelism processes keys and values block by block."""
    launches: tuple[Num, Num] = (1.0, 1.0)
    """What the host launches in forward and in backward, besides the exchanges, which are ops of their own."""
    merge_forward_bytes: Num = 0.0
    """Bytes that kernels around the calls move: partial results merged, chunks reordered."""
    merge_backward_bytes: Num = 0.0
    merge_kernels: Num = 0.0
    forward_temp_bytes: Num = 0.0
    backward_temp_bytes: Num = 0.0

    @property
    def full_flops(self) -> Num:
        """Forward FLOPs with the whole score matrix: 2 b nq sq skv (d_qk + d_v)."""
        return 2.0 * self.batch * self.n_q_heads * self.q_len * self.kv_len * (self.d_qk + self.d_v)


@dataclass(slots=True, eq=False, repr=False)
class Move(Op):
    """A memory-bound kernel, or a group of `kernels` of them.

    Bytes follow from the dataflow (each input and parameter read, each output and stat written) unless `forward_bytes` or
    `backward_bytes` says otherwise. `same_grad`: backward passes the gradient on without a kernel (residual add, views).
    """

    forward_bytes: Num | None = None
    backward_bytes: Num | None = None
    kernels: float = 1.0
    same_grad: bool = False
    forward_temp_bytes: Num = 0.0
    backward_temp_bytes: Num = 0.0
    stays_bytes: Num = 0.0
    """Bytes that its module references until its next forward, besides what is kept for backward."""
    draws_mask: bool = False
    """Whether its stats are a dropout mask, which the state of the random number generator reproduces."""
    chooses: bool = False
    """Whether it chooses each token's experts."""
    looped: bool = False
    """Whether its kernels are launched by one C++ loop over experts."""
    gaps: Num | None = None
    """Its kernels after which the device pauses, where those of one expert after another are not counted one by one."""
    forward_by_element: ByElement = VECTORIZED
    backward_by_element: ByElement = VECTORIZED


@dataclass(slots=True, eq=False, repr=False)
class Comm(Op):
    """A collective on the forward path (`kind`), its counterpart in backward (`backward`), None where there is none.

    `bytes` is the full tensor of one call: what all-gather returns, what reduce-scatter and all-reduce take.
    `regather`: this all-gather is repeated in backward, for wgrad, because only the shard was saved (Megatron SP).
    `count` calls are equal; each can overlap the share `attention_share` of the part's attention kernel (axis cp).
    `region`: it enters the tensor-parallel region, before a column-parallel projection, or leaves it, after a row-parallel one.
    """

    kind: Kind | None = None
    backward: Kind | None = None
    axis: Axis = "tp"
    bytes: Num = 0.0
    regather: bool = False
    backward_bytes: Num | None = None
    """The full tensor of the collective in backward, where it differs."""
    count: Num = 1.0
    attention_share: Num = 0.0
    region: Literal["", "enter", "leave"] = ""
    joined: bool = False
    """Its pieces are along a later dimension than a single sequence's: torch's DTensor joins them by a copy."""
    score_bytes: Num = 0.0
    """Bytes of the rows' scores for one expert, sent besides for each expert of the innermost domain (HybridEP)."""
    routing: Routing | None = None
    """An all-to-all that sends rows once to each rank that needs them, and over any tier once to each domain (DeepEP), or a call
    that prepares it; `bytes` are those received."""


def tensor_bytes(ops: list[Op], x: Tensor) -> dict[str, Num]:
    """Size of every tensor of a part by name, including its input [B]."""
    return {tensor.name: 1.0 * tensor.bytes for tensor in [x, *(t for op in ops for t in op.allocates)]}
