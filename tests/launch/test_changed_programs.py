"""Programs over Megatron-LM whose model is not that of the flags alone, and programs that start another one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch_readings import HARDWARE
from test_flags_of_forks import GPT2, RUN, job_of, problem_of

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

OF_FLAGS = """
import os
from megatron.training.arguments import core_transformer_config_from_args
from megatron.core.models.gpt import GPTModel

def model_provider(pre_process=True, post_process=True):
    print(os.environ.get("LOCAL_RANK"), os.environ.get("DEPTH_PATTERN"))
    return GPTModel(core_transformer_config_from_args(get_args()))

pretrain(model_provider, forward_step)
"""
OF_SOME = """
from megatron.core import TransformerConfig
from megatron.core.models.gpt import GPTModel

def build(pre_process=True, post_process=True):
    args = get_args()
    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads, bf16=args.bf16
    )
    return GPTModel(config)

pretrain(build, forward_step)
"""


def test_a_config_of_some_of_the_flags_is_not_taken_for_that_of_all(tmp_path: Path) -> None:
    """--swiglu and the groups of queries do not reach the model, whose class has defaults of its own for them."""
    (tmp_path / "pretrain_gpt.py").write_text(OF_SOME, encoding="utf-8")
    assert problem_of(tmp_path, f"{GPT2} --swiglu").partition("run.sh: ")[2] == (
        "pretrain_gpt.py: builds a TransformerConfig of its own from some of its flags, with other defaults for the rest; "
        "not modeled; --allow-unmodeled ignores it"
    )
    whole = OF_SOME.replace("num_layers=args.num_layers", "num_layers=args.num_layers, **vars(args)")
    (tmp_path / "pretrain_gpt.py").write_text(whole, encoding="utf-8")
    assert job_of(tmp_path, f"{GPT2} --swiglu").model.glu
    fixed = OF_SOME.replace("args.num_layers", "2").replace("args.hidden_size", "12").replace("args.bf16", "True")
    (tmp_path / "pretrain_gpt.py").write_text(fixed, encoding="utf-8")
    assert job_of(tmp_path, GPT2).model.n_layers == 4


@pytest.mark.parametrize(
    ("test", "frozen"),
    [("'mtp' not in name", True), ("any(k in name for k in ('q', 'k'))", True), ("args.freeze", False)],
)
def test_a_program_that_trains_a_part_of_the_weights(tmp_path: Path, test: str, frozen: bool) -> None:
    """Which weights the names decide; whether there are any, an option of the program does."""
    loop = f"    for name, p in model.named_parameters():\n        if {test}:\n            p.requires_grad = False\n"
    code = OF_FLAGS.replace("    return ", f"    model = GPTModel(config)\n{loop}    return ")
    (tmp_path / "pretrain_gpt.py").write_text(code, encoding="utf-8")
    if frozen:
        line = problem_of(tmp_path, GPT2)
        assert "pretrain_gpt.py: frozen weights, set up by its code; not modeled" in line
    else:
        assert job_of(tmp_path, GPT2).model.n_layers == 4


def test_a_fraction_that_is_no_number(tmp_path: Path) -> None:
    flags = f"{GPT2} --use-distributed-optimizer --optimizer-cpu-offload --use-precision-aware-optimizer"
    assert problem_of(tmp_path, f"{flags} --optimizer-offload-fraction half").endswith("expected a number (got 'half')")


def test_a_variable_that_the_program_reads_for_its_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(OF_FLAGS, encoding="utf-8")
    assert job_of(tmp_path, GPT2, "export LOCAL_RANK=0\nexport OTHER=1\n").model.n_layers == 4
    line = problem_of(tmp_path, GPT2, "export LOCAL_RANK=0\nexport DEPTH_PATTERN=1,2,3,4,1,2,3,4\n")
    assert line.partition("run.sh: ")[2].startswith(
        "DEPTH_PATTERN: read by pretrain_gpt.py where it builds its model; not modeled"
    )


def test_a_program_that_builds_another_model_than_megatrons(tmp_path: Path) -> None:
    """One of another name is that at the top of the checkout, wherever the script was written; Megatron's own is not."""
    older = "    if args.use_legacy_models:\n        return megatron.legacy.model.GPTModel()\n    return GPTModel("
    other = OF_FLAGS.replace("    return GPTModel(", older).replace("return GPTModel(", "return FastGPTModel(")
    (tmp_path / "pretrain_fastgpt.py").write_text(other, encoding="utf-8")
    path = tmp_path / "examples" / "gpt" / "run.sh"
    path.parent.mkdir(parents=True)
    path.write_text(f"{RUN} {GPT2}\n".replace("pretrain_gpt.py", "../../old/pretrain_fastgpt.py"), encoding="utf-8")
    with pytest.raises(ConfigError, match="builds a FastGPTModel, a model of its own; not modeled"):
        to_job(read("megatron", str(path), HARDWARE), HARDWARE)
    path.write_text(f"{RUN} {GPT2}\n".replace("pretrain_gpt.py", "/opt/megatron/pretrain_gpt.py"), encoding="utf-8")
    one_of_two = OF_FLAGS.replace("    return", "    if args.own:\n        return OwnModel()\n    return")
    (tmp_path / "pretrain_gpt.py").write_text(one_of_two, encoding="utf-8")
    assert to_job(read("megatron", str(path), HARDWARE), HARDWARE).model.n_layers == 4


