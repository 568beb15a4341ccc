"""What torch.compile and torchtitan's selective checkpointing keep for backward, byte for byte, against the op lists.

The graph that autograd saves from is cut by AOTAutograd's min-cut partitioner with inductor's decompositions, on a CPU; nothing
is compiled. Views of one storage count once; weights and rotary tables, which are there in any case, not at all.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_ours import block_input, kept, whole

from steptime.model.blocks import block_ops, head_ops
from steptime.model.model import Model
from steptime.model.ops import Gemm, Op, tensor_bytes
from steptime.model.ops import Tensor as Input
from steptime.model.segments import find_segments, kept_names, replayed
from steptime.model.shard import Shard
from steptime.software.performance import Performance, resolve
from steptime.software.settings import Compile

ATEN = torch.ops.aten
VIEWS = {
    ATEN.view.default, ATEN.permute.default, ATEN.alias.default, ATEN.transpose.int, ATEN.unsqueeze.default,
    ATEN._unsafe_view.default, ATEN.reshape.default, ATEN.expand.default, ATEN.t.default, ATEN.detach.default,
}  # fmt: skip
CPU_FLASH = ATEN._scaled_dot_product_flash_attention_for_cpu
SAVED_OPS = {CPU_FLASH.default}
B, S = 2, 37
"""A prime length: no weight is as large as a multiple of the tokens."""
SIZES = {
    "llama": {"hidden_sz": 64, "inter_sz": 176, "n_q_heads": 4, "n_kv_heads": 2, "head_dim": 16},
    "qwen3": {"hidden_sz": 48, "inter_sz": 80, "n_q_heads": 6, "n_kv_heads": 2, "head_dim": 16, "qk_norm": True},
    "gelu": {"hidden_sz": 64, "inter_sz": 128, "n_q_heads": 4, "head_dim": 16, "activation": "gelu"},
}


class Block(nn.Module):
    """A Llama block as torchtitan writes it: every step a torch function."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, d = model, model.head_dim
        q, kv, h, inner = model.n_q_heads * d, model.n_kv_heads * d, model.hidden_sz, model.inter_sz
        shapes = {"q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h), "gate": (h, inner), "up": (h, inner)}
        shapes["down"] = (inner, h)
        self.linear = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(width)) for width in (h, h, d, d)])
        self.act = {"silu": F.silu, "gelu": F.gelu}[model.activation]
        self.bfloat16()

    def norm(self, x: Tensor, i: int) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.norms[i], 1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        normed = self.norm(x, 0)
        q, k, v = (self.linear[name](normed).view(b, s, -1, self.model.head_dim) for name in "qkv")
        if self.model.qk_norm:
            q, k = self.norm(q, 2), self.norm(k, 3)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.linear["o"](o.transpose(1, 2).reshape(b, s, -1))
        normed = self.norm(x, 1)
        return x + self.linear["down"](self.act(self.linear["gate"](normed)) * self.linear["up"](normed))


class LitBlock(Block):
    """The same with one product for q, k and v, each a view of it (Lightning-AI/litgpt@b042058e litgpt/model.py)."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        every = (model.n_q_heads + 2 * model.n_kv_heads) * model.head_dim
        self.qkv = nn.Linear(model.hidden_sz, every, bias=False).bfloat16()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (b, s, _), groups = x.shape, self.model.n_kv_heads
        each = self.model.n_q_heads // groups
        qkv = self.qkv(self.norm(x, 0)).view(b, s, groups, each + 2, -1).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((each, 1, 1), dim=2)
        q, k, v = (t.expand(b, groups, each, s, -1).reshape(b, groups * each, s, -1) for t in (q, k, v))
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linear["o"](o.transpose(1, 2).reshape(b, s, -1))
        normed = self.norm(x, 1)
        return x + self.linear["down"](self.act(self.linear["gate"](normed)) * self.linear["up"](normed))


def model_of(kind: str) -> Model:
    return Model(n_layers=1, vocab_sz=128, **SIZES[kind])


def shard_of(model: Model, compiled: Compile, software: str = "torch") -> Shard:
    software = resolve(Performance(software=software, compile=compiled))
    return Shard(float(B), float(S), float(S), 1.0, False, float(model.vocab_sz), software)


def inputs(model: Model) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(B, S, model.hidden_sz, dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(1, S, 1, model.head_dim, dtype=torch.bfloat16)
    return x, table, table.clone()


def part_of_split(node: torch.fx.Node) -> bool:
    """Whether a node is one of the views that a split makes."""
    return node.target is operator.getitem and node.args[0].target is ATEN.split_with_sizes.default


def storage_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node that made the storage that a node is a view of."""
    while node.op == "call_function" and (node.target in VIEWS or part_of_split(node)):
        node = node.args[0].args[0] if part_of_split(node) else node.args[0]
    return node


