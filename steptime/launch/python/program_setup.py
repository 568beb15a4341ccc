"""What a training program sets up by its code alone, read by ast: adapters, quantized or frozen weights, other training."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from steptime.launch.python.config_values import calls_in, last_name, syntax_of
from steptime.launch.python.program_values import Argument, fulfilled, value_of

_PREFERENCES = re.compile(r"(?:DPO|CPO|ORPO|KTO|BCO|GRPO|PPO|RLOO|XPO|OnlineDPO|NashMD|GKD|Reward|PRM)\w*Trainer")
"""Trainers of trl (trl/trainer) that train on preferences or rewards, or beside a reference model."""
_ON_PREFERENCES = "training on preferences or rewards"


def of_preferences(program: str) -> str:
    """What a program trains by its name: on rewards or preferences, a reward model, or beside a reference model; else "".

    >>> of_preferences("train_rm.py"), of_preferences("safe_rlhf.finetune")
    ('training on preferences or rewards', '')
    """
    last = program.lower().removesuffix(".py").rpartition(".")[2]
    words = r"(?:^|[_-])(?:rm|orm|prm|reward|dpo|simpo|kto|orpo|ppo|grpo|rloo|rlhf|kl|gkd|opd)(?=[_-]|$)"
    return _ON_PREFERENCES if re.search(words, last) else ""


def other_training(code: str) -> str:
    """What a program trains instead of a model of text: by its trainers, or by the kind of model that it loads; else "".

    >>> other_training("t = trl.DPOTrainer(model)"), other_training("t = DPOTrainer(m) if dpo else SFTTrainer(m)")
    ('training on preferences or rewards', '')
    >>> other_training("m = AutoModelForSequenceClassification.from_pretrained(name)")
    'training of a model that labels sequences'
    """
    calls = [call.func for call in calls_in(syntax_of(code))]
    names = [name for call in calls if (name := last_name(call)).endswith("Trainer")]
    if names and all(_PREFERENCES.fullmatch(name) for name in names):
        return _ON_PREFERENCES
    loads = (call.value for call in calls if isinstance(call, ast.Attribute) and call.attr == "from_pretrained")
    kinds = {found[1] for load in loads if (found := re.search(r"For(CausalLM|\w+Classification)$", last_name(load)))}
    return "training of a model that labels sequences" if kinds and "CausalLM" not in kinds else ""


_SWITCHES = r"\bif\b[^\n]*\b\w*(?:lora|peft)\b|--[\w-]*(?:lora|peft)(?![\w-])"
"""An `if` on a switch of adapters, and its option: use_lora, but not lora_r or lora_checkpoint."""
_METHOD = re.compile(r"lora|peft|adapter|tun(?:e|ing)|full|method|mode", re.IGNORECASE)
_BITS = re.compile(r"bit|int[48]|quant|bnb|lora", re.IGNORECASE)
_DEEPEST = 5


def sets_up_adapters(code: str) -> bool:
    r"""Whether a training program puts adapters on its model, whatever its arguments.

    >>> sets_up_adapters("model = get_peft_model(model, LoraConfig(r=8))"), sets_up_adapters("if args.use_lora: LoraConfig(r=8)")
    (True, False)
    >>> sets_up_adapters("p.add_argument('--lora_r')\nif args.lora_path: load()\nm = get_peft_model(m, c)")
    True
    >>> sets_up_adapters("def wrap(m):\n  return get_peft_model(m, c)\nif method == 'adapters': m = wrap(m)")
    False
    """
    if re.search(_SWITCHES, code, re.IGNORECASE):
        return False
    tree = syntax_of(code)
    above = _above(tree)
    wraps = calls_in(tree, "get_peft_model") or calls_in(tree, "LoraConfig")
    return any(not _asked(node, above, tree, _METHOD) for node in wraps)


def _above(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    """Node -> the one that it is in."""
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _asked(node: ast.AST, above: dict[ast.AST, ast.AST], tree: ast.Module, of: re.Pattern[str], depth: int = 0) -> bool:
    """Whether a test with such words decides on a statement, or on every call of the function that it is in."""
    while (parent := above.get(node)) is not None:
        if isinstance(parent, ast.If | ast.IfExp) and node is not parent.test and of.search(ast.unparse(parent.test)):
            return True
        if isinstance(parent, ast.FunctionDef) and depth < _DEEPEST and (made := calls_in(tree, parent.name)):
            return all(_asked(call, above, tree, of, depth + 1) for call in made)
        node = parent
    return False


def quantizes(code: str) -> str:
    r"""The bits to which a training program quantizes the weights that it loads, unconditionally: "4", or "8"; else "".

    What a BitsAndBytesConfig has by expressions, or none of the calls takes, counts as 8 bits, which no plan expresses.

    >>> quantizes("m = f(quantization_config=BitsAndBytesConfig(load_in_4bit=True))")
    '4'
    >>> quantizes("q = BitsAndBytesConfig(load_in_4bit=True)"), quantizes("if args.use_qlora:\n q = BitsAndBytesConfig()")
    ('8', '')
    >>> code = "m = LlamaForCausalLM.from_pretrained(name, load_in_8bit=True)"
    >>> quantizes(code), quantizes(f"if args.use_int8_training:\n  print()\n  {code}")
    ('8', '')
    """
    asked = re.search(r"\bif\b[^\n]*(?:4_?bit|8_?bit|qlora|quant|bits)|--\w*(?:qlora|bit|quant)", code, re.IGNORECASE)
    if asked or not re.search(r"\bBitsAndBytesConfig\(|\bload_in_[48]bit=True\b", code):
        return ""
    tree = syntax_of(code)
    above = _above(tree)
    said = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and _in_bits(node)]
    loads = [*calls_in(tree, "BitsAndBytesConfig"), *(node.value for node in said)]
    if all(_asked(node, above, tree, _BITS) for node in loads):
        return ""
    taken = re.search(r"\bquantization_config\b", code) or not re.search(r"\bBitsAndBytesConfig\(", code)
    return "4" if taken and {node.arg for node in said} == {"load_in_4bit"} else "8"


def _in_bits(node: ast.keyword) -> bool:
    """load_in_8bit=True, load_in_4bit=True."""
    return bool(node.arg and re.fullmatch("load_in_[48]bit", node.arg)) and getattr(node.value, "value", None) is True


_MORE = {
    "modules_to_save": "weights trained in full in addition to adapters",
    "use_dora": "DoRA: LoRA is counted",
}
"""Argument of LoraConfig -> what it adds to adapters."""


def _of_adapters(code: str) -> set[str]:
    """The arguments of LoraConfig that a program gives other values than None, False or an empty list.

    >>> _of_adapters("c = LoraConfig(r=8, use_dora=False, modules_to_save=['lm_head'])") - {"r"}
    {'modules_to_save'}
    """
    given = [keyword for call in calls_in(syntax_of(code), "LoraConfig") for keyword in call.keywords]
    return {word.arg for word in given if word.arg and ast.unparse(word.value) not in {"None", "False", "[]"}}


def set_up_in(code: str, given: set[str], own: set[str], values: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """What a program sets up by its code, and no key says: quantized weights, adapters, or weights that it does not train.

    `given`, `own`: keys of its command and configs, and those that its code gives; `values`: of its arguments.
    """
    by = "set up by its code"
    quantized = quantizes(code) and not {"load_in_4bit", "load_in_8bit"} & {*given, *own}
    found = [f"quantized weights, {by}"] if quantized else []
    if not sets_up_adapters(code):
        return [*found, f"{frozen}, {by}"] if (frozen := freezes(code, values)) else found
    found += [f"{_MORE[name]}, {by}" for name in _MORE if name in _of_adapters(code)]
    told = "use_peft" in own or any(key.startswith(("lora_", "use_peft", "peft_")) for key in given)
    return found if told else [*found, f"adapters over frozen weights, {by}"]


_NAMES = re.compile(r"name|model_id|repo|_path$|_dir$", re.IGNORECASE)
"""In what a test by the name of a model or of a run compares with words."""


def freezes(code: str, given: Mapping[str, Any] = MappingProxyType({})) -> str:
    r"""Whether a program excludes weights from training, and under which test of names that the `given` values leave open.

    Outside of any `if` but one of a loop's own variables, or one that these values fulfill: other switches count as off.

    >>> freezes("for p in m.parameters():\n  p.requires_grad = False"), freezes("if a.x: m.requires_grad_(False)")
    ('frozen weights', '')
    >>> freezes("for n, p in m.named_parameters():\n  if 'mtp' not in n: p.requires_grad = False")
    'frozen weights'
    >>> code = "if 'frozen' in args.run_name: m.requires_grad_(False)"
    >>> freezes(code), freezes(code, {"run_name": "a-frozen"}), freezes(code, {"run_name": "a"})
    ("frozen weights if 'frozen' in args.run_name", 'frozen weights', '')
    """
    tree = syntax_of(code)
    targets = (node.target for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension))
    loops = {"__name__", "any", "all", *(name for target in targets for name in _names(target))}
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if _excludes(node):
            return "frozen weights"
        if not isinstance(node, ast.If) or _names(node.test) <= loops:
            left += [] if isinstance(node, ast.IfExp) and not _names(node.test) <= loops else ast.iter_child_nodes(node)
            continue
        holds, body = fulfilled(node.test, given), [part for each in node.body for part in ast.walk(each)]
        if _by_name(node.test, loops) and holds is not False and any(map(_excludes, body)):
            return f"frozen weights{'' if holds else f' if {ast.unparse(node.test)}'}"
        left += [] if holds is None else node.body if holds else node.orelse
    return ""


def _excludes(node: ast.AST) -> bool:
    """Whether a statement excludes weights from training."""
    named = [last_name(target) for target in node.targets] if isinstance(node, ast.Assign) else []
    value: ast.expr | None = node.value if isinstance(node, ast.Assign) and "requires_grad" in named else None
    if isinstance(node, ast.Call) and last_name(node.func) == "requires_grad_":
        value = next(iter(node.args), None)
    return isinstance(value, ast.Constant) and value.value is False


def _by_name(test: ast.expr, loops: set[str]) -> bool:
    """Whether a test compares the name of a model or of a run, no loop's variable, with words."""
    words = any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(test))
    said = (value_of(part) for part in ast.walk(test) if isinstance(part, ast.Attribute | ast.Name | ast.Subscript))
    names = {value.name for value in said if isinstance(value, Argument)} - loops
    return words and any(map(_NAMES.search, names))


def _names(node: ast.AST) -> set[str]:
    """The variables in an expression."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
