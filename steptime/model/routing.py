"""The router of a mixture of experts as ops: gate, choice of the top k, balancing losses; and the row counts that result.

Letters: T tokens of this device, E experts, k experts per token, p bytes of a probability. What is kept for backward is what
Megatron-Core 0.16.1 keeps (megatron/core/transformer/moe/router.py, moe_utils.py; tests/truth/test_mcore_moe.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptime.base.num import Num, ceil, minimum, same, where
from steptime.model.grouped_casts import padded_to
from steptime.model.ops import Comm, Gemm, Move, Op, Param, Tensor
from steptime.model.router_choice import Routing

if TYPE_CHECKING:
    from steptime.model.model import Model, Moe
    from steptime.model.shard import Shard

INT64, INT32, BOOL, FP32 = 8.0, 4.0, 1.0, 4.0
"""Bytes of one number."""


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows go where in one layer on one device, and their width."""

    moe: Moe
    hidden: int
    shard: Shard

    @property
    def tokens(self) -> Num:
        """T: tokens that this device routes."""
        return self.shard.sequence_tokens

    @property
    def ranks(self) -> Num:
        """Devices over which one layer's experts lie."""
        return self.shard.ep * self.shard.etp

    @property
    def spread(self) -> bool:
        """Whether the experts of a layer lie on several devices."""
        return same(self.ranks != 1)

    @property
    def local_experts(self) -> Num:
        """Experts of this device."""
        return self.moe.n_experts / self.shard.ep

    @property
    def several(self) -> bool:
        """Whether a device has more than one expert, so that received rows are sorted by expert."""
        return same(self.local_experts != 1)

    @property
    def capacity(self) -> Num:
        """Most rows that one device may send to one expert (moe_utils.py, get_capacity)."""
        return ceil(self.tokens * self.moe.experts_per_token / self.moe.n_experts * (self.moe.capacity_factor or 1.0))

    @property
    def sent(self) -> Num:
        """Rows that this device's tokens become: k each, minus those dropped at even routing, or padded to capacity."""
        every = self.tokens * self.moe.experts_per_token
        if self.moe.capacity_factor is None:
            return every
        full = self.capacity * self.moe.n_experts
        return full if self.moe.pad_to_capacity else minimum(full, every)

    @property
    def load(self) -> Num:
        """Rows of the fullest device divided by the mean; limited by capacity."""
        factor: Num = self.moe.imbalance_factor
        if self.capacity_share is not None:  # rows beyond the buffer are dropped
            factor = minimum(factor, self.room / self.sent)
        if self.moe.capacity_factor is not None:
            factor = minimum(factor, self.capacity * self.moe.n_experts / self.sent)
        return where(self.shard.ep > 1, factor, 1.0)

    @property
    def received(self) -> Num:
        """Rows that arrive over ep, before those of etp are gathered."""
        return self.sent * self.load

    @property
    def here(self) -> Num:
        """N: rows that this device's experts compute."""
        return self.received * self.shard.etp

    @property
    def capacity_share(self) -> float | None:
        """Room of a buffer for received rows, in the most that can arrive; None where the host waits for their number.

        MinimalAsyncEP has room for all (pytorch/torchtitan@6b960233 torchtitan/models/common/token_dispatcher.py,
        MinimalAsyncEPTokenDispatcher.dispatch), HybridEP for a share that its user sets (torchtitan/distributed/deepep/
        hybridep.py@aa1d3741, _num_permuted_tokens_for_non_blocking).
        """
        how = self.shard.software.moe
        if how.dispatcher != "flex" or not self.spread:
            return None
        return 1.0 if how.flex_backend == "minimal_async_ep" else how.non_blocking_capacity_factor

    @property
    def room(self) -> Num:
        """Rows for which tensors between dispatch and combine have room: those that arrive, or of the buffer.

        The most that can arrive are all experts per token of every rank's tokens, or all of this rank's experts.
        """
        if self.capacity_share is None:
            return self.here + self.padding
        return self.capacity_share * self.ranks * self.tokens * minimum(self.moe.experts_per_token, self.local_experts)

    @property
    def padding(self) -> Num:
        """Rows by which the groups of experts are padded for products in low precision.

        torchao's permutation has room for the most (pytorch/ao@36027d82 torchao/prototype/moe_training/ep/permute.py,
        permute_and_pad: x.shape[0] + num_local_experts * alignment); HybridEP pads the groups that arrive, by half in the mean.
        """
        multiple = padded_to(self.shard)
        if multiple == 1.0:
            return 0.0
        return (
            self.local_experts
            * multiple
            * (0.5 if self.shard.software.moe.dispatcher == "flex" and self.spread else 1.0)
        )

    @property
    def map_kept(self) -> bool:
        """Whether the router keeps its map of tokens and experts for backward; the dispatcher references it too."""
        return self.moe.capacity_factor is not None or self.moe.load_balancing == "sinkhorn"

    @property
    def prob(self) -> float:
        """p: bytes of a probability. DeepEP supports only fp32 (fused_a2a.py)."""
        moe = self.shard.software.moe
        return FP32 if moe.router_dtype == "fp32" or moe.dispatcher == "flex" else self.shard.itemsize

    @property
    def routing(self) -> Routing:
        """Routing of this layer: top k of the experts, in all groups or in the best."""
        moe = self.moe
        return Routing(moe.n_experts, moe.experts_per_token, moe.n_groups or 1, moe.node_limit or 1)


