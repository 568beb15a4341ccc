"""`3dtrn validate`: rows become plans field by field, reasons for skipping, arithmetic of the summary, files, exit codes."""

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steptime import cli
from steptime.config import ConfigError
from steptime.job import Job
from steptime.report.validation import sections
from steptime.step import estimate
from steptime.validation import compare, hardware, measurements, rows, software, summary
from steptime.validation.measurements import REQUIRED, Row, SkipRowError
from steptime.validation.select import select

ROOT = Path(__file__).parents[1]
SHIPPED = {row.id: row for row in measurements.shipped()}
BASE = {
    "id": "own-1",
    "gpu": "dgx-h100",
    "n_gpus": "64",
    "n_layers": "32",
    "hidden": "4096",
    "ffn_hidden": "14336",
    "n_heads": "32",
    "seq_len": "4096",
    "global_batch_size": "128",
    "micro_batch_size": "1",
    "tp": "4",
    "pp": "2",
    "step_time_s": "2.5",
}


@pytest.fixture(scope="module")
def judged():
    """All shipped rows, judged once."""
    return [compare.judge(row) for row in SHIPPED.values()]


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(ROOT)

    def call(*args):
        code = cli.main(["validate", *map(str, args)])
        return (code, *capsys.readouterr())

    return call


def own(**cells):
    """A user's row: BASE with cells changed."""
    return Row(BASE | {key: str(value) for key, value in cells.items()}, "", 2)


def write(path, *changes, columns=None):
    """A CSV with one row per mapping of changes to BASE."""
    found = [BASE | change for change in changes]
    columns = columns or list(dict.fromkeys(key for row in found for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(found)
    return path


def at(config, path):
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


# --- a row becomes a plan --------------------------------------------------------------------------------------------------

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
        "parallelism": {"tp": 1, "pp": 1, "dp": 512, "sp": False, "fsdp": {"reshard_after_forward": True}},
        "hardware": {"node_type": "dgx-h100"},
        "model.bias": True,
        "model.dropout": None,
    },
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
        "parallelism": {"tp": 8, "pp": 4, "dp": 1, "sp": True, "zero_level": 0},
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
    config = rows.to_config(SHIPPED[name]).config
    assert {path: at(config, path) for path in MAPPED[name]} == MAPPED[name]


def test_a_nemotron_row_has_its_family_and_overlap():
    row = next(r for r in SHIPPED.values() if r.text("model_name") == "Nemotron4-15B" and r.text("precision") == "bf16")
    config = rows.to_config(row).config
    assert {"activation": "relu", "norm": "layernorm", "bias": False}.items() <= config["model"].items()
    assert config["performance"]["main_grad_dtype"] == "bf16"
    assert config["performance"]["overlap"] == {"dp": True} | ({"tp": True} if config["parallelism"]["tp"] > 1 else {})


@pytest.mark.parametrize("number", range(1, 9))
def test_korthikantis_rows_are_the_shipped_plans(number):
    """The same step time as configs/published, which were written by hand."""
    row = SHIPPED[f"KOR22-{number:03}"]
    plan = Job.load(next((ROOT / "configs" / "published").glob(f"kor22_{number:03}_*.yaml")))
    found = estimate(rows.to_job(rows.to_config(row)))
    assert found.step_s == pytest.approx(estimate(plan).step_s, rel=1e-12)
    assert found.memory.peak_allocated_bytes == pytest.approx(estimate(plan).memory.peak_allocated_bytes, rel=1e-12)


def test_replicas_where_states_are_sharded_over_fewer_ranks():
    found = rows.to_config(own(zero_or_fsdp="zero1 over 4 ranks (one node)")).config
    assert (found["parallelism"]["dp"], found["parallelism"]["replicas"]) == (8, 2)


def test_layers_that_do_not_divide():
    """126 layers and both ends fill 8 x 8 = 64 chunks twice over; 30 layers on 4 stages are spread."""
    even = rows.to_config(own(n_layers=126, n_gpus=64, tp=1, pp=8, vpp=8))
    assert even.config["parallelism"]["embedding_and_loss_count_as_layers"] is True
    assert "embedding and loss count as layers, which makes the stages even" in even.assumed
    assert rows.to_config(own(n_layers=30, pp=4)).config["parallelism"]["layers_per_stage"] == "auto"


def test_a_plan_runs_as_printed():
    """The config of a row, overrides and all, goes through `Job.load` to the same answer."""
    mapped = rows.to_config(SHIPPED["hagemann-003"])
    loaded = Job.load(json.dumps(mapped.config))
    assert estimate(loaded).step_s == estimate(rows.to_job(mapped)).step_s


def test_empty_cells_take_usual_values_and_are_listed():
    mapped = rows.to_config(own())
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
    assert rows.to_config(said).assumed == []


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        ("Megatron-Bridge NeMo 25.11", "megatron-bridge"),
        ("NeMo 24.12", "nemo"),
        ("NeMo Megatron", "nemo-2022"),
        ("MaxText (JAX/XLA SPMD)", "xla"),
        ("NeMo AutoModel (FSDP2)", "fsdp2"),
        ("Megatron-DeepSpeed (BLOOM production)", "bloom"),
        ("Megatron-LM + DeepSpeed 3D (Megatron-DeepSpeed), Jun-Jul 2021", "megatron-deepspeed-2021"),
        ("DeepSpeedExamples Megatron-LM v1.1.5-ZeRO3", "deepspeed-2021"),
        ("Megatron-LM (May-Jul 2021)", "megatron-deepspeed"),
        ("torchtitan+torchao", "fsdp2"),
        ("llm-foundry v0.0.4", "llm-foundry"),
        ("our trainer", "megatron-core"),
        ("torch", "torch"),
        ("", "megatron-core"),
    ],
)
def test_frameworks(words, profile):
    assert software.framework_of(own(framework=words)).profile == profile


