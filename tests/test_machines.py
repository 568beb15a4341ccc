"""Shipped machines: every name loads, every figure has a source, and known errors of other tables are not repeated."""

from __future__ import annotations

import re
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest
import yaml

import steptime
from steptime.base.config import ConfigError
from steptime.hardware.machine import Machine, machine_names, normalize
from steptime.validation.judgement import judge
from steptime.validation.measurements import MeasuredRow, SkipRowError, shipped
from steptime.validation.row_machine import hardware_of

DATA = Path(steptime.__file__).parent / "data"
MACHINES = sorted((DATA / "machines").glob("*.yaml"))
ACCELERATORS = sorted((DATA / "accelerators").glob("*.yaml"))
ALIASES = yaml.safe_load((DATA / "machine_aliases.yaml").read_text(encoding="utf-8"))
DOCS = Path(__file__).parents[1] / "docs" / "machines.md"


def figures(node, path=""):
    """The numbers of a file: (dotted path, value, source or None)."""
    if isinstance(node, dict) and node.keys() == {"value", "source"}:
        yield path, node["value"], node["source"]
    elif isinstance(node, dict):
        for key, item in node.items():
            yield from figures(item, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list) and path != "aliases":
        for i, item in enumerate(node):
            yield from figures(item, f"{path}.{i}")
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield path, node, None


def test_every_figure_has_a_source():
    for path in [*MACHINES, *ACCELERATORS]:
        content = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
        found = list(figures(content))
        assert content["name"] == path.stem
        assert len(found) >= 5, path.name
        for at, _, source in found:
            assert source, f"{path.name}: {at} names no source"
            assert len(source) >= 7, f"{path.name}: {at}: {source!r} says nothing"
            assert not re.search(r"STAS_|AZBENCH|LLMA\b|MLPERF\b|AWSREF|NVSLIDE|DLCALC", source), f"{at}: {source}"


def test_all_machines_load_by_name():
    assert len(machine_names()) == 78
    for name in machine_names():
        machine = Machine.load(name)
        assert machine.name == name
        device = machine.accelerator
        assert device.usable_memory_bytes <= device.memory_bytes
        assert machine.tiers[-1].size == inf
        assert machine.tiers[0].size >= machine.devices_per_node
        assert 0 < device.attention_backward_efficiency < 1
        if (
            device.attention_backward_efficiency > device.attention_forward_efficiency
        ):  # only where somebody measured it so
            assert device.kernels is not None
            for direction in ("forward", "backward"):
                assert machine.source(f"accelerator.attention_{direction}_efficiency").startswith("measured: ")
        for dtype, rate in device.sustained_flops.items():
            assert 0.3 < rate / device.peak_flops[dtype] <= 1, (name, dtype)
        assert machine.source("accelerator.memory_bytes")


def test_aliases_are_those_of_the_files():
    files = {path.stem: yaml.load(path.read_text(), yaml.CSafeLoader) for path in MACHINES}
    stated = {alias: name for name, content in files.items() for alias in content["aliases"]}
    assert stated == ALIASES
    assert not stated.keys() & set(machine_names())
    assert all(alias == normalize(alias) for alias in stated)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "dgx-h100"),
        ("H100", "dgx-h100"),
        ("DGX H100", "dgx-h100"),
        ("h200", "dgx-h200"),
        ("b200", "dgx-b200"),
        ("gb200", "gb200-nvl72"),
        ("gb300", "gb300-nvl72"),
        ("a100-80", "dgx-a100-80"),
        ("a100-40", "dgx-a100-40"),
        ("v100", "dgx-1v"),
        ("mi300x", "mi300x-node"),
        ("p4d.24xlarge", "aws-p4d.24xlarge"),
        ("p4de", "aws-p4de.24xlarge"),
        ("p5", "aws-p5.48xlarge"),
        ("Standard_ND96isr_H100_v5", "azure-nd96isr-h100-v5"),
        ("Selene", "selene"),
    ],
)
def test_common_names(alias, name):
    assert Machine.load(alias).name == name