def saved_by_compile(run, *args: Tensor) -> Counter[int]:
    """Bytes of the storages that the partitioned forward hands to backward; weights and tables left out."""
    return saved_within({1.0: ()}, run, *args)[1.0]


def saved_within(expensive: dict[float, tuple], run, *args: Tensor) -> dict[float, Counter[int]]:
    """The same for each memory budget, with some more ops among those that are never recomputed for free; traced once."""
    found: dict[float, Counter[int]] = {}

    def partition(joint: torch.fx.GraphModule, example: object, **options):
        lists = partitioners.get_default_op_list()
        for budget, more in expensive.items():
            ops = replace(lists, compute_intensive_ops=lists.compute_intensive_ops | {*more})
            with (
                mock.patch.object(partitioners, "get_default_op_list", lambda ops=ops: ops),
                torch._functorch.config.patch(activation_memory_budget=budget),
            ):
                parts = min_cut_rematerialization_partition(joint, example, **options)
            found[budget] = saved_by_graph(parts[0])
        return parts

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    torch.compile(run, backend=backend, fullgraph=True)(*args)
    return found


def saved_by_graph(forward: torch.fx.GraphModule) -> Counter[int]:
    """Of a forward with one result, which its other outputs follow."""
    results = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    known = {storage_of(node) for node in results[1:] if isinstance(node, torch.fx.Node)}
    tensors = [node.meta["val"] for node in known if isinstance(node.meta["val"], Tensor)]
    held = [t for t in tensors if t.numel() % (B * S) == 0 and t.shape[0] != 1]
    return Counter(t.numel() * t.itemsize for t in held)


@pytest.mark.parametrize("kind", SIZES)
def test_compiled_block(kind):
    """Inputs of matrix products and attention, statistics of norms and attention; no activation of gate, no fp32 copy.

    Within a memory budget below 1 no norm's nor activation's output; of Qwen3 from 0.8 on neither query nor key after their norms
    and rotation. Its bytes per token without the input, attention's output twice: 1,792, then 1,440, which is 0.8036 of it. The
    CPU's attention kernel is put among those that are expensive to run again, as flash attention is.
    """
    model = model_of(kind)
    shard = shard_of(model, "blocks")
    ops, x = block_ops(model, shard), block_input(model, shard)
    budgets = (0.95, 0.81, 0.8, 0.7) if model.qk_norm else (0.95, 0.7)
    found = saved_within({1.0: ()} | dict.fromkeys(budgets, (CPU_FLASH,)), Block(model), *inputs(model))
    assert found.pop(1.0) == kept(ops, x)
    for budget, saved in found.items():
        assert saved == ours_within(budget, ops, x), budget


def ours_within(budget: float, ops: list[Op], x: Input) -> Counter[int]:
    sizes = tensor_bytes(ops, x)
    return Counter(
        whole(sizes[name]) for name in kept_names(ops, find_segments(ops, frozenset({budget}), compiled=True))
    )


def test_compiled_block_of_litgpt():
    """The value is a view that holds all of the product."""
    model = Model(n_layers=1, vocab_sz=128, **SIZES["llama"] | {"n_kv_heads": 4})
    shard = shard_of(model, "blocks", "litgpt-ddp")
    ours = kept(block_ops(model, shard), block_input(model, shard))
    assert saved_by_compile(LitBlock(model), *inputs(model)) == ours