def test_fp16_on_megatron_is_of_its_time():
    assert software.framework_of(own(framework="Megatron-LM", precision="fp16")).profile == "megatron-2021"
    assert software.framework_of(own(framework="Megatron-LM", precision="bf16")).profile == "megatron-core"


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
    found = hardware.hardware_of(own(gpu=gpu))
    assert found.section["node_type"] == name
    assert bool(found.assumed) == listed


def test_a_machine_file_is_an_accelerator_too(tmp_path, run):
    path = tmp_path / "mine.yaml"
    cli.main(["show", "dgx-h100"])
    text = (ROOT / "steptime/data/machines/dgx-h100.yaml").read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    same = compare.judge(own())
    assert compare.judge(own(gpu=path)).predicted_step_s == same.predicted_step_s
    assert "no such file" in compare.judge(own(gpu=tmp_path / "none.yaml")).skipped


# --- what cannot be judged -------------------------------------------------------------------------------------------------

SKIPPED = [
    ({"precision": "int8"}, "not modelled yet: int8"),
    ({"precision": "fp8 rowwise", "framework": "torchtitan"}, "not modelled yet: fp8 with fsdp2"),
    (
        {"cp": 2, "n_gpus": 8, "model_name": "gpt_cp2_a2a_p2p"},
        "not modelled yet: context parallelism by a2a and p2p at once",
    ),
    ({"n_experts": 8}, "not modelled yet: mixture of experts"),
    ({"attention_kind": "mla"}, "not modelled yet: multi-head latent attention"),
    ({"attention_kind": "gqa+sliding-window128 alternating"}, "not modelled yet: sliding-window attention"),
    ({"task": "lora"}, "not modelled yet: LoRA"),
    ({"framework": "Levanter (JAX FSDP/TP)"}, "not modelled yet: framework XLA (Levanter, T5X)"),
    ({"recompute": "none+cpu_activation_offload(40 layers)"}, "not modelled yet: activation offloading"),
    ({"recompute": "selective(mla_up_proj)"}, "not modelled yet: recompute 'selective(mla_up_proj)'"),
    ({"zero_or_fsdp": "zero3 + offload"}, "not modelled yet: offloading"),
    ({"overlap_notes": "ZBV"}, "not modelled yet: schedule zbv"),
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
    ({"gpu": "Cray-1"}, "gpu: unknown accelerator (got 'Cray-1'); 3dtrn machines lists what there is"),
    ({"tp": "32", "pp": "1", "n_heads": "24", "hidden": "3072"}, "parallelism.tp: must divide n_q_heads 24 (got 32)"),
]


