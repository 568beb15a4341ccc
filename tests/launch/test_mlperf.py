"""MLPerf's jobs, whose config_*.sh only size them, and Primus's, whose models have files of their own."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from test_files_of_forks import GPT, SETS, asked, written

from steptime.base.config import ConfigError
from steptime.launch.read import read

SIZES = """\
export MINIBS=48
export TENSOR_MODEL_PARALLEL=4
export PIPELINE_MODEL_PARALLEL=8
export CONTEXT_PARALLEL=2
export MICRO_BATCH_SIZE=1
export DGXNNODES=32
export DGXNGPU=8
"""
CUSTOM = """\
trainer:
  devices: ${oc.decode:${oc.env:DGXNGPU,8}}
  num_nodes: ${oc.decode:${oc.env:DGXNNODES,1}}
  precision: bf16
exp_manager: {}
model:
  mcore_gpt: true
  base_config: ${oc.env:MODEL_SIZE,405b}
  micro_batch_size: ${oc.decode:${oc.env:MICRO_BATCH_SIZE}}
  tensor_model_parallel_size: ${oc.decode:${oc.env:TENSOR_MODEL_PARALLEL}}
  pipeline_model_parallel_size: ${oc.decode:${oc.env:PIPELINE_MODEL_PARALLEL}}
  context_parallel_size: ${oc.decode:${oc.env:CONTEXT_PARALLEL,1}}
  global_batch_size: ${multiply:${oc.decode:${oc.env:MINIBS}},${floor_div:${multiply:${trainer.devices},${trainer.num_nodes}},64}}
  overwritten_attributes:
    num_layers: ${oc.decode:${oc.env:LAYERS,126}}
    cuda_graph_scope: ${if:${eq:'1',${oc.env:WHOLE,0}},'full_iteration','full'}
  encoder_seq_length: 8192
  sequence_parallel: true
  transformer_engine: true
  fp8: ${oc.decode:${oc.env:FP8,True}}
  fp8_recipe: tensorwise
  fp4: ${oc.decode:${oc.env:FP4,False}}
  optim: {use_distributed_optimizer: true, overlap_grad_reduce: true, bucket_size: 1000000, fp8_param_gather: false}
"""


def placed(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text), encoding="utf-8")


def test_a_config_that_hydra_only_composes_is_the_jobs_and_names_its_model(tmp_path: Path) -> None:
    """32 nodes of 8 over tp 4, pp 8, cp 2: 256 / 64 = 4 ranks; 48 sequences each are 192. No gradient is reduced in fp32."""
    placed(tmp_path, {"conf/custom.yaml": CUSTOM})
    placed(tmp_path, {"conf/job.yaml": "defaults:\n  - _self_\n  - custom\n\nhydra:\n  output_subdir: null\n"})
    plan = written(tmp_path, "config_32x8.sh", SIZES).config
    assert plan["model"] == {"preset": "llama3-405b", "n_layers": 126}
    layout = plan["parallelism"]
    assert [layout[axis] for axis in ("tp", "pp", "cp", "dp", "zero_level")] == [4, 8, 2, 4, 1]
    assert (plan["data"]["gbs"], plan["data"]["seqlen"]) == (192, 8192)
    told = plan["performance"]
    assert (told["precision"], told["main_grad_dtype"]) == ("fp8_current", "bf16")
    fp4 = written(tmp_path, "config_32x8.sh", f"{SIZES}export FP4=True FP8=False MODEL_SIZE=8b LAYERS=32\n").config
    assert (fp4["performance"]["precision"], fp4["model"]["preset"]) == ("nvfp4", "llama3-8b")


def test_the_sizes_are_a_file_of_nemo_as_well_as_of_the_megatron_that_it_trains_with(tmp_path: Path) -> None:
    placed(tmp_path, {"conf/custom.yaml": CUSTOM, "config_32x8.sh": SIZES})
    nemo, megatron = (read(kind, str(tmp_path / "config_32x8.sh"), SETS).config for kind in ("nemo", "megatron"))
    assert nemo == megatron
    assert nemo["parallelism"]["pp"] == 8


def test_the_sizes_may_be_in_a_folder_beside_the_config(tmp_path: Path) -> None:
    """They source what lies beside them: without its micro-batch of 1 the config has none."""
    common = "export MICRO_BATCH_SIZE=1\n"
    own = 'source "$(dirname ${BASH_SOURCE[0]})/config_common.sh"\n' + SIZES.replace(common, "")
    placed(tmp_path, {"conf/custom.yaml": CUSTOM, "configs/config_common.sh": common})
    assert written(tmp_path, "configs/config_32x8.sh", own).config == written(tmp_path, "config_32x8.sh", SIZES).config


def test_a_config_that_another_one_adds_to_is_not_the_job(tmp_path: Path) -> None:
    placed(tmp_path, {"conf/custom.yaml": CUSTOM, "conf/job.yaml": "defaults:\n  - custom\n\ntrainer: {devices: 4}\n"})
    assert asked(tmp_path, "config_32x8.sh", SIZES)[0].startswith("sets variables of a job (DGXNNODES, DGXNGPU,")


RUN = """\
#!/bin/bash
: "${SEED:?SEED not set}"
: "${SEQ_PARALLEL:=True}"
CMD=( ${NSYSCMD} 'python' '-u' )
${CMD[@]} /workspace/llm/megatron_gpt_pretraining_custom.py \\
    --config-path=/workspace/llm/conf --config-name=megatron_gpt_config model.seed=${SEED} \\
    trainer.devices=${SLURM_NTASKS_PER_NODE-$DGXNGPU} trainer.num_nodes=${SLURM_JOB_NUM_NODES-1} \\
    model.global_batch_size=${GBS} model.tensor_model_parallel_size=${TENSOR_MODEL_PARALLEL}
