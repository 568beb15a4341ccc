"""Configs of Megatron-Bridge by name: through importlib, from a benchmark's launcher, under a YAML file and words."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from test_files_of_forks import SETS, asked, written

from steptime.launch.read import read
from steptime.launch.reading import Reading

BY_NAME = """\
    import argparse
    import importlib

    from megatron.bridge import recipes
    from megatron.bridge.training.pretrain import pretrain

    def load(family, name):
        module = importlib.import_module(f"megatron.bridge.recipes.{family}")
        builder = getattr(module, name)
        return builder()

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--family", default="llama")
        parser.add_argument("--recipe", default="llama3_8b")
        args = parser.parse_args()
        job = load(args.family, f"{args.recipe}_pretrain_config")
        job.train.global_batch_size = 64
        pretrain(config=job, forward_step_func=step)

    if __name__ == "__main__":
        main()
"""
CALLED = 'job = getattr(recipes, args.recipe + "_pretrain_config")()'
MERGED = """\
    import argparse
    from pathlib import Path

    from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
    from megatron.bridge.training.pretrain import pretrain

    DEFAULT = Path(__file__).parent / "conf" / "short.yaml"

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--config-file", type=str, default=str(DEFAULT))
        args, words = parser.parse_known_args()
        job: ConfigContainer = llama3_8b_pretrain_config()
        job.train.micro_batch_size = 2
        %s
        pretrain(config=job, forward_step_func=step)

    if __name__ == "__main__":
        main()
"""
WHOLE = "job = process_config_with_overrides(job, config_filepath=args.config_file, cli_overrides=words)"
PARTS = """\
merged, excluded = create_omegaconf_dict_config(job)
        if args.config_file:
            merged = OmegaConf.merge(merged, OmegaConf.load(args.config_file))
        merged = parse_hydra_overrides(merged, words)
        apply_overrides(job, OmegaConf.to_container(merged, resolve=True), excluded)"""
YAML = "model: {context_parallel_size: 1, seq_length: 2048}\ndataset: {sequence_length: 2048}\ntrain: {global_batch_size: 32}\n"
BENCHMARK = """\
    def own_8b_pretrain_8gpu_h100_fp8cs_config() -> ConfigContainer:
        cfg = llama3_8b_pretrain_config()
        cfg.mixed_precision = bf16_with_fp8_current_scaling_mixed()
        cfg.model.context_parallel_size = 1
        cfg.train.global_batch_size = 128
        options = {"pad": False}
        options["pad"] = True
        cfg.dataset = Packed(seq_length=4096, options=options)
        return cfg
"""
LAUNCHED = (
    "uv run python scripts/performance/setup_experiment.py -m own -mr own_8b -ng 8 -g h100 -c fp8_cs -gn 8 -a x -p y"
)


def with_words(tmp_path: Path, name: str, text: str, words: str) -> Reading:
    """The program as it is started with words."""
    written(tmp_path, name, text)
    return read("auto", f"{tmp_path / name} {words}", SETS | {"devices": 8})


@pytest.mark.parametrize(
    "text", [BY_NAME, BY_NAME.replace('job = load(args.family, f"{args.recipe}_pretrain_config")', CALLED)]
)
def test_a_recipe_that_is_imported_by_its_name(tmp_path: Path, text: str) -> None:
    """llama3_8b_pretrain_config: cp 2, 8,192 tokens; qwen3_4b_pretrain_config: tp 2, 4,096 tokens."""
    plan = written(tmp_path, "run.py", text).config
    assert (plan["model"], plan["parallelism"]["cp"]) == ("llama3-8b", 2)
    assert plan["data"] == {"gbs": 64, "seqlen": 8192, "microbatch_sz": 1}
    plan = with_words(tmp_path, "run.py", text, "--family qwen --recipe qwen3_4b").config
    assert (plan["model"], plan["parallelism"]["tp"], plan["data"]["seqlen"]) == ("qwen3-4b", 2, 4096)


@pytest.mark.parametrize("how", [WHOLE, PARTS])
def test_a_file_and_words_over_a_programs_config(tmp_path: Path, how: str) -> None:
    """The file's default, the file that is named, and words over both."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "short.yaml").write_text(YAML)
    (tmp_path / "other.yaml").write_text(YAML.replace("32", "48"))
    plan = written(tmp_path, "run.py", MERGED % how).config
    assert plan["data"] == {"gbs": 32, "seqlen": 2048, "microbatch_sz": 2}
    assert plan["parallelism"].get("cp", 1) == 1
    words = "--config-file other.yaml model.tensor_model_parallel_size=2"
    plan = with_words(tmp_path, "run.py", MERGED % how, words).config
    assert (plan["data"]["gbs"], plan["parallelism"]["tp"], plan["parallelism"]["dp"]) == (48, 2, 4)
    script = f"#!/bin/bash\ntorchrun --nnodes 2 --nproc_per_node 8 run.py {words}\n"
    plan = written(tmp_path, "run.sh", script).config
    assert (plan["data"]["gbs"], plan["parallelism"]["tp"], plan["parallelism"]["dp"]) == (48, 2, 8)


