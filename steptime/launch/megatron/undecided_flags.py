"""Flags in a variable to which a script's undecided test gives one of several texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from steptime.launch.keys import load_table, speaks_of_cost, spelled
from steptime.launch.shell.processes import Word
from steptime.launch.shell.scope import Unknown


def decided(
    words: Iterable[Word], read: Callable[[list[Word]], Mapping[str, tuple[str, str]]]
) -> tuple[list[Word], list[tuple[int, Unknown, str]]]:
    """The words with such variables replaced where all of their texts have the same flags that change cost.

    `read` gives the arguments of words, each with its flag and value. Where the texts differ in such flags, the variable's
    line, the reason, and those flags are returned too: what the job costs is then not known.
    """
    words = list(words)
    said: set[str] = set()
    kept: list[Word] = []
    open_: list[tuple[int, Unknown, str]] = []
    for word in words:
        own = (reason for reason in word.unresolved if reason.why.startswith(f"{word.text} "))
        cause = next((reason for reason in own if reason.choices), None)
        if cause is None:
            kept.append(word)
            continue
        said = said or _said(words, read)
        texts = [[Word(text, word.line) for text in choice.split()] for choice in cause.choices]
        costs = [_costly(read(text), said) for text in texts]
        if differ := {
            pair for cost in costs for pair in cost.values() if any(pair not in other.values() for other in costs)
        }:
            open_.append((word.line, cause, ", ".join(dict.fromkeys(flag for flag, _ in sorted(differ)))))
        elif costs[0]:
            kept += next(text for text in texts if read(text))
        else:
            kept.append(word)
    return kept, open_


def _said(words: list[Word], read: Callable[[list[Word]], Mapping[str, tuple[str, str]]]) -> set[str]:
    """The arguments that the words give, whatever is undecided among them."""
    table = load_table("megatron")
    choices = {text for word in words for reason in word.unresolved for text in reason.choices}
    sure = [word for word in words if not any(reason.choices for reason in word.unresolved)]
    texts = [sure, *([Word(text, 0) for text in choice.split()] for choice in choices)]
    return {spelled(argument, table) for text in texts for argument in read(text)}


def _costly(arguments: Mapping[str, tuple[str, str]], said: set[str]) -> dict[str, tuple[str, str]]:
    """The arguments that may change what a job costs; one that matters only with another does not where that is off."""
    table = load_table("megatron")
    found = {}
    for argument, value in arguments.items():
        rule = table.rules.get(spelled(argument, table))
        needed = (rule.only_with if rule else "") or ("num_experts" if argument.startswith("moe_") else "")
        if needed and needed not in said and table.defaults.get(needed, ("", None))[1] in (None, False, 0, 1):
            continue
        if speaks_of_cost(argument) if rule is None else rule.status != "irrelevant":
            found[argument] = value
    return found
