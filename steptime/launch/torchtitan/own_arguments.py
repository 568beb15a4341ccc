"""Arguments of a fork's Llama that torchtitan's own does not have, or has no value for."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from steptime.launch.config_values import syntax_of
from steptime.launch.job_keys import JobKeys

_LLAMA3 = ("original", "tokenizer.model")
"""The end of the path at which torchtitan's scripts/download_tokenizer.py leaves the tokenizer of Llama 3."""


def own_vocabulary(keys: JobKeys) -> dict[str, str]:
    """The vocabulary of Llama 3 where the job names its tokenizer as torchtitan 0.1 downloads it; empty elsewhere.

    Source: pytorch/torchtitan v0.1.0 README.md ("Downloading a tokenizer") and torchtitan/datasets/tokenizer/tiktoken.py (128,000
    tokens of the file and 256 reserved ones).
    """
    path = PurePath(str(keys.values.get("model.tokenizer_path", "")))
    return {"vocab_size": "128256"} if path.parts[-2:] == _LLAMA3 else {}


def own_width(keys: JobKeys, said: dict[str, str], arguments: str, code: str) -> dict[str, str]:
    """The width of the feed-forward network of a fork whose ModelArgs have ffn_dim, the flavor's own or the default.

    Raises:
        ConfigError: its FeedForward computes another width from it.
    """
    default = re.search(r"\bffn_dim: int = (\d+)", arguments)
    width = said.get("ffn_dim") or (default[1] if default else None)
    if width is None or _computes(code):
        raise keys.error(
            "model.flavor", "the fork's ModelArgs have ffn_dim, whose use is not read; add --set model=NAME"
        )
    return {"hidden_dim": width}


def _computes(code: str) -> bool:
    """Whether the FeedForward of that program changes the width that it is given, or is not there."""
    classes = [node for node in syntax_of(code).body if isinstance(node, ast.ClassDef) and node.name == "FeedForward"]
    names = [node for each in classes for node in ast.walk(each) if isinstance(node, ast.Name)]
    return not classes or any(node.id == "hidden_dim" and isinstance(node.ctx, ast.Store) for node in names)
