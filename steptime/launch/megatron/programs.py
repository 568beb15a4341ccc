"""Programs over Megatron-LM beside a script: whether one trains, and whether its model is that of its flags."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.config_values import literal, syntax_of
from steptime.launch.python.program_setup import freezes
from steptime.launch.reading import LaunchFlag

_TRAINS = re.compile(r"train(?!ed)|tune|sft|fit$|backward|main|run|launch|step$", re.IGNORECASE)
"""Names of functions that train, or that may call one that does."""
_PLATFORM = re.compile(
    r"(?:NVTE|NCCL|RCCL|CUDA|HIP|ROCM|MIOPEN|TORCH|PYTORCH|WANDB|SLURM|OMP|HF|MASTER|LOCAL|UB|GLOO|FI)_|(?:WORLD_SIZE|RANK)$"
)
"""Beginnings of the names of variables that libraries and launchers read, of which a program may read some as well."""
_OF_FLAGS = re.compile(
    r"(?:GPT2?|Legacy\w*|Llama[23]?|LL[aA]M[aA]|Mistral|Mixtral|Falcon|Qwen\d*|Baichuan\d*|ChatGLM\d*|CodeGeeX|Pythia|Mamba|Hybrid)"
    r"(?:Model|ModelPipe)"
)
"""Classes of models whose layers are those of the flags."""


def own_model(program: str, nearby: NearbyFiles, variables: Mapping[str, str]) -> list[LaunchFlag]:
    """What makes the model of a program in the repository beside the flags of Megatron-LM.

    Megatron-LM's own programs hand all flags on (core_transformer_config_from_args); a config built from some of them leaves the
    others at the defaults of the class. `variables`: those of the script, of which a program may read some where it builds the
    model.
    """
    code = _over_megatron(program, nearby)
    found = {program: f"{frozen}, set up by its code"} if code and (frozen := freezes(code)) else dict[str, str]()
    for node in ast.walk(syntax_of(code)) if code else ():
        if isinstance(node, ast.ImportFrom) and (file := _with_own_layers(node, nearby)):
            found[program] = f"builds the layers of {file}, which are its own"
        elif isinstance(node, ast.Call) and _name(node.func) == "TransformerConfig" and _of_some_flags(node):
            what = "a TransformerConfig of its own from some of its flags, with other defaults for the rest"
            found[program] = f"builds {what}"
        elif isinstance(node, ast.FunctionDef) and re.search(r"model", node.name):
            if other := _other_model(node):
                found[program] = f"builds a {other}, a model of its own"
            for name, usual in _variables_read(node):
                if variables.get(name) not in (None, "", usual) and not _PLATFORM.match(name):
                    found[name] = f"read by {program} where it builds its model"
    return [LaunchFlag(what, "", "unmodeled", why) for what, why in found.items()]


def _with_own_layers(node: ast.ImportFrom, nearby: NearbyFiles) -> str:
    """The file beside a program with the layers of the model that it imports, made from Megatron-LM's; "" of other imports."""
    file = f"{(node.module or '').rpartition('.')[2]}.py"
    whole = (node.module or "").startswith("megatron") or not any(_OF_FLAGS.fullmatch(part.name) for part in node.names)
    text = "" if whole else nearby.text(file) or ""
    return file if re.search(r"^class \w+\((?:\w+\.)*(?:Parallel)?TransformerLayer\):", text, re.MULTILINE) else ""


def _other_model(function: ast.FunctionDef) -> str:
    """The class of the model that a function builds, where none of those is Megatron-LM's GPT; "" where one is.

    Megatron's older layers, which a flag has in their place (megatron.legacy.model.GPTModel), do not count.
    """
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    built = [_name(func) for func in calls if "legacy." not in ast.unparse(func)]
    built = [name for name in built if re.fullmatch(r"[A-Z]\w*Model(?:Pipe)?", name)]
    return "" if any(map(_OF_FLAGS.fullmatch, built)) else next(iter(built), "")


def _of_some_flags(call: ast.Call) -> bool:
    """Whether a call passes values of `args` one by one, and no mapping of all."""
    given = [keyword.value for keyword in call.keywords if keyword.arg is not None]
    of_args = [value for value in given if isinstance(value, ast.Attribute) and _name(value.value) == "args"]
    return len(of_args) > 2 and len(given) == len(call.keywords)


def _variables_read(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Names of the environment's variables that a function reads, with its defaults for them."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call | ast.Subscript):
            of, inside = (node.func, node.args) if isinstance(node, ast.Call) else (node.value, [node.slice])
            name, usual = [*(literal(part) for part in inside[:2]), None, None][:2]
            if isinstance(name, str) and re.fullmatch(r"(?:os\.)?(?:environ(?:\.get)?|getenv)", ast.unparse(of)):
                yield name, usual


def _over_megatron(program: str, nearby: NearbyFiles) -> str:
    """The text of a program in the repository that imports Megatron's functions; "" of another, or where it is not there."""
    if not program.endswith(".py"):
        return ""
    alone = program.rpartition("/")[2]  # one of another name than Megatron-LM's is that at the top of the checkout
    code = nearby.text(program) or (nearby.text(alone) if alone != "pretrain_gpt.py" else None)
    return code if code and re.search(r"^\s*(?:from|import) megatron\b", code, re.MULTILINE) else ""


def does_not_train(program: str, nearby: NearbyFiles) -> bool:
    """Whether a program in the repository imports Megatron's functions, and calls none that trains: it runs a model.

    False where the program is not there, or cannot be read.
    """
    if not (code := _over_megatron(program, nearby)):
        return False
    nodes = list(ast.walk(syntax_of(code)))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    called = {_name(node.func) for node in nodes if isinstance(node, ast.Call)} - own
    runs = any(isinstance(node, ast.Attribute) and node.attr == "no_grad" for node in nodes)
    trains = (name for name in called if _TRAINS.search(name) and not re.search(r"data|valid", name))
    return runs and not any(trains)  # build_train_valid_test_datasets only makes the data sets


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", "") or getattr(function, "id", ""))
