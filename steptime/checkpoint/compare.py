"""What a checkpoint and a training plan say about the same model: the one place that touches the calculator.

The plan is seen through `Plan` alone: rows of (module, parameters) and bytes per rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steptime.checkpoint.summary import Summary


class Plan(Protocol):
    """What the comparison needs to know of a job."""

    def modules(self) -> Iterable[tuple[str, int]]:
        """(module, unique parameters) of embedding, attention, mlp, norms, head, over all layers."""
        ...

    def bytes_per_rank(self) -> dict[str, float]:
        """Weights and optimizer bytes of the fullest rank, under "model" and "optimizer"."""
        ...
