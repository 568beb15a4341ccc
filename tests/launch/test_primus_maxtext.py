"""Primus over MaxText: its options under modules.pre_trainer.overrides, with Primus's defaults and its model's file."""

from __future__ import annotations

import pytest

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

JOB = """modules:
  pre_trainer:
    framework: maxtext
    config: pre_trainer.yaml
    model: llama2_70B.yaml
    overrides:
      dataset_type: synthetic
      dcn_data_parallelism: -1
      ici_fsdp_parallelism: {fsdp}
      ici_tensor_parallelism: {tp}
      ici_tensor_sequence_parallelism: -1
      max_target_length: 4096
      per_device_batch_size: 15
"""
SETS = {"hardware.node_type": "mi355x"}


def written(folder, fsdp=8, tp=1):
    path = folder / "job.yaml"
    path.write_text(JOB.format(fsdp=fsdp, tp=tp))
    return str(path)


def test_a_stage_of_maxtexts_pipeline_is_visited_until_all_layers_are_done(tmp_path):
    """pyconfig.py: repeats = layers / (stages x layers on each), 32 / (4 x 1) and 32 / (4 x 2) of Llama 2 7B."""
    text = "model_name: llama2-7b\nper_device_batch_size: 4\nmax_target_length: 2048\nici_pipeline_parallelism: 4\n"
    for more, chunks in (("", 8), ("num_layers_per_pipeline_stage: 2\nnum_pipeline_repeats: 4\n", 4)):
        (tmp_path / "job.yml").write_text(text + more, encoding="utf-8")
        layout = read("maxtext", str(tmp_path / "job.yml"), {"hardware.node_type": "dgx-h100"}).config["parallelism"]
        assert (layout["pp"], layout["vpp"]) == (4, chunks)


def test_the_defaults_are_those_of_primus(tmp_path):
    """primus/configs/modules/maxtext/pre_trainer.yaml: remat_policy full, weights in bf16; GPUS_PER_NODE 8."""
    job = to_job(read("auto", written(tmp_path), SETS), SETS)
    assert (job.model.n_layers, job.model.hidden_sz, job.model.n_kv_heads) == (80, 8_192, 8)
    assert (job.parallelism.devices, job.parallelism.tp, job.data.gbs, job.data.seqlen) == (8, 1, 120, 4_096)
    assert job.software.states.param_dtype == "bf16"
    assert job.performance.activation_checkpointing_type == "full"


def test_the_files_of_its_checkout_win(tmp_path):
    configs = tmp_path / "primus/configs"
    for name, text in {
        "modules/maxtext/pre_trainer.yaml": "extends: [trainer_base.yaml]\nweight_dtype: float32\nremat_policy: minimal\n",
        "models/maxtext/llama2_70B.yaml": "extends: [model_base.yaml]\nmodel_name: llama2-7b\n",
    }.items():
        (configs / name).parent.mkdir(parents=True, exist_ok=True)
        (configs / name).write_text(text)
    job = to_job(read("auto", written(tmp_path), SETS), SETS)
    assert (job.model.n_layers, job.model.hidden_sz) == (32, 4_096)
    assert job.software.states.param_dtype == "fp32"
    assert job.performance.activation_checkpointing_type == "selective"


@pytest.mark.parametrize(("fsdp", "tp", "left"), [(8, 1, []), (4, 2, []), (4, 1, ["ici_tensor_sequence_parallelism"])])
def test_an_axis_of_minus_one_has_what_the_others_leave_of_a_node(tmp_path, fsdp, tp, left):
    """8 devices: 8 / (8 * 1) = 1 is no axis; 8 / (4 * 1) = 2 is one that is not modeled."""
    reading = read("auto", written(tmp_path, fsdp, tp), SETS)
    assert [flag.name for flag in reading.flags if flag.status == "unmodeled"] == left


def test_states_in_16_bits_are_half_of_those_in_mixed_precision(tmp_path):
    """69 G parameters of 2 + 2 + 4 bytes, 514 GiB, fit on 8 devices of 79 GiB; 16 bytes would not, and are asked for devices."""
    sets = {"hardware.node_type": "h100"}
    assert to_job(read("auto", written(tmp_path), sets), sets).parallelism.devices == 8
    path = tmp_path / "fp32.yaml"
    path.write_text(JOB.format(fsdp=8, tp=1) + "      weight_dtype: float32\n")
    with pytest.raises(ConfigError, match="1,028 GiB of states do not fit on 8 devices"):
        to_job(read("auto", str(path), sets), sets)


@pytest.mark.parametrize(("model", "refused"), [("mixtral-8x7b", True), ("llama2-7b", False)])
def test_experts_over_a_fixed_capacity_are_refused(tmp_path, model, refused):
    """MoeBlock: without sparse_matmul a capacity above 0 drops tokens, by one-hot products; it is not read with it."""
    text = f"model_name: {model}\nper_device_batch_size: 4\nmax_target_length: 1024\nici_fsdp_parallelism: 8\n"
    sets = {"hardware.node_type": "dgx-h100", "devices": 8}
    (path := tmp_path / "job.yml").write_text(f"{text}megablox: true\nsparse_matmul: true\ncapacity_factor: 1.25\n")
    assert to_job(read("maxtext", str(path), sets), sets).data.gbs == 32
    for more in ("", "num_experts: 1\n"):  # as base.yml has it, whatever the model
        path.write_text(f"{text}sparse_matmul: false\ncapacity_factor: 1.25\n{more}")
        flags = {flag.name: flag.status for flag in read("maxtext", str(path), sets).flags}
        assert flags["sparse_matmul"] == ("unmodeled" if refused else "irrelevant")
        assert flags["capacity_factor"] == "irrelevant"
