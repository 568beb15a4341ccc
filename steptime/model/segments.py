"""Recomputation: which ops of a part run again in backward, and what is kept instead.

Two mechanisms exist. A checkpoint keeps the inputs of a run of ops and replays it when its backward starts
(torch.utils.checkpoint; megatron/core/tensor_parallel/random.py, CheckpointFunction). A discarded output is thrown away and
replayed just before its consumer's backward (same file, CheckpointWithoutOutput). Dropout masks come back from the RNG state.
"""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from steptime.model.ops import Attention, Comm, Gemm, Move, Op, Role
from steptime.software.precision import by_rows

MOE: frozenset[Role] = frozenset[Role](("moe", "router", "moe_act", "shared_experts"))
"""Roles of the ops of a mixture of experts."""
PER_OP: dict[str, tuple[int, tuple[str, ...]]] = {
    "per_op": (2, ("reduce_scatter", "all_to_all")),
    "per_op_all": (1, ("reduce_scatter", "all_to_all")),
    "per_op_resend": (2, ("reduce_scatter",)),
}
"""Policies by op: which matrix products each keeps, every second one or all, and of which collectives the outputs."""


class Segment(NamedTuple):
    """Ops first..last of a part, replayed when backward reaches op `trigger`; `reads` are their input tensors."""

    first: int
    last: int
    trigger: int
    reads: tuple[str, ...]
    drops: frozenset[str]
    """Tensors made inside that forward does not keep."""
    skips: frozenset[int] = frozenset()
    """Ops inside that are not replayed: their outputs are kept."""
    keeps: tuple[str, ...] = ()
    """Those outputs."""


def find_segments(ops: list[Op], modules: AbstractSet[str | float], *, compiled: bool = False) -> list[Segment]:
    """The segments of a layer for the named modules, in op order; none for a module that the layer does not have.

    `compiled`: torch.compile sees forward and backward, so that it keeps nothing that neither needs.

    core_attn, mlp, moe, shared_experts, mtp (of each depth its projection and layer) and after_qkv are checkpoints: their inputs
    are kept. layernorm, act and moe_act are discarded outputs. `after_qkv` is MaxText's save_qkv_proj
    (MaxText/layers/decoders.py, get_remat_policy): of a layer only q, k, v and its input stay. With a policy by op, core_attn
    says that attention runs again too.
    """
    if kept := modules & PER_OP.keys():
        return [per_op(ops, str(min(kept)), compiled=compiled, attend="core_attn" in modules)]
    segments: list[Segment] = []
    for budget in (share for share in modules if isinstance(share, float)):
        return within_budget(ops, budget)
    for module in sorted(str(module) for module in modules):
        if module == "mtp":
            segments += [checkpoint(ops, run) for run in depths(ops)]
        elif module == "core_attn":
            segments += [checkpoint(ops, run) for run in runs(ops, {"core_attn"})]
        elif module == "mlp":
            segments += [checkpoint(ops, run) for run in runs(ops, {"mlp", "act"})]
        elif module == "moe":
            segments += [checkpoint(ops, run) for run in runs(ops, MOE)]
        elif module == "shared_experts" and "moe" not in modules:
            segments += [checkpoint(ops, run) for run in runs(ops, {"shared_experts"})]
        elif module == "mla_up_proj":
            segments += [discarded(ops, run) for run in runs(ops, {"mla_up_proj"})]
        elif module == "moe_act" and "moe" not in modules:
            segments += [discarded(ops, run) for run in runs(ops, {"moe_act"})]
        elif module == "after_qkv":
            segments += [checkpoint(ops, range(run.start, len(ops))) for run in runs(ops, {"core_attn"})]
            segments += [discarded(ops, run) for run in runs(ops, {"norm"})[:1]]
        elif module == "layernorm":
            segments += [discarded(ops, run) for run in runs(ops, {"norm"})]
        elif module == "act":
            parents = {"act": "mlp", "moe_act": "moe"}
            roles = {role for role, whole in parents.items() if whole not in modules and role not in modules - {"act"}}
            segments += [discarded(ops, run) for run in runs(ops, roles)]
        elif module == "dropout":
            masks = [i for i, op in enumerate(ops) if isinstance(op, Move) and op.draws_mask]
            drawn = {i: frozenset(t.name for t in ops[i].stats) for i in masks if not covered(i, segments)}
            segments += [Segment(i, i, i, (), names) for i, names in drawn.items()]
    return sorted(segments)


