"""Settings of a measured row of a Hugging Face trainer or DeepSpeed, from its text."""

from __future__ import annotations

from typing import Any

from steptime.launch.deepspeed import TRACED_MASK
from steptime.launch.trainers.trainer_kernels import liger_chunks
from steptime.validation.measurements import MeasuredRow

NLL_ROWS = 256
"""Rows of a chunk of TRL's chunked_nll loss (huggingface/trl trl/trainer/sft_trainer.py).

The published steps of millions of tokens run scaled_dot_product_attention on cuDNN, which took one from 606 to 373 s
(huggingface/transformers pull requests 48163 and 48324)."""


def of_hugging_face(row: MeasuredRow, notes: str) -> dict[str, Any]:
    """Kernels of fms-acceleration's plugins, and heads that transformers 4.45 repeats (MistralFlashAttention2.forward)."""
    loss = "fused" if "liger" in notes else "in_place"
    section: dict[str, Any] = (
        {"norm_impl": "fused", "rope_impl": "fused", "loss_impl": loss} if "foak-fast-kernels" in notes else {}
    )
    repeats = "fms-acceleration" in row.text("source") and "mistral" in row.text("model_name").lower()
    section |= {"repeat_kv": True} if repeats else {}
    if "liger" in notes:
        section["loss_chunks"] = liger_chunks(row.needed("hidden"), row.whole("vocab") or row.needed("hidden"))
    if "chunked_nll" in row.text("note"):
        section["loss_chunks"] = max(
            1, row.needed("seq_len") * row.needed("micro_batch_size") // (row.whole("cp") or 1) // NLL_ROWS
        )
    return section


def of_deepspeed(row: MeasuredRow, notes: str) -> dict[str, Any]:
    """What a row of DeepSpeed runs besides its profile: DeepCompile, and attention where a script sets what nothing reads.

    DeepCompile gathers each parameter on a stream that waits for what runs before it (deepspeedai/DeepSpeed@edaa7221
    deepspeed/compile/init_z3.py; csrc/compile/z3.cpp, launchAllGather). examples/sdma_allgather
    sets attn_implementation on the config, which transformers does not read.
    """
    section: dict[str, Any] = {}
    if "deepcompile" in row.text("framework").lower() and "eager backend" not in notes:
        section = {"compile": "all"} | TRACED_MASK
        section |= {"overlap": {"dp": False}} if row.text("zero_or_fsdp").startswith("zero3") else {}
    if "examples/sdma_allgather" in row.text("source"):
        section |= {"attention_impl": "flash", "softmax_impl": "fused"}
    return section


def offloaded_by_guide(row: MeasuredRow) -> dict[str, Any]:
    """States that TRL's guide to a million tokens puts into host memory, of models of 30 B parameters or more.

    huggingface/trl pull request 6846, docs/source/distributing_training.md: fsdp_offload_params.
    """
    return {"params": True} if row.group == "trl-longctx" and (row.number("n_params_b") or 0.0) >= 30.0 else {}
