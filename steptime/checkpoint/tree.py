"""Tensors as a tree of modules, with identical numbered siblings (layers, experts) folded into one.

Counts are of unique elements, so that a tied weight or a replica on another rank adds nothing; bytes are as stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from steptime.base.grouping import grouped
from steptime.checkpoint.stored_records import Shape, StoredTensor

MAX_PARTS = 64  # of a dotted name; a hostile name has millions


@dataclass(slots=True)
class Node:
    """A module or, without children, a tensor. After folding it represents `repeat` equal ones, listed in `name`.

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

    def elements(self, pattern: re.Pattern[str], above: str = "") -> int:
        """Elements of the tensors below whose name matches, those of all `repeat` nodes together."""
        name = f"{above}.{self.name}"
        inside = sum(child.elements(pattern, name) for child in self.children.values()) * self.repeat
        return inside if self.shape is None or not pattern.search(name) else self.params

    def named(self, name: str) -> Node:
        """A node like this one, called `name`."""
        return replace(self, name=name)


_Branch = dict[str, Any]  # parts of a module: branches, groups, tensors, lists of the pieces of one tensor
_Kinds = dict[object, int]
_OWN: Any = object()
"""Key of a tensor whose name is also a module; differs from every part of a name."""
_NUMBERED = re.compile(r"(?:.*\.)?\d+(?=\.)")
"""A name up to its last number that is followed by a dot: the prefix of one layer or expert."""


_LIKE = attrgetter("shape", "global_shape", "dtype", "unique", "nbytes", "alias_of")
"""Fields that must be equal for tensors to fold."""


class _Group(NamedTuple):
    """The tensors of a numbered module without numbers below it; groups of one `key` have one node, built once."""

    tensors: list[StoredTensor]
    key: int
    start: int
    """Index in the names at which the part below the module begins."""


@dataclass(slots=True)
class _Folding:
    """State of folding: the numbers of equal nodes, and the node of each group."""

    kinds: _Kinds = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)


def build(tensors: Iterable[StoredTensor]) -> Node:
    """The folded tree of `tensors`."""
    root: _Branch = {}
    branch, above = root, ""
    for name, item in _items(list(tensors)):
        last = name[len(above) :] if name.startswith(above) else "."
        if "." in last:  # of another module than the one before
            *path, last = name.split(".", MAX_PARTS)
            branch, above = _branch(root, path), ".".join([*path, ""])
        _put(branch, last, item)
    return _folded("", root, _Folding())


def _items(tensors: list[StoredTensor]) -> Iterator[tuple[str, StoredTensor | _Group]]:
    """Tensors and groups by name, in the order of their first tensor."""
    starts: list[tuple[str, int]] = []  # of neighbors in one numbered module: its name, and the first of them
    modules: set[str] = set()
    torn: dict[str, list[StoredTensor]] = {}  # modules whose tensors are not all neighbors
    own_names: set[str] = set()  # tensors named like a numbered module
    ends: set[str] = set()  # rests of names without a number: neighbors with one belong to the same module
    here, length, stem = "", 0, ""
    for at, tensor in enumerate(tensors):
        name = tensor.name
        if here and name.startswith(here) and name[length:] in ends:
            continue
        prefix = _module(name, stem, ends)
        stem = prefix[: prefix.rfind(".") + 1]
        starts.append((prefix, at))
        if prefix in modules and prefix:
            torn[prefix] = []
        modules.add(prefix)
        if name[-1:].isdecimal():
            own_names.add(name)
        here = ""
        if prefix and name not in own_names:
            here = f"{prefix}."
            length = len(here)
            ends.add(name[length:])
    upper = _above(modules) | own_names
    runs = [(*start, end) for start, (_, end) in pairwise([*starts, ("", len(tensors))])]
    for prefix, at, end in runs if torn else ():
        if prefix in torn:
            torn[prefix] += tensors[at:end]
    keys: dict[object, int] = {}
    last: object = None
    number = 0
    for prefix, at, end in runs:
        group = tensors[at:end]
        if not prefix or prefix in upper:
            yield from ((tensor.name, tensor) for tensor in group)
        elif group := torn.get(prefix, group):
            start = len(prefix) + 1
            key = (*[tensor.name[start:] for tensor in group], *map(_LIKE, group))
            if key != last:  # neighbors are mostly equal, and a hash of so much takes longer
                last, number = key, keys.setdefault(key, len(keys))
            yield prefix, _Group(group, number, start)
            if prefix in torn:
                torn[prefix] = []


