"""Megatron-LM's launch scripts as plans: fixtures, the environment, words, and what a file cannot say."""

from __future__ import annotations

from pathlib import Path

import drawn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_readings import FOLDER, H100, RELEASE, load, problems, reading, script

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.launch.megatron.sources import read_megatron
from steptime.launch.plan_yaml import plan_yaml
from steptime.launch.read import read, read_as
from steptime.launch.reading import to_job

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
    why = "pass script and arguments as one string: 'SCRIPT ARG ...'"
    told = problems(read, "megatron", str(path))
    words = (
        "$2 (--num-layers ...), $3 (--micro-batch-size), $4 (--global-batch-size), $5 (--seq-length), $6 (--bf16 ...), "
        "$7 (--tensor-model-parallel-size ...), $8 (--pipeline-model-parallel-size ...), $9 (--context-parallel-size), "
        "$12 (--recompute-activations ...)"
    )
    assert told == [f"{path}: line 130: {words} have no value; {why}"]


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
    line = "run.sh: 16 processes per node, but dgx-h100 has 8 devices; add --set hardware.node_type=NAME"
    assert problems(to_job, read_megatron("run.sh", crowded)) == [line]
    named = read_megatron("run.sh", script(launch="torchrun --nproc_per_node 8"))
    assert problems(to_job, named, {"hardware.node_type": "perlmutter-80"}) == [
        "run.sh: 8 processes per node, but perlmutter-80 has 4 devices; add --set hardware.node_type=NAME"
    ]
    dies = "frontier-gcd, whose devices are the dies (GCDs)"
    assert problems(to_job, named, {"hardware.node_type": "frontier"}) == [
        f"run.sh: 8 processes per node, but frontier has 4 devices; add --set hardware.node_type={dies}"
    ]
    assert to_job(named, {"hardware.node_type": "frontier-gcd"}).machine.devices_per_node == 8


def test_the_environment_of_transformer_engine():
    text = "export NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0\n" + script()
    assert read_megatron("run.sh", text).config["performance"]["attention_impl"] == "unfused"
    text = "export CUDA_LAUNCH_BLOCKING=1\n" + script()
    notes = to_job(read_megatron("run.sh", text), H100).notes
    assert any(
        note.startswith("approximated: CUDA_LAUNCH_BLOCKING 1: the host synchronizes after every kernel")
        for note in notes
    )


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("pretrain_bert.py", "BERT"),
        ("pretrain_mask_diff.py", "masked diffusion without causal attention"),
        ("pretrain_mdm.py", "masked diffusion without causal attention"),
    ],
)
def test_programs_for_other_models_are_not_modeled(program, what):
    found = read_megatron("run.sh", script().replace("pretrain_gpt.py", program))
    assert [(flag.name, flag.note) for flag in found.of("unmodeled")] == [(program, f"{what}, another kind of model")]


def test_a_script_without_its_words_and_without_layers_asks_for_both_in_one_round():
    text = script().replace("--num-layers 8", "--model_name $1")
    with pytest.raises(ConfigError) as caught:
        read_megatron("run.sh", text)
    assert (
        caught.value.problems[0] == "run.sh: $1 has no value; pass script and arguments as one string: 'SCRIPT ARG ...'"
    )
    assert caught.value.problems[1].startswith("run.sh: its flags have no --num-layers; add --set model=NAME")


# --- bad input ---

