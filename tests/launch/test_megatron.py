"""Megatron-LM's scripts, lists of flags and logs as plans; every flag of its release is known."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import drawn
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.launch.keys import load_table, spelled
from steptime.launch.logs.printed_config import read_dump
from steptime.launch.megatron.flags import plain
from steptime.launch.megatron.parallelism_section import stages_of
from steptime.launch.megatron.sources import from_arguments, read_megatron
from steptime.launch.plan_yaml import plan_yaml
from steptime.launch.read import read, read_as
from steptime.launch.reading import Reading, to_job

FOLDER = Path(__file__).parents[1] / "data" / "launch" / "megatron"
TABLE = load_table("megatron")
RELEASE = "Megatron-LM (megatron-core 0.16.1)"
LEFT_OUT = "; not modeled; --allow-unmodeled ignores it"
H100 = {"hardware.node_type": "dgx-h100"}

PLANS = {
    "gpt3_175b.sh": H100,
    "llama3_8b_fp8.sh": H100,
    "slurm_104b.slurm": {},
    "functional_test.yaml": H100 | {"parallelism.dp": 8},
    "llama2_70b_srun.sh": {},
    "rocm_llama3.sh": {"hardware.node_type": "mi300x-node", "parallelism.dp": 1},
    "args.txt": H100 | {"parallelism.dp": 4},
    "gpt_2021.sh": {"hardware.node_type": "selene"},
    "log_core_0_16.txt": H100,
    "log_2021.txt": {"hardware.node_type": "selene"},
}
"""Fixture -> what its user would --set."""


LAYOUTS = ["Et*3|(tt|)*2tL", "E|(t|)*3,t|t||L", "Ettt|tttt*2|t*2,t|ttL"]
ASK = """
import dataclasses, json, sys
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

kinds = (TransformerConfig, MLATransformerConfig, ModelParallelConfig, OptimizerConfig, DistributedDataParallelConfig)
defaults = {}
for kind in (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig, TransformerConfig):
    for field in dataclasses.fields(kind):
        meta = field.metadata.get("argparse_meta", {})
        defaults[field.name] = str(meta.get("default", field.default))
layouts = {text: PipelineParallelLayerLayout.get_num_stages_from_str(text) for text in json.loads(sys.argv[1])}
fields = sorted({field.name for kind in kinds for field in dataclasses.fields(kind)})
print(json.dumps({"fields": fields, "defaults": defaults, "layouts": layouts}))
"""


@pytest.fixture(scope="module")
def core():
    """What the installed megatron-core says, asked in a process of its own: it warns, and takes long to import."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, json.dumps(LAYOUTS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def load(name: str, **env: str) -> Reading:
    """The reading of a fixture."""
    return read_megatron(name, (FOLDER / name).read_text(encoding="utf-8"), env)


def script(*flags: str, launch: str = "torchrun --nproc_per_node 8") -> str:
    """A script of a small model with more flags."""
    usual = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
    batch = "--micro-batch-size 1 --global-batch-size 64 --vocab-size 50257 --bf16"
    return f"{launch} pretrain_gpt.py {usual} {batch} {' '.join(flags)}\n"


def reading(*flags: str, launch: str = "torchrun --nproc_per_node 8", **env: str) -> Reading:
    return read_megatron("run.sh", script(*flags, launch=launch), env)


def problems(call, *args, **more) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*args, **more)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


# --- plans ---


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_as_recorded(name, golden):
    """What the file says, as a YAML; the job of the YAML is the job of the file."""
    job = to_job(load(name), PLANS[name], allow_unmodeled=True)
    text = plan_yaml(job)
    golden(f"launch/megatron_{Path(name).stem}.yaml", text)
    assert Job.load(text) == job


@pytest.mark.parametrize("name", PLANS)
def test_every_flag_of_a_fixture_is_known(name):
    found = load(name)
    assert [flag for flag in found.flags if "unknown" in flag.note and flag.status == "unmodeled"] == []
    assert found.of("used")
    if name.endswith(".sh"):
        release = "Megatron-LM (2021 and 2022)" if "2021" in name else RELEASE
        assert {flag.note.partition(":")[0] for flag in found.of("default")} == {release}
        assert found.framework.startswith(release.removesuffix(")"))


def test_a_plan_by_hand():
    """examples/gpt3's 175B on 128 nodes of 8: dp = 1024 / (8 * 16) = 8, ffn = 4 * 12288, GPT-2's 50257 entries."""
    job = to_job(load("gpt3_175b.sh"), H100)
    assert (job.parallelism.tp, job.parallelism.pp, job.parallelism.dp) == (8, 16, 8)
    assert (job.model.n_layers, job.model.inter_sz, job.model.vocab_sz, job.model.max_positions) == (
        96,
        49152,
        50257,
        2048,
    )
    assert (job.model.dropout, job.model.tie_embeddings, job.model.bias, job.model.norm) == (
        0.1,
        True,
        True,
        "layernorm",
    )
    assert (job.software.precision, job.software.states.main_grad_dtype, job.zero_level, job.sp) == (
        "fp16",
        "fp16",
        0,
        False,
    )
    assert (job.software.overlap.dp, job.software.overlap.pp, job.software.kernels.attention_impl) == (
        False,
        False,
        "flash",
    )
    assert (job.data.gbs, job.data.seqlen, job.data.microbatch_sz) == (1536, 2048, 1)
    assert any("16 16 5859375" in note and "full batch" in note for note in job.notes)


