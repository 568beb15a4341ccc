"""What a custom program passes to Hugging Face's objects, and files of adapters that its script names."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import Reading, to_job

SETS: dict[str, Any] = {"hardware.node_type": "dgx-h100"}
COMMAND = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 2048 "


def reading(folder: Path, script: str, **files: str) -> Reading:
    """A script beside other files (name with _ for the dot before py or json), read."""
    for name, text in ({"run.sh": script + "\n"} | files).items():
        path = folder / name.replace("_py", ".py").replace("_json", ".json")
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return read("transformers", str(folder / "run.sh"), SETS)


def lora(folder: Path, script: str, **files: str) -> Any:
    found = reading(folder, script, **files)
    return to_job(found, SETS).model.lora


ARGUMENTS = """\
    parser.add_argument("--use_lora", action="store_true")
    parser.add_argument("--rank_of_lora", type=int, default=32)
    args = parser.parse_args()
    if args.use_lora:
        model = get_peft_model(model, LoraConfig(r=args.rank_of_lora, target_modules=["q_proj", "o_proj"], lora_dropout=0.1))
"""


@pytest.mark.parametrize(("flag", "rank"), [("", 32), (" --rank_of_lora 4", 4)])
def test_the_rank_and_targets_that_a_program_passes_to_peft(tmp_path: Path, flag: str, rank: int) -> None:
    """LoraConfig(r=args.X): the flag's value, else the default of add_argument; literals as they stand."""
    found = lora(
        tmp_path, f"{COMMAND} --bf16 True --per_device_train_batch_size 1 --use_lora{flag}", train_py=ARGUMENTS
    )
    assert (found.rank, list(found.targets), found.dropout) == (rank, ["q_proj", "o_proj"], 0.1)


def test_without_the_switch_there_are_no_adapters(tmp_path: Path) -> None:
    assert lora(tmp_path, f"{COMMAND} --bf16 True --per_device_train_batch_size 1", train_py=ARGUMENTS) is None


@pytest.mark.parametrize(("flag", "rank"), [("", None), (" --use_lora", 4)])
def test_defaults_of_adapters_do_not_switch_them_on(tmp_path: Path, flag: str, rank: int | None) -> None:
    """Rank and targets have defaults under names that peft's settings have too; argparse's store_true is false unless given."""
    program = ARGUMENTS.replace('"--rank_of_lora", type=int, default=32', '"--lora_r", type=int, default=4')
    program = program.replace("rank_of_lora", "lora_r")
    found = lora(tmp_path, f"{COMMAND} --bf16 True --per_device_train_batch_size 1{flag}", train_py=program)
    assert (found.rank if found else None) == rank


def test_do_lora_is_not_one_of_the_switches_of_what_the_trainer_does(tmp_path: Path) -> None:
    """do_train and do_eval change no cost; do_lora freezes the weights."""
    program = ARGUMENTS.replace("use_lora", "do_lora")
    found = lora(
        tmp_path, f"{COMMAND} --bf16 True --per_device_train_batch_size 1 --do_train --do_lora", train_py=program
    )
    assert found.rank == 32


def test_unknown_rank_and_targets_of_a_custom_program_are_asked_for(tmp_path: Path) -> None:
    found = reading(tmp_path, f"{COMMAND} --bf16 True --per_device_train_batch_size 1 --use_lora True")
    with pytest.raises(ConfigError) as error:
        to_job(found, SETS)
    told = [line.partition("; ")[2] for line in error.value.problems]
    assert told == ["add --set model.lora.rank=N", "add --set model.lora.targets=[q_proj,v_proj]"]
    more = SETS | {"model.lora.rank": 64, "model.lora.targets": ["v_proj"]}
    job = to_job(found, more)
    assert job.model.lora is not None
    assert (job.model.lora.rank, list(job.model.lora.targets)) == (64, ["v_proj"])


def test_a_file_of_adapters_is_read(tmp_path: Path) -> None:
    config = '{"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.2, "lora_target_modules": ["k_proj", "down_proj"]}'
    script = f"{COMMAND} --bf16 True --per_device_train_batch_size 1 --use_lora True --lora_config conf/lora.json"
    found = lora(tmp_path, script, lora_json=config)
    assert (found.rank, list(found.targets), found.dropout) == (4, ["k_proj", "down_proj"], 0.2)


def test_a_file_of_adapters_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.json, which was not found.*--with FILE"):
        reading(tmp_path, f"{COMMAND} --use_lora True --lora_config conf/lora.json")


