"""Benchmarks of Megatron-Bridge 0.2, which its launchers choose by model, size, accelerator and precision.

Source: NVIDIA-NeMo/Megatron-Bridge v0.2.2 scripts/performance/utils/helpers.py, get_model_recipe_with_user_overrides: settings
of the benchmark's function, then the options, then a batch in proportion to the devices, then words `a.b=c`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from steptime.base.config import ConfigError, closest
from steptime.job.edit import put
from steptime.launch.keys import table_file
from steptime.launch.python.config_values import CLASS

WORKLOADS = "megatron_bridge_workloads"
"""The table of the benchmarks."""
_ONLY_ON = ("moe_a2a_overlap", "use_megatron_fsdp", "use_tokendrop")


class Chosen(NamedTuple):
    """A recipe that a script starts."""

    name: str
    tree: dict[str, Any]
    """Its config."""
    notes: list[str]
    devices: int = 0
    """Those of a benchmark whose batch is in proportion to the replicas; 0: of another recipe, or a benchmark for as many."""


def workload(path: str, said: dict[str, Any], devices: int | None) -> Chosen:
    """A benchmark by its options; what it takes is removed from the options.

    Raises:
        ConfigError: there is no such benchmark, or it is one of 0.1.
    """
    table = table_file(WORKLOADS)
    for short, name in table["selectors"].items():
        if short in said:
            said[name] = said.pop(short)
    for name in table["without_cost"]:
        said.pop(name, None)
    chosen = [str(said.pop(key, "")).lower() for key in ("model_name", "model_size", "gpu")]
    precision = str(said.pop("compute_dtype", "bf16")).lower()
    name = "_".join([*chosen, precision])
    if re.search(r":25\.0\d", str(said.get("container_image"))) or {"fp8_recipe", "config_file"} & said.keys():
        what = "benchmarks of Megatron-Bridge 0.1 are not known"
        raise ConfigError(f"{path}: {what}; give the log that prints the job's config")
    task = said.pop("task", "pretrain")
    if name not in table["workloads"] or task != "pretrain":
        what = f"{path}: {task} {name} is not a known benchmark of Megatron-Bridge {table['release']}"
        meant = closest(name, table["workloads"])
        hint = f"; did you mean {meant}? else" if meant else ";"
        raise ConfigError(f"{what}{hint} give the log that prints the job's config")
    said.pop("num_gpus", None)
    note = f"settings of the benchmark {name} as in Megatron-Bridge {table['release']}, scripts/performance"
    return Chosen(name, _config(name, precision, said, devices), [note])


def _config(name: str, precision: str, said: dict[str, Any], devices: int | None) -> dict[str, Any]:
    table = table_file(WORKLOADS)
    model = next(model for model in table["models"] if name.startswith(f"{model}_"))
    own = {table["names"][key]: value for key, value in table["workloads"][name].items()}
    options = {key: said.pop(key) for key in table["sets"] if key in said}
    # -et alone is none
    options = {key: value for key, value in options.items() if value is not True or key in _ONLY_ON}
    usual = own.pop("num_gpus")
    fields = dict(table["all"])
    for like in table["models"][model]["like"]:
        fields |= table["like"][like]
    fields |= _set_by(own)
    for pattern, after in table["after"].items():
        fields |= after if re.search(pattern, name) else {}
    fields |= _set_by(options)
    axes = ("tensor_model", "pipeline_model", "context", "virtual_pipeline_model")
    tp, pp, cp, vpp = (whole(fields.get(f"model.{axis}_parallel_size")) or 1 for axis in axes)
    fields["model.sequence_parallel"] = tp > 1
    if devices is not None and "global_batch_size" not in options:
        fields["train.global_batch_size"] = int(fields["train.global_batch_size"] / usual * devices)
    sharded = (devices or usual) // (tp * pp * cp) > 1
    fields["optimizer.overlap_param_gather_with_optimizer_step"] = sharded and pp > 1 and vpp > 1
    tree: dict[str, Any] = {CLASS: "ConfigContainer"}
    tree["model"] = {CLASS: "AutoBridge.from_hf_pretrained", "_args_": [table["models"][model]["hf"]]}
    tree["mixed_precision"] = {CLASS: table["precisions"][precision]}
    for key, value in fields.items():
        put(tree, key, value)
    return tree


def _set_by(options: dict[str, Any]) -> dict[str, Any]:
    """What options set; a switch that is off sets nothing."""
    fields: dict[str, Any] = {}
    for option, given in options.items():
        if option in _ONLY_ON and str(given).lower() not in {"true", "1", "t", "yes", "y"}:
            continue
        listed = option in {"cuda_graph_scope", "recompute_modules"} and isinstance(given, str)
        value = given.split(",") if listed else given
        fields |= {key: value if sets == "=" else sets for key, sets in table_file(WORKLOADS)["sets"][option].items()}
    return fields


def whole(value: Any) -> int | None:
    """A whole number as an option or a table has it; None of anything else."""
    return int(str(value)) if re.fullmatch(r"\d{1,15}", str(value)) else None
