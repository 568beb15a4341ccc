"""Recomputation settings of a job in one normal form."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from steptime.software.performance import Performance, Recompute
from steptime.software.settings import Module

SELECTIVE: frozenset[Module] = frozenset[Module](("core_attn",))
"""Megatron's default recompute_modules (megatron/core/transformer/transformer_config.py, __post_init__)."""
SUPER_SELECTIVE: frozenset[Module] = frozenset[Module](("core_attn", "layernorm", "act", "dropout"))


MODULES_OF: dict[str, frozenset[Module]] = {
    "selective": SELECTIVE,
    "super-selective": SUPER_SELECTIVE,
    "per-op": frozenset[Module](("per_op",)),
}
"""Modules by the word of activation_checkpointing_type."""


def words(family: str) -> tuple[str, ...]:
    """The words of activation_checkpointing_type that a framework's own settings can state.

    Megatron-Core recomputes no activation of a dense MLP and no dropout alone (megatron-core 0.16.1
    transformer/transformer_config.py, allowed_modules).
    """
    return (
        ("none", "selective", "full") if family == "megatron-core" else ("none", "selective", "super-selective", "full")
    )


class Recomputation(NamedTuple):
    """Recomputation in normal form: the meaning of both ways to state it.

    `selective` recomputes `modules` in every layer. `full` recomputes whole layers: "uniform" checkpoints the input of every
    group of `n_layers` layers; "block" checkpoints the first `n_layers` layers one by one and keeps the others; "every"
    checkpoints each `n_layers`-th. `n_layers` has one entry per model chunk, in the order of `Job.layers_per_chunk`.
    Source: megatron/core/transformer/transformer_block.py, TransformerBlock._checkpointed_forward.
    """

    granularity: Literal["none", "selective", "full"] = "none"
    method: Literal["uniform", "block", "every"] | None = None
    n_layers: tuple[int, ...] = ()
    modules: frozenset[Any] = frozenset()
    """What `selective` recomputes: names of modules, or one number, torch.compile's memory budget."""

    @property
    def mtp_modules(self) -> frozenset[Any]:
        """What it recomputes in multi-token prediction; whole depths only one by one.

        megatron/core/transformer/multi_token_prediction.py, _checkpointed_forward: `block` is skipped.
        """
        return frozenset(("mtp",)) if self.granularity == "full" and self.method == "uniform" else self.modules

    def to_config(self) -> dict[str, Any]:
        """The keys of the performance section that state this."""
        if self.granularity == "none":
            return {"activation_checkpointing_type": "none"}
        if budget := [kept for kept in self.modules if isinstance(kept, float)]:
            return {"recompute": {"granularity": "selective", "memory_budget": budget[0]}}
        if self.granularity == "selective":
            return {"recompute": {"granularity": "selective", "modules": sorted(map(str, self.modules))}}
        counts: int | list[int] = self.n_layers[0] if len(set(self.n_layers)) == 1 else list(self.n_layers)
        return {"recompute": {"granularity": "full", "method": self.method, "n_layers": counts}}


def resolve_recompute(performance: Performance, pp: int, vpp: int) -> Recomputation:
    """The normal form of `activation_checkpointing_type` and `recompute`; without either, no recomputation.

    One number of layers holds for every chunk; pp numbers hold for the chunks of each stage.
    """
    said, word = performance.recompute, performance.activation_checkpointing_type
    if said is None:
        if word is None or word == "none":
            return Recomputation()
        if word != "full":
            return Recomputation("selective", modules=MODULES_OF[word])
        said = Recompute(granularity="full")
    if said.memory_budget is not None:
        return Recomputation("selective", modules=frozenset((float(said.memory_budget),)))
    if said.granularity == "selective":
        return Recomputation("selective", modules=SELECTIVE if said.modules is None else frozenset(said.modules))
    counts = said.n_layers if isinstance(said.n_layers, list) else [1 if said.n_layers is None else said.n_layers]
    return Recomputation("full", said.method or "uniform", tuple(counts[i % len(counts)] for i in range(pp * vpp)))
