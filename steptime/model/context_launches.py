"""What the host launches for attention over ranks that share a sequence, exchanges left out: they are ops of their own.

Counted on TransformerEngine's functions for a causal mask and FlashAttention (NVIDIA/TransformerEngine v2.7 and 9c61cd7,
transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py): a kernel of torch, a compiled function, a call of
the attention kernel or of torch.distributed is one launch each. A short sequence on many ranks waits for them, not for kernels.
"""

from __future__ import annotations

from steptime.base.num import Num, where

SWAPPED = 2.0
"""Launches around an all-to-all of one tensor: its heads copied apart before it, its chunks put in order after it
(flash_attn_a2a_communicate; before it in order and after it together for what goes back)."""


def ring_launches(cp: Num) -> tuple[Num, Num]:
    """Forward and backward of AttnFuncWithCPAndKVP2P over `cp` ranks.

    Forward: keys and values joined; cp attention calls; the log-sum-exp copied and corrected cp - 1 times; cp outputs corrected.
    Backward: half of the log-sum-exp, keys and values copied; cp attention calls, each with its gradient of the query and of keys
    and values added. Over more than two ranks an exchange is two calls, isend and irecv, of which `Comm.count` has one.
    """
    received = where(cp > 2, 1.0, 0.0)
    forward = 3.0 * cp + 1.0 + received * (cp - 1.0)
    return forward, 3.0 * cp + 2.0 + received * cp


def gather_launches(batch: Num, *, flash: bool) -> tuple[Num, Num]:
    """Forward and backward of AttnFuncWithCPAndKVAllGather, but for the copy of an output, an op of its own.

    Forward: the chunks' indices, keys and values put in order; two attention calls, another copy of an output; for cuDNN's
    kernel the sequences' offsets divided by twice the ranks. Backward: two gradients zeroed; indices and order as before; for
    each of two chunks the call, the query's gradient copied, two gradients added; indices and order again. FlashAttention has the
    batch first: each operand of a chunk is copied on its way to and from that layout: keys and values, then three operands of two
    chunks forward; four operands and two gradients of two chunks, then both whole gradients, back. A single sequence has the same
    layout both ways: `contiguous` copies nothing.
    """
    if not flash:
        return 7.0, 16.0
    several = where(batch > 1, 1.0, 0.0)
    return 6.0 + 8.0 * several, 16.0 + 14.0 * several


def heads_launches(*, output_in_backward: bool = False, indices: bool = True) -> tuple[Num, Num]:
    """Around the all-to-alls of AttnFuncWithCPAndQKVOA2A: query, keys, values and the output; back their gradients.

    `output_in_backward`: backward exchanges the output too. `indices`: those of the chunks are computed in each pass, once on
    each side of the kernel.
    """
    of_indices = 2.0 if indices else 0.0
    return of_indices + 4.0 * SWAPPED, of_indices + (5.0 if output_in_backward else 4.0) * SWAPPED


def together(one: tuple[Num, Num], other: tuple[Num, Num]) -> tuple[Num, Num]:
    """The launches of both, by pass."""
    return one[0] + other[0], one[1] + other[1]
