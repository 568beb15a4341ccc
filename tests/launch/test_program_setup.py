"""What a training program's own code decides: constants and expressions for its trainer, adapters, and other kinds of models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_program_calls import SETS, reading

from steptime.base.config import ConfigError
from steptime.launch.reading import to_job

COMMAND = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 2048"


def test_constants_that_a_program_passes_are_read(tmp_path: Path) -> None:
    """3 sequences x 5 micro-batches x 8 devices = 120, not the trainer's 8 x 1 x 8."""
    passed = "per_device_train_batch_size=SIZE, gradient_accumulation_steps=STEPS, bf16=True"
    program = f"SIZE = 3\nSTEPS = 5\nTrainingArguments({passed})\n"
    job = to_job(reading(tmp_path, COMMAND, train_py=program), SETS)
    assert (job.data.microbatch_sz, job.data.gbs, job.performance.precision) == (3, 120, "bf16")


@pytest.mark.parametrize(
    ("passed", "open_keys"),
    [
        ("per_device_train_batch_size=sizes[name]", {"data.microbatch_sz", "data.gbs"}),
        ("gradient_accumulation_steps=128 // world_size", {"data.gbs"}),
        ("bf16=dtype == 'bf16'", {"performance.precision"}),
        ("bf16=is_bfloat16_supported(), fp16=not is_bfloat16_supported()", set[str]()),
        ("gradient_checkpointing=long > 1024", {"performance.activation_checkpointing_type"}),
        ("gradient_checkpointing=False", set[str]()),
        ("gradient_checkpointing=own.gradient_checkpointing, bf16=own.bf16", set[str]()),  # TrainingArguments' own
    ],
)
def test_expressions_that_a_program_passes_are_asked_for(tmp_path: Path, passed: str, open_keys: set[str]) -> None:
    """A default of the trainer's in their place would be another job."""
    found = reading(tmp_path, COMMAND, train_py=f"TrainingArguments({passed})\n")
    assert (found.left_open or {}).keys() == open_keys
    if open_keys == {"data.gbs"}:
        why = "gradient_accumulation_steps is set by the code of train.py; add --set data.gbs=N"
        assert found.left_open == {"data.gbs": why}
        with pytest.raises(ConfigError, match="gradient_accumulation_steps is set by the code"):
            to_job(found, SETS)


def test_a_name_that_is_set_twice_is_no_constant(tmp_path: Path) -> None:
    program = "SIZE = 3\nif debug:\n  SIZE = 1\nTrainingArguments(per_device_train_batch_size=SIZE)\n"
    assert "data.microbatch_sz" in (reading(tmp_path, COMMAND, train_py=program).left_open or {})


def test_adapters_beside_an_argument_of_theirs_that_is_no_switch(tmp_path: Path) -> None:
    """--lora_checkpoint only loads: get_peft_model() runs whatever it is; r and targets are the module's constants."""
    program = (
        'p.add_argument("--lora_checkpoint")\nR = 4\nif args.lora_checkpoint is not None:\n    load()\n'
        'model = get_peft_model(model, LoraConfig(r=R, target_modules=["q_proj"]))\n'
    )
    lora = to_job(reading(tmp_path, COMMAND + " --bf16", train_py=program), SETS).model.lora
    assert lora is not None
    assert (lora.rank, list(lora.targets)) == (4, ["q_proj"])


def test_a_ds_config_that_a_switch_of_the_program_chooses(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    program = 'TrainingArguments(deepspeed="zero.json" if args.deepspeed else None, bf16=True)\n'
    assert to_job(reading(tmp_path, COMMAND + " --deepspeed", train_py=program), SETS).parallelism.zero_level == 2
    assert to_job(reading(tmp_path, COMMAND, train_py=program), SETS).performance.software == "accelerate-ddp"


@pytest.mark.parametrize("kind", ["AutoModelForSequenceClassification", "LlamaForTokenClassification"])
def test_a_model_that_labels_sequences_is_no_model_of_text(tmp_path: Path, kind: str) -> None:
    program = f"model = {kind}.from_pretrained(name)\n"
    with pytest.raises(ConfigError, match=r"runs train\.py: training of a model that labels sequences is not modeled"):
        reading(tmp_path, COMMAND, train_py=program)
    both = program + "other = AutoModelForCausalLM.from_pretrained(name)\n"
    assert reading(tmp_path, COMMAND, train_py=both).config["parallelism"]["dp"] == 8


QLORA = """
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", quantization_config=bnb)
peft_config = LoraConfig(r=32, lora_alpha=8{more})
trainer = SFTTrainer(model, args=TrainingArguments(per_device_train_batch_size=2, bf16=True), peft_config=peft_config)
"""


def test_adapters_over_weights_in_4_bits_that_the_code_sets_up(tmp_path: Path) -> None:
    """peft gives queries and values adapters where no targets are named, and takes rank 8 and no dropout by default."""
    found = reading(tmp_path, COMMAND, train_py=QLORA.format(more=""))
    lora = to_job(found, SETS).model.lora
    assert lora is not None
    assert (lora.rank, list(lora.targets), lora.dropout, lora.base_dtype) == (32, ["q_proj", "v_proj"], 0.0, "nf4")
    least = to_job(reading(tmp_path, COMMAND, train_py=QLORA.format(more="").replace("r=32, ", "")), SETS).model.lora
    assert least is not None
    assert least.rank == 8


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (", modules_to_save=['lm_head']", "weights trained in full in addition to adapters"),
        (", use_dora=True", "DoRA: LoRA is counted"),
    ],
)
def test_what_else_the_code_of_adapters_sets_up_is_refused(tmp_path: Path, more: str, why: str) -> None:
    found = reading(tmp_path, COMMAND, train_py=QLORA.format(more=more))
    with pytest.raises(ConfigError, match=rf"train\.py: {why}, set up by its code; not modeled"):
        to_job(found, SETS)


