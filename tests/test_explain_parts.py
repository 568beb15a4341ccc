"""`3dtrn explain` of parts of a step and of a stage's memory: numbers from their formula by hand, sums as the step has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steptime.answer.result import estimate
from steptime.commands.cli import main
from steptime.job.job import Job
from steptime.memory.kept_ops import kept_of_chunk
from steptime.memory.part_memories import PartMemories
from steptime.report.breakdown import part_name
from steptime.report.estimate_text import sections
from steptime.report.explain import explain, names
from steptime.report.explain_parts import PARTS
from steptime.report.kernel_table import op_times
from steptime.report.table import WIDTH, FactList, Style, layout

PLAN = Path(__file__).parents[1] / "configs" / "llama3_70b.yaml"


@pytest.fixture(scope="module")
def found():
    return estimate(Job.load(PLAN))


def words(found, name):
    (section,) = explain(found, name)
    return section.title, {fact.label: " ".join(fact.lines) for fact in section.facts}


def exposed_in(text):
    """Exposed seconds of a line; 0 where it has none."""
    exposed = re.search(r"([\d.]+) (s|ms|us) exposed", text)
    return float(exposed[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[exposed[2]] if exposed else 0.0


def test_every_part_and_stage_has_a_name(found):
    listed = set(names(found))
    assert {"stage 0", "stage 3", "launch", "tp_comm"} <= listed
    assert not {"cp_comm", "ep_comm"} & listed  # the job has neither
    assert {part for part in PARTS if found.time.parts_s.get(part)} <= listed


REPORTS = ("llama3_70b_run", "gpt3_175b_a100", "deepseek_v3", "gpt_oss_120b", "llama2_7b_hsdp", "llama3_70b_cross_dc")


@pytest.mark.parametrize("plan", REPORTS)
def test_every_term_that_a_report_prints_has_a_page(plan):
    """The first cell of every row and the label of every fact, without its unit: dense, experts, FSDP, pipelines, a whole run."""
    answer = estimate(Job.load(PLAN.with_name(f"{plan}.yaml")))
    terms = set()
    for section in sections(answer):
        if isinstance(section, FactList):
            terms |= {fact.label.strip() for fact in section.facts}
        elif not section.title.startswith(("to make it fit", "settings that shorten")):  # whose rows are commands
            terms |= {re.sub(r" \(\w+\): .*| \(p90\)$", "", row[0]).strip() for row in section.rows if row}
    assert len(terms) > 30
    assert [term for term in sorted(terms - {""}) if not explain(answer, term)] == []


def test_data_parallel_communication_lists_that_of_experts_too():
    """Gradients of experts have their own ranks (axis edp); the exposed seconds of all rows are the part's."""
    answer = estimate(Job.load(PLAN.with_name("gpt_oss_120b.yaml")))
    rows = [row for row in answer.collectives if row.axis in {"dp", "edp"}]
    assert {row.axis for row in rows} == {"dp", "edp"}
    _, facts = words(answer, "dp_comm")
    (section,) = explain(answer, "dp_comm")
    assert len(section.facts) == len(rows) + 1
    assert sum(row.exposed_s for row in rows) == pytest.approx(answer.time.parts_s["dp_comm"], rel=1e-6)
    assert explain(answer, "edp") == [section]
    assert "each" in facts


def test_the_page_of_a_pipeline_has_what_the_report_tells_of_it():
    answer = estimate(Job.load(PLAN.with_name("deepseek_v3.yaml")))
    _, facts = words(answer, "layers")
    assert facts["layers"] == "3 4 4 4 4 4 4 4 4 4 4 4 4 4 3 3, first stage to last"
    assert facts["schedule"] == "1f1b, 16 stages, 120 micro-batches"


def test_a_whole_run_by_hand():
    """15e12 tokens of 2,048 x 8,192 are 894,070 steps; 50,700 device-hours on 1,024 devices are 49.5 hours, 2.063 days."""
    answer = estimate(Job.load(PLAN.with_name("llama3_70b_run.yaml")))
    _, facts = words(answer, "run")
    assert facts["steps"] == "tokens / (gbs 2,048 x seqlen 8,192), rounded up"
    assert facts["failures"] == "run.mtbf_device_hours 50700 / 1,024 devices"
    assert "2.063 days between failures" in facts["best interval"]
    assert words(answer, "goodput")[1] == facts