def test_compiled_loss():
    """The bf16 logits, the targets, and of each token the maximum and the logarithm of the sum in fp32."""
    model = model_of("llama")
    logits = torch.randn(B, S, model.vocab_sz, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, model.vocab_sz, (B, S))
    found = saved_by_compile(lambda p, t: F.cross_entropy(p.flatten(0, 1).float(), t.flatten(0, 1)), logits, targets)
    loss = head_ops(model, shard_of(model, "all"))[-1]
    sizes = tensor_bytes(head_ops(model, shard_of(model, "all")), block_input(model, shard_of(model, "all")))
    assert found == Counter(whole(sizes[name]) for name in loss.saves)
    assert sum(size * count for size, count in found.items()) == B * S * (2 * 128 + 8 + 4 + 4)


def policy(counts: list[int], op, *_args, **_kwargs) -> CheckpointPolicy:
    """torchtitan's: attention, and every other matrix product from the first one on (pytorch/torchtitan
    torchtitan/distributed/activation_checkpoint.py)."""
    if op is ATEN.mm.default:
        counts[0] += 1
        return CheckpointPolicy.PREFER_RECOMPUTE if counts[0] % 2 == 0 else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def contexts(kept_by: list[object] | None = None):
    forward, again = [0], [0]
    modes = create_selective_checkpoint_contexts(
        lambda ctx, op, *a, **k: policy(again if ctx.is_recompute else forward, op, *a, **k)
    )
    if kept_by is not None:
        kept_by.append(modes[0])
    return modes


def ours_per_op(model: Model, *, compiled: bool) -> Counter[int]:
    shard = shard_of(model, "blocks" if compiled else "none")
    ops, x = block_ops(model, shard), block_input(model, shard)
    segments = find_segments(ops, frozenset({"per_op"}), compiled=compiled)
    sizes = tensor_bytes(ops, x)
    return Counter(whole(sizes[name]) for name in kept_names(ops, segments))


def test_a_compiled_replay_is_cut_to_what_backward_reads():
    """Products of backward: two for each of the block's, and its replay without the last one, though early_stop is off."""
    model, products = model_of("qwen3"), []
    block = Block(model)

    def backward(graph: torch.fx.GraphModule, _example: object):
        products.append(sum(node.target is ATEN.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return checkpoint(block, x, cos, sin, use_reentrant=False, early_stop=False)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    torch.compile(run, backend=backend, fullgraph=True)(*inputs(model)).sum().backward()
    ops = block_ops(model, shard_of(model, "blocks"))
    early = resolve(Performance(software="torchtitan", compile="blocks")).activations.recompute_stops_early
    again = replayed(ops, 0, len(ops) - 1, stops_early=early)
    forward = [isinstance(op, Gemm) for op in ops]
    assert products == [2 * sum(forward) + sum(forward[i] for i in again)] == [2 * 7 + 6]


@pytest.mark.parametrize("kind", SIZES)
def test_selective_per_op(kind):
    """Eager: the block's input and every output that the policy caches, the last product's too, which nobody reads."""
    model, modes = model_of(kind), []
    x, cos, sin = inputs(model)
    out = checkpoint(Block(model), x, cos, sin, use_reentrant=False, context_fn=lambda: contexts(modes))
    cached = [value.val for values in modes[0].storage.values() for value in flat(values)]
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.itemsize for t in [x, *cached]}
    assert Counter(storages.values()) == ours_per_op(model, compiled=False)
    out.sum().backward()


def flat(values) -> list:
    """Cached tensors of some calls; attention returns several values, some no tensor."""
    leaves = torch.utils._pytree.tree_leaves(list(values.values()) if isinstance(values, dict) else values)
    return [leaf for leaf in leaves if isinstance(getattr(leaf, "val", None), Tensor)]


@pytest.mark.parametrize("kind", ["qwen3", "gelu"])
def test_selective_per_op_compiled(kind):
    """Compiled: the same without the last product's output."""
    model = model_of(kind)
    block = Block(model)

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return checkpoint(block, x, cos, sin, use_reentrant=False, context_fn=contexts)

    assert saved_by_compile(run, *inputs(model)) == ours_per_op(model, compiled=True)
