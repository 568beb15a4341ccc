"""The colors of every picture: parts of the step, parts of memory, passes of the pipeline, verdicts.

Hues after Okabe and Ito 2008, distinguishable by color-blind readers. Neighbors in a bar differ in lightness too, and bars have
edges, so that a picture reads in grayscale.
"""

from __future__ import annotations

TIME = {
    "gemm": "#0b5fa5",
    "attention": "#7cc4ee",
    "memory_bound": "#3f7f93",
    "launch": "#b9c0c9",
    "recompute": "#6a3d9a",
    "tp_comm": "#e08a3c",
    "cp_comm": "#a6761d",
    "ep_comm": "#f0d060",
    "dp_comm": "#0a7f5a",
    "pp_comm": "#d69ac0",
    "embedding_comm": "#7fcdb0",
    "host_comm": "#c2b280",
    "bubble": "#d5d8dc",
    "optimizer": "#5c6470",
    "stragglers": "#b15928",
}
"""By key of `Time.parts_s`."""
MEMORY = {
    "params_bytes": "#0b5fa5",
    "gradients_bytes": "#7cc4ee",
    "optimizer_bytes": "#5c6470",
    "activations_bytes": "#e08a3c",
    "buffers_bytes": "#f3e2b3",
    "transient_bytes": "#b15928",
    "fragmentation": "#d5d8dc",
    "overhead": "#6a3d9a",
}
"""By key of `StageMemory`; memory reserved beyond what is allocated; memory outside of the allocator."""
PASSES = {"F": "#7cc4ee", "B": "#0b5fa5", "I": "#3c86bd", "W": "#6a3d9a"}
"""Forward, backward, and the two halves of a split backward: gradients of the inputs, of the weights."""
VERDICTS = {"fits": "#0a7f5a", "tight": "#8a5a00", "does_not_fit": "#b3261e"}
OTHER = "#8c8c8c"
"""Color of everything without its own."""


def time_color(part: str) -> str:
    """The color of a part of the step."""
    return TIME.get(part, OTHER)


def time_class(part: str) -> str:
    """The CSS class of a part of the step."""
    return f"t-{part}" if part in TIME else "t-other"


def css() -> str:
    """CSS classes with these colors: t-gemm, m-params_bytes, p-F, v-fits."""
    groups = (("t", TIME), ("m", MEMORY), ("p", PASSES), ("v", VERDICTS))
    lines = [
        f".{letter}-{name}{{fill:{color};--own:{color}}}" for letter, group in groups for name, color in group.items()
    ]
    return "\n".join(lines)
