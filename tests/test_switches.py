"""Settings besides the layout that shorten a step: which are tried, what they save, what is measured of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from shlex import split

import pytest

from steptime import Job, estimate
from steptime.answer import switches
from steptime.answer.measured import measured
from steptime.answer.switches import FEW, LEAST, MEGATRON, SWITCHES, architecture, code_base, savings
from steptime.commands.cli import main
from steptime.report import switch_tables
from steptime.report.estimate_text import report
from steptime.report.headline import typed
from steptime.search.run import run
from steptime.search.search import Asked
from steptime.search.sensitivity import sensitivity
from steptime.search.space import Axes
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config, to_job

CONFIGS = Path(__file__).parents[1] / "configs"
EXPERTS = {
    "model": "qwen3-30b-a3b",
    "parallelism": {"tp": 1, "pp": 1, "dp": 16, "ep": 16},
    "data": {"gbs": 512, "seqlen": 4096, "microbatch_sz": 1},
    "hardware": "gb200-nvl72",
}
DENSE = {
    "model": "llama3-8b",
    "parallelism": {"tp": 4, "pp": 1, "dp": 2},
    "data": {"gbs": 64, "seqlen": 8192, "microbatch_sz": 1},
    "hardware": "dgx-h100",
}


def changed(job, name):
    """What a switch sets in a job."""
    return next(switch for switch in SWITCHES if switch.name == name).change(job)


@pytest.mark.parametrize("plan", ["qwen3_30b_a3b", "nemotron3_nano_h100", "llama3_8b_fsdp", "llama3_70b"])
def test_a_saving_is_the_estimate_with_its_settings(plan):
    """The step, the memory and the verdict are those of the plan with the words that are shown."""
    job = Job.load(CONFIGS / f"{plan}.yaml")
    given = estimate(job)
    found = savings(given, given.time.parts_s, estimate, exact=False)
    assert found
    for one in found:
        sets = [word for word in split(one.set) if word != "--set"]
        again = estimate(Job.load(CONFIGS / f"{plan}.yaml", sets))
        assert (again.step_s, again.peaks.verdict, again.peaks.most_bytes) == (one.step_s, one.verdict, one.most_bytes)
        assert one.step_change == one.step_s / given.step_s - 1.0 <= -LEAST
    alone = [one for one in found if not one.name.startswith("together")]
    assert [one.step_s for one in alone] == sorted(one.step_s for one in alone)
    assert all(one.step_s < alone[0].step_s for one in found[len(alone) :])


def test_graphs_of_a_dense_step_save_half_of_its_launch_gaps():
    """One stage, nothing hidden but tensor parallelism's own overlap: the step shrinks by the launch gaps that graphs close.

    32 micro-batches of 32 layers with 0.5 ms of gaps each: 0.512 s, of which half are closed (docs/limits.md). The host's 15 ms
    of a step stay.
    """
    job = Job.load(DENSE)
    before, after = estimate(job), estimate(job.replace(**changed(job, "CUDA graphs")))
    gaps = before.time.parts_s["launch"]
    assert (gaps, after.time.parts_s["launch"]) == (pytest.approx(0.512 + 0.015), pytest.approx(0.256 + 0.015))
    assert before.step_s - after.step_s == pytest.approx(0.256)


def test_graphs_of_experts_are_those_that_megatron_captures():
    """No graph of the whole step, whose host reads how many rows each expert has; none of a router that is recomputed."""
    job = Job.load(EXPERTS)
    usual = {"performance.cuda_graphs": ["attn", "moe_router", "moe_preprocess"]}
    assert changed(job, "CUDA graphs") == usual
    moe = job.replace(**{"performance.recompute": {"granularity": "selective", "modules": ["moe"]}})
    assert changed(moe, "CUDA graphs") == {"performance.cuda_graphs": ["attn"]}
    assert changed(job.replace(**{"performance.activation_checkpointing_type": "full"}), "CUDA graphs") is None
    dropped = job.replace(**{"model.moe.capacity_factor": 1.0})
    assert changed(dropped, "CUDA graphs") == {"performance.cuda_graphs": ["attn", "moe_router"]}
    hybrid = Job.load(CONFIGS / "nemotron3_nano_h100.yaml")
    assert changed(hybrid, "CUDA graphs") == {
        "performance.cuda_graphs": ["attn", "mamba", *usual["performance.cuda_graphs"][1:]]
    }


def test_a_setting_is_tried_only_in_the_software_that_has_it():
    """Other code bases of Megatron's family have none of its later switches, and torch no userbuffers."""
    dense, experts = Job.load(DENSE), Job.load(EXPERTS)
    for name in ("aleph-alpha", "internevo", "nanotron", "megatron-2021", "deepspeed"):
        job = dense.replace(**{"performance.software": name, "parallelism.zero_level": 1})
        assert [switch.name for switch in SWITCHES if switch.change(job)] == [], name
    sharded = dense.replace(parallelism={"tp": 1, "pp": 1, "dp": 8, "fsdp": {"version": 2}})
    for name in ("xla", "paxml", "llm-foundry"):  # torchao's recipes are not theirs
        assert changed(sharded.replace(**{"performance.software": name}), "8-bit matrix multiplies") is None, name
    recipe = changed(sharded.replace(**{"performance.software": "torchtitan"}), "8-bit matrix multiplies")
    assert recipe == {"performance.precision": "fp8_tensorwise"}
    own = {switch.name for switch in SWITCHES if switch.change(dense)}
    assert own == {"CUDA graphs", "tensor-parallel overlap (userbuffers)", "8-bit matrix multiplies", "bf16 gradients"}
    assert changed(dense.replace(**{"performance.software": "nemo"}), "tensor-parallel overlap (userbuffers)") is None
    assert changed(experts, "DeepEP or HybridEP") == {
        "performance.moe.dispatcher": "flex",
        "performance.moe.flex_backend": "hybridep",
    }
    on_h100 = experts.replace(hardware="dgx-h100")
    assert changed(on_h100, "DeepEP or HybridEP") == {"performance.moe.dispatcher": "flex"}
    assert changed(experts.replace(hardware="dgx-a100-80"), "DeepEP or HybridEP") is None
    on = {"performance.moe.dispatcher": "flex", "performance.overlap.ep": True, "performance.cuda_graphs": ["attn"]}
    assert {switch.name for switch in SWITCHES if switch.exact and switch.change(experts.replace(**on))} == set()
    native = Job.load(CONFIGS / "llama3_8b_fsdp.yaml")
    assert {switch.name for switch in SWITCHES if switch.exact and switch.change(native)} == {"torch.compile"}


