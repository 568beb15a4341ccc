"""torchtitan's batches in tokens, since 2026-08-20.

Each expected batch is worked out from pytorch/torchtitan@b5bcd76c torchtitan/trainer.py, Trainer.__init__:
num_tokens_per_dp_rank = num_tokens_per_microbatch_per_dp_rank * num_pp_microbatches (1 without a pipeline), and
gradient_accumulation_steps = num_tokens_per_train_step // (num_tokens_per_dp_rank * dp_degree).
"""

from __future__ import annotations

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.torchtitan.job_config import read_torchtitan

FUNCTION = """
def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"{attention}),
        training=TrainingConfig({training}),
        parallelism=ParallelismConfig({parallelism}),
    )
"""
TOKENS, STEP = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
PASSES = "parallelism.num_pp_microbatches"
PIPELINE = "pipeline_parallel_degree=4"


def tokens(count, context=8192, more=""):
    return f"num_tokens_per_microbatch_per_dp_rank={count}, max_context_length={context}, steps=10{more}"


def reading(training, parallelism="", *, devices=64, attention=""):
    text = FUNCTION.format(training=training, parallelism=parallelism, attention=attention)
    return read_torchtitan("config_registry.py:llama3_8b", text, {"WORLD_SIZE": str(devices)})


def batch(*args, **kwargs):
    data = reading(*args, **kwargs).config["data"]
    return data["gbs"], data["seqlen"], data["microbatch_sz"]


def problem(*args, **kwargs):
    with pytest.raises(ConfigError) as error:
        reading(*args, **kwargs)
    (line,) = error.value.problems
    return line.removeprefix("config_registry.py:llama3_8b: ")


def test_tokens_of_a_step_are_the_global_batch():
    """4,194,304 / 8,192 = 512 sequences; 512 / 64 ranks = 8 accumulations of one sequence of 8,192."""
    found = reading(tokens(8192, more=", num_tokens_per_train_step=4194304"))
    assert found.config["data"] == {"gbs": 512, "seqlen": 8192, "microbatch_sz": 1}
    assert {TOKENS, STEP} <= {flag.name for flag in found.of("used")}


def test_a_step_is_one_accumulation_unless_it_is_set():
    """-1: 2 x 8,192 tokens on each of 64 ranks, 128 sequences; by default 16,384 tokens, 8 sequences of 2,048 on 64 ranks."""
    assert batch(tokens(2 * 8192)) == (128, 8192, 2)
    assert batch("max_context_length=2048") == (512, 2048, 8)


@pytest.mark.parametrize(("step", "gbs", "passes"), [("", 256, None), (", num_tokens_per_train_step=6291456", 768, 3)])
def test_a_micro_batch_of_the_pipeline_is_the_tokens_of_a_forward(step, gbs, passes):
    """64 / 4 stages = 16 ranks, each with 8 micro-batches of 2 sequences: 256 sequences, 2,097,152 tokens a pass.

    6,291,456 tokens are three times that: the pipeline runs three times.
    """
    found = reading(tokens(16384, more=step), f"{PIPELINE}, num_pp_microbatches=8")
    assert found.config["data"] == {"gbs": gbs, "seqlen": 8192, "microbatch_sz": 2}
    assert found.config["parallelism"].get("pipeline_passes") == passes
    assert PASSES in {flag.name for flag in found.of("used")}


def test_micro_batches_of_a_pipeline_count_for_nothing_without_one():
    """ParallelismConfig.num_pp_microbatches: "ignored when pipeline parallelism is disabled"."""
    found = reading(tokens(8192), "num_pp_microbatches=8")
    assert found.config["data"]["gbs"] == 64
    assert PASSES in {flag.name for flag in found.of("irrelevant")}


def test_a_schedule_that_torch_refuses_with_the_default_of_one_micro_batch():
    """torch 2.13.0 Schedule1F1B.__init__: fewer micro-batches than stages; Interleaved1F1B takes one."""
    assert problem(tokens(8192), PIPELINE) == (
        f"{PASSES}: schedule 1F1B needs a micro-batch for each of its 4 stages (got 1); give 4 or more, "
        "or another schedule"
    )
    dual = f'{PIPELINE}, pipeline_parallel_schedule="DualPipeV", num_pp_microbatches=7'
    assert "DualPipeV needs a micro-batch for each of its 8 stages (got 7)" in problem(tokens(8192), dual)
    interleaved = f'{PIPELINE}, pipeline_parallel_schedule="Interleaved1F1B"'
    assert batch(tokens(8 * 8192), interleaved) == (128, 8192, 8)


