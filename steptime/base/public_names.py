"""The names of settings that `help` and completion list: the package's own, without those of pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class Wording(NamedTuple):
    """What the error lines of a class say of its keys."""

    not_modeled: Mapping[str, str] = {}
    """Keys ("path") and values ("path=word") that are known but not modeled, with their message."""
    natural_names: Mapping[str, str] = {}
    """Keys of other frameworks -> the dotted key with the same meaning."""
    missing: Mapping[str, str] = {}
    """Required keys -> what to give where they are missing; "": any other."""
    fixes: Mapping[str, str] = {}
    """Keys with a value of the wrong type ("path=value") -> what to write; "": where a mapping is expected."""


class PublicNames(ModelMetaclass):
    """Metaclass of settings, whose `dir`, and so `help`, is without private names and those of pydantic.

    `wording` is no class variable of `Config`: pydantic evaluates the annotations of those anew for each class.
    """

    wording: Wording = Wording()
    __class_vars__: set[str]
    if TYPE_CHECKING:  # a class hashes by its identity; of a dataclass no hash is derived

        def __hash__(self) -> int: ...

    def __dir__(self) -> list[str]:
        """Public names that this package defines, without class variables."""
        ours = {
            name
            for base in self.__mro__
            if issubclass(base, BaseModel) and base is not BaseModel
            for name in vars(base)
        }
        hidden = vars(BaseModel).keys() | vars(PublicNames).keys() | self.__class_vars__
        shown = {name for name in ours - hidden if not name.startswith("_")}
        return sorted(shown | {"__doc__"})


class PublicFields(BaseModel, defer_build=True):
    """Settings of which a notebook completes the fields and the public names of their class."""

    def __dir__(self) -> list[str]:
        """The names of the class (`PublicNames`), and the fields, which are no attributes of it."""
        return sorted({*dir(type(self)), *type(self).model_fields})