def test_one_pass_of_the_pipeline_is_offered_where_it_drains_for_every_micro_batch():
    """Bubble over work (pp - 1) / (v m): 4 stages, 8 passes of 1 micro-batch 3 / 1, one pass of 8 3 / 8 (docs/schedules.md).

    Of 8 micro-batches' work w each that is 8 w (1 + 3) and 8 w (1 + 3 / 8): 66 % less, apart from stages of unlike work and
    what does not depend on the schedule.
    """
    layout = {"tp": 1, "pp": 4, "dp": 2, "schedule": "1f1b", "pipeline_passes": 8, "fsdp": {}}
    job = Job(**DENSE | {"parallelism": layout, "performance": {"software": "torchtitan"}})
    job = job.replace(**{"data.gbs": 16, "performance.activation_checkpointing_type": "full"})
    found = {one.name: one for one in estimate(job).savings}
    one = found["one pass of the pipeline"]
    assert one.set == "--set parallelism.pipeline_passes=1"
    assert one.step_change == pytest.approx(11.0 / 32.0 - 1.0, abs=0.05)
    assert changed(job.replace(**{"parallelism.pipeline_passes": 1}), "one pass of the pipeline") is None


def test_settings_are_those_that_megatron_accepts_beside_each_other(monkeypatch):
    """Checks of transformer_config.py, __post_init__: overlapped experts only in interleaved pipelines, without recomputation of
    moe; overlapped shared experts only with the alltoall dispatcher (0.16.1), so not together with DeepEP.
    """
    experts = Job.load(EXPERTS)
    name = "all-to-all under another micro-batch"
    assert changed(experts, name) == {"performance.overlap.ep": True}
    piped = experts.replace(**{"parallelism.pp": 2, "parallelism.dp": 8, "parallelism.ep": 8})
    assert changed(piped, name) is None
    assert changed(piped.replace(**{"parallelism.vpp": 2}), name) is not None
    moe = {"granularity": "selective", "modules": ["moe"]}
    assert changed(experts.replace(**{"performance.recompute": moe}), name) is None

    shared = experts.replace(**{"model.moe.n_shared_experts": 1})
    name = "shared experts under the all-to-all"
    assert changed(shared, name) == {"performance.moe.shared_expert_overlap": True}
    assert changed(shared.replace(**{"performance.moe.dispatcher": "flex"}), name) is None
    overlapped = shared.replace(**{"performance.moe.shared_expert_overlap": True})
    assert changed(overlapped, "DeepEP or HybridEP") is None
    two = [switch for switch in SWITCHES if switch.name in {name, "DeepEP or HybridEP"}]
    monkeypatch.setattr(switches, "SWITCHES", two)
    monkeypatch.setattr(switches, "LEAST", 0.0)
    found = savings(estimate(shared), estimate(shared).time.parts_s, estimate)
    assert {one.name for one in found} == {switch.name for switch in two}