def test_targets_are_all_the_words_after_their_flag(tmp_path: Path) -> None:
    """nargs of HfArgumentParser: a list of words, up to the next flag."""
    script = (
        f"{COMMAND} --use_peft --lora_target_modules q_proj up_proj --lora_r 2 --bf16 --per_device_train_batch_size 1"
    )
    found = lora(tmp_path, script)
    assert (found.rank, list(found.targets)) == (2, ["q_proj", "up_proj"])


def test_a_fused_name_among_separate_ones_matches_no_module(tmp_path: Path) -> None:
    """Qwen2 has q_proj, k_proj and v_proj; c_attn is Qwen1's, and peft finds no such module here."""
    script = f"{COMMAND} --use_peft --lora_target_modules c_attn,q_proj,v_proj --lora_r 2 --bf16 --per_device_train_batch_size 1"
    assert list(lora(tmp_path, script).targets) == ["q_proj", "v_proj"]


def test_what_a_program_passes_to_the_trainer(tmp_path: Path) -> None:
    """bf16=True, and a batch and a length under names of its own: 3 x 5 steps x 8 processes = 120 sequences."""
    program = """\
        training = SFTConfig(
            per_device_train_batch_size=args.bs, gradient_accumulation_steps=5, max_length=args.cut, bf16=True,
            gradient_checkpointing=True,
        )
    """
    script = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --bs 3 --cut 1536"
    job = to_job(reading(tmp_path, script, train_py=program), SETS)
    assert (job.data.gbs, job.data.microbatch_sz, job.data.seqlen) == (120, 3, 1536)
    assert (job.performance.precision, job.performance.activation_checkpointing_type) == ("bf16", "full")


def test_a_program_of_which_python_warns_is_read(tmp_path: Path) -> None:
    """A pattern that is not a raw string, as many programs have; the warning is theirs, not the report's."""
    program = 'name = re.sub("\\d", "", name)\ntraining = TrainingArguments(bf16=True)\n'
    script = f"{COMMAND} --per_device_train_batch_size 1"
    assert to_job(reading(tmp_path, script, train_py=program), SETS).performance.precision == "bf16"


def test_the_sequence_that_a_program_passes_to_its_trainer_is_read(tmp_path: Path) -> None:
    """trl's SFTTrainer had max_seq_length itself before its SFTConfig did; where a config is passed too, both must agree."""
    command = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --bf16"
    program = "trainer = SFTTrainer(model=model, args=arguments, max_seq_length=1024)\n"
    assert to_job(reading(tmp_path, command, train_py=program), SETS).data.seqlen == 1024
    both = program + "arguments = SFTConfig(max_seq_length=2048)\n"
    assert "data.seqlen" in (reading(tmp_path, command, train_py=both).left_open or {})


def test_a_template_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model:\n  _component_: torchtune.models.phi4.phi4_14b\n  path: {{folder}}/x\n")
    with pytest.raises(
        ConfigError, match=r"line 3: a key must be a word; the \{\{name\}\} of a template must be filled in first"
    ):
        read("torchtune", str(tmp_path / "job.yaml"), SETS)


def test_two_calls_that_differ_are_asked_for(tmp_path: Path) -> None:
    program = "a = TrainingArguments(bf16=True)\nb = TrainingArguments(bf16=False)\n"
    found = reading(tmp_path, f"{COMMAND} --per_device_train_batch_size 1", train_py=program)
    assert found.left_open == {
        "performance.precision": "bf16 is set by the code of train.py; add --set performance.precision=NAME"
    }
    said = reading(tmp_path, f"{COMMAND} --per_device_train_batch_size 1 --bf16", train_py=program)
    assert to_job(said, SETS).performance.precision == "bf16"


@pytest.mark.parametrize("launcher", ["deepspeed --hostfile hosts", "deepspeed --hostfile=hosts --num_gpus 8"])
def test_the_devices_of_a_hostfile_are_asked_for(tmp_path: Path, launcher: str) -> None:
    """No default of accelerate's applies to another launcher."""
    script = f"{launcher} train.py --model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 2048 --bf16 True"
    found = reading(tmp_path, script + " --per_device_train_batch_size 1 --deepspeed zero3.json")
    with pytest.raises(ConfigError, match="number of devices unknown: those of its hostfile"):
        to_job(found, SETS)
    sets = SETS | {"parallelism.dp": 16}
    assert to_job(read("transformers", str(tmp_path / "run.sh"), sets), sets).data.gbs == 16


def test_adapters_that_the_code_sets_up_with_rank_and_targets_are_read(tmp_path: Path) -> None:
    program = 'model = get_peft_model(model, LoraConfig(r=8, target_modules=["k_proj"], lora_dropout=0.3))\n'
    found = lora(tmp_path, f"{COMMAND} --bf16 True --per_device_train_batch_size 1", train_py=program)
    assert (found.rank, list(found.targets), found.dropout) == (8, ["k_proj"], 0.3)


