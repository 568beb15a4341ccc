"""Reports: the layout of text, the numbers in it, JSON keys, HTML; on a hand-made estimate whose figures are easy to check."""

import json
import re
from pathlib import Path

import jobs
import pytest
from made_estimate import GIB, gemm, job, made

from steptime import Estimate, Job, estimate
from steptime.answer.result import document as to_dict
from steptime.base.rows import (
    CollectiveRow,
    Time,
)
from steptime.report import breakdown, details, diff_tables, explain, headline
from steptime.report.estimate_text import report, sections
from steptime.report.headline import layout_words
from steptime.report.notebook import estimate_html
from steptime.report.table import Style, layout, wants_color

WIDTH = 80


def lines_of(estimate, **options):
    return report(estimate, **options).splitlines()


# --- numbers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4, 5, 6, 64])
@pytest.mark.parametrize("verdict", ["fits", "tight", "does_not_fit"])
@pytest.mark.parametrize("brief", [True, False])
def test_reports_keep_to_eighty_columns(stages, verdict, brief):
    plan = {"job": job(pp=2)} if stages == 2 else {}
    lines = lines_of(made([40.0 - 0.3 * i for i in range(stages)], verdict, **plan), brief=brief)
    assert max(map(len, lines)) <= WIDTH


def test_huge_figures_keep_to_eighty_columns():
    row = gemm(0, "forward")._replace(
        m=1_048_576.0, n=1_234_567.0, k=131_072.0, flops=3.4e17, compute_s=680.0, time_s=680.1
    )
    link = CollectiveRow(
        "a very long name of a collective operation",
        "reduce_scatter",
        "dp",
        131072,
        "cross-dc",
        9e13,
        1e6,
        0.5,
        900.0,
        900.5,
        9e5,
    )
    big = made(gemms=[row], collectives=[link])
    assert max(map(len, lines_of(big))) <= WIDTH


# --- text ------------------------------------------------------------------------------------------------------------------


def test_the_answer_comes_first():
    memory = made().memory
    lines = lines_of(made(memory=memory._replace(capacity_bytes=99.5 * GIB)))
    assert lines[0].startswith("llama3-70b, 70.6 B parameters")
    assert "tp 8  pp 4  dp 32" in lines[1]
    # allocated 56 GiB + context 0.5 + communicators 1.5 = 58, the p90 of reserved 72.5 + 2 = 74.5, of 99.5
    assert lines[3] == "  FITS  needs 58.0 to 74.5 of 99.5 GiB on stage 0 (highest); 25.0 GiB free"
    assert lines[4].split()[:3] == ["STEP", "14.75", "s"]
    assert lines[5].split("  ")[-1].strip() == "80 % interval 13.50 s to 16.25 s, extrapolated"
    assert lines[6].strip() == "extrapolated: scale: 1,024 devices, measured up to 512"
    assert "48.2 % of 989 TFLOP/s bf16 dense (causal attention halved)" in lines[7]


def test_nodes_are_not_racks():
    """2,304 GB200 in nodes of 4 are 576 nodes, which fill 32 racks of the name gb200-nvl72."""
    plan = {"model": "llama3-8b", "parallelism": {"tp": 1, "pp": 1, "dp": 2304}, "hardware": "gb200-nvl72"}
    found = estimate(Job(**plan, data={"gbs": 2304, "seqlen": 8192, "microbatch_sz": 1}))
    assert headline.headline(found)[0].endswith("2,304 x gb200-186 (576 gb200-nvl72 nodes)")


@pytest.mark.parametrize(
    ("plan", "sets", "note"),
    [
        (
            "llama3_70b",
            {},
            "tp: calls of stage 3, the busiest; dp: of stage 0, which sends most; embedding and head: of their own stages",
        ),
        ("llama3_405b", {}, "tp, dp: calls of stage 1, the busiest; embedding and head: of their own stages"),
        ("deepseek_v3", {}, "ep_etp: calls of stage 15, the busiest; dp: of stage 0, which sends most"),
        ("llama3_70b", {"parallelism.tp": 1, "parallelism.dp": 1}, None),
        ("llama3_70b", {"parallelism.pp": 1, "parallelism.vpp": 1}, None),
    ],
)
def test_the_stages_that_collectives_are_of(plan, sets, note):
    """Only of axes that have calls; one stage is told once, and none where there is no pipeline or sends alone."""
    found = estimate(Job.load(f"configs/{plan}.yaml").replace(**sets))
    assert details.collectives(found).notes[1:] == ([note] if note else [])


