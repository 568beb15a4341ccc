"""FSDP2's communication under a pipeline: what it adds to which action of a stage.

A chunk's parameters are gathered once a step where they stay, its gradients are reduced once: after its last backward, group by
group, while the stage waits (torch 2.13 distributed/pipelining/stage.py, perform_reduce_grad; _fsdp_state.py,
_root_post_backward_final_callback). GPipe and 1F1B of one chunk gather from FSDP's hooks, layer by layer, once the stage's first
input has come; other schedules gather whole chunks ahead (schedules.py, _add_unshard_reshard).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from steptime.base.num import Num, is_column
from steptime.cost.overlap import contention, hidden_s
from steptime.cost.part_seconds import PartTime
from steptime.cost.rates import Rates
from steptime.fsdp.calls import Calls
from steptime.fsdp.collective_ranks import shard_group
from steptime.fsdp.groups import Groups, ParamGroup, buffers, groups
from steptime.fsdp.loss_in_pipeline import by_micro_batch, reduction_left_s, turns
from steptime.fsdp.of_job import reduced_in, syncs_last
from steptime.fsdp.pipeline_memory import stage_steps
from steptime.fsdp.seconds import CommSeconds, ShardedPass, exposed_s, micro_batch_exposed, price
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly, Chunk
from steptime.job.parts import Part
from steptime.schedule import Action, order
from steptime.schedule.sharded import Around, ShardedStep
from steptime.software.performance import ITEMSIZE


class ChunkSeconds(NamedTuple):
    """FSDP's seconds for a chunk in the actions of a step."""

    forward_s: Num
    """Added to a forward that gathers the whole chunk layer by layer."""
    forward_layers_s: Num
    """The same where the root is already gathered."""
    backward_s: Num
    """Added to a backward that gathers the layers."""
    gather_s: Num
    """Gathering the whole chunk, one group after another."""
    copies_s: Num
    """Copying from the flat buffers to the parameters."""
    first_sum_s: Num
    """Copying the first micro-batch's gradients to where they accumulate."""
    sum_s: Num
    """Adding a later micro-batch's gradients to them."""
    reduce_s: Num
    """Copying all gradients to flat buffers and reducing them."""
    head_s: Num = 0.0
    """Gathering the head's group once more, where its loss has freed it."""
    loss_s: Num = 0.0
    """Copying and reducing its gradient with each micro-batch (`loss_in_pipeline`)."""


class Prices(NamedTuple):
    """A chunk's groups with their seconds."""

    groups: Groups
    of: dict[ParamGroup, CommSeconds]

    @property
    def every(self) -> list[CommSeconds]:
        """The root, and the layers in depth order."""
        return [self.of[group] for group in (self.groups.root, *self.groups.layers)]


def group_price(assembly: Assembly, tiers: tuple[Tier, ...], rates: Rates, of: ParamGroup) -> CommSeconds:
    """Seconds of a group. Gradients are copied to the flat buffer from where they accumulate."""
    summed = ITEMSIZE[reduced_in(assembly.job)]
    copied = sum([one.elements * summed + buffers(assembly, one).reduce_input for one in of.all])
    return price(assembly, tiers, of, rates)._replace(compute_s=1.0 * copied / rates.bytes_per_s)


def chunk_seconds(
    assembly: Assembly,
    tiers: tuple[Tier, ...],
    rates: Rates,
    chunk: Chunk,
    every: Sequence[CommSeconds],
    elements: Num,
    parts: Mapping[Part, PartTime],
    replay_s: Mapping[Part, Num],
) -> ChunkSeconds:
    """Seconds of one chunk: of its root and its layers in depth order; gradients of so many elements add up in a step."""
    root, *layers = every
    of_layer = [part for part, count in chunk.runs for _ in range(count)]
    pairs = list(zip(layers, of_layer, strict=True))
    ends = [parts[assembly.embedding]] if chunk.embedding else [], [parts[assembly.head]] if chunk.head else []
    before, after = ([CommSeconds(0.0, end.forward.seconds) for end in side] for side in ends)
    inside = [CommSeconds(of.gather_s, parts[p].forward.seconds, 0.0, of.copy_s) for of, p in pairs]
    back = [
        CommSeconds(of.gather_s, parts[p].backward.seconds + replay_s.get(p, 0.0), 0.0, of.copy_s)
        for of, p in reversed(pairs)
    ]
    layers_first = [*before, *inside, *after]
    whole = [CommSeconds(root.gather_s, 0.0, 0.0, root.copy_s), *layers_first]
    first, later = sums_s(assembly, rates, 1.0 * elements)
    reduced, loss = every, (0.0, 0.0)
    if by_micro_batch(assembly, chunk):
        slowed = contention(shard_group(assembly.job), tiers)
        left = reduction_left_s(root, [*inside, *back], assembly.job.software.overlap.dp, slowed)
        reduced, loss = layers, (root.gather_s + root.copy_s, root.compute_s + left)
    return ChunkSeconds(
        micro_batch_exposed(assembly, tiers, [whole]),
        micro_batch_exposed(assembly, tiers, [layers_first]),
        micro_batch_exposed(assembly, tiers, [back]),
        sum(of.gather_s for of in every),
        sum(of.copy_s for of in every),
        first,
        later,
        exposed_s(reductions(reduced, last_waits=not in_time_steps(assembly)), 0),
        *loss,
    )