def router_ops(model: Model, rows: Rows, x: str) -> tuple[list[Op], str]:
    """Gate and top k: ops, and the tensor of probabilities, T x E."""
    moe, shard, p = rows.moe, rows.shard, rows.prob
    cells = rows.tokens * moe.n_experts
    logits = Tensor("moe.logits", cells, p)
    weight = Param("mlp.router.weight", (moe.n_experts, model.hidden_sz))
    gate = Gemm(
        "moe.router",
        (x,),
        (logits,),
        (x,),
        (),
        (weight, Param("mlp.router.bias", (moe.n_experts,))) if model.bias else (weight,),
        m=rows.tokens,
        n=moe.n_experts,
        k=model.hidden_sz,
        itemsize=shard.itemsize,
        role="router",
    )
    kept = (*choice(rows), *losses(rows))
    probs = Tensor("moe.probs", cells, p)
    names = tuple(t.name for t in kept)
    # softmax or sigmoid, top k, scatter of scores and of the map, each with its casts; a loss is as many again
    kernels = 8.0 * (1.0 + (moe.load_balancing != "none"))
    top_k = Move("moe.top_k", (logits.name,), (probs,), names, kept, kernels=kernels, role="router", chooses=True)
    return [gate, top_k, *loss_sums(rows)], probs.name


def choice(rows: Rows) -> tuple[Tensor, ...]:
    """Bytes kept by the top-k choice: indices, and scores of the chosen or of all experts (topk_routing_with_score_function)."""
    moe, p = rows.moe, rows.prob
    chosen, cells = rows.tokens * moe.experts_per_token, rows.tokens * moe.n_experts
    if moe.load_balancing == "sinkhorn":  # router.py, sinkhorn_load_balancing
        return (Tensor("moe.scores", cells, p if moe.experts_per_token == 1 else FP32), Tensor("moe.map", cells, BOOL))
    kept = [Tensor("moe.indices", chosen, INT64)]
    if rows.shard.software.moe.deterministic:  # index_put_ takes the tokens' numbers too
        kept.append(Tensor("moe.tokens", rows.tokens, INT64))
    if moe.score_function == "sigmoid":
        kept.append(Tensor("moe.sigmoid", cells, FP32))
        if moe.experts_per_token > 1:  # the chosen scores and their sum
            kept.append(Tensor("moe.chosen", rows.tokens * (moe.experts_per_token + 1), p))
        if moe.expert_bias and p != FP32:
            kept.append(Tensor("moe.scores", cells, p))
    else:
        kept.append(Tensor("moe.softmax", cells if moe.pre_softmax else chosen, FP32))
    if moe.capacity_factor is not None:
        kept.append(Tensor("moe.drop_mask", cells, BOOL))
    return tuple(kept)


def losses(rows: Rows) -> tuple[Tensor, ...]:
    """Bytes kept by the balancing loss and the z loss: their own scores, and tokens per expert (moe_utils.py)."""
    moe, p, tokens = rows.moe, rows.prob, rows.tokens
    kept: list[Tensor] = []
    if moe.balancing_loss:
        if moe.score_function == "sigmoid":
            kept.append(Tensor("moe.loss.scores", tokens * (moe.n_experts + 1) + 1, p))
        else:
            kept.append(Tensor("moe.loss.softmax", tokens * moe.n_experts + 1, FP32))
        per_expert = {"aux_loss": INT64, "seq_aux_loss": INT64 * rows.shard.batch, "global_aux_loss": 2.0}
        kept.append(Tensor("moe.loss.counts", moe.n_experts * per_expert[moe.load_balancing], BOOL))
    if moe.z_loss:
        kept.append(Tensor("moe.z_loss", tokens * (moe.n_experts + 1) + 1, p))
    return tuple(kept)


def loss_sums(rows: Rows) -> list[Op]:
    """Tokens per expert summed over the ranks that share the sequences (router.py, _apply_aux_loss, _apply_seq_aux_loss)."""
    moe, shard = rows.moe, rows.shard
    counted = {"aux_loss": 1.0, "seq_aux_loss": shard.batch}.get(moe.load_balancing)
    if counted is None or not (shard.split or shard.context_split):
        return []
    return [Comm("moe.loss.sum", kind="all_reduce", axis="tp_cp", bytes=INT64 * moe.n_experts * counted, role="router")]
