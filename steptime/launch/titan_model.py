"""torchtitan's models: by name and flavor, or as a log prints them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from steptime.config import ConfigError, build, near
from steptime.document import parse_mapping, read_source
from steptime.launch.keys import FOLDER, Values
from steptime.model.model import Model

_BUILDING = re.compile(r"Building (\w+) (\S+) with (.*)")
_SIZE = re.compile(r"size: ([\d,]+) total parameters")


@cache
def models() -> dict[str, Any]:
    """The table of flavors."""
    return parse_mapping(*read_source(FOLDER / "torchtitan_models.yaml"))


def known_models() -> set[str]:
    """Names of models, modelled or not."""
    table = models()
    return {*table, *table["aliases"], *table["not_modelled"]["mixture of experts"]}


def flavor_of(values: Values, changes: dict[str, Any]) -> dict[str, Any]:
    """The model section of model.name and model.flavor; what a flavor has that is not modelled goes to `changes`.

    Raises:
        ConfigError: unknown, or a mixture of experts.
    """
    table = models()
    name, flavor = str(values.get("model.name")), str(values.get("model.flavor"))
    family = table["aliases"].get(name, name)
    experts = table["not_modelled"]
    if family in experts["mixture of experts"]:
        raise values.fail("model.name", f"{name} is a mixture of experts, which is not modelled; only dense models are")
    if family == "qwen3" and flavor in experts["mixture of experts of qwen3"]:
        raise values.fail("model.flavor", f"{name} {flavor} is a mixture of experts, which is not modelled")
    families = [key for key in table if key not in {"source", "aliases", "not_modelled"}]
    if family not in families:
        raise values.fail("model.name", f"unknown model (got {name!r}){near(name, families)}; or add --set model=NAME")
    base = flavor
    for word, why in experts["flavors"].items():
        if re.search(rf"_{word}(_attn)?$", flavor):
            base = re.sub(rf"_{word}(_attn)?$", "", base)
            changes["model.flavor"] = ("unmodelled", f"{why}; taken as {base}")
    if base not in table[family]:
        raise values.fail("model.flavor", f"unknown flavor of {name} (got {flavor!r}){near(flavor, table[family])}")
    return dict(table[family][base])


def from_log(path: str, text: str) -> dict[str, Any] | None:
    """The model that "Building llama3 8B with ..." describes, checked against the parameters that the log counts.

    None where the line is missing, or does not say enough.

    Raises:
        ConfigError: the model read and the parameters counted differ.
    """
    found = _BUILDING.search(text)
    if found is None or found[1] not in {"llama3", "llama"}:
        return None
    said = dict(re.findall(r"[\"']?(\w+)[\"']?\s*[=:]\s*([\d.]+|None|null)", found[3]))
    if not {"dim", "n_layers", "n_heads", "vocab_size"} <= said.keys():
        return None
    heads, dim = int(said["n_heads"]), int(said["dim"])
    kv = said.get("n_kv_heads", "None")
    model = {
        "n_layers": int(said["n_layers"]),
        "hidden_sz": dim,
        "inter_sz": hidden_dim(dim, int(said.get("multiple_of", 256)), said.get("ffn_dim_multiplier")),
        "n_q_heads": heads,
        "n_kv_heads": int(kv) if kv.isdigit() else heads,
        "vocab_sz": int(said["vocab_size"]),
        "source": f"the log of torchtitan {found[1]} {found[2]}",
    }
    if size := _SIZE.search(text):
        counted, ours = int(size[1].replace(",", "")), build(Model, model).n_params
        if "enable_weight_tying=True" in found[3]:
            model["tie_embeddings"] = True
            ours = build(Model, model).n_params
        if counted != ours:
            raise ConfigError(
                f"{path}: the log counts {counted:,} parameters, and the model that it describes has {ours:,}; "
                "add --set model=NAME"
            )
    return model


def hidden_dim(dim: int, multiple_of: int, multiplier: str | None) -> int:
    """Width of the feed-forward network (torchtitan/models/llama3/model/model.py, FeedForward).

    >>> hidden_dim(4096, 1024, "1.3"), hidden_dim(256, 256, None)
    (14336, 768)
    """
    width = int(2 * 4 * dim / 3)
    if multiplier not in {None, "None", "null"}:
        width = int(float(str(multiplier)) * width)
    return multiple_of * -(-width // multiple_of)
