"""What a plan's own framework stops at when it starts: the plan is counted as it stands, and the answer says so first."""

from __future__ import annotations

from steptime.base.words import REFUSED
from steptime.job.job import Job, facts
from steptime.job.megatron_expert_rules import woven_in_one_stage


def refusals(job: Job) -> list[str]:
    """One line for each setting that the framework refuses, with the fix; those of a launch file first."""
    of_file = [note for note in job.notes if note.startswith(REFUSED)]
    return [*of_file, *_overlapped_exchange(job), *_shared_experts(job), *_torchtitan(job)]


def _overlapped_exchange(job: Job) -> list[str]:
    """An overlapped all-to-all in a pipeline without virtual stages (transformer_config.py, __post_init__, of core_v0.16.1)."""
    if not job.software.overlap.ep or not woven_in_one_stage(facts(job)):
        return []
    what = f"performance.overlap.ep with pp {job.parallelism.pp} and vpp 1"
    return [
        f"{REFUSED}Megatron-Core: {what}; raise vpp, unless it stands for another program's overlap, such as DualPipe's"
    ]


def _shared_experts(job: Job) -> list[str]:
    """NVIDIA/Megatron-LM megatron/core/transformer/transformer_config.py, __post_init__, of core_v0.17.1 and core_v0.18.0."""
    how = job.software.moe
    if not how.shared_expert_overlap or how.dispatcher != "flex" or not job.software.name.startswith("megatron-core"):
        return []
    what = "performance.moe.shared_expert_overlap with dispatcher flex"
    return [f"{REFUSED}Megatron-Core before 0.18: {what}; use dispatcher alltoall, or that release"]


def _torchtitan(job: Job) -> list[str]:
    """Where: parallelize functions of v0.1.0, tensor_parallel.py of v0.2.2, config/configs.py and trainer.py of b5bcd76c.

    GraphTrainer compiles the whole step, and captures graphs of its own.
    """
    software, p, found = job.software, job.parallelism, []
    if not software.name.startswith("torchtitan") or software.timing.step_graph != "none":
        return []
    compiled = software.kernels.compile != "none"
    if software.overlap.tp and p.tp > 1 and not compiled:
        found.append(
            "performance.overlap.tp (async TP) without torch.compile; set performance.compile to blocks or all"
        )
    if software.timing.cuda_graphs and p.pp > 1:
        found.append(f"performance.cuda_graphs with pp {p.pp}; set it to false")
    if software.precision == "mxfp8_torchao" and compiled and p.tp > 1 and software.name == "torchtitan@0.2":
        # torchtitan/components/quantization/mx.py of v0.2.2: "TP not yet supported with torch.compile for mxfp8"
        found.append(f"mxfp8_torchao of a compiled model with tp {p.tp}; set performance.compile to none, or tp to 1")
    return [f"{REFUSED}torchtitan: {line}" for line in found]