def _module(name: str, stem: str, ends: set[str]) -> str:
    """The numbered module of a tensor, "" for none; mostly the next number after `stem`, with a known rest of the name."""
    dot = name.find(".", len(stem)) if stem and name.startswith(stem) else -1
    if dot > 0 and name[len(stem) : dot].isdecimal() and name[dot + 1 :] in ends:
        return name[:dot]
    match = _NUMBERED.match(name)
    return match[0] if match is not None and name.count(".") < MAX_PARTS else ""


def _above(modules: set[str]) -> set[str]:
    """All modules in which one of `modules` is."""
    found: set[str] = set()
    for name in modules:
        above = name
        while (above := above.rpartition(".")[0]) and above not in found:
            found.add(above)
    return found


def _branch(root: _Branch, path: list[str]) -> _Branch:
    """The module at `path`, made where there is none."""
    for part in path:
        below = root.get(part)
        if type(below) is not dict:
            below = root[part] = {} if below is None else {_OWN: below}
        root = below
    return root


def _put(branch: _Branch, last: str, item: StoredTensor | _Group) -> None:
    """Put a tensor or a group into its module; several tensors of one name are its pieces."""
    if type(branch.get(last)) is dict:
        branch, last = branch[last], _OWN
    here = branch.get(last)
    if here is None:
        branch[last] = item
    elif type(here) is list:
        here.append(item)
    else:
        branch[last] = [here, item]


def _of_group(name: str, group: _Group, folding: _Folding) -> Node:
    """The node of a group, the same one for equal groups; it has the name of the first of them."""
    known = folding.nodes.get(group.key)
    if known is None:
        branch: _Branch = {}
        for tensor in group.tensors:
            *path, last = tensor.name[group.start :].split(".", MAX_PARTS)
            _put(_branch(branch, path), last, tensor)
        known = folding.nodes[group.key] = _folded(name, branch, folding)
    return known


def _folded(name: str, branch: Any, folding: _Folding) -> Node:
    """The node of a branch: fold its children first, then merge equal numbered children. One part alone gives its name."""
    if type(branch) is _Group:
        return _of_group(name, branch, folding)
    if type(branch) is not dict:
        return _with_kind(_leaf(name, branch if type(branch) is list else [branch]), folding.kinds)
    if len(branch) == 1 and name and not name.isdecimal():
        ((part, below),) = branch.items()
        if part is not _OWN and not part.isdecimal():
            node = _folded(part, below, folding)
            if node.repeat == 1:
                node.name = f"{name}.{node.name}"
                return node
            return _with_kind(Node(name, node.params, node.nbytes, children={node.name: node}), folding.kinds)
    own = branch.pop(_OWN, [])
    node = _leaf(name, own if type(own) is list else [own])
    children = [(part, _folded(part, below, folding)) for part, below in branch.items()]
    branch.clear()
    for _, child in children:
        node.params += child.params
        node.nbytes += child.nbytes
    node.children = {child.name: child for child in map(_merged, _grouped(children, folding.kinds))}
    return _with_kind(node, folding.kinds)


def _leaf(name: str, pieces: list[StoredTensor]) -> Node:
    node = Node(name)
    for tensor in pieces:
        node.params += tensor.unique
        node.nbytes += tensor.nbytes
        node.shape, node.dtype = tensor.whole, tensor.dtype if node.dtype in ("", tensor.dtype) else "mixed"
        node.alias_of = tensor.alias_of if node.alias_of is None and not tensor.unique else node.alias_of
    return node


def _with_kind(node: Node, kinds: _Kinds) -> Node:
    """Set `kind`, equal for equal nodes, which may then fold. A module has the dtype of its parts, or "mixed"."""
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
    return only.named(f"{child.name}.{only.name}")


def _grouped(children: list[tuple[str, Node]], kinds: _Kinds) -> Iterator[Node]:
    """Children with numbers for names, those of one kind as one node, in order of their first number; then the others."""
    if sum(part.isdecimal() for part, _ in children) > 1:
        children.sort(key=_order)
    groups: dict[int | str, list[tuple[str, Node]]] = grouped(
        children, lambda child: child[1].kind if child[0].isdecimal() else child[0]
    )
    whole = len([key for key in groups if type(key) is int]) == 1
    for key, group in groups.items():
        part, first = group[0]
        if len(group) > 1:
            name = "*" if whole else f"[{ranges([int(part) for part, _ in group])}]"
            params, nbytes = sum([node.params for _, node in group]), sum([node.nbytes for _, node in group])
            yield _with_kind(replace(first, name=name, params=params, nbytes=nbytes, repeat=len(group)), kinds)
        else:
            yield first.named(part) if type(key) is int else first


def _order(child: tuple[str, Node]) -> tuple[int, int]:
    return (0, int(child[0][:18])) if child[0].isdecimal() else (1, 0)


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
