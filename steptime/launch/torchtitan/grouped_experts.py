"""torchtitan's converters of grouped experts: the low precision in which the products of routed experts run.

Sources: pytorch/torchtitan@b5bcd76c torchtitan/components/quantization/mx.py and float8.py (MXFP8GroupedExpertsConverter,
Float8GroupedExpertsConverter); @v0.2.2 of the same and torchtitan/config/job_config.py (TOML: quantize.grouped_mm.mx and
quantize.grouped_mm.float8, which convert the modules that `fqns` names).
"""

from __future__ import annotations

from typing import Any

from steptime.launch.job_keys import JobKeys

CLASSES = {"Float8GroupedExpertsConverter": "float8", "MXFP8GroupedExpertsConverter": "mx"}
"""Converter of a config function -> its kind."""
TOML_NAMES = {"quantize.grouped_mm.float8": "float8", "quantize.grouped_mm.mx": "mx"}
"""The same by their names in `model.converters`, which are also their sections."""
RECIPES = {
    "mxfp8": "mxfp8_torchao", "mxfp8_rceil": "mxfp8_torchao", "mxfp8_wgrad_with_hp": "mxfp8_torchao_wgrad_hp",
    "mxfp8_rceil_wgrad_with_hp": "mxfp8_torchao_wgrad_hp",
}  # fmt: skip
"""Recipe of the converter to MXFP8 -> the plan's."""
_OWN, _KEY = "quantize.experts", "performance.moe.grouped_precision"


def grouped_of(keys: JobKeys, *, experts: bool) -> dict[str, Any]:
    """`grouped_precision` in a plan's section of experts; nothing without a converter that finds any."""
    sections = [name for name in keys.words("model.converters") if name in TOML_NAMES]
    name = str(keys.get(f"{_OWN}.converter") or "")
    if name in CLASSES:
        return _said(keys, CLASSES[name], _OWN, f"{_OWN}.converter", experts=experts)
    if not sections:
        return {}
    found = {}
    for section in sections:
        if keys.words(f"{section}.fqns"):
            found = _said(keys, TOML_NAMES[section], section, f"{section}.fqns", experts=experts)
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
    word = str(keys.get(recipe) or "mxfp8")
    if keys.get(recipe) is not None:
        keys.becomes(recipe, _KEY)
    if word not in RECIPES:
        keys.approximate(recipe, "a recipe that is not known: counted as mxfp8")
    if keys.get(pads) is not None and keys.number(pads) != 128:
        keys.approximate(pads, "rows of experts are counted as padded to a multiple of 128")
    return {"grouped_precision": RECIPES.get(word, "mxfp8_torchao")}
