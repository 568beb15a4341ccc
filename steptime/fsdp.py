"""FSDP2: parameter groups walked as all-gathers, frees and reduce-scatters, for bytes and for seconds.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/ (_fsdp_param_group.py, _fsdp_collectives.py). Groups are one per
block and the root with the embedding, final norm and head; with wrap "model" all is one group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from steptime.assembly import Assembly
from steptime.cost.comm import collective
from steptime.cost.parts import PartTime
from steptime.estimate import CollectiveRow
from steptime.job import Job
from steptime.machine import Tier
from steptime.mesh import Fsdp, group
from steptime.ops import Param
from steptime.performance import ITEMSIZE
from steptime.stage_memory import Held, PartMemories
from steptime.states import States, shard_ranks, state_bytes


@dataclass(frozen=True)
class ParamGroup:
    """One FSDP parameter group on one device.

    `padded`: elements with every parameter's rows rounded up to the shard ranks; `elements`: without.
    """

    padded: int
    elements: int
    ranks: int


class Buffers(NamedTuple):
    """Bytes of a group's buffers, in torch's own order of making them."""

    copy_in: float
    """The local shard cast to the compute dtype; none where it already is."""
    gathered: float
    unsharded: float
    gradients: float
    reduce_input: float
    reduce_output: float


class Groups(NamedTuple):
    """The groups of a model."""

    root: ParamGroup
    block: ParamGroup
    n_blocks: int


def options(assembly: Assembly) -> Fsdp:
    """What the job says of FSDP; torch's defaults where it only names ZeRO-3."""
    job = assembly.job
    return job.parallelism.fsdp or Fsdp(reshard_after_forward=job.zero_level == 3)


