"""Tensors as a tree of modules, with identical numbered siblings (layers, experts) folded into one.

Counts are of unique elements, so that a tied weight or a replica on another rank adds nothing; bytes are as stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steptime.checkpoint.records import Shape, StoredTensor

MAX_PARTS = 64  # of a dotted name; a hostile name has millions


@dataclass(slots=True)
class Node:
    """A module or, without children, a tensor. After folding it stands for `repeat` equal ones named in `name`.

    `params` [elements] and `nbytes` are of all of them together.
    """

    name: str
    params: int = 0
    nbytes: int = 0
    shape: Shape | None = None
    dtype: str = ""
    alias_of: str | None = None
    repeat: int = 1
    children: dict[str, Node] = field(default_factory=dict)

    def signature(self) -> tuple[object, ...]:
        """Equal for modules with the same tensors under the same names, in whatever order they were stored."""
        below = tuple((name, child.signature()) for name, child in sorted(self.children.items()))
        return (self.shape, self.dtype, self.params, self.alias_of is None, self.repeat, below)


def build(tensors: Iterable[StoredTensor]) -> Node:
    """The folded tree of `tensors`."""
    root = Node("")
    for tensor in tensors:
        root.params += tensor.unique
        root.nbytes += tensor.nbytes
        node = root
        for part in tensor.name.split(".", MAX_PARTS):
            found = node.children.get(part)
            if found is None:
                found = node.children[part] = Node(part)
            node = found
            node.params += tensor.unique
            node.nbytes += tensor.nbytes
        node.shape, node.dtype = tensor.whole, tensor.dtype
        node.alias_of = tensor.alias_of if node.alias_of is None and not tensor.unique else node.alias_of
    _fold(root)
    return root


def _fold(node: Node) -> None:
    for child in node.children.values():
        _fold(child)
    numbered = [name for name in node.children if name.isdecimal()]
    if len(numbered) > 1:
        node.children = _grouped(node.children)
    merged = map(_merged, node.children.values())
    node.children = {child.name: child for child in merged}


def _merged(child: Node) -> Node:
    """`model` with the one child `layers` becomes `model.layers`; a folded group keeps its own line."""
    only = next(iter(child.children.values())) if len(child.children) == 1 else None
    if only is None or child.repeat > 1 or child.shape is not None:
        return child
    only.name = f"{child.name}.{only.name}"
    return only


def _grouped(children: dict[str, Node]) -> dict[str, Node]:
    """Numbered children with equal signatures as one node each, in order of their first number."""
    groups: dict[object, list[Node]] = {}
    for name, child in sorted(children.items(), key=lambda item: _order(item[0])):
        key: object = child.signature() if name.isdecimal() else name
        groups.setdefault(key, []).append(child)
    whole = len([key for key in groups if isinstance(key, tuple)]) == 1
    folded = {}
    for key, group in groups.items():
        first = group[0]
        if isinstance(key, tuple) and len(group) > 1:
            name = "*" if whole else f"[{ranges([int(node.name) for node in group])}]"
            first = Node(
                name, sum(n.params for n in group), sum(n.nbytes for n in group), first.shape, first.dtype,
                first.alias_of, len(group), first.children,
            )  # fmt: skip
        folded[first.name] = first
    return folded


def _order(name: str) -> tuple[int, int]:
    return (0, int(name[:18])) if name.isdecimal() else (1, 0)


def ranges(numbers: list[int]) -> str:
    """0,1,2,5 as "0-2,5"; a constant step as "0-62:2"."""
    if len(numbers) > 2:
        step = numbers[1] - numbers[0]
        if step > 1 and all(b - a == step for a, b in pairwise(numbers)):
            return f"{numbers[0]}-{numbers[-1]}:{step}"
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
