"""GPT-NeoX's words for attention and for recomputation, which decide memory and kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import SETS, asked, written

from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.model.blocks import n_params

JOB = """\
    {
      "pipe_parallel_size": 1, "num_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
      "max_position_embeddings": 128, "train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": true},
      "checkpoint_activations": true, %s
    }
"""


@pytest.mark.parametrize("words", ['"attention_config": [[["flash"], 8]]', '"te_mha": true'])
def test_flash_attention(tmp_path: Path, words: str) -> None:
    """megatron/model/transformer.py: te_mha makes TEMultiheadAttention, which has flash attention."""
    plan = written(tmp_path, "job.yml", JOB % words).config
    assert plan["performance"]["attention_impl"] == "flash"
    assert "attention_impl" not in written(tmp_path, "job.yml", JOB % '"te_mha": false').config["performance"]
    assert "attention_impl" not in written(tmp_path, "job.yml", JOB % '"weight_decay": 0').config["performance"]


def test_learned_positions_and_kernels_without_their_fusions(tmp_path: Path) -> None:
    """neox_args.py: pos_emb is learned by default, both fusions are off; 128 positions of 256 are 32,768 weights more."""
    usual = written(tmp_path, "job.yml", JOB % '"weight_decay": 0').config
    assert (usual["performance"]["softmax_impl"], usual["performance"]["activation_impl"]) == ("composite", "composite")
    fused = '"scaled_upper_triang_masked_softmax_fusion": true, "bias_gelu_fusion": true, "pos_emb": "rotary"'
    rotary = written(tmp_path, "job.yml", JOB % fused)
    assert (
        rotary.config["performance"] | {"softmax_impl": "fused", "activation_impl": "fused"}
        == rotary.config["performance"]
    )
    learned = to_job(written(tmp_path, "job.yml", JOB % '"pos_emb": "learned"'), SETS).model
    assert learned.learned_positions
    assert not learned.rotary_embeds
    assert to_job(rotary, SETS).model.rotary_embeds
    none = to_job(written(tmp_path, "job.yml", JOB % '"pos_emb": "none"'), SETS).model
    assert (none.learned_positions, none.rotary_embeds) == (False, False)


def test_several_kernels_are_counted_as_unfused(tmp_path: Path) -> None:
    reading = written(tmp_path, "job.yml", JOB % '"attention_config": [[["flash", "global"], "all"]]')
    assert "attention_impl" not in reading.config["performance"]
    (flag,) = reading.of("approximated")
    assert flag.note.startswith("layers of several attention kernels")


@pytest.mark.parametrize("word", ["mamba", "hyena"])
def test_layers_of_another_kind_are_told_as_such(tmp_path: Path, word: str) -> None:
    """GPT-NeoX's own words, and those of forks, that name no attention."""
    (line,) = asked(tmp_path, "job.yml", JOB % f'"attention_config": [[["{word}"], 8]]')
    assert line.startswith(f'attention_config [[["{word}"], 8]]: {word} layers, another kind of model')


def test_several_layers_between_two_checkpoints(tmp_path: Path) -> None:
    """megatron/model/gpt2_model.py: checkpoint_num_layers is DeepSpeed's activation_checkpoint_interval."""
    reading = written(tmp_path, "job.yml", JOB % '"checkpoint_num_layers": 4')
    assert reading.config["performance"]["recompute"] == {"granularity": "full", "method": "uniform", "n_layers": 4}
    one = written(tmp_path, "job.yml", JOB % '"checkpoint_num_layers": 1')
    assert one.config["performance"]["activation_checkpointing_type"] == "full"
    off = JOB.replace('"checkpoint_activations": true', '"checkpoint_activations": false')
    plan = to_job(written(tmp_path, "off.yml", off % '"checkpoint_num_layers": 4'), SETS)
    assert plan.performance.recompute is None


@pytest.mark.parametrize(("words", "width"), [('"hidden_dropout": 0', 768), ('"intermediate_size": 640', 640)])
def test_the_llama_mlp_of_older_releases(tmp_path: Path, words: str, width: int) -> None:
    """LLaMAParallelMLP: 8 x 256 / 3 = 682 in multiples of 256 are 768; swiglu of later releases: 4 x 256 / 3 = 341."""
    older = JOB % f'"mlp_type": "llama", "activation": "silu", {words}'
    model = written(tmp_path, "job.yml", older).config["model"]
    assert (model["glu"], model["inter_sz"]) == (True, width)
    later = written(tmp_path, "job.yml", JOB % '"activation": "swiglu"').config["model"]
    assert (later["glu"], later["inter_sz"]) == (True, 341)


def test_the_mlp_of_stable_lm(tmp_path: Path) -> None:
    """8/3 of 1,536 is 4,096, a multiple of 256; 2 devices a rank of tp: 4 ranks of 1 x 8 sequences."""
    job = """\
        "pipe-parallel-size": 0
        "model-parallel-size": 2
        "num-layers": 4
        "hidden-size": 1536
        "num-attention-heads": 16
        "num_kv_heads": 4
        "attention_head_type": groupedquery
        "qk_norm": true
        "seq-length": 1024
        "mlp_type": gated
        "activation": silu
        "no-weight-tying": true
        "full_precision_lm_cross_entropy": true
        "reset_attention_mask": true
        "train_micro_batch_size_per_gpu": 1
        "gradient_accumulation_steps": 8
        "bf16": {"enabled": true}
        "tokenizer-type": TiktokenTokenizer
        "vocab-file": arcade100k.tiktoken
    """
    reading = written(tmp_path, "job.yml", job, devices=8)
    model = reading.config["model"]
    assert (model["inter_sz"], model["n_kv_heads"], model["qk_norm"], model["vocab_sz"]) == (4096, 4, True, 100352)
    assert reading.config["data"]["gbs"] == 32
    assert not reading.of("unmodeled")


