"""The JSON Schema of settings, by pydantic, which a report does not import."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pydantic

from steptime.base.core_schemas import BeforeValidator, FieldInfo
from steptime.base.declared import Settings

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema(cls: type[Settings]) -> dict[str, Any]:
    """The JSON Schema of a class."""
    found: dict[str, Any] = _standard(_model(cls, {}).model_json_schema())
    return found


def _standard(node: Any) -> Any:
    """A schema with the bounds that pydantic leaves under names of its own, where a validator runs first, as JSON Schema's.

    >>> _standard({"anyOf": [{"type": "number", "ge": 0}, {"type": "number", "ge": 0, "gt": 0}]})
    {'anyOf': [{'type': 'number', 'minimum': 0}, {'type': 'number', 'exclusiveMinimum': 0}]}
    """
    if isinstance(node, list):
        return [_standard(item) for item in node]
    if not isinstance(node, dict):
        return node
    number = node.get("type") in {"number", "integer"}
    plain = {_BOUNDS.get(key, key) if number else key: _standard(item) for key, item in node.items()}
    if "minimum" in plain and plain["minimum"] == plain.get("exclusiveMinimum"):
        del plain["minimum"]  # the other says more
    return plain


def _model(cls: type[Settings], known: dict[type[Settings], Any]) -> Any:
    """The same class as a model of pydantic; `known` are those made before."""
    if cls not in known:
        fields: dict[str, Any] = {
            key: (_hint(info.hint, known), _field(key, info)) for key, info in cls.model_fields.items()
        }
        known[cls] = pydantic.create_model(cls.__name__, __config__={"extra": "forbid"}, __doc__=cls.__doc__, **fields)
    return known[cls]


def _field(key: str, info: FieldInfo) -> Any:
    said: dict[str, Any] = info.limits | {"title": key.title().replace("_", " ")}
    if not info.required:
        said["default" if info.default_factory is None else "default_factory"] = info.default_factory or info.default
    return pydantic.Field(**said)


def _hint(hint: Any, known: dict[type[Settings], Any]) -> Any:
    """An annotation in the words of pydantic."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        return _model(hint, known)
    if isinstance(hint, FieldInfo):
        return pydantic.Field(**hint.limits)
    if isinstance(hint, BeforeValidator):
        return pydantic.BeforeValidator(hint.func)
    args = tuple(_hint(arg, known) for arg in get_args(hint))
    kinds: dict[Any, Any] = {UnionType: Union, Union: Union, Annotated: Annotated, list: list, tuple: tuple, dict: dict}
    kind = kinds.get(get_origin(hint))
    return hint if kind is None else kind[args]
