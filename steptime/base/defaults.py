"""Factories of default values."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def no_entries() -> dict[str, Any]:
    """A new mapping."""
    return {}


def no_items() -> list[Any]:
    """A new list."""
    return []


def always(value: T) -> Callable[[], T]:
    """The same value each time, for one that is never changed: sections that nobody set are then one object."""
    return lambda: value