@pytest.mark.parametrize("wrapper", ["py_nsys.py", "tools/profile.py"])
def test_a_program_that_starts_the_training_program(tmp_path: Path, wrapper: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{RUN} {GPT2}\n".replace("pretrain_gpt.py", f"{wrapper} pretrain_gpt.py"), encoding="utf-8")
    assert to_job(read("megatron", str(path), HARDWARE), HARDWARE).model.n_layers == 4


def test_stages_and_micro_batches_of_the_first_3d_parallel_release(tmp_path: Path) -> None:
    """8 devices over tp 2 and pp 2 are 2 replicas, which take 8 micro-batches of 2 each: 2 * 8 * 2 = 32 sequences."""
    sizes = (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --fp16"
    )
    flags = (
        f"{sizes} --batch-size 2 --model-parallel-size 2 --deepspeed --deepspeed_config ds.json --zero-stage 1 {GPT2}"
    )
    path, config = tmp_path / "run.sh", tmp_path / "ds.json"
    config.write_text('{"gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 2}', encoding="utf-8")

    def job_with(more: str, pp: int):
        path.write_text(f"deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt2.py {flags} {more}\n", encoding="utf-8")
        found = to_job(read("megatron", str(path), HARDWARE), HARDWARE)
        assert (found.parallelism.tp, found.parallelism.pp, found.parallelism.dp) == (2, pp, 4 // pp)
        return found.data.gbs

    assert job_with("--pipe-parallel-size 2 --gas 8", 2) == 32
    assert job_with("--pipe-parallel-size 2", 2) == 32  # by the ds_config
    assert job_with("--pipe-parallel-size 0", 1) == 2 * 4 * 8


def test_overlap_of_tensor_parallelism_switched_off_in_part(tmp_path: Path) -> None:
    assert not job_of(tmp_path, f"{GPT2} --disable-tp-comm-atomic-ag --disable-tp-comm-atomic-rs").parallelism.sp


def test_a_model_whose_sizes_are_those_of_the_checkpoint_it_loads(tmp_path: Path) -> None:
    """No --num-layers: --use-checkpoint-args takes them from the folder of that name; another name has no model."""
    flags = (
        "--seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --bf16 --use-checkpoint-args --load ../models/{}"
    )
    path = tmp_path / "run.sh"

    def reading(folder: str):
        path.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags.format(folder)}\n", encoding="utf-8")
        return read("megatron", str(path), HARDWARE)

    assert to_job(reading("llama-3-8B-megatron-tp1-bf16"), HARDWARE).model.n_layers == 32
    with pytest.raises(ConfigError, match="no --num-layers; add --set model=NAME"):
        reading("own-8B-megatron-tp1-bf16")


def test_a_variable_at_the_value_that_the_program_has_without_it(tmp_path: Path) -> None:
    """os.environ.get("NAME", "none"): the script's own NAME=none changes nothing."""
    code = OF_FLAGS.replace('("DEPTH_PATTERN")', '("DEPTH_PATTERN", "none")')
    (tmp_path / "pretrain_gpt.py").write_text(code, encoding="utf-8")
    assert job_of(tmp_path, GPT2, "export DEPTH_PATTERN=none\n").model.n_layers == 4
    assert "DEPTH_PATTERN: read by pretrain_gpt.py" in problem_of(tmp_path, GPT2, "export DEPTH_PATTERN=each\n")


@pytest.mark.parametrize(
    ("base", "refused"), [("ParallelTransformerLayer", True), ("TransformerLayer", True), ("MegatronModule", False)]
)
def test_a_model_with_layers_of_a_file_beside_the_program(tmp_path: Path, base: str, refused: bool) -> None:
    """A layer made from Megatron-LM's has norms or activations that no flag gives; a model around its layers has none."""
    (tmp_path / "llama_layers.py").write_text(f"class Block({base}):\n    pass\n", encoding="utf-8")
    code = OF_FLAGS.replace("from megatron.core.models.gpt import GPTModel", "from llama_layers import LLAMAModel")
    (tmp_path / "pretrain_gpt.py").write_text(code.replace("GPTModel(", "LLAMAModel("), encoding="utf-8")
    if refused:
        line = problem_of(tmp_path, GPT2)
        assert "pretrain_gpt.py: builds the layers of llama_layers.py, which are its own; not modeled" in line
    else:
        assert job_of(tmp_path, GPT2).model.n_layers == 4


def test_a_job_that_generates_text(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM examples/inference/gpt/utils.py, add_common_inference_args."""
    line = problem_of(tmp_path, f"{GPT2} --num-tokens-to-generate 30 --return-log-probs")
    assert "--num-tokens-to-generate 30: a job that generates text (examples/inference/gpt)" in line


def told_in(folder: Path, command: str) -> list[str]:
    (script := folder / "run.sh").write_text(f"#!/bin/bash\n{command}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        to_job(read("megatron", str(script), HARDWARE), HARDWARE)
    return [line.partition("run.sh: ")[2].partition("; ")[0] for line in caught.value.problems]


def test_the_length_of_a_decoder_in_a_model_without_an_encoder(tmp_path: Path) -> None:
    """Megatron-LM's core/pipeline_parallel/schedules.py reads it for models of both parts only."""
    assert job_of(tmp_path, f"{GPT2} --decoder-seq-length 64").model.n_layers == 4
    command = f"{RUN} {GPT2} --decoder-seq-length 64"
    assert told_in(tmp_path, command.replace("pretrain_gpt", "finetune")) == [
        "--decoder-seq-length 64: encoder and decoder"
    ]


def test_what_a_program_does_is_told_with_the_layers_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(f"{OF_FLAGS}\nmodel.layer.requires_grad_(False)\n", encoding="utf-8")
    assert told_in(tmp_path, re.sub(r"--num-layers \d+", "", f"{RUN} {GPT2}")) == [
        "its flags have no --num-layers", "pretrain_gpt.py: frozen weights, set up by its code",
    ]  # fmt: skip


@pytest.mark.parametrize("usual", ["[]", "{}", "None"])
def test_a_default_of_any_kind_is_no_value_of_the_environment(tmp_path: Path, usual: str) -> None:
    code = OF_FLAGS.replace('"DEPTH_PATTERN"', f'"DEPTH_PATTERN", {usual}')
    (tmp_path / "pretrain_gpt.py").write_text(code, encoding="utf-8")
    told = problem_of(tmp_path, GPT2, "export DEPTH_PATTERN=a\n")
    assert "DEPTH_PATTERN: read by pretrain_gpt.py where it builds its model; not modeled" in told