def group_of(params: list[Param], tp: int, ranks: int) -> ParamGroup:
    """Parameters of one group: dimension 0 of each is cut into `ranks` equal pieces of whole rows."""
    padded = elements = 0
    for p in params:
        rows = -(-p.shape[0] // tp) if column(p) else p.shape[0]
        local = -(-p.elements // tp) if p.shard else p.elements
        elements += local
        padded += -(-rows // ranks) * ranks * (local // rows)
    return ParamGroup(padded, elements, ranks)


def column(p: Param) -> bool:
    """Whether tp cuts the rows of this weight (row-parallel weights are cut by columns)."""
    return bool(p.shard) and not p.name.startswith(("attn.proj", "mlp.down"))


def groups(assembly: Assembly) -> Groups:
    """The model's groups."""
    tp, ranks = assembly.block.tp, shard_ranks(assembly.job)
    ends = [*assembly.embedding.params, *assembly.head_params]
    layers = assembly.job.model.n_layers
    if options(assembly).wrap == "model":
        return Groups(group_of(ends + assembly.block.params * layers, tp, ranks), ParamGroup(0, 0, ranks), layers)
    return Groups(group_of(ends, tp, ranks), group_of(assembly.block.params, tp, ranks), layers)


def buffers(assembly: Assembly, of: ParamGroup) -> Buffers:
    """Buffer sizes of one group."""
    job = assembly.job
    stored, used = state_bytes(job).params, job.software.itemsize
    reduce = ITEMSIZE[options(assembly).reduce_dtype]
    shard = of.padded / of.ranks
    return Buffers(
        copy_in=0.0 if stored == used else shard * used,
        gathered=of.padded * used,
        unsharded=of.padded * used,
        gradients=of.elements * used,
        reduce_input=of.padded * reduce,
        reduce_output=shard * reduce,
    )


def sharded_elements(assembly: Assembly) -> float:
    """Parameters on the fullest rank."""
    g = groups(assembly)
    return g.root.padded / g.root.ranks + g.n_blocks * g.block.padded / g.block.ranks


def states(assembly: Assembly) -> list[States]:
    """Sharded states of the fullest rank; without resharding the gathered parameters are transients of the walk, not states."""
    size, shard = state_bytes(assembly.job), sharded_elements(assembly)
    return [States(size.params * shard, size.gradients * shard, (size.master + size.moments) * shard, [])]


class Moments:
    """The worst moment so far: activations, other bytes, and what was going on."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.worst = Held(0.0, 0.0, "")

    def mark(self, saved: float, beside: float, op: str) -> None:
        """Note a moment that holds `saved` bytes for backward and `beside` others."""
        if saved + beside > self.worst.activations_bytes + self.worst.transient_bytes:
            self.worst = Held(saved, beside, op)


def held(assembly: Assembly) -> Held:
    """Activations and transients at the worst moment of a micro-batch, FSDP buffers among the transients.

    Sharded gradients are counted as states, there from the start; of a single micro-batch those not yet made are taken off.
    """
    memories = PartMemories(assembly, weight_grads_stay=True)
    g = groups(assembly)
    root, block = buffers(assembly, g.root), buffers(assembly, g.block)
    reshard = options(assembly).reshard_after_forward
    moments = Moments()
    forward(assembly, memories, moments, root, block, reshard=reshard)
    backward(assembly, memories, moments, root, block, reshard=reshard)
    return moments.worst


def forward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, block: Buffers, *, reshard: bool
) -> None:
    """Root first, then blocks in order; an all-gather's output stays until the next group has copied out."""
    moments.mark(0.0, root.copy_in + root.gathered + root.unsharded, "forward of the root's all-gather")
    below = memories.embedding.saved
    embedding = memories.embedding.forward
    moments.mark(0.0, root.unsharded + root.gathered + embedding.bytes, f"forward of {embedding.op}")
    x = float(assembly.block.x.bytes)
    previous, kept = root.gathered, 0.0
    for count, memory in memories.blocks(assembly.chunks[0]):
        for _ in range(count):
            arriving = root.unsharded + previous + block.gathered + kept
            moments.mark(below, arriving + x + max(block.copy_in, block.unsharded), "forward of an all-gather")
            held_now = root.unsharded + block.unsharded + block.gathered + kept
            extra = memory.forward.bytes - memory.saved
            moments.mark(below + memory.saved, held_now + extra, f"forward of {memory.forward.op}")
            below += memory.saved
            previous = block.gathered
            kept += 0.0 if reshard else block.unsharded
    extra = memories.head.forward.bytes - memories.head.saved
    moments.mark(
        below + memories.head.saved, root.unsharded + previous + kept + extra, f"forward of {memories.head.forward.op}"
    )


def backward(
    assembly: Assembly, memories: PartMemories, moments: Moments, root: Buffers, block: Buffers, *, reshard: bool
) -> None:
    """Last block first: the next group arrives while this one computes; a reduce-scatter's input outlives one block."""
    blocks = [memory for count, memory in memories.blocks(assembly.chunks[0]) for _ in range(count)]
    head, embedding = memories.head, memories.embedding
    below = embedding.saved + sum(memory.saved for memory in blocks)
    arriving = block.gathered if reshard and blocks else 0.0
    unsharded = 0.0 if reshard else len(blocks) * block.unsharded
    due = sharded_gradients(assembly) if assembly.job.microbatches == 1 else 0.0
    moments.mark(
        below + head.saved,
        root.unsharded + arriving + unsharded + head.backward.bytes - head.saved - due,
        f"backward of {head.backward.op}",
    )
    head_grad = group_of(assembly.head_params, assembly.block.tp, 1).elements * assembly.job.software.itemsize
    x, reducing = float(assembly.block.x.bytes), 0.0
    for i in range(len(blocks) - 1, -1, -1):
        memory = blocks[i]
        base = root.unsharded + head_grad - due
        mine = block.unsharded if reshard else unsharded
        following = block.gathered if reshard and i else 0.0
        moments.mark(
            below, base + mine + (block.gathered if reshard else 0.0) + reducing + x, "backward of an all-gather"
        )
        extra = memory.backward.bytes - memory.saved
        moments.mark(below, base + mine + following + reducing + extra, f"backward of {memory.backward.op}")
        below -= memory.saved
        unsharded -= 0.0 if reshard else block.unsharded
        rest = following if reshard else unsharded
        moments.mark(below, base + rest + block.gradients + block.reduce_input + x, "backward of a reduce-scatter")
        reducing = block.reduce_input
        due = max(0.0, due - block.reduce_output)
    moments.mark(
        embedding.saved,
        root.unsharded + reducing + embedding.backward.bytes - embedding.saved + head_grad - due,
        f"backward of {embedding.backward.op}",
    )
    moments.mark(0.0, root.gradients + root.reduce_input - due, "backward of the root's reduce-scatter")


def sharded_gradients(assembly: Assembly) -> float:
    """Bytes of all sharded gradients in their stored dtype."""
    return sharded_elements(assembly) * state_bytes(assembly.job).gradients


class CommSeconds(NamedTuple):
    """Seconds of one group of one micro-batch: its collectives, and the compute between them."""

    gather_s: float
    compute_s: float
    reduce_s: float = 0.0


def exposed_s(groups_s: list[CommSeconds], prefetch: int) -> float:
    """Seconds by which groups in a row outlast their compute.

    Compute and network are one stream each. The gather of the group `prefetch` ahead is queued when a group's compute starts, its
    reduce-scatter when that ends; a group waits for its own gather.

    >>> exposed_s([CommSeconds(2.0, 10.0), CommSeconds(2.0, 10.0, 3.0)], 1)
    5.0
    """
    network = clock = 0.0
    arrived: list[float] = []

    def gather(gate: float) -> None:
        nonlocal network
        network = max(network, gate) + groups_s[len(arrived)].gather_s
        arrived.append(network)

    for i, of in enumerate(groups_s):
        if len(arrived) == i:
            gather(clock)
        start = max(clock, arrived[i])
        while len(arrived) < min(i + 1 + prefetch, len(groups_s)):
            gather(start)
        clock = start + of.compute_s
        if of.reduce_s:
            network = max(network, clock) + of.reduce_s
    return max(clock, network) - sum(of.compute_s for of in groups_s)


def applies(job: Job) -> bool:
    """Whether parameters are sharded and gathered group by group."""
    return job.zero_level == 3 or job.parallelism.fsdp is not None


def group_seconds(
    assembly: Assembly, tiers: tuple[Tier, ...], parts: tuple[PartTime, PartTime, PartTime], replay_s: float
) -> tuple[list[CommSeconds], list[CommSeconds]]:
    """Groups of a micro-batch in forward and in backward order, collectives priced.

    The root gathers first and stays; its reduce-scatter comes last, after the embedding's backward.
    """
    job = assembly.job
    over = group(job.parallelism, "shards", n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)
    g = groups(assembly)
    root, block = (
        [
            collective("all_gather", b.gathered, over, tiers).time_s,
            collective("reduce_scatter", b.reduce_input, over, tiers).time_s,
        ]
        for b in (buffers(assembly, g.root), buffers(assembly, g.block))
    )
    embedding, blocks, head = parts
    again = block[0] if options(assembly).reshard_after_forward else 0.0
    forward = [CommSeconds(root[0], embedding.forward.seconds)]
    forward += [CommSeconds(block[0], blocks.forward.seconds)] * g.n_blocks
    forward.append(CommSeconds(0.0, head.forward.seconds))
    back = [CommSeconds(0.0, head.backward.seconds)]
    back += [CommSeconds(again, blocks.backward.seconds + replay_s, block[1])] * g.n_blocks
    back.append(CommSeconds(0.0, embedding.backward.seconds, root[1]))
    return forward, back


def rows(
    assembly: Assembly, tiers: tuple[Tier, ...], exposed: float, row: Callable[..., CollectiveRow]
) -> list[CollectiveRow]:
    """Collectives per step: parameters gathered once or twice per micro-batch, gradients reduced once."""
    job = assembly.job
    over = group(job.parallelism, "shards", n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)
    g, m = groups(assembly), float(job.microbatches)
    again = 2.0 if options(assembly).reshard_after_forward else 1.0
    made = []
    for name, of, count, gathers in (("root", g.root, 1.0, 1.0), ("block", g.block, float(g.n_blocks), again)):
        sizes = buffers(assembly, of)
        if of.padded:
            gather = collective("all_gather", sizes.gathered, over, tiers)
            reduce = collective("reduce_scatter", sizes.reduce_input, over, tiers)
            made.append((f"{name} parameters", "all_gather", sizes.gathered, m * count * gathers, gather))
            made.append((f"{name} gradients", "reduce_scatter", sizes.reduce_input, m * count, reduce))
    total = sum(count * cost.time_s for _, _, _, count, cost in made)
    return [
        row(name, kind, "dp", over.ranks, bytes_, count, cost, exposed * count * cost.time_s / total if total else 0.0)
        for name, kind, bytes_, count, cost in made
    ]
