"""What a training program passes to Hugging Face's objects, read by ast: arguments of TrainingArguments and LoraConfig."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from steptime.base.document import parse_mapping
from steptime.launch.keys import GivenKey, table_file
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.config_values import calls_in, constants_of, last_name, syntax_of
from steptime.launch.python.program_setup import quantizes, sets_up_adapters
from steptime.launch.python.program_values import Argument, Expression, name_of, solved, value_of

ADAPTERS_OF = re.compile(r"--(?:lora|peft)[-_]config(?:[-_](?:file|path))?")
"""Options of custom programs that name a file of LoRA's settings."""
_ENABLE = "gradient_checkpointing_enable"


def passed_in(code: str) -> dict[str, Any]:
    r"""Key -> the literal that a program passes, or the `Argument` of its own that it passes; None for any other expression.

    A key to which several calls pass different values is None.

    >>> passed_in("t = SFTConfig(bf16=True, max_length=args.max_len)\npeft = LoraConfig(r=config['lora_r'], bias=none())")
    {'bf16': True, 'max_seq_length': Argument(name='max_len'), 'lora_r': Argument(name='lora_r')}
    """
    tree, found, passed = syntax_of(code), dict[str, Any](), table_file("transformers")["passed"]
    constants = _constants(tree)
    for node in calls_in(tree, *passed):
        for keyword in node.keywords:
            unset = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
            if (key := passed[last_name(node.func)].get(keyword.arg or "")) is not None and not unset:
                value = value_of(keyword.value)
                value = constants.get(value.name, value) if isinstance(keyword.value, ast.Name) else value
                found[key] = value if found.get(key, value) == value else None
    return _checkpointing(tree) | _model(tree) | _cut_to(tree) | found


