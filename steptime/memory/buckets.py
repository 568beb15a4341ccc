"""Gradient buckets of Megatron's DistributedDataParallel, to the element.

Megatron keeps all gradients of a pipeline stage (or virtual chunk) in one flat buffer, and with the distributed optimizer
all parameters in another of the same length. Buckets are stretches of it; each is reduced and gathered by one collective.
Line numbers: megatron-core 0.16.1, megatron/core/distributed/param_and_grad_buffer.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from steptime.base.num import PLAIN, Num, lcm, where

PARAM_ALIGNMENT = 64
"""A parameter starts at a multiple of this many elements (lines 657-666)."""
BUCKET_ALIGNMENT = 128
"""A bucket ends at a multiple of this many elements, and of dp (lines 638-656)."""


_PLAIN_OR_NONE = frozenset({*PLAIN, type(None)})


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
    pieces = [Pieces(elements, 1, position in alone) for position, elements in enumerate(params)]
    return piece_buckets(pieces, dp, bucket_size, sharded=sharded, alignment=alignment)


class Pieces(NamedTuple):
    """Consecutive tensors of one size."""

    elements: Num
    times: int
    alone: bool = False
    """Whether it is a tied embedding's copy."""


def piece_buckets(
    pieces: Sequence[Pieces],
    dp: Num,
    bucket_size: Num | None,
    *,
    sharded: bool = True,
    alignment: int = BUCKET_ALIGNMENT,
) -> list[Num]:
    """As `bucket_elements`, of tensors in backward order, alike ones together: those of a bucket are laid down at once.

    >>> piece_buckets([Pieces(100, 30), Pieces(70, 1)], dp=2, bucket_size=1000)
    [1152, 1152, 1152, 512]
    """
    if not {type(dp), type(bucket_size), *[type(each.elements) for each in pieces]} <= _PLAIN_OR_NONE:
        return _columns(pieces, dp, bucket_size, sharded=sharded, alignment=alignment)
    start_at, end_at = (PARAM_ALIGNMENT, lcm(lcm(BUCKET_ALIGNMENT, alignment), dp)) if sharded else (1, 1)
    ends: list[Num] = [0]
    end: Num = 0
    for elements, times, alone in pieces:
        own, apart, left = sharded and alone, -(-elements // start_at) * start_at, times
        while left:
            start = -(-end // start_at) * start_at
            if own and end > ends[-1]:
                start = round_up(start, end_at)
                ends.append(start)
            laid = 1 if own else left
            if bucket_size is not None and laid > 1 and apart > 0:
                laid = int(min(left, max(1, 1 - (start - ends[-1] + elements - bucket_size) // apart)))
            end = start + (laid - 1) * apart + elements
            left -= laid
            if own or (bucket_size is not None and end - ends[-1] >= bucket_size):
                end = round_up(end, end_at)
                ends.append(end)
                if left > 1 and bucket_size is not None and not own:  # buckets of this size only, all equal
                    each = max(1, 1 - int((elements - bucket_size) // apart))
                    size = round_up((each - 1) * apart + elements, end_at)
                    ends += [end + size * i for i in range(1, left // each + 1)]
                    end, left = ends[-1], left % each
    if end > ends[-1]:
        ends.append(round_up(end, end_at))
    return [stop - start for start, stop in pairwise(ends)]


def _columns(pieces: Sequence[Pieces], dp: Num, bucket_size: Num | None, *, sharded: bool, alignment: int) -> list[Num]:
    """The same, parameter by parameter for all candidates at once."""
    start_at, end_at = (PARAM_ALIGNMENT, lcm(lcm(BUCKET_ALIGNMENT, alignment), dp)) if sharded else (1, 1)
    sizes: list[Num] = []
    last = end = 0.0
    for elements, own_bucket in ((each.elements, sharded and each.alone) for each in pieces for _ in range(each.times)):
        start = round_up(end, start_at)
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
