"""Who leads, who is told by source, model kinds, tokens per second, baselines: small rows, sums by hand."""

import gc

import pytest
from accuracy import markdown
from validation_rows import judged

from steptime.report import analyses
from steptime.report.table import Style, Table, layout
from steptime.report.validation_tables import tables
from steptime.validation import error_summary, judgement, slices
from steptime.validation.measurements import MeasuredRow
from steptime.validation.yardsticks import baselines, scaled


def test_who_leads():
    assert slices.leads(judged("a"))
    assert slices.leads(judged("b", file=""))
    assert slices.leads(judged("c", file="other", source_group="simumax"))
    assert not slices.leads(judged("d", file="other", source_group="hagemann"))
    assert not slices.leads(judged("e", file="out_of_memory", source_group="hagemann"))
    titan, hagemann = judged("f", file="native"), judged("g", file="other", source_group="hagemann")
    assert (slices.native(titan), slices.leads(titan), slices.others(titan)) == (True, False, False)
    assert (slices.native(hagemann), slices.leads(hagemann), slices.others(hagemann)) == (False, False, True)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ({"n_kv_heads": 32}, "dense mha"),
        ({"n_kv_heads": 8}, "dense gqa"),
        ({"n_kv_heads": 1}, "dense mqa"),
        ({}, "dense mha"),
        ({"n_experts": 1}, "dense mha"),
        ({"n_experts": 8, "n_kv_heads": 8}, "moe gqa"),
        ({"n_experts": 256, "attention_kind": "MLA"}, "moe mla"),
    ],
)
def test_model_kinds(cells, kind):
    assert slices.model_kind(judged("a", **cells)) == kind


def other(name, error, source, **cells):
    """A row of another trainer with this error; every row is a cell of its own."""
    return judged(name, 1.0, 1.0 + error, file="other", source_group=source, model_name=name, **cells)


def test_every_source_has_one_voice():
    """a: .1 .2 .3, median .2; b: .5; c (fit only): .02. Over sources .2; over test sources (.2, .5) .35."""
    rows = [other(f"a{i}", e, "a") for i, e in enumerate((0.1, -0.2, 0.3))]
    rows += [other("b", 0.5, "b"), other("c", 0.02, "c", split="fit")]
    found = slices.told_by_source(rows)
    assert list(found["sources"]) == ["a", "b", "c"]
    assert found["sources"]["a"]["median"] == pytest.approx(0.2)
    assert found["median_over_sources"] == pytest.approx(0.2)
    assert found["test_median_over_sources"] == pytest.approx(0.35)
    assert found["worse_than_15_percent"] == []


def test_a_bad_source_is_named_from_ten_rows_on():
    nine = [other(f"a{i}", 0.2, "a") for i in range(9)]
    vague = [other("z", 0.2, "a", quality="C")]
    good = [other(f"b{i}", 0.15, "b") for i in range(10)]
    assert slices.told_by_source([*nine, *vague, *good])["worse_than_15_percent"] == []
    assert slices.told_by_source([*nine, *good, other("a9", 0.2, "a")])["worse_than_15_percent"] == ["a"]


def test_tokens_per_second():
    """8,192 tokens per device in 2 s measured, in 4 s predicted: 4,096 and 2,048 tokens/s."""
    row = judged("a", 2.0, 4.0, more={"tokens_per_device": 8192.0})
    found = row.to_dict()
    assert (found["measured_tokens_per_s_per_gpu"], found["predicted_tokens_per_s_per_gpu"]) == (4096.0, 2048.0)
    assert judged("b").to_dict()["measured_tokens_per_s_per_gpu"] is None


def test_tokens_per_second_are_those_of_the_row():
    """128 sequences of 4096 on 64 devices: 8,192 tokens each."""
    cells = {
        "id": "x", "gpu": "dgx-h100", "n_gpus": "64", "n_layers": "32", "hidden": "4096", "ffn_hidden": "14336",
        "n_heads": "32", "seq_len": "4096", "global_batch_size": "128", "micro_batch_size": "1", "tp": "4", "pp": "2",
        "tokens_per_s_per_gpu": "1000",
    }  # fmt: skip
    found = judgement.judge(judged("x").row._replace(cells=cells, file=""))
    assert found.measured_tokens_per_s == pytest.approx(1000.0)
    assert found.tokens_per_device == 8192.0
    assert found.model_flops > 6 * 6e9 * 8192


def test_rows_that_share_a_config_are_estimated_once(monkeypatch):
    calls = []
    real = judgement.estimate
    monkeypatch.setattr(judgement, "estimate", lambda job: calls.append(1) or real(job))
    cells = {
        "gpu": "dgx-h100", "n_gpus": "8", "n_layers": "4", "hidden": "1024", "ffn_hidden": "4096", "n_heads": "8",
        "seq_len": "1024", "global_batch_size": "8", "micro_batch_size": "1", "tp": "1", "pp": "1", "step_time_s": "1",
    }  # fmt: skip
    rows = [judged("x").row._replace(cells=cells | change, file="") for change in ({}, {"note": "again"}, {"tp": "2"})]
    found = judgement.judge_all(rows)
    assert len(calls) == 2
    assert gc.isenabled()
    assert found[0].predicted_step_s == found[1].predicted_step_s != found[2].predicted_step_s
    assert found == [judgement.judge(row) for row in rows]


