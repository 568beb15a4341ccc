"""FSDP2's communication under a pipeline: what it adds to which action of a stage.

A chunk's parameters are gathered once a step where they stay, its gradients are reduced once: after its last backward, group by
group, while the stage waits (torch 2.13 distributed/pipelining/stage.py, perform_reduce_grad; _fsdp_state.py,
_root_post_backward_final_callback). GPipe and 1F1B of one chunk gather from FSDP's hooks, layer by layer, once the stage's first
input has come; other schedules gather whole chunks ahead (schedules.py, _add_unshard_reshard).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from steptime.cost.overlap import contention, hidden_s
from steptime.cost.parts import PartTime
from steptime.cost.rates import Rates
from steptime.fsdp.groups import ParamGroup, buffers, groups, options
from steptime.fsdp.pipeline_memory import stage_steps
from steptime.fsdp.seconds import Calls, CommSeconds, micro_batch_exposed, price, shard_group
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly, Chunk, Part
from steptime.schedule import Action, order
from steptime.schedule.sharded import Around, ShardedStep
from steptime.software.performance import ITEMSIZE

NO_GATHER = CommSeconds(0.0, 0.0)


class ChunkSeconds(NamedTuple):
    """A chunk's seconds of FSDP in a step's actions."""

    forward_s: float
    """What a forward takes longer that gathers all of the chunk as it goes."""
    forward_layers_s: float
    """The same where the root is there."""
    backward_s: float
    """What a backward takes longer that gathers the layers."""
    gather_s: float
    """Of the whole chunk, one group after the other."""
    copies_s: float
    """From the flat buffers to the parameters."""
    first_sum_s: float
    """Gradients of a micro-batch copied to where they add up."""
    sum_s: float
    """The same of a later one, which adds to them."""
    reduce_s: float
    reduced_s: float
    """The collectives among `reduce_s`."""


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
        self.assembly, self.tiers = assembly, tiers
        priced = [self.price_chunk(chunk, parts, replays[chunk.depth], rates) for chunk in assembly.chunks]
        self.chunks = [[priced[chunk.depth] for chunk in chunks] for chunks in assembly.stages]
        share = assembly.job.software.overlap.dp
        slowed = contention(shard_group(assembly.job), tiers)
        self.shown = [
            [of.gather_s - float(hidden_s(of.gather_s, of.gather_s, share, slowed)) for of in stage]
            for stage in self.chunks
        ]
        self.waits = share is True
        """A gather that is asked for ahead runs beside compute; else what shows of it is added to the action."""

    def price_chunk(
        self, chunk: Chunk, parts: Mapping[Part, PartTime], replay_s: Mapping[Part, float], rates: Rates
    ) -> ChunkSeconds:
        """Seconds of one chunk."""
        assembly, tiers = self.assembly, self.tiers
        found = groups(assembly, chunk)
        known = {of: price(assembly, tiers, of, rates) for of in (found.root, *found.layers)}
        root, layers = known[found.root], [known[of] for of in found.layers]
        of_layer = [part for part, count in chunk.runs for _ in range(count)]
        ahead = [CommSeconds(0.0, parts[assembly.embedding].forward.seconds)] if chunk.embedding else []
        behind = [CommSeconds(0.0, parts[assembly.head].forward.seconds)] if chunk.head else []
        pairs = list(zip(layers, of_layer, strict=True))
        forward = [*ahead, *(CommSeconds(g.gather_s, parts[p].forward.seconds, 0.0, g.copy_s) for g, p in pairs), *behind]
        whole = [CommSeconds(root.gather_s, 0.0, 0.0, root.copy_s), *forward]
        back = [
            CommSeconds(g.gather_s, parts[p].backward.seconds + replay_s.get(p, 0.0), 0.0, g.copy_s) for g, p in pairs[::-1]
        ]
        every = [root, *layers]
        elements = sum(of.elements for of in (found.root, *found.layers))
        own, summed = assembly.job.software.itemsize, ITEMSIZE[options(assembly).reduce_dtype]
        converts = options(assembly).reduce_dtype != assembly.job.software.compute_dtype
        first = elements * (own + summed) / rates.bytes_per_s if converts else 0.0
        return ChunkSeconds(
            micro_batch_exposed(assembly, tiers, [whole]),
            micro_batch_exposed(assembly, tiers, [forward]),
            micro_batch_exposed(assembly, tiers, [back]),
            sum(of.gather_s for of in every),
            sum(of.copy_s for of in every),
            first,
            elements * (own + 2.0 * summed) / rates.bytes_per_s if converts else 0.0,
            sum(of.reduce_s + of.compute_s for of in every),
            sum(of.reduce_s for of in every),
        )

    def __call__(self, stage: int, actions: Sequence[Action]) -> dict[Action, Around]:
        """What is around those actions of a stage that have anything."""
        mine, found = self.chunks[stage], dict[Action, Around]()
        to_copy, summed = set[int](), set[int]()
        known = set(actions)
        for step in stage_steps(self.assembly, stage, actions):
            kind, chunk = step.action.kind, step.action.chunk
            of, added = mine[chunk], 0.0
            to_copy |= set(step.fetched)
            if chunk in to_copy:
                to_copy.remove(chunk)
                added += of.copies_s
            if step.gathers and kind == "F":
                added += of.forward_s if step.roots else of.forward_layers_s
            elif step.gathers:
                added += of.backward_s
            if kind in "BI":
                added += of.sum_s if chunk in summed else of.first_sum_s
                summed.add(chunk)
            if not self.waits:
                added += sum(self.shown[stage][c] for c in step.fetched)
            fetched = tuple((c, mine[c].gather_s) for c in step.fetched) if self.waits else ()
            around = Around(added, fetched, of.reduce_s if step.reduces else 0.0)
            if added or fetched or around.after_s:
                found[step.action if step.action in known else step.action._replace(kind="W")] = around
        return found

    def step_steps(self, stage: int) -> list[ShardedStep]:
        """All actions of a stage in a step."""
        job, p = self.assembly.job, self.assembly.job.parallelism
        orders = order(job.schedule, p.pp, p.vpp, job.microbatches, p.microbatch_group_sz)
        return stage_steps(self.assembly, stage, orders[stage])

    def network_s(self, stage: int) -> float:
        """Seconds of a stage's collectives in a step."""
        gathers = self.gathers(stage)
        total = sum(of.reduced_s for of in self.chunks[stage])
        for chunk, (layers, roots) in enumerate(gathers):
            found = groups(self.assembly, self.assembly.stages[stage][chunk])
            del found
            total += self.chunks[stage][chunk].gather_s * max(layers, roots)
        return total

    def gathers(self, stage: int) -> list[tuple[int, int]]:
        """By chunk, how often a step gathers its layers, and its root."""
        steps = self.step_steps(stage)
        count = range(len(self.chunks[stage]))
        asked = [sum(c in step.fetched for step in steps) for c in count]
        layers = [sum(step.gathers and step.action.chunk == c for step in steps) for c in count]
        roots = [sum(step.roots and step.action.chunk == c for step in steps) for c in count]
        return [(a + n, a + r) for a, n, r in zip(asked, layers, roots, strict=True)]
