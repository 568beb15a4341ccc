"""The structure of a checkpoint (names, shapes, element types, never values): its hash, and how two of them differ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from steptime.checkpoint.stacks import MAX_LAYERS, STACKED
from steptime.checkpoint.stored_records import Shape, StoredTensor
from steptime.checkpoint.tree import ranges

_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")


CHUNK = 10_000  # lines hashed at once
Structure = dict[str, tuple[Shape, str]]
"""{name: (whole shape, dtype)}: pieces and replicas of one tensor are one entry."""


def structural_hash(tensors: Iterable[StoredTensor]) -> str:
    """32 hexadecimal digits, independent of file layout, sharding, order and training step."""
    ends: dict[tuple[Shape, str], str] = {}  # most tensors share one: no pair is kept for each
    lines: dict[str, str] = {}
    for tensor in tensors:
        kind = tensor.whole, tensor.dtype
        end = ends.get(kind)
        if end is None:
            end = ends[kind] = f" {tensor.dtype!r} {kind[0]}\n"
        lines[tensor.name] = end
    names, digest = sorted(lines), blake2b(digest_size=16)
    for at in range(0, len(names), CHUNK):
        digest.update("".join([f"{name!r}{lines[name]}" for name in names[at : at + CHUNK]]).encode())
    return digest.hexdigest()


class Line(NamedTuple):
    """One difference: "-" only left, "+" only right, "~" in both; `what` is shape and type, of "~" on both sides."""

    sign: str
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.sign} {self.name} {self.what}"


def prefixes(left: Structure, right: Structure) -> tuple[str, str]:
    """The prefix of all names on each side, where names differ with the prefix and most are equal without it."""
    if not left or not right or not left.keys().isdisjoint(right):
        return "", ""
    ours, theirs = _before(left), _before(right)
    rest = {name[len(ours) :] for name in left} & {name[len(theirs) :] for name in right}
    return (ours, theirs) if 2 * len(rest) > min(len(left), len(right)) else ("", "")


def _before(names: Structure) -> str:
    """The longest common prefix of all names that ends at a dot and leaves the last part of every name."""
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[: first.rfind(".", 0, same) + 1]


def difference(a: Structure, b: Structure) -> tuple[str, list[Line]]:
    """(how the names differ as a whole, or ""; one line per tensor that only one side has or that differs).

    Names that all differ by a prefix are compared without it.
    """
    ours, theirs = prefixes(a, b)
    note = ""
    if ours or theirs:
        a = {name[len(ours) :]: entry for name, entry in a.items()}
        b = {name[len(theirs) :]: entry for name, entry in b.items()}
        sides = [f"{side} with {prefix!r}" for side, prefix in (("here", ours), ("there", theirs)) if prefix]
        note = f"all names start {' and '.join(sides)}; compared without it:"
    a, b = _unstacked(a, b), _unstacked(b, a)
    lines = [Line("-", name, _text(a[name])) for name in a if name not in b]
    lines += [Line("+", name, _text(b[name])) for name in b if name not in a]
    both = (name for name in a if name in b and a[name] != b[name])
    return note, lines + [Line("~", name, f"{_text(a[name])} -> {_text(b[name])}") for name in both]


def _unstacked(names: Structure, others: Structure) -> Structure:
    """Layers that one side keeps as one tensor, with the layers as first dimension, where the other has one for each."""
    found: Structure = {}
    for name, (shape, dtype) in names.items():
        match = STACKED.search(name)
        rest = (name[: match.end()], name[match.end() :]) if match and shape else None
        if rest is None or name in others or others.get(f"{rest[0]}0.{rest[1]}", ((), ""))[0] != shape[1:]:
            found[name] = (shape, dtype)
            continue
        found |= {f"{rest[0]}{layer}.{rest[1]}": (shape[1:], dtype) for layer in range(min(shape[0], MAX_LAYERS))}
    return found


def _text(entry: tuple[Shape, str]) -> str:
    return f"{entry[1]} {list(entry[0])}"


def folded(lines: Iterable[Line]) -> list[str]:
    """Merge lines whose names differ only in numbers (layers, experts); show the numbers and their count."""
    groups: dict[Line, list[list[int]]] = {}
    for line in lines:
        numbers = [int(number) for number in _NUMBER.findall(line.name)]
        groups.setdefault(line._replace(name=_NUMBER.sub("*", line.name)), []).append(numbers)
    return [_folded(line, found) for line, found in groups.items()]


def _folded(line: Line, found: list[list[int]]) -> str:
    columns = [sorted(set(column)) for column in zip(*found, strict=True)]
    texts = [str(column[0]) if len(column) == 1 else f"[{ranges(column)}]" for column in columns]
    parts = line.name.split("*")
    name = parts[0] + "".join(text + part for text, part in zip(texts, parts[1:], strict=True))
    return str(line._replace(name=name)) + (f"  x{len(found)}" if len(found) > 1 else "")
