"""Programs over a recipe of NeMo 2.0 that keep it in a variable: what they set over it, as a function that can be read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.job.edit import put
from steptime.launch.config_values import dotted, literal, options_in, syntax_of
from steptime.launch.devices import told
from steptime.launch.reading import Sets
from steptime.launch.vocabulary import entries_of

FUNCTION = "_job"
"""Name of the function that `as_function` adds."""
_RECIPES = ({"pretrain_recipe"}, {"finetune_recipe"})
_SWITCHES = {"store_true": True, "store_false": False}
"""Action of an argument -> its value where it is given."""
_READ = (ast.Assign, ast.AnnAssign, ast.If, ast.Expr)


def as_function(path: str, text: str) -> str:
    """The program with one function more, which returns the recipe that its main part keeps in a variable; "" without one.

    Of the main part only the statements on which the recipe depends are kept, and its arguments have their defaults.

    Raises:
        ConfigError: it sets the recipe in a loop, by setattr or the like.
    """
    module = syntax_of(text)
    for body in main_parts(module):
        if name := next((found for node in body if (found := _kept_in(node))), ""):
            kept = on_which({name}, body)
            if other := next((node for node in body if node not in kept and sets_part(name, node)), None):
                what = "sets the recipe in a way that is not read"
                raise ConfigError(f"{path}: line {other.lineno} {what}; give the log that prints the job's config")
            return with_function(text, arguments_of(module), kept, name)
    return ""


def with_function(text: str, arguments: Mapping[str, Any], kept: Iterable[ast.stmt], returned: str) -> str:
    """A program with one function more: statements of its main part with its arguments, and what it returns."""
    inside = [f"args = {arguments!r}", *map(ast.unparse, kept), f"return {returned}"]
    lines = "\n".join(f"    {line}" for part in inside for line in part.splitlines())
    return f"{text}\n\ndef {FUNCTION}():\n{lines}"


def main_parts(module: ast.Module) -> Iterator[list[ast.stmt]]:
    """The statements of the module, of `if __name__ == ...` and of `main`."""
    for node in module.body:
        main = isinstance(node, ast.FunctionDef) and node.name == "main"
        if (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)) or main:
            yield getattr(node, "body", [])
    yield module.body


def _kept_in(node: ast.stmt) -> str:
    """The variable to which a statement assigns a recipe."""
    plain = isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    calls = plain and any({*dotted(part)[-1:]} in _RECIPES for part in ast.walk(node) if isinstance(part, ast.expr))
    return (
        node.targets[0].id if calls and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else ""
    )


def on_which(names: set[str], body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that set variables, or what they need for these; not the arguments, which are given by name."""
    needed, kept = set(names), list[ast.stmt]()
    for node in reversed(body):
        targets = [target for part in ast.walk(node) for target in getattr(part, "targets", [])]
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
        sets = {(dotted(target) or [""])[0] for target in _each(targets)}
        sets |= (
            {(dotted(node.value.func) or [""])[0]}
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            else set()
        )
        if isinstance(node, _READ) and sets & needed and "parse_args" not in ast.unparse(node):
            kept.insert(0, node)
            needed |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return kept


def sets_part(name: str, node: ast.stmt) -> bool:
    """Whether a statement that is not kept sets a part of a variable."""
    parts = [part for part in ast.walk(node) if not isinstance(part, ast.For | ast.comprehension)]
    targets = [target for part in parts for target in [*getattr(part, "targets", []), getattr(part, "target", None)]]
    called = [part for part in parts if isinstance(part, ast.Call) and dotted(part.func) == ["setattr"] and part.args]
    set_ = [*(target for target in targets if isinstance(target, ast.expr)), *(call.args[0] for call in called)]
    return any(dotted(part)[:1] == [name] for part in _each(set_))


def _each(targets: list[ast.expr]) -> list[ast.expr]:
    """Targets of an assignment, those of a tuple one by one."""
    return [
        part for target in targets for part in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
    ]


def arguments_of(module: ast.Module) -> dict[str, Any]:
    """Argument -> its literal default; None without one, unless it is required."""
    found: dict[str, Any] = {}
    for name, said in options_in(module):
        action = literal(said.get("action"))
        usual = ast.Constant(not _SWITCHES[action] if action in _SWITCHES else None)
        default = said.get("default", usual)
        if (
            (action in _SWITCHES or "action" not in said)
            and "required" not in said
            and isinstance(default, ast.Constant)
        ):
            found[name] = default.value
    return found


def put_vocabulary(path: str, tree: dict[str, Any], sets: Sets) -> None:
    """The vocabulary of the tokenizer that a program puts over a recipe's: its data's (nemo/collections/llm/api.py, pretrain).

    Raises:
        ConfigError: that tokenizer is not known.
    """
    data, model = tree.get("data"), tree.get("model")
    own = data.get("tokenizer") if isinstance(data, dict) else None
    config = model.get("config") if isinstance(model, dict) else None
    if not isinstance(own, Mapping) or "vocab_size" in (config if isinstance(config, dict) else {}):
        return
    name = str(
        next((own[key] for key in ("pretrained_model_name", "model_name", "tokenizer_model") if own.get(key)), "")
    )
    files = [str(own[key]) for key in ("vocab_file", "tokenizer_model") if own.get(key)]
    found = entries_of(name, files) or (entries_of("", [name]) if name else None)
    if found is not None:
        put(tree, "model.config.vocab_size", found[0])
    elif told(sets, "model.vocab_sz") is None and told(sets, "model") is None:
        raise ConfigError(
            f"{path}: vocabulary size unknown (tokenizer {name or 'of its own'}); add --set model.vocab_sz=N"
        )
