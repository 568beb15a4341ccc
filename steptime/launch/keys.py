"""A framework's config keys: a table of what each means for cost (data/launch/*.yaml), and a file's keys sorted by it.

A table says of each key what it becomes (`used`, with the framework's own default), that it changes no cost (`irrelevant`), or
that it changes cost and no config expresses it (`unmodelled`, but for the values that switch it off). `section.*` stands for
all keys of a section that are not named themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from steptime.base.config import ConfigError, show
from steptime.base.document import parse_mapping, read_source
from steptime.launch.reading import Flag, Status

FOLDER = Path(__file__).parent.parent / "data" / "launch"
_OFF = "as modelled"
MOST = 10**12
"""The largest whole number taken: more than any size, count or buffer."""


class Entry(NamedTuple):
    """What a key means."""

    status: Status
    note: str
    off: tuple[Any, ...] = ()
    """Values that switch an unmodelled key off."""


class Table(NamedTuple):
    """The keys of a framework."""

    framework: str
    """Framework and release whose defaults fill in."""
    entries: dict[str, Entry]
    defaults: dict[str, Any]
    """Defaults of keys that are used."""
    renamed: dict[str, str]
    """Older spelling -> the one that the table has."""
    raw: dict[str, Any]
    """The whole file, for what only one framework has."""


@cache
def load_table(name: str) -> Table:
    """The table data/launch/NAME.yaml, over the one that it extends."""
    raw = parse_mapping(*read_source(FOLDER / f"{name}.yaml"))
    base = load_table(raw["extends"]) if "extends" in raw else None
    entries = dict(base.entries) if base else {}
    defaults = dict(base.defaults) if base else {}
    for key, said in (raw.get("used") or {}).items():
        if isinstance(said, str):
            entries[key] = Entry("used", said)
            continue
        entries[key] = Entry("used", said["key"])
        defaults[key] = said["default"]
    entries |= {key: Entry("irrelevant", note) for key, note in (raw.get("irrelevant") or {}).items()}
    for key, said in (raw.get("unmodelled") or {}).items():
        entries[key] = Entry("unmodelled", said["why"], tuple(said["off"]))
    for key in raw.get("dropped") or []:
        defaults.pop(key, None)
    return Table(raw["framework"], entries, defaults, raw.get("renamed") or {}, raw)


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


def text_of(value: Any) -> str:
    """A value as a list of flags shows it: JSON, cut where it is long.

    >>> text_of(True), text_of("full"), text_of([1, None])
    ('true', 'full', '[1, null]')
    """
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def entry_of(key: str, table: Table) -> Entry | None:
    """What the table says of a key: itself, else the longest beginning that it has (`section.*` is the section itself too)."""
    if key in table.entries:
        return table.entries[key]
    begun = [name for name in table.entries if name.endswith("*") and f"{key}.".startswith(name[:-1])]
    return table.entries[max(begun, key=len)] if begun else None


def spelled(name: str, table: Table) -> str:
    """A key as the table spells it: renamed whole, or by the longest beginning that ends in a dot.

    >>> spelled("strategy.ddp.bucket_size", Table("", {}, {}, {"strategy.": "model.", "strategy.ddp.": "ddp."}, {}))
    'ddp.bucket_size'
    """
    if name in table.renamed:
        return table.renamed[name]
    begun = [old for old in table.renamed if old.endswith(".") and name.startswith(old)]
    return table.renamed[max(begun, key=len)] + name[len(max(begun, key=len)) :] if begun else name


def sort_keys(
    said: Mapping[str, Any],
    table: Table,
    source: str,
    defaults: Mapping[str, Any] | None = None,
    *,
    dump: bool = False,
) -> tuple[Values, list[Flag]]:
    """Every key of a file with its status, and the values of those that are used, the framework's defaults filled in.

    `said`: dotted keys. `defaults`: over the table's own, where the file is of another release. `dump`: written by the framework,
    maybe of a later release: keys that are unknown but switched off (null, false, empty) pass.

    Raises:
        ConfigError: keys that the framework does not have, one line each, with the near match.
    """
    problems: list[str] = []
    flags: list[Flag] = []
    values: dict[str, Any] = {}
    for name, value in said.items():
        key = spelled(name, table)
        entry = entry_of(key, table)
        if entry is None and dump and value in (None, False, "", [], {}):
            entry = Entry("irrelevant", "unknown, and switched off")
        if entry is None:
            close = get_close_matches(name, _like(name, table), n=1, cutoff=0.8)  # keys of a section begin alike
            hint = f"; did you mean {close[0]!r}?" if close else "; remove it"
            problems.append(f"{source}: {name}: unknown key of {table.framework} (got {show(value)}){hint}")
            continue
        if entry.status == "used" and not (value is None and key in values):
            values[key] = value
        off = entry.status == "unmodelled" and _switched_off(value, entry)
        flags.append(Flag(name, text_of(value), "irrelevant" if off else entry.status, _OFF if off else entry.note))
    if problems:
        raise ConfigError(problems)
    own = {new: old for old, new in table.renamed.items()} if table.raw.get("own_names") else {}
    for key, value in (table.defaults | dict(defaults or {})).items():
        if key not in values:
            values[key] = value
            name = own.get(key, key)
            flags.append(Flag(name, text_of(value), "default", f"{table.entries[key].note}; {table.framework}'s own"))
    return Values(source, values), flags


def _switched_off(value: Any, entry: Entry) -> bool:
    """Whether a value leaves an unmodelled key without effect; null does so where false, 0 or nothing does."""
    if value is None and any(not word for word in entry.off):
        return True
    return any(value == word and type(value) is type(word) for word in entry.off)


def _like(name: str, table: Table) -> Iterable[str]:
    """Keys of the same section; all keys where there is no such section."""
    section = name.rpartition(".")[0]
    known = [key for key in [*table.entries, *table.renamed] if not key.endswith("*")]
    return [key for key in known if key.rpartition(".")[0] == section] or known


def remark(flags: Iterable[Flag], changes: Mapping[str, tuple[Status, str]], table: Table) -> list[Flag]:
    """The flags with other status and note for some, told by the table's names; a default that changes no cost is not listed."""
    changed = []
    for flag in flags:
        key = spelled(flag.name, table)
        status, note = changes.get(key, (flag.status, flag.note))
        if flag.status == "default" and status == "irrelevant":
            continue
        if flag.status == "default" and status == "used":
            status, note = "default", f"{note}; {table.framework}'s own"
        changed.append(flag._replace(status=status, note=note))
    return changed


