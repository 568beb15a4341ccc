"""What classes of settings say of their fields, and the schemas that pydantic-core makes validators of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import isfinite
from operator import ge, gt
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic_core import PydanticKnownError, PydanticUndefined
from pydantic_core import core_schema as cs

M = TypeVar("M")


class FieldInfo:
    """What a class says of one field: its default and its limits (ge, gt, le, lt, multiple_of, min_length, pattern ...)."""

    hint: Any
    """The annotation; `annotation` and `metadata` are its parts where it is `Annotated`."""
    annotation: Any
    metadata: list[Any]

    def __init__(
        self, default: Any = PydanticUndefined, *, default_factory: Callable[..., Any] | None = None, **limits: Any
    ) -> None:
        """A factory of one argument makes the default from the fields before it."""
        self.default, self.default_factory, self.limits = default, default_factory, limits
        self.required = default is PydanticUndefined and default_factory is None
        self.takes_data = getattr(getattr(default_factory, "__code__", None), "co_argcount", 0) == 1

    def default_after(self, values: dict[str, Any]) -> Any:
        """The default of a field behind these."""
        if self.default_factory is None:
            return self.default
        return self.default_factory(values) if self.takes_data else self.default_factory()

    def is_default(self, value: Any) -> bool:
        """Whether a value is the default, where it depends on no other field."""
        return not self.required and not self.takes_data and bool(value == self.default_after({}))

    def __repr__(self) -> str:
        return f"Field({', '.join(f'{key}={value!r}' for key, value in self.limits.items())})"


Field: Callable[..., Any] = FieldInfo
"""A field of any type, for type checkers."""


class BeforeValidator(NamedTuple):
    """In an annotation: what changes a value before it is read."""

    func: Callable[[Any], Any]


class AfterValidator(NamedTuple):
    """In an annotation: what checks or changes a value that was read."""

    func: Callable[[Any], Any]


def model_validator(*, mode: Literal["before", "after"]) -> Callable[[M], M]:
    """Mark a class method that sees the data of a class before they are read, or a method of what was read."""

    def mark(method: M) -> M:
        method.validates = mode  # type: ignore[attr-defined]
        return method

    return mark


@cache
def class_schema(cls: Any) -> Any:
    """The schema of a class."""
    named = {name: of for base in reversed(cls.__mro__) for name, of in vars(base).items()}
    marked = [(of.validates, getattr(cls, name)) for name, of in named.items() if hasattr(of, "validates")]
    schema: Any = cs.model_fields_schema(
        {key: cs.model_field(_of_field(info)) for key, info in cls.model_fields.items()}
    )
    for method in [method for mode, method in marked if mode == "before"]:
        schema = cs.no_info_before_validator_function(method, schema)
    schema = cs.model_schema(cls, schema, config=cls.core_config)
    for method in [method for mode, method in marked if mode == "after"]:
        schema = cs.no_info_after_validator_function(method, schema)
    return cs.no_info_before_validator_function(cls._read_scalars, schema)


def _of_field(info: FieldInfo) -> Any:
    schema = _annotated(info.annotation, [info, *info.metadata])
    if info.default_factory is not None:
        factory: Any = info.default_factory
        return cs.with_default_schema(schema, default_factory=factory, default_factory_takes_data=info.takes_data)
    return schema if info.required else cs.with_default_schema(schema, default=info.default)


def _annotated(hint: Any, said: Iterable[Any]) -> Any:
    """The schema of an annotation, and of what `Annotated` says of it, from the inside out."""
    schema = _schema(hint)
    for each in said:
        if isinstance(each, BeforeValidator):
            schema = cs.no_info_before_validator_function(each.func, schema)
        elif isinstance(each, AfterValidator):
            schema = cs.no_info_after_validator_function(each.func, schema)
        elif each.limits:
            schema = _limited(schema, each.limits)
    return schema


_PLAIN: dict[Any, Any] = {
    int: cs.int_schema(),
    float: cs.float_schema(),
    str: cs.str_schema(),
    bool: cs.bool_schema(),
    Any: cs.any_schema(),
}


def _schema(hint: Any) -> Any:
    """The schema of an annotation. That of settings inside others is made when the first value for them arrives."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if hasattr(hint, "model_validate"):
        return cs.no_info_plain_validator_function(hint.model_validate)
    if origin is Annotated:
        return _annotated(args[0], args[1:])
    if origin is Literal:
        return cs.literal_schema(list(args))
    if origin in {UnionType, Union}:
        arms = [_schema(arm) for arm in args if arm is not NoneType]
        schema = cs.union_schema(arms) if len(arms) > 1 else arms[0]
        return cs.nullable_schema(schema) if NoneType in args else schema
    if origin is list:
        return cs.list_schema(_schema(args[0]))
    if origin is dict:
        return cs.dict_schema(*map(_schema, args))
    if origin is tuple:  # of any number of values
        return cs.tuple_schema([_schema(args[0])], variadic_item_index=0)
    return cs.is_instance_schema(hint)


_CHECKS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("greater_than_equal", ge),
    "gt": ("greater_than", gt),
    "allow_inf_nan": ("finite_number", lambda value, _: isfinite(value)),
}


def _limited(schema: Any, limits: Mapping[str, Any]) -> Any:
    """A schema with limits on what is not None; those of what a function reads are checked after it."""
    if schema["type"] == "nullable":
        return {**schema, "schema": _limited(schema["schema"], limits)}
    if not schema["type"].startswith("function-"):
        return {**schema, **limits}

    def check(value: Any) -> Any:
        for name, limit in limits.items():
            kind, holds = _CHECKS[name]
            if not holds(value, limit):
                raise PydanticKnownError(kind, {name: limit} if kind != "finite_number" else None)  # type: ignore[arg-type]
        return value

    return cs.no_info_after_validator_function(check, schema)
