"""YAML that names classes (`_target_`, as hydra and nemo-run write it) as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from steptime.launch.keys import table_file
from steptime.launch.reading import Sets
from steptime.software.profiles import profile_releases

CLASS = "_target_"
_CALL = {"_call_", "_args_", "_name_"}


class NemoConfig(NamedTuple):
    """A config and its context."""

    path: str
    tree: dict[str, Any]
    devices: int | None
    """Number of devices, from the surrounding log or the environment."""
    sets: Sets
    release: str
    """Release of the framework, where the file names it, else ""."""
    variables: Mapping[str, str] = {}
    """The environment, including variables from shell files given with the config."""

    def profile(self, name: str) -> str:
        """The software profile of the release, where there is a separate one."""
        return f"{name}@{self.release}" if self.release in profile_releases(name) else name


def class_of(node: Any) -> str:
    """The class or function that a mapping names; "" where it names none."""
    return str(node[CLASS]) if isinstance(node, dict) and CLASS in node else ""


def methods_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """The class of a job's adapters (peft, or NeMo 2's model_transform), which `simplify` leaves out, as a separate key.

    >>> methods_of({"peft": {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 8}, "train": {}})
    {'peft.method': 'LoRA'}
    """
    named = {key: class_of(tree[key]).rpartition(".")[2] for key in ("peft", "model_transform") if tree.get(key)}
    return {f"{key}.method": "unknown" if name in {"", "None"} else name for key, name in named.items()}


def other_class_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """The class of a NeMo 2 job's model and its kind, by its name or module, where that is no decoder's; as a separate key.

    >>> other_class_of({"model": {"_target_": "llm.BertModel", "config": {"_target_": "llm.MegatronBertBaseConfig"}}})
    {'model.class': 'MegatronBertBaseConfig (BERT)'}
    >>> other_class_of({"model": {"_target_": "llm.LlamaModel", "config": {"_target_": "llm.Llama3Config8B"}}})
    {}
    """
    model = tree.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    for name in filter(None, (class_of(config), class_of(model))):
        for words, kind in table_file("nemo2")["other_classes"].items():
            if re.search(words, name):
                return {"model.class": f"{name.rpartition('.')[2]} ({kind})"}
    return {}


def simplify(node: Any) -> Any:
    """Mappings without the keys that name classes; a function or an enumeration's member becomes its name.

    >>> simplify({"_target_": "a.Config", "dtype": {"_call_": False, "_target_": "torch.bfloat16"}})
    {'dtype': 'torch.bfloat16'}
    >>> simplify({"_target_": "enums.AttnBackend", "_call_": True, "_args_": [5]})
    'enums.AttnBackend(5)'
    >>> simplify({"_target_": "enums.AttnBackend", "_call_": True, "_args_": 5})
    'enums.AttnBackend(5)'
    """
    if isinstance(node, list):
        return [simplify(item) for item in node]
    if not isinstance(node, dict):
        return node
    if CLASS in node and _CALL & node.keys():
        args = node.get("_args_") or []
        args = args if isinstance(args, list) else [args]
        return f"{node[CLASS]}({', '.join(map(str, args))})" if args and "_partial_" not in node else str(node[CLASS])
    return {key: simplify(value) for key, value in node.items() if key not in {CLASS, "_partial_"}}