def test_several_processes_judge_as_one_does():
    """In a process of its own: pytest's may hold libraries that a fork would hurt."""
    code = (
        "from steptime.validation import parallel; from steptime.validation.compare import judge_all; "
        "from steptime.validation.measurements import shipped; rows = shipped()[::20]; parallel.FEWEST = 1; "
        "parallel.os.sched_getaffinity = lambda _: {0, 1}; assert parallel.forks(); "
        "assert parallel.judge_rows(rows) == judge_all(rows)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_release_of_a_framework_is_taken_where_the_profile_tells_it_apart():
    rows = {
        said: Row({"framework": said}, "", 2) for said in ("NeMo 24.12.01", "NeMo 23.08", "Megatron-Bridge NeMo 26.04")
    }
    known = {said: software.framework_of(row).software for said, row in rows.items()}
    assert known == {
        "NeMo 24.12.01": "nemo@24.12",
        "NeMo 23.08": "nemo",
        "Megatron-Bridge NeMo 26.04": "megatron-bridge@26.04",
    }
    assert {software.framework_of(row, known=False).software for row in rows.values()} == {"nemo", "megatron-bridge"}


@pytest.mark.parametrize(("cells", "reason"), SKIPPED, ids=[reason[:48] for _, reason in SKIPPED])
def test_a_row_that_cannot_be_judged_says_why(cells, reason):
    found = compare.judge(own(**cells))
    assert found.skipped.startswith(reason)
    assert "\n" not in found.skipped
    assert found.predicted_step_s is None


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
        found = compare.judge(own(**{column: word}))
        if found.skipped is None:
            assert math.isfinite(found.step_error)
        else:
            assert "\n" not in found.skipped
            assert len(found.skipped) <= compare.LONGEST
        json.dumps(found.to_dict(), allow_nan=False)


def test_published_cells_are_not_stated_rather_than_missing():
    with pytest.raises(SkipRowError, match=r"^micro_batch_size: not stated$"):
        rows.to_config(Row(BASE | {"micro_batch_size": ""}, "nvidia", 2))


# --- measured and predicted ------------------------------------------------------------------------------------------------


def test_tokens_per_second_give_the_step():
    """128 x 4096 tokens at 1,000 tokens/s on each of 64 devices: 8.192 s."""
    assert compare.measured_step_s(own(step_time_s="", tokens_per_s_per_gpu=1000)) == 128 * 4096 / 64_000
    assert compare.measured_step_s(own(tokens_per_s_per_gpu=1000)) == 2.5


@pytest.mark.parametrize(
    ("metric", "name", "unit"),
    [
        ("", "allocated", 1e9),
        ("GiB max_allocated, max over ranks (reserved 70.88 GiB)", "allocated", 2.0**30),
        ("GB as printed (torchtitan max_reserved)", "reserved", 1e9),
        ("GB nvidia-smi, first/last stage", "nvidia-smi", 1e9),
        ("GB as printed (max reserved/allocated not stated)", "unstated", 1e9),
        ("GB", "unstated", 1e9),
    ],
)
def test_memory_metrics(metric, name, unit):
    assert compare.memory_metric(own(mem_metric=metric)) == (name, unit)


@pytest.mark.parametrize("metric", ["resreved", "MB", "peak", "MiB allocated", "bytes reserved"])
def test_own_row_with_an_unreadable_memory_metric_is_not_judged(metric):
    judged = compare.judge(own(peak_memory_gb=40, mem_metric=metric))
    said = f"(got {metric.lower()!r})"
    assert judged.skipped == f"mem_metric: expected allocated, reserved or nvidia-smi, and GB or GiB {said}"
    published = compare.judge(Row(BASE | {"peak_memory_gb": "40", "mem_metric": metric}, "other", 2))
    assert published.skipped is None


def test_memory_is_compared_with_what_was_read():
    found = estimate(rows.to_job(rows.to_config(own()))).memory
    cells = {"step_time_s": "", "peak_memory_gb": 40}

    def predicted(**more):
        return compare.judge(own(**cells, **more)).predicted_bytes

    assert predicted() == found.peak_allocated_bytes
    assert predicted(mem_metric="GB max_reserved") == found.peak_reserved_bytes
    assert predicted(mem_metric="nvidia-smi") == found.peak_reserved_bytes + sum(found.overhead_bytes)
    logged = compare.judge(Row(BASE | {"peak_memory_gb": "40"}, "nvidia", 2))
    assert logged.predicted_bytes == found.stages[-1].allocated_bytes < found.peak_allocated_bytes


# --- arithmetic ------------------------------------------------------------------------------------------------------------


def test_stats_by_hand():
    """Four cells of one row: sizes .1 .2 .3 .4, median .25, mean .25; 90 % of four votes is passed by the fourth."""
    found = summary.stats([(("a",), 0.1), (("b",), -0.2), (("c",), 0.3), (("d",), -0.4)])
    assert found[:2] == (4, 4)
    assert found[2:] == pytest.approx((0.25, 0.25, 0.4, -0.05))


def test_rows_of_a_cell_share_one_vote():
    """Ten rows at .1 in one cell and one at .5 in another: each cell has one vote, so the mean is .3 and the median between."""
    found = summary.stats([*((("a",), 0.1) for _ in range(10)), (("b",), -0.5)])
    assert found[:2] == (11, 2)
    assert found[2:] == pytest.approx((0.3, 0.3, 0.5, -0.2))


def test_no_rows_no_figures():
    assert summary.stats([]) is None
    assert summary.interval([]) == {}


def test_the_interval_is_fixed_and_holds_the_figures():
    errors = [((str(i),), math.sin(i) / 4) for i in range(60)]
    found, figures = summary.interval(errors), summary.stats(errors)._asdict()
    assert found == summary.interval(list(reversed(errors)))
    assert all(low < figures[name] < high for name, (low, high) in found.items())


def test_one_cell_has_no_spread():
    found = summary.interval([(("a",), 0.1), (("a",), 0.1)])
    assert {tuple(map(round, ends, (9, 9))) for ends in found.values()} == {(0.1, 0.1)}


def test_reasons_are_counted_without_their_numbers():
    a = "parallelism.tp: must divide n_q_heads 24 (got 32); possible: 1, 2"
    b = "parallelism.tp: must divide n_q_heads 40 (got 16); possible: 1, 2"
    assert summary.skip_kind(a) == summary.skip_kind(b) == "parallelism.tp: must divide n_q_heads N"
    assert summary.skip_kind("gpu: unknown accelerator (got 'a; (b)'); x") == "gpu: unknown accelerator"


def test_the_worst_are_named_in_order():
    judged = [compare.judge(own(id=name, step_time_s=value)) for name, value in (("a", 2), ("b", 90), ("c", 0.01))]
    worst = summary.worst_rows(judged, 2)
    assert [j.row.id for j in worst] == ["c", "b"]
    assert all(j.step_error == j.predicted_step_s / j.measured_step_s - 1 for j in judged)


# --- the shipped collection ------------------------------------------------------------------------------------------------


def test_nothing_is_dropped(judged):
    found = summary.summarise(judged, 5)
    assert found["rows"] == len(judged) == len(SHIPPED) == 4096
    assert found["judged"] + found["skipped"] == found["rows"]
    assert sum(found["skipped_by_reason"].values()) == found["skipped"]
    timed = [j for j in judged if j.step_error is not None]
    assert found["step_time"]["rows"] + sum(f["rows"] for f in found["apart"].values()) == len(timed)
    for group in found["by"].values():
        assert sum(figures["rows"] for figures in group.values()) == found["step_time"]["rows"]


def test_every_row_has_an_error_or_a_reason(judged):
    for j in judged:
        assert (j.skipped is None) == (j.config is not None)
        errors = [error for error in (j.step_error, j.memory_error) if error is not None]
        assert bool(errors) or j.ran_out or j.skipped
        assert all(math.isfinite(error) for error in errors)


def test_every_row_names_its_source_and_side():
    for row in SHIPPED.values():
        assert row.text("source")
        assert row.text("split") in {"fit", "test"}
        assert row.text("quality") in {"A", "B", "C"}


def test_a_cell_is_on_one_side(judged):
    sides = {}
    for j in judged:
        if j.step_error is not None and j.apart is None:
            sides.setdefault(j.cell, set()).add(j.row.text("split"))
    assert all(len(side) == 1 for side in sides.values())


def test_rows_in_doubt_and_tiny_models_stand_apart(judged):
    found = {j.row.id: j.apart for j in judged if j.skipped is None}
    assert found["MLM-CI-008"] == "inputs in doubt: functional test, not a tuned run"
    assert {why for name, why in found.items() if name.startswith("vtrain-single")} == {
        "vtrain-single: tiny models, bound by kernel launches"
    }
    assert found["KOR22-001"] is None
    assert {j.apart for j in judged if j.row.text("quality") == "C" and j.skipped is None} & {None} == set()


def test_korthikanti_stays_near(judged):
    errors = [j.step_error for j in judged if re.fullmatch(r"KOR22-00[1-8]", j.row.id)]
    assert len(errors) == 8
    assert sum(map(abs, errors)) / 8 < 0.04


def test_the_report_fits_the_page(judged):
    from steptime.report.table import WIDTH, Style, layout

    found = sections(summary.summarise(judged, 5))
    assert found[0].title == "step time: NVIDIA's frameworks"
    assert all(len(line) <= WIDTH for section in found for line in layout(section, Style()))


# --- the command -----------------------------------------------------------------------------------------------------------


def test_a_selection_prints_the_summary_first(run):
    code, out, err = run("--source", "KOR22", "--worst", "1")
    assert (code, err) == (0, "")
    assert out.startswith("step time")
    assert "10 measured rows: 10 judged, 0 skipped" in out
    assert out.index("step time") < out.index("by accelerator") < out.index("worst rows")
    assert "a100-sxm4-80" in out


def test_selections(run):
    assert {r.group for r in select(None, "dgxc", None, "all")} == {"DGXC"}
    assert {r.id for r in select(None, "KOR22-00", None, "all")} == {f"KOR22-00{i}" for i in range(1, 10)}
    assert {r.group for r in select(None, "2205.05198", None, "all")} == {"KOR22"}
    assert {r.text("gpu") for r in select(None, None, "gb200", "test")} == {"GB200-NVL72"}
    assert {r.text("split") for r in select(None, "mosaic", None, "fit")} == {"fit"}
    for option in (["--source", "nobody"], ["--gpu", "abacus"], ["--split", "left"]):
        code, out, err = run(*option)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"{option[0]}: no row has {option[1]!r}; ")