def test_weak_scaling_of_a_plan_that_fits_at_no_degree_states_no_base():
    """The report has no efficiencies there, and no step is the least that fits."""
    job = Job.load(PLAN.with_name("llama3_8b.yaml"), ["model=llama3-70b", "parallelism.tp=1"])
    _, facts = words(estimate(job), "scaling")
    assert facts["efficiency"] == "not stated, since no degree fits"


def test_launch_gaps_by_hand(found):
    """20 layers on each of 4 stages, 64 micro-batches, 0.5 ms: 0.64 s, and 15 ms of the host for the step."""
    title, facts = words(found, "launch")
    assert facts["gaps"] == "layer_gap_s 500.0 us x 20 layers x 64 micro-batches = 640.0 ms"
    assert facts["host, step"].startswith("step_host_s 15.00 ms")
    assert title.startswith("launch gaps: 655.0 ms")
    assert words(found, "launch gaps") == (title, facts)


def test_attention_of_each_kind_of_layer_by_hand():
    """gpt-oss alternates windows of 128 with full attention, heads of 64.

    549 TFLOP/s is 0.555 of 989; of 128 keys a query 128 / (128 + 450) * 4,546 / 4,096 = 0.2458; 0.725 is for heads of 64.
    """
    facts = words(estimate(Job.load(PLAN.with_name("gpt_oss_120b.yaml"))), "attention")[1]
    for name, share in (("moe1.attn.core", 0.2458), ("moe2.attn.core", 1.0)):
        text = facts[name]
        forward_us, gflop, tflops, launch_us = (
            float(re.search(pattern, text)[1])
            for pattern in (
                r"\(([\d.]+) us forward",
                r"forward: ([\d.]+) GFLOP",
                r"at ([\d.]+) TFLOP/s",
                r"each \+ ([\d.]+) us",
            )
        )
        assert f"both rates x {share:g} for the keys seen" in text
        assert "forward x 0.725, backward x 0.836" in text
        assert forward_us == pytest.approx(gflop * 1e3 / (tflops * share * 0.725) + launch_us, rel=5e-3)


def small(**performance):
    """One layer of 16 heads of 128 on 8 H100 under FSDP2."""
    return estimate(
        Job(
            model={"n_layers": 1, "hidden_sz": 2048, "inter_sz": 4096, "n_q_heads": 16, "vocab_sz": 8192},
            parallelism={"tp": 1, "pp": 1, "dp": 8},
            performance={"software": "fsdp2", **performance},
            data={"gbs": 8, "seqlen": 1024, "microbatch_sz": 1},
            hardware="dgx-h100",
        )
    )


def test_attention_with_scores_in_memory_by_hand():
    """16 heads of 1,024^2 scores, 84 bytes each forward and 106 backward: 1.3125 and 1.656 GiB. No figure of a flash kernel."""
    facts = words(small(attention_kernel="flex_eager"), "attention")[1]
    assert "(1 of all scores)" in facts["attn.core"]
    assert "around it forward moves 1.31 GiB, backward 1.66 GiB of scores, kernel by kernel" in facts["attn.core"]
    assert "keys seen" not in facts["attn.core"]
    assert set(facts) == {"attn.core", "rates"}


@pytest.mark.parametrize(
    ("kernel", "key", "factor"), [("fa2", "fa2", ""), ("flex", "fa2", " x 0.9 for flex"), ("best", "attention", "")]
)
def test_the_figure_of_each_attention_kernel_is_listed(kernel, key, factor):
    found = small(attention_kernel=kernel)
    value = getattr(found.job.machine.accelerator, f"{key}_forward_efficiency")
    facts = words(found, "attention")[1]
    assert facts[f"{key}_forward_efficiency"].startswith(f"{value:g} of the dense peak{factor}: ")


def test_muon_under_fsdp2_names_its_collectives():
    facts = words(small(optimizer="muon"), "optimizer")[1]
    assert "the collectives of its shards" in facts["orthogonalize"]
    assert {"Muon norms", "Muon momenta", "Muon products"} <= facts.keys()


def test_stragglers_by_hand(found):
    """min(32 replicas, 128 nodes) = 32, a tree of depth 5."""
    facts = words(found, "stragglers")[1]
    assert facts["replicas"] == "min(dp x cp, nodes) = min(32, 128) = 32"
    assert " x 5 x " in facts["numbers"]
    assert facts["STRAGGLER"].startswith("0.0036: ")
    assert "dgxc-benchmarking" in facts["STRAGGLER"]