NO_LAYERS = (
    "its flags have no --num-layers; add --set model=NAME (3dtrn models), or the file that contains it with --with FILE"
)
OTHER_NODES = "; for other nodes add --devices N"
BAD = [
    (script("--tensor-model-parallel-size 3"),
     f"run.sh: world size 8 is not a multiple of tp 3 x pp 1 = 3 (3, 6, 9 ... are){OTHER_NODES}"),
    (script("--context-parallel-size 4 --pipeline-model-parallel-size 4"),
     f"run.sh: world size 8 is not a multiple of tp 1 x pp 4 x cp 4 = 16 (16, 32, 48 ... are){OTHER_NODES}"),
    (script("--world-size 16"), "run.sh: --world-size 16 contradicts the launch command, which starts 8 processes"),
    (script("--tensor-model-parallel-size $TP"),
     "run.sh: line 1: --tensor-model-parallel-size: $TP has no value; write TP=... before the command"),
    (script("--kv-channels $(cat d)"),
     "run.sh: line 1: --kv-channels: $(cat d) in line 1 is a command, and commands are not run; write the value into the script"),
    (script("--tensor-model-parallel-size $3"),
     "run.sh: line 1: --tensor-model-parallel-size: $3 has no value; pass script and arguments as one string: 'SCRIPT ARG ...'"),
    ('if [ "$SIZE" = 7b ]; then L=32; fi\n' + script("--num-layers $L"),
     "run.sh: line 1: --num-layers: $L depends on the test in line 1 ($SIZE has no value); write SIZE=... before the command"),
    (script("--tensor-model-parallel-size two"),
     "run.sh: --tensor-model-parallel-size: expected a whole number of at least 1 (got 'two')"),
    (script("--num-layers 0"), "run.sh: --num-layers: expected a whole number of at least 1 (got 0)"),
    (script("--num-layers"), "run.sh: line 1: --num-layers: missing value; write the value into the script"),
    (script("--bf16 oops"), "run.sh: line 1: 'oops' is not a flag"),
    (script("--fp16"), "run.sh: --bf16 and --fp16 are both set; use one"),
    (script("--recompute-granularity some"), "run.sh: --recompute-granularity: expected full or selective (got 'some')"),
    (script("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3"),
     "run.sh: --num-layers-per-virtual-pipeline-stage: 8 layers are not a multiple of pp 4 x 3"),
    ("torchrun --nproc_per_node 8 pretrain_gpt.py $ALL",
     ("run.sh: line 1 launches pretrain_gpt.py with no flags of a model; $ALL has no "
      "value; write ALL=... before the command")),
    (script().replace("--hidden-size 1024", ""), "run.sh: --hidden-size: required key is missing"),
    ("python train.py --lr=$LR",
     ("run.sh: line 1 launches train.py, which is of no framework that is read; "
      "write a plan with its settings, or name its framework with --from KIND")),
    ("deepspeed --num_gpus 8 train.py --model_id google/gemma-3-12b-it --vision_model_id own --batch_size 4096 --use_deepspeed",
     ("run.sh: line 1 launches train.py, which is of no framework that is read; "
      "write a plan with its settings, or name its framework with --from KIND")),
    ("torchrun --nproc_per_node 8 -m own.sft_trainer --model Qwen/Qwen2.5-7B --batch-size 16 --micro-batch-size 1 --tp-degree 4",
     ("run.sh: line 1 launches own.sft_trainer, which is of no framework that is read; "
      "write a plan with its settings, or name its framework with --from KIND")),
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
        ("swift sft --model Qwen/Qwen2.5-7B --deepspeed zero3", "swift"),
    ],
)
def test_scripts_of_other_frameworks_are_told_by_their_name(command, other):
    assert problems(read_as, "megatron", "run.sh", command, {}, None) == [
        f"run.sh: is a file of {other}; try --from {other}"
    ]


def test_the_public_example_contradicts_itself():
    """examples/gpt3/train_gpt3_175b_distributed.sh says one node, and tp 8 x pp 16."""
    assert problems(load, "gpt3_175b.sh", NUM_NODES="1") == [
        f"gpt3_175b.sh: world size 8 is not a multiple of tp 8 x pp 16 = 128 (128, 256, 384 ... are){OTHER_NODES}"
    ]


def test_what_the_file_cannot_say_is_asked_for():
    assert problems(to_job, load("args.txt")) == [
        "args.txt: number of devices unknown; add --set parallelism.dp=N",
        "args.txt: machine unknown; add --set hardware.node_type=NAME (3dtrn machines)",
    ]
    text = script().replace("--vocab-size 50257", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model my/own")
    found = read_megatron("run.sh", text)
    assert problems(to_job, found, H100) == ["run.sh: vocabulary size unknown; add --set model.vocab_sz=N"]
    assert to_job(found, H100 | {"model.vocab_sz": 1000}).model.vocab_sz == 1000


def test_devices_that_only_a_run_could_tell_may_be_set():
    found = load("rocm_llama3.sh")
    command = '$(python3 -c "import torch; print(torch.cuda.device_coun...) in line 15'
    why = f"--nproc-per-node: number of devices unknown, which {command} counts"
    assert problems(to_job, found, {"hardware.node_type": "mi300x-node"}) == [
        f"rocm_llama3.sh: line 147: {why}; add --set hardware.node_type=NAME"
    ]
    assert to_job(found, PLANS["rocm_llama3.sh"]).parallelism.devices == 8


def test_nodes_without_a_value():
    found = reading(launch="torchrun --nnodes $NODES --nproc_per_node 8")
    assert problems(to_job, found, H100) == [
        "run.sh: line 1: --nnodes: $NODES has no value; write NODES=... before the command, or add --set parallelism.dp=N"
    ]
    assert reading(launch="torchrun --nnodes $NODES --nproc_per_node 8", NODES="2").config["parallelism"]["dp"] == 16


@pytest.mark.parametrize("nodes", ["0", "abc"])
def test_what_is_no_number_of_nodes_is_not_the_launchers_default(nodes):
    found = reading(launch=f"torchrun --nnodes {nodes} --nproc_per_node 8")
    asked = f"run.sh: line 1: --nnodes: '{nodes}' is no number of nodes; add --set parallelism.dp=N"
    assert problems(to_job, found, H100) == [asked]
    assert to_job(found, H100 | {"parallelism.dp": 16}).parallelism.dp == 16


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


# --- save ---


@settings(max_examples=60, deadline=None)
@given(drawn.plans(), st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=3))
def test_a_saved_plan_is_the_same_job(plan, notes):
    notes = [note.encode("unicode_escape").decode() for note in notes]
    job = drawn.drawn_job(plan, notes=notes)
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
