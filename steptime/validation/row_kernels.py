"""Attention kernel, overlap, CUDA graphs and the allocator's segments of a measured row, from its text."""

from __future__ import annotations

import re
from typing import Any

from steptime.validation.measurements import MeasuredRow, SkipRowError
from steptime.validation.row_native import of_thunder
from steptime.validation.row_torchtitan import BEFORE_FLEX, before, of_today, on_cudnn_of_2024, torchtitan_release


def attention_of(row: MeasuredRow, notes: str) -> dict[str, Any]:
    """Settings of the kernel; empty where the release of the profile decides."""
    if litgpt_on_cudnn(row, notes) or on_cudnn_of_2024(row):
        return {"attention_kernel": "best", "attention_backend": "cudnn"}
    if "flexflash" in notes or "huggingface/trl pr" in row.text("source").lower():
        return {"attention_kernel": "best"}
    if row.text("attention_kind") == "mla" and row.text("framework").lower().startswith("torchtitan"):
        return {"attention_kernel": latent_kernel(row, notes)}
    if "flexattention" in notes or "flex_attention" in notes:
        return {"attention_kernel": "flex"}
    if "gpt-oss" in row.text("model_name").lower() and "automodel" not in row.text("framework").lower():
        # torchtitan/models/gpt_oss/model.py@58b03444: sinks need the log-sum-exp, which FlexAttention returns. AutoModel's
        # examples/llm_benchmark/gpt_oss say attn te, whose kernel has sinks
        return {"attention_kernel": "flex"}
    if of_today(row):
        return {"attention_kernel": "sdpa-9.19"} if "sdpa" in notes else {}
    if re.match(r"gb?[23]00|b[23]00", row.text("gpu").lower()) and "pr #" in row.text("source").lower():
        return {"attention_kernel": "best"} if torchtitan_release(row) != BEFORE_FLEX else {}
    return {"attention_kernel": "fa2"} if flash_before_cudnn(row) else {}


def flash_before_cudnn(row: MeasuredRow) -> bool:
    """Whether torchtitan's scaled_dot_product_attention ran FlashAttention-2 though its release prefers cuDNN's kernel.

    Before pull request 1776 (2025-10-09) it preferred cuDNN's on compute capability 10 alone. On the 8 x B200 of a sweep of May
    2026 cuDNN's kernel alone failed for Qwen3's grouped queries, and torch took FlashAttention's (pytorch/torchtitan@df248332
    results.tsv, "already selecting Flash kernels").
    """
    if not row.text("framework").lower().startswith("torchtitan"):
        return False
    return row.group == "torchtitan-ar" or before(row, 1776, "2025-09") is True


SINCE = "2026-04"
"""Month since which Megatron-Bridge's containers have the cuDNN of February 2026 (data/software/megatron-bridge.yaml)."""


def kernel_of_month(row: MeasuredRow) -> dict[str, Any]:
    """The kernel of a run of Megatron-Core's development branch, by its month, as Megatron-Bridge's releases have it."""
    dated = re.match(r"megatron-core dev \((20\d\d-\d\d)\)", row.text("framework").lower())
    return {"attention_kernel": "cudnn-9.19"} if dated and dated[1] >= SINCE else {}


def latent_kernel(row: MeasuredRow, notes: str) -> str:
    """The kernel of DeepSeek-V3 in torchtitan: torch's memory-efficient one, and FlexAttention since August 2025.

    pytorch/torchtitan pull request 1610: FlashAttention needs keys as wide as values, and cuDNN's kernel refused. GraphTrainer's
    first graphs (mode aot, backend aot_eager) ran FlexAttention's nodes eagerly unless --compile.passes named regional_inductor
    (torchtitan/experiments/graph_trainer/compile.py@72f89d20).
    """
    if "sdpa" in notes or before(row, 1610, "2025-07"):
        return "efficient"
    return "flex_eager" if "compile=aot graph" in notes and "inductor" not in notes else "flex"


def litgpt_on_cudnn(row: MeasuredRow, notes: str) -> bool:
    """Whether thunder's benchmark of litgpt ran cuDNN's attention: where it is named, or torch chose it.

    torch 2.5, whose development the containers of mid-2024 have, takes it first on H100 (pytorch.org/blog/pytorch2-5).
    """
    if "litgpt" not in row.text("framework").lower() or of_thunder(row) or "h100" not in row.text("gpu").lower():
        return False
    if "dynamo backend" in notes:
        return "cudnn" in notes
    return bool(re.search(r"2024-0[5-9]|pjnl-20240", f"{row.text('source')}; {row.text('note')}"))


_NO_DP_OVERLAP = re.compile(
    r"no --overlap-grad-reduce|no overlap flags|no compute/communication overlap|all-reduce not overlapped|"
    r"reduce not overlapped|no overlap-grad-reduce|no grad/param overlap|all-gather after backward"
)


def overlap_of(notes: str, tp: int, recipe: str) -> dict[str, bool]:
    """What the source says is or is not overlapped; the profile decides the rest.

    Raises:
        SkipRowError: the notes name a schedule that is not modeled.
    """
    if found := re.search(r"\b(zbv|zbb|v-half|v-min|dualpipe)\b", notes):
        raise SkipRowError(f"not modeled yet: schedule {found[1]}")
    overlap: dict[str, bool] = {}
    if tp > 1 and re.search(r"tp (userbuffer|ub) overlap|(?<!no )tp-comm-overlap|\+ tp overlap", notes):
        overlap["tp"] = True
    if found := re.search(r"ep a2a overlap( off)?|a2a_overlap=1", notes):
        overlap["ep"] = not found[1]
    if re.search(r"\bno tp overlap", notes) or (tp > 1 and recipe == "nvfp4"):
        # Megatron-Bridge scripts/performance/configs/llama: tp_comm_overlap = False for nvfp4
        overlap["tp"] = False
    if _NO_DP_OVERLAP.search(notes):
        overlap["dp"] = False
    elif "overlap-grad-reduce" in notes or "grad-reduce/param-gather overlap" in notes or "overlap_grad_sync" in notes:
        overlap["dp"] = True
    return overlap


DROPLESS = ["attn", "moe_router", "moe_preprocess"]
"""Modules that TransformerEngine's graphs can launch in a layer whose experts take any number of rows (moe_layer.py)."""


def graphs_of(notes: str) -> bool | list[str]:
    """What CUDA graphs launch: everything, the modules that the notes list, or nothing."""
    if "cuda_graph none" in notes:
        return False
    words = r"cuda_graph (?:local|transformer_engine) (\[[a-z_', ]+\]|attn|mlp)|te cuda graphs ([a-z_,]+)"
    if found := re.search(words, notes):
        return re.findall(r"[a-z_]+", found[1] or found[2])
    if "te cuda graphs" in notes:
        return DROPLESS
    return bool(re.search(r"cuda_graph |^cuda graphs", notes))


def segments_of(notes: str) -> dict[str, Any]:
    """Whether segments of the allocator are expandable; empty where the source does not say."""
    found = re.search("(no )?expandable[ _]segments", notes)
    return {"expandable_segments": not found[1]} if found else {}