# --- baselines -----------------------------------------------------------------------------------------------------------


def test_a_factor_is_the_median_of_fit_rows():
    """Guess 1 s everywhere. Fit rows take 2, 3 and 10 s: factor 3. A test row of 4 s gets 3 / 4 - 1 = -.25."""
    fit = [judged(f"f{i}", s, 1.0, split="fit") for i, s in enumerate((2.0, 3.0, 10.0))]
    found = scaled([*fit, judged("t", 4.0, 1.0)], lambda _: 1.0)
    assert [error for _, error in found] == pytest.approx([-0.25])


def test_a_pair_without_fit_rows_takes_the_median_of_all():
    fit = [judged("f", 2.0, 1.0, split="fit")]
    test = judged("t", 4.0, 1.0, more={"accelerator": "b200"})
    assert [error for _, error in scaled([*fit, test], lambda _: 1.0)] == pytest.approx([-0.5])
    assert scaled([test], lambda _: 1.0) == []


def test_baselines_by_hand():
    """FLOPs 10 in 2 s on the fit row: .2 s per FLOP; the test row has 20 in 5 s: 4 / 5 - 1. The estimate: 4.5 / 5 - 1."""
    rows = [
        judged("f", 2.0, 1.0, split="fit", more={"model_flops": 10.0}),
        judged("t", 5.0, 4.5, more={"model_flops": 20.0}),
    ]
    found = baselines(rows)
    assert found["estimate"]["median"] == pytest.approx(0.1)
    assert found["flat_mfu"]["bias"] == pytest.approx(-0.2)
    assert found["scaled_estimate"]["bias"] == pytest.approx(0.8)


def test_baselines_of_experts_are_of_their_group():
    """NVIDIA's: a fit row of 10 FLOPs in 2 s, a test row of 20 in 5: 4 / 5 - 1. Others': 10 in 1 s, then 20 in 4: 2 / 4 - 1."""
    rows = [
        judged("f", 2.0, 1.0, split="fit", n_experts=8, more={"model_flops": 10.0}),
        judged("t", 5.0, 4.5, n_experts=8, more={"model_flops": 20.0}),
        judged("g", 1.0, 1.0, split="fit", n_experts=8, file="native", more={"model_flops": 10.0}),
        judged("u", 4.0, 4.0, n_experts=8, file="native", more={"model_flops": 20.0}),
    ]
    summary = error_summary.summarize(rows, 3)
    flat = {name: found["flat_mfu"]["bias"] for name, found in summary["baselines"]["experts"].items()}
    assert list(flat) == list(slices.EXPERTS)
    assert list(flat.values()) == pytest.approx([-0.2, -0.5])
    assert [table.title for table in analyses.baselines(summary)] == [
        f"test rows of {name}: simpler baselines" for name in slices.EXPERTS
    ]


# --- what is printed -----------------------------------------------------------------------------------------------------


def test_the_headline_comes_first_then_other_trainers():
    rows = [judged("a", 1.0, 1.1), other("b", 0.5, "hagemann")]
    titles = [section.title for section in tables(error_summary.summarize(rows, 3))]
    assert titles[:2] == ["step time: NVIDIA's frameworks", "step time: other trainers"]
    assert titles.index("worst rows") < titles.index("worst rows, other trainers")


def test_other_trainers_alone_and_own_rows_alone():
    alone = tables(error_summary.summarize([other("b", 0.5, "hagemann")], 3))
    assert alone[0].title == "step time: other trainers"
    assert "1 measured row: 1 judged, 0 skipped" in alone[0].notes
    own = tables(error_summary.summarize([judged("a", 1.0, 1.1, file="", split="")], 3))
    assert own[0].title == "step time"
    assert not [table for table in own if "NVIDIA" in str(table)]


def test_nothing_at_all():
    assert [table.title for table in tables(error_summary.summarize([], 3))] == ["step time"]


def test_every_table_fits_the_page_with_long_names():
    rows = [other("b" * 60, 0.5, "x" * 50), judged("a" * 60, 1.0, 1.1)]
    for section in tables(error_summary.summarize(rows, 3)):
        assert all(len(line) <= 80 for line in layout(section, Style()))


def test_markdown_by_hand():
    made = markdown(Table("title", ["a", "b"], [["x|y", "1"], [], ["part"]], ("note",)))
    assert made == "## Title\n\n| a | b |\n|---|---:|\n| x/y | 1 |\n| **part** |  |\n\n- note\n"


def test_an_id_is_short_in_lines_about_its_row():
    """A cell of thousands of digits is told by its first 300, more than any row of the collection has."""
    assert MeasuredRow({"id": "9" * 5000}, "", 4).id == "9" * 300
    assert MeasuredRow({}, "", 4).id == "line 4"
