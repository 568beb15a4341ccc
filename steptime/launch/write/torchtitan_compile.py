"""What torchtitan compiles and quantizes: its sections compile and quantize, and the model's converters.

Source: pytorch/torchtitan@v0.2.2 torchtitan/config/job_config.py, torchtitan/components/quantization/float8.py and mx.py,
torchtitan/distributed/tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.job.edit import value_at
from steptime.job.job import Job
from steptime.launch.keys import KeyTable
from steptime.launch.write.plain_keys import word_for

ASYNC_TP = "parallelism.enable_async_tensor_parallel"
_FLOAT8, _MX = "quantize.linear.float8", "quantize.linear.mx"
_GROUPED = {"mxfp8_torchao": "quantize.grouped_mm.mx", "fp8_rowwise": "quantize.grouped_mm.float8"}
"""Precision of experts -> its converter; of weight gradients in bf16 there is none in 0.2.2."""
_COMPONENTS = {"all": ["model", "loss"], "blocks": ["model"]}


def compiled(config: Mapping[str, Any]) -> list[str]:
    """The components that a resolved plan compiles."""
    if parts := _COMPONENTS.get(str(value_at(config, "performance.compile"))):
        return parts
    return ["loss"] if value_at(config, "performance.loss_impl") == "compiled" else []


def compile_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section compile, without which nothing is compiled."""
    parts = compiled(config)
    return {"compile.enable": True, "compile.components": parts} if parts else {}


def hides_tp(config: Mapping[str, Any]) -> bool:
    """Whether asynchronous tensor parallelism can be written: torchtitan stops at it unless the model is compiled."""
    return "model" in compiled(config)


def refuses_mx(job: Job) -> bool:
    """Whether the MX converter stops: "TP not yet supported with torch.compile for mxfp8" (quantization/mx.py@v0.2.2)."""
    config = job.to_config()
    return value_at(config, "performance.precision") == "mxfp8_torchao" and hides_tp(config) and job.parallelism.tp > 1


def converter_keys(job: Job, config: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """The converters of a plan's precision and of its experts', and their sections."""
    found, grouped = _of_projections(job, config, table), _GROUPED.get(job.software.moe.grouped_precision)
    if job.model.moe is None or grouped is None:
        return found
    return found | {"model.converters": [*found.get("model.converters", []), grouped], f"{grouped}.fqns": ["experts"]}


def _of_projections(job: Job, config: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """The converter of a plan's precision and its section; empty where it has none, or nothing is sharded.

    The head and the router stay in bf16, as they are counted. float8 asserts that no recipe is named where FSDP gathers in
    float8; without a name it scales by tensor.
    """
    precision = value_at(config, "performance.precision")
    kept = ["output", "router.gate"] if job.model.moe is not None else ["output"]
    if job.parallelism.fsdp is None:
        return {}
    if precision == "fp8_tensorwise":
        gathers = {f"{_FLOAT8}.enable_fsdp_float8_all_gather": True} if job.software.states.fp8_params else {}
        return {"model.converters": [_FLOAT8], f"{_FLOAT8}.filter_fqns": kept, **gathers}
    if (recipe := word_for(table, f"{_FLOAT8}.recipe_name", precision)) is not None:
        return {"model.converters": [_FLOAT8], f"{_FLOAT8}.recipe_name": recipe, f"{_FLOAT8}.filter_fqns": kept}
    if precision == "mxfp8_torchao":
        return {"model.converters": [_MX], f"{_MX}.recipe_name": "mxfp8_cublas", f"{_MX}.filter_fqns": kept}
    return {}
