"""What a training program passes to Hugging Face's objects, read by ast: arguments of TrainingArguments and LoraConfig."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from steptime.base.document import parse_mapping
from steptime.launch.beside import Beside
from steptime.launch.config_values import syntax_of
from steptime.launch.keys import GivenKey

ADAPTERS_OF = re.compile(r"--(?:lora|peft)[-_]config(?:[-_](?:file|path))?")
"""Options of custom programs that name a file of LoRA's settings."""


class Argument(NamedTuple):
    """A value that a program takes from one of its own arguments."""

    name: str


_ENABLE = "gradient_checkpointing_enable"
_OF_TRAINER = {
    **{
        name: name
        for name in (
            "bf16",
            "fp16",
            "gradient_checkpointing",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "deepspeed",
            "fsdp",
        )
    },
    "optim": "optim",
    "max_seq_length": "max_seq_length",
    "max_length": "max_seq_length",
}
PASSED: Mapping[str, Mapping[str, str]] = {
    "TrainingArguments": _OF_TRAINER,
    "SFTConfig": _OF_TRAINER,
    "SFTTrainer": {"max_seq_length": "max_seq_length"},
    "LoraConfig": {"r": "lora_r", "target_modules": "lora_target_modules", "lora_dropout": "lora_dropout"},
}
"""Object -> its argument -> the key of Hugging Face Trainer.

Source: transformers training_args.py, trl sft_config.py, trl 0.12 sft_trainer.py, peft lora/config.py.
"""


def passed_in(code: str) -> dict[str, Any]:
    r"""Key -> the literal that a program passes, or the `Argument` of its own that it passes; None for any other expression.

    A key to which several calls pass different values is None.

    >>> passed_in("t = SFTConfig(bf16=True, max_length=args.max_len)\npeft = LoraConfig(r=config['lora_r'], bias=none())")
    {'bf16': True, 'max_seq_length': Argument(name='max_len'), 'lora_r': Argument(name='lora_r')}
    """
    tree, found = syntax_of(code), dict[str, Any]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        names = PASSED.get(getattr(node.func, "attr", getattr(node.func, "id", "")), {})
        for keyword in node.keywords:
            if (key := names.get(keyword.arg or "")) is not None:
                value = _value(keyword.value)
                found[key] = value if found.get(key, value) == value else None
    return _checkpointing(tree) | _model(tree) | _cut_to(tree) | found


def _cut_to(tree: ast.Module) -> dict[str, Any]:
    """The one length to which a program's tokenizer cuts sequences.

    >>> _cut_to(ast.parse("tokens = tokenizer(text, truncation=True, max_length=cutoff_len)"))
    {'max_seq_length': Argument(name='cutoff_len')}
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func) == "tokenizer"]
    said = [{keyword.arg: _value(keyword.value) for keyword in call.keywords} for call in calls]
    lengths = [words["max_length"] for words in said if words.get("truncation") is True and "max_length" in words]
    same = lengths and lengths[0] is not None and all(length == lengths[0] for length in lengths)
    return {"max_seq_length": lengths[0]} if same else {}


def _model(tree: ast.Module) -> dict[str, Any]:
    r"""The repository of the one model that a program loads: a literal, a constant of the module, or one of its arguments.

    >>> _model(ast.parse("NAME = 'a/b'\nm = AutoModelForCausalLM.from_pretrained(NAME, dtype='auto')"))
    {'model_name_or_path': 'a/b'}
    """
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    loads = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.args
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and _last_name(node.func.value).endswith("ForCausalLM")
    ]
    names = [constants.get(arg.id, Argument(arg.id)) if isinstance(arg, ast.Name) else _value(arg) for arg in loads]
    return {"model_name_or_path": names[0]} if names and all(name == names[0] for name in names) else {}


_PREFERENCES = re.compile(r"(?:DPO|CPO|ORPO|KTO|BCO|GRPO|PPO|RLOO|XPO|OnlineDPO|NashMD|GKD|Reward|PRM)\w*Trainer")
"""Trainers of trl (trl/trainer) that train on preferences or rewards, or beside a reference model."""


def on_preferences(code: str) -> bool:
    """Whether the trainers that a program constructs are all of preferences or rewards.

    >>> on_preferences("t = trl.DPOTrainer(model)"), on_preferences("t = DPOTrainer(m) if dpo else SFTTrainer(m)")
    (True, False)
    """
    calls = [node.func for node in ast.walk(syntax_of(code)) if isinstance(node, ast.Call)]
    names = [name for call in calls if (name := getattr(call, "attr", getattr(call, "id", ""))).endswith("Trainer")]
    return bool(names) and all(_PREFERENCES.fullmatch(name) for name in names)


def starts_trainer(text: str, beside: Beside | None) -> bool:
    """Whether a script runs a program in its folder that trains with Hugging Face's Trainer."""
    starts, program = r"\b(?:deepspeed|torchrun|accelerate launch|python3?)\s", r"(?<![\w./-])[\w./-]+\.py\b"
    lines = (line.partition("#")[0] for line in text.replace("\\\n", " ").splitlines())
    started = (line[found.end() :] for line in lines if (found := re.search(starts, line)))
    named = [found[0] for line in started if (found := re.search(program, line))]
    named += re.findall(rf"^\s*(?:export\s+)?\w+=[\"']?({program})", text, re.MULTILINE)  # in a variable that is run
    texts = (beside.text(name) or "" for name in named) if beside is not None else ()
    return any(
        re.search(r"\b(?:(?:TrainingArguments|SFTConfig)\(|HfArgumentParser\([^)]*\bTrainingArguments\b)", code)
        for code in texts
    )


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
    calls = [node for node in ast.walk(tree) if getattr(getattr(node, "func", None), "attr", "") == _ENABLE]
    values = [_value(tests[node]) if node in tests else True for node in calls]
    return {"gradient_checkpointing": values[0]} if values and all(value == values[0] for value in values) else {}