def test_a_job_without_enough_memory_has_no_settings_that_shorten_its_step():
    full = estimate(Job.load(EXPERTS, ["data.microbatch_sz=32"]))
    assert full.peaks.verdict == "does_not_fit"
    assert savings(full, full.time.parts_s, estimate, exact=False) == []


def test_measured_are_the_settings_that_runs_use():
    """`Switch.measured` against the runs of the split `fit`: at least `FEW` of a code base on an architecture use the setting."""
    fit = {run.id for run in measured("step").runs}
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in shipped():
        if row.id not in fit:
            continue
        job = to_job(to_config(row))
        software, spread = job.software, job.parallelism
        experts = job.model.moe is not None and spread.ep > 1
        uses = {
            "CUDA graphs": software.timing.cuda_graphs,
            "DeepEP or HybridEP": experts and software.moe.dispatcher == "flex",
            "all-to-all under another micro-batch": experts and software.overlap.ep,
            "shared experts under the all-to-all": experts and software.moe.shared_expert_overlap,
            "tensor-parallel overlap (userbuffers)": spread.tp > 1 and software.overlap.tp,
            "one pass of the pipeline": code_base(job) == "FSDP2" and spread.pp > 1 and spread.pipeline_passes == 1,
            "torch.compile": software.kernels.compile == "all",
            "8-bit matrix multiplies": software.precision in {"fp8_delayed", "mxfp8", "fp8_tensorwise", "fp8_rowwise"},
            "bf16 gradients": software.states.main_grad_dtype == "bf16" and software.family == "megatron-core",
        }
        assert set(uses) == {switch.name for switch in SWITCHES}
        counts.update((name, code_base(job), architecture(job)) for name, used in uses.items() if used)
    for switch in SWITCHES:
        for base in ("Megatron-Core", "FSDP2", "torch"):
            enough = {
                where for (name, of, where), n in counts.items() if (name, of) == (switch.name, base) and n >= FEW
            }
            assert switch.measured.get(base, frozenset()) == enough & {"Hopper", "Blackwell"}, (switch.name, base)


def test_what_no_measured_run_has_is_called_not_verified():
    """Graphs of Megatron-Core are measured on Blackwell, overlapped shared experts nowhere."""
    on_hopper = estimate(Job.load(CONFIGS / "qwen3_30b_a3b.yaml")).savings
    graphs = next(one for one in on_hopper if one.name == "CUDA graphs")
    assert graphs.note == "not verified: no measured runs of Megatron-Core on Hopper"
    on_blackwell = estimate(Job.load(CONFIGS / "qwen3_235b_gb200.yaml")).savings
    assert {one.note for one in on_blackwell} == {""}
    dense = estimate(Job.load(CONFIGS / "llama3_70b.yaml"))
    lower = [one for one in savings(dense, dense.time.parts_s, estimate, exact=False) if one.note]
    assert [one.note for one in lower] == ["changes the precision of training"]


def test_the_report_names_the_settings_of_a_job_that_fits():
    job = Job.load(CONFIGS / "qwen3_30b_a3b.yaml")
    text = report(estimate(job))
    line = "  --set performance.cuda_graphs='[attn, moe_router, moe_preprocess]'"
    assert f"{switch_tables.TITLE}\n{line}\n      CUDA graphs: " in text
    assert max(map(len, text.splitlines())) <= 80
    full = job.replace(**{"data.microbatch_sz": 64})
    assert estimate(full).peaks.verdict == "does_not_fit"
    assert switch_tables.of_report(estimate(full)) is None


