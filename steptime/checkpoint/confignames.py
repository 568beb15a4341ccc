"""Names other projects give to the fields of a model, in the order they are looked up."""

from __future__ import annotations

import re
from typing import Any

from steptime.checkpoint.name_tables import table, words

LARGEST = 1 << 40  # of a width or a count that somebody trains with
_TABLES = table("names")["config"]
FIELDS = {field: words(names) for field, names in _TABLES["model"].items()}
PARTS = {
    f"{part}_from_config": {field: words(names) for field, names in _TABLES[part].items()} for part in ("moe", "mamba")
}
NESTED = words(_TABLES["nested"])
"""Where multimodal models keep the language model's config, and DBRX its attention and experts."""
BIAS_FREE_LAYERNORM = frozenset(words(_TABLES["layernorm"]))
RMSNORM = frozenset(words(_TABLES["rmsnorm"]))
SOURCES = {"config": "config.json", "params": "params.json", "args": "args", "gguf": "GGUF key-values"}
CHECKED = ("n_layers", "hidden_sz", "inter_sz", "vocab_sz", "head_dim")


def from_config(facts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(source, fields) of each config a section's facts hold: config.json, pickled args, GGUF key-values."""
    found = []
    for key, source in SOURCES.items():
        values = facts.get(key)
        if not isinstance(values, dict):
            continue
        for nested in NESTED:
            if isinstance(values.get(nested), dict):
                values = values | values[nested]
        known = _fields(_unprefixed(values) if key == "gguf" else values)
        if known:
            found.append((source, known))
    return found


def _unprefixed(values: dict[str, Any]) -> dict[str, Any]:
    prefix = f"{values.get('general.architecture')}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _first(values: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((v for n in names if type(v := values.get(n)) is bool or (type(v) is int and 0 <= v < LARGEST)), None)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    found = {field: value for field, names in FIELDS.items() if (value := _first(values, names)) is not None}
    if values.get("block_auto_adjust_ff_dim"):  # LFM2: the code makes another width of it
        found.pop("inter_sz", None)
    groups = values.get("num_query_groups")
    if values.get("group_query_attention") and type(groups) is int:  # Megatron: 1 unless grouped
        found["n_kv_heads"] = groups
    untied = values.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        found["tie_embeddings"] = not untied
    for part, fields in PARTS.items():
        own = {field: value for field, names in fields.items() if (value := _first(values, names)) is not None}
        if own:
            found[part] = own
    return found


_ABOUT = {  # keys of any part of a config that are about a field: an encoder's, a decoder's, a stage's
    "n_layers": re.compile(r"layers?(?:_per_stack)?$|depth$"), "hidden_sz": re.compile(r"hidden_size|d_model|dim$|width"),
    "inter_sz": re.compile(r"intermediate|ffn|feed_?forward|inner|bottleneck"), "vocab_sz": re.compile(r"vocab"),
    "head_dim": re.compile(r"head_dim|d_kv"), "codebooks": re.compile(r"codebook"),
}  # fmt: skip


def said(facts: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Every number that a config.json, its nested parts included, states about each of CHECKED, and about codebooks."""
    found: dict[str, set[int]] = {key: set() for key in _ABOUT}
    pending = [fact["config"] for fact in facts if isinstance(fact.get("config"), dict)]
    while pending:
        config = pending.pop()
        pending += [value for value in config.values() if isinstance(value, dict)]
        for name, value in config.items():
            for key, about in _ABOUT.items():
                if type(value) is int and about.search(name):
                    found[key].add(value)
    return found


def norm_of(facts: dict[str, Any]) -> tuple[str, str] | None:
    """(rmsnorm or layernorm, source) where a config determines it: by a key of its epsilon, Megatron's argument or the family."""
    config, args, gguf = (
        value if isinstance(value := facts.get(key), dict) else {} for key in ("config", "args", "gguf")
    )
    if isinstance(args.get("normalization"), str):
        return args["normalization"].lower(), "args"
    known = _unprefixed(gguf)
    if "attention.layer_norm_rms_epsilon" in known or "attention.layer_norm_epsilon" in known:
        return ("rmsnorm" if "attention.layer_norm_rms_epsilon" in known else "layernorm"), "GGUF key-values"
    families = {str(config.get("model_type"))}
    for nested in NESTED:
        if isinstance(config.get(nested), dict):
            config = config | config[nested]
            families.add(str(config.get("model_type")))
    if families & BIAS_FREE_LAYERNORM:
        return "layernorm", "config.json"
    if "rms_norm_eps" in config or families & RMSNORM:
        return "rmsnorm", "config.json"
    return None