class Values:
    """The values of a file's keys, read with their types."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = dict(values)

    def fail(self, key: str, problem: str) -> ConfigError:
        """The error line of a key."""
        return ConfigError(f"{self.source}: {key}: {problem}")

    def get(self, key: str) -> Any:
        """The value as it stands; None where nothing says it."""
        return self.values.get(key)

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`.

        Raises:
            ConfigError: it is missing, or no such number.
        """
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "missing, and required")
        if isinstance(value, str) and value.strip().lstrip("-").isdigit():
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(key, f"expected a whole number of at least {least} (got {show(value)})")
        if value > MOST:
            raise self.fail(key, f"must be at most {MOST:,} (got {show(value)})")
        return value

    def yes(self, key: str, *, default: bool = False) -> bool:
        """True or false.

        Raises:
            ConfigError: it is neither.
        """
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in {"true", "false"}:
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false (got {show(value)})")
        return value

    def word(self, key: str, words: Mapping[str, Any]) -> Any:
        """What a word stands for, whatever its case.

        Raises:
            ConfigError: it is not one of the words.
        """
        value = self.get(key)
        folded = {name.lower(): found for name, found in words.items()}
        if str(value).lower() not in folded:
            raise self.fail(key, f"expected one of {', '.join(words)} (got {show(value)})")
        return folded[str(value).lower()]
