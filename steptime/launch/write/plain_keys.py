"""The keys of a table that correspond to exactly one key of the plan: the inverse of the table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from steptime.job.edit import value_at
from steptime.launch.keys import KeyTable

_PATH = re.compile(r"[a-z_]+(\.[a-z_]+)+")


def plain_keys(config: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """Key -> value of a resolved plan, for all keys that are the only ones of the table with their meaning."""
    used = {key: rule for key, rule in table.rules.items() if rule.status == "used" and _PATH.fullmatch(rule.note)}
    speakers = Counter(rule.note for rule in used.values())
    found = {}
    for key, rule in used.items():
        value = value_at(config, rule.note)
        if speakers[rule.note] > 1 or value is None or isinstance(value, Mapping):
            continue
        if isinstance(_default(key, table), bool) and not isinstance(value, bool):  # a share, where it is on or off
            continue
        if rule.words:
            value = word_for(table, key, value)
        if value is not None:
            found[key] = value
    return found


def word_for(table: KeyTable, key: str, value: Any) -> str | None:
    """The word of a key that means `value`; None where it has none."""
    return next((word for word, meaning in table.rules[key].words.items() if meaning == value), None)


def unusual(found: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """What is not the framework's default anyway."""
    return {key: value for key, value in found.items() if value is not None and not _is_default(key, value, table)}


def _is_default(key: str, value: Any, table: KeyTable) -> bool:
    said = _default(key, table)
    return type(said) is type(value) and bool(said == value)


def _default(key: str, table: KeyTable) -> Any:
    return table.defaults[key][1] if key in table.defaults else table.unlisted.get(key)
