"""Plans drawn at random over every key that a plan may have: what is accepted has an answer that can be true.

No figure is NaN, infinite or negative, no rate is above its peak, parts sum to their whole, and text, JSON and page can be made.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from fuzzing import Case, Door

from steptime.answer.result import Estimate, estimate
from steptime.base.config import ConfigError
from steptime.commands.cli import main as command
from steptime.hardware.machine import machine_names
from steptime.job.job import Job
from steptime.model.presets import load_model, model_names
from steptime.report.page.whole_page import page
from steptime.report.table import printable
from steptime.software.profiles import profile_names

ROOT = Path(__file__).parents[1]
MAY_BE_NEGATIVE = {"step_change"}
"""A fix may make the step shorter."""


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a document with where it stands."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from numbers(one, f"{path}.{i}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def wrong(found: Estimate) -> str | None:
    """What of an answer cannot be true."""
    told = found.to_dict()
    for path, value in numbers({key: one for key, one in told.items() if key != "config"}):
        if not math.isfinite(value) or (value < 0.0 and path.rpartition(".")[2] not in MAY_BE_NEGATIVE):
            return f"{path} is {value}"
    rates, time = found.throughput, found.time
    if not 0.0 < rates.mfu <= rates.hfu * (1 + 1e-9) or rates.hfu > 1.0:
        return f"MFU {rates.mfu}, HFU {rates.hfu}"
    if not 0.0 < time.step_s < math.inf:
        return f"a step of {time.step_s} s"
    if abs(sum(time.parts_s.values()) - time.step_s) > 1e-6 * time.step_s:
        return f"parts sum to {sum(time.parts_s.values())} of {time.step_s} s"
    if time.step_s_p10 is not None and not time.step_s_p10 <= time.step_s <= time.step_s_p90:
        return f"{time.step_s} s is not within {time.step_s_p10} and {time.step_s_p90}"
    for row in found.memory.stages:
        if row.reserved_bytes < row.allocated_bytes * (1 - 1e-9) or not row.peak_op:
            return f"stage {row.stage}: {row.reserved_bytes} reserved of {row.allocated_bytes} allocated, peak at {row.peak_op!r}"
    if found.params.active > found.params.total:
        return f"{found.params.active} of {found.params.total} parameters are active"
    return None


def sound(source: str) -> int:
    """Estimate a plan; the exit code of the command that would have.

    Raises:
        AssertionError: its answer cannot be true.
    """
    try:
        found = estimate(Job.load(source))
        bad = wrong(found)
    except ConfigError as error:
        lines = error.problems
        print(*map(printable, lines), sep="\n")
    else:
        assert bad is None, bad
        json.dumps(found.to_dict(), allow_nan=False)
        return 0
    assert lines
    assert all(line.strip() and "\n" not in line for line in lines), lines
    return 2


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a plan."""
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command(["schema"])
    return json.loads(out.getvalue())  # type: ignore[no-any-return]


SIZES = (1, 1, 2, 2, 3, 4, 4, 6, 8, 8, 12, 16, 32, 64, 96, 128, 256, 512, 1024, 4096)
SHARES = (0.0, 0.1, 0.25, 0.5, 0.9, 1.0, 1.25, 2.0)
NAMES = {"software": profile_names, "preset": model_names, "node_type": machine_names}
LEFT_OUT = {"hf", "overrides", "calibration", "name", "notes", "hybrid_pattern"}


def drawn(kind: dict[str, Any], draw: random.Random, depth: int = 0) -> Any:
    """A value that a schema allows, of a size that somebody may have."""
    if "$ref" in kind:
        return drawn(schema()["$defs"][kind["$ref"].rpartition("/")[2]], draw, depth)
    if "anyOf" in kind:
        return drawn(draw.choice(kind["anyOf"]), draw, depth)
    if "const" in kind or "enum" in kind:
        return draw.choice(kind.get("enum", [kind.get("const")]))
    if "examples" in kind and draw.random() < 0.2:
        return draw.choice(kind["examples"])
    made = kind.get("type")
    if made == "object" or "properties" in kind:
        keys = [key for key in kind.get("properties", {}) if key not in LEFT_OUT]
        some = draw.sample(keys, min(len(keys), draw.choice((1, 2, 3)))) if depth < 3 else []
        return {
            key: drawn(kind["properties"][key], draw, depth + 1)
            for key in {*some, *kind.get("required", [])} - LEFT_OUT
        }
    if made == "array":
        return [drawn(kind.get("items", {}), draw, depth + 1) for _ in range(draw.choice((1, 2, 3)))]
    if made == "boolean":
        return draw.random() < 0.5
    if made == "integer":
        return draw.choice(SIZES)
    if made == "number":
        return draw.choice((*SHARES, *SIZES))
    return None if made == "null" else draw.choice(("auto", "x"))


