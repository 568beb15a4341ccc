"""What commands in $(...) print that need no running: sums, parts of a text, numbers in a row, the length of a list."""

from __future__ import annotations

import re

from steptime.launch.shell.changed_texts import Fill
from steptime.launch.shell.scope import Scope

_SUM = re.compile(r"\s*expr\s+([^|;&<>\n]+)|\s*echo\s+\"?([^|;&<>\n\"]+)\"?\s*\|\s*bc\s*")
"""Whole-number arithmetic by other commands: $(expr 32 / $GPUS), $(echo "$A * $B" | bc)."""
_CUT = re.compile(r"\s*echo\s+([^|;&<>\n]+?)\s*\|\s*cut\s+-d\s*(['\"]?)(.)\2\s+-f\s*(\d{1,3})\s*")
"""One of the parts of a text: $(echo $SLURM_TASKS_PER_NODE | cut -d '(' -f 1)."""
_SPACED = re.compile(
    r"\s*echo\s+(\"[^\"|;&<>]*\"|\$\{?\w+\}?)"
    r"(?:\s*\|\s*(?:tr\s+['\"]\\n['\"]\s+['\"] ['\"]|tr\s+-s\s+['\"] ['\"]|sed\s+['\"]s/ +\\?[+*]/ /g['\"]|xargs))+\s*"
)
"""A text in one line, with one space between its words: $(echo "$OPTIONS" | tr '\\n' ' ' | sed 's/  \\+/ /g')."""
_SEQ = re.compile(r"\s*seq\s+(?!-)([^|;&<>()\n]+?)\s*")
_ARGUMENT = r"\s*echo\s+\"?([^-|;&<>\n\"'][^|;&<>\n\"']*?)\"?\s*\|\s*"
_PARTS = re.compile(
    _ARGUMENT
    + r"(?:tr\s+(['\"]?),\2\s+['\"]\\n['\"]\s*\|\s*wc\s+-l|awk\s+-F\s*(['\"]?),\3\s+'\s*\{\s*print\s+NF;?\s*\}\s*')\s*"
)
"""How many parts a list with commas has: $(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)."""
_VISIBLE = re.compile(
    r"\s*python3?\s+-c\s+.*environ(?:\.get\(|\[)\s*['\"]CUDA_VISIBLE_DEVICES['\"]\s*[)\]]"
    r"\.(?:count\(\s*['\"],['\"]\s*\)\s*\+\s*1|split\(\s*['\"],['\"]\s*\)\s*\))\s*\)\s*['\"]\s*"
)
_PATH = re.compile(r"\s*(?:readlink\s+-[ef]|realpath)\s+\"?([^-|;&<>\n\"'][^|;&<>\n\"']*?)\"?\s*")
"""A path, whose links are not followed."""
_WHICH = re.compile(
    r"\s*(?:which|command\s+-v)\s+"
    r"(accelerate|axolotl|composer|deepspeed|litgpt|llamafactory-cli|megatron|python3?|swift|torchrun|tune|xtuner)\s*"
)
"""The path of an installed command that trains or launches: $(which swift); that of any other says what is installed."""
_MOST_NUMBERS = 1000


def simple_output(scope: Scope, fill: Fill, inner: str, shown: str) -> str | None:
    """What the command prints; None of another command, or where a value in it is not known."""
    if sums := _SUM.fullmatch(inner):
        return scope.arithmetic(fill(sums[1] or sums[2]), shown)
    if cut := _CUT.fullmatch(inner):
        text = fill(cut[1])
        parts = text.split(cut[3])
        return parts[int(cut[4]) - 1] if scope.known(text) and 0 < int(cut[4]) <= len(parts) else None
    if spaced := _SPACED.fullmatch(inner):
        return " ".join(fill(spaced[1]).split())
    if seq := _SEQ.fullmatch(inner):
        return _numbers(fill(seq[1]).split())
    if listed := _PARTS.fullmatch(inner):
        text = fill(listed[1])
        return str(text.count(",") + 1) if scope.known(text) else None
    if command := _WHICH.fullmatch(inner):
        return command[1]
    if path := _PATH.fullmatch(inner):
        return fill(path[1])
    visible = scope.get("CUDA_VISIBLE_DEVICES") if _VISIBLE.fullmatch(inner) else None
    return str(visible.text.count(",") + 1) if visible is not None and scope.known(visible.text) else None


def _numbers(words: list[str]) -> str | None:
    """The numbers of `seq LAST`, `seq FIRST LAST`, `seq FIRST STEP LAST`, one a line.

    >>> (_numbers(["2", "4"]) or "").split(), _numbers(["0.5", "4"])
    (['2', '3', '4'], None)
    """
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        return None
    numbers = [int(word) for word in words]
    first, step = (numbers[0] if len(numbers) > 1 else 1), (numbers[1] if len(numbers) > 2 else 1)
    last = numbers[-1]
    if not step or abs(last - first) // abs(step) >= _MOST_NUMBERS:
        return None
    return "\n".join(map(str, range(first, last + (1 if step > 0 else -1), step)))
