"""Flags that a script without a launch command holds in variables (MODEL_ARGS, TRAINING_OPTIONS)."""

from __future__ import annotations

import re

from steptime.launch.shell.expansion import Expander
from steptime.launch.shell.processes import Word
from steptime.launch.shell.scope import Scope, Value

_HOLDS_FLAGS = re.compile(r"^(?!.*(?:DISTRIB|TORCH|LAUNCH|NSYS|PROFIL)).*(?:ARGS|OPTIONS|OPTS|FLAGS)$", re.IGNORECASE)
"""Names of variables that hold flags of a program, and not of what starts it."""
_OF_LAUNCHER = re.compile(r"--(?:nproc|ntasks)[-_]per[-_]node\b|--node[-_]rank\b")
"""Options of torchrun and srun."""


def flags_in(scope: Scope, name: str) -> tuple[list[Word], list[Word]]:
    """The flags in variables, without variables that another one contains, and those of torchrun; none without training flags."""
    expand = Expander(scope, name)
    held = [(key, values) for key, values in scope.values.items() if key not in scope.outside]
    texts = [" ".join(value.text for value in values).strip() for _, values in held]
    words: list[Word] = []
    starts: list[Word] = []
    for text, (key, values) in zip(texts, held, strict=True):
        again = any(text in other and text != other for other in texts)
        if values and not again and text.startswith("--"):
            fields = expand.fields(f"${{{key}[@]}}" if key in scope.arrays else f"${key}", values[0].line)
            (starts if _OF_LAUNCHER.search(text) else words).extend(word_of(value, scope) for value in fields)
    flags = {word.text.replace("_", "-") for word in words}
    return (words, starts) if "--num-layers" in flags else ([], [])


def unknown_flags(scope: Scope) -> str:
    """The first variable that holds flags by its name and has no known value, with the reason; "" where there is none."""
    for key, values in scope.values.items():
        reasons = scope.reasons_of(values[0].text) if len(values) == 1 and key not in scope.outside else []
        if reasons and _HOLDS_FLAGS.search(key) and scope.shown(values[0].text).startswith("$"):
            return reasons[0].cause.told("put the flags in a file (args.txt)")
    return ""


def word_of(value: Value, scope: Scope) -> Word:
    """A word as an error shows it, with what is missing in it."""
    return Word(scope.shown(value.text), value.line, tuple(reason.cause for reason in scope.reasons_of(value.text)))