def test_json_keeps_the_contract(run):
    code, out, _ = run("--source", "simumax", "--json")
    found = json.loads(out)
    assert code == 0
    assert found.keys() == {"summary", "rows"}
    names = {
        "id", "split", "measured_step_s", "predicted_step_s", "step_time_error", "measured_memory_gib",
        "predicted_memory_gib", "memory_error", "assumed", "skipped",
    }  # fmt: skip
    assert all(names <= row.keys() for row in found["rows"])
    judged = [row for row in found["rows"] if row["skipped"] is None and row["measured_step_s"]]
    for row in judged:
        assert row["step_time_error"] == pytest.approx(row["predicted_step_s"] / row["measured_step_s"] - 1, abs=1e-12)
    first = next(row for row in found["rows"] if row["id"] == "simumax-001")
    assert first["measured_memory_gib"] == 66.55
    assert abs(first["memory_error"]) < 0.1
    assert {"median", "mean", "p90", "bias"} <= found["summary"]["step_time"].keys()


def test_an_own_file(run, tmp_path):
    path = write(tmp_path / "own.csv", {}, {"id": "own-2", "split": "night", "note": "extra, ignored"})
    code, out, err = run("--measurements", path, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["split"] for row in found["rows"]] == ["", "night"]
    assert found["summary"]["judged"] == 2
    assert found["rows"][0]["apart"] is None


