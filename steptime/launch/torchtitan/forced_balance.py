"""Experts of a torchtitan job whose load is forced to be even: tokens take them in turn, and so the ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.job.edit import read_model
from steptime.launch.job_keys import JobKeys
from steptime.model.router_choice import ranks_in_turn

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
    read: Any = read_model(model)
    said: Any = read["moe"] if isinstance(read, Mapping) else read.moe
    moe = dict(said) if isinstance(said, Mapping) else said.model_dump(exclude_unset=True)
    ranks = ranks_in_turn(int(moe["n_experts"]), int(moe["experts_per_token"]), ep)
    return {**section, "moe": {**moe, "n_groups": ep, "node_limit": ranks}}
