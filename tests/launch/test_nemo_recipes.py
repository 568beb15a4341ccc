"""NeMo 2.0's own recipes by name: programs that change one, and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import SETS, asked, written

from steptime.base.config import ConfigError
from steptime.launch.nemo.models import class_preset, classes
from steptime.launch.read import read
from steptime.launch.reading import to_job

PROGRAM = """\
    import nemo_run as run
    from nemo.collections import llm

    def configure(nodes: int = 2, gpus: int = 8):
        recipe = llm.llama3_8b.pretrain_recipe(name="own", num_nodes=nodes, num_gpus_per_node=gpus)
        recipe.trainer.strategy.pipeline_model_parallel_size = 2
        recipe.data = OwnData(paths=["x"], seq_length=4096, micro_batch_size=1, global_batch_size=64)
        return recipe

    def executor(devices: int = 8):
        return run.LocalExecutor(ntasks_per_node=devices)
"""


OWN = """\
    def own_recipe() -> run.Partial:
        return run.Partial(
            llm.pretrain,
            model=run.Config(llm.LlamaModel, config=run.Config(llm.Llama3Config8B)),
            trainer=run.Config(nl.Trainer, devices=8, num_nodes=1, plugins={precision},
                strategy=run.Config(nl.MegatronStrategy, tensor_model_parallel_size=2)),
            data=run.Config(llm.MockDataModule, seq_length=4096, global_batch_size=64, micro_batch_size=1),
        )
"""


def test_a_program_over_a_recipe(tmp_path: Path) -> None:
    """llama3_8b: tp 1, cp 2; 16 devices over pp 2 and cp 2 are 4 data-parallel ranks."""
    plan = written(tmp_path, "own.py", PROGRAM).config
    assert plan["model"]["n_layers"] == 32
    assert {key: plan["parallelism"].get(key) for key in ("tp", "pp", "cp", "dp")} == {
        "tp": 1,
        "pp": 2,
        "cp": 2,
        "dp": 4,
    }
    assert plan["data"] == {"gbs": 64, "microbatch_sz": 1, "seqlen": 4096}


def test_nemos_command_line(tmp_path: Path) -> None:
    """llama3_70b: tp 4, pp 4 of 5 chunks, cp 2; 8 nodes of 8 devices over 32 are 2 ranks; then cp 1: 4 ranks."""
    script = (
        "#!/bin/bash\nnemo llm pretrain --factory \"llama3_70b(num_nodes=8, name='x')\" data.global_batch_size=64\n"
    )
    plan = written(tmp_path, "run.sh", script).config
    assert {key: plan["parallelism"][key] for key in ("tp", "pp", "vpp", "cp", "dp")} == {
        "tp": 4, "pp": 4, "vpp": 5, "cp": 2, "dp": 2,
    }  # fmt: skip
    assert plan["data"] == {"gbs": 64, "microbatch_sz": 1, "seqlen": 8192}
    one = written(tmp_path, "run.sh", script.strip() + " trainer.strategy.context_parallel_size=1\n").config
    assert one["parallelism"]["dp"] == 4


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("llama3_8b", "own_8b", "recipe own_8b of pretrain is not known"),
        ("num_nodes=nodes", "performance_mode=True", "performance_mode of recipe llama3_8b is not known"),
    ],
)
def test_what_is_not_known_of_a_recipe_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    (line,) = asked(tmp_path, "own.py", PROGRAM.replace(old, new))
    assert line.startswith(told)
    assert line.endswith("give the log that prints the job's config")


MAIN = """\
    import argparse
    from functools import partial
    import nemo_run as run
    from nemo.collections import llm

    def small():
        return run.Config(llm.Llama3Config8B, seq_length=1024, num_layers=4, hidden_size=512, num_attention_heads=8)

    def executor(nodes: int):
        with open("env.json") as file:
            variables = file.read()
        return run.SlurmExecutor(nodes=nodes, env_vars=variables)

    def parser():
        own = argparse.ArgumentParser()
        own.add_argument("--nodes", type=int, default=3)
        own.add_argument("--micro-batch", type=int, default=2)
        own.add_argument("--batch", type=int, default=None)
        return own

    if __name__ == "__main__":
        args = parser().parse_args()
        if args.batch is None:
            batch = args.nodes * 8 * args.micro_batch
        else:
            batch = args.batch
        if batch % 8:
            raise ValueError(batch)
        recipe = partial(llm.llama3_8b.pretrain_recipe, num_nodes=args.nodes)(name="own", dir="/tmp")
        recipe.trainer.strategy.context_parallel_size = 1
        recipe.model = run.Config(llm.LlamaModel, small())
        recipe.data = run.Config(llm.OwnData, seq_length=1024, micro_batch_size=args.micro_batch, global_batch_size=batch,
            tokenizer=run.Config(own_tokenizer, library="megatron", model_name="GPT2BPETokenizer"))
        place = executor(args.nodes)
        with run.Experiment("own") as experiment:
            experiment.add(recipe, executor=place)
