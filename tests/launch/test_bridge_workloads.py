"""Benchmarks of Megatron-Bridge 0.2, chosen by model, size, accelerator and precision.

The numbers are those of v0.2.2 scripts/performance/configs/*/workload_base_configs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_files_of_forks import asked, written

from steptime.launch.keys import table_file
from steptime.launch.nemo.bridge_workloads import WORKLOADS
from steptime.launch.reading import to_job

LAUNCHER = "python scripts/performance/setup_experiment.py --account A --partition P"


def plan(folder: Path, words: str) -> dict[str, Any]:
    return written(folder, "run.sh", f"#!/bin/bash\n{LAUNCHER} {words}\n").config


def test_a_benchmark_by_its_long_and_short_options(tmp_path: Path) -> None:
    """LLAMA3_70B_H100_BF16_BASE_CONFIG: 64 devices, tp 4, pp 4, cp 2, vp 5, batch 128; BASE_LLAMA3_8B_CONFIG with cp 2."""
    found = plan(tmp_path, "-g h100 -m llama3 -s 70b -ng 64 -gn 8 -hf $TOKEN --task pretrain")
    layout = found["parallelism"]
    assert [layout.get(key) for key in ("tp", "pp", "cp", "dp", "vpp", "sp", "zero_level")] == [4, 4, 2, 2, 5, True, 1]
    assert (found["model"], found["data"]) == ("llama3-70b", {"gbs": 128, "seqlen": 8192, "microbatch_sz": 1})
    assert found["performance"]["precision"] == "bf16"
    assert any("llama3_70b_h100_bf16 as in Megatron-Bridge 0.2.2" in note for note in found["notes"])
    found = plan(tmp_path, "--gpu h100 --model_name llama3 --model_size 8B --num_gpus 8 --compute_dtype bf16")
    assert [found["parallelism"].get(key) for key in ("tp", "cp", "dp")] == [1, 2, 4]


def test_a_batch_in_proportion_to_the_devices(tmp_path: Path) -> None:
    """helpers.py: 128 on 8 devices are int(16.0 * 24) on 24, unless -gb or a word sets it."""
    of_24 = "-g h100 -m llama3 -s 8b -ng 24"
    assert plan(tmp_path, of_24)["data"]["gbs"] == 384
    assert plan(tmp_path, f"{of_24} -gb 96")["data"]["gbs"] == 96
    assert plan(tmp_path, f"{of_24} train.global_batch_size=192")["data"]["gbs"] == 192


def test_precision_and_options_over_it(tmp_path: Path) -> None:
    """fp8_cs: LLAMA3_8B_H100_FP8_CS recomputes 5 layers, no layer in bf16, parameters gathered in fp8; tp 2 sets sp."""
    found = plan(tmp_path, "-g h100 -m llama3 -s 8b -ng 8 -c fp8_cs")
    assert found["performance"]["precision"] == "fp8_current"
    assert found["performance"]["fp8_params"] is True
    assert not found["performance"].get("bf16_layers_at_start")
    assert found["performance"]["recompute"] == {"granularity": "full", "method": "block", "n_layers": 5}
    found = plan(tmp_path, "-g h100 -m llama3 -s 8b -ng 8 -c fp8_cs -tp 2 -rl 3 --use_megatron_fsdp false")
    assert (found["parallelism"]["sp"], found["performance"]["recompute"]["n_layers"]) == (True, 3)
    assert found["parallelism"]["zero_level"] == 1
    assert plan(tmp_path, "-g h100 -m llama3 -s 8b -ng 8 --use_megatron_fsdp true")["parallelism"]["zero_level"] == 3


def test_words_that_switch_off_or_take_away(tmp_path: Path) -> None:
    """The benchmark has full CUDA graphs and hides the gather of parameters; -et without a number sets nothing."""
    of_gb200 = "-g gb200 -m llama3 -s 8b -ng 8 -et"
    found = plan(tmp_path, of_gb200)["performance"]
    assert (found["cuda_graphs"], found["overlap"]["dp"]) == (True, True)
    words = "++model.cuda_graph_impl=null comm_overlap.overlap_param_gather=False ddp.overlap_param_gather=False"
    found = plan(tmp_path, f"{of_gb200} {words}")["performance"]
    assert (found["cuda_graphs"], found["overlap"]["dp"]) == (False, 0.5)  # 2 bytes of gradients, 2 of parameters


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """QWEN3_30B_A3B_H100_BF16: 16 devices, pp 2, vp 12, ep 8, batch 512; its all-to-all is overlapped."""
    found = plan(tmp_path, "-g h100 -m qwen3 -s 30b_a3b -ng 16")
    assert [found["parallelism"].get(key) for key in ("pp", "vpp", "ep", "dp")] == [2, 12, 8, 8]
    assert found["model"] == "qwen3-30b-a3b"
    assert found["performance"]["moe"]["delay_wgrad_compute"] is True


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "-g h100 -m llama3 -s 9b -ng 8",
            "line 2: pretrain llama3_9b_h100_bf16 is not a known benchmark of Megatron-Bridge 0.2.2",
        ),
        ("-g h100 -m llama3 -s 8b -ng 8 --task sft", "line 2: sft llama3_8b_h100_bf16 is not a known benchmark"),
        (
            "-g h100 -m llama3 -s 8b -ng 8 -i nvcr.io/nvidia/nemo:25.09",
            "line 2: benchmarks of Megatron-Bridge 0.1 are not known",
        ),
        (
            "-g h100 -m llama3 -s 8b -ng 8 -c fp8 --fp8_recipe cs",
            "line 2: benchmarks of Megatron-Bridge 0.1 are not known",
        ),
        ("-g h100 -m llama3 -s 8b -ng 8 --layers 3", "line 2: --layers of setup_experiment.py is not read"),
    ],
)
def test_what_is_not_known_is_told(tmp_path: Path, words: str, line: str) -> None:
    (told,) = asked(tmp_path, "run.sh", f"#!/bin/bash\n{LAUNCHER} {words}\n")
    assert told.startswith(line)


@pytest.mark.parametrize("option", ["-tp", "-vp", "-cp"])
def test_a_degree_that_is_no_number_is_told(tmp_path: Path, option: str) -> None:
    told = asked(tmp_path, "run.sh", f"#!/bin/bash\n{LAUNCHER} -g h100 -m llama3 -s 8b -ng 8 {option} two\n")
    assert told[0].endswith("parallel_size: expected a whole number of at least 1 (got 'two')")


MACHINES = {"h100": "dgx-h100", "b200": "dgx-b200", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72"}


@pytest.mark.parametrize("name", table_file(WORKLOADS)["workloads"])
def test_every_benchmark_has_as_many_devices_as_its_layout(tmp_path: Path, name: str) -> None:
    """The replicas are whole, the batch is a multiple of them, and no key of the table is unknown."""
    table = table_file(WORKLOADS)
    model = next(model for model in table["models"] if name.startswith(f"{model}_"))
    gpu, precision = name.removeprefix(f"{model}_").split("_", 1)
    family = next(family for family in ("llama31", "llama3", "qwen3", "gpt_oss") if model.startswith(f"{family}_"))
    size, devices = model.removeprefix(f"{family}_"), table["workloads"][name]["gpus"]
    machine = {"hardware.node_type": MACHINES[gpu]}
    script = f"#!/bin/bash\n{LAUNCHER} -g {gpu} -m {family} -s {size} -ng {devices} -c {precision}\n"
    reading = written(tmp_path, "run.sh", script, **machine)
    job = to_job(reading, machine, allow_unmodeled=True)
    assert job.parallelism.devices == devices
    assert job.data.gbs == table["workloads"][name]["gb"]
    assert {flag.name for flag in reading.of("unmodeled")} <= {
        "model.cpu_offloading",
        "model.cpu_offloading_num_layers",
    }
