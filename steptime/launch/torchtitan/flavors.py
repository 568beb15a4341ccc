"""torchtitan's models: by name and flavor, or as a log prints them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from steptime.base.config import ConfigError, build, near, show
from steptime.job.edit import read_model
from steptime.job.limits import BOUNDS
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import table_file
from steptime.launch.named_models import preset_of
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.config_values import CLASS
from steptime.launch.reading import OTHER_MODEL, refusals
from steptime.launch.torchtitan import own_flavors
from steptime.launch.torchtitan.graph_trainer import SIMPLE
from steptime.model.blocks import n_params
from steptime.model.model import Model

_BUILDING = re.compile(r"Building (llama3|llama) (\S+) with (.*)")
_DIGITS = 12
"""Longest number accepted."""
_SIZE = re.compile(r"size: ([\d,]+) total parameters")
MODELS = "torchtitan_models"
"""The table of flavors."""
NO_FAMILIES = {"source", "aliases", "not_modeled", "of_forks", "of_functions", "changed_in_functions"}
"""Keys of the table that are no model."""


def known_models() -> list[str]:
    """Names of models, also of those that are not modeled, the longest first."""
    table = table_file(MODELS)
    return sorted({*table, *table["aliases"], *table["not_modeled"]["models"]} - NO_FAMILIES, key=len, reverse=True)


def family_of(functions: Iterable[str]) -> str:
    """The one family of models with which the names of config functions begin; "" where there is none, or several.

    >>> family_of(["sft_math", "qwen3_8b", "qwen3_moe_debug"]), family_of(["qwen3_vl_8b"]), family_of(["llama3_8b", "qwen3_8b"])
    ('qwen3', 'qwen3_vl', '')
    """
    begins = re.compile(rf"(?:{'|'.join(known_models())})(?=_)")
    found = {begun[0] for name in functions if (begun := begins.match(name))}
    families = {table_file(MODELS)["aliases"].get(name, name) for name in found}
    return families.pop() if len(families) == 1 else ""


_LATER = frozenset({
    *("training.seed", "training.deterministic", "debug.enable_deterministic"),
    *("compile.enable_async_tensor_parallel", "training.max_context_length"),
})  # fmt: skip
"""Names that 0.2 or a later version had too (v0.2.0 torchtitan/config/job_config.py, Training; Debug is of v0.2.1)."""


def flavor_of(keys: JobKeys, *, of_function: bool) -> dict[str, Any]:
    """The model section of model.name and model.flavor; what a flavor has that is not modeled is left out.

    `of_function`: the job is a config function, whose releases have flavors that releases with TOML files lack.

    Raises:
        ConfigError: unknown.
    """
    table = table_file(MODELS)
    if own := _of_a_fork(keys):
        return own
    name, flavor = str(keys.get("model.name")).removeprefix(SIMPLE), str(keys.get("model.flavor"))
    family = table["aliases"].get(name, name)
    families = [key for key in table if key not in NO_FAMILIES]
    if why := table["not_modeled"]["models"].get(name):
        raise keys.error("model.name", f"{name}, {OTHER_MODEL} ({why}); not modeled")
    if family not in families:
        known = near(name, families)
        raise keys.error("model.name", f"unknown model (got {show(name)}){known}; or add --set model=NAME")
    base = flavor
    for word, why in table["not_modeled"]["flavors"].items():
        if re.search(rf"_{word}(_attn)?$", base):
            base = re.sub(rf"_{word}(_attn)?$", "", base)
            keys.approximate("model.flavor", f"{why}; counted as {base}")
    flavors = table[family].keys() - (set() if of_function else set(table["of_functions"].get(family, [])))
    listed = dict(table[family][base]) if base in flavors else _of_its_fork(keys, family, flavor)
    if of_function and listed is not None:
        listed |= _changed(keys, family, base)
    if family in {"llama2", "llama3"} and (own := _of_registry(keys, family, flavor, listed)):
        return own
    if family == "qwen3" and (own := own_flavors.own_qwen3(keys, flavor, listed)):
        return own
    if family == "deepseek_v3" and listed is None and (own := own_flavors.own_deepseek(keys, flavor)):
        return own
    renamed = {item.name for item in keys.given if item.name != item.key} - _LATER
    if family in {"llama3", "llama4"} and flavor == "debugmodel" and renamed:
        # 8 layers in torchtitan/models/llama/__init__.py of November 2024, 6 in May 2025; no vocab_size in either
        why = "releases before 0.2 differ in its layers, and take its vocabulary from the tokenizer"
        raise keys.error("model.flavor", f"debugmodel: {why}; add --set model=NAME")
    if listed is None:
        known = near(flavor, flavors)
        keys.fail("model.flavor", f"unknown flavor of {name} (got {show(flavor)}){known}; or add --set model=NAME")
        raise ConfigError([*keys.problems, *refusals(keys.source, keys.flags())])
    return listed | (_registry_sizes(keys, family, flavor, listed) if family not in {"llama2", "llama3"} else {})


def _changed(keys: JobKeys, family: str, flavor: str) -> dict[str, Any]:
    """What a flavor of config functions has otherwise, unless the checkout is older than that."""
    changed = dict(table_file(MODELS)["changed_in_functions"].get(family, {}).get(flavor, {}))
    code, since = keys.nearby.text(f"torchtitan/models/{family}/__init__.py"), changed.pop("since", "")
    return changed if code is None or since in code else {}


def _of_its_fork(keys: JobKeys, family: str, flavor: str) -> dict[str, Any] | None:
    """A flavor of the fork whose own key the file has; None where there is none."""
    own = next((item.name for item in keys.given if item.name in table_file(MODELS)["of_forks"]), "")
    listed = table_file(MODELS)["of_forks"].get(own, {}).get(family, {}).get(flavor)
    if listed is None:
        return None
    keys.notes.append(f"model {flavor}, of the fork of torchtitan that has {own}")
    return dict(listed)


_SIZES = {"vocab_size": "vocab_sz", "dim": "hidden_sz", "n_layers": "n_layers", "n_heads": "n_q_heads"}


def _registry_sizes(keys: JobKeys, family: str, flavor: str, listed: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a flavor that the registry beside the config has and today's torchtitan does not."""
    nearby, model = keys.nearby, build(Model, read_model(listed))
    for folder in (f"torchtitan/models/{family}", f"torchtitan/experiments/{family}"):
        said = own_flavors.registered(nearby.text(f"{folder}/__init__.py") or "", flavor)
        if str(said.get(CLASS)).endswith("ModelArgs"):
            own = {field: said[key] for key, field in _SIZES.items() if isinstance(said.get(key), int)}
            if changed := {field: size for field, size in own.items() if getattr(model, field) != size}:
                keys.notes.append(f"model {flavor}, from {folder}/__init__.py: {', '.join(changed)}")
            return changed
    return {}


