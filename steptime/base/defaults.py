"""Factories of default values. pydantic reads the signature of each, which takes milliseconds for `dict` or `list` itself.

The default of a section is its `model_construct`, which builds no schema: there is nothing to check.
"""

from typing import Any


def no_entries() -> dict[str, Any]:
    """A new mapping."""
    return {}


def no_items() -> list[Any]:
    """A new list."""
    return []
