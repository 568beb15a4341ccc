"""`3dtrn explain PLAN experts`: rows, kernels and factors of the experts of a layer, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.report.explain import explain, names
from steptime.report.kernel_table import op_times

PLAN = Path(__file__).parents[1] / "configs" / "llama3_70b.yaml"


def words(found):
    """Title and facts of the page."""
    (section,) = explain(found, "experts")
    return section.title, {fact.label: " ".join(fact.lines) for fact in section.facts}


def test_experts_by_hand():
    """DeepSeek-V3 over ep 64: 4 of 256 experts on a device, 4,096 tokens * 8 * 64 / 256 = 8,192 rows for each."""
    found = estimate(Job.load(PLAN.with_name("deepseek_v3.yaml")))
    title, facts = words(found)
    assert facts["experts"] == "256, 8 of them for each token; 4 on a device (ep 64, etp 1)"
    assert facts["rows"] == "8,192 per expert and micro-batch: 4,096 tokens of a device x 8 x ep 64 / 256"
    assert {
        "moe2.experts.up",
        "moe2.experts.down",
        "moe2.moe.router",
        "moe.dispatch",
        "moe.combine.grad",
    } <= facts.keys()
    exposed = sum(row.exposed_s for row in found.collectives if row.name.startswith("moe."))
    kernels = [row for row in op_times(found) if row.op.role in {"router", "moe", "moe_act", "shared_experts"}]
    assert title.startswith(f"experts: {exposed + sum(row.step_s for row in kernels):.3f} s, ")


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        # of 4,096 tokens sequence parallelism gives a device 2,048 at tp 2: 2,048 x 2 x 4 / 8 = 2,048
        ({"tp": 2, "ep": 4, "etp": 1}, "2,048 per expert and micro-batch: 2,048 tokens of a device x 2 x ep 4 / 8"),
        (
            {"tp": 2, "ep": 4, "etp": 2},
            "4,096 per expert and micro-batch: 2,048 tokens of a device x 2 x ep 4 x etp 2 / 8",
        ),
    ],
)
def test_rows_of_experts_under_tensor_parallelism(layout, rows):
    """Factors multiply to the rows of one expert."""
    job = Job.load(PLAN.with_name("mixtral_8x7b.yaml"))
    found = estimate(job.replace(**{f"parallelism.{name}": degree for name, degree in layout.items()}))
    assert words(found)[1]["rows"] == rows


def test_a_grouped_product_has_every_factor_of_its_rate():
    """Up of DeepSeek-V3's experts: 8,192 / (8,192 + 120) = 0.986 for its rows, and the waves that are told below it."""
    found = estimate(Job.load(PLAN.with_name("deepseek_v3.yaml")))
    facts = next(part for part in explain(found, "moe2.experts.up") if part.title.endswith("forward")).facts
    text = " ".join(line for fact in facts for line in fact.lines)
    assert "8,192 / (8,192 + GROUP_ROWS 120) = 0.986 x 0.992 for waves of tiles" in text
    assert "(1 - 31.030 / 32) = 0.992" in text


def test_a_dense_plan_has_no_experts():
    assert "experts" not in names(estimate(Job.load(PLAN)))