def test_variables_come_from_the_environment():
    assert to_job(load("gpt3_175b.sh", NUM_NODES="16"), H100).parallelism.dp == 1
    assert load("llama2_70b_srun.sh", TP="8").config["parallelism"]["dp"] == 2


def test_a_script_is_named_with_its_words(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text((FOLDER / "pai_llama3.sh").read_text())
    found = read("megatron", f"{path} dsw 70B 1 128 8192 fp8 4 2 1 true true full '/my data'")
    assert found.source == str(path)
    assert (found.config["model"]["n_layers"], found.config["model"]["hidden_sz"]) == (80, 8192)
    assert found.config["parallelism"] == {"tp": 4, "pp": 2, "dp": 1, "sp": True, "zero_level": 1}
    assert found.config["performance"]["precision"] == "fp8_delayed"
    assert found.config["performance"]["recompute"] == {"granularity": "full", "method": "uniform", "n_layers": 1}
    assert found.config["performance"]["overlap"] == {"tp": True, "dp": True, "pp": False}
    why = "give script and arguments in one string: 'SCRIPT ARG ...'"
    told = problems(read, "megatron", str(path))
    assert told == [f"{path}: line 130: $3, $4, $2, $5, $7, $8, $9 have no value; {why}"]


def test_the_environment_is_named():
    assert "from the environment: NUM_NODES=16" in load("gpt3_175b.sh", NUM_NODES="16", HOME="/").config["notes"]


def test_values_of_the_environment_stay_secret():
    text = 'echo $MY_TOKEN $SIZE\nif [ -n "$KEY" ]; then :; fi\n' + script()
    notes = read_megatron("run.sh", text, {"MY_TOKEN": "hf_abc", "SIZE": "8", "KEY": "1234567"}).config["notes"]
    assert "from the environment: KEY, MY_TOKEN, SIZE=8" in notes


def test_defaults_are_listed_where_they_matter():
    names = {flag.name for flag in reading("--use-distributed-optimizer").of("default")}
    assert {
        "--hidden-dropout",
        "--overlap-grad-reduce",
        "--normalization",
        "--num-distributed-optimizer-instances",
    } <= names
    assert {"bias_gelu_fusion", "--fp16"} <= names  # a flag only turns the former off
    assert not names & {
        "--bias-gelu-fusion",
        "--fp8-recipe",
        "--exp-avg-dtype",
        "--use-distributed-optimizer",
        "--cp-comm-type",
    }


def test_the_machine_of_a_slurm_header():
    assert load("llama2_70b_srun.sh").config["hardware"] == {"node_type": "dgx-h100"}
    assert load("slurm_104b.slurm").config["hardware"] == {"node_type": "dgx-a100-80"}
    assert "hardware" not in load("gpt3_175b.sh").config
    crowded = "#SBATCH --gpus-per-node=h100:16\n" + script(launch="torchrun --nproc_per_node 16")
    line = "run.sh: 16 processes on each node, and dgx-h100 has 8 devices; add --set hardware.node_type=NAME"
    assert problems(to_job, read_megatron("run.sh", crowded)) == [line]
    named = read_megatron("run.sh", script(launch="torchrun --nproc_per_node 8"))
    assert problems(to_job, named, {"hardware.node_type": "perlmutter-80"}) == [
        "run.sh: 8 processes on each node, and perlmutter-80 has 4 devices; add --set hardware.node_type=NAME"
    ]


# --- single flags: what each becomes ---

CASES = [
    ((), "parallelism.zero_level", 0),
    (("--use-distributed-optimizer",), "parallelism.zero_level", 1),
    (("--optimizer muon",), "performance.optimizer", "muon"),
    (("--optimizer muon", "--use-distributed-optimizer"), "performance.optimizer", "dist_muon"),
    (("--optimizer dist_muon",), "parallelism.zero_level", 1),
    (("--optimizer muon", "--muon-tp-mode duplicated"), "performance.muon_tp_mode", "duplicated"),
    (("--optimizer lion",), "performance.optimizer", "lion"),
    (("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"), "performance.overlap.dp", True),
    # fp32 gradients are two thirds of the bytes, bf16 parameters one third
    (("--use-distributed-optimizer", "--overlap-grad-reduce"), "performance.overlap.dp", 0.667),
    (("--use-distributed-optimizer", "--overlap-grad-reduce", "--grad-reduce-in-bf16"), "performance.overlap.dp", 0.5),
    (("--overlap-grad-reduce",), "performance.overlap.dp", True),
    (("--num-distributed-optimizer-instances 2", "--use-distributed-optimizer"), "parallelism.replicas", 2),
    (("--tensor-model-parallel-size 2",), "parallelism.sp", False),
    (("--tensor-model-parallel-size 2", "--sequence-parallel"), "parallelism.sp", True),
    (("--sequence-parallel",), "parallelism.sp", False),
    (("--tensor-model-parallel-size 2", "--sequence-parallel", "--tp-comm-overlap"), "performance.overlap.tp", True),
    (("--model-parallel-size 4",), "parallelism.dp", 2),
    (("--context-parallel-size 2",), "parallelism.cp_comm_type", "p2p"),
    (("--context-parallel-size 2", "--cp-comm-type allgather"), "parallelism.cp_comm_type", "all_gather"),
    (("--context-parallel-size 2", "--cp-comm-type a2a a2a"), "parallelism.cp_comm_type", "a2a"),
    (("--pipeline-model-parallel-size 2", "--num-layers-per-virtual-pipeline-stage 2"), "parallelism.vpp", 2),
    (("--pipeline-model-parallel-size 4", "--num-virtual-stages-per-pipeline-rank 2"), "performance.overlap.pp", True),
    (
        ("--pipeline-model-parallel-size 4", "--num-virtual-stages-per-pipeline-rank 2", "--no-overlap-p2p-communication"),
        "performance.overlap.pp",
        False,
    ),
    (("--pipeline-model-parallel-size 4",), "performance.overlap.pp", False),
    (("--pipeline-model-parallel-size 4", "--decoder-last-pipeline-num-layers 2"), "parallelism.layers_per_stage", [2, 2, 2, 2]),
    (("--pipeline-model-parallel-size 4", "--decoder-first-pipeline-num-layers 5"), "parallelism.layers_per_stage", [5, 1, 1, 1]),
    (
        ("--pipeline-model-parallel-size 2", "--num-layers 6 --account-for-embedding-in-pipeline-split",
         "--account-for-loss-in-pipeline-split"),
        "parallelism.embedding_and_loss_count_as_layers", True,
    ),
    (
        ("--pipeline-model-parallel-size 2", "--num-layers 7 --account-for-loss-in-pipeline-split"),
        "parallelism.layers_per_stage", [4, 3],
    ),
    (
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout 'Et|tt*2|ttt|tL'"),
        "parallelism.layers_per_stage", [1, 3, 3, 1],
    ),
    (("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout 'Et|tt*2|ttt|tL'"), "parallelism.vpp", 2),
    (("--ddp-num-buckets 5",), "parallelism.n_param_buckets", 5),
    # 40e6 elements of fp32 gradients
    (("--ddp-bucket-size 40000000",), "parallelism.bucket_size_mb", 160.0),
    ((), "performance.activation_checkpointing_type", "none"),
    (("--recompute-activations",), "performance.recompute", {"granularity": "selective", "modules": ["core_attn"]}),
    (
        ("--recompute-granularity selective", "--recompute-modules core_attn layernorm moe_act"),
        "performance.recompute.modules", ["core_attn", "layernorm"],
    ),
    (
        ("--recompute-granularity full", "--recompute-method block", "--recompute-num-layers 3"),
        "performance.recompute", {"granularity": "full", "method": "block", "n_layers": 3},
    ),
    (("--fp8-format hybrid",), "performance.precision", "fp8_delayed"),
    (("--fp8-format e4m3", "--fp8-recipe mxfp8", "--fp8-param-gather"), "performance.precision", "mxfp8"),
    (("--fp8-format hybrid", "--fp8-recipe tensorwise", "--fp8-param-gather"), "performance.fp8_params", True),
    (("--fp8-format hybrid", "--fp8-recipe blockwise"), "performance.precision", "fp8_blockwise"),
    (("--fp4-format e2m1",), "performance.precision", "nvfp4"),
    ((), "performance.main_grad_dtype", "fp32"),
    (("--grad-reduce-in-bf16",), "performance.main_grad_dtype", "bf16"),
    (("--use-precision-aware-optimizer", "--main-grads-dtype bf16"), "performance.main_grad_dtype", "bf16"),
    (("--use-precision-aware-optimizer",), "performance.master_dtype", "remainder"),
    (
        ("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"),
        "performance.moment_dtype", "bf16",
    ),
    (("--attention-backend unfused",), "performance.attention_impl", "unfused"),
    (("--transformer-impl local",), "performance.attention_impl", "unfused"),
    (("--transformer-impl local", "--use-flash-attn"), "performance.attention_impl", "flash"),
    (("--attention-backend local", "--no-masked-softmax-fusion"), "performance.softmax_impl", "composite"),
    (("--position-embedding-type rope", "--no-rope-fusion"), "performance.rope_impl", "own_tables"),
    (("--swiglu", "--no-bias-swiglu-fusion"), "performance.activation_impl", "composite"),
    (("--disable-bias-linear",), "performance.activation_impl", "composite"),
    (("--cross-entropy-loss-fusion",), "performance.loss_impl", "native"),
    (("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl te"), "performance.loss_impl", "fused"),
    (("--cuda-graph-impl local", "--cuda-graph-scope attn mlp"), "performance.cuda_graphs", True),
    (("--enable-cuda-graph",), "performance.cuda_graphs", True),
    (
        ("--cuda-graph-impl transformer_engine", "--cuda-graph-scope attn moe_router"),
        "performance.cuda_graphs", ["attn", "moe_router"],
    ),
    (("--no-gradient-accumulation-fusion",), "performance.grad_accumulation_fusion", False),
    # 4 * 1024 * 2 / 3 = 2730.67, down to a multiple of 64
    (("--swiglu",), "model.inter_sz", 2688),
    ((), "model.inter_sz", 4096),
    (("--squared-relu", "--disable-bias-linear"), "model.activation", "relu2"),
    (("--squared-relu", "--disable-bias-linear"), "performance.activation_impl", "fused"),
    (("--quick-geglu",), "model.activation", "gelu"),
    (("--group-query-attention", "--num-query-groups 2"), "model.n_kv_heads", 2),
    (("--num-query-groups 2",), "model.n_kv_heads", 8),
    (("--kv-channels 64",), "model.head_dim", 64),
    (("--normalization RMSNorm",), "model.norm_bias", False),
    (("--disable-bias-linear", "--add-qkv-bias"), "model.qkv_bias", True),
    (("--qk-layernorm",), "model.qk_norm", True),
    (("--untie-embeddings-and-output-weights",), "model.tie_embeddings", False),
    (("--use-rotary-position-embeddings",), "model.learned_positions", False),
    (("--position-embedding-type none",), "model.rotary_embeds", False),
    (("--hidden-dropout 0", "--attention-dropout 0"), "model.dropout", 0.0),
    (("--tokenizer-type NullTokenizer", "--vocab-size 128256"), "model.vocab_sz", 128257),
    (("--padded-vocab-size 51200",), "model.vocab_sz", 51200),
    # 50257 up to a multiple of 256
    (("--make-vocab-size-divisible-by 256",), "performance.vocab_multiple", 256),
    (("--global-batch-size 32", "--micro-batch-size 4"), "data.microbatch_sz", 4),
    (("--num-layers 4", "--num-layers 12"), "model.n_layers", 12),
    (("--hidden-size=2048",), "model.hidden_sz", 2048),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "key", "value"), CASES)
