"""A framework's config keys: a table of what each means for cost (data/launch/*.yaml).

A table says of each key what it becomes (`used`, with the framework's own default), that it changes no cost (`irrelevant`), or
that it changes cost and no config expresses it (`unmodelled`, but for the values that switch it off). `section.*` stands for
all keys of a section that are not named themselves; `with` names the key beside which alone another one matters, `words` what the
words mean that a key takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from steptime.base.config import ConfigError, show
from steptime.base.document import parse_mapping, read_source
from steptime.launch.reading import Status

FOLDER = Path(__file__).parents[1] / "data" / "launch"


class KeyRule(NamedTuple):
    """What a key means."""

    status: Status
    note: str
    off: tuple[Any, ...] = ()
    """Values that switch an unmodeled key off."""
    beside: str = ""
    """The key that has to be on for this one to matter."""
    words: Mapping[str, Any] = {}
    """What the words mean that a key takes."""
    time_only: bool = False
    """An unmodelled key that leaves memory as it is."""


class KeyTable(NamedTuple):
    """The keys of a framework."""

    framework: str
    """Framework and release whose defaults fill in."""
    rules: dict[str, KeyRule]
    defaults: dict[str, tuple[str, Any]]
    """Key -> its name in a list of defaults, and its value where nobody says it."""
    unlisted: dict[str, Any]
    """The same of the table that this one extends, whose names the framework does not have."""
    renamed: dict[str, str]
    """Other spelling -> the one that the table has; of names that end in a dot, of all that begin so."""
    raw: dict[str, Any]
    """The whole file, for what only one framework has."""


class GivenKey(NamedTuple):
    """One key as a source gives it."""

    name: str
    """As the source spells it: --tensor-model-parallel-size, model.tensor_model_parallel_size."""
    key: str
    """As the table does: tensor_model_parallel_size."""
    value: Any
    shown: str = ""
    """The value in a list of flags, where it is another there: --no-x is true, and x false."""


@cache
def load_table(name: str) -> KeyTable:
    """The table data/launch/NAME.yaml, over the one that it extends."""
    raw = parse_mapping(*read_source(FOLDER / f"{name}.yaml"))
    base = load_table(raw["extends"]) if "extends" in raw else KeyTable("", {}, {}, {}, {}, {})
    rules, said = dict(base.rules), dict(raw.get("defaults") or {})
    for key, told in (raw.get("used") or {}).items():
        entry: dict[str, Any] = {"to": told} if isinstance(told, str) else told
        rules[key] = KeyRule("used", entry["to"], (), entry.get("with", ""), entry.get("words") or {})
        said |= {key: entry["default"]} if "default" in entry else {}
    for note, keys in (raw.get("irrelevant") or {}).items():
        rules |= dict.fromkeys(keys, KeyRule("irrelevant", note))
    for key, entry in (raw.get("unmodelled") or {}).items():
        rules[key] = KeyRule(
            "unmodelled", entry["why"], tuple(entry["off"]), entry.get("with", ""), time_only=entry.get("of") == "time"
        )
    listed, unlisted = base.defaults, base.unlisted
    if raw.get("only_these_defaults"):
        listed, unlisted = {}, {key: value for key, (_, value) in listed.items()}
    table = KeyTable(raw["framework"], rules, {}, unlisted, base.renamed | (raw.get("renamed") or {}), raw)
    table.defaults.update(named_defaults(dict(listed.values()) | said, table))
    return table


def named_defaults(said: Mapping[str, Any], table: KeyTable) -> dict[str, tuple[str, Any]]:
    """Defaults by the table's keys, each with its name in the framework's own words where the table wants those."""
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


def _section_rule(key: str, table: KeyTable) -> KeyRule | None:
    """The rule of the longest beginning that the table has (`section.*` is the section itself too)."""
    begun = [name for name in table.rules if name.endswith("*") and f"{key}.".startswith(name[:-1])]
    return table.rules[max(begun, key=len)] if begun else None


def rule_of(key: str, table: KeyTable) -> KeyRule | None:
    """What the table says of a key: itself, else its section; None where it knows neither."""
    return table.rules.get(key) or _section_rule(key, table)


def spelled(name: str, table: KeyTable) -> str:
    """A name as the table spells it: renamed whole, or by the longest beginning that ends in a dot, again and again.

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


def read_keys(said: Mapping[str, Any], table: KeyTable, source: str, *, dump: bool = False) -> list[GivenKey]:
    """The dotted keys of a file as the table spells them, those of its upper `layers` last: they are put over the others.

    `dump`: written by the framework, maybe of a later release: keys that are unknown but switched off (null, false, empty) pass.

    Raises:
        ConfigError: keys that the framework does not have, one line each, with the near match.
    """
    layers = table.raw.get("layers") or []
    height = {name: max((i for i, layer in enumerate(layers, 1) if name.startswith(layer)), default=0) for name in said}
    found = [GivenKey(name, spelled(name, table), said[name]) for name in sorted(said, key=height.__getitem__)]
    problems = [
        f"{source}: {name}: unknown key of {table.framework} (got {show(value)}){_near(name, table)}"
        for name, key, value, _ in found
        if rule_of(key, table) is None and not (dump and value in (None, False, "", [], {}))
    ]
    if problems:
        raise ConfigError(problems)
    return found


def _near(name: str, table: KeyTable) -> str:
    """The near match of an unknown name among those of its section, else among all: keys of a section begin alike."""
    section, dot, field = name.rpartition(".")
    known = [key for key in [*table.rules, *table.renamed] if not key.endswith(("*", "."))]
    fields = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] in {section, ""}]
    close = [section + dot + found for found in get_close_matches(field, fields, n=1, cutoff=0.8)]
    close = close or get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]!r}?" if close else "; remove it"