@pytest.mark.parametrize(
    "gpu",
    [
        "H100-80GB-SXM",
        "GB200-NVL72",
        "GB300-NVL72",
        "A100-80GB-SXM",
        "B200-180GB",
        "B300-288GB",
        "A100-40GB-SXM",
        "V100-32GB-SXM",
        "V100-32GB-SXM2",
        "V100-16GB-SXM2",
        "A100-80GB-PCIe",
        "H200-141GB-SXM",
        "H800-80GB-SXM",
        "A800-80GB-SXM",
        "MI300X-192GB",
        "MI325X-256GB",
        "MI355X-288GB",
        "TPUv3",
        "TPUv4",
        "TPUv5e",
        "TPUv5p",
        "TPUv6e",
        "TPU7x-Ironwood",
        "Trn1-NeuronCore-v2-16GB",
        "B200-180GB-SXM",
    ],
)
def test_gpu_names_of_published_runs_load(gpu):
    assert Machine.load(gpu).accelerator.peak_flops


def test_measured_machines_are_those_whose_runs_are_judged():
    """Of every accelerator of a machine marked `measured` some step time can be judged; every such accelerator has a machine."""
    rows: dict[str, list[MeasuredRow]] = {}
    for row in shipped():
        with suppress(SkipRowError):
            rows.setdefault(hardware_of(row).section["node_type"], []).append(row)
    judged = ((j for j in map(judge, runs) if j.measured_step_s and not j.skipped) for runs in rows.values())
    named = {first.accelerator for found in judged if (first := next(found, None))}
    marked = {machine.accelerator.name for name in machine_names() if (machine := Machine.load(name)).measured}
    assert marked == named


# --- how a file is read ---


def test_overrides_take_units_and_say_so():
    machine = Machine.load(
        "h100",
        {"tiers.1.latency_s": "10 us", "accelerator.peak_flops.bf16": "1 PFLOP/s", "accelerator": "h200-sxm5-141"},
    )
    assert machine.tiers[1].latency_s == pytest.approx(1e-5)
    assert machine.accelerator.peak_flops["bf16"] == 1e15
    assert machine.accelerator.name == "h200-sxm5-141"
    assert machine.source("tiers.1.latency_s") == "override"
    assert "Azure" in machine.source("tiers.0.latency_s")
    assert Machine.load("h100").tiers[1].latency_s == pytest.approx(14e-6)


def test_other_memory_leaves_the_same_share_usable():
    shipped, half = Machine.load("h100"), Machine.load("h100", {"accelerator.memory_bytes": "40 GiB"})
    assert half.accelerator.usable_memory_bytes == pytest.approx(shipped.accelerator.usable_memory_bytes / 2)
    assert "in proportion" in half.source("accelerator.usable_memory_bytes")
    said = {"accelerator.memory_bytes": "40 GiB", "accelerator.usable_memory_bytes": "39 GiB"}
    assert Machine.load("h100", said).accelerator.usable_memory_bytes == 39 * 2**30


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("h1000", {}, "unknown machine 'h1000'; did you mean h100 or "),
        ("qqqqqqqq", {}, "unknown machine 'qqqqqqqq'; 3dtrn machines lists them"),
        ("x" * 300, {}, "unknown machine 'xxx"),  # longer than a file's name may be
        ("no/such.yaml", {}, "no/such.yaml: no such file"),
        (
            "h100",
            {"tiers.7.latency_s": 1},
            "hardware.overrides.tiers.7.latency_s: '7' is not a valid index; valid: 0, 1",
        ),
        (
            "h100",
            {"tiers.0.latency_s.x": 1},
            "hardware.overrides.tiers.0.latency_s.x: tiers.0.latency_s is a single value",
        ),
        ("h100", {"tiers.0.latencys": 1}, "tiers[0].latencys: unknown key (got 1); did you mean 'latency_s'?"),
        ("h100", {"tiers.0.bytes_per_s": "450 Gb/s"}, "bits or bytes?"),
        ("h100", {"accelerator": "h99"}, "unknown accelerator 'h99'; "),
        ("h100", {"devices_per_node": 0}, "devices_per_node: must be at least 1 (got 0)"),
        ("h100", {"tiers.0.size": "inf"}, "must increase"),
    ],
)
def test_bad_input_is_one_line(name, overrides, line):
    with pytest.raises(ConfigError) as caught:
        Machine.load(name, overrides)
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_rates_that_are_one_number(tmp_path):
    """A rate needs its dtype: one line says what peak_flops is."""
    path = tmp_path / "lab.yaml"
    path.write_text("name: lab\naccelerator: {name: card, peak_flops: 0.85}\n")
    with pytest.raises(ConfigError, match=r"accelerator\.peak_flops"):
        Machine.load(str(path))