def per_op(ops: list[Op], policy: str, *, compiled: bool, attend: bool = False) -> Segment:
    """Selective checkpointing per op: a layer is replayed from its input, except for ops whose outputs are kept.

    Kept are attention, reduce-scatters, all-to-alls (since pull request 1672 of September 2025; `per_op_resend` is before it),
    the choice of experts, and every n-th matrix product, the first one of the layer included: every second in eager torch
    (pytorch/torchtitan torchtitan/distributed/activation_checkpoint.py, _get_custom_policy: mm_count % 2), all in a graph that
    GraphTrainer traces (torchtitan/experiments/graph_trainer/memory_policy.py@27aa4907, _make_default_memory_policy); the
    router's and the grouped products of experts run again. Eager torch keeps the last product's output too, which nothing
    reads again (torch/utils/checkpoint.py, _CachingTorchDispatchMode); in a graph it is not kept. `attend`: attention runs again,
    as cuDNN's did before pull request 2095 (2025-12-01).
    """
    nth, collectives = PER_OP[policy]
    products = [
        i
        for i, op in enumerate(ops)
        if isinstance(op, Gemm) and op.params and op.role != "router" and not op.grouped and not keeps_casts(op)
    ]
    skips = set(products[::nth])
    skips |= {i for i, op in enumerate(ops) if isinstance(op, Attention) and not attend}
    skips |= {i for i, op in enumerate(ops) if isinstance(op, Comm) and op.kind in collectives}
    skips |= {i for i, op in enumerate(ops) if isinstance(op, Move) and op.chooses}
    kept = [ops[i].outputs if isinstance(ops[i], Gemm) else ops[i].allocates for i in sorted(skips)]
    keeps = tuple(t.name for tensors in kept for t in tensors)  # autocast's copy of a weight is made again
    if compiled or nth == 1:
        needed, unused = read_by_backward(ops, skips)
        keeps = tuple(name for name in keeps if name in needed)
        skips |= unused
    every = range(len(ops))
    drops = allocated_names(ops, every) - set(keeps)
    return Segment(0, len(ops) - 1, len(ops) - 1, reads(ops, every), frozenset(drops), frozenset(skips), keeps)


def keeps_casts(op: Gemm) -> bool:
    """Whether it is a product of torchao's NVFP4: aten._scaled_mm_v2, which no policy by op names.

    torch 2.13, torch/_functorch/partitioners.py, get_default_op_list, compute_intensive_ops.
    """
    return op.recipe is not None and op.recipe.keeps_casts


def read_by_backward(ops: list[Op], kept: set[int]) -> tuple[set[str], set[int]]:
    """What backward and the replay of all ops but `kept` read, and the ops whose outputs neither reads."""
    needed, unused = {name for op in ops for name in op.saves}, set[int]()
    for i in sorted({*range(len(ops))} - kept, reverse=True):
        if needed & {t.name for t in (*ops[i].outputs, *ops[i].allocates)}:
            needed |= {*ops[i].inputs}
        else:
            unused.add(i)
    return needed, unused


