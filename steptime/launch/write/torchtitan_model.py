"""The flavor of torchtitan that a model is, from the reader's own table."""

from __future__ import annotations

from functools import cache
from typing import Any

from steptime.base.config import build
from steptime.job.edit import read_model
from steptime.launch.torchtitan.flavors import NO_FAMILIES, models
from steptime.model.model import Model

NOT_IN_LAST = frozenset({"llama2"})
"""Models of the table that v0.2.2 does not have (torchtitan/models/__init__.py, _supported_models)."""
NONE = "give name and flavor: the plan's model is none of torchtitan's"
"""A name that no model has: get_train_spec stops at it (torchtitan/protocols/train_spec.py@v0.2.2)."""
_ROUTER = (
    "score_function", "pre_softmax", "expert_bias", "node_limit", "n_groups", "load_balancing", "z_loss",
    "pad_to_capacity", "capacity_factor", "imbalance_factor",
)  # fmt: skip
"""Fields of experts that choose among them: no size of a weight."""


def flavor(model: Model) -> dict[str, str]:
    """The keys of the flavor that is a model, else of one of the same sizes whose router differs; empty where there is none."""
    for kept in (_whole, _sizes):
        ours = kept(model)
        for (family, name), known in _flavors().items():
            if kept(known) == ours:
                return {"model.name": family, "model.flavor": name}
    return {}


def other_router(model: Model) -> dict[str, Any]:
    """Dotted key of the plan -> value of what a model's router has otherwise than that of its flavor."""
    named = flavor(model)
    if not named or model.moe is None:
        return {}
    ours, known = (one.model_dump()["moe"] for one in (model, _flavors()[named["model.name"], named["model.flavor"]]))
    return {f"model.moe.{key}": ours[key] for key in _ROUTER if ours[key] != known[key]}


@cache
def _flavors() -> dict[tuple[str, str], Model]:
    """All flavors that job configs in TOML can name."""
    table = models()
    return {
        (family, name): build(Model, read_model(dict(section)))
        for family in table
        if family not in NO_FAMILIES
        for name, section in table[family].items()
        if name not in table["of_functions"].get(family, [])
    }


def _whole(model: Model) -> dict[str, Any]:
    return model.model_dump(exclude={"name", "source"})


def _sizes(model: Model) -> dict[str, Any]:
    found = _whole(model)
    if found.get("moe"):
        found["moe"] = {key: value for key, value in found["moe"].items() if key not in _ROUTER}
    return found
