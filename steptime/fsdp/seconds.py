"""FSDP2's communication that overlaps the compute of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from steptime.base.num import Num, is_column, maximum
from steptime.cost.comm import collective
from steptime.cost.overlap import contention, hidden_s
from steptime.cost.part_seconds import PartTime
from steptime.cost.rates import Rates
from steptime.fsdp.calls import Calls, calls_without_pipeline
from steptime.fsdp.collective_ranks import backward_group, copy_group, shard_group
from steptime.fsdp.groups import Buffers, ParamGroup, buffers, groups, options, root_stays, stays_gathered
from steptime.fsdp.of_job import reduced_in, unsynced
from steptime.fsdp.plus_plus import dequantized_bytes, has_second_partition, reduction, sent_bytes
from steptime.fsdp.replays import backward_gathers, kept_bytes, to_fewer_ranks
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.job.parts import Part
from steptime.memory.on_host import on_host
from steptime.software.performance import ITEMSIZE


class CommSeconds(NamedTuple):
    """Seconds of one group of one micro-batch: its collectives, and the compute between them."""

    gather_s: Num
    compute_s: Num
    reduce_s: Num = 0.0
    copy_s: Num = 0.0
    """Copies between FSDP's flat buffers and the parameters, part of the compute stream."""
    near_s: Num = 0.0
    """The gather among the neighbors that share a second partition of the parameters (ZeRO++)."""
    first_s: Num = 0.0
    """What copies of gradients that add up whole take beyond `copy_s`, in the first micro-batch of a step."""
    later_s: Num = 0.0
    """The same in one between it and the last."""
    last_s: Num = 0.0
    """The same in the last, which reduces them."""

    def summed(self, beyond_s: Num) -> CommSeconds:
        """The group in a micro-batch that reduces nothing."""
        return self._replace(reduce_s=0.0, copy_s=self.copy_s + beyond_s)

    def sums_of(self, of: CommSeconds) -> CommSeconds:
        """With the sums of another."""
        return self._replace(first_s=of.first_s, later_s=of.later_s, last_s=of.last_s)


Directions: TypeAlias = tuple[list[CommSeconds], list[CommSeconds]]
"""Groups of a micro-batch in forward and in backward order."""


def exposed_s(groups_s: list[CommSeconds], prefetch: int) -> Num:
    """Seconds by which groups in a row outlast their compute, copies included.

    Compute and network are one stream each. The gather of the group `prefetch` ahead is queued when a group's compute starts, its
    reduce-scatter when that ends; a group waits for its own gather.

    >>> exposed_s([CommSeconds(2.0, 10.0), CommSeconds(2.0, 10.0, 3.0)], 1)
    5.0
    """
    compute: Num = 0.0
    network: Num = 0.0
    arrived: list[Num] = []
    for i, of in enumerate(groups_s):
        if len(arrived) == i:
            network = maximum(network, compute) + of.gather_s
            arrived.append(network)
        start = maximum(compute, arrived[i])
        for ahead in groups_s[len(arrived) : i + 1 + prefetch]:
            network = maximum(network, start) + ahead.gather_s
            arrived.append(network)
        compute = start + of.compute_s + of.copy_s
        if is_column(of.reduce_s) or of.reduce_s:
            network = maximum(network, compute) + of.reduce_s
    return maximum(compute, network) - sum([of.compute_s for of in groups_s])


def micro_batch_exposed(assembly: Assembly, tiers: tuple[Tier, ...], directions: Sequence[list[CommSeconds]]) -> Num:
    """Seconds that one micro-batch's collectives and copies add, in one direction or both.

    By the two streams, all, or a share, as `overlap.dp` says. Hidden communication slows the compute that hides it.
    """
    share = assembly.job.software.overlap.dp
    every = [of for groups_s in directions for of in groups_s]
    network, copies = sum([of.gather_s + of.reduce_s for of in every]), sum([of.copy_s for of in every])
    outlasts: Num = 0.0
    at_once: Num = 0.0
    if share is True:
        outlasts = sum([exposed_s(groups_s, options(assembly).prefetch) for groups_s in directions]) - copies
        at_once = maximum(0.0, network - outlasts)
    slowed = contention(shard_group(assembly.job), tiers)
    return copies + maximum(network, outlasts) - hidden_s(network, at_once, share, slowed)


