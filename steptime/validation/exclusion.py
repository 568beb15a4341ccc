"""Which judged rows are left out of the headline figures, and why."""

from __future__ import annotations

import re

from steptime.validation.ci_jobs import is_ci
from steptime.validation.measurements import MeasuredRow

CI_ROWS = "Megatron-LM's own tests: memory alone"
DOUBTFUL = {
    **dict.fromkeys(("MLM-CI-006", "MLM-CI-007", "MLM-CI-008", "MLM-CI-009"), "functional test, not a tuned run"),
    **dict.fromkeys(("MBRIDGE-165", "MBRIDGE-167", "MBRIDGE-296"), "no recipe has the printed layout"),
    **dict.fromkeys(("MBRIDGE-273", "MBRIDGE-297"), "impossible as printed"),
    # pytorch/ao pull request 2736: run "without any performance debugging", fp8 "lower than expected"
    **dict.fromkeys(("torchao-005", "torchao-006", "torchao-007"), "untuned on MI300X, says its author"),
}
"""Published rows whose inputs are wrong or unknown although their quality is A or B."""

NOT_COUNTED = (
    (r"deepep over (uccl|nvshmem)", "DeepEP over EFA, whose sends a proxy on the host makes: not modeled"),
    (r'(?<!")unbalanced|\(imbalanced\)', "experts' load unbalanced, by how much is not stated"),
    (
        r"compile=thunder(?!.*dynamo backend)",
        "thunder's executors, which choose what is saved, and its own FSDP: not modeled",
    ),
    # torch 2.6 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _register_post_backward_hook: none is registered then
    (r"compiledautograd on", "compiled autograd, under which FSDP2 reduces every gradient after backward: not modeled"),
    (r"packed documents", "packed documents: how much attention is left between their ends is not stated"),
    (r"mem-efficient kernel", "torch's memory-efficient attention: its rate is not modeled"),
    (
        r"not explained \(interconnect not stated",
        "interconnect not stated, and the time not explained by its own source",
    ),
    (r"no fast grouped_mm", "experts one by one on the host, for want of a grouped kernel: not modeled"),
)
"""Words in a row's notes, and the reason why its time includes something that is not modeled."""


def exclusion(row: MeasuredRow, assumed: list[str]) -> str | None:
    """Why a judged row is not counted in the headline; None where it is. A user's own rows all count."""
    if row.group == "vtrain-single":
        return "vtrain-single: tiny models, bound by kernel launches"
    if row.file == "native" and re.search(r"deterministic(?! off)", row.text("overlap_notes")):
        return "deterministic debug mode: uninitialized memory is filled"
    if is_ci(row):
        return CI_ROWS
    words = f"{row.text('overlap_notes')}; {row.text('note')}".lower()
    if row.published and (cause := next((why for said, why in NOT_COUNTED if re.search(said, words)), None)):
        return cause
    if row.published and "mindspeed" in row.text("framework").lower():
        return "MindSpeed on Ascend: its vector kernels and fused products with collectives (MC2) are not modeled"
    if row.id in DOUBTFUL and row.published:
        return f"inputs in doubt: {DOUBTFUL[row.id]}"
    if row.published and row.text("task").lower() not in {"", "pretrain"}:
        return "fine-tuning, packed samples"
    if row.text("quality").upper() == "C":
        return "quality C: an important unknown"
    untimed = row.number("step_time_s") is None and row.number("tokens_per_s_per_gpu") is None
    if row.published and untimed and "nvidia-smi" in row.text("mem_metric").lower():
        return "trials of memory alone, read from nvidia-smi, which counts what the allocator caches"
    if not row.published or not assumed:
        return None
    telling = ("recompute: ", "vocab: ", "vpp: ") if (row.whole("pp") or 1) > 1 else ("recompute: ", "vocab: ")
    unknown = next((item for item in assumed if item.startswith(telling)), None)
    return f"{unknown.partition(':')[0]} not stated" if unknown else None
