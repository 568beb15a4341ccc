"""Scripts of NeMo 1: of its launcher, whose configs lie in conf/training, and of its programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from launch_readings import DATA, HARDWARE
from test_files_of_forks import asked, written

from steptime.base.config import ConfigError
from steptime.launch.logs.printed_config import block, plain_lines
from steptime.launch.nemo.formats import read_nemo
from steptime.launch.read import read

CONFIG = """\
trainer: {devices: 8, num_nodes: 16, precision: bf16}
exp_manager: {}
model:
  mcore_gpt: true
  micro_batch_size: 1
  global_batch_size: 64
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 1
  encoder_seq_length: 2048
  num_layers: 8
  hidden_size: 1024
  num_attention_heads: 16
  megatron_amp_O2: true
  tokenizer: {library: megatron, type: GPT2BPETokenizer}
  optim: {name: fused_adam}
"""
LAUNCHER = """\
    #!/bin/bash
    DIR=/opt/launcher
    python3 ${DIR}/launcher_scripts/main.py training=gpt3/own stages=[training] data_dir=${DATA} \\
        training.trainer.num_nodes=2 training.model.tensor_model_parallel_size=2
"""


def test_a_script_of_the_launcher_has_the_config_that_it_names(tmp_path: Path) -> None:
    """2 nodes of 8 devices over tp 2 are 8 data-parallel ranks; DATA changes no cost."""
    config = tmp_path / "launcher_scripts" / "conf" / "training" / "gpt3" / "own.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG, encoding="utf-8")
    plan = written(tmp_path, "examples/gpt/own.sh", LAUNCHER).config
    assert (plan["model"]["n_layers"], plan["parallelism"]["tp"], plan["parallelism"]["dp"]) == (8, 2, 8)
    assert plan["data"]["gbs"] == 64


def test_the_config_in_a_log_is_that_of_rank_0(tmp_path: Path) -> None:
    """srun --label: other ranks' lines come before the config and within it; 16 nodes of 8 devices over tp 4."""
    heading = "[NeMo I 2024-09-29 16:06:43 pretraining:70]\n\n************** Experiment configuration ***********"
    told = [f"  0:   {line}" for line in f"{heading}\n[NeMo I 2024]\n{CONFIG}\n".splitlines()]
    log = [
        "+ srun -l python",
        " 17: x: 1: started",
        *told[:9],
        " 18: :::MLLOG {}",
        *told[9:],
        "  0: GPU available: True",
    ]
    plan = written(tmp_path, "result_0.txt", "\n".join(log)).config
    assert (plan["model"]["n_layers"], plan["parallelism"]["dp"], plan["data"]["gbs"]) == (8, 32, 64)


@pytest.mark.parametrize(
    "text",
    [':::MLLOG {"key": "init_start", "value": null}\n', "1:  iteration       25/73242187 | consumed samples: 50 |\n"],
)
def test_a_log_of_steps_alone(tmp_path: Path, text: str) -> None:
    (line,) = asked(tmp_path, "result_1.txt", text)
    assert line == "a log that does not print the job's config; give the config or the script"


def test_printed_configs_end_where_the_log_goes_on():
    lines = plain_lines("a log line\n  x:\n    y: 1\n    z:\n    - 2\n  w: 3\n[NeMo I] next\n")
    assert yaml.safe_load("\n".join(block(lines, 1))) == {"x": {"y": 1, "z": [2]}, "w": 3}


def test_a_tokenizer_file_to_be_filled_in_leaves_the_configs_own(tmp_path: Path) -> None:
    """The config names GPT-2's tokenizer, 50,257 entries; a file that is given is the job's, and unknown."""
    config = tmp_path / "launcher_scripts" / "conf" / "training" / "gpt3" / "own.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG, encoding="utf-8")
    script = f"{LAUNCHER.rstrip()} training.model.tokenizer.model=${{TOK_PATH}}\n"
    assert written(tmp_path, "examples/gpt/own.sh", script).config["model"]["vocab_sz"] == 50257
    (line,) = asked(tmp_path, "examples/gpt/own.sh", script.replace("${DIR}/l", "${OWN}/l").replace("=2 ", "=$N "))
    assert line.endswith("$N has no value; write N=... before the command")


def test_all_that_a_program_lacks_is_asked_for_at_once(tmp_path: Path) -> None:
    script = """\
        python /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py trainer.devices=${DEVICES} \\
            model.global_batch_size=$GBS exp_manager.name=$NAME
    """
    assert asked(tmp_path, "run.sh", script) == (
        "line 1 reads conf/megatron_gpt_config.yaml, which was not found; put it in the same folder, or add --with FILE",
        "line 1: $DEVICES, $GBS have no value; write DEVICES=... GBS=... before the command",
    )
    config = tmp_path / "conf" / "megatron_gpt_config.yaml"
    config.parent.mkdir()
    config.write_text(CONFIG, encoding="utf-8")
    filled = "DEVICES=4\n" + script.strip().replace("$GBS", "32") + " trainer.num_nodes=1\n"
    plan = written(tmp_path, "run.sh", filled).config
    assert (plan["parallelism"]["tp"], plan["parallelism"]["dp"], plan["data"]["gbs"]) == (4, 1, 32)


