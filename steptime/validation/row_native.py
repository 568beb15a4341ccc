"""From the words of a measured row of the PyTorch-native stack (torchtitan, FSDP, torch.compile) to settings."""

from __future__ import annotations

import re
from typing import Any

from steptime.validation.measurements import MeasuredRow

RMS_NORM_PULL = 1450
"""Pull requests of pytorch/torchtitan below this are of July 2025 and before, on torch 2.8 and before."""


def torchtitan_release(row: MeasuredRow) -> str:
    """The release of the profile that a row of torchtitan ran, by its pull request or date; "" for today's."""
    source = row.text("source")
    if found := re.search(r"PR #(\d+)", source):
        return "2.8" if int(found[1]) < RMS_NORM_PULL else ""
    if found := re.search(r"\b(20\d\d)-(\d\d)", source):
        return "2.8" if (int(found[1]), int(found[2])) < (2025, 8) else ""
    return "2.8" if "2025" in row.text("framework") else ""


def compile_of(release: str, notes: str) -> dict[str, Any]:
    """What torch.compile made kernels of, where the notes say `compile=`.

    torchtitan compiled blocks alone before its compile.components (mid-2025), the loss too since; a graph that is traced
    (aot_eager, GraphTrainer without full inductor) keeps torch's own kernels.
    """
    found = re.search(r"\bcompile=([a-z_]*)([^;]*)", notes)
    if not found or (found[1] != "on" and "inductor" not in notes):
        return {}
    if "regional inductor" in notes or ("aot_fx_trace" in notes and "full inductor" not in notes):
        return {}
    loss = "loss" in found[2] or "full inductor" in found[2] or not (release or "(blocks)" in found[2])
    return {"compile": "all" if loss else "blocks"}


def native_kernels(row: MeasuredRow, release: str, notes: str) -> dict[str, Any]:
    """torch.compile, chunks of the loss, FlexAttention and CUDA graphs."""
    section = compile_of(release, notes)
    if found := re.search(r"chunked (?:ce|cross entropy)(?: \((\d+) loss chunks\))?", notes):
        section["loss_chunks"] = int(found[1] or 8)
    if "flexflash" in notes:
        section["attention_kernel"] = "best"
    elif "flexattention" in notes or "flex_attention" in notes:
        section["attention_kernel"] = "flex"
    elif re.match(r"gb?[23]00|b[23]00", row.text("gpu").lower()) and "pr #" in row.text("source").lower():
        section["attention_kernel"] = "best"
    if "cudagraph" in notes.replace("no cudagraph", "") or "cuda graph" in notes:
        section["cuda_graphs"] = True
    return section


def said_dtypes(row: MeasuredRow, notes: str) -> dict[str, Any]:
    """Dtype of the gradients where the source names it."""
    said = row.text("precision").lower()
    section: dict[str, Any] = {}
    if "fp32 grad" in said:
        section["main_grad_dtype"] = "fp32"
    if "bf16 grad" in said or "bf16 grad reduce" in notes:
        section["main_grad_dtype"] = "bf16"
    return section


def native_states(row: MeasuredRow) -> dict[str, Any]:
    """Dtypes of the parameters, gradients and optimizer states, where the precision's text says more than its first word."""
    said = row.text("precision").lower()
    if "pure" in said or "bf16 params" in said or "params/grads/adam bf16" in said:
        return {"param_dtype": "bf16", "main_grad_dtype": "bf16", "moment_dtype": "bf16"}
    if re.search(r"bf16 (adam|optimizer)", said):
        return {"moment_dtype": "bf16"}
    return {}


def recomputed_per_op(said: str) -> dict[str, Any]:
    """Selective checkpointing as torchtitan has it, per op or every other layer; nothing for other words."""
    if re.fullmatch(r"selective \((per-op|graph) sac[^)]*\)", said):
        return {"activation_checkpointing_type": "per-op"}
    if said == "selective (every other layer)":
        return {"recompute": {"granularity": "full", "method": "every", "n_layers": 2}}
    return {}


def resharded(said: str) -> bool:
    """Whether parameters are freed after forward, by the words of `zero_or_fsdp`."""
    return not re.search(r"\bzero-?2|reshard never", said)
