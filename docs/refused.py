"""The table of docs/limits.md: what a plan may ask for and is refused.

python docs/refused.py
"""

from __future__ import annotations

import re
import sys

from steptime.job.limits import MODELED, NOT_MODELED

GOT = re.compile(r" \(got ('(\w+)')?[^)]*\)")
"""The value a message quotes; where it is a fixed word, that word."""


def rows() -> list[tuple[str, str, str]]:
    """Key, the words of it that are refused ("" for any), and what message."""
    found = []
    for path, told in NOT_MODELED.items():
        key, _, word = path.partition("=")
        found.append((key, word, told))
    for rule in MODELED:
        got, told = (
            GOT.search(rule.text),
            GOT.sub("", rule.text).replace("{f.schedule_said}", "zero_bubble, zbv or dualpipev"),
        )
        found.append((rule.path, got[2] if got and got[2] else "", told))
    return sorted(found)


def main() -> None:
    """Print the table: words of one key that are told the same share a row."""
    words: dict[tuple[str, str], list[str]] = {}
    for key, word, told in rows():
        words.setdefault((key, told), []).append(f"`{word}`" if word else "")
    sys.stdout.write("| key | values | error |\n|---|---|---|\n")
    for (key, told), refused in words.items():
        sys.stdout.write(f"| `{key}` | {', '.join(refused)} | {told} |\n")


if __name__ == "__main__":
    main()
