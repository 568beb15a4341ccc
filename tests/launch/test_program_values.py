"""Expressions over a training program's arguments or config that it passes to Hugging Face's objects."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_program_calls import COMMAND, SETS, reading

from steptime.launch.python.program_calls import passed_in
from steptime.launch.python.program_values import Expression
from steptime.launch.reading import to_job

CHOICES = """\
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--eight_bits", action="store_true")
    def main(args):
        targets = ["q_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=targets))
        arguments = TrainingArguments(bf16=args.bf16, fp16=(not args.bf16), gradient_checkpointing=True,
            optim="paged_adamw_8bit" if args.eight_bits else "adamw_torch")
"""


@pytest.mark.parametrize(
    ("flags", "precision", "optimizer"),
    [("", "fp16", None), (" --bf16", "bf16", None), (" --bf16 --eight_bits", "bf16", "adamw_8bit")],
)
def test_a_choice_by_the_programs_own_switches(
    tmp_path: Path, flags: str, precision: str, optimizer: str | None
) -> None:
    """A switch of argparse is false unless it is given; the names of a function's own constants are those constants."""
    script = f"{COMMAND} --per_device_train_batch_size 1{flags}"
    job = to_job(reading(tmp_path, script, train_py=CHOICES), SETS)
    assert (job.performance.precision, job.performance.optimizer) == (precision, optimizer)
    assert job.model.lora is not None
    assert list(job.model.lora.targets) == ["q_proj", "o_proj"]


CONFIGURED = """\
    cfg = yaml.safe_load(open(args.config))
    if cfg.get("gradient_checkpointing", False):
        model.gradient_checkpointing_enable()
    arguments = TrainingArguments(bf16=cfg.get("bf16", False), fp16=cfg.get("fp16", False),
        per_device_train_batch_size=cfg.get("per_device_train_batch_size", 1),
        gradient_accumulation_steps=cfg["gradient_accumulation_steps"])
"""


@pytest.mark.parametrize(
    ("line", "precision", "recompute"),
    [("", "fp32", None), ("bf16: true\n", "bf16", None), ("gradient_checkpointing: true\n", "fp32", "full")],
)
def test_a_look_up_in_the_programs_config(tmp_path: Path, line: str, precision: str, recompute: str | None) -> None:
    """The file's value, else the look-up's default: 1 sequence x 4 accumulations on 8 devices."""
    (tmp_path / "sft.yaml").write_text(
        f"model_name_or_path: Qwen/Qwen2.5-7B\nmax_seq_length: 1024\ngradient_accumulation_steps: 4\n{line}",
        encoding="utf-8",
    )
    found = reading(tmp_path, "torchrun --nproc_per_node 8 train.py --config sft.yaml", train_py=CONFIGURED)
    job = to_job(found, SETS)
    assert (job.data.gbs, job.data.microbatch_sz) == (32, 1)
    assert job.performance.precision == precision
    assert found.config["performance"].get("activation_checkpointing_type") == recompute


def test_a_look_up_in_the_environment_has_no_value() -> None:
    assert passed_in("TrainingArguments(bf16=os.environ.get('BF16', False))") == {"bf16": None}
    assert passed_in("TrainingArguments(bf16=cfg.get('bf16'), deepspeed=None)") == {
        "bf16": Expression("cfg.get('bf16')")
    }


@pytest.mark.parametrize("optimizer", ["pick(args)", "args.name + '_8bit'"])
def test_an_optimizer_that_only_a_run_tells_is_asked_for(tmp_path: Path, optimizer: str) -> None:
    program = f"arguments = TrainingArguments(bf16=True, optim={optimizer})\n"
    found = reading(tmp_path, f"{COMMAND} --per_device_train_batch_size 1", train_py=program)
    assert set(found.left_open) == {"performance.optimizer"}


def test_the_length_of_a_prompt_with_its_answer(tmp_path: Path) -> None:
    """shibing624/MedicalGPT supervised_finetuning.py: full_max_length = 256 + 128, the default of the second."""
    fields = ("max_source_length: int = field(default=512)", "max_target_length: int = field(default=128)")
    program = "class Data:\n    " + "\n    ".join(fields)
    program += "\n\ndef main(args):\n    full = args.max_source_length + args.max_target_length\n"
    script = COMMAND.replace(
        "--max_seq_length 2048", "--max_source_length 256 --bf16 True --per_device_train_batch_size 1"
    )
    assert to_job(reading(tmp_path, script, train_py=program), SETS).data.seqlen == 384