def test_words_of_a_script_that_have_no_value(tmp_path: Path) -> None:
    """Hydra's + adds a key, its ~ takes one away; a folder without a value changes nothing."""
    written(tmp_path, "run.py", MERGED.replace("str(DEFAULT)", "None") % WHOLE, devices=8)
    script = "#!/bin/bash\ntorchrun --nproc_per_node 8 run.py checkpoint.save=$DIR ++train.global_batch_size=%s\n"
    assert written(tmp_path, "run.sh", script % 24).config["data"]["gbs"] == 24
    (line,) = asked(tmp_path, "run.sh", script % "$GBS")
    assert line == "line 2: $GBS has no value; write GBS=... before the command"
    (line,) = asked(tmp_path, "run.sh", script % "24 ~model.context_parallel_size")
    assert line.startswith("~model.context_parallel_size is not read")


def test_what_is_not_known_of_the_overrides_is_asked_for(tmp_path: Path) -> None:
    (line,) = asked(tmp_path, "run.py", MERGED % WHOLE)
    assert line.startswith("reads conf/short.yaml, which was not found")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "short.yaml").write_text(YAML)
    (line,) = asked(tmp_path, "run.py", MERGED % f"{WHOLE}\n        job.train.micro_batch_size = 4")
    assert line.startswith("line 16 sets the config after what is put over it")
    (line,) = asked(tmp_path, "run.py", MERGED % "apply_overrides(job, settings)")
    assert line.startswith("line 15 changes the config in a way that is not read")


def test_a_benchmark_that_is_chosen_by_model_devices_and_precision(tmp_path: Path) -> None:
    """own_8b, 8 devices, H100, fp8_cs: own_8b_pretrain_8gpu_h100_fp8cs_config, whose name says 8 devices."""
    written(tmp_path, "src/megatron/bridge/perf_recipes/own/h100/own.py", BENCHMARK)
    plan = written(tmp_path, "my/run.sh", f"#!/bin/bash\n{LAUNCHED} -gb 64\n").config
    assert (plan["model"], plan["parallelism"]["dp"]) == ("llama3-8b", 8)
    assert plan["data"] == {"gbs": 64, "seqlen": 4096, "microbatch_sz": 1}
    assert plan["performance"]["precision"] == "fp8_current"
    named = LAUNCHED.partition(" -m ")[0].replace("performance", "training")
    script = f"#!/bin/bash\n{named} --recipe own_8b_pretrain_8gpu_h100_fp8cs_config --nodes 2 --gpus-per-node 8\n"
    plan = written(tmp_path, "my/run.sh", script).config
    assert (plan["data"]["gbs"], plan["parallelism"]["dp"]) == (256, 16)
    (line,) = asked(tmp_path, "my/run.sh", f"#!/bin/bash\n{LAUNCHED.replace('own_8b', 'own_9b')}\n")
    assert line.startswith("line 2: recipe own_9b_pretrain_8gpu_h100_fp8cs_config was not found")
    (line,) = asked(tmp_path, "my/run.sh", f"#!/bin/bash\n{LAUNCHED} --num_layers 4\n")
    assert line.startswith("line 2: --num_layers of setup_experiment.py is not read")


def test_a_benchmark_for_another_number_of_devices_is_resized(tmp_path: Path) -> None:
    """v0.6.0 run_script.py: 128 sequences for dp 8, so 256 for dp 16 and for dp 8 of 16 devices with tp 2; -gb and the exact one
    are not scaled. bf16 with Adam: the precision-aware optimizer."""
    both = BENCHMARK + BENCHMARK.replace("8gpu", "32gpu").replace("= 128", "= 512")
    recipes = tmp_path / "src/megatron/bridge/perf_recipes/own/h100/own.py"
    recipes.parent.mkdir(parents=True)
    recipes.write_text(textwrap.dedent(both))

    def plan(words: str) -> dict[str, Any]:
        return written(tmp_path, "my/run.sh", f"#!/bin/bash\n{LAUNCHED.replace('-ng 8', words)}\n").config

    found = plan("-ng 16")
    assert (found["data"]["gbs"], found["parallelism"]["dp"]) == (256, 16)
    assert "own_8b_pretrain_32gpu_h100_fp8cs_config, resized to 16 devices" in found["notes"]
    assert plan("-ng 16 -tp 2")["data"]["gbs"] == 128
    assert plan("-ng 16 -gb 96")["data"]["gbs"] == plan("-ng 16 train.global_batch_size=96")["data"]["gbs"] == 96
    assert plan("-ng 8 -tp 2")["data"]["gbs"] == 128
    recipes.write_text(textwrap.dedent(BENCHMARK.replace("= 128", "= 100")))
    (line,) = asked(tmp_path, "my/run.sh", f"#!/bin/bash\n{LAUNCHED.replace('-ng 8', '-ng 9')}\n")
    assert line == "line 2: a batch of 100 for dp 8 does not scale to dp 9; add --set data.gbs=N"


