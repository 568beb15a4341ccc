"""Every figure behind an estimate besides its config, with its source: shared constants, the machine's, the profile's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from steptime.base.document import parse_mapping, read_source
from steptime.job.job import Job
from steptime.report.table import Table
from steptime.software.efficiency import EFFICIENCY_FILE, compute_factor, efficiency

PACKAGE = Path(__file__).parents[1]
PHYSICS = ("cost", "software/precision", "model", "fsdp", "memory", "timing", "answer/flops")
"""Folders and modules whose constants are used by an estimate."""
_NO_PHYSICS = {"hf", "hf_families", "presets"}


class Constant(NamedTuple):
    """A module's constant and the text below its definition, which gives its source."""

    name: str
    """module.NAME"""
    value: float
    source: str

    @property
    def said(self) -> str:
        """Value and source."""
        return f"{self.value:g}: {self.source}"


def constant(name: str) -> Constant:
    """The shared constant of that name (module.NAME)."""
    return next(one for one in shared_constants() if one.name == name)


def machine_source(job: Job, path: str) -> str:
    """The source of a figure of the job's machine, by its dotted path."""
    return job.machine.source(path) or "not in the machine's file: default (assumed)"


def setting_source(job: Job, path: str) -> str:
    """The origin of a setting of the software profile, by its dotted path: the plan, or the profile with its source."""
    axis = path.removeprefix("overlap.")
    section = job.performance.overlap if axis != path else job.performance
    if section is not None and getattr(section, axis, None) is not None:
        return "this config"
    return job.software.sources.get(path, "not in its file: default")


@cache
def shared_constants() -> list[Constant]:
    """Numbers in capitals at the top of the modules of `PHYSICS`, in their order."""
    found: list[Constant] = []
    for place in PHYSICS:
        folder = PACKAGE / place
        paths = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
        for path in paths:
            if path.stem not in _NO_PHYSICS:
                found += _constants(path)
    return found


def _constants(path: Path) -> Iterator[Constant]:
    """The documented numbers of one module; several names in one assignment share its text."""
    dotted = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
        for name in names:
            value = getattr(import_module(f"steptime.{dotted}"), name, None) if name.isupper() else None
            if isinstance(value, int | float):
                yield Constant(f"{dotted}.{name}", float(value), _text(after))


def _text(node: ast.AST | None) -> str:
    """The string literal that follows a definition, on one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def shared() -> Table:
    """The constants that all estimates share."""
    rows = [[f"{one.name} = {one.said}"] for one in shared_constants()]
    return Table("constants shared by all estimates", [], rows)


def machine(job: Job) -> Table:
    """Each figure of the machine and its source; figures missing in its file have the default of their field."""
    rows = []
    for path, value in _leaves(job.machine.model_dump(exclude={"provenance", "measured"}, exclude_none=True), ""):
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            rows.append([f"{path} = {value:.6g}: {machine_source(job, path)}"])
    return Table(f"figures of {job.machine.name}, SI", [], rows)


def software(job: Job) -> Table:
    """Each setting of the software profile and its source; settings made in the config are marked."""
    profile = job.software
    rows = [
        [f"{path} = {_word(value)}: {setting_source(job, path)}"] for path, value in _leaves(profile.settings(), "")
    ]
    return Table(f"software profile {profile.name}", [], rows, abbreviations(profile.name))


def abbreviations(profile: str) -> list[str]:
    """The comments at the head of a profile's file and of those it extends; they spell out abbreviated sources."""
    found: list[str] = []
    name: str | None = profile.partition("@")[0]
    while name:
        text, path = read_source(PACKAGE / "data" / "software" / f"{name}.yaml")
        head = takewhile(lambda line: line.startswith("#"), text.splitlines())
        found.append(" ".join(line.lstrip("# ") for line in head))
        name = parse_mapping(text, path).get("extends")
    return [text for text in found if text]


def fitted(job: Job) -> Table:
    """The constants fitted on measured runs that apply to this job (data/efficiency.yaml)."""
    found, device = efficiency(), job.machine.accelerator.name
    shares = found.sustained_share.get(device, {})
    rows = [[f"sustained_share of {device}, {dtype} = {share:g}"] for dtype, share in shares.items()]
    rows += [[f"default_share = {found.default_share:g}: GEMMs where no measured run has the accelerator or dtype"]]
    rows += [[f"recipe_gap = {found.recipe_gap:g}: launch gaps of a layer in a low-precision recipe over bf16"]]
    rows += [[f"compute_factor of {job.software.name} = {compute_factor(job.software.name):g}"]]
    source = parse_mapping(*read_source(EFFICIENCY_FILE)).get("source", "")
    return Table(
        "constants fitted on rows marked fit (data/efficiency.yaml)", [], rows, [str(source)] if source else []
    )


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted path, plain value) of everything in nested mappings and lists."""
    if isinstance(node, dict):
        for key, item in node.items():
            yield from _leaves(item, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from _leaves(item, f"{path}.{i}")
    else:
        yield path, node


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
