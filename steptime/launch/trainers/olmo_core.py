"""Training programs over OLMo-core, read by their syntax: the functions that a program gives to build_config.

The model's and the training module's builders are followed with the sequence length, batch and tokenizer that the program states,
as they run without Beaker; their settings become dotted keys, which data/launch/olmo_core.yaml translates.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.job.edit import put
from steptime.launch.devices import told
from steptime.launch.keys import KeyTable, flatten, is_costly, load_table
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.config_functions import CALLED, read_function
from steptime.launch.python.config_values import CLASS, FUNCTION, Computed, calls_in, ends, syntax_of, with_function
from steptime.launch.reading import Sets
from steptime.launch.shell.processes import blanks, flags_of
from steptime.launch.shell.script import Script, read_script
from steptime.launch.trainers.trainer_files import Said

_BUILDERS = {"model_config_builder": "model", "train_module_config_builder": "train_module"}
"""Argument of build_config -> the section of the config that its function returns."""
_PLAIN = ("global_batch_size", "max_sequence_length", "num_nodes")
_PLAN = "write a plan with its settings"
_READS = re.compile(r"(?:log\w*\.\w+|print)\(")
_ENTRIES = "model.embedding_size"
_LENGTH, _OLDER = "max_sequence_length", "sequence_length"
"""The argument of build_config for the length of sequences, and that of older releases."""
_USUAL = 4096
"""Its default, in both."""


def program_of(path: str, text: str, env: Mapping[str, str], sets: Sets, nearby: NearbyFiles) -> Said | None:
    """What a program over OLMo-core says, alone or with the words of the script that starts it; None of other files.

    Raises:
        ConfigError: one line per problem: settings that are not given to build_config, or known only at run time.
    """
    script, name, words = None, path, [word for key, word in env.items() if key.isdecimal()]
    if not path.endswith(".py"):
        if path.endswith((".yaml", ".yml", ".json")):
            return None
        script = read_script(text, path, dict(env), nearby)
        name, text = script.program, nearby.text(script.program) or ""
        words = [word.text for word in script.arguments]
    if "olmo_core" not in text:
        return None
    if script is not None and (blank := blanks(path, script.arguments, load_table("olmo_core"))):
        raise ConfigError(blank)
    tree = _config(path if script is None else name, text)
    for key, value in flags_of(words):
        if "." in key:
            _put_word(tree, key, value)
    found = _said(path, tree, script)
    entries = found.keys[_ENTRIES]
    if isinstance(entries, Computed) and told(sets, "model.vocab_sz") is None and told(sets, "model") is None:
        raise ConfigError(f"{path}: vocabulary size unknown ({entries.code}); add --set model.vocab_sz=N")
    known = {key: None if isinstance(value, Computed) else value for key, value in found.keys.items()}
    return found._replace(keys=known)


def _config(path: str, text: str) -> dict[str, Any]:
    """The arguments of build_config, with what its builders return.

    Raises:
        ConfigError: there is no such call.
    """
    module = syntax_of(text)
    given = [{item.arg or "": item.value for item in call.keywords} for call in calls_in(module)]
    found = [said for said in given if _BUILDERS.keys() <= said.keys()]
    functions = (node for node in module.body if isinstance(node, ast.FunctionDef))
    whole = [node.name for node in functions if ends(node.returns, "ExperimentConfig") or _returns_all(node)]
    if whole and not found:
        tree = read_function(path, text, whole[0], "ExperimentConfig", "$^")[1]
        for part, key, name in (("dataset", "sequence_length", _LENGTH), ("data_loader", *["global_batch_size"] * 2)):
            inner = tree.get(part)
            tree[name] = inner.get(key) if isinstance(inner, dict) else None
        named = {*re.findall(r"\bTokenizerConfig\.\w+", text)}
        return tree | ({"tokenizer": Computed(0, *named)} if len(named) == 1 else {})
    if len(found) != 1:
        what = "a program over OLMo-core without a call of its build_config(model_config_builder=...), and without a function "
        what += "that returns ExperimentConfig or a dict(model=..., train_module=...)"
        raise ConfigError(f"{path}: {what}; {_PLAN}")
    said = found[0]
    if own := sorted({"finalize_config", "common_config_builder"} & said.keys()):
        raise ConfigError(f"{path}: what {own[0]} sets is not read; {_PLAN}")
    said = {_LENGTH: said.pop(_OLDER, ast.Constant(_USUAL))} | said
    plain = ", ".join(f"{key}={ast.unparse(said[key])}" for key in _PLAIN if key in said)
    tokenizer = ast.unparse(said["tokenizer"]) if "tokenizer" in said else "TokenizerConfig.dolma2(x=0)"
    parts = ", ".join(f"{part}={ast.unparse(said[key])}(common)" for key, part in _BUILDERS.items())
    common = f"common = CommonComponents({plain}, launch=None, tokenizer={tokenizer})"
    added = with_function(text, common, f"return Job({plain}, {parts}, tokenizer={tokenizer})")
    return read_function(path, added, FUNCTION, "", "$^")[1]


def _returns_all(function: ast.FunctionDef) -> bool:
    """Whether a function returns the model and the training module by name: of a config, or of a mapping (dict)."""
    last = function.body[-1]
    given = last.value.keywords if isinstance(last, ast.Return) and isinstance(last.value, ast.Call) else []
    return {"model", "train_module"} <= {item.arg for item in given}


def _put_word(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a word of the command over the config; three of them are arguments of build_config."""
    plain = {
        "data_loader.global_batch_size": "global_batch_size",
        "dataset.sequence_length": _LENGTH,
        "launch.num_nodes": "num_nodes",
    }
    if key.partition(".")[0] in {"model", "train_module"} or key in plain:
        put(tree, plain.get(key, key), value)


