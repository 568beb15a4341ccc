"""`3dtrn --from KIND FILE` as a user types it: the report, its flags as JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steptime.commands import cli
from steptime.launch.devices import states_devices

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "launch"
SCRIPT = str(DATA / "megatron" / "gpt3_175b.sh")
H100 = ("--set", "hardware.node_type=h100")


@pytest.fixture
def run(capsys):
    """Run one command line in this process: (exit code, stdout, stderr)."""

    def call(*args):
        code = cli.main([str(arg) for arg in args])
        return (code, *capsys.readouterr())

    return call


def test_a_script_gives_its_report_and_the_way_of_every_flag(run):
    code, out, err = run("--from", "megatron", SCRIPT, *H100)
    assert (code, err) == (0, "")
    assert "tp 8  pp 16  dp 8" in out
    assert "--tensor-model-parallel-size" in out
    assert "parallelism.tp" in out
    assert "no cost" in out
    assert max(len(line) for line in out.splitlines() if SCRIPT not in line) <= 80


def test_json_carries_every_flag_once(run):
    document = json.loads(run("--from", "megatron", SCRIPT, *H100, "--json")[1])
    assert document["schema"] == "3dtrn/1"
    flags = document["launch"]["flags"]
    assert len({flag["name"] for flag in flags}) == len(flags)
    assert {flag["status"] for flag in flags} == {"used", "irrelevant", "default"}
    assert document["launch"]["framework"].startswith("Megatron-LM")


def test_machine_and_devices_are_settings_over_a_launch_file(run, tmp_path):
    """256 devices = tp 8 x pp 16 x dp 2, where the script itself runs 1,024."""
    named = ("--machine", "h100", "--devices", "256", "--json")
    document = json.loads(run("--from", "megatron", SCRIPT, *named)[1])
    assert (document["devices"], document["config"]["parallelism"]["dp"]) == (256, 2)
    assert document["config"]["hardware"]["node_type"] == "dgx-h100"
    (config := tmp_path / "train.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n'
    )
    assert json.loads(run("--from", "torchtitan", config, *named)[1])["devices"] == 256
    uneven = run("--from", "megatron", SCRIPT, "--machine", "h100", "--devices", "100")[2]
    assert "world size 100 is not a multiple of tp 8 x pp 16 = 128" in uneven


def test_a_file_that_leaves_something_open_is_told_the_whole_command(run, tmp_path):
    """What is missing is put into the command as it was typed; a line that asks for something else has no such command."""
    (config := tmp_path / "my job.json").write_text(
        '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'
    )
    code, _, err = run("--from", "deepspeed", config, "--machine", "h100", "--brief")
    assert code == 2
    retyped = f"to go on: 3dtrn --from deepspeed '{config}' --machine h100 --brief --set model=NAME --devices N"
    retyped += " --set data.seqlen=N"
    assert sorted(err.splitlines()[-1].split(" --")) == sorted(retyped.split(" --"))
    assert "to go on" not in run("--from", "megatron", SCRIPT, *H100, "--set", "parallelism.tp=7")[2]


def test_nodes_that_a_setting_gives_are_those_of_the_file(run, tmp_path):
    """8 nodes of 8 are 64 devices, unless --devices says another number; so for a plan."""
    text = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2-7B --max_length 2048 "
    (file := tmp_path / "run.sh").write_text(f"{text} --per_device_train_batch_size 1\n")
    (plan := tmp_path / "plan.yaml").write_text(
        "{model: llama3-8b, devices: 8, parallelism: {tp: 1, pp: 1}, hardware: h100, "
        "data: {gbs: 64, seqlen: 2048, microbatch_sz: 1}}\n"
    )
    for words in (("--from", "auto", file, "--machine", "h100"), (plan,)):
        code, out, _ = run(*words, "--set", "hardware.nodes=8", "--json")
        assert (code, json.loads(out)["devices"]) == (0, 64)
        code, _, err = run(*words, "--devices", "32", "--set", "hardware.nodes=8", "--json")
        assert (code, err) == (2, "--devices: 32, but --set hardware.nodes=8 makes 64 devices; remove one\n")
        code, _, err = run(*words, "--set", "hardware.nodes=8", "--set", "parallelism.dp=8")
        said = "--set hardware.nodes=8, but --set parallelism.dp=8 makes 8 devices; remove one\n"
        assert (code, err) == (2, said)
        code, out, _ = run(*words, "--set", "hardware.nodes=1", "--set", "parallelism.dp=4", "--json")
        assert (code, json.loads(out)["devices"]) == (0, 4)  # half of the node


def test_a_script_that_asks_slurm_for_its_nodes_is_told_a_command_that_works(run, tmp_path, monkeypatch):
    """Each missing fact has a line of its own; the last line is the command, which reads once the value is written out."""
    flags = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
    batch = "--micro-batch-size 1 --global-batch-size 64 --vocab-size 1000 --bf16"
    (file := tmp_path / "run.sh").write_text(
        f"N=$SLURM_NNODES\nsrun torchrun --nnodes $N --nproc_per_node 8 pretrain_gpt.py {flags} {batch}\n"
    )
    code, _, err = run("--from", "megatron", file, "--json")
    fix = "write SLURM_NNODES=... before the command, or add --set parallelism.dp=N"
    assert code == 2
    assert err.splitlines() == [
        f"{file}: line 1: --nnodes: $SLURM_NNODES has no value; {fix}",
        f"{file}: machine unknown; add --set hardware.node_type=NAME (3dtrn machines)",
        f"to go on: SLURM_NNODES=... 3dtrn --from megatron {file} --json --set hardware.node_type=NAME",
    ]
    monkeypatch.setenv("SLURM_NNODES", "4")
    assert run("--from", "megatron", file)[2].splitlines()[-1] == (
        f"to go on: SLURM_NNODES=4 3dtrn --from megatron {file} --set hardware.node_type=NAME"
    )
    code, out, _ = run("--from", "megatron", file, "--json", "--set", "hardware.node_type=dgx-h100")
    assert (code, json.loads(out)["devices"]) == (0, 32)


@pytest.mark.parametrize("number", ["100", "3" + "9" * 40])
def test_no_command_is_told_for_an_argument_that_nobody_counts_to(run, tmp_path, number):
    """One line for the missing value; a command would have to write out all arguments before it."""
    (file := tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py --num-layers ${{{number}}}\n")
    code, out, err = run("--from", "megatron", file, *H100)
    assert (code, out) == (2, "")
    assert f"--num-layers: ${number} has no value" in err
    assert "to go on" not in err


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--from", "megatron", SCRIPT), "machine unknown; add --set hardware.node_type=NAME"),
        (("--from", "megatronn", SCRIPT, *H100), "--from megatronn: unknown kind"),
        (("--from", "megatron", "no.sh", *H100), "no.sh: no such file"),
        (("--from", "deepspeed", SCRIPT, *H100), "gpt3_175b.sh"),
        (("--save", "x.yaml", str(ROOT / "configs" / "llama3_8b.yaml")), "--save and --allow-unmodeled: only with --from"),
        (("--from", "megatron", SCRIPT, *H100, "--save", "/no/such/folder/plan.yaml"), "folder /no/such/folder does not exist"),
        (("--from", "megatron", SCRIPT, *H100, "--set", "parallelism.tp=7"), "tp"),
    ],
)  # fmt: skip
def test_bad_input_is_told_in_a_line(run, args, problem):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert problem in err
    assert "Traceback" not in err


def test_launch_note_stands_only_without_devices_of_the_user():
    """A script that starts 8 processes on one node says nothing about a job whose number of devices the user gives."""
    assert not states_devices(None)
    assert not states_devices({"data.gbs": 4})
    assert all(states_devices(sets) for sets in ({"devices": 256}, {"parallelism.dp": 4}, {"hardware": {"nodes": 2}}))


def test_a_list_in_a_fix_is_retyped_whole(run, tmp_path):
    """The adapters of a custom program under DeepSpeed, which has no defaults of its own for them."""
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}'
    )
    script = tmp_path / "run.sh"
    words = "deepspeed --num_gpus 8 mine.py --model_path meta-llama/Llama-2-7b-hf --max_seq_len 2048 --deepspeed_config ds.json"
    script.write_text(f"#!/bin/bash\n{words} --lora_rank 8\n")
    code, _, err = run("--from", "deepspeed", script, *H100)
    asked, retyped = err.splitlines()
    assert code == 2
    assert asked.endswith(
        "targets of the adapters unknown (DeepSpeed has no default); add --set model.lora.targets=[q_proj,v_proj]"
    )
    assert retyped.endswith(" --set 'model.lora.targets=[q_proj,v_proj]'")
    code, out, _ = run("--from", "deepspeed", script, *H100, "--set", "model.lora.targets=[q_proj,v_proj]")
    assert code == 0
    assert "trained (LoRA of rank 8)" in out
    script.write_text(f"#!/bin/bash\n{words}\n")
    assert "LoRA" not in run("--from", "deepspeed", script, *H100)[1]


@pytest.mark.parametrize("machine", [["--machine", "dgx-h100"], ["--set", "hardware.node_type=dgx-h100"]])
def test_the_command_to_go_on_has_one_machine(run, tmp_path, machine):
    """A node of 8 devices takes no 16 processes: the machine to write takes the place of the one that was given."""
    flags = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
    batch = "--micro-batch-size 1 --global-batch-size 64 --vocab-size 1000 --bf16"
    (file := tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 16 pretrain_gpt.py {flags} {batch}\n")
    code, _, err = run("--from", "megatron", file, *machine, "--brief")
    assert code == 2
    assert err.splitlines()[-1] == f"to go on: 3dtrn --from megatron {file} --brief --set hardware.node_type=NAME"


def test_a_script_is_offered_as_many_arguments_as_it_takes(run, tmp_path):
    """$2 names the ds_config, and the test of $# asks for three; the first is given."""
    model = "--model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 1 --max_seq_length 2048 --bf16"
    (file := tmp_path / "run.sh").write_text(
        f"if (( $# != 3 )); then exit 2; fi\ndeepspeed --num_gpus 8 train.py --deepspeed $2 {model} --output_dir $1\n"
    )
    code, _, err = run("--from", "transformers", f"{file} out", *H100)
    asked = "pass script and arguments as one string: 'SCRIPT ARG ...', or add --set parallelism.zero_level=N"
    assert code == 2
    assert err.splitlines()[0] == f"{file}: ds_config: $2 has no value; {asked}"
    assert err.splitlines()[-1] == f"to go on: 3dtrn --from transformers '{file} out ARG2 ARG3' {' '.join(H100)}"


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("llamafactory", "llamafactory-cli train $1"),
        ("axolotl", "accelerate launch -m axolotl.cli.train $1"),
        ("llm-foundry", "composer -n 8 train/train.py $1"),
        ("gpt-neox", "python ./deepy.py train.py $1"),
        ("nanotron", "torchrun --nproc_per_node 8 run_train.py --config-file $1"),
        ("torchtitan", "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file conf/$1.toml"),
        ("nemo", "python megatron_gpt_pretraining.py --config-path=conf --config-name=$1"),
    ],
)
def test_a_config_that_an_argument_names_is_asked_for_as_that(run, tmp_path, kind, command):
    (file := tmp_path / "run.sh").write_text(f"{command}\n")
    code, _, err = run("--from", kind, file, *H100)
    first, again = err.splitlines()
    assert (code, again) == (2, f"to go on: 3dtrn --from {kind} '{file} ARG1' {' '.join(H100)}")
    assert first.endswith("$1 has no value; pass script and arguments as one string: 'SCRIPT ARG ...'")
