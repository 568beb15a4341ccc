"""A YAML file and words `a.b=c` that a program of Megatron-Bridge puts over its config.

Source: NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/utils/omegaconf_utils.py (process_config_with_overrides: the
file, then the words; create_omegaconf_dict_config, parse_hydra_overrides and apply_overrides are its parts).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from steptime.base.document import parse_mapping
from steptime.job.edit import put
from steptime.launch.config_values import CLASS, constants_of, dotted, merged, options_in
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.nemo.targets import simplify

_MERGES = {"process_config_with_overrides", "create_omegaconf_dict_config", "apply_overrides"}
_OF_ARGUMENT = 2
"""Names in `args.config_file`."""


class Overrides(NamedTuple):
    """What a program puts over its config."""

    default: str | None
    """The file without an argument for it, as far as its name is literal."""
    argument: str
    line: int
    """The last line that puts them over it."""


def overrides_in(module: ast.Module, body: Sequence[ast.stmt]) -> tuple[Overrides | None, list[ast.stmt]]:
    """What a program's main part takes, and its statements without those that put it over the config; None: nothing.

    What is put over it by a function of another name, or after the program's own settings, is not known.
    """
    merges = [node for node in body if _called(node) in _MERGES]
    named = [name for node in body for name in _files(node)]
    if not merges or not named:
        return None, list(body)
    return Overrides(_default_of(module, named[0]), named[0], merges[-1].lineno), [
        node for node in body if node not in merges
    ]


def _called(node: ast.stmt) -> str:
    call = getattr(node, "value", None)
    return (dotted(call.func) or [""])[-1] if isinstance(call, ast.Call) else ""


def _files(node: ast.stmt) -> Iterator[str]:
    """The argument that is given as the file: `config_filepath=args.NAME`, or OmegaConf.load(args.NAME)."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            whole = dotted(call.func) == ["OmegaConf", "load"]
            given = [item.value for item in call.keywords if item.arg == "config_filepath"]
            for item in [*given, *(call.args[:1] if whole else [])]:
                if len(path := dotted(item)) == _OF_ARGUMENT:
                    yield path[1]


def _default_of(module: ast.Module, argument: str) -> str | None:
    """The default of an argument that names a file: the literal parts of its path, those of constants included."""
    given = next((said.get("default") for name, said in options_in(module) if name == argument), None)
    return None if given is None else "/".join(_literals(given, constants_of(module))) or None


def _literals(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 5) -> list[str]:
    """The texts in an expression, in order."""
    found: list[str] = []
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Name):
        return _literals(constants[node.id], constants, depth - 1) if node.id in constants and depth else []
    for part in ast.iter_child_nodes(node):
        found += _literals(part, constants, depth) if isinstance(part, ast.expr) else []
    return found


def put_overrides(
    tree: dict[str, Any], overrides: Overrides, said: Mapping[str, Any], path: str, nearby: NearbyFiles
) -> None:
    """Put the file that the command names, else the default one, over a config, then the command's words.

    Raises:
        ConfigError: the file was not found, or cannot be read.
    """
    name = said.get(overrides.argument) or overrides.default
    over = parse_mapping(nearby.needed(str(name), f"{path}: reads"), str(name)) if name else {}
    for key, section in over.items():
        inner = tree.get(key)
        if section:  # the fields of bf16_mixed() are over what it returns
            own = {CLASS: inner} if isinstance(inner, str) and isinstance(section, Mapping) else inner
            tree |= merged({key: own}, {key: simplify(section)})
    for key, value in said.items():
        if "." in key:
            put(tree, key, value)