def test_a_flag_becomes_a_key(flags, key, value):
    found = reading(*flags)
    node = found.config
    for part in key.split("."):
        node = node[part]
    assert node == value


def test_the_master_copy_is_whole_under_other_recipes():
    """megatron-core 0.16.1 core/optimizer/optimizer_config.py: remainders with no recipe or delayed scaling alone."""
    flags = ("--use-precision-aware-optimizer", "--fp8-format hybrid")
    assert reading(*flags).config["performance"]["master_dtype"] == "remainder"
    assert "master_dtype" not in reading(*flags, "--fp8-recipe tensorwise").config["performance"]


def test_a_batch_that_nobody_says_is_one_micro_batch_each():
    text = script("--tensor-model-parallel-size 2").replace("--global-batch-size 64", "")
    found = read_megatron("run.sh", text)
    assert found.config["data"]["gbs"] == 4
    assert "global batch not set, so 4: one micro-batch on each replica" in found.config["notes"]


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*3|(tt|)*2tL", ["Ettt", "tt", "tt", "tL"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        ("E,t*2|t,L", ["Ett", "tL"]),
        ("Et||tL", ["Et", "", "tL"]),
        ("Et|*2tL", ["Et", "", "tL"]),
    ],
)  # fmt: skip
def test_pipeline_layouts_are_spelled_out(layout, stages):
    assert stages_of(layout) == stages


