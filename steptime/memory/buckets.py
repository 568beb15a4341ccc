"""Gradient buckets of Megatron's DistributedDataParallel, to the element.

Megatron keeps all gradients of a pipeline stage (or virtual chunk) in one flat buffer, and with the distributed optimizer
all parameters in another of the same length. Buckets are stretches of it; each is reduced and gathered by one collective.
Line numbers: megatron-core 0.16.1, megatron/core/distributed/param_and_grad_buffer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime.base.num import PLAIN, Num, lcm, where
from steptime.job.local_params import Pieces

PARAM_ALIGNMENT = 64
"""A parameter starts at a multiple of this many elements (lines 657-666)."""
BUCKET_ALIGNMENT = 128
"""A bucket ends at a multiple of this many elements, and of dp (lines 638-656)."""


_PLAIN_OR_NONE = frozenset({*PLAIN, type(None)})


Run = tuple[Sequence[Pieces], int]
"""Tensors in backward order, and the number of repetitions: those of one layer, and the number of layers."""


def run_buckets(
    runs: Sequence[Run],
    dp: Num,
    bucket_size: Num | None,
    *,
    sharded: bool = True,
    alignment: int = BUCKET_ALIGNMENT,
) -> list[Num]:
    """Padded element count of every bucket, in the order of backward (lines 627-742).

    `runs`: the tensors on this rank in backward order, the last registered parameter first. `dp`: ranks over which the
    optimizer is sharded (dp*cp). `bucket_size`: a bucket closes once it holds this many elements, its padding included; None
    makes one bucket. `sharded`: the distributed optimizer; without it nothing is padded. `alignment`: 2**16 under
    pad_buckets_for_high_nccl_busbw. Columns give an entry for every tensor, 0 where no bucket ends with it.

    >>> run_buckets([([Pieces(100, 1), Pieces(1000, 1), Pieces(70, 1)], 1)], dp=2, bucket_size=1000)
    [1152, 128]
    >>> run_buckets([([Pieces(100, 1), Pieces(300, 1)], 8)], dp=2, bucket_size=1000)
    [1408, 1408, 896]
    """
    figures = [each.elements for pieces, _ in runs for each in pieces]
    if not {type(dp), type(bucket_size), *map(type, figures)} <= _PLAIN_OR_NONE:
        every = [piece for pieces, times in runs for piece in [*pieces] * times]
        return _columns(every, dp, bucket_size, sharded=sharded, alignment=alignment)
    start_at, end_at = (PARAM_ALIGNMENT, lcm(lcm(BUCKET_ALIGNMENT, alignment), dp)) if sharded else (1, 1)
    sizes: list[Num] = []
    filled: Num = 0
    for pieces, times in runs:
        filled = _lay_layers(pieces, times, filled, sizes, bucket_size, (start_at, end_at), sharded=sharded)
    return [*sizes, round_up(filled, end_at)] if filled > 0 else sizes


def _lay_layers(
    pieces: Sequence[Pieces],
    times: int,
    filled: Num,
    sizes: list[Num],
    bucket_size: Num | None,
    align: tuple[int, Num],
    *,
    sharded: bool,
) -> Num:
    """As `_lay`, of the tensors of `times` layers; the time taken does not grow with their number.

    Where a layer starts in a bucket that is as full as at an earlier layer, all that followed that one follows again; where a
    layer closes no bucket, so do the next ones until the bucket is full, each of which adds the same.
    """
    known: dict[Num, tuple[int, int]] = {}
    done = 0
    while done < times:
        if filled in known:
            since, first = known[filled]
            cycle, cycles = sizes[first:], (times - done) // (done - since)
            sizes += cycle * cycles
            done += cycles * (done - since)
            known = {}
            continue
        known[filled] = done, len(sizes)
        before, had = filled, len(sizes)
        filled = _lay(pieces, before, sizes, bucket_size, align, sharded=sharded)
        done += 1
        if done < times and len(sizes) == had and filled > before:
            each = round_up(filled, align[0]) - round_up(before, align[0])
            more = times - done
            if bucket_size is not None and each:
                more = int(min(more, max(0, -(-(bucket_size - filled) // each) - 1)))
            filled, done = filled + more * each, done + more
    return filled


def _lay(
    pieces: Sequence[Pieces],
    filled: Num,
    sizes: list[Num],
    bucket_size: Num | None,
    align: tuple[int, Num],
    *,
    sharded: bool,
) -> Num:
    """Lay tensors into a bucket that holds `filled` elements; adds to `sizes` what is closed, and returns what the last holds.

    `align`: elements at whose multiples a tensor starts and a bucket ends. A bucket starts at a multiple of both.
    """
    start_at, end_at = align
    for elements, times, alone in pieces:
        own, padded, left = sharded and alone, -(-elements // start_at) * start_at, times
        while left:
            start = -(-filled // start_at) * start_at
            if own and filled > 0:
                sizes.append(round_up(start, end_at))
                start = 0
            laid = 1 if own else left
            if bucket_size is not None and laid > 1 and padded > 0:
                laid = int(min(left, max(1, 1 - (start + elements - bucket_size) // padded)))
            filled = start + (laid - 1) * padded + elements
            left -= laid
            if own or (bucket_size is not None and filled >= bucket_size):
                sizes.append(round_up(filled, end_at))
                filled = 0
                if left > 1 and bucket_size is not None and not own:  # buckets of this size only, all equal
                    each = max(1, 1 - int((elements - bucket_size) // padded))
                    sizes += [round_up((each - 1) * padded + elements, end_at)] * (left // each)
                    left %= each
    return filled


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