"""


def test_a_recipe_that_the_main_part_of_a_program_keeps(tmp_path: Path) -> None:
    """3 nodes of the recipe's 8 devices, tp 1 and cp 1: 24 ranks of 2 sequences, 48; the vocabulary is the data's tokenizer's."""
    reading = written(tmp_path, "run.py", MAIN)
    plan = reading.config
    assert (plan["model"]["n_layers"], plan["model"]["n_kv_heads"], plan["model"]["vocab_sz"]) == (4, 8, 50257)
    assert (plan["parallelism"]["dp"], plan["parallelism"].get("cp", 1)) == (24, 1)
    assert plan["data"] == {"gbs": 48, "microbatch_sz": 2, "seqlen": 1024}
    assert plan["notes"] == ["arguments of the program that are not given have its defaults"]


def test_a_recipe_that_a_function_of_the_main_part_keeps(tmp_path: Path) -> None:
    """The form of NeMo's quickstart: `if __name__ == "__main__": run_pretraining()`; fields of a precision's plugin are set."""
    before, _, body = MAIN.partition('    if __name__ == "__main__":\n')
    line = "        recipe.trainer.plugins = bf16_with_fp8_mixed()\n        recipe.trainer.plugins.grad_reduce_in_fp32 = False\n"
    body = body.replace("        recipe.model =", f"{line}        recipe.model =")
    text = f'{before}    def run_pretraining():\n{body}\n    if __name__ == "__main__":\n        run_pretraining()\n'
    plan = written(tmp_path, "run.py", text).config
    assert plan["data"] == {"gbs": 48, "microbatch_sz": 2, "seqlen": 1024}
    assert {key: plan["performance"][key] for key in ("precision", "fp8_params", "main_grad_dtype")} == {
        "precision": "fp8_delayed", "fp8_params": True, "main_grad_dtype": "bf16",
    }  # fmt: skip


def test_a_tokenizer_that_is_not_known(tmp_path: Path) -> None:
    (line,) = asked(tmp_path, "run.py", MAIN.replace("GPT2BPETokenizer", "own"))
    assert line == "vocabulary size unknown (tokenizer own); add --set model.vocab_sz=N"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bf16_mixed", ("bf16", None, None)),
        ("bf16_with_fp8_mixed", ("fp8_delayed", True, None)),
        ("bf16_with_mxfp8_mixed", ("mxfp8", True, None)),
        ("bf16_with_fp8_current_scaling_mixed", ("fp8_current", True, 1)),
        ("nemotron_h_bf16_with_fp8_current_scaling_mixed", ("fp8_current", True, 2)),
        ("bf16_with_fp8_subchannel_scaling_mixed", ("fp8_blockwise", None, None)),
    ],
)
def test_a_precision_by_the_name_of_its_function(tmp_path: Path, name: str, settings: tuple[object, ...]) -> None:
    """v2.4.0 recipes/precision/mixed_precision.py, over a recipe and in one; each was read as fp32."""
    over = MAIN.replace(
        "        place = executor", f"        recipe.trainer.plugins = {name}()\n        place = executor"
    )
    whole = OWN.format(precision=f"{name}()")
    for file, text in (("run.py", over), ("recipe.py", whole)):
        found = written(tmp_path, file, text).config["performance"]
        keys = ("precision", "fp8_params", "bf16_layers_at_start")
        assert tuple(found.get(key) or None for key in keys) == settings