def test_devices_of_a_launchers_default_are_told(tmp_path: Path) -> None:
    """torchrun without --nnodes starts one node, here of 8; the 16 devices of a job that is submitted are no default."""
    torchrun = "#!/bin/bash\ntorchrun --nproc_per_node 8 "
    written(tmp_path, "run.py", BY_NAME)
    for started in ("run.py", "scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config"):
        notes = written(tmp_path, "run.sh", f"{torchrun}{started}\n").config["notes"]
        assert sum(note.startswith("number of devices not set, 8 assumed: torchrun, one node") for note in notes) == 1
    written(tmp_path, "src/megatron/bridge/perf_recipes/own/h100/own.py", BENCHMARK)
    plan = written(tmp_path, "my/run.sh", f"#!/bin/bash\nexport GPUS_PER_NODE=4\n{LAUNCHED}\n").config
    assert (plan["parallelism"]["dp"], plan.get("notes") or []) == (8, [])


STARTED = "#!/bin/bash\nMORE=' train.global_batch_size=32 \n   model.tensor_model_parallel_size=2 '\n"
STARTED += "CMD='run_recipe.py --recipe llama3_8b_pretrain_config --peft_scheme none'\n"


@pytest.mark.parametrize("filters", [r"tr '\n' ' ' | sed 's/  \+/ /g'", "tr '\\n' ' ' | tr -s ' '", "xargs"])
def test_words_that_a_script_puts_in_one_line(tmp_path: Path, filters: str) -> None:
    """8 devices over tp 2 and the recipe's cp 2: 2 ranks; no adapters are those of the recipe itself."""
    run = f'CMD="$CMD $(echo "$MORE" | {filters})"\ntorchrun --nnodes 1 --nproc_per_node 8 $CMD\n'
    plan = written(tmp_path, "run.sh", STARTED + run).config
    assert (plan["data"]["gbs"], plan["parallelism"]["tp"], plan["parallelism"]["dp"]) == (32, 2, 2)


def test_words_of_run_recipe_that_are_not_known(tmp_path: Path) -> None:
    """They may set anything over the recipe; the value of a folder's option may not."""
    run = "torchrun --nnodes 1 --nproc_per_node 8 $CMD --save_dir $OUT $(cat words.txt)\n"
    (line,) = asked(tmp_path, "run.sh", STARTED + run)
    assert "$(cat words.txt)" in line
    assert written(tmp_path, "run.sh", STARTED + run.replace(" $(cat words.txt)", "")).config["data"]["gbs"] == 512


def test_a_program_that_starts_no_config_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("from megatron.bridge import AutoBridge\n")
    (line,) = asked(tmp_path, "run.sh", "#!/bin/bash\ntorchrun --nproc_per_node 2 run.py --size 3\n")
    assert line == "line 2 launches run.py, which names no config; give the log that prints the job's config"


def test_a_size_that_a_recipe_computes_is_asked_for(tmp_path: Path) -> None:
    """The base recipe's 8,192 tokens, 512 sequences and tp 1 are not those of a function that sets others."""
    text = (
        "from megatron.bridge.recipes.llama import llama3_8b_pretrain_config\n"
        "def own() -> ConfigContainer:\n    job = llama3_8b_pretrain_config()\n"
        "    job.model.seq_length = of(3)\n    job.model.tensor_model_parallel_size = of(4)\n    return job\n"
    )
    lines = asked(tmp_path, "own.py", text)
    assert lines == (
        "model.seq_length is computed (of(...)); add --set data.seqlen=N",
        "model.tensor_model_parallel_size is computed (of(...)); add --set parallelism.tp=N",
    )
    told = written(tmp_path, "own.py", text, **{"data.seqlen": 4096, "parallelism.tp": 2, "devices": 8})
    assert told.config["model"] == "llama3-8b"
    assert (
        written(tmp_path, "own.py", text.replace("of(3)", "2048").replace("of(4)", "2")).config["data"]["seqlen"]
        == 2048
    )


def test_a_recipe_that_a_module_imports_under_another_name(tmp_path: Path) -> None:
    """Recipes of 2026 are named after their devices; the module of the older names imports them from there."""
    written(tmp_path, "src/megatron/bridge/recipes/own/h100/own.py", BENCHMARK)
    alias = "from megatron.bridge.recipes.own.h100.own import own_8b_pretrain_8gpu_h100_fp8cs_config as own_8b_config\n"
    (tmp_path / "src/megatron/bridge/recipes/own/own.py").write_text(alias)
    script = "#!/bin/bash\ntorchrun --nnodes 1 --nproc_per_node 8 run_recipe.py --recipe own_8b_config\n"
    plan = written(tmp_path, "my/run.sh", script).config
    assert (plan["model"], plan["data"]["gbs"], plan["parallelism"]["dp"]) == ("llama3-8b", 128, 8)
