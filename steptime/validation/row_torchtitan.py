"""What torchtitan did at the date of a measured row: its release, and what changed between releases, by pull request."""

from __future__ import annotations

import re
from typing import Any

from steptime.validation.measurements import MeasuredRow

BEFORE_FLEX = "2026-05"
"""The release until FlexAttention became the default, on 2026-06-09 (torchtitan's commit 169545712, pull request 3571)."""
BEFORE_FUSED = "2026-06"
"""The release until one product for q, k and v became the default, on 2026-06-24 (commit 3396a4b37, pull request 3714)."""
BEFORE_TOKENS = "2026-08"
"""The release until a loss in chunks gathered the head before its first chunk, on 2026-08-13 (pull request 4143)."""
RELEASES = (
    ("0.1", 1450, (2025, 8)),
    ("0.2", 2937, (2026, 5)),
    (BEFORE_FLEX, 3571, (2026, 7)),
    (BEFORE_FUSED, 3714, (2026, 7)),
    (BEFORE_TOKENS, 4143, (2026, 9)),
)
"""Releases of the profile torchtitan, each with the first pull request and the first month that is later."""
LATEST = ("", BEFORE_TOKENS, BEFORE_FUSED)
"""Those since FlexAttention is the default."""


def torchtitan_release(row: MeasuredRow) -> str:
    """The profile's release for a row of torchtitan, from its pull request or date; "" for today's, a user's undated rows too."""
    source = row.text("source")
    if (
        "pytorch/ao" in source and "workflows/training.md" in source
    ):  # torchtitan 0.0.2 on H100, of August 2025 on the others
        return "0.1" if "h100" in row.text("gpu").lower() else "0.2"
    pull = re.search(r"PR #(\d+)", source) if "pytorch/torchtitan" in source else None
    month = re.search(r"\b(20\d\d)-(\d\d)", source)
    if pull is None and month is None:
        undated = BEFORE_FLEX if row.published else ""
        return "0.1" if re.search("2025|@05a8b5e", row.text("framework")) else undated
    for release, number, date in RELEASES:
        if int(pull[1]) < number if pull else month is not None and (int(month[1]), int(month[2])) < date:
            return "0.2.1" if release == "0.2" and sums_by_product(row) else release
    return ""


def sums_by_product(row: MeasuredRow) -> bool:
    """Whether a row's experts are combined by a product (`model.summed_product`), which alone sets 0.2.1 apart from 0.2."""
    experts = (row.whole("n_experts") or 1) > 1
    return experts and before(row, 1974, "2025-10") is False and before(row, 2775, "2026-03") is True


def before(row: MeasuredRow, pull: int, last: str) -> bool | None:
    """Whether a row of torchtitan is older than a pull request; None where nothing dates it.

    `last`: the last month or day before it (2024-09, 2024-10-22), for rows that give a date and no pull request.
    """
    source = row.text("source")
    own = re.search(r"PR #(\d+)", source) if "pytorch/torchtitan" in source else None
    dated = re.search(r"\b20\d\d-\d\d(-\d\d)?", f"{source} {row.text('framework')}")
    if own:
        return int(own[1]) < pull
    return dated[0][: len(last)] <= last if dated else None


def before_expandable_segments(row: MeasuredRow) -> bool:
    """Whether a row of torchtitan is older than the expandable segments of its script (pull request 643).

    It is of 2024-10-22, 13:04; the script of the pull request text of that day (@6b2f6731, 11:26) does not have them. Two runs of
    that month set them in their command (commit messages of eb0da76d and 46658697).
    """
    said = re.search("torchtitan@(eb0da76d|46658697)", row.text("source"))
    return before(row, 643, "2024-10-22") is True and not said