def in_time_steps(assembly: Assembly) -> bool:
    """Whether torch's pipelining is that of 2.6."""
    return assembly.job.software.layout.stage_exchange == "time_steps"


def reductions(every: Sequence[CommSeconds], *, last_waits: bool) -> list[CommSeconds]:
    """Groups that copy and reduce their gradients, root first, then the layers in depth order.

    The copies of a group wait for the reduction before it (_fsdp_param_group.py, post_backward); the stage waits for the last one
    since January 2025 (pytorch/pytorch pull request 144535).
    """
    found = [CommSeconds(0.0, 0.0, of.reduce_s, of.compute_s) for of in every]
    return found if last_waits else [*found[:-1], found[-1]._replace(reduce_s=0.0)]


def sums_s(assembly: Assembly, rates: Rates, elements: Num) -> tuple[Num, Num]:
    """Seconds of accumulating a chunk's gradients: for the first micro-batch, and for a later one.

    Where they are reduced in their own dtype autograd adds them, and the first micro-batch's become the sums.
    """
    job, dtype = assembly.job, reduced_in(assembly.job)
    own, summed = job.software.itemsize, ITEMSIZE[dtype]
    if dtype == job.software.compute_dtype:
        return 0.0, 3.0 * elements * own / rates.bytes_per_s
    return elements * (own + summed) / rates.bytes_per_s, elements * (own + 2.0 * summed) / rates.bytes_per_s