def test_batches_in_sequences_are_held_to_the_same():
    """A local batch of 3 in micro-batches of 1 is 3 for 4 stages; of 4 in micro-batches of 2 it is 2."""
    few = "training.local_batch_size: schedule 1F1B needs a micro-batch for each of its 4 stages"
    assert (
        problem("local_batch_size=3, seq_len=8192", PIPELINE) == f"{few} (got 3); give 4 or more, or another schedule"
    )
    halves = f"{PIPELINE}, pipeline_parallel_microbatch_size=2"
    assert problem("local_batch_size=4, seq_len=8192", halves) == f"{few} (got 2); give 8 or more, or another schedule"
    assert batch("local_batch_size=4, seq_len=8192", PIPELINE) == (64, 8192, 1)


def test_a_context_longer_than_the_micro_batch():
    """No document in a micro-batch of 4,096 tokens is longer than that."""
    assert batch(tokens(4096)) == (64, 4096, 1)


def test_batches_that_cannot_be_counted_or_that_torchtitan_refuses():
    """8,192 tokens on 64 ranks are 524,288 a step."""
    assert problem(tokens(12288)) == (
        f"{TOKENS}: 12288 tokens are not whole sequences of training.max_context_length 8192, and sequences of unequal length "
        "are not counted; give a multiple of it"
    )
    assert problem(tokens(8192, more=", num_tokens_per_train_step=600000")) == (
        f"{STEP}: must be a multiple of num_tokens_per_microbatch_per_dp_rank * micro-batches in the pipeline * data-parallel "
        "ranks = 8192 * 1 * 64 = 524288 (got 600000)"
    )
    assert problem(tokens(8192, more=", num_tokens_per_train_step=0")) == f"{STEP}: must be -1, or at least 1 (got 0)"
    assert problem(tokens(8192), "num_pp_microbatches=0, pipeline_parallel_degree=2").startswith(f"{PASSES}: expected")
    assert problem(tokens(8192, more=", local_batch_size=2")).startswith(
        f"training.local_batch_size: {TOKENS} replaces it"
    )
    assert problem(tokens(8192), attention=', attn_backend="sdpa"').startswith(
        "model.attn_backend: torchtitan refuses sdpa"
    )


def test_defaults_are_those_of_the_release_whose_keys_are_used():
    """Batches in tokens came a week after CUDA graphs (2026-08-13), which are on unless they are disabled."""
    today, before = reading(tokens(8192)), reading("local_batch_size=1, seq_len=8192")
    assert (today.framework, before.framework) == (
        "torchtitan configs.py@b5bcd76c",
        "torchtitan configs.py@0014ac2c",
    )
    named = {flag.name for flag in today.of("default")}
    assert STEP in named
    assert not named & {"training.global_batch_size", "training.local_batch_size"}
    assert today.config["performance"]["cuda_graphs"]
    assert "cuda_graphs" not in before.config["performance"]


def test_a_script_sets_the_tokens_of_a_micro_batch(tmp_path):
    """run_train.sh --training.num_tokens_per_microbatch_per_dp_rank 16384: 2 sequences on each of 32 ranks."""
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    text = FUNCTION.format(training=tokens(8192), parallelism="", attention="")
    (folder / "config_registry.py").write_text(text)
    run = tmp_path / "run.sh"
    run.write_text(
        "torchrun --nnodes 4 --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b "
        f"--{TOKENS} 16384 --{STEP} 1048576\n"
    )
    found = read("torchtitan", str(run), HARDWARE).config["data"]
    assert found == {"gbs": 128, "seqlen": 8192, "microbatch_sz": 2}


def test_a_log_prints_the_same_keys():
    """131,072 / 4,096 = 32 sequences of a step: 2 of each of 8 ranks, twice."""
    text = (
        'Running with configs: {"model_spec": {"name": "llama3", "flavor": "8B"}, "training": '
        '{"num_tokens_per_microbatch_per_dp_rank": 8192, "num_tokens_per_train_step": 131072, "max_context_length": 4096}, '
        '"parallelism": {"num_pp_microbatches": 1}}\n'
        "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1\n"
    )
    found = read_torchtitan("train.log", text)
    assert found.config["data"] == {"gbs": 32, "seqlen": 4096, "microbatch_sz": 2}


FORKS = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 4\nseq_len = 2048\ngradient_accumulation_steps = 8\n'


def test_a_forks_own_accumulation():
    """4 sequences on each of 16 ranks, 8 times between two optimizer steps: 512 sequences a step."""
    found = read_torchtitan("job.toml", FORKS, {"WORLD_SIZE": "16"})
    assert found.config["data"] == {"gbs": 512, "seqlen": 2048, "microbatch_sz": 4}
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps: 8 x 64 sequences are not \S+ 128; give one"):
        read_torchtitan("job.toml", f"{FORKS}global_batch_size = 128\n", {"WORLD_SIZE": "16"})
