"""Factories of default values. pydantic reads the signature of each, which takes milliseconds for `dict` or `list` itself."""

from typing import Any


def no_entries() -> dict[str, Any]:
    """A new mapping."""
    return {}


def no_items() -> list[Any]:
    """A new list."""
    return []