def test_targets_that_the_code_computes_are_asked_for(tmp_path: Path) -> None:
    found = reading(tmp_path, COMMAND, train_py=QLORA.format(more=", target_modules=find_all_linear_names(model)"))
    fix = "lora_target_modules is set by the code of train.py; add --set model.lora.targets=[q_proj,v_proj]"
    assert found.left_open == {"model.lora.targets": fix}
    lora = to_job(found, SETS | {"model.lora.targets": ["k_proj"]}).model.lora
    assert lora is not None
    assert (lora.rank, list(lora.targets)) == (32, ["k_proj"])


METHOD = "torchrun --nproc_per_node=8 sft.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 --max_length 2048"
METHOD += " --per_device_train_batch_size 1 --gradient_accumulation_steps 1"


@pytest.mark.parametrize("option", ["--peft_method lora", "--tuning_mode LoRA", "--method qlora", "--adapter=lora"])
def test_a_method_that_a_program_of_ones_own_takes_is_no_training_of_every_weight(tmp_path: Path, option: str) -> None:
    """Whatever the program calls it: its rank and its targets are its own."""
    name, word = re.split("[ =]", option.removeprefix("--"))
    found = reading(tmp_path, f"{METHOD} {option}")
    why = f"({name} is not an argument of Hugging Face Trainer)"
    assert (found.left_open or {}).keys() == {"model.lora.rank", "model.lora.targets"}
    assert all(why in said for said in (found.left_open or {}).values())
    lora = to_job(reading(tmp_path, f"{METHOD} {option} --lora_r 4 --target_modules q_proj"), SETS).model.lora
    assert lora is not None
    assert (lora.rank, list(lora.targets)) == (4, ["q_proj"])
    assert (lora.base_dtype == "nf4") == (word == "qlora")


def test_such_a_method_by_the_default_of_its_program(tmp_path: Path) -> None:
    """argparse's default counts where the command has no such option; of a method other than LoRA, or of every weight, too."""
    program = 'p.add_argument("--finetune_method", default="{}")\n'
    found = reading(tmp_path, METHOD, sft_py=program.format("lora"))
    assert (found.left_open or {}).keys() == {"model.lora.rank", "model.lora.targets"}
    assert to_job(reading(tmp_path, METHOD, sft_py=program.format("full")), SETS).model.lora is None
    with pytest.raises(ConfigError, match="partial training by a method other than LoRA"):
        to_job(reading(tmp_path, f"{METHOD} --finetune_method ia3", sft_py=program.format("lora")), SETS)


@pytest.mark.parametrize("folder", ["own", "src/own"])
def test_a_program_started_as_a_module_is_read(tmp_path: Path, folder: str) -> None:
    """python -m own.sft is own/sft.py of the repository, or of its folder src; without it only the command counts."""
    command = METHOD.replace("sft.py", "-m own.sft")
    assert to_job(reading(tmp_path, command), SETS).model.lora is None
    (tmp_path / folder).mkdir(parents=True)
    code = "model = get_peft_model(model, LoraConfig(r=4, target_modules=['q_proj']))\n"
    (tmp_path / folder / "sft.py").write_text(code, encoding="utf-8")
    lora = to_job(reading(tmp_path, command), SETS).model.lora
    assert lora is not None
    assert (lora.rank, list(lora.targets)) == (4, ["q_proj"])


def test_a_subcommand_of_another_method(tmp_path: Path) -> None:
    """`accelerate launch -m own grpo -c job.json`: the word after the program."""
    with pytest.raises(ConfigError) as error:
        reading(tmp_path, "accelerate launch --num_processes 8 -m trl_own grpo -c job.json")
    assert error.value.problems[0].endswith("runs trl_own grpo: training on preferences or rewards is not modeled")