def test_optimizer_by_hand(found):
    """Adam: gradient 4, master 2 x 4, moments 2 x 8, parameter 2; clipping reads the gradient twice and writes it: 12."""
    facts = words(found, "optimizer")[1]
    assert facts["bytes"].startswith("adamw 30 + clipping 12 bytes")
    zeroed, update = 2.27e9 * 4 / 2.97e12, 7.10e7 * 42 / 2.97e12
    assert facts["rest"].endswith(": 3.058 ms = 8.46 GiB at that rate")
    assert zeroed + update == pytest.approx(found.time.parts_s["optimizer"], rel=2e-3)


def test_muon_explains_its_iterations(found):
    """The optimizer takes its update, the iterations, and what zeroing gradients adds."""
    muon = estimate(found.job.replace(**{"performance.optimizer": "dist_muon"}))
    facts = words(muon, "optimizer")[1]
    iterated = float(facts["orthogonalize"].split("matrix: ")[1].split(" ms")[0]) / 1e3
    updated = float(facts["update"].split("= ")[1].split(" ms")[0]) / 1e3
    assert 0 < muon.timing.optimizer_s - iterated - updated < 0.01 * found.step_s


def test_the_kernels_listed_sum_to_their_part(found):
    for name in ("gemm", "attention", "memory_bound"):
        total = sum(row.step_s for row in op_times(found) if row.part == name)
        assert total == pytest.approx(found.time.parts_s[name])
        assert f"{100 * total / found.step_s:.1f} %" in words(found, name)[0]


def test_a_stage_has_its_states_by_the_byte(found):
    """2.27e9 parameters at 2 bytes are 4.23 GiB, at 4 twice that, and 12 bytes over 32 ranks 0.79 GiB."""
    facts = words(found, "stage 0")[1]
    for label, size in (("parameters", 4.231), ("gradients", 8.462), ("optimizer", 0.793)):
        assert facts[label].startswith(f"{size} GiB")