@pytest.mark.parametrize(("stages", "half", "level"), [(1, "bf16", 1), (0, "bf16", 0), (1, "fp16", 0)])
def test_bf16_states_of_a_pipeline_engine_are_sharded_at_stage_0(
    tmp_path: Path, stages: int, half: str, level: int
) -> None:
    """DeepSpeed runtime/engine.py, _do_optimizer_sanity_check: bf16 and pipeline_parallelism give BF16_Optimizer.

    GPT-NeoX has a pipeline where pipe_parallel_size is at least 1 (neox_arguments/arguments.py, is_pipe_parallel).
    """
    job = JOB.replace('"pipe_parallel_size": 1', f'"pipe_parallel_size": {stages}').replace('"fp16"', f'"{half}"')
    plan = written(tmp_path, "job.yml", job % '"zero_optimization": {"stage": 0}').config
    assert plan["parallelism"].get("zero_level", 0) == level
    older = (
        JOB.replace('{"enabled": true}', '{"enabled": true, "type": "bfloat16"}') % '"zero_optimization": {"stage": 0}'
    )
    plan = written(tmp_path, "old.yml", older).config
    assert (plan["performance"]["precision"], plan["parallelism"]["zero_level"]) == ("bf16", 0)


def test_the_number_of_devices_that_a_config_states(tmp_path: Path) -> None:
    """neox_arguments/arguments.py, calculate_derived: global_num_gpus goes before the hostfile. 8 over tp 2 are 4 ranks."""
    words = (
        '"global_num_gpus": 8, "model_parallel_size": 2, "hostfile": "./hosts", "zero_allow_untested_optimizer": true'
    )
    reading = written(tmp_path, "job.yml", JOB % f'{words}, "flops_profiler": {{"enabled": false, "module_depth": -1}}')
    assert reading.config["parallelism"]["dp"] == 4
    assert not reading.of("unmodeled")


def test_the_devices_on_which_a_model_was_trained_are_no_number_of_a_copy(tmp_path: Path) -> None:
    """As configs/20B.yml says of 96 A100, whose copies keep the comment with degrees of their own."""
    job = "# as it was trained on 96x 40GB A100\n# GPUs. You may need to change some parameters.\n" + JOB
    (told,) = asked(tmp_path, "job.yml", job % '"log_interval": 10')
    assert (
        told == "number of devices unknown: a comment says that the model was trained on 96; add --set parallelism.dp=N"
    )
    stated = written(tmp_path, "job.yml", job % '"log_interval": 10, "num_gpus": 4').config
    assert stated["parallelism"]["dp"] == 4


def test_what_is_no_option_of_gpt_neox_is_told_alone(tmp_path: Path) -> None:
    """Its own options of runs and data cost nothing and are not listed; the timers make the host wait."""
    words = '"train_iters": 10, "save": "x", "wall_clock_breakdown": true, "norm": "llamarmsnorm", "is_binary": true'
    reading = written(tmp_path, "job.yml", JOB % words)
    assert reading.config["model"]["norm"] == "rmsnorm"
    (note,) = [note for note in reading.config["notes"] if note.startswith("not options of GPT-NeoX")]
    assert note.endswith(": is_binary")
    assert any(flag.name == "wall_clock_breakdown" for flag in reading.of("approximated"))


def test_stages_that_do_not_divide_the_layers(tmp_path: Path) -> None:
    """DeepSpeed deals 8 layers to 3 stages as 3, 3 and 2; 8 devices of a node are no multiple of 3, 6 are."""
    job = JOB.replace('"pipe_parallel_size": 1', '"pipe_parallel_size": 3') % '"num_gpus": 6'
    plan = to_job(written(tmp_path, "job.yml", job), SETS).parallelism
    assert (plan.layers_per_stage, plan.dp) == ([3, 3, 2], 2)


def test_a_script_of_srun_is_of_the_kind_of_its_config(tmp_path: Path) -> None:
    """A launcher of one's own in front of train.py: 2 nodes of 8 processes, 4 sequences each."""
    (tmp_path / "job.yml").write_text(JOB % '"weight_decay": 0')
    (tmp_path / "run.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n"
        "CONFIG=job.yml\nsrun python run.py train.py $CONFIG\n"
    )
    job = to_job(read("auto", str(tmp_path / "run.sh"), SETS), SETS)
    assert (job.model.n_layers, job.parallelism.dp, job.data.gbs) == (8, 16, 64)


def test_norms_of_queries_and_keys_over_all_heads(tmp_path: Path) -> None:
    """ParallelSelfAttention: norms of 4 heads x 64 with one weight each, RMSNorm's: two of 256 in a layer more than without.

    norm_placement olmo3 (GeodesicResearch/geodesic-gpt-neox): norms of outputs, as many as those of inputs.
    """
    job = JOB % '"norm": "rmsnorm", "padded_vocab_size": 1024, "te_mha": true%s'
    plain = to_job(written(tmp_path, "job.yml", job % "", devices=8), SETS | {"devices": 8}).model
    own = '"use_qk_layernorm": true, "use_separate_qk_norms": true, "norm_placement": "olmo3"'
    reading = written(tmp_path, "own.yml", job % f", {own}", devices=8)
    model = to_job(reading, SETS | {"devices": 8}).model
    assert n_params(model) == n_params(plain) + 8 * 2 * 256
    assert (model.qk_norm_type, model.pre_norms, model.post_norms) == ("per_layer", False, True)
    assert not [flag for flag in reading.of("irrelevant") if "its name suggests no cost" in flag.note]