def test_pipeline_layouts_are_those_of_megatron_core(core):
    assert {text: len(stages_of(text)) for text in LAYOUTS} == core["layouts"]


UNMODELED = [
    (("--mtp-num-layers 1", "--mtp-standalone"),
     "--mtp-standalone true: multi-token prediction on a stage of its own"),
    (("--optimizer soap",), "--optimizer soap: another optimizer than Adam: its two moments are counted"),
    (("--hidden-dropout 0 --attention-backend unfused",), "--hidden-dropout 0: dropout of one kind alone: both are counted"),
    (("--use-torch-fsdp2",), "--use-torch-fsdp2 true: torch FSDP2 under Megatron's layers: ZeRO is counted in its place"),
    (("--exp-avg-dtype fp8", "--use-precision-aware-optimizer"),
     "--exp-avg-dtype fp8: both moments in one of fp32, bf16 and fp16: fp32 is counted"),
    (("--tensor-modle-parallel-size 2",),
     f"--tensor-modle-parallel-size 2: not an option of {RELEASE}; did you mean --tensor-model-parallel-size?"),
    (("--my-own-hidden-size 3",), f"--my-own-hidden-size 3: not an option of {RELEASE}, and its name suggests a cost"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "line"), UNMODELED)
def test_what_costs_and_is_not_modeled_is_one_line(flags, line):
    found = reading(*flags)
    told = problems(to_job, found, H100)
    assert told == [f"run.sh: {line}{LEFT_OUT}"]
    job = to_job(found, H100, allow_unmodeled=True)
    assert f"ignored (not modeled): {line}" in job.notes


