"""The machine of a measured row, from its words: the `gpu` column first, then what `machine` says of nodes and network."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping, read_source
from steptime.hardware.machine import Machine, machine_names, normalize
from steptime.validation.measurements import MeasuredRow, SkipRowError
from steptime.validation.row_torchtitan import torchtitan_release


class FoundMachine(NamedTuple):
    """A `hardware` section and the assumptions made for it."""

    section: dict[str, Any]
    assumed: list[str]


_FAMILY = re.compile(r"(gb|gh|b|h|a|v|l|mi|rtx-?|tpu-?|gaudi-?|trn|trainium-?)\d+[a-z]{0,2}")
_PER_NODE: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], float]], ...] = (
    (re.compile(r"inter-node (\d+) ?Gb/s"), lambda m: float(m[1])),
    (re.compile(r"\b(\d+) ?x ?(?:[A-Za-z-]+ )?(\d+) Gb/s"), lambda m: float(m[1]) * float(m[2])),
    (re.compile(r"\b(\d+) Gb/s [A-Za-z-]+ x(\d+)"), lambda m: float(m[1]) * float(m[2])),
    (re.compile(r"\b(\d+) Gb/s ?(?:/| per )node"), lambda m: float(m[1])),
)
"""How sources write the network of a node, and its rate [Gbit/s]."""
_INSTANCE = re.compile(r"\bp\d\w*(-\w+)?\.\d+xlarge\b")
"""An AWS instance type among other words."""
_PER_PAIR = re.compile(r"\b(\d+) Gb/s per GPU-pair")
_DEVICES = re.compile(r"\b([1-9]\d*)x [A-Z]+\d+\S*(?: \S+)? per node")

LIMITED = "grand-teton-h100"
"""Its devices run at 500 W by default and can be set to 700 (pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md)."""

UNBOUND = 1.524
"""`host_factor` of published runs of Pai-Megatron-Patch, whose hosts are not stated: processes that torchrun starts, bound to no
cores (alibaba/Pai-Megatron-Patch examples/qwen3/run_mcore_qwen3.sh). That of p6-b300.48xlarge, fitted on its own rows marked fit:
its processes start the same way, and its Xeons are of 2023, as those of H800 (assumed)."""

BY_TORCHRUN = 105.0 / 80.0
"""Host time of a launch where torchrun starts Megatron-Bridge, as AWS does, divided by that of its profile, whose processes are
bound to cores: `host_kernel_s` of Megatron-Core's profile over its own."""

EFA = ("dgx-h100", "aws-p5.48xlarge")
"""What nodes of eight H100 are taken for, and the instance that they are where a source names AWS' network: nanotron's own
scripts set FI_PROVIDER=efa (huggingface/nanotron@2411b022 examples/train_tiny_llama.sh)."""

COMMUNITY_DEEPEP = 2.0 / (1.0 / 400e9 + 1.0 / 190e9) / 900e9 * 31.0 / 32.0
"""Share of 900 GB/s that DeepEP reached over 32 GB200: 400 GB/s in dispatch and 190 in combine of what a rank receives, 1/32 of
it its own (NVIDIA/Megatron-LM@402bc50b docs/discussions/deepseek-v3-gb200-optimization, section 2.2.1). The guide tunes it later,
to a rate that it does not state."""


def hardware_of(row: MeasuredRow) -> FoundMachine:
    """The `hardware` section of a row.

    Raises:
        SkipRowError: the family of the accelerator is unknown.
    """
    gpu = row.text("gpu")
    if not gpu:
        raise SkipRowError("gpu: not stated" if row.published else "gpu: missing")
    try:
        name, exact = _machine(gpu)
    except ConfigError as error:
        raise SkipRowError(f"gpu: {error}") from None
    name = name if Path(name).suffix else _load(name).name
    place = normalize(re.sub(r"\(.*?\)", " ", row.text("machine")))
    if (found := _INSTANCE.search(place)) and found[0] in known_names():
        place = found[0]
    if place in known_names() and _load(place).accelerator.name == _load(name).accelerator.name:
        name, exact = _load(place).name, True
    assumed = [] if exact else [f"machine: {name} for gpu {gpu!r}"]
    if "pytorch/ao" in row.text("source") and "workflows/training.md" in row.text("source") and name == "dgx-h100":
        # its peaks are those of torchtitan's logs on these devices to a hundredth: 47.77 of tensorwise float8 (pull request 812)
        name = LIMITED
        assumed.append(f"machine: {name}, whose peak memory torchao prints")
    if name == LIMITED and _past_the_limit(row):
        name = f"{LIMITED}-700w"
        assumed.append(
            "hardware: the power limit is not stated; 700 W assumed, from the speed of single-node runs since August 2025"
        )
    on_aws = row.published and name == EFA[0] and re.search(r"\bEFA\b", row.text("machine")) is not None
    name = EFA[1] if on_aws else name
    overrides = _stated(row.text("machine"), name)
    assumed += [f"hardware.{key}: {value} from {row.text('machine')!r}" for key, value in overrides.items()]
    assumed += _known_of(row, name, overrides, on_aws=on_aws)
    return FoundMachine({"node_type": name, "overrides": overrides} if overrides else {"node_type": name}, assumed)


