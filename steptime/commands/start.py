"""What lets the process of one report start sooner: what pydantic and PyYAML prepare at import, made when first used.

Each function leaves what it changes with the same meaning, and does nothing where a version of Python or of a package has no
such place. Only a process of our own calls them: `import steptime` changes no other module.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import typing
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

UNUSED = "secrets", "base64"
"""Modules that pydantic imports for secret and encoded text, which no plan has; the first loads OpenSSL."""


def sooner() -> None:
    """Change what the imports that follow prepare."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # looking for plugins would import importlib.metadata, email and zipfile
    _stand_in("pydantic.plugin._loader", get_plugins=tuple)
    for name in UNUSED:
        _stand_in(name)
    no_zone = type("ZoneInfo", (Exception,), {})  # a type that pydantic compares with those of a plan's keys
    _stand_in("zoneinfo", ZoneInfo=no_zone, ZoneInfoNotFoundError=no_zone)
    argparse.__dict__["_"] = str  # messages are English in every locale; looking for a translation would import locale
    _annotations_as_text()
    _methods_when_called()


class StandIn(ModuleType):
    """Under the name of a module not yet imported: it has what is known, and loads the module for anything else."""

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("__"):  # queries of the import system
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), attribute)


def _stand_in(name: str, **known: object) -> None:
    if name not in sys.modules:
        sys.modules[name] = stand_in = StandIn(name)
        vars(stand_in).update(known)


def _annotations_as_text() -> None:
    """Keep annotations written as text uncompiled: `eval` takes text as well, and a report evaluates few of a thousand."""
    if typing.ForwardRef.__module__ == "typing":  # before Python 3.14

        def compiled(source: Any, name: str, mode: str, *flags: Any, **named: Any) -> Any:
            """Text as it is where it is an expression without line breaks, which `eval` reads as `compile` does."""
            if mode == "eval" and not flags and not named and isinstance(source, str) and "\n" not in source:
                return source
            return compile(source, name, mode, *flags, **named)

        typing.__dict__["compile"] = compiled


def _methods_when_called() -> None:
    """Let a dataclass compile each of its methods at the method's first call (Python 3.11 and 3.12 do it one by one)."""
    create: Callable[..., Callable[..., Any]] | None = getattr(dataclasses, "_create_fn", None)
    if create is None:
        return

    def late(name: str, *how: Any, **named: Any) -> Callable[..., Any]:
        made: Callable[..., Any] | None = None

        def method(*given: Any, **values: Any) -> Any:
            nonlocal made
            if made is None:
                made = create(name, *how, **named)
                for cls in type(given[0]).__mro__:
                    if vars(cls).get(name) is method:
                        setattr(cls, name, made)
            return made(*given, **values)

        method.__name__ = name
        return method

    dataclasses.__dict__["_create_fn"] = late


class _Pattern:
    """A regular expression that is compiled when first asked for anything."""

    def __init__(self, compiler: Callable[..., re.Pattern[Any]], *given: Any) -> None:
        self._made = compiler, given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        compiler, given = self._made
        found = getattr(compiler(*given), name)
        setattr(self, name, found)
        return found


def packages() -> None:
    """Import pydantic, PyYAML and json; their regular expressions are compiled when first used, PyYAML's by its own parser."""
    compiler = re.compile
    re.__dict__["compile"] = lambda pattern, flags=0: _Pattern(compiler, pattern, flags)
    try:
        import json  # noqa: F401
        import uuid  # noqa: F401  which pydantic's core loads

        import pydantic.main  # noqa: F401
        import yaml  # noqa: F401

        import steptime.base.units  # noqa: F401
    finally:
        re.__dict__["compile"] = compiler
    for name in ("zoneinfo", *UNUSED):
        if isinstance(sys.modules.get(name), StandIn):
            del sys.modules[name]  # so that others import the module itself
