"""Programs of Megatron-Bridge that change a recipe in their main part, and models that a recipe changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import asked, written

PROGRAM = """\
    import argparse
    from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
    from megatron.bridge.training.mixed_precision import bf16_mixed, bf16_with_nvfp4_mixed
    from megatron.bridge.training.pretrain import pretrain

    def low():
        mixed = bf16_with_nvfp4_mixed()
        mixed.first_last_layers_bf16 = True
        mixed.num_layers_at_end_in_bf16 = int(8 / 2)
        return mixed

    def main() -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--plain", action="store_true")
        parser.add_argument("--length", type=int, default=1024)
        args = parser.parse_args()
        job: ConfigContainer = llama3_8b_pretrain_config()
        job.model.context_parallel_size = 1
        job.model.seq_length = args.length
        job.dataset.sequence_length = args.length
        job.train.global_batch_size, job.train.micro_batch_size = 32, 2
        if args.plain:
            job.mixed_precision = bf16_mixed()
        else:
            job.mixed_precision = low()
        print(job)
        pretrain(config=job, forward_step_func=step)

    if __name__ == "__main__":
        main()
"""
RECIPE = """\
    from megatron.bridge.recipes.qwen import qwen3_4b_pretrain_config

    def own() -> ConfigContainer:
        config = qwen3_4b_pretrain_config()
        config.model.num_layers = 4
        config.model.hidden_size = %s
        config.model.share_embeddings_and_output_weights = False
        return config
"""


def test_a_program_over_a_recipe(tmp_path: Path) -> None:
    """--plain is off where it is not given; training/mixed_precision.py, bf16_with_nvfp4_mixed."""
    plan = written(tmp_path, "run.py", PROGRAM).config
    assert plan["model"] == "llama3-8b"
    assert plan["data"] == {"gbs": 32, "seqlen": 1024, "microbatch_sz": 2}
    assert (plan["performance"]["precision"], plan["performance"]["bf16_layers_at_end"]) == ("nvfp4", 4)
    plain = PROGRAM.replace('action="store_true"', 'action="store_false"')
    assert written(tmp_path, "plain.py", plain).config["performance"]["precision"] == "bf16"


def test_settings_of_a_file_are_asked_for(tmp_path: Path) -> None:
    text = PROGRAM.replace("print(job)", "apply_overrides(job, settings)")
    (line,) = asked(tmp_path, "run.py", text)
    assert line == "line 26 changes the config in a way that is not read; give the log that prints the job's config"


def test_a_model_that_a_recipe_changes(tmp_path: Path) -> None:
    """Qwen3 4B has 36 layers, a hidden size of 2,560 and one weight for embedding and head."""
    plan = written(tmp_path, "own.py", RECIPE % 512).config
    assert plan["model"] == {"preset": "qwen3-4b", "n_layers": 4, "hidden_sz": 512, "tie_embeddings": False}


@pytest.mark.parametrize(
    ("value", "code"), [("int(os.environ['H'])", "int(os.environ['H'])"), ("size_of('small')", "size_of(...)")]
)
def test_a_size_that_is_computed_is_asked_for(tmp_path: Path, value: str, code: str) -> None:
    (line,) = asked(tmp_path, "own.py", RECIPE % value)
    assert line.startswith(f"model.hidden_size is computed ({code}); add --set model.hidden_sz=N")


OF_A_CLASS = """\
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3ModelProvider1B

    def own() -> ConfigContainer:
        return common(provider_class=Gemma3ModelProvider1B, seq_length=2048)

    def common(provider_class: type, seq_length: int):
        model = provider_class()
        model.tensor_model_parallel_size = 2
        model.seq_length = seq_length
        return ConfigContainer(
            model=model,
            train=TrainingConfig(global_batch_size=32, micro_batch_size=2),
            dataset=GPTDatasetConfig(seq_length=seq_length),
            mixed_precision="bf16_mixed",
        )
"""


def test_the_class_of_a_model_that_is_given_to_a_function(tmp_path: Path) -> None:
    plan = written(tmp_path, "own.py", OF_A_CLASS).config
    assert (plan["model"], plan["parallelism"]["tp"], plan["data"]["seqlen"]) == ("gemma3-1b", 2, 2048)
    (line,) = asked(tmp_path, "own.py", OF_A_CLASS.replace("= provider_class()", "= provider_of(2)"))
    assert line == "its model is known only at run time; add --set model=NAME"
