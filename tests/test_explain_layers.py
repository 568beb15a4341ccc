"""`3dtrn explain` of the parts that are summed over layers: the printed terms are multiplied out and added up."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

from steptime.answer.assumptions import host_bound
from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.report.estimate_text import report
from steptime.report.explain import explain, names

CONFIGS = Path(__file__).parents[1] / "configs"
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
TIME = r"([\d.,]+) (s|ms|us)"


def lines_of(found, name):
    (section,) = explain(found, name)
    return section.title, {fact.label: fact.lines for fact in section.facts}


def seconds_in(text):
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in re.findall(TIME + r"\b", text)]


def product(text):
    """A time multiplied by every number that follows an x: "500.0 us x fp8 2.062 x 3 layers"."""
    factors = [float(one.replace(",", "")) for one in re.findall(r" x (?:[^\d\s]\S* )?([\d.,]+)", text)]
    return seconds_in(text)[0] * prod(factors)


def estimated(name, **changes):
    return estimate(Job.load(CONFIGS / f"{name}.yaml").replace(**changes))


PLANS = [
    ("deepseek_v3", {}),
    ("deepseek_v2_lite", {}),
    ("mixtral_8x7b", {}),
    ("gpt2_1gpu", {}),
    ("nemotron_h_56b", {}),
    ("gpt2_1gpu", {"performance.compile": "blocks"}),
    ("gpt3_175b_a100", {"performance.software": "bloom"}),  # blocking launches
    ("gpt3_175b_a100", {}),
]


@pytest.mark.parametrize(("plan", "changes"), PLANS)
def test_launch_gaps_add_up(plan, changes):
    """Each line's product is its result, and the results of all lines sum to the part of the step."""
    found = estimated(plan, **changes)
    title, facts = lines_of(found, "launch")
    total = 0.0
    for line in (*facts["gaps"], *facts["host"][1:]):
        formula, _, result = line.rpartition(" = ")
        (last,) = seconds_in(result)
        assert product(formula.rpartition(" = ")[2]) == pytest.approx(last, rel=2e-3), line
        total += last
    total += sum(seconds_in(facts["host, step"][0])) if "host, step" in facts else 0.0
    assert total == pytest.approx(found.time.parts_s["launch"], rel=2e-3)
    assert seconds_in(title)[0] == pytest.approx(total, rel=2e-3)
    *terms, added = seconds_in(facts["sum"][0])
    assert sum(terms) == pytest.approx(added, rel=2e-3)
    assert added == pytest.approx(total, rel=2e-3)


SMALL = {
    "model": "llama3-8b",
    "devices": 8,
    "parallelism": {"tp": 8, "pp": 1, "fsdp": {}},
    "performance": {"software": "torchtitan", "activation_checkpointing_type": "per-op"},
    "data": {"gbs": 1, "seqlen": 1024, "microbatch_sz": 1},
    "hardware": {"node_type": "h100"},
}


def test_seconds_of_a_launch_name_their_factor_and_its_reason():
    """65 us of fsdp2's profile x 2.5 on DTensors is 162.5 us, x 0.47 compiled 30.55 us; CUDA graphs leave none."""
    job = Job.load(SMALL)
    eager = lines_of(estimate(job), "launch")[1]["host rate"]
    assert eager[0] == ("host_kernel_s 65.00 us x DTENSOR_HOST 2.5 = 162.5 us (eager launches on DTensors, as tp is 8)")
    assert "pull request 133369" in eager[1]
    assert eager[2].startswith("DTENSOR_HOST 2.5: ")
    compiled = estimate(job.replace(**{"performance.compile": "blocks"}))
    assert lines_of(compiled, "launch")[1]["host rate"][0] == (
        "host_kernel_s 65.00 us x COMPILED_HOST 0.47 = 30.55 us (compile blocks)"
    )
    graphs = lines_of(estimate(job.replace(**{"performance.cuda_graphs": True})), "launch")[1]["host rate"]
    assert graphs[0].endswith("CUDA graphs launch everything")


@pytest.mark.parametrize(("graph", "idle"), [("simplified", 0.0), ("traced", 0.4)])
def test_nodes_of_a_traced_graph_are_counted_where_the_host_is_known(graph, idle):
    """Forward of the embedding: 4 nodes of its table, 2 of the gather of that, 4 + 8 of a reduce-scatter over 8 ranks.

    Without effect are a node of the table, one of its gather, and 3 of tensor parallelism; where they stay they count 0.4 each.
    """
    job = Job.load(SMALL | {"hardware": {"node_type": "grand-teton-h100"}}).replace(**{"performance.step_graph": graph})
    facts = lines_of(estimate(job), "launch")[1]
    assert facts["host rate"][0].startswith("hardware.host.node_s 77.00 us (least squares over rows torchtitan-pr-n011")
    assert len(facts["host rate"]) == 1 + (graph == "traced")
    nodes = round(4 + 2 + (4 + 8) + 5 * idle)
    (line,) = [line for line in facts["host"] if line.startswith("embedding: forward")]
    assert line.startswith(f"embedding: forward {nodes} nodes x 77.00 us - ")
    other = Job.load(SMALL).replace(**{"performance.step_graph": graph})
    assert lines_of(estimate(other), "launch")[1]["host rate"][0].startswith(
        "host_kernel_s 65.00 us x DTENSOR_HOST 2.5"
    )