def test_a_bad_row_gives_one_line_and_the_rest_is_judged(run, tmp_path):
    bad = (
        {"id": "b", "tp": "x"},
        {"id": "c", "gpu": "Cray-1"},
        {"id": "d", "precision": "int8"},
        {"id": "e", "tp": "3"},
    )
    path = write(tmp_path / "own.csv", {}, *bad)
    code, out, err = run("--measurements", path)
    assert code == 0
    assert [line.removeprefix(f"{path}: ").partition(": ")[0] for line in err.splitlines()] == [
        "line 3, b", "line 4, c", "line 5, d", "line 6, e",
    ]  # fmt: skip
    assert "5 measured rows: 1 judged, 4 skipped" in out


def test_no_row_could_be_judged(run, tmp_path):
    code, out, err = run("--measurements", write(tmp_path / "own.csv", {"precision": "int8"}, {"tp": ""}), "--json")
    assert code == 2
    assert json.loads(out)["summary"]["judged"] == 0
    assert err.count("\n") == 2


@pytest.mark.parametrize("column", REQUIRED)
def test_a_missing_column(run, tmp_path, column):
    path = write(tmp_path / "own.csv", {}, columns=[name for name in BASE if name != column])
    assert run("--measurements", path) == (2, "", f"{path}: column {column}: missing\n")