def within_budget(ops: list[Op], budget: float) -> list[Segment]:
    """What torch.compile recomputes of a block under a memory budget: more and more of what is element-wise.

    The partitioner lifts its bans on recomputing one after the other until a block keeps, its input apart, less than the
    budget's share of what it keeps with all bans (torch/_functorch/partitioners.py, choose_saved_values_set). First what one
    kernel makes from kept tensors, then what it would concatenate too: query and key, after norms and rotary embeddings
    (aten.cat is not in get_default_op_list). With float8 by rows the first changes nothing. Below that, products would run again.
    """
    if budget >= 1.0:
        return []
    plain = cast_from_inputs(ops)
    free = [recomputed_output(ops, i) for i, op in enumerate(ops) if isinstance(op, Move) and op.outputs]
    free = [segment for segment in free if listed_bytes(ops, [segment]) < listed_bytes(ops, [])]
    if any(isinstance(op, Gemm) and by_rows(op.recipe) for op in ops):
        free = plain
    if listed_bytes(ops, free) < budget * listed_bytes(ops, plain):
        return free
    least = listed_bytes(ops, free)
    return sorted([*free, *[turned for turned in rotations(ops) if listed_bytes(ops, [*free, turned]) < least]])


def listed_bytes(ops: list[Op], segments: list[Segment]) -> float:
    """Bytes that the partitioner counts: what is kept, attention's output twice where a product keeps it too, as another view."""
    sizes = {t.name: t.bytes for op in ops for t in op.allocates}
    kept = kept_names(ops, segments)
    by_products = {name for op in ops if isinstance(op, Gemm) for name in op.saves}
    viewed = [t.name for op in ops if isinstance(op, Attention) for t in op.outputs if t.name in by_products]
    return float(sum([sizes.get(name, 0.0) for name in [*kept, *viewed]]))


def rotations(ops: list[Op]) -> list[Segment]:
    """Query and key as attention reads them, made again from the products through their norms, whose sums are kept."""
    found = []
    for end in (i for i, op in enumerate(ops) if isinstance(op, Attention)):
        first = end
        while first and isinstance(ops[first - 1], Move) and feeds(ops, first - 1, range(first, end + 1)):
            first -= 1
        if first < end:
            segment, sums = discarded(ops, range(first, end)), [t.name for op in ops[first:end] for t in op.stats]
            found.append(segment._replace(drops=segment.drops - {*sums}, keeps=tuple(sums)))
    return found


def feeds(ops: list[Op], i: int, run: range) -> bool:
    """Whether a run reads something that op i makes."""
    return bool({t.name for t in ops[i].outputs} & {*reads(ops, run)})


def cast_from_inputs(ops: list[Op]) -> list[Segment]:
    """What torch.compile recomputes without any checkpointing: outputs that only products of float8 by rows keep.

    Backward needs their copy by columns alone, which it casts from what the norm or activation keeps anyway: a tensor that only
    backward makes is never banned from being made there (torch/_functorch/partitioners.py, solve_min_cut). The kernel that casts
    computes it again, which takes no time of its own here.
    """
    keepers: dict[str, list[Op]] = {}
    for op in ops:
        for name in op.saves:
            keepers.setdefault(name, []).append(op)
    found = []
    for i, op in enumerate(ops):
        kept_by = [keeper for t in op.outputs for keeper in keepers.get(t.name, ())] if isinstance(op, Move) else []
        if kept_by and all(isinstance(keeper, Gemm) and by_rows(keeper.recipe) for keeper in kept_by):
            found.append(recomputed_output(ops, i))
    return found


def recomputed_output(ops: list[Op], i: int) -> Segment:
    """An op whose outputs are recomputed before they are needed; its sums of each row are kept, a copy by columns is not."""
    op = ops[i]
    stats = () if isinstance(op, Move) and op.same_grad else tuple(t.name for t in op.stats)
    segment = discarded(ops, range(i, i + 1))
    return segment._replace(drops=segment.drops - set(stats), keeps=stats)


def runs(ops: list[Op], roles: AbstractSet[str]) -> list[range]:
    """Runs of consecutive ops that have one of the roles."""
    found: list[range] = []
    for i, op in enumerate(ops):
        if op.role in roles:
            follows = bool(found) and found[-1].stop == i
            found[-1:] = [range(found[-1].start, i + 1)] if follows else [*found[-1:], range(i, i + 1)]
    return found