def test_the_answer_says_what_part_of_the_step_waits_for_the_host():
    """Of 1 s, 0.6 s in launch gaps and 0.2 s in recomputation are 80 %; the report and --brief have the line once."""
    job = Job.load(SMALL)
    (line,) = host_bound({"launch": 0.6, "recompute": 0.2}, 1.0, job.software)
    assert "during 80 % of the step (60 % as launch gaps, 20 % as recomputation); " in line
    (line,) = host_bound({"launch": 0.3, "recompute": 0.004}, 1.0, job.software)  # 0 %, which is not told
    assert "during 30 % of the step (part of the launch gaps); " in line
    (line,) = host_bound({"launch": 0.456, "recompute": 0.116}, 1.0, job.software)  # rounded, they add up
    assert "during 57 % of the step (45 % as launch gaps, 12 % as recomputation); " in line
    found = estimate(job)
    for brief in (False, True):
        assert report(found, brief=brief).count("host-bound: ") == 1
        assert "HOST" in report(found, brief=brief)
    large = estimate(job.replace(**{"data.seqlen": 8192, "data.gbs": 16, "data.microbatch_sz": 2}))
    assert large.time.parts_s["launch"] < 0.25 * large.step_s
    assert "HOST" not in report(large)


def test_gaps_of_experts_and_waits_for_the_host_have_their_lines():
    """GPT-2: 500 us x 0.999 x 12 layers x 40 = 239.8 ms, and its embedding's two kernels, launched in 100 us, take 79.0."""
    facts = lines_of(estimated("gpt2_1gpu"), "launch")[1]
    assert facts["gaps"] == ["layer_gap_s 500.0 us x torch 0.999 x 12 layers x 40 micro-batches = 239.8 ms"]
    assert facts["host"][1].startswith(
        "embedding: forward 2 launches x 50.00 us - 79.04 us of kernels = 20.96 us x 40 "
    )


RECOMPUTING = [
    ("deepseek_v3", {}),
    ("gpt3_175b_a100", {}),
    ("llama3_70b", {"performance.recompute": {"granularity": "selective"}}),
]


@pytest.mark.parametrize(("plan", "changes"), RECOMPUTING)
def test_recomputation_adds_up(plan, changes):
    """Kinds of work sum to one layer's seconds, those times layers and micro-batches to the line, the lines to the part."""
    found = estimated(plan, **changes)
    title, facts = lines_of(found, "recompute")
    assert (title, facts) == lines_of(found, "recomputation")
    assert "recompute" in names(found)
    total = 0.0
    for label, lines in facts.items():
        if label in {"granularity", "collectives"}:
            continue
        *terms, each = seconds_in(lines[1])
        assert sum(terms) == pytest.approx(each, rel=2e-3)
        formula, _, result = lines[2].rpartition(" = ")
        assert product(formula) == pytest.approx(seconds_in(result)[0], rel=2e-3)
        total += seconds_in(result)[0]
    assert total == pytest.approx(found.time.parts_s["recompute"], rel=2e-3)


def test_full_recomputation_names_the_ops_of_a_forward():
    """GPT-3 runs a whole layer again; without recomputation the page says so."""
    again = lines_of(estimated("gpt3_175b_a100"), "recompute")[1]["layers"][0]
    assert again.startswith("runs again: attn.norm, ")
    assert "attn.core.scores" in again
    none = lines_of(estimated("llama3_70b"), "recompute")[1]
    assert none == {"granularity": ["none: nothing runs again"]}


def test_gradients_that_are_not_there_at_the_peak_are_counted():
    """8,030,261,248 gradients of 4 B over 64 ranks are 0.467 GiB, none of them yet there at the peak, in the loss's backward.

    Gradients that stay are there, and nothing is left to come.
    """

    def gradients(**changes):
        return lines_of(estimated("llama3_8b_fsdp", **changes), "memory")[1]["gradients"][0]

    held = "4 B each, sharded at zero_level 2 and above"
    assert gradients() == f"0 GiB   {held}; 0.467 GiB of them are not allocated at the peak"
    assert gradients(**{"parallelism.fsdp.gradients_stay": True}) == f"0.467 GiB   {held}"
