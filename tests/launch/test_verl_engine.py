"""verl's newer trainer of supervised fine-tuning, whose keys are of an engine and of model.path."""

import pytest
from launch_readings import job

from steptime.base.config import ConfigError

SCRIPT = """torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer \\
  data.train_batch_size=64 data.max_length=2048 model.path=Qwen/Qwen3-8B engine=fsdp optim=fsdp {more}
"""
OLDER = (
    "data: {train_batch_size: 256, micro_batch_size_per_gpu: 16}\nmodel: {partial_pretrain: gemma, strategy: fsdp2}\n"
)


def problems(tmp_path, more):
    with pytest.raises(ConfigError) as error:
        job(tmp_path, "run.sh", SCRIPT.format(more=more))
    return [line.rpartition("run.sh: ")[2] for line in error.value.problems]


def test_sequences_of_a_micro_batch_are_read(tmp_path):
    """sft_trainer_engine.yaml: 4 sequences on each device; engine/fsdp.yaml: strategy fsdp, the first FSDP; 64 of 8 devices."""
    found = job(tmp_path, "run.sh", SCRIPT.format(more="data.use_dynamic_bsz=False"))
    assert (found.model.n_layers, found.data.seqlen, found.data.gbs, found.data.microbatch_sz) == (36, 2048, 64, 4)
    assert (found.parallelism.dp, found.parallelism.fsdp.version) == (8, 1)


def test_the_engines_strategy_is_read(tmp_path):
    more = "data.use_dynamic_bsz=False engine.strategy=fsdp2 data.micro_batch_size_per_gpu=2"
    found = job(tmp_path, "run.sh", SCRIPT.format(more=more))
    assert (found.parallelism.fsdp.version, found.data.microbatch_sz) == (2, 2)


def test_the_older_trainers_defaults_are_not_the_newer_ones(tmp_path):
    """Both programs lie in one repository, each with a file of defaults."""
    config = tmp_path / "verl/trainer/config"
    config.mkdir(parents=True)
    (config / "sft_trainer.yaml").write_text(OLDER)
    found = job(tmp_path, "run.sh", SCRIPT.format(more="data.use_dynamic_bsz=False"))
    assert (found.data.microbatch_sz, found.parallelism.fsdp.version) == (4, 1)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("", "data.use_dynamic_bsz true: micro-batches of a number of tokens, not of sequences"),
        (
            "data.use_dynamic_bsz=False engine.param_offload=True",
            "engine.param_offload true: parameters in host memory",
        ),
        ("data.use_dynamic_bsz=False engine.fsdp_size=4", "engine.fsdp_size 4: replicas of shards"),
        ("data.use_dynamic_bsz=False engine=megatron", "engine megatron: another engine than FSDP"),
        ("data.use_dynamic_bsz=False engine.model_dtype=bf16", "engine.model_dtype bf16: weights in another dtype"),
    ],
)
def test_what_is_not_modeled_is_refused(tmp_path, more, named):
    told = problems(tmp_path, more)
    assert len(told) == 1
    assert told[0].startswith(named)