def _said(path: str, tree: dict[str, Any], script: Script | None) -> Said:
    """The dotted keys of a config.

    Raises:
        ConfigError: a part of it is known only at run time.
    """
    table = load_table("olmo_core")
    model, module = tree.get("model"), tree.get("train_module")
    kinds = [str(part.get(CLASS, "")) if isinstance(part, dict) else "" for part in (model, module)]
    known = kinds[0].startswith("TransformerConfig.") and kinds[0].replace(".", "_").isidentifier()
    if not (isinstance(model, dict) and isinstance(module, dict) and known and kinds[1].endswith("TrainModuleConfig")):
        raise ConfigError(f"{path}: its model or training module is known only at run time; {_PLAN}")
    if calls := [call for part in (model, module) for call in part.get(CALLED, []) if not _READS.match(call)]:
        raise ConfigError(f"{path}: {calls[0]} may change the config and is not read; {_PLAN}")
    entries = _vocabulary(model.pop("vocab_size", None), tree.get("tokenizer"), table)
    said = _model(model, table) | flatten({"train_module": _plain(module)})
    optimizer = str((module.get("optim") or {}).get(CLASS, "")).removesuffix("Config")
    said |= {_ENTRIES: entries, "train_module.optim": "AdamW" if "Adam" in optimizer else optimizer}
    length, micro = tree.get(_LENGTH), said.pop("train_module.rank_microbatch_size", None)
    if not isinstance(length, int):
        raise ConfigError(f"{path}: it does not state {_LENGTH} as a number; {_PLAN}")
    said |= {
        "sequence_length": length,
        "global_batch_size": tree.get("global_batch_size"),
        "num_nodes": tree.get("num_nodes"),
    }
    if isinstance(micro, int):
        said["train_module.rank_microbatch_size / sequence_length"] = micro // length
    for key, value in said.items():
        costs = key.startswith("model.") or is_costly(key, table, unknown=True)
        if isinstance(value, Computed) and key != _ENTRIES and costs:
            raise ConfigError(f"{path}: {key} is computed ({value.code}); {_PLAN}")
    return Said(said) if script is None else Said(said, script.devices, notes=script.notes)


def _model(model: dict[str, Any], table: KeyTable) -> dict[str, Any]:
    """The keys of a named model, or of llama_like's arguments."""
    name = str(model.pop(CLASS, "")).rpartition(".")[2]
    made = table.raw["factories"].get(name)
    more = {key: value for key, value in model.items() if key not in {"_args_", CALLED}}
    if isinstance(made, str):
        return {"model.factory": made} | (flatten({"model": _plain(more)}) if more else {})
    if made is None and name != "llama_like":
        return {"model.factory": f"TransformerConfig.{name}"}
    sizes = (made or {}) | more
    if not isinstance(sizes.get("d_model"), int):
        return {"model.factory": f"TransformerConfig.{name}"}
    block = _plain(sizes.pop("block_name", "default"))
    family = table.raw["olmo2"] if sizes.pop("olmo2", block == "reordered_norm") else {}
    sizes |= {} if family or block == "default" else {"block_name": block}
    family |= {"model.attention_layer_norm": sizes.pop("qk_norm")} if "qk_norm" in sizes else {}
    width = int(8 * sizes["d_model"] / 3)
    width = int(sizes.pop("hidden_size_multiplier", 1) * width)
    multiple = sizes.pop("hidden_size_multiple_of", 256)
    sizes["mlp_hidden_size"] = 2 * multiple * -(-width // multiple)
    return {**table.raw["llama_like"], **family, **flatten({"model": _plain(sizes)})}


def _vocabulary(said: Any, tokenizer: Any, table: KeyTable) -> Any:
    """The vocabulary that the model is given: a number, or that of the tokenizer, padded to a multiple of 128."""
    if not isinstance(said, Computed):
        return said
    named = tokenizer.get(CLASS) if isinstance(tokenizer, dict) else getattr(tokenizer, "code", "")
    name = str(named).partition("(")[0]
    size = table.raw["tokenizers"].get(name.rpartition(".")[2])
    if size is None or not re.search(r"\btokenizer\w*\.(?:padded_)?vocab_size\b", said.code):
        return said
    return 128 * -(-size // 128) if "padded" in said.code else size


def _plain(node: Any) -> Any:
    """Sections without the names of their classes, except where the class is the setting; members of enumerations by name."""
    if isinstance(node, Computed) and re.fullmatch(r"[A-Z]\w+\.\w+", node.code):
        return node.code.partition(".")[2]
    if not isinstance(node, dict):
        return node
    kind = str(node.get(CLASS, ""))
    args = [_plain(item) for item in node.get("_args_", [])]
    found = {key: _plain(item) for key, item in node.items() if key not in {CLASS, "_args_", CALLED}}
    if kind.endswith("ActivationCheckpointingConfig") and args:
        found["mode"] = args[0]
    if kind.startswith("TransformerContextParallelConfig."):
        found["kind"] = kind.rpartition(".")[2]
    return found or kind or None
