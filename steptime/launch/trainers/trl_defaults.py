"""Defaults of TRL's SFTConfig, which since its release 0.20 has gradient checkpointing and bf16 on where nothing is said.

Source: huggingface/trl pull requests 3510 and 3629 (July 2025); trl/trainer/base_config.py; 0.16 and 0.20 took away arguments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from typing import Any

from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.config_values import calls_in, last_name, syntax_of
from steptime.launch.python.program_calls import passed_in

_SINCE = (0, 20)
_GONE = {
    "SFTConfig": frozenset({"max_seq_length", "dataset_batch_size", "num_of_sequences", "chars_per_token"}),
    "SFTTrainer": frozenset({"max_seq_length", "tokenizer", "packing", "dataset_text_field", "dataset_num_proc"}),
}
"""Arguments that these take only in earlier releases."""
_NEEDED = ("requirements.txt", "pyproject.toml", "setup.py", "environment.yml", "environment.yaml")
_PINNED = re.compile(r"(?<![\w-])trl(?:\[[^\]]*\])?[\"']?\s*=?\s*[\"']?(==|~=|>=|<=|<|=)\s*v?(\d+)\.(\d+)(\.\d)?")
_SWITCHES = {
    "gradient_checkpointing": ("performance.activation_checkpointing_type", "full, or none"),
    "bf16": ("performance.precision", "bf16, or fp32"),
}


def of_trl(code: str, nearby: NearbyFiles, said: Mapping[str, Any]) -> dict[str, bool]:
    """What SFTConfig switches on where a program passes nothing, if its release is known to be a later one; no bf16 over fp16."""
    if not _uses(code) or not _later(code, nearby):
        return {}
    left = _SWITCHES.keys() - passed_in(code).keys()
    half = {"bf16"} if str(said.get("fp16", "")).lower() in {"true", "1"} else set()
    return dict.fromkeys(sorted(left - half), True)


def of_unknown_trl(code: str, program: str, nearby: NearbyFiles, said: Collection[str]) -> dict[str, str]:
    """Setting of a plan -> what to ask, where a program of unknown release leaves it to SFTConfig; `said`: keys with a value."""
    if not _uses(code) or _later(code, nearby) is not None:
        return {}
    stated = {"bf16": {"bf16", "fp16", "mixed_precision", "deepspeed", "torch_dtype"}}
    return {
        plan: f"{key} unknown: {program} leaves it to SFTConfig, off up to TRL 0.19 and on since; add --set {plan}={fix}"
        for key, (plan, fix) in _SWITCHES.items()
        if not stated.get(key, {key}) & {*said}
    }


def _uses(code: str) -> bool:
    """Whether a program's arguments are those of SFTConfig."""
    if "SFTConfig" not in code or "TrainingArguments(" in code:
        return False
    names = (node for node in ast.walk(syntax_of(code)) if isinstance(node, ast.Name | ast.Attribute))
    return any(last_name(node) == "SFTConfig" for node in names)


def _later(code: str, nearby: NearbyFiles) -> bool | None:
    """Whether the release is 0.20 or later, by its pin or by an argument that is gone; None where neither says it.

    >>> _later("SFTTrainer(model=m, tokenizer=t)", NearbyFiles()), _later("SFTConfig(max_length=512)", NearbyFiles())
    (False, None)
    """
    texts = [re.sub(r"#.*", "", nearby.text(name) or "") for name in _NEEDED]
    for sign, major, minor, patch in (found for text in texts for found in _PINNED.findall(text)):
        release = (int(major), int(minor))
        exact = sign in {"==", "="} or (sign == "~=" and patch)  # ~=0.12 is any 0 from 0.12 on, ~=0.12.0 is 0.12
        if exact or (sign in {">=", "~="} and release >= _SINCE) or (sign[0] == "<" and release < _SINCE):
            return release >= _SINCE
        if sign == "<" and release == _SINCE:
            return False
    passed = {(last_name(call.func), keyword.arg) for call in calls_in(syntax_of(code)) for keyword in call.keywords}
    return False if any((name, arg) in passed for name, gone in _GONE.items() for arg in gone) else None
