"""Keys of a trainer's files as its table spells them: switches, renamed keys, and defaults that come with others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.launch.keys import GivenKey, KeyTable, rule_of, spelled
from steptime.launch.python.program_calls import passed_on


def plainly(said: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """Keys with a switch no_X as X, where the trainer has only X; and what a key implies where nothing else is said."""
    found: dict[str, Any] = {}
    # a dtype that is "auto" by default gives way to fp16
    unsaid = {} if said.get("fp16") else {key: value for key, (_, value) in table.defaults.items()}
    for name, others in (table.raw.get("superseded") or {}).items():
        if any(said.get(other, unsaid.get(other)) for other in others):
            said = {key: value for key, value in said.items() if key != name}
    for by, more in (table.raw.get("implied") or {}).items():
        said = more | said if by in said else said
    for name, value in said.items():
        switch = name.removeprefix("no_")
        unlisted = switch != name and rule_of(spelled(name, table), table) is None
        known = unlisted and spelled(switch, table) in table.rules and str(value).lower() in {"true", "false"}
        found |= {switch: str(value).lower() == "false"} if known else {name: value}
    return found


_DIVIDED = re.compile(r"\b(?:train_)?batch_size\s*//")


def renamed_with(given: list[GivenKey], table: KeyTable, code: str = "") -> list[GivenKey]:
    """Names in custom programs, which a table reads only together with another key, and where nothing else sets the same.

    A batch that the program's code divides is that of all devices; what it passes on is under the key that it passes it to.
    """
    given = passed_on(given, code)
    if _DIVIDED.search(code):
        whole = {"batch_size", "train_batch_size"}
        given = [item._replace(key="global_batch_size") if item.name in whole else item for item in given]
    for by, names in (table.raw.get("renamed_with") or {}).items():
        known = {item.key for item in given}
        new = {name: key for name, key in names.items() if by in known and key not in known}
        given = [
            item if item.key == "global_batch_size" else item._replace(key=new.get(item.name, item.key))
            for item in given
        ]
    return given


def defaults_with(given: list[GivenKey], table: KeyTable, where: str = "defaults_with") -> dict[str, Any]:
    """Defaults with a key of the file: any, of a section (fsdp_config.), of a value (type=mistral), or without another (a!b)."""
    found: dict[str, Any] = {}
    keys = {item.key for item in given}
    for told, more in (table.raw.get(where) or {}).items():
        name, _, without = told.partition("!")
        name, _, value = name.partition("=")
        for item in given if without not in keys else ():
            named = item.name.startswith(name) if name.endswith(".") else item.key == name
            found |= more if named and (not value or str(item.value) == value) else {}
    return found
