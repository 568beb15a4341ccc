"""Measured rows become plans field by field; what cannot be judged says why."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from own_rows import BASE, SHIPPED, own

from steptime.answer.result import estimate
from steptime.commands import cli
from steptime.job.job import Job
from steptime.validation import judgement, row_machine, row_plan, row_software
from steptime.validation.measurements import MeasuredRow, SkipRowError

ROOT = Path(__file__).parents[1]


def at(config, path):
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


# --- a row becomes a plan --------------------------------------------------------------------------------------------------

LLM_FOUNDRY = {"reshard_after_forward": True, "reduce_dtype": "fp32"}
MAPPED = {
    "KOR22-004": {
        "performance.software": "megatron-2021",
        "performance.precision": "fp16",
        "performance.recompute": {"granularity": "selective", "modules": ["core_attn"]},
        "performance.overlap": {"tp": False},
        "parallelism": {"tp": 8, "pp": 8, "dp": 1, "vpp": 3, "sp": True, "zero_level": 0},
        "data": {"gbs": 64, "seqlen": 2048, "microbatch_sz": 1},
        "hardware": {"node_type": "selene"},
        "model.learned_positions": True,
        "model.dropout": 0.1,
        "model.tie_embeddings": True,
    },
    "simumax-001": {
        "performance.software": "megatron-core",
        "performance.main_grad_dtype": "fp32",
        "performance.loss_impl": "fused",
        "performance.overlap": {"tp": False, "dp": False},
        "parallelism.zero_level": 1,
        "hardware": {"node_type": "dgx-b200"},
        "model.n_layers": 12,
        "model.glu": True,
        "model.norm": "rmsnorm",
        "model.n_kv_heads": 8,
    },
    "hagemann-003": {
        "performance.attention_impl": "flash",
        "performance.attention_kernel": "fa2",
        "performance.activation_checkpointing_type": "none",
        "parallelism.dp": 16,
        "hardware.overrides": {"tiers.1.bytes_per_s": "12.5 GB/s"},
        "model.vocab_sz": 128000,
    },
    "mosaic-001": {
        "performance.software": "llm-foundry",
        "performance.activation_checkpointing_type": "full",
        "performance.overlap": None,
        "parallelism": {"tp": 1, "pp": 1, "dp": 512, "sp": False, "fsdp": LLM_FOUNDRY},
        "hardware": {"node_type": "dgx-h100"},
        "model.bias": True,
        "model.dropout": None,
    },
    "deepspeed-log-n001": {"performance.attention_impl": "flash", "performance.compile": None},
    "deepspeed-log-n008": {"performance.compile": "all", "performance.overlap": {"dp": False}},
    "hf-blog-n001": {"parallelism.fsdp": {"reshard_after_forward": True, "version": 1}},
    "trl-longctx-n004": {"performance.cpu_offload": {"params": True}, "performance.activation_offload": 1.0},
    "trl-longctx-n006": {"performance.cpu_offload": None},
    "qwen-readme-n002": {"performance.norm_impl": "fused", "performance.rope_impl": "composite"},
    "bs-v100-075": {
        "performance.software": "deepspeed",
        "performance.attention_impl": "unfused",
        "parallelism.zero_level": 3,
        "hardware.overrides": {"devices_per_node": 4, "tiers.0.size": 4, "tiers.1.bytes_per_s": "12.5 GB/s"},
    },
    "bs-a100-001": {
        "performance.software": "bloom",
        "performance.overlap": {"dp": False},
        "hardware.overrides": {"tiers.1.bytes_per_s": "6.25 GB/s"},
        "model.vocab_sz": 250880,
    },
    "internevo-001": {
        "performance.software": "internevo",
        "parallelism.zero_level": 1,
        "parallelism.replicas": None,
    },
    "vtrain-multi-001": {
        "performance.software": "megatron-2021",
        "performance.overlap": {"dp": False},
        "parallelism.zero_level": None,
        "hardware.node_type": "dgx-a100-80",
    },
    "NLAUNCH-A100-001": {
        "performance.software": "nemo-2022",
        "performance.recompute": {"granularity": "full", "method": "block", "n_layers": 4},
        "model.n_layers": 24,
    },
    "nanotron-020": {
        "performance.software": "nanotron",
        "parallelism.layers_per_stage": [21, 20, 20, 19],
        "parallelism.zero_level": 0,
    },
    "NAR21-017": {
        "performance.software": "deepspeed-2021",
        "performance.attention_impl": "unfused",
        "parallelism.dp": 1536,
        "hardware.node_type": "selene",
    },
}


@pytest.mark.parametrize("name", MAPPED)
def test_published_rows_become_these_plans(name):
    config = row_plan.to_config(SHIPPED[name]).config
    assert {path: at(config, path) for path in MAPPED[name]} == MAPPED[name]


def test_a_nemotron_row_has_its_family_and_overlap():
    row = next(r for r in SHIPPED.values() if r.text("model_name") == "Nemotron4-15B" and r.text("precision") == "bf16")
    config = row_plan.to_config(row).config
    assert {"activation": "relu2", "norm": "layernorm", "bias": False}.items() <= config["model"].items()
    assert config["performance"]["main_grad_dtype"] == "bf16"
    assert config["performance"]["overlap"] == {"dp": True} | ({"tp": True} if config["parallelism"]["tp"] > 1 else {})


@pytest.mark.parametrize("number", range(1, 9))
def test_korthikantis_rows_are_the_shipped_plans(number):
    """The same step time as configs/published, which were written by hand."""
    row = SHIPPED[f"KOR22-{number:03}"]
    plan = Job.load(next((ROOT / "configs" / "published").glob(f"kor22_{number:03}_*.yaml")))
    found = estimate(row_plan.to_job(row_plan.to_config(row)))
    assert found.step_s == pytest.approx(estimate(plan).step_s, rel=1e-12)
    assert found.memory.peak_allocated_bytes == pytest.approx(estimate(plan).memory.peak_allocated_bytes, rel=1e-12)


def test_replicas_where_states_are_sharded_over_fewer_ranks():
    found = row_plan.to_config(own(zero_or_fsdp="zero1 over 4 ranks (one node)")).config
    assert (found["parallelism"]["dp"], found["parallelism"]["replicas"]) == (8, 2)
    hybrid = row_plan.to_config(own(framework="torchtitan", zero_or_fsdp="hsdp 2x4 (reshard never)")).config
    assert hybrid["parallelism"]["replicas"] == 2  # copies x shards


def test_layers_that_do_not_divide():
    """126 layers and both ends fill 8 x 8 = 64 chunks twice over; 30 layers on 4 stages are spread."""
    even = row_plan.to_config(own(n_layers=126, n_gpus=64, tp=1, pp=8, vpp=8))
    assert even.config["parallelism"]["embedding_and_loss_count_as_layers"] is True
    assert "embedding and loss counted as layers, which makes the stages even" in even.assumed
    assert row_plan.to_config(own(n_layers=30, pp=4)).config["parallelism"]["layers_per_stage"] == "auto"


def test_multi_token_prediction_where_flops_per_token_count_it():
    """DeepSeek-V3, forward and backward. Products per token: attention 11.0 + 37.7 + 4.1 + 16.8 + 117.4 = 187.1 M, a dense MLP
    396.4 M, an MoE layer's router, 8 experts and shared one 398.2 M, head 926.7 M: 6 * (61 * 187.1 + 3 * 396.4 + 58 * 398.2 +
    926.7) M = 219.7 G. Scores and context, 3 * 2 * 61 * 128 * (192 + 128) * 4,096 / 2 = 30.7 G. Together 250.4 G; the source
    counts 260 G, a layer, a head and a projection of 2 h x h more: 6 * (187.1 + 398.2 + 926.7 + 102.8) M + 0.5 G = 10.2 G.
    """
    row = SHIPPED["MBRIDGE-136"]
    seconds_of_all = float(row.text("step_time_s")) * int(row.text("n_gpus"))
    per_token = float(row.text("tflops_per_gpu_reported")) * 1e12 * seconds_of_all / (4096 * 4096)
    assert per_token == pytest.approx(250.4e9 + 10.2e9, rel=0.01)
    found = row_plan.to_config(row)
    assert found.config["model"]["mtp"] == 1
    assert found.config["parallelism"]["layers_per_stage"] == [4] * 15 + [1]
    assert {"mtp: 1, as its FLOPs per token count", "layers_per_stage: as in the recipe"} <= set(found.assumed)
    assert "mtp" not in row_plan.to_config(SHIPPED["MBRIDGE-247"]).config["model"]  # 249 G per token


def test_latent_attention_on_blackwell_before_its_kernels():
    """NeMo 25.04 on GB200 ran it unfused; on H100, and Llama on GB200, it did not, nor Megatron-Bridge later."""
    unfused = {
        name: row_plan.to_config(SHIPPED[name]).config["performance"].get("attention_impl") == "unfused"
        for name in ("DGXC-280", "DGXC-279", "DGXC-285", "MBRIDGE-247")
    }
    assert unfused == {"DGXC-280": True, "DGXC-279": False, "DGXC-285": False, "MBRIDGE-247": False}


def test_a_plan_runs_as_printed():
    """The config of a row, overrides and all, goes through `Job.load` to the same answer."""
    mapped = row_plan.to_config(SHIPPED["hagemann-003"])
    loaded = Job.load(json.dumps(mapped.config))
    assert estimate(loaded).step_s == estimate(row_plan.to_job(mapped)).step_s


def test_empty_cells_take_usual_values_and_are_listed():
    mapped = row_plan.to_config(own())
    assert mapped.config["model"]["n_kv_heads"] == 32
    for word in (
        "vpp: 1",
        "cp: 1",
        "recompute: none",
        "vocab: 32000",
        "head_dim: 128",
        "n_kv_heads: 32",
        "precision: bf16",
    ):
        assert word in mapped.assumed
    said = own(vpp=1, cp=1, recompute="none", vocab=32000, head_dim=128, n_kv_heads=32, precision="bf16", glu=1, sp=1,
               tied_embeddings=0, zero_or_fsdp="zero1", framework="megatron-core")  # fmt: skip
    assert row_plan.to_config(said).assumed == []


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        ("Megatron-Bridge NeMo 25.11", "megatron-bridge"),
        ("NeMo 24.12", "nemo"),
        ("NeMo Megatron", "nemo-2022"),
        ("MaxText (JAX/XLA SPMD)", "xla"),
        ("NeMo AutoModel (FSDP2)", "automodel"),
        ("Megatron-DeepSpeed (BLOOM production)", "bloom"),
        ("Megatron-LM + DeepSpeed 3D (Megatron-DeepSpeed), Jun-Jul 2021", "megatron-deepspeed-2021"),
        ("DeepSpeedExamples Megatron-LM v1.1.5-ZeRO3", "deepspeed-2021"),
        ("Megatron-LM (May-Jul 2021)", "megatron-deepspeed"),
        ("torchtitan+torchao", "torchtitan"),
        ("accelerate 1.13 FSDP2", "accelerate"),
        ("torchtune", "fsdp2"),
        ("llm-foundry v0.0.4", "llm-foundry"),
        ("our trainer", "megatron-core"),
        ("torch", "torch"),
        ("", "megatron-core"),
    ],
)
def test_frameworks(words, profile):
    assert row_software.framework_of(own(framework=words)).profile == profile


def test_fp16_on_megatron_is_of_its_time():
    assert row_software.framework_of(own(framework="Megatron-LM", precision="fp16")).profile == "megatron-2021"
    assert row_software.framework_of(own(framework="Megatron-LM", precision="bf16")).profile == "megatron-core"


@pytest.mark.parametrize(
    ("gpu", "name", "listed"),
    [
        ("H100-80GB-SXM", "dgx-h100", False),
        ("dgx-a100-40", "dgx-a100-40", False),
        ("A100 (memory size not stated)", "dgx-a100-80", True),
        ("A100-40GB", "dgx-a100-40", False),
        ("NVIDIA A100-SXM4-40GB", "dgx-a100-40", True),
        ("A100-80GB-PCIe", "a100-pcie-node", False),
        ("H100-64GB-custom", "dgx-h100", True),
        ("B200-180GB-power-limited", "dgx-b200", True),
        ("GB200-NVL72", "gb200-nvl72", False),
        ("V100-16GB", "aws-p3.16xlarge", True),
    ],
)
def test_accelerators(gpu, name, listed):
    found = row_machine.hardware_of(own(gpu=gpu))
    assert found.section["node_type"] == name
    assert bool(found.assumed) == listed


def test_a_machine_file_is_an_accelerator_too(tmp_path, run_validate):
    path = tmp_path / "mine.yaml"
    cli.main(["show", "dgx-h100"])
    text = (ROOT / "steptime/data/machines/dgx-h100.yaml").read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    same = judgement.judge(own())
    assert judgement.judge(own(gpu=path)).predicted_step_s == same.predicted_step_s
    assert "no such file" in judgement.judge(own(gpu=tmp_path / "none.yaml")).skipped


# --- what cannot be judged -------------------------------------------------------------------------------------------------

SKIPPED = [
    ({"precision": "int8"}, "not modeled yet: int8"),
    ({"precision": "fp8 blockwise", "framework": "torchtitan"}, "not modeled yet: fp8 with torchtitan"),
    ({"n_experts": 8}, "topk: missing"),
    ({"attention_kind": "hybrid gated-deltanet+gqa"}, "not modeled yet: hybrid layers"),
    ({"task": "lora"}, "not modeled yet: LoRA"),
    ({"framework": "Levanter (JAX FSDP/TP)"}, "not modeled yet: framework XLA (Levanter, T5X)"),
    ({"recompute": "none+cpu_activation_offload(40 layers)"}, "not modeled yet: activation offloading"),
    ({"recompute": "selective(expert_fc1)"}, "not modeled yet: recompute 'selective(expert_fc1)'"),
    ({"zero_or_fsdp": "zero3 + offload"}, "not modeled yet: offloading"),
    ({"overlap_notes": "ZBV"}, "not modeled yet: schedule zbv"),
    ({"tp": "four"}, "tp: expected a positive number (got 'four')"),
    ({"tp": "0"}, "tp: expected a positive number (got '0')"),
    ({"tp": "1.5"}, "tp: expected a whole number (got '1.5')"),
    ({"step_time_s": "nan"}, "step_time_s: expected a positive number (got 'nan')"),
    ({"step_time_s": "1e999"}, "step_time_s: expected a positive number (got '1e999')"),
    ({"hidden": ""}, "hidden: missing"),
    ({"gpu": ""}, "gpu: missing"),
    ({"glu": "perhaps"}, "glu: expected 0 or 1 (got 'perhaps')"),
    ({"n_gpus": "60"}, "n_gpus: not the product of tp, pp, cp and dp"),
    ({"step_time_s": ""}, "nothing measured: no step time, tokens/s or peak memory"),
    ({"gpu": "Cray-1"}, "gpu: unknown accelerator (got 'Cray-1'); see 3dtrn machines"),
    ({"tp": "32", "pp": "1", "n_heads": "24", "hidden": "3072"}, "parallelism.tp: must divide n_q_heads 24 (got 32)"),
]


def test_several_processes_judge_as_one_does():
    """In a process of its own: pytest's may hold libraries that a fork would hurt."""
    code = (
        "from steptime.validation import judgement; "
        "from steptime.validation.measurements import shipped; rows = shipped()[::60]; judgement.FEWEST = 1; "
        "judgement.os.sched_getaffinity = lambda _: {0, 1}; assert judgement.forks(); "
        "assert judgement.judge_rows(rows) == judgement.judge_all(rows)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_release_of_a_framework_is_taken_where_the_profile_tells_it_apart():
    rows = {
        said: MeasuredRow({"framework": said}, "", 2)
        for said in ("NeMo 24.12.01", "NeMo 23.08", "Megatron-Bridge NeMo 26.04")
    }
    known = {said: row_software.framework_of(row).software for said, row in rows.items()}
    assert known == {
        "NeMo 24.12.01": "nemo@24.12",
        "NeMo 23.08": "nemo",
        "Megatron-Bridge NeMo 26.04": "megatron-bridge@26.04",
    }
    assert {row_software.framework_of(row, known=False).software for row in rows.values()} == {
        "nemo",
        "megatron-bridge",
    }


@pytest.mark.parametrize(("cells", "reason"), SKIPPED, ids=[reason[:48] for _, reason in SKIPPED])
def test_a_row_that_cannot_be_judged_says_why(cells, reason):
    found = judgement.judge(own(**cells))
    assert (found.skipped[: len(reason)], found.predicted_step_s) == (reason, None)
    assert "\n" not in found.skipped


ODD = [
    "",
    "0",
    "-1",
    "1",
    "7",
    "1e300",
    "nan",
    "x",
    "9" * 5000,
    "full",
    "zero1 over 0 ranks",
    "0x V100 per node",
    "a.yaml",
]


@pytest.mark.parametrize(
    "column", [*BASE, "vpp", "dp", "sp", "zero_or_fsdp", "recompute", "machine", "overlap_notes", "split"]
)
def test_no_cell_is_more_than_a_reason(column):
    """Whatever stands in a cell: an error that is a number, or one line that says why there is none."""
    for word in ODD:
        found = judgement.judge(own(**{column: word}))
        if found.skipped is None:
            assert math.isfinite(found.step_error)
        else:
            assert "\n" not in found.skipped
            assert len(found.skipped) <= judgement.LONGEST
        json.dumps(found.to_dict(), allow_nan=False)


def test_published_cells_are_not_stated_rather_than_missing():
    with pytest.raises(SkipRowError, match=r"^micro_batch_size: not stated$"):
        row_plan.to_config(MeasuredRow(BASE | {"micro_batch_size": ""}, "nvidia", 2))


TITAN = {"gpu": "H100-96GB-SXM", "framework": "torchtitan", "n_gpus": "8"}


@pytest.mark.parametrize(
    ("cells", "watts"),
    [
        (TITAN | {"source": "pytorch/torchtitan (PR #1690)"}, 700),
        (TITAN | {"source": "pytorch/torchtitan (PR #1690)", "n_gpus": "64"}, 500),
        (TITAN | {"source": "pytorch/torchtitan (PR #808)"}, 500),
        (TITAN | {"source": "pytorch/torchtitan (PR #1690)", "gpu": "H100-80GB-SXM"}, 700),
        (TITAN | {"source": "pytorch/torchtitan (PR #1690)", "framework": "NeMo"}, 500),
    ],
    ids=["one node of 2025", "eight nodes", "of 2024", "the 80 GB part, of 700 W", "another trainer"],
)
def test_the_power_limit_of_the_96_gb_part(cells, watts):
    """What the device sustains in bf16 is 575 TFLOP/s at 500 W and 675 at 700 W; where the limit is taken, the row says so."""
    found = row_machine.hardware_of(MeasuredRow(BASE | cells, "native", 2))
    device = row_machine.machine(found.section["node_type"], ()).accelerator
    assert device.power_w == watts
    assert device.sustained_flops["bf16"] == {500: 575e12, 700: 675e12}[watts]
    assert any("power limit" in text for text in found.assumed) == (device.name == "h100-sxm5-96-700w")
