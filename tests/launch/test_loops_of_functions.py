"""Loops in config functions of torchtitan and Megatron-Bridge: over known items, over parts of a config, over its layers."""

from __future__ import annotations

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

TITAN = """
def job() -> Trainer.Config:
    config = Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8),
    )
{}
    return config
"""
BRIDGE = """
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config


def job() -> ConfigContainer:
    cfg = llama3_8b_pretrain_config()
{}
    return cfg
"""
SETS = HARDWARE | {"devices": 8}


def reading_of(folder, kind, code):
    at = folder / "torchtitan/models/llama3" if kind == "torchtitan" else folder
    at.mkdir(parents=True, exist_ok=True)
    path = at / "config_registry.py"
    body = "\n".join(f"    {line}" for line in code.splitlines())
    path.write_text({"torchtitan": TITAN, "nemo": BRIDGE}[kind].format(body))
    return read(kind, f"{path}:job", SETS)


@pytest.mark.parametrize(
    "loop",
    [
        "for i in range(1, 4):\n    config.training.seq_len = 1024 * i",
        "for i, length in enumerate([1024, 2048, 3072]):\n    config.training.seq_len = length",
        "for name, length in zip(['steps', 'seq_len'], [10, 3072]):\n    setattr(config.training, name, length)",
        "for name, length in {'seq_len': 3072}.items():\n    setattr(config.training, name, length)",
        "config.training.seq_len = 3072\nfor i in range(0):\n    config.training.seq_len = i",
        "for part in (config.training,):\n    part.seq_len = 3072",
    ],
)
def test_a_loop_over_known_items_is_followed(tmp_path, loop):
    assert to_job(reading_of(tmp_path, "torchtitan", loop), SETS).data.seqlen == 3_072


def test_parts_of_a_config_that_another_function_makes(tmp_path):
    loop = "for part in (cfg.train, cfg.dataset):\n    part.global_batch_size = 64"
    assert to_job(reading_of(tmp_path, "nemo", loop), SETS).data.gbs == 64


def test_what_a_loop_sets_in_every_layer_is_told(tmp_path):
    """The feed-forward width of every layer is no option of the trainer: it is left out, not read as the model's."""
    loop = "for layer in config.model_spec.model.layers:\n    layer.feed_forward.hidden_dim = 8192"
    reading = reading_of(tmp_path, "torchtitan", loop)
    assert [flag.name for flag in reading.of("unmodeled")] == ["model.hidden_dim"]


def test_stages_that_a_loop_lays_out_are_told(tmp_path):
    loop = "layout = []\nfor i in range(4):\n    layout.append(['decoder'] * 8)\ncfg.model.pipeline_model_parallel_size = 4\n"
    reading = reading_of(tmp_path, "nemo", f"{loop}cfg.model.pipeline_model_parallel_layout = layout")
    (flag,) = reading.of("unmodeled")
    assert flag.name == "model.pipeline_model_parallel_layout"
    assert flag.value.startswith('[["decoder", "decoder"')


@pytest.mark.parametrize(
    "loop",
    [
        "for i, layer in enumerate(config.model_spec.model.layers):\n    layer.window = i",  # layers that differ
        "for i in range(n_layers):\n    config.training.seq_len = 1024",
        "for i in range(10**9):\n    config.training.seq_len = 1024",
        "for i in range(1, 4, 0):\n    config.training.seq_len = 1024",
        "for i in range():\n    config.training.seq_len = 1024",
        "sizes = {'a': 1}\nfor size in sizes:\n    size.window = 1",
        "for i in zip([1], config.other):\n    config.training.seq_len = 1024",
    ],
)
def test_a_loop_over_what_is_not_known_is_one_line(tmp_path, loop):
    with pytest.raises(ConfigError, match=r"registry.py:[89]: cannot be evaluated statically \(for [^\n]*\Z"):
        reading_of(tmp_path, "torchtitan", loop)


DOUBLED = "    a, b = [1], [1]\n" + "    a = [a, a]\n    b = [b, b]\n" * 40
"""2^40 items each, all of them the same two lists."""


@pytest.mark.parametrize(
    "use",
    [
        DOUBLED + "    if a == b:\n        x = 1",
        DOUBLED + "    if a in [b]:\n        x = 1",
        DOUBLED + "    cfg.x = {1: 2}[a]",
        DOUBLED + "    cfg.train.seed = a",
        "    a = [1]\n    a.append(a)\n    cfg.train.seed = a",
    ],
    ids=["compared", "looked for", "key", "value", "in itself"],
)
def test_lists_without_bound_end(tmp_path, use):
    """Neither compared nor written out."""
    code = f"def job() -> ConfigContainer:\n    cfg = ConfigContainer()\n{use}\n    return cfg\n"
    (tmp_path / "recipe.py").write_text(code)
    with pytest.raises(ConfigError, match="its model is known only at run time"):
        read("nemo", f"{tmp_path / 'recipe.py'}:job", HARDWARE)
