"""Figures of a trainer's job, by the keys of its files that say them."""

from __future__ import annotations

import re
from typing import Any

from steptime.launch.job_keys import JobKeys

_OFF = frozenset({"false", "none", "null", "", "0", "auto", "no", "[]", "{}"})


def size_of(value: Any, default: Any) -> Any:
    """A whole number, `default` where it is none: what is said stays in the config, whose own check tells it."""
    return int(value) if re.fullmatch(r"-?\d{1,18}", str(value)) else default


class Figures:
    """What the keys of a file say about figures that a plan is worked out of (names that begin with @)."""

    def __init__(self, keys: JobKeys) -> None:
        """None yet."""
        self.keys = keys
        self.figures: dict[str, str] = {}
        """@figure -> the key that says it."""

    def get(self, figure: str) -> Any:
        """What a figure's key says; None where none does."""
        return self.keys.get(self.figures[figure]) if figure in self.figures else None

    def on(self, figure: str) -> bool:
        """Whether a figure's switch is on."""
        value = self.get(figure)
        return (value is not None and str(value).lower() not in _OFF) or self.backend() == figure

    def backend(self) -> str:
        """The figure that a word for what runs the steps switches on (accelerate's distributed_type)."""
        key = self.figures.get("@distributed")
        return str(self.keys.word(key)) if key is not None else ""

    def whole(self, figure: str) -> int | None:
        """A figure's whole number; None where it is not given or left to another file."""
        return (
            None if figure not in self.figures or self.get(figure) == "auto" else self.keys.whole(self.figures[figure])
        )

    def optimizer(self) -> str | None:
        """The optimizer where it is not Adam; with a note where its states are not modeled."""
        said = str(self.get("@optimizer") or "adam").lower().rpartition(".")[2]
        if said.startswith("paged"):
            self.keys.approximate(
                self.figures["@optimizer"], "states paged to the host: on the device they are counted"
            )
            said = said.removeprefix("paged").lstrip("_")
        if re.match(r"adamw?_?(bnb_|torch_)?8bit", said):
            return "adamw_8bit"
        if said == "adafactor" and not self.on("@deepspeed") and not self.on("@fsdp"):
            return said
        named = re.sub(r"[^a-z]", "", said)
        if not named.startswith(("adam", "fusedadam")):
            self.keys.leave_out(self.figures["@optimizer"], "states of another optimizer; counted as Adam's")
        elif "4bit" in said:
            self.keys.leave_out(self.figures["@optimizer"], "quantized states; counted as fp32")
        return None
