"""Errors of peak memory by mechanism: which parts of the memory model are covered by measured runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from steptime.validation.judgement import Judgement
from steptime.validation.slices import memory_errors, model_kind
from steptime.validation.stats import plain, stats

ConfigDict = dict[str, Any]


def _recomputes(config: ConfigDict) -> str:
    """none, selective or full."""
    performance = config["performance"]
    word = performance.get("activation_checkpointing_type", "none")
    granularity = performance.get("recompute", {}).get("granularity") or word
    return "selective" if "selective" in granularity else str(granularity)


def _recompute(kind: str) -> Callable[[Judgement], bool]:
    return lambda j: _recomputes(j.config or {"performance": {}}) == kind


def _zero(level: int) -> Callable[[Judgement], bool]:
    return lambda j: _degree(j, "dp") > 1 and _parallelism(j).get("zero_level") == level


def _parallelism(j: Judgement) -> ConfigDict:
    return dict((j.config or {}).get("parallelism", {}))


def _degree(j: Judgement, axis: str) -> int:
    return int(_parallelism(j).get(axis) or 1)


MECHANISMS: dict[str, Callable[[Judgement], bool]] = {
    "one device": lambda j: j.row.text("n_gpus") == "1",
    "tensor parallel": lambda j: _degree(j, "tp") > 1,
    "pipeline, not interleaved": lambda j: _degree(j, "pp") > 1 and _degree(j, "vpp") == 1,
    "pipeline, interleaved": lambda j: _degree(j, "pp") > 1 and _degree(j, "vpp") > 1,
    "recompute none": _recompute("none"),
    "recompute selective": _recompute("selective"),
    "recompute full": _recompute("full"),
    "ZeRO 0": _zero(0),
    "ZeRO 1": _zero(1),
    "ZeRO 2": _zero(2),
    "ZeRO 3": _zero(3),
    "FSDP": lambda j: "fsdp" in _parallelism(j),
    "fp8": lambda j: j.precision in {"fp8", "mxfp8", "nvfp4"},
    "context parallel": lambda j: _degree(j, "cp") > 1,
    "mixture of experts": lambda j: model_kind(j).startswith("moe"),
}
"""Mechanisms of a run; it can show several. Levels of ZeRO as stated by the source."""


def memory_by_mechanism(judged: Sequence[Judgement]) -> dict[str, Any]:
    """Stats of the memory error by mechanism, and by how a peak was read (`how_read`)."""
    known = [j for j in judged if j.memory_error is not None]
    return {
        name: {how: _figures(j for j in known if shows(j) and how_read(j) == how) for how in READINGS}
        for name, shows in MECHANISMS.items()
    }


READINGS = ("allocated", "ci", "otherwise")


def how_read(j: Judgement) -> str:
    """One of `READINGS`: torch's peak allocation of a run, of a small test job, or any other reading."""
    if j.metric != "allocated":
        return "otherwise"
    return "ci" if j.held is not None else "allocated"


def _figures(rows: Iterable[Judgement]) -> dict[str, Any]:
    return plain(stats(memory_errors(rows)))
