"""Recomputation: which ops of a part run again in backward, and what is kept instead.

Two mechanisms exist. A checkpoint keeps the inputs of a run of ops and replays it when its backward starts
(torch.utils.checkpoint; megatron/core/tensor_parallel/random.py, CheckpointFunction). A discarded output is thrown away and
replayed just before its consumer's backward (same file, CheckpointWithoutOutput). Dropout masks come back from the RNG state.
"""

from __future__ import annotations

from typing import NamedTuple

from steptime.model.ops import Op


class Segment(NamedTuple):
    """Ops first..last of a part, replayed when backward reaches op `trigger`; `reads` are the tensors it starts from."""

    first: int
    last: int
    trigger: int
    reads: tuple[str, ...]
    drops: frozenset[str]
    """Tensors made inside that forward does not keep."""


CHECKPOINTED = {
    "core_attn": ("attn.core",),
    "mlp": ("mlp.",),
    # MaxText's save_qkv_proj (MaxText/layers/decoders.py, get_remat_policy): of a block only q, k, v and its input stay
    "after_qkv": ("attn.core", "attn.proj", "attn.dropout", "attn.residual", "mlp."),
}
DISCARDED = {"layernorm": ("attn.norm", "mlp.norm"), "act": ("mlp.act",)}
NOT_IN_MLP = ("mlp.norm", "mlp.dropout", "mlp.residual")


def find_segments(ops: list[Op], modules: frozenset[str]) -> list[Segment]:
    """The segments of a part for the named modules, in op order."""
    segments: list[Segment] = []
    for module in sorted(modules):
        if module in CHECKPOINTED:
            segments += runs(ops, CHECKPOINTED[module], discard=False)
            if module == "after_qkv":
                segments += runs(ops, ("attn.norm",), discard=True)
        elif module in DISCARDED and not (module == "act" and "mlp" in modules):
            for prefix in DISCARDED[module]:
                segments += runs(ops, (prefix,), discard=True)
        elif module == "dropout":
            segments += [mask_segment(op, i) for i, op in enumerate(ops) if is_dropout(op) and not covered(i, segments)]
    return sorted(segments)


def runs(ops: list[Op], prefixes: tuple[str, ...], *, discard: bool) -> list[Segment]:
    """The one run of ops whose names start so (none where the part has no such op)."""
    inside = [
        i for i, op in enumerate(ops) if op.name.startswith(prefixes) and (prefixes != ("mlp.",) or not_excluded(op))
    ]
    if not inside:
        return []
    first, last = inside[0], inside[-1]
    made = {t.name for i in inside for t in ops[i].made}
    reads = tuple(dict.fromkeys(name for i in inside for name in ops[i].inputs if name not in made))
    drops = frozenset(made) if discard else frozenset(made - {t.name for t in ops[last].outputs})
    trigger = last
    if discard:
        trigger = max((i for i, op in enumerate(ops) if i > last and set(op.inputs) & made), default=last)
        kept_by = (i for i, op in enumerate(ops) if i > last and set(op.saves) & made)
        trigger = max(trigger, *kept_by, last)
    return [Segment(first, last, trigger, reads, drops)]


def not_excluded(op: Op) -> bool:
    """Whether Megatron's `mlp` recomputation covers this op (megatron/core/transformer/transformer_layer.py, recompute_mlp)."""
    return not op.name.startswith(NOT_IN_MLP)


def is_dropout(op: Op) -> bool:
    """Whether the op is a dropout kernel."""
    return op.name.endswith(".dropout")


def mask_segment(op: Op, i: int) -> Segment:
    """A dropout whose mask is drawn again."""
    return Segment(i, i, i, (), frozenset(t.name for t in op.stats))


def covered(i: int, segments: list[Segment]) -> bool:
    """Whether op i already stands in a segment."""
    return any(s.first <= i <= s.last for s in segments)


def kept_names(ops: list[Op], segments: list[Segment]) -> set[str]:
    """Names of the tensors that forward keeps for backward."""
    kept: set[str] = set()
    dropped = frozenset[str]().union(*(s.drops for s in segments))
    for i, op in enumerate(ops):
        if any(s.first <= i <= s.last and s.reads for s in segments):
            continue
        kept.update(op.saves)
    kept -= dropped
    for s in segments:
        kept.update(name for name in s.reads if name not in dropped)
    return kept


def replayed(ops: list[Op], first: int, last: int, *, stops_early: bool) -> range:
    """The ops of first..last that a replay runs: all, or up to the last one that backward needs something of.

    torch's non-reentrant checkpoint stops once every saved tensor is back (torch/utils/checkpoint.py, _StopRecomputationError). A
    matrix product keeps its inputs before it runs, so as the last one it does not run again.
    """
    if not stops_early:
        return range(first, last + 1)
    saving = [i for i in range(first, last + 1) if ops[i].saves]
    if not saving:
        return range(first, first)
    end = saving[-1]
    makes_its_own = any(t.name in ops[end].saves for t in ops[end].made)
    return range(first, end + 1 if makes_its_own else end)
