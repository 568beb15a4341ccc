"""Adapters over frozen weights (LoRA, QLoRA) as trainers name them, as the `model.lora` of a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from steptime.launch.job_keys import text_of
from steptime.launch.keys import GivenKey, KeyTable, table_file
from steptime.launch.trainers.figures import Figures
from steptime.model.lora import EVERY, MLP, QKV

PARTLY = "partial training by a method other than LoRA: every weight is counted as trained"
DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "float32": "fp32", "fp32": "fp32", "float16": "fp16", "fp16": "fp16"}
"""Words for the dtype of loaded weights."""
_QUANTIZED = re.compile(r"[-_](?:aqlm|gptq|awq|hqq|int[48]|[48]bit)(?=[-_.]|$)", re.IGNORECASE)
"""Pattern of the names of repositories with quantized weights."""


@cache
def _targets() -> dict[str, list[str]]:
    """Projections by their names in models and trainers."""
    named = {name: words.split() for words, names in table_file("adapters")["names"].items() for name in names}
    return {name: [name] for name in EVERY} | named


def words_of(said: Any) -> list[str]:
    """Names of modules: a list, or one string of them; of a path with a star (*.self_attn.q_proj) its end."""
    names = said if isinstance(said, list) else re.split(r"[,\s]+", str(said).strip("[]() "))
    plain = [str(name).strip("'\" ") for name in names]
    return [name.rpartition(".")[2] if "*." in name else name for name in plain if name]


def lora_section(said: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The section, and names of modules that are no projection of a layer.

    `said`: rank, targets and dropout as a file has them, None where it has none; `usual`: the trainer's defaults.

    >>> lora_section({"rank": 16, "targets": "q_proj,lm_head"}, {"rank": 8, "dropout": 0.0})
    ({'rank': 16, 'targets': ['q_proj'], 'dropout': 0.0}, ['lm_head'])
    """
    figures = {key: usual.get(key) if said.get(key) is None else said[key] for key in ("rank", "targets", "dropout")}
    names = words_of(figures["targets"] or "all")
    if {name.lower() for name in names} & {"q_proj", "v_proj"}:
        # a list for several families: a model with separate projections has no fused one
        # (peft tuners_utils.py, check_target_module_exists)
        names = [name for name in names if _targets().get(name.lower()) != [*QKV]]
    unknown = [name for name in names if name.lower() not in _targets()]
    targets = [target for target in EVERY if any(target in _targets().get(name.lower(), ()) for name in names)]
    return {"rank": figures["rank"], "targets": targets, "dropout": figures["dropout"] or 0.0}, unknown


def switch_of(key: str, value: Any, table: KeyTable) -> str:
    """The key of the table for an option of a program of one's own that names a method of fine-tuning (`own_methods`).

    >>> from steptime.launch.keys import load_table
    >>> [switch_of("tuning_mode", word, load_table("transformers")) for word in ("lora", "full")]
    ['use_peft', 'tuning_mode']
    """
    names = table.raw.get("own_methods")
    named = (
        names
        and str(value).lower() in table_file("adapters")["methods"]
        and re.fullmatch(names, key.rpartition(".")[2])
    )
    return "use_peft" if named else key


def switched(given: list[GivenKey], table: KeyTable) -> list[GivenKey]:
    """The keys, where one names such a method with the key of the table; a switch that it has besides stays."""
    if any(item.key == "use_peft" for item in given):
        return given
    return [item._replace(key=switch_of(item.key, item.value, table)) for item in given]


def _tell_defaults(found: Figures, said: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Note what is the trainer's default; a custom program has its own, and a launcher none: they are asked for."""
    asked = found.keys.left_open
    unsaid = [name for name in ("rank", "targets") if said[name] is None and f"model.lora.{name}" not in asked]
    framework = found.keys.table.framework
    words = table_file("adapters")
    own = next((item.name for item in found.keys.given if item.name in words["own_switches"]), "")
    if found.keys.table.raw.get("own_methods") and str(found.get(found.switch())).lower() in words["methods"]:
        own = found.keys.names.get("use_peft", "the method of its program")
    if unsaid and (own or not usual.keys() >= {*unsaid}):
        why_not = f"{own} is not an argument of {framework}" if own else f"{framework} has no default"
        for name in unsaid:
            example = "N" if name == "rank" else "[q_proj,v_proj]"
            found.keys.ask(f"model.lora.{name}", f"{name} of the adapters unknown ({why_not})", example)
    elif unsaid:
        values = ", ".join(text_of(usual[name]) for name in unsaid)
        whose = f"the default of {framework}"
        found.keys.notes.append(f"{' and '.join(unsaid)} of the adapters not set, {values} assumed: {whose}")


def _is_lora(found: Figures, method: str) -> bool:
    """Whether a method is LoRA, or has its step; another one is left out."""
    key = found.figures["@adapter"]
    if why := table_file("adapters")["as_lora"].get(method):
        found.keys.notes.append(f"approximated: {key} {method}: {why}")
    elif method not in {"lora", "qlora", "true"}:
        found.keys.leave_out(key, PARTLY)
        return False
    return True


def put_adapters(found: Figures, config: dict[str, Any]) -> None:
    """Put the adapters of a job into its config, and what they are stored in; what is not LoRA is left out with its reason.

    Source of the dtypes: peft tuners_utils.py, cast_adapter_dtype (adapters in fp32, whatever the weights are in).
    """
    keys, table = found.keys, found.keys.table.raw
    bits = str(found.get("@base_bits")).lower()
    if found.on("@base_bits") and (bits not in {"4", "true"} or not found.adapted()):
        keys.leave_out(found.figures["@base_bits"], "quantized frozen weights")
    if _QUANTIZED.search(name := str(found.get("@model"))) and not name.endswith("-bnb-4bit"):
        keys.leave_out(found.figures["@model"], "quantized frozen weights")
    if not found.adapted():
        return
    by = found.switch()
    word = str(found.get(by)).lower()
    if by == "@adapter" and not _is_lora(found, word):
        return
    usual = table.get("adapters") or {}
    said = {name: found.get(f"@adapter_{name}") for name in ("rank", "targets", "dropout")}
    if each := table.get("adapter_switches"):
        said["targets"] = [target for key, target in each.items() if keys.on(key)]
    if found.on("@adapter_everywhere"):
        said["targets"] = "all"
    elif found.on("@adapter_mlp"):
        said["targets"] = [*words_of(said["targets"] or usual.get("targets") or ""), *MLP]
    section, unknown = lora_section(said, usual)
    _tell_defaults(found, said, usual)
    section = {name: value for name, value in section.items() if f"model.lora.{name}" not in keys.left_open}
    if unknown:
        keys.leave_out(found.figures["@adapter_targets"], f"adapters of {', '.join(unknown)}")
    loaded = DTYPES.get(str(found.get("@weights")).lower().removeprefix("torch."), found.frozen_in(usual))
    packed = word == "qlora" or re.search(r"\.qlora_|-bnb-4bit$", str(found.get("@model")))
    if packed or (found.on("@base_bits") and bits in {"4", "true"}):
        section["base_dtype"] = "nf4"
    elif loaded and not found.on("@deepspeed"):
        section["base_dtype"] = loaded
    if (
        config["performance"]["software"] == table["software"]["default"] != table["software"].get("deepspeed")
        and not table.get("pure")
        and not found.on("@pure_bf16")
    ):
        config["performance"] |= dict.fromkeys(("param_dtype", "main_grad_dtype", "moment_dtype"), "fp32")
    model = config["model"]
    config["model"] = ({"preset": model} if isinstance(model, str) else model) | {"lora": section}