def test_weights_that_the_code_quantizes_are_refused(tmp_path: Path) -> None:
    """Frozen weights of 4 bits are no bf16 weights, whatever the script says of the adapters."""
    program = ARGUMENTS + "    quantization = BitsAndBytesConfig(load_in_4bit=True)\n"
    script = f"{COMMAND} --bf16 True --per_device_train_batch_size 1 --use_lora"
    with pytest.raises(ConfigError, match=r"train\.py: quantized weights, set up by its code; not modeled"):
        lora(tmp_path, script, train_py=program)


ALPACA = """\
    def train(batch_size: int = 128, micro_batch_size: int = 4, cutoff_len: int = 256, lora_r: int = 8):
        steps = batch_size // micro_batch_size // world_size
        model = AutoModelForCausalLM.from_pretrained(base_model{bits})
        tokens = tokenizer(text, truncation=True, max_length=cutoff_len, padding=False)
        model = get_peft_model(model, LoraConfig(r=lora_r, target_modules=lora_target_modules))
        TrainingArguments(per_device_train_batch_size=micro_batch_size, gradient_accumulation_steps=steps, bf16=True)
    fire.Fire(train)
"""
FLAGS = "train.py --base_model Qwen/Qwen2.5-7B --batch_size 96 --micro_batch_size 4 --cutoff_len 640 --lora_r 4 "


def test_a_batch_that_the_program_divides_says_no_devices(tmp_path: Path) -> None:
    """96 sequences in micro-batches of 4: of 8 devices 3 micro-batches each, of 4 devices 6; `python` alone starts neither."""
    flags = FLAGS + "--lora_target_modules '[q_proj,v_proj]'"
    program = ALPACA.format(bits="")
    job = to_job(reading(tmp_path, f"torchrun --nproc_per_node 8 {flags}", train_py=program), SETS)
    assert (job.data.gbs, job.data.microbatch_sz, job.parallelism.dp, job.data.seqlen) == (96, 4, 8, 640)
    alone = reading(tmp_path, f"python {flags}", train_py=program)
    assert alone.left_open == {
        "parallelism.dp": "launched by python only: number of processes unknown; add --set parallelism.dp=N"
    }


def test_weights_that_the_code_loads_in_8_bits_are_refused(tmp_path: Path) -> None:
    script = f"torchrun --nproc_per_node 8 {FLAGS} --lora_target_modules '[q_proj,v_proj]'"
    found = reading(tmp_path, script, train_py=ALPACA.format(bits=", load_in_8bit=True"))
    with pytest.raises(ConfigError, match=r"train\.py: quantized weights, set up by its code; not modeled"):
        to_job(found, SETS)


def test_two_lengths_of_a_tokenizer_say_none(tmp_path: Path) -> None:
    program = "a = tokenizer(x, truncation=True, max_length=64)\nb = tokenizer(y, truncation=True, max_length=128)\n"
    command = "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --bf16"
    assert "data.seqlen" in (reading(tmp_path, command, train_py=program).left_open or {})


def test_a_script_that_passes_its_words_on_asks_for_them(tmp_path: Path) -> None:
    script = 'accelerate launch --num_processes 4 train.py --per_device_train_batch_size 1 --max_seq_length 512 "$@"'
    found = reading(tmp_path, script)
    with pytest.raises(
        ConfigError, match=r"model unknown \(the script passes its own words on; give both as one string"
    ):
        to_job(found, SETS)
    given = read("transformers", f"{tmp_path / 'run.sh'} --model_name_or_path Qwen/Qwen2.5-7B --bf16 True", SETS)
    assert to_job(given, SETS).model.name == "qwen2.5-7b"


OWN = """\
    BASE = "Qwen/Qwen2.5-7B"
    model = AutoModelForCausalLM.from_pretrained(BASE, torch_dtype="auto")
    arguments = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True, max_length=2048,
        gradient_checkpointing=True,
        deepspeed="zero.json")
"""


def test_a_program_that_says_all_itself(tmp_path: Path) -> None:
    """Without a flag on its command line: model, batch and the stage of the ds_config that it names are in its code."""
    for name, text in (("run.sh", "deepspeed --num_gpus 8 ./sft.py\n"), ("sft.py", textwrap.dedent(OWN))):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    job = to_job(read("auto", str(tmp_path / "run.sh"), SETS), SETS)
    assert (job.parallelism.zero_level, job.parallelism.dp, job.performance.precision) == (3, 8, "bf16")
    assert (job.data.gbs, job.data.microbatch_sz, job.data.seqlen, job.model.hidden_sz) == (64, 2, 2048, 3584)


