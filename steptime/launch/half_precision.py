"""Whether a trainer's job computes in bf16 or fp16, and the dtype in which it loads weights where no key says so."""

from __future__ import annotations

from steptime.launch.adapters import adapted
from steptime.launch.figures import Figures


def weights_of(found: Figures) -> str:
    """The dtype in which weights are loaded: the key's, else the model's own where neither bf16 nor fp16 is on; "" if not said.

    The table's `own_dtype` is of a trainer that does so, `frozen_own_dtype` of one that does so for frozen weights alone.
    """
    weights = str(found.get("@weights") or "").lower().removeprefix("auto")
    if weights or found.on("@bf16") or found.on("@fp16") or found.get("@bf16") == "auto":
        return weights
    raw = found.keys.table.raw
    if own := raw.get("own_dtype") or (raw.get("frozen_own_dtype") if adapted(found) else None):
        found.keys.notes.append(f"dtype not set, {own} assumed: the model's own")
    return str(own or "")


def halves(found: Figures, word: str) -> tuple[bool, bool]:
    """Whether bf16 and fp16 are on, by their switches or by the word of a key of precision or dtype."""
    fp16 = found.on("@fp16") or "fp16" in word or "float16" in word.replace("bfloat16", "") or word[:3] == "16-"
    # Axolotl's "auto" is bf16 wherever the device has it, but for fp16 (utils/config, normalize_config)
    auto = found.get("@bf16") == "auto" and not found.on("@fp16")
    bf16 = found.on("@bf16") or auto or "bf16" in word or "bfloat16" in word
    if "fp8" in str(found.get("@half")).lower():  # accelerate's own fp8, over bf16; llm-foundry's amp_fp8
        found.keys.leave_out(found.figures["@half"], "projections in fp8: those in bf16 are counted")
        bf16 = True
    return bf16, fp16
