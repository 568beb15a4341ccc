"""Megatron-Core's config objects, as written by Megatron-Bridge and NeMo, under Megatron's argument names.

Sources: megatron-core 0.16.1 transformer/transformer_config.py, model_parallel_config.py, distributed/
distributed_data_parallel_config.py, optimizer/optimizer_config.py; NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/
mixed_precision.py and comm_overlap.py, whose sections are put over the model's, the optimizer's and ddp's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import KeyTable, read_keys
from steptime.launch.megatron.releases import plain
from steptime.launch.reading import Sets

_BACKENDS = ("", "flash", "fused", "unfused", "local", "auto")
"""AttnBackend's numbers (megatron/core/enums.py)."""


def object_keys(
    said: Mapping[str, Any],
    table: KeyTable,
    source: str,
    sets: Sets,
    *,
    defaults: Mapping[str, Any] | None = None,
    defaults_of: str = "",
) -> JobKeys:
    """Fields by their dotted names as settings; `defaults` (with their owner) override the table's own."""
    given = [item._replace(value=plain(item.value)) for item in read_keys(said, table)]
    keys = JobKeys(source, table, given, defaults=defaults, defaults_of=defaults_of, sets=sets)
    groups = "num_query_groups"  # the parser's default does not apply to a field
    grouped = groups in keys.values or groups in keys.defaults
    keys.put("group_query_attention", grouped and keys.get(groups) is not None)
    if keys.on("optimizer.use_distributed_optimizer"):
        keys.put("use_distributed_optimizer", value=True, by="optimizer.use_distributed_optimizer")
    if keys.get("attention_backend") is None:  # "auto" chooses (AttnBackend's default)
        keys.put("attention_backend", "auto")
    backend = re.fullmatch(r".*\((\d)\)", str(keys.get("attention_backend")))
    if backend and int(backend[1]) < len(_BACKENDS):
        keys.put("attention_backend", _BACKENDS[int(backend[1])])
    return keys
