"""FSDP in a trainer's job: its version, and what its settings mean in a plan."""

from __future__ import annotations

import re
from typing import Any

from steptime.launch.figures import Figures


def put_fsdp(found: Figures, config: dict[str, Any], half: str) -> bool:
    """Put into the config how torch's FSDP shards weights of dtype `half`; the result: whether each node holds all of them.

    Sources: accelerate utils/dataclasses.py, FullyShardedDataParallelPlugin (version 1 unless another is said,
    set_mixed_precision); OLMo olmo/config.py, FSDPPrecision.
    """
    keys = found.keys
    word, said = str(found.get("@fsdp") or found.get("@distributed")).lower(), found.get("@fsdp_strategy")
    strategy = str(("" if word.isdecimal() else word) if said is None else said).lower()
    version = 2 if "2" in str(found.get("@fsdp_version") or word) else 1
    options: dict[str, Any] = {"version": version} | (_of_version_1(found) if version == 1 else {})
    if re.search(r"shard_grad_op|zero2|^false$" + ("|^[25]$" if version == 1 else ""), strategy):
        options["reshard_after_forward"] = False
    elif version == 2 and strategy.isdecimal() and int(strategy) not in {1, found.whole("@dp_shard")}:
        keys.leave_out(found.figures["@fsdp_strategy"], "parameters that stay gathered on some ranks")
    if str(found.get("@fsdp_precision")).lower() == "full":  # composer/distributed/mosaic_parallelism.py
        keys.leave_out(found.figures["@fsdp_precision"], "parameters gathered in fp32 under autocast")
    if half != "fp32":
        mixed = str(found.get("@fsdp_precision")).lower() in {"mixed", "default", "float32"}
        options["reduce_dtype"] = "fp32" if mixed else half
    if ((unit := keys.table.raw.get("whole_without")) and keys.get(unit) is None) or _unwrapped(found, word):
        options["wrap"] = "model"  # and no next unit to gather
        options.pop("backward_prefetch", None)
    if found.on("@sync_each_batch"):
        options["no_sync"] = False
    config["parallelism"]["fsdp"] = options
    if "offload" in word or found.on("@fsdp_offload"):
        config["performance"]["cpu_offload"] = {"params": True}
    return "hybrid" in strategy or strategy == "hsdp" or strategy in {"4", "5"}


def _unwrapped(found: Figures, word: str) -> bool:
    """Whether the whole model is one unit: the policy NO_WRAP, accelerate's where none is said, as by fsdp without auto_wrap.

    Source: accelerate utils/dataclasses.py, auto_wrap_policy; transformers training_args.py, FSDPOption.AUTO_WRAP.
    """
    policy = str(found.get("@fsdp_policy") or "").lower()
    by_size = found.get("@fsdp_least") not in (None, 0, "0")
    if policy == "size_based_wrap" or (by_size and not policy):
        found.keys.approximate(
            found.figures["@fsdp_policy" if policy else "@fsdp_least"], "units by size: blocks are counted"
        )
        return False
    alone = found.backend() == "@fsdp" or re.search("full_shard|shard_grad_op|hybrid_shard", word)
    unsaid = found.keys.table.raw.get("accelerates") and alone and "auto_wrap" not in word and not policy
    return "no_wrap" in policy or bool(unsaid)


def _of_version_1(found: Figures) -> dict[str, Any]:
    """When backward gathers, and whether parameters are kept apart; what is not said stays open but for accelerate.

    Source: accelerate utils/dataclasses.py, FullyShardedDataParallelPlugin (backward_prefetch: NO_PREFETCH where nothing is said,
    as in transformers training_args.py; use_orig_params).
    """
    word = str(found.get("@fsdp_prefetch") or "").lower()
    early: dict[str, Any] = {"backward_prefetch": "post"} if word == "backward_post" else {}
    unsaid = not word and found.keys.table.raw.get("accelerates")
    none = {"prefetch": 0} if unsaid or word in {"no_prefetch", "none"} else {}
    flat = str(found.get("@fsdp_original_params")).lower() == "false"
    return early | none | ({"original_params": False} if flat else {})
