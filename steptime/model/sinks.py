"""Attention sinks of plain torch modules: the kernel's output is then scaled by the softmax share that the sinks leave."""

from __future__ import annotations

from steptime.model.ops import Move, Op, Tensor
from steptime.model.sublayers import Sublayer


def scaled_by_sinks(kernel: Op, out: Tensor, lse: Tensor) -> Sublayer:
    """The kernel, then its output times sigmoid(log-sum-exp - sink), which is fp32 and cast to the output's dtype.

    pytorch/torchtitan@58b03444 torchtitan/models/gpt_oss/model.py. Kept: the output, the sigmoid, its cast. Backward: the product
    for the output (2 accesses of it), that for the scale (3) and its sum over the head's width (1).
    """
    sigmoid, scaled = lse._replace(name="attn.core.sink.sigmoid"), out._replace(name="attn.core.scaled")
    scale = sigmoid._replace(name="attn.core.sink.scale", itemsize=out.itemsize)
    stats = (sigmoid,) if out.itemsize == lse.itemsize else (sigmoid, scale)
    product = Move(
        "attn.core.sink",
        (out.name, lse.name),
        (scaled,),
        (out.name, *(t.name for t in stats)),
        stats,
        forward_bytes=2.0 * (out.bytes + sigmoid.bytes),
        backward_bytes=6.0 * out.bytes,
        kernels=4.0,
        backward_temp_bytes=out.bytes,
        role="core_attn",
    )
    return [kernel, product], scaled.name