"""


def test_variables_of_a_job_are_those_of_its_run_and_time(tmp_path: Path) -> None:
    """4 nodes of 8 over tp 4 are 8 ranks."""
    config = """\
        trainer: {devices: 1, num_nodes: 1, precision: bf16}
        exp_manager: {}
        model:
          mcore_gpt: true
          micro_batch_size: 1
          global_batch_size: 1
          tensor_model_parallel_size: 1
          encoder_seq_length: 2048
          num_layers: 8
          hidden_size: 1024
          num_attention_heads: 16
          megatron_amp_O2: true
          tokenizer: {library: megatron, type: GPT2BPETokenizer}
          activation_func_fp8_input_store: 0
          optim: {name: distributed_fused_adam, delay_grad_reduce: true, delay_param_gather: true}
        """
    placed(tmp_path, {"run_and_time.sh": RUN, "conf/megatron_gpt_config.yaml": config})
    sizes = "export GBS=64\nexport TENSOR_MODEL_PARALLEL=4\nexport DGXNNODES=4\nexport DGXNGPU=8\n"
    reading = written(tmp_path, "config_4x8.sh", sizes)
    assert reading.of("unmodeled") == []
    plan = reading.config
    assert (plan["parallelism"]["tp"], plan["parallelism"]["dp"], plan["data"]["gbs"]) == (4, 8, 64)


def test_a_config_whose_optimizer_has_no_name_is_a_part_of_one(tmp_path: Path) -> None:
    """Another config's defaults add one (optim@model.optim: distributed_fused_adam), which decides how its states are sharded."""
    part = """\
        trainer: {devices: 8, num_nodes: 4, precision: bf16}
        exp_manager: {}
        model:
          mcore_gpt: true
          micro_batch_size: 1
          global_batch_size: 64
          encoder_seq_length: 2048
          num_layers: 8
          hidden_size: 1024
          num_attention_heads: 16
          optim: {lr: 0.1}
        """
    what = "model.optim has no name: a part of a config that hydra composes"
    told = (f"{what}; give the composed one, or the log that prints it",)
    assert asked(tmp_path, "custom.yaml", dedent(part)) == told


PRIMUS = """\
modules:
  pre_trainer:
    framework: megatron
    model: qwen2.5_3B.yaml
    overrides: {micro_batch_size: 1, global_batch_size: 16, seq_length: 2048, no_fp8_weight_transpose_cache: true, fp8: hybrid}
"""


def test_a_model_of_primus_is_not_quite_the_one_of_its_name(tmp_path: Path) -> None:
    """qwen2.5_base.yaml unties the embeddings, which Qwen2.5-3B ties."""
    reading = written(tmp_path, "examples/job.yaml", PRIMUS)
    assert reading.config["model"] == {
        "preset": "qwen2.5-3b",
        "tie_embeddings": False,
        "qkv_bias": False,
        "qk_norm": False,
    }
    assert [flag.name for flag in reading.of("approximated")] == ["no_fp8_weight_transpose_cache"]


