"""What a fork of torchtitan has of its own: flavors of Qwen3, arguments of Llama, and how its code shards blocks."""

from __future__ import annotations

import ast
import re
from typing import Any

from steptime.base.config import build
from steptime.job.edit import read_model
from steptime.launch.config_values import syntax_of
from steptime.launch.job_keys import JobKeys
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.torchtitan.nested_flavors import nested_sizes
from steptime.model.model import Model

_LLAMA3 = re.compile(
    r"(?:^|/)original/tokenizer\.model$"
    r"|(?:^|/)(?:meta-)?llama-?3(?:\.[0-3])?-\d+b(?:-instruct)?(?:/(?:original/)?tokenizer\.\w+)?/?$",
    re.IGNORECASE,
)
"""Where torchtitan 0.1 leaves the tokenizer of Llama 3 (scripts/download_tokenizer.py), and folders of its repositories."""


def own_vocabulary(keys: JobKeys) -> dict[str, str]:
    """The vocabulary of Llama 3 where the job names its tokenizer by such a path; empty elsewhere.

    Source: pytorch/torchtitan v0.1.0 README.md ("Downloading a tokenizer") and torchtitan/datasets/tokenizer/tiktoken.py (128,000
    tokens of the file and 256 reserved ones).
    """
    named = (str(keys.values.get(f"model.{key}", "")) for key in ("tokenizer_path", "hf_assets_path"))
    return {"vocab_size": "128256"} if any(map(_LLAMA3.search, named)) else {}


def without_comments(code: str) -> str:
    """Python without its comments, among them flavors that are switched off.

    >>> without_comments("a = 1  # (b)")
    'a = 1  '
    """
    return re.sub(r"#.*", "", code)


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


_HANDED_ON = re.compile(r"\bhidden_dim=[\w.]+\.ffn_dim\s*[,)]")


def _computes(code: str) -> bool:
    """Whether the FeedForward of that program is given another width, changes it, or is not there."""
    classes = [node for node in syntax_of(code).body if isinstance(node, ast.ClassDef) and node.name == "FeedForward"]
    inside = [node for each in classes for node in ast.walk(each)]
    changed = [node for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    changed += [
        node for sums in inside if isinstance(sums, ast.BinOp) for node in ast.walk(sums) if isinstance(node, ast.Name)
    ]
    return not classes or not _HANDED_ON.search(code) or any(node.id == "hidden_dim" for node in changed)


_QWEN3 = {
    "n_layers": "n_layers", "dim": "hidden_sz", "hidden_dim": "inter_sz", "n_heads": "n_q_heads", "n_kv_heads": "n_kv_heads",
    "head_dim": "head_dim", "vocab_size": "vocab_sz", "enable_weight_tying": "tie_embeddings",
}  # fmt: skip
"""Arguments of a flavor of Qwen3 -> fields of a model."""


def own_qwen3(keys: JobKeys, flavor: str, listed: dict[str, Any] | None) -> dict[str, Any] | None:
    """A dense flavor of Qwen3 in the registry of the fork that the config lies in, the `listed` one where both are the same.

    None where there is none of literal sizes.

    Source: pytorch/torchtitan torchtitan/models/qwen3/__init__.py (qwen3_configs), whose attention normalizes queries and keys.
    """
    file = "torchtitan/models/qwen3/__init__.py"
    said = nested_sizes((keys.nearby or NearbyFiles()).text(file) or "", flavor, ties=True) or {}
    found: dict[str, Any] = {_QWEN3[key]: value for key, value in said.items() if key in _QWEN3}
    if not {*_QWEN3.values()} - {"tie_embeddings"} <= found.keys():
        return None
    section = {"tie_embeddings": False, "qk_norm": True} | found
    if listed is not None:
        model = build(Model, read_model(listed))
        if all(getattr(model, field) == value for field, value in section.items()):
            return listed
    keys.notes.append(f"model {flavor}, from {file}")
    return section


def own_resharding(keys: JobKeys) -> bool | None:
    """The constant that the fork's code gives fully_shard() of each block instead of the option; None where there is none."""
    folder, nearby = f"torchtitan/models/{keys.get('model.name')}", keys.nearby or NearbyFiles()
    files = [f"{folder}/{name}" for name in ("parallelize.py", "infra/parallelize.py", "parallelize_llama.py")]
    for file in [*files, "torchtitan/parallelisms/parallelize_llama.py"]:
        given = _of_blocks(nearby.text(file) or "")
        if len(given) == 1 and isinstance(value := given.pop(), bool):
            keys.notes.append(f"reshard_after_forward {value}, from {file}")
            return value
    return None


def _of_blocks(code: str) -> set[Any]:
    """What fully_shard() of a loop over layers is given as reshard_after_forward; an expression counts as None.

    >>> _of_blocks("for i, b in m.layers.items(): fully_shard(b, mesh=d, reshard_after_forward=False)")
    {False}
    """
    loops = [
        node for node in ast.walk(syntax_of(code)) if isinstance(node, ast.For) and "layers" in ast.unparse(node.iter)
    ]
    return {
        getattr(keyword.value, "value", None)
        for loop in loops
        for call in ast.walk(loop)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "fully_shard"
        for keyword in call.keywords
        if keyword.arg == "reshard_after_forward"
    }
