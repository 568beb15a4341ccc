"""Hugging Face `config.json` as fields of `Model`: plain JSON, no transformers, no remote code.

Keys missing in the file have the family's default (`hf_families.py`). Layers, hidden sizes, heads and vocabulary are taken from
defaults only in families whose published files omit them (Gemma 3); elsewhere a missing one is an error. So is what `Model`
cannot express: experts, latents and windows of other families, parallel residuals. Rotary details are not read: they do not
affect the cost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from steptime.base.config import ConfigError, show
from steptime.model.hf_experts import EXPERTS, LATENT, latent, no_kinds, pattern
from steptime.model.hf_families import FAMILIES
from steptime.model.hf_family import ACTIVATIONS, FORBIDDEN, UNMODELED, Family, Json
from steptime.model.hf_hybrid import HYBRIDS, LINEAR, counted, hybrid_section, linear_section

LARGEST_BYTES = 1 << 20
"""Largest config.json that is read; real ones have a few kB."""


def read_hf_config(path: str | Path) -> Json:
    """Fields of `Model` from a Hugging Face config.json, or from the model folder that holds one.

    Raises:
        ConfigError: one line per problem: the path, the key and its value, what is read instead.
    """
    file = Path(path)
    config = load_json(file / "config.json" if file.is_dir() else file)
    fields, problems = fields_of(config)
    if problems:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    model_type = str(config.get("model_type", ""))
    name = Path(str(config.get("_name_or_path") or model_type)).name
    return {"name": name, **fields, "source": f"{path} (model_type {model_type})"}


def fields_of(config: Json) -> tuple[Json, list[str]]:
    """Fields of `Model` from the content of a config.json, and what is wrong with it: then they are incomplete."""
    model_type = str(config.get("model_type", ""))
    forbidden = FORBIDDEN | no_kinds(model_type)
    problems = [f"{key}: {what} is not modeled" for key, what in forbidden.items() if config.get(key)]
    if not problems and model_type not in FAMILIES:
        problems = [unknown(model_type)]
    if problems:
        return {}, problems
    reader = Reader(FAMILIES[model_type], config, model_type)
    return reader.fields(), reader.problems


def load_json(file: Path) -> Json:
    """The JSON object in a file; ConfigError with one line for anything else."""
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise ConfigError(f"{file}: {file.stat().st_size:,} bytes, not a model config")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: not JSON (line {error.lineno}: {error.msg})") from None
    except (UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{file}: not JSON") from None
    if isinstance(config, dict):
        return cast("Json", config)
    raise ConfigError(f"{file}: expected a JSON object, got a {type(config).__name__}")


def unknown(model_type: str) -> str:
    """The message for a model_type that is not supported."""
    if not model_type:
        return "no model_type: not a Hugging Face model config"
    if model_type in UNMODELED:
        return f"model_type {show(model_type)} is not modeled: {UNMODELED[model_type]}"
    from difflib import get_close_matches

    near = get_close_matches(model_type, FAMILIES)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown model_type {show(model_type)}{hint} (supported: {', '.join(FAMILIES)})"


class Reader:
    """One config merged with its family's defaults; problems are collected in `problems`."""

    def __init__(self, family: Family, config: Json, model_type: str = "") -> None:
        """Rename keys to the common ones; an explicit value overrides the class default."""
        self.family, self.model_type = family, model_type
        own = {common: config[key] for common, key in family.names.items() if key in config}
        self.values: Json = family.defaults | config | own
        if model_type in HYBRIDS:
            self.values |= counted(self.values)
        self.problems = [
            f"{key}: {shown(self.values[key])} is not modeled, only {shown(wanted)}"
            for key, wanted in family.only.items()
            if self.values.get(key, wanted) != wanted
        ]

    def fields(self) -> Json:
        """Fields of `Model`; incomplete where there are problems."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        fields = self.family.fields | {
            "n_layers": self.size("num_hidden_layers"),
            "hidden_sz": hidden,
            "inter_sz": self.inner(hidden),
            "n_q_heads": heads,
            "vocab_sz": self.size("vocab_size"),
            "n_kv_heads": self.kv_heads(heads),
            "head_dim": self.head_dim(hidden, heads),
            "activation": self.activation(),
            "tie_embeddings": self.agreed(("tie_word_embeddings",)),
        }
        if self.family.bias:
            fields["bias"] = self.agreed(self.family.bias)
        fields |= {name: self.agreed((key,)) for name, key in self.family.switches.items()}
        if self.family.dropout:
            fields |= self.dropouts(self.family.dropout)
        if fields.get("learned_positions"):
            fields["max_positions"] = self.size("max_position_embeddings") + self.family.extra_positions
        if isinstance(depths := self.values.get("num_nextn_predict_layers"), int) and depths > 0:
            fields["mtp"] = depths
        fields |= self.kinds(fields["head_dim"])
        self.check_layers(hidden)
        return fields

    def kinds(self, head_dim: object) -> Json:
        """Fields for experts and attention, whose heads have that width."""
        found: Json = {}
        if self.model_type in HYBRIDS:
            found, problems = hybrid_section(self.values)
            self.problems += problems
        experts = EXPERTS.get(self.model_type)
        if experts and "E" in str(found.get("hybrid_pattern", "E")):
            found["moe"], problems = experts.read(self.values)
            self.problems += problems
        if self.model_type in LATENT:
            found["attention"] = latent(self.values)
        elif window := self.window():
            found["attention"] = window
        linear, problems = linear_section(self.model_type, self.values | {"head_dim": head_dim})
        self.problems += problems
        if linear:
            found["linear_attention"] = linear
        if self.model_type == "gpt_oss":
            found["swiglu_limit"] = self.values["swiglu_limit"]
        if self.model_type == "falcon" and self.values["parallel_attn"]:
            two = 2 if self.values["new_decoder_architecture"] else 1
            found["shared_norm"] = (self.values["num_ln_in_parallel_attn"] or two) != 2
        return found

    def window(self) -> Json:
        """The `attention` section for layers with a window or a chunk."""
        values = self.values
        if self.model_type == "llama4_text" and values.get("attention_chunk_size"):
            return {"window": self.size("attention_chunk_size"), "window_pattern": 4, "chunked": True}
        window, context = values.get("sliding_window"), values.get("max_position_embeddings")
        reaches = isinstance(window, int) and isinstance(context, int) and window >= context
        if window is None or reaches or not values.get("use_sliding_window", True):
            return {}
        if "use_sliding_window" in values:  # Qwen: layers from max_window_layers on
            advice = "set it to null for full attention"
            self.problems.append(f"sliding_window: {shown(window)} from max_window_layers on is not modeled; {advice}")
            return {}
        section: Json = {"window": self.size("sliding_window")}
        kinds, every = values.get("layer_types"), self.family.windows
        if isinstance(kinds, list):
            every = pattern(kinds)
            if every is None:
                self.problems.append(
                    "layer_types: only one full-attention layer at the end of every n layers is supported"
                )
            elif every == 1:
                return {}
        if every is not None and every <= self.size("num_hidden_layers"):
            section["window_pattern"] = every
        return section | ({"sinks": True} if self.model_type == "gpt_oss" else {})

    def spelt(self, key: str) -> str:
        """The key as spelled in the file."""
        return self.family.names.get(key, key)

    def size(self, key: str) -> int:
        """A required positive whole number; 1 where it is wrong, so that reading continues."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        what = "missing" if value is None else f"expected a positive whole number, got {shown(value)}"
        self.problems.append(f"{self.spelt(key)}: {what}")
        return 1

    def inner(self, hidden: int) -> int:
        """Width of the MLP; null is four times the hidden size for GPT-2 and Falcon (modeling_gpt2.py, GPT2Block)."""
        if "inner" in self.family.names:  # Llama 4: intermediate_size is an expert's
            return self.size("inner")
        if self.values.get("intermediate_size") is None and self.spelt("intermediate_size") in {
            "n_inner",
            "ffn_hidden_size",
        }:
            return 4 * hidden
        return self.size("intermediate_size")

    def kv_heads(self, heads: int) -> int:
        """Key-value heads; null or not set: one for each query head."""
        if "multi_query" in self.values and not self.values.get("new_decoder_architecture"):
            return 1 if self.values["multi_query"] else heads
        if self.values.get("num_key_value_heads") is None:
            return heads
        kv = self.size("num_key_value_heads")
        if heads % kv:
            self.problems.append(
                f"num_key_value_heads: {kv} does not divide {self.spelt('num_attention_heads')} {heads}"
            )
        return kv

    def head_dim(self, hidden: int, heads: int) -> int:
        """Width of a head; null or not set: hidden_size / num_attention_heads."""
        if self.values.get("head_dim") is not None:
            return self.size("head_dim")
        if hidden % heads and hidden > 1:
            self.problems.append(f"{self.spelt('num_attention_heads')}: {heads} does not divide {hidden}")
        return max(hidden // heads, 1)

    def activation(self) -> str:
        """The activation under `Model`'s name."""
        name = self.values.get("hidden_act")
        if isinstance(name, str) and name in ACTIVATIONS:
            return ACTIVATIONS[name]
        known = ", ".join(ACTIVATIONS)
        self.problems.append(f"{self.spelt('hidden_act')}: {shown(name)} is not modeled (known: {known})")
        return "gelu"

    def agreed(self, keys: tuple[str, ...], *, probability: bool = False) -> object:
        """The common value of several switches, or of several dropout probabilities."""
        found = {key: self.values.get(key) for key in keys}
        text = ", ".join(f"{key}: {shown(value)}" for key, value in found.items())
        right = is_probability if probability else is_flag
        if not all(map(right, found.values())):
            expected = "a probability from 0 to below 1" if probability else "true or false"
            self.problems.append(f"{text}: expected {expected}")
        elif len(set(found.values())) > 1:
            self.problems.append(f"{text}: different values are not modeled; make them equal")
        return found[keys[0]]

    def dropouts(self, keys: tuple[str, ...]) -> Json:
        """The probability of hidden states, and that of attention's scores where it differs."""
        scores = tuple(key for key in keys if key.startswith("att"))
        hidden = self.agreed(tuple(key for key in keys if key not in scores), probability=True)
        own = self.agreed(scores, probability=True)
        return {"dropout": hidden} | ({} if own == hidden else {"attention_dropout": own})

    def check_layers(self, hidden: int) -> None:
        """Refuse layers of other kinds, and an embedding with its own width."""
        kinds, known = self.values.get("layer_types"), {"full_attention", "sliding_attention", "chunked_attention"}
        known |= {"linear_attention"} if self.model_type in LINEAR else set()
        if isinstance(kinds, list) and set(map(str, kinds)) - known:
            self.problems.append("layer_types: only full_attention and sliding_attention are modeled")
        if self.values.get("word_embed_proj_dim") not in (None, hidden):
            self.problems.append(f"word_embed_proj_dim: only {hidden} (hidden_size) is modeled")


def is_flag(value: object) -> bool:
    """JSON's true or false."""
    return isinstance(value, bool)


def is_probability(value: object) -> bool:
    """A number that `Model.dropout` takes."""
    return isinstance(value, int | float) and 0 <= value < 1


def shown(value: object) -> str:
    """A value as JSON writes it, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
