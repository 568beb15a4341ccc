"""Commands in the YAML of a job: SkyPilot, Kubernetes, Beaker."""

import pytest

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

H100 = {"hardware.node_type": "dgx-h100"}
ARGUMENTS = (
    "--model_name_or_path {} --max_seq_length 2048 --per_device_train_batch_size 2 --gradient_accumulation_steps 4"
)
SKYPILOT = """\
resources:
  accelerators: {{{{H100: 8}}}}
num_nodes: 2
envs: {{{{MODEL: meta-llama/Llama-3.1-8B}}}}
run: |
  torchrun --nnodes $SKYPILOT_NUM_NODES --nproc_per_node $SKYPILOT_NUM_GPUS_PER_NODE train.py \\
    {} --bf16 true --deepspeed zero3
"""
KUBERNETES = """\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
      - name: train
        env: [{{{{name: MODEL, value: meta-llama/Llama-3.1-8B}}}}]
        command: [bash, -c]
        args: ["torchrun --nnodes 2 --nproc_per_node 8 train.py {} --bf16 true --deepspeed zero3"]
"""
WORDS = """\
tasks:
- command: [torchrun, --nnodes, "2", --nproc_per_node, "8", train.py, {}, --bf16, "true", --deepspeed, zero3]
"""
COMMAND_AND_ARGS = """\
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Worker: {{template: {{spec: {{containers: [{{
      command: [torchrun], args: [--nnodes, 2, --nproc_per_node, "8", train.py, {}, --bf16, "true", "--deepspeed", "zero3"]
    }}]}}}}}}
"""


@pytest.mark.parametrize(
    "text",
    [
        SKYPILOT.format(ARGUMENTS).format("$MODEL"),
        KUBERNETES.format(ARGUMENTS).format("$MODEL"),
        *(
            text.format(", ".join(f'"{word}"' for word in ARGUMENTS.format("meta-llama/Llama-3.1-8B").split()))
            for text in (WORDS, COMMAND_AND_ARGS)
        ),
    ],
    ids=["skypilot", "kubernetes", "words", "command and args"],
)
def test_the_command_is_read_as_a_script(tmp_path, text):
    """2 nodes of 8, ZeRO-3, 2 sequences 4 times on each of 16 devices: 128 a step."""
    (tmp_path / "job.yaml").write_text(text)
    found = to_job(read("auto", str(tmp_path / "job.yaml"), H100), H100)
    assert (found.parallelism.dp, found.data.gbs, found.data.seqlen, found.zero_level) == (16, 128, 2048, 3)
    assert (found.model.name, str(found.performance.precision)) == ("llama3-8b", "bf16")


@pytest.mark.parametrize(
    ("said", "devices"),
    [
        ("nprocPerNode: '4'", 16),
        ("elasticPolicy: {}", 3),
        ("elasticPolicy: {nProcPerNode: 2}", 6),
        ("elasticPolicy: {minReplicas: 1, maxReplicas: 8}", 4),
        ("elasticPolicy: {minReplicas: 2}", 2),
    ],
)
def test_replicas_of_a_pytorch_job_are_its_nodes(tmp_path, said, devices):
    """A master and three workers of the same command are 4 nodes; an elastic job's rendezvous takes at most maxReplicas of them,
    which are its workers' replicas, or minReplicas, where it is not set."""
    words = ", ".join(f'"{word}"' for word in ARGUMENTS.format("meta-llama/Llama-3.1-8B").split())
    container = f"{{command: [torchrun], args: [train.py, {words}, --bf16, 'true']}}"
    pod = f"template: {{spec: {{containers: [{container}]}}}}"
    replicas = f"pytorchReplicaSpecs: {{Master: {{{pod}}}, Worker: {{replicas: 3, {pod}}}}}"
    (tmp_path / "job.yaml").write_text(f"kind: PyTorchJob\nspec:\n  {said}\n  {replicas}\n")
    layout = read("auto", str(tmp_path / "job.yaml"), H100).config["parallelism"]
    assert layout["dp"] == devices


@pytest.mark.parametrize("said", ["nprocPerNode: auto", "nprocPerNode: gpu", "runPolicy: {}"])
@pytest.mark.parametrize("device", ["nvidia.com/gpu", "amd.com/gpu"])
def test_a_pytorch_job_starts_a_process_for_each_device_of_its_pods(tmp_path, said, device):
    """nprocPerNode is auto by default, which torchrun takes as the devices that it sees: 8 of each of 4 pods are 32."""
    words = ", ".join(f'"{word}"' for word in ARGUMENTS.format("meta-llama/Llama-3.1-8B").split())
    limits = f"resources: {{limits: {{memory: 1Ti, {device}: 8}}}}"
    container = f"{{command: [torchrun], args: [train.py, {words}, --bf16, 'true'], {limits}}}"
    pod = f"template: {{spec: {{containers: [{container}]}}}}"
    replicas = f"pytorchReplicaSpecs: {{Master: {{{pod}}}, Worker: {{replicas: 3, {pod}}}}}"
    (tmp_path / "job.yaml").write_text(f"kind: PyTorchJob\nspec:\n  {said}\n  {replicas}\n")
    assert read("auto", str(tmp_path / "job.yaml"), H100).config["parallelism"]["dp"] == 32


def test_an_accelerator_without_a_count_is_one(tmp_path):
    """SkyPilot's default count; 2 nodes of one device."""
    text = SKYPILOT.format(ARGUMENTS).format("$MODEL").replace("{H100: 8}", "H100")
    (tmp_path / "job.yaml").write_text(text)
    assert read("auto", str(tmp_path / "job.yaml"), H100).config["parallelism"]["dp"] == 2


def test_lines_are_those_of_the_yaml(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "name: a\nsetup: pip install x\nrun: |\n  torchrun --nproc_per_node 8 eval.py --bf16\n"
    )
    with pytest.raises(ConfigError) as error:
        to_job(read("transformers", str(tmp_path / "job.yaml"), H100), H100)
    assert "line 4 runs eval.py, which does not train" in str(error.value)


def test_a_folder_of_sizes_names_its_family(tmp_path):
    """.../hf_llama2_models/70B is Llama 2 70B; a program with its own --use_qlora tells neither dtype nor targets."""
    words = ARGUMENTS.format("../hf_llama2_models/70B")
    script = f"accelerate launch --num_processes 8 open_instruct/finetune.py {words} --use_qlora --lora_rank 64\n"
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{script}")
    reading = read("auto", str(tmp_path / "run.sh"), H100)
    assert reading.config["model"]["preset"] == "llama2-70b"
    assert list(reading.left_open) == ["performance.precision", "model.lora.targets"]


def test_an_accelerate_config_says_what_it_is(tmp_path):
    (tmp_path / "ds.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 8\n"
    )
    reading = read("auto", str(tmp_path / "ds.yaml"), H100)
    assert "an accelerate config names no model" in reading.left_open["model"]
    (tmp_path / "run.sh").write_text(
        f"accelerate launch --config_file ds.yaml train.py {ARGUMENTS.format('own/model')}\n"
    )
    script = read("transformers", str(tmp_path / "run.sh"), H100)
    assert "model 'own/model' is not among the presets" in script.left_open["model"]
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file ds.yaml train.py --per_device_train_batch_size 2\n"
    )
    assert "model unknown" in read("transformers", str(tmp_path / "run.sh"), H100).left_open["model"]
