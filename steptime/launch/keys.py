"""A framework's config keys: a table of what each means for cost (data/launch/*.yaml).

A table gives for each key what it becomes (`used`, with the framework's own default), that it changes no cost (`irrelevant`),
that it changes cost a little and a similar setting is counted (`approximated`), or that it changes cost and no config expresses
it (`unmodeled`); the last two except for values that switch them off. `section.*` matches all keys of a section that are not
listed; `with` names the key that must be on for another one to matter, `words` the meanings of the words that a key accepts,
`families` the key that a source says is off where no key of such a beginning matters, also those that the table does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from steptime.base.document import parse_mapping, read_source
from steptime.launch.reading import Status

FOLDER = Path(__file__).parents[1] / "data" / "launch"


class KeyRule(NamedTuple):
    """The use of a key."""

    status: Status
    note: str
    off: tuple[Any, ...] = ()
    """Values that switch an unmodeled key off."""
    only_with: str = ""
    """The key that must be on for this one to matter."""
    words: Mapping[str, Any] = {}
    """Meanings of the words that a key accepts."""


class KeyTable(NamedTuple):
    """The keys of a framework."""

    framework: str
    """Framework and release whose defaults are used."""
    rules: dict[str, KeyRule]
    defaults: dict[str, tuple[str, Any]]
    """Key -> its name in a list of defaults, and its default value."""
    unlisted: dict[str, Any]
    """The same for the extended table, whose names the framework does not have."""
    renamed: dict[str, str]
    """Other spelling -> the table's; for names that end in a dot, a common prefix of names."""
    raw: dict[str, Any]
    """The whole file, for entries of one framework only."""


class GivenKey(NamedTuple):
    """One key as given by a source."""

    name: str
    """In the source's spelling: --tensor-model-parallel-size, model.tensor_model_parallel_size."""
    key: str
    """In the table's spelling: tensor_model_parallel_size."""
    value: Any
    shown: str = ""
    """The value shown in a list of flags, if different: --no-x is true, and x false."""


@cache
def table_file(name: str) -> dict[str, Any]:
    """The table data/launch/NAME.yaml as it is written."""
    return parse_mapping(*read_source(FOLDER / f"{name}.yaml"))


@cache
def load_table(name: str) -> KeyTable:
    """The table data/launch/NAME.yaml, over the one that it extends."""
    raw = table_file(name)
    base = load_table(raw["extends"]) if "extends" in raw else KeyTable("", {}, {}, {}, {}, {})
    rules, said = dict(base.rules), dict(raw.get("defaults") or {})
    for key, told in (raw.get("used") or {}).items():
        entry: dict[str, Any] = {"to": told} if isinstance(told, str) else told
        rules[key] = KeyRule("used", entry["to"], (), entry.get("with", ""), entry.get("words") or {})
        said |= {key: entry["default"]} if "default" in entry else {}
    for note, keys in (raw.get("irrelevant") or {}).items():
        rules |= dict.fromkeys(keys, KeyRule("irrelevant", note))
    statuses: tuple[Status, ...] = ("approximated", "unmodeled")
    for status in statuses:
        for key, entry in (raw.get(status) or {}).items():
            rules[key] = KeyRule(status, entry["why"], tuple(entry["off"]), entry.get("with", ""))
    listed, unlisted = base.defaults, base.unlisted
    if raw.get("only_these_defaults"):
        listed, unlisted = {}, {key: value for key, (_, value) in listed.items()}
    table = KeyTable(raw["framework"], rules, {}, unlisted, base.renamed | (raw.get("renamed") or {}), raw)
    table.defaults.update(named_defaults(dict(listed.values()) | said, table))
    return table


