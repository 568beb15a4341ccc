"""Which sets of files hold the same model: known layouts of public repositories, or files of the same bytes.

Equal names and shapes are not sufficient evidence: two runs of one model also have them. Known layouts: Hugging Face's file names
(one model per folder, in several formats and variants), Meta's and Mistral's consolidated files next to them or in a folder
`original`, GGUF files made from the model next to them or from one another, DeepSpeed's files next to the gathered weights.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import Any, NamedTuple

from steptime.checkpoint.confignames import from_config
from steptime.checkpoint.stored_records import Section, StoredTensor
from steptime.checkpoint.weight_names import BUFFERS

STEMS = re.compile(
    r"^(?:model|pytorch_model|tf_model|flax_model|rust_model|open_clip_(?:pytorch_)?model|adapter_model|consolidated(?:\.00)?|"
    r"diffusion_(?:pytorch|flax)_model|weights)(?:\.(?:fp16|bf16|fp32|fp8|int8|non_ema|ema))?$"
)
_SPELLINGS = (  # Meta's, Mistral's and llama.cpp's names of a llama's tensors, in those of Hugging Face
    (r"^(?:model|transformer|language_model\.model)\.", ""), (r"^blk\.", "layers."), (r"output_norm|^norm", "norm"),
    (r"tok_embeddings|token_embd", "embed_tokens"), (r"^output\.", "lm_head."), (r"attn_output", "self_attn.o_proj"),
    (r"attention\.w([qkvo])\b", r"self_attn.\1_proj"), (r"attn_([qkv])\b", r"self_attn.\1_proj"),
    (r"attention_norm|attn_norm", "input_layernorm"), (r"ffn_norm", "post_attention_layernorm"),
    (r"feed_forward\.w1\b|ffn_gate\b", "mlp.gate_proj"), (r"feed_forward\.w2\b|ffn_down\b", "mlp.down_proj"),
    (r"feed_forward\.w3\b|ffn_up\b", "mlp.up_proj"),
)  # fmt: skip
_NAMES = [(re.compile(pattern), words) for pattern, words in _SPELLINGS]
MIN_TENSORS = 2
MAX_OWNERS = 64  # models of one folder with which another is compared by size


class _Profile(NamedTuple):
    """The values by which sections are compared, computed once per section."""

    section: Section
    family: str | None
    checksums: frozenset[Any] | None
    structure: frozenset[Any]
    size: int


def mark(found: list[Section]) -> None:
    """Set `same_as` on every section that repeats another one, so that each model counts once.

    Safetensors come first; where equal names and shapes are no copies, a note says that both count.
    """
    exact: dict[tuple[str, object], Section] = {}
    near: dict[str, list[_Profile]] = {}
    own = [section for section in found if section.same_as is None and len(_model(section)) >= MIN_TENSORS]
    folders = Counter(map(_folder, own))
    for section in sorted(own, key=lambda s: ("safetensors" not in s.format, "GGUF" in s.format, len(s.stem), s.path)):
        if folders[_folder(section)] < 2:
            continue
        one, folder = _profile(section), _folder(section)
        keys = [(folder, one.checksums)] if one.checksums else []
        keys += [(folder, one.structure)] if one.family else []
        others = near.setdefault(folder, [])
        other = next((exact[key] for key in keys if key in exact), None)
        if other is None and one.family:
            other = next((known.section for known in others if _close(one, known)), None)
        if other is not None:
            section.same_as = other.path or other.format
            continue
        exact.update(dict.fromkeys(keys, section))
        if one.family and len(others) < MAX_OWNERS:
            others.append(one)


def _profile(section: Section) -> _Profile:
    family = _family(section)
    structure = _structure(section) if family else frozenset()
    size = sum(prod(shape) for shape in {t.name: t.whole for t in _model(section)}.values()) if family else 0
    return _Profile(section, family, _checksums(section), structure, size)


def _folder(section: Section) -> str:
    """The folder of a section; DeepSpeed's tag folder and its maker's own format belong to the one above."""
    files = section.files[0].rpartition("/")[0] if section.files else section.path
    return files.rpartition("/")[0] if section.format.startswith("DeepSpeed") or _original(section) else files


def _original(section: Section) -> bool:
    """Whether it is the model in its maker's own format, next to that of Hugging Face (Llama, gpt-oss)."""
    return bool(section.files) and "original" in section.files[0].split("/")[-2:-1]


def _family(section: Section) -> str | None:
    """The layout whose folders hold one model each, from format and file names; None for other sections."""
    if section.format.startswith(("GGUF", "DeepSpeed", "Meta")):
        return section.format.partition(" ")[0]
    return "repository" if STEMS.match(section.stem) or _original(section) else None


def _model(section: Section) -> list[StoredTensor]:
    return [t for t in section.tensors if t.role in ("", "model")]


def _checksums(section: Section) -> frozenset[Any] | None:
    """Name and checksum of every tensor; None where one has none."""
    model = _model(section)
    if any(t.checksum is None for t in model):
        return None
    return frozenset((t.name, t.checksum, t.storage_nbytes, t.shape) for t in model)


def _structure(section: Section) -> frozenset[Any]:
    """Normalized names and whole shapes, without buffers that some formats save and others do not."""
    names = {t.name: t.whole for t in _model(section) if not BUFFERS.search(t.name)}
    return frozenset((_spelled(name), shape) for name, shape in names.items())


def _spelled(name: str) -> str:
    for pattern, words in _NAMES:
        name = pattern.sub(words, name)
    return name


def _close(one: _Profile, other: _Profile) -> bool:
    """Whether sizes agree within 2 % (buffers, tied heads). TensorFlow and Flax rename and transpose tensors."""
    if 50 * min(one.size, other.size) < 49 * max(one.size, other.size):
        return False
    if "GGUF" in (one.family, other.family):
        return _dimensions(one.section) == _dimensions(other.section) != {}
    return one.section.format != other.section.format or _original(one.section) != _original(other.section)


def _dimensions(section: Section) -> dict[str, Any]:
    """The size of the model in the section's own config or key-values."""
    known = dict(from_config(section.facts)[-1:])
    fields = next(iter(known.values()), {})
    return {key: fields[key] for key in ("n_layers", "hidden_sz") if key in fields}