def test_tight_by_what_one_run_in_ten_would_need():
    """Reserved 58 + 2 GiB fit into 70, its p90 of 72.5 + 2 does not."""
    tight = made(verdict="tight")
    text = " ".join(report(made(memory=tight.memory._replace(capacity_bytes=70 * GIB))).split())
    assert "TIGHT needs 58.0 to 74.5 of 70.0 GiB on stage 0 (highest); at most 4.50 GiB over" in text


def test_a_thin_margin_is_told_with_its_meaning():
    """58 + 2 GiB are expected and 58 * 1.25 + 2 = 74.5 are the 90th percentile, 14.5 above: thin where less than that is free."""
    memory = made().memory
    told = "a thin margin: up to 1 run in 10 needs more than 74.5 GiB"
    for free, thin in ((0.3, True), (14.4, True), (14.6, False)):
        text = " ".join(report(made(memory=memory._replace(capacity_bytes=(74.5 + free) * GIB))).split())
        assert f"{free:.3g} GiB free" in text.replace("0.30", "0.3")
        assert (told in text) == thin


def test_unequal_stages_and_a_split_left_to_the_estimate_are_told_in_layers():
    """DeepSeek-V3's 61 layers on 16 stages; 80 layers on 8 are even, which is told where the plan says auto."""
    sets = {"parallelism.vpp": 1, "parallelism.pp": 8, "parallelism.dp": 16}
    job = Job.load("configs/llama3_70b.yaml").replace(**sets)
    layers = {fact.label: fact.lines for fact in details.pipeline(estimate(job)).facts}
    assert "layers" not in layers
    auto = details.pipeline(estimate(job.replace(**{"parallelism.layers_per_stage": "auto"})))
    assert auto.facts[-1].lines == ["10 10 10 10 10 10 10 10, first stage to last"]
    own = details.pipeline(estimate(Job.load("configs/deepseek_v3.yaml")))
    counts = [int(n) for n in own.facts[-1].lines[0].partition(",")[0].split()]
    assert (own.facts[-1].label, sum(counts), len(counts)) == ("layers", 61, 16)


def test_verdicts_in_words():
    text = " ".join(report(made(verdict="does_not_fit")).split())
    assert "DOES NOT FIT needs 58.0 to 74.5 of 50.0 GiB on stage 0 (highest); at least 8.00 GiB over" in text


def test_the_table_beside_the_verdict_has_its_figures():
    rows = {row[0]: row[1:] for row in breakdown.memory(made()).rows}
    assert rows["needed at least"][0] == "58.00"
    assert rows["needed at most (p90)"][0] == "74.50"
    assert rows["left of 79.5 usable"][0] == "5.00"


def test_fixes_are_runnable_and_only_shown_when_needed():
    lines = lines_of(made(verdict="does_not_fit"))
    at = lines.index("to make it fit, fastest first")
    assert lines[at + 1] == "  --set performance.activation_checkpointing_type=super-selective \\"
    assert lines[at + 2].split() == ["--set", "parallelism.tp=16"]
    assert "15.00 s a step, +2.1 %; needs up to 63.0 GiB" in lines[at + 3]
    assert "to make it fit" not in report(made())
    nothing = report(made(verdict="does_not_fit", fixes=[]))
    assert "no change found that makes it fit" in nothing
    assert "3dtrn search PLAN tries every layout" in nothing


def parts_in(lines):
    """(name, seconds, percent) of each row of the first table."""
    start = next(i for i, line in enumerate(lines) if line.startswith("step time breakdown"))
    end = next(i for i, line in enumerate(lines) if i > start and line.strip().startswith("sum"))
    rows = [re.match(r"  (.+?)\s{2,}([\d.,]+)\s+([\d.,]+) %", line) for line in lines[start + 1 : end + 1]]
    return [(row[1], float(row[2].replace(",", "")), float(row[3])) for row in rows if row]


def test_parts_are_sorted_and_sum_to_the_step():
    *parts, total = parts_in(lines_of(made()))
    assert [name for name, _, _ in parts] == [
        "matrix multiplies",
        "attention",
        "tensor-parallel communication",
        "pipeline bubble",
        "data-parallel communication",
    ]
    assert sum(took for _, took, _ in parts) == pytest.approx(total[1], abs=0.005 * len(parts))
    assert total[1:] == (14.75, 100.0)
    assert sum(share for _, _, share in parts) == pytest.approx(100.0, abs=0.05 * len(parts))


def test_a_part_that_is_all_hidden_is_still_listed():
    estimate = made(time=Time(1.0, {"gemm": 1.0, "dp_comm": 0.0}, {"dp_comm": 0.5}))
    assert ("data-parallel communication", 0.0, 0.0) in parts_in(lines_of(estimate))


def test_equal_stages_share_a_column():
    table = breakdown.memory(made((40.0, 20.0, 20.0, 10.0)))
    assert table.header == ["", "stage 0", "1-2", "3"]
    assert table.rows[3] == ["activations", "40.00", "20.00", "10.00"]