@pytest.mark.parametrize(("layers", "word"), [(36, "extends"), (4, "extends"), (4, "bases")])
def test_a_model_of_primus_is_read_from_its_file(tmp_path: Path, layers: int, word: str) -> None:
    """AMD-AGI/Primus@610af752 gave bases the name extends."""
    models = "primus/configs/models/megatron"
    own = f"{word}:\n  - base.yaml\nnum_layers: {layers}\nhidden_size: 2048\nnum_attention_heads: 16\nffn_hidden_size: 11008\n"
    base = "extends:\n  - language_model.yaml\nqk_layernorm: true\nnormalization: RMSNorm\nvocab_size: 1000\n"
    placed(tmp_path, {f"{models}/qwen2.5_3B.yaml": own, f"{models}/base.yaml": base})
    placed(tmp_path, {f"{models}/language_model.yaml": "num_layers: 24\n"})
    model = written(tmp_path, "examples/job.yaml", PRIMUS).config["model"]
    assert (model["n_layers"], model["qk_norm"], model["norm"]) == (layers, True, "rmsnorm")
    assert (model["tie_embeddings"], model["bias"], model["glu"]) == (False, False, True)


@pytest.mark.parametrize(
    ("extends", "line"),
    [
        ("3", "qwen2.5_3B.yaml: extends: expected names of files (got 3)"),
        ("[qwen2.5_3B.yaml]", "qwen2.5_3B.yaml: extends: qwen2.5_3B.yaml extends itself"),
        ("[base.yaml]", "base.yaml: extends: qwen2.5_3B.yaml extends itself"),
        ("own.yaml", "qwen2.5_3B.yaml: extends primus/configs/models/megatron/own.yaml, which was not found"),
    ],
)
def test_files_of_primus_that_extend_nothing_or_themselves(tmp_path: Path, extends: str, line: str) -> None:
    models = "primus/configs/models/megatron"
    base = "extends: [qwen2.5_3B.yaml, qwen2.5_3B.yaml]\nnum_layers: 4\n"
    placed(tmp_path, {f"{models}/qwen2.5_3B.yaml": f"extends: {extends}\n", f"{models}/base.yaml": base})
    with pytest.raises(ConfigError) as error:
        written(tmp_path, "examples/job.yaml", PRIMUS)
    assert error.value.problems[0].partition("; put it")[0] == line


def test_attributes_that_are_no_mapping(tmp_path: Path) -> None:
    text = CUSTOM[: CUSTOM.index("  overwritten_attributes")] + "  overwritten_attributes: 3\n"
    placed(tmp_path, {"conf/custom.yaml": text + CUSTOM[CUSTOM.index("  encoder_seq_length") :]})
    assert written(tmp_path, "config_32x8.sh", SIZES).config["model"] == {"preset": "llama3-405b"}


def test_settings_and_adapters_that_are_elsewhere(tmp_path: Path) -> None:
    placed(tmp_path, {"conf/custom.yaml": CUSTOM})
    sizes = f"source $(dirname ${{BASH_SOURCE[0]}})/config_attention.sh\n{SIZES}"
    (line,) = asked(tmp_path, "config_32x8.sh", sizes)
    assert line == (
        "line 1 sources $(dirname ${BASH_SOURCE[0]})/config_attention.sh, which was not found; put it in the same folder, "
        "or add --with FILE"
    )
    placed(tmp_path, {"config_attention.sh": "export LAYERS=4\n", "train.py": "peft = LoRA(dim=16)\n"})
    with pytest.raises(ConfigError, match=r"train\.py beside it trains adapters over frozen weights"):
        written(tmp_path, "config_32x8.sh", sizes)
    (tmp_path / "train.py").unlink()
    assert written(tmp_path, "config_32x8.sh", sizes).config["model"]["n_layers"] == 4


def test_mindspeeds_overlap_is_not_without_cost(tmp_path: Path) -> None:
    """CoC hides communication of tensor parallelism under its products; without tp it has nothing to hide."""
    script = f"torchrun --nproc_per_node=8 pretrain_gpt.py --use-ascend-coc --tensor-model-parallel-size %d {GPT}\n"
    assert [flag.name for flag in written(tmp_path, "run.sh", script % 2).of("approximated")] == ["--use-ascend-coc"]
    assert not written(tmp_path, "run.sh", script % 1).of("approximated")