def test_fp8_of_a_model_in_fp32_and_a_model_alone(tmp_path: Path) -> None:
    """The products would be in fp8, but weights and activations in fp32, which no precision of a plan says."""
    job = CONFIG.replace("precision: bf16", "precision: 32").replace(
        "  mcore_gpt", "  transformer_engine: true\n  fp8: true\n  mcore_gpt"
    )
    (line,) = asked(tmp_path, "job.yaml", job)
    assert line.startswith("model.fp8 true: products in fp8 of a model in precision 32; not modeled")
    (line,) = asked(tmp_path, "model_config.yaml", "encoder_seq_length: 2048\nnum_layers: 4\nhidden_size: 512\n")
    assert line.endswith("without the trainer, precision and optimizer of a job; give the config that trains it")


@pytest.mark.parametrize(("precision", "kernel"), [("bf16", "flash"), ("16", "flash"), ("32", "unfused")])
def test_transformer_engine_has_no_flash_attention_in_fp32(tmp_path: Path, precision: str, kernel: str) -> None:
    """TransformerEngine pytorch/attention/dot_product_attention/utils.py, get_attention_backend: qkv_dtype."""
    text = CONFIG.replace("precision: bf16", f"precision: {precision}").replace("mcore_gpt", "transformer_engine")
    assert written(tmp_path, "job.yaml", text).config["performance"]["attention_impl"] == kernel


def test_the_length_of_fine_tuning_is_that_of_its_data(tmp_path: Path) -> None:
    """The model is in a checkpoint; examples/nlp/language_modeling/tuning/conf/megatron_gpt_finetuning_config.yaml."""
    text = CONFIG.replace("  encoder_seq_length: 2048\n", "  data: {train_ds: {max_seq_length: 512}}\n")
    assert written(tmp_path, "tune.yaml", text).config["data"]["seqlen"] == 512
    aligner = text.replace("  optim:", "  steerlm2: {micro_batch_size: 1, forward_micro_batch_size: 1}\n  optim:")
    assert written(tmp_path, "sft.yaml", aligner).of("unmodeled") == []  # of NeMo-Aligner's train_steerlm2.py


def test_a_stage_of_the_launcher_that_fine_tunes(tmp_path: Path) -> None:
    """launcher_scripts/conf/peft; 2 nodes of 8 devices over the config's tp 4 are 4 data-parallel ranks."""
    config = tmp_path / "launcher_scripts" / "conf" / "peft" / "llama" / "sft.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG, encoding="utf-8")
    options = "stages=[peft] peft=llama/sft peft.trainer.num_nodes=2 peft.model.global_batch_size=32"
    script = f"python3 launcher_scripts/main.py {options}\n"
    plan = written(tmp_path, "run.sh", f"#!/bin/bash\n{script}").config
    assert (plan["parallelism"]["tp"], plan["parallelism"]["dp"], plan["data"]["gbs"]) == (4, 4, 32)
    lacking = script.replace("=32", "=$GBS")
    assert asked(tmp_path, "run.sh", f"#!/bin/bash\n{lacking}") == (
        "line 2: $GBS has no value; write GBS=... before the command",
    )


def test_keys_of_nemo_1_without_effect():
    """Launcher configs: recomputation of 0 layers per pipeline, and a checkpoint to go on from."""
    text = (DATA / "nemo/llama3_1_70b.yaml").read_text(encoding="utf-8")
    keys = "  activations_checkpoint_layers_per_pipeline: 0\n  restore_from_path: /models/own.nemo\n"
    found = read_nemo("job", text.replace("\nmodel:\n", f"\nrestore_from_path: null\nmodel:\n{keys}"), {})
    assert not found.of("unmodeled")
    assert found.config == read_nemo("job", text, {}).config


def test_the_name_of_a_config_says_its_devices(tmp_path: Path) -> None:
    """256 devices over tp 4 are 64 ranks, and 256 samples 4 of each; two numbers, or nodes of its own, are not guessed over."""
    text = CONFIG.replace("num_nodes: 16, ", "").replace("global_batch_size: 64", "global_batch_size: 256")
    plan = written(tmp_path, "llama3-1-70b-256gpus-a4-bf16.yaml", text).config
    assert plan["parallelism"]["dp"] == 64
    assert "number of devices not set, 256 assumed: the name of the file" in plan["notes"][0]
    assert written(tmp_path, "own-256gpus.yaml", CONFIG).config["parallelism"]["dp"] == 32
    asks = ("number of devices unknown; add --set parallelism.dp=N",)
    assert asked(tmp_path, "mixtral-16-32-gpus.yaml", text) == asks
    assert written(tmp_path, "a-256gpus.yaml", text, **{"parallelism.dp": 8}).config["parallelism"]["dp"] == 8


def test_no_granularity_of_recomputation_is_none(tmp_path: Path) -> None:
    """NeMo's launcher, conf/training/llama: a method and a number of layers stay beside a granularity of null."""
    said = {"granularity": "null", "method": "block", "num_layers": 1}
    own = "\n  ".join(f"activations_checkpoint_{key}: {value}" for key, value in said.items())
    text = CONFIG.replace("  num_layers: 8", f"  {own}\n  num_layers: 8")
    assert written(tmp_path, "own.yaml", text).config["performance"]["activation_checkpointing_type"] == "none"