def test_many_stages_show_first_worst_last():
    sizes = [30.0 + i / 10 for i in range(64)]
    sizes[37] = 60.0
    table = breakdown.memory(made(sizes))
    assert table.header[1] == "stage 0"
    assert {"37", "63"} <= set(table.header)
    assert any("59 more of 64 stages" in note for note in table.notes)
    assert any("stage 37 needs the most memory" in note for note in table.notes)


def test_whole_gradients_of_fsdp_in_a_pipeline_are_among_the_transients():
    """torch reduces a layer's with the last micro-batch: no shard exists at a peak in the first ones' backward. Those of the head
    torchtitan's loss in chunks has reduced by then."""
    found = estimate(jobs.job(software="torchtitan", pp=2, dp=4, fsdp={}))
    assert found.memory.stages[found.memory.worst_stage].gradients_bytes == 0.0
    note = "no layer's gradient is reduced yet at the peak: whole gradients are among the transients"
    assert breakdown.memory(found).notes[-1] == note


def test_one_device_has_no_stage_and_no_pipeline():
    text = report(made((40.0,), collectives=[]))
    assert "stage" not in text.partition("matrix multiplies")[0]
    assert "\npipeline" not in text
    assert "collectives" not in text


def test_gemms_are_listed_once_for_equal_stages():
    rows = details.gemms(made()).rows
    assert rows[0] == ["attn.qkv (us): 1,280 calls a step"]
    assert rows[1] == [" forward", "8,192", "1,280", "8,192", "172", "128", "20.0", "20.0", "344", "88.1", "350"]
    assert [row[0].strip() for row in rows[1:4]] == ["forward", "dgrad", "wgrad"]
    assert rows[4] == ["head (us): 64 calls a step, on stage 3 only"]


def test_brief_reports_touch_no_lazy_part():
    estimate = made()
    for name in ("gemms", "collectives", "weak_scaling", "fixes"):
        delattr(estimate, name)
    assert "  TIME  " in report(estimate, brief=True)


def test_fsdp_and_other_axes_are_named():
    assert layout_words(made(job=job(vpp=2))) == "tp 8  pp 4  dp 32  vpp 2  sp  zero 1"
    assert layout_words(made(job=job(pp=1, fsdp={}, sp=False))) == "tp 8  pp 1  dp 32  fsdp"


# --- style -----------------------------------------------------------------------------------------------------------------


def test_adapters_say_how_many_parameters_are_trained():
    """Rank 16 on q (8,192 to 8,192) and v (8,192 to 1,024) of 80 layers: 80 * 16 * (16,384 + 9,216) = 32,768,000."""
    lora = {"rank": 16, "targets": ["q_proj", "v_proj"]}
    found = estimate({"model": {"preset": "llama3-70b", "lora": lora}, "hardware": "h100",
                      "parallelism": {"tp": 1, "pp": 1, "dp": 8, "fsdp": {}}, "performance": {"software": "fsdp2"},
                      "data": {"gbs": 8, "seqlen": 4096, "microbatch_sz": 1}})  # fmt: skip
    assert "parameters, 32,768,000 trained (LoRA of rank 16)" in report(found)


def test_ascii_reports_are_ascii():
    assert report(made(), Style(ascii=True)).isascii()
    assert not report(made()).isascii()


def test_colour_changes_nothing_but_colour():
    plain, coloured = report(made()), report(made(), Style(color=True))
    assert "\x1b[1;32mFITS\x1b[0m" in coloured
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()
    assert "\x1b" not in plain


