"""Memory of a loss in chunks under FSDP2: head and loss of each chunk run forward and backward before the model's backward.

Source: pytorch/torchtitan@bcc09297 torchtitan/components/loss.py, ChunkedLossWrapper. The head's gradients of all chunks add up
unsharded in the dtype of the reduction, which the last chunk reduces; the gradient of the hidden states is collected in fp32,
and the logits of a chunk are referenced until the next one's replace them. The head is gathered after the root's forward has
freed what an all-gather returned, so that this stays for the whole backward (torch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _root_post_forward; _fsdp_param_group.py, wait_for_unshard), and once more
for the final norm, which is in the same group.
"""

from __future__ import annotations

from steptime.base.num import Num, maximum, where
from steptime.fsdp.ends import GatheredEnds
from steptime.fsdp.groups import Buffers, buffers, one_group, options
from steptime.fsdp.moments import Moments
from steptime.job.assembly import Assembly
from steptime.memory.ledger import PartMemory
from steptime.model.embedding_and_head import TOKEN_ID
from steptime.model.sublayers import FP32
from steptime.software.performance import ITEMSIZE

BY_CHUNK = ("head.logits", "loss.log_probs", "loss.max", "loss.log_sum")
"""Tensors of the head that exist for one chunk at a time."""


def in_chunks(assembly: Assembly, ends: GatheredEnds) -> bool:
    """Whether the loss runs in chunks, each with its backward, and the head is a group of its own."""
    kernels = assembly.job.software.kernels
    return kernels.loss_chunks > 1 and kernels.loss_impl in {"composite", "compiled"} and ends.apart and not ends.traced


def chunks_backward(
    assembly: Assembly,
    moments: Moments,
    ends: GatheredEnds,
    head: PartMemory,
    *,
    below: Num,
    kept: Num,
    arriving: Num,
) -> Num:
    """Chunks of head and loss, then the final norm, while `below` is saved below them; returns the input of a last reduction.

    `kept`: bytes of parameters that are there besides; `arriving`: the last layer's, gathered for its backward.
    """
    weight, norm = head_and_norm(assembly)
    size = assembly.job.software.itemsize
    saved = sum([assembly.head.sizes[name] for name in BY_CHUNK if name in kept_by_head(assembly)])
    hidden = assembly.head.sizes[read_by_head(assembly)]
    labels = hidden / size / assembly.job.model.hidden_sz * TOKEN_ID
    copies = where(assembly.job.data.microbatch_sz > 1, hidden + labels, 0.0)  # of one sequence a chunk is a view
    summed, whole = weight.sums, below + head.saved
    moments.standing = ends.last.gathered
    held = kept + ends.last.unsharded + summed + copies + hidden / size * FP32
    most = held + head.backward.bytes - head.saved + logits_held(assembly) + labels
    moments.mark(whole, most, f"backward of {head.backward.op}")
    chunk = hidden / assembly.job.software.kernels.loss_chunks
    held = held + logits_held(assembly, every=True) + chunk + weight.reduce_input
    moments.mark(whole - saved, held, "backward of a sum of gradients")
    grown = ITEMSIZE[options(assembly).reduce_dtype] / size
    returned = maximum(0.0, weight.reduced + (grown - 1.0) * weight.last - summed)
    moments.mark(whole - saved, held + returned, "backward of a reduce-scatter", reduced=returned)
    moments.allocated(weight.stored)
    waiting = kept + ends.last.unsharded + weight.reduce_input
    left = whole - saved - hidden
    moments.send(ends.last.sent)
    moments.mark(left, waiting + hidden + ends.last.gathered, "backward of an all-gather", ends.last.gathered)
    moments.mark(left, waiting + 2.0 * hidden + arriving, "backward of head.norm", arriving)
    moments.allocated(norm.stored)
    return norm.reduce_input


def head_and_norm(assembly: Assembly) -> tuple[Buffers, Buffers]:
    """The head's weight and the final norm as groups of their own, as their gradients are reduced."""
    by_kind = [[p for p in assembly.head_params if p.vocab is kind] for kind in (True, False)]
    weight, norm = (buffers(assembly, one_group(assembly, params)) for params in by_kind)
    return weight, norm


def kept_by_head(assembly: Assembly) -> set[str]:
    """What the head's ops keep for backward."""
    return {name for op in assembly.head.ops for name in op.saves}


def read_by_head(assembly: Assembly) -> str:
    """The hidden states that are cut into chunks: what the head's product reads."""
    return next(op.inputs[0] for op in assembly.head.ops if op.name == "head.proj")


def logits_held(assembly: Assembly, *, every: bool = False) -> Num:
    """Bytes of the logits of a chunk besides those kept for backward, or all (`every`)."""
    if not every and "head.logits" in kept_by_head(assembly):
        return 0.0
    return assembly.head.sizes["head.logits"]