def test_sharded_parameters_say_what_is_more_or_less_than_their_elements():
    """8.03e9 parameters on 32 ranks: 0.467 GiB at 2 bytes, and 1.870 over 8; 6.98e9 in projections at 1 byte are 0.203 less.

    Unsharded, 14.958 GiB at 2 bytes, of which one layout in fp8 saves 6.500 (B200; products of H100 take two).
    """
    job = Job(
        model="llama3-8b",
        parallelism={"tp": 1, "pp": 1, "dp": 32, "zero_plus_plus": {"hpz_partition_size": 8}},
        performance={"software": "deepspeed"},
        data={"gbs": 32, "seqlen": 2048, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    low = {"software": "megatron-core", "precision": "fp8_current", "fp8_params": True}
    stored = job.replace(**{"parallelism.zero_plus_plus": None, "parallelism.zero_level": 3, "performance": low})
    whole = stored.replace(**{"parallelism.zero_level": 1, "hardware": "dgx-b200"})
    for plan, size, told in (
        (job, 2.337, "+1.870 GiB of a second partition, 2 B each over 8 ranks (hpz_partition_size)"),
        (stored, 0.264, "-0.203 GiB as fp8_current stores projections"),
        (whole, 8.458, "-6.500 GiB as fp8_current stores projections"),
    ):
        text = words(estimate(plan), "memory")[1]["parameters"]
        assert text.startswith(f"{size} GiB   2 B each, sharded at zero_level 3; {told}")


def test_a_stage_has_its_activations_and_what_the_allocator_adds(found):
    """Stage 1: 4.2 micro-batches of 5.239 GiB are 22.006; 13.167 + 22.201 x 1.2 = 39.808."""
    facts = words(found, "stage 1")[1]
    assert facts["activations"].startswith("22.006 GiB   saved for backward, 4.2 micro-batches")
    assert "keeps 5.239 GiB, 20 layers in 5 chunks" in facts["micro-batch"]
    assert facts["reserved"].startswith("39.808 GiB   13.167 states and buffers + 22.201 activations")
    assert f"= {39.808 / (13.167 + 22.201):.3f} x allocated (1.03 to 1.09 x in ten dense runs" in facts["reserved"]


def test_buffers_stand_apart_from_what_a_micro_batch_keeps(found):
    """Stage 0: cuBLAS 0.062 and 0.031, Megatron's buffer 0.125, gradients that stand in 0.199, sends 0.047, the mask 0.062."""
    (section,) = explain(found, "stage 0")
    labels = [fact.label for fact in section.facts]
    at = labels.index("buffers")
    assert section.facts[at].lines == ["hold 0.527 GiB at the peak"]
    sizes = [float(fact.lines[0].split()[0]) for fact in section.facts[at + 1 : labels.index("transient")]]
    assert sizes == [0.062, 0.031, 0.125, 0.199, 0.047, 0.062]


def test_what_a_micro_batch_keeps_by_hand(found):
    """Stage 1, 20 layers of h 8192, tp 8, 8,192 tokens, sequence parallel: shards of 1,024 rows or columns. In MiB of bf16:
    two norms keep their input (16 each) and 4 bytes a row; qkv and gate_up their inputs (16 each, gathered again), down
    8192 x 3584 (56); attention q and its output 16 each, k and v 2 each, 4 bytes a row for 8 heads (0.25); gate and up 112."""
    (section,) = explain(found, "stage 1")
    lines = [fact.lines[0] for fact in section.facts]
    mib = {
        "norms": 2 * (16 + 1024 * 4 / 2**20),
        "projections": 2 * 16 + 56,
        "core attention": 16 + 16 + 2 + 2 + 0.25,
        "activation functions": 112,
    }
    for label, size in mib.items():
        assert f"{20 * size / 1024:.3f} GiB   of which {label}" in lines
    assert 20 * sum(mib.values()) / 1024 == pytest.approx(5.239, abs=1e-3)


@pytest.mark.parametrize("plan", sorted(PLAN.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_size_of_the_memory_page_names_its_source(plan):
    """Files, settings of the profile or measured figures stand under each; what is kept sums to what the walk finds."""
    found = estimate(Job.load(plan))
    (section,) = explain(found, "memory")
    sized = [fact for fact in section.facts if " GiB" in fact.lines[0] and fact.label not in COUNTED]
    assert sized
    assert max(map(len, layout(section, Style()))) <= WIDTH
    assert [fact.label for fact in sized if not re.search(r"\(.*\w.*\)$", fact.lines[-1])] == []
    walked = PartMemories(found.assembly)
    for chunks in found.assembly.stages:
        for chunk in chunks:
            kept = sum(tensor.bytes for tensor in kept_of_chunk(walked, chunk))
            assert kept == pytest.approx(walked.chunk(chunk).saved)


COUNTED = {"micro-batch", "buffers", "between steps", "first step", "held"}
"""Sums of other lines."""


def test_data_parallel_communication_lists_that_of_experts():
    """Mixtral: gradients and parameters of experts, over the ranks that hold the same ones, take most of the part."""
    mixtral = estimate(Job.load(PLAN.with_name("mixtral_8x7b.yaml")))
    title, facts = words(mixtral, "dp_comm")
    assert {"gradients", "parameters", "expert gradients", "expert parameters"} <= facts.keys()
    lines = [line for fact in explain(mixtral, "dp_comm")[0].facts for line in fact.lines]
    assert sum(map(exposed_in, lines)) == pytest.approx(mixtral.time.parts_s["dp_comm"], rel=1e-3)
    assert title.startswith("data-parallel communication: 22.40 ms")


def test_communication_lists_what_the_step_waits_for(found):
    """Sends and gradients of the busiest stage sum to their parts; tensor-parallel ones have those of the head beside."""
    for part in ("dp_comm", "pp_comm"):
        title, facts = words(found, part)
        rows = [row for row in found.collectives if row.axis == part[:2]]
        assert sum(row.exposed_s for row in rows) == pytest.approx(found.time.parts_s[part])
        assert {row.name for row in rows} <= facts.keys()
        assert title.endswith("of the step")


@pytest.mark.parametrize("plan", ["llama3_70b", "gpt3_175b_a100", "gpt3_175b_h100", "mixtral_8x7b"])
def test_collectives_of_another_stage_are_not_in_the_sum(plan):
    """The busiest stage has the head: the embedding's all-reduces are listed, marked; the other lines sum to the part."""
    found = estimate(Job.load(PLAN.with_name(f"{plan}.yaml")))
    for part in ("tp_comm", "ep_comm"):
        own = 0.0
        for name, text in words(found, part)[1].items():
            apart = text.endswith("; of another stage, not in the sum")
            assert apart == name.startswith("embedding.reduce")
            own += 0.0 if apart else exposed_in(text)
        assert own == pytest.approx(found.time.parts_s.get(part, 0.0), rel=1e-3)


def test_latent_attention_says_where_its_backward_comes_from():
    """Two products of width 192 and 128 forward, three and two backward: (3 x 192 + 2 x 128) / 320 = 2.6."""
    facts = words(estimate(Job.load(PLAN.with_name("deepseek_v3.yaml"))), "attention")[1]
    assert "backward 2.6 times that (5 products to 2, " in facts["moe2.attn.core"]
    assert "[3 x 192 + 2 x 128] / [192 + 128] for q, k of width 192 and v of 128" in facts["moe2.attn.core"]


def test_an_exchange_of_experts_by_hand():
    """DeepSeek-V3, ep 64 on nodes of 8 (DeepEP): 4,096 tokens x 7,168 x 2 bytes = 56 MiB of own tokens.

    A token's 8 experts are of 4 of the 8 groups, 128 experts on 32 ranks of 4: one of each group, on 1 of its 8 ranks, and 4 of
    the other 124. A rank is missed with 7/8 x (120 x 119 x 118 x 117) / (124 x 123 x 122 x 121) = 0.76619: 32 x 0.23381 = 7.482.
    InfiniBand carries copies for 4 of 8 nodes but for the own one: 4 x 7/8 / 7.482 = 0.4678 of 419 MiB = 205.5 MB; 4.42 ms at
    46.5 GB/s.
    """
    (section, *_) = explain(estimate(Job.load(PLAN.parent / "deepseek_v3.yaml")), "moe.dispatch")
    facts = {fact.label: " ".join(fact.lines) for fact in section.facts}
    assert facts["rows"] == (
        "56.0 MiB of own tokens x 7.482 ranks that have any of a token's experts "
        "7.482 = 64 x 4/8 groups chosen x (1 - (1 - 8/64) x C(128 - 4 - 4, 4) / C(128 - 4, 4)) "
        "wire: over infiniband one copy for each of 4 of 8 domains with experts of a token, less 1/8 for its own: "
        "tensor x 0.4678 / (50.0 GB/s x 0.93 reached)"
    )
    assert (facts["latency"], facts["wire"]) == ("EXCHANGE_S 77.00 us", "4.420 ms")
    assert "rows" not in {fact.label for fact in explain(estimate(Job.load(PLAN)), "attn.gather")[0].facts}


def test_every_part_of_the_step_is_explained_by_the_name_of_the_report(found):
    for name, value in found.time.parts_s.items():
        if value and name != "embedding_comm":
            assert explain(found, part_name(name))[0].facts


def test_fsdp_zeroes_no_gradients_and_counts_one_microbatch():
    """FSDP2's gradients are freed after a step, so its optimizer has no rest; 1 micro-batch is no plural."""
    sharded = estimate(Job.load(PLAN.parent / "llama3_8b_fsdp.yaml"))
    assert "rest" not in {fact.label for fact in explain(sharded, "optimizer")[0].facts}
    held = {fact.label: " ".join(fact.lines) for fact in explain(sharded, "memory")[0].facts}
    assert "saved for backward, 1 micro-batch in flight at most" in held["activations"]
    assert held["communicators"].startswith("0.250 GiB   1 process group ")


def test_a_name_may_follow_an_option(capsys):
    """`3dtrn explain PLAN --set A.B=C NAME` as `3dtrn explain PLAN NAME --set A.B=C`."""
    plan, change = str(PLAN), ["--set", "data.gbs=1024"]
    shown = []
    for args in (["explain", plan, *change, "tokens"], ["explain", plan, "tokens", *change]):
        assert main(args) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "1,024 x 8,192" in shown[0]


def test_model_flops_of_adapters_multiply_frozen_weights_twice_and_once_back():
    """Llama 3 70B with adapters of rank 16 on its four fused projections, 80 layers, 32 x 4,096 tokens.

    Adapters: 16 (in + out) = 16 (8192 + 10240 + 2 x 8192 + 8192 + 57344 + 28672 + 8192) x 80 = 175.64 M weights, 6 FLOPs each;
    69.502 B frozen ones have no wgrad: 4 each. 131,072 x (1.054 + 278.01 + 16.11 GFLOP) = 38.69 PFLOP.
    """
    job = Job(
        model={"preset": "llama3-70b", "lora": {"rank": 16}},
        parallelism={"tp": 8, "pp": 1, "dp": 1},
        performance={"software": "megatron-bridge"},
        data={"gbs": 32, "seqlen": 4096, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    text = words(estimate(job), "mfu")[1]["model"]
    assert "projections and head 6 x 175.64 M weights + frozen ones 4 x 69.502 B weights + attention 3 x" in text
    assert text.endswith(" = 38.69 PFLOP")
