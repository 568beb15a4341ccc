"""Matrices and layers that are missing in the middle of a stack of layers that are otherwise alike.

A layer that has something of its own in their place (a dense MLP among experts, attention among Mamba) is of another kind. So are
many layers, those of a regular pattern, and those that lack something by design: keys and values that are another layer's (Gemma
3n), whole modules (Llama-Nemotron's block_configs).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from steptime.base.words import counted
from steptime.checkpoint import weight_names as names
from steptime.checkpoint.stacks import Stack
from steptime.checkpoint.stored_records import Problem

FEWEST = 3
"""Layers with which one can be compared with the others."""
SHARE = 8
"""At most one layer in so many is taken for damaged, not for another kind."""
SHOWN = 6
"""Tensors of a layer that a problem names."""
_OF_QUANTIZATION = re.compile(r"scale|zero|idx|absmax|quant|_inv$")
_CORE = (*names.Q, *names.K, *names.QKV, *names.OUT, *names.UP, *names.GATE, *names.DOWN)


def missing(stack: Stack, facts: list[dict[str, Any]]) -> list[Problem]:
    """MISSING_TENSOR problems of a stack, one per layer, from the lowest; `facts`: what the files say of themselves."""
    layers = stack.layers
    if len(layers) < FEWEST or not stack.attends() or any(fact.get("slices") or fact.get("part") for fact in facts):
        return []
    among = f"{stack.prefix}{min(layers)} to {stack.prefix}{max(layers)}"
    found = [Problem("MISSING_TENSOR", f"no layer {number} among {among}") for number in _numbers(layers)]
    kinds: defaultdict[frozenset[str], list[int]] = defaultdict(list)
    first = next(iter(layers.values())).keys()
    if all(tails.keys() == first for tails in layers.values()):
        return found
    for number, tails in sorted(layers.items()):
        kinds[frozenset(tails)].append(number)
    by_config = any("block_configs" in (fact.get("config") or {}) for fact in facts)
    for own, numbers in kinds.items():
        fuller = max((kind for kind in kinds if own < kind), key=lambda kind: len(kinds[kind]), default=None)
        if fuller is None or len(kinds[fuller]) < max(2, 3 * len(numbers)) or not _few(numbers, layers):
            continue
        model = layers[kinds[fuller][0]]
        for number in numbers:
            inner = min(layers) < number < max(layers) and len(numbers) == 1
            lost = [
                tail
                for tail in model
                if tail not in own and len(model[tail]) > 1 and _needed(tail, own, inner=inner, by_config=by_config)
            ]
            if lost:
                others = len(kinds[fuller])
                found.append(_lacking(f"{stack.prefix}{number}.", number, lost, others))
    return found


def _numbers(layers: Iterable[int]) -> list[int]:
    """Numbers that are left out, where they are few."""
    known = set(layers)
    left_out = [number for number in range(min(known), max(known)) if number not in known]
    return left_out if len(left_out) <= max(1, len(known) // SHARE) else []


def _few(numbers: list[int], layers: Iterable[int]) -> bool:
    """Whether so few layers, in no regular pattern, may be damaged ones.

    Two have one distance in any case: they are a pattern where no third would fit in, or where they are the first or the last.
    """
    known = sorted(layers)
    steps = {after - before for before, after in pairwise(numbers)}
    regular = len(numbers) > 1 and len(steps) == 1
    if len(numbers) == 2:
        step = numbers[1] - numbers[0]
        fills = numbers[0] - step < known[0] and numbers[1] + step > known[-1]
        regular = fills or numbers in (known[:2], known[-2:])
    return len(numbers) <= max(1, len(known) // SHARE) and not regular


def _needed(tail: str, own: frozenset[str], *, inner: bool, by_config: bool) -> bool:
    """Whether a layer that lacks this matrix is damaged: `inner` where it is the only one, and neither the first nor the last."""
    if _OF_QUANTIZATION.search(tail.rpartition(".")[2]):
        return False
    module = tail.partition(".")[0] + "."
    partial = any(other.startswith(module) for other in own)
    if inner:
        return partial or not by_config
    return partial and any(names.ends(tail, name) for name in _CORE)


def _lacking(start: str, number: int, lost: list[str], others: int) -> Problem:
    more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    message = (
        f"layer {number} lacks {', '.join(lost[:SHOWN])}{more}, which {counted(others, 'other layer')} of its kind have"
    )
    return Problem("MISSING_TENSOR", message, tensor=start + lost[0])