@pytest.mark.parametrize(
    ("flag", "note"),
    [
        (
            "--no-bias-dropout-fusion",
            "--no-bias-dropout-fusion true: bias, dropout and residual in kernels of their own",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type a2a+p2p",
            "--cp-comm-type a2a+p2p: exchanges of several kinds: a ring is counted",
        ),
        ("--embed-layernorm", "--embed-layernorm true: a norm of the embedding is not counted"),
    ],
)
def test_what_costs_little_is_approximated_and_told(flag, note):
    assert f"approximated: {note}" in to_job(reading(flag), H100).notes


def test_flags_of_forks_are_told_and_cost_nothing():
    """--trigger-path and its kin: names that speak of no size, layout, precision, recomputation, optimizer or overlap."""
    found = reading("--trigger-path /x --codecarbon-dir /y --use-z-loss --abort-on-unmet-fused-kernel-constraints")
    assert found.of("unmodeled") == []
    names = "--trigger-path, --codecarbon-dir, --use-z-loss, --abort-on-unmet-fused-kernel-constraints"
    assert f"not options of {RELEASE}, assumed to have no cost: {names}" in found.config["notes"]


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer adam",
        "--mtp-num-layers 0",
        "--rotary-percent 0.5",
        "--no-bias-dropout-fusion --disable-bias-linear --hidden-dropout 0 --attention-dropout 0",
        "--softmax-type vanilla",
        "--empty-unused-memory-level 0",
    ],
)
def test_a_value_that_changes_nothing_is_no_problem(flags):
    assert reading(flags).of("unmodeled") == []


def test_the_environment_of_transformer_engine():
    text = "export NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0\n" + script()
    assert read_megatron("run.sh", text).config["performance"]["attention_impl"] == "unfused"
    text = "export CUDA_LAUNCH_BLOCKING=1\n" + script()
    notes = to_job(read_megatron("run.sh", text), H100).notes
    assert any(
        note.startswith("approximated: CUDA_LAUNCH_BLOCKING 1: the host synchronizes after every kernel")
        for note in notes
    )


def test_programs_for_other_models_are_not_modeled():
    found = read_megatron("run.sh", script().replace("pretrain_gpt.py", "pretrain_bert.py"))
    assert [(flag.name, flag.note) for flag in found.of("unmodeled")] == [
        ("pretrain_bert.py", "BERT, another kind of model")
    ]


def test_a_script_without_its_words_and_without_layers_asks_for_both_in_one_round():
    text = script().replace("--num-layers 8", "--model_name $1")
    with pytest.raises(ConfigError) as caught:
        read_megatron("run.sh", text)
    assert (
        caught.value.problems[0] == "run.sh: $1 has no value; give script and arguments in one string: 'SCRIPT ARG ...'"
    )
    assert caught.value.problems[1].startswith("run.sh: its flags have no --num-layers; add --set model=NAME")


# --- bad input ---

