"""Programs over OLMo-core, read by their syntax."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import SETS, asked, written

from steptime.job.job import Job
from steptime.launch.read import read
from steptime.launch.reading import Reading, to_job

PROGRAM = """\
    from functools import partial
    from olmo_core.internal.experiment import CommonComponents, build_config, main
    from olmo_core.nn.transformer import TransformerConfig

    LENGTH = 4 * 1024
    BATCH = 64 * LENGTH

    def model_of(common: CommonComponents) -> TransformerConfig:
        return TransformerConfig.olmo2_7B(vocab_size=common.tokenizer.padded_vocab_size())

    def module_of(common: CommonComponents) -> TransformerTrainModuleConfig:
        tokens = common.max_sequence_length
        if common.launch is not None:
            tokens *= 4
        tokens *= 2
        return TransformerTrainModuleConfig(
            rank_microbatch_size=tokens,
            max_sequence_length=common.max_sequence_length,
            optim=SkipStepAdamWConfig(lr=3e-4, group_overrides=[OptimGroupOverride(params=["x"], opts=dict(weight_decay=0.0))]),
            compile_model=True,
            dp_config=TransformerDataParallelConfig(
                name=DataParallelType.hsdp, param_dtype=DType.bfloat16, reduce_dtype=DType.float32
            ),
            float8_config=Float8Config(enabled=False),
            scheduler=CosWithWarmup(warmup_steps=2000),
        )

    if __name__ == "__main__":
        main(
            config_builder=partial(
                build_config,
                global_batch_size=BATCH,
                max_sequence_length=LENGTH,
                model_config_builder=model_of,
                train_module_config_builder=module_of,
                trainer_config_builder=trainer_of,
            )
        )
"""
NAMED = "TransformerConfig.olmo2_7B(vocab_size=common.tokenizer.padded_vocab_size())"
LIKE = """TransformerConfig.llama_like(
            d_model=1000, n_layers=4, n_heads=8, vocab_size=1000, hidden_size_multiplier=1.5,
            block_name=TransformerBlockType.reordered_norm, qk_norm=True,
        )"""
ALONE = """\
    from olmo_core.train import TrainerConfig

    def whole(cli_context) -> ExperimentConfig:
        tokenizer = TokenizerConfig.dolma2()
        model = TransformerConfig.llama3_8B(vocab_size=tokenizer.vocab_size)
        module = TransformerTrainModuleConfig(
            rank_microbatch_size=8192, max_sequence_length=8192, dp_config=TransformerDataParallelConfig(name="fsdp"),
            cp_config=TransformerContextParallelConfig.llama3(degree=2),
        )
        return ExperimentConfig(
            model=model, train_module=module, dataset=Files.glob("*", sequence_length=8192),
            data_loader=Loader(global_batch_size=262144, seed=1),
        )
"""


def job(reading: Reading) -> Job:
    return to_job(reading, SETS)


def test_a_program_by_its_builders(tmp_path: Path) -> None:
    """4,096 x 64 tokens a step and twice 4,096 on a rank; 100,278 entries padded to 128 x 784 = 100,352; a shard per node."""
    found = job(written(tmp_path, "train.py", PROGRAM, devices=16))
    assert (found.model.name, found.model.vocab_sz) == ("olmo2-7b", 100352)
    assert (found.data.gbs, found.data.seqlen, found.data.microbatch_sz) == (64, 4096, 2)
    assert (found.parallelism.dp, found.parallelism.replicas) == (16, 2)
    assert found.parallelism.fsdp is not None
    assert found.parallelism.fsdp.reduce_dtype == "fp32"
    assert (found.performance.precision, found.performance.compile) == ("bf16", "blocks")
    older = PROGRAM.replace("max_sequence_length=LENGTH", "sequence_length=LENGTH")
    assert job(written(tmp_path, "older.py", older, devices=16)).data == found.data
    usual = PROGRAM.replace("max_sequence_length=LENGTH,", "").replace("4 * 1024", "8 * 1024")  # 4,096 by default
    assert job(written(tmp_path, "usual.py", usual, devices=16)).data.model_dump() == {
        "gbs": 128,
        "seqlen": 4096,
        "microbatch_sz": 2,
    }
    assert asked(tmp_path, "train.py", PROGRAM) == ("number of devices unknown; add --set parallelism.dp=N",)


def test_words_of_its_command_and_its_script(tmp_path: Path) -> None:
    """Words of the config go over the program's; --launch.num_nodes are whole nodes of the machine."""
    written(tmp_path, "train.py", PROGRAM, devices=8)
    words = "train my_run local --train_module.dp_config.shard_degree=4 --data_loader.global_batch_size=131072"
    found = job(read("auto", f"{tmp_path / 'train.py'} {words} --launch.num_nodes=2", SETS))
    assert (found.data.gbs, found.parallelism.dp, found.parallelism.replicas) == (32, 16, 4)
    found = job(written(tmp_path, "run.sh", f"#!/bin/bash\ntorchrun --nproc-per-node=8 train.py {words}\n"))
    assert (found.data.gbs, found.parallelism.dp) == (32, 8)


