"""A plan as DeepSpeed's ds_config.json."""

from __future__ import annotations

import json
from typing import Any

from steptime.job.edit import put
from steptime.job.job import Job
from steptime.launch.keys import load_table
from steptime.launch.write.plain_keys import word_for


def ds_config(job: Job) -> str:
    """The file: batch, precision, ZeRO; the model and what runs it are the program's."""
    table, p, states = load_table("deepspeed"), job.parallelism, job.software.states
    said: dict[str, Any] = {
        "train_batch_size": job.data.gbs,
        "train_micro_batch_size_per_gpu": job.data.microbatch_sz,
        "gradient_accumulation_steps": job.microbatches,
        "bf16.enabled": job.software.compute_dtype == "bf16",
        "fp16.enabled": job.software.compute_dtype == "fp16",
        "optimizer.type": "AdamW",
        "zero_optimization.stage": job.zero_level,
    }
    if states.main_grad_dtype != job.software.compute_dtype:
        said["data_types.grad_accum_dtype"] = word_for(table, "data_types.grad_accum_dtype", states.main_grad_dtype)
    if job.zero_level:
        said["zero_optimization.overlap_comm"] = job.software.overlap.dp is not False
        if p.bucket_size_mb is not None:
            elements = p.bucket_size_mb * 1e6 / (4 if states.main_grad_dtype == "fp32" else 2)
            said["zero_optimization.reduce_bucket_size"] = int(elements)
    away = job.performance.cpu_offload
    if away.share:
        said["zero_optimization.offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": away.share}
    if away.round_robin:
        said["zero_optimization.round_robin_gradients"] = True
    if away.params:
        said["zero_optimization.offload_param"] = {"device": "cpu", "pin_memory": True}
    if p.cp > 1:
        said["sequence_parallel_size"] = p.cp
    if p.tp > 1:
        said["tensor_parallel.autotp_size"] = p.tp
    tree: dict[str, Any] = {}
    for key, value in said.items():
        put(tree, key, value)
    return json.dumps(tree, indent=2) + "\n"