NO_LAYERS = (
    "its flags have no --num-layers; add --set model=NAME (3dtrn models), or the file that has it with --with FILE"
)
OTHER_NODES = "; for other nodes add --set parallelism.dp=N"
BAD = [
    (script("--tensor-model-parallel-size 3"), f"run.sh: world size 8 is not a multiple of tp 3 x pp 1 = 3{OTHER_NODES}"),
    (script("--context-parallel-size 4 --pipeline-model-parallel-size 4"),
     f"run.sh: world size 8 is not a multiple of tp 1 x pp 4 x cp 4 = 16{OTHER_NODES}"),
    (script("--world-size 16"), "run.sh: --world-size 16 contradicts the launch command, which starts 8 processes"),
    (script("--tensor-model-parallel-size $TP"),
     "run.sh: line 1: --tensor-model-parallel-size: $TP has no value; write TP=... before the command"),
    (script("--kv-channels $(cat d)"),
     "run.sh: line 1: --kv-channels: $(cat d) in line 1 is a command, and commands are not run; write the value into the script"),
    (script("--tensor-model-parallel-size $3"),
     "run.sh: line 1: --tensor-model-parallel-size: $3 has no value; give script and arguments in one string: 'SCRIPT ARG ...'"),
    ('if [ "$SIZE" = 7b ]; then L=32; fi\n' + script("--num-layers $L"),
     "run.sh: line 1: --num-layers: $L depends on the test in line 1 ($SIZE has no value); write SIZE=... before the command"),
    (script("--tensor-model-parallel-size two"),
     "run.sh: --tensor-model-parallel-size: expected a whole number of at least 1 (got 'two')"),
    (script("--num-layers 0"), "run.sh: --num-layers: expected a whole number of at least 1 (got 0)"),
    (script("--num-layers"), "run.sh: line 1: --num-layers: a value is missing"),
    (script("--bf16 oops"), "run.sh: line 1: 'oops' is not a flag"),
    (script("--fp16"), "run.sh: --bf16 and --fp16 are both set; use one"),
    (script("--recompute-granularity some"), "run.sh: --recompute-granularity: expected full or selective (got 'some')"),
    (script("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3"),
     "run.sh: --num-layers-per-virtual-pipeline-stage: 8 layers are not a multiple of pp 4 x 3"),
    ("torchrun --nproc_per_node 8 pretrain_gpt.py $ALL",
     ("run.sh: line 1 launches pretrain_gpt.py, which is not a Megatron-LM training script; $ALL has no "
      "value; write ALL=... before the command")),
    (script().replace("--hidden-size 1024", ""), "run.sh: --hidden-size: required key is missing"),
    ("python train.py --lr 1",
     f"run.sh: line 1 launches train.py, which is not a Megatron-LM training script; {NO_LAYERS}"),
    ("echo nothing", "run.sh: no launch command (torchrun, python -m torch.distributed.run, srun, mpirun, deepspeed ...)"),
    ("--lr 1e-4 --bf16", f"run.sh: {NO_LAYERS}"),
    ("--num-layers 'eight", "run.sh: line 1: No closing quotation"),
    ("MODEL_ARGS: 3", "run.sh: MODEL_ARGS: expected a mapping of flags"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), BAD)
def test_bad_input_is_one_line(text, problem):
    assert problems(read_megatron, "run.sh", text) == [problem]


@pytest.mark.parametrize(
    ("command", "other"),
    [
        ("torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file x.toml", "torchtitan"),
        ("deepspeed --num_gpus 8 train.py --deepspeed ds.json", "deepspeed"),
    ],
)
def test_scripts_of_other_frameworks_are_told_by_their_name(command, other):
    assert problems(read_as, "megatron", "run.sh", command, {}, None) == [
        f"run.sh: is a file of {other}; try --from {other}"
    ]


def test_the_public_example_contradicts_itself():
    """examples/gpt3/train_gpt3_175b_distributed.sh says one node, and tp 8 x pp 16."""
    assert problems(load, "gpt3_175b.sh", NUM_NODES="1") == [
        f"gpt3_175b.sh: world size 8 is not a multiple of tp 8 x pp 16 = 128{OTHER_NODES}"
    ]