def price(assembly: Assembly, tiers: tuple[Tier, ...], of: ParamGroup, rates: Rates) -> CommSeconds:
    """Seconds of one group's collectives and copies.

    The reduction includes the replicas' all-reduce behind it (_fsdp_collectives.py, foreach_reduce). `copy_s` reads the gathered
    flat output and writes the parameters, which version 1 reads where they are; `compute_s` reads the gradients and writes the
    reduction's input, by way of the flat gradient where version 1 reduces in another dtype.
    """
    if not is_column(of.padded) and not of.padded:
        return CommSeconds(0.0, 0.0)
    sizes, job = buffers(assembly, of), assembly.job
    over = shard_group(job, of.kind)
    reduce_s: Num = 0.0
    if is_column(sizes.reduce_input) or sizes.reduce_input:
        scatters = reduction(job, of.elements - of.frozen, sizes.reduce_input, of.matrices, over)
        reduce_s = sum([one.calls * collective(one.kind, one.bytes, one.group, tiers).time_s for one in scatters])
        reduce_s += collective("all_reduce", sizes.reduce_output, copy_group(job), tiers).time_s
        reduce_s += host_copy_s(job, of.trained_shard * on_host(job).reduced)
    flat = options(assembly).version == 1
    between = 2.0 * sizes.gathered if flat and reduced_in(job) != job.software.compute_dtype else 0.0
    shard = of.padded / of.ranks
    copied = 0.0 if flat else 2.0 * sizes.unsharded + dequantized_bytes(job, of.padded)
    sent = sent_bytes(job, of.padded, sizes.gathered)
    found = CommSeconds(
        collective("all_gather", sent, over, tiers).time_s + host_copy_s(job, shard * on_host(job).gathered),
        (sizes.gradients + between + sizes.reduce_input + 2.0 * sizes.turned) / rates.bytes_per_s,
        reduce_s,
        (copied + 2.0 * sizes.turned) / rates.bytes_per_s,
        collective("all_gather", sent, backward_group(job), tiers).time_s if has_second_partition(job) else 0.0,
        *(moved / rates.bytes_per_s for moved in summed_bytes(assembly, sizes)),
    )
    if of.experts is None:
        return found
    of_experts = price(assembly, tiers, of.experts, rates)
    return CommSeconds(*(mine + theirs for mine, theirs in zip(found, of_experts, strict=True)))


def summed_bytes(assembly: Assembly, of: Buffers) -> tuple[Num, Num, Num]:
    """Bytes that gradients move beyond the copies of `price` where they add up whole: first micro-batch, a later one, the last.

    c, r: bytes of a gradient, and of an element reduced. `price` copies c + r. Version 2 casts the first micro-batch's gradients,
    c + r, adds later ones, c + 2 r, and copies the sums, 2 r; in their own dtype autograd adds, 3 c, and only the last are copied
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed, accumulate_unsharded_grad_if_needed).
    Version 1 writes its flat gradient, to which autograd adds.
    """
    job, said = assembly.job, options(assembly)
    if not unsynced(job):
        return 0.0, 0.0, 0.0
    own, reduced = job.software.itemsize, ITEMSIZE[reduced_in(job)]
    plain, adds, cast = of.gradients + of.reduce_input, 3.0 * of.gradients, reduced != own
    if said.version == 1:
        quiet = of.gathered - of.reduce_input - (2.0 * of.gathered if cast else 0.0)
        return quiet, quiet + adds, adds
    if not cast:
        return -plain, adds - plain, adds
    elements = of.gradients / own
    adds = elements * (own + 2.0 * reduced)
    return elements * (own + reduced) - plain, adds - plain, adds + elements * reduced - of.gradients


def host_copy_s(job: Job, bytes_: Num) -> Num:
    """Seconds of a shard's copy to or from the host, on the stream of the collective that it precedes or follows."""
    link = job.machine.accelerator.host_bytes_per_s
    return 0.0 if link is None or not job.performance.cpu_offload.share else bytes_ / link


def group_seconds(
    assembly: Assembly,
    tiers: tuple[Tier, ...],
    parts: Mapping[Part, PartTime],
    replay_s: Mapping[Part, float],
    rates: Rates,
) -> tuple[list[CommSeconds], list[CommSeconds]]:
    """Groups of a micro-batch in forward and in backward order, collectives priced.

    `parts`: seconds of every part; `replay_s`: what recomputation adds to the backward of a layer of each kind.
    The root gathers first and stays; its reduce-scatter comes last, after the embedding's backward.
    """
    found = groups(assembly, assembly.chunks[0])
    root = price(assembly, tiers, found.root, rates)
    embedding, head = parts[assembly.embedding], parts[assembly.head]
    forward = [CommSeconds(root.gather_s, embedding.forward.seconds, 0.0, root.copy_s, root.near_s)]
    back = [CommSeconds(0.0, embedding.backward.seconds, root.reduce_s, root.compute_s).sums_of(root)]
    at = 0
    for part, count in assembly.runs:
        of, work = price(assembly, tiers, found.layers[at], rates), parts[part]
        gather_s, copied_s, leaves_s = backward_gather(assembly, tiers, rates, found.layers[at], of)
        at += count
        forward += [CommSeconds(of.gather_s, work.forward.seconds, 0.0, of.copy_s + leaves_s, of.near_s)] * count
        compute_s = work.backward.seconds + replay_s[part]
        back += [CommSeconds(gather_s, compute_s, of.reduce_s, copied_s + of.compute_s).sums_of(of)] * count
    forward.append(CommSeconds(0.0, head.forward.seconds))
    back.append(CommSeconds(0.0, head.backward.seconds))
    return forward, back[::-1]