def test_a_file_without_measurements(run, tmp_path):
    path = write(tmp_path / "own.csv", {}, columns=list(REQUIRED))
    code, _, err = run("--measurements", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "one of step_time_s, tokens_per_s_per_gpu, peak_memory_gb" in err


@pytest.mark.parametrize("text", [b"", b"\n\n", b"id,gpu\n", b"\xff\xfe\x00", b"id\0,gpu\n1,2\n", b'id,gpu\n"1,2\n'])
def test_files_that_are_no_table(run, tmp_path, text):
    path = tmp_path / "bad.csv"
    path.write_bytes(text)
    code, out, err = run("--measurements", path)
    assert (code, out) == (2, "")
    assert all(line.startswith(str(path)) for line in err.splitlines())


def test_no_such_file(run, tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        code, out, err = run("--measurements", path)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_odd_tables_are_read(tmp_path):
    """A byte-order mark, capitals and blanks in the header, CRLF, quotes with commas, empty lines, short and long rows."""
    path = tmp_path / "odd.csv"
    head = ",".join(BASE).replace("id,gpu", "ID ,gpu")
    good = ",".join(BASE.values())
    text = f'\ufeff{head},Note\r\n\r\n{good},"a, b"\r\n{good}\r\n{good},x,surplus\r\n'
    path.write_bytes(text.encode("utf-8"))
    found = measurements.read(str(path))
    assert [(row.line, row.text("note"), row.surplus) for row in found] == [(3, "a, b", 0), (4, "", 0), (5, "x", 1)]
    assert [compare.judge(row).skipped for row in found[:2]] == [None, None]
    assert compare.judge(found[2]).skipped.startswith("1 more cells than the header has columns")


def test_a_table_must_have_rows(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(",".join(BASE) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no rows; expected a header and one measured run per line"):
        measurements.read(str(path))


def test_neither_numpy_nor_torch_is_imported():
    code = (
        "import sys; from steptime.cli import main; assert main(['validate', '--source', 'KOR22']) == 0; "
        "assert not {'numpy', 'torch', 'tabulate'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_counts_what_the_collection_holds():
    page = (ROOT / "steptime/data/measurements/README.md").read_text(encoding="utf-8")
    for name in measurements.FILES:
        count = sum(row.file == name for row in SHIPPED.values())
        assert re.search(rf"\| {name}\.csv\.gz \| {count:,} \|", page), name
