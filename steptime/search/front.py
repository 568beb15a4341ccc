"""The Pareto front of the screened layouts: which none beats in both the objective and memory, and which of them are shown."""

from __future__ import annotations

from typing import Any

SHOWN = 12
"""Number of corners of the Pareto front that are estimated."""
REACH = 2.0
"""How much slower than the best they may be."""


def corners(value: Any, needed: Any) -> Any:
    """Places of the layouts of the whole front, best first, up to `REACH` times the best value."""
    import numpy as np

    order = np.lexsort((needed, value))
    if not order.size:
        return order
    least = np.minimum.accumulate(needed[order])
    found = order[np.concatenate([[True], needed[order][1:] < least[:-1]])]
    return found[value[found] <= REACH * value[order[0]]]


def shown(found: Any) -> Any:
    """At most as many of the corners as people read: the first, the last, and every n-th between them."""
    import numpy as np

    return found[np.linspace(0, found.size - 1, SHOWN).round().astype(int)] if found.size > SHOWN else found
