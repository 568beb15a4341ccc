"""The settings of one job: the value of each key, the framework's default where it is not given, and its use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

from steptime.base.config import ConfigError, show
from steptime.launch.keys import GivenKey, KeyTable, family, named_defaults, near_key, plan_key, rule_of, speaks_of_cost
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.reading import NOT_MODELED, LaunchFlag, Reading, Sets, Status, is_other_model, open_with, refusals

MOST = 10**12
"""Largest whole number that is accepted: larger than any size, count or buffer."""
_NOTHING: tuple[Any, ...] = (None, "", [], {}, ())
_OFF_WORDS = frozenset({"0", "0.0", "none", "null", "false", "off", "no"})
UNKNOWN = "not an option"
"""First words of the note for a key that is assumed irrelevant because of its name."""


class JobKeys:
    """The keys of a job under the table's names. Problems are collected in `problems` and reported together by `reading`.

    `given`: what the source says, in order. `defaults`: names and values over the table's own, and whose they are. `sets`: what
    the user sets. `spell`: the source's spelling of a key that it does not have.
    """

    def __init__(
        self,
        source: str,
        table: KeyTable,
        given: Iterable[GivenKey],
        *,
        defaults: Mapping[str, Any] | None = None,
        defaults_of: str = "",
        sets: Sets = None,
        spell: Callable[[str], str] = str,
    ) -> None:
        self.source, self.table, self.sets, self.spell = source, table, sets, spell
        self.given = list(given)
        over = named_defaults(defaults or {}, table)
        self.defaults = table.defaults | over
        self.defaults_of = dict.fromkeys(over, defaults_of or table.framework)
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        """Key -> where its value comes from."""
        for name, key, value, _ in self.given:
            if value is not None or key not in self.values:
                self.values[key], self.names[key] = value, name
        self.fates: dict[str, tuple[Status, str]] = {}
        """Keys whose use in this job differs from the table, and why."""
        self.without_value: dict[str, str] = {}
        """Keys whose value is known only by running the script, and the fix."""
        self.assumed_flags: list[LaunchFlag] = []
        """Assumptions besides the source's keys."""
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.left_open: dict[str, str] = {}
        """Config keys that the file does not set, and why."""
        self.devices_per_node: int | None = None
        self.launcher: Mapping[str, Any] | None = table.raw.get("launcher")
        """`devices` of the framework's own launcher by default (a number, or "node": all of one), and the source."""
        self.nearby = NearbyFiles()
        """Files that it may name."""
        self.tokenizer = ""
        """Whose official tokenizer it says that it has, besides its keys."""

    # --- values ---

    def name(self, key: str) -> str:
        """A key in the source's spelling."""
        return self.names.get(key) or self.spell(self.defaults[key][0] if key in self.defaults else key)

    def error(self, key: str, problem: str) -> ConfigError:
        """The problem of a key, after those already collected."""
        return ConfigError(dict.fromkeys([*self.problems, f"{self.source}: {self.name(key)}: {problem}"]))

    def fail(self, key: str, problem: str) -> None:
        """Record the problem of a key."""
        self.problem(f"{self.name(key)}: {problem}")

    def problem(self, what: str) -> None:
        """Record a problem of several keys."""
        self.problems.append(f"{self.source}: {what}")

    def ask(self, path: str, why: str, value: str = "N") -> None:
        """Leave a key of the plan open: the file does not set it."""
        self.left_open[path] = f"{why}; add --set {path}={value}"

    def put(self, key: str, value: Any, by: str = "") -> None:
        """Set a key to a value derived from others; `by` names them, where the source may also set the key."""
        self.values[key] = value
        if by:
            self.names[key] = by

    def get(self, key: str) -> Any:
        """The value unchanged; None where it is not given."""
        if key in self.values:
            return self.values[key]
        return self.defaults[key][1] if key in self.defaults else self.table.unlisted.get(key)

    def whole(self, key: str, *, least: int = 1) -> int | None:
        """A whole number of at least `least`; None where it is not given, or invalid, which is recorded."""
        value = self.get(key)
        if value is None:
            return None
        if key in self.without_value:
            self.problem(self.without_value[key])
            return None
        digits = isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,30}\s*", value)
        value = int(value) if digits or (isinstance(value, float) and value.is_integer()) else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(key, f"expected a whole number of at least {least} (got {show(value)}){self._fix(key, value)}")
        elif value > MOST:
            self.fail(key, f"must be at most {MOST:,} (got {show(value)})")
        else:
            return value
        return None

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; required where there is no default."""
        if self.get(key) is None and default is None:
            self.fail(key, "required key is missing")
        found = self.whole(key, least=least)
        return found if found is not None else max(least, default or 1)

    def number(self, key: str) -> float:
        """A finite number; 0 where it is not given."""
        value = self.get(key)
        with suppress(TypeError, ValueError, OverflowError):
            if isfinite(found := float(value or 0)):
                return found
        self.fail(key, f"expected a number (got {show(value)})")
        return 0.0

    def on(self, key: str, *, default: bool = False) -> bool:
        """Whether a switch is on."""
        value = self.get(key)
        word = str(value).lower()
        if value is None or word in {"true", "false", "0", "1", "yes", "no"}:
            return default if value is None else word in {"true", "1", "yes"}
        self.fail(key, f"expected true or false (got {show(value)})")
        return default

    def _fix(self, key: str, value: Any) -> str:
        """The user's fix where a template's placeholder stands for a key of the plan."""
        rule = self.table.rules.get(key)
        plan = rule is not None and re.fullmatch(r"(?:model|parallelism|data)\.\w+", rule.note)
        return f"; add --set {rule.note}=N" if rule and plan and re.search(r"<\w", str(value)) else ""

    def word(self, key: str, words: Mapping[str, Any] | None = None) -> Any:
        """The meaning of a key's word in the table, else in `words`, ignoring case; an unknown word is a problem."""
        words = words or self.table.rules[key].words
        found = self.meaning(key, words)
        if found is None:
            self.fail(key, f"expected one of {', '.join(words)} (got {show(self.get(key))})")
        return next(iter(words.values())) if found is None else found

    def meaning(self, key: str, words: Mapping[str, Any] | None = None) -> Any:
        """The same, but None for an unknown word; of a dotted path (torch.float32) the last part may be the word."""
        said = str(self.get(key)).lower()
        folded = {name.lower(): found for name, found in (words or self.table.rules[key].words).items()}
        return folded.get(said, folded.get(said.rpartition(".")[2]))

    def words(self, key: str) -> list[str]:
        """The words of a key with several: a list, or one text of them."""
        value = self.get(key)
        return [] if value is None else re.findall(r"[\w.+-]+", str(value))

    # --- the use of each key ---

    def becomes(self, key: str, what: str) -> None:
        """Record that a key is used differently from the table."""
        self.fates[key] = ("used", what)

    def leave_out(self, key: str, why: str) -> None:
        """Record that a key changes cost and is not in the config."""
        self.fates[key] = ("unmodeled", why)

    def approximate(self, key: str, what: str) -> None:
        """Record what is modeled instead of a key's setting."""
        self.fates[key] = ("approximated", what)

    def without_effect(self, key: str, why: str) -> None:
        """Record that a key changes nothing in this job."""
        self.fates[key] = ("irrelevant", why)

    def flags(self) -> list[LaunchFlag]:
        """Every given key, and the defaults in use that matter."""
        found = [self._flag(item) for item in self.given]
        for key, (name, value) in self.defaults.items():
            rule = self.table.rules[key]
            status, note = self.fates.get(key, ("default", rule.note))
            if key in self.values or status == "irrelevant":
                continue
            if not rule.only_with or (rule.only_with in self.values and self._matters(rule.only_with)):
                kind = "default" if status == "used" else status
                whose = self.defaults_of.get(key, self.table.framework)
                found.append(LaunchFlag(self.spell(name), text_of(value), kind, f"{whose}: {plan_key(note)}"))
        return found

    def _flag(self, given: GivenKey) -> LaunchFlag:
        name, key, value, _ = given
        by = self.names.get(key, name)
        status, note = self.fates.get(key) or self._fate(given)
        if by != name and value is not None and self.values[key] != value:
            status, note = "irrelevant", f"{by} overrides it"
        return LaunchFlag(name, given.shown or text_of(value), status, plan_key(note))

    def _fate(self, given: GivenKey) -> tuple[Status, str]:
        """The table's use of a key and its value."""
        key, value = given.key, given.value
        rule = rule_of(key, self.table)
        if rule is None:
            return self._unknown(key, value)
        if rule.status == "irrelevant":
            return "irrelevant", rule.note
        if rule.status == "used" and value is None:
            return "irrelevant", f"unset: {plan_key(rule.note)}"
        if rule.status in {"unmodeled", "approximated"} and _is_off(value, rule.off):
            return "irrelevant", f"off: {rule.note}"
        if not self._matters(rule.only_with):
            return "irrelevant", f"only with {self.name(rule.only_with)}"
        return rule.status, rule.note

    def _unknown(self, key: str, value: Any) -> tuple[Status, str]:
        """A key that the table does not have: judged by its name and value."""
        framework = self.table.framework
        if value in (*_NOTHING, False) or str(value).lower() in _OFF_WORDS:
            return "irrelevant", f"off; not an option of {framework}"
        if (on := family(key, self.table)) in self.values and not self._matters(on):
            return "irrelevant", f"only with {self.name(on)}"
        near = near_key(key, self.table)
        if not near and not speaks_of_cost(key):
            return "irrelevant", f"{UNKNOWN} of {framework}; its name suggests no cost"
        why = f"did you mean {self.spell(near)}?" if near else "its name suggests a cost"
        return "unmodeled", f"not an option of {framework}; {why}"

    def _matters(self, only_with: str) -> bool:
        """Whether the key that activates a rule is on: not empty, false, or a default size or word; "" is no key."""
        value, (_, default) = self.get(only_with), self.table.defaults.get(only_with, ("", None))
        off = value in (*_NOTHING, False) or _same(value, "false") or (default is not True and _same(value, default))
        return not only_with or not off

    def reading(self, config: dict[str, Any], left_open: Mapping[str, str] | None = None) -> Reading:
        """The config with the use of every key.

        Raises:
            ConfigError: the problems gathered, one line each.
        """
        flags = [*self.flags(), *self.assumed_flags]
        unknown = [flag.name for flag in flags if flag.status == "irrelevant" and flag.note.startswith(UNKNOWN)]
        notes = list(self.notes)
        if unknown:
            notes.append(f"not options of {self.table.framework}, assumed to have no cost: {', '.join(unknown)}")
        config = config | ({"notes": notes} if notes else {})
        open_keys = {**(left_open or {}), **self.left_open}
        reading = Reading(self.source, self.table.framework, config, flags, open_keys, self.devices_per_node)
        if self.problems:
            if any(map(is_other_model, flags)):
                raise ConfigError(refusals(self.source, flags, NOT_MODELED))
            refused = refusals(self.source, flags)
            raise ConfigError(dict.fromkeys([*self.problems, *refused, *open_with(reading, self.sets)]))
        return reading


def _is_off(value: Any, off: Iterable[Any]) -> bool:
    """Whether a value leaves an unmodeled key without effect: one of `off`, or nothing where these have that or are none."""
    off = [*off]
    nothing = value in _NOTHING and value is not False and not all(off or [""])
    return nothing or any(_same(value, word) for word in off)


def _same(value: Any, word: Any) -> bool:
    if isinstance(word, int | float) and not isinstance(word, bool) and not isinstance(value, bool):
        try:
            return float(value) == float(word)
        except (TypeError, ValueError):
            return False
    return str(value).lower() == str(word).lower()


def text_of(value: Any) -> str:
    """A value for a list of flags: JSON, cut where it is long.

    >>> text_of(True), text_of("full"), text_of([1, None])
    ('true', 'full', '[1, null]')
    """
    text = " ".join(value.split()) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