@pytest.mark.parametrize(
    ("choice", "tty", "environ", "expected"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("auto", False, {"FORCE_COLOR": "1"}, True),
        ("auto", True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_rules(choice, tty, environ, expected):
    assert wants_color(choice, tty=tty, environ=environ) is expected


# --- JSON and HTML ---------------------------------------------------------------------------------------------------------


def test_json_speaks_the_contract():
    document = json.loads(json.dumps(to_dict(made(verdict="does_not_fit")), allow_nan=False))
    assert document["schema"] == "3dtrn/1"
    assert document["memory"]["fixes"][0]["step_change"] == 0.021
    assert document["memory"]["overhead_bytes"] == {
        "context": 0.5 * GIB,
        "communicators": 1.5 * GIB,
        "receive_buffers": 0.0,
    }
    assert document["gemms"][0]["pass"] == "forward"
    assert document["time"]["parts_s"]["gemm"] == 10.0
    assert document["config"]["parallelism"]["tp"] == 8
    assert to_dict(made())["memory"]["fixes"] == []
    assert "run" not in to_dict(made(run=None))


def test_html_holds_every_section_and_escapes():
    estimate = made(assumptions=["a <b> & c"])
    page = estimate_html(estimate)
    for section in sections(estimate):
        assert section.title in page
    assert "a &lt;b&gt; &amp; c" in page
    assert "<script" not in page
    assert (
        page.count("<table")
        == page.count("</table>")
        == len([s for s in sections(estimate) if getattr(s, "header", True)])
    )


def test_a_notebooks_style_sheet_moves_no_cell():
    """JupyterLab puts cells of tables to the right (.jp-RenderedHTMLCommon td); what a cell says itself holds."""
    page = estimate_html(made())
    cells = re.findall(r"<t[dh]\b[^>]*>", page)
    assert len(cells) > 100
    assert all('style="text-align: ' in cell for cell in cells)
    assert '<td style="text-align: left;"><span style="color: #0b5fa5;">█' in page


def test_repr_is_one_short_line():
    assert (
        Estimate.__repr__(made(step_s=14.75))
        == "<Estimate llama3-70b on 1,024 devices: fits, 14.8 s a step, MFU 48.2 %>"
    )


# --- workings and comparison -----------------------------------------------------------------------------------------------


def words(facts):
    return {fact.label: " ".join(fact.lines) for fact in facts.facts}


def test_a_gemm_is_explained_with_its_numbers():
    forward = explain.explain(made(), "attn.qkv")[0]
    assert forward.title == "attn.qkv, forward"
    said = words(forward)
    assert said["work"] == "2 m n k = 2 x 8,192 x 1,280 x 8,192 = 172 GFLOP"
    assert said["rate"] == "500 TFLOP/s = 989 TFLOP/s dense peak x 0.506"
    # 661e12 x 8192 / 8392 = 645.2e12, of which 500e12 is 0.775
    assert said[""] == "= 661 TFLOP/s sustained x 8,192 / (8,192 + 200) x 0.775 for waves of tiles"
    assert said["math"] == "work / rate = 343.6 us"
    assert said["memory"] == "bytes / 2.00 TB/s = 88.08 us"
    assert said["time"] == "max(math, memory) + 6.000 us launch = 349.6 us, limited by arithmetic"
    assert said["per step"].startswith("1,280 calls = 447.5 ms, 3.0 % of the step")


def test_a_collective_is_explained_with_its_numbers():
    said = words(explain.explain(made(), "gradients")[0])
    assert said["group"] == "32 ranks along dp, over infiniband"
    # 4 GiB in 90 ms is 47.7 GB/s of tensor; a ring moves 31/32 of it: 46.2 GB/s on the bus
    assert said["wire"] == "90.00 ms"
    assert said[""] == "47.7 GB/s of the whole tensor (bus bandwidth 46.2 GB/s)"
    assert (said["per step"], said["exposed"]) == ("5 calls = 455.0 ms", "250.0 ms; 205.0 ms overlapped with compute")


@pytest.mark.parametrize("name", ["step", "mfu", "tokens", "bubble", "attn.qkv", "qkv gather"])
def test_workings_keep_to_the_page(name):
    for section in explain.explain(made(), name):
        assert max(map(len, layout(section, Style()))) <= WIDTH


def test_unknown_names_get_a_near_match():
    with pytest.raises(explain.UnknownNameError, match=r"did you mean attn\.qkv"):
        explain.explain(made(), "attn.qvk")


def test_all_names_can_be_explained():
    """Of real estimates: explanations of the parts of a step go down to its ops."""
    for plan in ("llama3_70b", "llama3_8b_fsdp"):
        found = estimate(Job.load(Path(__file__).parents[1] / "configs" / f"{plan}.yaml"))
        assert all(explain.explain(found, name) for name in explain.names(found))


def test_diff_shows_what_changed():
    a, b = made(), made((50.0, 30.0, 20.0, 10.0), "tight", job=job(vpp=2))
    changed, answer, _, memory = diff_tables.diff((a, b), ("a", "b"))
    assert ["parallelism.vpp", "1", "2"] in changed.rows
    assert answer.rows[0] == ["verdict", "FITS", "TIGHT", ""]
    assert ["activations", "40.00", "50.00", "+25.0 %"] in memory.rows
    same = diff_tables.diff((a, a), ("a", "b"))
    assert same[0].title == "no setting differs"
    assert all(row[-1] == "" for table in same[1:] for row in table.rows)


def test_memory_of_plans_side_by_side_has_the_rows_of_the_report():
    """No key of JSON (params, transient), but the names that the memory table of a report explains."""
    table = diff_tables.diff([made(), made(), made()], ["a", "b", "c"])[-1]
    names = [row[0] for row in table.rows]
    assert names[:-1] == [row[0] for row in breakdown.memory(made()).rows[: len(names) - 1]]
