"""Flavors in the registry of a fork: `ModelArgs(...)`, or `Llama3Model.Config(...)` of nested configs in releases since 2026.

Source: pytorch/torchtitan torchtitan/models/llama3/__init__.py (llama3_configs) and models/common (compute_ffn_hidden_dim).
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from typing import Any

from steptime.base.config import ConfigError, build
from steptime.job.edit import put, read_model
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import flatten
from steptime.launch.python.config_functions import read_function
from steptime.launch.python.config_values import CLASS, FUNCTION, constants_of, literal, syntax_of, with_function
from steptime.model.model import Model

_SIZES = frozenset({"dim", "n_layers", "vocab_size", "n_heads", "n_kv_heads", "hidden_dim", "head_dim"})
_TIES = "enable_weight_tying"
_WITHIN = frozenset({"layer", "layers", "attention", "feed_forward"})
"""Arguments whose own arguments are sizes."""
_OTHER = frozenset({
    *(CLASS, "_args_", "rope", "norm", "tok_embeddings", "output", "attention_norm", "ffn_norm", "attn_backend"),
    *("rope_backend", "lm_head", "mask_type", "attn_mask_type", "fuse_qkv", "max_seq_len"),
})  # fmt: skip
"""Arguments that follow from the sizes, or change none."""


def registered(code: str, flavor: str, family: str = "llama3") -> dict[str, Any]:
    """What a module's registry has under a flavor, or the function there returns, as nested mappings; empty where it is not read.

    `family`: its registry is taken from a module that has those of other models too.

    >>> registered('c = {"1B": Model.Config(dim=64, attention=A.Config(n_heads=4))}', "1B")
    {'_class_': 'Model.Config', 'dim': 64, 'attention': {'_class_': 'A.Config', 'n_heads': 4}}
    """
    tree = syntax_of(code)
    constants = constants_of(tree)
    within = next((constants[name] for name in (f"{family}_configs", f"{family}_args") if name in constants), tree)
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
        return read_function("", with_function(ast.unparse(tree), f"return {returned}"), FUNCTION, "")[1]
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


def own_width(keys: JobKeys, said: dict[str, str], arguments: str, code: str) -> dict[str, str]:
    """The width of the feed-forward network of a fork whose ModelArgs have ffn_dim, the flavor's own or the default.

    Raises:
        ConfigError: its FeedForward computes another width from it.
    """
    default = re.search(r"\bffn_dim: int = (\d+)", arguments)
    width = said.get("ffn_dim") or (default[1] if default else None)
    if width is None or _computes(code):
        what = "the fork's ModelArgs have ffn_dim, whose use is not read"
        raise keys.error("model.flavor", f"{what}; add --set model=NAME")
    return {"hidden_dim": width}


_HANDED_ON = re.compile(r"\bhidden_dim=[\w.]+\.ffn_dim\s*[,)]")


def _computes(code: str) -> bool:
    """Whether the FeedForward of that program is given another width, changes it, or is not there."""
    classes = [node for node in syntax_of(code).body if isinstance(node, ast.ClassDef) and node.name == "FeedForward"]
    inside = [node for each in classes for node in ast.walk(each)]
    changed = [node for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    sums = (part for node in inside if isinstance(node, ast.BinOp) for part in ast.walk(node))
    changed += [node for node in sums if isinstance(node, ast.Name)]
    return not classes or not _HANDED_ON.search(code) or any(node.id == "hidden_dim" for node in changed)


def own_qwen3(keys: JobKeys, flavor: str, listed: dict[str, Any] | None) -> dict[str, Any] | None:
    """A dense flavor of Qwen3 in the registry of the fork that the config lies in, the `listed` one where both are the same.

    None where there is none of literal sizes.

    Source: pytorch/torchtitan torchtitan/models/qwen3/__init__.py (qwen3_configs), whose attention normalizes queries and keys.
    """
    file, names = "torchtitan/models/qwen3/__init__.py", keys.table.raw["registries"]["qwen3"]
    said = nested_sizes(registered(keys.nearby.text(file) or "", flavor), ties=True) or {}
    found: dict[str, Any] = {names[key]: value for key, value in said.items() if key in names}
    if not {*names.values()} - {"tie_embeddings"} <= found.keys():
        return None
    section = {"tie_embeddings": False, "qk_norm": True} | found
    if listed is not None:
        model = build(Model, read_model(listed))
        if all(getattr(model, field) == value for field, value in section.items()):
            return listed
    keys.notes.append(f"model {flavor}, from {file}")
    return section


def own_deepseek(keys: JobKeys, flavor: str) -> dict[str, Any] | None:
    """A flavor of DeepSeek-V3 in the registry of the fork that the config lies in; None where there is none of literal sizes.

    Source: pytorch/torchtitan v0.2.1 torchtitan/models/deepseek_v3/__init__.py (deepseekv3_configs) and model/args.py; of today's
    flavors the router's bias and its softmax before the choice.
    """
    file, table = "torchtitan/models/deepseek_v3/__init__.py", keys.table.raw["registries"]
    names: dict[str, str] = table["deepseek_v3"]
    found = flatten(registered(keys.nearby.text(file) or "", flavor, "deepseekv3"))
    said = {key: value for key, value in found.items() if key.rpartition(".")[2] not in {CLASS, "_args_"}}
    fields = names | table["groups"]
    sizes = {key: said[key] for key in fields if key in said}
    known = not said.keys() - fields.keys() - {*table["without_cost"]} and _are_numbers(sizes)
    if not known or not sizes.keys() >= names.keys() - {"q_lora_rank"}:
        return None
    section: dict[str, Any] = {"attention": {"kind": "mla"}, "moe": {"pre_softmax": True, "expert_bias": True}}
    one = any(sizes.get(key) == 1 for key, field in table["groups"].items() if field == "moe.n_groups")
    for key, field in fields.items():
        if sizes.get(key) and not (one and key in table["groups"]):  # q_lora_rank 0: none
            put(section, field, sizes[key])
    keys.notes.append(f"model {flavor}, from {file}")
    return section


def own_resharding(keys: JobKeys) -> bool | None:
    """The constant that the fork's code gives fully_shard() of each block instead of the option; None where there is none."""
    folder, nearby = f"torchtitan/models/{keys.get('model.name')}", keys.nearby
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