def compiles_loss(row: MeasuredRow) -> bool:
    """Whether a row of torchtitan 0.1 compiled the loss together with the blocks.

    From 2024-10-22 (its commit e10cb9494) to 2024-12-18 (e8977b007), and again since 2025-04-02 (pull request 1033).
    """
    first = before(row, 640, "2024-10-21") is False and before(row, 750, "2024-12") is True
    return first or before(row, 1033, "2025-03") is False


def compiles_blocks_alone(row: MeasuredRow) -> bool:
    """Whether a row ran with torchtitan's configs of NVFP4, which compile the model and not the loss.

    torchtitan/models/llama3/config_registry.py@bcc09297, llama3_8b_first_85_pct_layers_nvfp4: CompileConfig(enable=True,
    components=["model"]); the same in Qwen3's, and in Llama 3's of MXFP8.
    """
    return of_today(row) and not traced(row) and bool(re.search("nvfp4|mxfp8", row.text("precision").lower()))


def norm_of(row: MeasuredRow, notes: str) -> dict[str, Any]:
    """The RMSNorm of torchtitan itself, before 2025-03-19 (pull request 985), written op by op as Hugging Face's.

    It keeps its input in fp32 and the normalized input in bf16 (pytorch/torchtitan@9dc418a8 torchtitan/models/norms.py,
    compute_rmsnorm).
    """
    own = before(row, 985, "2025-02") is True or "custom rmsnorm" in notes
    return {"norm_impl": "fused"} if "fused rmsnorm" in notes else {"norm_impl": "eager"} if own else {}


def heads_of(row: MeasuredRow, release: str, *, compiled: bool) -> dict[str, Any]:
    """How torchtitan rotated, repeated and gathered heads, where the release does not determine it: by model and pull request."""
    section: dict[str, Any] = {}
    if re.match("qwen3|gpt-?oss", row.text("model_name").lower()):
        if not compiled:
            section["rope_impl"] = "composite" if before(row, 2575, "2026-02") or release == "0.1" else "upcast"
        if before(row, 1870, "2025-09") and (row.whole("tp") or 1) > 1:
            section["qk_norm_gathered"] = True
    if release in {"0.2", "0.2.1"} and before(row, 2259, "2026-01") is False:
        section["repeat_kv"] = False
    return section


def of_today(row: MeasuredRow) -> bool:
    """Whether a row is of torchtitan since FlexAttention is its default."""
    return row.text("framework").lower().startswith("torchtitan") and torchtitan_release(row) in LATEST


def traced(row: MeasuredRow) -> bool:
    """Whether torchtitan's GraphTrainer traced forward and backward into one graph, which recomputes only what backward needs."""
    return "graphtrainer" in row.text("framework").lower()


def step_graph(row: MeasuredRow, notes: str) -> str:
    """The traced graph that the host runs: GraphTrainer's and its predecessor's; "" for others, and where inductor compiles it.

    Passes remove nodes without effect since 2026-04-12 (pull requests 2917 to 2920, before 2924); some runs had none.
    """
    if not re.search("graph_?trainer|compiler_toolkit", row.text("framework").lower()) or "full inductor" in notes:
        return ""
    return "traced" if "no passes" in notes or before(row, 2917, "2026-03") is True else "simplified"


def by_parameter(row: MeasuredRow) -> bool:
    """Whether a traced graph gathers each parameter (torchtitan's SimpleFSDP)."""
    return "simple" in row.text("zero_or_fsdp").lower() and row.whole("pp") in {None, 1}


def waits_for_gathers(notes: str) -> bool:
    """Whether a traced graph waits for each gather where it stands, since no pass moved it (SimpleFSDP, arXiv 2411.00284).

    Rows marked fit of one ladder of passes, before that pass, are 2 and 4 % off so, and 7 and 12 % too fast otherwise. Pieces of
    a graph in CUDA graphs exclude the pass (torchtitan/experiments/graph_trainer/passes.py@9e07ee8a2, compile_time_passes: no
    collective bucketing or overlap in piecewise).
    """
    before_passes = re.search(r"compile=(aot )?graph\b", notes) and not re.search(r"prefetch|\(\+|production", notes)
    return bool(before_passes) or "piecewise cudagraph" in notes