def _of_a_fork(keys: JobKeys) -> dict[str, Any] | None:
    """The model that a key names instead of a flavor: of a fork (flame: model.config), or of transformers; None without one.

    pytorch/torchtitan v0.2.1 torchtitan/experiments/transformers_modeling_backend: flavor full has the repository's own sizes.

    Raises:
        ConfigError: it names none of the presets.
    """
    backend = keys.get("model.name") == "transformers_modeling_backend" and keys.get("model.flavor") == "full"
    if {"model.name", "model.flavor"} & keys.values.keys() and not backend:
        return None
    named = {"hf_transformers.model"} if backend else {"model.config", "model.model_name_or_path"}
    own = next((item for item in keys.given if item.key in named), None)
    if own is None:
        return None
    if (preset := preset_of(str(own.value))) is None:
        raise keys.error(own.key, f"not among the presets (got {show(own.value)}); add --set model=NAME")
    keys.becomes(own.key, "model")
    if backend:
        keys.approximate("model.name", "modules of transformers: torchtitan's of the same sizes are counted")
    return {"preset": preset}


_UNSET = re.compile(r"vocab_size: int = -1\b")
"""Of releases whose models take their vocabulary from the tokenizer."""


def _of_registry(keys: JobKeys, family: str, flavor: str, listed: dict[str, Any] | None) -> dict[str, Any] | None:
    """A flavor of Llama's in the registry of the fork that the config lies in; None where there is none of literal sizes.

    `listed`: the flavor of that name in torchtitan itself, returned where both are the same; its vocabulary is that of a flavor
    without one in releases that take it from the tokenizer.

    Source: torchtitan/models/llama3/__init__.py (the registry) and model/args.py (the vocabulary where a flavor has none).
    """
    of_tokenizer = own_flavors.own_vocabulary(keys) if family == "llama3" else {}
    usual = of_tokenizer if listed is None else {"vocab_size": str(build(Model, read_model(listed)).vocab_sz)}
    nearby = keys.nearby
    for folder in ("torchtitan/models/llama3", "torchtitan/models/llama"):
        config = own_flavors.registered(nearby.text(f"{folder}/__init__.py") or "", flavor, family)
        of_tests = flavor == "debugmodel" and _UNSET.search(nearby.text(f"{folder}/model.py") or "")
        known = _of_test_tokenizer(keys, nearby) if of_tests else usual
        nested = own_flavors.nested_sizes(config, ties=True)
        if not (sizes := nested or own_flavors.flat_sizes(config)):
            continue
        arguments = nearby.text(f"{folder}/model.py" if nested else f"{folder}/model/args.py") or ""
        default = re.search(r"vocab_size: int = (\d+)", arguments)
        said = {"vocab_size": default[1]} if default else known
        said = said | {key: str(value) for key, value in sizes.items()}
        if not nested and "ffn_dim:" in arguments:
            said |= own_flavors.own_width(keys, said, arguments, nearby.text(f"{folder}/model/model.py") or "")
        if not {"dim", "n_layers", "n_heads", "vocab_size"} <= said.keys():
            continue
        if (own := _same(listed, _sizes(keys.source, said))) != listed:
            keys.notes.append(f"model {flavor}, from {folder}/__init__.py")
        return own
    return None


