"""Memory of a loss in chunks under FSDP2: head and loss of each chunk run forward and backward before the model's backward.

Source: pytorch/torchtitan@bcc09297 torchtitan/components/loss.py, ChunkedLossWrapper (see `memory.chunked_loss`). The head's
gradients of all chunks add up unsharded in the dtype of the reduction, which the last chunk reduces. The head is gathered after
the root's forward has freed what an all-gather returned, so that this stays for the whole backward (torch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _root_post_forward; _fsdp_param_group.py, wait_for_unshard), unless the loss
gathers it outside of the hooks (@b5bcd76c of the same); and once more for the final norm, which is in the same group.
"""

from __future__ import annotations

from steptime.base.num import Num, maximum
from steptime.fsdp.ends import GatheredEnds, with_tied
from steptime.fsdp.groups import Buffers, buffers, one_group
from steptime.fsdp.moments import Moments
from steptime.fsdp.of_job import reduced_in
from steptime.job.assembly import Assembly
from steptime.memory import chunked_loss
from steptime.memory.chunked_loss import hidden_bytes, loop_bytes, saved_by_chunk
from steptime.memory.ledger import PartMemory
from steptime.software.performance import ITEMSIZE


def in_chunks(assembly: Assembly, ends: GatheredEnds) -> bool:
    """Whether a training loop runs the loss in chunks."""
    return chunked_loss.in_chunks(assembly.job) and not ends.traced


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
    """Chunks of a head that is a group of its own, and the final norm after them; returns the input of a last reduction.

    `below`: bytes saved below them; `kept`: of parameters that are there besides; `arriving`: of the last layer's, gathered for
    its backward.
    """
    weight, norm = head_and_norm(assembly)
    size = assembly.job.software.itemsize
    saved, hidden = saved_by_chunk(assembly.head), hidden_bytes(assembly.head)
    summed, whole = weight.sums, below + head.saved
    moments.standing = 0.0 if assembly.job.software.buffers.loss_by_token else ends.last.gathered
    transient = kept + ends.last.unsharded + summed
    moments.mark(whole, transient + head.backward.bytes - head.saved, f"backward of {head.backward.op}")
    chunk = hidden / assembly.job.software.kernels.loss_chunks
    transient = transient + loop_bytes(assembly.head) + assembly.head.sizes["head.logits"] + chunk + weight.reduce_input
    moments.mark(whole - saved, transient, "backward of a sum of gradients")
    grown = ITEMSIZE[reduced_in(assembly.job)] / size
    returned = maximum(0.0, weight.reduced + (grown - 1.0) * weight.last - summed)
    moments.mark(whole - saved, transient + returned, "backward of a reduce-scatter", reduced=returned)
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
    by_kind = [[p for p in with_tied(assembly) if p.vocab is kind] for kind in (True, False)]
    weight, norm = (buffers(assembly, one_group(assembly, params)) for params in by_kind)
    return weight, norm


def rooted_chunks(
    assembly: Assembly, moments: Moments, ends: GatheredEnds, head: PartMemory, below: Num, kept: Num, arriving: Num
) -> None:
    """Chunks of a head in the root's group, which stays gathered: no hook of it runs, and gradients add up as they are made."""
    hidden = hidden_bytes(assembly.head)
    transient = kept + ends.last.unsharded + head_and_norm(assembly)[0].gradients
    moments.mark(below + head.saved, transient + head.backward.bytes - head.saved, f"backward of {head.backward.op}")
    left = below + head.saved - saved_by_chunk(assembly.head) - hidden
    moments.mark(left, transient + 2.0 * hidden + arriving, "backward of head.norm", arriving)