def depths(ops: list[Op]) -> list[range]:
    """The ops of each depth of multi-token prediction."""
    places = {depth: [i for i, op in enumerate(ops) if op.depth == depth] for depth in {op.depth for op in ops} - {0}}
    return [range(mine[0], mine[-1] + 1) for mine in places.values()]


def checkpoint(ops: list[Op], run: range) -> Segment:
    """A run replayed from its inputs, which are kept, when its own backward starts; its outputs are kept for later ops."""
    inner = allocated_names(ops, run) - {t.name for t in ops[run[-1]].outputs}
    return Segment(run[0], run[-1], run[-1], reads(ops, run), frozenset(inner))


def discarded(ops: list[Op], run: range) -> Segment:
    """A run whose outputs are freed, and recomputed just before the backward of the last op that reads or keeps them."""
    allocated = allocated_names(ops, run)
    users = (i for i in range(run.stop, len(ops)) if allocated & {*ops[i].inputs, *ops[i].saves})
    return Segment(run[0], run[-1], max(users, default=run[-1]), reads(ops, run), frozenset(allocated))


def allocated_names(ops: list[Op], run: range) -> set[str]:
    """Every storage that a run allocates."""
    return {t.name for i in run for t in ops[i].allocates}


def reads(ops: list[Op], run: range) -> tuple[str, ...]:
    """Tensors from outside that a run reads."""
    allocated = allocated_names(ops, run)
    return tuple(dict.fromkeys(name for i in run for name in ops[i].inputs if name not in allocated))


def covered(i: int, segments: list[Segment]) -> bool:
    """Whether op i is already in a segment."""
    return any(s.first <= i <= s.last for s in segments)


def saved_by(ops: list[Op], segments: list[Segment]) -> dict[str, list[int]]:
    """For each tensor: the ops that save it in forward; what a segment reads or keeps is saved by its first op."""
    inside = {i for s in segments if s.reads for i in range(s.first, s.last + 1)}
    found: dict[str, list[int]] = {}
    pairs = [(name, i) for i, op in enumerate(ops) if i not in inside for name in op.saves]
    pairs += [(name, s.first) for s in segments for name in (*s.reads, *s.keeps)]
    for name, i in dict.fromkeys(pairs):
        found.setdefault(name, []).append(i)
    return found


def kept_by(ops: list[Op], segments: list[Segment]) -> dict[str, list[int]]:
    """For each tensor that forward keeps for backward: the ops that save it."""
    dropped = frozenset[str]().union(*(s.drops for s in segments))
    return {name: savers for name, savers in saved_by(ops, segments).items() if name not in dropped}


def kept_names(ops: list[Op], segments: list[Segment]) -> list[str]:
    """Names of the tensors that forward keeps for backward, each once, in the order of the ops that keep them."""
    return list(kept_by(ops, segments))


def rerun(ops: list[Op], segment: Segment, *, stops_early: bool) -> list[int]:
    """The ops of a segment that its replay runs."""
    rerun_ops = replayed(ops, segment.first, segment.last, stops_early=stops_early)
    return [i for i in rerun_ops if i not in segment.skips]


def replayed(ops: list[Op], first: int, last: int, *, stops_early: bool) -> range:
    """The ops of first..last that a replay runs: all, or up to the last one with an output that backward needs.

    torch's non-reentrant checkpoint stops once every saved tensor is back (torch/utils/checkpoint.py, _StopRecomputationError). A
    matrix product keeps its inputs before it runs, so as the last one it does not run again.
    """
    if not stops_early:
        return range(first, last + 1)
    saving = [i for i in range(first, last + 1) if ops[i].saves]
    if not saving:
        return range(first, first)
    end = saving[-1]
    makes_its_own = any(t.name in ops[end].saves for t in ops[end].allocates)
    return range(first, end + 1 if makes_its_own else end)
