"""OmegaConf's `${...}`: references to other keys, and NeMo's `multiply` and `divide`; whatever else stands as it is."""

from __future__ import annotations

import re
from typing import Any

from steptime.base.document import scalar

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_ROUNDS = 8


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with simple references filled in; what needs running (oc.env, eval) stays as text.

    `${.x}` is a key beside, `${..x}` one above; `${training.x}` is the launcher's name for `${x}`.

    >>> resolve({"a": {"b": 3, "c": "${multiply:4, ${.b}}", "d": "${oc.env:HOME}"}})
    {'a': {'b': 3, 'c': 12, 'd': '${oc.env:HOME}'}}
    """
    return {key: _walk(value, tree, (key,)) for key, value in tree.items()}


def _walk(node: Any, tree: dict[str, Any], at: tuple[str, ...]) -> Any:
    if isinstance(node, dict):
        return {key: _walk(value, tree, (*at, key)) for key, value in node.items()}
    if isinstance(node, list):
        return [_walk(item, tree, at) for item in node]
    for _ in range(_ROUNDS):
        if not isinstance(node, str) or not (found := _REFERENCE.search(node)):
            return node
        value = _value(found[1].strip(), tree, at)
        if value is None or isinstance(value, dict | list):
            return node
        whole = found.span() == (0, len(node))
        node = value if whole else node[: found.start()] + str(value) + node[found.end() :]
    return node


def _value(words: str, tree: dict[str, Any], at: tuple[str, ...]) -> Any:
    """What one `${words}` stands for; None where that is not simple."""
    name, colon, rest = words.partition(":")
    if colon:
        numbers = [scalar(part.strip()) for part in rest.split(",")]
        if len(numbers) != 2 or not all(isinstance(number, int) and number for number in numbers):
            return None
        if name == "multiply":
            return numbers[0] * numbers[1]
        return numbers[0] // numbers[1] if name in {"divide", "int_div"} else None
    dots = len(words) - len(words.lstrip("."))
    path = [*at[: len(at) - dots], *words[dots:].split(".")] if dots else words.split(".")
    if not dots and path[0] == "training" and "training" not in tree:
        path = path[1:]
    node: Any = tree
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return node
