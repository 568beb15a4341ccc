"""Walk an object graph of records without recursion: every tensor with its path, and plain values such as steps and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steptime.checkpoint.pickles.tensors import tensors_of
from steptime.checkpoint.pickles.values import CallRecord, Pairs, Pid, Ref, mapping, pairs
from steptime.checkpoint.stored_records import StoredTensor

MAX_DEPTH = 200
SCALARS = (str, int, float, bool, type(None))

Link = tuple["Link | None", object, int]  # (parent, key, depth): a path is rendered only for what is shown


def key_text(key: object) -> str:
    """A dict key as a path element; keys other than str, bytes, int, float, bool and None are named by their type."""
    if type(key) is str:
        return key
    if type(key) is bytes:
        return key.decode("latin-1")
    if type(key) in (int, float, bool, type(None)):
        return str(key)
    return f"<{type(key).__name__}>"


def path_of(link: Link | None) -> list[str]:
    """The path elements from the root."""
    keys: list[str] = []
    while link is not None:
        keys.append(key_text(link[1]))
        link = link[0]
    return keys[::-1]


def tensors(root: Any) -> Iterator[tuple[list[str], StoredTensor]]:
    """(path, tensor) of every tensor record under `root`, in stream order; each container is visited once.

    The last pair has an empty path and the note "too deep" if nesting deeper than `MAX_DEPTH` was skipped.
    """
    pending: list[tuple[Any, Link | None]] = [(root, None)]
    seen: set[int] = set()
    cut: StoredTensor | None = None
    while pending:
        value, link = pending.pop()
        kind = type(value)
        if kind is CallRecord or kind is Pid:
            found = tensors_of(value)
            if found is not None:
                for tensor in found:
                    yield path_of(link), tensor
                continue
        if kind not in (CallRecord, Pairs, list, tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        depth = link[2] if link else 0
        if depth >= MAX_DEPTH:
            cut = cut or StoredTensor("", (), "", 0, note="too deep")
            continue
        for key, child in reversed(children(value)):
            if type(child) in (CallRecord, Pid, Pairs, list, tuple):
                pending.append((child, (link, key, depth + 1)))
    if cut is not None:
        yield [], cut


def children(value: Any) -> list[tuple[Any, Any]]:
    """(key, child) of a container record: dict items, attributes, list items, call arguments."""
    kind = type(value)
    if kind is Pairs:
        return list(zip(value[::2], value[1::2], strict=False))
    if kind is list or kind is tuple:
        return list(enumerate(value))
    found: list[tuple[Any, Any]] = []
    if kind is CallRecord:
        if type(value.items) is list:
            found += enumerate(value.items)
        found += pairs(value)
        if type(value.state) in (list, tuple) and not pairs(value):
            found += enumerate(value.state)
        found += _from_arguments(value)
    return found


def _from_arguments(value: CallRecord) -> list[tuple[Any, Any]]:
    """OrderedDict([[key, value], ...]) of old protocols names its items; other arguments are numbered."""
    if value.path == "collections.OrderedDict" and value.args and type(value.args[0]) is list:
        return [(item[0], item[1]) for item in value.args[0] if type(item) in (list, tuple) and len(item) == 2]
    return list(enumerate(value.args)) if type(value.args) is tuple else []


def plain(value: Any, limit: int = 200) -> dict[str, Any]:
    """The scalar entries of a dict or object (a Namespace, a config), at most `limit`; enums and dtypes by name."""
    found: dict[str, Any] = {}
    for key, item in mapping(value).items():
        if len(found) >= limit:
            break
        if type(item) in SCALARS:
            found[key] = item
        elif type(item) is Ref:
            found[key] = item.name
        elif type(item) in (list, tuple) and len(item) <= 16 and all(type(v) in SCALARS for v in item):
            found[key] = list(item)
    return found