@pytest.mark.parametrize(
    "line",
    ["model = AutoModelForCausalLM.from_pretrained(choose())", "other = AutoModelForCausalLM.from_pretrained('a/b')"],
)
def test_a_model_that_the_code_leaves_open_is_asked_for(tmp_path: Path, line: str) -> None:
    program = OWN.replace('"Qwen/Qwen2.5-7B"', '"own/7b"') + f"    {line}\n"
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    with pytest.raises(ConfigError, match="add --set model=NAME"):
        to_job(reading(tmp_path, "deepspeed --num_gpus 8 sft.py", sft_py=program), SETS)


@pytest.mark.parametrize("trainer", ["DPOTrainer", "GRPOTrainer", "RewardTrainer"])
def test_a_program_of_another_trainer_is_no_training_on_sequences(tmp_path: Path, trainer: str) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    program = f"{OWN}    trainer = {trainer}(model, args=arguments)\n"
    with pytest.raises(ConfigError, match=r"runs sft\.py: training on preferences or rewards is not modeled"):
        reading(tmp_path, "deepspeed --num_gpus 8 sft.py", sft_py=program)


@pytest.mark.parametrize(
    "line", ["model.model.embed_tokens.requires_grad_(False)", "for p in half: p.requires_grad = False"]
)
def test_weights_that_a_program_does_not_train_are_told(tmp_path: Path, line: str) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sft\.py: frozen weights, set up by its code; not modeled"):
        to_job(reading(tmp_path, "deepspeed --num_gpus 8 sft.py", sft_py=f"{OWN}    {line}\n"), SETS)


ARGUMENTS_FILE = """\
    {"model_name_or_path": "Qwen/Qwen2.5-7B", "max_seq_length": 2048, "per_device_train_batch_size": 2, "bf16": true,
     "gradient_accumulation_steps": 4, "train_mode": "%s", "lora_rank": 32, "lora_target_modules": ["q_proj"]}
"""


@pytest.mark.parametrize(("mode", "rank", "base"), [("full", None, None), ("lora", 32, "fp32"), ("qlora", 32, "nf4")])
def test_a_file_of_a_programs_arguments(tmp_path: Path, mode: str, rank: int | None, base: str | None) -> None:
    """2 sequences x 4 steps x 8 devices are 64; train_mode switches the adapters on, in 4 bits with qlora."""
    (tmp_path / "train.py").write_text("parser = HfArgumentParser((Own, TrainingArguments))\n", encoding="utf-8")
    (tmp_path / "sft.json").write_text(textwrap.dedent(ARGUMENTS_FILE) % mode, encoding="utf-8")
    script = tmp_path / "run.sh"
    script.write_text("deepspeed --num_gpus 8 train.py --train_args_file sft.json\n", encoding="utf-8")
    found = to_job(read("auto", str(script), SETS), SETS)
    assert (found.data.gbs, found.data.seqlen, found.performance.precision) == (64, 2048, "bf16")
    lora = found.model.lora
    assert (lora and lora.rank) == rank
    assert base is None or (lora is not None and lora.base_dtype == base)


@pytest.mark.parametrize("mode", ["dora", "freeze", "ptuning"])
def test_partial_training_of_another_kind_by_train_mode(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match="partial training by a method other than LoRA"):
        lora(tmp_path, f"{COMMAND} --bf16 True --per_device_train_batch_size 1 --train_mode {mode}")


def test_tokens_as_they_were_stored_are_not_cut_by_the_tokenizer(tmp_path: Path) -> None:
    """The field is the tokenizer's; a program that loads tokens and hands them on has sequences as long as those of its data."""
    code = """\
    class Arguments(TrainingArguments):
        model_max_length: int = field(default=512)
    tokenizer = AutoTokenizer.from_pretrained(name, model_max_length=args.model_max_length)
    trainer = Trainer(model=model, tokenizer=tokenizer, train_dataset=load_from_disk(args.data))
    """
    script = f"{COMMAND.replace('--max_seq_length 2048 ', '')} --bf16 True --per_device_train_batch_size 1"
    with pytest.raises(ConfigError) as caught:
        to_job(reading(tmp_path, script, train_py=code), SETS)
    (line,) = caught.value.problems
    assert line.endswith("max_seq_length is set by the code of train.py; add --set data.seqlen=N")
    cut = textwrap.dedent(code) + "data = data.map(lambda row: tokenizer(row, truncation=True))\n"
    assert to_job(reading(tmp_path, script, train_py=cut), SETS).data.seqlen == 512