@pytest.mark.parametrize(
    ("words", "gathers", "layers"),
    [("", False, 0), ("fp8_params=True", True, 0), ("fp8_param_gather=True, first_last_layers_bf16=True", True, 0),
     ("first_last_layers_bf16=True, num_layers_at_end_in_bf16=3", False, 3)],
)  # fmt: skip
def test_what_the_precision_plugin_leaves_unsaid(tmp_path: Path, words: str, gathers: bool, layers: int) -> None:
    """v2.0.0 to v2.4.0 plugins/mixed_precision.py: no parameters in fp8 and no layers in bf16, unless said."""
    plugin = f'run.Config(nl.MegatronMixedPrecision, precision="bf16-mixed", fp8="hybrid", {words})'
    found = written(tmp_path, "recipe.py", OWN.format(precision=plugin)).config["performance"]
    assert (found["fp8_params"], found.get("bf16_layers_at_end") or 0) == (gathers, layers)


def test_another_precision_is_asked_for(tmp_path: Path) -> None:
    (problem,) = asked(tmp_path, "recipe.py", OWN.format(precision="own()"))
    assert problem == "trainer.plugins is own(), not read; add --set performance.precision=NAME"
    told = {"performance.precision": "fp8_delayed"}
    job = to_job(written(tmp_path, "recipe.py", OWN.format(precision="own()"), **told), SETS | told)
    assert job.performance.precision == "fp8_delayed"


@pytest.mark.parametrize(
    ("code", "shown"),
    [("own(args)", "own(...)"), ("args.plugin", "args.plugin"), ("[own(args)]", "own(...)"),
     ('nl.MegatronMixedPrecision("bf16-mixed")', "nl.MegatronMixedPrecision(...)")],
)  # fmt: skip
def test_a_precision_that_is_not_read_is_not_fp32(tmp_path: Path, code: str, shown: str) -> None:
    over = MAIN.replace(
        "        place = executor", f"        recipe.trainer.plugins = {code}\n        place = executor"
    )
    (problem,) = asked(tmp_path, "run.py", over)
    assert problem == f"trainer.plugins is {shown}, not read; add --set performance.precision=NAME"


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("recipe.trainer.strategy.tensor_model_parallel_size = int(TP)", "add --set parallelism.tp=N"),
        ("recipe.data.global_batch_size = own(8) * 2", "add --set data.gbs=N"),
        ("recipe.model.config.num_layers = own(8) * 2", "add --set model.n_layers=N"),
        ("recipe.trainer.num_nodes = int(NODES)", "number of devices unknown; add --set parallelism.dp=N"),
    ],
)
def test_a_size_that_is_computed_is_not_the_recipes(tmp_path: Path, line: str, asks: str) -> None:
    over = MAIN.replace("        place = executor", f"        {line}\n        place = executor")
    (problem,) = asked(tmp_path, "run.py", over)
    assert problem.endswith(asks), problem


