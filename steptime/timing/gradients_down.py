"""Gradients that go to host memory bucket by bucket, and whose copies the ranks wait for one after another."""

from typing import NamedTuple

from steptime.base.num import Num, maximum, minimum
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.on_host import follows_buckets, on_host
from steptime.memory.states import chunk_buckets, shard_ranks


def elements_in_turn(assembly: Assembly, owned: Num) -> Num:
    """Gradients whose copies to the host add up on the slowest way through backward: `owned` ones, or more.

    ZeRO 1 and 2 give each rank one stretch of all parameters. A bucket is reduced on all ranks, then each copies what it owns of
    it, on the stream that reduces the next bucket (deepspeedai/DeepSpeed@edaa7221 deepspeed/runtime/zero/stage_1_and_2.py,
    reduce_ipg_grads), so that in each bucket all wait for the rank that owns most of it. Buckets of less than a stretch are
    copied one after another. With `round_robin` a rank owns tensors of every bucket, here an equal share of each.
    """
    job = assembly.job
    if not follows_buckets(job) or job.performance.cpu_offload.round_robin:
        return owned
    buckets, total = chunk_buckets(assembly, assembly.chunks[0]), 0.0 * owned
    whole: dict[str, Num] = {}
    for bucket in buckets:
        whole[bucket.group] = whole.get(bucket.group, 0.0) + bucket.elements
    starts: dict[str, Num] = dict.fromkeys(whole, 0.0)
    for bucket in buckets:
        start, stretch = starts[bucket.group], whole[bucket.group] / shard_ranks(job, bucket.group)
        starts[bucket.group] = start + bucket.elements
        total = total + most_of_one(start, bucket.elements, maximum(stretch, 1.0))
    return total


class SumCopies(NamedTuple):
    """Seconds of a step's copies of the micro-batches' sums, both ways."""

    copied_s: Num = 0.0
    exposed_s: Num = 0.0


def sums_s(job: Job, in_turn: Num, n: Num, backward_s: Num, device_bytes_per_s: float) -> SumCopies:
    """Copies of the sums of `n` micro-batches, of `in_turn` parameters, beside backwards of `backward_s`.

    Every micro-batch's sum goes down, and but for the first the one before comes up and is added to, two read and one written.
    With overlap_comm they run beside the backward of the next bucket (deepspeedai/DeepSpeed@edaa7221
    deepspeed/runtime/zero/stage_1_and_2.py, average_tensor). In the last micro-batch they do not: the host looks at each gradient
    for inf and nan before it goes on (update_offload_overflow_tracker).
    """
    summed, link = on_host(job).summed, job.machine.accelerator.host_bytes_per_s
    if not summed or link is None:
        return SumCopies()
    down = in_turn * summed / link
    both = down + in_turn * (summed / link + 3.0 * summed / device_bytes_per_s)
    overlapping_s = 0.0 if job.software.overlap.dp is False else backward_s
    first, middle = maximum(0.0, down - overlapping_s), maximum(0.0, both - overlapping_s)
    several = 1.0 * (n > 1)
    return SumCopies(several * (down + (n - 1.0) * both), several * (first + (n - 2.0) * middle + both))


def most_of_one(start: Num, elements: Num, stretch: Num) -> Num:
    """The most that a bucket of `elements` from `start` on has in common with one of equal stretches.

    >>> most_of_one(0.0, 5.0, 10.0), most_of_one(8.0, 5.0, 10.0), most_of_one(8.0, 20.0, 10.0)
    (5.0, 3.0, 10.0)
    """
    first = minimum(elements, stretch - start % stretch)
    second = minimum(elements - first, stretch)
    return maximum(first, maximum(second, minimum(elements - first - second, stretch)))
