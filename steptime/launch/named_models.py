"""Models by the names that repositories and recipes give them."""

from __future__ import annotations

import re

from steptime.model.presets import model_names


def preset_of(name: str) -> str | None:
    """The preset of a model as Hugging Face's hub names it; None where there is none.

    >>> preset_of("meta-llama/Llama-3.2-3B"), preset_of("Qwen/Qwen3-4B-Instruct-2507"), preset_of("own/model")
    ('llama3-3b', 'qwen3-4b', None)
    """
    words = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    words = re.sub(r"^(?:nousresearch-|unsloth-)?meta-", "", words)
    words = re.sub(r"^llama-?([23])(?:\.[0-3])?-", r"llama\1-", words)
    words = re.sub(r"-(?:instruct|chat|base|it|hf|pt)(?:-.*)?$|-v0\.[1-3]$|-\d{4}$", "", words)
    known = model_names()
    return words if words in known else next((found for found in known if found == words.replace("-", "")), None)