def _constants(tree: ast.Module) -> dict[str, Any]:
    r"""The literals to which a module, or a function, sets a name once and in any case, and nothing else does.

    >>> _constants(ast.parse("A = 2\nB = 3\ndef f(C):\n  B = 4\n  D = 6\nC = 5\nif A: E = 7"))
    {'A': 2, 'D': 6}
    """
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    found = {
        node.targets[0].id: value_of(node.value)
        for node in (statement for body in bodies for statement in body)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    return {
        name: value
        for name, value in found.items()
        if stored.count(name) == 1 and not isinstance(value, Argument | Expression | None)
    }


_BOTH = re.compile(r"(?:\w+\.)?max_source_length \+ (?:\w+\.)?max_target_length(?: \+ 1)?")
"""The length of a prompt with its answer, to which some programs pad (shibing624/MedicalGPT, THUDM/ChatGLM-6B ptuning)."""


def _cut_to(tree: ast.Module) -> dict[str, Any]:
    r"""The one length to which a program's tokenizer cuts sequences, or that of a prompt with its answer.

    >>> _cut_to(ast.parse("tokens = tokenizer(text, truncation=True, max_length=cutoff_len)"))
    {'max_seq_length': Argument(name='cutoff_len')}
    >>> _cut_to(ast.parse("data = load_from_disk(path)\nTrainer(model=m, train_dataset=data)"))
    {'max_seq_length': Expression(code='load_from_disk(path)')}
    """
    calls = calls_in(tree, "tokenizer")
    stored = calls_in(tree, "load_from_disk")
    if stored and not calls_in(tree, "tokenizer", "tokenize", "encode", "map", "SFTTrainer", "SFTConfig"):
        return {"max_seq_length": Expression(ast.unparse(stored[0]))}  # tokens as they were stored
    said = [{keyword.arg: value_of(keyword.value) for keyword in call.keywords} for call in calls]
    lengths = [words["max_length"] for words in said if words.get("truncation") is True and "max_length" in words]
    same = lengths and lengths[0] is not None and all(length == lengths[0] for length in lengths)
    if same or not (both := _BOTH.search(ast.unparse(tree))):
        return {"max_seq_length": lengths[0]} if same else {}
    return {"max_seq_length": Expression(both[0])}


def _model(tree: ast.Module) -> dict[str, Any]:
    r"""The repository of the one model that a program loads: a literal, a constant of the module, or one of its arguments.

    SFTTrainer loads the model whose name it is given.

    >>> _model(ast.parse("NAME = 'a/b'\nm = AutoModelForCausalLM.from_pretrained(NAME, dtype='auto')"))
    {'model_name_or_path': 'a/b'}
    >>> _model(ast.parse("t = SFTTrainer(model='a/b')")), _model(ast.parse("t = SFTTrainer(model=model)"))
    ({'model_name_or_path': 'a/b'}, {})
    """
    constants = {name: node.value for name, node in constants_of(tree).items() if isinstance(node, ast.Constant)}
    loads = [
        node.args[0]
        for node in calls_in(tree, "from_pretrained")
        if node.args and last_name(getattr(node.func, "value", node)).endswith("ForCausalLM")
    ]
    names = [constants.get(arg.id, Argument(arg.id)) if isinstance(arg, ast.Name) else value_of(arg) for arg in loads]
    given = (keyword for node in calls_in(tree, "SFTTrainer") for keyword in node.keywords)
    names += [name for arg in given if arg.arg == "model" and isinstance(name := _literal(arg.value, constants), str)]
    return {"model_name_or_path": names[0]} if names and all(name == names[0] for name in names) else {}


def _literal(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """The value of a literal, or of a constant of the module."""
    return constants.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)


_STARTED = {
    "nemo": r"^(?:from|import) megatron\.bridge\b",
    "olmo": r"^(?:from|import) olmo_core\b",
    "transformers": r"\b(?:(?:TrainingArguments|SFTConfig)\(|HfArgumentParser\([^)]*\bTrainingArguments\b)",
}
"""Kind -> what a program over it contains."""


def kind_started(text: str, nearby: NearbyFiles) -> str | None:
    """The kind of the program that a script runs, if the program is found: of Hugging Face's Trainer, or over Megatron-Bridge."""
    starts = r"\b(?:deepspeed|torchrun|accelerate launch|python3?|torch\.distributed\.run)\s"
    program = r"(?<![\w./-])[\w./-]+\.py\b"
    lines = (line.partition("#")[0] for line in text.replace("\\\n", " ").splitlines())
    started = (line[found.end() :] for line in lines if (found := re.search(starts, line)))
    named = [found[0] for line in started if (found := re.search(program, line))]
    in_variable = r"^\s*(?:export\s+)?\w+=[\"']?(?:\$\{?\w+\}?/)?([\w./-]+\.py)\b"
    named += re.findall(in_variable, text, re.MULTILINE)  # that is run
    texts = [nearby.text(name) or "" for name in named]
    found_in = (kind for kind, marks in _STARTED.items() if any(re.search(marks, code, re.MULTILINE) for code in texts))
    return next(found_in, None)


def _checkpointing(tree: ast.Module) -> dict[str, Any]:
    """What switches gradient checkpointing on: True, or the argument that an `if` around the call tests.

    >>> _checkpointing(ast.parse("if args.gc: model.gradient_checkpointing_enable()"))
    {'gradient_checkpointing': Argument(name='gc')}
    """
    tests: dict[ast.AST, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            tests |= {inner: node.test for part in node.body for inner in ast.walk(part)}
            tests |= {inner: ast.Constant(None) for part in node.orelse for inner in ast.walk(part)}
    values = [value_of(tests[node]) if node in tests else True for node in calls_in(tree, _ENABLE)]
    return {"gradient_checkpointing": values[0]} if values and all(value == values[0] for value in values) else {}


_OF_PEFT = {"lora_r": 8, "lora_dropout": 0.0}
"""What LoraConfig leaves unsaid (peft lora/config.py)."""


def left_to_code(
    code: str, program: str, defaults: Mapping[str, Any], known: set[str], given: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Setting of a plan -> what to ask where a program passes an expression for it, which has no value without a run.

    `known`: keys and names that are given; `given`: names with their values. A batch of all devices says its accumulation.

    >>> left_to_code("TrainingArguments(gradient_accumulation_steps=n // 2, bf16=args.bf16)", "a.py", {"bf16": True}, set())
    {'data.gbs': 'gradient_accumulation_steps is set by the code of a.py; add --set data.gbs=N'}
    """
    found, costly = dict[str, str](), dict(table_file("transformers")["left_to_code"])
    costly = {key: asked for key, asked in costly.items() if not key.startswith("lora_") or _sets_up_lora(code)}
    for key, value in passed_in(code).items():
        own = {key, *defaults, *known}  # the trainer's own argument has the trainer's default
        known_value = solved(value, {**defaults, **(given or {})}) is not None
        has = value.name in own if isinstance(value, Argument) else known_value
        counted = key == "gradient_accumulation_steps" and "global_batch_size" in known
        if key in costly and not has and key not in known and not counted:
            found[costly[key][0]] = key
    found |= {"data.gbs": found["data.microbatch_sz"]} if "data.microbatch_sz" in found else {}
    by = f"is set by the code of {program}; add --set"
    return {plan: f"{key} {by} {plan}={costly[key][1]}" for plan, key in found.items()}


def passed_on(given: list[GivenKey], code: str) -> list[GivenKey]:
    """The given keys, the program's own arguments under the key to which it passes them, where nothing else gives that key."""
    named = {name: key for key, value in passed_in(code).items() if (name := name_of(value))}
    known = {item.key for item in given}
    switched = re.search(r"\bdeepspeed=([\"'])([^\"']+)\1 if [\w.]*\bdeepspeed else None", code)
    renamed = {name: key for name, key in named.items() if key not in known}
    found = [item._replace(key=renamed.get(item.name, item.key)) for item in given]
    if switched is None:  # TrainingArguments(deepspeed="FILE" if args.deepspeed else None)
        return found
    on = ("deepspeed", True)
    return [item._replace(value=switched[2]) if (item.key, item.value) == on else item for item in found]


def _sets_up_lora(code: str) -> bool:
    """Whether a program puts LoRA on its model in any case, and loads none."""
    return sets_up_adapters(code) and "LoraConfig(" in code and "PeftModel.from_pretrained(" not in code


def of_program(
    code: str, defaults: Mapping[str, Any], known: set[str], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Key -> the literal that a program passes, or the default of the argument, or the value of an expression over `given` ones.

    What it passes to LoRA counts where one of the `known` keys switches adapters on, or the code sets them up unconditionally;
    not where it loads adapters, whose rank is that of their file.
    """
    found: dict[str, Any] = {}
    for key, value in passed_in(code).items():
        said = solved(value, defaults if isinstance(value, Argument) else {**defaults, **(given or {})})
        found |= {key: said} if said is not None else {}
    if quantizes(code) == "4":
        found["load_in_4bit"] = True
    if _sets_up_lora(code):
        unsaid = {key: value for key, value in _OF_PEFT.items() if key not in passed_in(code)}
        return {**unsaid, **found, "use_peft": True}
    adapts = {"use_peft", "lora_r"} & known
    of_lora = {*table_file("transformers")["passed"]["LoraConfig"].values()}
    return {key: value for key, value in found.items() if adapts or key not in of_lora}


def is_read(name: str, value: Any) -> bool:
    """Whether an option names a file of LoRA's settings that `of_adapters` reads."""
    return bool(ADAPTERS_OF.fullmatch(f"--{name}")) and str(value).endswith(".json")


def of_adapters(text: str, name: str) -> dict[str, Any]:
    """The keys of LoRA in such a file, under peft's names or with lora_ before them.

    >>> of_adapters('{"lora_r": 16, "target_modules": ["q_proj"], "bias": "none"}', "lora.json")
    {'lora_r': 16, 'lora_target_modules': ['q_proj']}
    """
    inside = parse_mapping(text, name)
    names = {key: f"lora_{key.removeprefix('lora_')}" for key in inside}
    of_lora = {*table_file("transformers")["passed"]["LoraConfig"].values()}
    return {names[key]: value for key, value in inside.items() if names[key] in of_lora}