def test_what_the_file_cannot_say_is_asked_for():
    assert problems(to_job, load("args.txt")) == [
        "args.txt: number of devices unknown, machine unknown; add --set parallelism.dp=N --set hardware.node_type=NAME"
    ]
    text = script().replace("--vocab-size 50257", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model my/own")
    found = read_megatron("run.sh", text)
    assert problems(to_job, found, H100) == ["run.sh: vocabulary size unknown; add --set model.vocab_sz=N"]
    assert to_job(found, H100 | {"model.vocab_sz": 1000}).model.vocab_sz == 1000


def test_devices_that_only_a_run_could_tell_may_be_set():
    found = load("rocm_llama3.sh")
    command = '$(python3 -c "import torch; print(torch.cuda.device_coun...) in line 15 is a command'
    why = f"--nproc-per-node: {command}, and commands are not run"
    assert problems(to_job, found, {"hardware.node_type": "mi300x-node"}) == [
        f"rocm_llama3.sh: line 147: {why}; add --set parallelism.dp=N"
    ]
    assert to_job(found, PLANS["rocm_llama3.sh"]).parallelism.devices == 8


def test_nodes_without_a_value():
    found = reading(launch="torchrun --nnodes $NODES --nproc_per_node 8")
    assert problems(to_job, found, H100) == [
        "run.sh: line 1: --nnodes: $NODES has no value; add --set parallelism.dp=N"
    ]
    assert reading(launch="torchrun --nnodes $NODES --nproc_per_node 8", NODES="2").config["parallelism"]["dp"] == 16


def test_branches_follow_the_environment():
    found = load("rocm_llama3.sh", SIZE="8", TP="1", FP8="1", RECOMPUTE="1", ROPE_FUSION="0", SEQ="8192").config
    assert (found["model"]["n_layers"], found["model"]["hidden_sz"], found["data"]["seqlen"]) == (32, 4096, 8192)
    assert (found["performance"]["precision"], found["performance"]["rope_impl"]) == ("fp8_delayed", "own_tables")
    assert found["performance"]["recompute"] == {"granularity": "full", "method": "block", "n_layers": 32}


def test_an_empty_variable_among_the_flags_is_noted():
    found = reading("$EXTRA", "--swiglu", "$MORE")
    assert [note for note in found.config["notes"] if "empty" in note] == [
        "line 1: $EXTRA has no value: taken as empty",
        "line 1: $MORE has no value: taken as empty",
    ]


def test_read_takes_a_kind_and_a_path(tmp_path, monkeypatch):
    path = tmp_path / "run.sh"
    path.write_text(script("--tensor-model-parallel-size ${TP}"))
    monkeypatch.setenv("TP", "4")
    assert read("megatron", str(path)).config["parallelism"]["tp"] == 4
    assert problems(read, "megatorn", str(path)) == ["--from megatorn: unknown kind; did you mean 'megatron'?"]
    assert problems(read, "megatron", str(tmp_path)) == [f"{tmp_path}: is a directory; give a file"]
    assert problems(read, "megatron", "nowhere.sh") == ["nowhere.sh: no such file"]


def test_a_long_log_is_read_from_its_dump(tmp_path, monkeypatch):
    monkeypatch.setattr("steptime.launch.read.MAX_BYTES", 50_000)
    path = tmp_path / "log.txt"
    noise = b"NCCL INFO \xff ring\n" * 20_000
    path.write_bytes(noise + (FOLDER / "log_core_0_16.txt").read_bytes() + noise)
    assert read("megatron", str(path)).config == load("log_core_0_16.txt").config


# --- the dump ---


def dump() -> list[str]:
    return (FOLDER / "log_core_0_16.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "prefix", ["0: ", "[default0]:", "[rank0]: ", "2025-11-21T10:00:00 ", "\x1b[32m0:\x1b[0m ", "  7|gpu-3| "]
)
def test_prefixes_of_ranks_are_taken_off(prefix):
    expected = read_dump(dump())
    assert read_dump(prefix + line for line in dump()) == expected


def test_lines_of_other_ranks_are_passed_over():
    lines, noise = (
        dump(),
        ["[rank3]: NCCL INFO Channel 00/02 : 0 1", "1: using fused kernels ....... yes", "", "WARNING: x"],
    )
    order = random.Random(0)
    mixed = [part for line in lines for part in (line, *order.choices(noise, k=order.randrange(3)))]
    assert read_dump(mixed) == read_dump(lines)
    assert len(read_dump(lines)) == sum(line.startswith("  ") for line in lines)


def test_names_longer_than_the_dots_are_read():
    """48 columns: a longer name has none."""
    found = read_dump(dump())
    assert max(map(len, found)) > 48
    assert found["tensor_model_parallel_size"] == "8"
    assert found["cp_comm_type"] == "['p2p']"


def test_it_reads_no_further_than_the_end():
    def lines():
        for line in dump():
            yield line
            if "end of arguments" in line:
                break
        raise AssertionError("read on")

    assert read_dump(lines())["num_layers"] == "80"


@pytest.mark.parametrize("keep", [5, 40, 300])
def test_a_dump_cut_in_the_middle_is_one_line(keep):
    text = "\n".join(dump()[:keep])
    assert problems(read_megatron, "log.txt", text) == [
        f"log.txt: the dump of arguments is cut after line {keep}: no 'end of arguments' follows"
    ]


def test_a_log_without_a_dump_is_one_line():
    assert problems(read_dump, ["iteration 1"]) == [
        "no dump of arguments ('------ arguments ------') in it; not a Megatron-LM log"
    ]


def test_a_dump_that_contradicts_itself():
    arguments = read_dump(dump()) | {"world_size": "48"}
    assert problems(from_arguments, arguments, "log") == ["log: world size 48 is not a multiple of tp 8 x pp 4 = 32"]
    arguments = read_dump(dump()) | {"data_parallel_size": "4"}
    assert problems(from_arguments, arguments, "log") == [
        "log: data_parallel_size 4 contradicts world size 64, which leaves 2"
    ]
    assert problems(from_arguments, read_dump(dump()), "log", world_size=128) == [
        "log: world_size 64 contradicts the launch command, which starts 128 processes"
    ]


def test_unknown_arguments_of_a_dump_matter_when_they_are_on():
    arguments = read_dump(dump()) | {
        "new_feature": "False",
        "newer_feature": "3",
        "newer_hidden_size": "3",
        "inference_new_thing": "7",
    }
    found = from_arguments(arguments, "log")
    assert [(flag.name, flag.status) for flag in found.flags if flag.name.startswith(("new", "inference_new"))] == [
        ("new_feature", "irrelevant"), ("newer_feature", "irrelevant"), ("newer_hidden_size", "unmodeled"),
        ("inference_new_thing", "irrelevant"),
    ]  # fmt: skip


def test_a_log_states_its_vocabulary():
    arguments = read_dump(dump())
    assert from_arguments(arguments, "log", vocab_size=12345).config["model"]["vocab_sz"] == 12345


@pytest.mark.parametrize(
    ("text", "value"),
    [("torch.bfloat16", "bf16"), ("torch.float32", "fp32"), ("AttnBackend.auto", "auto"), ("<AttnBackend.flash: 1>", "flash"),
     ("None", None), ("'x'", "x"), ("1.5", "1.5"), ("a/b.c", "a/b.c")],
)  # fmt: skip
def test_values_lose_the_clothes_of_python(text, value):
    assert plain(text) == value


SAID = st.one_of(
    st.integers(-2, 64).map(str),
    st.sampled_from(
        ["none", "full", "selective", "bf16", "rope", "1.5", "E|t*3|L", "((t|)*99)*99L", "a b", "'", "p2p a2a", "e4m3"]
    ),
    st.text(st.characters(codec="utf-8"), max_size=6),
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(key for key, rule in TABLE.rules.items() if rule.status != "irrelevant")),
        SAID,
        max_size=6,
    ),
    st.booleans(),
)
@example(changes={"apply_residual_connection_post_layernorm": "0\x850"}, of_a_log=True)
def test_any_arguments_are_a_job_or_words(changes, of_a_log):
    """Whatever an argument says: a plan, or lines that say what is wrong."""
    usual = read_dump(dump()) if of_a_log else {"num_layers": "8", "hidden_size": "512", "num_attention_heads": "8"}
    told = []
    try:
        job = to_job(from_arguments(usual | changes, "log"), H100, allow_unmodeled=True)
    except ConfigError as error:
        told = error.problems
    else:
        assert Job.load(plan_yaml(job)) == job
    assert all(line.startswith("log: ") and "\n" not in line for line in told)


# --- the table ---


def test_every_flag_of_the_parser_is_known():
    negations, names, switches = (TABLE.raw[key] for key in ("negations", "flag_names", "switches"))
    recorded = (FOLDER.parent / "megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in recorded if not line.startswith("#")]
    assert len(rows) == 669
    for flag, argument, kind in rows:
        assert spelled(argument, TABLE) in TABLE.rules, f"{flag} is unknown"
        bare = flag[2:]
        if kind == "store_false":
            assert negations[bare] == argument
        else:
            assert names.get(bare, bare.replace("-", "_")) == argument
            assert (argument in switches) == (kind == "store_true")


def test_every_field_of_megatron_core_is_known(core):
    """The installed release's dataclasses: a field that a newer one adds fails here."""
    assert len(core["fields"]) > 300
    assert sorted(name for name in core["fields"] if spelled(name, TABLE) not in TABLE.rules) == []


def test_the_table_says_each_argument_once():
    raw = TABLE.raw
    places = [
        *raw["used"],
        *raw["approximated"],
        *raw["unmodeled"],
        *(name for names in raw["irrelevant"].values() for name in names),
    ]
    assert sorted({name for name in places if places.count(name) > 1}) == []
    assert sorted(set(places) & set(raw["renamed"])) == []
    assert {new for new in raw["renamed"].values() if new not in places} == set()


def test_defaults_are_those_of_megatron_core(core):
    """Where the parser makes its flags of TransformerConfig, the defaults are its own; a config object's always are."""
    own = core["defaults"]
    compared = {key: value for key, (_, value) in TABLE.defaults.items() if key in own}
    for name in (
        "gradient_accumulation_fusion",
        "overlap_p2p_comm",
        "masked_softmax_fusion",
        "apply_rope_fusion",
        "cp_comm_type",
        "kv_lora_rank",
    ):
        compared.pop(name)  # flags of the parser itself
    assert len(compared) > 20
    assert {name: plain(own[name]) for name in compared} == {name: plain(str(said)) for name, said in compared.items()}
    fields = {name.rpartition(".")[2]: value for name, value in load_table("megatron_bridge").raw["defaults"].items()}
    for name in ("activation_func", "position_embedding_type", "share_embeddings_and_output_weights"):  # of GPTModel
        fields.pop(name)
    assert len(fields) > 20
    assert {name: plain(own[name]) for name in fields} == {name: plain(str(said)) for name, said in fields.items()}


# --- save ---


@settings(max_examples=60, deadline=None)
@given(drawn.plans(), st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=3))
def test_a_saved_plan_is_the_same_job(plan, notes):
    notes = [note.encode("unicode_escape").decode() for note in notes]
    job = drawn.job(plan, notes=notes)
    again = Job.load(plan_yaml(job))
    assert again == job
    assert plan_yaml(again) == plan_yaml(job)


def test_a_reading_is_saved_under_its_name():
    found = reading("--swiglu")
    found = found._replace(config=found.config | {"hardware": {"node_type": "dgx-h100"}})
    text = plan_yaml(found)
    assert text.startswith("# run.sh: Megatron-LM (megatron-core 0.16.1; flags of 23.04 to core 0.19)\nmodel:\n")
    assert Job.load(text) == to_job(found)


@pytest.mark.parametrize(
    "word", ["1e3", "yes", "null", "0x10", "1_000", "010", "12:30", "'", '"', " x ", "#", "a: b", "- a", "é"]
)
def test_words_that_look_like_numbers_stay_words(word):
    job = to_job(reading(), {**H100, "model.name": f"m{word}", "notes": [word]})
    assert Job.load(plan_yaml(job)) == job