def test_what_else_is_computed(tmp_path: Path) -> None:
    """A setting that costs is told, a recipe's own argument asked for in a log, and a size that the user gives counts."""
    line = "        recipe.trainer.strategy.sequence_parallel = own(2) == 2\n        place = executor"
    reading = written(tmp_path, "run.py", MAIN.replace("        place = executor", line))
    assert "trainer.strategy.sequence_parallel" in {flag.name for flag in reading.of("approximated")}
    told = {"data.seqlen": 512}
    longer = MAIN.replace("num_nodes=args.nodes)", "num_nodes=args.nodes, seq_length=own(2) * 2)")
    longer = longer.replace("llm.OwnData, seq_length=1024, ", "llm.OwnData, ")
    assert asked(tmp_path, "run.py", longer)[0].endswith("add --set data.seqlen=N")
    assert to_job(written(tmp_path, "run.py", longer, **told), SETS | told).data.seqlen == 512
    (problem,) = asked(tmp_path, "run.py", longer.replace("seq_length=own(2) * 2)", "performance_mode=own(2) == 1)"))
    assert problem.startswith("performance_mode is computed (")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("recipe.model.config.num_layers -= 1", "line 34 sets the recipe in a way that is not read;"),
        ("setattr(recipe.model.config, 'num_layers', 2)", "line 34 sets the recipe in a way that is not read;"),
        ("for i in range(2): recipe.model.config.num_layers = i", "line 34 sets the recipe in a way that is not read;"),
        ("recipe.model = own_model()", "model of the recipe is set to a value that is not read;"),
        ("recipe = changed(recipe)", "the program changes its recipe in a way that is not read;"),
    ],
)
def test_what_a_program_sets_and_is_not_read_is_not_left_out_in_silence(tmp_path: Path, line: str, said: str) -> None:
    text = MAIN.replace("        place = executor", f"        {line}\n        place = executor")
    (problem,) = asked(tmp_path, "run.py", text)
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Nemotron3Config8B", 8.54), ("Nemotron3Config22B", 21.27), ("Nemotron4Config22B", 21.27), ("GPTConfig5B", 5.05)],
)
def test_classes_of_sizes_alone(name: str, billions: float) -> None:
    """Nemotron: 2 x 256,000 h + layers x (4 h^2 + 2 x 4 h x h); GPT: 50,304 h once, and positions and biases.

    8B: 2.10 + 32 x 0.2013 = 8.54. 22B: 3.15 + 40 x 0.4530 = 21.27. GPT 5B: 0.206 + 24 x 12 x 4,096^2 = 4.83 + 0.21 = 5.04, and
    0.01 of 2,048 positions and of biases.
    """
    fields = classes()[name]
    h, layers, wide = fields["hidden_size"], fields["num_layers"], fields["ffn_hidden_size"]
    tables = 1 if name.startswith("GPT") else 2
    extra = 2_048 * h + layers * (9 * h + wide) if tables == 1 else 0
    vocabulary = -(-fields["vocab_size"] // 128) * 128
    assert (tables * vocabulary * h + layers * (4 * h * h + 2 * h * wide) + extra) / 1e9 == pytest.approx(
        billions, abs=0.006
    )


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("MistralNeMo2407Config12B", "mistral-nemo-12b"),
        ("CodeGemmaConfig7B", "gemma-7b"),
        ("Qwen3Config600M", "qwen3-0.6b"),
    ],
)
def test_classes_by_their_names(name: str, preset: str) -> None:
    assert class_preset(name) == preset


FINE_TUNING = """\
    import nemo_run as run
    from nemo.collections import llm

    def main():
        recipe = llm.{name}.finetune_recipe(name="own", num_nodes=1, num_gpus_per_node=8{more})
        recipe.trainer.max_steps = 100
        run.run(recipe, executor=run.LocalExecutor())

    if __name__ == "__main__":
        main()
"""


def test_fine_tuning_by_a_recipe(tmp_path: Path) -> None:
    """llama3_8b: adapters of rank 8 at tp 1, states on every rank; every weight at tp 2, states shared by 4 ranks.

    SquadDataModule of 128 sequences of 2,048 (finetune_default.py), or of the length that the recipe is given.
    """
    adapters = written(tmp_path, "own.py", FINE_TUNING.format(name="llama3_8b", more="")).config
    assert adapters["model"]["lora"]["rank"] == 8
    assert {key: adapters["parallelism"][key] for key in ("tp", "dp", "zero_level")} == {
        "tp": 1,
        "dp": 8,
        "zero_level": 0,
    }
    assert adapters["data"] == {"gbs": 128, "microbatch_sz": 1, "seqlen": 2048}
    more = ', peft_scheme="none", seq_length=4096'
    full = written(tmp_path, "own.py", FINE_TUNING.format(name="llama3_8b", more=more)).config
    assert "lora" not in full["model"]
    assert {key: full["parallelism"][key] for key in ("tp", "dp", "zero_level")} == {"tp": 2, "dp": 4, "zero_level": 1}
    assert full["data"]["seqlen"] == 4096
    assert full["performance"]["overlap"]["dp"] is False  # Megatron's DDP as it is


