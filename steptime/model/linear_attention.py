"""Linear attention in place of attention: norm, one of three mixers, output projection, residual.

Gated DeltaNet as in Megatron-Core (megatron/core/ssm/gated_delta_net.py, 0.16.1, with causal_conv1d), Kimi Delta Attention as
flash-linear-attention v0.5.2 does (fla/layers/kda.py), Lightning Attention as in MiniMax-Text-01 (transformers 4.57.1
modeling_minimax.py) over that library's kernel. Letters: T tokens, H heads, K and V widths of a head, C tokens of a chunk; on
this device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.delta_rule import gated_delta_net, kimi_delta
from steptime.model.lightning import lightning
from steptime.model.ops import Op, Param
from steptime.model.quantize import backward_casts, cast, cast_norm
from steptime.model.sublayers import add_branch, enter_tp, leave_tp, linear, norm_before

if TYPE_CHECKING:
    from steptime.model.model import Model
    from steptime.model.shard import Shard

MIXERS = {"gated_delta_net": gated_delta_net, "kda": kimi_delta, "lightning": lightning}
"""Every kind: ops from the normalized tokens to the input of the output projection."""


def linear_attention_ops(model: Model, shard: Shard, out: str = "x2") -> list[Op]:
    """The half of a block that mixes tokens, from "x" to `out`.

    Raises:
        ValueError: the model has no linear attention.
    """
    of = model.linear_attention
    if of is None:
        raise ValueError("model.linear_attention: not set, so there is none")
    rows, hidden = shard.sequence_tokens, model.hidden_sz
    normed, n1 = norm_before("attn", "x", model, shard)
    normed, operand = cast_norm(normed, n1, rows * hidden, shard)
    entered, operand = enter_tp("attn", operand, hidden, shard, shard.software.recipe)
    mixed, y = MIXERS[of.kind](model, of, shard, operand)
    whole = of.widths[1]
    width = whole / shard.tp
    quantized, read = cast("attn.mixed", y, shard.tokens * width, shard)
    back = backward_casts(shard, shard.tokens, hidden, width, reduced=True)
    weight = (Param("attn.proj.weight", (hidden, whole), 1),)
    project = linear("attn.proj", read, "attn.proj.out", width, hidden, shard, weight, back)
    left, branch = leave_tp("attn", "attn.proj.out", hidden, shard)
    return [*normed, *entered, *mixed, *quantized, project, *left, *add_branch("attn", "x", branch, out, model, shard)]
