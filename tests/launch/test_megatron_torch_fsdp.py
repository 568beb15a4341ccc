"""Megatron-LM's --use-torch-fsdp2, in flags and in Primus's YAML: what the plan becomes, and what Megatron refuses with it."""

from __future__ import annotations

import re

import pytest
from megatron_readings import H100, problems, reading

from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.launch.write.export import write

FLAGS = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
PRIMUS = """\
modules:
  pre_trainer:
    framework: megatron
    model: llama3.1_70B.yaml
    overrides:
      {micro_batch_size: 1, global_batch_size: 128, seq_length: 8192, use_torch_fsdp2: true, use_distributed_optimizer: false,
       gradient_accumulation_fusion: false, recompute_granularity: full, recompute_method: block, recompute_num_layers: 30,
       cross_entropy_fusion_impl: te, cross_entropy_loss_fusion: true}
"""


def test_it_is_fsdp_with_gradients_in_the_parameters_dtype():
    """torch_fully_sharded_data_parallel.py gives fully_shard no MixedPrecisionPolicy: bf16 is gathered, reduced and added up.

    The optimizer holds fp32 copies of the shards (core optimizer/optimizer.py, Float16OptimizerWithFloat16Params).
    """
    found = reading(FLAGS)
    assert found.of("unmodeled") == []
    assert found.config["parallelism"]["fsdp"] == {"reduce_dtype": "bf16"}
    job = to_job(found, H100)
    assert (job.software.name, job.zero_level) == ("megatron-core-fsdp2", 3)
    states = job.software.states
    assert (states.main_grad_dtype, states.master_dtype, states.moment_dtype) == ("bf16", "fp32", "fp32")
    assert job.software.overlap.dp is True  # --overlap-grad-reduce is of Megatron's own data parallelism


def test_parameters_may_stay_after_forward():
    job = to_job(reading(f"{FLAGS} --torch-fsdp2-no-reshard-after-forward"), H100)
    assert (job.parallelism.fsdp.reshard_after_forward, job.zero_level) == (False, 2)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            FLAGS.replace("--no-gradient-accumulation-fusion ", ""),
            "Megatron-LM does not support it with gradient accumulation fusion; add --no-gradient-accumulation-fusion",
        ),
        (f"{FLAGS} --use-distributed-optimizer", "Megatron-LM does not support it with the distributed optimizer"),
    ],
)
def test_what_megatron_refuses_with_it_by_flag(flags, line):
    assert problems(reading, flags) == [f"run.sh: --use-torch-fsdp2: {line}"]


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        (f"{FLAGS} --pipeline-model-parallel-size 2", "pp 2, ep 1, precision bf16"),
        (FLAGS.replace("--untie-embeddings-and-output-weights", ""), "pp 1, ep 1, precision bf16"),
    ],
)
def test_what_megatron_refuses_with_it_by_plan(flags, got):
    rule = (
        "Megatron-LM refuses --use-torch-fsdp2 with pp or ep above 1, tied embeddings or fp16 (got megatron-core-fsdp2, "
        f"{got}); change them, or use software megatron-core"
    )
    assert problems(to_job, reading(flags), H100) == [f"run.sh: parallelism.fsdp: {rule}"]


def test_low_precision_with_it_is_not_modeled():
    line = "performance.precision: fp8_delayed is not modeled for megatron-core-fsdp2; use software "
    told = problems(to_job, reading(f"{FLAGS} --fp8-format hybrid"), H100)
    assert [one.startswith(f"run.sh: {line}") for one in told] == [True]


@pytest.mark.parametrize(("more", "copies"), [("", 1), (", data_parallel_replicate_degree: 2", 2)])
def test_primus(tmp_path, more, copies):
    """examples/megatron/configs/MI355X/llama3.1_70B-BF16-pretrain.yaml, and its copies of the shards (hsdp_args_patches.py)."""
    path = tmp_path / "job.yaml"
    path.write_text(PRIMUS.replace("loss_fusion: true", f"loss_fusion: true{more}"))
    found = read("primus", str(path), {"devices": 16})
    assert found.of("unmodeled") == []
    assert found.config["parallelism"]["fsdp"] == {"reduce_dtype": "bf16"}
    job = to_job(found, {"hardware": {"node_type": "mi355x-node"}, "devices": 16})
    assert (job.software.name, job.parallelism.replicas, job.parallelism.dp) == ("megatron-core-fsdp2", copies, 16)


def test_an_optimizer_of_primus_is_left_out(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(PRIMUS.replace("loss_fusion: true", "loss_fusion: true, use_fsdp2_fp32_param_optimizer: true"))
    found = read("primus", str(path), {"devices": 16})
    assert [flag.name for flag in found.of("unmodeled")] == ["use_fsdp2_fp32_param_optimizer"]


@pytest.mark.parametrize("more", ["", "--torch-fsdp2-no-reshard-after-forward", "--tensor-model-parallel-size 2"])
@pytest.mark.parametrize("kind", ["megatron", "bridge", "nemo"])
def test_a_plan_is_written_as_such_a_job(kind, more):
    """Not as one of Megatron-FSDP or of the distributed optimizer, and read back to the same plan, also from YAML."""
    job = to_job(reading(f"{FLAGS} {more}"), H100)
    found = write(job, kind)
    mask = {"performance.attention_mask"} if kind == "nemo" else set()
    assert set(found.left_out) - {"hardware", "parallelism.dp"} <= mask
    assert re.search("use.torch.fsdp2", found.text)
    assert "sharding" not in found.text
    assert not re.search("use.distributed.optimizer(: true|\n| )", found.text)


def test_a_plan_of_another_trainer_is_written_as_megatron_fsdp():
    """Which takes what torch's does not, such as pipelines."""
    job = to_job(reading(FLAGS), H100).replace(**{"performance.software": "fsdp2"})
    assert "--use-megatron-fsdp" in write(job, "megatron").text
