"""Releases of Megatron-LM: by which arguments each is recognized, and the defaults of those before Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from steptime.launch.keys import KeyTable, load_table, spelled, table_file

_OF_2021 = "Megatron-LM (2021 and 2022)"
_FORK = "Megatron-DeepSpeed (2021 and 2022)"
_BEFORE_2 = "Megatron-LM (2019 and 2020)"
OLD_ARGUMENTS = ("batch_size", "model_parallel_size")
"""Arguments that release 2.0 replaced and stops at (NVIDIA/Megatron-LM v2.0 megatron/arguments.py, parse_args)."""
_OFF_BEFORE_2 = {
    "masked_softmax_fusion": ("scaled_upper_triang_masked_softmax_fusion", False),
    "bias_gelu_fusion": ("bias_gelu_fusion", False),
}
"""Fused kernels that are off by default before it (v1.1.5 megatron/arguments.py)."""
_OF_OWN_LAYERS = {"23.04", "23.06", "core 0.4", "core 0.5"}
"""Releases whose parsers have Megatron's own layers by default."""
_OF_CORE = "core 0.8"
"""From here on models are Megatron-Core's unless --use-legacy-models is given."""
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
    listed = {key: table.defaults[key] for key in load_table("megatron").raw["of_2021"]}
    unlisted = {key: value for key, (_, value) in table.defaults.items() if key not in listed}
    older = is_before_2(arguments)
    name = _FORK if plain(arguments.get("deepspeed")) is True else _BEFORE_2 if older else _OF_2021
    return table._replace(framework=name, defaults=listed | (_OFF_BEFORE_2 if older else {}), unlisted=unlisted)


def fitting_release(arguments: Collection[str], *, dump: bool = False) -> str:
    """The releases whose parsers have all of the arguments, from first to last; for a dump, the one with the nearest parser.

    "" where no release has them all, or, for a dump, nearly all.

    >>> fitting_release(["DDP_impl", "num_layers"]), fitting_release(["num_layers", "muon_momentum"])
    ('2.0 to 23.06', 'core 0.16 to core 0.19')
    """
    said = set(arguments) - _derived() - {"world_size", "rank"}
    if dump:
        apart = {release: len(said ^ names) for release, names in _parsed().items()}
        nearest = min(apart, key=lambda release: apart[release])
        return nearest if apart[nearest] <= len(said) // 5 else ""
    fits = [release for release, names in _taken().items() if said <= names]
    return "" if not fits else fits[0] if len(fits) == 1 else f"{fits[0]} to {fits[-1]}"


@cache
def _parsed() -> dict[str, frozenset[str]]:
    """The arguments that each release's parser takes: it stops at those that 2.0 replaced."""
    names: frozenset[str] = frozenset()
    found: dict[str, frozenset[str]] = {}
    for release, change in table_file("megatron_releases")["releases"].items():
        names = names.union(change.get("adds") or []).difference(change.get("drops") or [], OLD_ARGUMENTS)
        found[str(release)] = names
    return found


@cache
def _taken() -> dict[str, frozenset[str]]:
    """The arguments that each release's parser takes, also as the table spells them.

    >>> [{"norm_epsilon", "layernorm_epsilon"} <= _taken()[release] for release in ("23.06", "core 0.4")]
    [False, True]
    """
    table = load_table("megatron")
    stored = {flag.replace("-", "_"): argument for flag, argument in table.raw["flag_names"].items()}
    spellings = ((release, names, {stored.get(name, name) for name in names}) for release, names in _parsed().items())
    return {release: names.union(own, (spelled(name, table) for name in own)) for release, names, own in spellings}


@cache
def _derived() -> frozenset[str]:
    """Arguments that no parser has and that Megatron-LM derives from others."""
    derived = {key for key, rule in load_table("megatron").rules.items() if rule.note.startswith("derived")}
    return frozenset(derived.difference(*_parsed().values()))


def of_core(arguments: Collection[str]) -> tuple[bool, bool]:
    """Whether only releases whose models are Megatron-Core's have all of the arguments, and whether one of them has.

    Not only these where the legacy models are asked for. The own layers of these have one attention, with all scores:
    --use-flash-attn is read by the legacy models only (NVIDIA/Megatron-LM core models/gpt/gpt_layer_specs.py,
    get_gpt_layer_local_spec; legacy/model/transformer.py).

    >>> of_core(["attention_backend"]), of_core(["use_flash_attn"]), of_core(["data_impl"])
    ((True, True), (False, True), (False, False))
    """
    first, _, last = fitting_release(arguments).partition(" to ")
    order = list(_parsed())
    core = order[order.index(_OF_CORE) :]
    return first in core and "use_legacy_models" not in arguments, (last or first) in core


def own_layers_by_default(arguments: Collection[str]) -> bool:
    """Whether Megatron's own layers are the default: those of `--transformer-impl local`, up to core 0.5.

    NVIDIA/Megatron-LM megatron/arguments.py at the tags 23.04 to core_v0.5.0: the default of --transformer-impl is local;
    only the models of Megatron-Core (--use-mcore-models, pretrain_gpt.py) have TransformerEngine's layers in any case.

    >>> own_layers_by_default(["data_impl", "recompute_granularity"]), own_layers_by_default(["num_layers"])
    (True, False)
    """
    if {"transformer_impl", "use_mcore_models", "deprecated_use_mcore_models"} & set(arguments):
        return False
    return fitting_release(arguments).rpartition("to ")[2] in _OF_OWN_LAYERS


def takes(name: str, arguments: Collection[str]) -> bool:
    """Whether the parser of the last release that has all of the arguments has one more.

    >>> takes("apply_rope_fusion", ["data_impl"]), takes("apply_rope_fusion", ["num_layers"])
    (False, True)
    """
    return name in _parsed().get(fitting_release(arguments).rpartition("to ")[2], ())
