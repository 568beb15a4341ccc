"""All that a launch file lacks is asked for in one round, with fixes that work."""

import json

import pytest

from steptime.base.config import ConfigError
from steptime.launch.deepspeed import read_deepspeed
from steptime.launch.read import read
from steptime.launch.reading import to_job

TOLD = {"hardware.node_type": "dgx-h100", "model": "llama3-8b", "data.seqlen": 4096, "parallelism.dp": 8}
STAGE = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


def ds_problems(tree, sets):
    with pytest.raises(ConfigError) as error:
        read_deepspeed("ds.json", json.dumps(STAGE | tree), {}, sets)
    return [line.removeprefix("ds.json: ") for line in error.value.problems]


def script_problems(folder, text, words=""):
    (folder / "run.sh").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read("auto", f"{folder / 'run.sh'}{words}", {"hardware.node_type": "dgx-h100"})
    return [line.rpartition("run.sh: ")[2] for line in error.value.problems]


def test_a_batch_that_a_ds_config_does_not_have_is_asked_for_with_the_model():
    missing = "train_batch_size: missing, and so is train_micro_batch_size_per_gpu; add "
    both = f"{missing}--set data.gbs=N --set data.microbatch_sz=N"
    assert both in ds_problems({}, {})
    assert ds_problems({}, TOLD) == [both]
    assert ds_problems({"gradient_accumulation_steps": 4}, TOLD) == [f"{missing}--set data.microbatch_sz=N"]
    told = TOLD | {"data.gbs": 64, "data.microbatch_sz": 2}
    assert read_deepspeed("ds.json", json.dumps(STAGE), {}, told).config["data"]["gbs"] == 64


@pytest.mark.parametrize("micro", [{}, {"train_micro_batch_size_per_gpu": "auto"}])
def test_of_two_sizes_with_known_steps_only_one_is_asked_for(micro):
    """train_batch_size = micro-batch * steps * ranks = 2 * 4 * 8 (runtime/config.py, _set_batch_related_parameters)."""
    tree = {"train_batch_size": "auto", "gradient_accumulation_steps": 4} | micro
    assert ["data.microbatch_sz" in line for line in ds_problems(tree, TOLD)] == [True]
    for told in ({"data.microbatch_sz": 2}, {"data.gbs": 64}):
        data = read_deepspeed("ds.json", json.dumps(STAGE | tree), {}, TOLD | told).config["data"]
        assert (data["gbs"], data["microbatch_sz"]) == (64, 2)


MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --global-batch-size 8 --vocab-size 1024"
)


def test_a_zero_stage_that_no_file_gives_is_asked_for_with_the_arguments(tmp_path):
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} --micro-batch-size $1 --deepspeed --deepspeed_config ds.json\n"
    first = script_problems(tmp_path, text)
    assert [line.partition(" ")[2].partition("; ")[2] for line in first] == [
        "pass script and arguments as one string: 'SCRIPT ARG ...'",
        "add --set parallelism.zero_level=N, or the file --with FILE",
    ]
    assert script_problems(tmp_path, text.replace("ds.json", "$2"))[1:] == []


def test_all_variables_of_a_command_without_layers_are_asked_for(tmp_path):
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py $MODEL_ARGS --micro-batch-size 1 --load $CKPT\n"
    blank = "$MODEL_ARGS, $CKPT have no value; write MODEL_ARGS=... CKPT=... before the command"
    assert script_problems(tmp_path, text)[0] == blank
    one = "$MODEL_ARGS has no value; write MODEL_ARGS=... before the command"
    assert script_problems(tmp_path, text.replace("$CKPT", "/ckpt"))[0] == one


def test_a_script_that_ends_before_its_launch_says_where(tmp_path):
    text = f"""if [ "$1" = 1 ]; then
  SP=--sequence-parallel
else
  echo "0 or 1"
  exit
fi
torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} --micro-batch-size 1 $SP
"""
    ends = "no launch command runs: line 5 ends the script (exit); pass the arguments and variables that it expects"
    assert script_problems(tmp_path, text, " 8") == [ends]
    read("auto", f"{tmp_path / 'run.sh'} 1", {"hardware.node_type": "dgx-h100"})


def test_a_batch_that_the_devices_do_not_divide_is_one_to_set(tmp_path):
    """64 sequences on 10 ranks of 2, and 8 on 16 ranks of 1: refused with the setting that replaces them."""
    tree = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}
    [line] = ds_problems(tree, TOLD | {"parallelism.dp": 10})
    assert line.endswith("= 2 * 10 (got 64); add --set data.gbs=N")
    told = TOLD | {"parallelism.dp": 10, "data.gbs": 80}
    assert read_deepspeed("ds.json", json.dumps(STAGE | tree), {}, told).config["data"]["gbs"] == 80
    text = f"torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py {MODEL} --micro-batch-size 1\n"
    [line] = script_problems(tmp_path, text)
    assert line.endswith("= 1 * 16 (got 8); add --set data.gbs=N")
    sets = {"hardware.node_type": "dgx-h100", "data.gbs": 32}
    assert to_job(read("auto", str(tmp_path / "run.sh"), sets), sets).data.gbs == 32
