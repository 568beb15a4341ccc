"""The recomputations that a search tries: their settings in a plan, and their normal form for any pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from steptime.base.config import ConfigError, build
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.software.performance import Performance
from steptime.software.recomputation import SELECTIVE, SUPER_SELECTIVE, Recomputation, resolve_recompute, words

WORD, MAPPING = "performance.activation_checkpointing_type", "performance.recompute"
MEGATRON_MODULES = (("layernorm",), ("mlp",), ("layernorm", "mlp"))
"""Sets of modules besides the words: norms, the MLP, and both."""
EXPERT_MODULES = (("moe_act",), ("layernorm", "moe_act"))
"""Additional sets for mixtures of experts."""
LATENT_MODULES = (("mla_up_proj",), ("layernorm", "mla_up_proj", "moe_act"))
"""Additional sets for experts with latent attention."""
PARTS = 8
"""Numbers of parts into which the layers of a chunk are divided for partial full recomputation."""


@dataclass(frozen=True, eq=False)
class RecomputeChoice:
    """One recomputation; there is one object of each."""

    setting: tuple[str, Any]
    """The key that sets it, and its value."""
    said: Performance

    @cached_property
    def modules(self) -> frozenset[Any]:
        """Modules of selective recomputation."""
        return resolve_recompute(self.said, 1, 1).modules

    def form(self, chunks: int) -> Recomputation:
        """Its normal form in a pipeline of `chunks` chunks."""
        return resolve_recompute(self.said, 1, chunks)


def recompute(key: str, value: Any) -> RecomputeChoice:
    """The recomputation that a key and its value say."""
    known = (key, repr(value))
    if known not in _MADE:
        _MADE[known] = RecomputeChoice((key, value), build(Performance, {key.partition(".")[2]: value}))
    return _MADE[known]


_MADE: dict[tuple[str, str], RecomputeChoice] = {}


def label(form: Recomputation) -> str:
    """A recomputation in a word or two.

    >>> label(Recomputation("full", "block", (2, 2))), label(Recomputation())
    ('2 layers', 'none')
    """
    if form.granularity == "selective":
        known = {SELECTIVE: "selective", SUPER_SELECTIVE: "super-selective"}
        return known.get(form.modules, "+".join(sorted(form.modules)))
    if form.granularity == "none" or (set(form.n_layers) == {1} and form.method == "uniform"):
        return form.granularity
    n = "/".join(str(n) for n in dict.fromkeys(form.n_layers))
    return f"{n} layer{'s' * (n != '1')}" if form.method == "block" else f"full by {n}"


def kind(form: Recomputation) -> str:
    """Its label, with all numbers of whole layers per chunk as one kind."""
    return "some layers" if form.method == "block" else label(form)


def usual(plan: Job) -> list[RecomputeChoice]:
    """Those that are tried in any pipeline: the words, sets of modules, and the set that the plan says.

    Without a dense layer the module `mlp` names nothing.
    """
    said = plan.performance.activation_checkpointing_type
    found = [recompute(WORD, word) for word in dict.fromkeys([*words(plan.software.family), *([said] if said else [])])]
    if plan.software.family == "megatron-core":
        dense = any(op.role == "mlp" for part in Assembly(plan).kinds for op in part.ops)
        sets: list[tuple[str, ...]] = [modules for modules in MEGATRON_MODULES if dense or "mlp" not in modules]
        sets += EXPERT_MODULES if plan.model.moe else ()
        sets += LATENT_MODULES if plan.model.moe and plan.model.attention.kind == "mla" else ()
        found += [recompute(MAPPING, {"granularity": "selective", "modules": list(modules)}) for modules in sets]
    own = plan.performance.recompute
    if own is not None and plan.recompute.granularity == "selective":
        mine = recompute(MAPPING, own.model_dump(exclude_unset=True))
        found += [mine] if mine.modules not in {one.modules for one in found} else []
    return found


def of_layers(layers: int) -> list[RecomputeChoice]:
    """Whole layers, of parts of a chunk that holds up to so many."""
    counts = sorted({-(-layers * part // PARTS) for part in range(1, PARTS)} - {layers})
    return [recompute(MAPPING, {"granularity": "full", "method": "block", "n_layers": n}) for n in counts]


def allowed(job: Job, found: Sequence[RecomputeChoice], known: dict[tuple[str, str], bool]) -> list[RecomputeChoice]:
    """Those that the framework and the precision support."""

    def runs(one: RecomputeChoice) -> bool:
        kind = (one.setting[0], str(one.said.recompute.modules if one.said.recompute else one.setting[1]))
        if kind not in known:
            try:
                job.replace(**dict([one.setting]))
                known[kind] = True
            except ConfigError:
                known[kind] = False
        return known[kind]

    return [one for one in found if runs(one)]


def of_plan(changes: Mapping[str, Sequence[Any]]) -> list[RecomputeChoice]:
    """Those that the caller names, by either key."""
    return [recompute(key, value) for key in (WORD, MAPPING) for value in changes.get(key, ())]
