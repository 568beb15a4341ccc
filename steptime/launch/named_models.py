"""Models by the names that repositories and recipes give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from steptime.base.document import scalar
from steptime.job.edit import read_model
from steptime.launch.keys import table_file
from steptime.model.hf import fields_of
from steptime.model.hf_family import UNMODELED
from steptime.model.presets import aliases, model_names


@cache
def _spellings() -> dict[re.Pattern[str], str]:
    """How repositories spell names -> how the presets do."""
    told = table_file("named_models")["spellings"]
    return {re.compile(pattern): str(meant) for pattern, meant in told.items()}


_TRAINED = re.compile(
    r"(?:-(?:sft|dpo|cpt|pretrain|full|ft|merged|final|local|model|bf16|fp16|checkpoint|ckpt|step|steps|epoch)(?:-?\d{1,6})?)+$"
)
"""Suffixes of names that do not affect sizes."""
_NO_NAME = re.compile(
    r"(?:checkpoint|ckpt|step|epoch|snapshot|global_step)s?[-_]?\d*|main|hf|final|original|latest|[0-9a-f]{40}",
    re.IGNORECASE,
)
"""Folders inside the one with the model's name."""
_FOLDER = re.compile(r"^hf[-_]|[-_](?:hf|models?|weights|checkpoints)(?=[-_]|$)", re.IGNORECASE)
"""What folders of a family of models have in their names beside the family's."""


def _last_name(path: str) -> str:
    """The part of a path that names a model: not a checkpoint within it, nor a snapshot of the hub's cache.

    >>> _last_name("hub/models--Qwen--Qwen3-8B/snapshots/main"), _last_name("/ckpt/Qwen3-8B/checkpoint-500")
    ('Qwen3-8B', 'Qwen3-8B')
    >>> _last_name("../hf_llama2_models/70B")
    'llama2-70B'
    """
    parts = [part for part in path.split("/") if part]
    while len(parts) > 1 and _NO_NAME.fullmatch(parts[-1]):
        parts.pop()
    last = parts[-1] if parts else ""
    if len(parts) > 1 and re.fullmatch(r"\d+(?:\.\d+)?[bBmM](?:-hf)?", last):  # a folder of a family's sizes
        last = f"{re.sub(_FOLDER, '', parts[-2])}-{last}"
    return last.rpartition("--")[2] if last.startswith("models--") else last


_OTHER = re.compile(
    r"(?:^|-)(?:vl\d*|vlm|llava|internvl[\d.]*|paligemma2?|idefics\d?|pixtral|mllama|minicpm-v|vision|omni|audio|whisper|"
    r"moondream\d?|molmo|smolvlm\d?|glm-4(?:\.\d)?v)(?:-|$)"
)
_FAMILY = re.compile(r"^(bloom|mpt|gpt-?j|jamba|mamba2?)z?(?=[-\d]|$)")


def not_modeled(name: str) -> str:
    """Why a model of that name is not modeled: it takes images or audio, or what its family has; "" where neither is known.

    >>> not_modeled("Qwen/Qwen2.5-VL-7B-Instruct"), not_modeled("bigscience/bloomz-7b1"), not_modeled("Qwen/Qwen2.5-7B")
    ('it takes images or audio in addition to text', 'ALiBi positions and a norm after the embedding', '')
    """
    last = _last_name(name).lower().replace("_", "-")
    if _OTHER.search(last):
        return "it takes images or audio in addition to text"
    found = _FAMILY.search(last)
    return UNMODELED[found[1].replace("-", "")] if found else ""


def _spelled(name: str) -> str:
    """A name in the words of the presets."""
    words = _last_name(name).lower().replace("___", ".").replace("_", "-")  # ___ is ModelScope's dot
    words = re.sub(_TRAINED, "", words)
    for pattern, meant in _spellings().items():
        words = pattern.sub(meant, words)
    return words


def begins(name: str) -> str:
    """Words for a message on a model whose name begins like a preset's: one trained further, perhaps with more words.

    >>> begins("own/Qwen2.5-7B-Memory")
    ' (qwen2.5-7b, if it has the sizes and vocabulary that its name begins with)'
    >>> begins("own/model")
    ''
    """
    words = re.sub(r"(?<=\d)p(?=\d+b\b)", ".", _spelled(name))
    words = re.sub(r"^mistral-7b(?:-instruct)?-v0\.1", "mistral-7b-v0.2", words)
    words = re.sub(r"^(qwen|phi)(\d)(\d)(?=-)", r"\1\2.\3", words)
    found = [preset for preset in model_names() if re.match(rf"{re.escape(preset)}(?:-|$)", words)]
    return f" ({max(found, key=len)}, if it has the sizes and vocabulary that its name begins with)" if found else ""


def preset_of(name: str) -> str | None:
    """The preset of a model as Hugging Face's hub names it; None where there is none.

    >>> preset_of("meta-llama/Llama-3.2-3B"), preset_of("Qwen/Qwen3-4B-Instruct-2507"), preset_of("own/model")
    ('llama3-3b', 'qwen3-4b', None)
    """
    words = _spelled(name)
    plain = re.sub(r"-(?:instruct|chat|base|it|hf|pt)(?:-.*)?$|-v0\.[1-3]$|-\d{4}$", "", words)
    known = {found: found for found in model_names()} | aliases()
    dashless = {found.replace("-", ""): preset for found, preset in known.items()}
    return known.get(words) or known.get(plain) or dashless.get(plain.replace("-", ""))


def model_field(section: Any, path: str) -> Any:
    """A field of a model section by its dotted path; None where neither the section nor its preset says it."""
    found = read_model(section)
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found


def of_overrides(model_type: str, overrides: str, entries: int | None) -> dict[str, Any]:
    """The sizes of a model that a trainer builds from its type with changes, as text: config_overrides.

    `entries`: the tokenizer's. Source: transformers examples/pytorch/language-modeling/run_clm.py. {} where they are incomplete.

    >>> of_overrides("gpt2", "n_embd=1024,n_head=16,n_layer=24,n_positions=512", 50257)["hidden_sz"]
    1024
    """
    pairs = (part.partition("=") for part in overrides.split(","))
    changes = {key.strip(): scalar(value.strip()) for key, _, value in pairs if value}
    known = {"vocab_size": entries} if entries else {}
    fields, problems = fields_of({"model_type": model_type, **known, **changes})
    return {} if problems else fields