def _of_test_tokenizer(keys: JobKeys, nearby: NearbyFiles) -> dict[str, str]:
    """The vocabulary of the debugmodel's tokenizer, whose file has one token a line; empty where it is not there.

    Source: torchtitan/datasets/tokenizer/tiktoken.py of v0.1.0 (num_reserved_special_tokens = 256).
    """
    tokens = len((nearby.text(str(keys.values.get("model.tokenizer_path", ""))) or "").splitlines())
    return {"vocab_size": str(tokens + 256)} if tokens else {}


def from_log(path: str, text: str) -> dict[str, Any] | None:
    """The model that "Building llama3 8B with ..." describes, checked against the parameters that the log counts.

    None where the line is missing, or is incomplete.

    Raises:
        ConfigError: the model read and the parameters counted differ.
    """
    found = _BUILDING.search(text)
    said = dict(re.findall(r"[\"']?(\w+)[\"']?\s*[=:]\s*([\d.]+|None|null)", found[3])) if found else {}
    if found is None or not {"dim", "n_layers", "n_heads", "vocab_size"} <= said.keys():
        return None
    model = _sizes(path, said) | {"source": f"the log of torchtitan {found[1]} {found[2]}"}
    if size := _SIZE.search(text):
        counted = int(size[1].replace(",", ""))
        if "enable_weight_tying=True" in found[3]:
            model["tie_embeddings"] = True
        ours = n_params(build(Model, model))
        if counted != ours:
            both = f"the log counts {counted:,} parameters, and the model that it describes has {ours:,}"
            raise ConfigError(f"{path}: {both}; add --set model=NAME")
    return _by_name(found[2], model)


def _sizes(path: str, said: dict[str, str]) -> dict[str, Any]:
    """The fields of a model that torchtitan's own arguments give."""

    def whole(key: str, default: int | None = None) -> int:
        number = said.get(key, "None")
        if number in {"None", "null"} and default is not None:
            return default
        if not number.isdecimal() or len(number) > _DIGITS or not int(number):
            raise ConfigError(f"{path}: {key}={number}: not a plausible size; add --set model=NAME")
        return int(number)

    if whole("n_layers") > BOUNDS["n_layers"][1]:
        raise ConfigError(f"{path}: n_layers={said['n_layers']}: not a plausible number; add --set model=NAME")
    heads, dim = whole("n_heads"), whole("dim")
    return {
        "n_layers": whole("n_layers"),
        "hidden_sz": dim,
        "inter_sz": whole("hidden_dim", hidden_dim(dim, whole("multiple_of", 256), said.get("ffn_dim_multiplier"))),
        "n_q_heads": heads,
        "n_kv_heads": whole("n_kv_heads", heads),
        "vocab_sz": whole("vocab_size"),
    } | ({"tie_embeddings": True} if said.get("enable_weight_tying") == "True" else {})


def _by_name(flavor: str, model: dict[str, Any]) -> dict[str, Any]:
    """The flavor's own section where it is the same model."""
    return _same(table_file(MODELS)["llama3"].get(flavor), model)


def _same(own: dict[str, Any] | None, model: dict[str, Any]) -> dict[str, Any]:
    """A flavor's section in place of a model that is the same."""
    if own is None:
        return model
    named, read = (build(Model, read_model(section)) for section in (own, model))
    shape = {"source": "", "name": ""}
    return dict(own) if named.model_copy(update=shape) == read.model_copy(update=shape) else model


def hidden_dim(dim: int, multiple_of: int, multiplier: str | None) -> int:
    """Width of the feed-forward network (torchtitan/models/llama3/model/model.py, FeedForward).

    >>> hidden_dim(4096, 1024, "1.3"), hidden_dim(256, 256, None), hidden_dim(8192, 4096, "3 / 2")
    (14336, 768, 32768)
    """
    width = int(2 * 4 * dim / 3)
    if multiplier is not None and (said := re.fullmatch(r"(\d{1,3}(?:\.\d+)?)(?: */ *(\d{1,3}))?", multiplier)):
        width = int(float(said[1]) / int(said[2] or 1) * width)
    return multiple_of * -(-width // multiple_of)
