"""What a loss in chunks holds beside the logits of one chunk: head and loss of each run forward and backward in turn.

Source: pytorch/torchtitan@bcc09297 torchtitan/components/loss.py, ChunkedLossWrapper. Chunks of several sequences are copies; the
gradient of the hidden states is collected in fp32; the logits of a chunk are referenced until the next one's replace them; the
head's gradient is there from the first chunk on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.base.num import Num, where
from steptime.model.embedding_and_head import TOKEN_ID
from steptime.model.sublayers import FP32

if TYPE_CHECKING:
    from steptime.job.assembly import Assembly

BY_CHUNK = ("head.logits", "loss.log_probs", "loss.max", "loss.log_sum")
"""Tensors of the head that exist for one chunk at a time."""
LOSSES = {"composite", "compiled"}
"""Of `loss_impl`: those that a training loop runs chunk by chunk."""


def in_chunks(assembly: Assembly) -> bool:
    """Whether a training loop runs the loss in chunks."""
    kernels = assembly.job.software.kernels
    return kernels.loss_chunks > 1 and kernels.loss_impl in LOSSES


def kept_by_head(assembly: Assembly) -> set[str]:
    """What the head's ops keep for backward."""
    return {name for op in assembly.head.ops for name in op.saves}


def saved_by_chunk(assembly: Assembly) -> Num:
    """Bytes of one chunk's tensors among those kept."""
    kept = kept_by_head(assembly)
    return sum([assembly.head.sizes[name] for name in BY_CHUNK if name in kept])


def hidden_bytes(assembly: Assembly) -> Num:
    """Bytes of the hidden states that are cut into chunks: what the head's product reads."""
    name = next(op.inputs[0] for op in assembly.head.ops if op.name == "head.proj")
    return assembly.head.sizes[name]


def label_bytes(assembly: Assembly) -> Num:
    """Bytes of the labels."""
    job = assembly.job
    return hidden_bytes(assembly) / job.software.itemsize / job.model.hidden_sz * TOKEN_ID


def loop_bytes(assembly: Assembly) -> Num:
    """Bytes that stay while chunks run: copies of hidden states and labels, and the collected gradient in fp32."""
    hidden = hidden_bytes(assembly)
    copies = where(assembly.job.data.microbatch_sz > 1, hidden + label_bytes(assembly), 0.0)
    return copies + hidden / assembly.job.software.itemsize * FP32


def logits_held(assembly: Assembly, *, every: bool = False) -> Num:
    """Bytes of the logits of a chunk besides those kept for backward, or all (`every`)."""
    if not every and "head.logits" in kept_by_head(assembly):
        return 0.0
    return assembly.head.sizes["head.logits"]


def beside_head(assembly: Assembly) -> Num:
    """Bytes that later chunks' backward finds besides the walk of the head, its own gradient where a step starts without it."""
    job = assembly.job
    extra = loop_bytes(assembly) + logits_held(assembly) + label_bytes(assembly)
    if not job.single_microbatch or job.software.states.gradients_persist:
        return extra
    mine = assembly.embedding.registered_params if job.model.tie_embeddings else assembly.local_head_params
    weight = next((p.elements for p in mine if p.param.vocab), 0.0)
    return extra + weight * job.software.bytes_of(job.software.states.main_grad_dtype)