FINE_TUNED = """\
    run: {convert_dir: "${base_results_dir}/${.model_train_name}/convert_nemo", model_train_name: NAME}
    trainer: {devices: 8, num_nodes: 1, precision: bf16}
    exp_manager: {}
    model:
      restore_from_path: ${fine_tuning.run.convert_dir}/results/megatron_llama.nemo
      global_batch_size: 16
      micro_batch_size: 1
      tensor_model_parallel_size: 2
      megatron_amp_O2: true
      data: {train_ds: {max_seq_length: 1024, global_batch_size: "${fine_tuning.model.global_batch_size}"}}
      optim: {name: fused_adam}
"""


def test_the_path_of_a_checkpoint_names_its_model(tmp_path: Path) -> None:
    """A reference is relative to its own key, wherever it is used; 8 devices over tp 2 are 4 ranks."""
    reading = written(tmp_path, "squad.yaml", FINE_TUNED.replace("NAME", "llama2_7b"))
    assert reading.config["model"] == "llama2-7b"
    assert (reading.config["parallelism"]["dp"], reading.config["data"]["seqlen"]) == (4, 1024)
    assert reading.config["performance"]["software"] == "nemo"
    assert "from the path of its checkpoint" in reading.config["notes"][0]


def test_a_checkpoint_without_a_size_in_its_path_is_asked_for(tmp_path: Path) -> None:
    for name in ("gpt3_sft", "llama2", "own_7b"):
        (line,) = asked(tmp_path, "squad.yaml", FINE_TUNED.replace("NAME", name))
        assert line == "model unknown; add --set model=NAME (3dtrn models lists them)"


def test_variables_of_a_config_that_are_not_set_are_asked_for(tmp_path: Path) -> None:
    """MLPerf's conf/custom.yaml: a variable without a default, which a config_*.sh beside it sets."""
    text = CONFIG.replace("tensor_model_parallel_size: 4", "tensor_model_parallel_size: ${oc.decode:${oc.env:TP}}")
    text = text.replace("global_batch_size: 64", "global_batch_size: ${multiply:${oc.env:MINIBS},${oc.env:TP}}")
    fix = "before the command, or give the file that sets it with --with FILE"
    lines = asked(tmp_path, "custom.yaml", text)
    assert set(lines[:2]) == {
        f"model.global_batch_size: $MINIBS and $TP not set; write MINIBS=... TP=... {fix}",
        f"model.tensor_model_parallel_size: $TP not set; write TP=... {fix}",
    }


def test_scales_of_fp8_are_told_only_under_fp8() -> None:
    """MLPerf's configs set them also where fp8 is off (training_results_v5.1 AMD llama2_70b_lora megatron_gpt_peft_*)."""
    for precision, told in (("", "irrelevant"), ("  fp8: true\n", "approximated")):
        scales = "  reduce_amax: false\n  disable_parameter_transpose_cache: true\n"
        flags = read_nemo("job", f"{CONFIG}{precision}{scales}", {}, None).flags
        found = {flag.name: flag.status for flag in flags}
        assert found["model.reduce_amax"] == found["model.disable_parameter_transpose_cache"] == told


def test_the_launcher_started_in_its_own_folder_by_a_file_without_a_shebang(tmp_path: Path) -> None:
    """NeMo's launcher of 2022: main.py at the top of the checkout; amp_backend native is torch's autocast."""
    config = tmp_path / "conf" / "training" / "gpt3" / "126m.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG.replace("trainer: {", "trainer: {amp_backend: native, "), encoding="utf-8")
    script = tmp_path / "tests" / "train.sh"
    script.parent.mkdir()
    options = "training=gpt3/${SIZE} training.trainer.num_nodes=2 training.model.global_batch_size=32 data_dir=${DATA}"
    script.write_text(f"SIZE=126m\nHYDRA_FULL_ERROR=1 python3 main.py {options}\n", encoding="utf-8")
    found = read("auto", str(script), HARDWARE)
    plan = found.config
    assert (plan["parallelism"]["tp"], plan["parallelism"]["dp"], plan["data"]["gbs"]) == (4, 4, 32)
    assert not found.of("unmodeled")
    config.write_text(config.read_text().replace("native", "apex"), encoding="utf-8")
    assert [flag.name for flag in read("auto", str(script), HARDWARE).of("unmodeled")] == ["trainer.amp_backend"]


def test_griffin_is_another_kind_of_model():
    """NVIDIA/NeMo examples/nlp/language_modeling/conf/megatron_griffin_config.yaml has the keys of a GPT."""
    with pytest.raises(
        ConfigError, match="name megatron_griffin: recurrent layers, another kind of model; not modeled"
    ):
        read_nemo("job", f"name: megatron_griffin\n{CONFIG}", {})
    assert read_nemo("job", f"name: megatron_gpt\n{CONFIG}", {}).config["model"]["n_layers"] == 8