def test_a_word_of_its_script_without_a_value(tmp_path: Path) -> None:
    written(tmp_path, "train.py", PROGRAM, devices=8)
    script = "#!/bin/bash\ntorchrun --nproc-per-node=8 train.py train run x --%s=$SIZE\n"
    (line,) = asked(tmp_path, "run.sh", script % "train_module.rank_microbatch_size")
    assert line == "line 2: $SIZE has no value; write SIZE=... before the command"
    assert written(tmp_path, "run.sh", script % "train_module.optim.lr").config["data"]["microbatch_sz"] == 2


def test_sizes_of_an_own_model(tmp_path: Path) -> None:
    """int(8 x 1000 / 3) = 2,666, x 1.5 = 3,999, up to a multiple of 256: 4,096."""
    found = job(written(tmp_path, "train.py", PROGRAM.replace(NAMED, LIKE), devices=8)).model
    assert (found.n_layers, found.hidden_sz, found.inter_sz, found.glu, found.vocab_sz) == (4, 1000, 4096, True, 1000)
    assert (found.norm, found.qk_norm, found.qk_norm_type) == ("rmsnorm", True, "per_layer")
    assert (found.pre_norms, found.post_norms, found.tie_embeddings) == (False, True, False)
    small = job(written(tmp_path, "train.py", PROGRAM.replace("olmo2_7B", "olmo2_1B"), devices=8)).model
    assert (small.n_layers, small.hidden_sz, small.inter_sz) == (18, 2048, 8192)  # int(1.5 * 5461) = 8191


def test_a_whole_config_in_one_function(tmp_path: Path) -> None:
    """262,144 / 8,192 = 32 sequences; 8 devices over cp 2 are 4 ranks; the vocabulary as the tokenizer has it."""
    found = job(written(tmp_path, "train.py", ALONE, devices=8))
    assert (found.model.name, found.model.vocab_sz, found.data.gbs) == ("llama3-8b", 100278, 32)
    assert (found.parallelism.dp, found.parallelism.cp, found.cp_comm_type) == (4, 2, "all_gather")


def test_a_mapping_of_the_parts_in_one_function(tmp_path: Path) -> None:
    """A program of one's own returns them as a dict; full recomputation replays the 32 layers of a named model as of any."""
    parts = ALONE.replace(" -> ExperimentConfig", "").replace("return ExperimentConfig(", "return dict(")
    text = parts.replace("dp_config=", "ac_config=Checkpointing(mode=Mode.full), dp_config=")
    written(tmp_path, "train.py", text, devices=8)
    script = "#!/bin/bash\nPY=python3\n$PY -m torch.distributed.run --nnodes=1 --nproc_per_node=8 train.py\n"
    found = job(written(tmp_path, "run.sh", script))
    assert (found.model.name, found.data.gbs, found.parallelism.cp) == ("llama3-8b", 32, 2)
    assert found.performance.activation_checkpointing_type == "full"
    plain = job(written(tmp_path, "train.py", parts, devices=8)).performance
    assert plain.activation_checkpointing_type in {None, "none"}


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (NAMED, "thinner(TransformerConfig.olmo2_7B(vocab_size=1))", "its model or training module is known only at run time"),
        ("return " + NAMED, f"config = {NAMED}\n        config.d_model -= 8\n        return config", "model.d_model is computed"),
        ("return " + NAMED, f"config = {NAMED}\n        freeze(config)\n        return config", "freeze(config) may change"),
        ("common.tokenizer", "other", "vocabulary size unknown (other.padded_vocab_size())"),
        ("train_module_config_builder", "module_builder", "without a call of its build_config(model_config_builder=...)"),
        ("max_sequence_length=LENGTH", "max_sequence_length=LENGTH ** 1", "does not state max_sequence_length as a number"),
        ("trainer_config_builder", "finalize_config", "what finalize_config sets is not read"),
        ("olmo2_7B", "olmoe_1B_7B", "model 'TransformerConfig.olmoe_1B_7B' is not among the presets"),
        ("float8_config", "ac_config=C(mode=Mode.budget, activation_memory_budget=0.5), float8_config", "memory_budget 0.5"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_said(tmp_path: Path, old: str, new: str, what: str) -> None:
    text = PROGRAM.replace(old, new)
    (line,) = asked(tmp_path, "train.py", text, devices=8)
    assert what in line


def test_devices_of_a_launchers_default_are_told(tmp_path: Path) -> None:
    """torchrun without --nnodes starts one node; the user's number takes the note away."""
    written(tmp_path, "train.py", PROGRAM)
    script = "torchrun --nproc_per_node 8 train.py\n"
    (note,) = written(tmp_path, "run.sh", script).config["notes"]
    assert note.startswith("number of devices not set, 8 assumed: torchrun, one node without --nnodes")
    assert "notes" not in written(tmp_path, "run.sh", script, **{"parallelism.dp": 16}).config
