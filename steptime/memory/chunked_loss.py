"""What a loss in chunks holds beside the logits of one chunk: head and loss of each run forward and backward in turn.

Source: pytorch/torchtitan@bcc09297 torchtitan/components/loss.py, ChunkedLossWrapper. Chunks of several sequences are copies,
until all tokens are cut at once (@b5bcd76c); the gradient of the hidden states is collected in fp32; the logits of a chunk are
referenced until the next one's replace them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.base.num import Num, where
from steptime.model.sublayers import FP32

if TYPE_CHECKING:
    from steptime.job.job import Job
    from steptime.job.parts import Part

BY_CHUNK = ("head.logits", "loss.log_probs", "loss.max", "loss.log_sum")
"""Tensors of the head that exist for one chunk at a time."""
LOSSES = {"composite", "compiled"}
"""Of `loss_impl`: those that a training loop runs chunk by chunk."""


def in_chunks(job: Job) -> bool:
    """Whether a training loop runs the loss in chunks."""
    kernels = job.software.kernels
    return kernels.loss_chunks > 1 and kernels.loss_impl in LOSSES


def kept_by(head: Part) -> set[str]:
    """What the head's ops keep for backward."""
    return {name for op in head.ops for name in op.saves}


def saved_by_chunk(head: Part) -> Num:
    """Bytes of one chunk's tensors among those kept."""
    kept = kept_by(head)
    return sum([head.sizes[name] for name in BY_CHUNK if name in kept])


def hidden_bytes(head: Part) -> Num:
    """Bytes of the hidden states that are cut into chunks: what the head's product reads."""
    name = next(op.inputs[0] for op in head.ops if op.name == "head.proj")
    return head.sizes[name]


def loop_bytes(head: Part) -> Num:
    """Bytes that stay while chunks run: copies of hidden states and labels, and the collected gradient in fp32."""
    hidden = hidden_bytes(head)
    copies = where(head.sequences > 1, hidden + head.sizes["loss.targets"], 0.0)
    return copies + hidden / head.x.itemsize * FP32


def standing_bytes(head: Part) -> Num:
    """Bytes that a chunk's backward finds besides the walk of the head, with labels and logits that are still referenced."""
    logits = 0.0 if "head.logits" in kept_by(head) else head.sizes["head.logits"]
    return loop_bytes(head) + logits + head.sizes["loss.targets"]
