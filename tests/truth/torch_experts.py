"""Mixtures of experts and latent attention as torchtitan writes them, for `torch_blocks.Transformer`'s blocks.

After pytorch/torchtitan@b5bcd76c torchtitan/models/common/moe.py, token_dispatcher.py and models/deepseek_v3/model.py, line by
line, with tokens dealt evenly (its _debug_force_load_balance). What a local name keeps alive beyond its use is let go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from live_bytes import one_kernel
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_blocks import DTYPES, FusedGlu, Kernels, Norm, Rotate, Transformer
from torch_fsdp import Fsdp

from steptime.model.model import Model, Moe


class Router(nn.Module):
    """TokenChoiceTopKRouter: gate and scores in fp32."""

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        self.moe, self.gate = moe, nn.Linear(hidden, moe.n_experts, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        moe = self.moe
        scores = F.linear(x.float(), self.gate.weight.float())  # autocast to fp32
        scores = torch.sigmoid(scores) if moe.score_function == "sigmoid" else F.softmax(scores, -1)
        _, chosen = torch.topk(scores if bias is None else scores + bias, k=moe.experts_per_token, dim=-1, sorted=False)
        chosen.copy_(torch.arange(chosen.numel()).reshape(chosen.shape) % moe.n_experts)
        best = scores.gather(-1, chosen)
        if moe.experts_per_token > 1 and not moe.pre_softmax:
            best = best / (best.sum(-1, keepdim=True) + 1e-20)
        return best * 2.5, chosen, scores


class GroupedExperts(nn.Module):
    """Three grouped products over the local experts."""

    def __init__(self, hidden: int, moe: Moe, experts: int, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.w1 = nn.Parameter(torch.rand(experts, moe.expert_inter_sz, hidden) - 0.5)
        self.w2 = nn.Parameter(torch.rand(experts, hidden, moe.expert_inter_sz) - 0.5)
        self.w3 = nn.Parameter(torch.rand(experts, moe.expert_inter_sz, hidden) - 0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = product(x, self.w1, ends), product(x, self.w3, ends)
        inner = FusedGlu.apply(gate, up, F.silu) if self.fused else F.silu(gate) * up
        del gate, up, x
        return product(inner, self.w2, ends)


class Grouped(torch.autograd.Function):
    """torch._grouped_mm, which keeps its operands: the CPU's own makes copies of them."""

    @staticmethod
    def forward(ctx, x, weight, ends):
        ctx.save_for_backward(x, weight)
        with one_kernel("grouped product"):
            return x.new_zeros(x.shape[0], weight.shape[1])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with one_kernel("grouped product backward"):
            return torch.zeros_like(x), torch.zeros_like(weight), None


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return Grouped.apply(x, weight, ends)


