"""torchtitan's model converters as a precision: torchao's float8, MX and NVFP4 projections; and its overrides of modules.

Sources: pytorch/torchtitan@01db32e9 torchtitan/components/quantization/float8.py, mx.py (TOML: float8 without a recipe name
scales by tensor), @026c75f2 of the same (converters of a model's spec: rowwise unless said), before @6348d93d (a config's own
`model_converters`: by tensor, as in TOML); @b5bcd76c nvfp4.py (config functions alone).
"""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import load_table
from steptime.launch.python.config_functions import Tree
from steptime.launch.python.config_values import CLASS

_FLOAT8, _MX, _FP4 = "quantize.linear.float8", "quantize.linear.mx", "quantize.linear.nvfp4"
_BF16 = {"output", "lm_head", "router.gate", "auto_filter_small_kn"}
"""Modules whose GEMMs are counted in bf16, or that are excluded by their size."""


def put_converters(tree: Tree, given: list[Any], *, of_spec: bool) -> None:
    """Put the converters of a config function into a tree as in a TOML file: their names, and their own sections.

    `of_spec`: they are those of the model's spec, whose float8 scales by row where no recipe is named.
    """
    known, table = [item for item in given if isinstance(item, dict)], load_table("torchtitan").raw["converters"]
    of_experts = [item for item in known if _name(item) in table["of_experts"]]
    if of_experts:
        own = {key: value for key, value in of_experts[0].items() if key in {"recipe_name", "pad_multiple"}}
        tree["quantize.experts"] = {"converter": _name(of_experts[0])} | own
        known = [item for item in known if item not in of_experts]
        given = [item for item in given if item not in of_experts]
    names = [_name(item) for item in known]
    if given:
        others = (str(item) for item in given if not isinstance(item, dict))
        tree.setdefault("model", {})["converters"] = [*names, *others]
    for name, item in zip(names, known, strict=True):
        if section := table["sections"].get(name):
            usual = {} if section == _FLOAT8 and not of_spec else {"recipe_name": table["usual"][section]}
            tree[section] = usual | _with_tail(item)


def _name(item: Tree) -> str:
    """The class of a converter."""
    return str(item.get(CLASS, "a converter")).removesuffix(".Config")


def _with_tail(item: Tree) -> Tree:
    """A converter with the share of the last layers that stay in bf16, where a function of it names the others.

    pytorch/torchtitan@b5bcd76c torchtitan/components/quantization/nvfp4.py, nvfp4_bf16_tail_fqns(num_layers, fraction).
    """
    names = item.get("fqns")
    if not isinstance(names, dict) or names.get(CLASS) != "nvfp4_bf16_tail_fqns":
        return item
    given = names.get("bf16_tail_fraction", [*names.get("_args_", []), None, None][1])
    return {key: value for key, value in item.items() if key != "fqns"} | {"bf16_tail_fraction": given}


def precision_of(keys: JobKeys, n_layers: int, *, fsdp: bool, splits_data: bool) -> dict[str, Any]:
    """`precision`, and `fp8_params` where FSDP gathers weights in float8; nothing without a converter that is modeled.

    `splits_data`: whether shards hold different data. Where context parallelism alone shards, weights are gathered unconverted
    (torchtitan v0.2.0, torchtitan/components/quantization/float8.py, parallel_dims.dp_shard_enabled).
    """
    key, table = "model.converters", keys.table.raw["converters"]
    named = [name for name in keys.words(key) if name not in table["experts_in_toml"]]
    switch = "float8.enable_float8_linear"
    if (said := str(keys.get(switch) or "false").lower()) in {"true", "dynamic"}:
        named = [*named, _FLOAT8]
    elif said != "false":
        keys.leave_out(switch, "older scaling; projections are counted unconverted")
    known = {table["sections"].get(name, name) for name in named}
    if _FLOAT8 not in known:
        keys.without_effect(f"{_FLOAT8}.emulate", "no converter of float8")
    if not named or len(known) > 1 or not known <= {*table["usual"]}:
        return {}
    section = known.pop()
    if not fsdp:
        by = key if keys.words(key) else switch
        keys.leave_out(by, "projections in another precision without FSDP; counted unconverted")
        return {}
    keys.becomes(key, "performance.precision")
    for other in {*table["usual"]} - {section}:
        keys.without_effect(f"{other}.recipe_name", "belongs to another converter")
    found = {"precision": keys.word(f"{section}.recipe_name")}
    gathers = f"{section}.enable_fsdp_float8_all_gather"
    if section == _FLOAT8 and keys.on(gathers):
        if found["precision"] == "fp8_tensorwise" and splits_data:
            return found | {"fp8_params": True}
        scaled = "weights scaled by row" if splits_data else "weights that context parallelism alone shards"
        keys.without_effect(gathers, f"{scaled} are gathered unconverted")
    if section == _FP4 and (tail := keys.number(f"{_FP4}.bf16_tail_fraction")):
        found["bf16_layers_at_end"] = ceil(n_layers * tail)
    names = f"{section}.fqns" if section == _FP4 else f"{section}.filter_fqns"
    if set(keys.words(names)) - _BF16:
        keys.approximate(names, "counted with all projections of the layers in the recipe")
    return found


def fused_by_override(keys: JobKeys) -> dict[str, Any]:
    """SiLU and product in one kernel where the job overrides the modules (torchtitan/overrides/fused_swiglu.py@b5bcd76c)."""
    named = keys.words("override.imports")
    fused = [word for word in named if re.search(r"fused_swiglu\.fused_(swiglu|grouped_experts)$", word)]
    if len(fused) < len(named):
        other = "modules in place of torchtitan's own: counted as its own, but fused SwiGLU"
        keys.approximate("override.imports", other)
    return {"activation_impl": "fused"} if fused else {}
