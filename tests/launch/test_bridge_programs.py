"""Programs of Megatron-Bridge that change a recipe in their main part, and models that a recipe changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import SETS, asked, written

from steptime.launch.reading import to_job

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


OWN = """\
    def shorter(job):
        job.model.num_layers = 4

    def thinner(model):
        model.hidden_size = 512

"""


def with_statement(statement: str) -> str:
    return PROGRAM.replace("    def low():", f"{OWN}    def low():").replace("print(job)", statement)


def test_a_function_of_the_program_that_changes_the_config_is_followed(tmp_path: Path) -> None:
    plan = written(tmp_path, "run.py", with_statement("shorter(job)")).config
    assert plan["model"] == {"preset": "llama3-8b", "n_layers": 4}


@pytest.mark.parametrize(
    "statement",
    [
        "thinner(job.model)",
        "model = job.model; thinner(model)",
        "elsewhere(job.model)",
        'shorter(job) if os.environ.get("SMALL") == "1" else None',
    ],
)
def test_a_section_that_is_given_away_is_asked_for(tmp_path: Path, statement: str) -> None:
    """What a function does to a section, or to the config in a condition, is not followed."""
    (line,) = asked(tmp_path, "run.py", with_statement(statement))
    assert line.endswith("changes the config in a way that is not read; give the log that prints the job's config")


def test_a_condition_on_the_environment_is_unknown(tmp_path: Path) -> None:
    text = with_statement('if os.environ.get("SMALL"): job.model.num_layers = 4')
    (line,) = asked(tmp_path, "run.py", text)
    assert line.startswith("model.num_layers is computed (4 if os.environ.get('SMALL'))")


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


@pytest.mark.parametrize(
    "said",
    [
        *("num_moe_experts = 8", "gated_linear_unit = False", "add_bias_linear = True"),
        *("normalization = 'LayerNorm'", "window_size = (512, 0)", "multi_latent_attention = True"),
    ],
)
def test_another_kind_of_model_than_the_recipes_is_refused(tmp_path: Path, said: str) -> None:
    """Qwen3 4B: dense, gated, without bias, RMSNorm, grouped heads over the whole sequence (Hugging Face config.json)."""
    text = (RECIPE % 512).replace("num_layers = 4", said)
    (line,) = asked(tmp_path, "own.py", text)
    assert line.startswith(f"model.{said.partition(' ')[0]}: another kind of model than qwen3-4b (got ")
    assert line.endswith("; add --set model=NAME, or --set model.hf=CONFIG.json")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for key, given in (("model", "qwen3-4b"), ("model.hf", "config.json")):
        assert "model" in written(tmp_path, "own.py", text, **{key: given}).config


def test_fields_that_are_as_the_recipe_has_them(tmp_path: Path) -> None:
    same = "normalization = 'RMSNorm'; config.model.gated_linear_unit = True; config.model.window_size = None"
    plan = written(tmp_path, "own.py", (RECIPE % 512).replace("num_layers = 4", same)).config
    assert plan["model"] == {"preset": "qwen3-4b", "hidden_sz": 512, "tie_embeddings": False}


def test_experts_that_a_recipe_changes(tmp_path: Path) -> None:
    """Qwen3 30B-A3B has 128 experts of width 768, 8 for each token, in all of its 48 layers."""
    text = (RECIPE % 512).replace("4b", "30b_a3b")
    fewer = "num_moe_experts = 64; config.model.moe_router_topk = 4; config.model.mtp_num_layers = 1"
    given = {"data.gbs": 8, "data.seqlen": 512, "data.microbatch_sz": 1, "parallelism.dp": 8}
    reading = written(tmp_path, "own.py", text.replace("num_layers = 4", fewer), **given)
    model = to_job(reading, SETS | given).model
    assert model.moe is not None
    assert (model.moe.n_experts, model.moe.experts_per_token, model.moe.expert_inter_sz, model.mtp) == (64, 4, 768, 1)
    (line,) = asked(
        tmp_path, "own.py", text.replace("num_layers = 4", f"moe_layer_freq = {[0] * 4 + [1] * 44}"), **given
    )
    assert "model.moe_layer_freq" in line


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
