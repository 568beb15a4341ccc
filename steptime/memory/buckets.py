"""Gradient buckets of Megatron's DistributedDataParallel, to the element.

Megatron keeps all gradients of a pipeline stage (or virtual chunk) in one flat buffer, and with the distributed optimizer
all parameters in another of the same length. Buckets are stretches of it; each is reduced and gathered by one collective.
Line numbers: megatron-core 0.16.1, megatron/core/distributed/param_and_grad_buffer.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from steptime.base.num import Num, is_column, lcm, where

PARAM_ALIGNMENT = 64
"""A parameter starts at a multiple of this many elements (lines 657-666)."""
BUCKET_ALIGNMENT = 128
"""A bucket ends at a multiple of this many elements, and of dp (lines 638-656)."""


def bucket_elements(
    params: Iterable[Num],
    dp: Num,
    bucket_size: Num | None,
    *,
    sharded: bool = True,
    alone: Collection[int] = (),
    alignment: int = BUCKET_ALIGNMENT,
) -> list[Num]:
    """Padded element count of every bucket, in the order of backward (lines 627-742).

    `params`: element counts on this rank in backward order, the last registered parameter first. `dp`: ranks over which the
    optimizer is sharded (dp*cp). `bucket_size`: a bucket closes once it holds this many elements, its padding included; None
    makes one bucket. `sharded`: the distributed optimizer; without it nothing is padded. `alone`: positions in `params` of
    tied embedding copies of a pipeline of several stages, which get buckets of their own when sharded (lines 698-709).
    `alignment`: 2**16 under pad_buckets_for_high_nccl_busbw. Columns give an entry for every parameter, 0 where no
    bucket ends with it.

    >>> bucket_elements([100, 1000, 70], dp=2, bucket_size=1000)
    [1152, 128]
    """
    params = list(params)
    if any(map(is_column, (dp, bucket_size, *params))):
        return _columns(params, dp, bucket_size, sharded=sharded, alone=alone, alignment=alignment)
    start_at, end_at = (PARAM_ALIGNMENT, lcm(lcm(BUCKET_ALIGNMENT, alignment), dp)) if sharded else (1, 1)
    ends = [0]
    end = 0
    for position, elements in enumerate(params):
        start = round_up(end, start_at)
        own_bucket = sharded and position in alone
        if own_bucket and end > ends[-1]:
            start = round_up(start, end_at)
            ends.append(start)
        end = start + elements
        if own_bucket or (bucket_size is not None and end - ends[-1] >= bucket_size):
            end = round_up(end, end_at)
            ends.append(end)
    if end > ends[-1]:
        ends.append(round_up(end, end_at))
    return [stop - start for start, stop in pairwise(ends)]


def _columns(
    params: Sequence[Num], dp: Num, bucket_size: Num | None, *, sharded: bool, alone: Collection[int], alignment: int
) -> list[Num]:
    """The same, parameter by parameter for all candidates at once."""
    start_at, end_at = (PARAM_ALIGNMENT, lcm(lcm(BUCKET_ALIGNMENT, alignment), dp)) if sharded else (1, 1)
    sizes: list[Num] = []
    last = end = 0.0
    for position, elements in enumerate(params):
        start = round_up(end, start_at)
        own_bucket = sharded and position in alone
        if own_bucket:
            start = where(end > last, round_up(start, end_at), start)
            sizes.append(where(end > last, start - last, 0.0))
            last = where(end > last, start, last)
        end = start + elements
        closes = own_bucket if own_bucket or bucket_size is None else end - last >= bucket_size
        end = where(closes, round_up(end, end_at), end)
        sizes.append(where(closes, end - last, 0.0))
        last = where(closes, end, last)
    sizes.append(where(end > last, round_up(end, end_at) - last, 0.0))
    return sizes


def round_up(count: Num, multiple: Num) -> Num:
    """The smallest multiple of `multiple` that is not below `count`.

    >>> round_up(65, 64)
    128
    """
    return -(-count // multiple) * multiple
