"""Experts, attention and dispatch of a measured row, from its columns and words."""

from __future__ import annotations

import re
from math import sqrt
from statistics import NormalDist
from typing import Any

from steptime.model.router_choice import ranks_in_turn
from steptime.validation.measurements import MeasuredRow

SIGMOID = ("deepseek-v3", "deepseekv3", "kimi", "glm-4", "llama-4", "llama4")
"""Models whose router uses sigmoids, by part of their names."""
NO_BIAS = ("llama-4", "llama4")
"""Those of them without a balancing bias."""
NATURAL_SPREAD = 1.67
"""Standard deviation of the rows of an expert over their mean where a row says that routing is natural, not forced to be even:
the fullest of 8 ranks with 16 experts each then has 1.6 times the mean, which explains 14.16 against 11.37 s in the two rows
marked fit that differ in nothing else (MOEZOO-007 and -008). Over a global batch the fullest expert has 1.5 to 1.7 times the mean
under a balancing loss (Wang et al. 2024, arXiv 2408.15664)."""

LEARNED_SPREAD = 0.85
"""The same for torchtitan, whose routing is natural unless `debug.moe_force_load_balance` is set (torchtitan/config/configs.py@
6b960233), and for the routers of trained models. The two rows marked fit with its standard all-to-all (torchtitan-dsv3-n008 and
-n009) need 1.18 for the fullest of 4 ranks with 16 experts each, where this is 1.22, and Moonlight on 8 ranks with 8 experts
each (marked fit) 1.49, where it is 1.43: the least mean error, 1.6 %, of these and five with MinimalAsyncEP (n010 to n014)."""

TUNED = "/model_verification_cards/"
"""Where Megatron-Bridge describes training on real data, whose recipes do not force routing to be even (NVIDIA-NeMo/
Megatron-Bridge@067f987d src/megatron/bridge/recipes, moe_router_force_load_balancing = False in moonlight/h100/moonlight_16b.py
and qwen/h100/qwen3_moe.py)."""


NOUS_SMS = 128
"""What Nous' fork of torchtitan gives DeepEP on B200 (pytorch/torchtitan@495dc7d8d torchtitan/distributed/deepep/utils.py)."""

RECIPES_THAT_DROP = re.compile(r"\bNeMo 2\.0\b")
"""`framework` of runs of NeMo 2's performance scripts, which drop and pad tokens to a capacity of 1.0: MegatronTokenDropCallback,
with its defaults, in the performance mode of nemo/collections/llm/recipes/mixtral_8x7b.py, mixtral_8x22b.py (NVIDIA/NeMo v2.2.0
to v2.4.0), llama4_e16.py and llama4_e128.py (v2.3.0, v2.4.0), and in scripts/performance/llm/pretrain_deepseek_v3.py (v2.3.0) and
pretrain_grok1_314b.py (@7a8f1cc7 and @6f2c6fda, the commits of dgxc-benchmarking v25.05 and v25.05.01)."""


def capacity(words: str) -> re.Match[str] | None:
    """The capacity factor that a source states, in lower case.

    Of torchtitan's HybridEP, not waiting for counts, 1.0 sizes a buffer for the worst case: nothing is dropped
    (torchtitan/distributed/deepep/hybridep.py@aa1d3741).
    """
    return re.search(r"(?<!\(non-blocking, )capacity factor (\d+(?:\.\d+)?)", words)


def dropped_by_recipe(row: MeasuredRow) -> bool:
    """Whether a published run is of a recipe that drops tokens."""
    return row.published and RECIPES_THAT_DROP.search(row.text("framework")) is not None


def has_experts(row: MeasuredRow) -> bool:
    """Whether the row's model is a mixture of experts."""
    return (row.whole("n_experts") or 0) > 1


