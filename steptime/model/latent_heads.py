"""Heads of latent attention in torch: rope parts of queries and keys rotated, both put together from their two parts.

Queries are split in two and, once their rope part is rotated, concatenated; keys are concatenated from a slice of a projection
and one rope part that all heads share (pytorch/torchtitan@b5bcd76c torchtitan/models/deepseek_v3/model.py, Attention.forward;
NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/models/deepseek_v3/layers.py, MLA._forward_impl).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import VECTORIZED, ByElement, Move, Op, Tensor
from steptime.model.rotary import ROTATIONS
from steptime.software.profiles import without_release

if TYPE_CHECKING:
    from steptime.model.model import Model
    from steptime.model.shard import Shard

JOINED = 1.7
"""Elements of a concatenation of which a part is a slice or broadcast, in those of other kernels without vector loads. A thread
copies one element at a time and divides for its place in both tensors (aten/src/ATen/native/cuda/Shape.cu, CatArrayBatchedCopy;
with vector loads only where all parts are contiguous).

DeepSeek-V3 16B with 65,536 tokens on H100 (132 SMs): 27 layers concatenate 201 M elements of queries and of keys, twice with full
checkpointing, and in backward 201 M and 268 M, 34.4e9 in all, in 162 and 181 ms (pytorch/torchtitan@6b9602339
dsv3_scaling_experiment_results.md, cat/concat; row torchtitan-dsv3-n010): 1.61 and 1.44e9 a second per SM. 8,192 queries of 128
heads of 512 + 64 on B300 (148 SMs): 604e6 in 3.10 ms, 1.32e9 (vllm-project/vllm pull request 34917). 1.5e9 is 1 / 1.7 of
`cost.rates.ELEMENTS_PER_SM`."""


def torch_heads(model: Model, shard: Shard, inputs: tuple[str, str]) -> tuple[list[Op], str]:
    """From the projections of queries and of keys and values to "attn.q" and "attn.k": ops, and the tensor of the values."""
    q_up, kv_up = inputs
    size, kernels, n = shard.itemsize, shard.software.kernels, model.n_q_heads / shard.tp
    _, nope, rope, _ = model.attention.latent_widths
    q, k = (Tensor(f"attn.{part}", shard.tokens * n * (nope + rope), size) for part in ("q", "k"))
    if kernels.rope_impl == "fused" and not te_with_torch(shard):
        moved = 2.0 * (q.bytes + k.bytes)
        reads = (q_up, "attn.kv_down", kv_up)
        return [Move("attn.rope", reads, (q, k), (), (), (), moved, moved, 2.0, role="mla_up_proj")], kv_up
    turned = shard.tokens * (n + 1.0) * rope * size
    rotated, each = Tensor("attn.rope.out", turned / size, size), ROTATIONS[kernels.rope_impl]
    turn = Move(
        "attn.rope",
        (q_up, "attn.kv_down"),
        (rotated,),
        forward_bytes=each.forward * turned,
        backward_bytes=each.backward * turned,
        kernels=2.0 if kernels.rope_impl == "fused" else 12.0,
        role="mla_up_proj",
    )
    copied, v = own_value(model, shard, kv_up) if te_with_torch(shard) else ([], kv_up)
    return [turn, join(model, shard, (q_up, kv_up, rotated.name), (q, k)), *copied], v


def te_with_torch(shard: Shard) -> bool:
    """Whether TransformerEngine rotates and attends, and torch's own kernels do the rest, as in NeMo AutoModel uncompiled."""
    return without_release(shard.software.name) == "automodel" and shard.software.kernels.compile == "none"


def join(model: Model, shard: Shard, inputs: tuple[str, str, str], outputs: tuple[Tensor, Tensor]) -> Move:
    """Queries and keys concatenated.

    Backward concatenates too: the gradient of the queries from its two parts, that of keys and values from a slice of the keys'
    and the values'; the keys' rope part is summed over the heads.
    """
    q, k = outputs
    _, nope, rope, value = model.attention.latent_widths
    of_heads = shard.tokens * model.n_q_heads / shard.tp
    kv, summed = of_heads * (nope + value), of_heads * rope * shard.itemsize
    forward, backward = q.elements + k.elements, q.elements + kv
    eager = shard.software.kernels.compile == "none"
    slow = [ByElement(JOINED * x, 2.0 * x * shard.itemsize) if eager else VECTORIZED for x in (forward, backward)]
    return Move(
        "attn.join",
        inputs,
        outputs,
        forward_bytes=2.0 * forward * shard.itemsize,
        backward_bytes=2.0 * backward * shard.itemsize + summed,
        forward_by_element=slow[0],
        backward_by_element=slow[1],
        kernels=2.5,
        role="mla_up_proj",
    )


def own_value(model: Model, shard: Shard, kv_up: str) -> tuple[list[Op], str]:
    """The values as a tensor of their own.

    TransformerEngine makes queries, keys and values contiguous where the strides of keys and values differ by more than their
    widths, as those of a slice do (transformer_engine/pytorch/attention/dot_product_attention/utils.py, get_qkv_layout).
    """
    v = Tensor("attn.v", shard.tokens * model.n_q_heads / shard.tp * model.attention.latent_widths[3], shard.itemsize)
    slow = ByElement(v.elements, 2.0 * v.bytes)
    copy = Move(
        "attn.value",
        (kv_up,),
        (v,),
        forward_bytes=2.0 * v.bytes,
        same_grad=True,
        forward_by_element=slow,
        role="mla_up_proj",
    )
    return [copy], v.name
