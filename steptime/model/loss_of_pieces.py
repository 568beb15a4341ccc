"""Cross entropy of the logits' pieces in turn: the logits of all tokens are there, and backward begins when all losses are known.

Source: pytorch/torchtitan@e23bb707 torchtitan/components/loss.py, chunked_cross_entropy_loss (pull request 996, 2025-03-24;
removed on 2025-04-02 by pull request 1033).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import Move, Op, Tensor
from steptime.model.sublayers import FP32

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.shard import Shard


def chunks_of_head(shard: Shard) -> float:
    """Chunks that run from the head to the loss, and back, one after the other."""
    kernels = shard.software.kernels
    return 1.0 if kernels.loss_impl == "pieces" else float(kernels.loss_chunks)


def loss_of_pieces(shard: Shard, logits: Tensor, ids: Tensor, *, logits_kept: bool, split: bool) -> Op:
    """A piece is upcast for its log probabilities, which alone are kept, in fp32 (torch/nn/functional.py, cross_entropy).

    The last piece's upcast stands beside the logits and the log probabilities of all. Backward begins with two fp32 gradients of
    the last piece beside all log probabilities; the pieces' gradients in the logits' dtype are then joined, when no log
    probabilities are left (SplitBackward0). `split`: over a split vocabulary (see `torch_loss`), with one copy of a piece more.
    """
    pieces = float(shard.software.kernels.loss_chunks)
    log_probs = Tensor("loss.log_probs", logits.elements, FP32)
    whole, piece = log_probs.bytes, log_probs.bytes / pieces
    copies = 1.0 if split else 0.0
    forward: Num = logits.bytes + whole + (8.0 if split else 2.0) * whole
    joined = 2.0 * logits.bytes if pieces > 1.0 else 0.0
    backward: Num = whole + (7.0 if split else 3.0) * whole + whole + logits.bytes + joined
    return Move(
        "loss",
        (logits.name,),
        (),
        (log_probs.name, ids.name, *((logits.name,) if logits_kept else ())),
        (log_probs, ids),
        (),
        forward,
        backward,
        (8.0 if split else 3.0) * pieces,
        forward_temp_bytes=(1.0 + copies) * piece,
        backward_temp_bytes=(2.0 + copies) * piece - logits.bytes,
    )
