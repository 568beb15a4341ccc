"""What torch.compile keeps of a block whose linears are torchao's float8, by rows and by tensor, against the op lists.

Its function (pytorch/ao torchao/float8/float8_linear.py, matmul_with_hp_or_float8_args) is written out without torchao, with
a stand-in for the product, which the partitioner, too, can neither fuse nor run again for free.
"""

from __future__ import annotations

from collections import Counter

import torch
from plain_backward import AUTOGRAD
from test_torch_compile import CPU_FLASH, B, Block, S, inputs, ours_within, saved_by_compile, saved_within
from torch import Tensor, nn
from torch_ours import block_input, whole

from steptime.memory.op_walk import kept_by_part
from steptime.model.blocks import block_ops
from steptime.model.model import Model
from steptime.model.shard import Shard
from steptime.software.performance import Performance, resolve

LIBRARY = torch.library.Library("steptime_test", "DEF")
LIBRARY.define("product(Tensor a, Tensor b) -> Tensor")
for place in ("CPU", "Meta"):
    LIBRARY.impl("product", lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16), place)
LARGEST = 448.0
MODEL = Model(
    n_layers=1, vocab_sz=128, hidden_sz=80, inter_sz=272, n_q_heads=5, n_kv_heads=1, head_dim=16, qk_norm=True
)
"""Qwen3 14B, 64 times narrower."""


def cast(x: Tensor, dim: int) -> Tensor:
    """Scaled by the largest of each row or column, to float8."""
    scale = LARGEST / x.abs().amax(dim, keepdim=True).to(torch.float64).clamp(min=1e-12)
    return (x.float() * scale.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def cast_whole(x: Tensor, _dim: int) -> Tensor:
    """Scaled by the largest of all, to float8."""
    scale = LARGEST / x.abs().amax().to(torch.float64).clamp(min=1e-12)
    return (x.float() * scale.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.steptime_test.product(a, b)


@torch._dynamo.allow_in_graph
class Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return product(cast(x.flatten(0, -2), -1), cast(weight, 0)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows, inner = grad.flatten(0, -2), x.flatten(0, -2)
        to_x = product(cast(rows, -1), cast(weight, 1).t()).view(x.shape)
        return to_x, product(cast(rows, 0).t(), cast(inner, 0)).t()


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Float8.apply(x, self.weight.t())


def test_a_block():
    """The inputs of gate, up and down and of q, k and v are cast again from what the norms and the activation keep; of the output
    projection's, attention's output, both that and its copy by columns are kept.

    Within a memory budget query and key run again from their products: of 2,116 bytes a token 192 less. Attention's copy by
    columns stays. The bans that are lifted first save nothing here, so that this is what any budget below 1 leaves until products
    run again.
    """
    block = Block(MODEL)
    for linear in block.linear.values():
        linear.__class__ = Float8Linear
    software = resolve(Performance(software="torch", compile="blocks", precision="fp8_rowwise"))
    shard = Shard(float(B), float(S), float(S), 1.0, False, float(MODEL.vocab_sz), software)
    ops, x = block_ops(MODEL, shard), block_input(MODEL, shard)
    held = kept_by_part(ops, x, frozenset(), AUTOGRAD._replace(compiled=True))
    ours = Counter(whole(held.sizes[name]) for name in held.names)
    expensive = CPU_FLASH, torch.ops.steptime_test.product
    found = saved_within({1.0: ()} | dict.fromkeys((0.99, 0.95), expensive), block, *inputs(MODEL))
    assert found.pop(1.0) == ours
    kept = 2 * (2 * 80 + 3 * 80 + 3 * 16 + 2 * 272)  # in bf16: x twice; q twice, attention; k twice, v; gate and up
    width = kept + 80  # attention in float8
    rows = 4 * (2 + 5 + 1 + 5)  # of each row: two norms, those of heads, attention's sums
    assert bytes_of(ours) == B * S * (width + rows)
    for budget, saved in found.items():
        assert saved == ours_within(budget, ops, x), budget
        assert bytes_of(saved) == B * S * (2116 - 2 * 6 * 16)


def bytes_of(storages: Counter[int]) -> int:
    return sum(size * count for size, count in storages.items())


def test_a_block_scaled_by_tensor_keeps_float8(monkeypatch):
    """Both casts of an input are the same, so one is kept: of both norms, of the activation and, beside it, of attention."""
    monkeypatch.setitem(globals(), "cast", cast_whole)
    block = Block(MODEL)
    for linear in block.linear.values():
        linear.__class__ = Float8Linear
    software = resolve(Performance(software="torch", compile="blocks", precision="fp8_tensorwise"))
    shard = Shard(float(B), float(S), float(S), 1.0, False, float(MODEL.vocab_sz), software)
    held = kept_by_part(
        block_ops(MODEL, shard), block_input(MODEL, shard), frozenset(), AUTOGRAD._replace(compiled=True)
    )
    ours = Counter(whole(held.sizes[name]) for name in held.names)
    assert saved_by_compile(block, *inputs(MODEL)) == ours
    kept = 2 * (2 * 80 + 3 * 80 + 3 * 16 + 2 * 272)  # in bf16: x twice; q twice, attention; k twice, v; gate and up
    quantized = 2 * 80 + 272 + 80  # norms, activation, attention
    rows = 4 * (2 + 5 + 1 + 5)  # of each row: two norms, those of heads, attention's sums
    assert bytes_of(ours) == B * S * (kept + quantized + rows)
