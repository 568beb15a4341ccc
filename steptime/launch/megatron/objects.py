"""Megatron-Core's config objects, as Megatron-Bridge and NeMo write them, as settings by Megatron's argument names.

Sources: megatron-core 0.16.1 transformer/transformer_config.py, model_parallel_config.py, distributed/
distributed_data_parallel_config.py, optimizer/optimizer_config.py; NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/
mixed_precision.py and comm_overlap.py, whose sections are put over the model's, the optimizer's and ddp's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.launch.keys import KeyTable, read_keys
from steptime.launch.megatron.flags import plain
from steptime.launch.settings import Settings

_BACKENDS = ("", "flash", "fused", "unfused", "local", "auto")
"""AttnBackend's numbers (megatron/core/enums.py)."""


def object_settings(
    said: Mapping[str, Any],
    table: KeyTable,
    source: str,
    sets: Mapping[str, Any] | None,
    *,
    defaults: Mapping[str, Any] | None = None,
    dump: bool = False,
) -> Settings:
    """Fields by their dotted names as settings; `defaults` go over the table's own, `dump` as in `read_keys`.

    Raises:
        ConfigError: keys that the framework does not have, one line each.
    """
    given = [item._replace(value=plain(item.value)) for item in read_keys(said, table, source, dump=dump)]
    s = Settings(source, table, given, defaults=defaults, sets=sets)
    groups = "num_query_groups"  # the parser's default is no field's
    s.put("group_query_attention", (groups in s.values or groups in s.defaults) and s.get(groups) is not None)
    if s.on("optimizer.use_distributed_optimizer"):
        s.put("use_distributed_optimizer", value=True, by="optimizer.use_distributed_optimizer")
    backend = re.fullmatch(r".*\((\d)\)", str(s.get("attention_backend")))
    if backend and int(backend[1]) < len(_BACKENDS):
        s.put("attention_backend", _BACKENDS[int(backend[1])])
    return s
