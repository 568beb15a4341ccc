"""Tensors as a tree of modules, with identical numbered siblings (layers, experts) folded into one.

Counts are of unique elements, so that a tied weight or a replica on another rank adds nothing; bytes are as stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steptime.checkpoint.records import Shape, StoredTensor

MAX_PARTS = 64  # of a dotted name; a hostile name has millions


@dataclass(slots=True)
class Node:
    """A module or, without children, a tensor. After folding it stands for `repeat` equal ones named in `name`.

    `params` [elements] and `nbytes` are of all of them together. Nodes of one tree with the same tensors under the same
    names, in whatever order they were stored, have one `kind`.
    """

    name: str
    params: int = 0
    nbytes: int = 0
    shape: Shape | None = None
    dtype: str = ""
    alias_of: str | None = None
    repeat: int = 1
    children: dict[str, Node] = field(default_factory=dict)
    kind: int = -1


_Branch = dict[str, Any]  # of a module: its parts; a part is a branch, a tensor or a list of the pieces of one
_Kinds = dict[object, int]
_OWN = ""
"""Key of the tensor that a module itself is."""


def build(tensors: Iterable[StoredTensor]) -> Node:
    """The folded tree of `tensors`."""
    root: _Branch = {}
    for tensor in tensors:
        *path, last = tensor.name.split(".", MAX_PARTS)
        branch = root
        for part in path:
            below = branch.get(part)
            if type(below) is not dict:
                below = branch[part] = {} if below is None else {_OWN: below}
            branch = below
        here = branch.get(last)
        if here is None:
            branch[last] = tensor
        elif type(here) is dict:
            here[_OWN] = [*here.get(_OWN, ()), tensor]
        elif type(here) is list:
            here.append(tensor)
        else:
            branch[last] = [here, tensor]
    return _folded("", root, {})


def _folded(name: str, branch: Any, kinds: _Kinds) -> Node:
    """A branch as a node: first its children, then equal numbered ones as one; a module of one part is that part."""
    if type(branch) is not dict:
        return _with_kind(_leaf(name, branch if type(branch) is list else [branch]), kinds)
    if len(branch) == 1 and name and not name.isdecimal():
        ((part, below),) = branch.items()
        if not part.isdecimal() and part != _OWN:
            node = _folded(part, below, kinds)
            if node.repeat == 1:
                node.name = f"{name}.{node.name}"
                return node
            return _with_kind(Node(name, node.params, node.nbytes, children={node.name: node}), kinds)
    own = branch.pop(_OWN, [])
    node = _leaf(name, own if type(own) is list else [own])
    node.children = {part: _folded(part, below, kinds) for part, below in branch.items()}
    branch.clear()
    for child in node.children.values():
        node.params += child.params
        node.nbytes += child.nbytes
    if sum(map(str.isdecimal, node.children)) > 1:
        node.children = _grouped(node.children, kinds)
    node.children = {child.name: child for child in map(_merged, node.children.values())}
    return _with_kind(node, kinds)


def _leaf(name: str, pieces: list[StoredTensor]) -> Node:
    node = Node(name)
    for tensor in pieces:
        node.params += tensor.unique
        node.nbytes += tensor.nbytes
        node.shape, node.dtype = tensor.whole, tensor.dtype if node.dtype in ("", tensor.dtype) else "mixed"
        node.alias_of = tensor.alias_of if node.alias_of is None and not tensor.unique else node.alias_of
    return node


def _with_kind(node: Node, kinds: _Kinds) -> Node:
    """Number what is equal: nodes of one kind fold. The type of a module is that of its parts, where they agree."""
    children = node.children
    if children:
        dtypes = {child.dtype for child in children.values()}
        node.dtype = (dtypes.pop() if len(dtypes) == 1 else "mixed") if node.shape is None else node.dtype
    below = tuple(sorted((name, child.kind) for name, child in children.items())) if children else ()
    key = (node.shape, node.dtype, node.params, node.alias_of is None, node.repeat, below)
    node.kind = kinds.setdefault(key, len(kinds))
    return node


def _merged(child: Node) -> Node:
    """`model` with the one child `layers` becomes `model.layers`; a folded group keeps its own line."""
    only = next(iter(child.children.values())) if len(child.children) == 1 else None
    if only is None or child.repeat > 1 or child.shape is not None:
        return child
    only.name = f"{child.name}.{only.name}"
    return only


def _grouped(children: dict[str, Node], kinds: _Kinds) -> dict[str, Node]:
    """Numbered children of one kind as one node each, in order of their first number."""
    groups: dict[int | str, list[Node]] = {}
    for name, child in sorted(children.items(), key=lambda item: _order(item[0])):
        groups.setdefault(child.kind if name.isdecimal() else name, []).append(child)
    whole = len([key for key in groups if type(key) is int]) == 1
    folded = {}
    for key, group in groups.items():
        first = group[0]
        if type(key) is int and len(group) > 1:
            name = "*" if whole else f"[{ranges([int(node.name) for node in group])}]"
            first = Node(
                name, sum(n.params for n in group), sum(n.nbytes for n in group), first.shape, first.dtype,
                first.alias_of, len(group), first.children,
            )  # fmt: skip
            _with_kind(first, kinds)
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
