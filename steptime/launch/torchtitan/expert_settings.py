"""Experts of a torchtitan job: who holds them, how tokens reach them, an even load by force, and the precision of their products.

Sources: pytorch/torchtitan@b5bcd76c torchtitan/components/quantization/mx.py and float8.py (MXFP8GroupedExpertsConverter,
Float8GroupedExpertsConverter); @v0.2.2 of the same and torchtitan/config/job_config.py (TOML: quantize.grouped_mm.mx and
quantize.grouped_mm.float8, which convert the modules that `fqns` names).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.launch.job_keys import JobKeys
from steptime.launch.named_models import model_field
from steptime.model.router_choice import ranks_in_turn

_P = "parallelism."
OWN_BUFFERS = frozenset({"hybridep", "minimal_async_ep"})
"""Values of parallelism.expert_parallel_comm_backend that are libraries of dispatcher flex besides its default."""
FORCED = "debug.moe_force_load_balance"
ONE_COPY = frozenset({"deepep", "hybridep"})
"""Values of parallelism.expert_parallel_comm_backend that send a token once to each rank with any of its experts."""


def balanced(keys: JobKeys, model: Any, ep: int, library: str) -> Any:
    """The model section, with the ranks that a token goes to where its experts are taken in turn (`ranks_in_turn`).

    `library`: what sends the rows. An all-to-all sends a copy of a token for each expert, wherever they are.
    """
    if ep == 1 or not keys.on(FORCED):
        return model
    if library not in ONE_COPY:
        keys.without_effect(FORCED, "an even load is assumed; a copy of a token for each expert, wherever they are")
        return model
    section = {"preset": model} if isinstance(model, str) else model
    said: Any = model_field(model, "moe")
    moe = dict(said) if isinstance(said, Mapping) else said.model_dump(exclude_unset=True)
    ranks = ranks_in_turn(int(moe["n_experts"]), int(moe["experts_per_token"]), ep)
    return {**section, "moe": {**moe, "n_groups": ep, "node_limit": ranks}}


def experts_of(keys: JobKeys, model: Any) -> dict[str, Any]:
    """The ranks that share the experts, and how tokens reach them (torchtitan/distributed/parallel_dims.py)."""
    degree = f"{_P}expert_parallel_degree"
    ep, room = keys.count(degree), "model.non_blocking_capacity_factor"
    if model_field(model, "moe") is None:
        keys.without_effect(degree, "the model has no experts")
        return {}
    found: dict[str, Any] = {"parallelism": {"ep": ep}}
    if ep > 1:
        etp = keys.count(f"{_P}expert_tensor_parallel_degree")
        found["parallelism"] |= {"etp": etp} if etp > 1 else {}
        backend = f"{_P}expert_parallel_comm_backend"
        moe, library = {"dispatcher": keys.word(backend)}, str(keys.get(backend)).lower()
        moe |= {"flex_backend": library} if library in OWN_BUFFERS else {}
        if library == "hybridep" and keys.get(room) is not None:
            return found | {"performance": {"moe": moe | {"non_blocking_capacity_factor": keys.number(room)}}}
        found["performance"] = {"moe": moe}
    keys.without_effect(room, "only with HybridEP over several ranks")
    return found


_OWN, _KEY = "quantize.experts", "performance.moe.grouped_precision"


def grouped_of(keys: JobKeys, *, experts: bool) -> dict[str, Any]:
    """`grouped_precision` in a plan's section of experts; nothing without a converter that finds any."""
    table = keys.table.raw["converters"]
    kinds: dict[str, str] = table["experts_in_toml"]
    sections = [name for name in keys.words("model.converters") if name in kinds]
    name = str(keys.get(f"{_OWN}.converter") or "")
    if name in table["of_experts"]:
        return _said(keys, table["of_experts"][name], _OWN, f"{_OWN}.converter", experts=experts)
    if not sections:
        return {}
    found = {}
    for section in sections:
        if keys.words(f"{section}.fqns"):
            found = _said(keys, kinds[section], section, f"{section}.fqns", experts=experts)
    if set(keys.words("model.converters")) == set(sections):
        keys.becomes("model.converters", _KEY)
    return found


def _said(keys: JobKeys, kind: str, section: str, key: str, *, experts: bool) -> dict[str, Any]:
    """The precision of one converter; what it says beside it is used too."""
    if not experts:
        keys.without_effect(key, "the model has no experts")
        return {}
    keys.becomes(key, _KEY)
    if kind == "float8":
        return {"grouped_precision": "fp8_rowwise"}
    recipe, pads = f"{section}.recipe_name", f"{section}.pad_multiple"
    word, recipes = str(keys.get(recipe) or "mxfp8"), keys.table.raw["converters"]["expert_recipes"]
    if keys.get(recipe) is not None:
        keys.becomes(recipe, _KEY)
    if word not in recipes:
        keys.approximate(recipe, "a recipe that is not known: counted as mxfp8")
    if keys.get(pads) is not None and keys.number(pads) != 128:
        keys.approximate(pads, "rows of experts are counted as padded to a multiple of 128")
    return {"grouped_precision": recipes.get(word, "mxfp8_torchao")}