def backward_gather(
    assembly: Assembly, tiers: tuple[Tier, ...], rates: Rates, layer: ParamGroup, of: CommSeconds
) -> tuple[Num, Num, Num]:
    """Seconds of a layer's gathers in backward, of copying them out, and of the copy that its forward leaves for them.

    `of`: its gather in forward, which backward repeats; among fewer ranks backward gathers what forward has read and written.
    """
    times = backward_gathers(assembly)
    if has_second_partition(assembly.job):
        return times * of.near_s, times * of.copy_s, 0.0
    if not to_fewer_ranks(assembly):
        return times * of.gather_s, times * of.copy_s, 0.0
    sizes = buffers(assembly, layer)
    near = collective("all_gather", sizes.gathered, backward_group(assembly.job), tiers)
    return near.time_s, of.copy_s, 2.0 * kept_bytes(assembly, sizes) / rates.bytes_per_s


class ShardedPass(NamedTuple):
    """FSDP's work in one direction of a micro-batch."""

    calls: float
    network_s: float
    """Seconds of its collectives."""
    copies_s: float
    """Seconds of copies between flat buffers and parameters or gradients."""

    def plus(self, other: ShardedPass) -> ShardedPass:
        """Collectives and copies together."""
        return ShardedPass(*(a + b for a, b in zip(self, other, strict=True)))

    def over(self, count: float) -> ShardedPass:
        """Divided evenly among `n`."""
        return ShardedPass(*(value / count for value in self))


class StepSeconds(NamedTuple):
    """FSDP's communication of the busiest stage, and the part of it that is exposed in the step [s]."""

    forward: ShardedPass
    """Forward of one micro-batch; `backward` likewise."""
    backward: ShardedPass
    exposed_s: float
    """Exposed seconds of all micro-batches, copies included."""
    calls: Mapping[tuple[str, ParamGroup], Calls]
    """Collectives of a step, by the kind of group."""

    @property
    def network_s(self) -> float:
        """Seconds of the collectives of a micro-batch."""
        return self.forward.network_s + self.backward.network_s

    @property
    def copies_s(self) -> float:
        """Seconds of the copies of a micro-batch."""
        return self.forward.copies_s + self.backward.copies_s


def step_seconds(assembly: Assembly, tiers: tuple[Tier, ...], directions: Directions) -> StepSeconds:
    """FSDP without a pipeline."""
    m = float(assembly.job.microbatches)
    found = [(times / m, ways) for times, ways in passes(assembly, directions)]
    forward, backward = (
        ShardedPass(
            sum(share * sum((of.gather_s > 0.0) + (of.reduce_s > 0.0) for of in ways[at]) for share, ways in found),
            sum(share * sum(of.gather_s + of.reduce_s for of in ways[at]) for share, ways in found),
            sum(share * sum(of.copy_s for of in ways[at]) for share, ways in found),
        )
        for at in (0, 1)
    )
    return StepSeconds(forward, backward, step_exposed(assembly, tiers, directions), calls_without_pipeline(assembly))


def step_exposed(assembly: Assembly, tiers: tuple[Tier, ...], directions: Directions) -> Num:
    """Seconds that collectives and copies add to all micro-batches of a step."""
    found = [times * micro_batch_exposed(assembly, tiers, ways) for times, ways in passes(assembly, directions)]
    return sum(found[1:], found[0])


def passes(assembly: Assembly, directions: Directions) -> list[tuple[Num, Directions]]:
    """How many micro-batches of a step run with which collectives.

    Without synchronization all but the last reduce nothing; with parameters that stay gathered all but the first gather nothing;
    with ZeRO++'s second partition all but the first gather among neighbors.
    """
    m = 1.0 * assembly.job.microbatches
    if has_second_partition(assembly.job):
        from_neighbors = [of._replace(gather_s=of.near_s) for of in directions[0]]
        return [(1.0, directions), (m - 1.0, (from_neighbors, directions[1]))]
    if root_stays(assembly.job):
        root, *layers = directions[0]
        return [(1.0, directions), (m - 1.0, ([root._replace(gather_s=0.0, copy_s=0.0), *layers], directions[1]))]
    if not unsynced(assembly.job):
        return [(m, directions)]
    forward, backward = directions
    stays = stays_gathered(assembly)
    there = [of._replace(gather_s=0.0, copy_s=0.0) for of in forward] if stays else forward
    return [
        (1.0, (forward, [of.summed(of.first_s) for of in backward])),
        (m - 2.0, (there, [of.summed(of.later_s) for of in backward])),
        (1.0, (there, [of._replace(copy_s=of.copy_s + of.last_s) for of in backward])),
    ]