def _value(node: ast.expr) -> Any:
    """A literal, the argument that `args.name`, `name` or `args["name"]` is, or None."""
    if isinstance(node, ast.Attribute):
        return Argument(node.attr)
    if isinstance(node, ast.Name):
        return Argument(node.id)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return Argument(node.slice.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        return _value(node.func.value)  # args.target_modules.split(",")
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def passed_on(given: list[GivenKey], code: str) -> list[GivenKey]:
    """The given keys, the program's own arguments under the key to which it passes them, where nothing else gives that key."""
    named = {value.name: key for key, value in passed_in(code).items() if isinstance(value, Argument)}
    known = {item.key for item in given}
    return [
        item._replace(key=named[item.name]) if item.name in named and named[item.name] not in known else item
        for item in given
    ]


def of_program(code: str, defaults: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Key -> the literal that a program passes, or the default of the argument that it passes.

    What it passes to LoRA counts where one of the `known` keys switches adapters on, or the code sets them up unconditionally;
    not where it loads adapters, whose rank is that of their file.
    """
    found: dict[str, Any] = {}
    for key, value in passed_in(code).items():
        said = defaults.get(value.name) if isinstance(value, Argument) else value
        found |= {key: said} if said is not None else {}
    if (
        sets_up_adapters(code)
        and "PeftModel.from_pretrained(" not in code
        and found.keys() >= {"lora_r", "lora_target_modules"}
    ):
        return found | {"use_peft": True}
    adapts = {"use_peft", "lora_r"} & known
    return {key: value for key, value in found.items() if adapts or key not in PASSED["LoraConfig"].values()}


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
    return {names[key]: value for key, value in inside.items() if names[key] in PASSED["LoraConfig"].values()}


def sets_up_adapters(code: str) -> bool:
    """Whether a training program puts adapters on its model unconditionally.

    >>> sets_up_adapters("model = get_peft_model(model, LoraConfig(r=8))"), sets_up_adapters("if args.use_lora: LoraConfig(r=8)")
    (True, False)
    """
    asked = re.search(r"\bif\b[^\n]*(?:lora|peft)|--\w*(?:lora|peft)", code, re.IGNORECASE)
    return bool(re.search(r"\b(?:LoraConfig|get_peft_model)\(", code)) and not asked


def quantizes(code: str) -> bool:
    r"""Whether a training program quantizes the weights that it loads unconditionally.

    >>> quantizes("q = BitsAndBytesConfig(load_in_4bit=True)"), quantizes("if args.use_qlora:\n q = BitsAndBytesConfig()")
    (True, False)
    >>> quantizes("m = LlamaForCausalLM.from_pretrained(name, load_in_8bit=True)")
    True
    """
    asked = re.search(r"\bif\b[^\n]*(?:4_?bit|8_?bit|qlora|quant|bits)|--\w*(?:qlora|bit|quant)", code, re.IGNORECASE)
    return bool(re.search(r"\bBitsAndBytesConfig\(|\bload_in_[48]bit=True\b", code)) and not asked


def set_up_in(code: str, given: set[str], own: set[str]) -> list[str]:
    """What a program sets up by its code, and no key says: quantized weights, adapters, or weights that it does not train.

    `given`, `own`: keys of its command and configs, and those that its code gives.
    """
    by = "set up by its code"
    found = [f"quantized weights, {by}"] if quantizes(code) and not {"load_in_4bit", "load_in_8bit"} & given else []
    if not sets_up_adapters(code):
        return [*found, f"frozen weights, {by}"] if _freezes(code) else found
    told = "use_peft" in own or any(key.startswith(("lora_", "use_peft", "peft_")) for key in given)
    return found if told else [*found, f"adapters over frozen weights, {by}"]


def _freezes(code: str) -> bool:
    r"""Whether a program excludes weights from training, outside of any `if`.

    >>> _freezes("for p in m.parameters():\n  p.requires_grad = False"), _freezes("if a.x: m.requires_grad_(False)")
    (True, False)
    """
    left: list[ast.AST] = [syntax_of(code)]
    while left:
        node = left.pop()
        if isinstance(node, ast.If | ast.IfExp) and "__name__" not in {
            _last_name(n) for n in ast.iter_child_nodes(node.test)
        }:
            continue
        named = [_last_name(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        set_ = node.value if isinstance(node, ast.Assign) and "requires_grad" in named else None
        if isinstance(node, ast.Call) and _last_name(node.func) == "requires_grad_":
            set_ = next(iter(node.args), None)
        if isinstance(set_, ast.Constant) and set_.value is False:
            return True
        left += ast.iter_child_nodes(node)
    return False


def _last_name(node: ast.AST) -> str:
    """`c` of `a.b.c` or of `c`."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
