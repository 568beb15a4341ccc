"""Where a trainer's keys are besides the top of a file: a section of it, a subcommand, a file of defaults, a README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from steptime.base.document import parse_mapping
from steptime.launch.beside import Beside, is_readable, read_beside
from steptime.launch.keys import KeyTable, flatten, rule_of, spelled
from steptime.launch.shell.processes import flags_of
from steptime.launch.shell.script import Script

BY_README = "{} read, with which the README or script of this recipe starts it; for another add --with FILE"
"""The note on a config of accelerate that a recipe does not name."""


def of_section(tree: dict[str, Any], table: KeyTable) -> dict[str, Any]:
    """The config of a file whose job is one section (the table's `sections`), with the sections beside it on how it runs."""
    for section, kept in (table.raw.get("sections") or {}).items():
        if isinstance(inside := tree.get(section), dict):
            tree = {key: tree[key] for key in kept if key in tree} | inside
    return tree


def of_subcommand(script: Script, table: KeyTable) -> dict[str, Any]:
    """The subcommand of a trainer's own launcher, and its first word where that is no option (litgpt finetune_lora MODEL)."""
    if not (named := table.raw.get("subcommand")) or script.launchers or script.program.endswith(".py"):
        return {}
    first = next((word.text for word in script.arguments[:1] if not word.text.startswith("-")), None)
    return {named["key"]: script.program} | ({named["first"]: first} if first else {})


def of_defaults(table: KeyTable, beside: Beside | None) -> dict[str, Any]:
    """The trainer's own file of defaults, where it is in the repository of the job: the keys that the table knows."""
    name = str(table.raw.get("defaults_beside") or "")
    text = beside.text(name) if name and beside is not None else None
    said = flatten(parse_mapping(text, name)) if text else {}
    rules = {key: rule_of(spelled(key, table), table) for key in said}
    return {key: said[key] for key, rule in rules.items() if rule is not None and rule.status != "irrelevant"}


def of_readme(path: str) -> dict[str, Any]:
    """Options of `accelerate launch` in the README of a recipe's folder, or of the one above, or in the one script beside it."""
    here = Path(path).resolve()
    last = "/".join(here.parts[-3:])
    started = [_started(folder / "README.md", last) for folder in (here.parent, here.parent.parent)]
    beside = [found for script in sorted(here.parent.glob("*.sh"))[:20] if (found := _started(script, here.name))]
    return next(filter(None, started), beside[0] if len(beside) == 1 else {})


def _started(file: Path, name: str) -> dict[str, Any]:
    """Options of the first `accelerate launch` in a file that names a config."""
    text = read_beside(file).replace("\\\n", " ") if is_readable(file) else ""
    for line in text.split("\n"):
        if re.search(rf"\baccelerate launch\b.*(?<![\w.-]){re.escape(name)}(?![\w.-])", line):
            before = line.partition("accelerate launch")[2].partition(name)[0]
            return dict(flags_of(before.replace('"', "").replace("'", "").split()))
    return {}
