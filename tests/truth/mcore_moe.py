"""What stands between Megatron-Core's mixture of experts and a CPU, and how each gap is closed.

Streams and events are dummies. Routing is forced to be even: token t goes to experts t*k .. t*k+k-1 (mod E), or with a stride to
t, t+stride, .... TransformerEngine's grouped linear and fused permutation, and DeepEP's buffer, are stand-ins that keep what the
real ones keep (TransformerEngine pytorch/module/grouped_linear.py, pytorch/permutation.py; DeepEP deep_ep/buffer.py).
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import ClassVar

import torch


class Stream:
    """torch.cuda.Stream and Event."""

    def __init__(self, *_, **__):
        pass

    def record_event(self, *_):
        return self

    def wait_stream(self, *_):
        return None

    wait_event = wait = synchronize = record = current_stream_wait = wait_stream


class Even(torch.autograd.Function):
    """In place of the random logits of --moe-router-force-load-balancing."""

    topk, stride = 2, 1

    @staticmethod
    def forward(ctx, logits):
        flat = logits.view(-1, logits.shape[-1])
        tokens, experts = flat.shape
        first = torch.arange(tokens).unsqueeze(1) * (Even.topk if Even.stride == 1 else 1)
        out = torch.rand(tokens, experts, dtype=flat.dtype) * 0.01
        out[torch.arange(tokens).unsqueeze(1), (first + torch.arange(Even.topk) * Even.stride) % experts] += 5
        return out.view_as(logits)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Grouped(torch.autograd.Function):
    """Keeps the splits of its input, views of one storage, and the weights."""

    @staticmethod
    def forward(ctx, x, splits, *weights):
        parts = x.split(splits)
        ctx.splits = splits
        ctx.save_for_backward(*parts, *weights)
        return torch.cat([part @ w.t() for part, w in zip(parts, weights, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        n = len(ctx.splits)
        parts, weights = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        grads = grad.split(ctx.splits)
        back = torch.cat([g @ w for g, w in zip(grads, weights, strict=True)])
        return back, None, *[g.t() @ x for g, x in zip(grads, parts, strict=True)]


class GroupedLinear(torch.nn.Module):
    """One weight per local expert, split over the expert-tensor-parallel ranks."""

    def __init__(self, n, inputs, outputs, *, config, pg_collection, tp_comm_buffer_name, bias, skip_bias_add, **_):
        super().__init__()
        ranks = pg_collection.expt_tp.size()
        first = tp_comm_buffer_name == "fc1"
        shape = (outputs // ranks, inputs) if first else (outputs, inputs // ranks)
        for j in range(n):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{j}", weight)
        self.biases = [
            torch.nn.Parameter(torch.empty(shape[0], dtype=config.params_dtype)) for _ in range(n if bias else 0)
        ]
        for j, own in enumerate(self.biases):
            own.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"bias{j}", own)
        self.returns_bias = bias and skip_bias_add

    def forward(self, x, splits):
        weights = [w for name, w in self.named_parameters() if name.startswith("weight")]
        out = Grouped.apply(x, splits, *weights)
        return out, self.biases if self.returns_bias else None


class Permute(torch.autograd.Function):
    """Keeps row_id_map alone: int32, tokens x (2*experts + 1)."""

    @staticmethod
    def forward(ctx, x, probs, mask):
        chosen = mask.bool().t()
        at = torch.arange(len(x)).expand(len(chosen), -1).masked_select(chosen)
        rows = torch.zeros(len(x), 2 * len(chosen) + 1, dtype=torch.int32)
        rows.view(-1)[: len(at)] = at.int()
        ctx.save_for_backward(rows)
        ctx.chosen, ctx.shape = chosen, x.shape
        ctx.mark_non_differentiable(rows)
        return x[at], None if probs is None else probs.t().masked_select(chosen), rows

    @staticmethod
    def backward(ctx, grad, grad_probs, _):
        at = ctx.saved_tensors[0].view(-1)[: len(grad)].long()
        back = None
        if grad_probs is not None:
            back = grad_probs.new_zeros(ctx.chosen.shape).masked_scatter(ctx.chosen, grad_probs).t()
        return grad.new_zeros(ctx.shape).index_add_(0, at, grad), back, None


class Unpermute(torch.autograd.Function):
    """Keeps the row_id_map that the permutation made."""

    @staticmethod
    def forward(ctx, x, rows, shape):
        ctx.save_for_backward(rows)
        ctx.n = len(x)
        return x.new_zeros(shape).index_add_(0, rows.view(-1)[: len(x)].long(), x)

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0].view(-1)[: ctx.n].long()], None, None


class Sort(torch.autograd.Function):
    """Keeps row_id_map: int32, rows."""

    @staticmethod
    def forward(ctx, x, probs, sizes, order):
        chunks = torch.arange(len(x)).split(sizes.tolist())
        at = torch.cat([chunks[j] for j in order.tolist()]).int()
        ctx.save_for_backward(at)
        return x[at.long()], None if probs is None else probs[at.long()]

    @staticmethod
    def backward(ctx, grad, grad_probs):
        back = ctx.saved_tensors[0].long().argsort()
        return grad[back], None if grad_probs is None else grad_probs[back], None, None


class Buffer:
    """deep_ep.Buffer between twins: a rank gets each token once, whatever the number of its experts there; `sent` tells of it."""

    sent: ClassVar[list] = []

    def __init__(self, group, *_):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, 0, 0

    @staticmethod
    def set_num_sms(_):
        return None

    @staticmethod
    def get_dispatch_config(_):
        def none(*_):
            return 0

        return types.SimpleNamespace(get_nvl_buffer_size_hint=none, get_rdma_buffer_size_hint=none)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices, experts, **_):
        n = self.group.size()
        wanted = torch.stack([(indices // (experts // n) == r).any(-1) for r in range(n)], -1)
        return None, None, torch.bincount(indices[indices >= 0], minlength=experts), wanted, None

    def dispatch(
        self, x, handle=None, topk_idx=None, topk_weights=None, is_token_in_rank=None, num_tokens_per_expert=None, **_
    ):
        n, r = self.group.size(), self.group.rank()
        wanted = handle[0] if handle else is_token_in_rank
        mine = wanted[:, r]
        out = torch.cat([x[mine]] * n)
        Buffer.sent.append(["all_to_all", n, out.nbytes, "dispatch"])
        if handle:
            return out, None, None, None, None, Stream()
        per = len(num_tokens_per_expert) // n
        local = topk_idx[mine] - r * per
        here = (local >= 0) & (local < per)
        indices = torch.cat([local.masked_fill(~here, -1)] * n)
        weights = torch.cat([topk_weights[mine].masked_fill(~here, 0)] * n)
        counts = (num_tokens_per_expert[r * per : (r + 1) * per] * n).tolist()
        return out, indices, weights, counts, (wanted, topk_idx.shape), Stream()

    def combine(self, x, handle, topk_weights=None, **_):
        Buffer.sent.append(["all_to_all", self.group.size(), x.nbytes, "combine"])
        weights = None if topk_weights is None else torch.zeros(handle[1])
        return x.new_zeros(len(handle[0]), x.shape[1]), weights, Stream()


def extensions():
    """DeepEP, before Megatron is imported."""
    sys.modules["deep_ep"] = types.ModuleType("deep_ep")
    sys.modules["deep_ep"].Buffer = Buffer
    sys.modules["deep_ep.utils"] = types.SimpleNamespace(EventHandle=lambda: None, EventOverlap=lambda event: None)


def install():
    """Close the gaps, once Megatron is imported."""
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher

    class Whole(Linear):
        """TELinear on every rank alike, as the down projections of latent attention."""

        def __init__(self, *args, parallel_mode, **kwargs):
            super().__init__(*args, **kwargs)

    moe_layer.HAVE_TE, moe_layer.TELinear = True, Whole
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: Stream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    moe_utils.RandomSTE = Even
    token_dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, record_stream=False: (
        t.numpy() if as_numpy and torch.is_tensor(t) else t
    )
    moe_utils.HAVE_TE = True
    moe_utils.fused_permute_with_probs = lambda x, p, m, num_out_tokens: Permute.apply(x, p, m)
    moe_utils.fused_permute = lambda x, m, num_out_tokens: Permute.apply(x, None, m)[::2]
    moe_utils.fused_unpermute = lambda x, rows, merging_probs, restore_shape: Unpermute.apply(x, rows, restore_shape)
    moe_utils.fused_sort_chunks_by_index = lambda x, n, o: Sort.apply(x, None, n, o)[0]
    moe_utils.fused_sort_chunks_by_index_with_probs = Sort.apply


def grouped(spec):
    """Megatron's layer spec with TEGroupedMLP over the stand-in."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    experts = spec.submodules.mlp.submodules.experts
    experts.module = TEGroupedMLP
    experts.submodules = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    return spec


def latent(spec):
    """Megatron's layer spec of latent attention, its down projections whole on every rank as TransformerEngine's are.

    Megatron's unfused attention is built without the two arguments that latent attention gives it, and takes values to be as wide
    as keys.
    """
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
            super().__init__(*args, **kwargs)
            if v_channels:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    multi_latent_attention.TELinear = type("NotHere", (torch.nn.Module,), {})  # a mock, which isinstance() refuses
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = Attention
    parts.linear_q_down_proj = parts.linear_kv_down_proj = Linear
    return spec


def held(model, kept):
    """Bytes of the matrices that token dispatchers refer to after a forward and autograd does not keep."""
    found = 0
    ahead = model.mtp.layers if hasattr(model, "mtp") else ()
    for layer in (*model.decoder.layers, *(depth.transformer_layer for depth in ahead)):
        dispatcher = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
        for t in vars(dispatcher).values() if dispatcher else ():
            matrix = torch.is_tensor(t) and t.dim() == 2 and t.dtype != torch.long
            if matrix and t.untyped_storage()._cdata not in kept:
                found += t.nbytes
    return found
