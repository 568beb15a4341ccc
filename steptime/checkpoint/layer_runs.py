"""Layers that are not all alike, as runs of neighbors: dense or with experts, and the widths in which they differ."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from steptime.checkpoint import weight_names as names

if TYPE_CHECKING:
    from steptime.checkpoint.records import Shape

MAX_RUNS = 64


def infer(layers: dict[int, dict[str, Shape]], hidden: int, head_dim: int | None) -> list[dict[str, Any]]:
    """`model.layers` of a config: runs in depth order, [] where all layers are alike or widths are not known."""
    about = [_about(layers[number], hidden, head_dim) for number in sorted(layers)]
    runs = [(one, len(list(group))) for one, group in groupby(about)]
    if len(runs) < 2 or len(runs) > MAX_RUNS:
        return []
    same = {key for key in about[0] if all(one.get(key) == about[0][key] for one in about)} - {"kind"}
    return [{"repeat": count} | {key: one[key] for key in one if key not in same} for one, count in runs]


def _about(tails: dict[str, Shape], hidden: int, head_dim: int | None) -> dict[str, Any]:
    sparse = any(names.EXPERT.search(tail) or names.PACKED_DOWN.search(tail) for tail in tails)
    found: dict[str, Any] = {"kind": "moe" if sparse else "dense"}
    down = None if sparse else _matrix(tails, names.DOWN)
    if down is not None:
        found["inter_sz"] = next((n for n in down if n != hidden), hidden)
    q, k = _matrix(tails, names.Q), _matrix(tails, names.K)
    if q is not None and k is not None and head_dim and q[0] % head_dim == 0 and k[0] % head_dim == 0:
        found |= {"n_q_heads": q[0] // head_dim, "n_kv_heads": k[0] // head_dim}
    return found


def _matrix(tails: dict[str, Shape], modules: tuple[str, ...]) -> Shape | None:
    """The first of `modules` that the layer has as a matrix."""
    for module in modules:
        for tail, shape in tails.items():
            if len(shape) == 2 and names.ends(tail, module) and "expert" not in tail:
                return shape
    return None