def leaves(kind: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every key of a plan and what it may be, sections as a whole too."""
    if "$ref" in kind:
        kind = schema()["$defs"][kind["$ref"].rpartition("/")[2]]
    for option in kind.get("anyOf", []):
        yield from leaves(option, path)
    for key, inner in kind.get("properties", {}).items():
        if key not in LEFT_OUT and len(path) < 4:
            yield (*path, key), inner
            yield from leaves(inner, (*path, key))


@cache
def keys() -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Keys of the sections that a plan writes; a machine has a door of its own."""
    return [
        each
        for each in leaves(schema())
        if each[0][0] in {"model", "parallelism", "performance", "data", "run", "cross_dc"}
    ]


Section = dict[str, Any]


@cache
def families() -> dict[str, list[str]]:
    """Presets with experts, and plain dense ones."""
    found: dict[str, list[str]] = {"experts": [], "plain": []}
    for name in model_names():
        model = load_model(name)
        plain = model.attention.kind == "gqa" and not (model.layers or model.hybrid_pattern or model.linear_attention)
        if model.moe is not None:
            found["experts"].append(name)
        elif plain:
            found["plain"].append(name)
    return found


def _experts(draw: random.Random, model: Section, layout: Section, performance: Section) -> None:
    """A preset's experts with some of their settings changed: a section of experts is written whole."""
    model["preset"] = draw.choice(families()["experts"])
    moe = load_model(model["preset"]).moe
    assert moe is not None
    kinds = schema()["$defs"]["Moe"]["properties"]
    changes = {key: drawn(kinds[key], draw) for key in draw.sample(sorted(kinds), draw.choice((1, 1, 2, 3)))}
    model["moe"] = moe.model_dump(exclude_unset=True) | changes
    layout["ep"] = draw.choice((1, 2, 2, 4, 8))
    if draw.random() < 0.6:
        layout.pop("fsdp", None)
        performance["software"] = draw.choice(("megatron-core", "nemo", "megatron-bridge"))
    if draw.random() < 0.3:
        layout["etp"] = draw.choice((1, 2))


def _adapters(draw: random.Random, model: Section, layout: Section, performance: Section) -> None:
    """Low-rank adapters of a plain model, without what they are not modeled with."""
    model["preset"], layout["tp"] = draw.choice(families()["plain"]), 1
    model["lora"] = drawn(schema()["$defs"]["Lora"], draw)
    performance["precision"] = draw.choice(("bf16", "bf16", "fp16", "fp32"))
    layout.pop("schedule", None)
    layout.pop("ep", None)


def _more_tokens(draw: random.Random, model: Section, layout: Section, performance: Section) -> None:
    """Multi-token prediction, where it is modeled."""
    model["preset"] = draw.choice((*families()["plain"], *families()["experts"]))
    model["mtp"] = draw.choice((1, 1, 2, 3))
    performance["software"] = draw.choice(("megatron-core", "nemo", "megatron-bridge"))
    layout.pop("fsdp", None)
    layout["layers_per_stage"] = "auto"


def _context(draw: random.Random, model: Section, layout: Section, performance: Section) -> None:
    """Context parallelism in each of its ways, in groups of all-to-all too."""
    model["preset"] = draw.choice((*families()["plain"], *families()["experts"]))
    layout["cp"] = draw.choice((2, 4, 8))
    layout["cp_comm_type"] = draw.choice(("p2p", "all_gather", "a2a", "a2a+p2p", "a2a+p2p"))
    if layout["cp_comm_type"] == "a2a+p2p":
        layout["cp_a2a"] = draw.choice((2, 2, 4))
    layout.pop("fsdp", None)
    performance["software"] = draw.choice(("megatron-core", "megatron-core", "nemo", "megatron-bridge"))


def _sharded(draw: random.Random, model: Section, layout: Section, performance: Section) -> None:
    """FSDP with some of its settings, on the frameworks that have it, and what goes with it."""
    family = draw.choice(("plain", "plain", "experts"))
    model["preset"] = draw.choice(families()[family])
    if family == "plain":
        layout.pop("ep", None)
    kinds = schema()["$defs"]["Fsdp"]["properties"]
    keys = {"ends", "gradients_stay", *draw.sample(sorted(kinds), draw.choice((0, 1, 2, 3)))} & set(kinds)
    layout["fsdp"] = {key: drawn(kinds[key], draw) for key in sorted(keys) if draw.random() < 0.7}
    performance["software"] = draw.choice(("fsdp2", "torchtitan", "torchtitan", "accelerate", "litgpt"))
    performance["gathered_logits"] = draw.random() < 0.3
    if draw.random() < 0.7:
        layout.pop("schedule", None)
        layout["pp"] = layout["vpp"] = 1


Feature = Callable[[random.Random, Section, Section, Section], None]
FEATURES: tuple[Feature, ...] = (_experts, _adapters, _more_tokens, _context, _sharded)
"""Sections that need others to agree with them; keys drawn one by one hardly ever do."""


def start(draw: random.Random, feature: Feature | None = None) -> dict[str, Any]:
    """A preset on a machine, in a layout that divides; one of few layers, so that a case takes milliseconds."""
    tp, pp, dp = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4, 8, 16))
    vpp = draw.choice((1, 1, 2)) if pp > 1 else 1
    cp, batch = draw.choice((1, 1, 1, 2, 4)), draw.choice((1, 1, 2))
    micro = pp * draw.choice((1, 2, 4)) if vpp > 1 else draw.choice((1, 2, 4, 7))
    layout: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "cp": cp}
    model: dict[str, Any] = {"preset": draw.choice(model_names())}
    software = draw.choice(profile_names())
    if draw.random() < 0.3:
        layout["fsdp"] = {"reshard_after_forward": draw.random() < 0.5}
        software = draw.choice(("fsdp2", "torchtitan"))
    if draw.random() < 0.4:
        layout["ep"] = draw.choice((2, 4, 8))
    if draw.random() < 0.7:
        layout["layers_per_stage"] = "auto"
    if draw.random() < 0.3:
        layout["schedule"] = draw.choice(("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"))
    performance: dict[str, Any] = {"software": software}
    if feature is not None or draw.random() < 0.5:
        (feature or draw.choice(FEATURES))(draw, model, layout, performance)
    return {
        "model": model,
        "parallelism": layout,
        "performance": performance,
        "data": {"gbs": dp * batch * micro, "seqlen": draw.choice((512, 4096, 8192)), "microbatch_sz": batch},
        "hardware": {"node_type": draw.choice(("dgx-h100", "dgx-a100-80", draw.choice(machine_names())))},
    }


