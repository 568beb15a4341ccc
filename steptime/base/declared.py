"""Settings declared by annotations and read by pydantic-core: a report does not import pydantic, which takes a third of its time.

The words are those of pydantic: `Field`, `model_validator`, `model_dump`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache, partial
from inspect import Parameter, Signature, get_annotations
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from pydantic_core import CoreConfig, PydanticUndefined, SchemaValidator

from steptime.base.core_schemas import FieldInfo, class_schema
from steptime.base.records import Switches


class _Factory:
    """A default of a signature that depends on the fields before it, or is made anew for each object."""

    def __repr__(self) -> str:
        return "<factory>"


class SettingsType(type):
    """Metaclass of settings. It takes the defaults out of a class: fields are attributes of its objects alone."""

    def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any], **config: Any) -> Any:
        """A class with a configuration of pydantic-core: allow_inf_nan, extra_fields_behavior."""
        cls: Any = super().__new__(mcs, name, bases, space)
        cls.core_config = {"title": name, "extra_fields_behavior": "forbid", **config}
        cls.model_fields = {key: info for base in bases for key, info in getattr(base, "model_fields", {}).items()}
        own: dict[str, Any] = get_annotations(cls, eval_str=True)
        for key, hint in own.items():
            if get_origin(hint) is not ClassVar:
                said = vars(cls).get(key, PydanticUndefined)
                cls.model_fields[key] = info = said if isinstance(said, FieldInfo) else FieldInfo(said)
                info.hint = hint
                info.annotation, *info.metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
                if key in vars(cls):
                    delattr(cls, key)
        return cls

    def __dir__(cls) -> list[str]:
        """Public names that this package defines, without class variables and those of pydantic, for `help` and completion."""
        ours = {name for base in cls.__mro__ if issubclass(base, Settings) for name in vars(base)}
        hidden = vars(Settings).keys() | {"wording", "draw"}
        return ["__doc__", *sorted(name for name in ours - hidden if not name.startswith("_"))]

    @property
    def __signature__(cls: Any) -> Signature:
        """The fields as keywords, for `help` and notebooks."""
        shown = []
        for key, info in cls.model_fields.items():
            default = Parameter.empty if info.required else _Factory() if info.default_factory else info.default
            hint = Annotated[info.annotation, info] if info.limits else info.annotation
            shown.append(Parameter(key, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        return Signature(shown, return_annotation=None)


@cache
def validator(cls: type[Settings]) -> SchemaValidator:
    """What reads data as objects of a class; made when the first are read."""
    return SchemaValidator(class_schema(cls), cls.core_config)


class Settings(metaclass=SettingsType):
    """The base of settings: copied, compared and shown by their fields."""

    __slots__ = ("__dict__", "__pydantic_extra__", "__pydantic_fields_set__", "__pydantic_private__")
    __pydantic_fields_set__: ClassVar[Any]  # of each object
    core_config: ClassVar[CoreConfig]
    model_fields: ClassVar[dict[str, FieldInfo]]

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that were given."""
        found: set[str] = self.__pydantic_fields_set__
        return found

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """Data, or an object of the class, as an object of it.

        Raises:
            ValidationError: pydantic-core's, with all that is wrong.
        """
        read: Self = validator(cls).validate_python(data)
        return read

    @classmethod
    def model_construct(cls, fields_set: set[str] | None = None, **data: Any) -> Self:
        """An object of values that are known to be right; no schema is made for it."""
        values: dict[str, Any] = {}
        for key, info in cls.model_fields.items():
            if key in data:
                values[key] = data[key]
            elif not info.required:
                values[key] = info.default_after(values)
        of_known = object.__new__(cls)
        of_known.__setstate__((values, values.keys() & data.keys() if fields_set is None else fields_set))
        return of_known

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """The same with some values changed, which are not checked."""
        copy = self.__copy__()
        vars(copy).update(update or {})
        copy.__pydantic_fields_set__.update(update or {})
        return copy

    def model_dump(
        self,
        *,
        include: Container[str] | None = None,
        exclude: Container[str] = (),
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """Plain data. What is unset, a default or None is left out of settings inside these too."""
        inside = partial(
            Settings.model_dump,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
            exclude_none=exclude_none,
        )
        found: dict[str, Any] = {}
        for key, info in type(self).model_fields.items():
            value = self.__dict__[key]
            left_out = (
                key in exclude
                or (include is not None and key not in include)
                or (exclude_unset and key not in self.model_fields_set)
                or (exclude_defaults and info.is_default(value))
                or (exclude_none and value is None)
            )
            if not left_out:
                found[key] = _plain(value, inside)
        return found

    def __copy__(self) -> Self:
        """The fields alone: what a `cached_property` holds may not hold for a copy with other fields."""
        copy, fields = object.__new__(type(self)), type(self).model_fields
        values = {key: value for key, value in self.__dict__.items() if key in fields}
        copy.__setstate__((values, {*self.model_fields_set}))
        return copy

    def __getstate__(self) -> tuple[dict[str, Any], set[str]]:
        return vars(self), self.model_fields_set

    def __setstate__(self, state: tuple[dict[str, Any], set[str]]) -> None:
        for name, value in zip(self.__slots__, (state[0], None, state[1], None), strict=True):
            object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.__dict__.items())

    def __dir__(self) -> list[str]:
        """The names of the class, and the fields, which are no attributes of it."""
        return sorted({*dir(type(self)), *type(self).model_fields})

    def __str__(self) -> str:
        return " ".join([f"{key}={self.__dict__[key]!r}" for key in type(self).model_fields])

    def __repr__(self) -> str:
        said = ", ".join([f"{key}={self.__dict__[key]!r}" for key in type(self).model_fields])
        return f"{type(self).__name__}({said})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names, mine, others = type(self).model_fields, self.__dict__, other.__dict__
        return [*map(mine.get, names)] == [*map(others.get, names)]

    def __hash__(self) -> int:
        return hash(tuple([self.__dict__[key] for key in type(self).model_fields]))


def _plain(value: Any, dump: Callable[[Settings], dict[str, Any]]) -> Any:
    """A value with the settings inside it as plain data."""
    if isinstance(value, Settings):
        return dump(value)
    if isinstance(value, list):
        return [_plain(item, dump) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, dump) for key, item in value.items()}
    return {**vars(value)} if isinstance(value, Switches) else value
