"""The variables after a test that is not decided."""

from __future__ import annotations

from itertools import zip_longest

from steptime.launch.shell.scope import Scope, Unknown, Value, mark_of

_MOST_CHOICES = 16


def _choices(scope: Scope, texts: list[str]) -> tuple[str, ...]:
    """These texts, with what earlier tests leave open in them spelled out; none where no text is a flag, or there are many."""
    found = list(dict.fromkeys(texts))
    for at in range(len(scope.reasons)):
        mark, several = mark_of(at), scope.reasons[at].cause.choices
        if several and any(mark in text for text in found):
            found = [text.replace(mark, choice) for text in found for choice in several]
    flags = any(text.lstrip().startswith("-") for text in found)
    return tuple(dict.fromkeys(found)) if flags and len(found) <= _MOST_CHOICES else ()


def _before(texts: list[str]) -> str:
    """The text to which some tests add words (CMD="$CMD --flag"), as all of these begin with it; "" where they do not.

    >>> _before(["torchrun train.py", "torchrun train.py --bf16"]), _before(["--lr 1", "--lr 10"])
    ('torchrun train.py', '')
    """
    least = min(texts, key=len).rstrip()
    whole = all(text.startswith(least) and not text[len(least) :][:1].strip() for text in texts)
    return least if whole else ""


def _added(joined: Scope, lists: list[list[Value]]) -> tuple[list[Value], tuple[str, ...]]:
    """The elements with which an array begins, and the texts that tests add to them (CMD+=(--flag)); none where they do not."""
    texts = [[item.text for item in values] for values in lists]
    same = next((i for i, items in enumerate(zip_longest(*texts)) if len({*items}) > 1), 0)
    choices = _choices(joined, [" ".join(text[same:]) for text in texts])
    return (lists[0][:same], choices) if choices else ([], ())


def merged(scopes: list[Scope], cause: Unknown) -> Scope:
    """One scope from several possible ones: a variable keeps its value where all agree."""
    joined = scopes[0].copy()
    joined.named = {name for scope in scopes for name in scope.named}
    joined.cleared = {name for name in joined.cleared if all(name in scope.cleared for scope in scopes)}
    for name in {name for scope in scopes for name in scope.values}:
        values = [scope.values.get(name) for scope in scopes]
        texts = [None if value is None else [item.text for item in value] for value in values]
        if all(text == texts[0] for text in texts):
            continue
        whole, array = [" ".join(text or []) for text in texts], any(name in scope.arrays for scope in scopes)
        before = _before(whole) if not array and all(len(text or []) == 1 for text in texts) else ""
        choices = _choices(joined, [text[len(before) :] for text in whole])
        before, choices = (before, choices) if choices else ("", _choices(joined, whole))
        kept, added = _added(joined, [value or [] for value in values]) if array else ([], ())
        why = cause._replace(why=f"${name} depends on {cause.why}", choices=added or choices)
        mark = joined.mark(f"${name}", why)
        line = max(item.line for value in values for item in value or []) if any(values) else 0
        one = Value(f"{before} {mark}" if before else mark, line)
        joined.values[name] = [*kept, one] if added else [one]
        if array:
            joined.arrays.add(name)
    return joined
