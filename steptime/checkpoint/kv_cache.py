"""Bytes of the key-value cache that one token adds, over all layers, before tensor parallelism.

Formulas: 2 x key rows a layer (keys and values) for attention with heads; for multi-head latent attention the compressed vector
and the rotary key, the rows of the down projection (DeepSeek-V2, arXiv 2405.04434, section 2.1.4).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 2  # bytes of an element: fp16 or bf16
_NO_DECODER = re.compile(r"(?:^|\.)encoder\.|bert|^transformer\.layer\.|vision|visual")


def record(
    value: Callable[[str], Any], latent: tuple[str, tuple[int, ...]] | None, prefix: str, families: list[str],
    set_: Callable[..., None],
) -> None:  # fmt: skip
    """Set `kv_cache_bytes_per_token` [bytes] where the layers are a decoder's and their key rows are known."""
    if value("vocab_sz") is None or _NO_DECODER.search(prefix) or any("bert" in family for family in families):
        return
    kinds = value("layer_kinds") or {}
    layers = kinds.get("attention", 0) if kinds else value("n_layers")
    if not layers:
        return
    if latent is not None:
        rows = min(latent[1])
        set_(
            "kv_cache_bytes_per_token", layers * rows * WIDTH, f"{layers} layers x {rows} rows of {latent[0]} x 2 bytes"
        )
        return
    rows = value("kv_rows")
    if rows is None and value("n_kv_heads") and value("head_dim"):
        rows = value("n_kv_heads") * value("head_dim")
    if rows:
        set_("kv_cache_bytes_per_token", 2 * layers * rows * WIDTH, f"2 x {layers} layers x {rows} rows x 2 bytes")
