"""What is known of a language model so far: its tensors, and the fields found in them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from steptime.checkpoint import weight_names as names
from steptime.checkpoint.records import Shape
from steptime.checkpoint.stacks import StackParts


@dataclass(slots=True)
class FoundArchitecture:
    """The language model's tensors, and what was found so far: {field: {value, from}}."""

    parts: StackParts
    tied: AbstractSet[str]
    tails: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    attends: bool = True
    """Whether any layer has attention with heads."""

    def last(self, *modules: str) -> tuple[str, Shape] | None:
        """(name, shape) of the first of `modules` that a layer has as a matrix, except experts."""
        for module in modules:
            for tail, (name, shape) in self.tails.items():
                if (
                    names.ends(tail, module)
                    and len(shape) == 2
                    and "expert" not in tail
                    and not names.SHARED.search(tail)
                ):
                    return name, shape
        return None

    def set(self, key: str, value: Any, source: str, **more: Any) -> None:
        """Record a value unless one is known."""
        self.fields.setdefault(key, {"value": value, "from": source, **more})

    def get(self, key: str) -> Any:
        """The value found for `key`, or None."""
        return self.fields.get(key, {}).get("value")