def test_fine_tuning_on_the_command_line(tmp_path: Path) -> None:
    """NeMo's Qwen2.5 0.5B has a head of its own: 2 x 151,936 x 896 + 24 layers; its LoRA has NeMo's rank, 32."""
    script = "#!/bin/bash\nnemo llm finetune --factory qwen25_500m trainer.devices=2 data.global_batch_size=16\n"
    plan = written(tmp_path, "run.sh", script).config
    assert (plan["model"]["lora"]["rank"], plan["model"]["tie_embeddings"], plan["model"]["qkv_bias"]) == (
        32,
        False,
        True,
    )
    assert (plan["parallelism"]["dp"], plan["data"]["gbs"]) == (2, 16)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("own_8b", "", "recipe own_8b of finetune is not known"),
        ("llama3_8b", ', peft_scheme="dora"', "peft_scheme dora of recipe llama3_8b: adapters other than LoRA"),
        ("llama3_8b", ", packed_sequence=True", "packed_sequence of recipe llama3_8b is not known"),
    ],
)
def test_what_is_not_known_of_fine_tuning_is_told(tmp_path: Path, name: str, more: str, said: str) -> None:
    (line,) = asked(tmp_path, "own.py", FINE_TUNING.format(name=name, more=more))
    assert line.startswith(said)


@pytest.mark.parametrize("name", ["trainer", "model"])
def test_a_part_of_a_recipe_is_no_job(tmp_path: Path, name: str) -> None:
    """NeMo's recipes have a function for the trainer and one for the model."""
    text = f"def {name}(tp: int = 1) -> run.Config[nl.Trainer]:\n    return run.Config(nl.Trainer, devices=8)\n"
    (path := tmp_path / "llama3_8b.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="returns no recipe with a trainer; give the function that returns the whole"):
        read("nemo", f"{path}:{name}", SETS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llm.MegatronBertBaseConfig", "BERT"),
        ("nemo.collections.llm.bert.model.base.OwnConfig", "BERT"),
        ("llm.T5Config220M", "a model with an encoder"),
        ("llm.Hyena1bConfig", "Hyena layers"),
        ("llm.NVIDIAMambaHybridConfig8B", "Mamba layers, unread pattern"),
        ("Llama32EmbeddingConfig1B", "a model that embeds or ranks text"),
        ("llm.Llama32Reranker1BConfig", "a model that embeds or ranks text"),
        ("vlm.Llava15Config7B", "a vision model"),
        ("nemo.collections.vlm.mllama.model.base.OwnConfig", "a vision model"),
        ("DiTConfig", "a diffusion model"),
    ],
)
def test_models_that_are_no_decoders_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    """Also where the user names a decoder in their place, whose cost is another one."""
    model = f"run.Config(llm.OwnModel, config=run.Config({name}))"
    trainer = "run.Config(nl.Trainer, devices=8, num_nodes=1, strategy=run.Config(nl.MegatronStrategy))"
    data = "run.Config(MockDataModule, seq_length=512, global_batch_size=32, micro_batch_size=2)"
    text = (
        f"def pretrain_recipe():\n    return run.Partial(llm.pretrain, model={model}, trainer={trainer}, data={data})\n"
    )
    (path := tmp_path / "r.py").write_text(text, encoding="utf-8")
    own = f"model.class {name.rpartition('.')[2]} ({kind}): another kind of model; not modeled"
    for sets in (SETS, SETS | {"model": "llama3-1b"}):
        with pytest.raises(ConfigError) as error:
            to_job(read("nemo", f"{path}:pretrain_recipe", sets), sets)
        (line,) = error.value.problems
        assert own in line