def test_settings_on_several_lines_are_one_command_of_a_shell():
    """Three settings of 87 characters: pasted with their line breaks, a shell hands over the same words."""
    settings = "--set a.overlap.ep=true --set a.dispatcher=flex --set a.cuda_graphs='[attn, moe_router, x]'"
    lines = typed(settings)
    assert [line.endswith(" \\") for line in lines] == [True, True, False]
    assert split("\n".join(lines).replace("\\\n", "")) == split(
        settings
    )  # a shell drops a backslash with its line break


def test_the_json_of_an_estimate_has_them():
    """Under `settings`, as the report's table; none for a job that does not fit."""
    found = estimate(EXPERTS)
    assert found.savings
    assert found.to_dict()["settings"] == [one._asdict() for one in found.savings]
    assert (
        estimate(Job.load(EXPERTS, ["data.microbatch_sz=32", "performance.recompute=null"])).to_dict()["settings"] == []
    )


def test_sensitivity_and_search_name_them(tmp_path, capsys):
    """In sensitivity also those that change the precision; in a search those of its best layout that are no axes of it."""
    plan = Job.load(EXPERTS)
    found = sensitivity(plan, best=False)
    assert found.savings == savings(found.given, found.given.time.parts_s, estimate, exact=False)
    few = {"tp": (1,), "pp": (1,), "cp": (1,), "microbatch_sz": (1,), "zero_level": (1,), "sp": (False,)}
    few["performance.activation_checkpointing_type"] = ("none",)
    from steptime.report import search_tables

    searched = run(plan, Asked((16,), (512,), Axes(few)))
    names = [one["name"] for one in search_tables.document(searched)["settings"]]
    assert names == [one.name for one in searched.best.estimate.savings]
    assert "CUDA graphs" in names
    over = {"performance.cuda_graphs": [False, ["attn"]], "performance.moe": [{"dispatcher": "flex"}]}
    chosen = run(plan, Asked((16,), (512,), Axes(few), over))
    assert not {"CUDA graphs", "DeepEP or HybridEP"} & {
        one["name"] for one in search_tables.document(chosen)["settings"]
    }
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(EXPERTS), encoding="utf-8")
    fixed = [word for key in ("tp=1", "pp=1", "cp=1", "sp=false", "microbatch_sz=1") for word in ("--fix", key)]
    over_line = "performance.cuda_graphs=false,[attn, moe_router, moe_preprocess]"
    assert main(["search", str(path), *fixed, "--over", over_line]) == 0
    assert "performance.cuda_graphs='[attn, moe_router, moe_preprocess]'" in capsys.readouterr().out


def test_named_profiles_exist():
    from steptime.software.profiles import profile_names

    assert {*MEGATRON, *switches.NATIVE, *switches.TORCHAO} <= set(profile_names())


def test_float8_that_is_slower_in_eager_modules_is_offered_with_torch_compile():
    """torchao's casts are kernels of their own until torch.compile fuses them: float8 alone is slower than bf16, with compile it
    saves more than compile alone. Only where a change of the precision is asked for, and not if compile is on already."""
    layout = {"parallelism": {"tp": 1, "pp": 1, "dp": 8}, "performance": {"software": "torchtitan"}}
    plan = Job(**DENSE | layout)
    given, both = estimate(plan), {"performance.compile": "all", "performance.precision": "fp8_tensorwise"}
    alone = estimate(plan.replace(**{"performance.precision": "fp8_tensorwise"})).step_s / given.step_s - 1.0
    assert alone > 0.0
    found = savings(given, given.time.parts_s, estimate, exact=False)
    assert [one.name for one in found] == ["torch.compile", "together: torch.compile, 8-bit matrix multiplies"]
    assert split(found[1].set) == ["--set", "performance.compile=all", "--set", "performance.precision=fp8_tensorwise"]
    assert found[1].step_s == estimate(plan.replace(**both)).step_s < found[0].step_s * (1.0 - LEAST)
    told = f"8-bit matrix multiplies, which change the precision of training: by themselves {100.0 * alone:+.1f} %"
    assert found[1].note == told
    assert [one.name for one in given.savings] == ["torch.compile"]
    compiled = estimate(plan.replace(**{"performance.compile": "all"}))
    alone_now = savings(compiled, compiled.time.parts_s, estimate, exact=False)
    assert [(one.name, one.note) for one in alone_now] == [
        ("8-bit matrix multiplies", "changes the precision of training")
    ]
