"""Programs that give a config of Megatron-Bridge to pretrain(config=...) or finetune(config=...) in their main part.

What is put over the config: a YAML file and words `a.b=c`. Source: NVIDIA-NeMo/Megatron-Bridge
src/megatron/bridge/training/utils/omegaconf_utils.py (process_config_with_overrides: the file, then the words;
create_omegaconf_dict_config, parse_hydra_overrides and apply_overrides are its parts).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping
from steptime.job.edit import put
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.nemo.nemo_programs import arguments_of, main_parts, on_which, sets_part, with_arguments
from steptime.launch.nemo.targets import simplify
from steptime.launch.python import config_values as syntax
from steptime.launch.python.config_values import CLASS, calls_in, dotted, last_name

_MERGES = {"process_config_with_overrides", "create_omegaconf_dict_config", "apply_overrides"}
_OF_ARGUMENT = 2
"""Names in `args.config_file`."""


class Overrides(NamedTuple):
    """What a program puts over its config."""

    default: str | None
    """The file without an argument for it: the literal parts of its path, those of constants included."""
    argument: str
    line: int
    """The last line that puts them over it."""


def overrides_in(module: ast.Module, body: Sequence[ast.stmt]) -> tuple[Overrides | None, list[ast.stmt]]:
    """What a program's main part takes, and its statements without those that put it over the config; None: nothing.

    What is put over it by a function of another name, or after the program's own settings, is not known.
    """
    calls = {node: getattr(node, "value", None) for node in body}
    merges = [node for node, call in calls.items() if isinstance(call, ast.Call) and last_name(call.func) in _MERGES]
    named = [name for node in body for name in _files(node)]
    if not merges or not named:
        return None, list(body)
    rest = [node for node in body if node not in merges]
    given = next((said.get("default") for name, said in syntax.options_in(module) if name == named[0]), None)
    default = "/".join(_literals(given, syntax.constants_of(module))) if given is not None else ""
    return Overrides(default or None, named[0], merges[-1].lineno), rest


def _files(node: ast.stmt) -> Iterator[str]:
    """The argument that is given as the file: `config_filepath=args.NAME`, or OmegaConf.load(args.NAME)."""
    for call in calls_in(node):
        whole = dotted(call.func) == ["OmegaConf", "load"]
        given = [item.value for item in call.keywords if item.arg == "config_filepath"]
        for item in [*given, *(call.args[:1] if whole else [])]:
            if len(path := dotted(item)) == _OF_ARGUMENT:
                yield path[1]


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
            tree |= syntax.merged({key: own}, {key: simplify(section)})
    for key, value in said.items():
        if "." in key:
            put(tree, key, value)


_STARTS = {"pretrain", "finetune"}
"""src/megatron/bridge/training/pretrain.py and finetune.py."""
_READS = {
    "print", "len", "str", "repr", "hasattr", "getattr", "isinstance", "info", "debug", "warning", "to_yaml", "print_yaml",
}  # fmt: skip
"""Calls that change no config."""
_SECTION = 2
"""Names in the path of a section: `config.model`."""


class BridgeProgram(NamedTuple):
    """A program that starts with a config."""

    text: str
    """The program with one function more, which returns that config before it is overridden."""
    overrides: Overrides | None


def as_bridge_program(path: str, text: str, said: Mapping[str, Any]) -> BridgeProgram | None:
    """The program by what it starts with; None where it starts none.

    Of the main part only the statements on which the config depends are kept. `said`: the arguments that it is given; the others
    have their defaults.

    Raises:
        ConfigError: it sets the config in a way that is not read, such as by a file of settings.
    """
    module = syntax.syntax_of(text)
    own = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    for body in main_parts(module):
        found = [(node, config) for node in body if (config := _started(node))]
        if len(found) != 1:
            continue
        node, name = found[0]
        overrides, before = overrides_in(module, body[: body.index(node)])
        names = _names_of(name, before)
        set_ = on_which(names, before)
        kept = [part for part in before if part in set_ or _followed(name, part, own)]
        for part in before:
            missed = part not in kept and any(sets_part(each, part) for each in names)
            if missed or (_given_away(names, part) and not _followed(name, part, own)):
                what = f"{path}: line {part.lineno} changes the config in a way that is not read"
                raise ConfigError(f"{what}; give the log that prints the job's config")
        if overrides and (late := next((part for part in kept if part.lineno > overrides.line), None)):
            what = f"{path}: line {late.lineno} sets the config after what is put over it"
            raise ConfigError(f"{what}; give the log that prints the job's config")
        options = {option for option, _ in syntax.options_in(module)}
        given = arguments_of(module) | {key: value for key, value in said.items() if key in options}
        return BridgeProgram(syntax.with_function(text, *with_arguments(given, kept), f"return {name}"), overrides)
    return None


def _started(node: ast.stmt) -> str:
    """The variable that a statement gives to the training loop as its config."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or dotted(call.func)[-1:] not in [[start] for start in _STARTS]:
        return ""
    given = [*call.args[:1], *(item.value for item in call.keywords if item.arg in {"config", "cfg"})]
    return given[0].id if len(given) == 1 and isinstance(given[0], ast.Name) else ""


def _names_of(name: str, body: list[ast.stmt]) -> set[str]:
    """A config's variable, and those of its sections (`model = config.model`)."""
    found = {name}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_section(found, node.value):
            found.add(node.targets[0].id)
    return found


def _is_section(names: set[str], node: ast.expr) -> bool:
    """Whether an expression is a config or one of its sections, which have values under them."""
    path = dotted(node)
    return path[:1] != [] and path[0] in names and len(path) <= _SECTION


def _given_away(names: set[str], node: ast.stmt) -> bool:
    """Whether a function that may change it is given a config or a section of it."""
    calls = (call for call in calls_in(node) if last_name(call.func) not in _READS)
    return any(_is_section(names, item) for call in calls for item in _arguments(call))


def _followed(name: str, node: ast.stmt, own: set[str]) -> bool:
    """Whether a statement only calls a function of the module with the whole config, which can be followed into it."""
    call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if not isinstance(call, ast.Call) or last_name(call.func) not in own:
        return False
    return [dotted(item) for item in _arguments(call) if _is_section({name}, item)] == [[name]]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