def named_defaults(said: Mapping[str, Any], table: KeyTable) -> dict[str, tuple[str, Any]]:
    """Defaults by the table's keys, each with its name in the framework's spelling where the table has it."""
    own = {new: old for old, new in (table.raw.get("renamed") or {}).items()} if table.raw.get("own_names") else {}
    return {spelled(name, table): (own.get(name, name), value) for name, value in said.items()}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty mapping is a value.

    >>> flatten({"a": {"b": 1, "c": {}}, "d": [2]})
    {'a.b': 1, 'a.c': {}, 'd': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


_ADAPTERS = re.compile(r"(?:^|[._])(?:lora|qlora|peft|adapters?)(?:[._]|$)")


def _section_rule(key: str, table: KeyTable) -> KeyRule | None:
    """The rule with the longest matching prefix in the table (`section.*` includes the section itself).

    A prefix that does not refer to adapters does not match a key that does: do_* is not do_lora.
    """
    begun = [name for name in table.rules if name.endswith("*") and f"{key}.".startswith(name[:-1])]
    if _ADAPTERS.search(key):
        begun = [name for name in begun if _ADAPTERS.search(name) or table.rules[name].status != "irrelevant"]
    return table.rules[max(begun, key=len)] if begun else None


def rule_of(key: str, table: KeyTable) -> KeyRule | None:
    """The table's rule for a key: its own, else its section's; None where it has neither."""
    return table.rules.get(key) or _section_rule(key, table)


def family(key: str, table: KeyTable) -> str:
    """The key that must be on for every key with this beginning, the first that fits, to matter; "" where there is none.

    >>> family("moe_bins", KeyTable("", {}, {}, {}, {}, {"families": {"moe_": "num_experts"}}))
    'num_experts'
    """
    return next((on for begun, on in (table.raw.get("families") or {}).items() if key.startswith(begun)), "")


def is_costly(name: str, table: KeyTable, *, unknown: bool = False) -> bool:
    """Whether a name has a rule by which it changes the plan; `unknown`: the answer for a name without a rule."""
    rule = rule_of(spelled(name, table), table)
    return unknown if rule is None else rule.status != "irrelevant"


def spelled(name: str, table: KeyTable) -> str:
    """A name as the table spells it: renamed whole, or by the longest prefix that ends in a dot, repeatedly.

    >>> spelled("strategy.ddp.bucket_size", KeyTable("", {}, {}, {}, {"strategy.": "model.", "strategy.ddp.": "ddp."}, {}))
    'ddp.bucket_size'
    """
    if name in table.rules:
        return name
    if name in table.renamed:
        return spelled(table.renamed[name], table)
    begun = [old for old in table.renamed if old.endswith(".") and name.startswith(old)]
    if not begun:
        return name
    longest = max(begun, key=len)
    found = spelled(table.renamed[longest] + name[len(longest) :], table)
    return found if found in table.rules or not _section_rule(name, table) else name


def read_keys(said: Mapping[str, Any], table: KeyTable) -> list[GivenKey]:
    """The dotted keys of a file in the table's spelling, those of its upper `layers` last: they override the others."""
    layers = table.raw.get("layers") or []
    height = {name: max((i for i, layer in enumerate(layers, 1) if name.startswith(layer)), default=0) for name in said}
    return [GivenKey(name, spelled(name, table), said[name]) for name in sorted(said, key=height.__getitem__)]


@cache
def _words(name: str, ends: str = "_") -> str:
    """A pattern of the words of data/launch/key_words.yaml under a name, between `ends`."""
    return rf"(?:^|[{ends}])(?:{'|'.join(table_file('key_words')[name])})(?:[{ends}]|$)"


def speaks_of_cost(key: str) -> bool:
    """Whether the name of an unknown key refers to something that changes cost.

    >>> [speaks_of_cost(key) for key in ("model.n_dense_layers", "codecarbon_dir", "log_layer_norms", "infini_attention.segment")]
    [True, False, False, True]
    >>> [speaks_of_cost(key) for key in ("frobnicate-tensor-size", "net_width", "shuffle_buffer_size", "tensorboard_queue_size")]
    [True, True, False, False]
    >>> [speaks_of_cost(key) for key in ("enable_esmoe", "esmoe-optimizer-mode", "log_moe_loss", "padded_output")]
    [True, True, False, False]
    >>> [speaks_of_cost(key) for key in ("training.vocab_size", "vocab_file", "vocab_path")]
    [True, False, False]
    """
    section, _, name = key.lower().replace("-", "_").rpartition(".")
    name = name[:200]  # no key is as long; time grows with the square of a name's length
    if name.startswith("_"):  # as JSON has comments
        return False
    costs = re.search(_words("cost"), name) or re.search(_words("cost_sections", "._"), section)
    others = (_words("no_cost"), table_file("key_words")["no_cost_words"])
    return bool(costs) and not any(re.search(pattern, name) for pattern in others)


def near_key(key: str, table: KeyTable) -> str:
    """The key that an unknown one is probably a misspelling of, if that key changes cost; "" otherwise."""
    telling = [name for name, rule in table.rules.items() if rule.status != "irrelevant" and "*" not in name]
    section, _, field = key.rpartition(".")
    close = get_close_matches(key, telling, n=1, cutoff=0.9)
    parts = (name.rpartition(".") for name in [*telling, *table.renamed])
    fields = [last for of, _, last in parts if of in {section, ""}]
    return next(iter(close or get_close_matches(field, fields, n=1, cutoff=0.88)), "")


@cache
def _plan_keys() -> dict[str, str]:
    """@figure -> the key of a plan that it decides."""
    said = table_file("key_words")["figures"]
    return {f"@{figure}": key for key, figures in said.items() for figure in figures.split()}


def plan_key(to: str) -> str:
    """What a table says that a key becomes, with a figure as the key of the plan that it decides.

    >>> plan_key("@micro"), plan_key("data.seqlen")
    ('data.microbatch_sz', 'data.seqlen')
    """
    return _plan_keys().get(to, to)