class SharedExperts(nn.Module):
    """FeedForward: w2(silu(w1 x) * w3 x)."""

    def __init__(self, hidden: int, width: int, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.w1, self.w3 = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return self.w2(FusedGlu.apply(self.w1(x), self.w3(x), F.silu))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoeLayer(nn.Module):
    """MoE with LocalTokenDispatcher, or with AllToAllTokenDispatcher over `ep`."""

    def __init__(self, model: Model, kernels: Kernels, ep: DeviceMesh | None = None) -> None:
        super().__init__()
        moe, ranks = model.moe, 1 if ep is None else ep.size()
        self.moe, self.ep, self.local = moe, ep, moe.n_experts // ranks
        self.router = Router(model.hidden_sz, moe)
        self.experts = GroupedExperts(model.hidden_sz, moe, self.local, fused=kernels.activation == "fused")
        width = moe.shared_expert_inter_sz
        self.shared = SharedExperts(model.hidden_sz, width, fused=self.experts.fused) if width else None
        self.bias = torch.zeros(moe.n_experts) if moe.expert_bias else None

    def forward(self, x: Tensor) -> Tensor:
        shape, moe = x.shape, self.moe
        x = x.view(-1, shape[-1])
        best, chosen, scores = self.router(x, self.bias)
        hit = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        counts = hit.sum(0)
        del scores, hit
        order = torch.argsort(chosen.view(-1), stable=True)
        ranked = best.view(-1)[order]
        tokens = order // moe.experts_per_token
        del best, chosen, order
        y = x[tokens]
        if self.ep is not None:
            y, places, splits = self.dispatch(y, counts)
            counts = counts[: self.local]
        y = self.experts(y, counts)
        if self.ep is not None:
            y = self.combine(y, places, splits)
        out = torch.zeros_like(x)
        y = (y.to(torch.float32) * ranked.reshape(-1, 1)).to(y.dtype)
        out = out.scatter_add(0, tokens.reshape(-1, 1).expand(-1, x.shape[-1]), y)
        del y
        if self.shared is not None:
            out = out + self.shared(x)
        return out.view(shape)

    def dispatch(self, y: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Counts and rows to the ranks of their experts, rows in the order of experts."""
        ranks = self.ep.size()
        torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts.view(ranks, -1), None, None, self.ep))
        splits = [y.shape[0] // ranks] * ranks
        arrived = all_to_all_single(y, splits, splits, self.ep)
        places = torch.arange(arrived.shape[0])
        del y
        return arrived[places, :], places, splits

    def combine(self, y: Tensor, places: Tensor, splits: list[int]) -> Tensor:
        """Rows in the order of ranks, and back."""
        back = y.new_empty(y.shape)
        back[places, :] = y
        del y
        home = all_to_all_single(back, splits, splits, self.ep)
        return torch.ops._c10d_functional.wait_tensor(home)


class FlashLatent(torch.autograd.Function):
    """Flash attention whose values are narrower than its keys: keeps its operands, its output and the log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = q.new_zeros(*v.shape)
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = ctx.saved_tensors
        with one_kernel("flash backward"):
            return torch.zeros_like(q), torch.zeros_like(k), v.new_zeros(v.shape)


class Latent(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        super().__init__()
        of, h, n = model.attention, model.hidden_sz, model.n_q_heads
        self.of, self.n, d = of, n, of.qk_nope_head_dim + of.qk_rope_head_dim
        self.wq = None if of.q_lora_rank else nn.Linear(h, n * d, bias=False)
        if of.q_lora_rank:
            self.wq_a = nn.Linear(h, of.q_lora_rank, bias=False)
            self.q_norm = Norm(of.q_lora_rank, model, kernels)
            self.wq_b = nn.Linear(of.q_lora_rank, n * d, bias=False)
        self.wkv_a = nn.Linear(h, of.kv_lora_rank + of.qk_rope_head_dim, bias=False)
        self.kv_norm = Norm(of.kv_lora_rank, model, kernels)
        self.wkv_b = nn.Linear(of.kv_lora_rank, n * (of.qk_nope_head_dim + of.v_head_dim), bias=False)
        self.wo = nn.Linear(n * of.v_head_dim, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        of, (b, s, _) = self.of, x.shape
        q = self.wq(x) if self.wq is not None else self.wq_b(self.q_norm(self.wq_a(x)))
        q = q.view(b, s, self.n, -1)
        q_nope, q_pe = torch.split(q, [of.qk_nope_head_dim, of.qk_rope_head_dim], -1)
        kv, k_pe = torch.split(self.wkv_a(x), [of.kv_lora_rank, of.qk_rope_head_dim], -1)
        q_pe, k_pe = Rotate.apply(q_pe, cos, sin), Rotate.apply(k_pe.unsqueeze(2), cos, sin)
        q = torch.cat([q_nope, q_pe], -1)
        kv = self.wkv_b(self.kv_norm(kv)).view(b, s, self.n, -1)
        k_nope, v = torch.split(kv, [of.qk_nope_head_dim, of.v_head_dim], -1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n, -1)], -1)
        del q_nope, q_pe, kv, k_nope, k_pe, x
        return self.wo(FlashLatent.apply(q, k, v).reshape(b, s, -1))


def fitted(module: Transformer, ep: DeviceMesh | None = None) -> Transformer:
    """A transformer with the experts and the latent attention that its model has, in the default dtype."""
    model, kernels = module.model, module.kernels
    for i, block in enumerate(module.blocks):
        if model.attention.kind == "mla":
            block.attn = Latent(model, kernels)
        if model.moe is not None and model.moe.at(i):
            block.mlp = MoeLayer(model, kernels, ep)
    return module


@contextmanager
def expert_world(dp: int, ep: int, replicas: int = 1) -> Iterator[tuple[DeviceMesh, DeviceMesh]]:
    """The mesh of the dense parameters, and that of the experts, both with `replicas` copies; this process is rank 0.

    `dp`: all copies together.
    """
    dist.init_process_group("fake", rank=0, world_size=dp, store=FakeStore())
    shards, names = dp // replicas, ("replicas", "fsdp")
    try:
        data = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
        yield data, init_device_mesh("cpu", (replicas, shards // ep, ep), mesh_dim_names=("replicas", "efsdp", "ep"))
    finally:
        dist.destroy_process_group()


def copies(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    """The mesh to shard over, of two dimensions where there are several copies."""
    return mesh["replicas", shards] if mesh["replicas"].size() > 1 else mesh[shards]


def sharded(
    model: Model, kernels: Kernels, fsdp: Fsdp, seqlen: int, meshes: tuple[DeviceMesh, DeviceMesh]
) -> Transformer:
    """apply_fsdp_to_decoder, embedding, final norm and head in the root's group."""
    data, sparse = copies(meshes[0], "fsdp"), meshes[1]
    spread = sparse["ep"].size() > 1
    torch.set_default_dtype(DTYPES[fsdp.params])
    try:
        module = fitted(Transformer(model, kernels, seqlen), sparse["ep"] if spread else None)
    finally:
        torch.set_default_dtype(torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=kernels.dtype, reduce_dtype=DTYPES[fsdp.reduce], cast_forward_inputs=False
    )
    over = {"efsdp": _get_mesh_info(copies(sparse, "efsdp")), "fsdp": _get_mesh_info(data)}
    ranks = sparse["efsdp"].size() * sparse["ep"].size()
    for block in module.blocks:
        options = {"mesh": data, "mp_policy": policy, "reshard_after_forward": fsdp.reshard_blocks}
        if isinstance(block.mlp, MoeLayer):
            options["shard_placement_fn"] = placement(block.mlp, ranks, over, spread=spread)
        fully_shard(block, **options)
    fully_shard(module, mesh=data, mp_policy=policy)
    if spread:
        blocks = list(module.blocks)
        module.set_modules_to_forward_prefetch(blocks[:1])
        module.set_modules_to_backward_prefetch(blocks[-1:])
        for one, following in pairwise(blocks):
            one.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([one])
    return module


def placement(layer: MoeLayer, ranks: int, over, *, spread: bool):
    """Where a parameter of a block with experts is cut, and over which ranks."""
    experts = set(layer.experts.parameters())
    cut = Shard(1) if ranks > layer.moe.n_experts else Shard(0)

    def place(param: nn.Parameter):
        if not spread:
            return cut if param in experts else None
        mine = param in experts
        return ShardPlacementResult(placement=cut if mine else Shard(0), mesh_info=over["efsdp" if mine else "fsdp"])

    return place