def plan(draw: random.Random, feature: Feature | None = None) -> dict[str, Any]:
    """A plan with a few keys drawn anew; `feature`: one that it has."""
    made = start(draw, feature) if feature is not None or draw.random() < 0.8 else whole(draw)
    for _ in range(draw.choice((0, 1, 1, 2, 3, 5))):
        path, kind = draw.choice(keys())
        node: Any = made
        for key in path[:-1]:
            if not isinstance(node.get(key), dict):
                node[key] = {"preset": node[key]} if key == "model" and isinstance(node.get(key), str) else {}
            node = node[key]
        node[path[-1]] = draw.choice(NAMES[path[-1]]()) if path[-1] in NAMES else drawn(kind, draw)
    return made


def whole(draw: random.Random) -> dict[str, Any]:
    """A plan of the repository."""
    found: dict[str, Any] = yaml.safe_load(draw.choice(sorted((ROOT / "configs").glob("*.yaml"))).read_text())
    return found


def door() -> Door:
    """Plans; one in fifty as a page, one in ten as text."""

    def make(draw: random.Random, folder: Path) -> Case:
        file = folder / "plan.yaml"
        file.write_text(yaml.safe_dump(plan(draw), sort_keys=False))
        form = draw.random()
        if form < 0.1:
            return Case(lambda: command([str(file), "--assumed"]), f"3dtrn {file} --assumed")
        if form < 0.12:
            return Case(lambda: shown(str(file)), f"3dtrn {file} --html")
        return Case(lambda: sound(str(file)), f"3dtrn {file}")

    def warm(folder: Path) -> None:
        del folder
        for file in (str(ROOT / "configs" / name) for name in ("llama3_70b.yaml", "llama3_8b_fsdp.yaml")):
            sound(file)
            command([file, "--assumed"])
            shown(file)

    return Door(make, warm, 10.0)


def shown(source: str) -> int:
    """The page of a plan has no number that is none."""
    try:
        text = page(estimate(Job.load(source)))
    except ConfigError:
        print("refused")
        return 2
    assert not no_number(text), no_number(text)
    return 0


def no_number(html: str) -> list[str]:
    """What of a page's text and coordinates is no number where one should be."""
    return re.findall(r"[>\"](?:NaN|-?nan|-?inf|None)\b[^<\"]{0,40}", html)
