"""Dataclasses whose methods are shared: `dataclass` compiles them for each class, and a report makes dozens of classes."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self, TypeVar, dataclass_transform

T = TypeVar("T")


class ByFields:
    """A base of dataclasses that show themselves, and are equal, by their fields."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        of: Any = self
        said = ", ".join([f"{f.name}={getattr(self, f.name)!r}" for f in fields(of) if f.repr])
        return f"{type(self).__qualname__}({said})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        of: Any = self
        names = [f.name for f in fields(of) if f.compare]
        return [getattr(self, name) for name in names] == [getattr(other, name) for name in names]


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A dataclass that equals only itself, and whose fields are not assigned to: type checkers see to it, not each instance.

    >>> @record
    ... class Point:
    ...     x: float
    ...     y: float = 0.0
    >>> Point(1.0)
    Point(x=1.0, y=0.0)
    """
    if "__repr__" not in vars(cls):
        cls.__repr__ = ByFields.__repr__  # type: ignore[method-assign, assignment]
    return dataclass(eq=False, repr=False)(cls)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
class Switches(ByFields):
    """A base of groups of settings that files of this package state in full: equal by value, copied with changes, not validated.

    >>> class Kernels(Switches):
    ...     fused: bool
    ...     chunks: int = 1
    >>> Kernels(fused=True).replace(chunks=2)
    Kernels(fused=True, chunks=2)
    """

    def __init_subclass__(cls) -> None:
        """Make a dataclass of the group, without an `__init__` of its own, which takes long to compile."""
        dataclass(init=False, eq=False, repr=False)(cls)

    def __init__(self, **settings: Any) -> None:
        of: Any = self
        known = {each.name: each.default for each in fields(of)}
        if unknown := settings.keys() - known.keys():
            raise TypeError(f"not settings of {type(self).__name__}: {', '.join(sorted(unknown))}")
        values = known | settings
        if missing := [name for name, value in values.items() if value is MISSING]:
            raise TypeError(f"settings of {type(self).__name__} that are missing: {', '.join(missing)}")
        vars(self).update(values)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None

    def replace(self, **changes: Any) -> Self:
        """The same with some settings changed.

        Raises:
            TypeError: a name that is no setting.
        """
        if unknown := changes.keys() - vars(self).keys():
            raise TypeError(f"not settings of {type(self).__name__}: {', '.join(sorted(unknown))}")
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        return copy
