"""What a plan's own framework stops at is the first thing that an answer says: text, page, notebook and JSON."""

from __future__ import annotations

import json

import pytest
from jobs import node_job as job

from steptime import Job, estimate
from steptime.answer.assumptions import assumptions
from steptime.answer.refusals import refusals
from steptime.launch.torchtitan.job_config import read_torchtitan
from steptime.report.estimate_text import report
from steptime.report.notebook import estimate_html
from steptime.report.page import whole_page

SHARED = {"n_experts": 8, "expert_inter_sz": 2048, "experts_per_token": 2, "n_shared_experts": 1}


def told(plan):
    """The lines without the words that all of them start with."""
    lines = refusals(plan)
    assert all(line.startswith("refused by ") for line in lines)
    assert assumptions(plan)[: len(lines)] == lines
    return [line.removeprefix("refused by ") for line in lines]


@pytest.mark.parametrize(
    ("software", "lines"), [("megatron-core", 1), ("megatron-bridge", 0), ("megatron-bridge@26.06", 0)]
)
def test_flex_with_shared_experts_overlapped_needs_a_release(software, lines):
    """core_v0.17.1 raises "moe_shared_expert_overlap only works with alltoall token dispatcher", core_v0.18.0 takes flex too.

    Megatron-Bridge has 0.18 since 26.06 (docs/releases/software-versions.md); older profiles of it are an error.
    """
    moe = {"shared_expert_overlap": True, "dispatcher": "flex"}
    plan = job({"software": software, "moe": moe}, model={"moe": SHARED}, ep=8)
    assert len(told(plan)) == lines
    plain = job({"software": software, "moe": moe | {"dispatcher": "alltoall"}}, model={"moe": SHARED}, ep=8)
    assert not told(plain)


def test_an_overlapped_exchange_that_megatron_lacks():
    """Megatron-Core asserts virtual stages where overlap_moe_expert_parallel_comm meets a pipeline; without one it needs none."""
    layout = {"tp": 1, "pp": 4, "dp": 8, "ep": 8}
    batch = {"gbs": 32, "seqlen": 4096, "microbatch_sz": 1}
    overlap = {"overlap": {"ep": True}}
    found = Job(model="mixtral-8x7b", parallelism=layout, performance=overlap, data=batch, hardware="dgx-h100")
    (line,) = told(found)
    assert line.startswith("Megatron-Core: performance.overlap.ep with pp 4 and vpp 1; raise vpp")
    for change in ({"parallelism.vpp": 2}, {"performance.overlap": {"ep": False}}, {"parallelism.pp": 1}):
        assert not told(found.replace(**change))


@pytest.mark.parametrize(
    ("performance", "parallelism", "line"),
    [
        ({"overlap": {"tp": True}}, {"tp": 2, "dp": 4}, "performance.overlap.tp (async TP) without torch.compile"),
        ({"overlap": {"tp": True}, "compile": "blocks"}, {"tp": 2, "dp": 4}, ""),
        ({"cuda_graphs": True}, {"pp": 2, "dp": 4}, "performance.cuda_graphs with pp 2; set it to false"),
        ({"cuda_graphs": True}, {}, ""),
        ({"cuda_graphs": True, "software": "megatron-core"}, {"pp": 2, "dp": 4}, ""),
    ],
)
def test_torchtitan(performance, parallelism, line):
    """config/configs.py@b5bcd76c: "Async TP requires 'model' in --compile.components"; trainer.py, _validate_cuda_graphs."""
    found = told(job({"software": "torchtitan"} | performance, **parallelism))
    assert [one.startswith(f"torchtitan: {line}") for one in found] == [True] * bool(line)


@pytest.mark.parametrize(
    ("software", "compiled", "tp", "lines"),
    [
        ("torchtitan@0.2", "all", 2, 1),
        ("torchtitan@0.2", "none", 2, 0),
        ("torchtitan@0.2", "all", 1, 0),
        ("torchtitan", "all", 2, 0),
    ],
)
def test_mxfp8_with_tensor_parallelism(software, compiled, tp, lines):
    """components/quantization/mx.py of v0.2.2: "TP not yet supported with torch.compile for mxfp8"; not in b5bcd76c."""
    performance = {"software": software, "compile": compiled, "precision": "mxfp8_torchao"}
    assert len(told(job(performance, "dgx-b200", tp=tp, dp=8 // tp))) == lines


def test_first_in_each_form_of_an_answer():
    found = estimate(job({"software": "torchtitan", "overlap": {"tp": True}}, tp=2, dp=4))
    (line,) = refusals(found.job)
    for brief in (False, True):
        text = report(found, brief=brief)
        above, below = " ".join(text.split()).split(" STEP ", 1)
        assert line in above
        assert line not in below
    assert json.loads(json.dumps(found.to_dict()))["refused"] == [line]
    assert "refused" not in estimate(job({"software": "torchtitan"})).to_dict()
    assert line in estimate_html(found).partition("STEP")[0]
    assert line in str(whole_page.page(found)).partition("STEP")[0]


def test_a_config_that_torchtitan_stops_at():
    """CUDA graphs are on by default, and _validate_cuda_graphs raises with a pipeline."""
    text = """
def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B", attn_backend="flex"),
        training=TrainingConfig(local_batch_size=2, seq_len=4096, steps=10, disable_cuda_graphs=False),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2),
    )
"""
    found = read_torchtitan("config_registry.py:llama3_8b", text, {"WORLD_SIZE": "16"})
    key = "training.disable_cuda_graphs"
    line = f"refused by torchtitan: CUDA graphs with pp 2; set {key} to true, as is counted here"
    assert [note for note in found.config["notes"] if "CUDA" in note] == [line]
    assert refusals(job({"software": "torchtitan"}).replace(notes=found.config["notes"])) == [line]
