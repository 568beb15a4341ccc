"""What a script's variables are where a test that cannot be decided gives them one of several values."""

from __future__ import annotations

from itertools import takewhile

from steptime.launch.shell.scope import CLOSE, OPEN, Scope, Unknown, Value

_MOST_CHOICES = 16


def _choices(scope: Scope, texts: list[str]) -> tuple[str, ...]:
    """These texts, with what earlier tests leave open in them spelled out; none where no text is a flag, or there are many."""
    found = list(dict.fromkeys(texts))
    for at in range(len(scope.reasons)):
        mark, several = f"{OPEN}{at}{CLOSE}", scope.reasons[at].cause.choices
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


def _in_all(lists: list[list[str]]) -> int:
    """How many words of an array come before those that some tests add (ARGS+=(--flag value)); what differs begins with flags.

    >>> _in_all([["--lr", "1"], ["--lr", "1", "--bf16"]]), _in_all([["--lr", "1"], ["--lr", "2"]]), _in_all([])
    (2, 0, 0)
    """
    same = len([*takewhile(lambda words: len({*words}) == 1, zip(*lists, strict=False))])
    ends = (
        at for at in range(same, 0, -1) if all(text[at : at + 1] == [] or text[at].startswith("-") for text in lists)
    )
    return next(ends, 0)


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
        whole = [" ".join(text or []) for text in texts]
        before = _before(whole) if name not in joined.arrays and all(len(text or []) == 1 for text in texts) else ""
        lists = [text or [] for text in texts] if all(name in scope.arrays for scope in scopes) else []
        first = _in_all(lists)
        added = [" ".join(text[first:]) for text in lists] if first else [text[len(before) :] for text in whole]
        choices = _choices(joined, added)
        before, first, choices = (before, first, choices) if choices else ("", 0, _choices(joined, whole))
        mark = joined.mark(f"${name}", cause._replace(why=f"${name} depends on {cause.why}", choices=choices))
        line = max(item.line for value in values for item in value or []) if any(values) else 0
        joined.values[name] = [*(values[0] or [])[:first], Value(f"{before} {mark}" if before else mark, line)]
        if any(name in scope.arrays for scope in scopes):
            joined.arrays.add(name)
    return joined
