"""Parameters of a part on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from steptime.base.num import Num
from steptime.model.ops import Param


class LocalParam(NamedTuple):
    """A parameter, and its elements on one device; for experts, those of all experts on the device."""

    param: Param
    elements: Num
    tensors: Num = 1
    """Tensors that it has on one device: one, or one per local expert."""

    @property
    def each(self) -> Num:
        """Elements of one tensor."""
        return self.elements / self.tensors if self.param.n_experts else self.elements


@dataclass(frozen=True, eq=False)
class LocalParams:
    """Trained parameters of a part on one device, in the order in which its modules register them."""

    params: list[LocalParam]

    def __iter__(self) -> Iterator[LocalParam]:
        return iter(self.params)

    @cached_property
    def elements(self) -> dict[str, Num]:
        """Their elements by parameter group."""
        found: dict[str, Num] = {}
        for p in self.params:
            group = p.param.group
            found[group] = found.get(group, 0.0) + p.elements
        return found

    @cached_property
    def backward(self) -> dict[str, list[LocalParam]]:
        """Those of each parameter group in the order of backward: the last registered first."""
        found: dict[str, list[LocalParam]] = {}
        for p in reversed(self.params):
            found.setdefault(p.param.group, []).append(p)
        return found

    @cached_property
    def total(self) -> Num:
        """All of their elements."""
        return sum([p.elements for p in self.params])

    @cached_property
    def tensors(self) -> Num:
        """Tensors that they have on one device."""
        return sum([p.tensors for p in self.params])


CountedParams: TypeAlias = list[tuple[LocalParams, int]]
"""Parameters of some parts, with how often each part occurs."""
