"""Jobs of Megatron-LM before Megatron-Core: by which arguments they are recognized, and their defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.launch.keys import KeyTable

_OF_2021 = "Megatron-LM (2021 and 2022)"
_FORK = "Megatron-DeepSpeed (2021 and 2022)"
_BEFORE_2 = "Megatron-LM (2019 and 2020)"
OLD_ARGUMENTS = ("batch_size", "model_parallel_size")
"""Arguments that release 2.0 replaced and stops at (NVIDIA/Megatron-LM v2.0 megatron/arguments.py, parse_args)."""
_OFF_BEFORE_2 = {
    "masked_softmax_fusion": ("--scaled-upper-triang-masked-softmax-fusion", False),
    "bias_gelu_fusion": ("--bias-gelu-fusion", False),
}
"""Fused kernels that are off by default before it (v1.1.5 megatron/arguments.py)."""
_WORDS = {"": None, "None": None, "[]": None, "{}": None, "()": None, "True": True, "False": False}
_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "uint8": "fp8"}


def plain(value: Any) -> Any:
    """A value without Python syntax: torch.bfloat16 is bf16, AttnBackend.auto is auto, None is empty, True is true."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in _WORDS:
        return _WORDS[text]
    if found := re.fullmatch(r"\[(\d+)\]", text):  # Megatron-DeepSpeed's experts: the only one of a list
        return found[1]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if found := re.fullmatch(r"<?(?:torch|[A-Z]\w+)\.(\w+)(?:: .*>)?", text):
        return _DTYPES.get(found[1], found[1])
    return text


def is_legacy(arguments: Mapping[str, str]) -> bool:
    """Whether the arguments are of Megatron-LM before Megatron-Core and TransformerEngine: those of 2021 and 2022."""
    if plain(arguments.get("deepspeed")) is True:
        return "transformer_impl" not in arguments
    if "transformer_impl" in arguments or "recompute_granularity" in arguments:
        return False
    if is_before_2(arguments):
        return True
    alone = {"DDP_impl", "activations_checkpoint_method", "data_impl"}
    return plain(arguments.get("checkpoint_activations")) is True or bool(alone & arguments.keys())


def is_before_2(arguments: Mapping[str, str]) -> bool:
    """Whether an argument is one that only the parsers before release 2.0 take.

    >>> is_before_2({"batch_size": "8"}), is_before_2({"micro_batch_size": "8", "batch_size": "None"})
    (True, False)
    """
    return any(plain(arguments.get(name)) is not None for name in OLD_ARGUMENTS)


def of_older_release(table: KeyTable, arguments: Mapping[str, str]) -> KeyTable:
    """The table with the defaults of the release, or of the fork, that such arguments are of."""
    listed = {key: table.defaults[key] for key in table.raw["of_2021"]}
    unlisted = {key: value for key, (_, value) in table.defaults.items() if key not in listed}
    older = is_before_2(arguments)
    name = _FORK if plain(arguments.get("deepspeed")) is True else _BEFORE_2 if older else _OF_2021
    return table._replace(framework=name, defaults=listed | (_OFF_BEFORE_2 if older else {}), unlisted=unlisted)