def test_a_users_file(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text("""
name: lab
accelerator:
  name: card
  peak_flops: {bf16: {value: 100 TFLOP/s, source: data sheet}}
  memory_bytes: 24 GiB
  usable_memory_bytes: 23.5 GiB
  memory_bytes_per_s: 1e12
devices_per_node: 4
tiers:
  - {name: pcie, size: 4, bytes_per_s: 31 GB/s, latency_s: 5 us}
  - {name: ethernet, bytes_per_s: 25 Gbit/s, latency_s: 50 us}
provenance: measured on the lab's own nodes
""")
    machine = Machine.load(str(path))
    assert (machine.tiers[1].bytes_per_s, machine.tiers[1].size) == (25e9 / 8, inf)
    assert machine.accelerator.peak_flops == {"bf16": 100e12}
    assert machine.source("accelerator.peak_flops.bf16") == "data sheet"
    assert machine.source("tiers.0.latency_s") == "measured on the lab's own nodes"
    assert not machine.measured


def test_a_bad_file_tells_every_problem(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("accelerator: h100-sxm5-80\ntiers: [{name: x, bytes_per_s: fast, latency_s: -1}]\ndevices: 8\n")
    with pytest.raises(ConfigError) as caught:
        Machine.load(str(path))
    problems = caught.value.problems  # the misspelled devices_per_node is reported once, not as missing too
    assert [problem.partition(":")[0] for problem in problems] == [
        "tiers[0].bytes_per_s",
        "tiers[0].latency_s",
        "devices",
    ]
    assert problems[2].endswith("did you mean 'devices_per_node'?")
    path.write_text("- a list")
    with pytest.raises(ConfigError, match="expected a mapping"):
        Machine.load(str(path))


# --- figures that other tables get wrong (jfc4050/dlcalc@cda3963 dlcalc/utils/hardware.py and others) ---


def test_p4d_has_four_nics_of_100_gbit():
    assert Machine.load("p4d").tiers[1].bytes_per_s == 6.25e9  # 4 x 100 Gbit/s over 8 devices


def test_b200_memory_is_not_as_slow_as_h200s():
    assert Machine.load("p6-b200").accelerator.memory_bytes_per_s == 8e12  # not 4.916e12


def test_nvlink5_is_900_gb_per_direction():
    for name in ("u-p6e-gb300x72", "gb200", "b200", "b300"):
        assert Machine.load(name).tiers[0].bytes_per_s == 900e9  # not 1848e9, which is both directions


def test_neuronlink_is_per_chip_and_finite():
    assert Machine.load("trn1").tiers[0].bytes_per_s == 192e9
    assert Machine.load("trn1n").tiers[0].bytes_per_s == 384e9
    assert all(0 < tier.latency_s < 1e-3 for name in machine_names() for tier in Machine.load(name).tiers)


def test_all_gpus_have_a_number_of_processors():
    """Only chips whose matrix units are no grid of processors have none."""
    without = {path.stem for path in ACCELERATORS if "sm_count" not in path.read_text(encoding="utf-8")}
    assert {name.rstrip("0123456789") if "tpu" not in name else "tpu" for name in without} == {
        "ascend-910b",
        "gaudi",
        "tpu",
        "trainium",
    }


def test_usable_memory_is_less_than_the_label():
    gib = {
        name: Machine.load(name).accelerator.usable_memory_bytes / 2**30
        for name in ("a100-40", "a100-80", "h100", "gb300")
    }
    assert gib["a100-40"] < 40
    assert gib["a100-80"] == pytest.approx(79.21)
    assert gib["h100"] < 79.65  # what the driver counts
    assert gib["gb300"] == pytest.approx(276.5)  # 284208 MiB by the driver, not 284 GiB


def test_usable_memory_is_what_torch_reports():
    """One meaning in every file: torch's total memory, or an assumed fraction of the capacity; never the driver's figure."""
    for path in ACCELERATORS:
        entry = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["usable_memory_bytes"]
        assert re.match(r"torch('s|_npu) total|assumed: ", entry["source"]), (path.stem, entry)


def test_efa_latency_differs_by_generation():
    assert [Machine.load(n).tiers[1].latency_s for n in ("p3dn", "p4d", "p5en")] == pytest.approx(
        [150e-6, 75e-6, 35e-6]
    )


def test_peaks_are_dense():
    peaks = {name: Machine.load(name).accelerator.peak_flops for name in ("mi355x", "l40s", "h100", "a100-80")}
    assert peaks["mi355x"]["bf16"] == 2.5e15  # 5.0e15 is the sparse figure
    assert peaks["l40s"]["bf16"] == 362e12  # 183e12 is tf32
    assert peaks["h100"]["bf16"] == 989e12
    assert "fp8" not in peaks["a100-80"]


def test_pages_swap_columns_but_we_do_not():
    gb200 = Machine.load("azure-nd128isr-gb200-v6")
    assert gb200.tiers[0].bytes_per_s > gb200.tiers[1].bytes_per_s
    assert Machine.load("p6e-gb200").tiers[1].bytes_per_s == 50e9  # 400 Gbit/s per GPU, not 800


# --- the page ---


def table() -> str:
    """The table of shipped machines, as docs/machines.md holds it."""
    lines = [
        "| machine | aliases | node | dense bf16 TFLOP/s | usable GiB | GB/s inner, outer | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in machine_names():
        m = Machine.load(name)
        d = m.accelerator
        peak = d.peak_flops.get("bf16") or d.peak_flops["fp16"]
        aliases = ", ".join(m.aliases[:4])
        rates = ", ".join(f"{tier.bytes_per_s / 1e9:.4g}" for tier in m.tiers)
        cells = [
            name,
            aliases,
            f"{m.devices_per_node} x {d.name}",
            f"{peak / 1e12:,.{0 if peak >= 1e12 else 2}f}",
            f"{d.usable_memory_bytes / 2**30:.1f}",
            rates,
        ]
        lines.append("| " + " | ".join([*cells, "yes" if m.measured else ""]) + " |")
    return "\n".join(lines)


def test_the_page_lists_what_ships(update_golden):
    text = DOCS.read_text(encoding="utf-8")
    head, _, rest = text.partition("<!-- machines -->\n")
    _, _, tail = rest.partition("\n<!-- end -->")
    if update_golden:
        text = f"{head}<!-- machines -->\n{table()}\n<!-- end -->{tail}"
        DOCS.write_text(text, encoding="utf-8")
    assert table() in text, "docs/machines.md: pytest tests/test_machines.py --update-golden"


def test_overriding_a_peak_keeps_the_share_that_is_sustained():
    """A device said to be half as fast sustains half as much, unless what it sustains is said too."""
    whole = Machine.load("h100").accelerator
    half = Machine.load("h100", {"accelerator.peak_flops.bf16": whole.peak_flops["bf16"] / 2}).accelerator
    assert half.sustained_flops["bf16"] == whole.sustained_flops["bf16"] / 2
    assert half.sustained_flops["fp8"] == whole.sustained_flops["fp8"]
    both = {"accelerator.peak_flops.bf16": "500 TFLOP/s", "accelerator.sustained_flops.bf16": "400 TFLOP/s"}
    assert Machine.load("h100", both).accelerator.sustained_flops["bf16"] == 400e12