class PipelineSeconds:
    """What FSDP adds to the actions of every stage; called as `schedule.sharded.AroundActions`."""

    def __init__(
        self,
        assembly: Assembly,
        tiers: tuple[Tier, ...],
        parts: Mapping[Part, PartTime],
        replays: Sequence[Mapping[Part, float]],
        rates: Rates,
    ) -> None:
        """`replays`: by depth of the chunk, what recomputation adds to the backward of a layer of each kind [s]."""
        self.assembly, self.tiers, self.rates = assembly, tiers, rates
        self.prices = [[self.prices_of(chunk) for chunk in chunks] for chunks in assembly.stages]
        self.chunks = [
            [self.seconds(chunk, prices, parts, replays[chunk.depth]) for chunk, prices in zip(*rows, strict=True)]
            for rows in zip(assembly.stages, self.prices, strict=True)
        ]
        share = assembly.job.software.overlap.dp
        slowed = contention(shard_group(assembly.job), tiers)
        self.shown = [
            [of.gather_s - float(hidden_s(of.gather_s, of.gather_s, share, slowed)) for of in stage]
            for stage in self.chunks
        ]
        self.times = 1.0 if syncs_last(assembly.job) else 1.0 * assembly.job.parallelism.pipeline_passes
        """How often parameters are gathered and gradients reduced in a step: each time the pipeline drains, or once."""
        self.losses = [{c for c, of in enumerate(s) if by_micro_batch(assembly, of)} for s in assembly.stages]
        """The chunks of each stage that gather and reduce their head with each micro-batch."""
        self.waits = share is True
        """A prefetched all-gather overlaps compute; otherwise its exposed time is added to the action."""

    def prices_of(self, chunk: Chunk) -> Prices:
        """Seconds of a chunk's groups."""
        found = groups(self.assembly, chunk)
        every = dict.fromkeys((found.root, *found.layers))
        return Prices(found, {of: group_price(self.assembly, self.tiers, self.rates, of) for of in every})

    def seconds(
        self, chunk: Chunk, prices: Prices, parts: Mapping[Part, PartTime], replay_s: Mapping[Part, float]
    ) -> ChunkSeconds:
        """Seconds of one chunk."""
        found = prices.groups
        root = [] if by_micro_batch(self.assembly, chunk) else [found.root]
        elements = sum(one.elements for of in (*root, *found.layers) for one in of.all)
        around = self.assembly, self.tiers, self.rates
        return chunk_seconds(*around, chunk, prices.every, elements, parts, replay_s)

    def __call__(self, stage: int, actions: Sequence[Action]) -> dict[Action, Around]:
        """FSDP's work around those actions of a stage that have any."""
        mine, found = self.chunks[stage], dict[Action, Around]()
        to_copy, summed = set[int](), set[int]()
        known = set(actions)
        steps = stage_steps(self.assembly, stage, actions)
        for step, turn in zip(steps, turns(steps, self.losses[stage]), strict=True):
            kind, chunk = step.action.kind, step.action.chunk
            of = mine[chunk]
            added: Num = turn.gathers * of.head_s + turn.reductions * of.loss_s if turn.gathers else 0.0
            to_copy |= set(step.fetched)
            if chunk in to_copy:
                to_copy.remove(chunk)
                added = added + of.copies_s
            if step.gathers and kind == "F":
                added = added + (of.forward_s if step.roots else of.forward_layers_s)
            elif step.gathers:
                added = added + of.backward_s
            if kind in "BI":
                added = added + (of.sum_s if chunk in summed else of.first_sum_s)
                summed.add(chunk)
            if not self.waits:
                added = added + sum(self.shown[stage][c] for c in step.fetched)
            fetched = tuple([(c, mine[c].gather_s) for c in step.fetched if self.waits])
            after_s = of.reduce_s if step.reduces else 0.0
            if in_time_steps(self.assembly):  # before the gradient of its input is sent
                added, after_s = added + after_s, 0.0
            around = Around(added, fetched, after_s)
            if fetched or any(is_column(seconds) or seconds for seconds in (added, around.after_s)):
                found[step.action if step.action in known else step.action._replace(kind="W")] = around
        return found

    def steps(self, stage: int) -> list[ShardedStep]:
        """All actions of a stage in a pass of the pipeline."""
        job, p = self.assembly.job, self.assembly.job.parallelism
        orders = order(job.schedule, p.pp, p.vpp, job.schedule_microbatches, p.microbatch_group_sz)
        return stage_steps(self.assembly, stage, orders[stage])

    def calls(self, stage: int) -> dict[tuple[str, ParamGroup], Calls]:
        """Collectives of a stage in a step."""
        found: dict[tuple[str, ParamGroup], Calls] = {}

        def count(key: tuple[str, ParamGroup], gathers: float, reductions: float) -> None:
            found[key] = found.get(key, Calls(0.0, 0.0)).plus(gathers * self.times, reductions * self.times)

        steps = self.steps(stage)
        for step, turn in zip(steps, turns(steps, self.losses[stage]), strict=True):
            for key in gathered(self.prices[stage], step):
                count(key, 1.0, 0.0)
            if turn.gathers:
                count(("root", self.prices[stage][step.action.chunk].groups.root), turn.gathers, turn.reductions)
        for chunk, prices in enumerate(self.prices[stage]):
            root, layers = prices.groups
            count(("root", root), 0.0, float(chunk not in self.losses[stage]))
            for of in layers:
                count(("block", of), 0.0, 1.0)
        return found

    def passes(self, stage: int) -> tuple[ShardedPass, ShardedPass]:
        """FSDP's work in the forwards and in the backwards of a stage for one micro-batch, averaged over the step."""
        every = {"F": ShardedPass(0.0, 0.0, 0.0), "B": ShardedPass(0.0, 0.0, 0.0)}
        job, once = self.assembly.job, self.times / self.assembly.job.parallelism.pipeline_passes
        microbatches = job.schedule_microbatches
        steps = self.steps(stage)
        for step, turn in zip(steps, turns(steps, self.losses[stage]), strict=True):
            way = "F" if step.action.kind == "F" else "B"
            head = [("root", self.prices[stage][step.action.chunk].groups.root)]
            for _, of in [*gathered(self.prices[stage], step), *(head * turn.gathers)]:
                one = self.price(stage, of)
                every[way] = every[way].plus(ShardedPass(once, once * one.gather_s, once * one.copy_s))
            for _, of in head * turn.reductions:
                every[way] = every[way].plus(reduced_once(self.price(stage, of), once))
        for chunk, (prices, of_chunk) in enumerate(zip(self.prices[stage], self.chunks[stage], strict=True)):
            sums = of_chunk.first_sum_s + (microbatches - 1) * of_chunk.sum_s
            reduced = [reduced_once(of, once) for of in prices.every[chunk in self.losses[stage] :]]
            for each in (ShardedPass(0.0, 0.0, sums), *reduced):
                every["B"] = every["B"].plus(each)
        return every["F"].over(microbatches), every["B"].over(microbatches)

    def price(self, stage: int, of: ParamGroup) -> CommSeconds:
        """Seconds of one group of a stage."""
        return next(prices.of[of] for prices in self.prices[stage] if of in prices.of)


def reduced_once(of: CommSeconds, times: float) -> ShardedPass:
    """Copying and reducing a group's gradients."""
    return ShardedPass(times * (of.reduce_s > 0.0), times * of.reduce_s, times * of.compute_s)


def gathered(chunks: Sequence[Prices], step: ShardedStep) -> list[tuple[str, ParamGroup]]:
    """The groups that are gathered before or in an action: roots, and layers."""
    own = step.action.chunk
    roots = [*step.fetched, *([own] if step.roots else [])]
    layers = [*step.fetched, *([own] if step.gathers else [])]
    found = [("root", chunks[chunk].groups.root) for chunk in roots]
    found += [("block", of) for chunk in layers for of in chunks[chunk].groups.layers]
    return [(kind, of) for kind, of in found if of.padded]
