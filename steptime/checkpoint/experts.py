"""A mixture of experts from names and shapes, and layers that are not all equal.

Experts are numbered, or all of a layer are packed in one tensor. Runs of neighbors are dense or have experts, and differ in their
widths.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from steptime.checkpoint import weight_names as names
from steptime.checkpoint.stacks import FoundArchitecture, Stack
from steptime.checkpoint.stored_records import Shape

MAX_RUNS = 64
Tails = dict[str, tuple[str, Shape]]


def infer(f: FoundArchitecture) -> bool:
    """Record `moe`, and the experts' `inter_sz` and `glu`, where a layer has experts; whether `moe` says which layers have."""
    tails, hidden = f.tails, f.get("hidden_sz")
    numbers = [int(match[1]) for match in map(names.EXPERT.search, tails) if match]
    packed = _first(tails, names.PACKED_DOWN) or _first(tails, names.PACKED_UP)
    router = _first(tails, names.ROUTER)
    rows = next((n for n in router[1] if n != hidden), None) if router else None
    flat = next(((n, s) for t, (n, s) in tails.items() if "experts.mlp.w" in t and len(s) == 2), None)  # DBRX
    if not (numbers or packed or flat):
        return False
    count = max(numbers) + 1 if numbers else rows if flat else packed[1][0] if packed else rows
    moe: dict[str, Any] = {"n_experts": count}
    # LatentMoE: (latent, hidden)
    latent = next((s for t, (_, s) in tails.items() if names.ends(t, "fc1_latent_proj")), None)
    read = latent[0] if latent else hidden
    moe |= {"latent_sz": read} if latent else {}
    matrices = [t for t, (_, shape) in tails.items() if names.EXPERT.search(t) and len(shape) == 2]
    down = next((tails[t] for t in matrices if re.search(r"(down_proj|w2|linear_fc2)\.weight", t)), None)
    width, source, gated = None, "", any("gate_proj" in t or names.ends(t, "w3") for t in tails)
    if down is not None:
        width, source = next((n for n in down[1] if n != read), read), down[0]
        up = next((s for t, (_, s) in tails.items() if names.EXPERT.search(t) and "linear_fc1.weight" in t), ())
        gated = gated or (len(up) == 2 and 2 * width in up)
    elif packed is not None and len(packed[1]) >= 3:
        width, source = next((n for n in packed[1][1:] if n != read), read), packed[0]
        up_packed = _first(tails, names.PACKED_UP)
        gated = "ffn_gate_exps.weight" in tails or (up_packed is not None and 2 * width in up_packed[1][1:])
    elif flat is not None and count:
        width, source, gated = flat[1][0] // count, flat[0], any("experts.mlp.v1" in t for t in tails)
    if width:
        moe["expert_inter_sz"] = width
        f.set("inter_sz", width, source)
        f.set("glu", gated, "expert projections")
    _shared(tails, hidden, moe)
    regular = _placed(f.parts.main, moe)
    f.set("moe", moe, "expert tensors; shapes do not contain top-k")
    return regular


def _first(tails: Tails, pattern: Any) -> tuple[str, Shape] | None:
    return next((entry for tail, entry in tails.items() if pattern.search(tail) and len(entry[1]) >= 2), None)


def _shared(tails: Tails, hidden: int, moe: dict[str, Any]) -> None:
    shared = [tail for tail in tails if names.SHARED.search(tail)]
    if not shared:
        return
    down = next((tails[t][1] for t in shared if "down" in t or "fc2" in t or "output_linear" in t), None)
    moe["n_shared_experts"] = 1
    if any("shared_expert_gate" in tail for tail in tails):
        moe["shared_expert_gate"] = True
    if down is not None and len(down) == 2:
        moe["shared_expert_inter_sz"] = next((n for n in down if n != hidden), hidden)


def _placed(stack: Stack, moe: dict[str, Any]) -> bool:
    """Which layers are sparse, in a plan's form: dense ones first, then a share of the rest."""
    sparse = sorted(i for i, tails in stack.layers.items() if any(map(names.SPARSE.search, tails)))
    first, second = (*sparse, *sparse, 0)[0], (*sparse, 0, 0)[1]
    every = max(1, second - first)
    dense = first - every + 1  # a plan counts from the last of each `every` layers behind the dense ones
    if dense < 0 or sparse != list(range(first, len(stack.layers), every)):
        return False  # no pattern that a share can say: `layers` lists them
    moe |= {"n_dense_layers": dense} if dense else {}
    moe |= {"moe_frequency": round(1 / every, 6)} if every > 1 else {}
    return True


def runs(layers: dict[int, dict[str, Shape]], hidden: int, head_dim: int | None) -> list[dict[str, Any]]:
    """`model.layers` of a config: runs in depth order, [] where all layers are alike or widths are not known."""
    known: dict[object, dict[str, Any]] = {}  # most layers are alike
    about = []
    for number in sorted(layers):
        key = tuple(layers[number].items())
        if key not in known:
            known[key] = _about(layers[number], hidden, head_dim)
        about.append(known[key])
    found = [(one, len(list(group))) for one, group in groupby(about)]
    if len(found) < 2 or len(found) > MAX_RUNS:
        return []
    same = {key for key in about[0] if all(one.get(key) == about[0][key] for one in about)} - {"kind"}
    return [{"repeat": count} | {key: one[key] for key in one if key not in same} for one, count in found]


def _about(tails: dict[str, Shape], hidden: int, head_dim: int | None) -> dict[str, Any]:
    sparse = any(names.EXPERT.search(tail) or names.PACKED_DOWN.search(tail) for tail in tails)
    found: dict[str, Any] = {"kind": "moe" if sparse else "dense"}
    matrices: dict[str, Shape] = {t: s for t, s in tails.items() if len(s) == 2 and "expert" not in t}
    down = None if sparse else _first_of(matrices, names.DOWN)
    if down is not None:
        found["inter_sz"] = next((n for n in down if n != hidden), hidden)
    q, k = _first_of(matrices, names.Q), _first_of(matrices, names.K)
    if q is not None and k is not None and head_dim and q[0] % head_dim == 0 and k[0] % head_dim == 0:
        found |= {"n_q_heads": q[0] // head_dim, "n_kv_heads": k[0] // head_dim}
    return found


def _first_of(matrices: dict[str, Shape], modules: tuple[str, ...]) -> Shape | None:
    """The first of `modules` that the layer has."""
    return next((s for module in modules for tail, s in matrices.items() if names.ends(tail, module)), None)
