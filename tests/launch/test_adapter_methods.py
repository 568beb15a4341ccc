"""PiSSA and LoRA+ are LoRA with other initial values and learning rates: the same step."""

from __future__ import annotations

import pytest

from steptime.launch.read import read

SETS = {"hardware.node_type": "dgx-h100", "devices": 8}
JOBS = {
    "llamafactory": "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\n"
    "cutoff_len: 2048\nbf16: true\nper_device_train_batch_size: 1\n",
    "axolotl": "base_model: NousResearch/Meta-Llama-3-8B\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n"
    "sequence_len: 2048\nbf16: true\nmicro_batch_size: 1\n",
    "swift": "model: Qwen/Qwen2.5-7B-Instruct\ntuner_type: lora\nmax_length: 2048\nper_device_train_batch_size: 1\n",
}
SAID = [
    ("llamafactory", "pissa_init: true\npissa_iter: 16\npissa_convert: true\n", "pissa_init true: PiSSA"),
    ("llamafactory", "loraplus_lr_ratio: 16.0\nloraplus_lr_embedding: 1.0e-6\n", "loraplus_lr_ratio 16.0: LoRA+"),
    ("axolotl", "loraplus_lr_ratio: 16\nloraplus_lr_embedding: 1.0e-6\n", "loraplus_lr_ratio 16: LoRA+"),
    ("axolotl", "peft_init_lora_weights: pissa\n", "peft_init_lora_weights pissa: LoRA of other"),
    ("swift", "lorap_lr_ratio: 16\n", "lorap_lr_ratio 16: LoRA+"),
    ("swift", "init_weights: pissa_niter_4\n", "init_weights pissa_niter_4: LoRA of other"),
]


def reading_of(folder, kind, more=""):
    path = folder / "job.yaml"
    path.write_text(JOBS[kind] + more)
    return read(kind, str(path), SETS)


def plan_of(reading):
    return {section: said for section, said in reading.config.items() if section != "notes"}


@pytest.mark.parametrize(("kind", "more", "note"), SAID, ids=[f"{kind}: {note}" for kind, _, note in SAID])
def test_the_step_is_that_of_lora(tmp_path, kind, more, note):
    plain, reading = reading_of(tmp_path, kind), reading_of(tmp_path, kind, more)
    assert plan_of(reading) == plan_of(plain)
    assert plan_of(plain)["model"]["lora"]["rank"] == 8
    told = [f"{flag.name} {flag.value}: {flag.note}" for flag in reading.flags if flag.status == "approximated"]
    assert any(line.startswith(note) for line in told)
    assert not [flag.name for flag in reading.flags if flag.note.startswith("not an option")]


@pytest.mark.parametrize(
    ("method", "unmodeled"), [("pissa", []), ("loraplus", []), ("ia3", ["peft_method"]), ("freeze", ["peft_method"])]
)
def test_a_method_of_a_program_of_ones_own(tmp_path, method, unmodeled):
    """IA3 scales activations: it is not LoRA."""
    script = tmp_path / "run.sh"
    script.write_text(
        f"torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --peft_method {method} --lora_r 8 --bf16 True"
        " --lora_target_modules q_proj,v_proj --model_max_length 2048 --per_device_train_batch_size 1\n"
    )
    reading = read("transformers", str(script), {"hardware.node_type": "dgx-h100"})
    assert [flag.name for flag in reading.flags if flag.status == "unmodeled"] == unmodeled
    told = any("LoRA of other" in note for note in reading.config.get("notes", []))
    assert told == (not unmodeled)