def _known_of(row: MeasuredRow, name: str, overrides: dict[str, Any], *, on_aws: bool) -> list[str]:
    """Adds what else is known of the hosts and networks of some sources to `overrides`; says what."""
    assumed: list[str] = []
    if "deepseek-v3-gb200-optimization" in row.text("source") and "DeepEP" in row.text("overlap_notes"):
        rate = round(COMMUNITY_DEEPEP, 3)
        overrides["tiers.0.exchange_efficiency"] = rate
        assumed.append(f"hardware.tiers.0.exchange_efficiency: {rate}, the rates that the source states")
    if on_aws:  # with p5's own factor nanotron's smallest model (fit) is up to 55 % too slow instead of 26
        overrides["host_factor"] = 1.0
        why = "from its network; hardware.host_factor: 1, since its smallest jobs are not slower"
        assumed.append(f"machine: {name}, {why}")
    if row.published and "pai-megatron" in row.text("framework").lower():
        overrides["host_factor"] = UNBOUND
        assumed.append(f"hardware.host_factor: {UNBOUND:g}, since its processes are bound to no cores")
    if row.published and row.group == "aws-mbridge":
        overrides["host_factor"] = round(_load(name).host_factor * BY_TORCHRUN, 3)
        assumed.append(f"hardware.host_factor: {overrides['host_factor']:g}, since torchrun starts its processes")
    return assumed


def _past_the_limit(row: MeasuredRow) -> bool:
    """Whether a run of torchtitan on one node was made since August 2025, when such runs exceed the speed possible at 500 W.

    Qwen3-32B on 8 devices (pull request 1690, a row marked fit) sustains 513 TFLOP/s of products and attention over the whole
    step, where long products alone reach 575. Of 31 fit rows of one node from then on 19 are 13 to 30 % faster than at 500 W;
    those of several nodes are 9 to 19 % slower, but for one.
    """
    titan = "torchtitan" in row.text("framework").lower()
    return titan and row.needed("n_gpus") <= 8 and torchtitan_release(row) != "0.1"


@cache
def machine(name: str, overrides: tuple[tuple[str, Any], ...]) -> Machine:
    """A machine with overrides, built once for all rows that ran on it."""
    return Machine.load(name, dict(overrides))


@cache
def known_names() -> frozenset[str]:
    """Names and aliases of the shipped machines, as `normalize` writes them."""
    path = Path(__file__).parents[1] / "data" / "machine_aliases.yaml"
    return frozenset((*machine_names(), *parse_mapping(*read_source(path))))


@cache
def _load(name: str) -> Machine:
    return Machine.load(name)


@cache
def _machine(gpu: str) -> tuple[str, bool]:
    """The machine of a `gpu` cell, and whether the cell names it exactly.

    Else family and form decide: parentheses are ignored, and the nearest capacity is taken.

    Raises:
        ConfigError: a machine file cannot be read, or the family is unknown.
    """
    if Path(gpu).suffix in {".yaml", ".yml", ".json"}:
        _load(gpu)
        return gpu, True
    if normalize(gpu) in known_names():
        return normalize(gpu), "power" not in gpu
    words = normalize(re.sub(r"\(.*?\)", " ", gpu)).removeprefix("nvidia-")
    if words in known_names():
        return words, False
    family = _FAMILY.search(words)
    names = [n for n in known_names() if family and re.fullmatch(rf"{re.escape(family[0])}(-.*)?", n)]
    if not family or not names:
        raise ConfigError(f"unknown accelerator (got {gpu[:60]!r}); see 3dtrn machines")
    stated = re.search(r"(\d+) ?-?g(?:i?b)?\b", words)

    def distance(name: str) -> tuple[bool, float, int]:
        accelerator = _load(name).accelerator
        capacity = accelerator.memory_bytes / 2.0**30
        other_form = ("pcie" in words) != ("pcie" in accelerator.name)
        return other_form, abs(capacity - float(stated[1])) if stated else 0.0, len(name)

    return min(names, key=distance), False


def _stated(text: str, name: str) -> dict[str, Any]:
    """Overrides from a source's words about nodes: devices per node, network per node."""
    known = _load(name)
    per_node = known.devices_per_node
    overrides: dict[str, Any] = {}
    if (found := _DEVICES.search(text)) and int(found[1]) != per_node:
        per_node = int(found[1])
        overrides = {"devices_per_node": per_node, "tiers.0.size": per_node}
    rate = next((read(found) for pattern, read in _PER_NODE if (found := pattern.search(text))), 0.0) / per_node
    if found := _PER_PAIR.search(text):
        rate = float(found[1]) / 2.0
    outer = len(known.tiers) - 1
    if rate and rate * 1e9 / 8.0 != known.tiers[outer].bytes_per_s:
        overrides[f"tiers.{outer}.bytes_per_s"] = f"{rate / 8.0:g} GB/s"
    return overrides
