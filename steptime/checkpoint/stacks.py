"""The parts of a model by the names of its tensors: the language model's layers first, then vision, audio and the rest.

A stack is the set of names with the same text before a layer number. The language model is the largest stack that is not of
another part; of an encoder and a decoder it is the decoder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import prod
from typing import Any

from steptime.checkpoint import weight_names as names
from steptime.checkpoint.stored_records import Shape
from steptime.checkpoint.weight_names import EMBED

LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blk|blocks?|resblocks)\.(\d{1,6})\.")
STACKED = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(?!\d)")
"""In place of the layer number in the name of a tensor that has all layers as its first dimension."""
MAX_LAYERS = 10_000
_PARTS = (  # in this order: a vision tower's projector is the projector's
    ("projector", re.compile(r"(?:^|[._])(?:(?!vocab_)\w*projector|connector|merger|mlp1|mm|resampler|aligner)\.")),
    ("vision", re.compile(r"(?:^|[._])(?:visual|vision\w*|image\w*|vit|siglip\w*|patch_embed\w*|v\.blk)(?:[._]|$)")),
    ("audio", re.compile(r"(?:^|[._])(?:audio\w*|speech\w*|conformer|a\.blk)(?:[._]|$)")),
    ("mtp", re.compile(r"(?:^|[._])(?:mtp\w*|nextn\w*)\.")),
)  # fmt: skip
_MTP_LAYER = re.compile(r"^(?:nextn\.)?(?:eh_proj|enorm|hnorm|shared_head)\b")
_MIXER = re.compile(r"att|qkv|[qk]_proj|w[qk]\.|mixer|mamba|ssm|query|c_proj")
_ENCODER = re.compile(r"(?:^|\.)encoder\.")
_DECODER = re.compile(r"(?:^|\.)decoder\.")


@dataclass(slots=True)
class Stack:
    """Layers of one prefix: whole shapes by layer number and by the rest of the name."""

    prefix: str
    layers: dict[int, dict[str, Shape]] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Elements of all layers together."""
        return sum([prod(shape) for tails in self.layers.values() for shape in tails.values()])

    def widths(self) -> dict[int, int]:
        """How often norms and biases have each length, the most common first."""
        every = Counter([shape[0] for tails in self.layers.values() for shape in tails.values() if len(shape) == 1])
        return dict(every.most_common())

    def attends(self) -> bool:
        """Whether a layer has attention or a scan instead: a vocoder's blocks and a time series' convolutions have none."""
        return any(_MIXER.search(tail) for tails in self.layers.values() for tail in tails)

    def summary(self) -> dict[str, Any]:
        """Layers, width (the most common length of a norm or bias) and parameters."""
        width = [("hidden_sz", width) for width in self.widths()][:1]
        return {"n_layers": len(self.layers), **dict(width), "params": self.elements}


@dataclass(slots=True)
class StackParts:
    """`main` is the language model's stack, `outer` its tensors outside layers; `others` what each other part holds."""

    main: Stack
    outer: dict[str, Shape]
    others: dict[str, dict[str, Any]]


def part_of(name: str) -> str:
    """The part a name belongs to, "" for the language model."""
    return next((part for part, pattern in _PARTS if pattern.search(name)), "")


def split(shapes: Mapping[str, Shape]) -> StackParts | None:
    """The parts of a model; None when nothing has numbered layers."""
    stacks: dict[str, Stack] = {}
    outer: dict[str, Shape] = {}
    here, stack = "", Stack("")
    layer: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if not here or not name.startswith(here):  # neighbors are of one layer
            match = LAYER.search(name)
            if match is None:
                outer[name] = shape
                continue
            prefix, here = name[: match.start(1)], name[: match.end()]
            if prefix not in stacks:
                stacks[prefix] = Stack(prefix)
            stack = stacks[prefix]
            layer = stack.layers.setdefault(int(match[1]), {})
        layer[name[len(here) :]] = shape
    if not stacks:
        return None
    parts = {prefix: part_of(prefix) for prefix in stacks}
    own = [stack for prefix, stack in stacks.items() if not parts[prefix]] or list(stacks.values())
    own = [stack for stack in own if stack.attends()] or own if len(own) > 1 else own
    decoders = [stack for stack in own if _DECODER.search(stack.prefix)]
    encoders = [stack for stack in own if _ENCODER.search(stack.prefix)]
    main = max(own, key=lambda stack: stack.elements) if len(own) > 1 else own[0]
    if main in encoders and decoders:
        decoder = max(decoders, key=lambda stack: stack.elements)
        main = decoder if 10 * decoder.elements > main.elements else main
    if own_part := parts[main.prefix]:  # a model that is a vision or audio encoder alone
        parts = {prefix: "" if part == own_part else part for prefix, part in parts.items()}
    parts |= {stack.prefix: "encoder" for stack in encoders if stack is not main and main in decoders}
    encoder = "encoder" in parts.values()
    parts_of = {name: part_of(name) or ("encoder" if encoder and _ENCODER.search(name) else "") for name in outer}
    if not any(map(EMBED.search, outer)):  # no language model: patches and their like are the encoder's own
        parts_of = {name: part if part in parts.values() else "" for name, part in parts_of.items()}
    parts_of = {name: part for name, part in parts_of.items() if part and part != own_part}
    others = _others(main, stacks, {name: (part, outer[name]) for name, part in parts_of.items()}, parts)
    return StackParts(main, {name: shape for name, shape in outer.items() if name not in parts_of}, others)


def _others(
    main: Stack, stacks: dict[str, Stack], outer: dict[str, tuple[str, Shape]], parts: dict[str, str]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for stack in sorted(stacks.values(), key=lambda stack: -stack.elements):
        if stack is not main and (part := parts[stack.prefix]):
            known = found.setdefault(part, stack.summary() | {"params": 0})
            known["params"] += stack.elements
    for part, shape in outer.values():
        known = found.setdefault(part, {"params": 0})
        known["params"] += prod(shape)
    marks = {tail for tails in main.layers.values() for tail in tails if tail[:1] in "nesh" and _MTP_LAYER.match(tail)}
    ahead = [number for number, tails in main.layers.items() if not marks.isdisjoint(tails)] if marks else []
    if 0 < len(ahead) < len(main.layers):
        found["mtp"] = {"n_layers": len(ahead), "params": sum(prod(s) for n in ahead for s in main.layers[n].values())}
        for number in ahead:
            del main.layers[number]
    return found


@dataclass(slots=True)
class FoundArchitecture:
    """The language model's tensors, and what was found so far: {field: {value, from}}."""

    parts: StackParts
    tied: AbstractSet[str]
    tails: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    attends: bool = True
    """Whether any layer has attention with heads."""

    def last(self, *modules: str) -> tuple[str, Shape] | None:
        """(name, shape) of the first of `modules` that a layer has as a matrix, except experts."""
        for module in modules:
            for tail, (name, shape) in self.tails.items():
                if (
                    names.ends(tail, module)
                    and len(shape) == 2
                    and "expert" not in tail
                    and not names.SHARED.search(tail)
                ):
                    return name, shape
        return None

    def set(self, key: str, value: Any, source: str, **more: Any) -> None:
        """Record a value unless one is known."""
        self.fields.setdefault(key, {"value": value, "from": source, **more})

    def get(self, key: str) -> Any:
        """The value found for `key`, or None."""
        return self.fields.get(key, {}).get("value")
