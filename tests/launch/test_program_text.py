"""What is found in the text of programs and files by their marks: in linear time, and where it is written."""

from pathlib import Path
from time import process_time

import pytest

from steptime.base.config import ConfigError
from steptime.launch.kinds import kind_of
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.program_calls import kind_started, passed_in
from steptime.launch.python.program_setup import set_up_in
from steptime.launch.read import read

FROZEN = ["frozen weights, set up by its code"]
MARK = "-" * 10 + " arguments " + "-" * 10 + "\n"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if __name__ == '__main__':\n  for p in m.parameters():\n    p.requires_grad = False", FROZEN),
        ("m.model.layers[0].requires_grad_(False)", FROZEN),
        ("if args.freeze:\n  m.requires_grad_(False)", []),
        ("m.requires_grad_(True)", []),
        ("x = m" + ".a()" * 900, []),  # ast.unparse of such a chain is too deep
    ],
)
def test_frozen_weights_are_those_of_no_test_of_the_program_s_own(code: str, found: list[str]) -> None:
    assert set_up_in(code, set(), set()) == found


BY_NAME = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--hub_model_id")
parser.add_argument("--freeze", action="store_true")
args = parser.parse_args()
if "unfrozen_qk" in args.hub_model_id:
    for param in model.model.parameters():
        param.requires_grad = False
elif "frozen" in args.hub_model_id.lower():
    if "frozen" not in locals():
        model.model.layers[0].requires_grad_(False)
elif args.freeze:
    model.requires_grad_(False)
trainer = SFTTrainer(model=model)
"""


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--hub_model_id own/unfrozen_qk_7b", "frozen weights"),
        ("--hub_model_id own/Frozen_7b", "frozen weights"),
        ("--hub_model_id own/7b", ""),
        ("--hub_model_id own/7b --freeze", "frozen weights"),
        ("", "frozen weights if 'unfrozen_qk' in args.hub_model_id"),
    ],
)
def test_weights_frozen_by_a_name_are_decided_by_its_value(tmp_path: Path, flags: str, why: str) -> None:
    (tmp_path / "sft.py").write_text(BY_NAME, encoding="utf-8")
    command = f"accelerate launch --num_processes 8 sft.py --model_name_or_path Qwen/Qwen2.5-7B --bf16 true {flags}"
    more = "--per_device_train_batch_size 1 --max_seq_length 1024"
    (tmp_path / "run.sh").write_text(f"{command} {more}\n", encoding="utf-8")
    reading = read("transformers", str(tmp_path / "run.sh"), {"hardware.node_type": "dgx-h100"})
    notes = [flag.note for flag in reading.of("unmodeled") if "frozen" in flag.note]
    assert notes == ([f"{why}, set up by its code"] if why else [])


def test_the_model_that_a_program_loads_is_a_literal_of_any_module() -> None:
    code = "m = transformers.AutoModelForCausalLM.from_pretrained('a/b', dtype='auto')"
    assert passed_in(code)["model_name_or_path"] == "a/b"
    assert "model_name_or_path" not in passed_in(code.replace("ForCausalLM", ""))


def test_a_program_behind_a_continued_line_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("args = TrainingArguments(output_dir='x')", encoding="utf-8")
    nearby = NearbyFiles(tmp_path)
    continued = "torchrun --nproc_per_node 8 \\\n  --nnodes 2 \\\n  train.py --bf16\n"
    assert kind_started(continued, nearby) == "transformers"
    assert kind_started('RUN="./train.py --bf16"\nsrun bash -c "deepspeed $RUN"\n', nearby) == "transformers"
    assert kind_started('PY="${ROOT}/train.py"\ntorchrun "${PY}" --bf16\n', nearby) == "transformers"
    (tmp_path / "train.py").write_text("from megatron.bridge.recipes import x", encoding="utf-8")
    assert kind_started(continued, nearby) == "nemo"
    assert not kind_started("# torchrun train.py\necho train.py\n", nearby)


@pytest.mark.parametrize("text", ["python " * 140_000, "python " + "a" * 1_000_000, "python " + "a.py" * 250_000 + "x"])
def test_the_program_of_a_long_line_is_found_in_linear_time(text: str, tmp_path: Path) -> None:
    start = process_time()
    assert not kind_started(text, NearbyFiles(tmp_path))
    assert process_time() - start < 2.0


@pytest.mark.parametrize("text", [MARK * 11_000, (MARK + "hidden_size ... 4096 x\n" + "\n" * 20) * 5_000])
def test_the_kind_of_many_dumps_is_found_in_linear_time(text: str) -> None:
    start = process_time()
    assert kind_of("a.log", text) == "megatron"
    assert process_time() - start < 1.6  # a dozen patterns; in quadratic time it takes many times as long


def test_a_long_line_of_dashes_is_no_dump() -> None:
    start = process_time()
    with pytest.raises(ConfigError, match="unknown framework"):
        kind_of("a.txt", "-" * 300_000)
    assert process_time() - start < 1.5


def test_a_dump_in_comments_does_not_decide_the_kind() -> None:
    """A script of ms-swift with what another job printed, as a remark."""
    dump = "# -------- arguments --------\n#  hidden_size ........ 4096\n"
    assert kind_of("run.sh", f"#!/bin/bash\nswift sft --model Qwen/Qwen2.5-7B --train_type full\n{dump}") == "swift"


def test_flags_in_comments_do_not_decide_the_kind() -> None:
    command = "accelerate launch train.py --model_name_or_path a/b --per_device_train_batch_size 1"
    assert kind_of("run.sh", f"#!/bin/bash\n# before: --tensor-model-parallel-size 8\n{command}\n") == "transformers"


def test_a_factory_of_nemo_behind_a_launcher() -> None:
    command = "nemo llm pretrain --factory llama3_8b trainer.num_nodes=2"
    for line in (command, f"srun {command} -y", f"srun bash -c '{command}'"):
        assert kind_of("run.sh", f"#!/bin/bash\n#SBATCH --nodes=2\n{line}\n") == "nemo"


def test_the_flags_of_a_functional_test_of_megatron_over_a_recipe() -> None:
    """Megatron-LM's tests/functional_tests/test_cases: MODEL_ARGS may also be overrides, without any flag."""
    text = "ENV_VARS: {A: 1}\nMODEL_ARGS:\n  trainer.devices: 8\n  model.config.num_layers: 12\n"
    assert kind_of("model_config.yaml", text) == "megatron"


@pytest.mark.parametrize("kind", ["auto", "transformers", "llamafactory"])
def test_a_program_without_its_command_asks_for_it(tmp_path: Path, kind: str) -> None:
    """A shell reads `trainer.train()` as a function without a body, and the apostrophe of a remark as an open quote."""
    for number, code in enumerate(("trainer = Trainer(model)\ntrainer.train()\n", "# it isn't one\ntrain()\n")):
        (path := tmp_path / f"own{number}.py").write_text(code)
        with pytest.raises(ConfigError) as error:
            read(kind, str(path))
        assert error.value.problems == [
            f"{path}: a Python program, which is not run; give its launch script, or a file with the command that starts it"
        ]
