"""Flavors in the registry of a fork: `ModelArgs(...)`, or `Llama3Model.Config(...)` of nested configs in releases since 2026.

Source: pytorch/torchtitan torchtitan/models/llama3/__init__.py (llama3_configs) and models/common (compute_ffn_hidden_dim).
"""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.config_functions import read_function
from steptime.launch.config_values import CLASS, constants_of, literal, syntax_of

_SIZES = frozenset({"dim", "n_layers", "vocab_size", "n_heads", "n_kv_heads", "hidden_dim", "head_dim"})
_TIES = "enable_weight_tying"
_WITHIN = frozenset({"layer", "layers", "attention", "feed_forward"})
"""Arguments whose own arguments are sizes."""
_OTHER = frozenset({
    *(CLASS, "_args_", "rope", "norm", "tok_embeddings", "output", "attention_norm", "ffn_norm", "attn_backend"),
    *("rope_backend", "lm_head", "mask_type", "attn_mask_type", "fuse_qkv", "max_seq_len"),
})  # fmt: skip
"""Arguments that follow from the sizes, or change none."""
_REGISTRIES = ("llama3_configs", "llama3_args")
"""Names of Llama 3's registry beside those of other models in one module."""
_FLAVOR = "_flavor"


def registered(code: str, flavor: str) -> dict[str, Any]:
    """What a module's registry has under a flavor, or the function there returns, as nested mappings; empty where it is not read.

    >>> registered('c = {"1B": Model.Config(dim=64, attention=A.Config(n_heads=4))}', "1B")
    {'_class_': 'Model.Config', 'dim': 64, 'attention': {'_class_': 'A.Config', 'n_heads': 4}}
    """
    tree = syntax_of(code)
    constants = constants_of(tree)
    within = next((constants[name] for name in _REGISTRIES if name in constants), tree)
    dicts = (node for node in ast.walk(within) if isinstance(node, ast.Dict))
    pairs = (pair for node in dicts for pair in zip(node.keys, node.values, strict=True))
    said = next((value for key, value in pairs if literal(key) == flavor), None)
    if said is None:
        return {}
    # a function that makes a list of layers stays a call with its arguments
    tree.body = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef) or isinstance(getattr(node.body[-1], "value", None), ast.Call)
    ]
    returned = ast.unparse(said) + ("()" if isinstance(said, ast.Name) else "")
    with suppress(ConfigError):
        return read_function("", f"{ast.unparse(tree)}\ndef {_FLAVOR}(): return {returned}", _FLAVOR, "")[1]
    return {}


def nested_sizes(config: dict[str, Any], *, ties: bool = False) -> dict[str, Any] | None:
    """The sizes of nested configs by torchtitan's names, multiple_of and ffn_dim_multiplier too; None where not all are literal.

    `ties`: the family's configs have enable_weight_tying, which is then given too.

    >>> nested_sizes({"_class_": "Model.Config", "dim": 64, "attention": {"_class_": "A.Config", "n_heads": 4}})
    {'dim': 64, 'n_heads': 4}
    """
    found: dict[str, Any] = {}
    whole = str(config.get(CLASS)).endswith(".Config") and _gather(config, found, _SIZES | {_TIES} if ties else _SIZES)
    return found if whole else None


def _gather(config: dict[str, Any], found: dict[str, Any], sizes: frozenset[str]) -> bool:
    """Add the sizes of a config and of the configs in it; whether all of its arguments are known."""
    for name, value in config.items():
        if name in _WITHIN:
            if not isinstance(value, dict) or not _gather(value, found, sizes):
                return False
        elif name == "hidden_dim" and isinstance(value, dict) and value.get(CLASS) == "compute_ffn_hidden_dim":
            parts = {key: part for key, part in value.items() if key not in {CLASS, "_args_"}}
            if not parts.keys() <= {"multiple_of", "ffn_dim_multiplier"} or not _are_numbers(parts):
                return False
            found |= parts
        elif name in sizes:
            if not _are_numbers({name: value}) or found.get(name, value) != value:
                return False
            found[name] = value
        elif name not in _OTHER:
            return False
    return True


_FLAT = {"dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "ffn_dim_multiplier", "multiple_of", "vocab_size"}


def flat_sizes(config: dict[str, Any]) -> dict[str, Any] | None:
    """The sizes of `ModelArgs(...)` of Llama; None of other classes, and where an argument is unknown or not literal."""
    said = {key: value for key, value in config.items() if key not in _OTHER and not key.startswith("rope_")}
    known = config.get(CLASS) in {"ModelArgs", "TransformerModelArgs"} and said.keys() <= _FLAT and _are_numbers(said)
    return said if known else None


def _are_numbers(said: dict[str, Any]) -> bool:
    return all(isinstance(value, int | float) for value in said.values())