def expert_degrees(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """Ep and etp of a row that has experts."""
    if not has_experts(row):
        return {}
    ep = row.whole("ep")
    if ep is None:
        assumed.append("ep: 1")
    degrees = {"ep": ep or 1}
    if etp := row.whole("etp"):
        degrees["etp"] = etp
    elif (ep or 1) > 1:
        assumed.append("etp: 1")
    return degrees


def kinds_of(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """The `moe` and `attention` sections of a row, and the other settings of its family of models."""
    name, kind = row.text("model_name").lower(), row.text("attention_kind").lower()
    found: dict[str, Any] = {}
    if has_experts(row):
        found["moe"] = experts(row, name, assumed)
    if kind.startswith("mla"):
        rank = {} if "lite" in name else {"q_lora_rank": 1536}
        found["attention"] = {"kind": "mla"} | rank
        assumed.append("latent attention: ranks and widths of DeepSeek-V2 and V3")
    elif "window" in kind:
        width = re.search(r"window[ =]*(\d+)", kind)
        found["attention"] = {"window": int(width[1]) if width else 128}
        found["attention"] |= {"window_pattern": 2} if "alternat" in kind else {}
    if "gpt-oss" in name:
        found |= {"bias": True, "norm_bias": False, "swiglu_limit": 7.0}
        found["attention"] = found.get("attention", {}) | {"sinks": True}
    if "qwen3" in name:
        found["qk_norm"] = True
    return found


def experts(row: MeasuredRow, name: str, assumed: list[str]) -> dict[str, Any]:
    """The `moe` section."""
    width = row.whole("moe_ffn_hidden")
    if width is None:
        width = row.needed("ffn_hidden")
        assumed.append(f"moe_ffn_hidden: {width}")
    section: dict[str, Any] = {
        "n_experts": row.needed("n_experts"),
        "expert_inter_sz": width,
        "experts_per_token": row.needed("topk"),
    }
    if row.text("n_shared_experts") not in {"", "0"} and (shared := row.whole("n_shared_experts")):
        section["n_shared_experts"] = shared
    section |= which_layers(row)
    if any(word in name for word in SIGMOID):
        section |= {"score_function": "sigmoid"}
        section |= {} if any(word in name for word in NO_BIAS) else {"expert_bias": True}
    words = f"{row.text('overlap_notes')} {row.text('note')}".lower()
    if found := capacity(words):
        section["capacity_factor"] = float(found[1])
    elif "tokendrop" in words or "token drop" in words:
        section["capacity_factor"] = 1.0
        assumed.append("capacity_factor: 1")
    elif dropped_by_recipe(row):
        section |= {"capacity_factor": 1.0, "pad_to_capacity": True}
        assumed.append("capacity_factor: 1, padded, as in the recipe")
    if "capacity_factor" in section and "pad" in words:
        section["pad_to_capacity"] = True
    learned = "torchtitan" in row.text("framework").lower() and "forced load balance" not in words
    if "natural routing" in words:
        section["imbalance_factor"] = fullest(NATURAL_SPREAD, section["n_experts"], row.whole("ep") or 1)
    elif learned or TUNED in row.text("source"):
        section["imbalance_factor"] = fullest(LEARNED_SPREAD, section["n_experts"], row.whole("ep") or 1)
    assumed.append(f"imbalance_factor: {section.get('imbalance_factor', 1)}")
    if (ep := row.whole("ep") or 1) > 1 and in_turn(row, words):
        ranks = ranks_in_turn(section["n_experts"], section["experts_per_token"], ep)
        section |= {"n_groups": ep, "node_limit": ranks}
        assumed.append(f"ranks of a token: {ranks}, from its balanced gate")
    return section


def in_turn(row: MeasuredRow, words: str) -> bool:
    """Whether tokens take experts in turn, and their ranks determine what is sent: to each one copy of a token (DeepEP)."""
    framework = row.text("framework").lower()
    forced = "torchtitan" in framework and "forced load balance" in words
    return "automodel" in framework or (forced and re.search("deepep|hybridep", words) is not None)


def fullest(spread: float, experts: int, ranks: int) -> float:
    """Rows of the fullest rank over the mean, rounded: those of experts differ by `spread`, those of a rank less.

    The rows of a rank are a sum over experts / ranks experts, whose deviation is spread / sqrt(experts / ranks) of the mean; the
    largest of n normal numbers is expected at the (n - 3/8) / (n + 1/4) quantile (Blom 1958, Statistical Estimates and
    Transformed Beta-Variables).

    >>> fullest(0.85, 64, 4), fullest(0.85, 256, 32), fullest(1.67, 128, 8)
    (1.22, 1.62, 1.6)
    """
    if ranks <= 1:
        return 1.0
    quantile = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return round(1.0 + spread * sqrt(ranks / experts) * quantile, 2)


def which_layers(row: MeasuredRow) -> dict[str, Any]:
    """Dense layers before those with experts, or experts in every n-th layer."""
    said = row.text("moe_layer_freq").lower()
    first = re.search(r"first (\d+) dense|\[0\]\*(\d+)\+", said)
    listed = row.text("first_k_dense")
    dense = int(first[1] or first[2]) if first else int(listed) if listed.isdecimal() else 0
    if dense:
        return {"n_dense_layers": dense}
    return {"moe_frequency": 1.0 / int(said)} if said.isdecimal() and int(said) > 1 else {}


def dispatch_of(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """The `performance.moe` section."""
    if not has_experts(row):
        return {}
    words = f"{row.text('overlap_notes')} {row.text('note')} {row.text('model_name')}".lower()
    section: dict[str, Any] = {}
    if re.search(r"hybridep|deepep|\bflex\b(?! attention)", words):
        section["dispatcher"] = "flex"
        section |= {"flex_backend": "hybridep"} if "hybridep" in words else {}
        section |= {"deepep_sms": NOUS_SMS} if row.text("framework").startswith("Nous torchtitan") else {}
        if said := re.search(r"non-blocking, capacity factor (\d+(?:\.\d+)?)", words):
            section["non_blocking_capacity_factor"] = float(said[1])
    elif "minimalasyncep" in words:
        section |= {"dispatcher": "flex", "flex_backend": "minimal_async_ep"}
    elif re.search(r"all-?to-?all|a2a", words):
        section["dispatcher"] = "alltoall"
    else:
        assumed.append("dispatcher: alltoall")
    if "shared expert overlap" in words:
        section["shared_expert_overlap"] = True
    if "delay_wgrad" in words:
        section["delay_wgrad_compute"] = True
    if "full_iteration" in words and "mx" in row.text("precision").lower():
        section["fused_mlp"] = True
        section["paged_stash"] = section.get("dispatcher") == "flex"
    if "no grouped gemm" in words:
        section["grouped_gemm"] = False
    if capacity(words) or dropped_by_recipe(row) or row.whole("ep") in {None, 1}:
        section.pop("dispatcher", None)
        section.pop("flex_backend", None)
        section.pop("non_blocking_capacity_factor", None)
        section.pop("deepep_sms", None)
    return section


def positions_of(row: MeasuredRow, family: str) -> dict[str, Any]:
    """How gpt-oss' positions are rotated under Megatron-Core, which has no fused kernel for YaRN's mscale.

    megatron/core/models/common/embeddings/rope_utils.py, apply_rotary_pos_emb, in all releases of Megatron-Bridge with measured
    rows (v0.2.0 to v0.6.0).
    """
    yarn = family == "megatron-core" and "gpt-oss" in row.text("model_name").lower()
    return {"rope_impl": "own_tables"} if yarn else {}