def recomputes_all_to_all(row: MeasuredRow) -> bool:
    """Whether torchtitan's per-op checkpointing runs all-to-alls of experts again: before pull request 1672 (2025-09-06)."""
    dropped = "a2a and _to_copy not saved" in row.text("overlap_notes")
    return bool(row.whole("n_experts")) and (dropped or before(row, 1672, "2025-08") is True)


def on_cudnn_of_2024(row: MeasuredRow) -> bool:
    """Whether scaled_dot_product_attention of a row of torchtitan on H100 took cuDNN's kernel first: September and October 2024.

    torch 2.5 did, and its main branch until pytorch pull request 138522 (2024-10-22). Logs of 2024-10-21 and 22 say "cuDNN SDPA
    backward got grad_output.strides() != output.strides()" (pytorch/torchtitan, commit messages of 46658697 and 6b2f6731).
    """
    if not row.text("framework").lower().startswith("torchtitan") or "h100" not in row.text("gpu").lower():
        return False
    return before(row, 564, "2024-08") is False and before(row, 643, "2024-10-22") is True


def recomputes_attention(row: MeasuredRow) -> bool:
    """Whether torchtitan's per-op checkpointing ran attention again: cuDNN's kernel, before its list had it.

    So it did in 2024 (`on_cudnn_of_2024`). Since pull request 2095 (2025-12-01) the list has every kernel of
    scaled_dot_product_attention, before only FlashAttention's and the memory-efficient one
    (torchtitan/models/llama3/infra/parallelize.py@d9bdfbb2, _op_sac_save_list). cuDNN's was first on compute capability 10 since
    pull request 1196 (2025-05-14), on all NVIDIA devices since 1776 (2025-10-09).
    """
    words, gpu = f"{row.text('framework')}; {row.text('overlap_notes')}".lower(), row.text("gpu").lower()
    if (
        not words.startswith("torchtitan")
        or "flex" in words
        or row.text("attention_kind") == "mla"
        or gpu.startswith("mi")
    ):
        return False
    blackwell = bool(re.match(r"gb?[23]00|b[23]00", gpu))
    if "pytorch/ao" in row.text("source"):  # of August 2025 on devices other than H100
        return blackwell
    preferred = before(row, 1196, "2025-04") if blackwell else before(row, 1776, "2025-09")
    return on_cudnn_of_2024(row) or (preferred is False and before(row, 2095, "2025-11") is True)


def saves_gathers(row: MeasuredRow) -> bool:
    """Whether GraphTrainer's default memory policy kept all gathered parameters, a workaround of five days.

    From pull request 3060 (2026-04-23) to 3056 (2026-04-28, 15:45). The commit of 3141, at 17:33 of that day, still describes it
    (torchtitan/experiments/graph_trainer/configs.py@a364b4b4, memory_policy), and was measured before.
    """
    return "pytorch/torchtitan@a364b4b4" in row.text("source")


def ends_of(row: MeasuredRow) -> dict[str, Any]:
    """FSDP groups outside of blocks: those of pull request 1094 (2025-07-28), with experts of 1561 (2025-08-13), or a root.

    Two automated searches for the fastest settings of Qwen3 14B wrap the model themselves: all of it in the root
    (pytorch/torchtitan@fc6629b torchtitan/models/qwen3/parallelize.py), since 2026-05-19 the head apart (@dc2765b).
    """
    if not row.text("framework").lower().startswith("torchtitan") or row.whole("pp") not in {None, 1}:
        return {}
    if found := re.search("autoresearch-parallelize/may(15|19)", row.text("source")):
        return {"ends": "root" if found[1] == "15" else "head"}
    older = before(row, 1561 if row.whole("n_experts") else 1094, "2025-07")
    return {} if older is None else {"ends": "root" if older else "apart"}
