"""Answers a user can act on and recompute: what varies in a search is named, settings are in words, explained figures follow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from steptime import ConfigError, Job, estimate, search
from steptime.report.diff_tables import diff
from steptime.report.explain import explain
from steptime.report.search_tables import sections
from steptime.report.table import PLAIN, layout

PLAN = {
    "model": "llama3-8b",
    "devices": 16,
    "parallelism": {"tp": 2, "pp": 2},
    "data": {"gbs": 64, "seqlen": 8192, "microbatch_sz": 1},
    "hardware": "dgx-h100",
}


@pytest.fixture(scope="module")
def job():
    return Job.load(PLAN)


FEW = {"tp": [2, 8], "pp": [1], "cp": [1], "microbatch_sz": [1]}
"""The layouts of a search of which the words alone are looked at."""


@pytest.fixture(scope="module")
def large():
    """Llama 3 70B under tp 8, pp 4, dp 32 on H100, the plan that README shows."""
    return estimate("configs/llama3_70b.yaml")


def shown(table):
    """A table or list of facts as text, blanks and line ends as one blank."""
    return " ".join(" ".join(layout(table, PLAIN)).split())


def told(found, name):
    """What `3dtrn explain PLAN NAME` prints."""
    return " ".join(shown(table) for table in explain(found, name))


def test_a_mapping_is_a_plan_and_stays_as_it_was(job):
    before = {**PLAN, "parallelism": {**PLAN["parallelism"]}}
    assert estimate(PLAN).step_s == estimate(job).step_s
    assert before == PLAN


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: estimate(42), "expected a path, YAML text or a mapping (got 42)"),
        (
            lambda: search(PLAN, objective="money"),
            "objective: unknown (got 'money'); valid: cost, energy, memory, step",
        ),
        (
            lambda: search(PLAN, devices="16"),
            "devices: expected a whole number of at least 1, or a list of them (got '16')",
        ),
        (
            lambda: search(PLAN, gbs=[64, 0]),
            "gbs: expected a whole number of at least 1, or a list of them (got a list of 2)",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(call, line):
    with pytest.raises(ConfigError) as error:
        call()
    assert error.value.problems == [line]


def test_a_mapping_that_one_plan_has_is_spelled_out(job):
    """performance.recompute is a mapping: each of its keys has a row, and no Python is shown."""
    full = {"granularity": "full", "method": "block", "n_layers": 2}
    other = job.replace(**{"performance.recompute": full, "parallelism.sp": False})
    text = layout(diff((estimate(job), estimate(other)), ("a", "b"))[0], PLAIN)
    rows = {line.split()[0]: line.split()[1:] for line in text[1:]}
    assert rows["performance.recompute.granularity"] == ["-", "full"]
    assert rows["performance.recompute.n_layers"] == ["-", "2"]
    assert rows["parallelism.sp"] == ["true", "false"]
    assert "'" not in " ".join(text)


def test_what_a_search_varies_is_in_its_answer(job):
    """Of several numbers of devices the best says on how many it runs, and each row does."""
    found = search(job, devices=[8, 16], axes=FEW)
    answer, best, *_ = sections(found, 3)
    assert f"devices {found.best.estimate.devices}" in shown(answer)
    assert best.header[:3] == ["", "devices", "step"]


def test_costs_without_a_price_are_device_seconds(job):
    unpriced = job.replace(**{"hardware.node_type": "gb200-nvl72"})
    assert "device-seconds per token (no price known" in search(unpriced, objective="cost", axes=FEW).unit
    paid = unpriced.replace(**{"run.price_per_device_hour": 2.5})
    assert search(paid, objective="cost", axes=FEW).unit == "cost per token"


def test_machines_of_which_some_have_a_price_cannot_be_compared(job):
    with pytest.raises(ConfigError, match=r"no price for gb200-nvl72; set price_per_device_hour in its machine file"):
        search(job, over={"hardware.node_type": ["gb200-nvl72", "aws-p5.48xlarge"]}, objective="cost")


def test_the_plan_on_its_own_machine_under_an_alias_is_no_change(job):
    best = search(job, over={"hardware.node_type": ["h100", "h200"]}, axes=FEW).top(8)
    changed = {(x.job.machine.name, "hardware.node_type" in x.changes) for x in best}
    assert changed == {("dgx-h100", False), ("dgx-h200", True)}


def test_waves_of_tiles_by_hand(large):
    """8,192 x 1,280 in tiles of 128 x 256 are 64 x 5 = 320, on 132 SMs 2.424 waves: 1 - 0.25 (1 - 2.424 / 3) = 0.952."""
    text = told(large, "attn.qkv")
    assert "320 tiles of 128 x 256 / 132 SMs = 2.424 waves" in text
    assert "1 - WAVE_LOSS 0.25 x (1 - 2.424 / 3) = 0.952" in text
    assert "661 TFLOP/s sustained x 8,192 / (8,192 + 200) x 0.952" in " ".join(text.split())


def test_a_ring_over_nvlink_by_hand(large):
    """8.4 us + 7 hops of 1.6 us; 7/8 of 128 MiB at 0.8 of 450 GB/s take 326.2 us; 0.6 sqrt(19.6 us x 326.2 us) = 47.98 us."""
    text = told(large, "attn.gather")
    assert "19.60 us = 8.400 us base + 7 x 1.600 us (nvlink)" in text
    assert "326.2 us = 128 MiB x 0.875 / (450 GB/s nvlink x 0.8 reached)" in text
    assert "47.98 us = RAMP 0.6 x sqrt(19.60 us tree latency x wire)" in text


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("attn.gather", ["nvlink", "RAMP", "RING_S"]),  # a ring, all of it exposed
        ("mlp.gather.again", ["nvlink", "RAMP", "RING_S", "CONTENTION"]),  # covered, over the links that compute uses
        ("stage 0 to 1", ["infiniband", "RAMP", "SEND_S"]),
        ("gradients", ["infiniband", "RAMP", "RING_S", "NIC_CONTENTION"]),  # one rank of the group in a node
    ],
)
def test_the_constants_of_a_collective_are_those_it_uses(large, name, labels):
    (constants,) = [table for table in explain(large, name) if table.title == "constants"]
    assert [fact.label for fact in constants.facts] == labels


def test_a_covered_collective_by_hand(large):
    """1,280 calls of 393.8 us are 504.1 ms, all covered: 0.15 of them come back as slower compute, 75.61 ms."""
    assert "75.61 ms = 0 s not covered by compute + CONTENTION 0.15 x 504.1 ms covered" in told(
        large, "mlp.gather.again"
    )


def test_model_flops_by_hand(large):
    """16,777,216 tokens x (6 x 69.502 B weights + 3 x 80 layers x 2 x 64 heads x 128 x 8,192) = 7.537 EFLOP."""
    attention = 80 * 2 * 64 * 128 * 8192
    assert 2048 * 8192 * (6 * 69.502e9 + 3 * attention) == pytest.approx(7.537e18, rel=1e-4)
    assert "16,777,216 tokens x (projections and head 6 x 69.502 B weights + attention 3 x 10.74 GFLOP" in told(
        large, "mfu"
    )


def test_kernels_of_memory_by_hand(large):
    """mlp.act reads 112 MiB and writes 56: 168 MiB at 3.35 x 0.887 TB/s and 3 us take 62.28 us; the loss has four kernels."""
    text = told(large, "memory_bound")
    assert (
        "mlp.act forward moves 168 MiB, backward 280 MiB, 1 kernel each; 1,280 x (62.28 us forward + 101.8 us" in text
    )
    assert "loss forward moves 1.72 GiB, backward 1.72 GiB, 4 kernels each" in text


def test_lines_keep_numbers_with_their_units():
    """No line ends between a number and its unit, or between --set and its setting."""
    from steptime.report.table import wrapped

    assert wrapped("a step takes 12.5 ms or 40 % more", 17) == ["a step takes", "12.5 ms or 40 %", "more"]
    assert wrapped("change --set a.b=1 --set c.d=2", 20) == ["change --set a.b=1", "--set c.d=2"]


ODD = (
    r"unsaid|unproved|(?:held|told|stands?) apart|who holds what|comes and goes|no share\b|dealt out|deals out|w[eo]aven?\b"
    r"|\bmends?\b|\bnobody\b|in the mean\b|\banew\b|least split|unless said|\bbeside\b|\blies (?:on|over|in)\b|as they lie"
    r"|\bstands? (?:in|with|there)\b|of their kind\b|runs (?:are|is) off\b|see below\b|what it promises"
)
"""Words that a reader of technical English stumbles over."""
SPOKEN = ("base", "hardware", "software", "job", "answer", "commands", "model")
"""Rooms whose strings a user reads."""


def pages():
    """The pages by hand and the texts in data files: path and text."""
    root = Path(__file__).parents[1]
    data = root / "steptime" / "data"
    for path in [*(root / "docs").glob("*.md"), root / "README.md", data / "keys.yaml", *data.glob("software/*.yaml")]:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"<!-- output of.*?<!-- end of output -->|```.*?```", "", text, flags=re.DOTALL)
        yield path, "\n".join(line for line in text.split("\n") if path.suffix != ".md" or "| `3dtrn" not in line)


def strings():
    """Every string of more than one word in the rooms that speak to a user, without docstrings: path and text."""
    for room in SPOKEN:
        for path in (Path(__file__).parents[1] / "steptime" / room).glob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
                    yield path, node.value


@pytest.mark.parametrize("source", [pages, strings])
def test_no_odd_words(source):
    found = [f"{path.name}: {match[0]!r}" for path, text in source() for match in re.finditer(ODD, text)]
    assert found == []
